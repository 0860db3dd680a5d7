"""Contractions whose operands are computed in their kernel: more cases of ``emit_cases``.

Every extent is ragged, the contracted one too: what a prologue makes of the padding (exp(0) is
one, 1 / 0 infinite) must not be summed.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from tests.helpers import emit_cases
from tests.helpers.cutting_cases import CUTTING
from tests.helpers.emit_cases import BRAIN, WIDE, Case
from tests.helpers.specs import P, S, Tiled

_ROWS_T, _COLUMNS_T = Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32)
_ROWS_M, _COLUMNS_M = Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 128)
_NN_T, _NN_M = (_ROWS_T, _COLUMNS_T, Tiled(0, 1, S, 16)), (_ROWS_M, _COLUMNS_M, Tiled(0, 1, S, 128))
_BATCH_T = (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(0, 2, S, 16))
_BATCH_M = (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 128), Tiled(0, 2, S, 128))
_X, _W, _SQUARE = (70, 200), (200, 130), (130, 130)


def _norm(x: Any, mean: Any, rstd: Any, g: Any, b: Any, w: Any) -> Any:
    return jax.nn.relu(((x - mean) * rstd * g + b) @ w)


def _causal(s: Any, v: Any) -> Any:
    rows, columns = lax.broadcasted_iota(jnp.int32, s.shape, 0), lax.broadcasted_iota(jnp.int32, s.shape, 1)
    return jnp.where(rows >= columns, jnp.exp(s), 0) @ v


def _heads(q: Any, k: Any) -> Any:
    q = q.reshape(40, 4, 32).transpose(1, 0, 2) * 0.2
    return jnp.einsum("htd,hdu->htu", q, k)


def _narrow(x: Any, w: Any) -> Any:
    return jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


HALF, BF16 = ("float16",), ("bfloat16",)

PROLOGUES: tuple[Case, ...] = (
    Case("into-left", lambda a, b, w: (jax.nn.silu(a) * b) @ w, (_X, _X, _W), _NN_T, _NN_M, BRAIN),
    Case("into-right", lambda x, w: x @ jnp.tanh(w) + 1, (_X, _W), _NN_T, _NN_M, WIDE),
    Case("into-both", lambda x, w: jax.nn.relu(x) @ jnp.tanh(w), (_X, _W), _NN_T, _NN_M, HALF),
    Case(
        "of-padding-one",
        lambda x, w: jnp.exp(x) @ jnp.exp(w),
        (_X, _W),
        (_ROWS_T, _COLUMNS_T, Tiled(0, 1, S, 256)),
        (_ROWS_M, _COLUMNS_M, Tiled(0, 1, S, 200)),
        WIDE,
    ),
    Case(
        "of-padding-infinite",
        lambda x, w: lax.rsqrt(jnp.abs(x)) @ jnp.log(jnp.abs(w)),
        (_X, _W),
        _NN_T,
        _NN_M,
        WIDE,
    ),
    Case("into-norm", _norm, (_X, (70, 1), (70, 1), (200,), (200,), _W), _NN_T, _NN_M, WIDE),
    Case(
        "into-norm-vectors",
        lambda x, mean, rstd, w: ((x - mean[:, None]) * rstd[:, None]) @ w,
        (_X, (70,), (70,), _W),
        _NN_T,
        (_COLUMNS_M, Tiled(0, 1, S, 128)),
        WIDE,
    ),
    Case(
        "dequantised-columns",
        lambda x, q, s: x @ (q.astype(x.dtype) * s),
        (_X, (200, 130, "int8"), (130,)),
        _NN_T,
        _NN_M,
        BF16,
    ),
    Case(
        "dequantised-depth",
        lambda x, q, s, z: x @ ((q.astype(x.dtype) - z[:, None]) * s[:, None]),
        (_X, (200, 130, "int8"), (200,), (200,)),
        _NN_T,
        _NN_M,
        HALF,
    ),
    Case("narrowed", _narrow, (_X, _W), _NN_T, _NN_M, WIDE),
    Case(
        "masked-left",
        lambda x, keep, w: jnp.where(keep, x, 0) @ w,
        (_X, (70, 200, "bool"), _W),
        _NN_T,
        _NN_M,
        BF16,
    ),
    Case("masked-by-position", _causal, (_X, _W), _NN_T, _NN_M, WIDE),
    Case("transposed-right", lambda x, w: x @ jnp.tanh(w).T, (_X, (130, 200)), _NN_T, _NN_M, BF16),
    Case(
        "transposed-left",
        lambda x, w: jnp.exp(x).T @ w,
        ((200, 130), (200, 140)),
        (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32), Tiled(0, 0, S, 16)),
        (Tiled(-1, 0, P, 128), Tiled(-1, 1, P, 128), Tiled(0, 0, S, 64)),
        WIDE,  # XLA:CPU, on which kernels are interpreted, has no such product of bfloat16.
    ),
    Case(
        "into-batched",
        lambda a, c, b: jnp.einsum("bij,bjk->bik", jax.nn.silu(a + c), jnp.tanh(b)),
        ((3, 70, 200), (3, 1, 200), (3, 200, 130)),
        _BATCH_T,
        _BATCH_M,
        BF16,
    ),
    Case(
        "into-batched-nt",
        lambda a, b, s: jnp.einsum("bij,bkj->bik", a * s, b * 0.5),
        ((3, 70, 200), (3, 130, 200), (3, 1, 1)),
        _BATCH_T,
        _BATCH_M,
        WIDE,
    ),
    Case(
        "split-heads-left",
        _heads,
        ((40, 128), (4, 32, 130)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(1, 1, S, 16)),
        None,
        BF16,
    ),
    Case(
        "merged-heads",
        lambda x, w: jnp.tanh(x.transpose(1, 0, 2).reshape(70, 128)) @ w,
        ((4, 70, 32), (128, 130)),
        (_ROWS_T, _COLUMNS_T, Tiled(0, 0, S, 1)),
        (_ROWS_M, _COLUMNS_M, Tiled(0, 0, S, 1)),
        WIDE,
    ),
    Case("residual-of-left", lambda x, w: jax.nn.silu(x) @ w + x, (_SQUARE, _SQUARE), _NN_T, _NN_M, WIDE),
    Case(
        "before-and-after",
        lambda x, r, w: (lambda s: (x * s) @ w + s)(jnp.exp(r)),
        (_X, (70, 1), _W),
        _NN_T,
        _NN_M,
        WIDE,
    ),
    Case(
        "row-into-matrix",
        lambda x, w: jnp.exp(x) @ jnp.tanh(w),
        ((1, 200), _W),
        (_COLUMNS_T, Tiled(0, 1, S, 16)),
        (_COLUMNS_M, Tiled(0, 1, S, 128)),
        WIDE,
    ),
    Case(
        "matrix-into-vector",
        lambda w, x: jnp.tanh(w) @ jnp.exp(x),
        ((130, 200), (200,)),
        (Tiled(0, 0, P, 32), Tiled(0, 1, S, 16)),
        (Tiled(0, 0, P, 128), Tiled(0, 1, S, 128)),
        BF16,
    ),
)

CASES = (*emit_cases.CASES, *PROLOGUES, *CUTTING)
BY_NAME = {case.name: case for case in CASES}


def runs(backend: str) -> list[Any]:
    """Names and dtypes of the cases that a backend can emit. Every kernel runs on both Pythons in one
    dtype; what the others test, how values are widened and rounded, is the same in either."""
    return [
        pytest.param(case.name, dtype, marks=[pytest.mark.one_python] if dtype != case.dtypes[0] else [])
        for case in CASES
        if getattr(case, backend) is not None
        for dtype in case.dtypes
    ]
