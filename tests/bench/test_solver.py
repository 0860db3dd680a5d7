"""``fuseplan bench solver`` on tiny workloads: what it counts, its tables, its files."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from fuseplan.bench.solver import WORKLOADS as BENCHED
from fuseplan.bench.solver import (
    AtDeadline,
    SolverTiming,
    Spread,
    bench_solver,
    solver_tables,
    steps_of,
    summary_line,
)
from fuseplan.cli import app
from fuseplan.console import Steps
from fuseplan.plan.options import Features
from fuseplan.settings import make_options
from fuseplan.support.format import columns
from fuseplan.workloads import GROUPS, HUGE, PACKAGES, WORKLOADS, get_workload
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
    assert measured.of_xla == measured.planning.median_s / measured.xla_compile_s


def test_seconds(measured):
    total = measured.total
    assert 0 < total.least_s <= total.median_s <= total.most_s
    assert 0 < measured.planning.median_s < total.median_s, "tracing is in one of them"
    assert measured.peak_rss_bytes is None or 10**7 < measured.peak_rss_bytes < 10**11
    stages = sum(seconds for _, seconds in measured.stages)
    assert 0 < stages <= total.most_s
    assert [at.deadline_s for at in measured.at_deadlines] == [0.5, 5.0]


def test_every_feature_is_switched_off_alone(measured):
    assert [a.feature for a in measured.ablation] == [field.name for field in dataclasses.fields(Features)]
    assert all(a.time_ratio >= 1 for a in measured.ablation), "the search space has shrunk"
    (nests,) = (a for a in measured.ablation if a.feature == "loop_nests")
    assert nests.time_ratio > 1
    assert nests.kernels_ratio > 1


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
        peak_rss_bytes=12_345 * 10**6, planning=late.seconds,
        at_deadlines=(late,) * 4,
    )  # fmt: skip


def test_tables_fit_80_columns(measured):
    assert solver_tables([]) == []
    tables = solver_tables([wide(measured), wide(measured)])
    assert len(tables) == 7
    for head, lines, right in tables:
        assert all(len(line) == len(head) for line in lines)
        assert max(map(len, columns([head, *lines], right))) <= 80
    longest = max((*PACKAGES, *BENCHED.split(",")), key=len)
    for head, lines, right in solver_tables([dataclasses.replace(measured, workload=longest)]):
        assert max(map(len, columns([head, *lines], right))) <= 80
    without = dataclasses.replace(measured, at_deadlines=(), ablation=(), xla_compile_s=None)
    assert len(solver_tables([without])) == 4


def test_the_summary_counts_near_bounds_and_quick_plans(measured):
    near = dataclasses.replace(measured, status="FEASIBLE", gap=0.01, xla_compile_s=1e-9)
    far = dataclasses.replace(near, gap=0.02, xla_compile_s=1e9)
    unbounded = dataclasses.replace(far, gap=None, xla_compile_s=None)
    assert summary_line([measured, near, far, unbounded]).startswith(
        "h200: 2 of 4 within 1 % of their bound, 1 proven; "
    )
    assert summary_line([near, far, unbounded]).endswith("; 1 of 2 planned in XLA's compile time")
    assert summary_line([unbounded]) == "h200: 0 of 1 within 1 % of their bound, 0 proven"
    rows = [dataclasses.replace(unbounded, device="h200:mosaic_gpu")] * 999
    assert len(summary_line([dataclasses.replace(row, xla_compile_s=1.0) for row in rows])) <= 110


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
    assert text.splitlines()[-1] == "h200: 2 of 2 within 1 % of their bound, 2 proven"
    short = (*small[:2], *small[2:5], "--deadlines", "", "--no-ablation")
    records = json.loads(run(*short, "--json").stdout)
    assert records[0].keys() == next(csv.DictReader(run(*short, "--csv").stdout.splitlines())).keys()
    assert not any(key.startswith(("at_", "without_")) for key in records[0])


def test_each_device_has_its_tables_and_its_summary():
    short = ("--repeats", "1", "--deadlines", "", "--no-ablation", "--with-xla", "--small")
    text = run("--workloads", "softmax,gelu_bias", "--device", "h200,tpu_v5e", *short).stdout
    assert text.index("h200  ") < text.index("tpu_v5e  ")
    assert text.count("peak MB") == text.count("XLA compile") == 2
    assert [line.partition(":")[0] for line in text.splitlines()[-2:]] == ["h200", "tpu_v5e"]
    assert "of 2 planned in XLA's compile time" in text


def test_a_group_is_benched_without_what_is_not_installed(monkeypatch):
    jraph = dataclasses.replace(PACKAGES["jraph_network"], needs=("jraph", "no_such_package"))
    group = {"softmax": WORKLOADS["softmax"], "jraph_network": jraph}
    monkeypatch.setitem(GROUPS, "packages", group)
    short = ("--repeats", "1", "--deadlines", "", "--no-ablation", "--small", "--csv")
    result = run("--workloads", "packages,softmax", *short)
    assert [row["workload"] for row in csv.DictReader(result.stdout.splitlines())] == ["softmax"]
    assert "left out: jraph_network, which needs" in result.stderr
    assert "no_such_package, not installed" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--deadlines", "soon"), "--deadlines expects seconds above 0"),
        (("--deadlines", "1,0"), "--deadlines expects seconds above 0"),
        (("--workloads", ","), "--workloads expects one or more names"),
        (("--workloads", "softmx"), "did you mean 'softmax'"),
        (("--device", "h200,cpu"), "choose a GPU or TPU"),
        (("--workloads", "packages", "--dtype", "bfloat16"), "is of float32"),
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
