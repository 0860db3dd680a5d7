"""``fuseplan bench cpu``: every case in small size from end to end, and what may go wrong."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel import calibrate
from fuseplan.bench import cpu as bench_cpu
from fuseplan.bench.cpu import (
    Case,
    Goal,
    Row,
    bench_cases,
    colour,
    head_line,
    row_line,
    summary_lines,
    time_in_turns,
)
from fuseplan.bench.float64 import in_float64, is_right_in_float64
from fuseplan.cli import app
from fuseplan.runtime.tolerance import check_results
from fuseplan.support.errors import InvalidArgumentError, UnknownNameError
from fuseplan.targets import calibrate as xla_calibrate
from fuseplan.workloads import WORKLOADS, attention, cpu, functions, get_workload, make_args, pairwise
from fuseplan.workloads.large import LARGE
from tests.helpers.quickly import run_quickly

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((8, 16), "float32")


@pytest.fixture(autouse=True)
def quick_cpu(monkeypatch, tmp_path):
    """A measured CPU without the seconds it takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "measure", lambda limit_s: calibrate.described_cpu())
    monkeypatch.setattr(xla_calibrate, "measure", lambda limit_s: calibrate.described_cpu())


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def measure(*cases, repeats=1):
    return list(bench_cases(cases, make_args, repeats, sample_s=0.0))


def run(*args, code=0):
    result = CliRunner().invoke(app, ["bench", "cpu", *args])
    assert result.exit_code == code, (result.output, result.exception)
    return result


# --- every case, and the workloads behind them -----------------------------------------------


@pytest.mark.parametrize("name", cpu.GOALS)
def test_every_case_is_right_in_small_size(name):
    (row,) = measure(*cpu.get_cases([name], small=True))
    assert (row.workload, row.status, row.error) == (name, "measured", "")
    assert row.checked == "jax.jit, float64"
    assert row.relative_error < 2e-4
    assert row.speedup == pytest.approx(row.jax_ms / row.fuseplan_ms)
    assert row.kernels >= 1
    assert row.predicted_ms > 0
    assert min(row.plan_s, row.fuseplan_compile_s, row.jax_compile_s) > 0


@pytest.mark.parametrize("name", cpu.HUGE)
def test_huge_cases_run_alone_and_say_their_peak(name):
    (row,) = measure(*cpu.get_cases([name], small=True, huge=True))
    assert (row.status, row.error) == ("measured", "")
    assert row.checked == "float64 of 64 rows"
    assert row.jax_ms is row.speedup is None
    assert row.fuseplan_ms > 0
    assert row.jax_temp_bytes > 0
    assert 50e6 < row.peak_rss_bytes < 5e9


@pytest.mark.parametrize("name", cpu._SAMPLES)
def test_samples_are_rows_of_the_whole(name):
    (case,) = cpu.get_cases([name], small=True)
    args, rows = make_args(case.args), np.array([0, 5, 130])
    exact = case.sample.expected(args, rows)
    assert len(exact) == 3
    result = run_quickly(case.f, *args)
    if case.settled is not None:
        result = case.settled(args, result).astype(np.float32)
    check_results(name, case.sample.picked(result, rows), exact.astype(np.float32))


@pytest.mark.slow
def test_rows_are_checked_where_the_whole_takes_too_much(monkeypatch):
    monkeypatch.setattr(bench_cpu, "_WIDE_SHARE", 0)
    (case,) = cpu.get_cases(["gaussian_gram_vjp"], small=True)
    (row,) = measure(dataclasses.replace(case, sample=dataclasses.replace(case.sample, count=20)))
    assert (row.status, row.checked) == ("measured", "jax.jit, float64 of 20 rows")
    assert row.relative_error < 1e-4


def test_huge_sizes_exceed_the_memory_and_are_bounded():
    for memory_bytes in (8 * 2**30, 24 * 2**30):
        assert cpu.huge_tokens(memory_bytes) * 131_072 * 4 >= 1.5 * memory_bytes
    assert cpu.huge_tokens(2**40) * 131_072 * 4 < 97e9
    for name in cpu.HUGE:
        (case,) = cpu.get_cases([name], huge=True)
        assert case.alone
        assert case.goal is None
        assert case.sample.count == 64
    assert cpu.get_cases(["attention_32768"], huge=True)[0].args[0].shape == (1, 32_768, 8, 64)


def test_cases_are_of_known_workloads_at_the_sizes_that_the_goals_are_for():
    shapes = {case.name: [a.shape for a in jax.tree.leaves(case.args)] for case in cpu.get_cases()}
    assert shapes["causal_attention"] == [(1, 4096, 8, 64)] * 3
    assert shapes["grouped_attention"] == [(1, 4096, 8, 64)] + [(1, 4096, 2, 64)] * 2
    assert shapes["linear_cross_entropy"] == [(4096, 768), (768, 32_000), (4096,)]
    assert shapes["gated_mlp_768"] == [(4096, 768), (3072, 768), (768, 3072), (768, 3072)]
    assert shapes["gaussian_gram_vjp"] == [(20_000, 3), (20_000, 3), (20_000,), (20_000,)]
    assert shapes["kmeans_assign"] == [(100_000, 16), (1024, 16)]
    assert shapes["block_2048"][-1] == (1, 2048, 768)
    assert not LARGE.keys() & WORKLOADS.keys()
    assert all(get_workload(name) is workload for name, workload in LARGE.items())


# --- the functions say what their names say --------------------------------------------------


def small(name, **sizes):
    f, args = get_workload(name).build("float32", True, **sizes)
    arrays = make_args(args)
    return arrays, run_quickly(f, *arrays)


@pytest.mark.slow
def test_variants_of_attention():
    (q, k, v), y = small("grouped_attention")
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(y, want, atol=1e-5)
    (q, k, v), y = small("window_attention")
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(16, 0))
    np.testing.assert_allclose(y, want, atol=1e-5)
    (q, k, v), y = small("alibi_attention")
    i, j = np.arange(133)[:, None], np.arange(133)
    bias = np.stack([2.0 ** (-8 * (h + 1) / 3) * (j - i) for h in range(3)])[None].astype("float32")
    want = jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)
    np.testing.assert_allclose(y, want, atol=1e-5)
    (q, k, v, g), (out, *grads) = small("causal_attention_vjp", batch=1)
    np.testing.assert_allclose(out, functions.causal_attention(q, k, v), atol=1e-5)
    for got, want in zip(grads, functions.causal_attention_grad(q, k, v, g), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
    rows = np.array([0, 7, 132])
    exact = attention.exact_causal_rows((q, k, v), rows)
    np.testing.assert_allclose(np.asarray(out)[0, rows], exact, atol=1e-5)


@pytest.mark.slow
def test_pairwise_functions():
    (x, y, b), result = small("gaussian_gram")
    squares = np.square(np.asarray(x, np.float64)[:, None] - np.asarray(y)).sum(-1)
    np.testing.assert_allclose(result, np.exp(-squares) @ np.asarray(b), atol=1e-5)
    np.testing.assert_allclose(pairwise.gaussian_differences(x, y, b), result, atol=1e-5)
    np.testing.assert_allclose(
        pairwise.laplacian(x, y, b), np.exp(-np.sqrt(squares)) @ np.asarray(b), atol=1e-4
    )
    np.testing.assert_allclose(pairwise.distance_logsumexp(x, y), np.log(np.exp(-squares).sum(1)), atol=1e-5)
    np.testing.assert_array_equal(pairwise.nearest(x, y), squares.argmin(1))
    np.testing.assert_allclose(pairwise.chosen_distances((x, y), squares.argmin(1)), squares.min(1))


def test_forces_are_the_gradient_of_the_energy():
    (x, masses), (_, gradient) = small("nbody_energy_grad")
    forces = pairwise.nbody(x, masses)
    np.testing.assert_allclose(gradient, -masses[:, None] * forces, atol=2e-2 * np.abs(forces).max())


def test_float64_of_a_function_that_asks_for_float32():
    x = np.full(3, 1 / 3, np.float32)
    exact = in_float64(lambda x: {"sum": (x.astype(jnp.float32) * 1e-9 + 1).sum(), "i": jnp.argmax(x)}, (x,))
    assert exact["sum"].dtype == np.float64
    assert exact["sum"] - 3 == pytest.approx(1e-9)
    assert exact["i"].dtype == np.int32
    assert jnp.ones(1).dtype == jnp.float32, "float64 stays inside"


def test_xla_is_not_trusted_with_huge_float64_arrays():
    n = jax.ShapeDtypeStruct((16_384,), "float32")
    assert is_right_in_float64(jnp.add, (n, n))
    assert not is_right_in_float64(jnp.add.outer, (n, n))


# --- goals, failures and wrong results -------------------------------------------------------


@pytest.mark.slow
def test_a_goal_is_met_or_missed():
    low, high = measure(
        Case("low", softmax, (X,), Goal(0.001, 0.5)), Case("high", softmax, (X,), Goal(1e6, 1))
    )
    assert (low.status, high.status) == ("met", "missed")
    text = "\n".join(summary_lines([low, high]))
    assert "Goals met: 1 of 2." in text
    assert "missed: high:" in text
    assert "goal 1e+06×" in text


def test_a_failure_is_a_row_of_its_own():
    def broken(x):
        raise RuntimeError("no luck\nat all")

    first, failed, last = measure(*(Case(f.__name__, f, (X,)) for f in (softmax, broken, softmax)))
    assert (first.status, failed.status, last.status) == ("measured", "failed", "measured")
    assert failed.error == "RuntimeError: no luck\nat all"
    assert failed.jax
    assert row_line(failed).split(maxsplit=1)[1] == "failed: RuntimeError: no luck at all"


def test_a_killed_process_is_a_row_of_its_own():
    (row,) = measure(Case("killed", dies, (X,), alone=True))
    assert row.status == "failed"
    assert "killed" in row.error


def dies(x):
    import os

    os._exit(1)


def test_a_wrong_result_is_found(monkeypatch):
    real = bench_cpu.jit
    monkeypatch.setattr(bench_cpu, "jit", lambda f: real(lambda x: f(x).at[3, 5].add(0.01)))
    (row,) = measure(Case("softmax", softmax, (X,), Goal(0.001, 0.5)))
    assert row.status == "wrong"
    assert "against jax.jit" in row.error
    assert "[3, 5]" in row.error
    assert row.speedup is None
    assert any(line.startswith("WRONG: softmax:") for line in summary_lines([row]))


def test_a_result_that_jax_shares_but_float64_does_not_is_found():
    def cancels(x):
        return jnp.sqrt(x * x + 1e8) - 1e4

    (row,) = measure(Case("cancels", cancels, (X,)))
    assert row.status == "wrong"
    assert row.checked == "jax.jit"
    assert "against float64" in row.error


def test_indices_may_differ_where_distances_are_equal(monkeypatch):
    x = np.zeros((4, 2), np.float32)
    y = np.ones((6, 2), np.float32)  # all equally near
    real = bench_cpu.jit
    monkeypatch.setattr(bench_cpu, "jit", lambda f: real(lambda x, y: f(x, y) + 1))
    case = Case("nearest", pairwise.nearest, (x, y))
    (strict,), (settled,) = (
        measure(c) for c in (case, dataclasses.replace(case, settled=pairwise.chosen_distances))
    )
    assert (strict.status, settled.status) == ("wrong", "measured")


def test_what_does_not_fit_is_not_run(monkeypatch):
    monkeypatch.setattr(bench_cpu, "capacity_bytes", lambda: 100)
    (row,) = measure(Case("softmax", softmax, (X,)))
    assert row.status == "failed"
    assert "not run: it needs" in row.error
    assert row.fuseplan_temp_bytes is not None


def test_turns_are_taken():
    calls = []
    samples = time_in_turns([lambda: calls.append("a"), lambda: calls.append("b")], (), 3, sample_s=0.0)
    assert "".join(calls) == "ab" + "abbaab"
    assert [len(s) for s in samples] == [3, 3]


def test_only_the_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(bench_cpu, "local_platform", lambda: "gpu")
    with pytest.raises(InvalidArgumentError, match="JAX_PLATFORMS=cpu"):
        measure(Case("softmax", softmax, (X,)))


# --- the command -----------------------------------------------------------------------------


def test_the_table_has_80_columns(tmp_path):
    out = tmp_path / "cpu.csv"
    lines = run(
        "gaussian_gram", "linear_cross_entropy_grad", "--quick", "--repeats", "2", "--out", str(out)
    ).stdout
    lines = lines.splitlines()
    assert lines[0] == head_line()
    assert [line.split()[0] for line in lines[1:3]] == ["gaussian_gram", "linear_cross_entropy_grad"]
    assert max(map(len, lines)) <= 80
    assert "Results checked against jax.jit, float64: all." in lines
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == [field.name for field in dataclasses.fields(Row)]
    assert rows[1]["workload"] == "linear_cross_entropy_grad"
    assert rows[0]["jax"] == jax.__version__
    assert rows[0]["cpu"]
    assert float(rows[0]["speedup"]) > 0


def test_a_line_of_large_numbers_fits():
    row = Row("linear_cross_entropy_grad", "missed", 123_456, 12_345.6, 100.2, 90.0, 110.0, 2.0,
              34_400_000_000, 34_400_000_000, 12_345.0, 200.0)  # fmt: skip
    assert len(row_line(row)) <= 80
    assert row_line(row).split() == [
        "linear_cross_entropy_grad", "123,456", "12,346", "100×", "10", "34,400", "1/12,345", "missed",
    ]  # fmt: skip
    for status, expected in (("met", "green"), ("measured", None), ("missed", "red"), ("failed", "red")):
        assert colour(dataclasses.replace(row, status=status)) == expected


def test_json_and_a_function_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def make():\n"
        "    return (lambda x, i: jax.nn.softmax(x)[i]), (jnp.ones((8, 16)), jnp.array(7))\n"
    )
    monkeypatch.chdir(tmp_path)
    records = json.loads(run("mine:make", "--json", "--repeats", "1").stdout)
    assert [r["workload"] for r in records] == ["mine:make"]
    assert records[0]["status"] == "measured"
    assert records[0]["goal_speedup"] is None
    assert records[0]["repeats"] == 1


def test_quick_takes_the_small_size_of_a_workload_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_size.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from fuseplan.workloads import Workload, of_shapes\n"
        "made = []\n"
        "def f(x):\n"
        "    made.append(x.shape)\n"
        "    return jax.nn.softmax(x)\n"
        "sized = Workload('sized', '', {'m': 64, 'n': 32}, {'m': 5, 'n': 7}, of_shapes(f, 'm n'))\n"
        "def fixed():\n"
        "    return jnp.tanh, (jnp.ones((8, 16)),)\n"
    )
    monkeypatch.chdir(tmp_path)
    records = json.loads(run("own_size:sized", "own_size:fixed", "--quick", "--json").stdout)
    assert [r["status"] for r in records] == ["measured", "measured"]
    made = sys.modules["own_size"].made
    assert set(made) == {(5, 7)}
    made.clear()
    run("own_size:sized", "--json", "--repeats", "1")
    assert set(made) == {(64, 32)}


def test_a_failure_is_exit_code_1_and_keeps_the_other_rows(tmp_path, monkeypatch):
    def failing(case, args, found):
        if case.name == "softmax":
            raise RuntimeError("no luck")
        return real(case, args, found)

    real = bench_cpu._compile
    monkeypatch.setattr(bench_cpu, "_compile", failing)
    out = tmp_path / "cpu.csv"
    text = run("softmax", "layernorm", "--quick", "--repeats", "1", "--out", str(out), code=1).stdout
    assert "FAILED: softmax: RuntimeError: no luck" in text
    assert [r["status"] for r in csv.DictReader(out.read_text().splitlines())] == ["failed", "measured"]


def test_mistakes_are_explained(tmp_path):
    assert "did you mean 'gaussian_gram'?" in run("gausian_gram", code=2).stderr
    assert "attention_32768" in run("softmax", "--huge", code=2).stderr
    assert "there is no folder" in run("--out", str(tmp_path / "no" / "x.csv"), code=2).stderr
    assert "Usage" in run("--repeats", "0", code=2).stderr
    with pytest.raises(UnknownNameError, match="did you mean 'token_losses_huge'"):
        cpu.get_cases(["token_loses_huge"], huge=True)
