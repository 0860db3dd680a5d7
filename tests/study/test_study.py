"""``fuseplan.study``: its rows, in one process and in several, and that it goes on where it stopped."""

import io
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel import get_device
from fuseplan import studies
from fuseplan.console import Board, _LiveBoard
from fuseplan.extend import register_rule, rules
from fuseplan.planners import unregister_planner
from fuseplan.search.heuristics import greedy
from fuseplan.studies import WorkerError, study
from fuseplan.support.atomic_file import OutputError
from fuseplan.support.errors import InvalidArgumentError, UnknownNameError
from fuseplan.support.row_file import OtherColumnsError
from fuseplan.targets import detect

ROOT = Path(__file__).resolve().parents[2]
X = jax.ShapeDtypeStruct((64, 32), "bfloat16")
KEY = ["workload", "device", "dtype", "planner"]


def own(x):
    return jnp.tanh(x) * 2


def keys(frame):
    return frame[KEY].to_numpy().tolist()


@pytest.fixture
def planned(monkeypatch):
    """The tasks that are planned in this process."""
    found, plan = [], studies._plan
    monkeypatch.setattr(studies, "_plan", lambda *a: found.append(a[1].planner) or plan(*a))
    return found


def test_a_row_for_each_workload_device_dtype_and_planner():
    frame = study(
        ["softmax", ("mine", own, [X])],
        ["h200", "tpu_v5e"],
        ["greedy", "solver"],
        dtypes=["float32", "bfloat16"],
    )
    both = list(itertools.product(("h200", "tpu_v5e"), ("greedy", "solver")))
    expected = [["softmax", d, t, p] for t in ("float32", "bfloat16") for d, p in both]
    expected += [["mine", d, "bfloat16", p] for d, p in both]  # its own dtype, once
    assert keys(frame) == expected
    one = fuseplan.compare(own, device="tpu_v5e", planners=["greedy", "solver"])(X)
    mine = frame[(frame.workload == "mine") & (frame.device == "tpu_v5e")]
    for name in ("kernels", "time_us", "unrewritten_us", "hbm_bytes", "peak_bytes", "status"):
        assert mine[name].tolist() == one[name].tolist()
    assert frame.versions[0] == studies._base_versions()
    assert mine.versions.iloc[0].startswith(f"{frame.versions[0]}; program ")


def test_a_program_that_cannot_be_planned_is_a_row_with_the_reason(monkeypatch):
    def broken(x):
        return x.nothing

    frame = study(["softmax", ("broken", broken, [X])], "h200", ["greedy", "solver"])
    assert frame.status.tolist() == ["FEASIBLE", "OPTIMAL", "NONE", "NONE"]
    row = frame.iloc[2]
    assert "AttributeError" in row.notes
    assert "nothing" in row.notes
    assert row[["operations", "kernels", "time_us"]].isna().all()


def test_rows_that_are_there_are_not_planned_again(tmp_path, planned):
    path = tmp_path / "rows.csv"
    asked = {"devices": ["h200"], "planners": ["greedy", "solver"], "path": path}
    first = study(["softmax", "mlp"], **asked)
    assert len(planned) == 4
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # as if the machine had stopped while it wrote
    again = study(["softmax", "mlp"], **asked)
    assert len(planned) == 5
    kept = [name for name in first.columns if name != "planning_s"]
    assert again[kept].equals(first[kept])
    more = study(["mlp", "rope"], **asked)
    assert len(planned) == 7
    assert more.workload.tolist() == ["mlp", "mlp", "rope", "rope"]
    assert len(fuseplan.read_frame(path)) == 6, "rows of workloads that are not asked for stay"


def test_rows_are_planned_again_when_what_they_depend_on_has_changed(tmp_path, planned, monkeypatch):
    path = tmp_path / "rows.csv"
    h200 = get_device("h200")
    slower = replace(h200, hbm_bytes_per_s=h200.hbm_bytes_per_s // 2)

    def times(**changed):
        before = len(planned)
        study(
            [("mine", changed.pop("f", own), [X]), "softmax"], [changed.pop("device", h200)], ["greedy"],
            path=path, **changed,
        )  # fmt: skip
        assert len(fuseplan.read_frame(path)) == 2
        return len(planned) - before

    assert times() == 2
    assert times() == 0
    assert times(f=lambda x: jnp.tanh(x) * 3) == 1, "another program of that name"
    assert times(f=own) == 1
    assert times(device=slower) == 2
    assert times(device=slower) == 0
    assert times(deadline_s=7.0) == 2
    assert times(features=fuseplan.Features(rewrites=False)) == 2
    with jax.default_matmul_precision("highest"):
        assert times() == 2
        assert times() == 0
    with jax.enable_x64(True):
        assert times() == 2
        assert times() == 0
    assert times() == 2
    monkeypatch.setattr(studies, "_base_versions", lambda: "fuseplan 99")
    assert times() == 2


def test_rows_of_this_machine_are_those_of_its_figures(tmp_path, planned, monkeypatch):
    path, cpu = tmp_path / "rows.csv", detect.local_cpu()

    def times(device, figures):
        before = len(planned)
        monkeypatch.setattr(detect, "local_cpu", lambda: figures)
        study("softmax", device, "unfused", path=path)
        return len(planned) - before

    assert times("cpu", cpu) == 1
    assert times(None, cpu) == 0
    assert times(cpu, cpu) == 0
    assert times("cpu", replace(cpu, sources=())) == 0, "the date of a measurement"
    calibrated = replace(cpu, hbm_bytes_per_s=cpu.hbm_bytes_per_s // 2)
    assert times("cpu", calibrated) == 1
    assert times("cpu", calibrated) == 0


def test_the_name_of_a_known_device_tells_its_figures():
    for name in ("h200", "h200:mosaic_gpu", "tpu_v5e"):
        assert studies._is_known(get_device(name))
    h200 = get_device("h200")
    for own_device in (
        replace(h200, name="mine"),
        replace(h200, launch_ps=5),
        replace(h200, backend="mosaic_gpu"),
        replace(h200, name="h200:mine"),
    ):
        assert not studies._is_known(own_device)


class Slower(fuseplan.CostModel):
    """HBM at a multiple of its time."""

    def cost(self, graph, kernel, device, estimated):
        return replace(estimated, memory_ps=self.factor * estimated.memory_ps)


@dataclass(frozen=True)
class Field(Slower):
    factor: int


@dataclass(frozen=True, slots=True)
class Slotted(Slower):
    factor: int


class Attribute(Slower):
    def __init__(self, factor):
        self.factor = factor


def closed_over(factor):
    class Around(fuseplan.CostModel):
        def cost(self, graph, kernel, device, estimated):
            return replace(estimated, memory_ps=factor * estimated.memory_ps)

    return Around()


def made_of_a_class(factor):
    return type("Made", (Slower,), {"factor": factor})()


@pytest.mark.parametrize("model", [Field, Slotted, Attribute, closed_over, made_of_a_class])
def test_rows_are_those_of_a_cost_model_of_this_state(tmp_path, planned, model):
    path = tmp_path / "rows.csv"

    def time_us(factor):
        asked = {"devices": "h200", "planners": "unfused", "path": path, "cost_model": model(factor)}
        return study("softmax", **asked).time_us[0]

    times = [time_us(factor) for factor in (1, 2, 5)]
    assert times == sorted(set(times))
    assert len(planned) == 3
    assert time_us(5) == times[2]
    assert len(planned) == 3, "a model of the same state"


def test_rows_of_a_cost_model_whose_state_cannot_be_told_are_never_continued(tmp_path, planned):
    @dataclass(frozen=True)
    class Called(fuseplan.CostModel):
        factor: Callable[[], int]

        def cost(self, graph, kernel, device, estimated):
            return replace(estimated, memory_ps=self.factor() * estimated.memory_ps)

    for _ in range(2):
        study("softmax", "h200", "unfused", path=tmp_path / "rows.csv", cost_model=Called(lambda: 2))
    assert len(planned) == 2


@pytest.mark.slow
def test_several_processes_find_the_same_rows(tmp_path):
    constant = jnp.arange(32.0)
    workloads = [
        "softmax",
        ("mine", lambda x: jnp.tanh(x) * constant, [X]),  # no other process can import it
        ("callback", lambda x: jax.pure_callback(lambda y: y, X, x) * 2, [X]),  # nor read it from a file
        ("broken", lambda x: x.nothing, [X]),
    ]
    asked = (workloads, ["h200", "tpu_v5e"], ["unfused", "greedy", "solver"])
    alone = study(*asked)
    together = study(*asked, processes=2, path=tmp_path / "rows.csv")
    kept = [name for name in alone.columns if name != "planning_s"]
    assert together[kept].equals(alone[kept])
    written = fuseplan.read_frame(tmp_path / "rows.csv")
    assert sorted(keys(written)) == sorted(keys(together))


@pytest.mark.slow
def test_planners_that_other_processes_lack_plan_here(planned):
    fuseplan.register_planner("mine", greedy)
    try:
        frame = study(["softmax", "rope"], "h200", ["mine", "greedy"], processes=2)
    finally:
        unregister_planner("mine")
    assert planned == ["mine", "mine"], "the others are planned elsewhere"
    assert frame.status.tolist() == ["FEASIBLE"] * 4


@pytest.mark.slow
def test_programs_are_planned_here_if_other_processes_lack_a_rule(planned):
    before = rules()["tanh"]
    register_rule("tanh", replace(before))
    try:
        study(["softmax", "rope"], "h200", "greedy", processes=2)
    finally:
        register_rule("tanh", before)
    assert planned == ["greedy"] * 2
    study(["softmax", "rope"], "h200", "greedy", processes=2)
    assert len(planned) == 2, "fuseplan's own rule is back"


@pytest.mark.slow
def test_a_process_that_dies_costs_one_row(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text(
        "import os, signal\ndef program():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.chdir(tmp_path)
    lethal = studies._Program("deadly.py:program", lambda _: None, True, False, False)
    known = studies._program
    monkeypatch.setattr(studies, "_program", lambda w: lethal if w == "deadly.py:program" else known(w))
    path = tmp_path / "rows.csv"
    frame = study(["deadly.py:program", "softmax", "rope"], "h200", ["greedy"], processes=2, path=path)
    assert frame.status.tolist() == ["NONE", "FEASIBLE", "FEASIBLE"]
    assert f"exit code {-signal.SIGKILL}" in frame.notes[0]
    written = fuseplan.read_frame(path).workload
    assert sorted(written) == ["rope", "softmax"], "the next study tries the other one again"


@pytest.mark.slow
def test_ctrl_c_is_for_the_process_that_started_the_study(tmp_path, monkeypatch):
    """A terminal sends it to all processes, which may end before the first one has told them to."""
    (tmp_path / "patient.py").write_text(
        "import os, time, jax\n"
        "def program():\n"
        "    open('running', 'w').close()\n"
        "    while not os.path.exists('sent'):\n"
        "        time.sleep(0.05)\n"
        "    return jax.nn.relu, (jax.ShapeDtypeStruct((8,), 'float32'),)\n"
    )
    monkeypatch.chdir(tmp_path)
    patient = studies._Program("patient.py:program", lambda _: None, True, False, False)
    known = studies._program
    monkeypatch.setattr(studies, "_program", lambda w: patient if w == "patient.py:program" else known(w))

    def send():
        while not Path("running").exists():
            time.sleep(0.05)
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGINT)
        Path("sent").touch()

    sender = threading.Thread(target=send)
    sender.start()
    aside = ("callback", lambda x: jax.pure_callback(lambda y: y, X, x) * 2, [X])  # there is one worker
    frame = study(["patient.py:program", aside], "h200", ["greedy"], processes=2)
    sender.join()
    assert frame.status.tolist() == ["FEASIBLE"] * 2


@pytest.mark.slow
def test_all_processes_are_known_to_end_before_one_does(monkeypatch):
    made, ended, end = [], [], studies._Worker.end

    def looked(worker):
        ended.append([other._ended for other in made])
        end(worker)

    init = studies._Worker.__init__
    monkeypatch.setattr(studies._Worker, "__init__", lambda w, *a: made.append(w) or init(w, *a))
    monkeypatch.setattr(studies._Worker, "end", looked)
    study(["softmax", "rope"], "h200", ["greedy"], processes=2)
    assert ended == [[True, True]] * 2


@pytest.mark.slow
def test_other_processes_have_the_settings_of_this_thread(tmp_path, monkeypatch):
    (tmp_path / "wide.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def program():\n"
        "    f = lambda x: jnp.cumsum(x.astype(float)) * 2\n"
        "    return f, (jax.ShapeDtypeStruct((4096,), 'float32'),)\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = (["wide.py:program", ("mine", own, [X])], "h200", ["unfused", "greedy"])
    with jax.enable_x64(True):
        alone = study(*asked)
        together = study(*asked, processes=2)
    kept = [name for name in alone.columns if name != "planning_s"]
    assert together[kept].equals(alone[kept])
    assert alone.hbm_bytes[0] > study(*asked).hbm_bytes[0]


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fuseplan\n"
        "fuseplan.study(['softmax', 'rope'], 'h200', ['greedy'], processes=2, path='rows.csv')\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert done.returncode == 1
    assert 'below `if __name__ == "__main__":`' in done.stderr
    assert not (tmp_path / "rows.csv").exists(), "a row says that the program cannot be planned"


@pytest.mark.slow
def test_an_interrupted_study_keeps_its_rows_and_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fuseplan, multiprocessing, os, signal, threading, time\n"
        "def stop():\n"
        "    while not os.path.exists('rows.csv'):\n"
        "        time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=stop, daemon=True).start()\n"
        "    names = ['softmax', 'rope', 'gpt2_block_grad', 'gpt2_train_4']\n"
        "    try:\n"
        "        fuseplan.study(names, 'h200', ['greedy', 'solver'], processes=2, path='rows.csv')\n"
        "    except KeyboardInterrupt:\n"
        "        print('stopped', len(multiprocessing.active_children()))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=env, check=True
    )
    assert done.stdout == "stopped 0\n"
    assert 1 <= len(fuseplan.read_frame(tmp_path / "rows.csv")) < 8


@pytest.mark.parametrize("name", ["a\rb", "a\nb", "nul\0", "\x7f", "\udc80"])
def test_a_name_with_control_characters_is_refused(tmp_path, planned, name):
    path = tmp_path / "rows.csv"
    with pytest.raises(InvalidArgumentError, match="no control characters"):
        study(["softmax", (name, own, [X])], "h200", "greedy", path=path)
    assert planned == []
    assert not path.exists()


def test_one_named_tuple_is_one_workload():
    assert study(("mine", own, (X,)), "h200", "greedy").workload.tolist() == ["mine"]


def test_two_studies_write_one_file(tmp_path, planned, monkeypatch):
    path, plan = tmp_path / "rows.csv", studies._plan

    def meanwhile(*asked):
        monkeypatch.setattr(studies, "_plan", plan)
        study(["rope", "mlp"], "h200", "greedy", path=path)
        return plan(*asked)

    study("mlp", "h200", "unfused", path=path)
    monkeypatch.setattr(studies, "_plan", meanwhile)
    study(["softmax", "rmsnorm"], "h200", "greedy", path=path)
    names = sorted(fuseplan.read_frame(path).workload)
    assert names == ["mlp", "mlp", "rmsnorm", "rope", "softmax"]


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"workloads": []}, InvalidArgumentError, "workloads expects one or more"),
        ({"workloads": ["softmx"]}, UnknownNameError, "did you mean 'softmax'"),
        ({"workloads": [own]}, InvalidArgumentError, r"a tuple \(name, f, args\)"),
        ({"workloads": [("mine", own)]}, InvalidArgumentError, r"a tuple \(name, f, args\)"),
        ({"workloads": ["softmax", "softmax"]}, InvalidArgumentError, "expected each row once"),
        ({"devices": ["h300"]}, UnknownNameError, "h300"),
        ({"devices": []}, InvalidArgumentError, "devices expects one or more"),
        ({"planners": ["greedi"]}, UnknownNameError, "greedi"),
        ({"planners": []}, InvalidArgumentError, "planners expects one or more"),
        ({"deadline_s": -1}, InvalidArgumentError, "deadline_s"),
        ({"processes": 0}, InvalidArgumentError, "processes expects a number of at least 1"),
        ({"path": "missing/rows.csv"}, OutputError, "there is no folder"),
        ({"workloads": 5}, InvalidArgumentError, "workloads expects one or more in a list, got 5"),
        ({"workloads": None}, InvalidArgumentError, "workloads expects one or more in a list, got None"),
        ({"planners": 7}, InvalidArgumentError, "planners expects one or more in a list, got 7"),
        ({"path": 5}, InvalidArgumentError, "expected the path of a file to write, got 5"),
        ({"path": "a\0b.csv"}, OutputError, "no NUL character"),
        ({"path": "binary.csv"}, InvalidArgumentError, "expected a CSV file in UTF-8"),
        ({"path": "other.csv"}, OtherColumnsError, "has other columns"),
    ],
)
def test_wrong_arguments_cost_nothing(tmp_path, monkeypatch, planned, asked, error, message):
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\0")
    with pytest.raises(error, match=message):
        study(**{"workloads": ["softmax"], "devices": ["h200"], "planners": ["greedy"]} | asked)
    assert planned == []
    assert Path("other.csv").read_text() == "a,b\n1,2\n"
    assert Path("binary.csv").read_bytes() == b"\xff\xfe\0"


def test_a_terminal_shows_what_is_planned_its_stage_and_the_time_left(monkeypatch):
    from rich.console import Console

    shown = _LiveBoard(2)
    monkeypatch.setattr(studies, "board", lambda total: _Entered(shown))
    seen, plan = [], studies._plan

    def look(lowered, options):
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(shown)
        seen.append(console.export_text())
        return plan(lowered, options)

    monkeypatch.setattr(studies, "_plan", look)
    study("softmax", "h200", ["greedy", "solver"])
    assert "softmax on h200: greedy" in seen[0]
    assert "0/2" in seen[0]
    assert "softmax on h200: solver" in seen[1]
    assert "1/2" in seen[1]
    assert "left" in seen[1]
    assert shown.lines == []


class _Entered:
    def __init__(self, board):
        self.board = board

    def __enter__(self):
        return self.board

    def __exit__(self, *_):
        return None


def test_a_board_has_a_line_for_each_running_step():
    board = Board()
    board.start(1, "softmax on h200: solver", lambda: "search, 13.5 µs, gap 3%")
    board.start(2, "mlp on h200: solver", lambda: "")
    assert board.lines == ["softmax on h200: solver  search, 13.5 µs, gap 3%", "mlp on h200: solver"]
    board.done(1)
    assert board.lines == ["mlp on h200: solver"]


def test_an_error_of_a_lane_ends_the_study(monkeypatch):
    def refuse(self):
        raise WorkerError("cannot start")

    monkeypatch.setattr(studies._Worker, "_started", refuse)
    before = threading.active_count()
    with pytest.raises(WorkerError, match="cannot start"):
        study(["softmax", "rope"], "h200", ["greedy"], processes=2)
    assert threading.active_count() <= before


def test_an_error_of_a_lane_is_told_before_the_tasks_of_this_process_are_done(monkeypatch):
    is_told, planned = threading.Event(), []

    def refuse(self):
        is_told.set()
        raise WorkerError("cannot start")

    def slow(lowered, options):
        planned.append(options)
        is_told.wait()
        time.sleep(0.2)
        return {"status": "NONE"}

    monkeypatch.setattr(studies._Worker, "_started", refuse)
    monkeypatch.setattr(studies, "_plan", slow)
    fuseplan.register_planner("mine", greedy)
    with pytest.raises(WorkerError, match="cannot start"):
        study(["softmax", "rope", "mlp"], "h200", ["mine", "greedy"], processes=2)
    assert len(planned) <= 1


def test_reasons_are_short_enough_for_a_csv_file(tmp_path):
    def broken(x):
        raise ValueError("no " * 100_000)

    path = tmp_path / "rows.csv"
    for _ in range(2):
        frame = study(("broken", broken, [X]), "h200", "greedy", path=path)
        assert frame.notes[0].startswith("ValueError: no no")
        assert len(frame.notes[0]) <= 300
