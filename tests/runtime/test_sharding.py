"""Fused functions on several devices: eight simulated ones, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# One process of eight devices is enough for all of them.
pytestmark = [pytest.mark.xdist_group("sharding"), pytest.mark.slow]


@pytest.fixture(scope="module")
def said():
    """The line of each case, as ``sharded_process`` prints it."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.helpers.sharded_process"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}


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
