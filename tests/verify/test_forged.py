"""Forged plans and proofs are refuted from their files, with a message that names the fault.

Each forgery keeps the claims of the plan consistent with the forged proof, so that the fault itself is found.
"""

import random
import re
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.devices import get_device
from costmodel.graph import Flops, OpKind, make_graph
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.fusion_plan import Case
from fuseplan.plan.json_codec import read_plan
from fuseplan.plan.options import Features, Options
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.components import components, crossable_edges, data_edges
from fuseplan.support.digraph import execution_order, group_successors
from fuseplan.verify import groups as enumeration
from fuseplan.verify.bound import Counts, verify_proof
from fuseplan.verify.errors import RefutedError
from fuseplan.verify.groups import Groups
from fuseplan.verify.report import NOT_CHECKED, REFUTED, VERIFIED, verify_plan
from fuseplan.workloads import get_workload
from fuseplan.workloads.packages import PACKAGES
from fuseplan.workloads.workload import array
from tests.helpers.plans import plan_best
from tests.helpers.small_graphs import Bytes, brute_force, graphs

SOLVE = get_planner("solver")

pytestmark = pytest.mark.one_python


def two_programs(x, y):
    attention, _ = get_workload("attention").build(small=True)
    norm_mlp, _ = get_workload("norm_mlp").build(small=True)
    return attention(*x), norm_mlp(*y)


def in_steps(x, w, y):
    """Sums so long that they are made in two steps, of what several kernels compute again."""
    shared = jnp.exp(x) * 2.0
    return jnp.tanh(shared) @ w, jnp.sum(shared * y, 0), jnp.sum(jnp.sin(shared), 0)


def waiting(x, y):
    """The cheapest groups of two components would wait for each other."""
    a, b = jnp.exp(x), jnp.exp(y)
    return a + jnp.sort(b), b + jnp.sort(a)


SQUARE = array("float32", 1024, 1024)
LONG = array("float32", 8192, 768)


@cache
def made(name):
    args, features = (SQUARE, SQUARE), Features()
    if name == "parts":
        f, args = two_programs, [get_workload(w).build(small=True)[1] for w in ("attention", "norm_mlp")]
    elif name == "copies":
        f, args = in_steps, (LONG, array("float32", 768, 768), LONG)
    elif name == "cases":
        f, args = PACKAGES["log_density_grad"].build()
    elif name == "joint":
        f, features = waiting, Features(recompute=False)
    else:
        f, args = get_workload("adam_update").build(small=True)
    options = Options(get_device("h200"), "solver", 120.0, features=features)
    return plan_best(lower(trace(f, *args)), options)[1]


@cache
def verified(name):
    """As ``made``; its plan is verified from its file."""
    plan = made(name)
    assert verify_plan(read_plan(plan.to_json())).status == VERIFIED
    return plan


def claiming(plan, **changes):
    """``plan`` with changes of its proof, and the bound that it then proves."""
    proof = replace(plan.proof, **changes)
    bound = min(proof.bound_ps, plan.objective_ps)
    status = "OPTIMAL" if bound == plan.objective_ps else "FEASIBLE"
    return replace(plan, proof=proof, bound_ps=bound, status=status)


def with_part(plan, k, **changes):
    parts = list(plan.proof.parts)
    parts[k] = replace(parts[k], **changes)
    return claiming(plan, parts=tuple(parts))


def priced(plan):
    """The part with most different prices, and where it stands."""
    k = max(range(len(plan.proof.parts)), key=lambda k: len(set(plan.proof.parts[k].prices_ps)))
    return k, plan.proof.parts[k]


def with_price(plan, *more):
    """The part with most prices, with ``more`` of them at positions."""
    k, part = priced(plan)
    prices = list(part.prices_ps)
    for i, ps in more:
        prices[i] += ps
    return with_part(plan, k, prices_ps=tuple(prices))


def with_node(plan, n, **changes):
    nodes = list(plan.graph.nodes)
    nodes[n] = replace(nodes[n], **changes)
    return replanned(plan, replace(plan.graph, nodes=tuple(nodes)))


def replanned(plan, graph):
    """A plan of another graph, with a proof that is right for it."""
    found = SOLVE(graph, Scheduler(graph, plan.device), Budget())
    groups = [kernel.spec.nodes for kernel in found.kernels]
    order = execution_order(group_successors(data_edges(graph), groups))
    return replace(
        plan, graph=graph, kernels=tuple(found.kernels[k] for k in order), status=found.status,
        bound_ps=found.bound_ps, proof=found.proof,
    )  # fmt: skip


def forged_bound(plan):
    return replace(plan, bound_ps=plan.bound_ps - 1, status="FEASIBLE", proof=replace(plan.proof, parts=()))


def forged_bound_beyond_its_proof(plan):
    k, part = priced(plan)
    lower_ = with_part(plan, k, bound_ps=part.bound_ps - 2)
    return replace(lower_, bound_ps=plan.bound_ps - 1)


def forged_bound_of_a_component(plan):
    k, part = priced(plan)
    return with_part(plan, k, bound_ps=part.bound_ps + 10**6)


def forged_floor(plan):
    k = next(k for k, part in enumerate(plan.proof.parts) if not part.prices_ps)
    return with_part(plan, k, bound_ps=plan.proof.parts[k].bound_ps + 1)


def raised_price(plan):
    return with_price(plan, (0, 10**6))


def moved_price(plan):
    """From one operation to another: the sum is the same."""
    _, part = priced(plan)
    dearest = part.prices_ps.index(max(part.prices_ps))
    other = (dearest + 1) % len(part.prices_ps)
    return with_price(plan, (dearest, -part.prices_ps[dearest]), (other, part.prices_ps[dearest]))


def negative_price(plan):
    """What is below nothing for one operation is paid by another."""
    return with_price(plan, (0, -(10**9)), (1, 10**9))


def permuted_prices(plan):
    k, part = priced(plan)
    return with_part(plan, k, prices_ps=(*part.prices_ps[1:], part.prices_ps[0]))


def negated_prices(plan):
    k, part = priced(plan)
    return with_part(plan, k, prices_ps=tuple(-ps for ps in part.prices_ps))


def too_few_prices(plan):
    k, part = priced(plan)
    return with_part(plan, k, prices_ps=part.prices_ps[1:])


def too_many_prices(plan):
    k, part = priced(plan)
    return with_part(plan, k, prices_ps=(0, *part.prices_ps))


def prices_of_another_component(plan):
    k, part = priced(plan)
    other = max((p for p in plan.proof.parts if p is not part), key=lambda p: len(p.prices_ps))
    prices = (other.prices_ps * len(part.prices_ps))[: len(part.prices_ps)]
    return with_part(plan, k, prices_ps=prices, bound_ps=sum(prices))


def components_exchanged(plan):
    parts = plan.proof.parts
    sizes = [(len(part.prices_ps), k) for k, part in enumerate(parts) if len(part.prices_ps) > 1]
    (_, a), (_, b) = min(sizes), max(sizes)
    swapped = list(parts)
    swapped[a] = replace(parts[a], first_nodes=parts[b].first_nodes)
    swapped[b] = replace(parts[b], first_nodes=parts[a].first_nodes)
    return claiming(plan, parts=tuple(swapped))


def proof_of_another_program(plan):
    return claiming(plan, **{"parts": made("copies").proof.parts})


def proof_of_a_slower_device(plan):
    found = SOLVE(plan.graph, Scheduler(plan.graph, get_device("tpu_v5e")), Budget())
    return claiming(plan, parts=found.proof.parts, joint=found.proof.joint)


def component_left_out(plan):
    return claiming(plan, parts=plan.proof.parts[1:])


def component_counted_twice(plan):
    return with_part(plan, 0, first_nodes=plan.proof.parts[0].first_nodes * 2)


def component_that_is_not_there(plan):
    return with_part(plan, 0, first_nodes=(*plan.proof.parts[0].first_nodes, 10**6))


def forged_joint_bound(plan):
    joint = plan.proof.joint
    greedier = replace(joint, bound_ps=joint.bound_ps + 1)
    return replace(claiming(plan, joint=greedier), bound_ps=plan.objective_ps)


def with_cases_in_the_joint(plan, prices_of=lambda part, prices: prices):
    """``plan`` with one case for each component of the joint bound, which holds all of its plans."""
    book = PriceBook(plan.graph, Scheduler(plan.graph, plan.device, features=plan.features))
    found = components(plan.graph, crossable_edges(plan.graph, book))
    sizes = {component.nodes[0]: len(component.nodes) for component in found}
    parts = []
    for part in plan.proof.parts:
        if set(part.first_nodes) & set(plan.proof.joint.first_nodes):
            prices = prices_of(part, part.prices_ps or (0,) * sizes[part.first_nodes[0]])
            part = replace(part, bound_ps=sum(prices), prices_ps=prices, cases=(Case((), (), prices),))
        parts.append(part)
    return claiming(plan, parts=tuple(parts))


def forged_joint_bound_beside_cases(plan):
    return forged_joint_bound(with_cases_in_the_joint(plan))


def forged_joint_bound_beside_cases_without_prices(plan):
    nothing = with_cases_in_the_joint(plan, lambda _, prices: (0,) * len(prices))
    parts = tuple([replace(part, prices_ps=()) if part.cases else part for part in nothing.proof.parts])
    return forged_joint_bound(claiming(plan, parts=parts))


def raised_price_beside_cases_in_the_joint(plan):
    found = with_cases_in_the_joint(plan)
    parts = [
        replace(part, prices_ps=(part.prices_ps[0] + 10**6, *part.prices_ps[1:])) if part.cases else part
        for part in found.proof.parts
    ]
    return claiming(found, parts=tuple(parts))


def joint_of_nothing(plan):
    return claiming(plan, joint=replace(plan.proof.joint, first_nodes=()))


def joint_of_a_component_twice(plan):
    first = plan.proof.joint.first_nodes
    return claiming(plan, joint=replace(plan.proof.joint, first_nodes=first + first[:1]))


def root_that_has_one_reader(plan):
    return claiming(plan, copied=(*plan.proof.copied, 2))


def root_that_is_not_there(plan):
    return claiming(plan, copied=(*plan.proof.copied, 10**6))


def copies_of_other_operations(plan):
    """The two sums are taken for one."""
    origins = list(range(len(plan.graph.nodes)))
    first, second = [n.id for n in plan.graph.nodes if n.op == "reduce_sum"][:2]
    origins[second] = first
    return claiming(plan, origins=tuple(origins))


def too_few_origins(plan):
    return claiming(plan, origins=(0,))


def kernel_that_is_faster_than_it_is(plan):
    k = plan.kernels[0]
    faster = replace(k, cost=replace(k.cost, launch_ps=k.cost.launch_ps - 1))
    return claiming(replace(plan, kernels=(faster, *plan.kernels[1:])))


def operation_removed(plan):
    """The last one, with its result."""
    graph = plan.graph
    (result,) = graph.nodes[-1].outputs
    assert result == len(graph.values) - 1
    outputs = [v for v in graph.outputs if v != result]
    return replanned(plan, make_graph(graph.values[:-1], graph.nodes[:-1], graph.inputs, outputs))


def result_left_out(plan):
    """What another operation reads is no result any more, and need not be written."""
    graph = plan.graph
    return replanned(plan, make_graph(graph.values, graph.nodes, graph.inputs, graph.outputs[1:]))


def work_left_out(plan):
    n = max(plan.graph.nodes, key=lambda node: node.flops.transcendental).id
    return with_node(plan, n, flops=Flops())


def narrower_arrays(plan):
    values = tuple(replace(value, dtype="bfloat16") for value in plan.graph.values)
    return replanned(plan, replace(plan.graph, values=values))


def operation_of_another_name(plan):
    return with_node(plan, 0, op="exp2")


def operation_that_may_not_fuse(plan):
    n = next(node.id for node in plan.graph.nodes if node.kind == OpKind.ELEMENTWISE)
    return with_node(plan, n, kind=OpKind.OPAQUE)


def wait_that_is_none(plan):
    """Operations that may not share a kernel leave fewer plans to choose from."""
    n = next(node for node in plan.graph.nodes if plan.graph.values[node.inputs[0]].producer >= 0)
    pair = (plan.graph.values[n.inputs[0]].producer, n.id)
    return replanned(plan, replace(plan.graph, waits=(*plan.graph.waits, pair)))


def divided(plan):
    """The part that cases prove, and where it stands."""
    return next((k, part) for k, part in enumerate(plan.proof.parts) if part.cases)


def with_case(plan, i, **changes):
    k, part = divided(plan)
    cases = list(part.cases)
    cases[i] = replace(cases[i], **changes)
    bound = min(sum(case.prices_ps) for case in cases)
    return with_part(plan, k, cases=tuple(cases), bound_ps=bound)


def case_left_out(plan):
    k, part = divided(plan)
    return with_part(plan, k, cases=part.cases[1:])


def case_of_other_pairs(plan):
    """A case that says too much leaves out plans."""
    _, part = divided(plan)
    (i, j), size = (*part.cases[0].together, *part.cases[0].apart)[0], len(part.cases[0].prices_ps)
    other = next((i, m) for m in range(size) if m not in (i, j))
    return with_case(plan, 0, together=(*part.cases[0].together, other))


def case_of_a_node_that_is_not_there(plan):
    return with_case(plan, 0, apart=((0, 1_000_000),))


def case_with_too_few_prices(plan):
    return with_case(plan, -1, prices_ps=divided(plan)[1].cases[-1].prices_ps[1:])


def case_without_pairs(plan):
    """The prices of one case, for all plans."""
    k, part = divided(plan)
    return with_part(plan, k, cases=(replace(part.cases[0], together=(), apart=()),))


def case_with_raised_prices(plan):
    prices = divided(plan)[1].cases[0].prices_ps
    return with_case(plan, 0, prices_ps=tuple(2 * ps for ps in prices))


def bound_beyond_its_cases(plan):
    k, part = divided(plan)
    cases = tuple(replace(c, prices_ps=tuple(ps // 2 for ps in c.prices_ps)) for c in part.cases)
    return with_part(plan, k, cases=cases)


def another_devices_speed(plan):
    return replace(plan, device=replace(plan.device, hbm_bytes_per_s=plan.device.hbm_bytes_per_s // 2))


CHEAPER = r"a kernel of n\d+ .* takes [\d,]+ ps, less than the [\d,]+ ps that the proof gives"
PRICES = r"\d+ prices are given for the component of n\d+"
COPIES, JOINT, CASES = "copies", "joint", "cases"
FORGERIES = {
    forged_bound: "adds up to",
    forged_bound_beyond_its_proof: "adds up to",
    forged_bound_of_a_component: "no plan beats",
    (forged_floor, JOINT): r"the component of n\d+ .*: its floor is [\d,]+ ps, not",
    raised_price: CHEAPER,
    moved_price: CHEAPER,
    negative_price: CHEAPER,
    permuted_prices: CHEAPER,
    negated_prices: CHEAPER,
    too_few_prices: PRICES,
    too_many_prices: PRICES,
    prices_of_another_component: CHEAPER,
    components_exchanged: f"{PRICES}|{CHEAPER}",
    proof_of_another_program: f"{PRICES}|says nothing of|there is none",
    component_left_out: r"the proof says nothing of the component of n\d+",
    component_counted_twice: r"counts the component of n\d+ twice",
    component_that_is_not_there: "a component that starts at n1000000: there is none",
    (forged_joint_bound, JOINT): r"kernels take [\d,]+ ps, less than",
    (forged_joint_bound_beside_cases, JOINT): r"kernels take [\d,]+ ps, less than",
    (forged_joint_bound_beside_cases_without_prices, JOINT): r"kernels take [\d,]+ ps, less than",
    (raised_price_beside_cases_in_the_joint, JOINT): CHEAPER,
    (joint_of_nothing, JOINT): "the joint bound is not about",
    (joint_of_a_component_twice, JOINT): "the joint bound is not about different components",
    (case_left_out, CASES): r"no case has .* in one kernel, and .* in two",
    (case_of_other_pairs, CASES): r"no case has .* in one kernel, and .* in two",
    (case_of_a_node_that_is_not_there, CASES): "is about a node that is not there",
    (case_with_too_few_prices, CASES): PRICES,
    (case_without_pairs, CASES): CHEAPER,
    (case_with_raised_prices, CASES): CHEAPER,
    (bound_beyond_its_cases, CASES): "the prices of a case add up to",
    (root_that_has_one_reader, COPIES): "rematerialises an operation that",
    (root_that_is_not_there, COPIES): r"rematerialises n1000000, of \d+ operations",
    (copies_of_other_operations, COPIES): r"takes n\d+ reduce_sum for a copy of n\d+",
    (too_few_origins, COPIES): r"has 1 origins for \d+ operations",
    proof_of_a_slower_device: CHEAPER,
    kernel_that_is_faster_than_it_is: r"kernel 0 .* claims [\d,]+ ps .* but costs",
    (operation_removed, JOINT): "the graph has 5 operations, its program 6",
    (result_left_out, JOINT): "the results are v7, in the program v5, v7",
    operation_of_another_name: r"n0 exp2 is \w+ in the program",
    work_left_out: r"n\d+ \w+: its flops is .*, in the program",
    (narrower_arrays, COPIES): r"v\d+ is bfloat16\[.*\], in the program float32",
    operation_that_may_not_fuse: r"n\d+ \w+: its kind is .*, in the program",
    wait_that_is_none: r"n\d+ \w+ waits for n\d+ \w+, and they are no reduction in two steps",
    another_devices_speed: "the plan's h200 is not fuseplan's: its hbm_bytes_per_s is",
}  # fmt: skip


@pytest.mark.parametrize(
    ("forgery", "message"),
    [
        pytest.param(f, text, id=(f[0] if isinstance(f, tuple) else f).__name__)
        for f, text in FORGERIES.items()
    ],
)
def test_forgeries_are_refuted(forgery, message):
    forge, base = forgery if isinstance(forgery, tuple) else (forgery, "parts")
    plan = verified(base)
    forged = forge(plan)
    result = verify_plan(forged)
    assert result.status == REFUTED, result
    assert re.search(message, result.reason), result.reason
    assert result.bound_us is None
    if forged.graph == plan.graph:
        result_of_file = verify_plan(read_plan(forged.to_json()))
        assert (result_of_file.status, result_of_file.reason) == (REFUTED, result.reason)
    else:  # The graph alone is forged, and does not fit the program that a file holds.
        alone = verify_plan(replace(forged, program=None))
        breaks_a_kernel = forge in (wait_that_is_none, operation_that_may_not_fuse)
        assert alone.status == (REFUTED if breaks_a_kernel else VERIFIED), alone


def test_a_joint_bound_of_components_with_cases_is_verified():
    plan = with_cases_in_the_joint(made(JOINT))
    assert any(part.cases for part in plan.proof.parts)
    assert verify_plan(plan).status == VERIFIED
    assert verify_plan(read_plan(plan.to_json())).status == VERIFIED


def test_an_operation_whose_rule_is_not_known_is_not_checked(monkeypatch):
    """A plan of another process, which registered the rule of an operation."""
    plan = made(JOINT)
    assert plan.graph.nodes[0].op == "exp"
    monkeypatch.setattr("fuseplan.verify.program.has_rule", lambda equation: equation.primitive.name != "exp")
    assert plan.verify(), "its node is what any process takes it for"
    result = verify_plan(with_node(plan, 0, kind=OpKind.OPAQUE))
    assert result.status == NOT_CHECKED
    assert result.reason == "n0 exp follows from a rule that is not registered here"


@settings(max_examples=100, deadline=None)
@given(graphs(), st.sampled_from([99, 3, 2]), st.booleans(), st.data())
def test_prices_of_any_sign_prove_no_more_than_the_optimum(g, max_nodes, foresees, data):
    """A plan holds every operation exactly once, so what is below nothing for one may pay for another."""
    pricing = Bytes(g, max_nodes, foresees=foresees)
    (optimum, _, _), _ = brute_force(g, pricing)
    proof = SOLVE(g, pricing, Budget()).proof
    parts = []
    for part in proof.parts:
        size = len(next(c for c in components_of(g, pricing) if c.nodes[0] == part.first_nodes[0]).nodes)
        changes = data.draw(st.lists(st.integers(-80_000, 80_000), min_size=size, max_size=size))
        scale = data.draw(st.sampled_from([0, 1, 100, 10_000]))
        given_ = part.prices_ps or (0,) * size
        prices = [p + change // (scale or 10**6) for p, change in zip(given_, changes, strict=True)]
        parts.append(replace(part, prices_ps=tuple(prices), bound_ps=sum(prices)))
    try:
        proven = verify_proof(replace(proof, parts=tuple(parts), joint=None), PriceBook(g, pricing), Counts())
    except RefutedError:
        return
    assert proven <= optimum


def components_of(g, pricing):
    return components(g, crossable_edges(g, PriceBook(g, pricing)))


@pytest.mark.parametrize("seed", range(4))
def test_a_search_with_bounds_finds_what_a_list_finds_at_prices_of_any_sign(seed, monkeypatch):
    """Of a component with many groups, bounds leave out only those that cost more than their operations."""
    plan, draw = made("parts"), random.Random(seed)
    book = PriceBook(plan.graph, Scheduler(plan.graph, plan.device))
    for component, part in zip(
        components(plan.graph, crossable_edges(plan.graph, book)), plan.proof.parts, strict=True
    ):
        prices = [p + draw.randint(-(10**6), 10**6) for p in part.prices_ps]
        draw.shuffle(prices)

        def cheaper(prices=prices, component=component):
            groups = Groups(component, book)
            for mask in groups.below(prices, 1000):
                inside = groups.members(mask)
                price = book.price(inside)
                worth = sum(p for n, p in zip(component.nodes, prices, strict=True) if n in inside)
                if groups.fits(mask) and not hasattr(price, "reason") and price.time_ps < worth + 1000:
                    yield inside

        listed = set(cheaper())
        with monkeypatch.context() as patch:
            patch.setattr(enumeration, "_STEPS", 0)
            assert set(cheaper()) == listed
        assert listed
