"""Mosaic TPU kernels, run in Pallas' interpret mode against ``jax.jit``."""

from __future__ import annotations

import pytest

from tests.helpers.emit_cases import check
from tests.helpers.prologue_cases import BY_NAME, runs
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import hand_spec, kernel_function, whole_group

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.parametrize(("name", "dtype"), runs("mosaic"))
def test_matches_jit(name: str, dtype: str) -> None:
    case = BY_NAME[name]
    args = case.arguments(dtype)
    lowered = whole_group(case.f, *args)
    spec = hand_spec(lowered, "mosaic_tpu", *(case.mosaic or ()))
    check(case, dtype, run_quickly(kernel_function(spec, lowered, interpret=True), *args), args)
