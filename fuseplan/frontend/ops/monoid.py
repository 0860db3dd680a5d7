"""The rule of ``jax.lax.reduce`` by a function of the user, of one array or of several at once.

JAX requires a monoid: an associative function with the initial values as its identity. Nothing else is
assumed: elements are combined in ascending order, and the initial values once. A tile combines its rows one
after the other, each step by vector instructions along the other dimensions, where XLA:CPU combines element
by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from costmodel.graph import Flops, OpKind
from fuseplan.frontend.ops.opaque import body_flops
from fuseplan.frontend.ops.reduction import reduced_space
from fuseplan.frontend.ops.rule import PALLAS, Reduction, Rule, Space, Tile, reshaped, whole_space
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.support import jax_compat


@dataclass(frozen=True, slots=True)
class _Monoid(Reduction):
    """Combines tuples of arrays, one for each array that the equation reduces."""

    def init(self, shape: tuple[int, ...], eqn: Equation) -> Any:
        starts = zip(_initial_values(eqn), eqn.out_avals, strict=True)
        return tuple([jnp.full(shape, value, aval.dtype) for value, aval in starts])

    def finish_whole(self, part: Any, eqn: Equation) -> Sequence[Any]:
        return self.finish(self.combine(self.init(part[0].shape, eqn), part), eqn)

    def finish(self, total: Any, eqn: Equation) -> Sequence[Any]:
        return tuple(total)


def _initial_values(eqn: Equation) -> list[Any]:
    """The initial values that are literals. ``_rule`` accepts an equation only if all of them are."""
    return [v.val for v in eqn.inputs[len(eqn.out_avals) :] if isinstance(v, Literal)]


def _space(eqn: Equation) -> Space:
    n = len(eqn.out_avals)
    of_arrays = reduced_space(eqn, eqn.params["dimensions"])
    return Space(of_arrays.dims, of_arrays.roles, of_arrays.input_maps[:n] + ((),) * n, of_arrays.output_maps)


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
        rows = [jnp.moveaxis(x, dim, 0) for x in args[: len(eqn.out_avals)]]
        n_rows, first = rows[0].shape[0], jnp.int32(0)
        valid = tile.valid(0, dim)
        if valid is not None:  # The rows that an earlier tile has combined come first.
            first = jnp.argmax(jnp.moveaxis(valid, dim, 0).reshape(n_rows, -1)[:, 0]).astype(jnp.int32)

        def row(k: Any) -> tuple[Any, ...]:
            return tuple([lax.dynamic_index_in_dim(x, k, 0, keepdims=False) for x in rows])

        def with_row(k: Any, total: Sequence[Any]) -> tuple[Any, ...]:
            return combine(total, row(k))

        total = lax.fori_loop(first + 1, jnp.int32(n_rows), with_row, row(first))
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
