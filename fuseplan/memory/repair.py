"""Fit a plan under a limit where it exceeds it: a few kernels there are grouped and ordered anew.

All other kernels keep their nodes and their place, so each part is a small problem that is solved
exactly (``fuseplan.memory.region``): a large neighbourhood search.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.graph import Graph
from costmodel.memory import is_bitcast
from fuseplan.memory.liveness import lives_of, profile
from fuseplan.memory.order_dp import Steps, TooLargeError, Way
from fuseplan.memory.region import Region
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import PriceBook
from fuseplan.support.work import Work

_MAX_ROUNDS = 40
"""Parts that are planned anew."""

_MAX_NODES, _MAX_STEPS = 24, 400_000
"""Of one part: a fifth of a second."""

Kernels = tuple[Kernel, ...]


def repair(graph: Graph, book: PriceBook, kernels: Kernels, max_peak_bytes: int, work: Work) -> Kernels:
    """``kernels`` with less memory in use where it is more than ``max_peak_bytes``, as far as that
    succeeds: at the least loss of time where the limit can be kept, else as low as can be. The
    peak does not rise."""
    for _ in range(_MAX_ROUNDS):
        needs = _needs(graph, kernels)
        worst = max(needs, default=0)
        if worst <= max_peak_bytes or work.is_over:
            break
        better = _lower(graph, book, kernels, needs, max_peak_bytes, work)
        if better is None:
            break
        kernels = better
    return kernels


def _lower(
    graph: Graph, book: PriceBook, kernels: Kernels, needs: list[int], limit: int, work: Work
) -> Kernels | None:
    """Plan a part around the highest step anew, the more the better, until that helps."""
    worst = max(needs)
    top = needs.index(worst)
    found: Kernels | None = None
    for start, stop in _parts(kernels, top):
        region = part(graph, book, kernels, start, stop, _MAX_STEPS, work)
        if region is None:
            continue
        try:
            way: Way | None = region.fastest(limit)
            fits = way is not None
            way = way or region.lowest()
        except TooLargeError:
            continue
        new = (*kernels[:start], *way.kernels, *kernels[stop:])
        after = _needs(graph, new)
        # Whether a bitcast is a kernel of its own shows in what is alive outside as well.
        inside = max(after[start : start + len(way.kernels)])
        outside = max([*after[:start], *after[start + len(way.kernels) :]], default=0)
        before = max([*needs[:start], *needs[stop:]], default=0)
        if outside > max(before, limit):
            continue
        if fits and inside <= limit:
            return new
        if inside < worst and found is None:
            found = new
    return found


def _parts(kernels: Kernels, top: int) -> list[tuple[int, int]]:
    """Stretches of kernels around ``top``, the small ones first."""
    found: list[tuple[int, int]] = []
    for width in (1, 2, 3, 4, 6, 8, 11, 15):
        for start in range(top - width + 1, top + 1):
            stop = start + width
            if start < 0 or stop > len(kernels):
                continue
            centred = width <= 2 or start in (top - width + 1, top - width // 2, top)
            if centred and sum(len(k.spec.nodes) for k in kernels[start:stop]) <= _MAX_NODES:
                found.append((start, stop))
    return found


def part(
    graph: Graph,
    book: PriceBook,
    kernels: Sequence[Kernel],
    start: int,
    stop: int,
    max_steps: int,
    work: Work,
) -> Region | None:
    """The nodes of ``kernels[start:stop]`` as a region; None if they have too many groups."""
    outside = (*kernels[:start], *kernels[stop:])
    try:
        return Region(
            graph,
            book,
            tuple(sorted(n for k in kernels[start:stop] for n in k.spec.nodes)),
            Steps(max_steps, work),
            earlier={n for k in kernels[:start] for n in k.spec.nodes},
            renamed={n for k in outside if is_bitcast(graph, k.spec) for n in k.spec.nodes},
            max_renamed=4,
        )
    except TooLargeError:
        return None


def _needs(graph: Graph, kernels: Sequence[Kernel]) -> list[int]:
    return profile(lives_of(graph, kernels), range(len(kernels)))
