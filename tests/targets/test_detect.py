"""The device that JAX runs on, by the name that its driver gives it."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from fuseplan.support.errors import FuseplanWarning
from fuseplan.targets.detect import local_device

KNOWN = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "b200",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "TPU v4": "tpu_v4",
    "TPU v5 lite": "tpu_v5e",
    "TPU v5e": "tpu_v5e",
    "TPU v5": "tpu_v5p",
    "TPU v5p": "tpu_v5p",
    "TPU v6 lite": "tpu_v6e",
}

# Their names contain those of others.
UNKNOWN = {
    "NVIDIA L40S": "h100",
    "NVIDIA L40": "h100",
    "NVIDIA GH200 480GB": "h100",
    "NVIDIA A1000": "h100",
    "TPU v40": "tpu_v5e",
}


@pytest.fixture
def runs_on(monkeypatch):
    def set_device(kind):
        platform = "tpu" if kind.startswith("TPU") else "gpu"
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind, platform=platform)])

    return set_device


@pytest.mark.parametrize("kind", KNOWN)
def test_a_known_device(runs_on, kind):
    runs_on(kind)
    assert local_device().name == KNOWN[kind]


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_part_of_a_word_is_no_match(runs_on, kind):
    runs_on(kind)
    with pytest.warns(FuseplanWarning, match="does not know the device"):
        assert local_device().name == UNKNOWN[kind]
