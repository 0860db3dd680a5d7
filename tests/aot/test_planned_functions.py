"""Whole planned functions compile for devices that are not there: every kernel that the
solver chose for a full-size workload is one the device's own compiler accepts."""

from __future__ import annotations

import jax
import pytest

import fuseplan
from experiments.workloads import WORKLOADS, get_workload
from fuseplan import fused
from fuseplan.planner import plan_traced
from tests.emit_cases import layernorm_rows, softmax_grad

NAMES = [name for name in WORKLOADS if "train" not in name]

# Each form of kernel is compiled with both JAXes (test_compile_kernels.py); whole plans with one.
pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.one_python]


CALLS = {"h200": "__gpu$xla.gpu.triton", "h200:mosaic_gpu": "mosaic_gpu_v2", "tpu_v5e": "tpu_custom_call"}
"""What XLA calls a kernel of a device."""


@pytest.fixture
def plans(monkeypatch):
    """The plans that were made on the way to the kernels."""
    found = []

    def planned(*args):
        lowered, plan = plan_traced(*args)
        found.append(plan)
        return lowered, plan

    monkeypatch.setattr(fused, "plan_traced", planned)
    return found


# What Mosaic GPU plans differs in what contractions it takes, and in rows that threads do not hold.
MOSAIC_GPU = ("gpt2_block", "layernorm", "softmax", "mlp", "gelu_bias", "cross_entropy_grad")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "device"),
    [*((n, d) for n in NAMES for d in ("h200", "tpu_v5e")), *((n, "h200:mosaic_gpu") for n in MOSAIC_GPU)],
)
def test_compiles(name, device, dtype, plans):
    f, args = get_workload(name).build(dtype=dtype)
    text = fuseplan.jit(f).lower(*args, device=device).compile().as_text()
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
