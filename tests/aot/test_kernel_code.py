"""What compilers make of one kernel, as ``plan.kernels[k].code(compiled=True)`` shows it."""

import re

import jax
import jax.numpy as jnp
import pytest

import fuseplan

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.one_python]

X = jax.ShapeDtypeStruct((512, 256), "float32")
W = jax.ShapeDtypeStruct((256, 256), "float32")
HALF = tuple(x.update(dtype="bfloat16") for x in (X, W))


def code(device, f=jax.nn.softmax, args=(X,)):
    plan = fuseplan.make_plan(f, device=device)(*args)
    kernel = next(k for k in plan.kernels if k.spec.capabilities.emits_kernels)
    return kernel.spec.backend, kernel.code(compiled=True)


def test_triton_kernels_are_shown_as_ptx_with_their_resources():
    backend, text = code("h200")
    assert backend == "triton"
    assert re.search(
        r"^# fuseplan_softmax_9: [1-9]\d* registers a thread, 0 B of spills, .*threads$", text, re.MULTILINE
    )
    assert ".visible .entry fuseplan_softmax_9" in text
    assert "ex2.approx" in text


def test_mosaic_gpu_kernels_are_shown_as_ptx_with_their_registers():
    backend, text = code("h200:mosaic_gpu", lambda x, w: jnp.tanh(x @ w), HALF)
    assert backend == "mosaic_gpu"
    assert "registers a thread" in text
    assert "wgmma.mma_async" in text


def test_mosaic_tpu_kernels_are_shown_as_mlir_with_their_memory():
    backend, text = code("tpu_v5e")
    assert backend == "mosaic_tpu"
    assert re.search(r"^# compiled by libtpu for tpu_v5e", text, re.MULTILINE)
    assert "func.func @" in text
    assert "math.exp" in text


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_groups_of_xla_are_shown_as_its_optimized_program(device):
    plan = fuseplan.make_plan(lambda x: jnp.sort(x, axis=0), device=device)(X)
    assert "HloModule" in plan.kernels[0].code(compiled=True)
