"""Measure: time a fused function against ``jax.jit`` on the caller's own arguments, once for
each set of shapes, and keep the better.

A model may misjudge; a measurement on the spot cannot, but for its noise. What cannot be
measured without being noticed (side effects, several processes) is run by ``jax.jit``.
"""

from __future__ import annotations

import statistics
import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax

from fuseplan.report.debug import report_measurement
from fuseplan.runtime.cache_key import Calls
from fuseplan.runtime.interleave import OTHER, SIDES, Inputs, Program, RunError, Side, race, too_large
from fuseplan.support.errors import ConstraintError, FuseplanWarning, UnsupportedOperationError

_TIE = 0.03
"""Medians this close, relative to the smaller, are told apart by noise alone."""

# One measurement at a time, of any function: two would slow each other.
_clock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was found out at one set of shapes, and what is run from then on.

    Times are medians in milliseconds, None where a side was not timed; temporary bytes are
    the compiler's own figure, None where it gives none.
    """

    kept: Side
    reason: str
    fused_ms: float | None = None
    plain_ms: float | None = None
    fused_temp_bytes: int | None = None
    plain_temp_bytes: int | None = None

    def __str__(self) -> str:
        kept = "the fused function" if self.kept == "fused" else "jax.jit's"
        if self.fused_ms is None or self.plain_ms is None:
            return f"kept {kept}: {self.reason}"
        return f"fused {self.fused_ms:.3g} ms, jax.jit {self.plain_ms:.3g} ms; kept {kept}: {self.reason}"


def decide(
    fused_ms: float, plain_ms: float, fused_temp_bytes: int | None, plain_temp_bytes: int | None
) -> Measurement:
    """The faster side; within 3 % the one with less temporary memory, and else ``jax.jit``'s.

    Example:
        >>> decide(1.0, 2.0, 0, 0).kept, decide(1.0, 1.02, 8, 4).kept, decide(1.02, 1.0, 4, 8).kept
        ('fused', 'plain', 'fused')
    """
    kept: Side = "fused" if fused_ms < plain_ms else "plain"
    low, high = sorted((fused_ms, plain_ms))
    reason = f"{high / low:.2f}× as fast" if low else "faster"
    if high - low <= _TIE * low:
        spare = (plain_temp_bytes or 0) - (fused_temp_bytes or 0)
        kept = "fused" if spare > 0 else "plain"
        reason = f"as fast, with {'less' if spare else 'as much'} temporary memory"
    return Measurement(kept, reason, fused_ms, plain_ms, fused_temp_bytes, plain_temp_bytes)


class Choices:
    """Calls the better of two jitted functions, ``fused`` and ``plain``, which give the same
    results; measures them first at each new set of shapes, dtypes, shardings and statics."""

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        fused: Any,
        plain: Any,
        options: dict[str, Any],
        are_same: Callable[[Any], bool],
    ) -> None:
        """``are_same`` says of a jaxpr whether the fused program is the plain one."""
        self.fused, self.plain, self._are_same = fused, plain, are_same
        self._name = name
        self._calls = Calls(f, options)
        self._kept: dict[Hashable, Callable[..., Any]] = {}
        self._measurements: dict[Hashable, Measurement] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            key = self._calls.key(args, kwargs)
            kept = self._kept.get(key)
        except (TypeError, ValueError):  # No key, no cache: jax.jit says what is wrong.
            return self.fused(*args, **kwargs)
        if kept is not None:
            return kept(*args, **kwargs)
        # Never wait: who holds the clock may be waiting for a callback into this function.
        if _is_staging(args, kwargs) or not _clock.acquire(blocking=False):
            return self.fused(*args, **kwargs)
        try:
            measurement, result = self._measure(args, kwargs)
            self._measurements[key] = measurement
            self._kept[key] = self.fused if measurement.kept == "fused" else self.plain
        finally:
            _clock.release()
        report_measurement(self._name, measurement)
        return result

    def measured(self, args: Any, kwargs: Any) -> Measurement | None:
        """The measurement at arguments like these, if there was one."""
        try:
            return self._measurements.get(self._calls.key(args, kwargs))
        except (TypeError, ValueError):  # As in a call: no key.
            return None

    def clear(self) -> None:
        """Forget, and measure anew."""
        self._kept.clear()
        self._measurements.clear()

    def _measure(self, args: Any, kwargs: Any) -> tuple[Measurement, Any]:
        jitted = {"fused": self.fused, "plain": self.plain}

        def settle(measurement: Measurement) -> tuple[Measurement, Any]:
            return measurement, jitted[measurement.kept](*args, **kwargs)

        def without(side: Side, error: Exception) -> tuple[Measurement, Any]:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            other = OTHER[side]
            try:
                settled = settle(Measurement(other, f"the {side} program failed: {said}"))
                jax.block_until_ready(settled[1])
            except Exception as second:
                # Both fail, so it is the function that does: jax.jit's error is the one expected.
                raise (error if side == "plain" else second) from None
            text = f"{self._name}: the {side} program failed, so the {other} one is used. It said: {said}"
            warnings.warn(text, FuseplanWarning, stacklevel=5)
            return settled

        # The function's own errors come from here, as jax.jit raises them.
        traced = self.plain.trace(*args, **kwargs)
        if traced.jaxpr.effects:
            return settle(Measurement("plain", "it has side effects, so it is run once, by jax.jit"))
        if self._are_same(traced.jaxpr):
            return settle(Measurement("plain", "it is jax.jit's own program: no tiled loop could gain"))
        if jax.process_count() > 1:
            return settle(Measurement("plain", "several processes must agree, so it is not timed"))
        dynamic = self._calls.split(args, kwargs)[1:]
        if len(jax.tree.leaves(dynamic)) != len(jax.tree.leaves(traced.args_info)):
            # Versions of JAX differ in what a negative position means where defaults are left out.
            return settle(Measurement("plain", "which arguments are static is unclear, so it is not timed"))
        inputs = Inputs(dynamic, traced.args_info)
        programs: dict[Side, Program] = {}
        for side in SIDES:
            try:
                programs[side] = Program(jitted[side].lower(*args, **kwargs).compile())
            except (UnsupportedOperationError, ConstraintError):
                raise  # strict=True asked for it, or a constraint for what cannot be.
            except Exception as error:
                return without(side, error)
        fused, plain = programs["fused"], programs["plain"]
        refused = too_large(fused, plain, inputs)
        if refused is not None:
            kept, reason = refused
            return settle(Measurement(kept, reason, None, None, fused.temp_bytes, plain.temp_bytes))
        try:
            times, results = race(programs, inputs)
        except RunError as failure:
            return without(failure.side, failure.error)
        inputs.donate()
        medians = [1e3 * statistics.median(times[side]) for side in SIDES]
        measurement = decide(medians[0], medians[1], fused.temp_bytes, plain.temp_bytes)
        return measurement, results[measurement.kept]


def _is_staging(args: Any, kwargs: Any) -> bool:
    """Whether what is called now is recorded (inside ``jax.jit``), transformed, or interpreted,
    instead of compiled and run."""
    disabled: bool = jax.config.jax_disable_jit  # type: ignore[attr-defined]  # a documented option
    # An operation without operands shows what becomes of any, and transfers nothing.
    values = (jax.lax.iota("int32", 1), *jax.tree.leaves((args, kwargs)))
    return disabled or any(isinstance(x, jax.core.Tracer) for x in values)
