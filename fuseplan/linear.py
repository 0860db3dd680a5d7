"""The linear half of a derivative as one equation: what forward mode evaluates, and what reverse mode
transposes into the pass back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from fuseplan import _compat
from fuseplan.call import Call, Settings, closed_call, fused_p, with_axis

linear_p = jex_core.Primitive("fused_tangents")
linear_p.multiple_results = True


@dataclass(eq=False)
class Linear:
    """A function of arguments, hints and tangents that is linear in the tangents."""

    settings: Settings
    effects: frozenset[Any]
    avals: Sequence[Any]
    """Of the arguments."""
    tangents: Sequence[Any]
    """Avals of the tangents that go in."""
    out_tangents: Sequence[Any]
    push: Callable[..., Any]
    """From arguments and tangents to tangents, by JAX's own operations."""
    transpose: Callable[[Sequence[Any], Sequence[int], Sequence[Any]], Sequence[Any]]
    """From arguments and hints, and the places and cotangents of some results, to the cotangents
    of all tangents that go in."""

    def __repr__(self) -> str:
        return f"{len(self.tangents)} tangents to {len(self.out_tangents)}"

    @functools.cached_property
    def pushing(self) -> Call | None:
        """``push``, planned; None if it closes over a tracer."""
        return closed_call(self.push, [*self.avals, *self.tangents], self.settings)

    def run(self, *flat: Any) -> Any:
        """From arguments, hints and tangents to tangents."""
        n, m = len(self.avals), len(self.tangents)
        run = self.push if self.pushing is None else self.pushing.run
        return run(*flat[:n], *flat[len(flat) - m :])


def moves(tangent: Any) -> bool:
    """Whether it is not known to be zero."""
    return not isinstance(tangent, ad.Zero) and jax.typeof(tangent).dtype != jax.dtypes.float0


@linear_p.def_impl
def _evaluated(*flat: Any, linear: Linear) -> Any:
    return jax.jit(linear.run)(*flat)


@linear_p.def_effectful_abstract_eval
def _shapes(*_: Any, linear: Linear) -> Any:
    return list(linear.out_tangents), set(linear.effects)


mlir.register_lowering(
    linear_p, mlir.lower_fun(lambda *flat, linear: linear.run(*flat), multiple_results=True)
)


def _transposed(cotangents: Any, *flat: Any, linear: Linear) -> Any:
    split = len(flat) - len(linear.tangents)
    places = [k for k, ct in enumerate(cotangents) if moves(ct)]
    if not places:
        return [*[None] * split, *(ad.Zero(aval) for aval in linear.tangents)]
    return [*[None] * split, *linear.transpose(flat[:split], places, [cotangents[k] for k in places])]


ad.primitive_transposes[linear_p] = _transposed


def _jvp(flat: Any, tangents: Any, *, linear: Linear) -> tuple[Any, Any]:
    n, split = len(linear.avals), len(flat) - len(linear.tangents)
    if not any(map(moves, tangents[:n])):
        results = linear_p.bind(*flat, linear=linear)
        moved = [ad.instantiate_zeros(t) for t in tangents[split:]]
        return results, linear_p.bind(*flat[:split], *moved, linear=linear)
    keep = [*range(n), *range(split, len(flat))]
    values, moving = [flat[i] for i in keep], [tangents[i] for i in keep]
    if linear.pushing is None:
        some = [ad.instantiate_zeros(t) for t in moving]
        return jax.jvp(lambda *both: linear.push(*both), values, some)
    return ad.primitive_jvps[fused_p](values, moving, call=linear.pushing)


ad.primitive_jvps[linear_p] = _jvp


def _batching_rule(axis: Any, flat: Any, dims: Any, *, linear: Linear) -> Any:
    n, split = len(linear.avals), len(flat) - len(linear.tangents)
    known, inner = flat[:split], list(dims[:split])
    size, mesh_axis = axis.size, axis.explicit_mesh_axis
    # All tangents get the axis, so that all cotangents have it.
    tangents = [
        batching.bdim_at_front(t, d, size, mesh_axis)
        for t, d in zip(flat[split:], dims[split:], strict=True)
    ]

    def transpose(known: Sequence[Any], places: Sequence[int], cotangents: Sequence[Any]) -> Any:
        f = lambda *both: linear.transpose(both[:split], places, both[split:])  # noqa: E731
        back = with_axis(f, axis, [*inner, *[0] * len(places)], [0] * len(tangents))
        return back(*known, *cotangents)

    new = Linear(
        linear.settings,
        linear.effects - _compat.axis_effects(linear.effects, axis.name),
        [jax.typeof(x) for x in flat[:n]],
        [jax.typeof(t) for t in tangents],
        [_compat.with_leading(aval, size, mesh_axis) for aval in linear.out_tangents],
        with_axis(linear.push, axis, [*inner[:n], *[0] * len(tangents)], [0] * len(linear.out_tangents)),
        transpose,
    )
    return linear_p.bind(*known, *tangents, linear=new), [0] * len(linear.out_tangents)


batching.fancy_primitive_batchers[linear_p] = _batching_rule
