"""Pricing within a user's constraints: groups that they forbid are refused.

``never_fuse`` and ``max_group_size`` are monotone and part of ``compatible``. ``max_kernel_args`` is not,
since a larger group may have fewer arrays: it is checked with the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from costmodel.graph import Graph, OpKind, arrays_of, boundary
from fuseplan.plan.constraints import Nodes, Resolved
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import Pricing, PricingWrapper
from fuseplan.schedule.structure import Signatures
from fuseplan.support.errors import Verdict

RULE = "constraint"


def marks(graph: Graph, constraints: Resolved) -> list[int]:
    """For each node, the sides of entries of ``never_fuse`` that it is on, as bits."""
    found = [0] * len(graph.nodes)
    for k, entry in enumerate(constraints.apart):
        for n in entry.a:
            found[n] |= 1 << 2 * k
        for n in entry.b or ():
            found[n] |= 2 << 2 * k
    return found


def marked(graph: Graph, constraints: Resolved) -> Graph:
    """``graph`` for planners: two nodes differ in structure if ``never_fuse`` names only one of them. A node
    that it names is absorbed by its reader (``presolve.absorb_moves``) only where it names the reader as
    well, so that no plan is lost."""
    if not constraints.apart:
        return graph
    found = marks(graph, constraints)
    known: dict[tuple[int, int], int] = {}
    nodes = []
    for node, mark in zip(graph.nodes, found, strict=True):
        readers = {n for v in node.outputs for n in graph.consumers[v]}
        stays = any(mark & ~found[n] for n in readers)
        signature = known.setdefault((node.signature, mark), len(known))
        nodes.append(replace(node, signature=signature, kind=OpKind.OPAQUE if stays else node.kind))
    return replace(graph, nodes=tuple(nodes))


def limited(graph: Graph, pricing: Pricing, constraints: Resolved | None) -> tuple[Graph, Pricing]:
    """A graph and its prices for planners, within all constraints but ``must_fuse``."""
    if constraints is None or not constraints.shapes_groups:
        return graph, pricing
    return marked(graph, constraints), ConstrainedPricing(graph, pricing, constraints)


class ConstrainedPricing(PricingWrapper):
    """``Pricing`` within all constraints but ``must_fuse`` (``fuseplan.search.must_fuse``). Where a kernel
    computes several copies of an operation once, they count as one operation, and their arrays as one.

    ``PriceBook`` takes groups of equal structure for equal: give it ``marked(graph, …)``.
    """

    def __init__(self, graph: Graph, pricing: Pricing, constraints: Resolved) -> None:
        self.graph = graph
        self.constraints = constraints
        super().__init__(pricing.unsettled())
        self._marks = marks(graph, constraints)
        self._origin = graph.origins if self.merges_copies else ()
        counted = constraints.max_group_size is not None or constraints.max_kernel_args is not None
        # To absorb an operation into its reader's kernel is free only where no limit counts it.
        self.absorbs_moves = self.absorbs_moves and not counted
        self.offers = tuple(nodes for nodes in self.offers if self.refuse(nodes) is None)

    @cached_property
    def _array(self) -> Sequence[int]:
        """A name for the array of each value."""
        return arrays_of(self.graph) if self._origin else range(len(self.graph.values))

    def compatible(self, nodes: Nodes) -> Verdict | None:
        return self._forbidden(nodes) or self._pricing.compatible(nodes)

    def renames(self, n: int) -> bool:
        """As ``Pricing.renames``. It has one array on either side, so moving it to another kernel changes no
        kernel's number of arrays; but it counts as an operation."""
        counted = self.constraints.max_group_size is not None
        return not counted and not self._marks[n] and self._pricing.renames(n)

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """As ``Pricing.cache_key``, with what the constraints say about ``nodes``: where that is
        nothing, it is what it would be without them."""
        known = self._pricing.cache_key(nodes, signatures)
        if known is None:
            return None
        said: list[object] = []
        for k, entry in enumerate(self.constraints.apart):
            sides = [self._marks[n] >> 2 * k & 3 for n in nodes]
            if any(sides):
                said.append((entry.text, entry.b is None, sides))
        limits = (self.constraints.max_group_size, self.constraints.max_kernel_args)
        return known if limits == (None, None) and not said else f"{known}\n{limits} {said}"

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        return self.refuse(nodes) or self._pricing.price(nodes)

    def refuse(self, nodes: Nodes) -> Verdict | None:
        """The constraint that the group breaks, or None."""
        return self._forbidden(nodes) or self._too_many_args(nodes)

    def _forbidden(self, nodes: Nodes) -> Verdict | None:
        """The monotone constraint that the group breaks, or None: every larger group breaks it too."""
        once = self._once(nodes)
        if len(once) < 2:
            return None
        most = self.constraints.max_group_size
        if most is not None and len(once) > most:
            return Verdict(RULE, f"max_group_size allows {most} operations in a kernel", nodes)
        sides = 0
        for n in once:
            sides |= self._marks[n]
        if sides:
            for k, entry in enumerate(self.constraints.apart):
                found = self._pair(once, k, entry.b is None) if sides >> 2 * k & 1 else None
                if found is not None:
                    return Verdict(RULE, entry.text, found)
        return None

    def _once(self, nodes: Nodes) -> Nodes:
        """One copy of each operation among ``nodes``."""
        return tuple({self._origin[n]: n for n in nodes}.values()) if self._origin else nodes

    def _pair(self, nodes: Nodes, k: int, from_all: bool) -> Nodes | None:
        """Two of ``nodes`` that the k-th entry keeps apart."""
        a = [n for n in nodes if self._marks[n] >> 2 * k & 1]
        b = nodes if from_all else [n for n in nodes if self._marks[n] >> 2 * k & 2]
        pair = next(((m, n) for m in a[:2] for n in b if m != n), None)
        return None if pair is None else (min(pair), max(pair))

    def _too_many_args(self, nodes: Nodes) -> Verdict | None:
        most = self.constraints.max_kernel_args
        if most is None or len(self._once(nodes)) < 2:
            return None
        edge, array = boundary(self.graph, nodes), self._array
        made = {array[v] for n in nodes for v in self.graph.nodes[n].outputs}
        count = len({array[v] for v in edge.reads} - made) + len({array[v] for v in edge.writes})
        if count <= most:
            return None
        return Verdict(RULE, f"max_kernel_args allows {most} arrays, and it would have {count}", nodes)
