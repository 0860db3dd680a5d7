"""Recall and check the solutions of components that have been solved before.

The key (``solution_key``) is a digest of the component, of all that its prices depend on, of the planner and
of its limit of groups. On disk it has a digest of the program, too (``cache.program_digest``). The deadline
and the counted work are not in it: a solution that they may have cut short is not kept. A recalled solution
is checked all the same: its groups must partition the component, be able to run, and cost as much as they
did. Otherwise the component is solved again and the entry replaced.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from operator import index

from fuseplan.plan.notes import Note
from fuseplan.schedule.pricing import FREE, Price
from fuseplan.search import cache
from fuseplan.search.cache import Entry
from fuseplan.search.grouping import Budget, Decomposition, Solved
from fuseplan.search.space import Mask, Space
from fuseplan.support.errors import Verdict
from fuseplan.support.work import MARGIN, seconds_of


class ComponentCache:
    """Reads and writes the cached solutions of the parts (distinct components) of one planning."""

    def __init__(
        self,
        parts: Decomposition,
        planner: str,
        budget: Budget,
        expires_at: float,
        begun: Mapping[int, list[Mask]],
        starts: Collection[int],
    ) -> None:
        """``begun``: by part, the plan that its search is given to start from, if there is one;
        ``starts``: the parts of which only a plan to start from is sought."""
        self._parts = parts
        self._expires_at = expires_at
        self._solved = budget.solved if budget.solved is not None else set()
        self._cache = cache.current() if budget.deadline_s > 0 else None
        self._keys: dict[int, bytes] = {}
        if self._cache is not None:
            for part, space in enumerate(parts.spaces):
                # A component of one operation needs no search.
                if space.n == 1:
                    continue
                name = f"{planner}, to start from" if part in starts else planner
                key = solution_key(space, name, budget, begun.get(part))
                if key is not None:
                    self._keys[part] = key
        found = self._cache.recall(self._keys.values()) if self._cache is not None and self._keys else {}
        self._found = {part: found[key] for part, key in self._keys.items() if key in found}
        self._new: dict[int, Entry] = {}
        self.recalled: dict[int, Entry] = {}
        """By part, the entries that are used."""

    def recall(self, part: int) -> Entry | None:
        """The remembered solution of a part, with its note renumbered for this graph. None if there is none,
        or if what is left of the counted work could change it."""
        entry = self._found.pop(part, None)
        space = self._parts.spaces[part]
        work = space.book.work
        if entry is None or not entry.may_be_found_with(work.left):
            return None
        spent = work.spent
        problem = _misfit(space, entry)
        work.spent = spent + (0 if problem else entry.work)
        if problem:
            cache.note(f"a solution is ignored: {problem}")
            return None
        self.recalled[part] = entry
        return replace(entry, note=_moved(entry.note, space.component.nodes.__getitem__))

    def has(self, part: int) -> bool:
        """Whether there is a solution of a part that has not been recalled yet."""
        return part in self._found

    def keep(self, part: int, solved: Solved, work: int) -> None:
        """Store a component's solution and its counted work, unless the clock may have cut it short."""
        space = self._parts.spaces[part]
        in_time = time.monotonic() < self._expires_at - seconds_of(MARGIN)
        if part not in self._keys or not solved.is_repeatable or not in_time:
            return
        total = space.total(solved.groups)
        found = smallest_refusals(space)
        place = {n: i for i, n in enumerate(space.component.nodes)}
        entry = Entry(
            tuple(solved.groups),
            total.objectives,
            solved.bound_ps,
            solved.optimal,
            tuple(map(index, solved.duals)),  # integers, of NumPy or not
            max(len(solved.columns), 1),
            _moved(solved.note, place.__getitem__),
            tuple((mask, rule, verdict.reason) for rule, (mask, verdict) in found.items()),
            has_too_many_copies=solved.has_too_many_copies,
            work=work,
            left=space.book.work.left + work,
            cases=solved.cases,
        )
        if not _misfit(space, entry):
            self._new[part] = entry

    def close(self) -> None:
        """Write the new solutions, in one step; none if the pricing contradicts itself."""
        if any(space.book.fault is not None for space in self._parts.spaces):
            self._new = {}
        self._solved.update(self._keys[part] for part in self._new)
        if self._cache is not None and self._new:
            self._cache.keep({self._keys[part]: entry for part, entry in self._new.items()})

    def n_from_earlier_plans(self) -> int:
        """How many parts have a solution that this planning did not find itself."""
        return sum(self._keys[part] not in self._solved for part in self.recalled)

    def slower(self) -> dict[int, set[str]]:
        """By part, the heuristics that are remembered as slower. Only the plan's notes depend on it."""
        return {part: set(entry.slower) for part, entry in self.recalled.items() if entry.slower}

    def add_slower(self, slower: Mapping[int, set[str]]) -> None:
        """Remember which heuristics are slower."""
        known = {**self.recalled, **self._new}
        more = {
            self._keys[part]: replace(known[part], slower=tuple(sorted(names)))
            for part, names in slower.items()
            if part in known and names - set(known[part].slower)
        }
        if self._cache is not None and more:
            self._cache.keep(more)

    def refusals(self) -> tuple[Verdict, ...]:
        """For each component and rule, the smallest group that was refused when priced."""
        found: list[Verdict] = []
        for part, space in enumerate(self._parts.spaces):
            if part in self.recalled:
                refused = self.recalled[part].refusals
                found += [Verdict(rule, reason, space.nodes(mask)) for mask, rule, reason in refused]
            else:
                smallest = smallest_refusals(space).values()
                found += [replace(verdict, nodes=space.nodes(mask)) for mask, verdict in smallest]
        return tuple(found)


def smallest_refusals(space: Space) -> dict[str, tuple[Mask, Verdict]]:
    """By rule, the smallest group that was refused."""
    found: dict[str, tuple[Mask, Verdict]] = {}
    sizes: dict[str, tuple[int, tuple[int, ...]]] = {}
    for mask, verdict in space.refusals:
        nodes = space.nodes(mask)
        size = (len(nodes), nodes)
        if verdict.rule not in found or size < sizes[verdict.rule]:
            found[verdict.rule], sizes[verdict.rule] = (mask, verdict), size
    return found


def solution_key(space: Space, planner: str, budget: Budget, begun: list[Mask] | None) -> bytes | None:
    """A digest of what decides the solution of a component in one version of the program, or None if its
    prices depend on something without a textual form."""
    component = space.component
    cache_key = space.book.cache_key(component.nodes)
    if cache_key is None:
        return None
    apart = [f"{mask:x}" for mask in component.apart]
    offers = [f"{mask:x}" for mask in space.offers]
    start = [f"{mask:x}" for mask in begun or ()]
    # The floor may be a plan's only proof, and it depends on readers outside of the component.
    limits = (cache.SCHEMA, planner, budget.max_groups, space.floor_ps)
    words = (*limits, component.edges, component.siblings, apart, offers, start)
    return hashlib.blake2b(f"{words!r}\n{cache_key}".encode(), digest_size=20).digest()


def _moved(note: Note | None, number: Callable[[int], int]) -> Note | None:
    return None if note is None else note.renumbered(number)


def _misfit(space: Space, entry: Entry) -> str:
    """What is wrong with an entry; empty if nothing is."""
    covered = 0
    total = FREE
    for mask in entry.groups:
        if mask <= 0 or mask & ~space.everything or mask & covered:
            return "its groups are no partition"
        covered |= mask
        if mask not in space.offers and space.clashes(mask):
            return "it has a group that cannot be"
        price = space.price(mask)
        if not isinstance(price, Price):
            return f"it has a group that is refused: {price}"
        total += price
    if covered != space.everything:
        return "its groups do not cover the component"
    if total.objectives != entry.objectives:
        return f"its groups cost {total.objectives}, not {entry.objectives}"
    if not space.can_run(entry.groups):
        return "its groups wait for each other"
    if not 0 <= entry.bound_ps <= total.time_ps or (entry.optimal and entry.bound_ps != total.time_ps):
        return f"its bound is {entry.bound_ps}, and its time {total.time_ps}"
    n_prices = {len(entry.duals), *(len(case.prices_ps) for case in entry.cases)}
    pairs = [pair for case in entry.cases for pair in (*case.together, *case.apart)]
    if not n_prices <= {0, space.n} or not all(0 <= i < space.n for pair in pairs for i in pair):
        return "it is about other operations"
    if entry.candidates < 1:
        return "it counts other operations"
    if entry.note is not None and entry.note.node not in (None, *range(space.n)):
        return "its note is about an operation that is not there"
    if any(mask <= 0 or mask & ~space.everything for mask, _, _ in entry.refusals):
        return "it refuses what is not there"
    return ""
