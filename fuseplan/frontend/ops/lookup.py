"""Rules of lookups in a table, ``table[i]``, and of sums into one, ``table.at[i].add(x)``, for tiled loops.

The axes of the indices are tiled, and the table is whole in each tile. A tile fetches the rows that its own
indices name, so that what is gathered is never written as a whole; a sum into a table is a reduction over the
indices, and its result the table. A window of the table that moves with the index is whole, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.frontend.ops.reduction import accumulator
from fuseplan.frontend.ops.rule import PALLAS, Reduction, Rule, Space, Tile, no_flops
from fuseplan.frontend.trace import Equation

_Dims = tuple[int, ...]


class _Space:
    """The iteration space of a lookup, dimension by dimension.

    ``windows`` are the operand's dimensions that the gathered or added array has, too, in its order of
    ``window_dims``; ``indexed`` those in which the indices choose a place; ``batching`` pairs of a dimension
    of the operand and one of the indices that are equal.
    """

    def __init__(self, role_of_indices: DimRole) -> None:
        self.dims: list[int] = []
        self.roles: list[DimRole] = []
        self._role_of_indices = role_of_indices

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
            of_operand[d] = self._own(operand[d], DimRole.WHOLE)
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
    space = _Space(DimRole.PARALLEL)
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
    windows = _windows(table.ndim, numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    sizes = [1] * table.ndim
    for d, at in zip(windows, numbers.offset_dims, strict=True):
        sizes[d] = tile.out_shapes[0][at]
    return [eqn.primitive.bind(table, indices, **{**eqn.params, "slice_sizes": tuple(sizes)})]


GATHER = Rule(OpKind.INJECTIVE, _gather_space, no_flops, _gathered, PALLAS)


def _scatter_space(eqn: Equation) -> Space:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (a.shape for a in eqn.in_avals)
    space = _Space(DimRole.REDUCED)
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
