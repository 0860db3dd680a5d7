"""Rules of reductions (sums, extrema, products, arg-extrema) and of cumulative operations.

Where a kernel language has no primitive, a reduction folds halves onto each other, and a cumulative
operation joins blocks (Triton, which splits blocks at powers of two) or shifts rows (Mosaic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.frontend.ops.composed import (
    TOP_BIT,
    as_ordered_integers,
    from_ordered_integers,
    propagating_maximum,
    propagating_minimum,
    unsigned_greater,
)
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    NONE,
    PALLAS,
    XLA,
    Reduction,
    Rule,
    Space,
    Tile,
    bind,
    in_size,
    is_float_in_triton,
    known_dtypes,
    own_dims,
    reshaped,
)
from fuseplan.frontend.ops.slices import join_even, split_even
from fuseplan.frontend.trace import Equation

Combine = Callable[[Any, Any], Any]


def _fold(tile: Tile, x: Any, dim: int, combine: Combine) -> Any:
    """``x`` reduced along ``dim`` to one element, by combining halves."""
    rest: list[Any] = []
    while (n := x.shape[dim]) > 1:
        half = n // 2
        if tile.language == "triton":
            sides = split_even(x, dim, 2)
        else:
            sides = [lax.slice_in_dim(x, i * half, (i + 1) * half, axis=dim) for i in (0, 1)]
            rest += [lax.slice_in_dim(x, n - 1, n, axis=dim)] if n % 2 else []
        x = combine(*sides)
    for one in rest:
        x = combine(x, one)
    return x


def _scan_blocks(x: Any, dim: int, combine: Combine, reverse: bool) -> Any:
    """An inclusive scan that doubles the length of scanned blocks (J. Sklansky, Conditional-Sum Addition
    Logic, 1960): the total of one block is combined with each element of its neighbour."""
    shape, n = x.shape, x.shape[dim]
    totals, size = x, 1
    while size < n:
        pairs = n // (2 * size)
        blocks = split_even(lax.reshape(x, (*shape[:dim], pairs, 2, size, *shape[dim + 1 :])), dim + 1, 2)
        ends = split_even(lax.reshape(totals, (*shape[:dim], pairs, 2, 1, *shape[dim + 1 :])), dim + 1, 2)
        if reverse:
            sides = [combine(blocks[0], ends[1]), blocks[1]]
        else:
            sides = [blocks[0], combine(blocks[1], ends[0])]
        x = lax.reshape(join_even(sides, dim + 1), shape)
        totals, size = combine(*ends), 2 * size
    return x


def _scan_shifts(x: Any, dim: int, combine: Combine, reverse: bool) -> Any:
    """An inclusive scan that combines each element with the one 1, 2, 4 … before it (W. D. Hillis and
    G. L. Steele, Data Parallel Algorithms, 1986)."""
    n, distance = x.shape[dim], 1
    while distance < n:
        near, far = (lax.slice_in_dim(x, start, start + n - distance, axis=dim) for start in (0, distance))
        if reverse:
            ends = [combine(near, far), lax.slice_in_dim(x, n - distance, n, axis=dim)]
        else:
            ends = [lax.slice_in_dim(x, 0, distance, axis=dim), combine(near, far)]
        x, distance = lax.concatenate(ends, dim), 2 * distance
    return x


def _reduce_space(eqn: Equation) -> Space:
    return reduced_space(eqn, eqn.params["axes"])


def reduced_space(eqn: Equation, along: Iterable[Any]) -> Space:
    """The iteration space of a reduction of arrays of one shape along some of their dimensions."""
    dims, in_map = own_dims(eqn.in_avals[0].shape)
    reduced = {int(d) for d in along}
    dropped = {i for d in reduced for i in in_map[d]}
    roles = tuple(DimRole.REDUCED if i in dropped else DimRole.PARALLEL for i in range(len(dims)))
    out_map = tuple(m for d, m in enumerate(in_map) if d not in reduced)
    return Space(dims, roles, (in_map,) * len(eqn.in_avals), (out_map,) * len(eqn.out_avals))


def _reduce_flops(eqn: Equation) -> Flops:
    return Flops(vector=max(in_size(eqn) - sum(a.size for a in eqn.out_avals), 0))


def accumulator(dtype: Any) -> Any:
    """The dtype of partial results: float32 for 16-bit floats, as in XLA; else ``dtype``."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(dtype)


def masked(tile: Tile, operand: int, dims: Sequence[int], x: Any, neutral: Any) -> Any:
    """``x`` with ``neutral`` at elements outside the array or in an earlier tile (``Tile.valid``)."""
    for dim in dims:
        valid = tile.valid(operand, dim)
        if valid is not None:
            x = jnp.where(valid, x, jnp.asarray(neutral, x.dtype))
    return x


def _native(tile: Tile, eqn: Equation, x: Any, axes: tuple[int, ...]) -> Any:
    """The equation's primitive along ``axes``. A TPU reduces unsigned integers as signed ones; Triton's
    extrema of floats ignore NaN, so that it reduces integers of the same order."""
    params = {**eqn.params, "axes": axes}
    is_extremum = eqn.primitive.name in ("reduce_max", "reduce_min")
    if is_extremum and is_float_in_triton(tile.language, x.dtype):
        ordered = as_ordered_integers(x, nan_is_largest=eqn.primitive.name == "reduce_max")
        return from_ordered_integers(eqn.primitive.bind(ordered, **params), x.dtype)
    if tile.language != "mosaic_tpu" or x.dtype != jnp.uint32:
        return eqn.primitive.bind(x, **params)
    if eqn.primitive.name == "reduce_sum":
        return eqn.primitive.bind(x.astype(jnp.int32), **params).astype(jnp.uint32)
    flipped = (x ^ TOP_BIT).astype(jnp.int32)
    return eqn.primitive.bind(flipped, **params).astype(jnp.uint32) ^ TOP_BIT


def _reduce(
    combine: Combine,
    neutral: Callable[[Any], Any],
    *,
    folds: bool = False,
    in_triton: Combine | None = None,
) -> Rule:
    """The rule of a reduction. With ``folds``, Pallas lacks the primitive: it is folded on Triton and TPUs,
    and not fused on Mosaic GPU, which cannot split a block in registers. ``in_triton`` combines floats
    there, if ``combine`` does not."""

    def elements(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        x = jnp.asarray(args[0], accumulator(eqn.out_avals[0].dtype))
        return [masked(tile, 0, sorted(map(int, eqn.params["axes"])), x, neutral(x.dtype))]

    def within(tile: Tile, eqn: Equation, x: Any) -> Any:
        dims, adds_wide_rows = sorted(map(int, eqn.params["axes"])), False
        if tile.language == "loops":
            # XLA:CPU compiles some fusions with dimensions of size one to kernels ten times as slow.
            long = [d for d in range(x.ndim) if x.shape[d] != 1]
            x, dims = reshaped(x, tuple(x.shape[d] for d in long)), [long.index(d) for d in dims if d in long]
            adds_wide_rows = eqn.primitive.name == "reduce_sum" and _adds_wide_rows(x, dims)
            if not adds_wide_rows:
                x, dims = _combine_few_rows(tile, x, dims, combine)
        # A reshape drops dimensions of size one.
        real = tuple(d for d in dims if x.shape[d] != 1)
        if adds_wide_rows:
            x = _sum_rows(x, len(real))
        elif folds and tile.language not in XLA:
            for d in real:
                x = _fold(tile, x, d, combine)
        elif real:
            x = _native(tile, eqn, x, real)
        return reshaped(x, tile.out_shapes[0])

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        (x,) = elements(tile, eqn, args)
        return [within(tile, eqn, x)]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        _reduce_flops,
        block,
        MOSAIC_GPU if folds else NONE,
        Reduction(combine, neutral, accumulator, elements, within, in_triton),
    )


_FEW_ROWS = 32
"""Up to so many rows are combined elementwise in a CPU's loops: XLA:CPU may reduce them at a twentieth of
that speed (measured with jax 0.10: the maxima of 8 rows of 262,144 float32 in 8 ms against 0.4; with jax 0.12
both take 0.4)."""


def _combine_few_rows(tile: Tile, x: Any, dims: Sequence[int], combine: Combine) -> tuple[Any, list[int]]:
    """In a CPU's loops, reduce the dimensions ``dims``, ascending, of at most ``_FEW_ROWS`` elements
    elementwise, but for the last dimension; returns the array without them, and the other ``dims`` in it."""
    for d in reversed(dims if tile.language == "loops" else []):
        if d != x.ndim - 1 and x.shape[d] <= _FEW_ROWS:
            x = reshaped(_fold(tile, x, d, combine), (*x.shape[:d], *x.shape[d + 1 :]))
            dims = [other - (other > d) for other in dims if other != d]
    return x, list(dims)


_WIDE_ROW_ELEMENTS = 8192
"""Row length from which XLA:CPU may add rows at a tenth of the speed of a product with ones (measured with
jax 0.10: 128 x 20,000 float32 in 7.7 ms against 0.4 ms; 512 x 4,096 in 0.3 ms either way)."""


def _adds_wide_rows(x: Any, dims: Sequence[int]) -> bool:
    """Whether the reduction over ``dims`` adds long rows of floats."""
    wide = math.prod(x.shape[len(dims) :]) >= _WIDE_ROW_ELEMENTS
    return wide and tuple(dims) == tuple(range(len(dims))) != () and jnp.issubdtype(x.dtype, jnp.floating)


def _sum_rows(x: Any, leading: int) -> Any:
    """The sum over the leading dimensions, as a product with ones."""
    ones = jnp.ones(x.shape[:leading], x.dtype)
    axes = tuple(range(leading))
    return lax.dot_general(ones, x, ((axes, axes), ((), ())), precision=lax.Precision.HIGHEST)


def _quantifier(reduce: jex_core.Primitive, combine: Combine, neutral: int, bitwise: Rule) -> Rule:
    """The rule of ``all`` and ``any``: extrema of zeros and ones, since Triton cannot reduce booleans. For
    integers the rule is ``bitwise``."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        dims = sorted(map(int, eqn.params["axes"]))
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
        MOSAIC_GPU,  # holds no rows of booleans in registers
        Reduction(combine, lambda dtype: neutral, lambda dtype: jnp.dtype(jnp.int32)),
        special=lambda eqn: None if eqn.out_avals[0].dtype == jnp.bool_ else bitwise,
    )


def larger(a: Any, b: Any) -> Any:
    """The elementwise maximum; unsigned integers are compared as a TPU can."""
    return jnp.where(unsigned_greater(a, b), a, b) if a.dtype == jnp.uint32 else jnp.maximum(a, b)


def smaller(a: Any, b: Any) -> Any:
    """The elementwise minimum; unsigned integers are compared as a TPU can."""
    return jnp.where(unsigned_greater(b, a), a, b) if a.dtype == jnp.uint32 else jnp.minimum(a, b)


def lowest(dtype: Any) -> Any:
    """The least value of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf
    return False if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """The greatest value of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf
    return True if jnp.issubdtype(dtype, jnp.bool_) else jnp.iinfo(dtype).max


_NO_INDEX = np.iinfo(np.int32).max
"""An index greater than every index of an array."""

_NAN_OFFSET = np.iinfo(np.int32).min
"""Added to the index of a NaN, so that it is less than the index of every number."""


@dataclass(frozen=True, slots=True)
class ArgReduction(Reduction):
    """Combines pairs of an extremum and its index (int32)."""

    def init(self, shape: tuple[int, ...], eqn: Equation) -> Any:
        dtype = self.accumulator(eqn.in_avals[0].dtype)
        return jnp.full(shape, self.neutral(dtype), dtype), jnp.full(shape, _NO_INDEX, jnp.int32)

    def finish(self, total: Any, eqn: Equation) -> Sequence[Any]:
        return [total[1].astype(eqn.out_avals[0].dtype)]


def _arg_extremum(
    reduce: Callable[..., Any],
    extreme: Combine,
    exceeds: Callable[[Any, Any], Any],
    neutral: Callable[[Any], Any],
) -> Rule:
    """The rule of ``argmax`` or ``argmin``: the first of equal extrema; a NaN precedes any number. ``reduce``
    and ``extreme`` give the extremum of a row and of two numbers."""

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
        at = masked(tile, 0, (dim,), at, _NO_INDEX)
        # Some floats of eight bits have no infinity.
        x = masked(tile, 0, (dim,), x.astype(accumulator(x.dtype)), neutral(x.dtype))
        # XLA vectorises a reduction of one array, but not of pairs: first the extremum, then its index. On a
        # CPU, XLA's extremum of a row with a NaN may be a number, so a NaN's index is made to come first.
        extremum, left = _combine_few_rows(tile, x, [dim], extreme)
        extremum = reduce(x, axes=(dim,)) if left else extremum
        found = jnp.where(x == lax.expand_dims(extremum, (dim,)), at, _NO_INDEX)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return [(extremum, lax.reduce_min(found, axes=(dim,)))]
        first = lax.reduce_min(jnp.where(x != x, at + _NAN_OFFSET, found), axes=(dim,))
        is_nan = first < 0
        return [(jnp.where(is_nan, np.nan, extremum), jnp.where(is_nan, first - _NAN_OFFSET, first))]

    return Rule(
        OpKind.REDUCTION,
        _reduce_space,
        lambda eqn: Flops(vector=in_size(eqn)),
        block,
        PALLAS,
        ArgReduction(combine, neutral, accumulator),
    )


def _scan_space(eqn: Equation) -> Space:
    """The scanned axis is needed whole."""
    dims, dim_map = own_dims(eqn.in_avals[0].shape)
    along = set(dim_map[int(eqn.params["axis"])])
    roles = tuple(DimRole.WHOLE if i in along else DimRole.PARALLEL for i in range(len(dims)))
    return Space(dims, roles, (dim_map,) * len(eqn.in_avals), (dim_map,) * len(eqn.out_avals))


def _scan_flops(eqn: Equation) -> Flops:
    """``log2 n`` operations for each element of a row of ``n``, as in both parallel forms."""
    n = eqn.in_avals[0].shape[int(eqn.params["axis"])]
    return Flops(vector=in_size(eqn) * max(n - 1, 0).bit_length())


def _scan(combine: Combine, neutral: Callable[[Any], Any], in_triton: Combine | None = None) -> Rule:
    """The rule of a cumulative operation, in ascending or (``reverse``) descending order. ``in_triton``
    combines floats there, if ``combine`` does not."""

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        if tile.language in XLA:
            return bind(tile, eqn, args)
        x, dim = jnp.asarray(args[0], accumulator(args[0].dtype)), int(eqn.params["axis"])
        x = masked(tile, 0, (dim,), x, neutral(x.dtype))
        own = in_triton if in_triton and is_float_in_triton(tile.language, x.dtype) else combine
        scan = _scan_blocks if tile.language == "triton" else _scan_shifts
        x = scan(x, dim, own, eqn.params["reverse"])
        return [x.astype(eqn.out_avals[0].dtype)]

    return Rule(OpKind.REDUCTION, _scan_space, _scan_flops, block, MOSAIC_GPU, supports=_scan_supports)


_MAX_SCAN_ELEMENTS = 4096
"""The longest row that a kernel scans: each doubling adds a step to the kernel's code."""


def _scan_supports(eqn: Equation, language: str) -> bool:
    short = eqn.in_avals[0].shape[int(eqn.params["axis"])] <= _MAX_SCAN_ELEMENTS
    return short and known_dtypes(eqn, language)


def _log_add(a: Any, b: Any) -> Any:
    """``log(exp(a) + exp(b))``, correct for infinities."""
    top = jnp.maximum(a, b)
    rest = jnp.where(a == b, 0.0, jnp.abs(a - b)).astype(top.dtype)
    return top + lax.log1p(lax.exp(-rest))


RULES: dict[str, Rule] = {
    "reduce_sum": _reduce(lambda a, b: a + b, lambda dtype: 0),
    "reduce_max": _reduce(larger, lowest, in_triton=propagating_maximum),
    "reduce_min": _reduce(smaller, highest, in_triton=propagating_minimum),
    "reduce_prod": _reduce(jnp.multiply, lambda dtype: 1, folds=True),
    "reduce_and": _quantifier(
        lax.reduce_min_p,
        jnp.minimum,
        1,
        _reduce(jnp.bitwise_and, lambda dtype: ~np.zeros((), dtype), folds=True),
    ),
    "reduce_or": _quantifier(
        lax.reduce_max_p, jnp.maximum, 0, _reduce(jnp.bitwise_or, lambda dtype: 0, folds=True)
    ),
    "reduce_xor": _reduce(jnp.bitwise_xor, lambda dtype: 0, folds=True),
    "argmax": _arg_extremum(lax.reduce_max, jnp.maximum, jnp.greater, lowest),
    "argmin": _arg_extremum(lax.reduce_min, jnp.minimum, jnp.less, highest),
    "cumsum": _scan(jnp.add, lambda dtype: 0),
    "cumprod": _scan(jnp.multiply, lambda dtype: 1),
    "cummax": _scan(larger, lowest, propagating_maximum),
    "cummin": _scan(smaller, highest, propagating_minimum),
    "cumlogsumexp": _scan(_log_add, lowest),
}
