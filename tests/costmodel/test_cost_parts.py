"""A cost's parts: each is what its name says, and they add up to the time."""

from dataclasses import fields, replace
from functools import cache

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.calibrate import described_cpu
from costmodel.devices import get_device
from costmodel.kernel import BOUNDS, Cost
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Options
from fuseplan.report.frames import kernels_frame
from fuseplan.report.text import parts_text
from fuseplan.workloads import get_workload
from fuseplan.workloads.workload import array
from tests.helpers.plans import plan_best

pytestmark = pytest.mark.one_python

PARTS = [f.name for f in fields(Cost) if f.name.endswith("_ps")]
CPU = replace(
    described_cpu(), launch_ps=1_000_000, step_ps=300_000, fresh_bytes_per_s=10**9, reduction_per_s=10**9
)


@given(st.fixed_dictionaries({name: st.integers(0, 50) for name in PARTS}), st.booleans())
def test_parts_add_up_and_the_largest_bounds(amounts, in_turns):
    cost = Cost(**amounts, in_turns=in_turns)
    parts = cost.parts_ps
    assert sum(parts.values()) == cost.time_ps
    assert set(parts) <= {*BOUNDS, "surcharge"}
    work = {name: ps for name, ps in parts.items() if name != "surcharge"}
    assert cost.bound_by == "free" if not work else work[cost.bound_by] == max(work.values())
    busy = dict.fromkeys(PARTS, 0) | amounts
    assert cost.time_ps >= max(busy.values())


def plan_of(f, *args, device):
    return plan_best(lower(trace(f, *args)), Options(device, "solver", 60.0))[1]


@cache
def made(name, device):
    f, args = get_workload(name).build()
    return plan_of(f, *args, device=CPU if device == "cpu" else get_device(device))


ZOO = [
    (name, device)
    for name in ("layernorm", "causal_attention", "mlp", "cross_entropy")
    for device in ("h200", "tpu_v5e", "cpu")
]


@pytest.mark.parametrize(("name", "device"), ZOO)
def test_launch_is_launches_alone(name, device):
    plan = made(name, device)
    for kernel in plan.kernels:
        cost = kernel.cost
        assert sum(cost.parts_ps.values()) == cost.time_ps
        if cost.time_ps and kernel.spec.backend != "loops":
            assert cost.launch_ps == plan.device.launch_ps
        assert cost.launch_ps % plan.device.launch_ps == 0


def test_looking_for_infinities_is_no_launch_of_the_kernel():
    kernel = max(made("causal_attention", "h200").kernels, key=lambda k: k.cost.scan_ps)
    assert kernel.spec.tiles_visited
    read = {a.value for a in kernel.spec.reads}
    assert kernel.cost.scan_ps > len(read) * get_device("h200").launch_ps
    assert kernel.cost.launch_ps == get_device("h200").launch_ps


def test_new_pages_bound_what_makes_a_large_array_of_nothing():
    plan = plan_of(
        lambda x: jnp.broadcast_to(x[:, None], (4096, 8192)) * 2, array("float32", 4096), device=CPU
    )
    (kernel,) = [k for k in plan.kernels if k.cost.time_ps]
    assert kernel.cost.bound_by == "pages"
    assert kernel.cost.fresh_ps == 4096 * 8192 * 4 * 1_000
    assert kernel.cost.launch_ps == CPU.launch_ps


def test_a_result_takes_the_pages_of_what_was_computed_but_not_of_an_argument():
    lowered = lower(trace(lambda x: jnp.sin(jnp.tanh(x)), array("float32", 4096, 8192)))
    plan = plan_best(lowered, Options(CPU, "unfused", 60.0))[1]
    assert [k.cost.fresh_ps > 0 for k in plan.kernels] == [True, False]


def test_loops_take_turns():
    """In a CPU's loops contractions and the rest follow each other: none hides behind another."""
    kernel = max(made("causal_attention", "cpu").kernels, key=lambda k: k.cost.matrix_ps)
    cost = kernel.cost
    assert kernel.spec.backend == "loops"
    assert cost.in_turns
    assert {"matrix", "steps", "sync", "surcharge"} <= set(cost.parts_ps)
    rest = max(cost.memory_ps + cost.cache_ps + cost.sums_ps, cost.vector_ps + cost.transcendental_ps)
    assert cost.time_ps > cost.matrix_ps + rest + cost.step_ps + cost.sync_ps


def test_reductions_on_a_cpu_are_sums_not_cache():
    slow = replace(CPU, reduction_per_s=10**6, reduction_row_ps=0)
    plan = plan_of(lambda x: x.sum(1), array("float32", 512, 512), device=slow)
    assert [k.cost.bound_by for k in plan.kernels] == ["sums"]
    assert plan.kernels[0].cost.sums_ps == 512 * 512 * 10**6


def test_tables_say_every_part():
    plan = made("causal_attention", "h200")
    frame = kernels_frame(plan)
    for kernel, text in zip(plan.kernels, frame["parts"], strict=True):
        assert text == parts_text(kernel.cost)
        assert all(name in text for name in kernel.cost.parts_ps)
    assert parts_text(Cost(launch_ps=2_000_000, memory_ps=5_500_000)) == "memory 5.50 + launch 2.00 µs"
    assert parts_text(Cost()) == "free"
