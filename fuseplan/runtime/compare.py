"""Plan one program by several planners, as traced and rewritten, and time the plans against ``jax.jit``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from costmodel.device import DeviceSpec
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import closed_jaxpr, flatten
from fuseplan.patterns.choice import apply_patterns
from fuseplan.pipeline import plan_best
from fuseplan.plan.options import Options
from fuseplan.planners import ProgramPlanner, get_planner, has_fixed_kernels, planner_names
from fuseplan.planners.xla import has_compiler
from fuseplan.report.comparison import Compared, Timing
from fuseplan.runtime.autoselect import Inputs, Program, race, too_large
from fuseplan.runtime.bind import fuse
from fuseplan.runtime.tolerance import check_results
from fuseplan.support.errors import (
    ExtensionError,
    InvalidArgumentError,
    MemoryLimitError,
    short_reason,
)
from fuseplan.targets.detect import local_device, local_platform


def require_measurable(options: Sequence[Options], args: Any, kwargs: Any) -> None:
    """Raise ``InvalidArgumentError`` if plans for these devices cannot be run here with these arguments."""
    here = local_device()
    for option in options:
        if option.device.name.partition(":")[0] != here.name:
            raise InvalidArgumentError(
                f"measure=True runs the programs here, on {here.name!r}, but they are to be planned for "
                f"{option.device.name!r}: leave out device, or measure"
            )
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise InvalidArgumentError(
                f"measure=True runs the programs: it expects arrays, got {leaf}; pass arrays, or leave out "
                "measure"
            )


def _time(
    f: Callable[..., Any], args: Any, kwargs: Any, options: Options, plain: Program, inputs: Inputs
) -> Timing:
    def planned(*args: Any, **kwargs: Any) -> Any:
        return fuse(f, args, kwargs, options, local_platform())

    fused = Program(jax.jit(planned).lower(*args, **kwargs).compile())
    ours, theirs = fused.temp_bytes, plain.temp_bytes
    temp_ratio = ours / theirs if ours is not None and theirs else None  # jax.jit may need no temporaries
    if too_large(fused, plain, inputs) is not None:
        return Timing(temp_bytes=ours, temp_ratio=temp_ratio)
    times, results = race({"fused": fused, "plain": plain}, inputs)
    check_results(f"{getattr(f, '__name__', 'f')} by {options.planner!r}", results["fused"], results["plain"])
    ours_s, plain_s = (statistics.median(times[side]) for side in ("fused", "plain"))
    return Timing(ours_s, ours_s / plain_s, ours, temp_ratio)


def default_planners(device: DeviceSpec) -> tuple[str, ...]:
    """Every planner of graphs, and XLA's own plan if its compiler for the device is installed."""
    graphs = planner_names(of_graphs=True)
    return tuple(name for name in planner_names() if name in graphs or has_compiler(device))


def compare_plan(lowered: Lowered, options: Options) -> Compared:
    """Plan a program by one planner, rewritten and as traced.

    The row has no plan but the reason where XLA fails to compile the program or another process holds its
    compiler, where there is no plan within the limit of memory, and where a user's planner fails.
    """
    return _or_reason(options.planner, lambda: _compare_plan(lowered, options))


def _or_reason(planner: str, row_of: Callable[[], Compared]) -> Compared:
    """The row that ``row_of`` makes, or one with the error that says why the planner has no plan."""
    try:
        return row_of()
    except (ExtensionError, MemoryLimitError) as error:
        return Compared(planner, None, reason=" ".join(str(error).split()), error=error)


def require_plan(rows: Sequence[Compared]) -> None:
    """Raise the first error of a planner of graphs if none of ``rows`` has a plan."""
    errors = [row.error for row in rows if row.error is not None]
    if errors and all(row.plan is None for row in rows):
        raise errors[0]


def _compare_plan(lowered: Lowered, options: Options) -> Compared:
    is_compiled = isinstance(get_planner(options.planner), ProgramPlanner)
    try:
        plan = plan_best(lowered, options)
    except Exception as error:
        if not is_compiled:
            raise
        return Compared(options.planner, None, reason=short_reason(error))
    if has_fixed_kernels(options.planner) or not options.features.rewrites:
        return Compared(options.planner, plan, plan.objective_ps)
    as_traced = replace(options, features=replace(options.features, rewrites=False))
    try:
        return Compared(options.planner, plan, plan_best(lowered, as_traced).objective_ps)
    except MemoryLimitError:
        return Compared(options.planner, plan)


def compare_patterned(
    f: Callable[..., Any], args: Any, kwargs: Any, options: Sequence[Options]
) -> list[Compared]:
    """As ``compare_plan`` for each of ``options``, of a function whose matches of patterns are replaced."""
    closed, out_tree = closed_jaxpr(f, args, kwargs)
    name = getattr(f, "__name__", type(f).__name__)

    def row_of(option: Options) -> Compared:
        applied = apply_patterns(closed, option, name, out_tree=out_tree)
        row = compare_plan(lower(flatten(applied.closed, out_tree)), replace(option, patterns=()))
        if row.plan is not None and applied.notes:
            row = replace(row, plan=replace(row.plan, notes=(*row.plan.notes, *applied.notes)))
        return row

    return [_or_reason(option.planner, partial(row_of, option)) for option in options]


def time_rows(
    f: Callable[..., Any], args: Any, kwargs: Any, options: Sequence[Options], rows: Sequence[Compared]
) -> Iterator[Timing]:
    """For each of ``rows``, ``f`` as planned by its options against ``jax.jit(f)``, on these arguments.

    A function with side effects is not run: its timings are empty, as are those of a row without a plan, and
    of a program that does not fit in memory beside ``jax.jit``'s.

    Raises:
        MismatchError: a program's results are not ``jax.jit``'s.
    """
    plain = jax.jit(f)
    traced = plain.trace(*args, **kwargs)
    if traced.jaxpr.effects:
        yield from (Timing() for _ in rows)
        return
    inputs = Inputs((args, kwargs), traced.args_info)
    reference = Program(plain.lower(*args, **kwargs).compile())
    for option, row in zip(options, rows, strict=True):
        yield Timing() if row.plan is None else _time(f, args, kwargs, option, reference, inputs)
