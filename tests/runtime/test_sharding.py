"""Fused functions on several devices: eight simulated ones, in a process of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.sharded import PROGRAMS

# One process of eight devices is enough for all of them.
pytestmark = [pytest.mark.xdist_group("sharding"), pytest.mark.slow]


ROOT = Path(__file__).parents[2]


def started(module, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.helpers.{module}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_of(process):
    """What a process prints: a JSON object a line."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # Gloo prints, too


@pytest.fixture(scope="module")
def said():
    """The line of each case, as ``sharded_process`` prints it."""
    return {line["name"]: line for line in lines_of(started("sharded_process"))}


@pytest.mark.parametrize(
    "name",
    [
        "shard_map of fused",
        "fused shard_map",
        "gradient of fused shard_map",
        "collective inside, checked",
        "collective inside, unchecked",
        "training step, fused loss",
        "training step, all fused",
        "gathered and scattered",
        "ordered side effect on each shard",
        "sharded arguments",
        "explicitly sharded arguments",
        "in_shardings",
        "vmap with a named axis",
    ],
)
def test_results_and_shardings_are_those_of_jax(said, name):
    assert said[name]["wrong"] < 1e-6
    assert said[name]["same_shardings"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_shard_is_planned_by_its_own_shapes(said, check_vma):
    """Attention of a shard is loops, forward and back, however JAX tracks what differs."""
    of_shard = said[f"loops of each shard, {check_vma}"]
    assert of_shard["wrong"] < 1e-4
    assert of_shard["loops"] >= 3


CASES = [
    f"{name}, {kind}"
    for name, program in PROGRAMS.items()
    for kind in ("Auto", "Explicit")[: 1 + program.is_explicit]
]


@pytest.mark.parametrize("case", CASES)
def test_loops_are_partitioned_as_xla_partitions_operations(said, case):
    """No operand is gathered: the only collectives are those of ``jax.jit``'s program."""
    partitioned = said[case]
    assert partitioned["wrong"] < 1e-4
    assert partitioned["same_shardings"]
    assert partitioned["kernels"] >= 1
    assert not partitioned["more_collectives"]


@pytest.mark.parametrize(
    "name",
    [
        "shards inside over 2",
        "shards inside over 1",
        "explicit without set_mesh",
        "explicit with set_mesh",
        "explicit with a scatter",
    ],
)
def test_loops_run_wherever_jax_has_a_mesh(said, name):
    assert said[name]["wrong"] < 1e-5
    assert said[name]["same_shardings"]
    assert said[name]["loops"] >= 1


@pytest.mark.parametrize("name", ["64 bits in a block", "manual over one axis"])
def test_where_kernels_cannot_be_partitioned_the_program_is_jaxs(said, name):
    inside = said[name]
    assert inside["wrong"] == 0
    assert not inside["more_collectives"]
    assert inside["same_shardings"]
    assert inside["loops"] == 0


def test_partitioned_loops_keep_what_is_large_out_of_memory(said):
    assert said["training: batch, heads, Auto"]["temporaries"] < 0.5


@pytest.mark.one_python
def test_nests_give_the_same_results_split_over_devices():
    """Nests with tiles chosen by hand, split along two of their axes: with masks, softmaxes, ragged tiles."""
    lines = lines_of(started("split_process", 1, 0))
    assert len(lines) > 40
    assert [line for line in lines if not line["wrong"] < 1e-9] == []
    assert [line for line in lines if all(line["split"]) and line["moves"]] == []
    assert any(line["inside"] and all(line["split"]) for line in lines)


@pytest.mark.one_python
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_kernels_give_the_same_results_split_over_devices(device):
    """In Pallas' interpreter, along each axis that can be split."""
    lines = lines_of(started("split_process", device))
    assert len(lines) > 10
    assert [line for line in lines if not line["wrong"] < 1e-4 or line["moves"]] == []


def test_loops_are_partitioned_over_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [started("distributed_process", number, port) for number in range(2)]
    try:
        said_by = list(map(lines_of, processes))
    finally:
        for process in processes:  # If one fails, the other waits for it.
            process.kill()
            process.communicate()
    for lines in said_by:
        assert len(lines) == 3
        for line in lines:
            assert line["wrong"] < 1e-4
            assert line["same_shardings"]
            assert line["kernels"] >= 1
