"""The experiment that compares all planners: its rows, that it goes on where it stopped, its tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import fuseplan
from experiments import greedy_vs_solver
from experiments.greedy_vs_solver import ZOO, main
from experiments.planner_tables import frame_of, short_table, tables
from fuseplan import studies
from fuseplan.bench import RowFile
from fuseplan.report.frames import study_frame
from fuseplan.studies import StudyRow
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python


@dataclass(frozen=True)
class Made:
    name: str
    count: int
    share: float | None
    good: bool
    version: str


def test_rows_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "rows.csv"
    rows = [Made("a, b", 1, 0.1, True, "1"), Made('"', -2, None, False, "1")]
    file = RowFile(path, Made)
    for row in rows:
        file.add(row)
    assert RowFile(path, Made).rows == rows


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_line_that_was_cut_short_is_none(tmp_path, cut):
    path = tmp_path / "rows.csv"
    file = RowFile(path, Made)
    file.add(Made("a", 1, 0.5, True, "1"))
    file.add(Made("b", 2, 0.5, True, "1"))
    path.write_text(path.read_text()[:-cut])
    again = RowFile(path, Made)
    assert [row.name for row in again.rows] == (["a", "b"] if cut == 1 else ["a"])
    again.add(Made("c", 3, None, False, "1"))
    assert [row.name for row in RowFile(path, Made).rows][-1] == "c"
    assert len(path.read_text().splitlines()) == len(again.rows) + 1


def test_rows_of_other_versions_go_with_the_first_new_one(tmp_path):
    path = tmp_path / "rows.csv"
    RowFile(path, Made).add(Made("old", 1, None, True, "1"))
    file = RowFile(path, Made, lambda row: row.version == "2")
    assert file.rows == []
    assert "old" in path.read_text()
    file.add(Made("new", 1, None, True, "2"))
    assert "old" not in path.read_text()


def test_a_file_of_something_else_is_left_as_it_is(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match="has other columns than name, count"):
        RowFile(path, Made)
    assert path.read_text() == "x,y\n1,2\n"


ASKED = (
    "--workloads",
    "softmax,lorenz_96",
    "--devices",
    "h200,tpu_v5e",
    "--planners",
    "unfused,greedy,solver",
)


def run(path: Path, *more: str) -> int:
    return main([*ASKED, "--out", str(path), *more])


@pytest.mark.slow
def test_a_row_a_plan_and_what_is_there_is_not_planned_again(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results" / "rows.csv"
    assert run(path) == 0
    rows = RowFile(path, StudyRow).rows
    assert len(rows) == 12
    assert all(row.date and row.unrewritten_us >= row.time_us for row in rows)
    assert "h200, float32: 2 workloads" in capsys.readouterr().out
    text = path.with_suffix(".md").read_text()
    assert "- h200, float32: 2 of 2 that are proven: softmax, lorenz_96." in text
    assert path.with_suffix(".svg").read_text().startswith("<?xml")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:9])
    planned = []
    found = studies._plan
    monkeypatch.setattr(studies, "_plan", lambda *a: planned.append(a) or found(*a))
    assert run(path) == 0
    assert len(planned) == 1
    assert len(RowFile(path, StudyRow).rows) == 12


def test_what_cannot_be_planned_is_a_row_with_the_reason(tmp_path, monkeypatch):
    def refuse(program, options):
        if options.planner == "solver":
            raise KeyError("a bug")
        raise InvalidArgumentError("no compiler\nfor it")

    monkeypatch.setattr(studies, "compare_plan", refuse)
    path = tmp_path / "rows.csv"
    run(path)
    rows = RowFile(path, StudyRow).rows
    assert (rows[0].status, rows[0].time_us, rows[0].notes) == ("NONE", None, "no compiler for it")
    assert {row.notes for row in rows if row.planner == "solver"} == {"KeyError: 'a bug'"}
    assert (
        "- unfused on h200, 2 workloads (softmax …): no compiler for it"
        in path.with_suffix(".md").read_text()
    )


def test_ones_own_program_joins_the_study(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mymod.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def good():\n"
        "    return lambda x: jnp.tanh(x) * 2, (jax.ShapeDtypeStruct((64, 32), 'bfloat16'),)\n"
    )
    asked = ["--workloads", "mymod:good,softmax", "--devices", "h200", "--planners", "greedy,solver"]
    assert main([*asked, "--out", "rows.csv"]) == 0
    rows = RowFile(tmp_path / "rows.csv", StudyRow).rows
    assert [(row.workload, row.dtype) for row in rows[:2]] == [("mymod:good", "bfloat16")] * 2
    assert all(row.status in ("FEASIBLE", "OPTIMAL") for row in rows)
    assert "### h200, bfloat16" in (tmp_path / "rows.md").read_text()
    assert "4 rows in rows.csv" in capsys.readouterr().out


def test_wrong_names_cost_nothing(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    wrong = {
        "did you mean 'softmax'": ("--workloads", "softmx"),
        "h300": ("--devices", "h300"),
        "Did you mean 'greedy'": ("--planners", "greedi"),
        "is a folder": ("--out", str(tmp_path)),
    }
    for said, asked in wrong.items():
        with pytest.raises(SystemExit):
            run(path, *asked)
        assert said in capsys.readouterr().err
    assert not path.exists()


def rows_of(traced=(), **times):
    """Rows of the workloads ``a`` and ``b``; ``traced`` has the times as traced where they are others."""

    def row(workload, planner, time_us, traced_us):
        figures = (3, 2, time_us, traced_us, 10**6, 0, 0, "FEASIBLE")
        return StudyRow(workload, "h200", "float32", planner, *figures, date="today", versions="1")

    rows = [
        row(*known)
        for planner, both in times.items()
        for known in zip("ab", [planner] * 2, both, dict(traced).get(planner, both), strict=True)
    ]
    return study_frame([asdict(row) for row in rows])


def test_the_tables_of_known_times():
    traced = {"greedy": (8.0, 2.0), "solver": (9.0, 1.0)}
    rows = rows_of(traced, greedy=(4.0, 1.0), solver=(1.0, 1.0), inductor=(0.5, None))
    frame = frame_of(rows)
    assert frame.over_solver.tolist()[:5] == [4.0, 1.0, 1.0, 1.0, 0.5]
    assert frame.traced_over_solver.tolist()[:5] == [8.0, 2.0, 9.0, 1.0, 0.5]
    ((title, head, lines),) = short_table(rows)
    assert title == "h200, float32: 2 workloads"
    assert lines[0] == ["greedy", "2.00", "2.00", "4.00", "1 of 2", "4", "2", "0.0"]
    assert lines[1][:3] == ["solver", "3.00", "1.00"]
    assert len(head) == 8
    text = tables(rows, "command", "1", "today")
    assert "| a | h200 | float32 | inductor | 0.500 |" in text
    assert "| a | 4.00 (8.00) | 1.00 (9.00) | 0.50 |" in text
    assert "| b | 1.00 (2.00) | 1.00 | – |" in text


def test_the_zoo_is_large_and_known():
    assert len(ZOO) >= 25
    assert len(set(ZOO)) == len(ZOO)
    assert all(get_workload(name).name == name for name in ZOO)


def test_the_committed_results_have_no_plan_below_the_solvers_but_xlas_own():
    """The plans of other planners enter the solver's answer; XLA's real one does where the user asks."""
    frame = frame_of(fuseplan.read_frame(greedy_vs_solver.RESULTS))
    others = frame[~frame.planner.isin(["solver", "xla"])]
    assert len(others) >= 8 * len(ZOO) * frame.device.nunique()
    # The time of each kernel is rounded up to a picosecond, so that equal plans may differ by some.
    assert others[others.over_solver < 1 - 1e-8].empty
