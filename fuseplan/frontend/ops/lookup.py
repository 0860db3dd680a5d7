"""Rules of lookups in a table, ``table[i]``, and of sums into one, ``table.at[i].add(x)``, for tiles.

The axes of the indices are tiled. A tile fetches the rows that its own indices name, so that what is gathered
is never written as a whole. A window of the table that moves with the index is whole.

- A loop of a CPU has the whole table in each tile.
- A kernel that loads by index (``Backend.loads_by_index``) reads each element at its address, from a table in
  memory: the dimensions in which indices choose places are ``DimRole.ADDRESSED``.
- A sum into a table is a reduction over the indices, and its result the table; only loops of CPUs hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.frontend.ops.reduction import accumulator
from fuseplan.frontend.ops.rule import (
    PALLAS,
    Reduction,
    Rule,
    Space,
    Table,
    Tile,
    known_dtypes,
    no_flops,
    reshaped,
)
from fuseplan.frontend.trace import Equation

_Dims = tuple[int, ...]
_Mode = lax.GatherScatterMode


class _Space:
    """The iteration space of a lookup, dimension by dimension.

    ``windows`` are the operand's dimensions that the gathered or added array has, too, in its order of
    ``window_dims``; ``indexed`` those in which the indices choose a place; ``batching`` pairs of a dimension
    of the operand and one of the indices that are equal.
    """

    def __init__(self, role_of_indices: DimRole, role_of_places: DimRole) -> None:
        self.dims: list[int] = []
        self.roles: list[DimRole] = []
        self._role_of_indices, self._role_of_places = role_of_indices, role_of_places

    def _own(self, extent: int, role: DimRole) -> _Dims:
        if extent == 1:
            return ()
        self.dims.append(extent)
        self.roles.append(role)
        return (len(self.dims) - 1,)

    def maps(
        self,
        operand: _Dims,
        indices: _Dims,
        rows: _Dims,
        window_dims: Sequence[int],
        windows: Sequence[int],
        indexed: Sequence[int],
        batching: tuple[Sequence[int], Sequence[int]],
    ) -> tuple[DimMap, DimMap, DimMap]:
        """The maps of the operand, of the indices, and of the array of ``rows`` that is gathered or added."""
        shared = dict(zip(batching[1], batching[0], strict=True))
        of_indices = [
            self._own(n, DimRole.PARALLEL if d in shared else self._role_of_indices)
            for d, n in enumerate(indices[:-1])
        ]
        of_rows: list[_Dims] = [()] * len(rows)
        outer = (d for d in range(len(rows)) if d not in window_dims)
        for d, axes in zip(outer, of_indices, strict=True):
            of_rows[d] = axes
        of_operand: list[_Dims] = [()] * len(operand)
        for i, d in shared.items():
            of_operand[d] = of_indices[i]
        for d in range(len(operand)):
            if d in shared.values():
                continue
            at = window_dims[list(windows).index(d)] if d in windows else None
            if at is not None and d not in indexed and rows[at] == operand[d]:
                of_operand[d] = of_rows[at] = self._own(operand[d], DimRole.PARALLEL)
                continue
            of_operand[d] = self._own(operand[d], self._role_of_places)
            if at is not None:
                of_rows[at] = self._own(rows[at], DimRole.WHOLE)
        vector = self._own(indices[-1], DimRole.WHOLE)
        return tuple(of_operand), (*of_indices, vector), tuple(of_rows)


def _windows(operand: int, dropped: Sequence[int], batching: Sequence[int]) -> list[int]:
    """The operand's dimensions that an array of windows has."""
    return [d for d in range(operand) if d not in dropped and d not in batching]


def _gather_space(eqn: Equation) -> Space:
    numbers = eqn.params["dimension_numbers"]
    operand, indices = (a.shape for a in eqn.in_avals)
    space = _Space(DimRole.PARALLEL, DimRole.ADDRESSED)
    batching = numbers.operand_batching_dims
    maps = space.maps(
        operand,
        indices,
        eqn.out_avals[0].shape,
        numbers.offset_dims,
        _windows(len(operand), numbers.collapsed_slice_dims, batching),
        numbers.start_index_map,
        (batching, numbers.start_indices_batching_dims),
    )
    return Space(tuple(space.dims), tuple(space.roles), maps[:2], maps[2:])


def _gathered(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    numbers, (table, indices) = eqn.params["dimension_numbers"], args
    if isinstance(table, Table):
        return [_loaded(tile, eqn, table, indices)]
    windows = _windows(table.ndim, numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    sizes = [1] * table.ndim
    for d, at in zip(windows, numbers.offset_dims, strict=True):
        sizes[d] = tile.out_shapes[0][at]
    return [eqn.primitive.bind(table, indices, **{**eqn.params, "slice_sizes": tuple(sizes)})]


def _loaded(tile: Tile, eqn: Equation, table: Table, indices: Any) -> Any:
    """The block of the result, of which each element is loaded from its own address."""
    numbers, space, shape = eqn.params["dimension_numbers"], _gather_space(eqn), tile.out_shapes[0]
    is_filled = eqn.params["mode"] == _Mode.FILL_OR_DROP
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    windows = _windows(table.ndim, numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    window_at = dict(zip(windows, numbers.offset_dims, strict=True))
    outer = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    in_array: list[Any] = []
    known: dict[int, Any] = {}
    """For each dimension of the result that has an axis, the places of the tile's elements."""
    for dim, own in enumerate(space.output_maps[0]):
        if own:
            known[dim], inside = tile.places(shape, dim, own[0])
            in_array += [] if inside is None else [inside]

    def along(dim: int | None) -> Any:
        zeros = jnp.zeros(shape, jnp.int32)
        return zeros if dim is None else known.get(dim, zeros)

    starts, in_table = _starts(eqn, indices, lambda x: _spread(x, outer, shape), is_filled)
    places = []
    for d in range(table.ndim):
        if d in batching:
            places.append(along(outer[batching[d]]))
        elif d in starts:
            places.append(starts[d] + along(window_at.get(d)))
        else:
            places.append(along(window_at.get(d)))
    read = functools.reduce(jnp.logical_and, [*in_array, *in_table]) if in_array or in_table else None
    found = table.load(places, read)
    if not in_table:
        return found
    fill = np.asarray(eqn.params["fill_value"]).astype(eqn.out_avals[0].dtype)[()]
    return jnp.where(functools.reduce(jnp.logical_and, in_table), found, fill)


def _starts(
    eqn: Equation, indices: Any, spread: Callable[[Any], Any], is_filled: bool
) -> tuple[dict[int, Any], list[Any]]:
    """The first place that each index names, by dimension of the table; and, if others are filled in, which
    windows are inside of the table. As XLA's gather, which moves other windows to the nearest end."""
    operand, sizes = eqn.in_avals[0].shape, eqn.params["slice_sizes"]
    starts: dict[int, Any] = {}
    in_table: list[Any] = []
    for k, d in enumerate(eqn.params["dimension_numbers"].start_index_map):
        index, last = _component(indices, k), operand[d] - sizes[d]
        if is_filled:  # JAX converts them before it compares.
            index = spread(index.astype(jnp.int32))
            in_table += [index >= 0, index <= last]
        else:
            index = spread(jnp.clip(index, 0, last) if index.dtype.itemsize >= 4 else index)
        starts[int(d)] = jnp.clip(index.astype(jnp.int32), 0, last)
    return starts, in_table


def _component(indices: Any, k: int) -> Any:
    """One of the places that each index vector has; vectors lie along the last dimension."""
    *outer, count = indices.shape
    if count == 1:
        return reshaped(indices, (*outer,)) if outer else indices
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    is_kth = lax.broadcasted_iota(jnp.int32, indices.shape, len(outer)) == k
    return lax.reduce_sum(jnp.where(is_kth, indices, jnp.zeros((), indices.dtype)), axes=(len(outer),))


def _spread(x: Any, outer: Sequence[int], shape: tuple[int, ...]) -> Any:
    """``x``, whose dimensions are ``outer`` ones of the result, in the result's block shape."""
    return jnp.broadcast_to(reshaped(x, tuple(n if d in outer else 1 for d, n in enumerate(shape))), shape)


def _supports(eqn: Equation, language: str) -> bool:
    """Whether a kernel may load by index: a table of one place has no address to choose."""
    if eqn.params["mode"] not in (_Mode.CLIP, _Mode.PROMISE_IN_BOUNDS, _Mode.FILL_OR_DROP):
        return False
    return (
        known_dtypes(eqn, language)
        and DimRole.ADDRESSED in _gather_space(eqn).roles
        and eqn.out_avals[0].ndim > 0
    )


GATHER = Rule(OpKind.INJECTIVE, _gather_space, no_flops, _gathered, supports=_supports)


def _scatter_space(eqn: Equation) -> Space:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (a.shape for a in eqn.in_avals)
    space = _Space(DimRole.REDUCED, DimRole.WHOLE)
    batching = numbers.operand_batching_dims
    of_operand, of_indices, of_updates = space.maps(
        operand,
        indices,
        updates,
        numbers.update_window_dims,
        _windows(len(operand), numbers.inserted_window_dims, batching),
        numbers.scatter_dims_to_operand_dims,
        (batching, numbers.scatter_indices_batching_dims),
    )
    return Space(tuple(space.dims), tuple(space.roles), (of_operand, of_indices, of_updates), (of_operand,))


def _added(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """The table that a tile adds to: the operand counts for the first tile."""
    operand, indices, updates = args
    numbers, dtype = eqn.params["dimension_numbers"], accumulator(operand.dtype)
    windows, is_first = set(numbers.update_window_dims), jnp.bool_(True)
    own = _scatter_space(eqn)
    updates = updates.astype(dtype)
    for dim, axes in enumerate(own.input_maps[2]):
        if dim in windows or not axes or own.roles[axes[0]] != DimRole.REDUCED:
            continue
        is_first &= tile.indices((1,), 0, axes[0])[0] == 0
        valid = tile.valid(2, dim)
        if valid is not None:
            updates = jnp.where(valid, updates, 0)
    start = jnp.where(is_first, operand.astype(dtype), 0)
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    # The sum in the equation's own parameters is of its own dtype.
    return [lax.scatter_add(start, indices, updates, **{name: eqn.params[name] for name in names})]


def scatter_flops(eqn: Equation) -> Flops:
    """One operation for each update."""
    return Flops(vector=eqn.in_avals[-1].size)


SCATTER_ADD = Rule(
    OpKind.REDUCTION,
    _scatter_space,
    scatter_flops,
    _added,
    PALLAS | {"xla"},  # XLA does not fuse a scatter: it loops over the updates.
    Reduction(lambda a, b: a + b, lambda dtype: 0, accumulator),
)
