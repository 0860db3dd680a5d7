"""The examples of the documentation run, each in a process of its own, from files outside of the package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.one_python, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def python(folder, *arguments):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=env, timeout=300,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def fuseplan(folder, *arguments):
    return python(folder, "-m", "fuseplan", *arguments)


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "backend.py", "cost_model.py", "device.toml", "operation.py", "planner.py", "typed_jit.py",
        "workload.py",
    }  # fmt: skip


def test_a_workload(tmp_path):
    file = EXAMPLES / "workload.py"
    text = fuseplan(tmp_path, "plan", f"{file}:gated", "--device", "h200")
    assert "dot_general" in text
    options = ("--small", "--dtype", "bfloat16", "--device", "h200,tpu_v5e", "--planners", "unfused,solver")
    text = fuseplan(tmp_path, "compare", f"{file}:sized", *options)
    assert "on tpu_v5e, modelled" in text


def test_a_planner(tmp_path):
    options = ("--planner-module", EXAMPLES / "planner.py", "--planners", "into_reader,solver")
    text = fuseplan(tmp_path, "compare", "softmax", "--device", "h200", *options)
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["into_reader", "solver"]


def test_a_device(tmp_path):
    text = fuseplan(tmp_path, "plan", "softmax", "--device-file", EXAMPLES / "device.toml")
    assert text.startswith("solver plan for my_gpu")
    assert "assumed of my_gpu, not measured or published: hbm_bytes_per_s" in " ".join(text.split())


def test_a_cost_model(tmp_path):
    first, second = python(tmp_path, EXAMPLES / "cost_model.py").splitlines()
    assert first.endswith("OPTIMAL")
    with_launches, without = (float(word) for word in first.split() if word.replace(".", "").isdigit())
    assert without < with_launches
    assert second.startswith("1 kernel by the model, ")
    assert int(second.split(", ")[1].split()[0]) > 1
    assert second.endswith("OPTIMAL")


def test_an_operation(tmp_path):
    (line,) = python(tmp_path, EXAMPLES / "operation.py").splitlines()
    before, after = (int(word) for word in line.split() if word.isdigit())
    assert after < before


def test_a_backend(tmp_path):
    lines = python(tmp_path, EXAMPLES / "backend.py").splitlines()
    assert any(line.startswith("kernel of tanh") for line in lines)


def test_types(tmp_path):
    assert not python(tmp_path, EXAMPLES / "typed_jit.py")
