"""Evaluate a program in NumPy, and bound the error of a correct result in its working types.

The program is evaluated several times in float64: exactly; with each operation's result rounded to its
working type, as hardware that keeps subnormal numbers does and as hardware that does not; and with each
result moved by a few units in the last place at random (stochastic arithmetic). The spread of these runs
is the error that rounding alone makes: it is large where the program is ill-conditioned. Where the runs
disagree on what is NaN or infinite, or on an integer, the element is undetermined and is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from experiments.fuzz.operations import OPERATIONS
from experiments.fuzz.program import Program, is_float, numpy_type

ULPS = 4
"""How far a result is moved at random, in units in the last place: elementary functions of XLA err by as
much."""

SPREADS = 16
"""How many times the observed spread is allowed. Eight samples see a typical error, not the largest."""

SAMPLES = 5
MORE_SAMPLES = 40


@dataclass(frozen=True, slots=True)
class Expected:
    """One result: its exact value, and how far a correct result may be from it."""

    value: np.ndarray
    allowed: np.ndarray
    """The absolute difference allowed for rounding; 0 where elements must be equal."""
    determined: np.ndarray
    """The elements whose value does not depend on how rounding turns out."""
    dtype: str


class _Exact:
    """Float64, without any rounding to the working type."""

    def __init__(self, dtype: str) -> None:
        self.limits = ml_dtypes.finfo(numpy_type(dtype)) if is_float(dtype) else None

    def __call__(self, x: Any) -> Any:
        return x

    def total(self, x: Any, magnitudes: Any) -> Any:
        return x


class _Rounded(_Exact):
    """Each result is rounded to the working type, whose subnormal numbers may be zero."""

    def __init__(self, dtype: str, flushed: bool) -> None:
        super().__init__(dtype)
        self.dtype, self.flushed = numpy_type(dtype), flushed

    def __call__(self, x: Any) -> Any:
        if self.limits is None:
            return x
        x = np.asarray(x).astype(self.dtype).astype(np.float64)
        return np.where(abs(x) < float(self.limits.smallest_normal), 0.0, x) if self.flushed else x

    def total(self, x: Any, magnitudes: Any) -> Any:
        # In another order, terms that overflow together may not, or may cancel as infinities.
        if self.limits is None:
            return x
        return np.where(np.isfinite(x) & (magnitudes > float(self.limits.max)), np.nan, x)


class _Moved(_Exact):
    """Each result is a few units in the last place off, and zeros have any sign."""

    def __init__(self, dtype: str, rng: np.random.Generator) -> None:
        super().__init__(dtype)
        self.rng = rng

    def __call__(self, x: Any) -> Any:
        if self.limits is None:
            return x
        x = np.asarray(x, np.float64)
        noise = self.rng.uniform(-1, 1, x.shape)
        zero = np.copysign(0.0, noise)
        return np.where(x == 0, zero, x * (1 + ULPS * float(self.limits.eps) * noise))

    def total(self, x: Any, magnitudes: Any) -> Any:
        # What cancels out has the error of its terms.
        if self.limits is None:
            return x
        noise = self.rng.uniform(-1, 1, np.shape(x))
        return np.where(np.isfinite(magnitudes), x + float(self.limits.eps) * magnitudes * noise, x)


def evaluate(program: Program, inputs: Sequence[np.ndarray], run: str = "exact", seed: int = 0) -> list[Any]:
    """All values of the program, floats as float64. ``run``: ``exact``, ``rounded``, ``flushed`` or
    ``moved``, at random by ``seed``."""
    rng = np.random.default_rng(seed)
    values: list[Any] = [
        x.astype(np.float64) if is_float(i.dtype) else x for i, x in zip(program.inputs, inputs, strict=True)
    ]
    if run == "flushed":
        values = [_Rounded(i.dtype, True)(v) for i, v in zip(program.inputs, values, strict=True)]
    with np.errstate(all="ignore"):
        for step in program.steps:
            rounding = (
                _Moved(step.dtype, rng)
                if run == "moved"
                else _Rounded(step.dtype, run == "flushed")
                if run != "exact"
                else _Exact(step.dtype)
            )
            operation = OPERATIONS[step.op]
            x = operation.numpy(rounding, *(values[a] for a in step.args), *step.params)
            if is_float(step.dtype):
                x = np.asarray(x, np.float64)
                if not operation.exact:
                    x = rounding(x)
            else:
                x = np.asarray(x).astype(numpy_type(step.dtype))
            values.append(x)
    return values


def rounds(program: Program) -> list[bool]:
    """Of each value, whether rounding may change it."""
    known = [False] * len(program.inputs)
    for step in program.steps:
        made = is_float(step.dtype) and not OPERATIONS[step.op].exact
        known.append(made or any(known[a] for a in step.args))
    return known


def expected_results(program: Program, samples: int = SAMPLES) -> list[Expected]:
    """What each result must be, and how exactly."""
    inputs = [i.array() for i in program.inputs]
    runs = [evaluate(program, inputs)]
    runs += [evaluate(program, inputs, run) for run in ("rounded", "flushed")]
    runs += [evaluate(program, inputs, "moved", seed) for seed in range(samples)]
    rounded = rounds(program)
    return [_expected(program.dtype_of(v), [run[v] for run in runs], rounded[v]) for v in program.results]


def _expected(dtype: str, samples: list[np.ndarray], rounded: bool) -> Expected:
    value = np.asarray(samples[0])
    if not is_float(dtype):
        same = np.ones(value.shape, bool)
        for other in samples[1:]:
            same &= other == value
        return Expected(value, np.zeros(value.shape), same, dtype)
    limits = ml_dtypes.finfo(numpy_type(dtype))
    same = np.ones(value.shape, bool)
    spread = np.zeros(value.shape)
    with np.errstate(all="ignore"):
        for other in samples[1:]:
            same &= (np.isnan(value) & np.isnan(other)) | (value == other) | np.isfinite(value - other)
            spread = np.maximum(spread, np.nan_to_num(abs(other - value), nan=0.0, posinf=0.0))
        # What is within rounding of the largest number may overflow or not.
        same &= ~(np.isfinite(value) & (abs(value) * 1.01 > float(limits.max)))
        finite = np.where(np.isfinite(value), abs(value), 0.0)
    allowed = np.full(value.shape, float(limits.smallest_normal))
    if rounded:
        allowed += SPREADS * spread + 4 * ULPS * float(limits.eps) * finite
    else:  # The value as its type has it.
        allowed += spread
    return Expected(value, allowed, same, dtype)


def difference(got: Any, expected: Expected) -> str:
    """How a result differs from the expected one; empty if it does not."""
    got = np.asarray(got)
    if got.shape != expected.value.shape or got.dtype != numpy_type(expected.dtype):
        return (
            f"expected {expected.dtype}{list(expected.value.shape)}, got {got.dtype}{list(got.shape)} "
            "(type or shape)"
        )
    wrong = ~_agrees(got, expected) & expected.determined
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements are wrong, first at {list(at)}: expected "
        f"{expected.value[at]!r} within {expected.allowed[at]:.3g}, got {got[at]!r}"
    )


def _agrees(got: np.ndarray, expected: Expected) -> np.ndarray:
    value = expected.value
    if not is_float(expected.dtype):
        return np.asarray(got == value)
    x = got.astype(np.float64)
    with np.errstate(all="ignore"):
        near = abs(x - value) <= expected.allowed
    return np.asarray(near | (x == value) | (np.isnan(x) & np.isnan(value)))
