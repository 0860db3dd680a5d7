"""Small graphs and kernels in which everything occurs that memory depends on: arrays without
elements, bitcasts of temporaries, inputs and outputs, side effects, kernels with blocks of their
own; and the least peak by trying every order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import hypothesis.strategies as st

from costmodel.graph import Graph, Node, OpKind, Value, make_graph
from costmodel.kernel import Access, Cost, KernelSpec
from costmodel.memory import peak_bytes
from fuseplan import Kernel
from tests.helpers.small_graphs import can_run, edges_after, is_connected, is_convex, live_values

SIZES = (0, 1, 1, 2, 3, 5, 8)


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 7) -> Graph:
    """Values of up to 8 KiB. Nodes read up to three values; some only rename their first."""
    values = [Value(0, (256,), "float32", -1), Value(1, (512,), "float32", -1)]
    nodes: list[Node] = []
    for n in range(draw(st.integers(1, max_nodes))):
        reads = tuple(
            draw(st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=3, unique=True))
        )
        kind = draw(st.sampled_from("eeeebbff"))
        sizes = [256 * draw(st.sampled_from(SIZES)) for _ in range(draw(st.sampled_from((1, 1, 1, 2))))]
        if kind == "b":
            reads, sizes = reads[:1], [values[reads[0]].size]
        writes = tuple(range(len(values), len(values) + len(sizes)))
        values += [Value(v, (size,), "float32", n) for v, size in zip(writes, sizes, strict=True)]
        nodes.append(
            Node(
                n, kind, OpKind.OPAQUE if kind == "f" else OpKind.ELEMENTWISE, reads, writes, (), (),
                (((),),) * len(reads), (((),),) * len(writes), bitcast=kind == "b", effects=kind == "f",
            )
        )  # fmt: skip
    made = [v.id for v in values if v.producer >= 0]
    outputs = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    if draw(st.booleans()):
        outputs = list(dict.fromkeys([*outputs, made[-1]]))
    return make_graph(values, nodes, (0, 1), outputs)


def kernel(graph: Graph, nodes: Sequence[int], tile_bytes: int = 0, time_ps: int = 1) -> Kernel:
    """The group as a kernel that keeps ``tile_bytes`` to itself."""
    reads, writes = live_values(graph, nodes)
    renames = all(graph.nodes[n].bitcast for n in nodes)
    spec = KernelSpec(
        tuple(nodes), (), ((),) * len(nodes),
        tuple(Access(v, ((),)) for v in reads), tuple(Access(v, ((),)) for v in writes),
        backend="loops" if tile_bytes and not renames else "xla",
    )  # fmt: skip
    moved = 0 if renames else sum(graph.values[v].nbytes for v in reads + writes)
    return Kernel(spec, Cost(0 if renames else time_ps, moved, onchip_bytes=tile_bytes, hbm_read_bytes=moved))


@st.composite
def programs(draw: st.DrawFn, max_nodes: int = 7) -> tuple[Graph, tuple[Kernel, ...]]:
    """A graph, and its nodes in kernels by lowest node that can run."""
    graph = draw(graphs(max_nodes))
    after = edges_after(graph)
    groups: list[tuple[int, ...]] = [(n,) for n in range(len(graph.nodes))]
    for _ in range(draw(st.integers(0, 3))):
        a, b = draw(st.sampled_from(groups)), draw(st.sampled_from(groups))
        both = tuple(sorted({*a, *b}))
        rest = [g for g in groups if g not in (a, b)]
        fits = not any(graph.nodes[n].effects for n in both)
        if fits and is_connected(graph, both) and is_convex(after, both) and can_run(after, [*rest, both]):
            groups = [*rest, both]
    kernels = [kernel(graph, g, draw(st.sampled_from((0, 0, 0, 512, 3000)))) for g in sorted(groups)]
    return graph, next(orders(graph, kernels))


def orders(graph: Graph, kernels: Sequence[Kernel]) -> Iterator[tuple[Kernel, ...]]:
    """Every order that can run, the first one the lowest kernel first."""
    after = edges_after(graph)
    before = [{u for u in range(len(after)) if n in after[u]} for n in range(len(after))]

    def extend(done: frozenset[int], order: tuple[Kernel, ...]) -> Iterator[tuple[Kernel, ...]]:
        if len(order) == len(kernels):
            yield order
        for k in kernels:
            nodes = set(k.spec.nodes)
            if not nodes & done and all(before[n] <= done | nodes for n in nodes):
                yield from extend(done | nodes, (*order, k))

    return extend(frozenset(), ())


def peak(graph: Graph, kernels: Sequence[Kernel]) -> int:
    """By the definition."""
    tiles = [k.cost.onchip_bytes if k.spec.backend == "loops" else 0 for k in kernels]
    return peak_bytes(graph, [k.spec for k in kernels], tiles)


def least_peak_by_force(graph: Graph, kernels: Sequence[Kernel], limit: int = 3000) -> int | None:
    """The least peak of all orders; None where there are more than ``limit``."""
    every = list(itertools.islice(orders(graph, kernels), limit + 1))
    return min(peak(graph, order) for order in every) if len(every) <= limit else None
