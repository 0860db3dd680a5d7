"""The rounds of column generation: a linear program over the groups known, and the search for others.

"Restricted master problem" is the field's name of the linear program, as it is restricted to the groups known
(Desaulniers, Desrosiers and Solomon, "Column Generation", 2005).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from costmodel.set_tables import Figures
from fuseplan.search.decisions import UNDECIDED, Decisions
from fuseplan.search.group_search import GroupSearch, NearGroups
from fuseplan.search.limits import LIMITS
from fuseplan.search.set_partitioning import Covering
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits

_USED = 1e-6
"""A group is used by a solution of the linear program if more than this of it is."""


class Columns:
    """The linear program over the groups known, each with its time; ``plan``: some of them that cover."""

    def __init__(self, space: Space, times_ps: dict[Mask, int], plan: Sequence[Mask]) -> None:
        self._plan = list(plan)
        self._covering = Covering(space.n)
        self._barred: frozenset[int] = frozenset()
        self.times_ps: dict[Mask, int] = {}
        for mask, time_ps in times_ps.items():
            self.add(mask, time_ps)

    def add(self, mask: Mask, time_ps: int) -> None:
        """Add a group."""
        self._covering.add(bits(mask), time_ps)
        self.times_ps[mask] = time_ps

    def extend(self, times_ps: Mapping[Mask, int]) -> bool:
        """Add those groups that are not known; whether there are any."""
        new = [mask for mask in times_ps if mask not in self.times_ps]
        for mask in new:
            self.add(mask, times_ps[mask])
        return bool(new)

    def rounded(self, prices: Figures) -> Figures:
        """Whole picoseconds that sum up to no more than ``prices`` and nearly as much. No group that may be
        used costs less than its members do, if that holds of ``prices``."""
        whole = np.floor(prices)
        usable = [mask for k, mask in enumerate(self.times_ps) if k not in self._barred]
        members = np.zeros((len(usable), len(prices)), dtype=bool)
        for k, mask in enumerate(usable):
            members[k, bits(mask)] = True
        spare = np.array([self.times_ps[mask] for mask in usable]) - members @ whole
        left = prices.sum() - whole.sum()
        for i in np.argsort(whole - prices, kind="stable").tolist():
            own = members[:, i]
            if left >= 1 - 1e-3 and spare[own].min(initial=1) >= 1:
                whole[i] += 1
                spare[own] -= 1
                left -= 1
        return whole

    def pull(self, prices: Figures | None) -> None:
        """Of prices that are nearly as good as the best, prefer those close to ``prices``; None: the best."""
        self._covering.pull(None if prices is None else prices.tolist())

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

    def obey(self, decisions: Decisions, most_ps: int) -> None:
        """Use the groups that ``decisions`` allow, or none for a position for ``most_ps`` picoseconds."""
        offers = frozenset(decisions.space.offers)
        barred = [k for k, mask in enumerate(self.times_ps) if not decisions.allow(mask, mask in offers)]
        self._barred = frozenset(barred)
        self._covering.restrict((), barred)
        self._covering.allow_lacking(most_ps)

    def release(self) -> None:
        """Use all groups again."""
        self._barred = frozenset()
        self._covering.restrict((), ())
        self._covering.allow_lacking(None)

    @property
    def solution(self) -> dict[Mask, float]:
        """How much of each group the last solution uses."""
        return dict(zip(self.times_ps, self._covering.solution, strict=False))

    @property
    def usage(self) -> dict[Mask, float]:
        """As ``solution``, of the groups that it uses, but for rounding."""
        return {mask: x for mask, x in self.solution.items() if x > UNDECIDED}

    def prices(self, limit_s: float) -> Figures | None:
        """The dual price of each position in picoseconds, none negative; None if it is not solved in time."""
        duals = self._covering.duals(limit_s)
        return None if duals is None else np.array(duals)


class ColumnSearch:
    """Rounds of the linear program and of the search for groups that improve it."""

    def __init__(self, search: GroupSearch, columns: Columns, expires_at: float, max_work: int) -> None:
        self.space, self.columns = search.space, columns
        self.search, self.expires_at = search, expires_at
        self._started = search.space.book.work.spent
        self._limit = self._started + max_work
        self.duals: tuple[int, ...] = (0,) * search.space.n
        """Prices in picoseconds, with which no group costs less than its members."""
        self.worth_ps = math.inf
        """The value of the linear program over the groups known; none that was found since lowers it."""

    @property
    def spent(self) -> int:
        """Units of work so far."""
        return self.space.book.work.spent - self._started

    @property
    def priced(self) -> dict[Mask, int]:
        """The groups known, and their times in picoseconds: those of the linear program, and others that were
        priced while these were sought."""
        return {**self.search.times_ps, **self.columns.times_ps}

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

    def converge(self, slack: float, max_work: int) -> bool:
        """Add groups until none saves more than the part ``slack`` of its members' prices; whether that was
        reached, in ``max_work`` units. The first part of a search for groups, depth first, takes as long as
        all before at most; what it found by then improves the prices. Half of ``max_work`` is kept to raise
        the bound, but where ``slack`` is 0: then the gap is small already."""
        most = min(max_work, self.left)
        limit = self.spent + most
        while (prices := self.grow(slack, limit)) is not None:
            left = limit - self.spent
            seeking = min(left - most // 2, self.as_much_again) if slack else left
            found = self.search.below(
                prices,
                most=LIMITS.max_new_columns,
                max_work=left,
                expires_at=self.expires_at,
                depth_first_work=max(seeking, 0),
            )
            proven = np.floor(prices * found.share)
            if proven.sum() > self.bound_ps:
                self.duals = tuple(map(int, proven))
            if not self.columns.extend(found.times_ps):
                return found.complete
        self._solve()
        return False

    def grow(self, slack: float, limit: int = 1 << 62) -> Figures | None:
        """Add groups that are found fast until there are none, and return the prices with which that was so,
        lowered by the part ``slack``. None if a limit came first: of time, of work, or ``limit`` units of all
        work."""
        while (left := min(self.left, limit - self.spent)) > 0:
            exact = self._solve()
            if exact is None:
                return None
            prices = self.columns.rounded(exact * (1 - slack))
            if not self._grow(prices, left):
                return prices
        return None

    def _solve(self) -> Figures | None:
        """The prices of the linear program over the groups known; None if there is no time."""
        self.columns.pull(self.search.shares(self.columns.support()))
        exact = self.columns.prices(self.expires_at - self.space.book.clock())
        if exact is not None:
            self.worth_ps = float(exact.sum())
        return exact

    def part_overlaps(self) -> None:
        """Price what makes a partition of the groups that the linear program uses, where they overlap."""
        self.search.disjoint(sorted(self.columns.support(), key=lambda mask: mask & -mask), self.expires_at)

    def _grow(self, prices: Figures, max_work: int) -> bool:
        """Add groups that are found fast, from those that the linear program uses and from single positions;
        whether there are any."""
        alone = [1 << i for i in np.argsort(-prices, kind="stable").tolist() if prices[i] > 0]
        return self.grow_from(self.search, prices, alone, max_work)

    def grow_from(self, search: GroupSearch, prices: Figures, alone: Sequence[Mask], max_work: int) -> bool:
        """Add groups that ``search`` finds fast (``GroupSearch.grown``), from those that the linear program
        uses and from ``alone``; whether there are any."""
        starts = list(dict.fromkeys([*self.columns.support(), *alone]))
        most = min(max_work, LIMITS.max_growth_work)
        return self.columns.extend(search.grown(prices, starts, most, self.expires_at))

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
                self.search.grown(
                    prices, list(dict.fromkeys(starts)), limit - self.spent, self.expires_at, covered
                )
                if starts
                else {}
            )
            columns.extend(found)
        columns.restrict(())

    def near(self) -> NearGroups:
        """The groups that may take little longer than the prices of their members."""
        return NearGroups(self.search, np.array(self.duals, dtype=np.float64))
