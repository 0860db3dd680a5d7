"""What a group of copies costs, the long way: the graph in which they are one, and nothing else is.

Written without anything that plans copies: a group's kernel is what the plain scheduler makes of an
ordinary graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations

from costmodel.device import DeviceSpec
from costmodel.graph import Graph, copies_of, make_graph
from costmodel.roofline import estimate
from fuseplan import Features, Kernel
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.legality import refuse_loop
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import Verdict


class ByHand:
    """``Pricing.price`` of groups of a split graph that are in the search space."""

    def __init__(
        self, graph: Graph, device: DeviceSpec, offers: Collection[tuple[int, ...]] | None = None
    ) -> None:
        self.graph, self.device = graph, device
        self.offers = offers
        """The groups that break the rules and are kernels all the same; None: all that have a price."""
        self.loops = frozenset(offers or ())
        """The groups that may be loops of XLA."""
        self.copies = {n: nodes for nodes in copies_of(graph) for n in nodes}
        self._renames = Scheduler(graph, device).renames

    def price(self, nodes: Sequence[int]) -> Kernel | Verdict:
        """The kernel that computes each operation of the group once, or why it is none."""
        if not self.is_searched(set(nodes)):
            return Verdict("copies", "not in the search space", tuple(nodes))
        merged, new = merged_in(self.graph, nodes)
        group = tuple(sorted({new[n] for n in nodes}))
        scheduler = Scheduler(merged, self.device, features=Features(xla_loops=False))
        if self.offers is not None and tuple(nodes) not in self.offers:
            refused = scheduler.compatible(group)
            if refused is not None:
                return refused
        kernel = scheduler.price(group)
        loop = self._loop(merged, group) if tuple(nodes) in self.loops else None
        if loop is None:
            return kernel
        return loop if isinstance(kernel, Verdict) or loop.cost.time_ps < kernel.cost.time_ps else kernel

    def _loop(self, merged: Graph, group: tuple[int, ...]) -> Kernel | None:
        """The group as one loop of XLA."""
        if refuse_loop(merged, group, self.device.backend) is not None:
            return None
        spec = whole_array_spec(merged, group)
        return Kernel(spec, estimate(merged, spec, self.device))

    def is_searched(self, group: set[int]) -> bool:
        """The three sentences of ``fuseplan.search.remat.duplicates``, one after the other."""
        graph = self.graph
        for n in group:
            for v in graph.nodes[n].inputs:
                own = graph.values[v].producer
                if own not in group and group.intersection(self.copies.get(own, ())):
                    return False
            every = self.copies.get(n, ())
            if not every or group.issuperset(every):
                continue
            readers = {r for v in graph.nodes[n].outputs for r in graph.consumers[v]}
            is_result = not graph.results.isdisjoint(graph.nodes[n].outputs)
            if len(every) > 2 and (is_result or not group & readers):
                return False
            if not group.issuperset(self._leading(n)):
                return False
        return True

    def _leading(self, n: int) -> set[int]:
        makers = {self.graph.values[v].producer for v in self.graph.nodes[n].inputs}
        found = {m for m in makers & self.copies.keys() if self._leads_to_this_alone(m, n)}
        behind = set[int]().union(*(self._leading(m) for m in found if self._renames(m)))
        least = self._made(self._reader_behind(n))
        return {m for m in found if self._renames(m) or self._made(m) >= least} | behind

    def _reader_behind(self, n: int) -> int:
        """The operation for which alone ``n`` renames; else ``n``."""
        readers = [r for v in self.graph.nodes[n].outputs for r in self.graph.consumers[v]]
        is_result = not self.graph.results.isdisjoint(self.graph.nodes[n].outputs)
        if not self._renames(n) or len(set(readers)) != 1 or is_result:
            return n
        return self._reader_behind(readers[0])

    def _made(self, n: int) -> int:
        return sum(self.graph.values[v].nbytes for v in self.graph.nodes[n].outputs)

    def _leads_to_this_alone(self, maker: int, n: int) -> bool:
        graph = self.graph
        made = {v for m in self.copies[maker] for v in graph.nodes[m].outputs}
        readers = {r for v in made for r in graph.consumers[v]}
        return made.isdisjoint(graph.results) and readers <= set(self.copies[n])


def ties(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Copies of one operation may share a kernel for that alone."""
    return tuple(pair for nodes in copies_of(graph) for pair in combinations(nodes, 2))


def merged_in(graph: Graph, group: Sequence[int]) -> tuple[Graph, dict[int, int]]:
    """The graph with the copies in ``group`` made one, and those that it reads, and the new number of
    each node."""
    inside = set(group)
    read = {graph.values[v].producer for n in inside for v in graph.nodes[n].inputs} - inside
    stands_for: dict[int, int] = {}
    for n, origin in enumerate(graph.origins):
        alike = [m for m in (inside if n in inside else read) if graph.origins[m] == origin]
        stands_for[n] = min(alike) if n in inside | read else n
    value = {
        v: w
        for n, m in stands_for.items()
        for v, w in zip(graph.nodes[n].outputs, graph.nodes[m].outputs, strict=True)
    }
    kept_nodes = sorted(set(stands_for.values()))
    kept_values = [v.id for v in graph.values if value.get(v.id, v.id) == v.id]
    node_id = {n: i for i, n in enumerate(kept_nodes)}
    value_id = {v: i for i, v in enumerate(kept_values)}

    def named(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(value_id[value.get(v, v)] for v in values)

    nodes = [
        replace(node, id=node_id[n], inputs=named(node.inputs), outputs=named(node.outputs))
        for n in kept_nodes
        for node in [graph.nodes[n]]
    ]
    values = [
        replace(graph.values[v], id=value_id[v], producer=node_id.get(graph.values[v].producer, -1))
        for v in kept_values
    ]
    merged = make_graph(values, nodes, named(graph.inputs), dict.fromkeys(named(graph.outputs)))
    return merged, {n: node_id[m] for n, m in stands_for.items()}
