"""Run JAX's own tests with ``fuseplan.jit`` in the place of ``jax.jit``.

    python -m experiments.jax_tests path/to/jax/tests api_test pjit_test

The tests are those of a checkout of JAX at the installed version (``git clone --branch jax-v0.10.2``), and
need ``absl-py`` and ``hypothesis``. Each file runs twice, in processes of its own: with JAX's ``jit``, and
with fuseplan's where a test calls ``jax.jit``. The table counts the tests of each file that pass with the
first and fail with the second, whose names follow. ``--out`` adds the rows to a CSV file, each when its file
is through.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fuseplan.bench import RowFile, machine_columns, print_table

FILES = (
    "api_test", "custom_api_test", "lax_control_flow_test", "pjit_test", "nn_test", "random_test",
    "batching_test", "python_callback_test", "export_test", "lax_scipy_test", "array_test", "jax_jit_test",
    "lax_numpy_test", "lax_numpy_operators_test", "lax_numpy_reducers_test",
)  # fmt: skip
_SIDE, _FOLDER = "FUSEPLAN_JAX_TESTS_SIDE", "FUSEPLAN_JAX_TESTS_FOLDER"
_CASES = "10"
"""Of each parameterised test, JAX's tests draw so many cases."""


@dataclass(frozen=True, slots=True)
class Row:
    """The tests of one file: how many there are, fail with ``jax.jit``, and fail with fuseplan's alone."""

    file: str
    tests: int
    fail_with_jax: int
    fail_alone: int
    fuseplan: str
    jax: str
    python: str
    date: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; whether a test fails with fuseplan's ``jit`` alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder tests of a checkout of JAX")
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE", help="such as api_test")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="add the rows to this file")
    chosen = parser.parse_args(arguments)
    rows, names = [], []
    for file in chosen.files:
        ours, theirs = (run(chosen.folder.resolve(), file, side) for side in ("fuseplan", "jax"))
        alone = sorted(name for name, passed in ours.items() if not passed and theirs.get(name, False))
        rows.append((file, f"{len(theirs):,}", f"{sum(not p for p in theirs.values()):,}", f"{len(alone):,}"))
        names += [f"{file}::{name}" for name in alone]
        if chosen.out:
            plain = sum(not passed for passed in theirs.values())
            machine = machine_columns()
            versions = {name: str(machine[name]) for name in ("fuseplan", "jax", "python", "date")}
            _add(chosen.out, Row(file, len(theirs), plain, len(alone), **versions))
    head = ("file", "tests", "fail with jax.jit", "fail with fuseplan.jit alone")
    print_table(head, rows, right=range(1, len(head)))
    print("\n".join(names))
    return 1 if names else 0


def _add(path: Path, row: Row) -> None:
    """Add a row to a file of rows, in the place of one of the same tests with the same JAX."""
    RowFile(path, Row, lambda other: (other.file, other.jax) != (row.file, row.jax)).add(row)


def run(folder: Path, file: str, side: str) -> dict[str, bool]:
    """Whether each test of a file that is not skipped passes with the ``jit`` of ``side``."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "experiments.jax_tests", "-p",
                   "no:cacheprovider", f"--junitxml={report}", str(folder / f"{file}.py")]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, _SIDE: side, _FOLDER: str(folder), "PYTHONPATH": path,
                       "JAX_NUM_GENERATED_CASES": _CASES}  # fmt: skip
        done = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"{file} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, bool] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            outcomes = {child.tag for child in case}
            if "skipped" not in outcomes:
                name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
                found[name] = found.get(name, True) and outcomes.isdisjoint({"failure", "error"})
        return found


def pytest_configure(config: Any) -> None:
    """Replace ``jax.jit`` in the tests, and in the helpers that JAX has for them, if this process is to."""
    if os.environ.get(_SIDE) != "fuseplan":
        return
    import jax

    import fuseplan

    plain, folder = jax.jit, os.environ[_FOLDER]

    @functools.wraps(plain)
    def jit(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals
        is_test = str(caller.get("__file__", "")).startswith(folder)
        is_helper = str(caller.get("__name__", "")).endswith(".test_util")
        return (fuseplan.jit if is_test or is_helper else plain)(*args, **kwargs)

    jax.jit = jit


if __name__ == "__main__":
    sys.exit(main())
