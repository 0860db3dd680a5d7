"""Plan functions at fifty sizes: what the plan of one size, taken over to others, saves and costs.

``python -m experiments.dynamic_shapes`` prints a table of modelled plans for several devices. Each function
is planned by one ``fuseplan.jit`` at fifty sizes of its leading axis, in random order, and at every fifth
size by ``fuseplan.make_plan``, to compare. Then the first calls at these sizes are timed on this CPU, beside
those of ``jax.jit`` and of ``fuseplan.jit(dynamic_shapes=False)``; ``--without-calls`` leaves them out.
``--out FILE`` keeps the rows as CSV.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fuseplan
from fuseplan.bench import csv_of, machine_columns, print_table, progress, write_text

DEVICES = ("cpu", "h200", "tpu_v5e")

N_SIZES = 50

COMPARED = 5
"""Of so many sizes one is also searched for a plan of its own."""

Row = dict[str, Any]


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def _softmax(rows: int) -> Any:
    return jax.nn.softmax, (_array(64 * rows, 1024),)


def _attention(batch: int) -> Any:
    def f(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8
        return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)

    return f, (_array(batch, 4, 256, 64),) * 3


def _mlp_gradient(rows: int) -> Any:
    def loss(w: Any, x: Any, y: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        spread = ((x - mean) ** 2).mean(-1, keepdims=True)
        hidden = jax.nn.gelu((x - mean) * jax.lax.rsqrt(spread + 1e-5) @ w[0])
        return jnp.mean((hidden @ w[1] - y) ** 2)

    x = _array(16 * rows, 256)
    return jax.grad(loss), ([_array(256, 1024), _array(1024, 256)], x, x)


def _kernel_matrix(points: int) -> Any:
    def f(x: Any, y: Any, w: Any) -> Any:
        return jnp.exp(-((x[:, None] - y[None]) ** 2).sum(-1)) @ w

    return f, (_array(100 * points, 3), _array(2000, 3), _array(2000))


def _convolution(batch: int) -> Any:
    def f(x: Any, w: Any, scale: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        centred = y - y.mean((0, 1, 2))
        return jax.nn.relu(centred * jax.lax.rsqrt((centred**2).mean((0, 1, 2)) + 1e-5) * scale)

    return f, (_array(batch, 32, 32, 16), _array(3, 3, 16, 32), _array(32))


PROGRAMS: dict[str, Callable[[int], Any]] = {
    "softmax": _softmax,
    "attention": _attention,
    "mlp gradient": _mlp_gradient,
    "kernel matrix": _kernel_matrix,
    "convolution": _convolution,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default=",".join(DEVICES), metavar="NAMES")
    parser.add_argument("--without-calls", action="store_true", help="do not time calls on this CPU")
    parser.add_argument("--out", metavar="FILE", help="keep the rows as CSV")
    options = parser.parse_args(arguments)
    # Half of the sizes are above 32, so that most are within a factor of two of several others.
    sizes = random.Random(0).sample(range(8, 8 + 2 * N_SIZES), N_SIZES)
    devices = options.devices.split(",")
    with progress(len(PROGRAMS) * (len(devices) + (not options.without_calls))) as steps:
        rows = []
        for name, build in PROGRAMS.items():
            for device in devices:
                steps.start(f"{name}, {device}")
                rows.append({"program": name, "device": device, **planned(build, device, sizes)})
                steps.done()
    calls = []
    if not options.without_calls:
        for name, build in PROGRAMS.items():
            calls.append({"program": name, **called(build, sizes)})
    _print(rows, calls)
    if options.out:
        write_text(Path(options.out), csv_of([{**row, **machine_columns()} for row in rows]))
    return 0


def planned(build: Callable[[int], Any], device: str, sizes: Sequence[int]) -> Row:
    """What one function's plans at all sizes take, and how much slower those that are taken over are."""
    searches: list[float] = []
    taken: list[float] = []
    traces: list[float] = []
    losses: list[float] = []
    f, _ = build(sizes[0])  # Its code does not depend on the size.
    jitted = fuseplan.jit(f, device=device)
    for k, size in enumerate(sizes):
        _, args = build(size)
        jax.clear_caches()
        traces.append(_seconds(partial(jax.jit(f).trace, *args)))
        jax.clear_caches()
        started = time.perf_counter()
        plan = jitted.plan(*args)
        spent = time.perf_counter() - started
        is_taken = any("taken over to" in note for note in plan.notes)
        (taken if is_taken else searches).append(spent)
        if is_taken and k % COMPARED == 0:
            own = fuseplan.make_plan(f, device=device)(*args)
            losses.append(plan.objective_us / own.objective_us - 1)
    return {
        "searched": len(searches),
        "sizes": len(sizes),
        "search_s": statistics.median(searches),
        "taken_over_s": statistics.median(taken) if taken else None,
        "trace_s": statistics.median(traces),
        "mean_loss": statistics.mean(losses or [0.0]),
        "worst_loss": max(losses, default=0.0),
    }


def called(build: Callable[[int], Any], sizes: Sequence[int]) -> Row:
    """Seconds of the first calls at all sizes, by three jitted functions in turns."""
    f, _ = build(sizes[0])
    sides = {
        "jax": jax.jit(f),
        "dynamic": fuseplan.jit(f),
        "each": fuseplan.jit(f, dynamic_shapes=False),
    }
    spent = dict.fromkeys(sides, 0.0)
    for k, size in enumerate(sizes):
        _, shapes = build(size)
        args = jax.tree.map(lambda shape: jnp.full(shape.shape, 0.01, shape.dtype), shapes)
        for side in [*sides][:: 1 if k % 2 else -1]:
            spent[side] += _seconds(partial(_finished, sides[side], args))
    return {f"{side}_s": seconds for side, seconds in spent.items()}


def _finished(f: Callable[..., Any], args: Sequence[Any]) -> None:
    jax.block_until_ready(f(*args))


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _print(rows: Sequence[Row], calls: Sequence[Row]) -> None:
    def shown() -> Iterator[tuple[str, ...]]:
        for row in rows:
            taken = "" if row["taken_over_s"] is None else f"{row['taken_over_s']:.3f}"
            yield (
                row["program"], row["device"], f"{row['searched']} of {row['sizes']}",
                f"{row['search_s']:.3f}", taken, f"{row['trace_s']:.3f}",
                f"{row['mean_loss']:.1%}", f"{row['worst_loss']:.1%}",
            )  # fmt: skip

    print_table(
        ("program", "device", "searched", "search s", "taken over s", "trace s", "slower by", "at most"),
        list(shown()),
        right=range(2, 8),
        title=f"Plans at {N_SIZES} sizes: medians; the modelled time against a plan of the size's own",
    )
    if calls:
        print_table(
            ("program", "jax.jit s", "fuseplan.jit s", "dynamic_shapes=False s"),
            [(r["program"], *(f"{r[k]:.1f}" for k in ("jax_s", "dynamic_s", "each_s"))) for r in calls],
            right=range(1, 4),
            title=f"First calls at {N_SIZES} sizes on this CPU, in all",
        )


if __name__ == "__main__":
    sys.exit(main())
