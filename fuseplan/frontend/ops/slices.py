"""Slices, splits, concatenations, stacks and pads: the primitives that cut arrays and join them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from costmodel.graph import DimMap, DimRole, OpKind
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    BlockFn,
    Rule,
    Space,
    Tile,
    known_dtypes,
    moved,
    no_flops,
    own_dims,
    reshaped,
)
from fuseplan.frontend.ops.windows import (
    Window,
    Windows,
    is_cut_in_kernels,
    placed,
    taken,
    window_space,
    windows_in,
)
from fuseplan.frontend.trace import Equation, Literal

_P, _W = DimRole.PARALLEL, DimRole.WHOLE


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
            axis = int(eqn.params["axis"])
            shorts = [moved(tile, x, lambda x: lax.expand_dims(x, (axis,))) for x in shorts]
        for d, windows in _found(find, eqn).items():
            shorts = [placed(tile, shorts, d, windows, fill)]
        return shorts

    return _windowed(space, block, find)


def _without(dim_map: DimMap, eqn: Equation) -> DimMap:
    axis = int(eqn.params["axis"])
    return (*dim_map[:axis], *dim_map[axis + 1 :])


def _windowed(space: Callable[[Equation], Space], block: BlockFn, find: Find) -> Rule:
    """A rule that cuts blocks, as threads of Mosaic GPU, each with its own elements, do not."""

    def supports(eqn: Equation, language: str) -> bool:
        rank = max(a.ndim for a in (*eqn.in_avals, *eqn.out_avals))
        windows = [(rank - d, w) for d, several in _found(find, eqn).items() for w in several]
        return known_dtypes(eqn, language) and all(is_cut_in_kernels(w, d, language) for d, w in windows)

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
