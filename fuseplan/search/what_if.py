"""What-if pricing: whether other groups of a plan's nodes are possible, and what they would cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodel.graph import Graph
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.schedule.pricing import Nodes, PriceBook, total_of
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.selectors import Ties
from fuseplan.support.digraph import cyclic_sets, group_successors
from fuseplan.support.errors import Verdict


@dataclass(frozen=True, slots=True)
class Change:
    """Some kernels of a plan replaced by other groups of the same nodes."""

    groups: tuple[Nodes, ...]
    extra_ps: int
    extra_hbm_bytes: int


class Regrouping:
    """Prices other groups of a plan's nodes; prices are remembered."""

    def __init__(self, plan: FusionPlan) -> None:
        self.plan = plan
        self.graph: Graph = plan.graph
        self.loops = not plan.device.capabilities.emits_kernels
        """Whether groups may be tiled loops, which break rules that others keep."""
        self.constraints = plan.constraints or Resolved()
        scheduler = Scheduler(plan.graph, plan.device, plan.program, plan.features)
        self.book = PriceBook(*limited(plan.graph, scheduler, self.constraints))
        self.ties = Ties(plan.graph, self.book.full_size_operands)
        self.groups: list[Nodes] = [k.spec.nodes for k in plan.kernels]
        self.kernel_of = {n: k for k, nodes in enumerate(self.groups) for n in nodes}

    def merge(self, kernels: Iterable[int]) -> Change | Verdict:
        """The change that makes ``kernels``, and all kernels between them, one kernel."""
        chosen = set(kernels)
        while True:
            closure = self.ties.between({n for k in chosen for n in self.groups[k]})
            wider = {self.kernel_of[n] for n in closure}
            if wider == chosen:
                break
            chosen = wider
        nodes = tuple(sorted(closure))
        refused = self.why_no_kernel(nodes)
        if refused is not None:
            return refused
        return self.change(chosen, [nodes])

    def why_no_kernel(self, nodes: Nodes) -> Verdict | None:
        """Why ``nodes`` cannot be one kernel, by a rule or for want of a schedule."""
        if len(nodes) > 1 and len(self.ties.parts(nodes)) > 1:
            return Verdict(
                "producer-consumer",
                "no value passes between them, nor do they read one array side by side",
                nodes,
            )
        # A group that the rules refuse may be tiled loops: only its price tells.
        refused = None if self.loops else self.book.compatible(nodes)
        price = refused or self.book.price(nodes)
        return price if isinstance(price, Verdict) else None

    def change(self, kernels: Iterable[int], groups: Sequence[Nodes]) -> Change | Verdict:
        """Replace ``kernels`` by ``groups``, if the rest can then still run."""
        cut = next((t for group in groups if (t := self.constraints.cut(group)) is not None), None)
        if cut is not None:
            return Verdict("constraint", cut.text, cut.nodes)
        gone = set(kernels)
        others = [g for k, g in enumerate(self.groups) if k not in gone]
        after = group_successors(self.ties.edges, [*groups, *others])
        if cyclic_sets(after):
            return Verdict("cycle", "the kernels would wait for each other", groups[0])
        prices = [self.book.price(group) for group in groups]
        refused = next((price for price in prices if isinstance(price, Verdict)), None)
        if refused is not None:
            return refused
        new, now = total_of(prices), [self.plan.kernels[k].cost for k in gone]
        extra_ps = new.time_ps - sum(cost.time_ps for cost in now)
        return Change(tuple(groups), extra_ps, new.hbm_bytes - sum(cost.hbm_bytes for cost in now))

    def pieces(self, nodes: Iterable[int]) -> list[Nodes]:
        """``nodes`` as kernels: each connected part that has a price is one, other nodes are one each."""
        pieces: list[Nodes] = []
        for part in self.ties.parts(tuple(nodes)):
            convex = set(part) == self.ties.between(set(part))
            if convex and self.why_no_kernel(part) is None:
                pieces.append(part)
            else:
                pieces += [(n,) for n in part]
        return pieces

    def split_out(self, nodes: Nodes) -> Change | Verdict:
        """The change that makes ``nodes`` one kernel and leaves other nodes of their kernels in pieces."""
        refused = self.why_no_kernel(nodes)
        if refused is not None:
            return refused
        kernels = {self.kernel_of[n] for n in nodes}
        rest = {n for k in kernels for n in self.groups[k]} - set(nodes)
        return self.change(kernels, [nodes, *self.pieces(rest)])
