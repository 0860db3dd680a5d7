"""Cumulative operations: a result for each element of all before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.frontend.ops.reduction import accumulator, highest, larger, lowest, masked, smaller
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    XLA,
    Rule,
    Space,
    Tile,
    bind,
    in_size,
    known_dtypes,
    own_dims,
)
from fuseplan.frontend.ops.tree_reduce import scanned
from fuseplan.frontend.trace import Equation


def _scan_space(eqn: Equation) -> Space:
    """The result along the axis may depend on all of it."""
    dims, dim_map = own_dims(eqn.in_avals[0].shape)
    along = set(dim_map[int(eqn.params["axis"])])
    roles = tuple(DimRole.WHOLE if i in along else DimRole.PARALLEL for i in range(len(dims)))
    return Space(dims, roles, (dim_map,) * len(eqn.in_avals), (dim_map,) * len(eqn.out_avals))


def _scan_flops(eqn: Equation) -> Flops:
    """Of a row of ``n`` each element is combined in ``log2 n`` steps, in any parallel form."""
    n = eqn.in_avals[0].shape[int(eqn.params["axis"])]
    return Flops(vector=in_size(eqn) * max(n - 1, 0).bit_length())


def _scan(combine: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]) -> Rule:
    """A result for each element of all before it, or behind it."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language in XLA:
            return bind(tile, eqn, args)
        x, dim = jnp.asarray(args[0], accumulator(args[0].dtype)), int(eqn.params["axis"])
        x = masked(tile, 0, (dim,), x, neutral(x.dtype))
        x = scanned(tile, x, dim, combine, eqn.params["reverse"])
        return [x.astype(eqn.out_avals[0].dtype)]

    return Rule(OpKind.REDUCTION, _scan_space, _scan_flops, block, MOSAIC_GPU, supports=_scan_supports)


_LONGEST_SCAN = 4096
"""Elements of a row that one block holds: each doubling is a step of the kernel's code."""


def _scan_supports(eqn: Equation, language: str) -> bool:
    short = eqn.in_avals[0].shape[int(eqn.params["axis"])] <= _LONGEST_SCAN
    return short and known_dtypes(eqn, language)


def _log_add(a: Any, b: Any) -> Any:
    """``log(exp(a) + exp(b))``, also of infinities."""
    top = jnp.maximum(a, b)
    rest = jnp.where(a == b, 0.0, jnp.abs(a - b)).astype(top.dtype)
    return top + lax.log1p(lax.exp(-rest))


RULES: dict[str, Rule] = {
    "cumsum": _scan(jnp.add, lambda dtype: 0),
    "cumprod": _scan(jnp.multiply, lambda dtype: 1),
    "cummax": _scan(larger, lowest),
    "cummin": _scan(smaller, highest),
    "cumlogsumexp": _scan(_log_add, lowest),
}
