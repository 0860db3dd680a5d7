"""One of two processes of ``jax.distributed``, each with two simulated devices: the arguments are its number
and the coordinator's port. It runs sharded functions as ``jax.jit`` does and as fuseplan does, and prints how
far they are from each other, and whether they are sharded alike."""

from __future__ import annotations

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

import fuseplan
from fuseplan.targets.calibrate import described_cpu


def main() -> None:
    number, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    from tests.helpers.sharded_programs import EXPLICITLY, PARTITIONED

    for name in EXPLICITLY:
        f, args, specs = PARTITIONED[name]
        mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
        placed = [
            jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), np.asarray(x).__getitem__)
            for x, spec in zip(args, specs, strict=True)
        ]
        lowered = fuseplan.jit(f, device=described_cpu()).lower(*placed)
        got, want = jax.tree.leaves(lowered.compile()(*placed)), jax.tree.leaves(jax.jit(f)(*placed))
        wrong = max(_distance(a, b) for x, y in zip(got, want, strict=True) for a, b in _shards(x, y))
        same = all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(got, want, strict=True))
        kernels = lowered.as_text().count("CustomSPMDPartitioning")
        print(
            json.dumps({"name": name, "wrong": wrong, "same_shardings": same, "kernels": kernels}), flush=True
        )


def _shards(x: jax.Array, y: jax.Array) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = zip(x.addressable_shards, y.addressable_shards, strict=True)
    return [(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs]


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


if __name__ == "__main__":
    main()
