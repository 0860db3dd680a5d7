"""Bounds of the named workloads hold, from their files: a share of what ``experiments.verify_all`` checks.

Each pair of a workload and a device is in one of the shares. One of them runs on each Python, so that the
oldest and the newest JAX check different plans, and those of ``ALWAYS`` on the oldest.
"""

import sys
from functools import cache

import pytest

from costmodel.calibrate import described_cpu
from costmodel.devices import get_device
from experiments.verify_all import SLOW, ZOO, device_names, in_share, verify_one
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.verify.report import VERIFIED
from fuseplan.workloads import get_workload

OLDEST = sys.version_info < (3, 12)
SHARES = 4
MINE = 0 if OLDEST else 1
ALWAYS = {
    "adam_update": ("cpu",),
    "gpt2_block": ("h200",),
    "gray_scott": ("h200",),
    "nbody": ("cpu",),
    "gpt2_block_grad": ("h200", "tpu_v5e"),
    "layernorm_grad": ("h200", "tpu_v5e", "cpu"),
    "linear_cross_entropy_grad": ("tpu_v5e",),
    "equinox_mlp_train": ("cpu",),
    "shallow_water": ("h200",),
    "clip_loss_grad": ("h100",),
    "selective_scan": ("h200", "cpu"),
    "grouped_attention": ("cpu", "h200"),
    "window_attention": ("cpu",),
    "causal_attention_grad": ("h200", "h200:mosaic_gpu", "tpu_v6e"),
}
"""Copies beside sums in two steps, free operations at the end of a loop, masks; some that take long."""


def devices_of(name: str) -> list[str]:
    share = [d for d in device_names() if name not in SLOW and in_share(name, d, MINE, SHARES)]
    return list(dict.fromkeys((*(ALWAYS.get(name, ()) if OLDEST else ()), *share)))


@cache
def lowered(name):
    f, args = get_workload(name).build()
    return lower(trace(f, *args))


@pytest.mark.parametrize("name", [name for name in ZOO if devices_of(name)])
def test_proofs_are_verified_from_their_files(name):
    for device in devices_of(name):
        spec = described_cpu() if device == "cpu" else get_device(device)
        found = verify_one(lowered(name), spec)
        assert found["result"] == VERIFIED, (device, found)


def test_every_pair_is_in_one_share():
    for name in ZOO:
        for device in device_names():
            assert sum(in_share(name, device, k, SHARES) for k in range(SHARES)) == 1
    assert len({d for name in ZOO for d in devices_of(name)}) == len(device_names())
    assert set(ZOO) >= set(SLOW)
    assert set(ALWAYS) <= set(ZOO)
