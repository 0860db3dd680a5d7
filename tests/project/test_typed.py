"""``fuseplan.jit`` keeps a function's parameters and result for type checkers."""

import inspect
from pathlib import Path

import jax
import pytest

from fuseplan import api

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.one_python


def test_type_checkers_know_every_option():
    """Those of ``fuseplan.jit``, and those of ``jax.jit`` but for the device and what JAX deprecates."""
    own = [p.name for p in inspect.signature(api.jit).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert set(own) <= set(api.JitOptions.__annotations__)
    of_jax = {p.name for p in inspect.signature(jax.jit).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert set(api.JitOptions.__annotations__) <= set(own) | of_jax
    assert of_jax - set(api.JitOptions.__annotations__) <= {"abstracted_axes"}


WRONG = {
    "fast('text')": "incompatible type",
    "fast(x, 1.0, 2.0)": "Too many arguments",
    "plain(x).shape": "has no attribute",
    "fuseplan.jit(scaled, devise='h200')": "devise",
    "with_options(x, n='three')": "incompatible type",
}
"""Uses that a type checker refuses, and a part of its message."""


@pytest.mark.slow
def test_a_wrong_use_is_an_error_of_types(tmp_path):
    checker = pytest.importorskip("mypy.api")
    source = (ROOT / "docs/examples/typed_jit.py").read_text()
    path = tmp_path / "wrong.py"
    path.write_text(source + "".join(f"    {line}\n" for line in WRONG))
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    text, _, code = checker.run([*config, "--no-error-summary", "--hide-error-context", str(path)])
    assert code == 1, text
    first = len(source.splitlines()) + 1
    for number, message in enumerate(WRONG.values(), first):
        found = [line for line in text.splitlines() if line.startswith(f"{path}:{number}: error")]
        assert any(message in line for line in found), (number, text)
    assert text.count("wrong.py:") == text.count(": error") + text.count(": note"), text
