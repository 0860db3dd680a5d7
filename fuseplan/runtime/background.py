"""Plan and compile in a thread, while ``jax.jit``'s program answers (``fuseplan.jit(background=True)``)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from fuseplan.runtime.recovering import CallSignatures, RecoveringJit
from fuseplan.support import jax_compat
from fuseplan.support.errors import FuseplanWarning, first_line


@cache
def _worker() -> ThreadPoolExecutor:
    # One thread: two plannings would slow each other, and the program that runs.
    return ThreadPoolExecutor(1, thread_name_prefix="fuseplan")


class InBackground:
    """Calls ``plain`` at new shapes until ``fused`` is compiled for them, and ``fused`` from then on.

    Python runs one thread at a time, so that planning slows what else the program does in Python.
    """

    def __init__(
        self,
        name: str,
        fused: Callable[..., Any],
        compiles: RecoveringJit,
        plain: Callable[..., Any],
        calls: CallSignatures,
    ) -> None:
        """``compiles`` is lowered and compiled in the thread, so that ``fused`` need not be."""
        self._name, self._fused, self._compiles, self._plain = name, fused, compiles, plain
        self._calls = calls
        self._lock = threading.Lock()
        self._program: dict[Hashable, Callable[..., Any]] = {}
        """By signature, what is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            key = self._calls.key(args, kwargs)
            program = self._program.get(key)
        except (TypeError, ValueError):  # No key, no cache: jax.jit raises the error.
            return self._plain(*args, **kwargs)
        if program is None:
            if not jax_compat.is_eager():  # recorded, transformed or interpreted
                return self._fused(*args, **kwargs)
            program = self._begin(key, args, kwargs)
        return program(*args, **kwargs)

    def is_ready(self, args: Any, kwargs: Any) -> bool:
        """Whether calls like this one run the fused program."""
        try:
            return self._program.get(self._calls.key(args, kwargs)) is self._fused
        except (TypeError, ValueError):
            return False

    def clear(self) -> None:
        """Begin anew at the next calls."""
        with self._lock:
            self._program.clear()

    def _begin(self, key: Hashable, args: Any, kwargs: Any) -> Callable[..., Any]:
        with self._lock:
            if key in self._program:
                return self._program[key]
            self._program[key] = self._plain
        shapes = self._calls.shapes(args, kwargs)
        _worker().submit(self._prepare, key, *shapes, jax_compat.trace_context())
        return self._plain

    def _prepare(self, key: Hashable, args: Any, kwargs: Any, context: Any) -> None:
        """Compile for these shapes. What the calling thread has set for itself, such as a mesh, is not known
        to this one: there the next call compiles."""
        try:
            if jax_compat.trace_context() == context:
                self._compiles.lower(*args, **kwargs).compile()
        except Exception as error:
            text = f"{self._name}: it was not planned in the background, so jax.jit's program stays: "
            warnings.warn(text + first_line(error), FuseplanWarning, stacklevel=2)
            return
        with self._lock:
            if key in self._program:
                self._program[key] = self._fused
