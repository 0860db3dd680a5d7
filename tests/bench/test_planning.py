"""Planning is timed stage by stage, and the rows add up."""

import csv
import io
from dataclasses import asdict

import jax
import jax.numpy as jnp

from fuseplan.bench.machine import machine_columns
from fuseplan.bench.planning import csv_of, plan_table, time_plan, xla_compile_s
from fuseplan.console import Steps
from fuseplan.settings import make_options
from fuseplan.support.format import columns

SHAPES = (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 48), "float32"))


def f(x, w):
    return jax.nn.softmax(jnp.tanh(x @ w))


def row(with_xla=False, planner="solver"):
    return time_plan("f", f, SHAPES, make_options("test", planner), with_xla)


def test_xla_compiles_the_same_function_again():
    """For each device, in one process."""
    seconds = [xla_compile_s("f", f, SHAPES, Steps()) for _ in range(3)]
    assert min(seconds) > max(seconds) / 50, "none comes from a cache"


def test_counts_and_seconds():
    timing = row()
    assert timing.workload == "f"
    assert timing.device == "test"
    assert timing.nodes == timing.equations > 5
    assert timing.components >= timing.distinct_components >= 1
    assert timing.candidates >= timing.nodes
    assert timing.status == "OPTIMAL"
    assert timing.gap == 0.0
    assert timing.xla_compile_s is None
    stages = timing.trace_s + timing.lower_s + timing.enumerate_s + timing.solve_s + timing.check_s
    assert 0 < stages <= timing.total_s
    assert stages > timing.total_s / 2, "a stage is missing from the columns"


def test_xla_is_timed_where_asked():
    assert row(with_xla=True).xla_compile_s > 0


def test_a_heuristic_has_no_gap():
    timing = row(planner="greedy")
    assert timing.gap is None
    assert timing.enumerate_s > 0


def test_csv_has_a_column_for_each_field():
    rows = [row(), row(planner="unfused")]
    records = list(csv.DictReader(io.StringIO(csv_of([asdict(row) | machine_columns() for row in rows]))))
    assert [r["planner"] for r in records] == ["solver", "unfused"]
    assert records[0].keys() == asdict(rows[0]).keys() | machine_columns().keys()
    assert all(records[0][name] for name in ("cpu", "cores", "fuseplan", "jax", "date"))
    assert float(records[0]["total_s"]) == rows[0].total_s
    assert records[1]["gap"] == ""
    assert csv_of([]).strip() == ""


def test_tables_fit_80_columns():
    for head, lines, right in plan_table([row(with_xla=True), row(planner="unfused")]):
        assert all(len(line) == len(head) for line in lines)
        assert max(map(len, columns([head, *lines], right))) <= 80
