"""Operations that are computed again for their readers: the search space, the optimum, the program."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import fuseplan
from costmodel.devices import get_device
from costmodel.graph import ORIGINAL, GraphError, OpKind, check_graph, copies_of, without_copies
from fuseplan import Features, Plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.rewrite import with_copies, with_one_copy
from fuseplan.frontend.trace import trace
from fuseplan.pipeline import PEERS
from fuseplan.plan.options import Options
from fuseplan.planners import Budget, get_planner
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.tolerance import check_results
from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search import heuristic_plans
from fuseplan.search.cache import SolutionCache, using_cache
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.grouping import decompose
from fuseplan.search.heuristic_plans import HEURISTICS
from fuseplan.search.limits import LIMITS
from fuseplan.search.presolve import absorb_renames
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import roots_of, split
from fuseplan.search.remat.search import split_all
from fuseplan.support.bitset import bits
from fuseplan.verify.groups import Groups
from fuseplan.verify.plan import check_plan
from fuseplan.workloads import get_workload, make_args
from tests.helpers.copies_by_hand import ByHand, ties
from tests.helpers.graphs import TEST_DEVICE
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import run_quickly
from tests.helpers.small_graphs import brute_force, edges_after, is_connected, is_convex, siblings_of
from tests.planners.test_planners import objectives, programs

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")
QUICK = dataclasses.replace(TEST_DEVICE, launch_ps=TEST_DEVICE.launch_ps // 1000)
"""So that small arrays are worth computing again."""

MOST = 9
"""Positions that brute force can look at."""


def split_programs(g):
    copies = split(g, roots_of(g, QUICK))
    return copies if copies is not None and len(copies.graph.nodes) <= MOST else None


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(programs())
def test_what_is_computed_again_is_decided_optimally(g):
    copies = split_programs(g)
    if copies is None:
        return
    pricing = DuplicatePricing(copies, Scheduler(g, QUICK))
    plan = SOLVE(copies.graph, pricing, Budget())
    assert plan.status == "OPTIMAL"
    pairs = {*siblings_of(copies.graph, pricing), *ties(copies.graph)}
    by_hand = ByHand(copies.graph, QUICK, pricing.offers)
    assert objectives(plan) == brute_force(copies.graph, by_hand, tuple(pairs))[0]


@settings(max_examples=80, deadline=None)
@given(programs())
def test_groups_of_copies_are_those_of_the_definition(g):
    copies = split_programs(g)
    if copies is None:
        return
    pricing = DuplicatePricing(copies, Scheduler(g, QUICK))
    graph, by_hand = copies.graph, ByHand(copies.graph, QUICK, pricing.offers)
    parts = decompose(graph, PriceBook(graph, pricing))
    pairs = parts.crossable.siblings
    after = edges_after(graph)
    for space in parts.spaces:
        found = {space.nodes(mask) for mask in enumerate_groups(space, 10**6).groups}
        for nodes in found:
            assert by_hand.is_searched(set(nodes))
            assert is_connected(graph, nodes, pairs)
            assert is_convex(after, nodes)
            one, other = pricing.price(nodes), by_hand.price(nodes)
            assert type(one) is type(other)
            if hasattr(one, "cost"):
                assert one.cost == other.cost
                assert pricing.floor(nodes) <= one.cost.time_ps
                assert pricing.floors(nodes)[1] <= one.cost.hbm_bytes


def masked_twice(x, y):
    i = jnp.arange(x.shape[1])
    seen = i[:, None] >= i
    return jnp.where(seen, x, 0.0).sum(0), jnp.where(seen, jnp.exp(y), 0.0).sum(1)


def test_renaming_what_leads_to_a_copy_makes_no_other_kernel():
    """Else one that is not searched, for a renaming belongs to its reader there, has a price below what
    its operations are said to be worth."""
    g = lower(trace(masked_twice, *[jax.ShapeDtypeStruct((2048, 2048), "float32")] * 2)).graph
    h200 = get_device("h200")
    copies = split(g, roots_of(g, h200))
    book = PriceBook(copies.graph, DuplicatePricing(copies, Scheduler(g, h200)))
    by_hand = ByHand(copies.graph, h200)
    (space,) = (s for s in decompose(copies.graph, book).spaces if s.duplicate_rules is not None)
    small = absorb_renames(space)
    assert small.n == space.n  # All of them read copies, and so stay.

    def computed(nodes):
        return frozenset(n for n in nodes if not book.renames(n))

    found = {space.nodes(mask) for mask in enumerate_groups(space, 10**5).groups}
    searched = {computed(small.nodes(mask)) for mask in enumerate_groups(small, 10**5).groups} - {frozenset()}
    assert {computed(nodes) for nodes in found} - {frozenset()} == searched
    assert all(by_hand.is_searched(set(nodes)) for nodes in found)
    groups = Groups(space.component, book)
    listed = {groups.members(mask) for mask in groups}
    assert {computed(nodes) for nodes in listed} - {frozenset()} <= searched
    # The search lets in some groups that do not fit on chip, which the verifier leaves out: no kernel is one.
    assert not any(isinstance(book.price(nodes), Price) for nodes in found - listed)


def test_a_sum_of_few_terms_is_computed_again_if_it_is_made_of_less():
    """The distance of two points for each of its readers, but not the mean of a row."""

    def distances(x, y):
        d = ((x[:, None] - y[None]) ** 2).sum(-1)
        return d.max(1), jnp.exp(d).sum(1)

    def centred(x):
        y = x - x.mean(1, keepdims=True)
        return y.max(1), jnp.exp(y).sum(1)

    points = jax.ShapeDtypeStruct((2000, 3), "float32")
    rows = jax.ShapeDtypeStruct((200_000, 30), "float32")
    for f, args, copied in ((distances, (points, points), True), (centred, (rows,), False)):
        graph = lower(trace(f, *args)).graph
        copies = split(graph, roots_of(graph, get_device("h200")))
        sums = [node.id for node in graph.nodes if node.op == "reduce_sum"]
        assert (copies is not None and copies.copies[sums[0]] == 2) == copied


def test_distances_of_points_are_computed_by_each_reader():
    """The optimum where a value of all pairs is never written, which is three times as fast."""
    points = jax.ShapeDtypeStruct((8000, 4), "float32")

    def soft_minimum(x, y):
        return -jax.nn.logsumexp(-((x[:, None] - y[None]) ** 2).sum(-1), 1)

    plan = fuseplan.make_plan(soft_minimum, device="h200")(points, points)
    written = max(v.size for k in plan.kernels for w in k.spec.writes for v in [plan.graph.values[w.value]])
    assert plan.status == "OPTIMAL"
    assert written == 8000
    others = [
        fuseplan.make_plan(soft_minimum, device="h200", planner=p)(points, points)
        for p in (*HEURISTICS, *PEERS)
    ]
    assert all(plan.objective_ps <= other.objective_ps for other in others)


def with_slow_memory(name):
    """The device, as if small arrays were large: they are worth computing again."""
    device = get_device(name)
    return dataclasses.replace(device, hbm_bytes_per_s=device.hbm_bytes_per_s // 10**5)


def run(f, args, device):
    traced = trace(f, *args)
    lowered, plan = plan_traced(traced, Options(device))
    flat = [*lowered.consts, *jax.tree.leaves(args)]
    got = run_quickly(make_runner(lowered, plan, platform="cpu", interpret=True), *flat)
    return plan, got, run_quickly(traced.evaluate, *flat)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize(
    "name", ["gpt2_block", "cross_entropy_grad", "layernorm_grad", "causal_attention_grad", "mlp", "rope"]
)
def test_what_is_computed_again_is_the_same(name, device):
    f, args = get_workload(name).build(small=True)
    plan, got, want = run(f, make_args(args, seed=0), with_slow_memory(device))
    check_results(name, got, want)
    again = Plan.from_json(plan.to_json())
    assert again.recomputed == plan.recomputed
    if (name, device) == ("gpt2_block", "h200"):
        assert plan.recomputed


def read_early_and_late(x, w):
    y = x.astype("float32") * 0.5
    return jnp.sort(y) + w + y  # too late for the kernel that makes y


LARGE = jax.ShapeDtypeStruct((4096, 4096), "int8"), jax.ShapeDtypeStruct((4096, 4096), "float32")


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_partly_is_the_same(device):
    x, w = jax.ShapeDtypeStruct((15, 250), "int8"), jax.ShapeDtypeStruct((15, 250), "float32")
    plan, got, want = run(read_early_and_late, make_args((x, w), seed=0), with_slow_memory(device))
    check_results("partly", got, want)
    assert len(plan.recomputed) == 2


def test_partly():
    """One reader computes a value again and another reads it: neither all of them nor none."""
    f = read_early_and_late
    plan = fuseplan.make_plan(f, device="h200")(*LARGE)
    assert sorted(plan.graph.nodes[n].op for n in plan.recomputed) == ["convert_element_type", "mul"]
    apart = fuseplan.make_plan(f, device="h200", features=Features(recompute=False))(*LARGE)
    assert plan.status == apart.status == "OPTIMAL"
    assert plan.objective_ps < apart.objective_ps
    assert apart.recomputed == ()


def test_copies_are_copies():
    graph = fuseplan.make_plan(read_early_and_late, device="h200")(*LARGE).graph
    check_graph(graph)
    copy = next(n for n, origin in enumerate(graph.origins) if n != origin)
    node = graph.nodes[copy]
    other = dataclasses.replace(node, signature=node.signature + 1)
    nodes = (*graph.nodes[:copy], other, *graph.nodes[copy + 1 :])
    with pytest.raises(GraphError, match=f"n{copy} {node.op} is no copy of n{graph.origins[copy]}"):
        check_graph(dataclasses.replace(graph, nodes=nodes))


def test_a_graph_without_its_copies_is_the_graph():
    f, args = get_workload("gpt2_block").build()
    graph = lower(trace(f, *args)).graph
    copies = split(graph, roots_of(graph, get_device("h200")))
    assert copies.node == tuple(sorted(copies.node))
    merged = without_copies(copies.graph)
    assert [str(n.op) for n in merged.nodes] == [str(n.op) for n in graph.nodes]
    assert split(merged, roots_of(merged, get_device("h200"))).graph == copies.graph
    assert without_copies(graph) is graph


def test_a_program_without_its_copies_is_the_program():
    def f(x):
        y = jnp.exp(x)
        return y + 1, y * 2

    lowered = lower(trace(f, jnp.ones(8)))
    exp, add, mul = range(3)
    reader = {add: 0, mul: 1}
    items = [(exp, 0), (exp, 1), (add, ORIGINAL), (mul, ORIGINAL)]
    program, _ = with_copies(lowered, items, lambda item, v: reader.get(item[0], ORIGINAL))
    assert [node.op for node in program.graph.nodes] == ["exp", "exp", "add", "mul"]
    assert program.graph.origins
    once = with_one_copy(program)
    assert once.graph == lowered.graph == without_copies(program.graph)
    assert once.equations == lowered.equations
    assert with_one_copy(lowered) is lowered


def test_what_is_split():
    """What is large, cheap, read by several, and made from no more than twice its size."""
    f, args = get_workload("gpt2_block").build()
    graph = lower(trace(f, *args)).graph
    copies = split(graph, roots_of(graph, get_device("h200")))
    for nodes in copies_of(copies.graph):
        assert len(nodes) <= LIMITS.max_copies
        assert copies.graph.nodes[nodes[0]].kind <= OpKind.INJECTIVE
        readers = [
            {r for v in copies.graph.nodes[n].outputs for r in copies.graph.consumers[v]} for n in nodes
        ]
        assert all(len(some) <= 1 for some in readers)
    assert split(lower(trace(jnp.exp, jnp.ones(8))).graph, (0,)) is None


@pytest.mark.parametrize(("count", "ops"), [(2, {"ge", "tanh"}), (40, {"ge"})])
def test_what_is_made_of_indices_needs_nothing_and_what_is_made_of_too_much_is_not_split(count, ops):
    def f(x, y, *vectors):
        mask = jnp.tri(4096, dtype=bool)
        total = jnp.tanh(sum(vectors)[:, None] * jnp.ones((1, 4096)))
        return jnp.where(mask, x, 0.0).sum(0), jnp.where(mask, y, 0.0).sum(1), total.sum(0), total.max(1)

    matrix, vector = jax.ShapeDtypeStruct((4096, 4096), "float32"), jax.ShapeDtypeStruct((4096,), "float32")
    graph = lower(trace(f, matrix, matrix, *[vector] * count)).graph
    assert {graph.nodes[n].op for n in roots_of(graph, get_device("h200"))} == ops


def test_two_copies_of_an_array_are_not_two_arrays():
    """What one kernel reads once, another that is alike but for that reads twice."""

    def f(x, c, a, b):
        y = x * 2
        early, late = jnp.sort(c), jnp.sort(a)
        return y + early, y * early, a + late, b * late

    graph = lower(trace(f, *[jax.ShapeDtypeStruct((2048, 2048), "float32")] * 4)).graph
    device = get_device("h200")
    copies = split(graph, roots_of(graph, device))
    book = PriceBook(copies.graph, DuplicatePricing(copies, Scheduler(graph, device)))
    ops = [node.op for node in copies.graph.nodes]
    assert ops == ["mul", "mul", "sort", "sort", "add", "mul", "add", "mul"]
    assert book.price((4, 5)).hbm_bytes == 4 * 2**24
    assert book.price((6, 7)).hbm_bytes == 5 * 2**24
    assert book.signatures.text((4, 5)) != book.signatures.text((6, 7))


def planned(name, device="h200", deadline_s=100, **options):
    f, args = get_workload(name).build()
    return fuseplan.make_plan(f, device=device, deadline_s=deadline_s, **options)(*args)


@pytest.mark.slow
def test_of_many_values_those_that_pay_are_left_to_the_search():
    once = planned("gpt2_block_grad", features=Features(recompute=False))
    plan = planned("gpt2_block_grad")
    every = roots_of(without_copies(plan.graph), plan.device)
    assert set(plan.proof.copied).intersection(every) < set(every)
    assert plan.objective_ps < 0.96 * once.objective_ps
    assert plan.peak_bytes < once.peak_bytes
    again = planned("gpt2_block_grad")
    assert again.kernels == plan.kernels
    # Of components that are one kernel from the start there is nothing to remember: three products.
    assert again.stats.remembered == again.stats.distinct_components - 3
    assert again.status == plan.status


def test_a_small_operation_is_computed_once_where_its_copies_would_leave_another_without():
    """Each copy of the sum would read the differences, which then had six readers."""

    def energy(r):
        d = r[:, None] - r[None]
        q = (d**2).sum(-1) + jnp.eye(len(r))
        return ((q**-6 - q**-3) * (1 - jnp.eye(len(r)))).sum()

    graph = lower(trace(jax.grad(energy), jax.ShapeDtypeStruct((2_000, 3), "float32"))).graph
    roots = roots_of(graph, get_device("h200"))
    plainly, found = split(graph, roots), split_all(graph, roots, frozenset())
    lost = set(roots).difference(plainly.copied)
    assert lost
    assert lost <= set(found.copied)
    assert set(plainly.copied).difference(found.copied).isdisjoint(roots)


def test_a_deadline_leaves_the_plan_without(monkeypatch):
    """What the second search does not find in time is no reason for a slower plan."""
    once = planned("gpt2_block", features=Features(recompute=False))
    monkeypatch.setattr(
        Budget,
        "until",
        lambda budget, _: dataclasses.replace(budget, deadline_s=1e-6, asked_s=budget.whole_s),
    )
    with using_cache(SolutionCache()):
        plan = planned("gpt2_block")
    assert (plan.objective_ps, plan.status) == (once.objective_ps, "FEASIBLE")
    assert plan.bound_ps < plan.objective_ps
    Plan.from_json(plan.to_json())  # is checked


def test_what_cannot_be_cut_short_is_not_begun_too_late(monkeypatch):
    """The second search is left out where its fixed costs alone would exceed the deadline."""
    once = planned("gpt2_block", features=Features(recompute=False))
    monkeypatch.setattr("fuseplan.search.remat.search.UNCUT", 10**12)
    monkeypatch.setattr("fuseplan.search.remat.search.worth_recomputing", None)
    plan = planned("gpt2_block")
    assert (plan.objective_ps, plan.status) == (once.objective_ps, "FEASIBLE")
    assert plan.bound_ps < plan.objective_ps
    assert any("plans with rematerialisation were searched" in note for note in plan.notes)
    Plan.from_json(plan.to_json())  # is checked


@pytest.mark.parametrize("damage", ["roots", "kernels"])
def test_a_false_proof_is_refuted(damage):
    plan = fuseplan.make_plan(read_early_and_late, device="h200")(*LARGE)
    assert plan.verify().status == "verified"
    if damage == "roots":
        proof = dataclasses.replace(plan.proof, copied=(*plan.proof.copied, 0))
        plan = dataclasses.replace(plan, proof=proof)
    else:
        prices = max(plan.proof.parts, key=lambda part: part.bound_ps)
        dearer = dataclasses.replace(prices, bound_ps=prices.bound_ps + 10**6)
        parts = tuple(dearer if part is prices else part for part in plan.proof.parts)
        plan = dataclasses.replace(plan, proof=dataclasses.replace(plan.proof, parts=parts))
    assert plan.verify().status == "refuted"


@pytest.mark.parametrize(("device", "packs"), [("cpu", True), ("h200", False), ("h200", True)])
def test_groups_with_copies_cross_hubs_where_those_without_do(device, packs):
    """Else a CPU's kernels would hold operations that only a scalar ties together, which is none."""

    def step(x, rate):
        y = x - x.mean(1, keepdims=True)
        return y.max(1), jnp.exp(y).sum(1), *[rate * (x[:, k] + k) for k in range(8)]

    shapes = (jax.ShapeDtypeStruct((512, 256), "float32"), jax.ShapeDtypeStruct((), "float32"))
    lowered = lower(trace(step, *shapes))
    scheduler = Scheduler(lowered.graph, get_device(device), lowered, Features(packs=packs))
    copies = split(lowered.graph, roots_of(lowered.graph, scheduler.device))
    assert (
        DuplicatePricing(copies, scheduler).crosses_hubs
        == scheduler.crosses_hubs
        == (device != "cpu" and packs)
    )
    plan = fuseplan.make_plan(step, device=device, features=Features(packs=packs), planner="greedy")(*shapes)
    assert check_plan(plan)


def test_a_rename_that_reads_a_copy_is_an_operation_of_its_own():
    """Merged with its reader, it could not be in the kernel of the copy, which the proof has to know."""

    def distances(x):
        squares = (((2,), (2,)), ((0, 1), (0, 1)))
        return jax.lax.dot_general(x[None] - x[:, None], x[None] - x[:, None], squares)

    def f(x, w):
        kernel = (1.0 * jnp.exp(-distances(x) / 2.0)).T
        mean = kernel @ w
        moved = (x[None] - x[:, None]) / 1.0
        slopes = jnp.transpose(-(moved * (1.0 * jnp.exp(-distances(x) / 2.0))[..., None]), (1, 0, 2))
        best = jnp.argmax(mean - jnp.sum(kernel, 0) / 1024.0)
        return best, mean, jax.lax.dot_general(slopes, w, (((1,), (0,)), ((), ())))

    points, weights = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((1024, 3), (1024,)))
    plan = fuseplan.make_plan(f, device="h200")(points, weights)
    assert plan.status == "OPTIMAL"
    assert plan.verify()


def test_kernels_of_one_operation_each_hold_none_twice():
    """Also where some copies of an operation are among them, and others are not."""
    lowered = lower(trace(read_early_and_late, *LARGE))
    scheduler = Scheduler(lowered.graph, get_device("h200"), lowered)
    copies = split(lowered.graph, roots_of(lowered.graph, scheduler.device))
    book = PriceBook(copies.graph, DuplicatePricing(copies, scheduler))
    (space,) = (s for s in decompose(copies.graph, book).spaces if s.duplicate_rules is not None)
    (together, *_) = space.duplicate_rules.classes
    for i in bits(together):
        some = space.everything & ~(1 << i)
        groups = heuristic_plans._apart(space, some)
        assert sum(groups) == some
        assert sum(mask.bit_count() for mask in groups) == some.bit_count()
    assert together in heuristic_plans._apart(space, space.everything)
