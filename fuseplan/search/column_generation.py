"""Solve a component that has too many groups to list: column generation, with a bound at any time.

A linear program covers all positions by groups at the least cost; at first it has few groups. Its dual prices
tell which others could improve it: those that cost less than the prices of their members together, which
``group_search`` finds: most of them fast, by growing groups, and all of them by branch and bound. Where there
are none, no plan costs less than all prices together (Gilmore and Gomory, "A linear programming approach to
the cutting-stock problem", 1961). Then the groups that cost little more than their members are listed, and
the cheapest exact cover by them is the best plan of all.

The rows of the linear program ask for each position at least once: then no price is negative, and the prices
settle in fewer rounds than with equations. Of prices that are equally good, those close to what each position
adds to its group are preferred (du Merle, Villeneuve, Desrosiers and Hansen, "Stabilized column generation",
1999): they are proven with less search, as the bounds of ``costmodel.partial_floor`` add up likewise.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from costmodel.partial_floor import PartialFloor
from costmodel.set_tables import Figures
from fuseplan.schedule.pricing import Price
from fuseplan.search.column_pricing import prove, solve_listed
from fuseplan.search.group_search import GroupSearch, NearGroups
from fuseplan.search.grouping import Solved, ended_note
from fuseplan.search.heuristics import better
from fuseplan.search.limits import LIMITS
from fuseplan.search.set_partitioning import Covering
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits


def solve_by_columns(
    space: Space,
    floor: PartialFloor,
    best: list[Mask],
    expires_at: float,
    max_work: int = LIMITS.max_column_work,
) -> Solved:
    """The best partition found of ``space``, no worse than ``best``, with prices that prove its bound.

    It is optimal, or a limit came first: then the prices are those that are proven up to there.
    ``max_work`` bounds the search for groups, in units of counted work.

    Raises:
        RuntimeError: OR-Tools failed.
    """
    prices = {mask: space.price(mask) for mask in (*best, *space.singles, *space.offers)}
    columns = _Columns(space, {m: p.time_ps for m, p in prices.items() if isinstance(p, Price)}, best)
    search = _Search(GroupSearch(space, floor), columns, expires_at, max_work)
    search.grow(LIMITS.slack_divisor)
    best = _cover(search, best)  # A plan first: the proof may not end.
    converged = search.converge(LIMITS.slack_divisor, max_work - search.spent - max_work // _SHARE_OF_DIVE)
    best = _cover(search, best)
    if converged and space.total(best).time_ps > search.bound_ps:
        # The gap is small already: to close it is worth as much work again.
        converged = search.converge(None, search.as_much_again)
        best = _cover(search, best)
    is_proven = space.total(best).time_ps == search.bound_ps
    if converged and not is_proven and not space.book.is_past(expires_at):
        return _by_near_groups(search, best)
    return _solved(search, best, search.bound_ps)


_SHARE_OF_DIVE = 8
"""One in so many units is kept to look for a plan among the groups that were found."""

_USED = 1e-6
"""A group is used by a solution of the linear program if more than this of it is."""


class _Columns:
    """The linear program over the groups known, each with its time; ``plan``: some of them that cover."""

    def __init__(self, space: Space, times_ps: dict[Mask, int], plan: Sequence[Mask]) -> None:
        self._plan = list(plan)
        self._covering = Covering(space.n)
        self.times_ps: dict[Mask, int] = {}
        for mask, time_ps in times_ps.items():
            self.add(mask, time_ps)

    def add(self, mask: Mask, time_ps: int) -> None:
        """Add a group."""
        self._covering.add(bits(mask), time_ps)
        self.times_ps[mask] = time_ps

    def rounded(self, prices: Figures) -> Figures:
        """Whole picoseconds that sum up to no more than ``prices`` and nearly as much. No group known costs
        less than its members do, if that holds of ``prices``."""
        whole = np.floor(prices)
        members = np.zeros((len(self.times_ps), len(prices)), dtype=bool)
        for k, mask in enumerate(self.times_ps):
            members[k, bits(mask)] = True
        spare = np.array(list(self.times_ps.values())) - members @ whole
        left = prices.sum() - whole.sum()
        for i in np.argsort(whole - prices, kind="stable").tolist():
            own = members[:, i]
            if left >= 1 - 1e-3 and spare[own].min() >= 1:
                whole[i] += 1
                spare[own] -= 1
                left -= 1
        return whole

    def pull(self, prices: Figures) -> None:
        """Of prices that are nearly as good as the best, prefer those close to ``prices``."""
        self._covering.pull(prices.tolist())

    def support(self) -> list[Mask]:
        """The groups that the last solution uses, or those of the plan before the first."""
        if not self._covering.solution:
            return self._plan
        return [mask for mask, x in zip(self.times_ps, self._covering.solution, strict=False) if x > _USED]

    def restrict(self, chosen: Collection[Mask], covered: Mask = 0) -> None:
        """Use the groups ``chosen``, which cover the positions ``covered``, and no other group that holds one
        of these."""
        index = {mask: k for k, mask in enumerate(self.times_ps)}
        barred = [k for mask, k in index.items() if mask & covered and mask not in chosen]
        self._covering.restrict({index[mask] for mask in chosen}, set(barred))

    @property
    def solution(self) -> dict[Mask, float]:
        """How much of each group the last solution uses."""
        return dict(zip(self.times_ps, self._covering.solution, strict=False))

    def prices(self, limit_s: float) -> Figures | None:
        """The dual price of each position in picoseconds, none negative; None if it is not solved in time."""
        duals = self._covering.duals(limit_s)
        return None if duals is None else np.array(duals)


class _Search:
    """Rounds of the linear program and of the search for groups that improve it."""

    def __init__(self, search: GroupSearch, columns: _Columns, expires_at: float, max_work: int) -> None:
        self.space, self.columns = search.space, columns
        self._search, self.expires_at = search, expires_at
        self._started = search.space.book.work.spent
        self._limit = self._started + max_work
        self.duals: tuple[int, ...] = (0,) * search.space.n
        """Prices in picoseconds, with which no group costs less than its members."""

    @property
    def spent(self) -> int:
        """Units of work so far."""
        return self.space.book.work.spent - self._started

    @property
    def priced(self) -> dict[Mask, int]:
        """The groups known, and their times in picoseconds: those of the linear program, and others that were
        priced while these were sought."""
        return {**self._search.times_ps, **self.columns.times_ps}

    @property
    def as_much_again(self) -> int:
        """Units of work that one more step of a proof is worth: as many as it took to come here."""
        return max(self.spent, LIMITS.min_proof_work)

    @property
    def left(self) -> int:
        """Units of work."""
        return max(self._limit - self.space.book.work.spent, 0)

    @property
    def bound_ps(self) -> int:
        """Picoseconds that no plan beats."""
        return sum(self.duals)

    def converge(self, slack_divisor: int | None, max_work: int) -> bool:
        """Add groups until none saves more than a part of its members' prices, or nothing; whether that was
        reached, in ``max_work`` units. The first part of a search for groups, depth first, takes as long as
        all before at most; what it found by then improves the prices. Half of ``max_work`` is kept to raise
        the bound, but where ``slack_divisor`` is None: then the gap is small already."""
        most = min(max_work, self.left)
        limit = self.spent + most
        while (prices := self.grow(slack_divisor, limit)) is not None:
            left = limit - self.spent
            seeking = left if slack_divisor is None else min(left - most // 2, self.as_much_again)
            found = self._search.below(
                prices,
                most=LIMITS.max_new_columns,
                max_work=left,
                expires_at=self.expires_at,
                depth_first_work=max(seeking, 0),
            )
            proven = np.floor(prices * found.share)
            if proven.sum() > self.bound_ps:
                self.duals = tuple(map(int, proven))
            new = [mask for mask in found.times_ps if mask not in self.columns.times_ps]
            if not new:
                return found.complete
            for mask in new:
                self.columns.add(mask, found.times_ps[mask])
        return False

    def grow(self, slack_divisor: int | None, limit: int = 1 << 62) -> Figures | None:
        """Add groups that are found fast until there are none, and return the prices with which that was so,
        lowered by a part. None if a limit came first: of time, of work, or ``limit`` units of all work."""
        share = 1.0 if slack_divisor is None else 1 - 1 / slack_divisor
        while (left := min(self.left, limit - self.spent)) > 0:
            if self.space.book.is_past(self.expires_at):
                return None
            self.columns.pull(self._search.shares(self.columns.support()))
            exact = self.columns.prices(self.expires_at - self.space.book.clock())
            if exact is None:
                return None
            prices = self.columns.rounded(exact * share)
            if not self._grow(prices, min(left, LIMITS.max_growth_work)):
                return prices
        return None

    def part_overlaps(self) -> None:
        """Price what makes a partition of the groups that the linear program uses, where they overlap."""
        self._search.disjoint(sorted(self.columns.support(), key=lambda mask: mask & -mask), self.expires_at)

    def _grow(self, prices: Figures, max_work: int) -> bool:
        """Add groups that are found fast (``GroupSearch.grown``), from those that the linear program uses and
        from single positions; whether there are any."""
        alone = [1 << i for i in np.argsort(-prices, kind="stable").tolist() if prices[i] > 0]
        starts = list(dict.fromkeys([*self.columns.support(), *alone]))
        found = self._search.grown(prices, starts, max_work, self.expires_at)
        new = [mask for mask in found if mask not in self.columns.times_ps]
        for mask in new:
            self.columns.add(mask, found[mask])
        return bool(new)

    def dive(self) -> None:
        """Find a partition near the solution of the linear program: choose the group that it uses most, solve
        it again with the groups that the prices of the rest ask for, and so on (Joncour, Michel, Sadykov,
        Sverdlov and Vanderbeck, "Column generation based primal heuristics", 2010)."""
        columns, space = self.columns, self.space
        chosen: dict[Mask, None] = {}
        covered = 0
        limit = self.spent + LIMITS.max_dive_work
        while covered != space.everything and self.spent < limit and self.left > 0:
            columns.restrict(chosen, covered)
            exact = columns.prices(self.expires_at - space.book.clock())
            if exact is None:
                break
            used = {mask: x for mask, x in columns.solution.items() if x > _USED and not mask & covered}
            most = max(used.values(), default=0.0)
            for mask, x in used.items():
                if x >= min(most, 1 - _USED) and not mask & covered:
                    chosen[mask] = None
                    covered |= mask
                    if most < 1 - _USED:
                        break
            prices = exact * [not covered >> i & 1 for i in range(space.n)]
            starts = [mask for mask in used if not mask & covered]
            starts += [1 << i for i in np.argsort(-prices, kind="stable").tolist() if prices[i] > 0]
            found = (
                self._search.grown(
                    prices, list(dict.fromkeys(starts)), limit - self.spent, self.expires_at, covered
                )
                if starts
                else {}
            )
            for mask, time_ps in found.items():
                if mask not in columns.times_ps:
                    columns.add(mask, time_ps)
        columns.restrict(())

    def near(self) -> NearGroups:
        """The groups that may take little longer than the prices of their members."""
        return NearGroups(self._search, np.array(self.duals, dtype=np.float64))


def _cover(search: _Search, best: list[Mask]) -> list[Mask]:
    """The best partition by the groups known, if it can run and is better than ``best``."""
    space = search.space
    if time.monotonic() < search.expires_at:
        search.part_overlaps()
        if space.total(best).time_ps > search.bound_ps:
            search.dive()
    times_ps = search.priced
    found = prove(space, list(times_ps), dict(times_ps), {}, (), 0, best, search.expires_at)
    return better(space, best, found.groups)


def _by_near_groups(search: _Search, best: list[Mask]) -> Solved:
    """The best partition, from the groups that cost little more than their members.

    A group that costs more than its members by the gap between ``best`` and the sum of all prices is in no
    better plan. The others are listed, as far as counted work allows: first those within a small part of the
    gap, as a better plan among them narrows it.
    """
    space, duals, base_ps = search.space, search.duals, search.bound_ps
    bound_ps, near = base_ps, search.near()
    limit = search.spent + min(search.as_much_again, search.left)
    known = search.priced
    found: Solved | None = None
    for divisor in LIMITS.room_divisors:
        gap_ps = space.total(best).time_ps - base_ps
        n_listed = len(near.masks)
        is_all = near.within(
            gap_ps // divisor, LIMITS.max_near_groups, limit - search.spent, search.expires_at
        )
        if not is_all and len(near.masks) > LIMITS.max_groups:
            break  # To solve it takes long, and proves nothing.
        if found is None or len(near.masks) > n_listed:
            # Offers and the groups of the plan need not be among those that the search finds.
            worth = {mask: sum(duals[i] for i in bits(mask)) for mask in known}
            cheap = [mask for mask, time_ps in known.items() if time_ps - worth[mask] <= gap_ps]
            columns = dict.fromkeys([*best, *space.singles, *cheap, *near.masks])
            found = solve_listed(space, tuple(columns), best, search.expires_at)
            best = better(space, best, found.groups)
        time_ps = space.total(best).time_ps
        if is_all:  # A plan with another group takes longer than the prices and the room.
            bound_ps = max(bound_ps, min(found.bound_ps, base_ps + near.room_ps + 1, time_ps))
        if not (is_all and found.steady) or time_ps == bound_ps:
            break
    solved = _solved(search, best, bound_ps)
    if found is not None and not (found.steady or solved.optimal):  # The solver failed.
        solved.note, solved.steady = found.note, False
    listed = {
        mask: price.time_ps for mask in near.masks if isinstance(price := space.known_price(mask), Price)
    }
    solved.columns = {**listed, **solved.columns}
    return solved


def _solved(search: _Search, best: list[Mask], bound_ps: int) -> Solved:
    space = search.space
    is_proven = space.total(best).time_ps == bound_ps
    ended = None if is_proven else ended_note(space, space.book.is_past(search.expires_at))
    return Solved(best, bound_ps, is_proven, search.priced, search.duals, ended, lists_all=False)
