"""Kernels that stream an axis, where a TPU of two cores is simulated: its copies between HBM and VMEM with
the semaphores they wait for, programs of the parallel axes in any order, and memory that holds NaN until
something is written. No two accesses race, and the results are XLA's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from costmodel.devices import get_device
from fuseplan.codegen import emit
from fuseplan.codegen.mosaic_tpu import blocks as mosaic_blocks
from fuseplan.codegen.single_pass import live_ins
from tests.codegen.test_kernel_nests import evaluated, in_float32, in_kernels, in_ranges, small_tiles  # noqa: F401
from tests.helpers.nest_cases import CASES
from tests.helpers.nests import assert_close, describe
from tests.helpers.prologue_cases import BY_NAME
from tests.helpers.specs import S, Tiled, hand_spec, kernel_function, whole_group

pytestmark = [pytest.mark.one_python, pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

SIMULATED = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, random_seed=7)
NESTS = ("attention", "sliding", "cross_entropy", "gated", "gaussian", "gradient of attention")
STREAMED = (
    *("softmax-passes", "layernorm-passes", "passes-down-columns", "written-on-the-way"),
    *("losses-grad-passes", "matmul", "matmul-batched", "row-times-matrix", "into-norm", "residual-of-left"),
)
"""One case of each way that arrays are copied. The results of all cases are checked without the simulation,
which takes seconds a case."""


def race(capfd) -> bool:
    return "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.parametrize("name", NESTS)
def test_several_contractions(name, small_tiles, capfd):  # noqa: F811
    f, args = CASES[name]
    args = in_float32(args)
    lowered, specs = in_kernels(f, args, get_device("tpu_v5e"))
    values = evaluated(lowered, args)
    for spec in (*specs[:1], *in_ranges(lowered, specs)[:1]):
        got = jax.jit(emit(spec, lowered, interpret=SIMULATED))(*(values[v] for v in live_ins(spec)))
        for x, write in zip(got, spec.writes, strict=True):
            assert_close(np.asarray(x), np.asarray(values[write.value]), 2e-4, 2e-5, describe(spec, lowered))
        assert not race(capfd)


def streamed(name):
    case = BY_NAME[name]
    args = case.arguments("float32")
    lowered = whole_group(case.f, *args)
    spec = hand_spec(lowered, "mosaic_tpu", *case.mosaic)
    got = jax.jit(kernel_function(spec, lowered, interpret=SIMULATED))(*args)
    return got, jax.jit(case.f)(*args)


@pytest.mark.parametrize("name", STREAMED)
def test_rows_and_products(name, capfd):
    got, want = streamed(name)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(np.asarray(x), np.asarray(y), 2e-4, 2e-5, name)
    assert not race(capfd)


def test_cores_that_share_a_stream_race(monkeypatch, capfd):
    """What the simulation is for: two cores add to one result, each half of what it sums up."""
    monkeypatch.setattr(mosaic_blocks, "semantics", lambda spec: [pltpu.PARALLEL])
    x, w = np.ones((8, 256), np.float32), np.ones((256, 128), np.float32)
    lowered = whole_group(lambda x, w: x @ w, x, w)
    spec = hand_spec(lowered, "mosaic_tpu", Tiled(0, 1, S, 128))

    def races() -> bool:
        try:
            jax.block_until_ready(jax.jit(kernel_function(spec, lowered, interpret=SIMULATED))(x, w))
        except jax.errors.JaxRuntimeError as error:  # what JAX 0.10 prints newer ones raise
            return "RACE DETECTED" in str(error)
        return race(capfd)

    # Where one core has ended before the other starts, as one time in six, there is nothing to see.
    assert any(races() for _ in range(10))
