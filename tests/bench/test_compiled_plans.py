"""The kernels of a compiled program are told apart by the plan's kernels that they compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.bench import count_compiled_kernels

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot")]


def normalised(x, scale):
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return jnp.sort(y * scale, axis=0)


ARGS = jax.ShapeDtypeStruct((4096, 768), "float32"), jax.ShapeDtypeStruct((768,), "float32")


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_a_kernel_and_a_step_of_xla_run_as_planned(device):
    """A sort may be any number of launches."""
    found = count_compiled_kernels(fuseplan.make_plan(normalised, device=device)(*ARGS))
    assert found.kernels == found.as_planned == 2


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_operations_that_xla_fuses_are_merged(device):
    found = count_compiled_kernels(fuseplan.make_plan(normalised, device=device, planner="unfused")(*ARGS))
    assert found.merged >= 5
    assert found.as_planned + found.merged + found.divided == found.kernels
