"""``experiments.plan_differences``: two checkouts are planned, each from its own files, and compared."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from experiments.plan_differences import ROOT, differences

pytestmark = [pytest.mark.one_python, pytest.mark.slow]


def compared(other):
    command = [sys.executable, "-m", "experiments.plan_differences", str(other)]
    command += ["--workloads", "softmax,mlp", "--devices", "h200,cpu", "--planners", "solver"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout.splitlines()


def test_two_checkouts(tmp_path):
    other = tmp_path / "other"
    for package in ("fuseplan", "costmodel", "experiments"):
        shutil.copytree(ROOT / package, other / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert compared(other) == (0, ["0 of 4 plans differ"])
    devices = other / "costmodel" / "devices.py"
    text = devices.read_text()
    assert "launch_ps=" in text
    devices.write_text(text.replace("launch_ps=", "launch_ps=3 * "))
    code, lines = compared(other)
    assert (code, lines[-1]) == (1, "2 of 4 plans differ")
    assert lines[0].startswith("mlp h200 solver: ")
    assert "time_ps" in lines[0]


def test_which_facts_differ():
    key = ("softmax", "h200", "solver")
    one = {"time_ps": 1, "notes": ["a"], "status": "OPTIMAL"}
    assert not list(differences({key: one}, {key: dict(one)}))
    (line,) = differences({key: one}, {key: {**one, "time_ps": 2, "notes": []}})
    assert line == "softmax h200 solver: notes, time_ps 1 -> 2"
    (line,) = differences({key: one}, {})
    assert line == "softmax h200 solver: only in the other checkout"


def test_what_is_no_checkout_is_refused(tmp_path):
    command = [sys.executable, "-m", "experiments.plan_differences", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is no checkout" in done.stderr
