"""Compute once what several steps of one task ask for.

Planning a program looks at equal things from several sides: a screen, quick plans, the search and other
planners each need the graph, its rewritten forms and their prices. Within ``sharing``, functions marked
``shared`` compute each of these once. Nothing is kept after it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_results: ContextVar[dict[Hashable, tuple[Any, Any]] | None] = ContextVar("shared results", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """Share results within this block, also with those that share around it. Each thread has its own.

    Example:
        >>> @shared
        ... def numbers(text, sign):
        ...     return [sign * int(word) for word in text]
        >>> text = ["1", "2"]
        >>> with sharing():
        ...     print(numbers(text, -1) is numbers(text, -1), numbers(text, 1))
        True [1, 2]
        >>> numbers(text, 1) is numbers(text, 1)
        False
    """
    if _results.get() is not None:
        yield
        return
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


def shared(f: F) -> F:
    """``f``, which returns the same object for the same first argument (the object itself) and equal others
    within ``sharing``. No caller may change it."""

    signature = inspect.signature(f)

    @functools.wraps(f)
    def once(*args: Any, **named: Any) -> Any:
        results = _results.get()
        if results is None:
            return f(*args, **named)
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        first, *others = bound.arguments.values()
        key = (f, id(first), *others)
        if key not in results:
            results[key] = first, f(*args, **named)  # ``first`` is kept, and with it its id
        return results[key][1]

    return once  # type: ignore[return-value]
