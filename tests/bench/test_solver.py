"""``fuseplan bench solver`` on tiny workloads: what it counts, its tables, its files."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from fuseplan.bench.solver import WORKLOADS as BENCHED
from fuseplan.bench.solver import AtDeadline, SolverTiming, Spread, bench_solver, solver_tables, steps_of
from fuseplan.cli import app
from fuseplan.console import Steps
from fuseplan.plan.options import Features
from fuseplan.settings import make_options
from fuseplan.support.format import columns
from fuseplan.workloads import HUGE, WORKLOADS, get_workload
from fuseplan.workloads.stress import STRESS
from fuseplan.workloads.workload import make_args

pytestmark = pytest.mark.one_python

SHAPES = (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 48), "float32"))


def f(x, w):
    return jax.nn.softmax(jnp.tanh(x) @ w)


class Counted(Steps):
    def __init__(self):
        super().__init__()
        self.count = 0

    def done(self):
        self.count += 1


@pytest.fixture(scope="module")
def measured():
    steps = Counted()
    row = bench_solver("f", f, SHAPES, make_options("h200"), (0.5, 5.0), 2, with_xla=True, steps=steps)
    assert steps.count == steps_of((0.5, 5.0), 2, with_xla=True)
    return row


@pytest.mark.slow
def test_counts_and_proofs(measured):
    assert measured.equations > 5
    assert measured.candidates >= measured.components
    assert measured.priced > 0
    assert (measured.status, measured.gap) == ("OPTIMAL", 0.0)
    assert [name for name, _ in measured.excess] == ["unfused", "greedy", "best_first"]
    assert all(excess >= 0 for _, excess in measured.excess)
    assert dict(measured.excess)["unfused"] > 0
    assert measured.of_xla == measured.total.median_s / measured.xla_compile_s


def test_seconds(measured):
    total = measured.total
    assert 0 < total.least_s <= total.median_s <= total.most_s
    stages = sum(seconds for _, seconds in measured.stages)
    assert 0 < stages <= total.most_s
    assert [at.deadline_s for at in measured.at_deadlines] == [0.5, 5.0]


def test_every_feature_is_switched_off_alone(measured):
    assert [a.feature for a in measured.ablation] == [field.name for field in dataclasses.fields(Features)]
    assert all(a.time_ratio >= 1 for a in measured.ablation), "the search space has shrunk"
    (prologues,) = (a for a in measured.ablation if a.feature == "prologues")
    assert prologues.time_ratio > 1
    assert prologues.kernels_ratio > 1


def test_a_deadline_is_kept_within_the_slack():
    seconds = Spread(0.5, 0.4, 1.15)
    assert AtDeadline(1.0, "FEASIBLE", 0.1, seconds).kept
    assert AtDeadline(1.0, "FEASIBLE", 0.1, seconds).overshoot_ms == pytest.approx(150)
    assert not AtDeadline(0.9, "FEASIBLE", 0.1, seconds).kept
    assert AtDeadline(2.0, "FEASIBLE", 0.1, seconds).overshoot_ms == 0


def wide(row: SolverTiming) -> SolverTiming:
    late = AtDeadline(0.1, "FEASIBLE", 0.123, Spread(1.0, 1.0, 12.3456))
    return dataclasses.replace(
        row, workload="random_sums_60", equations=36_963, components=12_345, candidates=123_456,
        priced=12_345, kernels=12_345, time_us=123_456.7, status="FEASIBLE", gap=0.123,
        at_deadlines=(late,) * 4,
    )  # fmt: skip


def test_tables_fit_80_columns(measured):
    assert solver_tables([]) == []
    tables = solver_tables([wide(measured), wide(measured)])
    assert len(tables) == 7
    for head, lines, right in tables:
        assert all(len(line) == len(head) for line in lines)
        assert max(map(len, columns([head, *lines], right))) <= 80
    without = dataclasses.replace(measured, at_deadlines=(), ablation=(), xla_compile_s=None)
    assert len(solver_tables([without])) == 4


def run(*args, code=0):
    result = CliRunner().invoke(app, ["bench", "solver", *args])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_command(tmp_path):
    out = tmp_path / "rows.csv"
    small = ("--workloads", "softmax,gelu_bias", "--small", "--repeats", "1", "--deadlines", "1")
    text = run(*small, "--out", str(out)).stdout
    assert max(map(len, text.splitlines())) <= 80
    (softmax, gelu) = csv.DictReader(out.read_text().splitlines())
    assert (softmax["workload"], softmax["device"], gelu["status"]) == ("softmax", "h200", "OPTIMAL")
    assert softmax["at_1s_status"] == "OPTIMAL"
    short = (*small[:2], *small[2:5], "--deadlines", "", "--no-ablation")
    records = json.loads(run(*short, "--json").stdout)
    assert records[0].keys() == next(csv.DictReader(run(*short, "--csv").stdout.splitlines())).keys()
    assert not any(key.startswith(("at_", "without_")) for key in records[0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--deadlines", "soon"), "--deadlines expects seconds above 0"),
        (("--deadlines", "1,0"), "--deadlines expects seconds above 0"),
        (("--workloads", ","), "--workloads expects one or more names"),
        (("--workloads", "softmx"), "did you mean 'softmax'"),
        (("--device", "cpu"), "choose a GPU or TPU"),
    ],
)
def test_mistakes_are_explained(args, message):
    assert message in run(*args, code=2).stderr


def test_the_workloads_it_runs_are_known():
    assert set(STRESS) | set(HUGE) < set(BENCHED.split(","))
    for name in BENCHED.split(","):
        assert get_workload(name).name == name
    assert not WORKLOADS.keys() & (STRESS.keys() | HUGE.keys())


@pytest.mark.parametrize("name", STRESS)
def test_stress_functions_have_results(name):
    f, args = get_workload(name).build("bfloat16", small=True)
    leaves = jax.tree.leaves(jax.eval_shape(f, *args))
    assert leaves
    assert all(leaf.size > 0 for leaf in leaves)


@pytest.mark.parametrize("name", ["fan_in_40", "lstm_cell", "gru_cell", "shallow_water", "euler_fluxes"])
def test_stress_functions_run(name):
    f, args = get_workload(name).build(small=True)
    args = make_args(args)
    if name == "euler_fluxes":  # densities and pressures are positive
        args = jax.tree.map(jnp.abs, args)
    for leaf in jax.tree.leaves(jax.jit(f)(*args)):
        assert leaf.size > 0
        assert bool(jnp.isfinite(leaf).all())
