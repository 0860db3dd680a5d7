"""The primitive that stands for a match: one equation that runs the replacement.

Its derivative, and the replacement of a batch, are ``jit``s of the replacement's own rules that are not
inlined (``fuseplan.frontend.trace.pattern_call``): the passes of a gradient are kernels by themselves, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from costmodel.graph import Flops
from fuseplan.frontend.flat_view import ClosedJaxpr, function_of
from fuseplan.frontend.trace import PATTERN, Primitive, pattern_call

pattern_p = Primitive(PATTERN)
pattern_p.multiple_results = True


def bind(name: str, jaxpr: ClosedJaxpr, time_ps: int | None, flops: Flops, *flat: Any) -> Sequence[Any]:
    """The results of a replacement as one equation. ``time_ps``: the time of a run, if it is given;
    ``flops``: those of what it replaces."""
    results: Sequence[Any] = pattern_p.bind(*flat, name=name, jaxpr=jaxpr, time_ps=time_ps, flops=flops)
    return results


def _run(jaxpr: ClosedJaxpr) -> Callable[..., Any]:
    return function_of(jaxpr)


def _call(name: str, jaxpr: ClosedJaxpr) -> Callable[..., Any]:
    """The replacement as a ``jit`` that keeps the pattern's name under every transformation."""

    def run(*flat: Any) -> list[Any]:
        return list(_run(jaxpr)(*flat))

    run.__name__ = run.__qualname__ = pattern_call(name)
    return jax.jit(run)


@pattern_p.def_impl
def _evaluated(*flat: Any, name: str, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    return _call(name, jaxpr)(*flat)


@pattern_p.def_abstract_eval
def _shapes(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> Any:
    return list(jaxpr.out_avals)


def _lowered(*flat: Any, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    return list(_run(jaxpr)(*flat))


mlir.register_lowering(pattern_p, mlir.lower_fun(_lowered, multiple_results=True), cacheable=False)


def _of_some(call: Callable[..., Any], flat: Sequence[Any], moving: Sequence[int]) -> Callable[..., Any]:
    """``call`` as a function of the arguments ``moving``."""

    def of_moving(*some: Any) -> list[Any]:
        filled = list(flat)
        for i, value in zip(moving, some, strict=True):
            filled[i] = value
        return list(call(*filled))

    return of_moving


def _jvp(flat: Any, tangents: Any, *, name: str, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    f = _of_some(_call(name, jaxpr), flat, moving)
    return jax.jvp(f, [flat[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[pattern_p] = _jvp


def _transposed(cotangents: Any, *flat: Any, name: str, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    linear = [i for i, x in enumerate(flat) if ad.is_undefined_primal(x)]
    f = _of_some(_call(name, jaxpr), flat, linear)
    full = list(map(ad.instantiate_zeros, cotangents))
    back = iter(jax.linear_transpose(f, *(flat[i].aval for i in linear))(full))
    return [next(back) if ad.is_undefined_primal(x) else None for x in flat]


ad.primitive_transposes[pattern_p] = _transposed


def _batched(axis: Any, flat: Any, dims: Any, *, name: str, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    named = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    if all(d is None for d in dims):
        results = _call(name, jaxpr)(*flat)
        return results, [None] * len(results)
    results = jax.vmap(_call(name, jaxpr), tuple(dims), 0, **named)(*flat)
    return results, [0] * len(results)


batching.fancy_primitive_batchers[pattern_p] = _batched
