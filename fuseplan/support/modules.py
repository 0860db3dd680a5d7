"""Import the modules of a user: by name, or from a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fuseplan.support.errors import UnknownNameError


def is_file(place: str) -> bool:
    """Whether ``place`` names a file, not a module."""
    return place.endswith(".py")


def folder_of(place: str) -> str:
    """The folder in which the modules that ``place`` imports are looked for first: that of a file, or the
    current one."""
    return str(Path(place).resolve().parent if is_file(place) else Path.cwd())


@contextmanager
def importing_from(folder: str) -> Iterator[None]:
    """Import modules of ``folder`` first, as ``python file.py`` and ``python -m`` do."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def import_place(place: str, expected: str) -> ModuleType:
    """Import ``package.module``, or run ``file.py`` as a module of its own, each time anew.

    What the module itself raises is left as it is.

    Args:
        place: the name of a module, or the path of a file that ends in ``.py``.
        expected: what an error says was expected, such as ``WORKLOAD as package.module:function``.

    Raises:
        UnknownNameError: there is no such module or file; the message has the closest file.
    """
    with importing_from(folder_of(place)):
        return _from_file(place, expected) if is_file(place) else _by_name(place, expected)


def _by_name(name: str, expected: str) -> ModuleType:
    problem = "it is no name of a module"
    if name and all(part.isidentifier() for part in name.split(".")):
        importlib.invalidate_caches()  # a file may have just been written
        try:
            module = importlib.import_module(name)
            if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
                folder = next(iter(module.__path__), name)
                raise UnknownNameError(
                    f"expected {expected}, but {name!r} is a folder, {folder}: name a module or a file in "
                    f"it, such as {name}.module or {name}/file.py"
                )
            return module
        except ImportError as error:
            problem = str(error)
    raise UnknownNameError(f"expected {expected}, but {name!r} cannot be imported: {problem}")


def _from_file(place: str, expected: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        there = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, there, n=1)
        hint = f"; did you mean {path.parent / close[0]}?" if close else ""
        raise UnknownNameError(f"expected {expected}, but there is no file {place!r}{hint}")
    # A name that no other module has: dataclasses and pickle look modules up by their names.
    name = "_".join(("fuseplan_file", *path.resolve().with_suffix("").parts[1:])).replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None, "the suffix .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
