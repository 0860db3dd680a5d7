"""``fuseplan explain`` and ``diff`` on workloads and on plans in files, and ``fuseplan workloads``."""

import json

import jax
import jax.numpy as jnp
import pytest
import typer.main
from typer.testing import CliRunner

from fuseplan import Plan, make_plan
from fuseplan.cli import app
from fuseplan.report.difference import compare_plans
from fuseplan.workloads import FAMILIES

pytestmark = pytest.mark.one_python


def run(*args, code=0, stdin=None):
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Plans of one workload by two planners, for another device, and of another workload."""
    folder = tmp_path_factory.mktemp("plans")
    for name, command in {
        "solver": ("layernorm", "--device", "test"),
        "unfused": ("layernorm", "--device", "test", "--planner", "unfused"),
        "h200": ("layernorm", "--device", "h200"),
        "other": ("softmax", "--device", "test"),
    }.items():
        run("plan", *command, "--small", "--out", folder / f"{name}.json")
    return folder


def read(path):
    return Plan.from_json(path.read_text())


# --- explain ----------------------------------------------------------------------------------


def test_a_plan_in_a_file_is_explained_as_the_workload_is(plans):
    of_file = run("explain", plans / "solver.json", "0,1").stdout
    assert of_file == run("explain", "layernorm", "0,1", "--device", "test", "--small").stdout
    assert of_file.startswith("n0 ")
    assert run("explain", "-", "0,1", stdin=(plans / "solver.json").read_text()).stdout == of_file


def test_an_explanation_has_80_columns(plans):
    for ends in ("0,1", "0,4"):
        lines = run("explain", plans / "solver.json", ends).stdout.splitlines()
        assert max(map(len, lines)) <= 80
        whole = str(read(plans / "solver.json").explain(*map(int, ends.split(","))))
        assert max(map(len, whole.splitlines())) > 80, "there is something to wrap"
        assert " ".join("\n".join(lines).split()) == " ".join(whole.split())


def test_an_explanation_as_json(plans):
    found = json.loads(run("explain", plans / "unfused.json", "0,1", "--json").stdout)
    assert (found["a"], found["b"], found["together"]) == (0, 1, False)
    assert found["text"] == str(read(plans / "unfused.json").explain(0, 1))


EXPLAIN_OPTIONS = {
    "--device": "test", "--device-file": "spec.toml", "--planner": "greedy", "--planner-module": "mine.py",
    "--dtype": "bfloat16", "--small": None, "--deadline": "7", "--must-fuse": "exp,div",
    "--never-fuse": "exp,div", "--max-peak-bytes": "9", "--max-group-size": "9", "--max-kernel-args": "9",
}  # fmt: skip


@pytest.mark.parametrize("option", EXPLAIN_OPTIONS)
def test_options_on_planning_are_refused_beside_a_plan(plans, option):
    value = EXPLAIN_OPTIONS[option]
    file = plans / "solver.json"
    result = run("explain", file, "0,1", option, *([] if value is None else [value]), code=2)
    assert f"{option} and {file}" in result.stderr
    assert result.stdout == ""


def test_every_option_of_explain_is_one_on_planning_but_those_on_output():
    command = typer.main.get_command(app).commands["explain"]
    options = {option for param in command.params for option in param.opts if option.startswith("--")}
    assert options - EXPLAIN_OPTIONS.keys() == {"--json"}


# --- diff -------------------------------------------------------------------------------------


def test_equal_plans(plans):
    result = run("diff", plans / "solver.json", plans / "solver.json")
    assert "The plans have the same kernels" in result.stdout
    assert (
        json.loads(run("diff", plans / "h200.json", plans / "h200.json", "--json").stdout)["differences"]
        == []
    )


def test_the_difference_of_two_planners(plans):
    text = run("diff", plans / "solver.json", plans / "unfused.json", code=1).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "B takes" in text
    assert "moved: " in text
    found = json.loads(run("diff", plans / "solver.json", plans / "unfused.json", "--json", code=1).stdout)
    one, other = read(plans / "solver.json"), read(plans / "unfused.json")
    assert found["one"]["time_us"] == one.objective_us
    assert found["other"]["kernels"] == len(other.kernels)
    extra = sum(d["extra_us"] for d in found["differences"])
    assert extra == pytest.approx(other.objective_us - one.objective_us)
    n_bytes = sum(d["extra_hbm_bytes"] for d in found["differences"])
    assert n_bytes == other.hbm_bytes - one.hbm_bytes


def test_operations_that_moved_are_counted_exactly(plans):
    one, other = read(plans / "solver.json"), read(plans / "unfused.json")
    found = compare_plans(one, other)
    held = {n: k for k, kernel in enumerate(one.kernels) for n in kernel.spec.nodes}
    alone = {n: k for k, kernel in enumerate(other.kernels) for n in kernel.spec.nodes}
    for difference in found.differences:
        for moved in difference.moved:
            n = int(moved.operation.split()[0][1:])
            assert (moved.one, moved.other) == (held[n], alone[n])
    # One operation of each fused kernel stays: the others have kernels of their own.
    operations = sum(k.operations for d in found.differences for k in d.one)
    stayed = sum(len(d.one) for d in found.differences)
    assert sum(len(d.moved) for d in found.differences) == operations - stayed
    assert not any(d.only_in_one or d.only_in_other for d in found.differences)


def test_plans_of_other_programs_share_no_operation(plans):
    found = compare_plans(read(plans / "solver.json"), read(plans / "other.json"))
    assert found.equal_kernels == 0
    names = [name for d in found.differences for name in d.only_in_one]
    assert len(names) == len(read(plans / "solver.json").graph.nodes)
    assert run("diff", plans / "solver.json", plans / "other.json", code=1).stdout


def test_plans_of_other_programs_say_so_first(plans, tmp_path):
    pair = (plans / "solver.json", plans / "other.json")
    assert run("diff", *pair, code=1).stdout.startswith("The plans are of different programs.\n")
    assert json.loads(run("diff", *pair, "--json", code=1).stdout)["same_program"] is False
    for name in ("unfused", "h200"):
        pair = (plans / "solver.json", plans / f"{name}.json")
        assert run("diff", *pair, code=1).stdout.startswith("A  ")
        assert json.loads(run("diff", *pair, "--json", code=1).stdout)["same_program"] is True


def test_programs_of_the_same_arguments_and_results():
    x = jax.ShapeDtypeStruct((64, 32), "float32")

    def plan(f, planner="solver"):
        return make_plan(f, device="test", planner=planner)(x)

    def one(x):
        return jnp.tanh(x) * 2

    def same(x):
        return jnp.tanh(x) * 2

    def other(x):
        return jnp.exp(x) - 1

    def twice(f):
        return lambda x: f(x) * 2

    assert compare_plans(plan(one), plan(same)).same_program is True, "wherever it stands"
    assert compare_plans(plan(one), plan(other)).same_program is False
    untold = compare_plans(plan(twice(jnp.tanh)), plan(twice(jnp.exp)))
    assert untold.same_program is None
    assert untold.text().startswith("The plans have different operations")
    assert max(map(len, untold.text().splitlines())) <= 80


def test_the_same_operations_in_another_schedule_are_a_difference_without_moves(plans):
    found = compare_plans(read(plans / "solver.json"), read(plans / "h200.json"))
    assert not found.is_empty
    assert all(not d.moved for d in found.differences if len(d.one) == len(d.other) == 1)


def test_what_is_no_plan(plans, tmp_path):
    (tmp_path / "text.json").write_text("{}")
    result = run("diff", plans / "solver.json", tmp_path / "text.json", code=2)
    assert "text.json: expected an object" in result.stderr
    assert "cannot read" in run("diff", plans / "none.json", plans / "solver.json", code=2).stderr
    assert "both are to be read from stdin" in run("diff", "-", "-", code=2, stdin="").stderr


# --- workloads --------------------------------------------------------------------------------


def test_every_workload_is_listed():
    records = json.loads(run("workloads", "--json").stdout)
    assert [record["name"] for record in records] == [name for family in FAMILIES.values() for name in family]
    softmax = next(record for record in records if record["name"] == "softmax")
    assert softmax["sizes"] == {"m": 4096, "n": 1024}
    assert softmax["family"] == "general"


def test_workloads_are_filtered_by_any_text():
    lines = run("workloads", "LayerNorm").stdout.splitlines()
    assert any(line.startswith("layernorm_grad ") for line in lines)
    assert not any(line.startswith("rope ") for line in lines)
    assert "no workload has 'qqq'" in run("workloads", "qqq").stdout


def test_operations_are_counted_on_request():
    (record,) = json.loads(run("workloads", "gelu_bias", "--operations", "--json").stdout)
    assert record["operations"] > 3
