"""The linear half of a derivative as one equation: what forward mode evaluates, and what reverse mode
transposes into the pass back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from fuseplan.frontend.trace import Primitive
from fuseplan.runtime.primitive import with_axis
from fuseplan.support import jax_compat

linear_p = Primitive("fused_tangents")
linear_p.multiple_results = True


@dataclass(eq=False)
class Linear:
    """A function of known arrays and of tangents that is linear in the tangents."""

    effects: frozenset[Any]
    n_tangents: int
    out_avals: Sequence[Any]
    push: Callable[..., Sequence[Any]]
    """From what is known and tangents to tangents."""
    transpose: Callable[[Sequence[Any], Sequence[int], Sequence[Any]], Sequence[Any]]
    """From what is known, and the places and cotangents of some results, to the cotangents of all
    tangents that go in."""

    is_high: bool = False
    """Whether the derivative is of a function of high-level types."""

    def __repr__(self) -> str:
        return f"{self.n_tangents} tangents to {len(self.out_avals)}"


def moves(tangent: Any) -> bool:
    """Whether it is not known to be zero."""
    return not isinstance(tangent, ad.Zero) and jax.typeof(tangent).dtype != jax.dtypes.float0


@linear_p.def_impl
def _evaluated(*flat: Any, linear: Linear) -> Any:
    return jax.jit(linear.push)(*flat)


@linear_p.def_effectful_abstract_eval
def _shapes(*_: Any, linear: Linear) -> Any:
    return list(linear.out_avals), set(linear.effects)


mlir.register_lowering(
    linear_p, mlir.lower_fun(lambda *flat, linear: linear.push(*flat), multiple_results=True), cacheable=False
)


jax_compat.register_low(
    linear_p, lambda *flat, linear: linear.push(*flat), lambda *avals, linear: linear.is_high
)


def _transposed(cotangents: Any, *flat: Any, linear: Linear) -> Any:
    split = len(flat) - linear.n_tangents
    places = [k for k, ct in enumerate(cotangents) if moves(ct)]
    if not places:
        return [*[None] * split, *(ad.Zero(t.aval) for t in flat[split:])]
    return [*[None] * split, *linear.transpose(flat[:split], places, [cotangents[k] for k in places])]


ad.primitive_transposes[linear_p] = _transposed


def _jvp(flat: Any, tangents: Any, *, linear: Linear) -> tuple[Any, Any]:
    split = len(flat) - linear.n_tangents
    if not any(map(moves, tangents[:split])):
        results = linear_p.bind(*flat, linear=linear)
        moved = [ad.instantiate_zeros(t) for t in tangents[split:]]
        return results, linear_p.bind(*flat[:split], *moved, linear=linear)
    moving = [i for i, t in enumerate(tangents) if moves(t)]

    def of_moving(*some: Any) -> Any:
        filled = list(flat)
        for i, value in zip(moving, some, strict=True):
            filled[i] = value
        return list(linear.push(*filled))

    return jax.jvp(of_moving, [flat[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[linear_p] = _jvp


def _batching_rule(axis: Any, flat: Any, dims: Any, *, linear: Linear) -> Any:
    split = len(flat) - linear.n_tangents
    known, inner = flat[:split], list(dims[:split])
    size, mesh_axis = axis.size, axis.explicit_mesh_axis
    # All tangents get the axis, so that all cotangents have it.
    tangents = [
        batching.bdim_at_front(t, dim, size, mesh_axis)
        for t, dim in zip(flat[split:], dims[split:], strict=True)
    ]

    def transpose(known: Sequence[Any], places: Sequence[int], cotangents: Sequence[Any]) -> Any:
        f = lambda *both: linear.transpose(both[:split], places, both[split:])  # noqa: E731
        back = with_axis(f, axis, [*inner, *[0] * len(places)], [0] * len(tangents))
        return back(*known, *cotangents)

    new = Linear(
        linear.effects - jax_compat.axis_effects(linear.effects, axis.name),
        linear.n_tangents,
        [jax_compat.with_leading(aval, size, mesh_axis) for aval in linear.out_avals],
        with_axis(linear.push, axis, [*inner, *[0] * len(tangents)], [0] * len(linear.out_avals)),
        transpose,
        linear.is_high,
    )
    return linear_p.bind(*known, *tangents, linear=new), [0] * len(linear.out_avals)


batching.fancy_primitive_batchers[linear_p] = _batching_rule
