"""One of each distinct region: the same operations, the same order, and the same answers."""

import jax
import jax.numpy as jnp
import pytest
import rustworkx as rx
from hypothesis import given, settings

from costmodel.devices import get_device
from fuseplan import pipeline as planner
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.cache import SolutionCache, using
from fuseplan.search.component_cache import Remembered
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.search.grouping import take_apart
from fuseplan.search.remat import search as again
from fuseplan.search.remat.duplicate_pricing import Recomputing
from fuseplan.search.remat.duplicates import roots_of, split
from fuseplan.search.remat.select import by_place, sample_of, worth_again
from fuseplan.settings import make_options
from fuseplan.support.stage_timer import Clock
from tests.planners.test_planners import programs
from tests.search.test_duplicates import QUICK

pytestmark = pytest.mark.one_python

LAYERS = 5
H200 = get_device("h200")
SOLVE = get_planner("solver")


def stack(xs, weights):
    """Normalise, multiply, activate and add, layer after layer; and the gradient of that."""

    def loss(ws):
        x = xs
        for w in ws:
            x = x + jnp.tanh(x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1) @ w)
        return (x * x).sum()

    return jax.grad(loss)(weights)


def stacked(layers=LAYERS, rows=1024, columns=1024):
    x = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    return trace(stack, x, [jax.ShapeDtypeStruct((columns, columns), jnp.float32)] * layers)


@pytest.fixture(scope="module")
def lowered():
    return lower(stacked())


def reached(graph):
    """For each node, those that wait for it."""
    order = rx.PyDiGraph()
    order.add_nodes_from(range(len(graph.nodes)))
    order.add_edges_from_no_data([*data_edges(graph), *effect_edges(graph)])
    return [rx.descendants(order, n) for n in range(len(graph.nodes))]


def check_sample(g, components, roots):
    sample = sample_of(g, components, roots)
    here, there = reached(sample.graph), reached(g)
    for i, same in enumerate(sample.alike):
        node = sample.graph.nodes[i]
        made = [sample.graph.values[v] for v in node.outputs]
        for n in same:
            assert (node.op, node.signature, node.dims) == (
                g.nodes[n].op,
                g.nodes[n].signature,
                g.nodes[n].dims,
            )
            whole = [g.values[v] for v in g.nodes[n].outputs]
            assert [(v.shape, v.dtype) for v in made] == [(v.shape, v.dtype) for v in whole]
    assert set(sample.everywhere(sample.first(roots))) >= {n for n in roots if copied(g, roots, n)}
    return sample, here, there


def copied(g, roots, n):
    copies = split(g, roots)
    return copies is not None and copies.copies[n] > 1


@settings(max_examples=100, deadline=None)
@given(programs())
def test_who_waits_for_whom_is_the_same_in_a_sample(g):
    components = take_apart(g, PriceBook(g, Scheduler(g, QUICK))).instances
    roots = roots_of(g, QUICK)
    sample, here, there = check_sample(g, components, roots)
    regions = rx.PyGraph()
    regions.add_nodes_from(range(len(sample.graph.nodes)))
    place = {same[0]: i for i, same in enumerate(sample.alike)}
    for _, nodes in components:
        inside = [place[n] for n in nodes if n in place]
        regions.add_edges_from_no_data([(inside[0], i) for i in inside[1:]])
    copies = split(g, roots)
    for n in range(len(g.nodes)) if copies is not None else ():
        if copies.copies[n] > 1:
            readers = {r for v in g.nodes[n].outputs for r in g.consumers[v]}
            regions.add_edges_from_no_data([(place[n], place[r]) for r in readers])
    for nodes in rx.connected_components(regions):
        for i in nodes:
            waiting = {sample.alike[j][0] for j in here[i] & nodes}
            assert waiting == there[sample.alike[i][0]] & {sample.alike[j][0] for j in nodes}


def test_equal_layers_are_one_region(lowered):
    g = lowered.graph
    components = take_apart(g, PriceBook(g, Scheduler(g, H200, lowered))).instances
    roots = roots_of(g, H200)
    tanh = [n for n in roots if g.nodes[n].op == "tanh"]
    assert len(tanh) == LAYERS
    inner = [nodes for nodes in by_place(g, components, tanh) if len(nodes) > 1]
    assert inner, "the layers but for the first and last are alike"
    sample, *_ = check_sample(g, components, inner[0])
    assert len(sample.first(inner[0])) == 1
    assert sample.everywhere(sample.first(inner[0])) == inner[0]
    assert len(sample.graph.nodes) < len(g.nodes) / 2


def test_the_sample_knows_the_plan_of_the_whole(lowered, monkeypatch):
    """All that the search of the whole needs has been solved in the sample's, and the plan is that of a
    search of the whole alone."""
    solved: list[tuple[int, list[int]]] = []
    keep = Remembered.keep

    def kept(self, kind, answer, work):
        space = self._parts.kinds[kind]
        if space.n > 1:
            solved[-1][1].append(space.n)
        keep(self, kind, answer, work)

    plan_groups = SOLVE

    def counted(graph, pricing, budget):
        solved.append((len(graph.nodes), []))
        return plan_groups(graph, pricing, budget)

    monkeypatch.setattr(Remembered, "keep", kept)
    # What is offered follows from more than a sample shows.
    g, scheduler = lowered.graph, Scheduler(lowered.graph, H200, lowered, Features(loop_nests=False))
    with using(SolutionCache()):
        budget = Budget(solved=set())
        once = counted(g, scheduler, budget)
        answer = again.plan_again(lowered, scheduler, lambda limits: counted, once, budget, Clock())
    program, plan = answer.lowered, answer.grouping
    (_, first), (n_sample, sampled), (n_whole, last) = solved
    assert first
    assert sampled
    assert not last
    assert n_sample < n_whole / 2
    copies = split(g, worth_again(g, scheduler, once.components, once.groups))
    with using(SolutionCache()):
        alone = SOLVE(copies.graph, Recomputing(copies, scheduler), Budget())
    assert plan.status == alone.status == "OPTIMAL"
    assert plan.bound_ps == alone.bound_ps < once.bound_ps
    assert len(program.graph.nodes) > len(g.nodes)


def test_what_one_planning_finds_is_not_remembered_from_an_earlier_one():
    options = make_options("h200", "solver")
    traced = stacked(3, 512, 512)
    with using(SolutionCache()):
        first, second = (planner.plan_traced(traced, options)[1] for _ in range(2))
    assert first.stats.remembered == 0 < second.stats.remembered
    assert first.stats.distinct_components == second.stats.distinct_components


def test_without_a_cache_the_sample_is_of_use_all_the_same(monkeypatch):
    monkeypatch.setenv("FUSEPLAN_CACHE", "0")
    options, traced = make_options("h200", "solver"), stacked(3, 512, 512)
    with using(None):
        first, second = (planner.plan_traced(traced, options)[1] for _ in range(2))
    assert first.stats.remembered == second.stats.remembered == 0
    assert first.objective_us == second.objective_us
