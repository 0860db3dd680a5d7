"""Compiling for a device that is not there."""

from __future__ import annotations

import jax
import pytest
from jax import numpy as jnp

from fuseplan.support.errors import FuseplanError, UnknownNameError
from fuseplan.targets.compile_only import (
    MissingCompilerError,
    compile_for,
    targets,
    topology_device,
)

AOT = [pytest.mark.aot, pytest.mark.xdist_group("aot")]


@pytest.mark.parametrize("device", [pytest.param(d, marks=AOT) for d in ("h200", "tpu_v5e")])
def test_compiles_any_function(device: str) -> None:
    x = jax.ShapeDtypeStruct((1024, 512), "float32")
    compiled = compile_for(
        lambda t: (t["a"] @ t["b"]).sum(), {"a": x, "b": jnp.ones((512, 256))}, device=device
    )
    stats = compiled.memory_analysis()
    assert stats.argument_size_in_bytes >= 4 * 1024 * 512
    if device.startswith("tpu"):  # XLA:GPU analyses no cost without its device
        assert compiled.cost_analysis()["flops"] >= 2 * 1024 * 512 * 256
    assert jax.default_backend() == "cpu"


@pytest.mark.parametrize(
    "device", [pytest.param(d, marks=AOT) for d in ("h200", "h100", "tpu_v5e", "tpu_v6e")]
)
def test_devices(device: str) -> None:
    kind = topology_device(device).device_kind.lower()
    assert any(word in kind for word in ("h200", "h100", "tpu"))


def test_names() -> None:
    assert set(targets()) >= {"h200", "h100", "tpu_v5e", "tpu_v6e"}
    with pytest.raises(UnknownNameError, match="expected a device to compile for among h200"):
        compile_for(jnp.sin, jax.ShapeDtypeStruct((8,), "float32"), device="h300")
    assert issubclass(MissingCompilerError, FuseplanError)
