"""One of two processes of ``jax.distributed``, each with two simulated devices: the arguments are its number
and the coordinator's port. It runs sharded functions as ``jax.jit`` does and as fuseplan does, and prints how
far they are from each other, and whether they are sharded alike."""

from __future__ import annotations

import functools
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import jax
from jax.sharding import AxisType

import fuseplan
from experiments.sharded import PROGRAMS, compiled
from fuseplan.targets.calibrate import described_cpu

NAMES = ("attention: batch, queries", "attention grad: batch", "pairwise: both")


def main() -> None:
    number, port = int(sys.argv[1]), sys.argv[2]
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for name in NAMES:
        pair = compiled(PROGRAMS[name], mesh, functools.partial(fuseplan.jit, device=described_cpu()))
        wrong, same = pair.difference()
        said = {"name": name, "wrong": wrong, "same_shardings": same, "kernels": pair.kernels}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
