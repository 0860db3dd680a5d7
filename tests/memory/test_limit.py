"""Plans under a limit: against every grouping in every order of small graphs, and in the planner."""

from __future__ import annotations

import dataclasses
import math
import time
import zlib

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodel.devices import TEST_DEVICE
from fuseplan.memory import limit
from fuseplan.memory.exact import ExactOptions, plan_exactly
from fuseplan.memory.limit import SURCHARGE_UNIT_BYTES, LimitOptions, SurchargedPricing, plan_within
from fuseplan.memory.liveness import plan_peak_bound
from fuseplan.memory.order import minimise_peak
from fuseplan.plan.constraints import Constraints, Resolved
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook, Pricing
from fuseplan.settings import make_options
from fuseplan.support.errors import InvalidPlanError, MemoryLimitError, Verdict
from fuseplan.support.work import unlimited
from fuseplan.verify.plan import check_plan
from fuseplan.workloads.functions import linear_cross_entropy_grad
from tests.helpers import memory_graphs
from tests.helpers.memory_graphs import peak
from tests.helpers.plans import plan_function
from tests.helpers.small_graphs import Bytes, edges_after, graph, graphs, is_connected, is_convex, siblings_of

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")
WITHOUT_EXACT = LimitOptions(ExactOptions(max_nodes=0))


def subsets(n):
    return (tuple(i for i in range(n) if mask >> i & 1) for mask in range(1, 1 << n))


def legal_kernels(g, pricing, pairs):
    """The kernel of each group that can be one, written without anything of ``fuseplan`` but the prices."""
    after = edges_after(g)
    groups = {}
    for nodes in subsets(len(g.nodes)):
        if is_connected(g, nodes, pairs) and is_convex(after, nodes):
            kernel = pricing.price(nodes)
            if not isinstance(kernel, Verdict):
                groups[nodes] = kernel
    return groups


def every_plan(g, pricing, most=20_000, siblings=()):
    """For each peak that any grouping in any order has, the least time with it; written without
    anything of ``fuseplan`` but the prices. None where there are too many plans."""
    after = edges_after(g)
    before = [{u for u in range(len(after)) if n in after[u]} for n in range(len(after))]
    groups = legal_kernels(g, pricing, siblings)
    found: dict[int, int] = {}
    count = 0
    stack = [(frozenset(), ())]
    while stack:
        done, kernels = stack.pop()
        if len(done) == len(g.nodes):
            count += 1
            if count > most:
                return None
            highest, time_ps = peak(g, kernels), sum(k.cost.time_ps for k in kernels)
            found[highest] = min(found.get(highest, time_ps), time_ps)
            continue
        for nodes, kernel in groups.items():
            if done.isdisjoint(nodes) and all(before[n] <= done | set(nodes) for n in nodes):
                stack.append((done | set(nodes), (*kernels, kernel)))
    return found


def odd_ps(g, nodes):
    """A time that has nothing to do with size, so that what is fast is not what is small."""
    ops = "".join(g.nodes[n].op for n in nodes)
    return 100 + zlib.crc32(ops.encode()) % 5000 * len(ops)


class Odd(Bytes):
    """Groups at odd prices."""

    def __init__(self, g, max_nodes, fuses_siblings=False):
        super().__init__(g, max_nodes=max_nodes, floor=False, fuses_siblings=fuses_siblings)

    def price(self, nodes):
        kernel = super().price(nodes)
        if isinstance(kernel, Verdict):
            return kernel
        cost = dataclasses.replace(
            kernel.cost, launch_ps=odd_ps(self.graph, nodes), memory_ps=0, latency_ps=0
        )
        return dataclasses.replace(kernel, cost=cost)


def time_ps(kernels):
    return sum(k.cost.time_ps for k in kernels)


def limits(plans):
    """Each peak that some plan has, and one byte less than each."""
    return sorted({m - d for m in plans for d in (0, 1) if m - d >= 0}, reverse=True)


@settings(max_examples=150)
@given(graphs(max_nodes=5), st.sampled_from((Bytes, Odd)), st.sampled_from((2, 3, 99)), st.booleans())
def test_every_limit_from_infinite_to_impossible(g, prices, max_nodes, fuses_siblings):
    pricing = prices(g, max_nodes=max_nodes, fuses_siblings=fuses_siblings)
    plans = every_plan(g, pricing, siblings=siblings_of(g, pricing))
    assume(plans is not None)
    for max_peak_bytes in [2**60, *limits(plans)]:
        fitting = [t for highest, t in plans.items() if highest <= max_peak_bytes]
        if fitting:
            grouping = plan_within(g, pricing, Budget(), SOLVE, max_peak_bytes)
            assert time_ps(grouping.kernels) == min(fitting) == grouping.bound_ps
            assert grouping.status == "OPTIMAL"
            assert peak(g, grouping.kernels) <= max_peak_bytes
            assert sorted(n for group in grouping.groups for n in group) == list(range(len(g.nodes)))
        else:
            with pytest.raises(MemoryLimitError) as caught:
                plan_within(g, pricing, Budget(), SOLVE, max_peak_bytes)
            assert (caught.value.limit_bytes, caught.value.smallest_bytes) == (max_peak_bytes, min(plans))
            assert caught.value.proven


@pytest.mark.slow
@settings(max_examples=100)
@given(graphs(max_nodes=6), st.sampled_from((Bytes, Odd)), st.sampled_from((2, 99)))
def test_without_the_exact_search_what_is_claimed_holds(g, prices, max_nodes):
    pricing = prices(g, max_nodes=max_nodes)
    smallest = plan_exactly(g, pricing, -1, unlimited()).smallest_bytes
    fastest = minimise_peak(g, SOLVE(g, pricing, Budget()).kernels)
    for max_peak_bytes in {smallest - 1, smallest, (smallest + fastest.peak_bytes) // 2}:
        found = answer(g, pricing, max_peak_bytes, WITHOUT_EXACT)
        if isinstance(found, MemoryLimitError):
            assert found.smallest_bytes >= smallest >= found.least_bytes
            assert found.smallest_bytes > max_peak_bytes
            continue
        grouping = found
        assert peak(g, grouping.kernels) <= max_peak_bytes
        best = time_ps(plan_exactly(g, pricing, max_peak_bytes, unlimited()).kernels)
        assert grouping.bound_ps <= best <= time_ps(grouping.kernels)
        assert (grouping.status == "OPTIMAL") == (grouping.bound_ps == time_ps(grouping.kernels))


def answer(g, pricing, max_peak_bytes, options=None):
    try:
        return plan_within(g, pricing, Budget(), SOLVE, max_peak_bytes, options or LimitOptions())
    except MemoryLimitError as error:
        return error


class Renaming(Pricing):
    """Prices of graphs with bitcasts, arrays without elements and kernels with their own blocks."""

    def __init__(self, g, tile_bytes):
        self.graph, self.tile_bytes = g, tile_bytes

    def compatible(self, nodes):
        alone = len(nodes) > 1 and any(self.graph.nodes[n].effects for n in nodes)
        return Verdict("side-effects", "has side effects", nodes) if alone or len(nodes) > 3 else None

    def oversized(self, nodes, crossing):
        return None

    def renames(self, n):
        return self.graph.nodes[n].bitcast

    def price(self, nodes):
        refused = self.compatible(nodes)
        tile_bytes = self.tile_bytes if len(nodes) > 1 else 0
        return refused or memory_graphs.kernel(self.graph, nodes, tile_bytes, odd_ps(self.graph, nodes))


@settings(max_examples=200)
@given(memory_graphs.graphs(max_nodes=5), st.sampled_from((0, 700)))
def test_renamed_and_empty_arrays_and_blocks(g, tile_bytes):
    pricing = Renaming(g, tile_bytes)
    plans = every_plan(g, pricing)
    assume(plans is not None)
    for max_peak_bytes in limits(plans):
        found = plan_exactly(g, pricing, max_peak_bytes, unlimited())
        fitting = [t for highest, t in plans.items() if highest <= max_peak_bytes]
        if fitting:
            assert time_ps(found.kernels) == min(fitting)
            assert peak(g, found.kernels) <= max_peak_bytes
        else:
            assert (found.kernels, found.smallest_bytes) == (None, min(plans))
    assert plan_peak_bound(g, PriceBook(g, pricing), math.inf) <= min(plans)


# Fused, n1, n2 and n4 write three arrays at once, but n2's is only needed after n4 has read n1's.
TWO = graph("oeeoe", [[], [0], [1], [1, 2], [1]])
FASTEST_BYTES, SMALLEST_BYTES = 196_608, 131_072


def test_surcharges_are_on_what_is_written_and_can_be_taken_off():
    pricing = Bytes(TWO)
    dear = SurchargedPricing(TWO, pricing)
    assert dear.price((0,)) == pricing.price((0,))
    dear.charge([TWO.nodes[0].outputs[0]])
    dear.ps_per_unit = 5 * SURCHARGE_UNIT_BYTES
    size = TWO.values[TWO.nodes[0].outputs[0]].nbytes
    assert dear.price((0,)).cost.time_ps == pricing.price((0,)).cost.time_ps + 5 * size
    assert dear.without_surcharge([dear.price((0,))]) == (pricing.price((0,)),)
    assert dear.price((1,)) == pricing.price((1,)), "another kind of node"
    for nodes in ((0,), (1, 2), (1, 2, 4), (3,)):
        kernel = dear.price(nodes)
        assert isinstance(kernel, Verdict) or dear.floor(nodes) <= kernel.cost.time_ps


def test_a_limit_that_the_fastest_plan_keeps_changes_nothing():
    pricing = Bytes(TWO)
    fastest = SOLVE(TWO, pricing, Budget())
    order = minimise_peak(TWO, fastest.kernels)
    assert order.peak_bytes == FASTEST_BYTES
    grouping = plan_within(TWO, pricing, Budget(), SOLVE, order.peak_bytes)
    assert (grouping.kernels, grouping.status, grouping.notes) == (order.kernels, "OPTIMAL", fastest.notes)


def test_a_limit_below_costs_time_and_a_note():
    grouping = plan_within(TWO, Bytes(TWO), Budget(), SOLVE, FASTEST_BYTES - 1)
    assert grouping.status == "OPTIMAL"
    assert peak(TWO, grouping.kernels) == SMALLEST_BYTES
    assert "196,608 bytes" in str(grouping.notes[-1])
    with pytest.raises(MemoryLimitError, match="smallest possible peak is 131,072 bytes"):
        plan_within(TWO, Bytes(TWO), Budget(), SOLVE, SMALLEST_BYTES - 1)


def test_under_a_limit_kernels_side_by_side_are_searched_too():
    g = graph("oeeoeoee", [[], [0], [1], [1, 2], [1], [], [5], [5]])  # TWO, and n6 and n7 beside it
    pricing = Bytes(g, fuses_siblings=True)
    free = SOLVE(g, pricing, Budget())
    grouping = plan_within(g, pricing, Budget(), SOLVE, minimise_peak(g, free.kernels).peak_bytes - 1)
    assert (6, 7) in free.groups
    assert (6, 7) in grouping.groups
    assert grouping.status == "OPTIMAL"


@pytest.mark.parametrize("planner", ["solver", "best_first"])
def test_a_large_graph_is_planned_at_surcharges(planner):
    g = graph("erore", [[], [0], [0], [1, 2], [3]])

    def plan():
        return plan_within(g, Bytes(g), Budget(), get_planner(planner), 131_072, WITHOUT_EXACT)

    assert minimise_peak(g, SOLVE(g, Bytes(g), Budget()).kernels).peak_bytes > 131_072
    grouping = plan()
    assert peak(g, grouping.kernels) == 131_072
    assert grouping.status == "FEASIBLE"
    assert plan().kernels == grouping.kernels


def test_a_deadline_of_zero_still_answers():
    pricing = Bytes(TWO)
    started = time.process_time()
    with pytest.raises(MemoryLimitError) as caught:
        plan_within(TWO, pricing, Budget(deadline_s=0), SOLVE, 1)
    assert time.process_time() - started < 2
    assert caught.value.smallest_bytes >= caught.value.least_bytes


def test_a_planner_that_proves_nothing_is_asked_itself(monkeypatch):
    monkeypatch.setattr(limit, "plan_exactly", None)
    grouping = plan_within(TWO, Bytes(TWO), Budget(), get_planner("best_first"), 2**30)
    assert (grouping.status, grouping.bound_ps) == ("FEASIBLE", None)


# --- in the planner --------------------------------------------------------------------------


def mlp(x, w, v):
    return jax.nn.gelu(jnp.sort(x @ w, axis=-1)) @ v + x


SHAPES = tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((256, 64), (64, 512), (512, 64)))
TEST_CPU = dataclasses.replace(TEST_DEVICE, backend="xla", platform="cpu")


@pytest.mark.parametrize("device", [TEST_DEVICE, TEST_CPU], ids=["gpu", "cpu"])
def test_a_plan_keeps_to_the_limit_or_says_what_it_needs(device):
    free = plan_function(mlp, SHAPES, {}, make_options(device))[1]
    with pytest.raises(MemoryLimitError, match="no plan exists") as caught:
        plan_function(mlp, SHAPES, {}, make_options(device, constraints=Constraints(max_peak_bytes=1000)))
    smallest = caught.value.smallest_bytes
    assert caught.value.proven
    assert f"max_peak_bytes={smallest}," in str(caught.value)
    plan = plan_function(
        mlp, SHAPES, {}, make_options(device, constraints=Constraints(max_peak_bytes=smallest))
    )[1]
    assert plan.peak_bytes == smallest <= free.peak_bytes
    assert plan.status == "OPTIMAL"
    assert plan.objective_ps >= free.objective_ps
    with pytest.raises(InvalidPlanError, match="temporaries need"):
        check_plan(dataclasses.replace(plan, constraints=Resolved(max_peak_bytes=smallest - 1)))


def test_the_error_says_what_is_proven():
    found = MemoryLimitError(100, 300, 200, 7)
    assert not found.proven
    text = str(found)
    assert "no plan exists" in text
    assert "found is 300 bytes, and none is below 200" in text
    assert "no plan was found" in str(MemoryLimitError(250, 300, 200))
    other = MemoryLimitError(100, 250, 250, None)
    assert other.proven
    both = found.joined(other)
    assert (both.smallest_bytes, both.least_bytes, both.bound_ps, both.proven) == (250, 200, None, False)


@pytest.mark.slow
def test_what_follows_from_products_is_computed_again_under_a_limit():
    """Logits stand once, and their gradient in no array: each of its contractions computes it."""
    x, w, labels = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((4096, 256), "bfloat16"), ((256, 16_384), "bfloat16"), ((4096,), "int32"))
    )
    logits = 4096 * 16_384
    most = 3 * 4 * logits // 2
    options = make_options("h200", "solver", deadline_s=8, constraints=Constraints(max_peak_bytes=most))
    _, plan = plan_function(linear_cross_entropy_grad, (x, {"w": w}, labels), {}, options)
    assert plan.peak_bytes <= most
    large = [
        w for k in plan.kernels for w in k.spec.writes if plan.graph.values[w.value].size == 4096 * 16_384
    ]
    assert len(large) == 1


def raised(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer
