"""Represent a generated program as data: typed inputs, steps over earlier values, and results.

``Program.source`` writes it as a plain jnp function, and ``Program.function`` is that source compiled, so
that the program that a failure prints is the program that ran.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax import numpy as jnp

FLOATS = ("float32", "bfloat16", "float16", "float64")
SIGNED = ("int32", "int8", "int16", "int64")
UNSIGNED = ("uint32", "uint8", "uint16", "uint64")
INTEGERS = SIGNED + UNSIGNED


def numpy_type(dtype: str) -> Any:
    """The NumPy type of that name, bfloat16 among them."""
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def is_float(dtype: str) -> bool:
    """Whether the type has NaN."""
    return dtype in FLOATS


@dataclass(frozen=True, slots=True)
class Input:
    """An array of random numbers: an argument, or a constant that the function closes over."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    """``normal``; ``positive``; ``special``, with NaN, infinities and zeros; ``infinite``, with infinities
    and zeros; ``small`` and ``large`` integers; ``rare`` and ``often`` true booleans."""
    seed: int
    constant: bool = False

    def array(self) -> np.ndarray:
        """The numbers, the same for the same seed."""
        rng = np.random.default_rng(self.seed)
        if self.dtype == "bool":
            return rng.random(self.shape) < {"rare": 0.1, "often": 0.8}.get(self.kind, 0.5)
        if not is_float(self.dtype):
            limits = np.iinfo(self.dtype)
            low, high = (limits.min, limits.max) if self.kind == "large" else (max(limits.min, -9), 9)
            return rng.integers(low, high, self.shape, self.dtype, endpoint=True)
        x = rng.standard_normal(self.shape)
        if self.kind == "positive":
            x = abs(x) + 0.25
        if self.kind in ("special", "infinite"):
            odd = [np.inf, -np.inf, 0.0, -0.0] + [np.nan] * (self.kind == "special")
            x = np.where(rng.random(self.shape) < 0.06, rng.choice(odd, self.shape), x)
        return np.asarray(x).astype(numpy_type(self.dtype))


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of the table (``operations.OPERATIONS``) on earlier values."""

    op: str
    args: tuple[int, ...]
    params: tuple[Any, ...] = ()
    dtype: str = "float32"
    """Of the result."""


@dataclass(frozen=True, slots=True)
class Program:
    """Values are numbered: first the inputs, then the result of each step."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    x64: bool = False

    def dtype_of(self, value: int) -> str:
        """The type of a value's elements."""
        n = len(self.inputs)
        return self.inputs[value].dtype if value < n else self.steps[value - n].dtype

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The arguments that a derivative may be taken by: their places among the arguments."""
        arguments = [i for i in self.inputs if not i.constant]
        return tuple(k for k, i in enumerate(arguments) if is_float(i.dtype) and np.prod(i.shape))

    def arguments(self) -> list[np.ndarray]:
        """The arrays that the function is called with."""
        return [i.array() for i in self.inputs if not i.constant]

    def source(self) -> str:
        """The program as a function ``f`` in Python."""
        from experiments.fuzz.operations import OPERATIONS

        arguments = [f"v{k}" for k, i in enumerate(self.inputs) if not i.constant]
        lines = [f"def f({', '.join(arguments)}):"]
        for k, i in enumerate(self.inputs):
            where = "a constant, " if i.constant else ""
            lines.append(f"    # v{k}: {where}{i.dtype}{list(i.shape)}, {i.kind}, seed {i.seed}")
        for k, step in enumerate(self.steps, len(self.inputs)):
            template = OPERATIONS[step.op].source
            names = [f"v{a}" for a in step.args]
            text = template.format(*names, p=step.params, t=step.dtype)
            lines.append(f"    v{k} = {text}")
        lines.append(f"    return ({''.join(f'v{r}, ' for r in self.results)})")
        return "\n".join(lines)

    def function(self) -> Callable[..., Any]:
        """``source``, compiled."""
        names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": lax, "inf": np.inf}
        names |= {f"v{k}": jnp.asarray(i.array()) for k, i in enumerate(self.inputs) if i.constant}
        exec(compile(self.source(), "<generated program>", "exec"), names)
        return names["f"]  # type: ignore[no-any-return]

    def in_float64(self) -> Program:
        """The same program with every float of 64 bits."""
        inputs = tuple(replace(i, dtype="float64") if is_float(i.dtype) else i for i in self.inputs)
        wide = dict.fromkeys(FLOATS, "float64")
        steps = tuple(
            replace(
                s,
                dtype=wide.get(s.dtype, s.dtype),
                params=tuple(wide.get(p, p) if isinstance(p, str) else p for p in s.params),
            )
            for s in self.steps
        )
        return replace(self, inputs=inputs, steps=steps, x64=True)
