"""Who may import whom, where import-linter cannot say it, and that importing stays cheap."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for an attribute chain on a name, otherwise the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def names_used(source: str) -> Iterator[str]:
    """Every dotted name that a module imports or reaches by attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)


def users_of(name: str, *folders: str) -> set[str]:
    """The files that use ``name`` or anything below it."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if any(used == name or used.startswith(f"{name}.") for used in names_used(path.read_text()))
    }


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax import _src",
        "from jax._src import core as c",
        "import jax\ndef f():\n    return jax._src.core.Jaxpr",
        "def f():\n    from jax._src.core import Jaxpr",
    ],
)
def test_every_way_to_reach_a_module_is_seen(source):
    assert any(name == "jax._src" or name.startswith("jax._src.") for name in names_used(source))


def test_private_names_of_jax_stand_in_one_file():
    assert users_of("jax._src", "costmodel", "fuseplan", "experiments") <= {"fuseplan/jax_compat.py"}


def test_only_the_front_reads_jaxprs():
    front = (
        "fuseplan/jax_compat.py",
        "fuseplan/trace",
        "fuseplan/describe",
        "fuseplan/lower",
        "fuseplan/ops/",
    )
    for path in users_of("jax.extend", "costmodel", "fuseplan", "experiments"):
        assert path.startswith(front), f"{path} uses jax.extend; only {', '.join(front)} may"


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        ("fuseplan", {"pandas", "matplotlib", "ortools", "jinja2", "typer", "rich", "experiments"}),
        ("costmodel", {"jax", "jaxlib", "pandas", "matplotlib", "ortools", "fuseplan"}),
    ],
)
def test_importing_is_cheap(package, heavy):
    code = f"import sys, {package}; print(*sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.split() == []
