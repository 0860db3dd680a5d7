"""Import a user's own function as a workload: ``package.module:function`` or ``file.py:function``."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fuseplan.support.errors import InvalidArgumentError, UnknownNameError
from fuseplan.support.modules import folder_of, import_place, importing_from
from fuseplan.workloads.workload import Built, Workload

FORMS = "package.module:function or file.py:function"
"""How a user's own function is named."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnWorkload(Workload):
    """A user's function that returns ``(f, args)``: it has one size, and decides on the dtypes itself."""

    def build(self, dtype: str = "float32", small: bool = False, **sizes: int) -> Built:
        """As ``Workload.build``, without a choice of dtype and size.

        Raises:
            InvalidArgumentError: another dtype or size is asked for, or the function returns anything but
                ``(f, args)``.
        """
        if dtype != "float32" or small or sizes:
            raise InvalidArgumentError(
                f"dtype and size (--dtype, --small) are for named workloads, and {self.name} decides on them "
                "itself"
            )
        return self.make()


def own_workload(text: str) -> Workload:
    """The workload that ``package.module:function`` or ``file.py:function`` names: see ``load_workload``."""
    place, _, path = text.rpartition(":")
    module = import_place(place, f"WORKLOAD as {FORMS}")
    found = _attribute(module, path)
    if isinstance(found, Workload):
        return found
    if not callable(found):
        raise UnknownNameError(_no_function(module, place, path))
    if needed := _required(found):
        raise InvalidArgumentError(
            f"{text} takes the arguments {', '.join(needed)}: name a function without arguments, which "
            "returns (f, args), the function to plan and a tuple of its arguments"
        )

    folder = folder_of(place)

    def make() -> Built:
        with importing_from(folder):
            made = found()
        is_pair = isinstance(made, tuple) and len(made) == 2
        if not (is_pair and callable(made[0]) and isinstance(made[1], (tuple, list))):
            raise InvalidArgumentError(
                f"{text}() must return (f, args), a function and a tuple of its arguments; got {made!r}"
            )
        return made[0], tuple(made[1])

    description = (inspect.getdoc(found) or "").partition("\n")[0].rstrip(".")
    return OwnWorkload(text, description, {}, {}, make)


def _attribute(module: ModuleType, path: str) -> Any:
    """``module.a.b`` for the path ``a.b``; None if there is no such attribute."""
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _required(function: Any) -> list[str]:
    """The names of the arguments that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C without a signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _no_function(module: ModuleType, place: str, path: str) -> str:
    """The message on a function that is not in its module, with the closest that is."""
    known = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isinstance(value, Workload) or _is_own_maker(module, value))
    ]
    problem = f"expected a function {path!r} in module {place!r}, there is none"
    close = difflib.get_close_matches(path, known, n=1)
    if close:
        return f"{problem}; did you mean {place}:{close[0]}?"
    return f"{problem}; there are {', '.join(f'{place}:{name}' for name in known[:8])}" if known else problem


def _is_own_maker(module: ModuleType, value: Any) -> bool:
    """Whether a value looks like a function that returns ``(f, args)``: one of the module, without
    arguments."""
    is_own = inspect.isfunction(value) and value.__module__ == module.__name__
    return is_own and not _required(value)
