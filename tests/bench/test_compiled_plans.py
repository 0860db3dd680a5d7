"""The kernels of a compiled program are told apart by the plan's kernels that they compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.bench import count_compiled_kernels
from fuseplan.workloads import get_workload

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


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def two_layers(x, w, b, v, c):
    return jnp.tanh(x @ w + b) @ v + c


def heads(x, w, b):
    """Products of one array, which XLA would join to one, with the biases in kernels of their own."""
    return [x @ w[k] + b[k] for k in range(3)]


def summed(x, w):
    """A product of few tiles, and a sum of its squares, which adds up the product's parts."""
    return jnp.square(x @ w).sum()


def doubled(x):
    y = jnp.tanh(x) + 1
    return y[::2] * y[1::2]


def normalised_vector(x, scale):
    return (x * scale).sum(0), x * scale


LAYERS = shaped(4096, 768), shaped(768, 3072), shaped(3072), shaped(3072, 768), shaped(768)
HEADS = shaped(1024, 768), [shaped(768, 768)] * 3, [shaped(768)] * 3


@pytest.mark.parametrize(
    ("f", "args", "device"),
    [
        (two_layers, LAYERS, "tpu_v5e"),
        (two_layers, LAYERS, "h200"),
        (heads, HEADS, "h200"),
        (summed, (shaped(768, 8192), shaped(8192, 768)), "h200"),
        (doubled, (shaped(2048, 512, 16),), "tpu_v5e"),
        (*get_workload("rope").build(), "tpu_v5e"),
        (normalised_vector, ARGS, "tpu_v5e"),
        (*get_workload("causal_attention_grad").build(), "h200"),
    ],
)
def test_groups_that_are_left_to_xla_stay_apart(f, args, device):
    found = count_compiled_kernels(fuseplan.make_plan(f, device=device)(*args))
    assert found.as_planned == found.kernels
