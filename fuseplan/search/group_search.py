"""Find the legal groups that cost less than the prices of their members, or prove that there are none.

This is the pricing problem of column generation (``fuseplan.search.column_generation``). A branch and bound
works on *partial groups*: some positions are in, some are out, the others are open. What is known of all
groups within a partial one bounds them: no legal group takes more than the open positions that are left when
convexity, connectivity and conflicts are used, and at most one of each clique of conflicts; and a kernel
takes at least its ``costmodel.partial_floor``. Hundreds of partial groups are bounded at a time, as rows of
boolean matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from costmodel.graph import OpKind
from costmodel.partial_floor import PartialFloor
from costmodel.set_tables import Figures, Sets, UnionTable, as_sets, total
from fuseplan.schedule.pricing import Price
from fuseplan.search.decisions import Decisions, closed_conflicts
from fuseplan.search.limits import LIMITS
from fuseplan.search.nogoods import MonotoneRefusals
from fuseplan.search.partial_groups import BATCH, Cliques, PartialGroups, Waiting, masks
from fuseplan.search.remat.duplicates import DuplicateRules
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, connected_parts


@dataclass(slots=True)
class Found:
    """The groups that cost less than their members."""

    times_ps: dict[Mask, int] = field(default_factory=dict)
    complete: bool = True
    """Whether these are all."""
    share: Figures = field(default_factory=lambda: np.ones(0))
    """For each position, the part of its price with which no group costs less than its members."""


@dataclass(frozen=True, slots=True)
class _Unpaid:
    """The group that a start grew into, where the prices of its positions do not exceed its time, or where it
    is no legal kernel."""

    near: Sets
    """The group and its neighbours."""
    prices: Figures
    """Picoseconds for each position of the component, when it grew."""
    lacking_ps: float
    """Picoseconds by which its time, or a lower bound of that, exceeds the prices of its positions; 0 if it
    is no legal kernel."""


class GroupSearch:
    """The legal groups of one component, as ``candidates.enumerate_groups`` has them, by price.

    Args:
        space: the component.
        floor: of the positions of ``space``.
    """

    def __init__(self, space: Space, floor: PartialFloor) -> None:
        self.space, self._floor = space, floor
        self.times_ps: dict[Mask, int] = {}
        """The legal groups that were priced so far, whether they were sought or not."""
        self._unpaid: dict[Mask, _Unpaid] = {}
        """For each start that did not lead to a group of ``grown``, the group that it led to."""
        self.conflicts = self._closed_conflicts()
        self._below, self._above = space.below_table, space.above_table
        self._near, self._apart = (_table(of, space.n) for of in (space.neighbours, self.conflicts))
        self._together: UnionTable | None = None
        """For each position, those that the same group holds by ``under``."""
        n_values = len(space.values)
        self._made, self._read = _table(space.made, n_values), _table(space.read, n_values)
        self._kept = as_sets([space.kept], n_values)[0]
        rules = space.duplicate_rules
        self._duplicates = None if rules is None else _DuplicateTables(rules, space.n)
        self._rules = _Answers(space.rules, space.n)
        self._overflows, self._misfitting = (
            _Answers(nogoods, space.question_width) for nogoods in (space.overflowing, space.misfits)
        )

    def under(self, decisions: Decisions) -> GroupSearch:
        """The same search among the groups that ``decisions`` allow. What one learns, both know."""
        other = copy(self)
        other.conflicts = decisions.conflicts
        other._apart = _table(decisions.conflicts, self.space.n)
        other._together = _table(decisions.classes, self.space.n) if decisions.together else None
        other._unpaid = dict(self._unpaid)
        return other

    def below(
        self,
        prices: Figures,
        most: int = 1 << 62,
        max_work: int = 1 << 62,
        expires_at: float = float("inf"),
        depth_first_work: int = 1 << 62,
    ) -> Found:
        """The groups that take less than their positions' ``prices`` together.

        The search begins depth-first, which finds groups soon. If it finds none in ``depth_first_work``
        units, it goes on best-first: it takes the partial groups of least share, as these bound
        ``Found.share``.

        Args:
            prices: picoseconds for each position, none negative.
            most: end when so many have been found.
            max_work: end after so many units of counted work.
            expires_at: end at this time of the book's ``clock``, in seconds.
            depth_first_work: units of counted work of the depth-first search, which ends the whole search if
                it has found groups.
        """
        space, found = self.space, Found()
        work = space.book.work
        limit, end_of_depth = work.spent + max_work, work.spent + depth_first_work
        cliques = Cliques(self.conflicts, prices)
        waiting = Waiting([self.roots(prices, with_free=False)])
        is_depth_first = True
        while waiting:
            if is_depth_first and work.spent >= end_of_depth:
                is_depth_first = False
                if found.times_ps:
                    limit = work.spent
            if len(found.times_ps) >= most or work.spent >= limit or space.book.is_past(expires_at):
                found.complete = False
                break
            step = self.step(waiting.last() if is_depth_first else waiting.least(), prices, cliques)
            for half in step.halves:
                waiting.add(half)
            for k, mask in enumerate(masks(step.whole.known)):
                if space.book.is_past(expires_at):
                    waiting.add(step.whole[k:])
                    break
                time_ps = self._time_ps(mask)
                if time_ps is not None and time_ps < step.worth[k]:
                    found.times_ps[mask] = time_ps
        found.share = self._share(prices, waiting, found.times_ps, cliques, expires_at)
        return found

    def step(self, partial: PartialGroups, prices: Figures, cliques: Cliques, room: int = 0) -> _Step:
        """Bound partial groups, and divide those that may hold a group which takes less than ``room``
        picoseconds more than its positions' ``prices``.

        Args:
            cliques: of the prices.
        """
        self.space.book.work.spend_partial_groups(len(partial), self.space.n)
        partial, open_ = self._propagate(partial)
        worth = total(partial.known, prices)
        margins = self._margins(partial, open_, worth, cliques)
        partial.share = margins.share
        near = margins.least_ps < room
        beyond, partial, open_, worth = partial[~near], partial[near], open_[near], worth[near]
        allowed = self._allowed(partial.known, partial.known | open_)
        partial, open_, worth = partial[allowed], open_[allowed], worth[allowed]
        whole = ~open_.any(axis=1)
        halves = [] if whole.all() else self._branches(partial[~whole], open_[~whole], prices)
        return _Step(halves, partial[whole], worth[whole], beyond)

    def grown(
        self,
        prices: Figures,
        starts: Sequence[Mask],
        max_work: int = 1 << 62,
        expires_at: float = float("inf"),
        barred: Mask = 0,
    ) -> dict[Mask, int]:
        """Groups that cost less than their positions' ``prices``, with their times in picoseconds, found by
        steepest ascent; none holds a position of ``barred``.

        Each of ``starts`` takes in the neighbour, with what convexity and copies then require, that adds most
        to its positions' prices less its floor, as long as one adds. All starts take a step together. A start
        that led to no such group before is left out until the prices around it have risen by what it lacked.
        """
        space, work = self.space, self.space.book.work
        limit = work.spent + max_work
        starts = [start for start in starts if not self._is_still_unpaid(start, prices)]
        if not starts:
            return {}
        groups, out = as_sets(starts, space.n), as_sets([barred], space.n)
        led_by = np.arange(len(starts))
        gains = total(groups, prices) - self._floor(groups, groups)
        growing = np.ones(len(groups), dtype=bool)
        while growing.any() and work.spent < limit and not space.book.is_past(expires_at):
            of, wider, wider_gains = self._wider(groups, np.flatnonzero(growing), prices, out, expires_at)
            growing[:] = False
            # Of equal gains the larger group, since what joins for nothing may lead to more.
            sizes = wider.sum(axis=1)
            for k in np.lexsort((-sizes, -wider_gains)).tolist():
                g = of[k]
                if space.book.is_past(expires_at):
                    break
                if growing[g] or wider_gains[k] < gains[g] or not self._is_allowed(wider[k]):
                    continue
                groups[g], gains[g], growing[g] = wider[k], wider_gains[k], True
            # Starts that have grown into the same group go on as one.
            _, first, which = np.unique(groups, axis=0, return_index=True, return_inverse=True)
            same = first[which.ravel()]
            growing &= same == np.arange(len(groups))
            led_by = same[led_by]
        found: dict[Mask, int] = {}
        lacking = np.maximum(-gains, 0)
        last = np.unique(led_by)
        for k, mask in zip(last.tolist(), masks(groups[last]), strict=True):
            if space.book.is_past(expires_at):
                return found
            time_ps = self._time_ps(mask) if gains[k] > 0 else None
            if time_ps is not None:
                lacking[k] = time_ps - prices[bits(mask)].sum()
                if lacking[k] < 0:
                    found[mask] = time_ps
        if not barred and work.spent < limit:
            near = groups | self._near(groups)
            for start, k in zip(starts, led_by.tolist(), strict=True):
                if lacking[k] >= 0:
                    self._unpaid[start] = _Unpaid(near[k], prices, lacking[k])
        return found

    def _is_still_unpaid(self, start: Mask, prices: Figures) -> bool:
        """Whether ``start`` did not lead to a group of ``grown`` before, and the prices around it have risen
        by no more than it lacked."""
        before = self._unpaid.get(start)
        if before is None:
            return False
        rise = np.maximum(prices - before.prices, 0)[before.near].sum()
        return bool(rise <= before.lacking_ps)

    def shares(self, groups: Sequence[Mask]) -> Figures:
        """The picoseconds that each position adds by itself to the slowest resource of its group of
        ``groups``; 0 for those in none."""
        if not groups:
            return np.zeros(self.space.n)
        each: Figures = self._floor.shares(as_sets(groups, self.space.n)).max(axis=0)
        return each

    def disjoint(self, groups: Sequence[Mask], expires_at: float = float("inf")) -> None:
        """Price the connected parts of each group that no group before it holds, and the same from the last
        to the first, until ``expires_at``: with these, groups that overlap become a partition."""
        for order in (groups, groups[::-1]):
            taken = 0
            for group in order:
                for part in connected_parts(group & ~taken, self.space.neighbours):
                    if self.space.book.is_past(expires_at):
                        return
                    (row,) = as_sets([part], self.space.n)
                    hull, never, _ = self._closed(row[None], ~row[None])
                    if not (hull & never).any() and self._is_allowed(row):
                        self._time_ps(part)
                taken |= group

    def _wider(
        self, groups: Sets, rows: Any, prices: Figures, out: Sets, expires_at: float
    ) -> tuple[Any, Sets, Figures]:
        """Each of the ``rows`` of ``groups`` with each of its neighbours that may join, closed: the row, the
        larger group, and by how much its positions' prices exceed its floor; those that are found until
        ``expires_at``."""
        work = self.space.book.work
        near = self._near(groups[rows]) & ~groups[rows] & ~out
        of, joins = np.nonzero(near)
        of = rows[of]
        parts: list[tuple[Any, Sets, Figures]] = []
        for start in range(0, len(of), BATCH):
            if self.space.book.is_past(expires_at):
                break
            own, join = of[start : start + BATCH], joins[start : start + BATCH]
            work.spend_partial_groups(len(own), self.space.n)
            known = groups[own]
            known[np.arange(len(own)), join] = True
            known, _, fine = self._closed(known, np.broadcast_to(out, known.shape))
            own, known = own[fine], known[fine]
            _, questions = self._questions(known, known)
            allowed = ~(self._misfits(questions) | self._rules.refused(known))
            own, known = own[allowed], known[allowed]
            parts.append((own, known, total(known, prices) - self._floor(known, known)))
        if not parts:
            return rows[:0], groups[:0], np.zeros(0)
        own, known, gain = zip(*parts, strict=True)
        return np.concatenate(own), np.concatenate(known), np.concatenate(gain)

    def _is_allowed(self, group: Sets) -> bool:
        """Whether no rule refuses the group, and it may have a tile that fits."""
        (mask,) = masks(group[None])
        return self._obeys_rules(mask) and not self.space.misfits_alone(mask)

    def _time_ps(self, mask: Mask) -> int | None:
        """The time of a group that holds all that convexity requires; None if it cannot be one kernel."""
        rules = self.space.duplicate_rules
        if rules is not None and not rules.allows(mask):
            return None
        price = self.space.price(mask)
        if not isinstance(price, Price):
            # The price says that no tile fits as fast as the question why. The answer is for other groups.
            self.space.misfits_alone(mask)
            return None
        self.times_ps[mask] = price.time_ps
        return price.time_ps

    def roots(self, prices: Figures, with_free: bool) -> PartialGroups:
        """Partial groups for each position that has a price, or with ``with_free`` for each position, without
        those of higher prices: a group is found from its dearest member. It executes that alone, or several
        operations, of which more is known."""
        order = np.argsort(-prices, kind="stable")
        if not with_free:
            order = order[prices[order] > 0]
        rank = np.full(len(prices), len(prices))
        rank[order] = np.arange(len(order))
        known = np.zeros((len(order), len(prices)), dtype=bool)
        known[np.arange(len(order)), order] = True
        out = rank[None, :] < np.arange(len(order))[:, None]
        of_any_size, no_share = np.zeros(len(order), dtype=bool), np.zeros(len(order))
        every = PartialGroups(known, out, order, of_any_size, no_share)[::-1]
        if self._duplicates is not None:  # Copies of one operation are executed once.
            return every
        executes = self._floor.executes
        busy = every[executes[every.seed]]
        alone = replace(busy, out=busy.out | (executes & ~busy.known))
        several = replace(busy, several=~busy.several)
        return PartialGroups.joined([every[~executes[every.seed]], several, alone])

    def _propagate(self, partial: PartialGroups) -> tuple[PartialGroups, Sets]:
        """The partial groups that hold a legal group, with all that each of these holds, and the positions
        that it may hold beside."""
        hull, never, fine = self._closed(partial.known, partial.out)
        hull, never, partial = hull[fine], never[fine], partial[fine]
        seed = partial.seed
        # Nothing beyond a position that can never join, on a path from or to a member, joins either.
        beyond = self._below(never & self._below(hull)) | self._above(never & self._above(hull))
        possible = hull | ~(never | beyond)
        reached = np.zeros_like(hull)
        reached[np.arange(len(seed)), seed] = True
        while True:
            more = self._near(reached) & possible & ~reached
            if not more.any():
                break
            reached |= more
        connected = ~(hull & ~reached).any(axis=1)
        hull, reached, partial = hull[connected], reached[connected], partial[connected]
        return replace(partial, known=hull), reached & ~hull

    def _closed(self, known: Sets, barred: Sets) -> tuple[Sets, Sets, Sets]:
        """For each partial group, the positions that all of its groups hold, those that none of them holds
        for what it holds, and whether there may be such a group."""
        while True:
            hull = known | (self._below(known) & self._above(known))
            never = barred | self._apart(hull)
            wanted = None
            if self._together is not None:
                wanted = self._together(hull) & ~hull
                never |= self._together(never)
            if self._duplicates is not None:
                copies, barred = self._duplicates.decided(hull, never)
                never |= barred
                wanted = copies if wanted is None else wanted | copies
            if wanted is None or not wanted.any():
                break
            known, barred = hull | wanted, never
        return hull, never, ~(hull & never).any(axis=1)

    def _margins(self, partial: PartialGroups, open_: Sets, worth: Figures, cliques: Cliques) -> _Margins:
        """By how much all groups within each partial one cost more than their positions.

        Args:
            worth: the prices of the known positions together.
            cliques: of the prices.
        """
        known = partial.known
        found = self._floor.bounds(known, known | open_, partial.several)
        bounds = [(found.floor_ps, worth + cliques.most(open_))]
        if open_.any():
            memory, compute, *others = found.additive
            both = (
                (memory.known_ps + compute.known_ps) / 2,
                (memory.added_ps + compute.added_ps) / 2,
            )
            # A kernel takes as long as its slowest resource, so no less than the mean of two: then what a
            # position adds counts against its price.
            for least, added in (both, *((r.known_ps, r.added_ps) for r in (memory, compute, *others))):
                bounds.append((least, worth + cliques.most(open_, added)))
        margins = [least - most for least, most in bounds]
        shares = [least / np.maximum(most, 1) for least, most in bounds]
        return _Margins(np.max(margins, axis=0), np.minimum(np.max(shares, axis=0), 1))

    def _allowed(self, known: Sets, possible: Sets) -> Sets:
        """Whether no monotone rule refuses each set of known members, and with it all that hold them."""
        crossing, questions = self._questions(known, possible)
        fits = ~self._misfits(questions)
        asked = np.flatnonzero(fits)
        # Most partial groups fit: some of each batch are looked at, as long as there are any that do not.
        # Nogoods are learnt from these.
        left = LIMITS.capacity_misses
        for k in asked[:: -(-len(asked) // LIMITS.capacity_checks) or 1].tolist():
            (mask,), (exchanged,) = masks(known[k : k + 1]), masks(crossing[k : k + 1])
            if not self.space.is_tight(mask):
                continue
            fits[k] = not self.space.overflows(mask, exchanged)
            left = left - 1 if fits[k] else LIMITS.capacity_misses
            if not left:
                break
        fits &= ~self._misfits(questions)
        fits &= ~(self._rules.refused(known) & (known.sum(axis=1) > 1))
        unknown = fits & ~self._rules.allowed(known)
        fits[unknown] = [self._obeys_rules(mask) for mask in masks(known[unknown])]
        return fits

    def _questions(self, known: Sets, possible: Sets) -> tuple[Sets, Sets]:
        """What each group that holds ``known`` within ``possible`` exchanges, and the questions whether it
        fits on chip."""
        never = ~possible
        crossing = self._made(known) & (self._read(never) | self._kept)
        crossing |= self._read(known) & self._made(never)
        return crossing, np.concatenate([known, crossing, never], axis=1)

    def _misfits(self, questions: Sets) -> Sets:
        """Whether a nogood answers each question whether a partial group fits on chip."""
        return self._overflows.refused(questions) | self._misfitting.refused(questions)

    def _obeys_rules(self, mask: Mask) -> bool:
        # XLA runs a single position, whatever the rules say.
        return not mask & (mask - 1) or not self.space.breaks_rules(mask)

    def _branches(self, partial: PartialGroups, open_: Sets, prices: Figures) -> list[PartialGroups]:
        """Each partial group without and with one open position: that of which most depends, by its price and
        by the arrays that pass between it and the members."""
        near = self._near(partial.known) & open_
        stakes = prices + self._floor.stakes(partial.known)
        # A position that leaves one core busy decides most: few groups gain by holding it.
        stakes += self._floor.idles(partial.known, partial.known | open_) * prices.sum()
        chosen = np.where(open_, stakes + 1, -1) + 0.5 * near
        k, at = np.arange(len(partial)), chosen.argmax(axis=1)
        without, with_ = partial.out.copy(), partial.known.copy()
        without[k, at], with_[k, at] = True, True
        return [replace(partial, out=without), replace(partial, known=with_)]

    def _share(
        self,
        prices: Figures,
        waiting: Waiting,
        times_ps: dict[Mask, int],
        cliques: Cliques,
        expires_at: float,
    ) -> Figures:
        """As ``Found.share``: 1 but for positions of groups that were found, or may be in groups that were
        not looked at. After ``expires_at``, the latter count with the shares that the search has found."""
        share = np.ones(len(prices))
        for partial in waiting.batches():
            if self.space.book.is_past(expires_at):
                possible, theirs = ~partial.out, partial.share
            else:
                partial, open_ = self._propagate(partial)
                possible = partial.known | open_
                theirs = self._margins(partial, open_, total(partial.known, prices), cliques).share
            share = np.minimum(share, np.where(possible, theirs[:, None], 1).min(axis=0, initial=1))
        for mask, time_ps in times_ps.items():
            at = bits(mask)
            worth = prices[at].sum()
            if time_ps < worth:
                share[at] = np.minimum(share[at], time_ps / worth)
        return share

    def _closed_conflicts(self) -> list[Mask]:
        """For each position, those that no group holds beside it: as ``Space.conflicts``, with the pairs of
        contractions and reductions that the rules refuse, and what lies beyond a conflict on a path."""
        space = self.space
        found = list(space.conflicts)
        graph = space.book.graph
        heavy = [
            i
            for i, nodes in enumerate(space.members)
            if any(graph.nodes[n].kind >= OpKind.REDUCTION for n in nodes)
        ]
        for a, i in enumerate(heavy):
            for j in heavy[a + 1 :]:
                if not found[i] >> j & 1 and space.breaks_rules(1 << i | 1 << j):
                    found[i] |= 1 << j
                    found[j] |= 1 << i
        return closed_conflicts(space, found)


@dataclass(frozen=True, slots=True)
class _Margins:
    """Bounds on the groups within each of many partial ones."""

    least_ps: Figures
    """Picoseconds that each group costs more than its positions at least; negative where it may cost less."""
    share: Figures
    """The part of its positions' prices that each group costs at least, no more than 1."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The result of ``GroupSearch.step``: what is left of a batch of partial groups."""

    halves: list[PartialGroups]
    """Those that may hold groups within the room, divided."""
    whole: PartialGroups
    """Those without an open position: each is one group, with ``worth``, the prices of its members."""
    worth: Figures
    beyond: PartialGroups
    """Partial groups whose groups all take longer than the room allows."""


class NearGroups:
    """The groups that may take little longer than the prices of their members together, by lower bounds of
    their times: none is priced.

    Args:
        search: of the component.
        prices: picoseconds for each position, none negative.
    """

    def __init__(self, search: GroupSearch, prices: Figures) -> None:
        self._search, self._prices = search, prices
        self._cliques = Cliques(search.conflicts, prices)
        self._beyond = [search.roots(prices, with_free=True)]
        self.room_ps = 0
        """The largest room, in picoseconds, that ``within`` was called with."""
        self.masks: dict[Mask, None] = {}
        """The groups that were found, in this order."""

    def within(self, room: int, most: int, max_work: int, expires_at: float) -> bool:
        """Find the groups that may take at most ``room`` picoseconds longer than their members' prices, and
        return whether these are all.

        Args:
            room: picoseconds; that of the call before, if it was larger.
            most: end when so many are known.
            max_work: end after so many units of counted work.
            expires_at: end at this time of the book's ``clock``, in seconds.
        """
        book, rules = self._search.space.book, self._search.space.duplicate_rules
        limit = book.work.spent + max_work
        self.room_ps = max(self.room_ps, room)
        waiting, self._beyond = Waiting(self._beyond), []
        while waiting:
            if len(self.masks) >= most or book.work.spent >= limit or book.is_past(expires_at):
                self._beyond += waiting.batches()
                return False
            step = self._search.step(waiting.last(), self._prices, self._cliques, self.room_ps + 1)
            for half in step.halves:
                waiting.add(half)
            if len(step.beyond):
                self._beyond.append(step.beyond)
            every = masks(step.whole.known)
            self.masks |= dict.fromkeys(mask for mask in every if rules is None or rules.allows(mask))
        return True


class _Answers:
    """The answers that ``MonotoneRefusals`` knows, for many sets at a time."""

    def __init__(self, learnt: MonotoneRefusals, width: int) -> None:
        self._learnt, self._width = learnt, width
        self._cores, self._allowed = (_table((0,) * width, 0),) * 2
        self._n_cores = self._n_allowed = 0

    def refused(self, rows: Sets) -> Sets:
        """Whether each set holds one that is known to be refused."""
        cores = self._learnt.cores
        if self._n_cores != len(cores):
            self._n_cores, self._cores = len(cores), UnionTable(as_sets(cores, self._width).T)
        return ~self._cores(~rows).all(axis=1)

    def allowed(self, rows: Sets) -> Sets:
        """Whether each set is within one that is known to be allowed."""
        allowed = self._learnt.allowed
        if self._n_allowed != len(allowed):
            self._n_allowed, self._allowed = len(allowed), UnionTable(~as_sets(allowed, self._width).T)
        return ~self._allowed(rows).all(axis=1)


class _DuplicateTables:
    """``DuplicateRules.decided`` of many partial groups at a time."""

    def __init__(self, rules: DuplicateRules, n: int) -> None:
        class_of = {together: c for c, together in enumerate(rules.classes)}
        classes = as_sets(rules.classes, n)
        self._classes = UnionTable(classes.T)
        """For each position, the operation that it is a copy of."""

        def tables(of: Sequence[Sequence[tuple[Mask, Mask]]]) -> tuple[Any, Any, list[Mask]]:
            flat = [(i, other, class_of[copies]) for i, some in enumerate(of) for other, copies in some]
            at, others, classes = zip(*flat, strict=True) if flat else ((), (), ())
            return np.array(at, dtype=np.intp), np.array(classes, dtype=np.intp), list(others)

        self._reader, self._read_class, own = tables(rules.own)
        self._served, self._served_class, readers = tables(rules.served)
        self._led, self._led_class, makers = tables(rules.led)
        self._own, self._makers = (_table(some, n) for some in (own, makers))
        self._read_copies, self._served_copies, self._led_copies = (
            UnionTable(classes[of]) for of in (self._read_class, self._served_class, self._led_class)
        )
        self._own_at, self._maker_at = (
            np.array([mask.bit_length() - 1 for mask in some], dtype=np.intp) for some in (own, makers)
        )
        inside = rules.outside - 1
        served = as_sets([mask & inside for mask in readers], n)
        self._readers, self._served_by = UnionTable(served), UnionTable(served.T)
        self._leaves = np.array([mask > inside for mask in readers], dtype=bool)
        """Whether the caller, or another component, reads the copy."""

    def decided(self, known: Sets, out: Sets) -> tuple[Sets, Sets]:
        """The positions that each partial group must hold too, and those that it must leave out too. A group
        that cannot be is left with positions that it must both hold and leave out, unless only its last
        member tells."""
        copied, cut = self._classes(known), self._classes(out)
        reads = known[:, self._reader]
        holds = reads & copied[:, self._read_class]
        lacks = reads & ~holds & out[:, self._own_at]
        serves = known[:, self._served]
        each = serves & cut[:, self._served_class]
        unread = self._served_by(out) | self._leaves
        whole = serves & ~each & unread & ~self._served_by(known)
        leads = known[:, self._led]
        alone = leads & cut[:, self._led_class]
        with_all = leads & ~alone & out[:, self._maker_at]
        wanted = self._own(holds) | self._readers(each) | self._makers(alone)
        wanted |= self._served_copies(whole) | self._led_copies(with_all)
        unwanted = self._read_copies(lacks)
        rows, k = np.nonzero(each & self._leaves)
        unwanted[rows, self._served[k]] = True
        return wanted & ~known, unwanted & ~out


def _table(masks: Sequence[Mask], width: int) -> UnionTable:
    return UnionTable(as_sets(masks, width))
