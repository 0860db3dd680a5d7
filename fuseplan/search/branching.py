"""Prove a plan of one component by cases: branch and price.

The linear program of column generation may be far below every plan, as it may use several groups that
overlap, half of each. Then two positions are chosen of which some groups in use hold both, and others one. In
each plan, one group holds both or none does. Each of these cases excludes some of the groups in use, so its
linear program is worth more. It is divided again, until its worth reaches that of the best plan known
(Barnhart, Johnson, Nemhauser, Savelsbergh and Vance, "Branch-and-price: column generation for solving huge
integer programs", 1998). A case in which the linear program uses whole groups has a plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from costmodel.set_tables import Figures
from fuseplan.plan.fusion_plan import Case
from fuseplan.search.decisions import Decisions, Pair, undecided
from fuseplan.search.heuristics import better
from fuseplan.search.limits import LIMITS
from fuseplan.search.restricted_master import ColumnSearch
from fuseplan.search.space import Mask
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import cyclic_sets, shortest_cycle


@dataclass(slots=True)
class Branched:
    """A plan and the cases that prove its bound."""

    groups: list[Mask]
    cases: tuple[Case, ...]

    @property
    def bound_ps(self) -> int:
        """Picoseconds that no plan beats."""
        return min(sum(case.prices_ps) for case in self.cases)


@dataclass(slots=True)
class _Open:
    """A case with the prices that are proven for it so far."""

    decisions: Decisions
    prices: tuple[int, ...]
    """Picoseconds for each position, such that no group of the case costs less than its positions."""


@dataclass(slots=True)
class _Outcome:
    """What column generation finds in one case."""

    worth_ps: float = 0.0
    """The value of the linear program over the groups known."""
    goal_ps: int = 0
    """What was to be proven."""
    usage: dict[Mask, float] = field(default_factory=dict)
    proven: Figures | None = None
    """Prices for each position with which no group of the case costs less than its positions, if the linear
    program is worth the goal; else None."""


def branch(search: ColumnSearch, best: list[Mask], max_work: int) -> Branched:
    """The best plan found, no worse than ``best``, with the cases that prove a bound on it, in ``max_work``
    units.

    A case is proven where it is worth all but a part (``LIMITS.slack``) of the best plan: the prices
    are lowered by so much, as in all of column generation. Then those are proven to the end that allow it.
    """
    return _Branching(search, best, max_work).run()


class _Branching:
    def __init__(self, search: ColumnSearch, best: list[Mask], max_work: int) -> None:
        self._master, self._space, self.best = search, search.space, best
        self._limit = search.spent + min(max_work, search.left)

    @property
    def _left(self) -> int:
        return self._limit - self._master.spent

    @property
    def _has_ended(self) -> bool:
        return self._left <= 0 or self._space.book.is_past(self._master.expires_at)

    @property
    def _time_ps(self) -> int:
        return self._space.total(self.best).time_ps

    def run(self) -> Branched:
        """As ``branch``."""
        root = Decisions(self._space, self._master.search.conflicts)
        cases = self._divide([_Open(root, self._master.duals)], is_exact=False)
        # The gap is small now, if no limit came: to close it is worth as much work again.
        self._limit = min(self._limit, self._master.spent + self._master.as_much_again)
        is_near = min(sum(case.prices) for case in cases) + self._space.n >= self._lowered_ps
        if is_near:
            cases = self._divide(cases, is_exact=True)
        self._master.columns.release()
        return Branched(self.best, tuple(_as_case(case) for case in cases))

    def _divide(self, cases: Sequence[_Open], is_exact: bool) -> list[_Open]:
        """Cases that prove a plan, or nearly (``_lowered_ps``), as far as no limit comes first."""
        numbers = count()
        # The case of the least worth comes first: it holds the bound down.
        waiting = [(float(sum(case.prices)), next(numbers), case) for case in cases]
        heapq.heapify(waiting)
        closed: list[_Open] = []
        while waiting and not self._has_ended:
            worth_ps, _, case = heapq.heappop(waiting)
            if sum(case.prices) >= (self._time_ps if is_exact else self._lowered_ps):
                closed.append(case)
                continue
            outcome = self._solve(case.decisions, is_exact)
            if outcome.proven is not None:
                proven = tuple(map(int, outcome.proven))
                case.prices = max(case.prices, proven, key=sum)
                if sum(proven) + self._space.n >= outcome.goal_ps:
                    closed.append(case)
                    continue
            worth_ps, before = max(worth_ps, outcome.worth_ps), self.best
            pair = self._pair(case.decisions, outcome) if outcome.usage else None
            if self.best is not before:
                # Fewer decisions prove a faster plan: those that its predecessor asked for are dropped.
                return self._divide(cases, is_exact)
            if pair is None:
                closed.append(case)
            else:
                for decisions in (case.decisions.and_together(pair), case.decisions.and_apart(pair)):
                    heapq.heappush(waiting, (worth_ps, next(numbers), _Open(decisions, case.prices)))
        return closed + [case for _, _, case in waiting]

    @property
    def _lowered_ps(self) -> float:
        """What is proven at first."""
        return self._time_ps * (1 - LIMITS.slack)

    def _solve(self, decisions: Decisions, is_exact: bool) -> _Outcome:
        """Column generation in a case. The goal is to prove the best plan, or nearly, unless ``is_exact``, if
        the linear program is not worth more.

        Groups are sought until the linear program is worth less than the goal, which its plan could be then:
        the case is to be divided; or until no group of the case costs less than its positions.
        """
        master, columns = self._master, self._master.columns
        search = master.search.under(decisions)
        max_work = self._left if is_exact else LIMITS.max_case_work
        while not self._has_ended:
            columns.obey(decisions, self._time_ps)
            self._space.book.work.spend_relaxation(len(columns.times_ps), self._space.n)
            columns.pull(None if is_exact else search.shares(columns.support()))
            exact = columns.prices(master.expires_at - self._space.book.clock())
            if exact is None:
                break
            usage, worth_ps = columns.usage, float(exact.sum())
            goal_ps = self._time_ps
            if not is_exact and worth_ps < goal_ps / (1 - LIMITS.slack):
                goal_ps = int(self._lowered_ps)
            if worth_ps < goal_ps - _ROUNDING_PS:  # Groups that are not known can only lower it.
                return _Outcome(worth_ps, goal_ps, usage)
            lowered = columns.rounded(exact * (1 - LIMITS.slack))
            if master.grow_from(search, lowered, decisions.wholes, min(self._left, max_work)):
                continue
            prices = columns.rounded(exact * min(goal_ps / worth_ps, 1.0))
            found = search.below(
                prices,
                most=LIMITS.max_new_columns,
                max_work=min(self._left, max_work),
                expires_at=master.expires_at,
            )
            if not columns.extend(found.times_ps):
                return _Outcome(worth_ps, goal_ps, usage, np.floor(prices * found.share))
        return _Outcome()

    def _pair(self, decisions: Decisions, outcome: _Outcome) -> Pair | None:
        """Two positions to decide; None if the case has a plan that is worth no more than its linear program,
        or none is found."""
        pairs = undecided(decisions, outcome.usage)
        if not pairs:
            used = list(outcome.usage)
            if sum(used) != self._space.everything or any(a & b for a in used for b in used if a != b):
                return None
            if self._space.can_run(used):
                self.best = better(self._space, self.best, used)
                return None
            pairs = dict.fromkeys(self._of_cycle(decisions, used), 1.0)
        most = max(pairs.values(), default=0.0)
        likely = [pair for pair, use in pairs.items() if use >= _LIKELY * most]
        return max(likely, key=lambda pair: (self._follows(decisions, pair), pair), default=None)

    def _follows(self, decisions: Decisions, pair: Pair) -> int:
        """An estimate of how many other pairs follow from either decision on ``pair``: the product of both
        counts."""
        below, above = self._space.below, self._space.above
        i, j = pair if below[pair[0]] >> pair[1] & 1 else pair[::-1]
        one, other = decisions.classes[i], decisions.classes[j]
        if not below[i] >> j & 1:
            return one.bit_count() * other.bit_count()
        path = below[i] & above[j] | one | other
        return (above[i] | one).bit_count() * (below[j] | other).bit_count() * path.bit_count() ** 2

    def _of_cycle(self, decisions: Decisions, groups: list[Mask]) -> list[Pair]:
        """Pairs in the groups of a cycle: where one group is entered, and where it is left. If one group
        holds each of them, all groups of the cycle are one."""
        space = self._space
        (cycle, *_) = cyclic_sets(space.followers(groups))
        order = shortest_cycle(space.successors(groups), cycle)
        inside = [groups[g] for g in order]
        pairs: list[Pair] = []
        for group in inside:
            others = sum(inside) & ~group
            left = [i for i in bits(group) if space.below[i] & others]
            entered = [i for i in bits(group) if space.above[i] & others]
            firsts = {
                tuple(sorted((_first(decisions.classes[i]), _first(decisions.classes[j]))))
                for i in left
                for j in entered
                if decisions.classes[i] != decisions.classes[j]
            }
            pairs += sorted(firsts)  # type: ignore[arg-type]
        return pairs


_ROUNDING_PS = 1.0
"""The error of a linear program's value, in picoseconds, is smaller."""

_LIKELY = 0.8
"""Only pairs whose usage is at least this part of the largest are candidates for a decision."""


def _first(mask: Mask) -> int:
    return (mask & -mask).bit_length() - 1


def _as_case(case: _Open) -> Case:
    return Case(case.decisions.together, case.decisions.apart, case.prices)
