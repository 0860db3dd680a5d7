"""Compare functions of sharded arrays with ``jax.jit``'s, on eight simulated devices of this CPU.

``python -m experiments.sharded`` prints a table: how many kernels are partitioned, the collectives of both
programs, their temporaries on each device, and their times in turns. Exit code 1 if a result differs, or is
sharded otherwise. ``--out FILE`` keeps the rows as CSV.

The devices share the cores of this machine, so the times compare the programs, not numbers of devices.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fuseplan
from fuseplan.bench import (
    bytes_text,
    csv_of,
    in_turns,
    machine_columns,
    print_table,
    progress,
    rounds,
    write_text,
)

_COLLECTIVES = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@dataclass(frozen=True, slots=True)
class Program:
    """A function, the shapes of its arguments and how these are sharded over the axes ``data`` and ``model``
    of a mesh."""

    f: Callable[..., Any]
    shapes: tuple[Any, ...]
    specs: tuple[Any, ...]
    is_explicit: bool = False
    """Whether JAX also has it on a mesh of explicit axes, without further annotations."""

    def args(self, mesh: jax.sharding.Mesh) -> list[Any]:
        """Arguments on a mesh."""

        def make(shape: jax.ShapeDtypeStruct, spec: P) -> jax.Array:
            rng = np.random.default_rng(list(shape.shape))
            if jnp.issubdtype(shape.dtype, jnp.integer):
                array = rng.integers(0, CLASSES, shape.shape).astype(shape.dtype)
            else:
                array = (rng.standard_normal(shape.shape) / 4).astype(shape.dtype)
            return jax.make_array_from_callback(
                array.shape, NamedSharding(mesh, spec), array.__getitem__, array.dtype
            )

        pairs = zip(self.shapes, self.specs, strict=True)
        return [jax.tree.map(make, shapes, specs) for shapes, specs in pairs]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of one head."""
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def pairwise(x: Any, y: Any, w: Any) -> Any:
    """A Gaussian kernel matrix times a matrix."""
    return jnp.exp(-((x[:, None] - y[None]) ** 2).sum(-1)) @ w


def pair_energy(x: Any, i: Any, j: Any) -> Any:
    """The energy of pairs of points that indices name."""
    return jax.nn.softplus(-(((x[i] - x[j]) ** 2).sum(-1))).sum()


def cross_entropy(h: Any, w: Any, labels: Any) -> Any:
    """The mean loss of a language model's last layer."""
    logits = h @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def training_step(params: dict[str, Any], x: Any, y: Any) -> tuple[Any, Any]:
    """A step of gradient descent on a transformer's layer."""

    def loss(params: dict[str, Any]) -> Any:
        q, k, v = (jnp.einsum("bsd,dhe->bhse", x, params[name]) for name in "qkv")
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / 4
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
        a = jnp.einsum("bhqk,bhke->bhqe", jax.nn.softmax(scores), v)
        h = x + jnp.einsum("bhse,hed->bsd", a, params["out"])
        return ((h + jax.nn.gelu(h @ params["up"]) @ params["down"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))


def _array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


CLASSES = 4096
MOST_DIFFERENCE = 1e-4
"""Of a result from ``jax.jit``'s, relative to its largest element, in float32."""
_HEADS = (_array(4, 1024, 16),) * 3
_BY_BATCH = (P("data"),) * 3
_POINTS = (_array(2048, 4), _array(4096, 4), _array(4096, 3))
_TOKENS = (_array(1024, 32), _array(32, CLASSES), _array(1024, dtype="int32"))
_PAIRS = (_array(CLASSES, 3), *(_array(1 << 22, dtype="int32"),) * 2)
_PARAMS = {
    **dict.fromkeys("qkv", _array(64, 4, 16)),
    "out": _array(4, 16, 64),
    "up": _array(64, 256),
    "down": _array(256, 64),
}
_BY_HEADS = {
    **dict.fromkeys("qkv", P(None, "model")),
    "out": P("model"),
    "up": P(None, "model"),
    "down": P("model"),
}
PROGRAMS = {
    "attention: batch": Program(attention, _HEADS, _BY_BATCH, True),
    "attention: batch, queries": Program(attention, _HEADS, (P("data", "model"), P("data"), P("data")), True),
    "attention grad: batch": Program(_gradient(attention), _HEADS, _BY_BATCH, True),
    "pairwise: rows": Program(pairwise, _POINTS, (P(("data", "model")), P(), P()), True),
    "pairwise: both": Program(pairwise, _POINTS, (P("data"), P("model"), P("model"))),
    "pairwise grad: rows": Program(_gradient(pairwise), _POINTS, (P("data"), P(), P()), True),
    "pairwise grad: both": Program(_gradient(pairwise), _POINTS, (P("data"), P("model"), P("model"))),
    "named pairs grad: pairs": Program(jax.value_and_grad(pair_energy), _PAIRS, (P(), P("data"), P("data"))),
    "cross-entropy: both": Program(
        jax.value_and_grad(cross_entropy, (0, 1)), _TOKENS, (P("data"), P(None, "model"), P("data"))
    ),
    "training: batch, heads": Program(
        training_step, (_PARAMS, _array(4, 1024, 64), _array(4, 1024, 64)), (_BY_HEADS, P("data"), P("data"))
    ),
}
"""By name: what of them is sharded."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A program of sharded arrays, compiled by fuseplan and by ``jax.jit``."""

    args: list[Any]
    ours: Any
    theirs: Any
    kernels: int
    """The kernels that are partitioned."""

    @property
    def collectives(self) -> tuple[Counter[str], Counter[str]]:
        """The collectives of both programs, by name."""
        ours, theirs = (Counter(_COLLECTIVES.findall(c.as_text())) for c in (self.ours, self.theirs))
        return ours, theirs

    @property
    def temp_bytes(self) -> tuple[int, int]:
        """The temporaries of both programs on each device."""
        ours, theirs = (c.memory_analysis().temp_size_in_bytes for c in (self.ours, self.theirs))
        return ours, theirs

    def difference(self) -> tuple[float, bool]:
        """The largest difference of the results on this process's devices, relative to the largest element,
        and whether all results are sharded alike."""
        results = [jax.tree.leaves(run(*self.args)) for run in (self.ours, self.theirs)]
        pairs = list(zip(*results, strict=True))
        same = all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
        shards = [
            (np.asarray(x.data), np.asarray(y.data))
            for a, b in pairs
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        ]
        return float(max(np.abs(x - y).max() / np.abs(y).max() for x, y in shards)), same


def compiled(program: Program, mesh: jax.sharding.Mesh, jit: Callable[..., Any] = fuseplan.jit) -> Pair:
    """A program on a mesh with the axes ``data`` and ``model``; ``jit`` is fuseplan's, with other options
    perhaps."""
    args = program.args(mesh)
    lowered = jit(program.f).lower(*args)
    kernels = lowered.as_text().count("CustomSPMDPartitioning")
    return Pair(args, lowered.compile(), jax.jit(program.f).lower(*args).compile(), kernels)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all programs, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.sharded", description=__doc__)
    parser.add_argument("--out", type=Path, help="a file for the rows, as CSV")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each program (7)")
    options = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    tasks = [
        (name, program, kind)
        for name, program in PROGRAMS.items()
        for kind in (AxisType.Auto, AxisType.Explicit)[: 1 + program.is_explicit]
    ]
    records = []
    with progress(len(tasks)) as steps:
        for name, program, kind in tasks:
            steps.start(name)
            mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
            records.append(_record(name, kind.name.lower(), compiled(program, mesh), options.rounds))
            steps.done()
    columns = ["program: sharded", "axes", "kernels", "collectives", "temporaries", "time"]
    print_table(columns, map(_cells, records), right=range(2, 6), title="fuseplan / jax.jit, 4 × 2 devices")
    wrong = [r for r in records if r["difference"] > MOST_DIFFERENCE or not r["same_shardings"]]
    for record in wrong:
        alike = "alike" if record["same_shardings"] else "otherwise"
        print(f"{record['program']}: differs by {record['difference']:.0e}, and is sharded {alike}")
    if options.out:
        machine = machine_columns()
        write_text(options.out, csv_of([record | machine for record in records]))
    return int(bool(wrong))


def _record(name: str, mesh: str, pair: Pair, count: int) -> dict[str, Any]:
    (ours, theirs), (own_bytes, jax_bytes) = pair.collectives, pair.temp_bytes
    difference, same = pair.difference()

    def timed(run: Any) -> Callable[[], float]:
        def sample() -> float:
            started = time.perf_counter()
            jax.block_until_ready(run(*pair.args))
            return time.perf_counter() - started

        return sample

    own_s, jax_s = in_turns([timed(pair.ours), timed(pair.theirs)], rounds(count))
    return {
        "program": name,
        "mesh": mesh,
        "kernels": pair.kernels,
        "collectives": ours.total(),
        "jax_collectives": theirs.total(),
        "more_collectives": " ".join((ours - theirs).elements()),
        "temp_bytes": own_bytes,
        "jax_temp_bytes": jax_bytes,
        "ms": 1000 * statistics.median(own_s),
        "jax_ms": 1000 * statistics.median(jax_s),
        "speedup": statistics.median(b / a for a, b in zip(own_s, jax_s, strict=True)),
        "difference": difference,
        "same_shardings": same,
    }


def _cells(record: dict[str, Any]) -> list[str]:
    return [
        record["program"],
        record["mesh"],
        str(record["kernels"]),
        f"{record['collectives']} / {record['jax_collectives']}",
        f"{bytes_text(record['temp_bytes'])} / {bytes_text(record['jax_temp_bytes'])}",
        f"{record['speedup']:.2f}×",
    ]


if __name__ == "__main__":
    sys.exit(main())
