"""Slices, splits, concatenations, stacks and pads: part of a dimension is a dimension elsewhere.

Cut into pieces of equal length, the long dimension is ``(parts, rest, stride)`` and the short
one ``(count, rest)``: the short one's elements are every ``stride``-th of some consecutive parts.
So two halves of a row, or its even elements, have axes of the row: whole parts, and a rest that
is tiled like any other.
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
from fuseplan.ops.rule import BlockFn, Rule, Space, Tile, known_dtypes, no_flops, own_dims, reshaped
from fuseplan.trace import Equation, Literal

_P, _W = DimRole.PARALLEL, DimRole.WHOLE

_MOST_PIECES = 16
"""Pieces of a dimension that a Triton kernel takes apart: each is a conversion of layout."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where a short dimension of ``count * rest`` lies in a long one of ``parts * rest * stride``."""

    parts: int
    rest: int
    stride: int
    first: int
    """The part that it starts with."""
    phase: int
    """The element of each ``stride`` that it takes."""
    count: int


Windows = dict[int, tuple[Window, ...]]
"""For each dimension in which short arrays differ from the long one, the window of each of them."""


def windows_in(extent: int, pieces: Sequence[tuple[int, int]], stride: int = 1) -> tuple[Window, ...]:
    """The windows of ``pieces``, each (start, elements), that take every ``stride``-th element of
    a dimension; in parts of one where ``stride`` does not divide it.

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
    """Iteration dimensions and their roles, and how the long array and the ``shorts`` are indexed."""
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


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cut(x: Any, dim: int, pieces: int) -> Sequence[Any]:
    """``x`` in equal pieces."""
    return [x] if pieces == 1 else lax.split(x, (x.shape[dim] // pieces,) * pieces, dim)


def joined(pieces: Sequence[Any], dim: int) -> Any:
    """A power of two of equal pieces side by side, by what Triton has: pairs of elements."""
    if len(pieces) == 1:
        return pieces[0]
    half = len(pieces) // 2
    pair = [joined(side, dim) for side in (pieces[:half], pieces[half:])]
    shape, last = pair[0].shape, pair[0].ndim
    both = lax.concatenate([lax.expand_dims(x, (last,)) for x in pair], last)
    both = lax.transpose(both, (*range(dim), last, *range(dim, last)))
    return lax.reshape(both, (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]))


def _padded(pieces: Sequence[Any]) -> list[Any]:
    """As many pieces as a power of two; what is past the end is masked when it is stored."""
    return [*pieces, *[pieces[0]] * (_power(len(pieces)) - len(pieces))]


def _interleaved(x: Any, dim: int, stride: int) -> tuple[int, ...]:
    """The shape of ``x`` with ``dim`` divided into runs of ``stride``."""
    return (*x.shape[:dim], x.shape[dim] // stride, stride, *x.shape[dim + 1 :])


def _merged(x: Any, dim: int) -> Any:
    """``x`` with ``dim`` and the next merged."""
    return lax.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))


def taken(tile: Tile, x: Any, dim: int, w: Window) -> Any:
    """The block of the short array out of the block ``x`` of the long one."""
    pieces: Sequence[Any]
    if tile.backend == "triton":
        if w.stride > 1:
            x = lax.reshape(x, _interleaved(x, dim, _power(w.stride)))
            x = _merged(cut(x, dim + 1, _power(w.stride))[w.phase], dim)
        pieces = cut(x, dim, _power(w.parts))
        return joined(_padded(pieces[w.first : w.first + w.count]), dim)
    unit = x.shape[dim] // (w.parts * w.stride)
    start, size = w.first * unit, w.count * unit
    if w.stride > 1:  # Mosaic lowers no strided slice.
        x = lax.reshape(x, _interleaved(x, dim, w.stride))
        x = _merged(lax.slice_in_dim(x, w.phase, w.phase + 1, axis=dim + 1), dim)
    return lax.slice_in_dim(x, start, start + size, axis=dim)


def placed(tile: Tile, shorts: Sequence[Any], dim: int, windows: Sequence[Window], fill: Any) -> Any:
    """The block of the long array with those of ``shorts``, which are in order, in their windows and
    ``fill`` around them."""
    w, by_pairs = windows[0], tile.backend == "triton"
    pieces: list[Any] = []
    end = 0
    if by_pairs:
        for x, window in zip(shorts, windows, strict=True):
            own = cut(x, dim, _power(window.count))[: window.count]
            pieces += [jnp.full_like(own[0], fill)] * (window.first - len(pieces))
            pieces += own
        pieces += [jnp.full_like(pieces[0], fill)] * (w.parts - len(pieces))
        whole = joined(_padded(pieces), dim)
    else:
        unit = shorts[0].shape[dim] // w.count
        for x, window in zip(shorts, windows, strict=True):
            pieces += [*_gap(x, dim, (window.first - end) * unit, fill), x]
            end = window.first + window.count
        pieces += _gap(shorts[0], dim, (w.parts - end) * unit, fill)
        whole = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    if w.stride == 1:
        return whole
    whole = lax.expand_dims(whole, (dim + 1,))
    around = jnp.full_like(whole, fill)
    runs = [whole if i == w.phase else around for i in range(w.stride)]
    return _merged(joined(_padded(runs), dim + 1) if by_pairs else lax.concatenate(runs, dim + 1), dim)


def _gap(x: Any, dim: int, size: int, fill: Any) -> list[Any]:
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return [jnp.full(shape, fill, x.dtype)] if size else []


def _sliced(starts: Sequence[int], eqn: Equation, strides: Sequence[int]) -> Windows | None:
    """The windows of the result in the first operand; None where a stride divides no dimension."""
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
    return _sliced(starts, eqn, eqn.params["strides"] or (1,) * len(starts))


def _constant_windows(eqn: Equation) -> Windows | None:
    """Of a ``dynamic_slice`` whose indices are literals, which XLA clamps; else None."""
    at = [int(np.asarray(v.val)) for v in eqn.inputs[1:] if isinstance(v, Literal)]
    long, short = eqn.in_avals[0].shape, eqn.out_avals[0].shape
    if len(at) != len(long):
        return None
    starts = [min(max(i, 0), n - size) for i, n, size in zip(at, long, short, strict=True)]
    return _sliced(starts, eqn, (1,) * len(starts))


def _side_by_side(sizes: Sequence[int]) -> tuple[Window, ...]:
    ends = np.cumsum([0, *sizes]).tolist()
    return windows_in(ends[-1], list(zip(ends[:-1], map(int, sizes), strict=True)))


def _split_windows(eqn: Equation) -> Windows:
    sizes = eqn.params["sizes"]
    return {int(eqn.params["axis"]): _side_by_side(sizes)} if len(sizes) > 1 else {}


def _concatenate_windows(eqn: Equation) -> Windows:
    dim = int(eqn.params["dimension"])
    sizes = [a.shape[dim] for a in eqn.in_avals]
    return {dim: _side_by_side(sizes)} if len(sizes) > 1 else {}


def _stack_windows(eqn: Equation) -> Windows:
    """Of ``stack`` and ``unstack``: each short array is one element of the dimension."""
    count = max(len(eqn.in_avals), len(eqn.out_avals))
    return {int(eqn.params["axis"]): _side_by_side((1,) * count)} if count > 1 else {}


def _pad_windows(eqn: Equation) -> Windows | None:
    """None where it cuts, or where the distance of elements does not divide the result."""
    found: Windows = {}
    for d, (low, high, gap) in enumerate(eqn.params["padding_config"]):
        size, extent, stride = eqn.in_avals[0].shape[d], eqn.out_avals[0].shape[d], int(gap) + 1
        if low < 0 or high < 0 or extent % stride:
            return None
        if extent != size:
            found[d] = windows_in(extent, [(int(low), size)], stride)
    return found


Find = Callable[[Equation], Windows | None]


def _found(find: Find, eqn: Equation) -> Windows:
    windows = find(eqn)
    assert windows is not None, "its rule is that of arrays needed whole"
    return windows


def _taking(find: Find, stacked: bool = False) -> Rule:
    """Results are windows of the first operand, ``stacked`` without the dimension that they share;
    other operands are literals."""

    def space(eqn: Equation) -> Space:
        windows = _found(find, eqn)
        dims, roles, long, shorts = window_space(eqn.in_avals[0].shape, len(eqn.out_avals), windows)
        shorts = tuple(_without(m, eqn) for m in shorts) if stacked else shorts
        return Space(dims, roles, (long, *((),) * (len(eqn.in_avals) - 1)), shorts)

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        results = [args[0]] * len(eqn.out_avals)
        for d, windows in _found(find, eqn).items():
            results = [taken(tile, x, d, w) for x, w in zip(results, windows, strict=True)]
        return [reshaped(x, shape) for x, shape in zip(results, tile.out_shapes, strict=True)]

    return _windowed(space, block, find)


def _placing(find: Find, stacked: bool = False, padded: bool = False) -> Rule:
    """Operands are windows of the result, ``stacked`` without the dimension that they share; with
    ``padded`` the last one fills the rest."""

    def space(eqn: Equation) -> Space:
        count = len(eqn.in_avals) - padded
        dims, roles, long, shorts = window_space(eqn.out_avals[0].shape, count, _found(find, eqn))
        shorts = tuple(_without(m, eqn) for m in shorts) if stacked else shorts
        return Space(dims, roles, (*shorts, ()) if padded else shorts, (long,))

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        *shorts, fill = args if padded else (*args, 0)
        if stacked:
            shorts = [lax.expand_dims(x, (int(eqn.params["axis"]),)) for x in shorts]
        for d, windows in _found(find, eqn).items():
            shorts = [placed(tile, shorts, d, windows, fill)]
        return shorts

    return _windowed(space, block, find)


def _without(dim_map: DimMap, eqn: Equation) -> DimMap:
    axis = int(eqn.params["axis"])
    return (*dim_map[:axis], *dim_map[axis + 1 :])


def _windowed(space: Callable[[Equation], Space], block: BlockFn, find: Find) -> Rule:
    def supports(eqn: Equation, backend: str) -> bool:
        rank = max(a.ndim for a in (*eqn.in_avals, *eqn.out_avals))
        windows = [(rank - d, w) for d, several in _found(find, eqn).items() for w in several]
        return known_dtypes(eqn, backend) and all(_in_kernels(w, d, backend) for d, w in windows)

    return Rule(
        OpKind.INJECTIVE,
        space,
        no_flops,
        block,
        supports=supports,
        special=lambda eqn: _WHOLE if find(eqn) is None else None,
    )


def _in_kernels(w: Window, minor: int, backend: str) -> bool:
    """Whether a backend cuts the ``minor``-th dimension from the last so."""
    if backend == "triton":
        return _power(w.parts) * _power(w.stride) <= _MOST_PIECES
    # In the registers of a TPU a run of two is as long as a vector, or as many rows.
    return w.stride == 1 or minor > 2


def _partly_whole_space(eqn: Equation) -> Space:
    """Dimensions along which operands and result agree move together; the others are
    needed whole, each with an extent of its own."""
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
"""Of slices and pads that are no windows."""


def constant_slice(eqn: Equation) -> Rule | None:
    """The rule of a ``dynamic_slice`` whose indices are literals; else None."""
    return _CONSTANT_SLICE if _constant_windows(eqn) is not None else None


_CONSTANT_SLICE = _taking(_constant_windows)

RULES: dict[str, Rule] = {
    "slice": _taking(_slice_windows),
    "split": _taking(_split_windows),
    "unstack": _taking(_stack_windows, stacked=True),
    "concatenate": _placing(_concatenate_windows),
    "stack": _placing(_stack_windows, stacked=True),
    "pad": _placing(_pad_windows, padded=True),
}
