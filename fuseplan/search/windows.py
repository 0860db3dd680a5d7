"""Large neighbourhood search: improve the plan of a component that has too many groups to enumerate.

(Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998.) A
*window* frees a few operations around a border between two groups. The rest of each group becomes one
position or two, and the cheapest plan of that much smaller component is found as that of any other. It is a
plan of the whole component, no slower than the one before.

Measured on 60 random elementwise operations, which have more than a million groups: from 5 % above
the floor to 0.01 % in 70 windows. Merges and splits alone, as the heuristics make them, stop where
two groups would both have to change at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from fuseplan.schedule.pricing import Price
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.column_pricing import solve_listed
from fuseplan.search.heuristics import better
from fuseplan.search.limits import LIMITS
from fuseplan.search.presolve import fold
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, union_at
from fuseplan.support.digraph import connected_sets


def improve(space: Space, groups: list[Mask], bound_ps: int, expires_at: float) -> list[Mask]:
    """A plan of ``space`` no slower than ``groups``, which must be able to run; deterministic unless the
    deadline ends it."""
    rng = random.Random(0)
    tried: set[tuple[Mask, int]] = set()
    idle = turn = 0
    while idle < LIMITS.max_idle_windows and not space.book.is_past(expires_at):
        time_ps = space.total(groups).time_ps
        if time_ps - bound_ps <= bound_ps // LIMITS.window_gap_divisor:
            break
        free = choose_window(space, groups, *LIMITS.window_shapes[turn % len(LIMITS.window_shapes)], rng)
        turn += 1
        idle += 1
        if not free or (free, time_ps) in tried:
            continue
        tried.add((free, time_ps))
        found = _solve_window(space, groups, free, expires_at)
        if space.total(found) < space.total(groups):
            groups, idle = found, 0
    return groups


def choose_window(
    space: Space, groups: Sequence[Mask], width: int, sideways: float, rng: random.Random
) -> Mask:
    """A convex set of up to ``width`` positions around a border between two groups; 0 if there is none."""
    owner = {i: mask for mask in groups for i in bits(mask)}
    pairs = space.component.edges + space.component.siblings
    borders = [(u, v) for u, v in pairs if owner[u] != owner[v]]
    if not borders:
        return 0
    u, v = rng.choice(borders)
    flow = [0] * space.n
    for a, b in space.component.edges:
        flow[a] |= 1 << b
        flow[b] |= 1 << a
    free = _closed(space, 1 << u | 1 << v)
    left = free
    while left:
        i = rng.choice(bits(left))
        near = flow[i] & ~free
        if not near or rng.random() < sideways:
            near = space.neighbours[i] & ~free
        wider = _closed(space, free | 1 << rng.choice(bits(near))) if near else free
        if near and wider.bit_count() <= width:
            left |= wider & ~free
            free = wider
        else:
            left &= ~(1 << i)
    return free


def _closed(space: Space, mask: Mask) -> Mask:
    """``mask`` with the positions on paths between two of its own."""
    return mask | sum(1 << i for i in bits(union_at(mask, space.below)) if space.below[i] & mask)


def _solve_window(space: Space, groups: list[Mask], free: Mask, expires_at: float) -> list[Mask]:
    """The best plan found that differs from ``groups`` only in the groups around ``free``."""
    before = sum(1 << i for i in range(space.n) if space.below[i] & free)
    # Each group falls into the part before the window and the rest. These parts form no cycle: the groups
    # form none, the window is convex, and no position after or beside the window is before it.
    side = {i: (mask, before >> i & 1) for mask in groups for i in bits(mask & ~free)}
    pairs = space.component.edges + space.component.siblings
    together = [(u, v) for u, v in pairs if u in side and side[u] == side.get(v)]
    small = fold(space, connected_sets(space.n, together))
    around = sum(mask for mask in groups if mask & free)
    within = small.mask(space.nodes(around))
    found = enumerate_groups(small, LIMITS.max_groups_of_window, expires_at, within=within)
    known = [small.mask(space.nodes(mask)) for mask in groups]
    others = [*small.offers, *(1 << i for i in range(small.n))]
    columns = [*known, *found.groups, *(mask for mask in others if isinstance(small.price(mask), Price))]
    solved = solve_listed(small, tuple(dict.fromkeys(columns)), known, expires_at)
    return better(space, groups, [space.mask(small.nodes(mask)) for mask in solved.groups])
