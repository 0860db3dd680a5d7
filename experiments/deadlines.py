"""Check that planning keeps its deadline on programs that are hard to plan.

``python -m experiments.deadlines`` plans each for a CPU, a GPU and a TPU under several deadlines, and prints
the excess of each planning time over its limit: the deadline, half a second, and a fifth of the time of
tracing and lowering. Times are CPU times of this process, the planner's own clock included, so that other
load on the machine does not count. Exit code 1 if a limit is exceeded.

``--programs 1000`` plans so many programs of random kinds, sizes and deadlines instead (``random_task``),
each for one device, and prints a table by kind and the worst excesses. ``--first`` is the number of the
first, so that one can be planned again.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import fuseplan
from experiments.fuzz.generate import generate
from fuseplan.bench import print_table, progress
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


def web(n: int, width: int = 8, seed: int = 0) -> Program:
    """Binary operations, each on two of the last few results."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(width), rng.randrange(width)) for _ in range(n)]

    def f(*arrays: Any) -> Any:
        last = list(arrays)
        for i, (a, b) in enumerate(pairs):
            one, other = last[-1 - a % len(last)], last[-1 - b % len(last)]
            last = [*last[1 - width :], (one + other, one * other, jnp.maximum(one, other))[i % 3]]
        return last[-1]

    return f, tuple(_array(64, 64) for _ in range(4))


def simulation(n: int, seed: int = 1) -> Program:
    """Many small vectors that are computed from each other, now and then put together and taken apart: one
    step of many rigid bodies."""
    rng = random.Random(seed)

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


def mixture(n: int, seed: int) -> Program:
    """Random steps on matrices: elementwise, sums and norms along rows and columns, products, transposes."""
    rng = random.Random(seed)
    steps = [(rng.randrange(12), rng.randrange(4), rng.randrange(8)) for _ in range(n)]

    def f(x: Any) -> Any:
        last = [x]
        for kind, near, far in steps:
            a, b = last[-1 - near % len(last)], last[-1 - far % len(last)]
            axis = near % 2
            if kind < 4:
                y = (jnp.tanh(a), a * 1.5, jnp.exp(-a), abs(a) + 1.0)[kind]
            elif kind < 8:
                y = (a + b, a * b, jnp.maximum(a, b), jnp.where(a > b, a, 0.5))[kind - 4]
            elif kind == 8:
                y = a * b.sum(axis, keepdims=True)
            elif kind == 9:
                y = jax.nn.softmax(a, axis)
            else:
                y = a @ b if kind == 10 else a.T + b
            last = [*last[-7:], y]
        return tuple(last[-3:])

    return f, (_array(512, 512),)


def generated(seed: int) -> Program:
    """A program of ``experiments.fuzz`` without 64-bit numbers."""
    rng = random.Random(seed)
    while True:
        program = generate(rng.choice)
        dtypes = {value.dtype for value in program.inputs} | {step.dtype for step in program.steps}
        if not any(dtype.endswith("64") for dtype in dtypes):
            return program.function(), tuple(program.arguments())


RANDOM: dict[str, Callable[[random.Random], Program]] = {
    "chain": lambda rng: chain(_size(rng, 10, 10_000)),
    "fan": lambda rng: fan(_size(rng, 10, 5_000), rng.randint(1, 4)),
    "web": lambda rng: web(_size(rng, 10, 5_000), rng.randint(2, 24), rng.randrange(1 << 30)),
    "simulation": lambda rng: simulation(_size(rng, 10, 5_000), rng.randrange(1 << 30)),
    "mixture": lambda rng: mixture(_size(rng, 5, 1_000), rng.randrange(1 << 30)),
    "sums": lambda rng: sums(_size(rng, 2, 400)),
    "norms": lambda rng: norms(_size(rng, 1, 80)),
    "attention": lambda rng: masked_attention(*(128 * rng.randint(1, 64) for _ in range(2))),
    "nests": lambda rng: nests(_size(rng, 1, 30)),
    "generated": lambda rng: generated(rng.randrange(1 << 30)),
}
"""Kinds of random programs, in turns; the sizes of each are as often small as large."""

RANDOM_DEADLINES_S = (0.1, 1.0, 20.0)


def _size(rng: random.Random, least: int, most: int) -> int:
    return round(least * (most / least) ** rng.random())


def random_task(number: int) -> tuple[str, Program, str, float]:
    """The kind, program, device and deadline in seconds of a number; the same on every machine."""
    rng = random.Random(number)
    kind = [*RANDOM][number % len(RANDOM)]
    return kind, RANDOM[kind](rng), rng.choice(DEVICES), rng.choice(RANDOM_DEADLINES_S)


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


@dataclass(frozen=True, slots=True)
class RandomRun:
    """One planning of a random program."""

    number: int
    kind: str
    device: str
    run: Run


def random_runs(numbers: Sequence[int]) -> Iterator[RandomRun]:
    """The plannings of random programs, by their numbers."""
    for number in numbers:
        # Else the traces of earlier programs make the collector's pauses long.
        jax.clear_caches()
        gc.collect()
        gc.freeze()
        kind, program, device, deadline_s = random_task(number)
        (run,) = runs(program, [device], [deadline_s])
        yield RandomRun(number, kind, device, run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; whether a promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--devices", default=",".join(DEVICES))
    parser.add_argument("--deadlines", default=",".join(map(str, DEADLINES_S)))
    parser.add_argument("--programs", type=int, default=0, metavar="N", help="so many random ones instead")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER")
    chosen = parser.parse_args(arguments)
    # What is loaded once in a process is no part of a planning.
    list(runs(web(20), DEVICES, [5.0]))
    if chosen.programs:
        broken = _print_random(range(chosen.first, chosen.first + chosen.programs), chosen.only)
    else:
        deadlines_s = [float(text) for text in chosen.deadlines.split(",")]
        broken = _print_named(chosen.only, chosen.devices.split(","), deadlines_s)
    print(f"{broken} promises broken")
    return 1 if broken else 0


def _print_random(numbers: Sequence[int], only: str) -> int:
    """Plan random programs, each broken promise told at once; how many there are."""
    numbers = [number for number in numbers if only in [*RANDOM][number % len(RANDOM)]]
    found: list[RandomRun] = []
    with progress(len(numbers)) as steps:
        for one in random_runs(numbers):
            found.append(one)
            if one.run.over_s > 0:
                print(f"BROKEN by {one.run.over_s:.2f} s: {_described(one)}", flush=True)
            steps.start(f"{one.kind} {one.number}")
            steps.done()
    rows = []
    for kind in RANDOM:
        own = [one.run for one in found if one.kind == kind]
        if own:
            sizes = [len(run.plan.graph.nodes) for run in own]
            rows.append(
                (
                    kind,
                    f"{len(own):,}",
                    f"{median(sizes):,.0f}",
                    f"{max(sizes):,}",
                    f"{sum(run.plan.status == 'OPTIMAL' for run in own):,}",
                    f"{max(run.over_s for run in own):+.2f}",
                    f"{sum(run.over_s > 0 for run in own):,}",
                )
            )
    head = ("kind", "programs", "median operations", "most", "proven", "worst over s", "broken")
    print_table(head, rows, right=range(1, len(head)), title="Planning times over their limits")
    for one in sorted(found, key=lambda one: -one.run.over_s)[:10]:
        print(f"{one.run.over_s:+.2f} s: {_described(one)}")
    return sum(one.run.over_s > 0 for one in found)


def _described(one: RandomRun) -> str:
    run = one.run
    stages = sorted(run.plan.stats.seconds, key=lambda stage: -stage[1])[:3]
    slowest = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages)
    return (
        f"number {one.number}, {one.kind} of {len(run.plan.graph.nodes):,} operations for {one.device}: "
        f"{run.plan_s:.2f} s under {run.deadline_s:g} s, {run.plan.status}, most of it in {slowest}"
    )


def _print_named(only: str, devices: Sequence[str], deadlines_s: Sequence[float]) -> int:
    """Plan the named programs for each device under each deadline; how many promises are broken."""
    broken = 0
    print(f"{'program':24}{'device':9}{'deadline':>9}{'plan s':>8}{'over s':>8}  status      µs  kernels")
    for name, make in PROGRAMS.items():
        if only not in name:
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
    return broken


if __name__ == "__main__":
    sys.exit(main())
