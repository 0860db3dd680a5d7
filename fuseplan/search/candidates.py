"""Enumerate the legal groups of one component, as bitmasks of positions.

A group is legal if it is connected by crossable edges and convex (no path leaves it and returns), breaks no
monotone rule (``Pricing.compatible``, ``Pricing.oversized``), and has a price. All groups that meet the first
three conditions are enumerated here, each exactly once, without pricing them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.search.limits import LIMITS
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, union_at
from fuseplan.support.work import STEP


@dataclass(frozen=True, slots=True)
class Candidates:
    """Groups that are legal if they have a price; ``complete`` unless a limit ended the enumeration."""

    groups: tuple[Mask, ...]
    complete: bool


def enumerate_groups(
    space: Space,
    max_groups: int,
    expires_at: float = float("inf"),
    within: Mask | None = None,
    max_work: int = 1 << 62,
) -> Candidates:
    """Every connected, convex group of ``space`` that no monotone rule refuses, exactly once.

    From the lowest member, the search decides neighbour by neighbour whether it belongs to the group (then
    the positions on paths between belong to it too) or not. The positions left out decide which values the
    kernel must read and write, and which copies it needs (``fuseplan.search.remat.duplicates``). Now and then
    a partial group is checked for whether it overflows the chip however it grows: the nogood learnt prunes
    all groups around it. Each finished group is checked too. A few still have no tile that fits: their price
    says so. Each branch ends in another group, so the time is proportional to the number of groups.

    Args:
        space: the component.
        max_groups: stop when so many have been found.
        expires_at: stop at this time of the book's ``clock``, in seconds.
        within: of these positions alone, if given.
        max_work: stop after so many units of counted work.
    """
    found: list[Mask] = []
    n_tight = 0
    below, above = space.inner_below, space.inner_above
    neighbours, conflicts = space.neighbours, space.conflicts
    made, read = space.made, space.read
    duplicate_rules = space.duplicate_rules
    # The values that lower positions, which are left out, exchange with others.
    outside = 0 if within is None else space.everything & ~within
    left_needs, left_makes = space.kept | union_at(outside, read), union_at(outside, made)
    looked = 0
    steps_per_look, large = LIMITS.steps_per_clock_look, LIMITS.large_group
    work, clock = space.book.work, space.book.clock
    limit = work.spent + max_work
    if duplicate_rules is None and (space.everything & ~outside).bit_count() >= max_groups:
        return Candidates(tuple(space.singles), False)  # Each position is a group.
    for seed in bits(space.everything & ~outside):
        start = 1 << seed
        apart = conflicts[seed] & ~(start - 1)
        needed, others = left_needs | union_at(apart, read), left_makes | union_at(apart, made)
        # Groups that hold a lower position were found from there.
        stack = [
            (
                start, below[seed], above[seed], neighbours[seed], conflicts[seed],
                outside | (start - 1),
                made[seed], read[seed], needed, others, False,
            )
        ]  # fmt: skip
        left_needs |= read[seed]
        left_makes |= made[seed]
        while stack:
            group, down, up, border, clash, excluded, makes, reads, needed, others, tight = stack.pop()
            looked += 1
            work.spend(STEP)
            is_late = (looked % steps_per_look == 0 or group.bit_count() > large) and clock() > expires_at
            if is_late or work.spent >= limit:
                return Candidates(_with_singles(found, space), False)
            forced = 0
            if duplicate_rules is not None:
                forced, barred = duplicate_rules.decided(group, excluded | clash)
                excluded |= barred
                for j in bits(barred):
                    needed |= read[j]
                    others |= made[j]
                if forced & (excluded | clash | duplicate_rules.outside):
                    continue
            border &= ~(group | excluded | clash)
            if not border and not forced:
                if duplicate_rules is not None and not duplicate_rules.allows(group):
                    continue
                if tight and space.overflows(group, makes & needed | reads & others):
                    continue
                found.append(group)
                if len(found) >= max_groups:
                    return Candidates(_with_singles(found, space), False)
                continue
            new = forced & -forced or border & -border
            i = new.bit_length() - 1
            crossing = makes & needed | reads & others
            need_out, make_out = needed | read[i], others | made[i]
            crosses = makes & need_out | reads & make_out
            # No check is made after leaving a position out: it costs more than it prunes.
            decided = forced or (tight and crosses != crossing and space.is_known_to_overflow(group, crosses))
            if not decided:
                stack.append(
                    (group, down, up, border, clash, excluded | new, makes, reads, need_out, make_out, tight)
                )
            down |= below[i]
            up |= above[i]
            grown = group | new | (down & up)
            if grown & (excluded | clash):
                continue
            apart = clash
            for j in bits(grown & ~group):
                apart |= conflicts[j]
                border |= neighbours[j]
                makes |= made[j]
                reads |= read[j]
            if grown & apart:
                continue
            for j in bits(apart & ~(clash | excluded)):
                needed |= read[j]
                others |= made[j]
            if space.breaks_rules(grown):
                continue
            tight = space.is_tight(grown)
            n_tight += tight
            asks = n_tight <= LIMITS.capacity_checks or n_tight % LIMITS.capacity_checks == 0
            overflows = space.overflows if asks else space.is_known_to_overflow
            if not tight or not overflows(grown, makes & needed | reads & others):
                stack.append((grown, down, up, border, apart, excluded, makes, reads, needed, others, tight))
    return Candidates(tuple(found), True)


def _with_singles(found: list[Mask], space: Space) -> tuple[Mask, ...]:
    return tuple(dict.fromkeys([*space.singles, *found]))
