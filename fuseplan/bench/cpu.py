"""Measure ``fuseplan.jit`` against ``jax.jit`` on this CPU: time, temporary memory, and right results.

Each case is compiled by both, checked, and then timed in turns. A case that fails has a row that says so, and
does not affect the others. Rows are printed in 80 columns, a line each as soon as it is known.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np
from scipy.stats import kendalltau

from costmodel.calibrate import capacity_bytes
from costmodel.timing import in_turns, repeated, rounds
from fuseplan.api import jit, make_plan
from fuseplan.bench import keops_programs, torch_programs
from fuseplan.bench.float64 import in_float64, is_right_in_float64
from fuseplan.bench.keops_programs import import_keops
from fuseplan.bench.machine import machine_columns, peak_rss_bytes, reset_peak_rss
from fuseplan.bench.torch_programs import import_torch, to_torch
from fuseplan.console import Steps
from fuseplan.report.comparison import divergence_lines
from fuseplan.runtime.tolerance import check_results, largest_difference
from fuseplan.support.errors import InvalidArgumentError, MismatchError
from fuseplan.support.format import bytes_text, cut, wrapped
from fuseplan.targets.detect import local_device, local_platform

Args = tuple[Any, ...]
Rows = np.ndarray

_SAMPLE_S = 0.05
"""A short program runs this long in each sample, well above the scheduler's noise."""
_MEMORY_SHARE = 0.9
"""Share of the machine's memory that one program may take; the rest is for the system."""
_WIDE_SHARE = 0.33
"""Share that the check of a whole result in float64 may take."""
_WIDE_BYTES = 256 << 20
"""And of a case with a sample: where it would take more, it would take minutes, and some rows are
checked instead."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a case: ``jax.jit``'s time over fuseplan's, and the same of the
    bytes of temporaries; 1 is as much as ``jax.jit``."""

    speedup: float
    less_temp: float


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a result, for a check in float64 where the whole would take too much."""

    count: int
    axis: int
    """The axis of the first argument that ``rows`` are drawn from."""
    expected: Callable[[Args, Rows], Any]
    """The rows in float64."""
    picked: Callable[[Any, Rows], Any]
    """The same rows of a result, of what stands in its place where the case settles it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A function to measure, at the shapes of its arguments."""

    name: str
    f: Callable[..., Any]
    args: Args
    """Arrays, or ``jax.ShapeDtypeStruct``\\ s that random arrays are made for."""
    goal: Goal | None = None
    sample: Sample | None = None
    settled: Callable[[Args, Any], Any] | None = None
    """The values to compare in the place of results that may rightly differ, such as indices of
    elements that are equal within rounding."""
    alone: bool = False
    """Too large for ``jax.jit``: run once by fuseplan alone, in a process of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one case; None where one is missing, or does not apply."""

    workload: str
    status: str = "measured"
    """``met`` or ``missed`` (its goal), ``measured`` (it has none), ``wrong`` or ``failed``."""
    jax_ms: float | None = None
    fuseplan_ms: float | None = None
    speedup: float | None = None
    """Of the medians."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    """The quartiles of the ratios of neighbouring runs."""
    goal_speedup: float | None = None
    jax_temp_bytes: int | None = None
    fuseplan_temp_bytes: int | None = None
    less_temp: float | None = None
    """``jax.jit``'s bytes of temporaries over fuseplan's."""
    goal_less_temp: float | None = None
    predicted_ms: float | None = None
    """The plan's modelled time."""
    jax_predicted_ms: float | None = None
    """That of XLA's own plan of the function."""
    kernels: int | None = None
    tiled_kernels: int | None = None
    plan_status: str | None = None
    plan_s: float | None = None
    fuseplan_compile_s: float | None = None
    """Planning included."""
    jax_compile_s: float | None = None
    checked: str = ""
    """The references that the results were checked against."""
    torch_ms: float | None = None
    keops_ms: float | None = None
    """Of PyTorch's and KeOps's programs, timed in the same turns."""
    beside: str = ""
    """The versions of these, or why one of them has no time."""
    relative_error: float | None = None
    """The largest difference from float64, over the root mean square of its array."""
    jax_relative_error: float | None = None
    peak_rss_bytes: int | None = None
    """Of the run alone, arguments included; of cases with a process of their own."""
    repeats: int | None = None
    error: str = ""
    cpu: str = ""
    cores: int | None = None
    memory_bytes: int | None = None
    fuseplan: str = ""
    jax: str = ""
    jaxlib: str = ""
    python: str = ""
    date: str = ""


def bench_cases(
    cases: Sequence[Case],
    make_arrays: Callable[[Any], Any],
    repeats: int = 7,
    sample_s: float = _SAMPLE_S,
    steps: Steps | None = None,
    beside: Sequence[str] = (),
) -> Iterator[Row]:
    """Measure each case; a row as soon as it is known.

    Args:
        cases: the cases to measure. Those that run ``alone`` must be picklable.
        make_arrays: from a pytree of ``jax.ShapeDtypeStruct`` to one of arrays.
        repeats: samples of each of the two.
        sample_s: seconds that a sample takes at least.
        steps: told of each case.
        beside: other systems to time each case in, of ``PEERS``, where they have it.

    Raises:
        InvalidArgumentError: JAX does not run on the CPU here.
    """
    if local_platform() != "cpu":
        raise InvalidArgumentError(f"bench cpu measures the CPU, but JAX runs on the {local_platform()}; "
                                   "set JAX_PLATFORMS=cpu")  # fmt: skip
    machine, steps = machine_columns(), steps or Steps()
    steps.start("measuring this machine")
    local_device()  # kept: the first plan's seconds are its own
    for case in cases:
        steps.start(case.name)
        found = (_found_alone if case.alone else _found)(case, make_arrays, repeats, sample_s, beside)
        steps.done()
        yield Row(**found, **machine)


def _found_alone(
    case: Case, make_arrays: Any, repeats: int, sample_s: float, beside: Sequence[str]
) -> dict[str, Any]:
    """In a fresh process: its peak is the run's own, and if it is killed nothing else is lost."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_found, case, make_arrays, repeats, sample_s, beside).result()
    except BrokenProcessPool:
        error = "its process was killed, probably for want of memory"
        return {"workload": case.name, "status": "failed", "error": error}


def _found(
    case: Case, make_arrays: Any, repeats: int, sample_s: float, beside: Sequence[str]
) -> dict[str, Any]:
    """The columns of a case; if it fails, those that are known by then."""
    found: dict[str, Any] = {"workload": case.name}
    if case.goal is not None:
        found |= {"goal_speedup": case.goal.speedup, "goal_less_temp": case.goal.less_temp}
    try:
        _measure(case, make_arrays, repeats, sample_s, found, beside)
    except MismatchError as error:
        found |= {"status": "wrong", "error": str(error)}
    except Exception as error:
        found |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return found


def _measure(
    case: Case,
    make_arrays: Any,
    repeats: int,
    sample_s: float,
    found: dict[str, Any],
    beside_names: Sequence[str],
) -> None:
    is_shape = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(case.args))
    args = make_arrays(case.args) if is_shape else case.args
    ours, jaxs = _compile(case, args, found)
    reset_peak_rss()
    started = time.perf_counter()
    result = jax.block_until_ready(ours(*args))
    first_s = time.perf_counter() - started
    if case.alone:
        found["peak_rss_bytes"] = peak_rss_bytes()
    beside = None
    if not case.alone and _needed_bytes(jaxs) <= _MEMORY_SHARE * capacity_bytes():
        beside = (jax.block_until_ready(jaxs(*args)),)
    _check(case, args, result, beside, found)
    if beside is None:
        found |= {"fuseplan_ms": 1000 * first_s, "repeats": 1}
        return
    made = {name: PEERS[name](case, args, beside[0], found) for name in beside_names}
    peers = {name: program for name, program in made.items() if program is not None}
    del result, beside
    ours_s, jax_s, *peers_s = time_in_turns((ours, jaxs, *peers.values()), args, repeats, sample_s)
    for name, seconds in zip(peers, peers_s, strict=True):
        found[f"{name}_ms"] = 1000 * statistics.median(seconds)
    ratios = [b / a for a, b in zip(ours_s, jax_s, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if repeats > 1 else ratios * 3
    fuseplan_ms, jax_ms = (1000 * statistics.median(s) for s in (ours_s, jax_s))
    found |= {"fuseplan_ms": fuseplan_ms, "jax_ms": jax_ms, "speedup": jax_ms / fuseplan_ms,
              "speedup_low": low, "speedup_high": high, "repeats": repeats}  # fmt: skip
    if case.goal is not None:
        reached = (found["speedup"], case.goal.speedup), (found["less_temp"], case.goal.less_temp)
        found["status"] = "met" if all(round(got, 2) >= goal for got, goal in reached) else "missed"


def _by_torch(case: Case, args: Args, wanted: Any, found: dict[str, Any]) -> Callable[..., Any] | None:
    """The case in PyTorch, on tensors of ``args``, or None; its result is compared with ``wanted``."""
    torch = import_torch()
    if torch is None or case.name not in torch_programs.MAKERS:
        return None
    made = torch_programs.MAKERS[case.name](torch)
    return _peer("PyTorch", torch.__version__, case, made, args, wanted, found)


def _by_keops(case: Case, args: Args, wanted: Any, found: dict[str, Any]) -> Callable[..., Any] | None:
    """As ``_by_torch``, in KeOps."""
    torch, keops = import_torch(), import_keops()
    if torch is None or keops is None or case.name not in keops_programs.MAKERS:
        return None
    made = keops_programs.MAKERS[case.name](keops)
    return _peer("KeOps", metadata.version("pykeops"), case, made, args, wanted, found)


PEERS = {"torch": _by_torch, "keops": _by_keops}
"""Other systems, by name."""


def _peer(
    name: str, version: str, case: Case, f: Any, args: Args, wanted: Any, found: dict[str, Any]
) -> Callable[..., Any] | None:
    """``f`` of ``args`` as tensors, whatever it is called with; None, with the reason in the row, if it fails
    or is another function than the case."""
    tensors = to_torch(import_torch(), args)

    def settled(result: Any) -> Any:
        arrays = [np.asarray(x) for x in jax.tree.leaves(result)]
        return arrays if case.settled is None else [case.settled(args, arrays[0])]

    try:
        result = jax.tree.map(lambda x: x.detach().numpy(), f(*tensors))
        check_results(f"{case.name} in {name}", _narrowed(settled(result)), _narrowed(settled(wanted)))
    except Exception as error:
        said = f"{name} {version} failed: {type(error).__name__}: {error}"
        found["beside"] = "; ".join(filter(None, [found.get("beside", ""), said[:300]]))
        return None
    found["beside"] = "; ".join(filter(None, [found.get("beside", ""), f"{name} {version}"]))
    return lambda *args: f(*tensors)


def _compile(case: Case, args: Args, found: dict[str, Any]) -> tuple[Any, Any]:
    """Both programs, ours and ``jax.jit``'s. Raises MemoryError if ours does not fit."""
    fast = jit(case.f)
    plan = fast.plan(*args)
    of_xla = make_plan(case.f, device="cpu", planner="xla")(*args)
    found |= {
        "jax_predicted_ms": of_xla.objective_us / 1000,
        "plan_s": plan.planning_s,
        "plan_status": plan.status,
        "predicted_ms": plan.objective_us / 1000,
        "kernels": len(plan.kernels),
        "tiled_kernels": sum(k.spec.capabilities.loop_nest for k in plan.kernels),
    }
    compiled: list[Any] = []
    for name, jitted in (("fuseplan", fast), ("jax", jax.jit(case.f))):
        started = time.perf_counter()
        compiled.append(jitted.lower(*args).compile())
        found[f"{name}_compile_s"] = time.perf_counter() - started
        found[f"{name}_temp_bytes"] = int(compiled[-1].memory_analysis().temp_size_in_bytes)
    found["less_temp"] = max(found["jax_temp_bytes"], 1) / max(found["fuseplan_temp_bytes"], 1)
    needed = _needed_bytes(compiled[0])
    if needed > _MEMORY_SHARE * capacity_bytes():
        raise MemoryError(f"not run: it needs {bytes_text(needed)} of {bytes_text(capacity_bytes())}")
    return compiled[0], compiled[1]


def _needed_bytes(compiled: Any) -> int:
    sizes: Any = compiled.memory_analysis()
    return int(sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes)


def time_in_turns(
    programs: Sequence[Callable[..., Any]], args: Args, repeats: int, sample_s: float
) -> list[list[float]]:
    """Seconds of one run of each program, in ``repeats`` samples of ``sample_s`` seconds each, in turns."""
    runs = [lambda program=program: jax.block_until_ready(program(*args)) for program in programs]
    return in_turns([repeated(run, sample_s) for run in runs], rounds(repeats))


def _check(case: Case, args: Args, result: Any, beside: tuple[Any] | None, found: dict[str, Any]) -> None:
    """Compare with ``jax.jit``'s result (``beside``), where there is one, and with float64: the
    whole result where that is feasible, otherwise a sample of its rows."""

    def compare(reference: str, got: Any, want: Any) -> None:
        check_results(f"{case.name} against {reference}", got, want)
        found["checked"] += f"{', ' if found['checked'] else ''}{reference}"

    def settled(result: Any) -> Any:
        return _narrowed(case.settled(args, result) if case.settled else result)

    found["checked"] = ""
    if beside is not None:
        compare("jax.jit", settled(result), settled(beside[0]))
    limit = _WIDE_SHARE * capacity_bytes()
    if case.sample is not None:
        limit = min(limit, _WIDE_BYTES)
    fits = 2 * found["jax_temp_bytes"] <= limit
    if fits and not case.alone and is_right_in_float64(case.f, args):
        picked, name, exact = settled, "float64", settled(in_float64(case.f, args))
    elif case.sample is not None:
        sample = case.sample
        total = args[0].shape[sample.axis]
        rows = np.sort(np.random.default_rng(1).choice(total, min(sample.count, total), replace=False))
        name, exact = f"float64 of {len(rows)} rows", _narrowed(sample.expected(args, rows))

        def picked(result: Any) -> Any:
            return _narrowed(sample.picked(settled(result), rows))
    else:
        return
    compare(name, picked(result), exact)
    found["relative_error"] = largest_difference(picked(result), exact)[1]
    if beside is not None:
        found["jax_relative_error"] = largest_difference(picked(beside[0]), exact)[1]


def _narrowed(tree: Any) -> Any:
    """As float32: the dtype whose tolerance applies."""
    arrays = jax.tree.map(np.asarray, tree)
    return jax.tree.map(lambda a: a.astype(np.float32) if a.dtype == np.float64 else a, arrays)


_WIDTHS = (25, 7, 7, 7, 4, 8, 8, 6)


def head_line() -> str:
    """The head of the table."""
    return _line(("workload", "jax ms", "ms", "faster", "±%", "temp MB", "of jax's", "goal"))


def row_line(row: Row) -> str:
    """A row of the table; one that failed says why."""
    if row.status in ("failed", "wrong"):
        name = cut(row.workload, _WIDTHS[0]).ljust(_WIDTHS[0])
        return cut(f"{name} {row.status}: {' '.join(row.error.split())}", 80)
    return _measured_line(row)


def colour(row: Row) -> str | None:
    """The colour of a row on a terminal: misses and failures stand out."""
    return {"met": "green", "measured": None}.get(row.status, "red")


def _measured_line(row: Row) -> str:
    spread = ""
    if row.speedup and row.speedup_low is not None and row.speedup_high is not None:
        spread = f"{50 * (row.speedup_high - row.speedup_low) / row.speedup:.0f}"
    return _line(
        (
            row.workload,
            "" if row.jax_ms is None else _digits(row.jax_ms),
            "" if row.fuseplan_ms is None else _digits(row.fuseplan_ms),
            "" if row.speedup is None else _times(row.speedup),
            spread,
            "" if row.fuseplan_temp_bytes is None else _digits(row.fuseplan_temp_bytes / 1e6),
            "" if row.less_temp is None else _part(row.less_temp),
            row.status if row.status in ("met", "missed") else "",
        )
    )


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """The summary of all rows: checks, goals, missed goals, and failures."""
    lines = []
    if rows and rows[0].cpu:
        row = rows[0]
        memory = "" if row.memory_bytes is None else f", {bytes_text(row.memory_bytes)}"
        machine = f"{row.cpu}, {row.cores} cores{memory}; JAX {row.jax}, Python {row.python}"
        lines += wrapped(machine, 80, "  ")
    repeats = max((row.repeats or 0 for row in rows), default=0)
    if repeats > 1:
        lines.append(f"Medians of {repeats} runs each, in turns; ±%: half of the quartiles' distance.")
    checks = Counter(row.checked for row in rows if row.checked and row.status != "wrong")
    for checked, same in checks.items():
        count = "all" if same == len(rows) else f"{same} of {len(rows)}"
        lines.append(f"Results checked against {checked}: {count}.")
    for row in rows:
        if row.peak_rss_bytes is not None and row.jax_temp_bytes is not None:
            lines.append(f"{row.workload}: peak memory {bytes_text(row.peak_rss_bytes)} with the arguments; "
                         f"jax.jit needs {bytes_text(row.jax_temp_bytes)} of temporaries")  # fmt: skip
    lines += [text for row in rows if (text := _beside_line(row))]
    judged = [row for row in rows if row.goal_speedup is not None]
    if judged:
        lines.append(f"Goals met: {sum(row.status == 'met' for row in judged)} of {len(judged)}.")
    for line in price_lines([asdict(row) for row in rows]):
        lines += wrapped(line, 80, "  ")
    times = [(row.workload, row.predicted_ms, row.fuseplan_ms) for row in rows]
    for line in divergence_lines(times, "cpu"):
        lines += wrapped(line, 80, "  ")
    lines += [_missed(row) for row in rows if row.status == "missed"]
    lines += [f"{row.status.upper()}: {row.workload}: {row.error}" for row in rows
              if row.status in ("wrong", "failed")]  # fmt: skip
    return lines


def price_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How well the model priced the programs that ran, fuseplan's and ``jax.jit``'s: the geometric mean of
    modelled over measured time, the mean error, Kendall's τ, and the regret: how much longer fuseplan's took
    than the faster of the two.

    Example:
        >>> one = {"fuseplan_ms": 2.0, "predicted_ms": 1.0, "jax_ms": 4.0, "jax_predicted_ms": 4.0}
        >>> two = {"fuseplan_ms": 8.0, "predicted_ms": 8.0, "jax_ms": 8.0, "jax_predicted_ms": 4.0}
        >>> print("\\n".join(price_lines([one, two])))
        Prices of 4 programs: 0.71 of the measured times, mean error 25 %, Kendall's τ 0.80.
        Regret: 0.0 % in the geometric mean, 0.0 % at most.
    """
    pairs = [
        (float(row[modelled]), float(row[measured]))
        for row in rows
        for modelled, measured in (("predicted_ms", "fuseplan_ms"), ("jax_predicted_ms", "jax_ms"))
        if row[modelled] and row[measured]
    ]
    if len(pairs) < 3:
        return []
    modelled, measured = (np.array(column) for column in zip(*pairs, strict=True))
    mean = math.exp(np.log(modelled / measured).mean())
    error = np.abs(modelled / measured - 1).mean()
    both = [
        (float(row["fuseplan_ms"]), float(row["jax_ms"]))
        for row in rows
        if row["fuseplan_ms"] and row["jax_ms"]
    ]
    regrets = np.array([ours / min(ours, jaxs) for ours, jaxs in both] or [1.0])
    return [
        f"Prices of {len(pairs)} programs: {mean:.2f} of the measured times, mean error {100 * error:.0f} %, "
        f"Kendall's τ {kendalltau(modelled, measured).statistic:.2f}.",
        f"Regret: {100 * (math.exp(np.log(regrets).mean()) - 1):.1f} % in the geometric mean, "
        f"{100 * (regrets.max() - 1):.1f} % at most.",
    ]


def _beside_line(row: Row) -> str:
    others = [(name, getattr(row, f"{name}_ms")) for name in PEERS]
    told = [
        f"{name} {_digits(ms)} ms ({_times(ms / row.fuseplan_ms)})"
        for name, ms in others
        if ms is not None and row.fuseplan_ms
    ]
    return f"{row.workload} beside: {', '.join(told)}" if told else ""


def _missed(row: Row) -> str:
    parts = []
    if row.speedup is not None and row.goal_speedup is not None and round(row.speedup, 2) < row.goal_speedup:
        parts.append(f"{_times(row.speedup)} as fast, goal {row.goal_speedup:g}×")
    less, goal = row.less_temp, row.goal_less_temp
    if less is not None and goal is not None and round(less, 2) < goal:
        parts.append(f"{_part(less)} of the temporaries, goal {_part(goal)}")
    return f"missed: {row.workload}: {'; '.join(parts)}"


def _line(cells: Sequence[str]) -> str:
    first, *numbers = (cut(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True))
    return " ".join(
        [first.ljust(_WIDTHS[0]), *(n.rjust(w) for n, w in zip(numbers, _WIDTHS[1:], strict=True))]
    ).rstrip()


def _digits(x: float) -> str:
    """Four significant digits or so: ``1,204``, ``120.4``, ``12.04``, ``0.120``."""
    if x >= 1000:
        return f"{x:,.0f}"
    return f"{x:.1f}" if x >= 100 else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:,.0f}×"


def _part(less: float) -> str:
    """``1/100`` of as much; ``1.00×`` and above where it is about as much or more."""
    if less < 0.01:
        return ">100×"
    return f"{1 / less:.2f}×" if less < 1.5 else f"1/{less:,.3g}" if less < 1000 else f"1/{less:,.0f}"
