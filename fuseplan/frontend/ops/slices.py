"""Rules of slices, splits, concatenations, stacks and pads.

Each has one long array and one or more short ones that are windows of it. Divided into equal pieces, a long
dimension is ``(parts, rest, stride)`` and the short one ``(count, rest)``: every ``stride``-th element of
``count`` consecutive parts. So both arrays share the axis ``rest``, which is tiled, and the other axes are
whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap, DimRole, OpKind
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    BlockFn,
    Rule,
    Space,
    Tile,
    known_dtypes,
    no_flops,
    own_dims,
    relayout,
    reshaped,
)
from fuseplan.frontend.trace import Equation, Literal

_P, _W = DimRole.PARALLEL, DimRole.WHOLE

_MAX_PIECES = 16
"""The most pieces into which a Triton kernel splits a dimension: each piece costs a layout conversion."""


@dataclass(frozen=True, slots=True)
class Window:
    """The position of a dimension of ``count * rest`` in one of ``parts * rest * stride`` elements."""

    parts: int
    rest: int
    stride: int
    first: int
    """The first part."""
    phase: int
    """The offset of its elements within each ``stride``."""
    count: int


Windows = dict[int, tuple[Window, ...]]
"""For each dimension in which the short arrays differ from the long one, their windows."""


def windows_in(extent: int, pieces: Sequence[tuple[int, int]], stride: int = 1) -> tuple[Window, ...]:
    """The windows of ``pieces``, each (start, elements), in a dimension of ``extent`` whose every
    ``stride``-th element is taken.

    Example:
        >>> windows_in(6, [(0, 2), (2, 4)])[1]
        Window(parts=3, rest=2, stride=1, first=1, phase=0, count=2)
    """
    units = extent // stride
    rest = max(math.gcd(units, *(n for start, size in pieces for n in (start // stride, size))), 1)
    return tuple(
        Window(units // rest, rest, stride, start // stride // rest, start % stride, size // rest)
        for start, size in pieces
    )


def window_space(
    long: Sequence[int], shorts: int, windows: Windows
) -> tuple[tuple[int, ...], tuple[DimRole, ...], DimMap, tuple[DimMap, ...]]:
    """The iteration dimensions, their roles, the map of the long array and those of ``shorts`` short ones."""
    dims: list[int] = []
    roles: list[DimRole] = []

    def own(extent: int, role: DimRole) -> tuple[int, ...]:
        if extent == 1:
            return ()
        dims.append(extent)
        roles.append(role)
        return (len(dims) - 1,)

    long_map: list[tuple[int, ...]] = []
    short_maps: list[list[tuple[int, ...]]] = [[] for _ in range(shorts)]
    for d, extent in enumerate(long):
        if d not in windows:
            long_map.append(own(extent, _P))
            for short in short_maps:
                short.append(long_map[d])
            continue
        w = windows[d][0]
        parts = own(w.parts, _W)
        rest = own(w.rest, _P)
        long_map.append(parts + rest + own(w.stride, _W))
        for short, window in zip(short_maps, windows[d], strict=True):
            short.append(own(window.count, _W) + rest)
    return tuple(dims), tuple(roles), tuple(long_map), tuple(map(tuple, short_maps))


def _next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def split_even(x: Any, dim: int, pieces: int) -> Sequence[Any]:
    """``x`` split into equal pieces along ``dim``."""
    return [x] if pieces == 1 else lax.split(x, (x.shape[dim] // pieces,) * pieces, dim)


def join_even(pieces: Sequence[Any], dim: int) -> Any:
    """Equal pieces, a power of two of them, concatenated along ``dim``: Triton joins only pairs of blocks,
    along a new last dimension, and its compiler ends the process for a pair of single elements."""
    if len(pieces) == 1:
        return pieces[0]
    half = len(pieces) // 2
    pair = [join_even(side, dim) for side in (pieces[:half], pieces[half:])]
    shape, last = pair[0].shape, pair[0].ndim
    if math.prod(shape) == 1:
        joined = (*shape[:dim], 2, *shape[dim + 1 :])
        first, second = (jnp.broadcast_to(x, joined) for x in pair)
        return jnp.where(lax.broadcasted_iota(jnp.int32, joined, dim) == 0, first, second)
    both = lax.concatenate([lax.expand_dims(x, (last,)) for x in pair], last)
    both = lax.transpose(both, (*range(dim), last, *range(dim, last)))
    return lax.reshape(both, (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]))


def _pad_pieces(pieces: Sequence[Any]) -> list[Any]:
    """``pieces`` padded to a power of two; the store masks elements past the end."""
    return [*pieces, *[pieces[0]] * (_next_power_of_two(len(pieces)) - len(pieces))]


def _strided_shape(x: Any, dim: int, stride: int) -> tuple[int, ...]:
    """The shape of ``x`` with ``dim`` split into (quotient, ``stride``)."""
    return (*x.shape[:dim], x.shape[dim] // stride, stride, *x.shape[dim + 1 :])


def _merge_dims(x: Any, dim: int) -> Any:
    """``x`` with ``dim`` and the next dimension merged."""
    return lax.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))


def read_window(tile: Tile, x: Any, dim: int, w: Window) -> Any:
    """The block of the short array with window ``w`` of the long array's block ``x``."""
    pieces: Sequence[Any]
    if tile.language == "triton":
        if w.stride > 1:
            x = lax.reshape(x, _strided_shape(x, dim, _next_power_of_two(w.stride)))
            x = _merge_dims(split_even(x, dim + 1, _next_power_of_two(w.stride))[w.phase], dim)
        pieces = split_even(x, dim, _next_power_of_two(w.parts))
        return join_even(_pad_pieces(pieces[w.first : w.first + w.count]), dim)
    unit = x.shape[dim] // (w.parts * w.stride)
    start, size = w.first * unit, w.count * unit
    if w.stride > 1:  # Mosaic lowers no strided slice.
        x = lax.reshape(x, _strided_shape(x, dim, w.stride))
        x = _merge_dims(lax.slice_in_dim(x, w.phase, w.phase + 1, axis=dim + 1), dim)
    return lax.slice_in_dim(x, start, start + size, axis=dim)


def write_windows(tile: Tile, shorts: Sequence[Any], dim: int, windows: Sequence[Window], fill: Any) -> Any:
    """The block of the long array: the blocks ``shorts``, in order, in their windows, and ``fill`` between
    them."""
    w, by_pairs = windows[0], tile.language == "triton"
    pieces: list[Any] = []
    end = 0
    if by_pairs:
        for x, window in zip(shorts, windows, strict=True):
            own = split_even(x, dim, _next_power_of_two(window.count))[: window.count]
            pieces += [jnp.full_like(own[0], fill)] * (window.first - len(pieces))
            pieces += own
        pieces += [jnp.full_like(pieces[0], fill)] * (w.parts - len(pieces))
        whole = join_even(_pad_pieces(pieces), dim)
    else:
        unit = shorts[0].shape[dim] // w.count
        for x, window in zip(shorts, windows, strict=True):
            pieces += [*_fill_gap(x, dim, (window.first - end) * unit, fill), x]
            end = window.first + window.count
        pieces += _fill_gap(shorts[0], dim, (w.parts - end) * unit, fill)
        whole = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    if w.stride == 1:
        return whole
    whole = lax.expand_dims(whole, (dim + 1,))
    around = jnp.full_like(whole, fill)
    runs = [whole if i == w.phase else around for i in range(w.stride)]
    return _merge_dims(
        join_even(_pad_pieces(runs), dim + 1) if by_pairs else lax.concatenate(runs, dim + 1), dim
    )


def _fill_gap(x: Any, dim: int, size: int, fill: Any) -> list[Any]:
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return [jnp.full(shape, fill, x.dtype)] if size else []


def _is_split_in_kernels(w: Window, minor: int, language: str) -> bool:
    """Whether a kernel language can split the ``minor``-th dimension from the last at this window."""
    if language == "triton":
        return _next_power_of_two(w.parts) * _next_power_of_two(w.stride) <= _MAX_PIECES
    # A TPU pads each group of ``stride`` elements in the last two dimensions to a whole vector register.
    return w.stride == 1 or minor > 2


def _slice_windows_at(starts: Sequence[int], eqn: Equation, strides: Sequence[int]) -> Windows | None:
    """The windows of the result in the first operand; None if a stride does not divide its dimension."""
    long, short = eqn.in_avals[0].shape, eqn.out_avals[0].shape
    found: Windows = {}
    for d, (extent, size, start, stride) in enumerate(zip(long, short, starts, strides, strict=True)):
        if extent % stride:
            return None
        if extent != size:
            found[d] = windows_in(extent, [(int(start), size)], stride)
    return found


def _slice_windows(eqn: Equation) -> Windows | None:
    starts = eqn.params["start_indices"]
    return _slice_windows_at(starts, eqn, eqn.params["strides"] or (1,) * len(starts))


def _constant_slice_windows(eqn: Equation) -> Windows | None:
    """The windows of a ``dynamic_slice`` with literal indices, which XLA clamps; else None."""
    at = [int(np.asarray(v.val)) for v in eqn.inputs[1:] if isinstance(v, Literal)]
    long, short = eqn.in_avals[0].shape, eqn.out_avals[0].shape
    if len(at) != len(long):
        return None
    starts = [min(max(i, 0), n - size) for i, n, size in zip(at, long, short, strict=True)]
    return _slice_windows_at(starts, eqn, (1,) * len(starts))


def _adjacent_windows(sizes: Sequence[int]) -> tuple[Window, ...]:
    ends = np.cumsum([0, *sizes]).tolist()
    return windows_in(ends[-1], list(zip(ends[:-1], map(int, sizes), strict=True)))


def _split_windows(eqn: Equation) -> Windows:
    sizes = eqn.params["sizes"]
    return {int(eqn.params["axis"]): _adjacent_windows(sizes)} if len(sizes) > 1 else {}


def _concatenate_windows(eqn: Equation) -> Windows:
    dim = int(eqn.params["dimension"])
    sizes = [a.shape[dim] for a in eqn.in_avals]
    return {dim: _adjacent_windows(sizes)} if len(sizes) > 1 else {}


def _stack_windows(eqn: Equation) -> Windows:
    """The windows of ``stack`` and ``unstack``: each short array is one element of the dimension."""
    count = max(len(eqn.in_avals), len(eqn.out_avals))
    return {int(eqn.params["axis"]): _adjacent_windows((1,) * count)} if count > 1 else {}


def _pad_windows(eqn: Equation) -> Windows | None:
    """The windows of a pad; None if it crops, or if the interior stride does not divide the result."""
    found: Windows = {}
    for d, (low, high, gap) in enumerate(eqn.params["padding_config"]):
        size, extent, stride = eqn.in_avals[0].shape[d], eqn.out_avals[0].shape[d], int(gap) + 1
        if low < 0 or high < 0 or extent % stride:
            return None
        if extent != size:
            found[d] = windows_in(extent, [(int(low), size)], stride)
    return found


Find = Callable[[Equation], Windows | None]


def _windows_of(find: Find, eqn: Equation) -> Windows:
    windows = find(eqn)
    assert windows is not None, "an equation without windows has the rule _WHOLE"
    return windows


def _split_rule(find: Find, stacked: bool = False) -> Rule:
    """The rule of a primitive whose results are windows of the first operand, with ``stacked`` without the
    split dimension. Other operands are literals."""

    def space(eqn: Equation) -> Space:
        windows = _windows_of(find, eqn)
        dims, roles, long, shorts = window_space(eqn.in_avals[0].shape, len(eqn.out_avals), windows)
        shorts = tuple(_drop_axis(m, eqn) for m in shorts) if stacked else shorts
        return Space(dims, roles, (long, *((),) * (len(eqn.in_avals) - 1)), shorts)

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        results = [args[0]] * len(eqn.out_avals)
        for d, windows in _windows_of(find, eqn).items():
            results = [read_window(tile, x, d, w) for x, w in zip(results, windows, strict=True)]
        return [reshaped(x, shape) for x, shape in zip(results, tile.out_shapes, strict=True)]

    return _window_rule(space, block, find)


def _join_rule(find: Find, stacked: bool = False, padded: bool = False) -> Rule:
    """The rule of a primitive whose operands are windows of the result, with ``stacked`` without the joined
    dimension. With ``padded`` the last operand fills the rest."""

    def space(eqn: Equation) -> Space:
        count = len(eqn.in_avals) - padded
        dims, roles, long, shorts = window_space(eqn.out_avals[0].shape, count, _windows_of(find, eqn))
        shorts = tuple(_drop_axis(m, eqn) for m in shorts) if stacked else shorts
        return Space(dims, roles, (*shorts, ()) if padded else shorts, (long,))

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        *shorts, fill = args if padded else (*args, 0)
        if stacked:
            axis = int(eqn.params["axis"])
            shorts = [relayout(tile, x, lambda x: lax.expand_dims(x, (axis,))) for x in shorts]
        for d, windows in _windows_of(find, eqn).items():
            shorts = [write_windows(tile, shorts, d, windows, fill)]
        return shorts

    return _window_rule(space, block, find)


def _drop_axis(dim_map: DimMap, eqn: Equation) -> DimMap:
    axis = int(eqn.params["axis"])
    return (*dim_map[:axis], *dim_map[axis + 1 :])


def _window_rule(space: Callable[[Equation], Space], block: BlockFn, find: Find) -> Rule:
    """The common part of both rules. Mosaic GPU cannot split a block, whose elements belong to threads."""

    def supports(eqn: Equation, language: str) -> bool:
        rank = max(a.ndim for a in (*eqn.in_avals, *eqn.out_avals))
        windows = [(rank - d, w) for d, several in _windows_of(find, eqn).items() for w in several]
        return known_dtypes(eqn, language) and all(_is_split_in_kernels(w, d, language) for d, w in windows)

    return Rule(
        OpKind.INJECTIVE,
        space,
        no_flops,
        block,
        MOSAIC_GPU,
        supports=supports,
        special=lambda eqn: _WHOLE if find(eqn) is None else None,
    )


def _partly_whole_space(eqn: Equation) -> Space:
    """The space in which dimensions of equal extent are parallel, and the others are whole."""
    out = eqn.out_avals[0].shape
    moved = [d for d, n in enumerate(out) if any(a.shape[d] != n for a in eqn.in_avals if a.ndim)]
    dims, out_map = own_dims(out)
    roles = [_W if any(out_map[d] == (i,) for d in moved) else _P for i in range(len(dims))]
    maps = []
    for aval in eqn.in_avals:
        operand_map: list[tuple[int, ...]] = []
        for d, extent in enumerate(aval.shape):
            if d in moved and extent != 1:
                operand_map.append((len(dims),))
                dims += (extent,)
                roles.append(_W)
            else:
                operand_map.append(() if extent == 1 else out_map[d])
        maps.append(tuple(operand_map))
    return Space(dims, tuple(roles), tuple(maps), (out_map,))


_WHOLE = Rule(OpKind.INJECTIVE, _partly_whole_space, no_flops)
"""The rule of slices and pads that have no windows."""


def constant_slice(eqn: Equation) -> Rule | None:
    """The rule of a ``dynamic_slice`` with literal indices; else None."""
    return _CONSTANT_SLICE if _constant_slice_windows(eqn) is not None else None


_CONSTANT_SLICE = _split_rule(_constant_slice_windows)

RULES: dict[str, Rule] = {
    "slice": _split_rule(_slice_windows),
    "split": _split_rule(_split_windows),
    "unstack": _split_rule(_stack_windows, stacked=True),
    "concatenate": _join_rule(_concatenate_windows),
    "stack": _join_rule(_stack_windows, stacked=True),
    "pad": _join_rule(_pad_windows, padded=True),
}
