"""Enforce ``must_fuse`` by edge contraction: merge the operations into one node before planning.

Every planner, also one registered from outside, then obeys the constraint without code for it: it plans a
graph with fewer nodes, whose prices are those of the contracted operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from costmodel.graph import Flops, Graph, Node, OpKind, boundary, make_graph
from costmodel.partial_floor import PartialFloor
from fuseplan.plan.constraints import Nodes, Resolved, Together
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.notes import renumbered
from fuseplan.schedule.pricing import Pricing
from fuseplan.schedule.structure import Signatures
from fuseplan.search.constrained_pricing import RULE, ConstrainedPricing, limited, marked
from fuseplan.search.grouping import Budget, Grouping, PlanGroups, order_groups
from fuseplan.search.selectors import Ties, joined
from fuseplan.support.digraph import cyclic_sets, execution_order
from fuseplan.support.errors import ConstraintError, Verdict


def plan_constrained(
    constraints: Resolved, plan_groups: PlanGroups, graph: Graph, pricing: Pricing, budget: Budget
) -> Grouping:
    """Plan the graph within the constraints.

    Raises:
        ConstraintError: they cannot hold.
    """
    require_possible(constraints, graph, pricing)
    if not constraints.together:
        return plan_groups(*limited(graph, pricing, constraints), budget)
    atoms = MustFusePricing(graph, ConstrainedPricing(graph, pricing, constraints))
    known = tuple(atoms.folded(nodes) for nodes in budget.known)
    return atoms.restored(plan_groups(atoms.graph, atoms, replace(budget, known=known)))


def require_possible(constraints: Resolved, graph: Graph, pricing: Pricing) -> None:
    """Raise ``ConstraintError`` if no plan obeys the constraints; the message names operations
    with their source lines, the rule, and the remedy."""
    within = ConstrainedPricing(graph, pricing, constraints)
    ties = Ties(graph, within.full_size_operands)
    for together in constraints.together:
        verdict = _why_not_one(ties, within, together.nodes)
        if verdict is not None:
            raise ConstraintError(_cannot_hold(graph, together, verdict))
    ranked, after = order_groups(graph, _groups(graph, constraints))
    for circle in cyclic_sets(after):
        waiting = [t for t in constraints.together if any(ranked[g] == t.nodes for g in circle)]
        nodes = tuple(sorted(n for t in waiting for n in t.nodes))
        verdict = Verdict("cycle", "the kernels would wait for each other", nodes)
        text = "; ".join(t.text for t in waiting)
        raise ConstraintError(_cannot_hold(graph, Together(text, nodes), verdict))


def _why_not_one(ties: Ties, limited: ConstrainedPricing, nodes: Nodes) -> Verdict | None:
    refused = limited.refuse(nodes)
    if refused is None and len(parts := ties.parts(nodes)) > 1:
        rest = tuple(sorted(set(nodes).difference(parts[0])))
        refused = Verdict("producer-consumer", "no value passes between them and the others", rest)
    price = refused or limited.price(nodes)
    return price if isinstance(price, Verdict) else None


def _cannot_hold(graph: Graph, together: Together, verdict: Verdict) -> str:
    inside = [n for n in verdict.nodes if n in together.nodes] or list(together.nodes)
    listed = ", ".join(
        f"n{n} {graph.nodes[n].op}" + (f" at {source}" if (source := graph.nodes[n].source) else "")
        for n in inside[:4]
    )
    more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
    remedy = "Leave them out of must_fuse, or choose a planner or device that allows it"
    if verdict.rule == RULE:
        remedy = "Drop one of the two, or raise the limit"
    elif verdict.rule == "cycle":
        remedy = "Ask for one kernel of all of them, or drop an entry"
    elif verdict.rule == "producer-consumer":
        remedy = "Add what ties them together to the entry, or make it two entries"
    return (
        f"{together.text}: {len(together.nodes)} operations, with what lies between, but {verdict} "
        f"({listed}{more}). {remedy}"
    )


def _groups(graph: Graph, constraints: Resolved) -> list[Nodes]:
    """The groups of ``must_fuse``, and all other nodes one by one."""
    inside = {n for t in constraints.together for n in t.nodes}
    single = [(n,) for n in range(len(graph.nodes)) if n not in inside]
    return [*single, *(t.nodes for t in constraints.together)]


class MustFusePricing(Pricing):
    """``Pricing`` of the graph in which each group of ``must_fuse`` is one node. Values keep their ids."""

    def __init__(self, graph: Graph, limited: ConstrainedPricing) -> None:
        self._whole, self._limited = graph, limited
        groups, after = order_groups(graph, _groups(graph, limited.constraints))
        self.members = [groups[g] for g in execution_order(after)]
        """For each node, those of the whole graph that it stands for."""
        self.position = {n: i for i, nodes in enumerate(self.members) for n in nodes}
        self.graph = _contracted(marked(graph, limited.constraints), self.members, self.position)
        self.absorbs_moves, self.merges_copies = limited.absorbs_moves, limited.merges_copies
        self.crosses_hubs, self.device = limited.crosses_hubs, limited.device
        offers = (self.folded(nodes) for nodes in self._offered())
        self.offers = tuple(dict.fromkeys(nodes for nodes in offers if len(nodes) > 1))
        self._below_floor = frozenset(i for i, nodes in enumerate(self.members) if self._beats_floor(nodes))

    def _offered(self) -> Iterator[Nodes]:
        """The scheduler's offers; one that holds a part of a ``must_fuse`` group is widened to the whole."""
        limited = self._limited
        for nodes in limited.offers:
            if limited.constraints.cut(nodes) is None:
                yield nodes
                continue
            together = joined(self._whole, [*limited.constraints.together, Together("", nodes)])
            (wider,) = (t.nodes for t in together if nodes[0] in t.nodes)
            if not isinstance(limited.price(wider), Verdict):
                yield wider

    def folded(self, nodes: Iterable[int]) -> Nodes:
        """The nodes of this graph that stand for ``nodes`` of the whole graph."""
        return tuple(sorted({self.position[n] for n in nodes}))

    def expanded(self, nodes: Iterable[int]) -> Nodes:
        """The nodes of the whole graph that ``nodes`` of this one stand for."""
        return tuple(sorted(n for i in nodes for n in self.members[i]))

    def _beats_floor(self, nodes: Nodes) -> bool:
        """Whether it is a loop nest that skips tiles, and so takes less time than the floor of its nodes."""
        if len(nodes) == 1:
            return False
        kernel = self._limited.price(nodes)
        return isinstance(kernel, Kernel) and kernel.cost.time_ps < self._limited.floor(nodes)

    def floor(self, nodes: Nodes) -> int:
        return 0 if self._below_floor.intersection(nodes) else self._limited.floor(self.expanded(nodes))

    def least(self, nodes: Nodes) -> int:
        """As ``Pricing.least``; 0 where a contracted node is a loop nest below the floor."""
        return 0 if self._below_floor.intersection(nodes) else self._limited.least(self.expanded(nodes))

    def floors(self, nodes: Nodes) -> tuple[int, int]:
        """As ``Pricing.floors``; 0 bytes where a contracted node is a loop nest below the floor."""
        is_below = self._below_floor.intersection(nodes)
        return self.least(nodes), 0 if is_below else self._limited.floors(self.expanded(nodes))[1]

    def partial_floor(self, members: Sequence[Nodes]) -> PartialFloor | None:
        """As ``Pricing.partial_floor``; None where a contracted node is a loop nest below the floor."""
        is_below = any(self._below_floor.intersection(nodes) for nodes in members)
        return None if is_below else self._limited.partial_floor([self.expanded(m) for m in members])

    def full_size_operands(self, n: int) -> Nodes:
        """As ``Pricing.full_size_operands``: those of all of its members."""
        return tuple(dict.fromkeys(v for m in self.members[n] for v in self._limited.full_size_operands(m)))

    def compatible(self, nodes: Nodes) -> Verdict | None:
        """As ``Pricing.compatible``. ``require_possible`` has checked single nodes."""
        return self._here(self._limited.compatible(self.expanded(nodes))) if len(nodes) > 1 else None

    def oversized(self, nodes: Nodes, crossing: frozenset[int]) -> Verdict | None:
        if len(nodes) == 1:
            return None
        return self._here(self._limited.oversized(self.expanded(nodes), crossing))

    def oversized_beside(
        self, nodes: Nodes, crossing: frozenset[int], joiners: Collection[int]
    ) -> Verdict | None:
        if len(nodes) == 1:
            return None
        every = self.expanded(tuple(sorted(joiners)))
        return self._here(self._limited.oversized_beside(self.expanded(nodes), crossing, every))

    def renames(self, n: int) -> bool:
        return len(self.members[n]) == 1 and self._limited.renames(self.members[n][0])

    def cache_key(self, nodes: Nodes, signatures: Signatures) -> str | None:
        """As ``Pricing.cache_key``: what ``nodes`` stand for, and how. Where each stands for itself
        and may do what it might without constraints, it is what it would be without them."""
        whole = self.expanded(nodes)
        known = self._limited.cache_key(whole, signatures)
        graph = self._limited.graph
        kinds = [
            (i, node.kind)
            for i, n in enumerate(nodes)
            if (node := self.graph.nodes[n]).kind != graph.nodes[self.members[n][0]].kind
        ]
        apart = [self.members[n] for n in nodes]
        if known is None or (not kinds and apart == [(n,) for n in whole]):
            return known
        place = {n: i for i, n in enumerate(whole)}
        return f"{known}\n{kinds} {[[place[n] for n in group] for group in apart]}"

    def price(self, nodes: Nodes) -> Kernel | Verdict:
        kernel = self._limited.price(self.expanded(nodes))
        if isinstance(kernel, Verdict):
            return self._here(kernel) or kernel
        return replace(kernel, spec=replace(kernel.spec, nodes=nodes))

    def _here(self, verdict: Verdict | None) -> Verdict | None:
        """Translate a verdict about nodes of the whole graph to nodes of this one."""
        if verdict is None:
            return None
        return replace(verdict, nodes=self.folded(verdict.nodes))

    def restored(self, grouping: Grouping) -> Grouping:
        """Translate a planner's answer about this graph to the whole one."""
        kernels = (
            replace(k, spec=replace(k.spec, nodes=self.expanded(k.spec.nodes))) for k in grouping.kernels
        )
        return replace(
            grouping,
            kernels=tuple(kernels),
            refusals=tuple(replace(v, nodes=self.expanded(v.nodes)) for v in grouping.refusals),
            notes=renumbered(grouping.notes, lambda n: self.members[n][0]),
            stats=replace(grouping.stats, equations=len(self._whole.nodes)),
            with_too_many_copies=tuple(map(self.expanded, grouping.with_too_many_copies)),
            # The proof of a contracted graph does not hold for the whole one.
            proof=grouping.proof if self.members == [(n,) for n in range(len(self.members))] else None,
        )


def _contracted(graph: Graph, members: Sequence[Nodes], position: dict[int, int]) -> Graph:
    """The graph with one node for each of ``members``.

    Two contracted nodes are alike only if their members have equal structure *and* order: the price of one
    group is carried over to another of equal structure node by node.
    """
    signatures = Signatures(graph)
    loose = [nodes for nodes in members if nodes[-1] - nodes[0] >= len(nodes)]
    tangled = {n for nodes in loose for n in range(nodes[0], nodes[-1] + 1)}
    known: dict[tuple[int, ...], int] = {}
    new: list[Node] = []
    for i, nodes in enumerate(members):
        node = graph.nodes[nodes[0]]
        node = replace(node, id=i) if len(nodes) == 1 else _atom(graph, i, nodes)
        if len(nodes) > 1:
            key = signatures.of(nodes).key
            node = replace(node, signature=known.setdefault(key, len(known)))
        if tangled.intersection(nodes):
            node = replace(node, signature=-1 - nodes[0])
        new.append(node)
    values = (replace(v, producer=position[v.producer]) if v.producer >= 0 else v for v in graph.values)
    first: dict[int, int] = {}
    origins = (
        first.setdefault(graph.origins[nodes[0]], i) for i, nodes in enumerate(members) if graph.origins
    )
    waits = dict.fromkeys((position[u], position[v]) for u, v in graph.waits)
    apart = [(u, v) for u, v in waits if u != v]
    return make_graph(values, new, graph.inputs, graph.outputs, origins, apart)


def _atom(graph: Graph, i: int, nodes: Nodes) -> Node:
    """One node for several: it reads the values that they read from outside, and writes those read there."""
    edge = boundary(graph, nodes)
    flops = sum((graph.nodes[n].flops for n in nodes), Flops())
    return Node(i, "must_fuse", OpKind.OPAQUE, edge.reads, edge.writes, (), (), (), (), flops)
