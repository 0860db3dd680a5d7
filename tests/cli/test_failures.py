"""Failures of a user's own file are shown from that file on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.one_python, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]

MINE = """
import jax, jax.numpy as jnp
def raises():
    raise ValueError("boom")
def inside():
    def f(x):
        return jnp.tanh(x) @ jnp.ones((7, 7))
    return f, (jax.ShapeDtypeStruct((3, 2), "float32"),)
def wrong():
    return (lambda x: x + 1), ("text",)
"""


@pytest.mark.parametrize(
    ("arguments", "last", "lines"),
    [
        (("plan", "mine.py:raises"), "ValueError: boom", 6),
        (("plan", "mine.py:inside"), "TypeError: ", 30),
        (("plan", "mine.py:wrong"), "TypeError: ", 30),
        (("plan", "broken.py:f"), "ModuleNotFoundError: No module named 'nope_xyz'", 5),
        (("plan", "syntax.py:f"), "SyntaxError: ", 5),
        (("compare", "softmax", "--planner-module", "broken.py"), "ModuleNotFoundError: ", 5),
    ],
)
def test_only_what_the_user_wrote_is_shown(tmp_path, arguments, last, lines):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import nope_xyz\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    done = subprocess.run(
        [sys.executable, "-m", "fuseplan", *arguments, "--device", "test"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert last in done.stderr
    assert len(done.stderr.splitlines()) <= lines, done.stderr
    for frame in ("runpy", "typer", "click", "fuseplan/cli", "importlib"):
        assert frame not in done.stderr, done.stderr
    if "wrong" not in arguments[1]:
        file = next(name for name in ("mine.py", "broken.py", "syntax.py") if name in " ".join(arguments))
        assert f'{file}", line ' in done.stderr
