"""The commands are declared without their code: help imports nothing heavy, and both agree."""

import inspect
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from fuseplan.bench.cpu import PEERS
from fuseplan.cli import app, bench_commands, commands
from fuseplan.workloads import GROUPS

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"jax", "jaxlib", "numpy", "pandas", "scipy", "ortools", "rustworkx", "matplotlib", "jinja2"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plan", "--help"],
        ["compare", "--help"],
        ["explain", "--help"],
        ["bench", "solver", "--help"],
        ["devices", "--nosuch"],
        ["plann"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        f"sys.argv = ['fuseplan', *{arguments!r}]\n"
        "from fuseplan.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        f"print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.splitlines()[-1].split() == ["HEAVY"], result.stdout


def declared():
    """The functions that declare a command, with the module that holds its code."""
    modules = {"planning": ("plan", "explain", "compare", "report"), "plans": ("diff", "verify")}
    modules |= {"tools": ("demo", "workloads", "devices", "calibrate", "cache")}
    for module, names in modules.items():
        yield from ((getattr(commands, name), f"fuseplan.cli.{module}") for name in names)
    for name in ("plan", "solver", "cpu"):
        yield getattr(bench_commands, name), "fuseplan.cli.bench"


def test_every_command_is_compared_here():
    group = typer.main.get_command(app)
    count = len(group.commands) - 1 + len(group.commands["bench"].commands)
    assert len(list(declared())) == count


@pytest.mark.parametrize(("declaration", "module"), list(declared()), ids=lambda x: getattr(x, "__name__", x))
def test_the_code_takes_what_the_declaration_says(declaration, module):
    code = getattr(import_module(module), declaration.__name__)
    expected, found = typing.get_type_hints(declaration), typing.get_type_hints(code)
    assert list(inspect.signature(code).parameters) == list(inspect.signature(declaration).parameters)
    assert found == expected
    assert declaration.__doc__


def test_the_names_in_help_are_those_of_the_code():
    assert tuple(GROUPS) == bench_commands.FAMILIES
    assert tuple(PEERS) == bench_commands.PEERS


def test_an_unknown_command_has_the_closest():
    result = CliRunner().invoke(app, ["explan"])
    assert result.exit_code == 2
    assert "Did you mean 'explain'" in result.stderr


def test_the_module_is_the_command():
    by_module = subprocess.run(
        [sys.executable, "-m", "fuseplan", "--help"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "Usage: fuseplan [OPTIONS] COMMAND" in by_module.stdout
    assert "Exit codes: 0 done" in by_module.stdout
