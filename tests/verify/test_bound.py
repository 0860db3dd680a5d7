"""The verifier accepts what is proven, whoever proved it, and refutes everything else."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fuseplan
from costmodel.devices import TEST_DEVICE, get_device
from fuseplan import Constraints, Kernel, Plan
from fuseplan.cli import app
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.fusion_plan import Joint
from fuseplan.plan.notes import NoteKind
from fuseplan.plan.options import Features, Options
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.component import make_proof
from fuseplan.search.components import components, crossable_edges
from fuseplan.search.grouping import Solved, decompose
from fuseplan.search.remat import materialise as recomputed
from fuseplan.verify import report
from fuseplan.verify.bound import Counts, verify_proof
from fuseplan.verify.errors import RefutedError
from fuseplan.verify.groups import Groups
from fuseplan.verify.report import NOT_CHECKED, REFUTED, VERIFIED, verify_plan
from fuseplan.workloads import get_workload
from fuseplan.workloads.workload import array
from tests.helpers.plans import plan_best
from tests.helpers.small_graphs import (
    LAUNCH_PS,
    Bytes,
    brute_force,
    edges_after,
    graph,
    graphs,
    is_connected,
    is_convex,
)

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).resolve().parents[2]
SOLVE = get_planner("solver")


def checked(g, pricing, proof):
    return verify_proof(proof, PriceBook(g, pricing), Counts())


small = (graphs(), st.sampled_from([99, 3, 2]), st.sampled_from([99, 2]), st.booleans(), st.booleans())


@settings(max_examples=60, deadline=None)
@given(*small)
def test_what_is_proven_is_verified(g, max_nodes, max_made, floor, foresees):
    pricing = Bytes(g, max_nodes, max_made, floor, foresees)
    (optimum, _, _), _ = brute_force(g, pricing)
    plan = SOLVE(g, pricing, Budget())
    assert plan.bound_ps == checked(g, pricing, plan.proof) == optimum


@settings(max_examples=60, deadline=None)
@given(*small, st.data())
def test_what_is_not_so_is_refuted(g, max_nodes, max_made, floor, foresees, data):
    """Whatever a false proof looks like: more than the optimum cannot be proven."""
    pricing = Bytes(g, max_nodes, max_made, floor, foresees)
    proof = SOLVE(g, pricing, Budget()).proof
    k = data.draw(st.integers(0, len(proof.parts) - 1))
    more = data.draw(st.sampled_from([1, 2, 300, 65_536, 10**9]))
    part, joint = proof.parts[k], proof.joint
    if joint is not None and set(part.first_nodes) & set(joint.first_nodes):
        false = replace(proof, joint=replace(joint, bound_ps=joint.bound_ps + more))
    elif part.prices_ps and data.draw(st.booleans()):
        worth = part.bound_ps - sum(part.prices_ps) + more
        i = data.draw(st.integers(0, len(part.prices_ps) - 1))
        prices = (*part.prices_ps[:i], part.prices_ps[i] + worth, *part.prices_ps[i + 1 :])
        false = with_part(proof, k, replace(part, prices_ps=prices, bound_ps=part.bound_ps + more))
    else:
        false = with_part(proof, k, replace(part, bound_ps=part.bound_ps + more))
    assert false.bound_ps > proof.bound_ps
    with pytest.raises(RefutedError, match="component of n"):
        checked(g, pricing, false)


def with_part(proof, k, part):
    return replace(proof, parts=(*proof.parts[:k], part, *proof.parts[k + 1 :]))


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([99, 3]), st.booleans())
def test_every_group_that_could_be_in_a_plan_is_looked_at(g, max_nodes, foresees):
    pricing = Bytes(g, max_nodes, foresees=foresees)
    book = PriceBook(g, pricing)
    found = []
    for component in components(g, crossable_edges(g, book)):
        groups = Groups(component, book)
        found += [groups.members(mask) for mask in groups]
    after = edges_after(g)
    expected = {
        nodes
        for size in range(1, len(g.nodes) + 1)
        for nodes in itertools.combinations(range(len(g.nodes)), size)
        if isinstance(pricing.price(nodes), Kernel) and is_connected(g, nodes) and is_convex(after, nodes)
    }
    assert len(found) == len(set(found))
    assert expected <= set(found)


def test_components_that_wait_for_each_other_are_proven_together():
    g = graph("eeooee", [[], [], [0], [1], [0, 3], [1, 2]])
    pricing = Bytes(g)
    plan = SOLVE(g, pricing, Budget())
    assert plan.proof.joint is not None
    assert {0, 1} <= set(plan.proof.joint.first_nodes), "and what lies on the way between their kernels"
    assert checked(g, pricing, plan.proof) == plan.bound_ps == brute_force(g, pricing)[0][0]
    joint = plan.proof.joint
    for wrong in (Joint(joint.bound_ps, (0, 0)), Joint(joint.bound_ps, (0, 99))):
        with pytest.raises(RefutedError, match="joint bound"):
            checked(g, pricing, replace(plan.proof, joint=wrong))
    with pytest.raises(RefutedError, match="kernels take"):
        checked(g, pricing, replace(plan.proof, joint=replace(joint, bound_ps=joint.bound_ps + 1)))


def test_an_integrality_gap_is_searched():
    """Each two of three would like to share a kernel: a relaxation takes half of every pair."""
    g = graph("aere", [[], [], [0, 1], [1, 0]])
    pricing = Bytes(g, max_nodes=2)
    plan = SOLVE(g, pricing, Budget())
    (part,) = plan.proof.parts
    assert part.bound_ps - sum(part.prices_ps) > LAUNCH_PS
    counts = Counts()
    assert verify_proof(plan.proof, PriceBook(g, pricing), counts) == plan.bound_ps
    assert counts.covers > 0


def test_where_the_first_relaxation_certifies_nothing_more_is_priced():
    """Floors alone prove the heuristics' plan here, and no group could tie with one of its."""
    g = graph("eeeccrce", [[], [0], [1], [2, 1], [0], [0], [1], [2]])
    pricing = Bytes(g)
    plan = SOLVE(g, pricing, Budget())
    assert plan.status == "OPTIMAL"
    assert plan.stats.candidates > len(set(pricing.asked)) + 20
    assert plan.stats.certified == "greedy"


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([99, 3]))
def test_what_is_said_of_heuristics_is_so(g, max_nodes):
    pricing = Bytes(g, max_nodes)
    plan = SOLVE(g, pricing, Budget())
    for name in ("greedy", "best_first"):
        as_fast = (
            sum(k.cost.time_ps for k in get_planner(name)(g, pricing, Budget()).kernels) == plan.bound_ps
        )
        if name == plan.stats.certified:
            assert as_fast
        elif as_fast and plan.proof.joint is None:
            assert plan.stats.certified == "greedy"


LOWERED = cache(lambda name: lower(trace(*_built(name))))


def _built(name):
    f, args = get_workload(name).build("float32", small=True)
    return (f, *args)


@cache
def made(name, device="h200", planner="solver", **limits):
    constraints = Constraints(**limits) if limits else None
    device = TEST_DEVICE if device == "test" else get_device(device)
    return plan_best(LOWERED(name), Options(device, planner, 30.0, constraints=constraints))[1]


_WORKLOADS = [(name, device) for name in ("softmax", "layernorm", "attention", "mlp", "adam_update")
              for device in ("h200", "tpu_v5e", "test")]  # fmt: skip


@pytest.mark.parametrize(("name", "device"), [*_WORKLOADS, ("rope", "h200")])
def test_plans_of_workloads_are_verified_from_their_files(name, device):
    plan = made(name, device)
    assert plan.status == "OPTIMAL"
    result = verify_plan(Plan.from_json(plan.to_json()))
    assert (result.status, result.reason) == (VERIFIED, "")
    assert result.bound_us == plan.bound_us
    assert result.kernels == len(plan.kernels)
    assert result.components == plan.stats.components
    assert result.groups >= result.distinct_components - sum(not p.prices_ps for p in plan.proof.parts)
    assert max(map(len, str(result).splitlines())) <= 80


def test_a_deadline_leaves_the_bound_unchecked():
    plan = made("mlp", "h200")
    result = verify_plan(plan, deadline_s=0)
    assert result.status == NOT_CHECKED
    assert result.reason.startswith("the deadline came before the component of n")
    assert result.bound_us is None
    assert verify_plan(plan, deadline_s=1e9).status == VERIFIED


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "mlp", "attention"])
def test_a_heuristic_is_optimal_where_the_plan_says_so(name):
    plan = made(name)
    if plan.stats.certified:
        assert made(name, planner=plan.stats.certified).objective_ps == plan.objective_ps
    assert bool(plan.stats.certified) == any("takes no longer" in note for note in plan.notes)


@pytest.mark.parametrize("limits", [{"never_fuse": ("exp",)}, {"max_kernel_args": 2}], ids=str)
def test_plans_within_constraints_are_proven_within_them(limits):
    plan = made("attention", **limits)
    assert plan.objective_ps > made("attention").objective_ps
    assert plan.verify().status == VERIFIED


def test_what_was_not_checked_is_said():
    plan = made("attention", must_fuse=(("exp", "sub"),))
    result = plan.verify()
    assert (result.status, result.bound_us) == (NOT_CHECKED, None)
    assert "must_fuse" in result.reason
    short = made("attention")
    slower = replace(
        short,
        kernels=made("attention", planner="unfused").kernels,
        constraints=Resolved(max_peak_bytes=10**12),
        bound_ps=made("attention", planner="unfused").objective_ps,
    )
    assert "max_peak_bytes" in slower.verify().reason
    assert slower.verify().status == NOT_CHECKED


def test_only_what_is_verified_is_true():
    plan = made("attention")
    assert plan.verify()
    apart = made("attention", planner="unfused")
    assert apart.verify()
    assert not replace(apart, kernels=apart.kernels[::-1]).verify()
    assert not made("attention", must_fuse=(("exp", "sub"),)).verify(), "its bound is not checked"


def test_plans_within_constraints_are_verified():
    plan = made("layernorm", max_group_size=4)
    assert plan.proof is not None
    assert plan.verify().status == VERIFIED
    lax = replace(plan, constraints=None)
    assert "takes" in lax.verify().reason, "without the limit, there are faster kernels"


def test_plans_without_a_proof():
    greedy = made("layernorm", planner="greedy")
    result = greedy.verify()
    assert (result.status, result.bound_us) == (VERIFIED, None)
    assert "claims no bound" in result.reason
    bare = replace(made("mlp"), proof=None).verify()
    assert bare.status == NOT_CHECKED
    assert "no proof" in bare.reason
    # A bound that is no more than the floor of the whole graph needs none.
    assert replace(made("layernorm"), proof=None).verify().status == VERIFIED


def test_a_deadline_of_zero_leaves_a_bound_that_is_verified():
    options = Options(get_device("h200"), "solver", 0.0)
    plan = plan_best(LOWERED("attention"), options)[1]
    assert plan.verify().status == VERIFIED
    assert plan.proof.bound_ps == plan.bound_ps


def raised_bound(plan):
    return replace(plan, bound_ps=plan.bound_ps + 1)


def raised_bound_everywhere(plan):
    parts = [replace(p, bound_ps=p.bound_ps + 10**6) for p in plan.proof.parts]
    bound = plan.bound_ps + 10**6 * sum(len(p.first_nodes) for p in parts)
    worse = made("attention", planner="unfused")
    return replace(
        plan, bound_ps=bound, status="FEASIBLE", proof=replace(plan.proof, parts=tuple(parts)),
        kernels=worse.kernels,
    )  # fmt: skip


def optimal_with_greedys_kernels(plan):
    return replace(plan, kernels=made("attention", planner="unfused").kernels)


def unfused_is_optimal(plan):
    worse = made("attention", planner="unfused")
    return replace(plan, kernels=worse.kernels, bound_ps=worse.objective_ps)


def raised_price(plan):
    k = max(range(len(plan.proof.parts)), key=lambda k: len(plan.proof.parts[k].prices_ps))
    part = plan.proof.parts[k]
    prices = (part.prices_ps[0] + 10**6, *part.prices_ps[1:])
    return replace(plan, proof=with_part(plan.proof, k, replace(part, prices_ps=prices)))


def missing_part(plan):
    return replace(plan, bound_ps=0, status="FEASIBLE", proof=replace(plan.proof, parts=()))


def counted_twice(plan):
    first = replace(plan.proof.parts[0], first_nodes=plan.proof.parts[0].first_nodes * 2)
    return replace(plan, proof=with_part(plan.proof, 0, first))


def no_such_component(plan):
    first = replace(plan.proof.parts[0], first_nodes=(*plan.proof.parts[0].first_nodes, 10**6))
    return replace(plan, proof=with_part(plan.proof, 0, first))


def too_few_prices(plan):
    k = next(k for k, p in enumerate(plan.proof.parts) if len(p.prices_ps) > 1)
    part = plan.proof.parts[k]
    return replace(plan, proof=with_part(plan.proof, k, replace(part, prices_ps=part.prices_ps[1:])))


def illegal_kernel(plan):
    k = max(range(len(plan.kernels)), key=lambda k: len(plan.kernels[k].spec.nodes))
    spec = plan.kernels[k].spec
    kernel = replace(plan.kernels[k], spec=replace(spec, reads=spec.reads[1:]))
    return replace(plan, kernels=(*plan.kernels[:k], kernel, *plan.kernels[k + 1 :]))


def another_devices_numbers(plan):
    return replace(plan, device=replace(plan.device, hbm_bytes_per_s=plan.device.hbm_bytes_per_s * 2))


def another_device(plan):
    return replace(plan, device=get_device("h100"))


MUTATIONS = {
    raised_bound: "exceeds the plan's own",
    raised_bound_everywhere: "the proof claims|its floor is",
    optimal_with_greedys_kernels: "needs a bound that equals it",
    unfused_is_optimal: "its proof adds up to",
    raised_price: r"the component of n\d+ \(\d+ operations\): a kernel of n\d+ .* takes [\d,]+ ps, less than",
    missing_part: "says nothing of the component of",
    counted_twice: "twice",
    no_such_component: "there is none",
    too_few_prices: "prices are given for",
    illegal_kernel: "reads .*, expected",
    another_devices_numbers: "is not fuseplan's: its hbm_bytes_per_s is",
    another_device: "claims .* ps and .* but costs",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_mutations_are_refuted(mutate):
    result = mutate(made("attention")).verify()
    assert result.status == REFUTED
    assert re.search(MUTATIONS[mutate], result.reason), result.reason
    assert result.bound_us is None
    assert max(map(len, str(result).splitlines())) <= 80


def run(*args, code=0, stdin=None):
    result = CliRunner().invoke(app, list(args), input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_the_command_line(tmp_path):
    file = tmp_path / "plan.json"
    run("plan", "mlp", "--small", "--device", "h200", "--out", str(file))
    assert run("verify", str(file)).startswith("verified: OPTIMAL plan for h200")
    record = json.loads(run("verify", "-", "--json", stdin=file.read_text()))
    assert record["status"] == VERIFIED
    plan = Plan.from_json(file.read_text())
    file.write_text(replace(plan, kernels=plan.kernels[1:]).to_json())
    assert "refuted" in run("verify", str(file), code=1)
    file.write_text(replace(plan, proof=None).to_json())
    assert "bound not re-checked" in run("verify", str(file), code=3)
    file.write_text("{}")
    run("verify", str(file), code=2)
    run("verify", str(tmp_path / "none.json"), code=2)


def test_a_plan_for_a_cpu_is_verified_beside_what_it_was_lowered_from():
    plan = plan_best(LOWERED("attention"), Options(get_device("cpu"), "solver", 30.0))[1]
    assert verify_plan(plan).status == VERIFIED


def test_a_plan_for_a_cpu_says_what_was_not_checked(tmp_path):
    file = tmp_path / "plan.json"
    run("plan", "softmax", "--small", "--device", "cpu", "--out", str(file))
    assert "verified: OPTIMAL plan for cpu" in run("verify", str(file))
    document = json.loads(file.read_text())
    del document["program"]
    file.write_text(json.dumps(document))
    text = run("verify", str(file), code=3)
    assert "bound not re-checked" in text
    assert "tiled loops" in text


@pytest.mark.slow
def test_it_needs_neither_the_solver_nor_the_planners(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(made("attention").to_json())
    code = """
import sys
sys.modules["ortools"] = None
import fuseplan, fuseplan.api, fuseplan.cli
def broken(*args, **kwargs):
    raise AssertionError("the verifier called what makes plans")
makers = ("planners", "search.presolve", "search.candidates", "search.nogoods", "search.set_partitioning",
          "search.space", "search.heuristics")
for maker in makers:
    assert f"fuseplan.{maker}" in sys.modules
for name, module in list(sys.modules.items()):
    if any(name == f"fuseplan.{maker}" or name.startswith(f"fuseplan.{maker}.") for maker in makers):
        for key, thing in vars(module).items():
            if getattr(thing, "__module__", "") == name and callable(thing):
                if isinstance(thing, type):
                    thing.__init__ = broken
                else:
                    setattr(module, key, broken)
sys.argv = ["fuseplan", "verify", sys.argv[1]]
fuseplan.cli.main()
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, env=env, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("verified: OPTIMAL")


TILED = Features(xla_loops=False)
"""Without XLA's loops, which add up columns in two steps of their own."""


def sums_in_steps(x, w, y):
    """Sums so long that they are made in two steps, of what several kernels compute again."""
    shared = jnp.exp(x) * 2.0
    first = jnp.tanh(shared) @ w
    return first, jnp.sum(shared * y, 0), jnp.sum(jnp.sin(shared), 0)


def test_proofs_of_programs_with_steps_and_copies_are_about_the_same_graph():
    """Operations that wait for each other do so in the graph that the verifier makes of the plan."""
    shapes = (array("float32", 8192, 768), array("float32", 768, 768), array("float32", 8192, 768))
    lowered = lower(trace(sums_in_steps, *shapes))
    _, plan = plan_best(lowered, Options(get_device("h200"), "solver", 120.0, features=TILED))
    assert plan.graph.waits, "a sum in two steps waits"
    assert plan.proof.copied, "some operation may be computed again"
    assert plan.status == "OPTIMAL"
    result = verify_plan(Plan.from_json(plan.to_json()))
    assert result.status == VERIFIED, result.reason


def test_a_graph_that_does_not_follow_from_the_plan_is_not_proven(monkeypatch):
    """Planning itself notices a proof that nobody could check."""
    real = recomputed.searched
    monkeypatch.setattr(
        recomputed,
        "searched",
        lambda *args: replace(real(*args), graph=replace(real(*args).graph, waits=((0, 1),))),
    )
    shapes = (array("float32", 8192, 768), array("float32", 768, 768), array("float32", 8192, 768))
    _, plan = plan_best(
        lower(trace(sums_in_steps, *shapes)), Options(get_device("a100"), "solver", 120.0, features=TILED)
    )
    assert (plan.status, plan.bound_ps, plan.proof) == ("FEASIBLE", None, None)
    assert NoteKind.UNVERIFIABLE.value in plan.notes
    assert plan.verify().status == VERIFIED, "its kernels are legal all the same"


def test_a_price_is_given_to_each_operation_where_a_proof_is_made():
    g = graph("eere", [[], [0], [1], [2]])
    pricing = Bytes(g)
    parts = decompose(g, PriceBook(g, pricing))
    bad = [Solved([], 0, False, duals=(0,) * (len(space.component.nodes) + 1)) for space in parts.spaces]
    with pytest.raises(AssertionError, match="prices for"):
        make_proof(parts, bad)


def test_copies_are_verified_with_the_masks_of_their_program(monkeypatch):
    f, args = get_workload("causal_attention").build()
    plan = fuseplan.make_plan(f, device="h200")(*args)
    assert plan.proof.copied
    (masked,) = [kernel for kernel in plan.kernels if kernel.spec.tiles_visited]

    def times_ps():
        _, pricing = report._pricing(plan)
        priced = map(pricing.price, pricing.offers)
        return {kernel.cost.time_ps for kernel in priced if isinstance(kernel, Kernel)}

    assert masked.cost.time_ps in times_ps()
    monkeypatch.setattr(report, "_program", lambda plan: None)
    assert masked.cost.time_ps not in times_ps(), "the mask leaves out tiles"
