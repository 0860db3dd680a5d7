"""``experiments.compiled`` keeps what it knows, loses one kernel where the compiler ends the process,
and sums up cycles."""

from __future__ import annotations

from dataclasses import asdict, replace

import pandas as pd
import pytest

from experiments import compiled, compiled_processes
from experiments.compiled_processes import Died, Work, all_rows
from experiments.compiled_rows import NOT_ASKED, Row, compiler_versions, kept_rows, records
from experiments.compiled_tables import cycles_csv, cycles_table, summary
from fuseplan.bench.planning import csv_of

A, B = ("a", "tpu_v5e", "float32"), ("b", "tpu_v5e", "bfloat16")
VERSIONS = compiler_versions("tpu")


def row(task, k, kinds=3, **found):
    return Row(
        *task, k, kinds, 1, f"kernel_{k}", 2, "8/8p", **{"compiled": True, "versions": VERSIONS} | found
    )


@pytest.fixture
def children(monkeypatch):
    """Processes of three kernels a task, which die as ``deaths`` say: a task and kernel, and at what. What
    each was asked to do is kept."""
    asked = []

    def received(deaths, work):
        asked.append(work)
        for task, first in work.tasks:
            for k in range(first, 3):
                died_at = deaths.get((task, k)) if work.with_cycles else None
                if died_at == "planning":
                    yield Died("planning failed")
                    return
                yield row(task, k, compiled=False), False
                if died_at == "ours" or (died_at == "ours in VMEM" and not work.in_hbm):
                    yield Died("ours")
                    return
                if died_at == "xla":
                    yield (
                        row(task, k, cycles=7, no_cycles="of XLA's own: the compiler ended the process"),
                        False,
                    )
                    yield Died("the compiler ended the process: no")
                    return
                yield row(task, k, cycles=7 if work.with_cycles else None, in_hbm=work.in_hbm), True
                if work.only_one:
                    return
            yield None

    def start(deaths):
        monkeypatch.setattr(compiled_processes, "_received", lambda work: received(deaths, work))
        return asked

    return start


def test_a_kernel_that_ends_the_process_is_the_only_one_lost(children):
    asked = children({(A, 1): "ours", (B, 0): "xla"})
    rows = [r for r in all_rows(Work(((A, 0), (B, 0)), 1.0, True)) if r is not None]
    assert [(r.workload, r.kernel, r.cycles, r.no_cycles) for r in rows] == [
        ("a", 0, 7, ""), ("a", 1, None, "ours"), ("a", 2, 7, ""),
        ("b", 0, 7, "of XLA's own: the compiler ended the process: no"), ("b", 1, 7, ""), ("b", 2, 7, ""),
    ]  # fmt: skip
    # One process does all; two do a kernel alone, in HBM and without cycles; one does the rest of each.
    assert [(w.tasks[0], w.with_cycles, w.in_hbm) for w in asked] == [
        ((A, 0), True, False), ((A, 1), True, True), ((A, 1), False, False), ((A, 2), True, False),
        ((B, 0), True, True), ((B, 1), True, False),
    ]  # fmt: skip


def test_what_has_no_cycles_in_vmem_has_them_in_hbm(children):
    asked = children({(A, 1): "ours in VMEM"})
    rows = [r for r in all_rows(Work(((A, 0),), 1.0, True)) if r is not None]
    assert [(r.kernel, r.cycles, r.in_hbm) for r in rows] == [(0, 7, False), (1, 7, True), (2, 7, False)]
    assert len(asked) == 3


def test_a_plan_that_fails_is_told_and_the_next_goes_on(children):
    children({(A, 0): "planning"})
    rows = list(all_rows(Work(((A, 0), (B, 1)), 1.0, True)))
    assert [r and (r.workload, r.kernel, r.compiled, r.cause) for r in rows] == [
        ("a", -1, False, "planning failed"), None, ("b", 1, True, ""), ("b", 2, True, ""), None,
    ]  # fmt: skip


def test_what_takes_too_long_is_ended():
    (lost, _) = all_rows(Work(((("softmax", "tpu_v5e", "float32"), 0),), 1.0, True, limit_s=0.01))
    assert lost.cause == "not known after 0.01 s"


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [row(A, k, cycles=k, cycles_us=0.1 * k, serialized=k == 1, registers=None) for k in range(3)]
    path.write_text(csv_of([asdict(r) for r in rows]))
    assert kept_rows(path, {VERSIONS}, True) == {A: rows}
    assert kept_rows(path, {"jax 0.1"}, True) == {}
    assert kept_rows(tmp_path / "none.csv", {VERSIONS}, True) == {}


@pytest.mark.parametrize("cut", [2, 8, 40, 70])
def test_a_line_cut_short_is_none_and_so_is_what_follows_it(tmp_path, cut):
    path = tmp_path / "rows.csv"
    rows = [row(A, 0), row(A, 1), row(B, 0)]
    text = csv_of([asdict(r) for r in rows])
    path.write_text(text[:-cut])
    assert kept_rows(path, {VERSIONS}, True) == {A: rows[:2]}
    head, a0, a1, b0 = text.splitlines()
    path.write_text("\n".join([head, a0[:-cut], a1, b0]))
    assert kept_rows(path, {VERSIONS}, True) == {B: rows[2:]}


def test_cycles_that_were_not_asked_for_are_found_out(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [row(A, 0), replace(row(A, 1), no_cycles=NOT_ASKED)]
    path.write_text(csv_of(records({A: rows})))
    assert kept_rows(path, {VERSIONS}, False) == {A: rows}
    assert kept_rows(path, {VERSIONS}, True) == {A: rows[:1]}


def test_the_command_goes_on_where_it_stopped(children, tmp_path, capsys):
    asked = children({})
    out, cycles = tmp_path / "rows.csv", tmp_path / "cycles.csv"
    out.write_text(csv_of([asdict(row(A, k, cycles=1, xla_cycles=2, cycles_us=1.0, xla_cycles_us=2.0))
                           for k in (0, 1)]))  # fmt: skip
    arguments = ["--only", "a,b,c", "--without", "c", "--devices", "tpu_v5e", "--out", str(out)]
    arguments += ["--cycles-out", str(cycles)]
    out_before = out.read_text()
    assert compiled.main([*arguments, "--dtypes", "float32", "--kept"]) == 0
    assert not asked
    assert out.read_text() == out_before
    assert "tpu_v5e,float32" not in cycles.read_text()  # one of three kernels is not there
    assert compiled.main([*arguments, "--dtypes", "float32"]) == 0
    assert asked.pop().tasks == ((A, 2), (("b", *A[1:]), 0))
    assert [r.kernel for r in kept_rows(out, {VERSIONS}, True)[A]] == [0, 1, 2]
    assert "a,tpu_v5e,float32,3,2,2,4,0.5," in cycles.read_text()
    again = cycles.read_text()
    assert compiled.main([*arguments, "--dtypes", "float32"]) == 0
    assert not asked  # no process is started for nothing
    assert cycles.read_text() == again
    # Another dtype's rows stand beside them, though the table is of those asked for.
    assert compiled.main([*arguments, "--dtypes", "bfloat16"]) == 0
    assert len(kept_rows(out, {VERSIONS}, True)) == 4
    assert "float32" not in cycles.read_text()
    assert "3 of 3" not in capsys.readouterr().out


def test_cycles_are_of_all_kernels_together():
    rows = [
        row(A, 0, cycles=10, xla_cycles=20, cycles_us=1.0, xla_cycles_us=4.0),
        row(A, 1, cycles=30, xla_cycles=10, cycles_us=6.0, xla_cycles_us=1.0),
        row(A, 2, cycles=99),
        row(B, 0),
    ]
    frame = pd.DataFrame([asdict(replace(r, count=3 if r.kernel == 0 else 1)) for r in rows])
    a, b = cycles_table(frame).to_dict("records")
    assert (a["kernels"], a["estimated"]) == (5, 4)
    assert a["ratio"] == pytest.approx(60 / 70, abs=0.001)
    assert a["time_ratio"] == pytest.approx(9 / 13, abs=0.001)
    assert (b["kernels"], b["estimated"]) == (3, 0)
    assert b["ratio"] is None or b["ratio"] != b["ratio"]
    assert summary(frame).loc[0, "worst"] == 6.0
    *comments, head, _, _ = cycles_csv(frame, "the command").splitlines()
    assert all(line.startswith("# ") for line in comments)
    assert VERSIONS in comments[-1]
    assert comments[-2] == "# the command"
    assert head.startswith("workload,device,dtype,kernels,estimated,cycles,xla_cycles,ratio")
