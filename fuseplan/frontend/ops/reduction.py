"""Primitives that consume axes: sums, extrema and where they are, products, scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.frontend.ops.composed import TOP_BIT, unsigned_greater
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    NONE,
    PALLAS,
    XLA,
    Reduction,
    Rule,
    Space,
    Tile,
    in_size,
    own_dims,
    reshaped,
)
from fuseplan.frontend.ops.tree_reduce import folded
from fuseplan.frontend.trace import Equation


def _reduced_dims(eqn: Equation) -> set[int]:
    return {int(d) for d in eqn.params["axes"]}


def _reduce_space(eqn: Equation) -> Space:
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    reduced = _reduced_dims(eqn)
    gone = {i for d in reduced for i in in_map[d]}
    roles = tuple(DimRole.REDUCED if i in gone else DimRole.PARALLEL for i in range(len(dims)))
    out_map = tuple(m for d, m in enumerate(in_map) if d not in reduced)
    return Space(dims, roles, (in_map,) * len(eqn.in_avals), (out_map,) * len(eqn.out_avals))


def _reduce_flops(eqn: Equation) -> Flops:
    return Flops(vector=max(in_size(eqn) - sum(a.size for a in eqn.out_avals), 0))


def accumulator(dtype: Any) -> Any:
    """Partial results of 16-bit floats are carried in float32, as XLA carries them."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(dtype)


def masked(tile: Tile, operand: int, dims: Sequence[int], x: Any, neutral: Any) -> Any:
    """``x`` with ``neutral`` wherever the tile has no element of its own."""
    for dim in dims:
        valid = tile.valid(operand, dim)
        if valid is not None:
            x = jnp.where(valid, x, jnp.asarray(neutral, x.dtype))
    return x


def _bound(tile: Tile, eqn: Equation, x: Any, axes: tuple[int, ...]) -> Any:
    """The primitive itself, along ``axes``."""
    params = {**eqn.params, "axes": axes}
    if tile.language != "mosaic_tpu" or x.dtype != jnp.uint32:
        return eqn.primitive.bind(x, **params)
    if eqn.primitive.name == "reduce_sum":
        return eqn.primitive.bind(x.astype(jnp.int32), **params).astype(jnp.uint32)
    flipped = (x ^ TOP_BIT).astype(jnp.int32)
    return eqn.primitive.bind(flipped, **params).astype(jnp.uint32) ^ TOP_BIT


def _reduce(
    combine: Callable[[Any, Any], Any],
    neutral: Callable[[Any], Any],
    *,
    folds: bool = False,
) -> Rule:
    """A reduction; with ``folds`` one that kernels lack. A block in the registers of Mosaic GPU is not
    cut in halves."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dims = sorted(_reduced_dims(eqn))
        x = jnp.asarray(args[0], accumulator(eqn.out_avals[0].dtype))
        x = masked(tile, 0, dims, x, neutral(x.dtype))
        if tile.language == "loops":
            # Of some fusions with dimensions of one, XLA:CPU makes kernels ten times as slow.
            long = [d for d in range(x.ndim) if x.shape[d] != 1]
            x, dims = reshaped(x, tuple(x.shape[d] for d in long)), [long.index(d) for d in dims if d in long]
        # Dimensions of size one are dropped by a reshape: nothing is combined there.
        real = tuple(d for d in dims if x.shape[d] != 1)
        if tile.language == "loops" and eqn.primitive.name == "reduce_sum" and _adds_wide_rows(x, real):
            x = _added_rows(x, len(real))
        elif folds and tile.language not in XLA:
            for d in real:
                x = folded(tile, x, d, combine)
        elif real:
            x = _bound(tile, eqn, x, real)
        return [reshaped(x, tile.out_shapes[0])]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        _reduce_flops,
        block,
        MOSAIC_GPU if folds else NONE,
        Reduction(combine, neutral, accumulator),
    )


_WIDE = 8192
"""Rows of so many elements XLA:CPU may add up at a tenth of the speed (jax 0.10: 128 x 20,000
float32 in 7.7 ms, as a product with ones in 0.4; 512 x 4,096 in 0.3 either way)."""


def _adds_wide_rows(x: Any, dims: Sequence[int]) -> bool:
    """Whether long rows of floats are added to one."""
    wide = math.prod(x.shape[len(dims) :]) >= _WIDE
    return wide and tuple(dims) == tuple(range(len(dims))) != () and jnp.issubdtype(x.dtype, jnp.floating)


def _added_rows(x: Any, leading: int) -> Any:
    """The sum over the leading dimensions, as a product with ones."""
    ones = jnp.ones(x.shape[:leading], x.dtype)
    axes = tuple(range(leading))
    return lax.dot_general(ones, x, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)


def _quantifier(
    reduce: jex_core.Primitive, combine: Callable[[Any, Any], Any], neutral: int, bitwise: Rule
) -> Rule:
    """``all`` and ``any``: extrema of zeros and ones, since Triton reduces no booleans; of integers,
    ``bitwise``."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dims = sorted(_reduced_dims(eqn))
        native = tile.language in XLA
        x = args[0] if native else args[0].astype(jnp.int32)
        x = masked(tile, 0, dims, x, neutral)
        real = tuple(d for d in dims if x.shape[d] != 1)
        if real:
            x = (eqn.primitive if native else reduce).bind(x, **{**eqn.params, "axes": real})
        return [reshaped(x, tile.out_shapes[0]).astype(jnp.int32)]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        _reduce_flops,
        block,
        # Its registers hold no row of booleans.
        MOSAIC_GPU,
        Reduction(combine, lambda dtype: neutral, lambda dtype: jnp.dtype(jnp.int32)),
        special=lambda eqn: None if eqn.out_avals[0].dtype == jnp.bool_ else bitwise,
    )


def larger(a: Any, b: Any) -> Any:
    """The larger of two, as every backend can."""
    return jnp.where(unsigned_greater(a, b), a, b) if a.dtype == jnp.uint32 else jnp.maximum(a, b)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two, as every backend can."""
    return jnp.where(unsigned_greater(b, a), a, b) if a.dtype == jnp.uint32 else jnp.minimum(a, b)


def _ones(dtype: Any) -> Any:
    return True if dtype == jnp.bool_ else np.asarray(~np.zeros((), dtype))[()]


def lowest(dtype: Any) -> Any:
    """What no number of a dtype is below."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """What no number of a dtype is above."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf
    return True if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).max


def _one_an_element(eqn: Equation) -> Flops:
    return Flops(vector=in_size(eqn))


_LAST = np.iinfo(np.int32).max
"""Behind every index."""


@dataclass(frozen=True, slots=True)
class Selection(Reduction):
    """Arg-extrema: what is combined are pairs of a value and where it is (int32)."""

    def init(self, shape: tuple[int, ...], eqn: Equation) -> Any:
        dtype = eqn.in_avals[0].dtype
        return jnp.full(shape, self.neutral(dtype), dtype), jnp.full(shape, _LAST, jnp.int32)

    def finish(self, total: Any, eqn: Equation) -> Any:
        return total[1].astype(eqn.out_avals[0].dtype)


def _arg_extremum(
    reduce: Callable[..., Any], exceeds: Callable[[Any, Any], Any], neutral: Callable[[Any], Any]
) -> Rule:
    """Where the extremum is: the first of equals, and a NaN before any number, as in JAX."""

    def combine(total: Any, part: Any) -> Any:
        (old, old_at), (new, new_at) = total, part
        is_number, is_nan = old == old, new != new
        tied = (old == new) | (~is_number & is_nan)
        better = (is_number & (is_nan | exceeds(new, old))) | (tied & (new_at < old_at))
        return jnp.where(better, new, old), jnp.where(better, new_at, old_at)

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        x, dim = args[0], int(eqn.params["axes"][0])
        own = own_dims(eqn.in_avals[0].shape)[1][dim]
        at = tile.indices(x.shape, dim, own[0]) if own else jnp.zeros(x.shape, jnp.int32)
        at = masked(tile, 0, (dim,), at, _LAST)
        x = masked(tile, 0, (dim,), x, neutral(x.dtype))
        # XLA vectorises a reduction of one array, but not of pairs: first what, then where.
        extremum = reduce(x, axes=(dim,))
        found = (x == lax.expand_dims(extremum, (dim,))) | (x != x)
        return [(extremum, lax.reduce_min(jnp.where(found, at, _LAST), axes=(dim,)))]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        _one_an_element,
        block,
        PALLAS,
        Selection(combine, neutral, jnp.dtype),
    )


RULES: dict[str, Rule] = {
    "reduce_sum": _reduce(lambda a, b: a + b, lambda dtype: 0),
    "reduce_max": _reduce(larger, lowest),
    "reduce_min": _reduce(smaller, highest),
    "reduce_prod": _reduce(jnp.multiply, lambda dtype: 1, folds=True),
    "reduce_and": _quantifier(lax.reduce_min_p, jnp.minimum, 1, _reduce(jnp.bitwise_and, _ones, folds=True)),
    "reduce_or": _quantifier(
        lax.reduce_max_p, jnp.maximum, 0, _reduce(jnp.bitwise_or, lambda dtype: 0, folds=True)
    ),
    "reduce_xor": _reduce(jnp.bitwise_xor, lambda dtype: 0, folds=True),
    "argmax": _arg_extremum(lax.reduce_max, jnp.greater, lowest),
    "argmin": _arg_extremum(lax.reduce_min, jnp.less, highest),
}
