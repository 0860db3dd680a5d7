"""Contest: programs of the same function by several planners, each timed here against ``jax.jit``'s."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from fuseplan.plan.options import Options
from fuseplan.report.comparison import Timing
from fuseplan.runtime.bind import fuse
from fuseplan.runtime.interleave import Inputs, Program, race, too_large
from fuseplan.runtime.tolerance import check_results
from fuseplan.support.errors import InvalidArgumentError
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


def time_each(f: Callable[..., Any], args: Any, kwargs: Any, options: Sequence[Options]) -> Iterator[Timing]:
    """For each of ``options``, ``f`` as planned by them against ``jax.jit(f)``, on these arguments.

    A function with side effects is not run: its timings are empty, as are those of a program that does not
    fit in memory beside ``jax.jit``'s.

    Raises:
        MismatchError: a program's results are not ``jax.jit``'s.
    """
    plain = jax.jit(f)
    traced = plain.trace(*args, **kwargs)
    if traced.jaxpr.effects:
        yield from (Timing() for _ in options)
        return
    inputs = Inputs((args, kwargs), traced.args_info)
    reference = Program(plain.lower(*args, **kwargs).compile())
    for option in options:
        yield _time(f, args, kwargs, option, reference, inputs)


def _time(
    f: Callable[..., Any], args: Any, kwargs: Any, options: Options, plain: Program, inputs: Inputs
) -> Timing:
    def planned(*args: Any, **kwargs: Any) -> Any:
        return fuse(f, args, kwargs, options, local_platform())

    fused = Program(jax.jit(planned).lower(*args, **kwargs).compile())
    if too_large(fused, plain, inputs) is not None:
        return Timing(temp_bytes=fused.temp_bytes, temp_ratio=_ratio(fused.temp_bytes, plain.temp_bytes))
    times, results = race({"fused": fused, "plain": plain}, inputs)
    check_results(f"{getattr(f, '__name__', 'f')} by {options.planner!r}", results["fused"], results["plain"])
    ours_s, plain_s = (statistics.median(times[side]) for side in ("fused", "plain"))
    return Timing(ours_s, ours_s / plain_s, fused.temp_bytes, _ratio(fused.temp_bytes, plain.temp_bytes))


def _ratio(ours: int | None, plain: int | None) -> float | None:
    """None where there is nothing to compare: ``jax.jit`` needs no temporaries."""
    return ours / plain if ours is not None and plain else None
