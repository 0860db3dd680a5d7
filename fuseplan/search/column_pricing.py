"""Solve one component as an exact cover of its nodes by its groups, with a proof.

To price a group is to schedule it, which takes long; a floor under its cost is known without. A linear
relaxation over floors and known prices tells which groups to price: those that its solution uses. The duals
of the last relaxation exclude groups that no plan as fast as the best known can hold, and ``exact_cover``
searches the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import numpy as np

from fuseplan.plan.notes import NoteKind
from fuseplan.schedule.pricing import Price
from fuseplan.search.grouping import FAILURES, Solved, ended_note, failure, part_note
from fuseplan.search.heuristics import better, heuristic_plan
from fuseplan.search.limits import LIMITS
from fuseplan.search.set_partitioning import Instance, Relaxation, exact_cover
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import cyclic_sets, shortest_cycle


def solve_listed(space: Space, columns: Sequence[Mask], best: list[Mask], expires_at: float) -> Solved:
    """The cheapest partition of ``space`` into ``columns``, no worse than ``best``; that, with a note, where
    the solver cannot be used.

    The relaxation is solved with the floors of groups that have no price yet. The groups that its solution
    uses by their floor are priced, with a few others of low reduced cost, and it is solved again, until the
    solution uses priced groups alone. Its value is then the same as with all prices: no price is lower than
    its floor, so the price of a group that is not used cannot lower it. Most groups are never priced.
    """
    try:
        return _solve(space, columns, best, expires_at)
    except FAILURES as error:
        return Solved(best, 0, False, note=failure(error), is_repeatable=False)


def _solve(space: Space, columns: Sequence[Mask], best: list[Mask], expires_at: float) -> Solved:
    cost: dict[Mask, int] = {}
    unpriced: dict[Mask, int] = {}
    """Groups of which only the floor is known, each with the bytes that it moves at least."""
    for mask in columns:
        if space.book.is_past(expires_at):
            return Solved(best, 0, False, note=ended_note(space))
        least_ps, nbytes = space.floors(mask) if space.known_price(mask) is None else (0, 0)
        if least_ps:
            cost[mask], unpriced[mask] = least_ps, nbytes
        else:
            _price(space, mask, cost, unpriced)
    masks = list(cost)
    relaxation = Relaxation([bits(m) for m in masks], [cost[m] for m in masks], space.n)
    is_open = np.array([m in unpriced for m in masks], dtype=bool)
    while True:
        relaxation.solve(expires_at)
        extra = relaxation.reduced_costs()
        wanted = [k for k in relaxation.support if is_open[k]]
        if not wanted:
            break
        if space.book.is_past(expires_at):
            return Solved(best, relaxation.bound, False, cost, relaxation.duals, ended_note(space))
        # With those that the relaxation uses, the most promising: a few at a time cost less than
        # the relaxations that ask for them one by one.
        open_ = np.flatnonzero(is_open)
        count = LIMITS.priced_at_once + len(masks) // LIMITS.columns_per_priced
        promising = open_[np.argsort(extra[open_], kind="stable")][:count].tolist()
        for k in dict.fromkeys([*wanted, *promising]):
            if space.book.is_past(expires_at):
                break
            _price(space, masks[k], cost, unpriced)
            is_open[k] = False
            if masks[k] in cost:
                relaxation.set_cost(k, cost[masks[k]])
            else:
                relaxation.drop(k)
    used = [masks[k] for k in relaxation.support]
    is_partition = sum(used) == reduce(or_, used, 0) == space.everything
    if is_partition and space.can_run(used):
        best = better(space, best, used)
    elif all(isinstance(space.price(mask), Price) for mask in space.singles):
        # In a window a position may be a part of a kernel that has no price by itself.
        best = better(space, best, heuristic_plan(space))
    # A group whose reduced cost exceeds the gap is in no plan as fast as the best known.
    gap = space.total(best).time_ps - relaxation.bound
    left = [m for m, more in zip(masks, extra.tolist(), strict=True) if more <= gap and m in cost]
    return prove(space, left, cost, unpriced, relaxation.duals, relaxation.bound, best, expires_at)


def _price(space: Space, mask: Mask, cost: dict[Mask, int], unpriced: dict[Mask, int]) -> None:
    price = space.price(mask)
    unpriced.pop(mask, None)
    if isinstance(price, Price):
        cost[mask] = price.time_ps
    else:
        cost.pop(mask, None)


def prove(
    space: Space,
    alive: list[Mask],
    cost: dict[Mask, int],
    unpriced: dict[Mask, int],
    duals: tuple[int, ...],
    bound: int,
    best: list[Mask],
    expires_at: float,
) -> Solved:
    """The cheapest partition into the groups ``alive``, or ``best``; no other group is in a plan that fast.

    Groups that are chosen by their floor are priced, and cycles cut off, until there is neither.
    """
    alive = list(dict.fromkeys([*alive, *best]))
    for mask in best:  # a heuristic's group need not be among the columns
        cost.setdefault(mask, space.total([mask]).time_ps)
    forbidden: list[tuple[Mask, ...]] = []
    while len(forbidden) <= LIMITS.max_cuts:
        index = {mask: k for k, mask in enumerate(alive)}
        instance = Instance(
            tuple(tuple(bits(m)) for m in alive),
            tuple((cost[m], unpriced[m], 1) if m in unpriced else space.total([m]).objectives for m in alive),
            space.n,
            tuple(sorted(index[m] for m in best)),
            max(expires_at - space.book.clock(), 0),
            tuple(tuple(sorted(index[m] for m in cut)) for cut in forbidden if index.keys() >= set(cut)),
        )
        try:
            selection = exact_cover(instance)
            space.book.work.spend(selection.counted_us)
            if not selection.chosen:  # there is one: that of the heuristic
                raise RuntimeError(f"{selection.engine} finds no cover: {selection.status}")
        except FAILURES as error:
            return Solved(best, bound, False, cost, duals, failure(error), is_repeatable=False)
        bound = max(bound, selection.bound)
        chosen = sorted((alive[k] for k in selection.chosen), key=lambda mask: mask & -mask)
        asked = [mask for mask in chosen if mask in unpriced]
        if asked:
            for mask in asked:
                _price(space, mask, cost, unpriced)
            alive = [mask for mask in alive if mask in cost]
            if selection.status == "OPTIMAL":
                continue
            chosen = best
        cycles = cyclic_sets(space.followers(chosen))
        if not cycles:
            optimal = selection.status == "OPTIMAL"
            note = None if optimal else ended_note(space, selection.is_late)
            return Solved(chosen, bound, optimal, cost, duals, note)
        after = space.successors(chosen)
        for cycle in cycles:
            forbidden.append(tuple(chosen[g] for g in shortest_cycle(after, cycle)))
    return Solved(best, bound, False, cost, duals, part_note(NoteKind.CYCLIC, space))
