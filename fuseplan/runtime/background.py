"""Plan and compile in a thread, while ``jax.jit``'s program answers (``fuseplan.jit(background=True)``)."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from fuseplan.runtime.recovering import MAX_SIGNATURES, CallSignatures, RecoveringJit
from fuseplan.support import jax_compat
from fuseplan.support.errors import FuseplanError, FuseplanWarning, first_line
from fuseplan.support.lru import LruCache


class _Worker:
    """Runs jobs one after the other in a thread: two plannings would slow each other, and the program that
    runs. Once the main thread has ended, no further job begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after those before it. An error of a job goes to ``threading.excepthook``."""
        with self._lock:
            self._jobs.append(job)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="fuseplan").start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._jobs or not threading.main_thread().is_alive():
                    self._is_running = False
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # a warning that is an error, say: the other jobs go on
                hooked = (type(error), error, error.__traceback__, threading.current_thread())
                threading.excepthook(threading.ExceptHookArgs(hooked))


_WORKER = _Worker()


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
        self._program: LruCache[Hashable, Callable[..., Any]] = LruCache(MAX_SIGNATURES)
        """By signature, what is called."""
        self._n_plain = 0
        """The number of signatures that do not run the fused program."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            key = self._key(args, kwargs)
            program = self._program.get(key)
        except (TypeError, ValueError):  # No key, no cache: jax.jit raises the error.
            return self._plain(*args, **kwargs)
        if program is None:
            if not jax_compat.is_eager():  # recorded, transformed or interpreted
                return self._fused(*args, **kwargs)
            return self._begin(key, args, kwargs)
        return program(*args, **kwargs)

    def is_ready(self, args: Any, kwargs: Any) -> bool:
        """Whether calls like this one run the fused program."""
        try:
            return self._program.get(self._key(args, kwargs)) is self._fused
        except (TypeError, ValueError):
            return False

    @property
    def is_settled(self) -> bool:
        """Whether calls at all shapes of earlier ones run the fused program."""
        return len(self._program) > 0 and self._n_plain == 0

    def _key(self, args: Any, kwargs: Any) -> tuple[Hashable, Any]:
        """The signature of a call, and JAX's settings of this thread, which change the program, too."""
        return self._calls.key(args, kwargs), jax_compat.trace_context()

    def clear(self) -> None:
        """Begin anew at the next calls."""
        with self._lock:
            self._program.clear()
            self._n_plain = 0

    def _begin(self, key: tuple[Hashable, Any], args: Any, kwargs: Any) -> Any:
        """The result of ``plain``. If it is no error, the fused program is prepared."""
        shapes = self._calls.shapes(args, kwargs)  # before the arguments may be donated
        result = self._plain(*args, **kwargs)
        with self._lock:
            if self._program.get(key) is not None:  # another thread has begun
                return result
            self._program.update([(key, self._plain)])
            self._n_plain += 1
        _WORKER.submit(partial(self._prepare, key, *shapes))
        return result

    def _prepare(self, key: tuple[Hashable, Any], args: Any, kwargs: Any) -> None:
        """Compile for these shapes. What the calling thread has set for itself, such as a mesh, is not known
        to this one: there ``plain`` stays."""
        if jax_compat.trace_context() != key[1]:
            return
        program = self._fused
        try:
            self._compiles.lower(*args, **kwargs).compile()
        except FuseplanError as error:  # for the user: the next call raises it
            program = partial(_raise, error)
        except Exception as error:
            text = f"{self._name}: it was not planned in the background, so jax.jit's program stays: "
            warnings.warn(text + first_line(error), FuseplanWarning, stacklevel=2)
            return
        with self._lock:
            if self._program.get(key) is not None:
                self._program.update([(key, program)])
                self._n_plain -= program is self._fused


def _raise(error: Exception, *_: Any, **__: Any) -> Any:
    raise error
