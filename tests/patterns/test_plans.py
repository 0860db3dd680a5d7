"""Plans with patterns: a match is a kernel of its own, with its own price, and may be chosen by cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan import Pattern

X = jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def gate(x, y):
    return jnp.tanh(x) * y + y


def model(x, y):
    return jnp.exp(gate(jnp.sin(x), y)).sum(axis=-1)


def plan_of(pattern, device="h200", **options):
    return fuseplan.make_plan(model, device=device, patterns=[pattern], **options)(X, X)


def kernel_of(plan, name="gate"):
    (kernel,) = [k for k in plan.kernels if [plan.graph.nodes[n].op for n in k.spec.nodes] == [name]]
    return kernel


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "test", "cpu"])
@pytest.mark.parametrize("planner", ["solver", "greedy", "unfused", "xla_priority"])
def test_a_match_is_a_kernel_of_its_own(device, planner):
    plan = plan_of(Pattern("gate", gate), device, planner=planner)
    kernel = kernel_of(plan)
    assert len(kernel.spec.nodes) == 1
    assert "gate" in plan.to_frame().name.tolist()
    assert "kernels in the place of matches of the pattern 'gate': 1" in plan.notes
    assert plan.verify().status != "refuted"


def test_the_time_is_what_cost_says():
    asked = []

    def cost(match, device):
        asked.append((match.pattern.name, device.name, match.nbytes))
        return 12.5e-6

    plan = plan_of(Pattern("gate", gate, cost=cost))
    assert kernel_of(plan).cost.time_ps == 12_500_000
    assert asked[0] == ("gate", "h200", 3 * 512 * 1024 * 4)
    assert plan.status == "OPTIMAL"
    assert plan.objective_us > 12.5


@pytest.mark.parametrize("seconds", [0, 1e-9, 1.0])
def test_any_time_gives_a_plan_whose_proof_holds(seconds):
    plan = plan_of(Pattern("gate", gate, cost=lambda match, device: seconds))
    assert kernel_of(plan).cost.time_ps == round(seconds * 1e12)
    assert plan.status == "OPTIMAL"
    assert plan.verify()


@pytest.mark.parametrize("answer", [-1.0, float("nan"), float("inf"), "fast", None, True])
def test_a_cost_that_is_no_time_is_an_error(answer):
    with pytest.raises(fuseplan.ExtensionError, match="cost of the pattern 'gate'"):
        plan_of(Pattern("gate", gate, cost=lambda match, device: answer))


def test_without_cost_it_is_a_roofline():
    plan = plan_of(Pattern("gate", gate))
    cost = kernel_of(plan).cost
    assert cost.hbm_bytes == 3 * 512 * 1024 * 4
    assert cost.flops.transcendental == 512 * 1024
    assert cost.time_ps >= cost.hbm_bytes / plan.device.hbm_bytes_per_s * 1e12


@pytest.mark.parametrize(("seconds", "is_used"), [(1e-9, True), (1.0, False)])
@pytest.mark.parametrize("planner", ["solver", "greedy"])
def test_chosen_by_cost(seconds, is_used, planner):
    pattern = Pattern("gate", gate, cost=lambda match, device: seconds, choose="cost")
    plan = fuseplan.make_plan(gate, device="h200", planner=planner, patterns=[pattern])(X, X)
    names = [plan.graph.nodes[n].op for k in plan.kernels for n in k.spec.nodes]
    assert ("gate" in names) == is_used
    plain = fuseplan.make_plan(gate, device="h200", planner=planner)(X, X)
    assert plan.objective_us <= plain.objective_us
    if planner == "solver":
        assert plan.bound_us <= plain.bound_us + 1e-9
    (note,) = [n for n in plan.notes if "with it and" in n]
    assert ("is used" in note) == is_used
    assert plan.verify().status != "refuted"


def test_chosen_by_cost_in_calls():
    x = jnp.ones((8, 8))
    for seconds in (1e-9, 1.0):
        pattern = Pattern("gate", gate, cost=lambda match, device, s=seconds: s, choose="cost",
                          replacement=lambda x, y: gate(x, y) + 1)  # fmt: skip
        fast = fuseplan.jit(gate, device="test", patterns=[pattern])
        assert fast(x, x)[0, 0].item() == pytest.approx(gate(x, x)[0, 0].item() + (seconds < 1))


def test_a_plan_is_written_and_read():
    plan = plan_of(Pattern("gate", gate, cost=lambda match, device: 3e-6))
    again = fuseplan.Plan.from_json(plan.to_json())
    assert again.objective_us == plan.objective_us
    assert [k.spec for k in again.kernels] == [k.spec for k in plan.kernels]
    assert str(again) == str(plan)
    assert "gate" in str(plan)


def test_compare_replaces_for_every_planner():
    frame = fuseplan.compare(
        model, device="h200", planners=("unfused", "greedy", "solver"), patterns=[Pattern("gate", gate)]
    )(X, X)
    assert frame.kernels.tolist()[0] > frame.kernels.tolist()[-1] >= 3
    assert frame.notes.astype(str).str.contains("pattern 'gate'").all()


def test_the_plan_of_a_call_and_of_its_gradient():
    fast = fuseplan.jit(model, device="h200", patterns=[Pattern("gate", gate)])
    assert kernel_of(fast.plan(X, X))
    halves = fast.plan_vjp(X, X)
    ops = [n.op for n in halves.lowered.graph.nodes]
    assert ops.count("gate") == 2, "the forward and the backward pass of the replacement"


def test_a_lowered_program_takes_no_patterns():
    from fuseplan.extend import lower, trace

    with pytest.raises(fuseplan.InvalidArgumentError, match="pass the function"):
        fuseplan.make_plan(lower(trace(model, X, X)), device="test", patterns=[Pattern("gate", gate)])


def test_a_pattern_is_named_in_constraints():
    constraints = fuseplan.Constraints(never_fuse=[("sin", "exp")])
    plan = plan_of(Pattern("gate", gate), constraints=constraints)
    assert kernel_of(plan)


def test_transposes_after_a_match_are_its_own():
    product = Pattern("product", lambda x, y: jnp.tanh(x) * y)
    f = lambda x, y: (jnp.tanh(x) * y).T.astype(jnp.bfloat16)  # noqa: E731
    plan = fuseplan.make_plan(f, device="h200", patterns=[product])(X, X)
    assert [node.op for node in plan.graph.nodes] == ["product"]
    several = lambda x, y: (lambda p: (p.T, p))(jnp.tanh(x) * y)  # noqa: E731
    plan = fuseplan.make_plan(several, device="h200", patterns=[product])(X, X)
    assert [node.op for node in plan.graph.nodes] == ["product", "transpose"]
