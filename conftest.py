"""What every test run shares: the CPU as JAX's platform, and Hypothesis without randomness."""

import gc
import os
import shutil
import sys

# Before the first import of jax. A test run must not take a GPU or TPU that happens to be
# there (the tests marked gpu are run with JAX_PLATFORMS set), nor ask a cloud for one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# NumPy's threads wait for each other busily, which makes small products slower where processes share cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Nor read or write what the user keeps of plans.
os.environ.pop("FUSEPLAN_CACHE", None)

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.dont_write_bytecode:
    # Else every process that a test starts, and every worker of pytest-xdist, compiles anew all that it
    # imports: it is kept, not beside the sources. Those processes find the settings in the environment.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if sys.pycache_prefix is None:
        sys.pycache_prefix = str(Path(__file__).parent / ".pytest_cache" / "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

# No doctests there: what tests share, and what MkDocs loads, whose packages a test run need not have.
collect_ignore_glob = ["tests/helpers", "experiments/docs_*"]


def pytest_configure(config: pytest.Config) -> None:
    try:
        import hypothesis
    except ModuleNotFoundError:  # the test group is not installed: doctests alone run
        return
    # The same examples in every run, and no deadline: the first example compiles.
    hypothesis.settings.register_profile("fuseplan", derandomize=True, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("fuseplan")


@pytest.fixture(autouse=True)
def _own_cache() -> Iterator[None]:
    """Each test plans anew, whatever others have planned before it."""
    from fuseplan.search.cache import SolutionCache, using_cache

    with using_cache(SolutionCache()):
        yield


@pytest.fixture(autouse=True)
def _own_planners() -> Iterator[None]:
    """A planner that a test registers is forgotten after it."""
    yield
    from fuseplan.planners import is_built_in, planner_names, unregister_planner

    for name in planner_names():
        if not is_built_in(name):
            unregister_planner(name)


@pytest.fixture
def compiled_quickly() -> Iterator[None]:
    """Compile without LLVM's dearer optimisations, for tests that are not about speed."""
    from tests.helpers.quickly import all_quickly

    with all_quickly():
        yield


@pytest.fixture
def new_process(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Calling it leaves of what is cached only what a new process would find: the files."""

    def begin() -> None:
        folder = tmp_path_factory.mktemp("process")
        shutil.copytree(os.environ["XDG_CACHE_HOME"], folder, dirs_exist_ok=True)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))  # what is in memory is kept by the file's path

    return begin


def pytest_collection_finish() -> None:
    """The modules and tests live to the end: Python's collector need not walk them again and again."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/plan/golden anew")
    parser.addoption(
        "--quick",
        action="store_true",
        help="the first case of each test, without those marked slow, aot or gpu",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    kept: list[pytest.Item] = []
    seen: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        left_out = any(item.get_closest_marker(name) for name in ("slow", "aot", "gpu"))
        if not left_out and test not in seen:
            seen.add(test)
            kept.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
