"""Every kernel of the emitter's tests, compiled for a GPU and a TPU that are not there."""

from __future__ import annotations

import pytest

from fuseplan.targets.compile_only import compile_for
from tests.helpers import mosaic_gpu_cases as mosaic_gpu
from tests.helpers.prologue_cases import BY_NAME, CASES, runs
from tests.helpers.specs import hand_spec, kernel_function, whole_group

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot")]

TPU = [(c.name, d) for c in CASES if c.mosaic is not None for d in c.dtypes if d != "float16"]


MOSAIC_GPU = [(c.case.name, d) for c in mosaic_gpu.CASES for d in c.case.dtypes if d != "float16"]


def _compile(name: str, dtype: str, backend: str, device: str) -> None:
    case = BY_NAME[name]
    args = case.arguments(dtype)
    lowered = whole_group(case.f, *args)
    tiles = case.triton if backend == "triton" else case.mosaic
    spec = hand_spec(lowered, backend, *(tiles or ()))
    compile_for(kernel_function(spec, lowered, interpret=False), *args, device=device)


@pytest.mark.parametrize(("name", "dtype"), runs("triton"))
def test_h200(name: str, dtype: str) -> None:
    _compile(name, dtype, "triton", "h200")


@pytest.mark.parametrize(("name", "dtype"), TPU)
def test_tpu_v5e(name: str, dtype: str) -> None:
    _compile(name, dtype, "mosaic_tpu", "tpu_v5e")


@pytest.mark.parametrize(("name", "dtype"), MOSAIC_GPU)
def test_h200_mosaic_gpu(name: str, dtype: str) -> None:
    case, tiles = mosaic_gpu.BY_NAME[name].case, mosaic_gpu.BY_NAME[name].tiles
    args = case.arguments(dtype)
    lowered = whole_group(case.f, *args)
    spec = hand_spec(lowered, "mosaic_gpu", *tiles)
    compile_for(kernel_function(spec, lowered, interpret=False), *args, device="h200")
