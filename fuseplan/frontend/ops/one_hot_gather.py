"""Rules of gathers, scatters, dynamic slices and sorts. XLA runs them, except for one-hot gathers.

``take_along_axis(logits, labels[:, None], -1)`` reads one element of each row. On tiles it is a reduction
over the picked dimension: the sum of ``where(index == position, x, 0)``, which has one nonzero term. So
logits that the same kernel computes need not be stored. Its gradient, a ``scatter-add`` of one update a
row, is elementwise: ``x + update`` where ``index == position``. Of a table shared by all indices such a
reduction would read all for every index: ``lookup`` has rules for loops and for kernels that load by index,
and elsewhere XLA runs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.frontend.ops.lookup import GATHER, SCATTER_ADD, scatter_flops
from fuseplan.frontend.ops.reduction import accumulator, masked
from fuseplan.frontend.ops.rule import (
    MOSAIC_GPU,
    PALLAS,
    Reduction,
    Rule,
    Space,
    Tile,
    in_size,
    no_flops,
    own_dims,
    reshaped,
    whole_space,
)
from fuseplan.frontend.ops.slices import constant_slice
from fuseplan.frontend.trace import Equation

_Mode = lax.GatherScatterMode


@dataclass(frozen=True, slots=True)
class Pick:
    """A gather or scatter of one element along ``dim`` for each index of the operand's other dimensions.

    ``index_dims`` has for each dimension of the indices the operand's dimension that it corresponds to,
    ``window`` the same for the gathered result or the scattered update; None for a dimension of size one.
    """

    dim: int
    index_dims: tuple[int | None, ...]
    window: tuple[int | None, ...]


def gather_pick(eqn: Equation) -> Pick | None:
    """The ``Pick`` of a ``gather``; None if it does not pick along one dimension."""
    numbers = eqn.params["dimension_numbers"]
    return _pick(
        eqn.in_avals[0].shape,
        eqn.in_avals[1].shape,
        tuple(eqn.params["slice_sizes"]),
        numbers.start_index_map,
        (numbers.operand_batching_dims, numbers.start_indices_batching_dims),
        numbers.collapsed_slice_dims,
        numbers.offset_dims,
        eqn.out_avals[0].ndim,
    )


def scatter_pick(eqn: Equation) -> Pick | None:
    """The ``Pick`` of a ``scatter-add``; None if it does not update along one dimension."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (a.shape for a in eqn.in_avals)
    batching = numbers.operand_batching_dims
    windows = [d for d in range(len(operand)) if d not in {*numbers.inserted_window_dims, *batching}]
    sizes = [1] * len(operand)
    for d, at in zip(windows, numbers.update_window_dims, strict=True):
        sizes[d] = updates[at]
    return _pick(
        operand,
        indices,
        tuple(sizes),
        numbers.scatter_dims_to_operand_dims,
        (batching, numbers.scatter_indices_batching_dims),
        numbers.inserted_window_dims,
        numbers.update_window_dims,
        len(updates),
    )


def _pick(
    operand: tuple[int, ...],
    indices: tuple[int, ...],
    sizes: tuple[int, ...],
    indexed: Sequence[int],
    batching: tuple[Sequence[int], Sequence[int]],
    collapsed: Sequence[int],
    offsets: Sequence[int],
    rank: int,
) -> Pick | None:
    if len(indexed) != 1 or sizes[int(indexed[0])] != 1:
        return None
    dim = int(indexed[0])
    moves = {int(i): int(d) for d, i in zip(*batching, strict=True)}
    rest = {*range(len(operand))} - {dim, *moves.values()}
    if any(sizes[d] != operand[d] for d in rest):
        return None
    index_dims = tuple(moves.get(i) for i in range(len(indices)))
    if any(d is None and n != 1 for d, n in zip(index_dims, indices, strict=True)):
        return None  # Several indices share a row.
    inner = iter(d for d in range(len(operand)) if d not in {*collapsed, *moves.values()})
    outer = iter(index_dims)  # the last one, the index vector's, is never read
    window = tuple(next(inner) if d in offsets else next(outer) for d in range(rank))
    return Pick(dim, index_dims, tuple(None if d == dim else d for d in window))


def _space(eqn: Equation, pick: Pick, role: DimRole) -> tuple[Space, DimMap]:
    """The operand's iteration space without results, and the map of the window."""
    dims, operand_map = own_dims(eqn.in_avals[0].shape)

    def along(moved: tuple[int | None, ...]) -> DimMap:
        return tuple(() if d is None else operand_map[d] for d in moved)

    picked = operand_map[pick.dim]
    roles = tuple(role if i in picked else DimRole.PARALLEL for i in range(len(dims)))
    return Space(dims, roles, (operand_map, along(pick.index_dims)), ()), along(pick.window)


def _align(x: Any, moved: tuple[int | None, ...], shape: tuple[int, ...], dim: int) -> Any:
    """``x`` transposed and reshaped to broadcast against an operand of ``shape``, with size one along
    ``dim``. ``moved`` has the operand's dimension of each dimension of ``x``."""
    order = sorted((i for i, d in enumerate(moved) if d is not None), key=lambda i: moved[i] or 0)
    ones = [i for i, d in enumerate(moved) if d is None]
    x = lax.transpose(x, (*order, *ones))
    kept = {moved[i] for i in order}
    return reshaped(x, tuple(n if d in kept and d != dim else 1 for d, n in enumerate(shape)))


def _row_indices(eqn: Equation, pick: Pick, index: Any, shape: tuple[int, ...]) -> Any:
    """The indices as integers of at least 32 bits, one for each row of an operand's block."""
    if index.dtype.itemsize < 4:
        index = index.astype(jnp.int32)
    aligned = _align(index, pick.index_dims, shape, pick.dim)
    # For indices promised to be in bounds, XLA's gather clamps and its scatter drops the others.
    gathers = eqn.primitive.name == "gather"
    if eqn.params["mode"] == _Mode.CLIP or (gathers and eqn.params["mode"] == _Mode.PROMISE_IN_BOUNDS):
        last = eqn.in_avals[0].shape[pick.dim] - 1
        return jnp.clip(aligned, 0, last)
    return aligned


def _one_hot(tile: Tile, eqn: Equation, pick: Pick, index: Any, shape: tuple[int, ...]) -> Any:
    """Bool array of an operand's block shape: True where ``index`` is the position along ``pick.dim``."""
    own = own_dims(eqn.in_avals[0].shape)[1][pick.dim]
    positions = tile.indices(shape, pick.dim, own[0]) if own else jnp.zeros(shape, jnp.int32)
    return positions.astype(index.dtype) == index


def _fill_value(eqn: Equation) -> float | None:
    """The value of an index out of bounds, 0 or NaN; None if it is another."""
    if eqn.params["mode"] != _Mode.FILL_OR_DROP:
        return 0.0
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = np.nan if jnp.issubdtype(eqn.out_avals[0].dtype, jnp.floating) else None
    return fill if fill is not None and (fill == 0 or fill != fill) else None


def gather_rule(eqn: Equation) -> Rule:
    """The rule of a gather: of one number a row, as a reduction."""
    pick, fill = gather_pick(eqn), _fill_value(eqn)
    if pick is None or fill is None or eqn.out_avals[0].dtype == jnp.bool_:
        return GATHER

    def space(eqn: Equation) -> Space:
        operand, window = _space(eqn, pick, DimRole.REDUCED)
        return replace(operand, output_maps=(window,))

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        x, index = args[0], _row_indices(eqn, pick, args[1], args[0].shape)
        x = x.astype(accumulator(x.dtype))
        x = jnp.where(_one_hot(tile, eqn, pick, index, x.shape), x, jnp.zeros((), x.dtype))
        x = masked(tile, 0, (pick.dim,), x, 0)
        total = lax.expand_dims(lax.reduce_sum(x, axes=(pick.dim,)), (pick.dim,))
        if fill != 0:
            inside = (index >= 0) & (index < eqn.in_avals[0].shape[pick.dim])
            total = jnp.where(inside, total, fill)
        kept = [d for d in pick.window if d is not None]
        order = (*kept, *(d for d in range(x.ndim) if d not in kept))
        return [reshaped(lax.transpose(total, order), tile.out_shapes[0])]

    kind = OpKind.REDUCTION if eqn.in_avals[0].shape[pick.dim] != 1 else OpKind.INJECTIVE
    combined = Reduction(lambda a, b: a + b, lambda dtype: 0, accumulator)
    return Rule(kind, space, no_flops, block, MOSAIC_GPU, combined)


def scatter_rule(eqn: Equation) -> Rule | None:
    """The rule of a scatter-add: of one number a row, as an elementwise sum."""
    pick = scatter_pick(eqn)
    if eqn.out_avals[0].dtype == jnp.bool_:
        return None
    if pick is None:
        return SCATTER_ADD

    def space(eqn: Equation) -> Space:
        operand, window = _space(eqn, pick, DimRole.PARALLEL)
        maps = operand.input_maps
        return replace(operand, input_maps=(*maps, window), output_maps=(maps[0],))

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        x, index = args[0], _row_indices(eqn, pick, args[1], args[0].shape)
        update = _align(args[2], pick.window, x.shape, pick.dim)
        hit, added = _one_hot(tile, eqn, pick, index, x.shape), x + update
        # In 32 bits on a TPU, as in select_n.
        wide = accumulator(x.dtype) if tile.language == "mosaic_tpu" else x.dtype
        return [jnp.where(hit, added.astype(wide), x.astype(wide)).astype(x.dtype)]

    # XLA does not fuse a scatter: it loops over the updates.
    return Rule(OpKind.ELEMENTWISE, space, scatter_flops, block, MOSAIC_GPU | {"xla"})


def _sort_flops(eqn: Equation) -> Flops:
    """``n log2 n`` comparisons for a row of ``n``, one pass of a sorting network (Batcher)."""
    rows = in_size(eqn)
    longest = max((a.shape[eqn.params.get("dimension", -1)] for a in eqn.in_avals if a.ndim), default=1)
    return Flops(vector=rows * max(math.ceil(math.log2(max(longest, 2))), 1))


_MOVE = Rule(OpKind.INJECTIVE, whole_space, no_flops, None, PALLAS)
_SCATTER = Rule(OpKind.OPAQUE, whole_space, scatter_flops, None, PALLAS)

RULES: dict[str, Rule] = {
    "gather": replace(_MOVE, special=gather_rule),
    "dynamic_slice": replace(_MOVE, special=constant_slice),
    "dynamic_update_slice": _MOVE,
    "scatter-add": replace(_SCATTER, special=scatter_rule),
    **dict.fromkeys(("scatter", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _SCATTER),
    "sort": Rule(OpKind.OPAQUE, whole_space, _sort_flops, None, PALLAS),
    "top_k": Rule(OpKind.OPAQUE, whole_space, lambda eqn: Flops(vector=in_size(eqn)), None, PALLAS),
}
