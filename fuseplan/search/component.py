"""Solve one distinct component by all of its groups, by those that column generation finds, or by windows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from costmodel.partial_floor import PartialFloor
from costmodel.set_tables import as_sets
from fuseplan.plan.fusion_plan import Case, Part, Proof
from fuseplan.plan.notes import NoteKind
from fuseplan.schedule.pricing import Nodes, Price
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.column_generation import solve_by_columns
from fuseplan.search.column_pricing import solve_listed
from fuseplan.search.grouping import FAILURES, Budget, Decomposition, Solved, ended_note, failure, part_note
from fuseplan.search.heuristic_plans import HeuristicPlans
from fuseplan.search.heuristics import better, heuristic_plan
from fuseplan.search.limits import LIMITS
from fuseplan.search.presolve import absorb_moves, absorb_renames
from fuseplan.search.space import Mask, Space
from fuseplan.search.windows import improve
from fuseplan.support.work import Limit, StageTimer

_SHARE_OF_COLUMNS = 0.75
"""Column generation may do this part of the counted work that is left; the rest is for windows."""


def solve_component(
    part: int,
    starts: HeuristicPlans,
    budget: Budget,
    expires_at: float,
    watch: StageTimer,
    is_start: bool = False,
) -> Solved:
    """Solve a component after presolve, and translate the solution back.

    ``is_start``: the plan is one to start from. Column generation may do little work, and no windows are
    tried."""
    space = starts.spaces[part]
    if space.n == 1:
        time_ps = space.total([1]).time_ps
        return Solved([1], time_ps, True, duals=(time_ps,))
    if space.is_ideal:
        return Solved([space.everything], space.floor_ps, True)
    if space.book.is_past(expires_at):
        known, name = starts.best(part)
        told = starts.used(part, name, ended_note(space)) if budget.deadline_s > 0 else None
        return Solved(known, space.floor_ps, False, note=told)
    if starts.keeps_kernels(part):
        groups = starts.best(part)[0]
        watch.lap("heuristics")
        is_best = space.total(groups).time_ps == space.floor_ps
        told = None if is_best else part_note(NoteKind.UNPROVEN, space, Limit.WORK)
        return Solved(groups, space.floor_ps, is_best, note=told)
    small = (absorb_moves if space.book.absorbs_moves else absorb_renames)(space)
    start = _folded(space, starts.best(part)[0], small) or heuristic_plan(small)
    watch.lap("heuristics")
    solved = _solve_space(small, start, budget, expires_at, watch, is_start)
    if small is not space:
        main = [space.position[_main(space, members)] for members in small.members]
        solved.groups = [space.mask(small.nodes(mask)) for mask in solved.groups]
        solved.columns = {space.mask(small.nodes(mask)): cost for mask, cost in solved.columns.items()}
        solved.duals = _at(main, solved.duals, space.n) if solved.duals else ()
        solved.cases = tuple(
            Case(_pairs(main, c.together), _pairs(main, c.apart), _at(main, c.prices_ps, space.n))
            for c in solved.cases
        )
    if not solved.optimal:
        # A plan that is not proven is no slower than the heuristics' plans, as far as these were made.
        known, name = starts.best(part)
        solved.groups = better(space, solved.groups, known)
        if solved.groups == known and solved.note is not None and solved.note.kind is NoteKind.UNPROVEN:
            solved.note = starts.used(part, name, solved.note)
        if solved.bound_ps == space.total(solved.groups).time_ps:
            # The plan reaches the bound, however it was found.
            solved.optimal, solved.note, solved.columns = True, None, {}
    return solved


def _at(positions: Sequence[int], prices: Sequence[int], n: int) -> tuple[int, ...]:
    """``prices`` at these of ``n`` positions; 0 elsewhere."""
    found = [0] * n
    for i, price in zip(positions, prices, strict=True):
        found[i] = price
    return tuple(found)


def _pairs(positions: Sequence[int], pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple([(positions[i], positions[j]) for i, j in pairs])


def _main(space: Space, members: Nodes) -> int:
    """Of nodes that presolve merged, the one that is given their dual price: a kernel with this node alone,
    or the others alone, must cost no less than the prices of its nodes (``fuseplan.verify.report`` checks
    it). A bitcast, which is free alone, cannot be that node."""
    nodes = space.book.graph.nodes
    busy = [n for n in members if not nodes[n].bitcast] or list(members)
    if space.book.absorbs_moves:
        return busy[-1]
    return next((n for n in busy if not space.book.renames(n)), busy[0])


def _folded(space: Space, groups: list[Mask], small: Space) -> list[Mask] | None:
    """``groups`` as groups of ``small``, unless they cut what is one position there."""
    if small is space:
        return groups
    folded = [small.mask(space.nodes(mask)) for mask in groups]
    return folded if sum(mask.bit_count() for mask in folded) == small.n else None


def _solve_space(
    space: Space,
    best: list[Mask],
    budget: Budget,
    expires_at: float,
    watch: StageTimer,
    is_start: bool,
) -> Solved:
    """The solution of a component, no worse than the plan ``best``."""
    singles = space.singles
    if space.n == 1:
        time_ps = space.total(singles).time_ps
        return Solved(singles, time_ps, True, duals=(time_ps,))
    # XLA's loops are offered for sets of hundreds of operations, from which no nogood is learnt.
    space.learns = space.learns or not space.offers
    floor_ps = space.floor_ps
    offers = [mask for mask in space.offers if isinstance(space.price(mask), Price)]
    always = [*best, *singles, *offers]
    floor = _bound_of_groups(space)
    most = LIMITS.max_listing_work if floor is not None else LIMITS.max_listing_work_without_bounds
    found = enumerate_groups(space, budget.max_groups, expires_at, max_work=most)
    watch.lap("enumerate")
    if found.complete:
        result = solve_listed(space, tuple(dict.fromkeys([*always, *found.groups])), best, expires_at)
    else:
        has_copies = space.duplicate_rules is not None
        most = LIMITS.max_column_work_with_copies if has_copies else LIMITS.max_column_work
        if is_start:
            most = LIMITS.max_dive_work
        most = min(most, int(space.book.work.left * _SHARE_OF_COLUMNS))
        # Column generation makes its tables in half a second, which is too long after the deadline.
        has_ended = time.monotonic() >= expires_at
        columns = None if has_ended else _by_columns(space, floor, best, expires_at, most, is_start)
        if columns is not None:
            result = columns
            result.has_too_many_copies = has_copies and not (result.optimal or space.book.is_past(expires_at))
            if result.has_too_many_copies and space.total(result.groups) >= space.total(best):
                told = part_note(NoteKind.TOO_MANY_COPIES, space)
                result.groups, result.note = best, told
                result.bound_ps = max(result.bound_ps, floor_ps)
                return result
        else:
            result = solve_listed(
                space, tuple(dict.fromkeys([*best, *always, *found.groups])), best, expires_at
            )
            # What is proven of these groups is not proven of all.
            result.optimal, result.bound_ps, result.duals = False, floor_ps, ()
            is_late = space.book.is_past(expires_at)
            too_many = (
                part_note(NoteKind.SOME_GROUPS, space, most=budget.max_groups)
                if len(found.groups) >= budget.max_groups
                else part_note(NoteKind.UNPROVEN, space, Limit.WORK)
            )
            result.note = result.note or (ended_note(space) if is_late else too_many)
        gap_ps = space.total(result.groups).time_ps - result.bound_ps
        # A plan to start from is not improved: the next search does that, or XLA regroups the operations.
        if gap_ps > result.bound_ps * LIMITS.slack and result.is_repeatable and not is_start:
            result.groups = improve(space, result.groups, result.bound_ps, expires_at)
    watch.lap("solve")
    if is_start:
        result.note = None
    result.bound_ps = max(result.bound_ps, floor_ps)
    if result.bound_ps == space.total(result.groups).time_ps:
        result.optimal, result.note = True, None
        if not found.complete:  # Some of the columns are of no use to a joint search.
            result.columns = {}
    return result


_MANY_FLOORS = 256
"""Priced groups that are compared with their floors after the deadline."""


def _bound_of_groups(space: Space) -> PartialFloor | None:
    """The bounds that column generation rests on; None where it cannot be used."""
    return None if space.n > LIMITS.max_dense_positions else space.book.partial_floor(space.members)


def _by_columns(
    space: Space,
    floor: PartialFloor | None,
    best: list[Mask],
    expires_at: float,
    max_work: int,
    is_start: bool,
) -> Solved | None:
    """What column generation finds, from the plan ``best`` on; None without ``floor``, if that plan is not as
    fast as any can be."""
    if space.total(best).time_ps == space.floor_ps:
        return Solved(best, space.floor_ps, True)
    if floor is None:
        return None
    try:
        found = solve_by_columns(space, floor, best, expires_at, max_work, is_start)
    except FAILURES as error:
        return Solved(best, space.floor_ps, False, note=failure(error), is_repeatable=False)
    priced = [mask for mask in found.columns if mask not in space.offers]
    if space.book.is_past(expires_at):  # There is time for a sample.
        priced = priced[:_MANY_FLOORS]
    _check_floor(space, floor, priced)
    return found


def _check_floor(space: Space, floor: PartialFloor, priced: Iterable[Mask]) -> None:
    """Note a fault if a priced group takes less than ``floor`` says."""
    masks = [mask for mask in priced if isinstance(space.known_price(mask), Price)]
    sets = as_sets(masks, space.n)
    for mask, floor_ps in zip(masks, floor(sets, sets).astype(int).tolist(), strict=True):
        space.book.check_bound(space.nodes(mask), space.total([mask]).time_ps, floor_ps)


def make_proof(parts: Decomposition, solved: Sequence[Solved]) -> Proof:
    """The proof of the bound on each distinct component.

    Raises:
        AssertionError: a component has prices, and not one for each operation.
    """
    for space, found in zip(parts.spaces, solved, strict=True):
        n_nodes = len(space.component.nodes)
        assert len(found.duals) in (0, n_nodes), f"{len(found.duals)} prices for {n_nodes} operations"
    first_nodes: list[list[int]] = [[] for _ in parts.spaces]
    for part, nodes in parts.instances:
        first_nodes[part].append(nodes[0])

    def proven(space: Space, found: Solved, first: tuple[int, ...]) -> Part:
        # A floor is simpler to check than prices that do not reach it, and prices than cases.
        is_floor = sum(found.duals) < found.bound_ps == space.floor_ps
        if found.cases and not is_floor:
            return Part(found.bound_ps, first, found.duals, found.cases)
        return Part(found.bound_ps, first, () if is_floor else found.duals)

    return Proof(tuple(map(proven, parts.spaces, solved, map(tuple, first_nodes))))
