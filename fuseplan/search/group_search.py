"""Find the legal groups that cost less than the prices of their members, or prove that there are none.

This is the pricing problem of column generation (``fuseplan.search.column_generation``). A branch and bound
works on *partial groups*: some positions are in, some are out, the others are open. What is known of all
groups within a partial one bounds them: no legal group takes more than the open positions that are left when
convexity, connectivity and conflicts are used, and at most one of each clique of conflicts; and a kernel
takes at least its ``costmodel.partial_floor``. Hundreds of partial groups are bounded at a time, as rows of
boolean matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from costmodel.graph import OpKind
from costmodel.parallelism import Figures, Sets
from costmodel.partial_floor import PartialFloor
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, transposed, union_at
from fuseplan.support.errors import Verdict

Table = npt.NDArray[np.float32]

_BATCH = 256
"""Partial groups that are bounded at a time."""


@dataclass(slots=True)
class Found:
    """The groups that cost less than their members."""

    times_ps: dict[Mask, int] = field(default_factory=dict)
    complete: bool = True
    """Whether these are all."""
    share: Figures = field(default_factory=lambda: np.ones(0))
    """For each position, the part of its price with which no group costs less than its members."""


@dataclass(slots=True)
class _Partial:
    """Partial groups: for each row, the positions that are in and those that are out, and one that is in."""

    known: Sets
    out: Sets
    seed: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.seed)

    def __getitem__(self, rows: slice | Sets) -> _Partial:
        """Some of the rows."""
        return _Partial(self.known[rows], self.out[rows], self.seed[rows])

    @staticmethod
    def joined(parts: Sequence[_Partial]) -> _Partial:
        """All rows of ``parts``."""
        if len(parts) == 1:
            return parts[0]
        return _Partial(
            np.concatenate([p.known for p in parts]),
            np.concatenate([p.out for p in parts]),
            np.concatenate([p.seed for p in parts]),
        )


class GroupSearch:
    """The legal groups of one component, as ``candidates.enumerate_groups`` has them, by price.

    Args:
        space: the component; none of its operations has copies.
        floor: of the positions of ``space``.
    """

    def __init__(self, space: Space, floor: PartialFloor) -> None:
        self.space, self._floor = space, floor
        self._above_masks = transposed(space.below)
        self.conflicts = self._closed_conflicts()
        self._below = _table(space.below)
        self._above = np.ascontiguousarray(self._below.T)
        self._near, self._apart = _table(space.neighbours), _table(self.conflicts)
        n_values = max(len(space.values), 1)
        self._made, self._read = _table(space.made, n_values), _table(space.read, n_values)
        self._kept = sets([space.kept], n_values)[0]
        self._cores: Table = np.zeros((space.question_width, 0), dtype=np.float32)
        self._core_sizes: Table = np.zeros(0, dtype=np.float32)

    def below(
        self,
        prices: Figures,
        room: int = 0,
        most: int = 1 << 62,
        max_work: int = 1 << 62,
        expires_at: float = float("inf"),
    ) -> Found:
        """The groups that take less than ``room`` picoseconds more than their positions' ``prices`` together.

        Args:
            prices: picoseconds for each position, none negative.
            room: picoseconds.
            most: end when so many have been found.
            max_work: end after so many units of counted work.
            expires_at: end at this time of the book's ``clock``, in seconds.
        """
        space, found = self.space, Found()
        limit = space.book.work.spent + max_work
        cliques = _Cliques(self.conflicts, prices)
        waiting = [self._roots(prices, with_free=room > 0)]
        while waiting:
            if (
                len(found.times_ps) >= most
                or space.book.work.spent >= limit
                or space.book.is_past(expires_at)
            ):
                found.complete = False
                break
            partial = _take(waiting)
            space.book.work.spend_partial_groups(len(partial), space.n)
            partial, open_ = self._propagate(partial)
            worth = partial.known @ prices
            most_worth = worth + cliques.most(open_)
            possible = partial.known | open_
            keep = self._floor(partial.known, possible) < most_worth + room
            partial, open_, worth = partial[keep], open_[keep], worth[keep]
            allowed = self._allowed(partial.known, possible[keep])
            partial, open_, worth = partial[allowed], open_[allowed], worth[allowed]
            leaf = ~open_.any(axis=1)
            if not leaf.all():
                waiting += self._branches(partial[~leaf], open_[~leaf], prices)
            whole = partial[leaf]
            for k, mask in enumerate(masks(whole.known)):
                if space.book.is_past(expires_at):
                    waiting.append(whole[k:])
                    break
                if self._is_learnt(mask):
                    continue
                price = space.price(mask)
                if isinstance(price, Verdict):
                    self._learn(mask, price)
                elif price.time_ps < worth[leaf][k] + room:
                    found.times_ps[mask] = price.time_ps
        found.share = self._share(prices, waiting, found.times_ps, cliques)
        return found

    def _roots(self, prices: Figures, with_free: bool) -> _Partial:
        """A partial group for each position that has a price, or each at all, without those of higher prices:
        a group is found from its dearest member."""
        order = np.argsort(-prices, kind="stable")
        if not with_free:
            order = order[prices[order] > 0]
        rank = np.full(len(prices), len(prices))
        rank[order] = np.arange(len(order))
        known = np.zeros((len(order), len(prices)), dtype=bool)
        known[np.arange(len(order)), order] = True
        out = rank[None, :] < np.arange(len(order))[:, None]
        return _Partial(known, out, order)[::-1]

    def _propagate(self, partial: _Partial) -> tuple[_Partial, Sets]:
        """The partial groups that hold a legal group, with all that each of these holds, and the positions
        that it may hold beside."""
        known = partial.known.astype(np.float32)
        down, up = known @ self._below > 0, known @ self._above > 0
        hull = partial.known | (down & up)
        never = partial.out | (hull.astype(np.float32) @ self._apart > 0)
        fine = ~(hull & never).any(axis=1)
        hull, never, down, up = hull[fine], never[fine], down[fine], up[fine]
        # Nothing beyond a position that can never join, on a path from or to a member, joins either.
        beyond = (never & down).astype(np.float32) @ self._below > 0
        beyond |= (never & up).astype(np.float32) @ self._above > 0
        possible = hull | ~(never | beyond)
        seed = partial.seed[fine]
        reached = np.zeros_like(hull)
        reached[np.arange(len(seed)), seed] = True
        while True:
            more = (reached.astype(np.float32) @ self._near > 0) & possible & ~reached
            if not more.any():
                break
            reached |= more
        connected = ~(hull & ~reached).any(axis=1)
        hull, reached = hull[connected], reached[connected]
        return _Partial(hull, partial.out[fine][connected], seed[connected]), reached & ~hull

    def _allowed(self, known: Sets, possible: Sets) -> Sets:
        """Whether no monotone rule refuses each set of known members, and with it all that hold them."""
        some, never = known.astype(np.float32), (~possible).astype(np.float32)
        needed = (never @ self._read > 0) | self._kept
        crossing = (some @ self._made > 0) & needed | (some @ self._read > 0) & (never @ self._made > 0)
        questions = [known, crossing[:, : len(self.space.values)], ~possible]
        fits = ~self._misfits(np.concatenate(questions, axis=1))
        pairs = zip(masks(known[fits]), masks(crossing[fits]), strict=True)
        fits[fits] = [self._is_allowed(mask, exchanged) for mask, exchanged in pairs]
        return fits

    def _misfits(self, questions: Sets) -> Sets:
        """Whether a nogood of ``Space.misfits`` answers each question."""
        cores = self.space.misfits.cores
        if len(cores) != len(self._core_sizes):
            table = sets(cores, self.space.question_width).astype(np.float32).T
            self._cores, self._core_sizes = np.ascontiguousarray(table), table.sum(axis=0)
        return (questions.astype(np.float32) @ self._cores == self._core_sizes).any(axis=1)

    def _is_learnt(self, mask: Mask) -> bool:
        """Whether a nogood that was learnt after the last batch excludes the group."""
        space = self.space
        if len(space.misfits.cores) == len(self._core_sizes):
            return False
        return space.misfits.holds_core(space.question(mask, mask, space.crossing(mask)))

    def _learn(self, mask: Mask, verdict: Verdict) -> None:
        """Learn why a group that no rule refuses has no tile that fits."""
        if verdict.rule == "on-chip":
            space = self.space
            space.misfits.refused(space.question(mask, mask, space.crossing(mask)))

    def _is_allowed(self, mask: Mask, crossing: Mask) -> bool:
        if not mask & (mask - 1):
            return True  # XLA runs a single position, whatever the rules say.
        if self.space.breaks_rules(mask):
            return False
        return not (self.space.is_tight(mask) and self.space.overflows(mask, crossing))

    def _branches(self, partial: _Partial, open_: Sets, prices: Figures) -> list[_Partial]:
        """Each partial group without and with its open position of the highest price, a neighbour if there
        are several."""
        near = (partial.known.astype(np.float32) @ self._near > 0) & open_
        chosen = np.where(open_, prices + 1, -1) + 0.5 * near
        k, at = np.arange(len(partial)), chosen.argmax(axis=1)
        without, with_ = partial.out.copy(), partial.known.copy()
        without[k, at], with_[k, at] = True, True
        return [
            _Partial(partial.known, without, partial.seed),
            _Partial(with_, partial.out, partial.seed),
        ]

    def _share(
        self, prices: Figures, waiting: Sequence[_Partial], times_ps: dict[Mask, int], cliques: _Cliques
    ) -> Figures:
        """As ``Found.share``: 1 but for positions of groups that were found, or may be in groups that were
        not looked at."""
        share = np.ones(len(prices))
        for part in waiting:
            for start in range(0, len(part), _BATCH):
                partial, open_ = self._propagate(part[start : start + _BATCH])
                possible = partial.known | open_
                most_worth = np.maximum(partial.known @ prices + cliques.most(open_), 1)
                theirs = np.minimum(self._floor(partial.known, possible) / most_worth, 1)
                if len(theirs):
                    share = np.minimum(share, np.where(possible, theirs[:, None], 1).min(axis=0))
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
        while True:
            wider = [
                (
                    mask
                    | union_at(mask & space.below[i], space.below)
                    | union_at(mask & self._above_masks[i], self._above_masks)
                )
                & ~(1 << i)
                for i, mask in enumerate(found)
            ]
            wider = [a | b for a, b in zip(wider, transposed(wider), strict=True)]
            if wider == found:
                return found
            found = wider


class _Cliques:
    """A partition of the positions with a price into cliques of conflicts: a group holds one of each."""

    def __init__(self, conflicts: Sequence[Mask], prices: Figures) -> None:
        left = [i for i in np.argsort(-prices, kind="stable").tolist() if prices[i] > 0]
        order: list[int] = []
        self._starts: list[int] = []
        while left:
            self._starts.append(len(order))
            common, rest = conflicts[left[0]], []
            order.append(left[0])
            for i in left[1:]:
                if common >> i & 1:
                    order.append(i)
                    common &= conflicts[i]
                else:
                    rest.append(i)
            left = rest
        self._order = np.array(order, dtype=np.intp)
        self._prices = prices[self._order]

    def most(self, open_: Sets) -> Figures:
        """For each row, what the open positions add to the worth of a group at most."""
        if not self._starts:
            return np.zeros(len(open_))
        worth = open_[:, self._order] * self._prices
        return np.maximum.reduceat(worth, self._starts, axis=1).sum(axis=1)


def _take(waiting: list[_Partial]) -> _Partial:
    """The last of the partial groups that wait, a batch of them."""
    taken: list[_Partial] = []
    count = 0
    while waiting and count < _BATCH:
        last = waiting.pop()
        room = _BATCH - count
        if len(last) > room:
            waiting.append(last[: len(last) - room])
            last = last[len(last) - room :]
        taken.append(last)
        count += len(last)
    return _Partial.joined(taken)


def sets(masks: Iterable[Mask], width: int) -> Sets:
    """A row for each mask."""
    n_bytes = -(-width // 8)
    rows = [mask.to_bytes(n_bytes, "little") for mask in masks]
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), n_bytes)
    return np.unpackbits(table, axis=1, count=width, bitorder="little").astype(bool)


def masks(rows: Sets) -> Iterator[Mask]:
    """A mask for each row."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    return (int.from_bytes(row.tobytes(), "little") for row in packed)


def _table(masks: Sequence[Mask], width: int | None = None) -> Table:
    return sets(masks, len(masks) if width is None else width).astype(np.float32)
