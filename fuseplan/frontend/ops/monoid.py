"""The rule of ``jax.lax.reduce`` by a function of the user, of one array or of several at once.

JAX requires a monoid: an associative function with the initial values as its identity. Nothing else is
assumed, so elements are combined in ascending order. A tile combines its rows one after the other, each step
by vector instructions along the other dimensions, where XLA:CPU combines element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.frontend.ops.opaque import body_flops
from fuseplan.frontend.ops.reduction import masked
from fuseplan.frontend.ops.rule import PALLAS, Reduction, Rule, Space, Tile, own_dims, reshaped, whole_space
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.support import jax_compat


@dataclass(frozen=True, slots=True)
class _Monoid(Reduction):
    """Combines tuples of arrays, one for each array that the equation reduces."""

    def init(self, shape: tuple[int, ...], eqn: Equation) -> Any:
        starts = zip(_initial_values(eqn), eqn.out_avals, strict=True)
        return tuple([jnp.full(shape, value, aval.dtype) for value, aval in starts])

    def finish(self, total: Any, eqn: Equation) -> Sequence[Any]:
        return tuple(total)


def _initial_values(eqn: Equation) -> list[Any]:
    """Those that are numbers: all of an equation that has the rule."""
    return [v.val for v in eqn.inputs[len(eqn.out_avals) :] if isinstance(v, Literal)]


def _space(eqn: Equation) -> Space:
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    reduced = {int(d) for d in eqn.params["dimensions"]}
    dropped = {i for d in reduced for i in in_map[d]}
    roles = tuple(DimRole.REDUCED if i in dropped else DimRole.PARALLEL for i in range(len(dims)))
    out_map = tuple(m for d, m in enumerate(in_map) if d not in reduced)
    n = len(eqn.out_avals)
    return Space(dims, roles, (in_map,) * n + ((),) * n, (out_map,) * n)


def _flops(eqn: Equation) -> Flops:
    combined = eqn.in_avals[0].size - eqn.out_avals[0].size
    return body_flops(eqn.params["jaxpr"]).times(max(combined, 0))


def _rule(eqn: Equation) -> Rule | None:
    """The rule of a reduction along one dimension from initial values that are numbers; None for others."""
    arrays, shape = eqn.inputs[: len(eqn.out_avals)], eqn.in_avals[0].shape
    is_known = len(_initial_values(eqn)) == len(arrays) and not any(isinstance(v, Literal) for v in arrays)
    long = [int(d) for d in eqn.params["dimensions"] if shape[d] != 1]
    if not is_known or len(long) != 1 or eqn.in_avals[0].size == 0:
        return None
    (dim,) = long
    of_numbers = jex_core.jaxpr_as_fun(jax_compat.closed(eqn.params["jaxpr"]))

    def combine(total: Sequence[Any], part: Sequence[Any]) -> tuple[Any, ...]:
        function = of_numbers
        for _ in total[0].shape:
            function = jax.vmap(function)
        return tuple(function(*total, *part))

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        values = _initial_values(eqn)
        tiles = [masked(tile, k, (dim,), x, values[k]) for k, x in enumerate(args[: len(values)])]
        rows = [jnp.moveaxis(x, dim, 0) for x in tiles]

        def add_row(k: Any, total: Sequence[Any]) -> tuple[Any, ...]:
            return combine(total, [lax.dynamic_index_in_dim(x, k, 0, keepdims=False) for x in rows])

        total = lax.fori_loop(1, rows[0].shape[0], add_row, tuple([x[0] for x in rows]))
        return [tuple([reshaped(x, own) for x, own in zip(total, tile.out_shapes, strict=True)])]

    return Rule(
        OpKind.REDUCTION,
        _space,
        _flops,
        block,
        PALLAS,
        _Monoid(combine, lambda dtype: _initial_values(eqn)[0], jnp.dtype),
    )


RULES: dict[str, Rule] = {
    "reduce": Rule(OpKind.OPAQUE, whole_space, _flops, None, PALLAS, special=_rule),
}
