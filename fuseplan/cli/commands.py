"""The command line: its small commands, and the version, warnings and errors of all of them."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from costmodel.calibrate import FIGURES, figure_of
from fuseplan.cli.arguments import Deadline, Dtype, Json, Small, load, writable
from fuseplan.cli.bench import bench
from fuseplan.cli.planning import compare, plan, report
from fuseplan.console import print_json, print_table, progress
from fuseplan.demo import Program, print_demo, run_demo
from fuseplan.plan.json_codec import read_plan
from fuseplan.plan.options import DEFAULT_DEADLINE_S
from fuseplan.report.frames import devices_frame, records
from fuseplan.search.cache import cache_file, open_disk, setting
from fuseplan.support.atomic_file import OutputError
from fuseplan.support.environment import installed_version
from fuseplan.support.errors import FuseplanError, FuseplanWarning, InvalidPlanError
from fuseplan.support.format import bytes_text, wrapped
from fuseplan.targets import calibrate as calibration
from fuseplan.verify.report import NOT_CHECKED, REFUTED, VERIFIED, verify_plan
from fuseplan.workloads.workload import make_args


def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", callback=writable, help="The HTML page.")
    ] = Path("fuseplan-demo.html"),
    small: Small = False,
    dtype: Dtype = "float32",
    deadline: Deadline = DEFAULT_DEADLINE_S,
    json: Json = False,
) -> None:
    """Plan a GPT-2 block and its gradient for three devices, and run both here."""
    programs = []
    for name in ("gpt2_block", "gpt2_block_grad"):
        f, args = load(name, dtype, small)
        programs.append(Program(name, f, args, make_args(args)))
    with progress(1) as steps:
        result = run_demo(programs, out, deadline, steps)
    if json:
        print_json(result.as_dict())
    else:
        print_demo(result)


def verify(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN.json", help="As `fuseplan plan --out` writes it; - is stdin.", show_default=False
        ),
    ],
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=0,
            help="Seconds after which the bound is not re-checked.",
            show_default="none",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Re-check a plan's kernels, costs and bound, without the solver.

    Exit code 0: all of it holds. 1: refuted, with the reason. 2: not a plan.
    3: the kernels are right, but the bound was not re-checked.
    """
    plan_read = read_plan(_read_text(file))
    with progress(1) as steps:
        steps.start(f"verifying {file}")

        def tell(done: int, total: int) -> None:
            steps.total(total)
            if done:
                steps.done()

        result = verify_plan(plan_read, tell, math.inf if deadline is None else deadline)
    if json:
        print_json(result.as_dict())
    else:
        print(result)
    code = {VERIFIED: 0, REFUTED: 1, NOT_CHECKED: 3}[result.status]
    if code:
        raise typer.Exit(code)


def _read_text(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPlanError(f"cannot read {file}: {error}") from None


def devices(json: Json = False) -> None:
    """List the known devices; --json adds the source of each figure."""
    frame = devices_frame()
    known = records(frame.reset_index())
    if json:
        sources = frame.attrs["sources"]
        print_json([{**device, "sources": sources[device["name"]]} for device in known])
        return
    rows = [
        (
            device["name"],
            device["backends"],
            _shown(device, "hbm_gb", f"{device['hbm_gb']:.0f}"),
            _shown(device, "hbm_gb_per_s", f"{device['hbm_gb_per_s']:,.0f}"),
            *(
                _shown(device, name, _significant(device[name]))
                for name in ("bf16_tflops", "f32_tflops", "vector_tflops")
            ),
            _shown(device, "ridge_point", f"{device['ridge_point']:.0f}"),
        )
        for device in known
    ]
    head = ("device", "backends", "GB", "GB/s", "bf16", "f32", "vector", "ridge")
    print_table(head, rows, right=(2, 3, 4, 5, 6, 7))
    print("backends: languages of kernels; --device h200:mosaic_gpu asks for the second.")
    print("bf16 and f32: matrix units, vector: the others, in Tflop/s.")
    print("ridge: bf16 flops per HBM byte.")
    print("?: assumed, neither measured nor published. Also assumed, but not shown:")
    for device in known:
        shown = {field for fields in _DEVICE_FIELDS.values() for field in fields}
        rest = [name for name in device["assumed"].split(", ") if name and name not in shown]
        if rest:
            print("\n".join(wrapped(f"  {device['name']}: {', '.join(rest)}", 80, "    ")))
    if "cpu" in {device["name"] for device in known if device["assumed"]}:
        print("`fuseplan calibrate` measures the CPU.")


_DEVICE_FIELDS = {
    "hbm_gb": ("hbm_capacity_bytes",),
    "hbm_gb_per_s": ("hbm_bytes_per_s",),
    "bf16_tflops": ("matrix_flops_per_s", "matrix_flops_per_s.bfloat16"),
    "f32_tflops": ("matrix_flops_per_s", "matrix_flops_per_s.float32"),
    "vector_tflops": ("vector_flops_per_s",),
    "ridge_point": ("hbm_bytes_per_s", "matrix_flops_per_s", "matrix_flops_per_s.bfloat16"),
}
"""For each column of the table, the fields of ``DeviceSpec`` that it follows from."""


def _shown(device: dict[str, Any], column: str, text: str) -> str:
    """Mark ``text`` with ``?`` if a field behind the column is assumed."""
    assumed = set(device["assumed"].split(", "))
    return f"{text}?" if assumed & set(_DEVICE_FIELDS[column]) else text


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def calibrate(
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0, help="How long to try on a busy machine.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Measure this machine's CPU anew (some ten seconds when it is idle), and keep the figures.

    A figure is taken when its timings agree. Exit code 1: some did not in time;
    they keep the values of an earlier measurement, or stay assumed.
    """
    with progress(1) as steps:
        steps.start("measuring")
        found = calibration.recalibrate_cpu(deadline)
    cpu = found.device
    if json:
        print_json(
            {
                "description": cpu.description,
                **{name: figure_of(cpu, name) for name in FIGURES},
                "measured": found.measured,
                "kept": found.kept,
                "assumed": found.assumed,
                "problems": dict(found.problems),
                "sources": {name: cpu.source(name) for name in FIGURES},
                "file": str(calibration.cache_file()) if found.is_stored else None,
            }
        )
    else:
        print(cpu.description)
        origin = dict.fromkeys(FIGURES, "measured")
        origin |= dict.fromkeys(found.kept, "kept from an earlier measurement")
        origin |= dict.fromkeys(found.assumed, "assumed")
        rows = [(name, _figure_text(name, figure_of(cpu, name)), origin[name]) for name in FIGURES]
        print_table(("figure", "value", "source"), rows, right=(1,))
        print(
            f"written to {calibration.cache_file()}"
            if found.is_stored
            else f"{calibration.cache_file()} is unchanged"
        )
        for why in dict.fromkeys(why for _, why in found.problems):
            names = ", ".join(name for name, other in found.problems if other == why)
            print("\n".join(wrapped(f"not measured: {names}: {why}", 80, "    ")))
    if found.problems:
        raise typer.Exit(1)


def _figure_text(name: str, value: int) -> str:
    """Format a time in µs or ns, or a rate in 10⁹ per second."""
    if not name.endswith("_ps"):
        return f"{value / 1e9:.1f} G/s"
    return f"{value / 1e6:.2f} µs" if value >= 10_000 else f"{value / 1e3:.2f} ns"


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all of them.")] = False, json: Json = False
) -> None:
    """Show how many solutions of earlier plans are kept on disk (with FUSEPLAN_CACHE=1)."""
    path, used = cache_file(), setting() not in ("", "0")
    disk = open_disk(path)
    if clear and disk is not None and not disk.clear():
        raise OutputError(f"{path} cannot be removed: remove it by hand, or set FUSEPLAN_CACHE to a folder")
    entries, size_bytes = (0, 0) if disk is None else (disk.count(), disk.size_bytes())
    if json:
        print_json({"file": str(path), "used": used, "entries": entries, "size_bytes": size_bytes})
        return
    print(f"file     {path}")
    print(f"used     {'yes' if used else 'no: FUSEPLAN_CACHE=1 keeps the solutions of components there'}")
    print(f"entries  {entries:,}, {bytes_text(size_bytes)}")


class _Commands(typer.core.TyperGroup):
    """Commands that print a ``FuseplanError`` as one line on stderr and exit with code 2."""

    def invoke(self, ctx: Any) -> Any:
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
for _command in (demo, compare, plan, verify, report, devices, calibrate, cache):
    app.command()(_command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    warnings.showwarning = _show_warning
    app()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _show_warning(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FuseplanWarning):
        print(f"warning: {_one_line(message)}", file=sys.stderr)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"fuseplan {installed_version('fuseplan', '0+unknown (not installed)')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass
