"""A jitted fused function that recovers when a compiler refuses its kernels.

Kernels are compiled inside one XLA program. If its compilation fails, or it fails in another way that a
kernel may have caused, the function is replanned with kernels that compile by themselves
(``fuseplan.runtime.replan``). If that fails too, ``jax.jit(f)`` takes over, and its errors are the user's
own. The choice is cached for calls with the same shapes.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import numpy as np

from fuseplan.frontend.trace import Traced
from fuseplan.pipeline import plan_traced
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.options import Options
from fuseplan.runtime.primitive import PlanOf
from fuseplan.runtime.replan import Compile, compile_here, has_kernels, is_refusal, plan_accepted
from fuseplan.support import jax_compat
from fuseplan.support.errors import CompilerRefusalWarning, FuseplanError, first_line
from fuseplan.support.lru import LruCache
from fuseplan.targets.detect import local_platform


class CallSignatures:
    """Cache keys of calls of ``jax.jit(f, **options)``: equal for calls that share one compiled program."""

    def __init__(self, f: Callable[..., Any], options: dict[str, Any]) -> None:
        self._static_numbers, self._static_names = _static_parameters(f, options)

    def key(self, args: Any, kwargs: Any) -> Hashable:
        """The key of a call. A tracer's type is part of it.

        Raises:
            TypeError, ValueError: there is no key, as for arguments that are not arrays.
        """
        statics: Any = ()
        if self._static_numbers or self._static_names:
            statics, args, kwargs = self.split(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        try:
            kinds: list[Any] = [(type(x), x.aval, x.sharding) for x in leaves]
        except AttributeError:  # numbers, NumPy arrays, tracers
            kinds = list(map(_kind_of, leaves))
        return tree, tuple(kinds), statics

    def split(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The static arguments, each with its type (since ``1 == 1.0``), and the others."""
        numbers = {n + len(args) if n < 0 else n for n in self._static_numbers}
        statics = [(i, type(a), a) for i, a in enumerate(args) if i in numbers]
        named = [(k, type(v), v) for k, v in sorted(kwargs.items()) if k in self._static_names]
        dynamic = tuple(a for i, a in enumerate(args) if i not in numbers)
        return (*statics, *named), dynamic, {k: v for k, v in kwargs.items() if k not in self._static_names}

    def shapes(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with a ``ShapeDtypeStruct`` (with dtype and sharding) in the place of each array."""
        static = {i for i, *_ in self.split(args, kwargs)[0]} if self._static_numbers else set()
        shapes = [a if i in static else jax.tree.map(_shape_of, a) for i, a in enumerate(args)]
        named = {k: v if k in self._static_names else jax.tree.map(_shape_of, v) for k, v in kwargs.items()}
        return tuple(shapes), named


def _kind_of(leaf: Any) -> tuple[Any, ...]:
    """What a compiled program depends on of an argument. JAX puts NumPy arrays and numbers on the default
    device."""
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        try:
            aval = jax.typeof(leaf)
        except OverflowError as error:
            raise ValueError(str(error)) from None
        return jax_compat.array_type(), aval, jax.sharding.SingleDeviceSharding(jax_compat.default_device())
    names = ("aval", "sharding", "shape", "dtype")
    return type(leaf), *(getattr(leaf, name, None) for name in names)


def _shape_of(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=jax.typeof(leaf).weak_type
    )


def _static_parameters(
    f: Callable[..., Any], options: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and names of static parameters; as in ``jax.jit``, each implies the other."""
    numbers, names = options.get("static_argnums"), options.get("static_argnames")
    n = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    s = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return n, s
    if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        n = tuple(i + len(parameters) if i < 0 else i for i in n)
    either = [(i, p.name) for i, p in enumerate(parameters) if p.kind == p.POSITIONAL_OR_KEYWORD]
    if names is None:
        s = tuple(name for i, name in either if i in n)
    elif numbers is None:
        n = tuple(i for i, name in either if name in s)
    return n, s


MAX_SIGNATURES = 4096
"""Sets of shapes of one function about which anything is kept, as many as ``jax.jit`` keeps programs."""

Emitted = Callable[[str | None, PlanOf], Callable[..., Any]]
"""From a platform (None: the local one) and a planning function to the function that runs the kernels."""

_kernels_made: ContextVar[bool] = ContextVar("_kernels_made", default=False)
"""Whether kernels were emitted for the current call, so that they may have caused its failure."""


def _plan_and_note_kernels(
    platform: str | None, plan_of: PlanOf, traced: Traced, options: Options
) -> FusionPlan:
    plan = plan_of(traced, options)
    # A program with side effects is not run twice unless the error's message shows that it did not run.
    pure = not any(eqn.effects for eqn in plan.lowered.equations)
    if pure and has_kernels(plan, platform):
        _kernels_made.set(True)
    return plan


class RecoveringJit:
    """``jax.jit`` of a fused function that recovers from refused kernels, with the interface of
    ``jax.jit``."""

    def __init__(
        self,
        name: str,
        emitted: Emitted,
        reference: Any,
        calls: CallSignatures,
        options: dict[str, Any],
        plan_of: PlanOf = plan_traced,
    ) -> None:
        self._name, self._reference, self._calls, self._plan_of = name, reference, calls, plan_of
        self.fused = jax.jit(emitted(None, partial(_plan_and_note_kernels, None, plan_of)), **options)
        """The fused function without recovery."""
        self._accepted = jax.jit(emitted(None, partial(plan_accepted, None, compile_here)), **options)
        self._kept: LruCache[Hashable, Any] = LruCache(MAX_SIGNATURES)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._kept:
            kept = self._kept.get(self._key(args, kwargs))
            if kept is not None:
                return kept(*args, **kwargs)
        if _is_staged():
            return self._accepted(*args, **kwargs)
        _kernels_made.set(False)
        try:
            return self.fused(*args, **kwargs)
        except Exception as error:
            if not may_be_kernels_fault(error) or _is_donated(args, kwargs):
                raise
        return self._fall_back(args, kwargs)

    def _fall_back(self, args: Any, kwargs: Any) -> Any:
        kept = self._accepted
        try:
            result = kept(*args, **kwargs)
        except Exception as error:
            if _is_donated(args, kwargs):
                raise
            kept, second = self._reference, error
        if kept is self._reference:
            result = kept(*args, **kwargs)
            warn_of_reference(self._name, second)
        self._kept.update([(self._key(args, kwargs), kept)])
        return result

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        try:
            return self._calls.key(args, kwargs)
        except (TypeError, ValueError):  # jax.jit raises the error
            return None

    def plan_of(self, args: Any, kwargs: Any) -> PlanOf:
        """The planning function for calls with these shapes."""
        if self._kept and self._kept.get(self._key(args, kwargs)) is not None:
            return partial(plan_accepted, None, compile_here)
        return self._plan_of

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(f).trace``. Kernels are compiled now, since the traced program is compiled by
        others."""
        on_cpu = local_platform() == "cpu"
        return (self.fused if on_cpu else self._accepted).trace(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> RecoveringLowered:
        """As ``jax.jit(f).lower``."""
        attempts = [self.fused, self._accepted, self._reference]
        kept = self._kept.get(self._key(args, kwargs)) if self._kept else None
        if kept is not None:
            attempts = attempts[attempts.index(kept) :]
        return RecoveringLowered(self._name, [partial(jitted.lower, *args, **kwargs) for jitted in attempts])

    def clear_cache(self) -> None:
        """As ``jax.jit(f).clear_cache()``."""
        self._kept.clear()
        for jitted in (self.fused, self._accepted):
            jitted.clear_cache()  # type: ignore[attr-defined]  # public, missing from JAX's stub


class RecoveringLowered(jax.stages.Lowered):
    """A ``jax.stages.Lowered`` whose ``compile`` recovers when the compiler refuses kernels."""

    def __init__(self, name: str, attempts: Sequence[Callable[[], Any]]) -> None:
        """``attempts`` lower the program; each is tried if those before it fail. The last is
        ``jax.jit``'s."""
        self._name, self._attempts = name, list(attempts)
        self._lowered: Any = None
        self._made = False
        self._retry(lambda: None)

    def compile(self, /, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.stages.Lowered.compile``."""
        return self._retry(lambda: self._lowered.compile(*args, **kwargs))

    def _retry(self, use: Callable[[], Any]) -> Any:
        refused: Exception | None = None
        while True:
            try:
                if self._lowered is None:
                    _kernels_made.set(self._made)
                    try:
                        self._lowered = self._attempts[0]()
                    finally:
                        self._made = _kernels_made.get()
                used = use()
                if refused is not None and len(self._attempts) == 1:
                    warn_of_reference(self._name, refused)
                return used
            except Exception as error:
                _kernels_made.set(self._made)
                if len(self._attempts) == 1 or not may_be_kernels_fault(error):
                    raise
                refused = error
            # Once kernels were emitted, they may have caused any later failure.
            self._lowered = None
            self._attempts.pop(0)

    def __getattr__(self, name: str) -> Any:
        # The attributes of ``jax.stages.Lowered``, whose constructor is not called.
        return getattr(self._lowered, name)


def lower_there(
    name: str,
    emitted: Emitted,
    reference: Any,
    platform: str,
    lower: Callable[[Any], Any],
    compile_kernel: Compile,
    options: dict[str, Any],
) -> RecoveringLowered:
    """Lower for a device that may be absent: ``lower`` lowers a jitted function, ``compile_kernel`` compiles
    a kernel."""
    planned = partial(_plan_and_note_kernels, platform, plan_traced)
    plans = planned, partial(plan_accepted, platform, compile_kernel)
    attempts = [jax.jit(emitted(platform, plan_of), **options) for plan_of in plans]
    return RecoveringLowered(name, [partial(lower, jitted) for jitted in (*attempts, reference)])


def may_be_kernels_fault(error: Exception) -> bool:
    """Whether a kernel may have caused a failure: kernels were emitted before it, or its message says so.
    fuseplan's own errors are meant for the user."""
    return not isinstance(error, FuseplanError) and (_kernels_made.get() or is_refusal(error))


def warn_of_reference(name: str, error: Exception) -> None:
    """Warn that ``jax.jit`` takes over after ``error``, of a compiler or of a run."""
    said = first_line(error)
    warnings.warn(
        f"{name}: the fused program does not compile or run, so jax.jit's own is used. The error: {said}",
        CompilerRefusalWarning,
        stacklevel=3,
    )


def _is_staged() -> bool:
    """Whether the call becomes part of a program that another ``jax.jit`` compiles, on an accelerator."""
    if jax_compat.is_eager() or local_platform() == "cpu":
        return False
    # An operation without operands returns a tracer exactly where operations are recorded.
    return isinstance(jax.lax.iota("int32", 1), jax.core.Tracer)


def _is_donated(args: Any, kwargs: Any) -> bool:
    """Whether an argument was donated, so that the program has run."""
    leaves = jax.tree.leaves((args, kwargs))
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    return any(x.is_deleted() for x in arrays)
