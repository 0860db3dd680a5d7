"""Every kernel that a plan of the workloads asks for, run in Pallas' interpreter against
JAX's own evaluation: other devices' kernels, on ragged sizes, with random inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuseplan.frontend.trace import trace
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.tolerance import check_results
from fuseplan.settings import make_options
from fuseplan.workloads import WORKLOADS, get_workload, make_args
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import on_both, run_quickly

pytestmark = pytest.mark.usefixtures("compiled_quickly")

LEFT_TO_XLA = {"dropout_residual"}
"""Random bits are made in a loop of XLA."""
NAMES = [name for name in WORKLOADS if "train" not in name and name not in LEFT_TO_XLA]


def run_planned(f, args, device, planner="solver"):
    traced = trace(f, *args)
    lowered, plan = plan_traced(traced, make_options(device, planner, deadline_s=120))  # also if it is busy
    flat = [*lowered.consts, *jax.tree.leaves(args)]
    got = run_quickly(make_runner(lowered, plan, platform="cpu", interpret=True), *flat)
    want = run_quickly(traced.evaluate, *flat)
    return plan, got, want


BOTH = ("softmax", "layernorm_grad", "causal_attention", "linear_cross_entropy_grad")
"""What both Pythons run; the others' kernels are of the same kinds."""


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", on_both(NAMES, BOTH))
def test_float32(name, device):
    f, args = get_workload(name).build(small=True)
    plan, got, want = run_planned(f, make_args(args, seed=0), device)
    check_results(name, got, want)
    assert any(k.spec.backend != "xla" for k in plan.kernels), "no fused kernel was tested"
    assert plan.status == "OPTIMAL"


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize(
    "name", ["layernorm_grad", "softmax", "mlp", "gelu_exact", "causal_attention", "swiglu"]
)
def test_bfloat16(name, device):
    f, args = get_workload(name).build(small=True, dtype="bfloat16")
    _, got, want = run_planned(f, make_args(args, seed=0), device)
    check_results(name, got, want)


def clipped_step(params, grads, rate):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    factor = rate / jnp.maximum(norm, 1.0)
    return [p - factor * g for p, g in zip(params, grads, strict=True)], norm


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_packs(device):
    """Arrays of several shapes in one kernel, with the scalars that it makes and needs."""
    shapes = [(100,), (3, 40), (100,), (7,), (2, 3, 5)]
    arrays = [
        jnp.asarray(np.random.default_rng(i).standard_normal(s), "float32") for i, s in enumerate(shapes)
    ]
    args = (arrays, [3.0 * a[::-1] for a in arrays], jnp.float32(0.5))
    plan, got, want = run_planned(clipped_step, args, device)
    check_results("clipped_step", got, want)
    assert [len(kernel.spec.reads) for kernel in plan.kernels] == [11]


@pytest.mark.one_python
@pytest.mark.parametrize("planner", ["unfused", "greedy", "best_first"])
@pytest.mark.parametrize("name", ["layernorm_grad", "gpt2_block"])
def test_every_planner(name, planner):
    f, args = get_workload(name).build(small=True)
    _, got, want = run_planned(f, make_args(args, seed=0), "h200", planner)
    check_results(name, got, want)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_special_values(device):
    """A padded or masked element must not leak into a row, nor a NaN leave its own."""

    def f(x):
        # XLA's own reduce_max loses NaNs in wide rows on the CPU: there is nothing to match.
        return jax.nn.softmax(x, axis=-1), x.sum(0), jnp.max(jnp.nan_to_num(x, nan=0.5) * 2, axis=1)

    x = np.random.default_rng(0).standard_normal((13, 130)).astype("float32")
    x[3, 5], x[4, 129], x[5, 0], x[6] = np.nan, np.inf, -np.inf, -np.inf
    _, got, want = run_planned(f, (x,), device)
    check_results("special values", got, want)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 130), (257, 1), (3, 5, 7), (2, 1, 129), (0, 5), (4, 0)])
def test_odd_shapes(device, shape):
    def f(x):
        y = jnp.exp(x - x.max(-1, keepdims=True, initial=-9.0))
        return y / y.sum(-1, keepdims=True), jnp.tanh(x).reshape(-1)

    x = np.random.default_rng(1).standard_normal(shape).astype("float32")
    _, got, want = run_planned(f, (x,), device)
    check_results(str(shape), got, want)
