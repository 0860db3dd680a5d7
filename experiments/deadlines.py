"""Check that planning keeps its deadline on programs that are hard to plan.

``python -m experiments.deadlines`` plans each for a CPU, a GPU and a TPU under several deadlines, and prints
the excess of each planning time over its limit: the deadline, half a second, and a fifth of the time of
tracing and lowering. Times are CPU times of this process, the planner's own clock included, so that other
load on the machine does not count. Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import fuseplan
from fuseplan.extend import SolutionCache, lower, trace, using_cache

Program = tuple[Callable[..., Any], tuple[Any, ...]]

DEVICES = ("cpu", "h200", "tpu_v5e")
DEADLINES_S = (0.0, 0.1, 1.0, 5.0)

_SLACK_S = 0.5
_SHARE = 0.2
"""What is promised beyond the deadline: seconds, and a share of tracing and lowering."""


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chain(n: int) -> Program:
    """Elementwise operations one after the other."""

    def f(x: Any) -> Any:
        for i in range(n):
            x = (jnp.sin(x), x * 1.01, x + 0.3)[i % 3]
        return x

    return f, (_array(64, 64),)


def fan(n: int, depth: int = 2) -> Program:
    """As many results of one array, each a few operations away."""

    def f(x: Any) -> Any:
        found = []
        for i in range(n):
            y = x * (1.0 + i)
            for _ in range(depth - 1):
                y = jnp.sin(y)
            found.append(y)
        return tuple(found)

    return f, (_array(64, 64),)


def web(n: int, width: int = 8) -> Program:
    """Binary operations, each on two of the last few results."""
    rng = random.Random(0)
    pairs = [(rng.randrange(width), rng.randrange(width)) for _ in range(n)]

    def f(*arrays: Any) -> Any:
        last = list(arrays)
        for i, (a, b) in enumerate(pairs):
            one, other = last[-1 - a % len(last)], last[-1 - b % len(last)]
            last = [*last[1 - width :], (one + other, one * other, jnp.maximum(one, other))[i % 3]]
        return last[-1]

    return f, tuple(_array(64, 64) for _ in range(4))


def simulation(n: int) -> Program:
    """Many small vectors that are computed from each other, now and then put together and taken apart: one
    step of many rigid bodies."""
    rng = random.Random(1)

    def f(x: Any) -> Any:
        vectors = [x[:, i] for i in range(16)]
        for k in range(n // 5):
            a, b, c = (rng.choice(vectors[-24:]) for _ in range(3))
            vectors.append(jnp.where(a > b, a * b - c, jnp.sin(c) + a))
            if k % 40 == 0:
                rows = jnp.stack(vectors[-12:], 1)
                rows = rows * jnp.sum(rows, 1, keepdims=True)
                vectors += [rows[:, i] for i in range(12)]
        return jnp.stack(vectors[-8:], 1)

    return f, (_array(2048, 16),)


def sums(n: int) -> Program:
    """Sums of one array along rows and columns in turns."""

    def f(x: Any) -> Any:
        return tuple((x * (i + 1.0)).sum(axis=i % 2) for i in range(n))

    return f, (_array(512, 512),)


def norms(n: int) -> Program:
    """Rows and columns normalised in turns."""

    def f(x: Any) -> Any:
        for _ in range(n):
            x = jnp.exp(x - x.max(-1, keepdims=True))
            x = x / x.sum(0, keepdims=True)
        return x

    return f, (_array(512, 512),)


def masked_attention(rows: int, columns: int) -> Program:
    """Attention behind a mask with a period."""

    def f(q: Any, k: Any, v: Any) -> Any:
        i, j = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
        return jax.nn.softmax(q @ k.T, axis=-1, where=(i % 7 != 3) & (i >= j)) @ v

    return f, (_array(rows, 64), _array(columns, 64), _array(columns, 64))


def nests(n: int) -> Program:
    """Attention of the result of attention."""

    def f(q: Any, k: Any, v: Any) -> Any:
        for _ in range(n):
            q = jax.nn.softmax(q @ k.T, -1) @ v
        return q

    return f, tuple(_array(1024, 64) for _ in range(3))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "chain of 10,000": lambda: chain(10_000),
    "fan of 300": lambda: fan(300),
    "fan of 5,000": lambda: fan(5_000),
    "flat fan of 5,000": lambda: fan(5_000, 1),
    "web of 300": lambda: web(300),
    "web of 3,000": lambda: web(3_000),
    "simulation of 5,000": lambda: simulation(5_000),
    "300 sums": lambda: sums(300),
    "60 norms": lambda: norms(60),
    "masked attention 1,536": lambda: masked_attention(1_536, 4_096),
    "masked attention 8,192": lambda: masked_attention(8_192, 8_192),
    "24 nests": lambda: nests(24),
}

SMALL: dict[str, Callable[[], Program]] = {
    "chain of 1,500": lambda: chain(1_500),
    "fan of 300": lambda: fan(300),
    "web of 600": lambda: web(600),
    "simulation of 1,200": lambda: simulation(1_200),
    "60 sums": lambda: sums(60),
    "8 norms": lambda: norms(8),
    "masked attention 8,192": lambda: masked_attention(8_192, 8_192),
    "4 nests": lambda: nests(4),
}
"""The same in a size for every test run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One planning, in seconds of CPU."""

    trace_s: float
    lower_s: float
    plan_s: float
    deadline_s: float
    plan: fuseplan.Plan

    @property
    def over_s(self) -> float:
        """By how much it outlasts what is promised; negative where it does not."""
        promised_s = self.deadline_s + _SLACK_S + _SHARE * (self.trace_s + self.lower_s)
        return self.plan_s - promised_s


def runs(program: Program, devices: Sequence[str], deadlines_s: Sequence[float]) -> Iterator[Run]:
    """A program, planned for each device under each deadline, with nothing remembered."""
    started = time.process_time()
    flat = trace(program[0], *program[1])
    traced = time.process_time()
    lowered = lower(flat)
    lowered_at = time.process_time()
    for device in devices:
        for deadline_s in deadlines_s:
            planned = fuseplan.make_plan(lowered, device=device, deadline_s=deadline_s)
            with using_cache(SolutionCache()), mock.patch.object(time, "monotonic", time.process_time):
                before = time.process_time()
                plan = planned()
                after = time.process_time()
            yield Run(traced - started, lowered_at - traced, after - before, deadline_s, plan)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; whether a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--deadlines", default=",".join(map(str, DEADLINES_S)))
    chosen = parser.parse_args(arguments)
    devices = chosen.devices.split(",")
    deadlines_s = [float(text) for text in chosen.deadlines.split(",")]
    # What is loaded once in a process is no part of a planning.
    list(runs(web(20), devices, [5.0]))
    broken = 0
    print(f"{'program':24}{'device':9}{'deadline':>9}{'plan s':>8}{'over s':>8}  status      µs  kernels")
    for name, make in PROGRAMS.items():
        if chosen.only not in name:
            continue
        found = runs(make(), devices, deadlines_s)
        for device in devices:
            for _ in deadlines_s:
                run = next(found)
                broken += run.over_s > 0
                print(
                    f"{name:24}{device:9}{run.deadline_s:9.1f}{run.plan_s:8.2f}{run.over_s:+8.2f}  "
                    f"{run.plan.status:9}{run.plan.objective_us:10.2f}{len(run.plan.kernels):8}"
                    f"{'  BROKEN' if run.over_s > 0 else ''}",
                    flush=True,
                )
    print(f"{broken} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
