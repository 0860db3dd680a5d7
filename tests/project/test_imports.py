"""Who may import whom, where import-linter cannot say it, and that importing stays cheap."""

import ast
import graphlib
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuseplan

ROOT = Path(__file__).resolve().parents[2]


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
    assert users_of("jax._src", "costmodel", "fuseplan", "experiments") <= {"fuseplan/support/jax_compat.py"}


def test_only_the_front_reads_jaxprs():
    front = ("fuseplan/support/jax_compat.py", "fuseplan/frontend/")
    for path in users_of("jax.extend", "costmodel", "fuseplan", "experiments"):
        assert path.startswith(front), f"{path} uses jax.extend; only {', '.join(front)} may"


@pytest.mark.parametrize(
    ("package", "heavy"),
    [
        (
            "fuseplan",
            {
                "pandas",
                "matplotlib",
                "ortools",
                "jinja2",
                "typer",
                "rich",
                "experiments",
                "importlib.metadata",
            },
        ),
        ("costmodel", {"jax", "jaxlib", "pandas", "matplotlib", "ortools", "fuseplan"}),
    ],
)
def test_importing_is_cheap(package, heavy):
    code = f"import sys, {package}; print(*sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.split() == []


def function_level_imports(path: Path) -> Iterator[str]:
    """The project's own modules that a file imports inside a function."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                yield from (name for name in modules if name.split(".")[0] in ("fuseplan", "costmodel"))


@pytest.mark.parametrize("folder", ["costmodel", "fuseplan"])
def test_own_modules_are_imported_at_the_top(folder):
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in (ROOT / folder).rglob("*.py")
        if (names := list(function_level_imports(path)))
    }
    assert not found, "an import inside a function hides a circle; move what both sides need below them"


def test_every_package_has_a_floor():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    listed = {name.strip() for layer in layers for name in layer.split(":")}
    there = {
        f"fuseplan.{path.stem}"
        for path in (ROOT / "fuseplan").iterdir()
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
    }
    assert there <= listed, f"the layers of pyproject.toml lack {sorted(there - listed)}"


def test_every_package_says_what_it_does():
    for path in (ROOT / "fuseplan").rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.slow
def test_importing_fuseplan_costs_little_beside_jax():
    """At most 0.15 s of CPU time more than ``import jax``, the least of three processes."""
    code = (
        "import time, jax; start = time.process_time(); import fuseplan; print(time.process_time() - start)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) <= 0.15


def test_every_public_name_is_found_where_it_is_said_to_be():
    assert sorted(fuseplan._MODULE_OF) == fuseplan.__all__
    for name, module in fuseplan._MODULE_OF.items():
        assert getattr(fuseplan, name) is getattr(sys.modules[module], name)
    assert set(fuseplan.__all__) <= set(dir(fuseplan))
    with pytest.raises(AttributeError, match="module 'fuseplan' has no attribute 'nosuch'"):
        fuseplan.nosuch  # noqa: B018


PUBLIC = {
    name: frozenset(importlib.import_module(name).__all__)
    for name in ("costmodel", "fuseplan", "fuseplan.bench", "fuseplan.extend", "fuseplan.workloads")
}
"""The modules that a user imports, and their names."""


def private_uses(source: str) -> Iterator[str]:
    """What a file uses of the library beside ``PUBLIC``: imports, attributes of the imported modules, and
    texts that name a module, such as the argument of ``importlib.import_module``."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(lambda alias: is_ours(alias.name), node.names):
                first = alias.name.split(".")[0]
                modules[alias.asname or first] = alias.name if alias.asname else first
                if alias.name not in PUBLIC:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in PUBLIC:
                    modules[alias.asname or alias.name] = name
                elif alias.name not in PUBLIC.get(node.module or "", ()):
                    yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_ours(node.value):
            path = ROOT.joinpath(*node.value.split("."))
            if node.value not in PUBLIC and (path.is_dir() or path.with_suffix(".py").is_file()):
                yield node.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node.value).partition(".")
            owner = ".".join(filter(None, (modules.get(first, ""), rest)))
            if owner in PUBLIC and f"{owner}.{node.attr}" not in PUBLIC and node.attr not in PUBLIC[owner]:
                yield f"{owner}.{node.attr}"


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("costmodel", "fuseplan")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fuseplan.pipeline", "fuseplan.pipeline"),
        ("from fuseplan.pipeline import plan_best", "fuseplan.pipeline.plan_best"),
        ("def f():\n    from costmodel.axes import unify", "costmodel.axes.unify"),
        ("from fuseplan import pipeline", "fuseplan.pipeline"),
        ("from fuseplan.workloads import functions", "fuseplan.workloads.functions"),
        ("import fuseplan\nfuseplan.settings.make_options()", "fuseplan.settings"),
        ("import fuseplan.extend as e\ne.PriceBook\ne.Scheduler", "fuseplan.extend.Scheduler"),
        ("from fuseplan import extend\nextend.Scheduler", "fuseplan.extend.Scheduler"),
        ("importlib.import_module('fuseplan.search.cache')", "fuseplan.search.cache"),
    ],
)
def test_every_way_to_reach_a_private_name_is_seen(source, found):
    assert list(private_uses(source)) == [found]


@pytest.mark.parametrize(
    "source",
    [
        "import fuseplan\nfuseplan.make_plan",
        "import fuseplan.extend\nfuseplan.extend.lower\nfuseplan.jit",
        "from fuseplan import Plan, extend\nextend.lower",
        "from costmodel import DeviceSpec\nimport jax\njax.jit",
        'def f():\n    """``fuseplan.pipeline``"""',
    ],
)
def test_public_names_may_be_used(source):
    assert not list(private_uses(source))


def test_studies_import_what_users_import():
    """``plan_differences`` loads modules of checkouts of any age by their names, and imports no other."""
    by_name = {"experiments/plan_differences.py": {"costmodel.calibrate", "fuseplan.search.cache"}}
    for path in (ROOT / "experiments").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        found = set(private_uses(path.read_text())) - by_name.get(name, set())
        assert not found, f"{name} uses {sorted(found)}; public are {', '.join(PUBLIC)}, by their __all__"


def module_imports(path: Path) -> Iterator[str]:
    """The project's modules that a file imports at the top: names of modules and of what is in them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "fuseplan",
            "costmodel",
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module or ""


def test_no_modules_import_each_other():
    paths = [path for folder in ("costmodel", "fuseplan") for path in (ROOT / folder).rglob("*.py")]
    name_of = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    }
    known = set(name_of.values())
    graph = {
        name: {other for other in module_imports(path) if other in known and other != name}
        for path, name in name_of.items()
    }
    for name, others in graph.items():  # a package's own modules are below its __init__
        graph[name] = {other for other in others if not name.startswith(f"{other}.")}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle
