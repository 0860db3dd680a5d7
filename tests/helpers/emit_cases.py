"""One kernel a case: functions, inputs, and tiles chosen to be ragged.

The same cases are run in interpret mode against ``jax.jit``, and compiled for devices that are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from tests.helpers.quickly import run_quickly
from tests.helpers.specs import P, S, Tiled

FLOATS = ("float32", "bfloat16", "float16")
WIDE = ("float32",)
BRAIN = ("float32", "bfloat16")

# Rounding errors allowed, in units of the dtype's epsilon: a sum of some hundred products of
# order ten in float32; in 16 bits a handful of operations that each round once.
EPSILONS = {"float32": 64, "bfloat16": 4, "float16": 8}


@dataclass(frozen=True, slots=True)
class Case:
    """``f`` of random arrays of ``shapes``; an entry may be a dtype of its own after the
    shape. ``triton`` and ``mosaic`` are the tiles, None where a backend cannot."""

    name: str
    f: Callable[..., Any]
    shapes: tuple[Any, ...]
    triton: tuple[Tiled, ...] | None
    mosaic: tuple[Tiled, ...] | None
    dtypes: tuple[str, ...] = BRAIN

    def arguments(self, dtype: str, seed: int = 0) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        return tuple(_random(rng, s, dtype) for s in self.shapes)


def _random(rng: np.random.Generator, shape: Any, dtype: str) -> Any:
    if shape and isinstance(shape[-1], str):
        *shape, dtype = shape
    if dtype == "bool":
        return jnp.asarray(rng.random(shape) < 0.5)
    if dtype.startswith(("int", "uint")):
        low = -50 if dtype.startswith("int") else 0
        return jnp.asarray(rng.integers(low, 50, shape), dtype)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def check(case: Case, dtype: str, results: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Results against ``jax.jit`` of the same function. Sixteen-bit floats are checked
    against the function in float32 of the same inputs: the truth they both round."""
    small = dtype in ("bfloat16", "float16")

    def widen(a: Any) -> Any:
        return a.astype(jnp.float32) if small and a.dtype == jnp.dtype(dtype) else a

    expected = jax.tree.leaves(run_quickly(case.f, *map(widen, args)))
    plain = jax.tree.leaves(jax.eval_shape(case.f, *args))
    assert len(results) == len(expected)
    for got, want, aval in zip(results, expected, plain, strict=True):
        assert got.shape == aval.shape
        assert got.dtype == aval.dtype
        got64, want64 = np.asarray(got, np.float64), np.asarray(want, np.float64)
        if not jnp.issubdtype(got.dtype, jnp.floating):
            np.testing.assert_array_equal(got64, want64)
            continue
        finite = np.isfinite(want64)
        scale = float(np.max(np.abs(want64[finite]), initial=1.0))
        name = str(got.dtype) if not small else dtype
        tolerance = EPSILONS[name] * float(jnp.finfo(name).eps)
        np.testing.assert_allclose(got64, want64, rtol=tolerance, atol=tolerance * scale)


def layernorm(x: Any, g: Any, b: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * g + b


def layernorm_rows(x: Any, g: Any, dy: Any) -> Any:
    """The gradient with respect to the rows."""
    mean = jnp.mean(x, -1, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x - mean), -1, keepdims=True) + 1e-5)
    y = (x - mean) * rstd
    dg = dy * g
    return (dg - jnp.mean(dg, -1, keepdims=True) - y * jnp.mean(dg * y, -1, keepdims=True)) * rstd


def rmsnorm(x: Any, g: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def softmax_grad(x: Any, dy: Any) -> Any:
    """The gradient with respect to the rows, which are normalised again."""
    y = jax.nn.softmax(x, -1)
    return y * (dy - jnp.sum(dy * y, -1, keepdims=True))


def causal_softmax(s: Any) -> Any:
    n, m = s.shape[-2:]
    rows, columns = lax.broadcasted_iota(jnp.int32, (n, m), 0), lax.broadcasted_iota(jnp.int32, (n, m), 1)
    return jax.nn.softmax(jnp.where(rows >= columns, s, -jnp.inf), axis=-1)


def _dot(dimension_numbers: Any) -> Callable[..., Any]:
    def f(a: Any, b: Any, bias: Any, residual: Any) -> Any:
        y = lax.dot_general(a, b, dimension_numbers, preferred_element_type=jnp.float32)
        return (jax.nn.gelu(y + bias) + residual.astype(jnp.float32)).astype(a.dtype)

    return f


_NN, _NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))
_BATCHED = (((2,), (1,)), ((0,), (0,)))
_BATCHED_NT = (((2,), (2,)), ((0,), (0,)))

_ROWS_T, _ROWS_M = (Tiled(0, 0, P, 4),), (Tiled(0, 0, P, 8),)
_BOTH_T, _BOTH_M = (Tiled(0, 0, P, 4), Tiled(0, 1, P, 64)), (Tiled(0, 0, P, 8), Tiled(0, 1, P, 128))
_WALK_T, _WALK_M = (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)), (Tiled(0, 0, P, 8), Tiled(0, 1, S, 128))
_MAT_T = (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32), Tiled(0, 1, S, 16))
_MAT_M = (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 128), Tiled(0, 1, S, 128))

CASES: tuple[Case, ...] = (
    Case("chain", lambda x, y: jnp.tanh(x) * 2 + y - 0.5, ((13, 257), (13, 257)), _BOTH_T, _BOTH_M, FLOATS),
    Case("scalar-operand", lambda x, s: x * s + 1, ((13, 257), ()), _BOTH_T, _BOTH_M),
    Case(
        "vector", lambda x, y: x * jnp.exp(y), ((300,), (300,)), (Tiled(0, 0, P, 64),), (Tiled(0, 0, P, 128),)
    ),
    Case("bias-gelu", lambda x, b: jax.nn.gelu(x + b), ((13, 257), (257,)), _BOTH_T, _BOTH_M),
    Case("softmax", lambda x: jax.nn.softmax(x, -1), ((5, 130),), _ROWS_T, _ROWS_M, FLOATS),
    Case(
        "softmax-3d",
        lambda x: jax.nn.softmax(x, -1),
        ((3, 5, 130),),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 4)),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 8)),
    ),
    Case("layernorm", layernorm, ((13, 257), (257,), (257,)), _ROWS_T, _ROWS_M),
    Case("layernorm-rows", layernorm_rows, ((13, 257), (257,), (13, 257)), _ROWS_T, _ROWS_M, FLOATS),
    Case("rmsnorm", rmsnorm, ((300, 768), (768,)), (Tiled(0, 0, P, 8),), (Tiled(0, 0, P, 64),)),
    Case("softmax-passes", lambda x: jax.nn.softmax(x, -1), ((13, 300),), _WALK_T, _WALK_M, FLOATS),
    Case("log-softmax-passes", lambda x: jax.nn.log_softmax(x, -1), ((13, 300),), _WALK_T, _WALK_M),
    Case("softmax-grad-passes", softmax_grad, ((13, 300), (13, 300)), _WALK_T, _WALK_M, FLOATS),
    Case("layernorm-passes", layernorm, ((13, 300), (300,), (300,)), _WALK_T, _WALK_M),
    Case("layernorm-rows-passes", layernorm_rows, ((13, 300), (300,), (13, 300)), _WALK_T, _WALK_M, FLOATS),
    Case("rmsnorm-passes", rmsnorm, ((13, 300), (300,)), _WALK_T, _WALK_M),
    Case(
        "passes-down-columns",
        lambda x: jax.nn.softmax(x, 0),
        ((300, 257),),
        (Tiled(0, 0, S, 32), Tiled(0, 1, P, 64)),
        (Tiled(0, 0, S, 32), Tiled(0, 1, P, 128)),
    ),
    Case(
        "passes-over-a-vector",
        lambda x: (jax.nn.softmax(x), jnp.max(x)),
        ((1000,),),
        (Tiled(0, 0, S, 128),),
        (Tiled(0, 0, S, 128),),
    ),
    Case("causal-passes", causal_softmax, ((40, 300),), _WALK_T, _WALK_M),
    Case(
        "written-on-the-way",
        lambda x, s: (jnp.exp(x) * s[:, None], jnp.exp(x).sum(1) / s, jnp.sqrt(jnp.abs(s))),
        ((200, 300), (200,)),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
        (Tiled(0, 0, P, 128), Tiled(0, 1, S, 128)),
    ),
    Case(
        "written-in-each-pass",
        lambda x, g: (
            (e := jnp.exp(x - x.max(1, keepdims=True))) * g,
            (q := e - e.mean(1, keepdims=True)),
            q.min(1),
        ),
        ((200, 300), (300,)),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
        (Tiled(0, 0, P, 128), Tiled(0, 1, S, 128)),
    ),
    Case("two-results", lambda x: (jnp.exp(x) * 2, jnp.tanh(x) - 1), ((13, 257),), _BOTH_T, _BOTH_M),
    Case(
        "row-statistics",
        lambda x: (x.mean(1), (x * x).sum(1)),
        ((200, 130),),
        (Tiled(0, 0, P, 16),),
        (Tiled(0, 0, P, 128),),
    ),
    Case(
        "outer",
        lambda x, y, z: x[:, None] * y[None, :] + z,
        ((13,), (257,), (13, 257)),
        (Tiled(2, 0, P, 4), Tiled(2, 1, P, 64)),
        (Tiled(2, 1, P, 128),),
    ),
    Case(
        "columns",
        lambda x, y: (x * y).sum(0),
        ((300, 257), (300, 257)),
        (Tiled(0, 0, S, 64), Tiled(0, 1, P, 64)),
        (Tiled(0, 0, S, 64), Tiled(0, 1, P, 128)),
        FLOATS,
    ),
    Case(
        "extrema-of-negatives",
        lambda x: ((x - 9).max(1), (9 - x).min(1)),
        ((200, 130),),
        (Tiled(0, 0, P, 16),),
        (Tiled(0, 0, P, 128),),
    ),
    Case(
        "two-blocks",
        lambda x: x + x.T,
        ((130, 130),),
        (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32)),
        (Tiled(-1, 0, P, 128), Tiled(-1, 1, P, 128)),
    ),
    Case("columns-whole", lambda x: x.max(0), ((13, 257),), (Tiled(0, 1, P, 64),), (Tiled(0, 1, P, 128),)),
    Case(
        "long-rows",
        lambda x: jnp.exp(x).sum(1),
        ((200, 300),),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
        (Tiled(0, 0, P, 128), Tiled(0, 1, S, 128)),
    ),
    Case(
        "sum",
        lambda x: (x * x * 0.01).sum(),
        ((300, 257),),
        (Tiled(0, 0, S, 8),),
        (Tiled(0, 0, S, 64),),
        FLOATS,
    ),
    Case(
        "norm",
        lambda x: jnp.sqrt((x * x * 0.01).sum()),
        ((300, 257),),
        (Tiled(0, 0, S, 8),),
        (Tiled(0, 0, S, 64),),
    ),
    Case(
        "transpose",
        lambda x, y: (x * 2).T + y,
        ((300, 257), (257, 300)),
        (Tiled(0, 0, P, 32), Tiled(0, 1, P, 16)),
        (Tiled(0, 0, P, 128), Tiled(0, 1, P, 128)),
        FLOATS,
    ),
    Case(
        "transpose-3d",
        lambda x: x.transpose(0, 2, 1) + 1,
        ((3, 40, 130),),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 16), Tiled(0, 2, P, 32)),
        (Tiled(0, 0, P, 1), Tiled(0, 2, P, 128)),
    ),
    Case(
        "split-heads",
        lambda x, s: x.reshape(24, 4, 32) * s[:, None],
        ((24, 128), (4,)),
        (Tiled(0, 0, P, 4), Tiled(0, 1, P, 2)),
        (Tiled(0, 0, P, 8),),
    ),
    Case(
        "merge-batch",
        lambda x, b: jnp.tanh(x.reshape(40, 130)) + b,
        ((5, 8, 130), (130,)),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 2)),
        (Tiled(0, 0, P, 1),),
    ),
    Case(
        "merge-ragged",
        lambda x, b: jnp.tanh(x.reshape(40, 130)) + b,
        ((5, 8, 130), (130,)),
        (Tiled(0, 0, P, 2), Tiled(0, 1, P, 8)),
        (Tiled(0, 0, P, 2), Tiled(0, 1, P, 8)),
    ),
    Case(
        "heads-transpose",
        lambda x: x.reshape(24, 4, 32).transpose(1, 0, 2) * 2,
        ((24, 128),),
        (Tiled(0, 0, P, 4), Tiled(0, 1, P, 1)),
        (Tiled(0, 0, P, 8),),
    ),
    Case("causal", causal_softmax, ((40, 70),), _ROWS_T, _ROWS_M),
    Case(
        "causal-3d",
        causal_softmax,
        ((3, 40, 70),),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 8)),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 8)),
    ),
    Case("matmul", _dot(_NN), ((70, 200), (200, 130), (130,), (70, 130)), _MAT_T, _MAT_M),
    Case("matmul-nt", _dot(_NT), ((70, 200), (130, 200), (130,), (70, 130)), _MAT_T, _MAT_M, FLOATS),
    Case(
        "matmul-tn",
        _dot(_TN),
        ((200, 130), (200, 140), (140,), (130, 140)),
        (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32), Tiled(0, 0, S, 16)),
        (Tiled(-1, 0, P, 128), Tiled(-1, 1, P, 128), Tiled(0, 0, S, 64)),
    ),
    Case(
        "matmul-batched",
        _dot(_BATCHED),
        ((3, 70, 200), (3, 200, 130), (130,), (3, 70, 130)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(0, 2, S, 16)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 128), Tiled(0, 2, S, 128)),
    ),
    Case(
        "matmul-batched-nt",
        _dot(_BATCHED_NT),
        ((3, 70, 200), (3, 130, 200), (130,), (3, 70, 130)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(0, 2, S, 16)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 128), Tiled(0, 2, S, 128)),
    ),
    Case(
        "matmul-one-turn",
        lambda x, w: jax.nn.relu(x @ w),
        ((70, 30), (30, 130)),
        (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32), Tiled(0, 1, S, 32)),
        (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 128), Tiled(0, 1, S, 30)),
    ),
    Case(
        "matmul-rows-of-batch",
        lambda x, w: jnp.tanh(x @ w * 0.1),
        ((3, 40, 200), (200, 130)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(0, 2, S, 16)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 128), Tiled(0, 2, S, 128)),
    ),
    Case(
        "matmul-transpose",
        lambda x, w: (x @ w).T * 2,
        ((130, 200), (200, 140)),
        (Tiled(-1, 0, P, 32), Tiled(-1, 1, P, 16), Tiled(0, 1, S, 16)),
        (Tiled(-1, 0, P, 128), Tiled(-1, 1, P, 128), Tiled(0, 1, S, 128)),
    ),
    Case(
        "matmul-heads",
        lambda x, w: (x @ w).reshape(70, 4, 32).transpose(1, 0, 2),
        ((70, 200), (200, 128)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(0, 1, S, 16)),
        (Tiled(-1, 0, P, 4), Tiled(-1, 1, P, 16), Tiled(-1, 2, P, 32), Tiled(0, 1, S, 128)),
    ),
    Case(
        "matmul-two-depths",
        lambda x, w: jnp.einsum("thd,hdn->tn", x, w) + 1,
        ((70, 4, 32), (4, 32, 130)),
        (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 32), Tiled(0, 1, S, 1)),
        None,
    ),
    Case(
        "row-times-matrix",
        lambda x, w: x @ w + 1,
        ((1, 200), (200, 130)),
        (Tiled(-1, 1, P, 32), Tiled(0, 1, S, 16)),
        (Tiled(-1, 1, P, 128), Tiled(0, 1, S, 128)),
    ),
    Case(
        "matrix-times-vector",
        lambda w, x: w @ x + 1,
        ((130, 200), (200,)),
        (Tiled(0, 0, P, 32), Tiled(0, 1, S, 16)),
        (Tiled(0, 0, P, 128), Tiled(0, 1, S, 128)),
    ),
    Case(
        "matrix-times-several-registers",
        lambda w, x: w @ x + 1,
        ((130, 1000), (1000,)),
        None,
        (Tiled(0, 0, P, 128), Tiled(0, 1, S, 512)),
        ("bfloat16",),
    ),
    Case(
        "integers",
        lambda a, b, c: jnp.where((a > b) & c, a << 1, jnp.maximum(b, 3) % 7 - (a >> 1)),
        ((13, 257, "int32"), (13, 257, "int32"), (13, 257, "bool")),
        _BOTH_T,
        _BOTH_M,
        ("int32",),
    ),
    Case(
        "bool-result",
        lambda a, b: ((a > b) | ~(a == 1), jnp.logical_xor(a < 0, b < 0)),
        ((13, 257, "int32"), (13, 257, "int32")),
        _BOTH_T,
        _BOTH_M,
        ("int32",),
    ),
    Case(
        "bool-scalar", lambda x, flag: jnp.where(flag, x, -x), ((13, 257), ("bool",)), _BOTH_T, _BOTH_M, WIDE
    ),
    Case(
        "integer-sums",
        lambda a: (a.sum(1), a.max(1), a.min(1)),
        ((200, 130, "int32"),),
        (Tiled(0, 0, P, 16),),
        (Tiled(0, 0, P, 128),),
        ("int32",),
    ),
    Case(
        "quantifiers",
        lambda a: ((a > 40).any(1), (a > -40).all(1)),
        ((200, 130, "int32"),),
        (Tiled(0, 0, P, 16), Tiled(0, 1, S, 32)),
        (Tiled(0, 0, P, 128),),
        ("int32",),
    ),
    Case(
        "count",
        lambda a: (a > 0).sum(0),
        ((200, 130, "int32"),),
        (Tiled(0, 1, P, 32), Tiled(0, 0, S, 32)),
        (Tiled(0, 1, P, 128), Tiled(0, 0, S, 32)),
        ("int32",),
    ),
    Case(
        "clamp",
        lambda x: (jnp.clip(x, -0.5, 0.5), jnp.sign(x) * jnp.abs(x), x**3, -x, x // 1),
        ((13, 257),),
        _BOTH_T,
        _BOTH_M,
        WIDE,
    ),
    Case(
        "casts",
        lambda x, i: (x.astype(jnp.int32) + i, i.astype(jnp.float32) * 0.5, (i > 0).astype(x.dtype)),
        ((13, 257), (13, 257, "int32")),
        _BOTH_T,
        _BOTH_M,
        BRAIN,
    ),
)

BY_NAME = {case.name: case for case in CASES}
