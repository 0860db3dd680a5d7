"""Whole planned functions compile for devices that are not there: every kernel that the
solver chose for a full-size workload is one the device's own compiler accepts."""

from __future__ import annotations

import pytest

import fuseplan
from experiments.workloads import WORKLOADS, get_workload

NAMES = [name for name in WORKLOADS if "train" not in name]

# Each form of kernel is compiled with both JAXes (test_compile_kernels.py); whole plans with one.
pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.one_python]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name, device, dtype):
    f, args = get_workload(name).build(dtype=dtype)
    fast = fuseplan.jit(f)
    text = fast.lower(*args, device=device).compile().as_text()
    plan = fuseplan.make_plan(f, device=device)(*args)
    fused = sum(kernel.spec.backend != "xla" for kernel in plan.kernels)
    ours = "__gpu$xla.gpu.triton" if device == "h200" else "tpu_custom_call"
    assert text.count(f'custom_call_target="{ours}"') == fused
