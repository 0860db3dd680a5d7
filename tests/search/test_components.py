"""Which edges a group may cross, against the definition; components and their equality."""

import itertools
from dataclasses import replace

from hypothesis import given, settings

from costmodel.devices import TEST_DEVICE
from costmodel.graph import make_graph
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.shared_operands import MAX_PORTS
from fuseplan.schedule.structure import Signatures
from fuseplan.search.components import component_key, components, crossable_edges, data_edges, effect_edges
from tests.helpers.graphs import GraphBuilder
from tests.helpers.small_graphs import Bytes, edges_after, graph, graphs, is_connected, is_convex


def decompose(g):
    book = PriceBook(g, Bytes(g))
    crossable = crossable_edges(g, book)
    return crossable, components(g, crossable)


def legal_groups(g):
    pricing, after = Bytes(g), edges_after(g)
    for size in range(1, len(g.nodes) + 1):
        for nodes in itertools.combinations(range(len(g.nodes)), size):
            if (
                is_connected(g, nodes)
                and is_convex(after, nodes)
                and not any(pricing.compatible(p) for p in itertools.combinations(nodes, 2) if p in pairs(g))
            ):
                yield nodes


def pairs(g):
    return set(data_edges(g))


def barrier_path(g, crossable, start, goal):
    """Whether some path from ``start`` to ``goal`` runs through a barrier."""
    after = edges_after(g)
    barriers = set(crossable.barriers)
    queue, seen = [(start, False)], set()
    while queue:
        n, crossed = queue.pop()
        if n == goal and crossed:
            return True
        for s in after[n]:
            state = (s, crossed or (n, s) in barriers)
            if state not in seen:
                seen.add(state)
                queue.append(state)
    return False


@settings(max_examples=200, deadline=None)
@given(graphs(max_nodes=9))
def test_no_legal_group_crosses_a_dropped_edge(g):
    crossable, parts = decompose(g)
    assert set(crossable.kept).isdisjoint(crossable.barriers)
    assert set(crossable.kept) | set(crossable.barriers) == pairs(g) | set(effect_edges(g))
    where = {n: i for i, c in enumerate(parts) for n in c.nodes}
    for nodes in legal_groups(g):
        assert len({where[n] for n in nodes}) == 1
        for u, v in crossable.barriers:
            assert not {u, v} <= set(nodes)


@settings(max_examples=200, deadline=None)
@given(graphs(max_nodes=9))
def test_every_edge_with_a_path_around_it_through_a_barrier_is_dropped(g):
    crossable, parts = decompose(g)
    for u, v in crossable.kept:
        assert not barrier_path(g, crossable, u, v)
    for c in parts:
        for (i, u), (j, v) in itertools.product(enumerate(c.nodes), repeat=2):
            assert bool(c.apart[i] >> j & 1) == (u < v and barrier_path(g, crossable, u, v))


def test_the_residual_stream_is_cut_at_every_layer():
    # x -> anchor -> add, and x -> add directly: the sum cannot join x.
    g = graph("eaea", [[], [0], [0, 1], [2]])
    crossable, parts = decompose(g)
    assert (0, 2) in crossable.barriers
    assert [c.nodes for c in parts] == [(0,), (1, 2), (3,)]
    assert {v.rule for v in crossable.refusals} == {"shapes", "cycle"}


def test_side_effects_are_barriers_in_order():
    # Nothing but the order of the two effects leads from 0 around to 3.
    g = graph("effe", [[], [0], [], [0, 2]])
    crossable, _ = decompose(g)
    assert effect_edges(g) == ((1, 2),)
    assert (0, 3) in crossable.barriers


def test_pairs_of_one_structure_are_asked_about_once():
    class Counting(Bytes):
        calls = 0

        def compatible(self, nodes):
            self.calls += 1
            return super().compatible(nodes)

    n = 50
    g = graph("e" * n, [[i - 1] if i else [] for i in range(n)])
    pricing = Counting(g)
    assert len(crossable_edges(g, PriceBook(g, pricing)).kept) == n - 1
    assert pricing.calls == 1


def test_structure_sees_what_changes_a_price():
    g = graph("eee", [[], [0], [1]])
    base = Signatures(g).of((0, 1)).key
    # Read outside or a result of the graph: either way it has to be written.
    assert Signatures(g).of((1, 2)).key == base
    # Another reader outside: 0 has to be written too.
    assert Signatures(graph("eeee", [[], [0], [1], [0]])).of((0, 1)).key != base
    # The same value twice is not two values.
    twice = Signatures(graph("eee", [[], [], [0, 1]]))
    once = Signatures(graph("eee", [[], [0], [0, 1]]))
    assert twice.of((2,)).key == once.of((2,)).key
    assert twice.of((0, 1)).key != once.of((0, 1)).key
    for change in (
        {"signature": 7},
        {"op": "other"},
        {"backends": ("triton",)},
        {"bitcast": True},
        {"effects": True},
    ):
        nodes = (g.nodes[0], replace(g.nodes[1], **change), g.nodes[2])
        other = make_graph(g.values, nodes, g.inputs, g.outputs)
        assert Signatures(other).of((0, 1)).key != base, change
    values = tuple(replace(v, dtype="bfloat16") if v.id == 1 else v for v in g.values)
    assert Signatures(make_graph(values, g.nodes, g.inputs, g.outputs)).of((0, 1)).key != base


def test_components_with_another_way_around_are_not_equal():
    # Both are e -> e and e -> e of one consumer, but in the second a barrier leads from one
    # producer to the other.
    free = graph("eee", [[], [], [0, 1]])
    tied = graph("eoee", [[], [0], [1], [0, 2]])
    for g, n_apart in ((free, 0), (tied, 1)):
        _, parts = decompose(g)
        assert sum(map(bool, max(parts, key=lambda c: len(c.nodes)).apart)) <= n_apart
    key = {component_key(PriceBook(g, Bytes(g)), decompose(g)[1][0]) for g in (free, tied)}
    assert len(key) == 2


def test_components_of_which_one_is_offered_are_not_equal():
    # Two chains of two operations.
    g = graph("eeee", [[], [0], [], [2]])
    _, parts = decompose(g)
    for offers, n_keys in (((), 1), (((0, 1),), 2), (((0, 1), (2, 3)), 1)):
        pricing = Bytes(g)
        pricing.offers = offers
        book = PriceBook(g, pricing)
        assert len({component_key(book, component) for component in parts}) == n_keys


def test_a_scalar_shared_by_many_ties_nothing_together_but_at_hubs():
    # A norm of several gradients: each is squared and summed, all are scaled by the result.
    for n in (1, 2, 3):
        b = GraphBuilder()
        grads = [b.elementwise(b.input((64, 128)), op="neg") for _ in range(n)]
        sums = [b.reduce(b.elementwise(g, op="square"), (0, 1)) for g in grads]
        total = sums[0]
        for s in sums[1:]:
            total = b.elementwise(total, s)
        scale = b.elementwise(total, op="rsqrt")
        scaled = [b.elementwise(g, b.broadcast(scale, (64, 128), ())) for g in grads]
        g = b.build(*scaled)
        book = PriceBook(g, Scheduler(g, TEST_DEVICE))
        assert len(components(g, crossable_edges(g, book))) == 1
        parts = components(g, crossable_edges(g, book, at_hubs=False))
        # Up to four ports (a sum and a scaling each) it is one component; beyond, each
        # gradient has its own, the arithmetic of the norm one, and the scalings theirs.
        if 2 * n <= MAX_PORTS:
            assert len(parts) == 1
        else:
            scalars = {v.producer for v in g.values if v.size == 1}
            arithmetic = [c for c in parts if scalars.issuperset(c.nodes)]
            assert [len(c.nodes) for c in arithmetic] == [n]
            assert len(parts) > n
