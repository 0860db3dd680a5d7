"""Whole planned functions compile for devices that are not there: every kernel that the
solver chose for a full-size workload is one the device's own compiler accepts."""

from __future__ import annotations

import jax
import pytest

import fuseplan
from fuseplan.pipeline import plan_traced
from fuseplan.runtime import recovering
from fuseplan.workloads import WORKLOADS, get_workload
from tests.helpers.cutting_cases import (
    qkv,
    qkv_grad,
    rope_by_pairs,
    rope_by_reshape,
    rope_by_slices,
    rope_grad,
)
from tests.helpers.emit_cases import layernorm_rows, softmax_grad

NAMES = [name for name in WORKLOADS if "train" not in name]

# Each form of kernel is compiled with the oldest and the newest JAX, whole plans with the oldest alone.
pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.one_python]


CALLS = {"h200": "__gpu$xla.gpu.triton", "h200:mosaic_gpu": "mosaic_gpu_v2", "tpu_v5e": "tpu_custom_call"}
"""What XLA calls a kernel of a device."""


@pytest.fixture
def plans(monkeypatch):
    """The plans that were made on the way to the kernels."""
    found = []

    def planned(*args):
        plan = plan_traced(*args)
        found.append(plan)
        return plan

    monkeypatch.setattr(recovering, "plan_traced", planned)
    return found


# What Mosaic GPU plans differs in what contractions it takes, in rows that threads do not hold, and in what
# picks or cuts.
MOSAIC_GPU = (
    *("gpt2_block", "layernorm", "softmax", "mlp", "gelu_bias", "cross_entropy_grad"),
    *("causal_attention", "gated_mlp", "rope"),
)


# Kernels of 16 bits differ in what their contractions and rows need.
NARROW = (
    *("gpt2_block_grad", "causal_attention_grad", "mlp", "gated_mlp", "layernorm_grad", "cross_entropy_grad"),
    *("rope", "linear_cross_entropy", "gaussian_kernel_sum", "softmax", "gelu_exact"),
)


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        # Kernels of gpt2_block_grad in float32 are those of its parts: gpt2_block and other gradients.
        *((n, d, "float32") for n in NAMES if n != "gpt2_block_grad" for d in ("h200", "tpu_v5e")),
        *((n, d, "bfloat16") for n in NARROW for d in ("h200", "tpu_v5e")),
        ("grouped_attention_vjp", "tpu_v5e", "bfloat16"),
        *((n, "h200:mosaic_gpu", t) for n in MOSAIC_GPU for t in ("float32", "bfloat16")),
    ],
)
def test_compiles(name, device, dtype, plans):
    f, args = get_workload(name).build(dtype=dtype)
    # Kernels compile or do not, whether the plan is proven or not.
    text = fuseplan.jit(f, deadline_s=5).lower(*args, device=device).compile().as_text()
    (plan,) = plans
    kernels = sum(kernel.spec.backend != "xla" for kernel in plan.kernels)
    ours = CALLS[device]
    assert kernels or device != "h200:mosaic_gpu"
    assert text.count(f'custom_call_target="{ours}"') == kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("f", [jax.nn.softmax, softmax_grad, layernorm_rows], ids=lambda f: f.__name__)
def test_rows_in_passes_compile(f, device, dtype, plans):
    """With the tiles that the planner prefers where a row does not fit on chip."""
    rows, row = (jax.ShapeDtypeStruct(s, dtype) for s in ((512, 2**19), (2**19,)))
    args = {"softmax": (rows,), "softmax_grad": (rows, rows)}.get(f.__name__, (rows, row, rows))
    text = fuseplan.jit(f).lower(*args, device=device).compile().as_text()
    (plan,) = plans
    assert max(len(kernel.spec.passes) for kernel in plan.kernels) > 1
    assert text.count("custom_call_target=") >= 1


HEADS, TABLE = (1024, 12, 64), (1024, 1, 64)
CUT = {
    rope_by_slices: (HEADS, TABLE, TABLE),
    rope_by_reshape: (HEADS, TABLE, TABLE),
    rope_by_pairs: (HEADS, TABLE, TABLE),
    rope_grad: (HEADS, TABLE, TABLE, HEADS),
    qkv: ((1024, 2304), (2304,)),
    qkv_grad: ((1024, 2304), (2304,), (3, 1024, 256), (3, 1024, 256), (3, 1024, 256)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("f", CUT, ids=lambda f: f.__name__)
def test_what_cuts_and_joins_is_one_kernel(f, device, dtype, plans):
    if (f, device) == (rope_by_pairs, "tpu_v5e"):
        pytest.skip("what is apart by one lane is XLA's on a TPU")
    args = [jax.ShapeDtypeStruct(s, dtype) for s in CUT[f]]
    fuseplan.jit(f).lower(*args, device=device).compile()
    (plan,) = plans
    alone = [plan.graph.nodes[k.spec.nodes[0]] for k in plan.kernels if len(k.spec.nodes) == 1]
    assert len(plan.kernels) - sum(node.bitcast for node in alone) == 1
    assert plan.status == "OPTIMAL"
