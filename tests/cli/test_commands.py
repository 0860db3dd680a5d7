"""The command line: in process through typer's runner, and as a process for its pipes."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from costmodel import calibrate
from fuseplan import Plan
from fuseplan.cli import app, bench, planning
from fuseplan.planners import planner_names
from fuseplan.report.comparison import Compared
from fuseplan.runtime.compare import compare_plan
from fuseplan.targets import calibrate as xla_calibrate

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).resolve().parents[2]


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def process(*args, cwd=ROOT, stdin=None):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", "fuseplan", *args],
        capture_output=True, text=True, cwd=cwd, env=env, input=stdin, check=False, timeout=300,
    )  # fmt: skip


COMMANDS = ("demo", "compare", "plan", "explain", "diff", "verify", "report", "workloads", "devices",
            "calibrate", "cache", "bench")  # fmt: skip


def test_help_lists_every_command():
    text = run("--help").output
    assert all(command in text for command in COMMANDS)
    assert run("bench", "--help").output
    assert "fuseplan" in run("--version").output


def test_options_are_spelled_the_same_everywhere():
    import typer.main

    group = typer.main.get_command(app)
    spelled = {}
    for command in ("compare", "plan", "explain", "report", "demo"):
        for param in group.commands[command].params:
            spelled.setdefault(param.name, set()).update(param.opts)
    for param in group.commands["bench"].commands["plan"].params:
        spelled.setdefault(param.name, set()).update(param.opts)
    assert all(len(opts) == 1 for opts in spelled.values()), spelled
    for option in ("device", "planner", "planners", "dtype", "out", "json"):
        assert spelled[option] == {f"--{option}"}


def test_compare_prints_a_row_for_each_planner_and_device():
    lines = run(
        "compare", "softmax", "--device", "test,tpu_v5e", "--planners", "unfused,solver"
    ).stdout.splitlines()
    assert lines[0] == "softmax on test, modelled (over unfused: speed-up)"
    assert "softmax on tpu_v5e, modelled (over unfused: speed-up)" in lines
    assert [line.split()[0] for line in lines[2:4]] == ["unfused", "solver"]
    assert "proven" in lines[3]
    assert max(map(len, lines)) <= 80


def test_compare_writes_json_and_csv(tmp_path):
    out = tmp_path / "plans.csv"
    result = run("compare", "softmax", "--device", "test", "--json", "--out", str(out))
    records = json.loads(result.stdout)
    assert [r["planner"] for r in records] == list(planner_names(of_graphs=True))
    assert records[0]["bound_us"] is None
    assert (records[-1]["planner"], records[-1]["status"]) == ("solver", "OPTIMAL")
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["planner"] for row in rows] == [r["planner"] for r in records]
    assert float(rows[3]["time_us"]) == records[3]["time_us"]


def test_plan_shows_kernels_summary_and_refusals():
    text = run("plan", "gpt2_block", "--device", "test", "--small").stdout
    assert "solver plan for test" in text
    assert "dot_general" in text
    assert "unfused" in text
    assert "refused fusions" in text
    assert max(map(len, text.splitlines()[:20])) <= 80
    refused = text.partition("refused fusions")[2].splitlines()
    assert max(map(len, refused)) <= 80
    assert any(line.startswith("    ") for line in refused), "a refusal is longer than a line"


def test_plan_json_is_the_plan(tmp_path):
    out = tmp_path / "plan.json"
    text = run("plan", "softmax", "--device", "test", "--json", "--out", str(out)).stdout
    assert Plan.from_json(text) == Plan.from_json(out.read_text())
    assert Plan.from_json(text).planner == "solver"


def test_dtype_reaches_the_workload():
    text = run("plan", "softmax", "--device", "test", "--dtype", "bfloat16", "--planner", "greedy").stdout
    assert "bf16[4096,1024]" in text
    assert "greedy plan" in text


def test_plan_shows_what_xla_does():
    text = run("plan", "softmax", "--device", "cpu", "--small", "--planner", "xla").stdout
    assert "xla plan for cpu" in text
    assert "kernels are matched with operations" in text


def test_explain_says_why():
    text = run("explain", "softmax", "reduce_max, sub", "--device", "test").stdout
    assert text.startswith("n0 reduce_max")
    assert "share kernel 0" in text
    assert "Pass a node's id" in run("explain", "mlp", "dot_general,0", "--device", "test", code=2).stderr


def test_report_writes_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("report", "softmax", "--device", "test,h200").stdout == "wrote fuseplan-softmax.html\n"
    html = (tmp_path / "fuseplan-softmax.html").read_text()
    assert "softmax on h200" in html
    document = json.loads(run("report", "softmax", "--device", "test", "--out", "p.html", "--json").stdout)
    assert document == {"page": "p.html"}


def test_a_report_leaves_out_devices_without_a_plan(tmp_path, monkeypatch):
    def plan_or_not(lowered, options):
        if options.device.name == "tpu_v5e":
            return Compared(options.planner, None, reason="its compiler is not installed")
        return compare_plan(lowered, options)

    monkeypatch.setattr(planning, "compare_plan", plan_or_not)
    page = tmp_path / "p.html"
    command = ("report", "softmax", "--small", "--planners", "greedy", "--out", str(page), "--device")
    result = run(*command, "tpu_v5e,h200")
    assert result.stdout == f"wrote {page}\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("left out: tpu_v5e: ")
    assert line.endswith("greedy: its compiler is not installed")
    assert "softmax on h200" in page.read_text()
    page.unlink()
    assert "its compiler is not installed" in run(*command, "tpu_v5e", code=2).stderr
    assert not page.exists()


@pytest.fixture
def quick_cpu(monkeypatch, tmp_path):
    """A measured CPU without the seconds it takes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure", lambda limit_s: calibrate.described_cpu())
    monkeypatch.setattr(xla_calibrate, "measure", lambda limit_s: calibrate.described_cpu())
    return tmp_path


def test_devices_lists_all_with_their_sources(quick_cpu):
    lines = run("devices").stdout.splitlines()
    assert {"h200", "tpu_v5e", "cpu"} <= {line.split()[0] for line in lines}
    assert all(len(line) <= 80 for line in lines)
    records = json.loads(run("devices", "--json").stdout)
    assert "datasheet" in next(r for r in records if r["name"] == "h200")["sources"]["hbm_bytes_per_s"]


def test_calibrate_measures_anew(quick_cpu):
    document = json.loads(run("calibrate", "--json", code=1).stdout)
    assert Path(document["file"]).is_file()
    assert document["hbm_bytes_per_s"] == calibrate.DEFAULTS["hbm_bytes_per_s"]
    assert document["step_ps"] == calibrate.described_cpu().step_ps
    assert document["assumed"] == list(calibrate.FIGURES)
    assert document["measured"] == document["kept"] == []
    text = run("calibrate", code=1).stdout
    assert re.search(r"^hbm_bytes_per_s +20.0 G/s +assumed$", text, re.MULTILINE)
    assert re.search(r"^launch_ps +0.40 µs +assumed$", text, re.MULTILINE)
    assert not re.search(r"G/s +measured", text)


def test_assumed_figures_are_marked_wherever_a_device_or_a_plan_is_shown(quick_cpu, tmp_path):
    run("devices")
    cpu = next(line for line in run("devices").stdout.splitlines() if line.startswith("cpu "))
    assert cpu.count("?") == 5
    records = {r["name"]: r for r in json.loads(run("devices", "--json").stdout)}
    assert records["cpu"]["assumed"] == ", ".join(described_names())
    assert records["h200"]["assumed"] == ""
    assert "vector_flops_per_s" in records["tpu_v5e"]["assumed"]
    note = "assumed of cpu, not measured or published: hbm_bytes_per_s"
    for command in (("plan", "softmax"), ("compare", "softmax", "--planners", "greedy")):
        text = " ".join(run(*command, "--device", "cpu", "--small").stdout.split())
        assert note in text
        assert "`fuseplan calibrate` measures this CPU" in text
        assert "assumed of" not in run(*command, "--device", "h200", "--small").stdout
    frame = json.loads(
        run("compare", "softmax", "--device", "cpu,h200", "--planners", "greedy", "--json").stdout
    )
    assert [row["assumed"] for row in frame] == [", ".join(described_names()), ""]
    page = tmp_path / "page.html"
    run("report", "softmax", "--device", "cpu", "--small", "--out", str(page))
    assert note in page.read_text()


def described_names():
    cpu = calibrate.described_cpu()
    return [name for name, text in cpu.sources if text.startswith("assumed")]


def test_bench_plan(tmp_path):
    out = tmp_path / "bench.csv"
    args = ("bench", "plan", "--workloads", "softmax,mlp", "--small", "--device", "test", "--no-xla")
    text = run(*args, "--out", str(out)).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert [row["workload"] for row in csv.DictReader(out.read_text().splitlines())] == ["softmax", "mlp"]
    records = json.loads(run(*args, "--json").stdout)
    assert records[0]["xla_compile_s"] is None
    assert records[1]["status"] == "OPTIMAL"


def test_bench_plan_writes_each_row_at_once(tmp_path, monkeypatch):
    out = tmp_path / "bench.csv"
    time_plan = bench.time_plan

    def interrupted(name, *others):
        if name == "mlp":
            raise KeyboardInterrupt
        return time_plan(name, *others)

    monkeypatch.setattr(bench, "time_plan", interrupted)
    args = ("bench", "plan", "--workloads", "softmax,mlp", "--small", "--device", "test", "--no-xla")
    CliRunner().invoke(app, [*args, "--out", str(out)])
    assert [row["workload"] for row in csv.DictReader(out.read_text().splitlines())] == ["softmax"]


# --- what a user gets wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("plan", "softmx"), "did you mean 'softmax'?"),
        (("plan", "softmax", "--device", "h2000"), "Did you mean 'h200'?"),
        (("plan", "softmax", "--planner", "solvr"), "Did you mean 'solver'?"),
        (("compare", "softmax", "--device", "test", "--planners", "solver,solvr"), "no planner is called"),
        (("compare", "softmax", "--device", ","), "--device expects one or more names"),
        (("compare", "softmax", "--planners", ""), "--planners expects one or more names"),
        (("plan", "softmax", "--dtype", "int32"), "floating-point dtype"),
        (("plan", "softmax", "--dtype", "float99"), "floating-point dtype"),
        (("explain", "softmax", "1", "--device", "test"), "expected two operations as A,B"),
        (("explain", "softmax", "1,999", "--device", "test"), "expected a node from 0"),
        (("explain", "none.json", "0,1"), "cannot read none.json"),
        (("plan", "nowhere.at_all:f"), "cannot be imported: No module named 'nowhere'"),
        (("plan", ":"), "cannot be imported"),
        (("plan", "os:"), "there is none"),
        (("plan", "os:nothing"), "expected a function 'nothing' in module 'os'"),
        (("plan", "os.path:sep"), "there is none"),
        (("plan", "os:getcwd", "--device", "test"), "must return (f, args)"),
        (("plan", "os:getcwd", "--small"), "are for named workloads"),
        (("bench", "plan", "--workloads", "nope"), "no workload is named 'nope'"),
        (("bench", "solver", "--json", "--csv"), "--csv and --json: expected one of the two"),
        (("devices", "--toml", "h200", "--json"), "--toml h200 and --json: expected one of the two"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(args, message):
    result = run(*args, code=2)
    assert result.stdout == ""
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("args", [("plan", "folder:f"), ("compare", "softmax", "--planner-module", "folder")])
def test_a_folder_is_told_to_be_one(tmp_path, monkeypatch, args):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text("def f():\n    return (lambda x: x), (1.0,)\n")
    monkeypatch.chdir(tmp_path)
    assert "'folder' is a folder" in run(*args, "--device", "test", code=2).stderr


@pytest.mark.parametrize(
    "args", [("plan",), ("plan", "softmax", "--deadline", "-1"), ("nope",), ("plan", "--jsn")]
)
def test_usage_errors_are_exit_code_2_too(args):
    assert "Usage" in run(*args, code=2).stderr


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "compare softmax --device test",
        "plan softmax --device test",
        "report softmax --device test",
        "bench plan --device test",
        "bench solver --device test",
        "bench cpu softmax",
    ],
)
def test_an_unwritable_out_is_told_before_the_work(command, tmp_path):
    result = run(*command.split(), "--out", str(tmp_path / "no" / "file"), code=2)
    assert "there is no folder" in result.stderr
    assert list(tmp_path.iterdir()) == []


# --- as a process ----------------------------------------------------------------------------


def test_a_pipe_gets_plain_text_and_nothing_on_stderr():
    result = process("compare", "softmax", "--device", "test")
    assert result.returncode == 0
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    assert not set(result.stdout) & set("│─╭╰━")
    assert result.stdout.splitlines()[1].split()[0] == "planner"


@pytest.mark.slow
def test_json_is_alone_on_stdout_and_errors_on_stderr(tmp_path):
    result = process("plan", "softmax", "--device", "test", "--json")
    assert json.loads(result.stdout)["format"] == "fuseplan.plan"
    failed = process("plan", "softmax", "--device", "none")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("fuseplan: unknown device 'none'")


@pytest.mark.slow
def test_a_workload_of_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "class Maker:\n"
        "    @staticmethod\n"
        "    def make():\n"
        "        return (lambda x: jnp.tanh(x).sum(0)), [jnp.ones((8, 16))]\n"
    )
    result = process("plan", "mine:Maker.make", "--device", "test", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "reduce_sum" in result.stdout
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ""] == ["mine.py"]


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m fuseplan plan softmax --device test | head -n 1"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False, timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert result.stdout.startswith("solver plan for test")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_an_error_of_the_users_function_is_shown_whole(tmp_path):
    (tmp_path / "mine.py").write_text("def make():\n    return (lambda x: 1 / 0), (1.0,)\n")
    result = process("plan", "mine:make", "--device", "test", cwd=tmp_path)
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert "mine.py" in result.stderr
