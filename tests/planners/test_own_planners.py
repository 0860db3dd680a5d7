"""Planners of other packages: by ``--planner-module``, and by entry points."""

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
from typer.testing import CliRunner

from fuseplan import planners
from fuseplan.cli import app
from fuseplan.planners import get_planner, import_planners, planner_names
from fuseplan.support.errors import FuseplanWarning, InvalidArgumentError, UnknownNameError

pytestmark = pytest.mark.one_python

SOURCE = '''
from fuseplan.extend import plan_decided, register_planner

def pairs(book):
    """Two operations a kernel, in order."""
    nodes = [node.id for node in book.graph.nodes]
    return [nodes[i:i + 2] for i in range(0, len(nodes), 2)]

def by_pairs(graph, pricing, budget):
    return plan_decided(graph, pricing, pairs)

NUMBER = 3
'''
REGISTERS = SOURCE + '\nregister_planner("pairs", by_pairs)\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with planners, first among those that modules are imported from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "their_planners.py").write_text(REGISTERS)
    (tmp_path / "unregistered.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("their_planners", "unregistered"):
        sys.modules.pop(name, None)


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.mark.parametrize("module", ["their_planners", "their_planners.py", "./their_planners.py"])
def test_a_module_with_planners(folder, module):
    text = run("compare", "softmax", "--small", "--device", "test", "--planners", "unfused,pairs,solver",
               "--planner-module", module).stdout  # fmt: skip
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["unfused", "pairs", "solver"]
    options = ("--small", "--device", "test", "--planner", "pairs", "--planner-module", module)
    assert "pairs plan for test" in run("plan", "softmax", *options).stdout


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("nowhere", "expected a module with planners as package.module or file.py, but 'nowhere' cannot"),
        ("their_planner.py", "did you mean their_planners.py?"),
        ("unregistered", "expected unregistered to call fuseplan.register_planner"),
    ],
)
def test_a_module_without_planners(folder, module, message):
    result = run("plan", "softmax", "--device", "test", "--planner-module", module, code=2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_errors_have_types(folder):
    with pytest.raises(UnknownNameError):
        import_planners("nowhere.at_all")
    with pytest.raises(InvalidArgumentError):
        import_planners("unregistered.py")


# --- entry points -----------------------------------------------------------------------------


@pytest.fixture
def installed(folder, monkeypatch):
    """Makes entry points of the group as if packages with them were installed."""
    loaded = planners._load_entry_points

    def install(**values):
        entries = [EntryPoint(name, value, planners.ENTRY_POINTS) for name, value in values.items()]
        monkeypatch.setattr(planners, "entry_points", lambda group: EntryPoints(entries).select(group=group))
        loaded.cache_clear()

    yield install
    loaded.cache_clear()


def test_a_function_of_an_entry_point_is_a_planner_of_its_name(installed):
    installed(two_by_two="unregistered:by_pairs")
    assert get_planner("two_by_two") is sys.modules["unregistered"].by_pairs
    assert "two_by_two" in planner_names()


def test_a_module_of_an_entry_point_registers_its_planners(installed):
    installed(anything="their_planners")
    assert "pairs" in planner_names()
    assert "anything" not in planner_names()


def test_entry_points_are_not_loaded_for_known_planners(installed):
    installed(two_by_two="unregistered:by_pairs")
    get_planner("solver")
    assert "unregistered" not in sys.modules


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "nowhere:f",
            r"the planner 'broken' of the entry point 'nowhere:f' is left out: ModuleNotFoundError",
        ),
        ("unregistered:none", "is left out: AttributeError"),
        ("unregistered:NUMBER", "expected a function or a module, got 3"),
    ],
)
def test_a_broken_entry_point_is_a_warning_with_its_name(installed, value, message):
    installed(broken=value, pairs="unregistered:by_pairs")
    with pytest.warns(FuseplanWarning, match=message):
        names = planner_names()
    assert "pairs" in names
    assert "broken" not in names


def test_no_entry_point_replaces_a_planner(installed):
    installed(solver="unregistered:by_pairs")
    before = get_planner("solver")
    with pytest.warns(FuseplanWarning, match="'solver'.*there is a planner of this name already"):
        planner_names()
    assert get_planner("solver") is before
