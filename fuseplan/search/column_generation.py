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

from costmodel.partial_floor import PartialFloor
from fuseplan.plan.fusion_plan import Case
from fuseplan.schedule.pricing import Price
from fuseplan.search.branching import branch
from fuseplan.search.column_pricing import prove, solve_listed
from fuseplan.search.group_search import GroupSearch
from fuseplan.search.grouping import Solved, ended_note
from fuseplan.search.heuristics import better
from fuseplan.search.limits import LIMITS
from fuseplan.search.restricted_master import Columns, ColumnSearch
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits


def solve_by_columns(
    space: Space,
    floor: PartialFloor,
    best: list[Mask],
    expires_at: float,
    max_work: int = LIMITS.max_column_work,
    is_start: bool = False,
) -> Solved:
    """The best partition found of ``space``, no worse than ``best``, with what proves its bound: prices, or
    prices for each of several cases.

    It is optimal, or a limit came first: then the bound is what is proven up to there. ``max_work`` bounds
    the search for groups, in units of counted work. ``is_start``: a plan alone is sought.

    Raises:
        RuntimeError: OR-Tools failed.
    """
    known = {mask: space.price(mask) for mask in (*best, *space.singles, *space.offers)}
    columns = Columns(space, {m: p.time_ps for m, p in known.items() if isinstance(p, Price)}, best)
    search = ColumnSearch(GroupSearch(space, floor), columns, expires_at, max_work)
    kept = max_work // _SHARE_OF_DIVE

    def is_far() -> bool:
        """Whether the linear program is worth so much less than the plan that no prices prove it."""
        return _is_far(space, best, search.worth_ps)

    search.grow(LIMITS.slack)
    best = _cover(search, best, dives=is_start or not is_far())  # A plan first: the proof may not end.
    most = max_work - search.spent - kept
    by_cases = is_far() and not is_start
    converged = search.converge(LIMITS.slack, most // _SHARE_OF_ROOT if by_cases else most)
    best = _cover(search, best, dives=is_start or not is_far())
    if is_start:
        return _solved(search, best, ())
    if not (converged or is_far()):
        converged = search.converge(LIMITS.slack, search.left - kept)
        best = _cover(search, best)
    cases: tuple[Case, ...] = ()
    if is_far():
        branched = branch(search, best, search.left - kept)
        best, cases = branched.groups, branched.cases
        best = _cover(search, best, dives=_is_far(space, best, branched.bound_ps))
    solved = _solved(search, best, cases)
    if converged and not solved.optimal and not is_far():
        # The gap is small already: to close it is worth as much work again.
        converged = search.converge(0.0, search.as_much_again)
        best = _cover(search, best)
        solved = _solved(search, best, cases)
    if (
        converged
        and not solved.optimal
        and _is_far(space, best, search.bound_ps) == _is_far(space, best, solved.bound_ps)
        and not space.book.is_past(expires_at)
    ):
        return _by_near_groups(search, solved)
    return solved


_SHARE_OF_DIVE = 8
"""One in so many units is kept to look for a plan among the groups that were found."""

_SHARE_OF_ROOT = 4
"""One in so many units may be spent on prices that prove less than cases do."""


def _is_far(space: Space, plan: list[Mask], bound_ps: float) -> bool:
    """Whether a plan takes longer than a bound by more than the part by which prices are lowered."""
    return space.total(plan).time_ps * (1 - LIMITS.slack) > bound_ps + space.n


def _cover(search: ColumnSearch, best: list[Mask], dives: bool = True) -> list[Mask]:
    """The best partition by the groups known, if it can run and is better than ``best``. ``dives``: others
    are found near the solution of the linear program."""
    space = search.space
    if time.monotonic() < search.expires_at:
        search.part_overlaps()
        if dives and space.total(best).time_ps > search.bound_ps:
            search.dive()
    times_ps = search.priced
    found = prove(space, list(times_ps), dict(times_ps), {}, (), 0, best, search.expires_at)
    return better(space, best, found.groups)


def _by_near_groups(search: ColumnSearch, known: Solved) -> Solved:
    """The best partition, from the groups that cost little more than their members.

    A group that costs more than its members by the gap between ``best`` and the sum of all prices is in no
    better plan. The others are listed, as far as counted work allows: first those within a small part of the
    gap, as a better plan among them narrows it.
    """
    space, duals, base_ps, best = search.space, search.duals, search.bound_ps, known.groups
    bound_ps, near = base_ps, search.near()
    limit = search.spent + min(search.as_much_again, search.left)
    priced = search.priced
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
            worth = {mask: sum(duals[i] for i in bits(mask)) for mask in priced}
            cheap = [mask for mask, time_ps in priced.items() if time_ps - worth[mask] <= gap_ps]
            columns = dict.fromkeys([*best, *space.singles, *cheap, *near.masks])
            found = solve_listed(space, tuple(columns), best, search.expires_at)
            best = better(space, best, found.groups)
        time_ps = space.total(best).time_ps
        if is_all:  # A plan with another group takes longer than the prices and the room.
            bound_ps = max(bound_ps, min(found.bound_ps, base_ps + near.room_ps + 1, time_ps))
        if not (is_all and found.is_repeatable) or time_ps == bound_ps:
            break
    solved = _solved(search, best, known.cases, bound_ps)
    if found is not None and not (found.is_repeatable or solved.optimal):  # The solver failed.
        solved.note, solved.is_repeatable = found.note, False
    listed = {
        mask: price.time_ps for mask in near.masks if isinstance(price := space.known_price(mask), Price)
    }
    solved.columns = {**listed, **solved.columns}
    return solved


def _solved(search: ColumnSearch, best: list[Mask], cases: tuple[Case, ...], bound_ps: int = 0) -> Solved:
    """``best`` with the highest bound: ``bound_ps``, that of the prices, or that of ``cases``."""
    space = search.space
    bound_ps = max(bound_ps, search.bound_ps)
    by_cases_ps = min((sum(case.prices_ps) for case in cases), default=0)
    if by_cases_ps <= bound_ps:
        cases = ()
    bound_ps = min(max(bound_ps, by_cases_ps), space.total(best).time_ps)
    is_proven = space.total(best).time_ps == bound_ps
    ended = None if is_proven else ended_note(space, space.book.is_past(search.expires_at))
    return Solved(best, bound_ps, is_proven, search.priced, search.duals, ended, lists_all=False, cases=cases)
