"""Tiny graphs with a transparent price, and the best plan by trying every partition.

A graph is written as a string of kinds and a list of predecessors: ``graph("erc", [[], [0],
[0]])`` is an elementwise operation read by a row and by a column reduction. The kinds are

    e  elementwise        r, c  row and column reduction: they share no kernel
    a  anchor: nothing is fused into it, and no two share a kernel
    o  opaque             f     has side effects
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st

from costmodel.graph import Graph, Node, OpKind, Value, make_graph
from costmodel.kernel import Access, Cost, KernelSpec
from fuseplan import Kernel
from fuseplan.schedule.pricing import PriceBook, Pricing
from fuseplan.schedule.shared_operands import full_size_operands
from fuseplan.search.components import crossable_edges
from fuseplan.support.errors import Verdict

LAUNCH_PS = 7812
FULL, ROW = (128, 128), (64,)  # 65,536 and 256 bytes

_KINDS = {
    "e": OpKind.ELEMENTWISE,
    "r": OpKind.REDUCTION,
    "c": OpKind.REDUCTION,
    "a": OpKind.OUT_ELEMENTWISE_FUSABLE,
    "o": OpKind.OPAQUE,
    "f": OpKind.OPAQUE,
}


def graph(kinds: str, preds: Sequence[Sequence[int]], outputs: Sequence[int] = ()) -> Graph:
    """A node a letter. Sources read an input each (an anchor two); what nobody reads is an
    output, and so are ``outputs``."""
    values: list[Value] = []
    nodes: list[Node] = []
    inputs: list[int] = []

    def value(shape: tuple[int, ...], producer: int) -> int:
        values.append(Value(len(values), shape, "float32", producer))
        return len(values) - 1

    made: list[int] = []
    for i, (kind, before) in enumerate(zip(kinds, preds, strict=True)):
        reads = [made[p] for p in before]
        while len(reads) < (2 if kind == "a" and not before else 1):
            reads.append(value(FULL, -1))
            inputs.append(reads[-1])
        shape = ROW if kind in "rc" else max((values[v].shape for v in reads), key=len)
        made.append(value(shape, i))
        maps = tuple(((),) * len(values[v].shape) for v in reads)
        nodes.append(
            Node(
                i, kind, _KINDS[kind], tuple(reads), (made[i],), (), (), maps,
                (((),) * len(shape),), effects=kind == "f",
            )
        )  # fmt: skip
    read = {v for node in nodes for v in node.inputs}
    results = [v for i, v in enumerate(made) if v not in read or i in outputs]
    return make_graph(values, nodes, inputs, results)


class Bytes(Pricing):
    """A group costs a launch and the bytes it reads and writes, one picosecond a byte.

    ``max_nodes`` and ``max_made`` (full-size results inside a group) refuse groups by size,
    as on-chip memory does. Without ``foresees`` that comes out only when a group is priced.
    """

    def __init__(
        self,
        graph: Graph,
        max_nodes: int = 99,
        max_made: int = 99,
        floor: bool = True,
        foresees: bool = False,
        fuses_siblings: bool = False,
    ) -> None:
        self.graph = graph
        self.full_size_operands = lambda n: (
            full_size_operands(graph, graph.nodes[n]) if fuses_siblings else ()
        )
        self.max_nodes = max_nodes
        self.max_made = max_made
        self.foresees = foresees
        self.asked: list[tuple[int, ...]] = []
        if floor:
            self.floor = self._floor

    def compatible(self, nodes: tuple[int, ...]) -> Verdict | None:
        ops = "".join(self.graph.nodes[n].op for n in nodes)
        if len(nodes) == 1:
            return None
        if "f" in ops:
            return Verdict("side-effects", "has side effects", nodes)
        if "o" in ops:
            return Verdict("opaque", "a step of its own", nodes)
        if "r" in ops and "c" in ops:
            return Verdict("shapes", "rows and columns", nodes)
        if ops.count("a") > 1:
            return Verdict("shapes", "two anchors", nodes)
        made = {v for n in nodes for v in self.graph.nodes[n].outputs}
        if any(made.intersection(self.graph.nodes[n].inputs) for n in nodes if self.graph.nodes[n].op == "a"):
            return Verdict("shapes", "nothing is fused into an anchor", nodes)
        return None

    def oversized(self, nodes: tuple[int, ...], crossing: frozenset[int]) -> Verdict | None:
        return self._does_not_fit(nodes) if self.foresees else None

    def _does_not_fit(self, nodes: tuple[int, ...]) -> Verdict | None:
        made = [self.graph.values[v] for n in nodes for v in self.graph.nodes[n].outputs]
        full = sum(v.shape == FULL for v in made)
        if len(nodes) > 1 and (len(nodes) > self.max_nodes or full > self.max_made):
            return Verdict("on-chip", f"{full} full-size values", nodes)
        return None

    def renames(self, n: int) -> bool:
        return False

    def price(self, nodes: tuple[int, ...]) -> Kernel | Verdict:
        self.asked.append(nodes)
        refused = self.compatible(nodes) or self._does_not_fit(nodes)
        if refused is not None:
            return refused
        reads, writes = live_values(self.graph, nodes)
        read_bytes = sum(self.graph.values[v].nbytes for v in reads)
        write_bytes = sum(self.graph.values[v].nbytes for v in writes)
        cost = Cost(
            LAUNCH_PS, read_bytes + write_bytes, hbm_read_bytes=read_bytes, hbm_write_bytes=write_bytes
        )

        def whole(v: int) -> Access:
            return Access(v, ((),) * len(self.graph.values[v].shape))

        spec = KernelSpec(nodes, (), ((),) * len(nodes), tuple(map(whole, reads)), tuple(map(whole, writes)))
        return Kernel(spec, cost)

    def _floor(self, nodes: tuple[int, ...]) -> int:
        reads, writes = live_values(self.graph, nodes)
        return LAUNCH_PS + sum(self.graph.values[v].nbytes for v in reads + writes)


def live_values(graph: Graph, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
    """What the group reads from outside, and what is needed of it outside."""
    made = {v for n in nodes for v in graph.nodes[n].outputs}
    reads = sorted({v for n in nodes for v in graph.nodes[n].inputs} - made)
    writes = sorted(v for v in made if v in graph.outputs or set(graph.consumers[v]) - set(nodes))
    return reads, writes


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8, kinds: str = "eeeercaof") -> Graph:
    """A graph of up to ``max_nodes``; each node reads up to three earlier ones."""
    letters = draw(st.text(kinds, min_size=1, max_size=max_nodes))
    preds = [
        draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        for i in range(len(letters))
    ]
    outputs = draw(st.lists(st.integers(0, len(letters) - 1), max_size=2))
    return graph(letters, preds, outputs)


def brute_force(  # type: ignore[no-untyped-def]
    graph: Graph, pricing, siblings: Sequence[tuple[int, int]] | None = None
) -> tuple[tuple[int, int, int], tuple[tuple[int, ...], ...]]:
    """The least (time, bytes, kernels) over all partitions that can run, and one of them.

    Written without anything of ``fuseplan`` but the prices, and which nodes are siblings.
    """
    n = len(graph.nodes)
    after = edges_after(graph)
    siblings = siblings_of(graph, pricing) if siblings is None else siblings
    groups: dict[tuple[int, ...], tuple[int, int, int]] = {}
    for size in range(1, n + 1):
        for nodes in itertools.combinations(range(n), size):
            if not is_connected(graph, nodes, siblings) or not is_convex(after, nodes):
                continue
            kernel = pricing.price(nodes)
            if isinstance(kernel, Kernel):
                groups[nodes] = (kernel.cost.time_ps, kernel.cost.hbm_bytes, 1)
    best: list[tuple[tuple[int, int, int], tuple[tuple[int, ...], ...]]] = []

    def extend(
        chosen: tuple[tuple[int, ...], ...], total: tuple[int, int, int], left: frozenset[int]
    ) -> None:
        if best and total >= best[0][0]:
            return
        if not left:
            if can_run(after, chosen):
                best[:] = [(total, chosen)]
            return
        first = min(left)
        for nodes, cost in groups.items():
            if nodes[0] == first and left.issuperset(nodes):
                more = (total[0] + cost[0], total[1] + cost[1], total[2] + cost[2])
                extend((*chosen, nodes), more, left.difference(nodes))

    extend((), (0, 0, 0), frozenset(range(n)))
    return best[0]


def siblings_of(graph: Graph, pricing) -> tuple[tuple[int, int], ...]:  # type: ignore[no-untyped-def]
    """The pairs that may share a kernel for what both read."""
    if not hasattr(pricing, "full_size_operands"):
        return ()
    return crossable_edges(graph, PriceBook(graph, pricing)).siblings


def edges_after(graph: Graph) -> list[set[int]]:
    """For each node, those that must come later: its readers, and the next side effect."""
    after = [{c for v in node.outputs for c in graph.consumers[v]} for node in graph.nodes]
    effects = [node.id for node in graph.nodes if node.effects]
    for first, second in itertools.pairwise(effects):
        after[first].add(second)
    return after


def is_connected(graph: Graph, nodes: Sequence[int], siblings: Sequence[tuple[int, int]] = ()) -> bool:
    """Whether producer-consumer edges and pairs of siblings inside the group connect it."""
    inside, found, queue = set(nodes), {nodes[0]}, [nodes[0]]
    while queue:
        node = graph.nodes[queue.pop()]
        near = {c for v in node.outputs for c in graph.consumers[v]}
        near |= {graph.values[v].producer for v in node.inputs}
        near |= {m for pair in siblings if node.id in pair for m in pair}
        queue += (new := (near & inside) - found)
        found |= new
    return found == inside


def is_convex(after: Sequence[set[int]], nodes: Sequence[int]) -> bool:
    """Whether no path leaves the group and comes back."""
    inside = set(nodes)
    outside = {s for n in nodes for s in after[n]} - inside
    queue = list(outside)
    while queue:
        for s in after[queue.pop()]:
            if s in inside:
                return False
            if s not in outside:
                outside.add(s)
                queue.append(s)
    return True


def can_run(after: Sequence[set[int]], groups: Sequence[Sequence[int]]) -> bool:
    """Whether the groups have an order in which nothing is read before it is made."""
    waiting = [set(g) for g in groups]
    done: set[int] = set()
    before: list[set[int]] = [set() for _ in after]
    for n, successors in enumerate(after):
        for s in successors:
            before[s].add(n)
    while waiting:
        ready = [g for g in waiting if all(before[n] <= done | g for n in g)]
        if not ready:
            return False
        for g in ready:
            done |= g
            waiting.remove(g)
    return True
