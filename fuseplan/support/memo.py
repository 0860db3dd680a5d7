"""Memoise functions for the length of a task: within ``memo_scope``, equal calls are computed once.

Planning a program looks at equal things from several sides: a screen, quick plans, the search and other
planners each need the graph, its rewritten forms and their prices. Nothing is kept after the scope.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class _Scope(threading.local):
    """Holds the results of this thread's scope, with the first argument of each call; None outside of
    scopes."""

    results: dict[Hashable, tuple[Any, Any]] | None = None


_scope = _Scope()


@contextmanager
def memo_scope() -> Iterator[None]:
    """Keep the results of ``memoised`` functions that this thread calls until the end of the block. A scope
    within another one adds nothing.

    Example:
        >>> @memoised
        ... def numbers(text, sign):
        ...     return [sign * int(word) for word in text]
        >>> text = ["1", "2"]
        >>> with memo_scope():
        ...     print(numbers(text, -1) is numbers(text, -1), numbers(text, 1))
        True [1, 2]
        >>> numbers(text, 1) is numbers(text, 1)
        False
    """
    if _scope.results is not None:
        yield
        return
    _scope.results = {}
    try:
        yield
    finally:
        _scope.results = None


def memoised(f: F) -> F:
    """Compute ``f`` once for each first argument, by its identity, and equal others, within ``memo_scope``.
    No caller may change the result."""
    signature = inspect.signature(f)

    @functools.wraps(f)
    def once(*args: Any, **named: Any) -> Any:
        results = _scope.results
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
