"""Time ``fuseplan.jit`` on a GPU beside ``jax.jit``, ``torch.compile`` and the best library kernel.

    python -m experiments.gpu_bench --out gpu.csv --budget-s 480

Each workload is first checked against float64, then timed: all programs in turns, beside a copy that measures
the memory's bandwidth. Each row is written at once; a failure is a row with its error. Rows that ``--out``
has of this device are not measured again. Without a GPU, small sizes run in Pallas' interpreter, as a test of
the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

# The rest is for PyTorch.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp

import fuseplan
from experiments import gpu_clock
from experiments.gpu_cases import CASES, MORE, GpuCase, least_bytes
from experiments.gpu_rows import Row, head_line, kept_rows, row_line, summary_lines
from fuseplan import FuseplanWarning, MismatchError, Plan
from fuseplan.bench import (
    TORCH_MAKERS,
    csv_of,
    import_torch,
    in_float64,
    in_turns,
    largest_difference,
    machine_columns,
    progress,
    rounds,
    to_torch,
    write_text,
)
from fuseplan.workloads import make_args

_LIMITS = {"bfloat16": 0.15, "float32": 5e-3}
"""The largest difference from float64, over the root mean square, that rounding explains: bfloat16
keeps 8 bits of elements that are up to 6 times that large, and rounds them a few times."""
_COPIED = 2**26
"""Float32 elements that the copy reads and writes: five times an H100's L2."""
_TORCH_S = 15.0
"""What ``torch.compile`` takes for one workload: it is left out where the budget lacks that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a line a workload and a summary; 1 if a result is wrong or a workload fails."""
    options = _parser().parse_args(argv)
    bench = Bench(options.repeats, options.torch, options.timer)
    cases = {**CASES, **MORE}
    names = options.only.split(",") if options.only else list(cases if options.more else CASES)
    rows = {r["workload"]: r for r in kept_rows(options.out, bench.machine["device"])}
    todo = [cases[name] for name in names if name not in rows]
    expires_at = time.monotonic() + options.budget_s
    longest_s = 0.0
    print(head_line(), flush=True)
    with progress(len(todo)) as steps:
        for k, case in enumerate(todo):
            left_s = expires_at - time.monotonic()
            if left_s < longest_s:
                print(f"{len(todo) - k} workloads are left for another run: the budget is spent")
                break
            steps.start(case.name)
            started = time.monotonic()
            with_torch = case.name in TORCH_MAKERS and left_s > _TORCH_S * (len(todo) - k)
            rows[case.name] = asdict(bench.row(case, with_torch))
            longest_s = max(longest_s, time.monotonic() - started)
            if options.out:
                write_text(options.out, csv_of(list(rows.values())))
            print(row_line(rows[case.name]), flush=True)
            steps.done()
    print("\n".join(summary_lines(list(rows.values()), bench.machine, bench.timer)))
    return int(any(r["status"] in ("wrong", "failed") for r in rows.values()))


class Bench:
    """One run: the machine, its clock, and the copy that everything is measured beside."""

    def __init__(self, repeats: int = 9, with_torch: bool = True, timer: str = "auto") -> None:
        self.on_gpu = jax.default_backend() in ("gpu", "cuda", "rocm")
        self.repeats = repeats if self.on_gpu else 1
        self.torch: Any = _torch_on_gpu() if with_torch and self.on_gpu else None
        self.machine = _machine(self.torch)
        self._copied = jnp.zeros(_COPIED if self.on_gpu else 8, jnp.float32)
        self._copy = jax.jit(jnp.negative).lower(self._copied).compile()
        cupti = timer != "queue" and self.on_gpu and gpu_clock.cupti_works(self._copy, (self._copied,))
        self.timer = "cupti" if cupti else "queue"

    def row(self, case: GpuCase, with_torch: bool = True) -> Row:
        """Everything about one workload; what is known when it fails is kept."""
        found: dict[str, Any] = {"workload": case.name, "dtype": case.dtype, "timer": "queue"}
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", FuseplanWarning)
                self._measure(case, with_torch, found)
            told = [str(w.message) for w in said if issubclass(w.category, FuseplanWarning)]
            found["notes"] = "; ".join(dict.fromkeys([*found.get("notes", []), *told]))
            found |= self.verdict(case, found)
        except MismatchError as error:
            found |= {"status": "wrong", "error": str(error)}
        except Exception as error:
            found |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
        if not isinstance(found.get("notes", ""), str):
            found["notes"] = "; ".join(found["notes"])
        return Row(**found, **self.machine)

    def _measure(self, case: GpuCase, with_torch: bool, found: dict[str, Any]) -> None:
        f, shapes = case.build(small=not self.on_gpu)
        found["sizes"] = json.dumps(case.sizes if self.on_gpu else case.workload.small_sizes)
        args = make_args(shapes)
        ours, plan = self._ours(f, args, found)
        started = time.perf_counter()
        jaxs = jax.jit(f).lower(*args).compile()
        found["jax_compile_s"] = time.perf_counter() - started
        found |= _plan_columns(plan)
        _check(f, args, ours(*args), jaxs(*args), case.dtype, found)

        programs = {"ours": ours, "jax": jaxs, "copy": self._copy}
        if case.by_library is not None:
            found["library"] = case.library
            _try(found, "library", lambda: programs.update(library=self._by_library(case, args)))
        inputs = dict.fromkeys(programs, args) | {"copy": (self._copied,)}
        clocks = {name: gpu_clock.by_queue(program, inputs[name]) for name, program in programs.items()}
        if self.timer == "cupti":
            by_cupti = {name: gpu_clock.by_cupti(p, inputs[name]) for name, p in programs.items()}
            # Where CUPTI loses track of one program, all are timed in the other way.
            if _try(found, "CUPTI", lambda: [clock() for clock in by_cupti.values()]):
                clocks, found["timer"] = by_cupti, "cupti"
        if self.torch is not None and with_torch:
            _try(found, "torch", lambda: clocks.update(torch=self._by_torch(case, args)))
        self._time(clocks, found)
        queued = [gpu_clock.by_queue(program, args) for program in (ours, jaxs)]
        for name, times in zip(("ours", "jax"), in_turns(queued, rounds(self.repeats)), strict=True):
            found[f"{name}_queued_us"] = 1e6 * statistics.median(times)
        if found["timer"] == "cupti":
            found["measured_kernels"] = json.dumps(gpu_clock.kernels_by_cupti(ours, args))
        seconds = found["ours_us"] / 1e6
        found["gb_per_s"] = least_bytes(f, args) / seconds / 1e9
        found["copy_gb_per_s"] = 2 * self._copied.nbytes / found["copy_us"] / 1e3
        found["of_copy"] = found["gb_per_s"] / found["copy_gb_per_s"]
        if case.total_flops and self.on_gpu:
            found["tflops"] = case.total_flops / seconds / 1e12

    def _ours(self, f: Callable[..., Any], args: Any, found: dict[str, Any]) -> tuple[Any, Plan]:
        """Our program, compiled, and its plan; in the interpreter where there is no GPU."""
        if not self.on_gpu:
            plan = fuseplan.make_plan(f, device="h100")(*args)
            return jax.jit(partial(plan.run, interpret=True)), plan
        fast = fuseplan.jit(f)
        plan = fast.plan(*args)
        started = time.perf_counter()
        compiled = fast.lower(*args).compile()
        found["compile_s"] = time.perf_counter() - started
        return compiled, plan

    def _by_library(self, case: GpuCase, args: Any) -> Any:
        assert case.by_library is not None
        if not self.on_gpu:
            raise NotImplementedError("the library runs on GPUs")
        return jax.jit(case.by_library).lower(*args).compile()

    def _by_torch(self, case: GpuCase, args: Any) -> gpu_clock.Clock:
        self.torch.compiler.reset()
        program = TORCH_MAKERS[case.name](self.torch)
        return gpu_clock.of_torch(self.torch, program, to_torch(self.torch, args, "cuda"))

    def _time(self, clocks: dict[str, gpu_clock.Clock], found: dict[str, Any]) -> None:
        samples = in_turns(list(clocks.values()), rounds(self.repeats))
        for name, times in zip(clocks, samples, strict=True):
            found[f"{name}_us"] = 1e6 * statistics.median(times)
        found["repeats"] = self.repeats
        for name in ("jax", "torch", "library"):
            if found.get(f"{name}_us"):
                found[f"faster_than_{name}"] = found[f"{name}_us"] / found["ours_us"]

    def verdict(self, case: GpuCase, found: dict[str, Any]) -> dict[str, str]:
        """Whether the goals are met."""
        if not self.on_gpu:
            return {"status": "tiny"}
        missed = []
        if found["faster_than_jax"] < case.speedup:
            missed.append(f"{found['faster_than_jax']:.2f} of {case.speedup} × jax.jit")
        if found["of_copy"] < case.copy_share:
            missed.append(f"{found['of_copy']:.2f} of {case.copy_share} of a copy's bandwidth")
        share = found.get("faster_than_library")
        if case.library_share and share is not None and share < case.library_share:
            missed.append(f"{share:.2f} of {case.library_share} × {case.library}")
        return {"status": "missed" if missed else "met", "missed": "; ".join(missed)}


def _try(found: dict[str, Any], what: str, step: Callable[[], object]) -> bool:
    """What stands beside ours may fail: that is noted."""
    try:
        step()
        return True
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        found.setdefault("notes", []).append(f"no {what}: {type(error).__name__}: {said}"[:300])
        return False


def _plan_columns(plan: Plan) -> dict[str, Any]:
    parts = plan.to_frame()[["name", "backend", "time_us"]].itertuples(index=False)
    return {
        "plan_s": plan.planning_s,
        "plan_status": plan.status,
        "modelled_us": plan.objective_us,
        "kernels": len(plan.kernels),
        "modelled_kernels": json.dumps([[n, b, round(us, 2)] for n, b, us in parts], ensure_ascii=False),
    }


def _check(f: Callable[..., Any], args: Any, ours: Any, jaxs: Any, dtype: str, found: dict[str, Any]) -> None:
    """Compare with float64. Raises MismatchError where ours is off by more than rounding, and by more
    than twice what ``jax.jit``'s result is."""
    exact = in_float64(f, args)
    error = found["relative_error"] = largest_difference(ours, exact)[1]
    jax_error = found["jax_relative_error"] = largest_difference(jaxs, exact)[1]
    limit = max(_LIMITS[dtype], 2 * jax_error)
    if not error <= limit:
        raise MismatchError(f"off by {error:.3g} of the root mean square; {limit:.3g} is allowed")


def _torch_on_gpu() -> Any:
    """PyTorch, or None where there is none, or none that sees a GPU."""
    torch = import_torch()
    return torch if torch is not None and torch.cuda.is_available() else None


def _machine(torch: Any) -> dict[str, Any]:
    """The device and the versions, as columns of a row."""
    device, driver = jax.devices()[0].device_kind, ""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        pass  # There is no driver, or it does not say.
    version = "" if torch is None else f"{torch.__version__}, CUDA {torch.version.cuda}"
    return {"device": device, "driver": driver.strip(), "torch": version, **machine_columns()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, help="a CSV file; what it has measured is not measured again")
    parser.add_argument("--budget-s", type=float, default=480.0, help="no workload is begun after it")
    parser.add_argument("--only", default="", metavar="NAME,…", help=", ".join((*CASES, *MORE)))
    parser.add_argument("--more", action="store_true", help="the other workloads, too, at their own sizes")
    parser.add_argument("--repeats", type=int, default=9, help="samples of each program")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--timer", choices=("auto", "queue"), default="auto",
                        help="queue: wall-clock of queued calls, not CUPTI's durations")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
