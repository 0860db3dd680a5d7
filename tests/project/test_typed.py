"""``fuseplan.jit`` keeps a function's parameters and result for type checkers."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.one_python


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("fast('text')", "incompatible type"),
        ("fast(x, 1.0, 2.0)", "Too many arguments"),
        ("plain(x).shape", "has no attribute"),
        ("fuseplan.jit(scaled, devise='h200')", "devise"),
    ],
)
def test_a_wrong_use_is_an_error_of_types(tmp_path, wrong, message):
    api = pytest.importorskip("mypy.api")
    source = (ROOT / "docs/examples/typed_jit.py").read_text()
    path = tmp_path / "wrong.py"
    path.write_text(f"{source}    {wrong}\n")
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path)]
    text, _, code = api.run([*config, str(path)])
    assert code == 1, text
    assert message in text.splitlines()[0], text
