"""A contraction along the few columns that another makes shares its kernel: low-rank adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.axes import unify
from costmodel.devices import get_device
from costmodel.graph import boundary
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.schedule.nests.accelerator import kernel_nests
from fuseplan.schedule.nests.regions import narrow_contractions
from tests.codegen.test_kernel_nests import check, evaluated, in_float32, small_tiles  # noqa: F401
from tests.helpers.nest_cases import normal

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]


def low_rank(x, w, a, b):
    return x @ w + 0.5 * ((x @ a) @ b)


def adapter(x, a, b):
    return jax.nn.gelu(x @ a) @ b


def gated_rank(x, w, a, b):
    return jnp.tanh((x @ a) * jax.nn.sigmoid(w) @ b)


CASES = {
    "low_rank": (low_rank, (normal(20, 40), normal(40, 24), normal(40, 5), normal(5, 24))),
    "adapter": (adapter, (normal(20, 40), normal(40, 6), normal(6, 24))),
    "gated_rank": (gated_rank, (normal(20, 40), normal(5), normal(40, 5), normal(5, 24))),
}


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", CASES)
def test_agrees(name, device, small_tiles):  # noqa: F811
    f, args = CASES[name]
    args = in_float32(args)
    lowered = lower(trace(f, *args))
    graph = lowered.graph
    groups = list(narrow_contractions(graph, get_device(device).backend))
    assert groups
    values = evaluated(lowered, args)
    for nodes in groups:
        axes, edge = unify(graph, nodes), boundary(graph, nodes)
        specs = list(kernel_nests(graph, nodes, axes, edge, get_device(device).backend))
        for spec in dict.fromkeys([specs[0], specs[len(specs) // 2], specs[-1]]):
            check(spec, lowered, values)


def shapes(*several, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(s, dtype) for s in several]


LARGE = shapes((4096, 1024), (1024, 1024), (1024, 16), (16, 1024))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_beside_its_weights_is_one_kernel_of_a_tpu(dtype):
    args = shapes(*(a.shape for a in LARGE), dtype=dtype)
    plan = fuseplan.make_plan(low_rank, device="tpu_v5e", deadline_s=100)(*args)
    apart = fuseplan.make_plan(
        low_rank, device="tpu_v5e", features=Features(loop_nests=False), deadline_s=100
    )(*args)
    assert len(plan.kernels) == 1
    assert plan.status == "OPTIMAL"
    assert plan.objective_ps < 0.8 * apart.objective_ps
    assert plan.verify()


def test_what_is_wide_or_wanted_elsewhere_is_not_offered():
    def found(f, *args):
        return list(narrow_contractions(lower(trace(f, *args)).graph, "mosaic_tpu"))

    x, w, a, b = LARGE
    assert len(found(low_rank, x, w, a, b)) == 2
    assert found(adapter, x, *shapes((1024, 512), (512, 1024))) == []
    assert found(lambda x, a, b: ((h := x @ a) @ b, h), x, a, b) == []
    (pair,) = found(lambda x, w, a, b: ((y := x @ w) + (x @ a) @ b, y), x, w, a, b)
    assert len(pair) == 2
