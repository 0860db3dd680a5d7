"""Runs of interchangeable operations: what is recognised, and that no plan is lost."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.devices import TEST_DEVICE, get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Resolved
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.components import components, crossable_edges
from fuseplan.search.constrained_pricing import Limited
from fuseplan.search.grouping import Budget, take_apart
from fuseplan.search.presolve import runs_of_twins
from fuseplan.search.space import Space
from tests.helpers.small_graphs import Bytes, brute_force, graph, graphs

pytestmark = pytest.mark.one_python


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Runs that brute force can look at."""
    monkeypatch.setattr("fuseplan.search.presolve._SHORTEST", 2)


def spaces(g, pricing):
    book = PriceBook(g, pricing)
    return [Space(c, book) for c in components(g, crossable_edges(g, book))]


def objectives(grouping):
    costs = [k.cost for k in grouping.kernels]
    return (sum(c.time_ps for c in costs), sum(c.hbm_bytes for c in costs), len(costs))


@st.composite
def with_twins(draw):
    """A random graph with up to two runs of readers of some of its values, ``e`` or ``r``."""
    g = draw(graphs(max_nodes=4))
    kinds = "".join(node.op for node in g.nodes)
    preds = [[g.values[v].producer for v in node.inputs if g.values[v].producer >= 0] for node in g.nodes]
    for _ in range(draw(st.integers(1, 2))):
        before = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=2, unique=True))
        count = draw(st.integers(2, 4))
        preds += [before] * count
        kinds += draw(st.sampled_from("eerac")) * count
    return graph(kinds[:9], preds[:9])


@settings(max_examples=200, deadline=None)
@given(
    with_twins(), st.sampled_from([99, 4, 3, 2]), st.sampled_from([99, 3, 2]), st.booleans(), st.booleans()
)
def test_intervals_of_twins_lose_no_plan(g, max_nodes, max_made, floor, foresees):
    pricing = Bytes(g, max_nodes, max_made, floor, foresees)
    plan = plan_groups(g, pricing, Budget())
    assert plan.status == "OPTIMAL"
    assert objectives(plan) == brute_force(g, pricing)[0]


@settings(max_examples=100, deadline=None)
@given(with_twins(), st.sampled_from([99, 3]))
def test_swapping_twins_changes_no_price(g, max_nodes):
    pricing = Bytes(g, max_nodes)
    for space in spaces(g, pricing):
        for run in runs_of_twins(space):
            members = [i for i in range(space.n) if run >> i & 1]
            for i, j in itertools.pairwise(members):
                for mask in enumerate_groups(space, 10**6).groups:
                    if (mask >> i ^ mask >> j) & 1:
                        swapped = mask ^ (1 << i | 1 << j)
                        assert space.book.signatures.of(space.nodes(mask)).key == (
                            space.book.signatures.of(space.nodes(swapped)).key
                        )
                        assert space.price(mask) == space.price(swapped)


@settings(max_examples=100, deadline=None)
@given(with_twins(), st.sampled_from([99, 3]))
def test_exactly_the_groups_with_intervals_are_listed(g, max_nodes):
    for space in spaces(g, Bytes(g, max_nodes, foresees=True)):
        runs = runs_of_twins(space)
        listed = enumerate_groups(space, 10**6, runs=runs).groups

        def is_interval(mask, runs=runs):
            held = [mask & run for run in runs]
            return all(not part or not (part // (part & -part) + 1) & part // (part & -part) for part in held)

        assert sorted(listed) == sorted(m for m in enumerate_groups(space, 10**6).groups if is_interval(m))


@pytest.mark.parametrize("max_nodes", [99, 6])
def test_forty_readers_of_one_value(max_nodes):
    width = 40
    g = graph("e" * (width + 1), [[], *([0] for _ in range(width))], outputs=[0])
    plan = plan_groups(g, Bytes(g, max_nodes=max_nodes), Budget())
    assert plan.status == "OPTIMAL"
    assert plan.stats.certified == "greedy"
    # The maker with as many readers as may join; the others one by one.
    assert len(plan.groups) == 1 + max(width + 1 - max_nodes, 0)


X = jax.ShapeDtypeStruct((2048, 2048), "float32")


def forty(x):
    y = x * 2
    return [jnp.exp(y) for _ in range(40)]


@pytest.mark.parametrize(("device", "most"), [("cpu", None), ("h200", 5), ("tpu_v5e", 5)])
def test_forty_real_readers(device, most):
    lowered = lower(trace(forty, X))
    scheduler = Scheduler(lowered.graph, get_device(device), lowered)
    limited = Limited(lowered.graph, scheduler, replace(Resolved(), max_group_size=most))
    plan = plan_groups(lowered.graph, limited, Budget(20.0, 4_000))
    assert plan.status == "OPTIMAL"
    assert plan.stats.candidates < 1_000


def test_what_is_a_run():
    def runs(f, *args):
        g = lower(trace(f, *args)).graph
        kinds = take_apart(g, PriceBook(g, Scheduler(g, TEST_DEVICE))).kinds
        return [[g.nodes[n].op for n in space.nodes(run)] for space in kinds for run in runs_of_twins(space)]

    def own_arrays(x, a, b):
        y = x * 2
        return y + a, y + b

    assert runs(own_arrays, X, X, X) == [["add", "add"]]
    # Other shapes, other operations, results that are read, or the same array read by others.
    row = jax.ShapeDtypeStruct((2048,), "float32")
    assert runs(lambda x, a, b: own_arrays(x, a[None], b), X, row, X) == []
    assert runs(lambda x: (jnp.exp(x * 2), jnp.sin(x * 2)), X) == []
    assert runs(lambda x: (jnp.exp(x * 2), jnp.exp(jnp.exp(x * 2))), X) == []

    def shared(x, a, b):
        y = x * 2
        return y + a, y + b, y * a

    assert runs(shared, X, X, X) == []
