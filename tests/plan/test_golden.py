"""Plans on the test device, which is never recalibrated: what changes here, changed on
purpose. ``pytest --update-golden`` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuseplan
from fuseplan.workloads import get_workload

FOLDER = Path(__file__).parent / "golden"
NAMES = [
    "add_transpose",
    "softmax",
    "layernorm",
    "rmsnorm",
    "gelu_bias",
    "mlp",
    "swiglu",
    "attention",
    "adam_update",
]


def describe(plan: fuseplan.Plan) -> str:
    """One line a kernel: its operations, axes, and what it moves."""
    lines = [f"{len(plan.kernels)} kernels, {plan.objective_us:.3f} us, {plan.status}"]
    for kernel in plan.kernels:
        ops = " ".join(plan.graph.nodes[n].op for n in kernel.spec.nodes)
        axes = " ".join(f"{a.role.name.lower()}:{a.size}/{a.tile}" for a in kernel.spec.axes) or "xla"
        lines.append(f"{ops} | {axes} | {kernel.cost.hbm_bytes} bytes, {kernel.cost.bound_by}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_plan_is_the_golden_one(name, request):
    f, args = get_workload(name).build()
    text = describe(fuseplan.make_plan(f, device="test")(*args))
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.read_text() == text, "if it changed on purpose: pytest --update-golden"
