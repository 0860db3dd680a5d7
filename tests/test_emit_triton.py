"""Triton kernels, run in Pallas' interpret mode against ``jax.jit``."""

from __future__ import annotations

import pytest

from tests.emit_cases import check
from tests.prologue_cases import BY_NAME, CASES
from tests.specs import hand_spec, kernel_function, whole_group

RUNS = [(c.name, d) for c in CASES if c.triton is not None for d in c.dtypes]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_matches_jit(name: str, dtype: str) -> None:
    case = BY_NAME[name]
    args = case.arguments(dtype)
    lowered = whole_group(case.f, *args)
    spec = hand_spec(lowered, "triton", *(case.triton or ()))
    check(case, dtype, kernel_function(spec, lowered, interpret=True)(*args), args)
