"""Find dead tiles: tiles of a loop to which a mask leaves no contribution, so that they can be skipped.

A causal mask sets half of the scores to -inf, and exp, sums and products turn these into exact zeros. The
tiles for which that holds follow from the mask's index arithmetic when the plan is made (``index_ranges``).
That the zeros are exact depends also on the data: zero times infinity is NaN, and exp(-1e9 - m) is not zero
if m is as low. This condition is checked when the plan is run: no element of an array may be larger than a
limit that is found when the plan is made, or else the extrema of the arrays decide (``value_ranges``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.graph import DimRole
from costmodel.kernel import Access, KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.index_ranges import MAX_DEPTH, IndexArithmetic
from fuseplan.masks.intervals import Interval, unknown
from fuseplan.masks.value_ranges import MAX_CASES, Assumption, Bounds, MaskedGroup, input_bounds

_MAX_TILES = 1 << 24
"""The largest grid of tiles that is searched for dead ones."""
_MAX_VALUES = 4
"""The most values of a mask: true and false, or a few constants that it adds or multiplies by."""
_TYPICAL_BOUNDS: Interval = (np.float64(0.5), np.float64(1))
"""The assumed bounds of float arrays when the plan is made. Tiles that are not dead even then are never
skipped."""


@dataclass(frozen=True, slots=True)
class Skips:
    """The dead tiles of a pass, and the condition under which they may be skipped."""

    axes: tuple[int, ...]
    """The kernel axes, all tiled, that index ``live``; the last one is the inner loop's."""
    live: np.ndarray
    """Bool, with one element for each tile along these axes: False for a dead tile."""
    safe: Callable[[Mapping[int, Any]], Any]
    """From the arrays that the kernel reads, by value id, a traced bool scalar: whether skipping the dead
    tiles leaves the results unchanged. If it is False, all tiles have to be visited."""


def find_skips(
    lowered: Lowered,
    spec: KernelSpec,
    inner: int,
    nodes: Sequence[int],
    index: IndexArithmetic | None = None,
) -> Skips | None:
    """The tiles that a pass over axis ``inner`` can skip; None if there are none.

    ``nodes`` are evaluated on every tile of the pass. A tile is dead if every reduction among them that
    combines tiles gets only its neutral element from it. ``index`` is a cache of index arithmetic, shared by
    all schedules of ``lowered``.
    """
    if spec.axes[inner].n_tiles == 1:
        return None
    group = MaskedGroup(lowered, spec, index)
    sinks = _sinks(group, inner, nodes)
    if not sinks or _has_repeated_axis(spec) or group.steps() > MAX_DEPTH:
        return None
    table = _MaskTable(group)
    cases = table.cases()
    if not cases:
        return None

    def neutral(
        xp: Any, inputs: Callable[[int], Interval], tested: Sequence[Assumption], dead: Sequence[Assumption]
    ) -> Any:
        bounds = Bounds(group, xp, inputs, table.ranges, table.choices, dead)
        holds: Any = xp.bool_(True)
        for case, i in itertools.product(tested, sinks):
            holds = xp.logical_and(holds, bounds.neutral(i, case))
        return holds

    def find_dead() -> list[Assumption]:
        # The bound of an extremum may not follow from skipped elements. Dead cases are removed until that
        # holds: two more rounds suffice in practice, and ``safe`` checks the rest.
        typical = _typical_bounds(group)
        dead = [case for case in cases if neutral(np, typical, [case], [case])]
        for _ in range(2):
            dead = [case for case in dead if neutral(np, typical, [case], dead)]
        return dead

    # Schedules that differ in tiles alone have the same bounds, if the same masks are constant on some tile.
    masks = tuple((mask, table.ranges[mask], tuple(table.choices.get(mask, ()))) for mask in table.ranges)
    key = (spec.nodes, spec.node_axes, group.sizes, tuple(sinks), tuple(cases), masks)
    dead = group.index.remembered(key, find_dead)
    if not dead:
        return None

    def find_limits() -> dict[int, float] | None:
        return _limits(group, lambda inputs: bool(neutral(np, inputs, dead, dead)))

    def safe(arrays: Mapping[int, Any]) -> Any:
        limits = group.index.remembered((key, "limits"), find_limits)
        if limits is None:
            return neutral(jnp, lambda v: input_bounds(arrays[v]), dead, dead)
        within = [jnp.abs(arrays[v]).max(initial=0) <= limit for v, limit in limits.items()]
        return functools.reduce(jnp.logical_and, within, jnp.bool_(True))

    axes, live = table.live({cases[case] for case in dead}, inner)
    return None if live.all() or inner not in axes else Skips(axes, live, safe)


def _limits(
    group: MaskedGroup, holds: Callable[[Callable[[int], Interval]], bool]
) -> dict[int, float] | None:
    """For each float array that the group reads, a power of two: dead tiles may be skipped if no element of
    any array is NaN or larger than it in absolute value. None if the elements may not even be as large as 1.

    ``holds`` says whether dead tiles may be skipped for given bounds of the arrays. To evaluate it on the
    bounds of a call's data takes hundreds of scalar operations; these limits take one maximum for each array,
    and are sufficient, not necessary.
    """
    reads = dict.fromkeys(access.value for access in group.spec.reads)
    floats = [v for v in reads if jnp.issubdtype(group.avals[v].dtype, jnp.floating)]
    most = {v: math.frexp(float(jnp.finfo(group.avals[v].dtype).max))[1] - 1 for v in floats}

    def may_reach(exponents: Mapping[int, int]) -> bool:
        def bounds(v: int) -> Interval:
            if v not in exponents:
                return unknown(group.avals[v].dtype)
            size = np.float64(2.0 ** min(exponents[v], most[v]))
            return -size, size

        return holds(bounds)

    def highest(least: int, too_high: int, works: Callable[[int], bool]) -> int:
        """The highest exponent that works; ``least`` does, and ``too_high`` does not."""
        while too_high - least > 1:
            middle = (least + too_high) // 2
            least, too_high = (middle, too_high) if works(middle) else (least, middle)
        return least

    def reaches_alone(others: Mapping[int, int], v: int, exponent: int) -> bool:
        return may_reach({**others, v: exponent})

    if not may_reach(dict.fromkeys(floats, 0)):
        return None
    common = highest(0, max(most.values(), default=0) + 1, lambda e: may_reach(dict.fromkeys(floats, e)))
    found = {v: min(common, most[v]) for v in floats}
    for v in floats:
        if may_reach({**found, v: most[v]}):
            found[v] = most[v]
        else:
            found[v] = highest(found[v], most[v], functools.partial(reaches_alone, found, v))
    return {v: 2.0**exponent for v, exponent in found.items()}


def _sinks(group: MaskedGroup, inner: int, nodes: Sequence[int]) -> list[int] | None:
    """The reductions that combine the tiles of a pass; None if the pass also writes single tiles."""
    spec = group.spec
    tiled = {a for a, axis in enumerate(spec.axes) if axis.n_tiles > 1}
    written = {w.value for w in spec.writes if inner in w.axis_set}
    sinks = []
    for i in sorted(spec.nodes.index(n) for n in nodes):
        if inner not in {a for axes in spec.node_axes[i] for a in axes}:
            continue
        if group.axes_of(i, DimRole.REDUCED) & tiled:
            sinks.append(i)
        elif not written.isdisjoint(group.nodes[i].outputs):
            return None
    return sinks


def _has_repeated_axis(spec: KernelSpec) -> bool:
    """Whether some node has an axis twice, as for a diagonal."""
    flat = ([a for axes in own for a in axes] for own in spec.node_axes)
    return any(len(set(axes)) < len(axes) for axes in flat)


def _typical_bounds(group: MaskedGroup) -> Callable[[int], Interval]:
    def bounds(v: int) -> Interval:
        dtype = group.avals[v].dtype
        if jnp.issubdtype(dtype, jnp.floating):
            return _TYPICAL_BOUNDS
        return unknown(jnp.bool_ if jnp.issubdtype(dtype, jnp.integer) else dtype)

    return bounds


class _MaskTable:
    """The masks of a group on the grid of tiles, with the tiles on which each mask is constant."""

    def __init__(self, group: MaskedGroup) -> None:
        self.group = group
        axes = group.spec.axes
        self.tiled = [a for a, axis in enumerate(axes) if axis.n_tiles > 1]
        cells: dict[int, Interval] = {}
        for k, a in enumerate(self.tiled):
            axis = axes[a]
            start = np.arange(axis.n_tiles) * axis.tile
            if group.spec.capabilities.loop_nest:  # the last tile is shifted back to end with the axis
                start = np.minimum(start, axis.size - axis.tile)
            start = start.reshape([-1 if j == k else 1 for j in range(len(self.tiled))])
            cells[a] = (start, np.minimum(start + axis.tile, axis.size) - 1)
        self.ranges: dict[Access, Interval] = {}
        """Bounds of each mask over all tiles."""
        self.constant: dict[Access, tuple[np.ndarray, list[float]]] = {}
        """For each mask that is constant on some tile, its value on each tile (NaN if it is not constant
        there), and its distinct values."""
        self.choices: dict[Access, list[float]] = {}
        """The values of these masks, with the extreme ones."""
        for mask in group.masks():
            lo, hi = (np.asarray(b, np.float64) for b in group.index.bounds(mask, cells, group.sizes))
            self.ranges[mask] = (lo.min(), hi.max())
            values = np.where(lo == hi, lo, np.nan)
            distinct = np.unique(values[~np.isnan(values)])
            if lo.size > 1 and 0 < len(distinct) <= _MAX_VALUES and lo.min() < hi.max():
                self.constant[mask] = (values, distinct.tolist())
                self.choices[mask] = sorted({*distinct.tolist(), *self.ranges[mask]})
        self._code: np.ndarray = np.zeros((1,) * len(self.tiled), np.int64)

    def cases(self) -> dict[Assumption, int] | None:
        """The combinations of masks and values that are constant on some tile, each with its code in the
        table; None if there are too many."""
        known = list(self.constant.items())
        if np.prod([float(n) for n in np.broadcast_shapes(*(v.shape for _, (v, _) in known))]) > _MAX_TILES:
            return None
        code = self._code
        for _, (values, distinct) in known:
            digit = np.searchsorted(distinct, values)  # NaN sorts last
            code = code * (len(distinct) + 1) + digit
        self._code = code
        found: dict[Assumption, int] = {}
        for number in np.unique(code).tolist():
            rest, case = number, []
            for mask, (_, distinct) in reversed(known):
                rest, digit = divmod(rest, len(distinct) + 1)
                if digit < len(distinct):
                    case.append((mask, distinct[digit]))
            if case:
                found[tuple(case)] = number
        return found if len(found) <= MAX_CASES else None

    def live(self, dead: set[int], inner: int) -> tuple[tuple[int, ...], np.ndarray]:
        """The axes that liveness depends on, ``inner`` last, and the table of live tiles along them."""
        live = ~np.isin(self._code, list(dead))
        kept = [k for k, n in enumerate(live.shape) if n > 1 and (live.any(k) != live.all(k)).any()]
        order = sorted(kept, key=lambda k: (self.tiled[k] == inner, k))
        rest = [k for k in range(live.ndim) if k not in kept]
        table = live.transpose(rest + order).reshape([-1, *(live.shape[k] for k in order)])[0]
        return tuple(self.tiled[k] for k in order), table
