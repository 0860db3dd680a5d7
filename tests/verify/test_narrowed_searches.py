"""Proofs of searches that a constraint, a feature switched off or a short deadline narrows: the verifier,
which knows the plan alone, searches the same space."""

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.plan.options import Features
from fuseplan.report.explain import Explainer
from fuseplan.search.what_if import Change
from fuseplan.support.work import SLACK_S, least_planning_s
from fuseplan.verify.report import REFUTED, VERIFIED
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python

LOOSE = fuseplan.Constraints(max_group_size=1000)
ROWS = jax.ShapeDtypeStruct((4096, 512), "float32")


def clipped(*gradients):
    norm = jnp.sqrt(sum((g * g).sum() for g in gradients))
    return [g * jnp.minimum(1, 1 / norm) for g in gradients]


def of(name):
    if name == "clipped":
        return clipped, [jax.ShapeDtypeStruct((256 + i, 128), "float32") for i in range(5)]
    return get_workload(name).build()


def verified(plan):
    report = plan.verify()
    assert plan.status == "OPTIMAL", plan.notes
    assert report.status == VERIFIED, report
    return plan


@pytest.mark.parametrize(
    ("name", "device"),
    [("clipped", "h200"), ("clipped", "cpu"), ("softmax", "tpu_v5e"), ("layernorm_grad", "h200")],
)
def test_a_constraint_that_does_not_bind_changes_nothing(name, device):
    f, args = of(name)
    free = verified(fuseplan.make_plan(f, device=device)(*args))
    bound = verified(fuseplan.make_plan(f, device=device, constraints=LOOSE)(*args))
    assert bound.objective_ps == free.objective_ps


@pytest.mark.parametrize("off", ["packs", "siblings", "choice_of_tile", "xla_loops"])
def test_with_a_feature_off_too(off):
    f, args = of("clipped" if off == "packs" else "layernorm_grad")
    features = Features(**{off: False})
    free = verified(fuseplan.make_plan(f, device="h200", features=features)(*args))
    bound = verified(fuseplan.make_plan(f, device="h200", features=features, constraints=LOOSE)(*args))
    assert bound.objective_ps == free.objective_ps


def joined(*arrays):
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [jnp.concatenate([jnp.exp(x), jnp.tanh(y)]) * 2 + 1 for x, y in pairs]


def test_without_time_to_look_for_loops_the_plan_claims_none():
    """Loops of XLA would be faster: 1.6 us a pair of arrays."""
    args = [jax.ShapeDtypeStruct((256, 512), "float32")] * 360
    deadline_s = least_planning_s(900, has_loops=True) - SLACK_S - 0.01
    plan = fuseplan.make_plan(joined, device="h200", deadline_s=deadline_s)(*args)
    assert plan.features == Features(loop_nests=False, xla_loops=False)
    assert f"a deadline of {deadline_s:g} s leaves no time to look for attention" in plan.notes[-1]
    assert plan.verify().status != REFUTED
    whole = verified(fuseplan.make_plan(joined, device="h200")(*args))
    assert whole.objective_ps < plan.objective_ps


def test_another_compilers_plan_obeys_no_constraints():
    alone = fuseplan.Constraints(max_group_size=1)
    plan = fuseplan.make_plan(jax.nn.softmax, device="cpu", constraints=alone, peers=["xla"])(ROWS)
    assert all(len(kernel.spec.nodes) == 1 for kernel in plan.kernels)
    assert "the planner 'xla' is not asked for a plan to compare: it takes no constraints" in plan.notes
    free = fuseplan.make_plan(jax.nn.softmax, device="cpu", peers=["xla"])(ROWS)
    assert len(free.kernels) < len(plan.kernels)


@pytest.mark.parametrize("name", ["causal_attention", "softmax"])
def test_a_kernel_in_its_own_place_costs_nothing(name):
    """Also where masks let it leave tiles out."""
    f, args = get_workload(name).build()
    explainer = Explainer(fuseplan.make_plan(f, device="h200")(*args))
    for k, group in enumerate(explainer.groups):
        assert explainer.change([k], [group]) == Change((group,), 0, 0)


def test_a_deadline_of_a_billion_years():
    verified(fuseplan.make_plan(jax.nn.softmax, device="h200", deadline_s=3e16)(ROWS))
