"""Digest an object of a user's class, its source and its state, to tell it from another after a restart."""

from __future__ import annotations

import hashlib
import inspect
import marshal
import pickle
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any


def object_digest(value: Any, base: type = object) -> str | None:
    """A digest of the class and the state of an object; None if the state cannot be told.

    The state is that which ``pickle`` writes, with the attributes of the class and the variables that its
    methods take from the function around them. Two objects with one digest behave alike as far as this says;
    what their methods read from elsewhere, such as a global variable or a file, is not in it.

    Args:
        value: the object.
        base: a class of which no source is read, nor that of its own bases.

    Example:
        >>> object_digest(1 + 2j) == object_digest(1 + 2j), object_digest(1j) == object_digest(2j)
        (True, False)
        >>> from types import SimpleNamespace
        >>> object_digest(SimpleNamespace(function=lambda: 1)) is None
        True
    """
    own = [cls for cls in type(value).__mro__ if cls not in base.__mro__]
    try:
        text = pickle.dumps((_state(value), [_class_state(cls, own) for cls in own]))
    except Exception:  # what a user's class raises, or a value that pickle refuses
        return None
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def _state(value: Any) -> Any:
    """The state of an object without its class, which may have no name that ``pickle`` finds."""
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        raise pickle.PicklingError("the object is known by its name alone")
    made, arguments, *state = reduced
    rest = [None if part is None else part if i == 0 else list(part) for i, part in enumerate(state)]
    return [part for part in arguments if part is not type(value)], getattr(made, "__name__", ""), rest


def _class_state(cls: type, own: list[type]) -> list[tuple[str, Any]]:
    """The source of a class, the values of its attributes, and those that its methods take from around it."""
    source = _source_of(cls)
    found: list[tuple[str, Any]] = [("", source or cls.__qualname__)]
    for name, attribute in vars(cls).items():
        if name.startswith(("__", "_abc_")):
            continue
        if isinstance(attribute, (GetSetDescriptorType, MemberDescriptorType)):
            continue
        function = attribute
        for wrapper in ("__func__", "fget", "func", "__wrapped__"):  # of a property or a decorator, say
            function = getattr(function, wrapper, function)
        if not inspect.isfunction(function):
            found.append((name, attribute))
            continue
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        around = [(variable, cell.cell_contents) for variable, cell in cells]
        found.append((name, [(v, value) for v, value in around if not any(value is c for c in own)]))
        if source is None:
            found.append((name, marshal.dumps(function.__code__)))
    return found


def _source_of(cls: type) -> str | None:
    """The source of a class; None for a class without one, such as one that was entered at a prompt."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return None
