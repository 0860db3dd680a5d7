"""A fused function that gets past a compiler that refuses its kernels.

Kernels are compiled inside of one XLA program. When that is refused, or fails in any other way that may be
theirs, the program is made anew of kernels that compile by themselves (``fuseplan.runtime.replan``); should
that fail too, ``jax.jit(f)`` takes its place, whose errors are the user's own. The way that worked is
remembered for calls of the same shapes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax

from fuseplan.frontend.trace import Traced
from fuseplan.pipeline import plan_traced
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.options import Options
from fuseplan.runtime.cache_key import Calls
from fuseplan.runtime.primitive import PlanOf
from fuseplan.runtime.replan import Compile, compile_here, has_kernels, is_refusal, plan_accepted
from fuseplan.support import jax_compat
from fuseplan.support.errors import CompilerRefusalWarning, FuseplanError
from fuseplan.targets.detect import local_platform

Emitted = Callable[[str | None, PlanOf], Callable[..., Any]]
"""For a platform (None: the local one) and a way to plan, the function by the kernels of its plan."""

_kernels_made: ContextVar[bool] = ContextVar("_kernels_made", default=False)
"""Whether kernels were made for the call under way: only then may its failure be theirs."""


def _plan_noted(platform: str | None, traced: Traced, options: Options) -> FusionPlan:
    plan = plan_traced(traced, options)
    # A program with side effects is not run twice unless the words of the error show that it did not run.
    pure = not any(eqn.effects for eqn in plan.lowered.equations)
    if pure and has_kernels(plan, platform or local_platform()):
        _kernels_made.set(True)
    return plan


def _plan_accepted(
    platform: str | None, compile_kernel: Compile, traced: Traced, options: Options, trace_s: float = 0.0
) -> FusionPlan:
    return plan_accepted(traced, options, platform or local_platform(), compile_kernel, trace_s)


class Careful:
    """``jax.jit`` of a fused function, called and lowered like it."""

    def __init__(
        self, name: str, emitted: Emitted, reference: Any, calls: Calls, options: dict[str, Any]
    ) -> None:
        self._name, self._reference, self._calls = name, reference, calls
        self._fused = jax.jit(emitted(None, partial(_plan_noted, None)), **options)
        self._accepted = jax.jit(emitted(None, partial(_plan_accepted, None, compile_here)), **options)
        self._kept: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kept:
            kept = self._kept.get(self._key(args, kwargs))
            if kept is not None:
                return kept(*args, **kwargs)
        if _is_staged():
            return self._accepted(*args, **kwargs)
        _kernels_made.set(False)
        try:
            return self._fused(*args, **kwargs)
        except Exception as error:
            if not may_be_ours(error) or _is_consumed(args, kwargs):
                raise
        return self._instead(args, kwargs)

    def _instead(self, args: Any, kwargs: Any) -> Any:
        kept = self._accepted
        try:
            result = kept(*args, **kwargs)
        except Exception as error:
            kept, second = self._reference, error
        if kept is self._reference:
            result = kept(*args, **kwargs)
            warn_of_reference(self._name, second)
        self._kept[self._key(args, kwargs)] = kept
        return result

    def _key(self, args: Any, kwargs: Any) -> Hashable:
        try:
            return self._calls.key(args, kwargs)
        except (TypeError, ValueError):  # jax.jit says what is wrong.
            return None

    def plan_of(self, args: Any, kwargs: Any) -> PlanOf:
        """How calls like this one are planned."""
        if self._kept and self._kept.get(self._key(args, kwargs)) is not None:
            return partial(_plan_accepted, None, compile_here)
        return plan_traced

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(f).trace``: kernels are tried now, for nobody sees it compiled."""
        on_cpu = local_platform() == "cpu"
        return (self._fused if on_cpu else self._accepted).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> CarefulLowered:
        """As ``jax.jit(f).lower``."""
        ways = [self._fused, self._accepted, self._reference]
        kept = self._kept.get(self._key(args, kwargs)) if self._kept else None
        if kept is not None:
            ways = ways[ways.index(kept) :]
        return CarefulLowered(self._name, [partial(way.lower, *args, **kwargs) for way in ways])

    def clear_cache(self) -> None:
        """As ``jax.jit(f).clear_cache()``."""
        self._kept.clear()
        for jitted in (self._fused, self._accepted):
            jitted.clear_cache()  # type: ignore[attr-defined]  # public, missing from JAX's stub


class CarefulLowered(jax.stages.Lowered):
    """A ``jax.stages.Lowered`` whose ``compile`` gets past a compiler that refuses its kernels."""

    def __init__(self, name: str, ways: Sequence[Callable[[], Any]]) -> None:
        """``ways`` lower the program, each to be tried where those before it fail: the last is
        ``jax.jit``'s."""
        self._name, self._ways = name, list(ways)
        self._lowered: Any = None
        self._made = False
        self._use(lambda: None)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.stages.Lowered.compile``."""
        return self._use(lambda: self._lowered.compile(*args, **kwargs))

    def _use(self, use: Callable[[], Any]) -> Any:
        refused: Exception | None = None
        while True:
            try:
                if self._lowered is None:
                    _kernels_made.set(self._made)
                    try:
                        self._lowered = self._ways[0]()
                    finally:
                        self._made = _kernels_made.get()
                used = use()
                if refused is not None and len(self._ways) == 1:
                    warn_of_reference(self._name, refused)
                return used
            except Exception as error:
                _kernels_made.set(self._made)
                if len(self._ways) == 1 or not may_be_ours(error):
                    raise
                refused = error
            # Once some were made, all that fails later may be for them.
            self._lowered = None
            self._ways.pop(0)

    def __getattr__(self, name: str) -> Any:
        # All that ``jax.stages.Lowered`` keeps of itself, which this one was not given.
        return getattr(self._lowered, name)


def lower_there(
    name: str,
    emitted: Emitted,
    reference: Any,
    platform: str,
    lower: Callable[[Any], Any],
    compile_kernel: Compile,
    options: dict[str, Any],
) -> CarefulLowered:
    """Lower for a device that need not be here: ``lower`` does it with a jitted function,
    ``compile_kernel`` tries a kernel."""
    plans = partial(_plan_noted, platform), partial(_plan_accepted, platform, compile_kernel)
    ways = [jax.jit(emitted(platform, plan_of), **options) for plan_of in plans]
    return CarefulLowered(name, [partial(lower, way) for way in (*ways, reference)])


def may_be_ours(error: Exception) -> bool:
    """Whether a failure may be that of a kernel: some were made on the way to it, or its words say so.
    Our own errors are meant for the user."""
    return not isinstance(error, FuseplanError) and (_kernels_made.get() or is_refusal(error))


def warn_of_reference(name: str, error: Exception) -> None:
    """Say that ``jax.jit`` takes over."""
    said = next(iter(str(error).splitlines()), type(error).__name__)
    warnings.warn(
        f"{name}: the compiler refused the fused program, so jax.jit's own is used. It said: {said}",
        CompilerRefusalWarning,
        stacklevel=3,
    )


def _is_staged() -> bool:
    """Whether the call becomes part of a program that another ``jax.jit`` compiles, on an accelerator."""
    if jax_compat.is_eager() or local_platform() == "cpu":
        return False
    # An operation without operands is recorded where anything is.
    return isinstance(jax.lax.iota("int32", 1), jax.core.Tracer)


def _is_consumed(args: Any, kwargs: Any) -> bool:
    """Whether an argument was donated already: the program ran."""
    leaves = jax.tree.leaves((args, kwargs))
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    return any(x.is_deleted() for x in arrays)
