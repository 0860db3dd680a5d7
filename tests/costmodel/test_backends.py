"""A backend is one record of capabilities and one module that emits kernels."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel import TEST_DEVICE
from costmodel.backends import backend_of, unregister_backend
from costmodel.device_fields import InvalidDeviceError
from costmodel.graph import OpKind
from fuseplan.extend import Backend, register_backend
from fuseplan.support.errors import UnknownNameError
from tests.helpers import toy_backend
from tests.helpers.arrays import ramp

TOY = Backend(
    "toy",
    "tests.helpers.toy_backend",
    dialect="loops",
    power_of_two_tiles=True,
    matmul_tiles=(32, 64),
    depth_tiles=(32,),
    fuses_operands=False,
    walks_in_passes=False,
)


@pytest.fixture
def device():
    register_backend(TOY)
    toy_backend.EMITTED.clear()
    yield replace(TEST_DEVICE, name="toy_device", platform="cpu", backend="toy")
    unregister_backend(TOY.name)


def gated(x, w):
    h = jax.nn.softmax(jnp.tanh(x) * 2, axis=-1)
    return jax.nn.gelu(h @ w) + 1


ARGS = ramp(-1, 1, 60, 50), ramp(0, 1, 50, 70)


def test_a_new_backend_plans_emits_and_runs(device):
    fused = fuseplan.jit(gated, device=device)
    plan = fused.plan(*ARGS)
    assert {kernel.spec.backend for kernel in plan.kernels} == {"toy"}
    assert plan.verify()
    np.testing.assert_allclose(fused(*ARGS), gated(*ARGS), rtol=1e-5)
    assert sorted(spec.nodes for spec in toy_backend.EMITTED) == sorted(k.spec.nodes for k in plan.kernels)


def test_its_capabilities_decide(device):
    plan = fuseplan.make_plan(gated, device=device)(*ARGS)
    for kernel in plan.kernels:
        nodes = [plan.graph.nodes[n] for n in kernel.spec.nodes]
        made = {v for node in nodes for v in node.outputs}
        for node in nodes:
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                assert made.isdisjoint(node.inputs), "nothing is computed on a contraction's operands"
        assert all(axis.tile & (axis.tile - 1) == 0 for axis in kernel.spec.axes), "tiles are powers of two"


@pytest.mark.parametrize(("fuses_operands", "count"), [(False, 2), (True, 1)])
def test_operands_are_computed_in_the_kernel_where_the_backend_can(device, fuses_operands, count):
    register_backend(replace(TOY, fuses_operands=fuses_operands))
    plan = fuseplan.make_plan(lambda x, w: (jnp.tanh(x) * 2) @ w, device=device)(*ARGS)
    assert len(plan.kernels) == count


def test_a_language_without_lowerings_is_refused():
    with pytest.raises(ValueError, match="the dialect of 'toy' is 'toy', expected one of xla, loops, triton"):
        register_backend(replace(TOY, dialect=""))
    with pytest.raises(KeyError, match="toy"):
        backend_of("toy")


def test_a_language_without_dtypes_is_refused(monkeypatch):
    monkeypatch.setattr("costmodel.backends.LANGUAGES", ("toy",))
    register_backend(replace(TOY, dialect=""))
    try:
        with pytest.raises(UnknownNameError, match="dtypes of kernels in 'toy' are unknown"):
            fuseplan.make_plan(gated, device="h200")(*ARGS)
    finally:
        unregister_backend(TOY.name)


def test_an_unknown_backend_is_refused():
    with pytest.raises(InvalidDeviceError, match="expected one of 'mosaic_tpu', 'triton'"):
        replace(TEST_DEVICE, backend="metal")
    with pytest.raises(TypeError, match="expects a Backend, got str"):
        register_backend("triton")
    with pytest.raises(KeyError, match="unknown backend 'metal': expected one of mosaic_tpu"):
        backend_of("metal")
