"""Masks: bounds of index arithmetic, tile by tile.

What depends on nothing but iota and literals is known when a plan is made. A causal mask
compares two indices: on a tile whose smallest column is past its largest row it is false,
and no element has to be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.axes import made_map
from costmodel.graph import Node
from costmodel.kernel import Access
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Literal
from fuseplan.masks.interval_operations import Interval
from fuseplan.masks.intervals import MOVES, apply, unknown

_ARITHMETIC = frozenset(
    {"add", "sub", "mul", "neg", "abs", "div", "rem", "max", "min", "clamp", "sign", "square", "integer_pow"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "select_n", "convert_element_type"}
)
# One operand may decide these, whatever the other is; they are arithmetic, too.
_DECIDED = frozenset({"and", "or", "select_n"})

_KNOWN = MOVES | _ARITHMETIC | {"iota"}
MAX_DEPTH = 120
"""Operations one after another that are looked through: bounds recurse once for each."""
_NEVER = 1 << 30

_PARTS = 64  # into which a cell of undecided elements is divided, along all its axes together
_CELLS = 1 << 20
"""Cells that one division may make before the question is given up: a counted limit, so that the answer
is the same on any machine (some tenths of a second of numpy)."""


class IndexArithmetic:
    """Which values of a graph are computed from indices and literals, and their bounds.

    A logical operation counts if one of its operands does: the other may be anything.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self._depth: dict[int, int] = {}
        """How many operations lead from indices to a value."""
        self._covered: dict[object, bool] = {}
        """Answers of ``covers``, by the question with its axes numbered anew."""

    def __contains__(self, v: int) -> bool:
        # Not by recursion: a chain of sums may be as long as the graph.
        waiting = [v] if v not in self._depth else []
        while waiting:
            u = waiting[-1]
            new = [w for w in self._operands(u) if w not in self._depth]
            if u not in self._depth and new:
                waiting += new
            else:
                self._depth[u] = self._depth_of(u)
                waiting.pop()
        return self._depth[v] <= MAX_DEPTH

    def _operands(self, v: int) -> tuple[int, ...]:
        """What decides whether ``v`` is index arithmetic."""
        graph = self.lowered.graph
        producer = graph.values[v].producer
        known = producer >= 0 and graph.nodes[producer].op in _KNOWN
        return graph.nodes[producer].inputs if known else ()

    def _depth_of(self, v: int) -> int:
        graph = self.lowered.graph
        producer = graph.values[v].producer
        if producer < 0 or graph.nodes[producer].op not in _KNOWN:
            return _NEVER
        node = graph.nodes[producer]
        # Of operands that are none, a logical operation knows nothing.
        depths = [self._depth[u] for u in self._operands(v)]
        decided = node.op in _DECIDED and graph.values[v].dtype == "bool"
        if decided and any(d < _NEVER for d in depths):
            depths = [d for d in depths if d < _NEVER]
        return min(1 + max(depths, default=0), _NEVER)

    def bounds(self, access: Access, cells: Mapping[int, Interval], sizes: Sequence[int]) -> Interval:
        """Bounds of a value on cells: for each axis its first and last index, as arrays that
        broadcast together. An axis that is not among ``cells`` is whole."""
        dims = tuple(
            _merged([(cells.get(a, (0, sizes[a] - 1)), sizes[a]) for a in axes]) for axes in access.axes
        )
        return self._value(access.value, dims, {})

    def _value(self, v: int, dims: tuple[Interval, ...], known: dict[Any, Any]) -> Interval:
        """``known`` has what was found out already: an operand may be used twice. It keeps the
        intervals that it is keyed by alive."""
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
            inner = tuple(
                _merged([(own.get(d, (0, node.dims[d] - 1)), node.dims[d]) for d in merged])
                for merged in in_map
            )
            operands.append(self._value(u, inner, known))
        return apply(np, eqn, operands, exact=True)

    def covers(
        self,
        keys: Sequence[tuple[Access, float]],
        reduced: frozenset[int],
        sizes: Sequence[int],
    ) -> bool:
        """Whether along the ``reduced`` axes, at each index of all others, some element has
        every key at its value. False also where that takes too many cells to find out.

        The answer does not depend on tiles: all schedules of a group share it.
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
        self,
        keys: Sequence[tuple[Access, float]],
        axes: list[int],
        reduced: frozenset[int],
        sizes: Sequence[int],
    ) -> bool:
        """``covers``: cells are divided until each row of them has one that is decided."""
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
                return False  # single elements that index arithmetic alone does not decide
            parts = _parts(cells)
            if _n_divided(cells, parts) > _CELLS:
                return False
            cells = _divided(cells, parts)

    def _has_bare_row(
        self, keys: Sequence[tuple[Access, float]], axes: list[int], rows: list[int], sizes: Sequence[int]
    ) -> bool:
        """Whether at some index of ``rows`` the bounds over all other axes exclude a key's value. This finds
        a fully masked row of a periodic mask without dividing any cell."""
        shape = [sizes[a] for a in rows]
        count = math.prod(shape)
        if not rows or not 0 < count <= _CELLS:
            return False
        places = np.unravel_index(np.arange(count), shape)
        cells: dict[int, Interval] = {a: (at, at) for a, at in zip(rows, places, strict=True)}
        cells |= {a: (np.zeros(1, np.int64), np.full(1, sizes[a] - 1)) for a in axes if a not in cells}
        return bool(self._decided(keys, cells, sizes, count)[1].any())

    def _decided(
        self,
        keys: Sequence[tuple[Access, float]],
        cells: Mapping[int, Interval],
        sizes: Sequence[int],
        count: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each of ``count`` cells, whether all of its elements have every key at its value, and whether
        none has."""
        everywhere, nowhere = np.ones(count, bool), np.zeros(count, bool)
        for access, value in keys:
            lo, hi = self.bounds(access, cells, sizes)
            everywhere &= (lo == value) & (hi == value)
            nowhere |= (lo > value) | (hi < value)
        return everywhere, nowhere


def constant(literal: Literal) -> Interval:
    """The bounds of a literal: itself."""
    dtype: Any = literal.aval.dtype  # type: ignore[attr-defined]
    if not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        return unknown(dtype)
    value = np.float64(np.asarray(literal.val).astype(dtype))
    return value, value


def _merged(parts: Iterable[tuple[Interval, int]]) -> Interval:
    """The range of an index merged from indices, major first, each with its extent."""
    first: Any = 0
    last: Any = 0
    for (lo, hi), size in parts:
        first, last = first * size + lo, last * size + hi
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
    """Number the distinct rows of a table of indices, each column with its extent."""
    code = np.zeros(count, np.int64)
    for column, size in columns:
        code = np.unique(code * size + column, return_inverse=True)[1].reshape(-1)
    return code


def _parts(cells: Mapping[int, Interval]) -> int:
    """The number of parts into which a cell is divided along each axis."""
    return max(2, int(_PARTS ** (1 / len(cells)) + 1e-9))


def _n_divided(cells: Mapping[int, Interval], parts: int) -> int:
    """How many cells ``_divided`` makes, without making them."""
    total = 1
    for lo, hi in cells.values():
        extent = hi - lo + 1
        width = -(-extent // parts)
        total = total * -(-extent // width)
    return int(np.sum(total))


def _divided(cells: Mapping[int, Interval], parts: int) -> dict[int, Interval]:
    """Each cell divided along all its axes; cells of the same rows stay together."""
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
