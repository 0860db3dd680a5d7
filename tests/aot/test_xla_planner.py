"""The planner ``xla`` for a GPU and a TPU that are not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.graph import Graph
from fuseplan import Plan
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads import get_workload

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot")]
both = pytest.mark.parametrize("device", ["h200", "tpu_v5e"])


def shaped(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def make(f, device, *args) -> Plan:
    plan = fuseplan.make_plan(f, device=device, planner="xla")(*args)
    assert Plan.from_json(plan.to_json()) == plan
    return plan


def ops(graph: Graph, nodes: tuple[int, ...]) -> list[str]:
    return [graph.nodes[n].op for n in nodes]


def launches(plan: Plan) -> int:
    return sum(kernel.spec.compiled.launches for kernel in plan.kernels)


def all_show(plan: Plan) -> bool:
    return "100 % of the bytes" in plan.notes[0]


@both
def test_softmax(device: str) -> None:
    plan = make(jax.nn.softmax, device, shaped(4096, 1024))
    assert all_show(plan)
    array_bytes = 4 * 4096 * 1024
    if device == "h200":  # one kernel, which XLA writes in Triton, and the solver's plan is no other
        assert (len(plan.kernels), launches(plan), plan.hbm_bytes) == (1, 1, 2 * array_bytes)
        best = fuseplan.make_plan(jax.nn.softmax, device=device)(shaped(4096, 1024))
        assert plan.objective_ps == best.objective_ps
    else:  # a kernel a reduction, two of which read the array from where it was copied to
        assert launches(plan) == len(plan.kernels) == 3
        assert 4 * array_bytes <= plan.hbm_bytes < 4.1 * array_bytes
        assert "lie on chip" in plan.notes[-1]


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_and_its_epilogue(device: str, dtype: str) -> None:
    x, w, b = (shaped(*shape, dtype=dtype) for shape in ((1024, 512), (512, 512), (512,)))
    plan = make(lambda x, w, b: jnp.maximum(x @ w + b, 0), device, x, w, b)
    assert all_show(plan)
    (kernel,) = plan.kernels
    assert ops(plan.graph, kernel.spec.nodes)[0] == "dot_general"
    assert kernel.cost.flops.matrix == 2 * 1024 * 512 * 512
    itemsize = jnp.dtype(dtype).itemsize
    assert plan.hbm_bytes == itemsize * (2 * 1024 * 512 + 512 * 512 + 512)


@both
def test_what_xla_computes_twice(device: str) -> None:
    # The sum over all is needed before the quotient, and exp is cheaper than to write it.
    plan = make(lambda x: (lambda e: e / (1 + e.sum()))(jnp.exp(x)), device, shaped(2048, 1024))
    assert all_show(plan)
    assert "exp" in ops(plan.graph, plan.recomputed)
    assert plan.hbm_bytes < 4 * 4 * 2048 * 1024
    origin = plan.graph.origins
    kernels = [{origin[n] for n in kernel.spec.nodes} for kernel in plan.kernels]
    assert sum(origin[plan.recomputed[0]] in nodes for nodes in kernels) == 2


@both
def test_scatter(device: str) -> None:
    args = shaped(1000, 64), shaped(50, dtype="int32"), shaped(50, 64)
    plan = make(lambda x, i, u: x.at[i].add(u), device, *args)
    assert len(plan.kernels) < launches(plan) <= 6
    copies = {"h200": 1, "tpu_v5e": 2}[device]  # to update it in place; on a TPU that is on chip, and back
    array_bytes = 4 * 64 * 1000
    assert 2 * copies * array_bytes <= plan.hbm_bytes < (2 * copies + 1) * array_bytes
    assert any("copies and auxiliary steps" in note for note in plan.notes)


def test_side_effects_want_the_device() -> None:
    def f(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    with pytest.raises(
        InvalidArgumentError, match=r"for 'h200', which is not here: .*[^.]\. Plan on the device"
    ):
        make(f, "h200", shaped(64))


def test_of_another_backend_of_the_device() -> None:
    plan = make(jnp.exp, "h200:mosaic_gpu", shaped(64, 64))
    assert [kernel.spec.backend for kernel in plan.kernels] == ["xla"]


def scanned(a, b):
    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return jax.lax.associative_scan(combine, (a, b))


@both
def test_xlas_plan_is_used_where_it_is_asked_for_and_faster(device: str) -> None:
    """XLA computes parts of a scan again on a GPU; on a TPU it fuses two products into one loop."""
    f, args = get_workload("neural_ode").build() if device == "tpu_v5e" else (scanned, [shaped(64, 4096)] * 2)
    xla = fuseplan.make_plan(f, device=device, planner="xla")(*args)
    alone = fuseplan.make_plan(f, device=device)(*args)
    both_ways = fuseplan.make_plan(f, device=device, peers=["xla"])(*args)
    assert both_ways.objective_ps == xla.objective_ps < alone.objective_ps
    assert both_ways.bound_ps <= both_ways.objective_ps
    assert "xla's plan is used" in both_ways.notes[-1]
    assert both_ways.verify().status == "verified"
    assert Plan.from_json(both_ways.to_json()) == both_ways


def test_a_peer_that_is_slower_changes_nothing() -> None:
    x = shaped(4096, 1024)
    plan = fuseplan.make_plan(jax.nn.softmax, device="h200", peers=["unfused", "xla"])(x)
    assert plan.status == "OPTIMAL"
    assert plan.kernels == fuseplan.make_plan(jax.nn.softmax, device="h200")(x).kernels
