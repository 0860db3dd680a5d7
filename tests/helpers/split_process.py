"""Run in a process of its own, with four simulated devices: loop nests with tiles chosen by hand, split over
devices along one or two of their axes. Each prints a line."""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = "true"

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from costmodel.kernel import KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import run_equations
from fuseplan.runtime.partition import partitioned, traced_for_devices
from fuseplan.runtime.split_axes import split_axes
from tests.helpers import nest_cases
from tests.helpers.nests import describe, specs_of
from tests.helpers.quickly import all_quickly

SIZES = {nest_cases.M: 16, nest_cases.N: 32}
"""Sizes that devices can share, for those of the cases."""
TILES = {16: 4, 32: 8, 3: 1}
RAGGED_TILES = {16: 3, 32: 5, 3: 1}
"""Tiles that do not divide a part."""
MESH = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
MOVES = re.compile(r"\b(all-gather|all-to-all|collective-permute)(?:-start)?\(")


def main() -> None:
    """Split ``count`` nests of each case; the arguments are the count and a seed."""
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    nest_cases.M, nest_cases.N = SIZES.values()
    for name, (f, args) in nest_cases.CASES.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        args = tuple(x[tuple(slice(SIZES.get(n, n)) for n in x.shape)] for x in args)
        lowered, specs = specs_of(f, args, (TILES, RAGGED_TILES)[rng.integers(2)])
        for spec in [specs[i] for i in rng.permutation(len(specs))[:count]]:
            print(json.dumps({"name": name, **split(spec, lowered, args, rng)}), flush=True)


def split(
    spec: KernelSpec, lowered: Lowered, args: tuple[Any, ...], rng: np.random.Generator
) -> dict[str, Any]:
    """Split a nest along two of its axes: what was split, and how far it is from the whole."""
    arrays = inputs(spec, lowered, args)
    axes = [int(a) for a in rng.permutation(len(spec.axes)) if spec.axes[a].size % 2 == 0][:2]
    of_axis = dict(zip(axes, MESH.axis_names, strict=False))
    first = {read.value: read for read in reversed(spec.reads)}
    placed = []
    for v, x in zip(live_ins(spec), arrays, strict=True):
        dims = [of_axis.get(own[0]) if own else None for own in first[v].axes]
        dims = [d if d is not None and dims.index(d) == i else None for i, d in enumerate(dims)]
        placed.append(jax.device_put(x, NamedSharding(MESH, P(*dims))))
    kernel = emit(spec, lowered)
    with traced_for_devices(jax.devices()):
        compiled = jax.jit(partitioned(kernel, spec, lowered, emit)).lower(*placed).compile()
    got, want = compiled(*placed), jax.jit(kernel)(*arrays)
    how = split_axes(spec, lowered)
    can = [a not in how.whole and spec.axes[a].size // 2 % how.units[a] == 0 for a in axes]
    return {
        "nest": describe(spec, lowered),
        "axes": axes,
        "split": can,
        "inside": len(how.inside),
        "moves": len(MOVES.findall(compiled.as_text())),
        "wrong": max(map(distance, got, want)),
    }


def inputs(spec: KernelSpec, lowered: Lowered, args: tuple[Any, ...]) -> list[Any]:
    """The arrays that a nest reads in a call of the whole function."""
    values: dict[int, Any] = dict(zip(lowered.graph.inputs, [*lowered.consts, *args], strict=True))
    run_equations(lowered.equations, values)
    return [values[v] for v in live_ins(spec)]


def distance(x: Any, y: Any) -> float:
    """The largest error, relative to the largest element; infinite if another element is no number."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return float("inf")
    x, y = np.where(np.isfinite(x), x, 0), np.where(np.isfinite(y), y, 0)
    return float(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-300))


if __name__ == "__main__":
    with all_quickly():
        main()
