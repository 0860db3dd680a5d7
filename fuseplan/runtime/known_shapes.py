"""Call a jitted function only at shapes that it was traced at before, as fast as ``jax.jit``.

``jax.jit`` finds the program of known shapes in C++. To ask in Python whether shapes are known takes as long
as such a call. So the function is called, and where ``jax.jit`` begins to trace it, an error ends that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class UnseenShapesError(Exception):
    """A call that was to trace nothing has shapes that the function was not traced at."""


class _Calls(threading.local):
    trace_nothing = False


class KnownShapes:
    """Tells a function that is being traced whether the call behind that may trace it.

    Example:
        >>> import jax
        >>> known = KnownShapes()
        >>> double = jax.jit(known.watched(lambda x: 2 * x))
        >>> double(1.0).item()
        2.0
        >>> known.call(double, (3.0,), {}).item()
        6.0
        >>> try:
        ...     known.call(double, (3,), {})
        ... except UnseenShapesError:
        ...     print("new")
        new
    """

    def __init__(self) -> None:
        self._calls = _Calls()

    def call(self, jitted: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a jitted function that is ``watched``.

        Raises:
            UnseenShapesError: it would be traced. The arguments are as they were.
        """
        calls = self._calls
        calls.trace_nothing = True
        try:
            return jitted(*args, **kwargs)
        finally:
            calls.trace_nothing = False

    def watched(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """``f``, which raises where a ``call`` traces it."""

        @functools.wraps(f)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if self._calls.trace_nothing:
                raise UnseenShapesError
            return f(*args, **kwargs)

        return traced
