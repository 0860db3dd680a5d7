"""Scalars that tie many operations together: plans fuse across them, or say that they do not."""

import re
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from fuseplan import Kernel, Plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.notes import NoteKind
from fuseplan.plan.options import Features
from fuseplan.planners import solver
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule import shared_operands
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search import component, heuristic_plans, heuristics
from fuseplan.search.cache import SolutionCache, using_cache
from fuseplan.search.component_cache import solution_key
from fuseplan.search.grouping import Budget, decompose
from fuseplan.search.heuristics import best_first, greedy
from fuseplan.search.limits import LIMITS
from fuseplan.settings import make_options
from fuseplan.support.work import Work
from fuseplan.verify.report import VERIFIED, verify_plan
from fuseplan.workloads import optimizer
from fuseplan.workloads.stress import STRESS
from tests.helpers.plans import plan_traced

pytestmark = pytest.mark.one_python


def small_adam():
    return STRESS["adam_100"].build("float32", small=True)


def hub_graph():
    f, args = small_adam()
    return lower(trace(f, *args)).graph


def large_hub_graph():
    f, _ = STRESS["adam_100"].build("float32", small=True)
    grads = [jax.ShapeDtypeStruct((768, 768) if i % 2 else (768,), "float32") for i in range(8)]
    state = jax.eval_shape(optimizer.adam_init, grads)
    return lower(trace(f, grads, state, grads)).graph


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_an_optimizer_step_of_small_arrays_is_few_kernels_and_proven(device):
    f, args = small_adam()
    apart = fuseplan.make_plan(f, device=device, features=Features(packs=False))(*args)
    plan = fuseplan.make_plan(f, device=device)(*args)
    assert len(plan.kernels) < len(apart.kernels) / 2
    assert plan.objective_us < 0.7 * apart.objective_us
    assert (plan.status == "OPTIMAL") == (plan.bound_us == plan.objective_us)
    assert plan.bound_us > 0.98 * plan.objective_us
    assert plan.bound_us < apart.bound_us, "a bound without such plans is none"
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.verify().status == VERIFIED


@pytest.mark.parametrize("planner", ["greedy", "best_first"])
def test_heuristics_go_on_merging_across_hubs(planner):
    f, args = small_adam()
    apart = fuseplan.make_plan(f, device="h200", planner=planner, features=Features(packs=False))(*args)
    plan = fuseplan.make_plan(f, device="h200", planner=planner)(*args)
    assert plan.objective_us < apart.objective_us
    assert plan.verify()


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_without_them_a_note_says_how_fast_plans_across_a_hub_may_be(device):
    graph = hub_graph()
    features = Features(packs=False)
    scheduler = Scheduler(graph, get_device(device), features=features)
    plan = plan_groups(graph, scheduler)
    (note,) = (note for note in plan.notes if note.kind is NoteKind.SCALAR_SPLIT)
    assert "hub" in {verdict.rule for verdict in plan.refusals}
    told = re.search(r"at least ([\d.,]+) µs", str(note))
    assert told is not None
    time_ps = sum(kernel.cost.time_ps for kernel in plan.kernels)
    across = best_first(graph, Scheduler(graph, get_device(device)))
    across_ps = sum(kernel.cost.time_ps for kernel in across.kernels)
    assert float(told[1].replace(",", "")) * 1e6 <= across_ps * 1.01, "three digits of it are told"
    assert across_ps < time_ps, "the space without such plans would lose nothing"


def test_where_there_was_no_time_for_them_the_bound_is_below_them():
    graph = hub_graph()
    scheduler = Scheduler(graph, get_device("h200"))
    hurried = plan_groups(graph, scheduler, Budget(deadline_s=0))
    assert any(note.kind is NoteKind.SCALAR_SPLIT for note in hurried.notes)
    assert hurried.status == "FEASIBLE"
    assert hurried.proof is None
    assert hurried.bound_ps <= plan_groups(graph, scheduler).time_ps


def test_a_component_that_is_too_large_keeps_its_kernels_whole(monkeypatch):
    """Then there is a plan, and no proof but the floor."""
    graph = hub_graph()
    scheduler = Scheduler(graph, get_device("h200"))
    apart = plan_groups(graph, Scheduler(graph, get_device("h200"), features=Features(packs=False)))
    best = plan_groups(graph, scheduler)
    for module in (component, heuristic_plans):
        monkeypatch.setattr(module, "LIMITS", replace(LIMITS, max_dense_positions=8))
    plan = plan_groups(graph, scheduler)
    assert best.time_ps <= plan.time_ps < apart.time_ps
    whole = [set(group) for group in plan.groups]
    assert all(any(set(group) <= kernel for kernel in whole) for group in apart.groups)
    assert plan.bound_ps == scheduler.floor(tuple(range(len(graph.nodes))))


def test_components_at_hubs_are_joined_and_the_others_stay():
    graph = hub_graph()
    book = PriceBook(graph, Scheduler(graph, get_device("h200")))
    apart, together = decompose(graph, book, at_hubs=False), decompose(graph, book)
    assert apart.splits_hubs
    assert not together.splits_hubs
    assert len(together.instances) < len(apart.instances)
    groups = [nodes for _, nodes in apart.instances]
    for (_, nodes), within in zip(together.instances, together.groups_within(groups), strict=True):
        space = together.spaces[0]
        assert sorted(n for mask in within for n in space.nodes(mask)) == list(nodes)


def test_a_remembered_plan_is_the_same():
    f, args = small_adam()
    with using_cache(SolutionCache()):
        first = fuseplan.make_plan(f, device="tpu_v5e", deadline_s=100)(*args)
        again = fuseplan.make_plan(f, device="tpu_v5e", deadline_s=100)(*args)
    assert [k.spec for k in first.kernels] == [k.spec for k in again.kernels]
    assert first.bound_ps == again.bound_ps
    assert again.stats.remembered > 0


def test_a_fused_step_has_the_numbers_of_jax():
    """A norm of all arrays, and what it scales, in one kernel."""

    def clipped(arrays):
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in arrays))
        return [x * jnp.minimum(1.0, 1.0 / norm) for x in arrays]

    keys = jax.random.split(jax.random.key(0), 7)
    arrays = [jax.random.normal(key, (3 + i, 5)) for i, key in enumerate(keys)]
    plan = fuseplan.make_plan(clipped, device="h200")(arrays)
    assert len(plan.kernels) == 1
    for found, expected in zip(plan.run(arrays, interpret=True), clipped(arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_arithmetic_on_a_scalar_is_tied_to_its_other_readers(device):
    """A kernel that also counts the steps."""

    def step(xs, count):
        return [x * jnp.sqrt(count) + x for x in xs], count + 1.0, jnp.exp(count) * 2.0

    args = (
        [jax.ShapeDtypeStruct((8, 16 + i), "float32") for i in range(6)],
        jax.ShapeDtypeStruct((), "float32"),
    )
    plan = fuseplan.make_plan(step, device=device)(*args)
    assert len(plan.kernels) == 1
    assert plan.verify().status == VERIFIED


def test_a_launch_on_a_gpu_passes_so_many_arrays():
    graph = lower(trace(lambda xs: [x * 2 + 1 for x in xs], [jnp.ones((4, 4))] * 300)).graph
    everything = tuple(range(len(graph.nodes)))
    refused = Scheduler(graph, get_device("h200")).price(everything)
    assert "would read and write 600 arrays" in str(refused)
    assert isinstance(Scheduler(graph, get_device("tpu_v5e")).price(everything), Kernel)
    some = tuple(n for n in everything if n < 500)
    assert isinstance(Scheduler(graph, get_device("h200")).price(some), Kernel)


def test_copies_of_an_operation_are_one_port_of_a_hub():
    """Else the plan without copies would fuse across a hub that the search with copies keeps apart, and be
    faster than what that search proves."""
    loss = jax.value_and_grad(lambda x: jax.nn.logsumexp(x).astype(jnp.float32) ** 2)
    x = jax.ShapeDtypeStruct((1024, 1000), "bfloat16")
    lowered, plan = plan_traced(trace(loss, x), make_options("tpu_v5e", deadline_s=100))
    assert lowered.graph.origins, "the difference is computed again"
    assert not shared_operands.wide_hubs(lowered.graph).ports
    assert plan.status == "OPTIMAL"
    assert verify_plan(plan).status == VERIFIED


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize(("most", "work"), [(8, 10_000_000), (1_500, 100_000)])
def test_a_component_that_is_not_proven_is_no_slower_than_the_heuristics_plans(
    device, most, work, monkeypatch
):
    """Either heuristic's, also where these end at the limit of what they look at. The component is too large
    for column generation, or little work may be done."""
    few = replace(LIMITS, max_dense_positions=most, max_looked=300, max_looked_in_rounds=3_000)
    for module in (component, heuristic_plans, heuristics):
        monkeypatch.setattr(module, "LIMITS", few)
    graph = large_hub_graph()
    plan = plan_groups(graph, Scheduler(graph, get_device(device)), Budget(work=Work(work)))
    for heuristic in (greedy, best_first):
        kernels = heuristic(graph, Scheduler(graph, get_device(device))).kernels
        assert plan.time_ps <= sum(kernel.cost.time_ps for kernel in kernels)


@pytest.mark.parametrize("left_s", [1e6, 0.0])
def test_the_heuristics_own_plans_are_merged_further_where_there_is_time(left_s, monkeypatch):
    # Merging further finds nothing, so that what is left is the plan that each began with.
    idle = dict.fromkeys(heuristic_plans.HEURISTICS, lambda space: space.singles)
    monkeypatch.setattr(heuristic_plans, "HEURISTICS", idle)
    graph = large_hub_graph()
    book = PriceBook(graph, Scheduler(graph, get_device("h200")))
    book.expires_at = time.monotonic() + left_s
    parts = decompose(graph, book)
    space = parts.spaces[0]
    good = parts.groups_within(best_first(graph, Scheduler(graph, get_device("h200"))).groups)[0]
    asked = []

    def own(name):
        asked.append(name)
        return {0: good if name == "greedy" else space.singles}

    starts = heuristic_plans.HeuristicPlans(parts.spaces, (), {0: space.singles}, own)
    groups, name = starts.best(0)
    if left_s:
        assert asked == ["greedy", "best_first"]
        assert name == "greedy"
        assert space.total(groups) == space.total(good) < space.total(space.singles)
    else:
        assert asked == []
        assert space.total(groups) > space.total(good)
    assert starts.skipped == (set() if left_s else {0}), "what more time could change is not remembered"
    assert starts.best(0) == (groups, name)
    assert len(asked) in (0, 2), "each is asked once"


def test_a_remembered_plan_began_with_the_same_plan(monkeypatch):
    """The search across hubs starts from a plan without such groups, which another deadline may change."""
    begun = []
    cached = solver.ComponentCache

    def recorded(parts, planner, budget, expires_at, plans, starts):
        begun.append({part: tuple(groups) for part, groups in plans.items()})
        return cached(parts, planner, budget, expires_at, plans, starts)

    monkeypatch.setattr(solver, "ComponentCache", recorded)
    graph = hub_graph()
    plan_groups(graph, Scheduler(graph, get_device("h200")), Budget())
    apart, across = begun
    assert apart == {}
    assert across
    (space,) = decompose(graph, PriceBook(graph, Scheduler(graph, get_device("h200")))).spaces
    keys = {solution_key(space, "solver", Budget(), start) for start in (None, [1], list(across[0]))}
    assert len(keys) == 3
