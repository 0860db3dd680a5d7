"""Plans under a limit that compute some values again: against every plan of copies in every order."""

from __future__ import annotations

from collections import Counter

import jax
import pytest
from hypothesis import given, settings

import fuseplan
from costmodel.graph import without_copies
from fuseplan import Constraints, Features, Plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.memory.liveness import live_ranges, plan_peak_bound, profile
from fuseplan.plan.options import Options
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.tolerance import check_results
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import roots_of, split
from fuseplan.support.errors import MemoryLimitError
from fuseplan.workloads import make_args
from tests.helpers.copies_by_hand import ByHand, ties
from tests.helpers.plans import plan_traced
from tests.helpers.small_graphs import edges_after, siblings_of
from tests.memory.test_limit import answer, legal_kernels, limits
from tests.planners.test_planners import programs
from tests.search.test_duplicates import QUICK, with_slow_memory

pytestmark = pytest.mark.one_python

MOST, PLANS = 8, 3_000


def needs(copies, groups):
    """Bytes of temporaries while each kernel runs, by going through them: a kernel makes an array once for
    all copies of it, and who finds several reads the first."""
    graph = copies.graph
    kernel_of = {n: k for k, nodes in enumerate(groups) for n in nodes}
    until, size = {}, {}
    for k, nodes in enumerate(groups):
        found = {}
        for n in nodes:
            for v in graph.nodes[n].inputs:
                maker = graph.values[v].producer
                if maker >= 0 and kernel_of[maker] != k:
                    found.setdefault(copies.value[v], kernel_of[maker])
        for array, maker in found.items():
            until[array, maker] = max(until.get((array, maker), 0), k)
        for n in nodes:
            for v in graph.nodes[n].outputs:
                array = copies.value[v], k
                outside = {kernel_of[c] for c in graph.consumers[v]} - {k}
                if v in graph.outputs:
                    size[array] = 0
                elif outside:
                    size.setdefault(array, graph.values[v].nbytes)
                    until.setdefault(array, k)
    return [
        sum(size[a] for a, last in until.items() if a in size and a[1] <= k <= last)
        for k in range(len(groups))
    ]


def every_plan(copies, pairs):
    """For each peak that any kernels of copies in any order have, the least time with it; None where
    there are too many."""
    graph = copies.graph
    after = edges_after(graph)
    before = [{u for u in range(len(after)) if n in after[u]} for n in range(len(after))]
    offers = DuplicatePricing(copies, Scheduler(copies.whole, QUICK)).offers
    kernels = legal_kernels(graph, ByHand(graph, QUICK, offers), pairs)
    groups = {nodes: kernel.cost.time_ps for nodes, kernel in kernels.items()}
    found: dict[int, int] = {}
    stack, count = [((), 0)], 0
    while stack:
        plan, time_ps = stack.pop()
        done = {n for nodes in plan for n in nodes}
        if len(done) == len(graph.nodes):
            count += 1
            if count > PLANS:
                return None
            highest = max(needs(copies, plan))
            found[highest] = min(found.get(highest, time_ps), time_ps)
        for nodes, cost in groups.items():
            if done.isdisjoint(nodes) and all(before[n] <= done | set(nodes) for n in nodes):
                stack.append(((*plan, nodes), time_ps + cost))
    return found


def time_ps(kernels):
    return sum(k.cost.time_ps for k in kernels)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(programs())
def test_what_is_claimed_under_a_limit_holds(g):
    copies = split(g, roots_of(g, QUICK))
    if copies is None or len(copies.graph.nodes) > MOST:
        return
    graph, pricing = copies.graph, DuplicatePricing(copies, Scheduler(g, QUICK))
    plans = every_plan(copies, [*siblings_of(graph, pricing), *ties(graph)])
    if plans is None:
        return
    assert plan_peak_bound(graph, PriceBook(graph, pricing), float("inf")) <= min(plans)
    for most in limits(plans):
        fitting = [t for highest, t in plans.items() if highest <= most]
        grouping = answer(graph, pricing, most)
        if isinstance(grouping, MemoryLimitError):
            assert grouping.least_bytes <= min(plans) <= grouping.smallest_bytes
            assert grouping.smallest_bytes > most
            assert grouping.bound_ps <= min(plans.values())
            continue
        lives = live_ranges(graph, grouping.kernels)
        assert profile(lives, range(len(grouping.kernels))) == needs(copies, grouping.groups)
        assert max(needs(copies, grouping.groups)) <= most
        assert grouping.bound_ps <= min(fitting) <= time_ps(grouping.kernels)
        assert (grouping.status == "OPTIMAL") == (grouping.bound_ps == time_ps(grouping.kernels))


def layers(x, ws):
    for a, b in ws:
        x = x + jax.nn.gelu(x @ a) @ b
    return (x**2).sum()


GRADIENT = jax.grad(layers, argnums=(0, 1))
WEIGHTS = [tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((256, 1024), (1024, 256)))] * 2
SHAPES = (jax.ShapeDtypeStruct((2048, 256), "float32"), WEIGHTS)


def planned(percent=None, recompute=True, device="h200", f=GRADIENT, args=SHAPES, **constraints):
    """The plan whose temporaries need so many percent of what the fastest one needs in which everything is
    computed once."""
    make = fuseplan.make_plan
    if percent is not None:
        free = make(f, device=device, features=Features(recompute=False))(*args)
        constraints["max_peak_bytes"] = free.peak_bytes * percent // 100
    features = Features(recompute=recompute)
    limits = Constraints(**constraints)
    return make(f, device=device, constraints=limits, features=features, deadline_s=60.0)(*args)


@pytest.mark.parametrize(("device", "percent"), [("h200", 75), ("tpu_v5e", 80)])
@pytest.mark.slow
def test_what_does_not_fit_is_computed_again(device, percent):
    with pytest.raises(MemoryLimitError):
        planned(percent, recompute=False, device=device)
    plan = planned(percent, device=device)
    assert plan.peak_bytes <= plan.constraints.max_peak_bytes
    assert plan.recomputed
    assert plan.bound_ps <= plan.objective_ps
    # In another order, where large values were computed again before the search, and without the transposes
    # of products whose operands were exchanged.
    ops = [
        Counter(n.op for n in g.nodes if n.op != "transpose")
        for g in (without_copies(plan.graph), lower(trace(GRADIENT, *SHAPES)).graph)
    ]
    assert ops[0] == ops[1]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.verify().status == "verified"


def test_a_limit_that_the_fastest_plan_keeps_costs_nothing():
    free = fuseplan.make_plan(GRADIENT, device="h200")(*SHAPES)
    assert free.recomputed
    plan = planned(max_peak_bytes=free.peak_bytes)
    assert (plan.kernels, plan.status, plan.notes) == (free.kernels, free.status, free.notes)


def test_a_limit_beside_other_constraints():
    plan = planned(90, never_fuse=["tanh"], max_group_size=20)
    alone = [k for k in plan.kernels if any(plan.graph.nodes[n].op == "tanh" for n in k.spec.nodes)]
    assert all(len(k.spec.nodes) == 1 for k in alone)
    assert plan.peak_bytes <= plan.constraints.max_peak_bytes


@pytest.mark.slow
def test_no_plan_is_slower_than_without():
    for percent in (100, 98):
        once = planned(percent, recompute=False)
        assert planned(percent).objective_ps <= once.objective_ps


@pytest.mark.slow
def test_what_no_plan_keeps_to():
    one = (SHAPES[0], WEIGHTS[:1])
    with pytest.raises(MemoryLimitError) as caught:
        planned(args=one, max_peak_bytes=1000)
    error = caught.value
    assert 0 < error.least_bytes <= error.smallest_bytes
    assert planned(args=one, max_peak_bytes=error.smallest_bytes).peak_bytes <= error.smallest_bytes


def test_the_results_are_the_same():
    f, device = GRADIENT, with_slow_memory("h200")
    weights = [tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((10, 40), (40, 10)))] * 3
    args = (jax.ShapeDtypeStruct((130, 10), "float32"), weights)
    free = fuseplan.make_plan(f, device=device, features=Features(recompute=False))(*args)
    constraints = Constraints(max_peak_bytes=free.peak_bytes * 4 // 5)
    real = make_args(args, seed=0)
    traced = trace(f, *args)
    lowered, plan = plan_traced(traced, Options(device, constraints=constraints))
    assert plan.recomputed
    flat = [*lowered.consts, *jax.tree.leaves(real)]
    got = jax.jit(make_runner(lowered, plan, platform="cpu", interpret=True))(*flat)
    check_results("late", got, jax.jit(traced.evaluate)(*flat))
