"""Programs that differ by their sizes: which plans are taken over, and when the guards forbid it."""

from __future__ import annotations

import copy
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from fuseplan import pipeline, shape_families
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.options import Options
from fuseplan.runtime import primitive
from fuseplan.shape_families import ShapeFamilies
from fuseplan.verify.plan import check_plan
from tests.helpers.arrays import ramp
from tests.helpers.cpus import SERVER_CPU

H200 = Options(get_device("h200"))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def kernel_sum(x, y, w):
    """Pairwise: one tiled loop on a CPU."""
    return jnp.exp(-((x[:, None] - y[None]) ** 2).sum(-1)) @ w


def points(n, m=2000):
    return ramp(-1, 1, n, 3), ramp(-2, 1, m, 3), ramp(0, 1, m)


def norm_and_gelu(x, w):
    mean = x.mean(-1, keepdims=True)
    spread = ((x - mean) ** 2).mean(-1, keepdims=True)
    return jax.nn.gelu((x - mean) * jax.lax.rsqrt(spread + 1e-5) @ w)


def reads_twice(x):
    """The large value is computed in both kernels that read it."""
    y = jnp.exp(x[:, None, :] - x[None, :, :])
    return y.sum(0), jnp.sort(y, axis=0)[0]


@pytest.fixture
def searches(monkeypatch):
    """The shapes of the arguments of each program that is searched for a plan."""
    seen = []
    search = pipeline.plan_best

    def counted(lowered, options, clock=None):
        seen.append(lowered.graph.values[lowered.graph.inputs[0]].shape)
        return search(lowered, options, clock)

    monkeypatch.setattr(shape_families, "plan_best", counted)
    return seen


def test_many_batch_sizes_cost_few_searches(searches):
    f = fuseplan.jit(kernel_sum)
    for n in range(3_000, 5_500, 100):
        args = points(n)
        np.testing.assert_allclose(f(*args), jax.jit(kernel_sum)(*args), rtol=2e-5)
    assert 1 <= len(searches) <= 3, searches


def test_without_dynamic_shapes_each_size_is_searched(searches):
    f = fuseplan.jit(kernel_sum, dynamic_shapes=False)
    assert f.plan(*points(4_800)).status == "OPTIMAL"
    assert f.plan(*points(4_900)).status == "OPTIMAL"
    assert searches == []  # of families


def test_the_plan_says_so():
    f = fuseplan.jit(norm_and_gelu, device="h200")
    first = f.plan(array(4096, 512), array(512, 2048))
    second = f.plan(array(5000, 512), array(512, 2048))
    assert [first.status, second.status] == ["OPTIMAL", "FEASIBLE"]
    told = "the groups are those of a plan for (4096, 512), taken over to (5000, 512) without a search"
    assert second.notes[-1].startswith(told)
    assert [k.spec.nodes for k in second.kernels] == [k.spec.nodes for k in first.kernels]
    assert second.bound_us <= second.objective_us
    # The program that was searched keeps its plan and proof.
    assert f.plan(array(4096, 512), array(512, 2048)).status == "OPTIMAL"
    f.clear_cache()
    assert f.plan(array(5000, 512), array(512, 2048)).status == "OPTIMAL"


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "cpu"])
@pytest.mark.parametrize(
    "f", [norm_and_gelu, reads_twice, kernel_sum, jax.grad(lambda x, w: norm_and_gelu(x, w).sum(), (0, 1))]
)
def test_taken_over_plans_are_legal_and_near_the_searched_ones(f, device):
    # A CPU's own figures differ from machine to machine.
    families, options = ShapeFamilies(), Options(SERVER_CPU if device == "cpu" else get_device(device))

    def args(n):
        if f is kernel_sum:
            return [array(n, 3), array(512, 3), array(512)]
        return [array(n, 256)] if f is reads_twice else [array(n, 256), array(256, 512)]

    taken = 0
    for n in (256, 300, 511, 512):
        if f is reads_twice:
            n //= 8
        plan = families.plan(trace(f, *args(n)), options)
        check_plan(plan)
        taken += any("the groups are those" in note for note in plan.notes)
        searched = pipeline.plan_traced(trace(f, *args(n)), options)
        assert plan.objective_ps <= 1.15 * searched.objective_ps, n
    assert taken >= 1


@pytest.mark.parametrize(
    ("planned", "asked"),
    [((64, 512), (129, 512)), ((64, 512), (31, 512)), ((64, 512), (64, 1)), ((1, 512), (2, 512))],
)
def test_the_first_guard(planned, asked, searches):
    families = ShapeFamilies()
    for shape in (planned, asked):
        families.plan(trace(lambda x: jax.nn.softmax(x, -1), array(*shape)), H200)
    assert len(searches) == 2


def test_other_programs_are_other_families(searches):
    families, x = ShapeFamilies(), array(64, 512)
    families.plan(trace(jax.nn.softmax, x), H200)
    families.plan(trace(jax.nn.log_softmax, array(65, 512)), H200)
    families.plan(trace(jax.nn.softmax, jax.ShapeDtypeStruct((65, 512), "bfloat16")), H200)
    assert len(searches) == 3


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_another_axis_is_another_family(device):
    """These programs differ in no operation, but along which axis it runs."""
    f = fuseplan.jit(lambda x, axis: jnp.exp(jnp.cumsum(x, axis)).sum(1), device=device, static_argnums=1)
    f.plan(array(2048, 1024), 0)
    assert not any("taken over" in note for note in f.plan(array(2000, 1024), 1).notes)


def test_only_the_solver_s_plans_are_taken_over():
    f = fuseplan.jit(norm_and_gelu, device="h200", planner="greedy")
    for n in (4096, 5000):
        assert not any("taken over" in note for note in f.plan(array(n, 512), array(512, 2048)).notes)


def test_sizes_that_are_no_arguments_are_named():
    f = fuseplan.jit(lambda x, n: x[0] * jnp.exp(jnp.arange(n) / n), device="h200", static_argnums=1)
    f.plan(array(8), 4000)
    assert "(4000,), taken over to (5000,)" in f.plan(array(8), 5000).notes[-1]


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_smaller_sizes_at_which_other_groups_fit_on_chip(device):
    """No plan that is taken over is slower than a heuristic's."""

    def attention(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    f = fuseplan.jit(attention, device=device)
    for n in (256, 200, 150):
        args = [array(n, 64)] * 3
        plan = f.plan(*args)
        quick = fuseplan.make_plan(attention, device=device, planner="best_first")(*args)
        assert plan.objective_us <= quick.objective_us


def test_the_deadline_holds_for_both_ways():
    """What cannot be taken over is searched in the time that is left."""
    families, options = ShapeFamilies(), Options(get_device("tpu_v5e"), deadline_s=1.0)

    def loss(x, *weights):
        for w in weights:
            x = norm_and_gelu(x, w)
        return x.sum()

    for n in (256, 300, 500):
        traced = trace(jax.grad(loss, (0, 1)), array(n, 128), *[array(128, 128)] * 6)
        started = time.process_time()
        families.plan(traced, options)
        assert time.process_time() - started < 2.5


def test_a_call_and_its_plan_agree():
    """On a CPU, a call takes over what was planned for tiled loops alone."""
    f = fuseplan.jit(kernel_sum)
    f(*points(4_800))
    f(*points(2_500))
    notes = f.plan(*points(2_500)).notes
    calls = primitive.plan_to_run  # what the call does
    settings = primitive.Settings(f._options(), "cpu", plan_of=f._families.plan, families=f._families)
    called = calls(trace(kernel_sum, *points(2_500)), settings)
    assert any("a call runs jax.jit's own program" in note for note in notes) == (called is None)


def test_functions_are_copied_with_families_of_their_own(searches):
    """A lock cannot be copied, and modules that hold jitted functions are."""
    families = ShapeFamilies()
    families.plan(trace(jax.nn.softmax, array(64, 512)), H200)
    copy.deepcopy(families).plan(trace(jax.nn.softmax, array(65, 512)), H200)
    assert len(searches) == 2
    copy.deepcopy(fuseplan.jit(norm_and_gelu))


def test_only_the_latest_members_are_kept(monkeypatch, searches):
    monkeypatch.setattr(shape_families, "MAX_MEMBERS", 2)
    families = ShapeFamilies()
    for rows in (10, 100, 1000, 1100, 11):
        families.plan(trace(jax.nn.softmax, array(rows, 512)), H200)
    assert [shape[0] for shape in searches] == [10, 100, 1000, 11]


def test_a_group_that_does_not_fit_is_not_taken_over(searches):
    """Rows that fit on chip are read once; twice as long, they do not."""
    families = ShapeFamilies()

    def f(x):
        return jnp.sort(jax.nn.softmax(x, -1) * 2, -1) + 1

    limit = get_device("h200").onchip_bytes // 4
    for columns in (limit * 3 // 4, limit * 5 // 4):
        check_plan(families.plan(trace(f, array(128, columns)), H200))
    whole = pipeline.plan_traced(trace(f, array(128, limit * 5 // 4)), H200)
    assert families.plan(trace(f, array(128, limit * 5 // 4)), H200).objective_ps <= whole.objective_ps


def test_the_fourth_guard_sees_what_another_form_would_gain(searches):
    """At 4,000 points the exponentials fit a cache, at 4,800 not: then a loop keeps them out of memory."""
    families, options = ShapeFamilies(), Options(get_device("cpu"), only_loops=True)
    for n in (4_000, 4_800):
        plan = families.plan(trace(kernel_sum, array(n, 3), array(2000, 3), array(2000)), options)
    searched = pipeline.plan_traced(trace(kernel_sum, array(4_800, 3), array(2000, 3), array(2000)), options)
    assert plan.objective_ps <= 1.05 * searched.objective_ps


@pytest.mark.parametrize("options", [{"constraints": Constraints(max_group_size=3)}, {"peers": ("greedy",)}])
def test_constraints_and_peers_are_asked_about_each_size(options, searches):
    f = fuseplan.jit(norm_and_gelu, device="h200", **options)
    for n in (4096, 5000):
        f.plan(array(n, 512), array(512, 2048))
    assert len(searches) == 2


def test_what_is_left_is_not_examined_again_at_smaller_sizes(monkeypatch):
    asked = []

    def never(programs, options):
        asked.append(programs[-1].graph.values[0].shape[0])
        return False

    monkeypatch.setattr(primitive, "may_gain", never)
    fused = fuseplan.jit(kernel_sum)
    for n in (4_800, 4_700, 2_400, 4_900, 2_000):  # the last is less than half of all before
        np.testing.assert_allclose(fused(*points(n)), jax.jit(kernel_sum)(*points(n)), rtol=2e-5)
    assert asked == [4_800, 4_900, 2_000]


def test_families_of_a_gradient():
    f = fuseplan.jit(lambda x, y, w: kernel_sum(x, y, w).sum())
    for n in (4_800, 5_000):
        args = points(n)
        for got, want in zip(
            jax.grad(f, (0, 1))(*args),
            jax.grad(lambda *a: kernel_sum(*a).sum(), (0, 1))(*args),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * float(abs(want).max()))


def test_threads_share_families():
    families = ShapeFamilies()
    sizes = [4096 + 64 * k for k in range(12)]
    traced = [trace(jax.nn.softmax, array(n, 512)) for n in sizes]
    plans = [None] * len(sizes)

    def plan(k):
        plans[k] = families.plan(traced[k], H200)

    threads = [threading.Thread(target=plan, args=(k,)) for k in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for traced_one, made in zip(traced, plans, strict=True):
        assert made.graph == lower(traced_one).graph
        check_plan(made)
