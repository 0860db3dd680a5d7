"""Mosaic GPU kernels, run in JAX's interpreter of threads and barriers against ``jax.jit``."""

from __future__ import annotations

import jax
import pytest

from fuseplan.support import jax_compat
from tests.helpers.emit_cases import check
from tests.helpers.mosaic_gpu_cases import BY_NAME, CASES
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import hand_spec, kernel_function, whole_group

pytestmark = pytest.mark.usefixtures("compiled_quickly")

OLD = jax.__version_info__ < (0, 11)


def run(name: str, dtype: str) -> None:
    case, tiles = BY_NAME[name].case, BY_NAME[name].tiles
    args = case.arguments(dtype)
    lowered = whole_group(case.f, *args)
    spec = hand_spec(lowered, "mosaic_gpu", *tiles)
    check(case, dtype, run_quickly(kernel_function(spec, lowered, interpret=True), *args), args)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(c.case.name, d) for c in CASES for d in c.case.dtypes if not (c.turned and OLD)],
)
def test_matches_jit(name: str, dtype: str) -> None:
    """A contraction also fails on a barrier that is not waited for, and on copies and stores that race
    (of what tensor cores read JAX keeps no record)."""
    run(name, dtype)


@pytest.mark.skipif(OLD, reason="JAX 0.10 interprets one program after the other")
def test_tiles_that_overlap_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of a ragged axis writes again what the one before it writes; nothing else does."""
    interpret = jax_compat.interpret_gpu
    monkeypatch.setattr(jax_compat, "interpret_gpu", lambda *, detect_races: interpret(detect_races=True))
    run("softmax-a-row-at-a-time", "float32")
    with pytest.raises(Exception, match="RACE DETECTED"):
        run("vector", "float32")
