"""A kernel that the real compiler of a device refuses is planned anew."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.devices import get_device
from fuseplan.support.errors import CompilerRefusalWarning

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.one_python]


def attend(q, k, v):
    return jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k)) @ v


def test_shared_memory_of_a_gpu():
    """The tile that 64 MiB of registers and shared memory would allow takes 426 kB, as Triton counts."""
    huge = replace(get_device("h200"), onchip_bytes=2**26, register_bytes=2**26)
    args = [jax.ShapeDtypeStruct((4, 2048, 128), "float32")] * 3
    lowered = fuseplan.jit(attend).lower(*args, device=huge)
    with pytest.warns(CompilerRefusalWarning, match=r"kernel attend: .*has 232.4 kB; planned anew for h200-"):
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1


def test_vmem_of_a_tpu():
    """A row of 4 MiB, eight at a time, exceeds all of VMEM."""
    huge = replace(get_device("tpu_v5e"), onchip_bytes=2**28)
    rows = jax.ShapeDtypeStruct((64, 2**20), "float32")
    lowered = fuseplan.jit(jax.nn.softmax).lower(rows, device=huge)
    with pytest.warns(CompilerRefusalWarning, match="on chip, and has 134.2 MB; planned anew for tpu_v5e-"):
        text = lowered.compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') >= 1
