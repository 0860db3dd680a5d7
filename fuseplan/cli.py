"""The command ``fuseplan``."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

if TYPE_CHECKING:
    from fuseplan.config import Options
    from fuseplan.constraints import Constraints
    from fuseplan.plan import Plan


class _Commands(typer.core.TyperGroup):
    """Commands whose ``FuseplanError`` is one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        from fuseplan.errors import FuseplanError

        try:
            return super().invoke(ctx)
        except FuseplanError as error:
            print(f"fuseplan: {_one_line(error)}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decide which operations of a JAX function share a kernel, with a proof.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Measure fuseplan itself.")
app.add_typer(bench_app, name="bench")

_ALL_PLANNERS = "unfused,greedy,best_first,solver"
_DEADLINE_S = 10.0

_WORKLOAD_HELP = "A named workload, or package.module:function returning (f, args)."
WorkloadName = Annotated[str, typer.Argument(metavar="WORKLOAD", help=_WORKLOAD_HELP, show_default=False)]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="One of `fuseplan devices`. Default: this machine's."),
]
Devices = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME[,NAME]", help="Of `fuseplan devices`. Default: this machine's."),
]
Planner = Annotated[str, typer.Option("--planner", metavar="NAME", help=f"One of {_ALL_PLANNERS}.")]
Planners = Annotated[str, typer.Option("--planners", metavar="NAME,…", help="The first is compared with.")]
Dtype = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help="Of a named workload's arrays.")]
Small = Annotated[bool, typer.Option("--small", help="A named workload's small, ragged size.")]
Deadline = Annotated[float, typer.Option("--deadline", metavar="SECONDS", min=0, help="For each plan.")]
MustFuse = Annotated[
    list[str] | None,
    typer.Option("--must-fuse", metavar="A,B", help="One kernel for these, and all between. Repeatable."),
]
NeverFuse = Annotated[
    list[str] | None,
    typer.Option("--never-fuse", metavar="A,B", help="No kernel with both; of one: alone. Repeatable."),
]
MaxPeak = Annotated[
    int | None, typer.Option("--max-peak-bytes", metavar="N", min=1, help="HBM bytes of temporaries.")
]
MaxGroup = Annotated[
    int | None, typer.Option("--max-group-size", metavar="N", min=1, help="Operations in a kernel.")
]
MaxArgs = Annotated[
    int | None, typer.Option("--max-kernel-args", metavar="N", min=1, help="Arrays read and written by one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="A file to write.")]


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    app()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    from fuseplan.errors import FuseplanWarning

    if issubclass(category, FuseplanWarning):
        print(f"warning: {_one_line(message)}", file=sys.stderr)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"fuseplan {version('fuseplan')}")
        except PackageNotFoundError:
            print("fuseplan 0+unknown (not installed)")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The HTML page.")] = Path(
        "fuseplan-demo.html"
    ),
    small: Small = False,
    dtype: Dtype = "float32",
    deadline: Deadline = 3.0,
    json: Json = False,
) -> None:
    """Plan a GPT-2 block and its gradient for three devices, and run both here."""
    from fuseplan.console import print_json, progress
    from fuseplan.demo import Program, print_demo, run_demo
    from fuseplan.output import check_writable

    check_writable(out)
    programs = []
    for name in ("gpt2_block", "gpt2_block_grad"):
        f, args = _load(name, dtype, small)
        programs.append(Program(name, f, args, _sampled(args)))
    with progress(1) as steps:
        result = run_demo(programs, out, deadline, steps)
    if json:
        print_json(result.as_dict())
    else:
        print_demo(result)


@app.command()
def compare(
    workload: WorkloadName,
    device: Devices = None,
    planners: Planners = _ALL_PLANNERS,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = _DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Plan WORKLOAD by each planner: a row each. --out writes them as CSV."""
    from fuseplan.bench import csv_of
    from fuseplan.console import print_json, print_table
    from fuseplan.output import check_writable, write_text
    from fuseplan.report import compare_frame, records

    if out is not None:
        check_writable(out)
    lines: list[dict[str, Any]] = []
    constraints = _constraints(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    by_device = _plan_all(workload, device, planners, dtype, small, deadline, constraints)
    for plans in by_device:
        frame = compare_frame(plans)
        frame.insert(0, "device", plans[0].device.name)
        lines += records(frame)
    if out is not None:
        write_text(out, csv_of(lines))
    if json:
        print_json(lines)
        return
    for i, plans in enumerate(by_device):
        if i:
            print()
        print_table(
            *compare_rows(plans),
            right=(1, 2, 3, 4, 5, 7),
            title=f"{workload} on {plans[0].device.name}, modelled",
        )
        for note in dict.fromkeys(note for plan in plans for note in plan.notes):
            print(f"note: {note}")


def compare_rows(plans: list[Plan]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The head and the rows of a table of plans of one function on one device."""
    from fuseplan.text import seconds_text, time_text

    first_ps = plans[0].objective_ps
    head = ("planner", "kernels", "µs", "speed-up", "HBM MB", "peak MB", "proof", "planning")
    rows = [
        (
            plan.planner,
            str(len(plan.kernels)),
            time_text(plan.objective_us),
            f"{first_ps / plan.objective_ps:.2f}×" if plan.objective_ps else "",
            f"{plan.hbm_bytes / 1e6:,.1f}",
            f"{plan.peak_bytes / 1e6:,.1f}",
            _proof_text(plan),
            seconds_text(plan.planning_s),
        )
        for plan in plans
    ]
    return head, rows


def _proof_text(plan: Plan) -> str:
    """As ``status_text``, shorter."""
    from fuseplan.text import status_text

    if plan.status == "OPTIMAL" or plan.gap is None:
        return status_text(plan)
    return f"gap {100 * plan.gap:.1f} %"


@app.command()
def plan(
    workload: WorkloadName,
    device: Device = None,
    planner: Planner = "solver",
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = _DEADLINE_S,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on an operation without a rule.")] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="A,B", help="Why these operations are (not) in one kernel."),
    ] = None,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """The kernels of WORKLOAD. --out and --json write the whole plan as JSON, for `fuseplan verify`."""
    from fuseplan.errors import InvalidArgumentError
    from fuseplan.output import check_writable, write_text

    if out is not None:
        check_writable(out)
    constraints = _constraints(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    options = _make_options(device, planner, deadline, strict, constraints)
    ends = explain.split(",") if explain is not None else []
    if explain is not None and len(ends) != 2:
        raise InvalidArgumentError(
            f"--explain expects two operations, such as 3,7 or exp,mul; got {explain!r}"
        )
    made = _plan_one(workload, options, dtype, small)
    answer = made.explain(*(_operation(end) for end in ends)) if ends else None
    if out is not None:
        write_text(out, made.to_json())
    if json:
        print(made.to_json())
        return
    if answer is not None:
        print(answer)
        return
    print(made)
    print()
    print(made.summary())
    if made.refusals:
        print("\nrefused fusions, by kind")
        for refusal in made.refusals:
            print(f"  {refusal}")


def _operation(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdigit() else text


@app.command()
def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN.json", help="As `fuseplan plan --out` writes it; - is stdin.", show_default=False
        ),
    ],
    json: Json = False,
) -> None:
    """Re-check a plan's kernels, costs and bound, without the solver.

    Exit code 0: all of it holds. 1: refuted, with what breaks it. 2: not a plan. 3: the kernels
    are right, the bound was not re-checked.
    """
    from fuseplan.console import print_json, progress
    from fuseplan.serialize import read_plan
    from fuseplan.verify import NOT_CHECKED, REFUTED, VERIFIED, verify_plan

    made = read_plan(_read_text(file))
    with progress(1) as steps:
        steps.start(f"verifying {file}")

        def tell(done: int, total: int) -> None:
            steps.total(total)
            if done:
                steps.done()

        result = verify_plan(made, tell=tell)
    if json:
        print_json(result.as_dict())
    else:
        print(result)
    code = {VERIFIED: 0, REFUTED: 1, NOT_CHECKED: 3}[result.status]
    if code:
        raise typer.Exit(code)


def _read_text(file: Path) -> str:
    from fuseplan.errors import InvalidPlanError

    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPlanError(f"cannot read {file}: {error}") from None


@app.command()
def report(
    workload: WorkloadName,
    device: Devices = None,
    planners: Planners = _ALL_PLANNERS,
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = _DEADLINE_S,
    must_fuse: MustFuse = None,
    never_fuse: NeverFuse = None,
    max_peak_bytes: MaxPeak = None,
    max_group_size: MaxGroup = None,
    max_kernel_args: MaxArgs = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page. Default: fuseplan-WORKLOAD.html."),
    ] = None,
    json: Json = False,
) -> None:
    """An HTML page about WORKLOAD; the last planner's plan is shown in detail."""
    from fuseplan.console import print_json
    from fuseplan.output import check_writable
    from fuseplan.report import Page, Study, write_page

    target = out or Path(f"fuseplan-{workload.rpartition(':')[2]}.html")
    check_writable(target)
    constraints = _constraints(must_fuse, never_fuse, max_peak_bytes, max_group_size, max_kernel_args)
    by_device = _plan_all(workload, device, planners, dtype, small, deadline, constraints)
    write_page(Page(workload, tuple(Study(workload, tuple(plans)) for plans in by_device)), target)
    if json:
        print_json({"page": str(target)})
    else:
        print(f"wrote {target}")


@app.command()
def devices(json: Json = False) -> None:
    """The known devices, and where their figures come from (--json)."""
    from fuseplan.console import print_json, print_table
    from fuseplan.report import devices_frame, records

    frame = devices_frame()
    known = records(frame.reset_index())
    if json:
        sources = frame.attrs["sources"]
        print_json([{**device, "sources": sources[device["name"]]} for device in known])
        return
    rows = [
        (
            device["name"],
            device["description"][:29],
            f"{device['hbm_gb']:.0f}",
            f"{device['hbm_gb_per_s']:,.0f}",
            _significant(device["bf16_tflops"]),
            _significant(device["f32_tflops"]),
            _significant(device["vector_tflops"]),
            f"{device['ridge_point']:.0f}",
        )
        for device in known
    ]
    head = ("device", "description", "GB", "GB/s", "bf16", "f32", "vector", "ridge")
    print_table(head, rows, right=(2, 3, 4, 5, 6, 7))
    print("bf16 and f32: matrix units, vector: the others, in Tflop/s; ridge: bf16 flops per HBM byte.")


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


@app.command()
def calibrate(json: Json = False) -> None:
    """Measure this machine's CPU anew (some seconds), and keep the figures."""
    from fuseplan.calibrate import cache_file, local_cpu
    from fuseplan.console import print_json, print_table, progress

    with progress(1) as steps:
        steps.start("measuring")
        cpu = local_cpu(refresh=True)
    rates = dict(cpu.matrix_flops_per_s)
    figures = {
        "description": cpu.description,
        "hbm_bytes_per_s": cpu.hbm_bytes_per_s,
        "cache_bytes_per_s": cpu.cache_bytes_per_s,
        "private_cache_bytes_per_s": cpu.private_cache_bytes_per_s,
        "matrix_bf16_flops_per_s": rates["bfloat16"],
        "matrix_f32_flops_per_s": rates["float32"],
        "matrix_f64_flops_per_s": rates["float64"],
        "vector_flops_per_s": cpu.vector_flops_per_s,
        "transcendental_per_s": cpu.transcendental_per_s,
        "reduction_per_s": cpu.reduction_per_s,
        "fresh_bytes_per_s": cpu.fresh_bytes_per_s,
    }
    overheads = {"launch_ps": cpu.launch_ps, "step_ps": cpu.step_ps}
    if json:
        print_json({**figures, **overheads, "file": str(cache_file())})
        return
    print(cpu.description)
    rows = [(name, f"{value / 1e9:.1f}") for name, value in figures.items() if isinstance(value, int)]
    print_table(("measured", "10⁹ a second"), rows, right=(1,))
    rows = [(name.replace("_ps", "_us"), f"{value / 1e6:.2f}") for name, value in overheads.items()]
    print_table(("measured", "µs"), rows, right=(1,))
    print(f"kept in {cache_file()}")


@app.command()
def memo(
    clear: Annotated[bool, typer.Option("--clear", help="Forget all of it.")] = False,
    json: Json = False,
) -> None:
    """What is remembered of earlier plans on disk, where FUSEPLAN_MEMO asks for that."""
    from fuseplan.console import print_json
    from fuseplan.memo import memo_file, open_disk, setting
    from fuseplan.output import OutputError
    from fuseplan.text import bytes_text

    path, used = memo_file(), setting() not in ("", "0")
    disk = open_disk(path)
    if clear and disk is not None and not disk.clear():
        raise OutputError(f"{path} cannot be removed: remove it by hand, or set FUSEPLAN_MEMO to a folder")
    entries, size_bytes = (0, 0) if disk is None else (disk.count(), disk.size_bytes())
    if json:
        print_json({"file": str(path), "used": used, "entries": entries, "size_bytes": size_bytes})
        return
    print(f"file     {path}")
    print(f"used     {'yes' if used else 'no: FUSEPLAN_MEMO=1 keeps the solutions of components there'}")
    print(f"entries  {entries:,}, {bytes_text(size_bytes)}")


@bench_app.command("plan")
def bench_plan(
    workloads: Annotated[
        str, typer.Option("--workloads", metavar="NAME,…", help="As WORKLOAD of the other commands.")
    ] = "gpt2_block,gpt2_block_grad,gpt2_train_4,gpt2_train_24",
    device: Device = "h200",
    planner: Planner = "solver",
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Deadline = _DEADLINE_S,
    xla: Annotated[bool, typer.Option("--xla/--no-xla", help="Time XLA's compiler here too.")] = True,
    out: Out = None,
    json: Json = False,
) -> None:
    """Seconds to plan each workload, stage by stage, beside XLA's compile time."""
    from fuseplan.bench import csv_text, plan_table, time_plan
    from fuseplan.console import print_json, print_table, progress
    from fuseplan.output import check_writable, write_text

    if out is not None:
        check_writable(out)
    options = _make_options(device, planner, deadline)
    programs = [(name, *_load(name, dtype, small)) for name in _names(workloads, "--workloads")]
    rows = []
    with progress(len(programs) * (1 + xla)) as steps:
        for name, f, args in programs:
            rows.append(time_plan(name, f, args, options, xla, steps))
    if out is not None:
        write_text(out, csv_text(rows))
    if json:
        print_json([row.as_dict() for row in rows])
    else:
        for i, (head, lines, right) in enumerate(plan_table(rows)):
            if i:
                print()
            print_table(head, lines, right=right)


@bench_app.command("solver")
def bench_solver(
    workloads: Annotated[
        str | None, typer.Option("--workloads", metavar="NAME,…", help="Default: those made for it.")
    ] = None,
    device: Device = "h200",
    dtype: Dtype = "float32",
    small: Small = False,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0, help="For the proofs and the stages.")
    ] = 30.0,
    deadlines: Annotated[
        str, typer.Option("--deadlines", metavar="SECONDS,…", help="What is reached in this time.")
    ] = "0.1,1,5,30",
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Plans of each kind.")] = 3,
    ablation: Annotated[
        bool, typer.Option("--ablation/--no-ablation", help="Switch each feature off alone.")
    ] = True,
    with_xla: Annotated[bool, typer.Option("--with-xla", help="Time XLA's compiler here too.")] = False,
    out: Out = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout.")] = False,
    json: Json = False,
) -> None:
    """How well and how fast each workload is planned; no kernel is run. --out writes CSV."""
    from fuseplan.bench import csv_of
    from fuseplan.bench_solver import WORKLOADS, bench_solver, steps_of
    from fuseplan.bench_solver_text import solver_tables
    from fuseplan.console import print_json, print_table, progress
    from fuseplan.errors import InvalidArgumentError
    from fuseplan.output import check_writable, write_text

    if out is not None:
        check_writable(out)
    options = _make_options(device, "solver", deadline)
    if options.device.backend == "xla":
        raise InvalidArgumentError(
            f"on {options.device.name} XLA decides most itself: choose a GPU or TPU, such as --device h200"
        )
    limits = _seconds(deadlines, "--deadlines")
    programs = [(name, *_load(name, dtype, small)) for name in _names(workloads or WORKLOADS, "--workloads")]
    rows = []
    with progress(len(programs) * steps_of(limits, repeats, ablation, with_xla)) as steps:
        for name, f, args in programs:
            rows.append(bench_solver(name, f, args, options, limits, repeats, ablation, with_xla, steps))
            if out is not None:  # after each row: what is known is kept, whatever comes next
                write_text(out, csv_of([row.as_dict() for row in rows]))
    records = [row.as_dict() for row in rows]
    if json:
        print_json(records)
    elif csv:
        print(csv_of(records), end="")
    else:
        for i, (head, lines, right) in enumerate(solver_tables(rows)):
            if i:
                print()
            print_table(head, lines, right=right)
        if limits:
            print("–: within the deadline; !: over it by more than 0.1 s and a tenth.")


@bench_app.command("cpu")
def bench_cpu(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="As of the other commands. Default: all."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Samples of each.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Small, ragged sizes: does it work?")] = False,
    huge: Annotated[bool, typer.Option("--huge", help="What jax.jit cannot hold in memory.")] = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """fuseplan.jit against jax.jit on this CPU: time, memory, right results.

    Exit code 1 if a result is wrong or a workload fails; a missed goal is a finding, not an error.
    """
    from experiments.cpu import get_cases
    from fuseplan.bench import csv_of
    from fuseplan.bench_cpu import Case, bench_cases
    from fuseplan.bench_text import colour, head_line, row_line, summary_lines
    from fuseplan.console import is_terminal, print_json, progress
    from fuseplan.output import check_writable, write_text

    if out is not None:
        check_writable(out)
    own = [name for name in names or () if ":" in name]
    cases = get_cases([name for name in names or () if name not in own], quick, huge) if names != own else []
    cases += [Case(name, *_load(name, "float32", small=False)) for name in own]
    rows = []
    # On a terminal the progress bar takes over print(); a pipe must get its lines all the same.
    on_terminal = is_terminal()
    stdout = None if on_terminal else sys.stdout
    if not json:
        print(head_line())
    with progress(len(cases)) as steps:
        for row in bench_cases(cases, _sampled, repeats, **({"sample_s": 0.0} if quick else {}), steps=steps):
            rows.append(row)
            if out is not None:  # after each row: what is known is kept, whatever comes next
                write_text(out, csv_of([row.as_dict() for row in rows]))
            if not json:
                line = typer.style(row_line(row), fg=colour(row)) if on_terminal else row_line(row)
                print(line, file=stdout, flush=True)
    if json:
        print_json([row.as_dict() for row in rows])
    else:
        print("\n".join(["", *summary_lines(rows)]))
    if any(row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(1)


def _names(text: str, option: str) -> list[str]:
    from fuseplan.errors import InvalidArgumentError

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidArgumentError(f"{option} expects one or more names with commas between, got {text!r}")
    return names


def _seconds(text: str, option: str) -> list[float]:
    from fuseplan.errors import InvalidArgumentError

    try:
        seconds = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        seconds = [-1.0]
    if not all(0 < s < float("inf") for s in seconds):
        raise InvalidArgumentError(f"{option} expects seconds above 0 with commas between, got {text!r}")
    return seconds


def _constraints(
    must_fuse: list[str] | None,
    never_fuse: list[str] | None,
    max_peak_bytes: int | None,
    max_group_size: int | None,
    max_kernel_args: int | None,
) -> Constraints:
    from fuseplan.constraints import Constraints

    def entries(texts: list[str] | None, option: str) -> list[Any]:
        found = [[_operation(name) for name in _names(text, option)] for text in texts or ()]
        return [entry[0] if len(entry) == 1 else entry for entry in found]

    return Constraints(
        entries(must_fuse, "--must-fuse"),
        entries(never_fuse, "--never-fuse"),
        max_peak_bytes,
        max_group_size,
        max_kernel_args,
    )


def _make_options(
    device: str | None,
    planner: str,
    deadline: float,
    strict: bool = False,
    constraints: Constraints | None = None,
) -> Options:
    from fuseplan.config import make_options

    return make_options(device, planner, deadline, strict, constraints)


def _plan_one(workload: str, options: Options, dtype: str, small: bool) -> Plan:
    from fuseplan.console import progress
    from fuseplan.planner import plan_function

    f, args = _load(workload, dtype, small)
    with progress(1) as steps:
        steps.start(f"planning {workload}")
        return plan_function(f, args, {}, options)[1]


def _plan_all(
    workload: str,
    device: str | None,
    planners: str,
    dtype: str,
    small: bool,
    deadline: float,
    constraints: Constraints,
) -> list[list[Plan]]:
    """For each device, a plan by each planner, all of one trace."""
    from fuseplan.console import progress
    from fuseplan.lower import lower
    from fuseplan.planner import plan_best
    from fuseplan.trace import trace

    names = _names(planners, "--planners")
    chosen: list[str | None] = list(_names(device, "--device")) if device is not None else [None]
    options = [[_make_options(d, p, deadline, constraints=constraints) for p in names] for d in chosen]
    f, args = _load(workload, dtype, small)
    result = []
    with progress(len(names) * len(chosen)) as steps:
        steps.start(f"tracing {workload}")
        lowered = lower(trace(f, *args))
        for of_device in options:
            plans = []
            for option in of_device:
                steps.start(f"{option.device.name}: {option.planner}")
                plans.append(plan_best(lowered, option)[1])
                steps.done()
            result.append(plans)
    return result


def _load(workload: str, dtype: str, small: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments: of a named workload, or of ``package.module:function``."""
    from fuseplan.errors import InvalidArgumentError, UnknownNameError

    if ":" not in workload:
        from experiments.workloads import get_workload

        return get_workload(workload).build(dtype, small=small)
    if dtype != "float32" or small:
        raise InvalidArgumentError(f"--dtype and --small are for named workloads, not for {workload}")
    module_name, _, function = workload.partition(":")
    sys.path.insert(0, "")  # as `python -m` does: a module of the current folder
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError, TypeError) as error:
        raise UnknownNameError(
            f"expected WORKLOAD as package.module:function, but {module_name!r} cannot be imported: {error}"
        ) from None
    finally:
        sys.path.remove("")
    make: Any = module
    for part in function.split("."):
        make = getattr(make, part, None)
    if not callable(make):
        raise UnknownNameError(f"expected a function {function!r} in module {module_name!r}, there is none")
    made = make()
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not (is_pair and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise InvalidArgumentError(
            f"{workload}() must return (f, args), a function and a tuple of its arguments; got {made!r}"
        )
    return made[0], tuple(made[1])


def _sampled(args: Any) -> Any:
    from experiments.sampling import make_args

    return make_args(args)


if __name__ == "__main__":
    main()
