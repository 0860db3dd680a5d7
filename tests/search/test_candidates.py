"""The enumeration of legal groups against the definition, contraction, orders."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import get_planner
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.components import components, crossable_edges
from fuseplan.search.grouping import Budget, decompose
from fuseplan.search.presolve import absorb_moves
from fuseplan.search.space import Space
from fuseplan.support.bitset import bits
from fuseplan.support.errors import Verdict
from fuseplan.workloads import get_workload
from tests.helpers.small_graphs import Bytes, brute_force, edges_after, graph, graphs, is_connected, is_convex

pytestmark = pytest.mark.one_python


def spaces(g, **limits):
    book = PriceBook(g, Bytes(g, **limits))
    return [Space(c, book) for c in components(g, crossable_edges(g, book))]


@settings(max_examples=200, deadline=None)
@given(graphs(max_nodes=9))
def test_every_legal_group_is_found_exactly_once(g):
    found = [s.nodes(mask) for s in spaces(g) for mask in enumerate_groups(s, 10**6).groups]
    after, pricing = edges_after(g), Bytes(g)
    legal = [
        nodes
        for size in range(1, len(g.nodes) + 1)
        for nodes in itertools.combinations(range(len(g.nodes)), size)
        if is_connected(g, nodes) and is_convex(after, nodes) and pricing.compatible(nodes) is None
    ]
    assert sorted(found) == sorted(legal)


def test_a_chain_has_as_many_groups_as_intervals():
    n = 40
    (space,) = spaces(graph("e" * n, [[i - 1] if i else [] for i in range(n)]))
    found = enumerate_groups(space, 10**6)
    assert found.complete
    assert len(found.groups) == n * (n + 1) // 2


def test_independent_readers_of_one_value_explode_as_expected():
    width = 10
    (space,) = spaces(graph("e" * (width + 1), [[], *([0] for _ in range(width))]))
    # The producer with any subset of its readers, or one reader alone.
    assert len(enumerate_groups(space, 10**6).groups) == 2**width + width


@pytest.mark.parametrize(("name", "device"), [("batchnorm_relu", "h200"), ("batchnorm_relu", "a100")])
def test_what_is_too_large_as_it_is_is_no_group(name, device, monkeypatch):
    f, args = get_workload(name).build()
    g = lower(trace(f, *args)).graph

    def found():
        kinds = decompose(g, PriceBook(g, Scheduler(g, get_device(device)))).spaces
        return {(space.n, mask): space for space in kinds for mask in enumerate_groups(space, 10**6).groups}

    groups = found()
    with monkeypatch.context() as patch:
        patch.setattr(Space, "is_tight", lambda self, mask: False)
        more = found()
    assert len(groups) < len(more)
    for (n, mask), space in more.items():
        assert ((n, mask) in groups) == space.allows(mask)


def test_limits_leave_every_single_node():
    width = 10
    (space,) = spaces(graph("e" * (width + 1), [[], *([0] for _ in range(width))]))
    for limited in (enumerate_groups(space, 30), enumerate_groups(space, 10**6, expires_at=0.0)):
        assert not limited.complete
        assert len(limited.groups) < 200
        assert {1 << i for i in range(space.n)} <= set(limited.groups)


def cheapest(space):
    """The least time over all partitions of a space, order aside, by dynamic programming."""
    asked = {*enumerate_groups(space, 10**6).groups, *space.offers}
    groups = [m for m in asked if not isinstance(space.price(m), Verdict)]
    best = {0: 0}
    for covered in range(space.everything + 1):
        if covered not in best:
            continue
        lowest = next((i for i in range(space.n) if not covered >> i & 1), None)
        if lowest is None:
            return best[covered]
        for mask in groups:
            if mask >> lowest & 1 and not mask & covered:
                total = best[covered] + space.price(mask).time_ps
                best[covered | mask] = min(best.get(covered | mask, math.inf), total)
    raise AssertionError("single nodes always cover a space")


@pytest.mark.slow
def test_a_plan_of_some_groups_says_so():
    width = 9
    g = graph("e" * (2 * width + 1), [[], *([0] for _ in range(width)), *([i + 1] for i in range(width))])
    plan = plan_groups(g, Bytes(g, max_nodes=6), Budget(max_groups=700))
    assert plan.status == "FEASIBLE"
    assert "only some were searched" in str(plan.notes[0])


def test_bits():
    assert list(bits(0b10110)) == [1, 2, 4]


def test_absorbing_renames_loses_nothing():
    """The optimum without renamings, put back, is the optimum with them, by brute force."""
    programs = [
        lambda x: jnp.exp(x.sum(1)[:, None]) + x,
        lambda x: (x.reshape(1, 64, 256).max(2), jnp.tanh(x)),
        lambda x: jnp.exp(x)[None].sum(1).reshape(256, 1) * 2,
        lambda x: ((x * 2)[None], (x * 2)[:, None].sum(2)),
    ]
    for f in programs:
        graph = lower(trace(f, jnp.zeros((64, 256)))).graph
        scheduler = Scheduler(graph, get_device("h200"))
        assert any(scheduler.renames(n.id) for n in graph.nodes)
        found = get_planner("solver")(graph, scheduler, Budget(60.0))
        (time_ps, _, _), _ = brute_force(graph, scheduler)
        assert sum(k.cost.time_ps for k in found.kernels) == time_ps


def _paired(x, y):
    return jnp.exp(-((x[:, None] - y) ** 2))


X, Y, W = (jax.ShapeDtypeStruct(shape, "float32") for shape in [(2048,), (4096,), (2048, 4096)])


def _twice(x):
    """Two reductions: what they share is written."""
    return x.sum(1), x.max(1)


ON_XLA = {
    # name: whether anything is absorbed, the function, its arguments
    "arithmetic stays": (False, lambda w: jnp.tanh(w * 2 + 1).sum(1), W),
    # Moved to where its flops are not hidden behind memory, the power would cost more.
    "arithmetic between kernels": (False, lambda w: _twice(jax.lax.integer_pow(3 / w + 0.5, 7)), W),
    # XLA fuses products into a sum, and no transposes.
    "transposed": (False, lambda w: (jnp.exp(w).T * 2).sum(1), W),
    "transposed, and no sum": (True, lambda w: jnp.tanh(jnp.exp(w).T * 2), W),
    "repeated rows": (True, lambda w: (jnp.exp(w.max(1))[:, None] * w * 2).sum(0), W),
    "reshaped twice": (True, lambda w: jnp.sin(jnp.exp(w).reshape(-1, 64).reshape(-1, 512)).sum(0), W),
    "reversed for two sums": (False, lambda w: _twice(jnp.exp(w)[::-1] * 3), W),
    "larger than made": (False, lambda w: _twice(jnp.exp(w)[:, ::2]), W),
    "read twice": (True, lambda w: (jnp.exp(w).T * 2, jnp.tanh(w).T.sum(0)), W),
    "broadcast rows": (True, lambda w: (w * w.max(1, keepdims=True) * 2).sum(0), W),
    # With the reshape, neither kernel could hold the pad.
    "reshaped beside a pad": (
        False,
        lambda a, b: jax.lax.pad(b, 0.0, [(0, 30, 0)]) + a.reshape(33),
        jax.ShapeDtypeStruct((3, 11), "float32"),
        jax.ShapeDtypeStruct((3,), "float32"),
    ),
    # A slice costs less without the reshape that it reads a part of.
    "sliced": (False, lambda w: w.reshape(-1)[5:6] * 2, W),
    "sliced to nothing": (False, lambda w: w.reshape(-1)[5:5], W),
    "pairs": (False, lambda x, y: _paired(x, y).sum(1), X, Y),
    "pairs twice": (False, lambda x, y: (_paired(x, y) * 3).sum(0), X, Y),
}


@pytest.mark.parametrize("name", ON_XLA)
def test_absorbing_moves_loses_nothing(name):
    """The cheapest partition into XLA's loops and nests is as cheap with the operations that
    were absorbed, by dynamic programming over all groups."""
    absorbs, f, *args = ON_XLA[name]
    lowered = lower(trace(f, *args))
    scheduler = Scheduler(lowered.graph, get_device("cpu"), lowered)
    spaces = [s for s in decompose(lowered.graph, PriceBook(lowered.graph, scheduler)).spaces if s.n > 1]
    smaller = [absorb_moves(space) for space in spaces]
    assert any(b.n < a.n for a, b in zip(spaces, smaller, strict=True)) == absorbs
    for a, b in zip(spaces, smaller, strict=True):
        assert cheapest(b) == cheapest(a)


def test_what_is_absorbed():
    """A transpose that one operation reads; not one that two read, nor arithmetic."""

    def f(w):
        e, s = jnp.exp(w), jnp.sin(w).T
        return e.T * 2, s * 2, s.sum(0)

    lowered = lower(trace(f, W))
    book = PriceBook(lowered.graph, Scheduler(lowered.graph, get_device("cpu")))
    found = [
        [lowered.graph.nodes[n].op for n in nodes]
        for space in decompose(lowered.graph, book).spaces
        for nodes in absorb_moves(space).members
    ]
    assert sorted(found) == sorted(
        [["exp"], ["transpose", "mul"], ["sin"], ["transpose"], ["mul"], ["reduce_sum"]]
    )
