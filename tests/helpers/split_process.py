"""Run in a process of its own, with four simulated devices: loop nests with tiles chosen by hand, or a plan's
kernels, split over devices along one or two of their axes. Each prints a line."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import zlib
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_X64"] = str(len(sys.argv) > 2)  # nests are compared in float64

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from costmodel.kernel import KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import run_equations, trace
from fuseplan.runtime.partition import partitioned, traced_for_devices
from fuseplan.runtime.split_axes import first_reads, split_axes
from fuseplan.settings import make_options
from fuseplan.workloads import get_workload, make_args
from tests.helpers import nest_cases
from tests.helpers.nests import describe, specs_of
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import all_quickly

SIZES = {nest_cases.M: 16, nest_cases.N: 32}
"""Sizes that devices can share, for those of the cases."""
TILES = {16: 4, 32: 8, 3: 1}
RAGGED_TILES = {16: 3, 32: 5, 3: 1}
"""Tiles that do not divide a part."""
MESH = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
MOVES = re.compile(r"\b(all-gather|all-to-all|collective-permute)(?:-start)?\(")


def scaled_rows(x):
    """A sum along the axis that indexes what it scales."""
    return x * jnp.exp(x).sum(1, keepdims=True), (jnp.exp(x).sum(1, keepdims=True) * jnp.tanh(x)).sum(0)


def merged(x):
    """The index along a dimension that merges two axes."""
    return (jnp.exp(x).reshape(-1) * jnp.arange(x.size)).sum()


def joined(x, y):
    return (jnp.concatenate([jnp.exp(x), jnp.tanh(y)], 1) * jnp.arange(2 * x.shape[1])).sum(1)


def symmetric(u, v):
    """The sum of an array and its transpose: one axis indexes both dimensions."""
    y = u[:, :, None] * v[:, None, :]
    return jnp.tanh(y + y.swapaxes(1, 2)).sum((1, 2))


def divided(x):
    """Parts of both signs over zero: infinite, and not NaN."""
    return jnp.sum(x**3, 1) / (0 * x[:, 0])


def picked(z, m):
    index = jnp.sum(m * m, 1).astype(int) % z.shape[1]
    return jnp.take_along_axis(jnp.exp(z), index[:, None], 1)


def any_product(x, y):
    return jnp.einsum("ij,jk->ik", jnp.exp(x) > 1, jnp.exp(y) > 1)


def normal(*shape: int) -> Any:
    return nest_cases.normal(*shape)


MORE = {
    "scaled_rows": (scaled_rows, (normal(16, 32),)),
    "merged": (merged, (normal(16, 32),)),
    "joined": (joined, (normal(16, 32), normal(16, 32))),
    "symmetric": (symmetric, (normal(8, 16), normal(8, 16))),
    "divided": (divided, (normal(16, 32),)),
    "picked": (picked, (normal(16, 32), normal(16, 32))),
    "any_product": (any_product, (normal(16, 32), normal(32, 16))),
}
"""Functions of which each nest is split along each axis."""
WORKLOADS = (
    "softmax",
    "layernorm_grad",
    "causal_attention",
    "mlp",
    "linear_cross_entropy_grad",
    "gpt2_block",
    "embedding_bags",
    "bond_energy",
)
"""Those whose kernels for GPUs and TPUs are split."""


def main() -> None:
    """Split ``count`` nests of each case, or the kernels of workloads for a device. The arguments are the
    count and a seed, or the device."""
    if len(sys.argv) == 2:
        of_device(sys.argv[1])
        return
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    nest_cases.M, nest_cases.N = SIZES.values()
    for name, (f, args) in nest_cases.CASES.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        args = tuple(x[tuple(slice(SIZES.get(n, n)) for n in x.shape)] for x in args)
        lowered, specs = specs_of(f, args, (TILES, RAGGED_TILES)[rng.integers(2)])
        for spec in [specs[i] for i in rng.permutation(len(specs))[:count]]:
            axes = [int(a) for a in rng.permutation(len(spec.axes)) if spec.axes[a].size % 2 == 0][:2]
            said = split(spec, lowered, inputs(spec, lowered, args), axes)
            print(json.dumps({"name": name, "nest": describe(spec, lowered), **said}), flush=True)
    for name, (f, args) in MORE.items():
        lowered, specs = specs_of(f, args, {8: 4, **TILES})
        for spec in specs[: 3 * count]:
            arrays = inputs(spec, lowered, args)
            for a in (a for a, axis in enumerate(spec.axes) if axis.size % 2 == 0):
                said = split(spec, lowered, arrays, [a])
                print(json.dumps({"name": name, "nest": describe(spec, lowered), **said}), flush=True)


def of_device(device: str) -> None:
    """Split each kernel of some workloads, in Pallas' interpreter, along each axis that can be split."""
    for name in WORKLOADS:
        f, args = get_workload(name).build(small=True)
        args = make_args(args, seed=0)
        plan = plan_traced(trace(f, *args), make_options(device, "greedy"))[1]
        for spec in (k.spec for k in plan.kernels if k.spec.backend != "xla"):
            arrays, how = inputs(spec, plan.lowered, jax.tree.leaves(args)), split_axes(spec, plan.lowered)
            for a, axis in enumerate(spec.axes):
                if a not in how.whole and axis.size % 2 == 0 and axis.size // 2 % how.units[a] == 0:
                    said = split(spec, plan.lowered, arrays, [a], interpret=True)
                    print(json.dumps({"name": name, "nodes": len(spec.nodes), **said}), flush=True)


def split(
    spec: KernelSpec, lowered: Lowered, arrays: list[Any], axes: list[int], *, interpret: bool = False
) -> dict[str, Any]:
    """Split a kernel along axes: what was split, and how far it is from the whole."""
    of_axis = dict(zip(axes, MESH.axis_names, strict=False))
    first = first_reads(spec)
    placed = []
    for v, x in zip(live_ins(spec), arrays, strict=True):
        dims = [of_axis.get(own[0]) if own else None for own in first[v].axes]
        dims = [d if d is not None and dims.index(d) == i else None for i, d in enumerate(dims)]
        placed.append(jax.device_put(x, NamedSharding(MESH, P(*dims))))
    emitted = functools.partial(emit, interpret=interpret)
    kernel = emitted(spec, lowered)
    with traced_for_devices(jax.devices()):
        compiled = jax.jit(partitioned(kernel, spec, lowered, emitted)).lower(*placed).compile()
    got, want = compiled(*placed), jax.jit(kernel)(*arrays)
    how = split_axes(spec, lowered)
    return {
        "axes": axes,
        "split": [a not in how.whole and spec.axes[a].size // 2 % how.units[a] == 0 for a in axes],
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
    """The largest error, relative to the largest element; infinite if another element is NaN or infinite."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    finite = np.isfinite(y)
    if not np.array_equal(np.where(finite, 0, y), np.where(np.isfinite(x), 0, x), equal_nan=True):
        return float("inf")
    x, y = np.where(finite, x, 0), np.where(finite, y, 0)
    return float(np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), 1e-300))


if __name__ == "__main__":
    with all_quickly():
        main()
