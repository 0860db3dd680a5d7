"""Skipping: tiles of a loop to which a mask leaves nothing.

A causal mask sets half of the scores to -inf, and exp, sums and products turn these into
exact zeros. Which tiles that holds for follows from the mask's index arithmetic when the
plan is made (``masks``); that the zeros are exact depends on the data, too: zero times an
infinity is not zero, and exp(-1e9 - m) is none if m is as low. What the data must satisfy
is checked when the plan is run, from the extrema of the arrays read (``bounds``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.graph import DimRole
from costmodel.kernel import Access, KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.index_ranges import MAX_DEPTH, IndexArithmetic
from fuseplan.masks.interval_operations import Interval
from fuseplan.masks.intervals import unknown
from fuseplan.masks.masked_group import Assumption, MaskedGroup
from fuseplan.masks.value_ranges import Bounds, input_bounds

_MAX_TILES = 1 << 24
_MAX_CASES = 64
_MAX_VALUES = 4
"""Of a mask: true and false, or the few constants that it adds or multiplies by."""
_ORDINARY: Interval = (np.float64(0.5), np.float64(1))
"""What arrays are taken to hold when the plan is made: tiles that would not be skipped even
then never are."""


@dataclass(frozen=True, slots=True)
class Skips:
    """Tiles that need not be walked."""

    axes: tuple[int, ...]
    """The kernel axes, all tiled, that index ``live``; the inner loop's is the last."""
    live: np.ndarray
    """Bool, as many tiles as each of these axes has: False where a tile adds nothing."""
    safe: Callable[[Mapping[int, Any]], Any]
    """Of the arrays that the kernel reads, by value id: a traced bool scalar, whether dropping
    the other tiles changes nothing. If False, all have to be walked."""


def find_skips(
    lowered: Lowered,
    spec: KernelSpec,
    inner: int,
    nodes: Sequence[int],
    index: IndexArithmetic | None = None,
) -> Skips | None:
    """The tiles that a pass over axis ``inner`` can skip; None if there are none. ``index`` remembers what
    other schedules have found out about the masks of ``lowered``.

    ``nodes`` are evaluated on every tile of the pass. A tile can be skipped if every
    reduction among them that combines tiles gets nothing but its neutral element from it.
    """
    if spec.axes[inner].n_tiles == 1:
        return None
    group = MaskedGroup(lowered, spec, index)
    sinks = _sinks(group, inner, nodes)
    if not sinks or _diagonal(spec) or group.steps() > MAX_DEPTH:
        return None
    table = _Table(group)
    cases = table.cases()
    if cases is None or not cases:
        return None

    def neutral(
        xp: Any, inputs: Callable[[int], Interval], case: Assumption, dead: Sequence[Assumption]
    ) -> Any:
        bounds = Bounds(group, xp, inputs, table.ranges, table.choices, dead)
        holds: Any = True
        for i in sinks:
            holds = bounds.neutral(i, case) & holds
        return holds

    # An extremum may not rest on elements that are themselves skipped: with what is skipped
    # shrinking, two more rounds settle it.
    dead = [case for case in cases if neutral(np, _ordinary(group), case, [case])]
    for _ in range(2):
        dead = [case for case in dead if neutral(np, _ordinary(group), case, dead)]
    if not dead:
        return None

    def safe(arrays: Mapping[int, Any]) -> Any:
        bounds = Bounds(group, jnp, lambda v: input_bounds(arrays[v]), table.ranges, table.choices, dead)
        holds: Any = jnp.bool_(True)
        for case in dead:
            for i in sinks:
                holds = jnp.logical_and(holds, bounds.neutral(i, case))
        return holds

    axes, live = table.live({cases[case] for case in dead}, inner)
    return None if live.all() or inner not in axes else Skips(axes, live, safe)


def _sinks(group: MaskedGroup, inner: int, nodes: Sequence[int]) -> list[int] | None:
    """The reductions that combine tiles of a pass; None if it also writes tiles as they are."""
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


def _diagonal(spec: KernelSpec) -> bool:
    """Whether some node has an axis twice: an element's axes then do not say where it is."""
    flat = ([a for axes in own for a in axes] for own in spec.node_axes)
    return any(len(set(axes)) < len(axes) for axes in flat)


def _ordinary(group: MaskedGroup) -> Callable[[int], Interval]:
    def bounds(v: int) -> Interval:
        dtype = group.avals[v].dtype
        if jnp.issubdtype(dtype, jnp.floating):
            return _ORDINARY
        return unknown(jnp.bool_ if jnp.issubdtype(dtype, jnp.integer) else dtype)

    return bounds


class _Table:
    """The masks of a group on the grid of tiles: where each of them is constant."""

    def __init__(self, group: MaskedGroup) -> None:
        self.group = group
        axes = group.spec.axes
        self.tiled = [a for a, axis in enumerate(axes) if axis.n_tiles > 1]
        cells: dict[int, Interval] = {}
        for k, a in enumerate(self.tiled):
            axis = axes[a]
            start = np.arange(axis.n_tiles) * axis.tile
            if group.spec.capabilities.loop_nest:  # The last tile ends where the axis does.
                start = np.minimum(start, axis.size - axis.tile)
            start = start.reshape([-1 if j == k else 1 for j in range(len(self.tiled))])
            cells[a] = (start, np.minimum(start + axis.tile, axis.size) - 1)
        self.ranges: dict[Access, Interval] = {}
        """Bounds of each mask over all tiles."""
        self.constant: dict[Access, tuple[np.ndarray, list[float]]] = {}
        """Of each mask that is: on which tiles (its values, NaN elsewhere), and the values."""
        self.choices: dict[Access, list[float]] = {}
        """Values of these masks: those, and the extreme ones."""
        for mask in group.masks():
            lo, hi = (np.asarray(b, np.float64) for b in group.index.bounds(mask, cells, group.sizes))
            self.ranges[mask] = (lo.min(), hi.max())
            values = np.where(lo == hi, lo, np.nan)
            distinct = np.unique(values[~np.isnan(values)])
            if (
                lo.size > 1
                and 0 < len(distinct) <= _MAX_VALUES
                and self.ranges[mask][0] < self.ranges[mask][1]
            ):
                self.constant[mask] = (values, distinct.tolist())
                self.choices[mask] = sorted({*distinct.tolist(), *self.ranges[mask]})
        self._code: np.ndarray = np.zeros((1,) * len(self.tiled), np.int64)

    def cases(self) -> dict[Assumption, int] | None:
        """What is constant on some tile: masks and their values, each with its number. None if
        there are too many."""
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
        return found if len(found) <= _MAX_CASES else None

    def live(self, dead: set[int], inner: int) -> tuple[tuple[int, ...], np.ndarray]:
        """The axes that decide which tiles are alive, ``inner`` last; and which are."""
        live = ~np.isin(self._code, list(dead))
        kept = []
        for k in range(live.ndim):
            if live.shape[k] > 1 and (live.any(k) != live.all(k)).any():
                kept.append(k)
        order = sorted(kept, key=lambda k: (self.tiled[k] == inner, k))
        rest = [k for k in range(live.ndim) if k not in kept]
        table = live.transpose(rest + order).reshape([-1, *(live.shape[k] for k in order)])[0]
        return tuple(self.tiled[k] for k in order), table
