"""Bounds of index arithmetic, tile by tile: values computed from iota and literals only.

These are known when a plan is made. A causal mask, for example, compares two indices: on a tile whose first
column is past its last row it is false everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from costmodel.axes import made_map
from costmodel.graph import Node
from costmodel.kernel import Access
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Literal
from fuseplan.masks.intervals import MOVES, Interval, apply, unknown

_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "neg", "abs", "div", "rem", "max", "min", "clamp", "sign", "square", "integer_pow"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "convert_element_type"}
)
# The logical operations, whose result one operand may decide.
_DECIDED = frozenset({"and", "or", "select_n"})

_KNOWN = MOVES | _ARITHMETIC | {"iota"}
MAX_DEPTH = 120
"""The longest chain of operations that is evaluated: bounds recurse once for each operation."""

_PARTS = 64
"""The parts into which a cell of undecided elements is divided, along all its axes together."""
_MAX_CELLS = 1 << 20
"""The most cells of one division, some tenths of a second of NumPy. Beyond, coverage counts as not proven."""

_T = TypeVar("_T")

Keys = Sequence[tuple[Access, float]]
"""Values of index arithmetic, each with a number that its elements may equal."""


class IndexArithmetic:
    """The values of a graph that are computed from indices and literals, and their bounds.

    A logical operation is index arithmetic if one of its operands is: the other is unbounded.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self._depth: dict[int, float] = {}
        """The number of operations from indices to each value; infinite unless it is index arithmetic."""
        self._covered: dict[object, bool] = {}
        """Results of ``covers``, by its arguments with renumbered axes."""
        self._remembered: dict[object, Any] = {}

    def __contains__(self, v: int) -> bool:
        # Iterative: a chain of operations may be as long as the graph.
        waiting = [v] if v not in self._depth else []
        while waiting:
            u = waiting[-1]
            value = self.lowered.graph.values[u]
            node = None if value.producer < 0 else self.lowered.graph.nodes[value.producer]
            if node is None or node.op not in _KNOWN:
                self._depth[u] = math.inf
            elif u not in self._depth and (new := [w for w in node.inputs if w not in self._depth]):
                waiting += new
                continue
            else:
                depths = [self._depth[w] for w in node.inputs]
                if node.op in _DECIDED and value.dtype == "bool":
                    depths = [d for d in depths if d < math.inf] or depths
                self._depth[u] = 1 + max(depths, default=0)
            waiting.pop()
        return self._depth[v] <= MAX_DEPTH

    def remembered(self, key: object, find: Callable[[], _T]) -> _T:
        """What ``find`` found first for ``key``, for all schedules of the program."""
        if key not in self._remembered:
            self._remembered[key] = find()
        found: _T = self._remembered[key]
        return found

    def bounds(self, access: Access, cells: Mapping[int, Interval], sizes: Sequence[int]) -> Interval:
        """Bounds of a value on cells.

        ``cells`` has the first and last indices along each axis, as arrays that broadcast together. An axis
        that is not among them is whole.
        """
        dims = tuple(_merged(axes, cells, sizes) for axes in access.axes)
        return self._value(access.value, dims, {})

    def _value(self, v: int, dims: tuple[Interval, ...], known: dict[Any, Any]) -> Interval:
        """Bounds of ``v`` at ranges of its dimensions. ``known`` is a cache by identity of the ranges, which
        it keeps alive."""
        key = (v, tuple((id(lo), id(hi)) for lo, hi in dims))
        if key not in known:
            known[key] = (self._computed(v, dims, known), dims)
        return known[key][0]

    def _computed(self, v: int, dims: tuple[Interval, ...], known: dict[Any, Any]) -> Interval:
        graph = self.lowered.graph
        if v not in self:
            return unknown(self.lowered.avals[v].dtype)
        node = graph.nodes[graph.values[v].producer]
        eqn = self.lowered.equations[node.id]
        if node.op == "iota":
            lo, hi = dims[eqn.params["dimension"]]
            return np.asarray(lo, np.float64), np.asarray(hi, np.float64)
        own = _iteration(node, v, dims)
        maps = iter(zip(node.inputs, node.input_maps, strict=True))
        operands = []
        for operand in eqn.inputs:
            if isinstance(operand, Literal):
                operands.append(constant(operand))
                continue
            u, in_map = next(maps)
            inner = tuple(_merged(axes, own, node.dims) for axes in in_map)
            operands.append(self._value(u, inner, known))
        return apply(np, eqn, operands, exact=True)

    def covers(self, keys: Keys, reduced: frozenset[int], sizes: Sequence[int]) -> bool:
        """Whether at each index of the other axes, some element along the ``reduced`` axes has every key at
        its value. False also if a proof needs too many cells.

        The result does not depend on tiles: all schedules of a group share it.
        """
        axes = sorted({a for access, _ in keys for a in access.axis_set})
        number = {a: k for k, a in enumerate(axes)}
        question = (
            tuple(
                (access.value, tuple(tuple(number[a] for a in dims) for dims in access.axes), value)
                for access, value in keys
            ),
            tuple(a in reduced for a in axes),
            tuple(sizes[a] for a in axes),
        )
        if question not in self._covered:
            self._covered[question] = self._finds_cover(keys, axes, reduced, sizes)
        return self._covered[question]

    def _finds_cover(
        self, keys: Keys, axes: list[int], reduced: frozenset[int], sizes: Sequence[int]
    ) -> bool:
        """``covers`` by dividing cells until each row of them has a cell on which every key is constant."""
        rows = [a for a in axes if a not in reduced]
        if self._has_bare_row(keys, axes, rows, sizes):
            return False
        cells: dict[int, Interval] = {a: (np.zeros(1, np.int64), np.full(1, sizes[a] - 1)) for a in axes}
        while True:
            count = len(next(iter(cells.values()))[0]) if cells else 1
            everywhere, nowhere = self._decided(keys, cells, sizes, count)
            row = _numbered([(cells[a][0], sizes[a]) for a in rows], count)
            covered = np.zeros(row.max() + 1, bool)
            covered[row[everywhere]] = True
            left = ~covered[row] & ~nowhere
            hopeful = covered.copy()
            hopeful[row[left]] = True
            if not hopeful.all():
                return False
            if covered.all():
                return True
            cells = {a: (lo[left], hi[left]) for a, (lo, hi) in cells.items()}
            if all((lo == hi).all() for lo, hi in cells.values()):
                return False  # single elements that index arithmetic does not decide
            parts = max(2, int(_PARTS ** (1 / len(cells)) + 1e-9))  # along each axis
            if _n_divided(cells, parts) > _MAX_CELLS:
                return False
            cells = _divided(cells, parts)

    def _has_bare_row(self, keys: Keys, axes: list[int], rows: list[int], sizes: Sequence[int]) -> bool:
        """Whether at some index of ``rows`` the bounds over all other axes exclude a key's value. This finds
        a fully masked row of a periodic mask without dividing cells."""
        shape = [sizes[a] for a in rows]
        count = math.prod(shape)
        if not rows or not 0 < count <= _MAX_CELLS:
            return False
        places = np.unravel_index(np.arange(count), shape)
        cells: dict[int, Interval] = {a: (at, at) for a, at in zip(rows, places, strict=True)}
        cells |= {a: (np.zeros(1, np.int64), np.full(1, sizes[a] - 1)) for a in axes if a not in cells}
        return bool(self._decided(keys, cells, sizes, count)[1].any())

    def _decided(
        self, keys: Keys, cells: Mapping[int, Interval], sizes: Sequence[int], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each of ``count`` cells, whether all of its elements have every key at its value, and whether
        no element has."""
        everywhere, nowhere = np.ones(count, bool), np.zeros(count, bool)
        for access, value in keys:
            lo, hi = self.bounds(access, cells, sizes)
            everywhere &= (lo == value) & (hi == value)
            nowhere |= (lo > value) | (hi < value)
        return everywhere, nowhere


def constant(literal: Literal) -> Interval:
    """The bounds of a literal."""
    dtype: Any = literal.aval.dtype  # type: ignore[attr-defined]
    if not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        return unknown(dtype)
    value = np.float64(np.asarray(literal.val).astype(dtype))
    return value, value


def _merged(axes: Iterable[int], ranges: Mapping[int, Interval], sizes: Sequence[int]) -> Interval:
    """The range of a row-major linear index over ``axes``, major first. An axis without a range is whole."""
    first: Any = 0
    last: Any = 0
    for a in axes:
        lo, hi = ranges.get(a, (0, sizes[a] - 1))
        first, last = first * sizes[a] + lo, last * sizes[a] + hi
    return first, last


def _iteration(node: Node, v: int, dims: Sequence[Interval]) -> dict[int, Interval]:
    """The ranges of a node's iteration dimensions, from those of its result's dimensions."""
    own: dict[int, Interval] = {}
    for (lo, hi), merged in zip(dims, made_map(node, v), strict=True):
        for d in reversed(merged[1:]):
            size = node.dims[d]
            together = np.asarray(lo) // size == np.asarray(hi) // size
            own[d] = np.where(together, lo % size, 0), np.where(together, hi % size, size - 1)
            lo, hi = lo // size, hi // size
        if merged:
            own[merged[0]] = lo, hi
    return own


def _numbered(columns: Sequence[tuple[np.ndarray, int]], count: int) -> np.ndarray:
    """For each row of a table of indices, the number of its distinct row; each column has its extent."""
    code = np.zeros(count, np.int64)
    for column, size in columns:
        code = np.unique(code * size + column, return_inverse=True)[1].reshape(-1)
    return code


def _n_divided(cells: Mapping[int, Interval], parts: int) -> int:
    """The number of cells that ``_divided`` makes."""
    total = 1
    for lo, hi in cells.values():
        extent = hi - lo + 1
        width = -(-extent // parts)
        total = total * -(-extent // width)
    return int(np.sum(total))


def _divided(cells: Mapping[int, Interval], parts: int) -> dict[int, Interval]:
    """Each cell divided along all of its axes."""
    result = dict(cells)
    for axis in cells:
        lo, hi = result[axis]
        width = -(-(hi - lo + 1) // parts)
        start = lo[:, None] + width[:, None] * np.arange(parts)
        keep = start <= hi[:, None]
        which = np.nonzero(keep)[0]
        end = np.minimum(start + width[:, None] - 1, hi[:, None])
        result = {a: (x[which], y[which]) for a, (x, y) in result.items()}
        result[axis] = start[keep], end[keep]
    return result
