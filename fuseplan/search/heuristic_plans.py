"""Make the heuristics' plans of each component: a search starts from them, and they are its answer where it
finds none that is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from costmodel.graph import Graph
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.schedule.pricing import Nodes, Price
from fuseplan.search.grouping import Decomposition, order_groups, place
from fuseplan.search.heuristics import (
    best_first_groups,
    better,
    greedy_groups,
    heuristic_groups,
    merge_further,
)
from fuseplan.search.limits import LIMITS
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, connected_parts
from fuseplan.support.digraph import cyclic_sets
from fuseplan.support.work import PEER, seconds_of

HEURISTICS = {"best_first": best_first_groups, "greedy": greedy_groups}
"""By quality of their plans, the best first, which is also the least simple."""


class HeuristicPlans:
    """The heuristic planners' plans of each distinct component, made once, on demand; or the plan ``known``,
    which is no slower."""

    def __init__(
        self,
        spaces: Sequence[Space],
        known: Sequence[Nodes] = (),
        earlier: Mapping[int, list[Mask]] | None = None,
        own_earlier: Callable[[str], Mapping[int, list[Mask]]] | None = None,
    ) -> None:
        self.spaces = spaces
        self._own_earlier = own_earlier
        """The plan that a heuristic had in the place of ``earlier``, by component."""
        self.earlier = earlier or {}
        """For each component that an earlier search had a plan of, that plan: the heuristics merge its groups
        further."""
        self._made: dict[tuple[int, str], list[Mask]] = {}
        self._best: dict[int, tuple[list[Mask], str]] = {}
        """By component, the best of the plans that there was time to make, and the name of its planner."""
        self._cut: set[tuple[int, str]] = set()
        """Those of ``_made`` that the deadline cut short."""
        self.work = [0] * len(spaces)
        """For each component, the counted work of its plans, which the caller adds to that of its search:
        whether a plan is made may depend on what an earlier planning left in the cache."""
        self.skipped: set[int] = set()
        """Components of which a plan was not made, as there was no time: more time could change the best."""
        self.given: dict[int, list[Mask]] = {}
        """The plans known before, of components that have copies."""
        group_of = {n: group for group in known for n in group}
        for part, space in enumerate(spaces if known else ()):
            if space.duplicate_rules is None:  # It is solved as it was.
                continue
            groups = _within(space, dict.fromkeys(group_of[n] for n in space.component.nodes))
            self.given[part] = better(space, groups, self.earlier.get(part, groups))

    @contextmanager
    def _counted(self, part: int) -> Iterator[None]:
        """Count what is done in ``work``, and not in that of the search."""
        work = self.spaces[part].book.work
        with work.uncounted():
            before = work.spent
            try:
                yield
            finally:
                self.work[part] += work.spent - before

    def plan(self, part: int, name: str) -> list[Mask]:
        """The plan of one heuristic for a component."""
        if (part, name) not in self._made:
            with self._counted(part):
                space, merge = self.spaces[part], HEURISTICS[name]
                ways: list[list[Mask]] = []
                if part in self.earlier:
                    ways.append(merge_further(space, self.earlier[part], merge))
                if not self.keeps_kernels(part):
                    ways.append(heuristic_groups(space, merge))
                self._made[part, name] = min(ways, key=space.total)
            if self.spaces[part].book.was_late:
                self._cut.add((part, name))
        return self._made[part, name]

    def _of_own(self, part: int, name: str) -> list[Mask]:
        """The plan of a heuristic that merges its own earlier plan of a component further."""
        assert self._own_earlier is not None, "a heuristic has an earlier plan"
        return merge_further(self.spaces[part], self._own_earlier(name)[part], HEURISTICS[name])

    def keeps_kernels(self, part: int) -> bool:
        """Whether kernels of the earlier plan of a component are merged, and none is divided: the component
        is too large for column generation."""
        return part in self.earlier and self.spaces[part].n > LIMITS.max_dense_positions

    def used(self, part: int, name: str, unproven: Note) -> Note:
        """The note ``unproven`` of a component, with the heuristic ``name`` whose plan is used."""
        partial = (part, name) in self._cut
        which = NoteKind.UNPROVEN_PARTIAL if partial else NoteKind.UNPROVEN_HEURISTIC
        return note(which, limit=unproven.limit, node=unproven.node, planner=name, **dict(unproven.figures))

    def best(self, part: int) -> tuple[list[Mask], str]:
        """The plan known before, or the best heuristic plan, and the name of its planner."""
        if part in self.given:
            return self.given[part], "the first search"
        if part not in self._best:
            with self._counted(part):
                self._best[part] = self._find_best(part)
        return self._best[part]

    def _find_best(self, part: int) -> tuple[list[Mask], str]:
        space = self.spaces[part]
        first, second = HEURISTICS
        ways = [(first, self.plan), (second, self.plan)]
        if part in self.earlier and self._own_earlier is not None:
            # With the plans that heuristics alone make, the answer is no slower than these.
            ways[1:1] = [(second, self._of_own), (first, self._of_own)]
        best: tuple[list[Mask], str] | None = None
        longest_s = 0.0
        for name, way in ways:
            if best is not None and not self._may_try(part, longest_s):
                self.skipped.add(part)
                break
            started = time.monotonic()
            groups = way(part, name)
            longest_s = max(longest_s, time.monotonic() - started)
            if best is None or space.total(groups) < space.total(best[0]):
                best = groups, name
        assert best is not None, "there is a heuristic"
        if part in self.earlier and space.total(self.earlier[part]) <= space.total(best[0]):
            return self.earlier[part], "the first search"
        return best

    def _may_try(self, part: int, longest_s: float) -> bool:
        """Whether there is time for another heuristic, after some of which the slowest took ``longest_s``."""
        space = self.spaces[part]
        if space.book.was_late:
            return False
        if part not in self.earlier:
            return True
        # Its kernels are large, and slow to price. The times of heuristics differ: half is a margin.
        least_s = max(seconds_of(PEER, space.n), 1.5 * longest_s)
        return least_s <= space.book.expires_at - time.monotonic()


def _within(space: Space, groups: Iterable[Nodes]) -> list[Mask]:
    """``groups``, those of a plan, within a component: of a group that is partly outside, the connected parts
    that are inside."""
    found: list[Mask] = []
    for group in groups:
        mask = space.mask(n for n in group if n in space.position)
        if mask.bit_count() == len(group):
            found.append(mask)
            continue
        for part in connected_parts(mask, space.neighbours):
            is_kernel = space.allows(part) and isinstance(space.price(part), Price)
            found += [part] if is_kernel else _apart(space, part)
    return found


def _apart(space: Space, mask: Mask) -> list[Mask]:
    """``mask`` as kernels of one operation each; copies of one are a kernel if all of them are in it."""
    whole = [single for single in space.singles if single & mask == single]
    return whole + [1 << i for i in bits(mask & ~sum(whole))]


def certifying_heuristic(
    graph: Graph,
    parts: Decomposition,
    starts: HeuristicPlans,
    bounds_ps: Sequence[int],
    slower: dict[int, set[str]],
) -> str:
    """The name of the simplest heuristic whose plan takes no longer than ``bounds_ps``, one for each distinct
    component; empty if there is none. It is tried on the largest components first. ``slower`` has, by
    component, the heuristics known to be slower there, and is extended."""
    if any(space.book.was_late for space in parts.spaces):
        return ""  # The heuristics' own plans are not known.
    largest_first = sorted(range(len(bounds_ps)), key=lambda part: -parts.spaces[part].n)
    for name in reversed(HEURISTICS):
        if any(name in names for names in slower.values()):
            continue
        for k in largest_first:
            if parts.spaces[k].total(starts.plan(k, name)).time_ps > bounds_ps[k]:
                slower.setdefault(k, set()).add(name)
                break
        else:
            placed = [g for part, nodes in parts.instances for g in place(starts.plan(part, name), nodes)]
            if not cyclic_sets(order_groups(graph, placed)[1]):
                return name
    return ""
