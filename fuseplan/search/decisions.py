"""Pairs of positions that one group holds, and pairs that no group holds, with all that follows from them.

These are the branches of branch and price for partitions (Ryan and Foster, "An integer programming approach
to scheduling", 1981): in each plan, one group holds two positions or two groups do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from costmodel.set_tables import as_sets
from fuseplan.search.partial_groups import masks
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import cyclic_sets

Pair = tuple[int, int]


@dataclass(frozen=True)
class Decisions:
    """What is decided of a component's plans.

    Args:
        space: the component.
        bars: for each position, those that no group holds beside it, whatever is decided; offered groups may.
        together: pairs that one group holds.
        apart: pairs that no group holds.
    """

    space: Space
    bars: Sequence[Mask]
    together: tuple[Pair, ...] = ()
    apart: tuple[Pair, ...] = ()

    def and_together(self, pair: Pair) -> Decisions:
        """These decisions, and that one group holds ``pair``."""
        return Decisions(self.space, self.bars, (*self.together, pair), self.apart)

    def and_apart(self, pair: Pair) -> Decisions:
        """These decisions, and that no group holds ``pair``."""
        return Decisions(self.space, self.bars, self.together, (*self.apart, pair))

    @cached_property
    def classes(self) -> list[Mask]:
        """For each position, those that the same group holds.

        The kernels of a plan can run in some order. So what lies on a path between two positions of a class
        is in it, and classes of which each waits for the other are one: the strongly connected sets of the
        dependences and the pairs, these in both directions.
        """
        space = self.space
        found = [1 << i for i in range(space.n)]
        if not self.together:
            return found
        after = [set(bits(mask)) for mask in space.component.apart]
        for i, producers in enumerate(space.producers):
            for u in producers:
                after[u].add(i)
        for i, j in self.together:
            after[i].add(j)
            after[j].add(i)
        for members in cyclic_sets(after):
            mask = sum(1 << i for i in members)
            for i in members:
                found[i] = mask
        return found

    @cached_property
    def conflicts(self) -> list[Mask]:
        """For each position, those that no group holds beside it, but offered ones."""
        if not (self.together or self.apart):
            return list(self.bars)
        found = list(self.bars)
        for i, j in self.apart:
            found[i] |= 1 << j
            found[j] |= 1 << i
        return closed_conflicts(self.space, found, self.wholes)

    @cached_property
    def wholes(self) -> list[Mask]:
        """The classes of several positions."""
        return sorted({mask for mask in self.classes if mask & (mask - 1)})

    @cached_property
    def _pairs(self) -> list[Mask]:
        return [1 << i | 1 << j for i, j in self.apart]

    def allow(self, group: Mask, is_offered: bool) -> bool:
        """Whether a plan that obeys these decisions may have the group, a legal one."""
        if any(group & whole not in (0, whole) for whole in self.wholes):
            return False
        if any(group & pair == pair for pair in self._pairs):
            return False
        return is_offered or all(not self.conflicts[i] & group for i in bits(group))


def closed_conflicts(space: Space, conflicts: Sequence[Mask], wholes: Sequence[Mask] = ()) -> list[Mask]:
    """For each position, those of ``conflicts``, which are symmetric, and those that follow.

    What lies beyond a conflict on a path would bring that in. Of each of ``wholes``, which groups hold as a
    whole or not at all, all positions have the conflicts of each.
    """
    n = space.n
    below, above = as_sets(space.below, n), as_sets(space.above, n)
    found = as_sets(conflicts, n)
    together = [bits(whole) for whole in wholes]
    while True:
        before = found.copy()
        for members in together:
            found[members] = found[members].any(axis=0)
        found |= space.below_table(found & below) | space.above_table(found & above)
        found |= found.T
        if (found == before).all():
            return list(masks(found))


def undecided(decisions: Decisions, usage: dict[Mask, float]) -> dict[Pair, float]:
    """The pairs that some groups in use hold, and of which others hold one, each with the lesser of both
    usages: a pair stands for the classes of its positions, which are the lowest of these.

    Args:
        usage: how much of each group a solution of the linear program uses.
    """
    firsts = sorted({(mask & -mask).bit_length() - 1 for mask in decisions.classes})
    holds = np.array([[group >> i & 1 for i in firsts] for group in usage], dtype=np.float64)
    both = (holds * np.array(list(usage.values()))[:, None]).T @ holds
    each = np.diag(both)
    one = each[:, None] + each[None, :] - 2 * both
    open_ = np.triu(np.minimum(both, one), 1)
    at = zip(*np.nonzero(open_ > UNDECIDED), strict=True)
    return {(firsts[a], firsts[b]): float(open_[a, b]) for a, b in at}


UNDECIDED = 0.02
"""A pair is undecided if more than this of both is in use. The linear program, which prefers some duals,
is wrong by a thousandth for each position."""
