"""Solve one distinct component: which groups are searched, and what stands where time is short."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fuseplan.absorb import absorb_moves, absorb_renames, contract
from fuseplan.candidates import enumerate_groups
from fuseplan.planners import best_first, greedy
from fuseplan.planners.base import Budget, Stopwatch, heuristic_groups, ideal
from fuseplan.planners.search import better, heuristic_plan, search
from fuseplan.planners.solved import FAILURES, LATE, UNUSABLE, Solved, deadline_note, failure, where
from fuseplan.pricing import Nodes, Price
from fuseplan.space import Mask, Space
from fuseplan.twins import runs_of_twins

_SMALL = 128
"""Positions of a component whose heuristic plans are made only where the relaxation does not lead
to a plan: for more they can take longer than a deadline may be overrun."""

_MANY_GROUPS = 4_000
"""Groups of a component after which interchangeable operations are told apart no more: a training
step's largest has half as many. What is proven so cannot be verified without the solver."""

HEURISTICS = {"best_first": best_first, "greedy": greedy}
"""The better first, the simpler last."""


class Starts:
    """The plans of the heuristic planners for each distinct component, as they would make them;
    made when they are asked for, once."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self.spaces = spaces
        self._made: dict[tuple[int, str], list[Mask]] = {}

    def plan(self, kind: int, name: str) -> list[Mask]:
        """That of one heuristic for a component."""
        if (kind, name) not in self._made:
            self._made[kind, name] = heuristic_groups(self.spaces[kind], HEURISTICS[name].merge)
        return self._made[kind, name]

    def known(self, kind: int) -> list[Mask] | None:
        """The best of them, if they have been made."""
        return self.best(kind)[0] if all((kind, name) in self._made for name in HEURISTICS) else None

    def best(self, kind: int) -> tuple[list[Mask], str]:
        """The best of them, and whose it is."""
        name = min(HEURISTICS, key=lambda name: self.spaces[kind].total(self.plan(kind, name)).objectives)
        return self.plan(kind, name), name


def solve_component(kind: int, starts: Starts, budget: Budget, expires_at: float, watch: Stopwatch) -> Solved:
    """Solve a component without what belongs to its readers anyway, and put that back."""
    space = starts.spaces[kind]
    if space.n == 1:
        time_ps = space.total([1]).time_ps
        return Solved([1], time_ps, True, duals=(time_ps,))
    floor_ps = space.floor(space.everything)
    whole = ideal(space)
    if whole is not None:
        return Solved(whole, floor_ps, True)
    if time.monotonic() >= expires_at:
        known, name = starts.best(kind)
        note = f"{deadline_note(space)}: {name}'s plan stands there" if budget.deadline_s > 0 else ""
        return Solved(known, floor_ps, False, note=note)
    small = (absorb_moves if space.book.absorbs_moves else absorb_renames)(space)
    given = starts.known(kind)
    folded = _folded(space, given, small) if given is not None else None
    solved = _solve_space(small, folded, budget, expires_at, watch)
    if small is not space:
        duals = [0] * space.n
        for k, dual in enumerate(solved.duals):
            duals[space.position[_main(space, small.members[k])]] = dual
        solved.groups = [space.mask(small.nodes(mask)) for mask in solved.groups]
        solved.columns = {space.mask(small.nodes(mask)): cost for mask, cost in solved.columns.items()}
        solved.duals = tuple(duals) if solved.duals else ()
    if not solved.optimal:
        # What is not proven is at least no slower than any heuristic's plan.
        known, name = starts.best(kind)
        solved.groups = better(space, solved.groups, known)
        if solved.groups == known and solved.note.startswith(LATE):
            solved.note += f": {name}'s plan stands there"
        if solved.bound_ps == space.total(solved.groups).time_ps:
            # However it was found, nothing is faster.
            solved.optimal, solved.note, solved.columns, solved.duals = True, "", {}, ()
    return solved


def _main(space: Space, members: Nodes) -> int:
    """Of nodes that share a kernel for nothing, the one that the kernel is for: whoever has the
    others only, or it only, then pays no more than their prices (``fuseplan.verify`` asks)."""
    if space.book.absorbs_moves:
        return members[-1]
    return next((n for n in members if not space.book.renames(n)), members[0])


def _folded(space: Space, groups: list[Mask], small: Space) -> list[Mask] | None:
    """``groups`` as groups of ``small``, unless they cut what is one position there."""
    if small is space:
        return groups
    folded = [small.mask(space.nodes(mask)) for mask in groups]
    return folded if sum(mask.bit_count() for mask in folded) == small.n else None


def _solve_space(
    space: Space, known: list[Mask] | None, budget: Budget, expires_at: float, watch: Stopwatch
) -> Solved:
    singles = space.singles
    if space.n == 1:
        time_ps = space.total(singles).time_ps
        return Solved(singles, time_ps, True, duals=(time_ps,))
    floor_ps = space.floor(space.everything)
    # A small component is rarely in need of a heuristic plan: the relaxation finds the best.
    best = known or (heuristic_plan(space) if space.n > _SMALL else singles)
    watch.lap("heuristics")
    offers = [mask for mask in space.offers if isinstance(space.price(mask), Price)]
    columns, complete, by_runs, note = _candidates(space, best + singles + offers, budget, expires_at)
    watch.lap("enumerate")
    if not complete:
        best = better(space, best, heuristic_plan(space))
        columns = tuple(dict.fromkeys([*best, *columns]))
    try:
        result = search(space, columns, best, expires_at)
    except FAILURES as error:
        result = Solved(best, floor_ps, False, note=failure(error), steady=False)
    watch.lap("solve")
    if by_runs:  # Prices that hold for these groups need not hold for others.
        result.by_runs, result.duals = True, ()
    if not complete:
        result.optimal = False
        result.bound_ps = floor_ps
        result.duals = ()
        result.note = result.note if result.note.startswith(UNUSABLE) else note
    result.bound_ps = max(result.bound_ps, floor_ps)
    if result.bound_ps == space.total(result.groups).time_ps:
        result.optimal, result.note = True, ""
        if not complete:  # not what a joint search may rely on
            result.columns, result.duals = {}, ()
    return result


def _candidates(
    space: Space, known: Sequence[Mask], budget: Budget, expires_at: float
) -> tuple[tuple[Mask, ...], bool, bool, str]:
    """The legal groups; if they are many, intervals of twins only; if still too many, those of the
    contracted component; whether no plan is lost; whether twins are; and what to tell the user."""
    runs = runs_of_twins(space)
    plain = min(budget.max_groups, _MANY_GROUPS) if runs else budget.max_groups
    found = enumerate_groups(space, plain, expires_at, time.monotonic)
    by_runs = bool(runs) and not found.complete and time.monotonic() < expires_at
    if by_runs:
        found = enumerate_groups(space, budget.max_groups, expires_at, time.monotonic, runs)
    if found.complete:
        return tuple(dict.fromkeys([*known, *found.groups])), True, by_runs, ""
    if time.monotonic() >= expires_at:
        return tuple(dict.fromkeys(known)), False, False, deadline_note(space)
    smaller = contract(space)
    some = enumerate_groups(smaller, budget.max_groups, expires_at, time.monotonic)
    groups = [space.mask(smaller.nodes(mask)) for mask in some.groups]
    too_many = (
        f"{space.n} operations from {where(space)} on have more than {budget.max_groups:,} legal groups"
    )
    searched = (
        "only those that keep single-use producers with their consumer were searched"
        if some.complete
        else "only some were searched"
    )
    return tuple(dict.fromkeys([*known, *groups])), False, False, f"{too_many}: {searched}"
