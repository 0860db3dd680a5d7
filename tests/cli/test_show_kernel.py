"""``fuseplan plan --show-kernel`` prints the code of one kernel."""

import json

import pytest
from typer.testing import CliRunner

import fuseplan
from fuseplan.cli import app
from fuseplan.workloads import get_workload

PLAN = ("plan", "softmax", "--device", "h200", "--small")


def run(*arguments):
    return CliRunner().invoke(app, [*PLAN, *arguments])


def test_the_code_of_one_kernel_is_printed_and_nothing_else(tmp_path):
    f, args = get_workload("softmax").build(small=True)
    expected = fuseplan.make_plan(f, device="h200")(*args).kernels[0].code()
    result = run("--show-kernel", "0", "--out", str(tmp_path / "plan.json"))
    assert result.exit_code == 0
    assert result.stdout == expected
    assert fuseplan.Plan.from_json((tmp_path / "plan.json").read_text()).kernels[0].code() == expected


def test_the_code_of_one_kernel_as_json():
    f, args = get_workload("softmax").build(small=True)
    expected = fuseplan.make_plan(f, device="h200")(*args).kernels[0].code()
    found = json.loads(run("--show-kernel", "0", "--json").stdout)
    assert found == {"kernel": 0, "code": expected}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--show-kernel", "7"), "expects the number of a kernel from 0 to 0, got 7"),
        (("--compiled",), "add --show-kernel K"),
    ],
)
def test_wrong_numbers_are_errors(tmp_path, arguments, message):
    result = run(*arguments, "--out", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.aot
@pytest.mark.xdist_group("aot")
def test_a_compiled_kernel_is_ptx():
    result = run("--show-kernel", "0", "--compiled")
    assert result.exit_code == 0, result.output
    assert "registers a thread" in result.stdout
