"""Kernels that cut arrays and join them, or pick one element a row: more cases of ``emit_cases``."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from tests.helpers.emit_cases import BRAIN, FLOATS, WIDE, Case
from tests.helpers.specs import P, S, Tiled

_HEADS = (40, 3, 32)
_TABLE = (40, 1, 32)
_TOKENS_T, _TOKENS_M = (Tiled(0, 0, P, 4), Tiled(0, 1, P, 1)), (Tiled(0, 0, P, 16),)
_MADE_T, _MADE_M = (Tiled(-1, 0, P, 4), Tiled(-1, 1, P, 1)), (Tiled(-1, 0, P, 16),)
_ROWS_T, _ROWS_M = (Tiled(0, 0, P, 4),), (Tiled(0, 0, P, 8),)


def _half_turned(x: Any) -> Any:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return jnp.concatenate([-b, a], -1)


def rope_by_slices(q: Any, cos: Any, sin: Any) -> Any:
    """As Llama's: the second half, negated, beside the first."""
    return q * cos + _half_turned(q) * sin


def rope_by_reshape(q: Any, cos: Any, sin: Any) -> Any:
    """The halves are an axis of their own."""
    halves = q.reshape(*q.shape[:-1], 2, q.shape[-1] // 2)
    turned = jnp.stack([-halves[..., 1, :], halves[..., 0, :]], axis=-2)
    return q * cos + turned.reshape(q.shape) * sin


def rope_by_pairs(q: Any, cos: Any, sin: Any) -> Any:
    """As GPT-J's: neighbours are rotated."""
    even, odd = q[..., ::2], q[..., 1::2]
    turned = jnp.stack([-odd, even], axis=-1).reshape(q.shape)
    return q * cos + turned * sin


def rope_grad(q: Any, cos: Any, sin: Any, dy: Any) -> Any:
    return jax.vjp(lambda q: rope_by_slices(q, cos, sin), q)[1](dy)[0]


def pairs_grad(q: Any, cos: Any, sin: Any, dy: Any) -> Any:
    return jax.vjp(lambda q: rope_by_pairs(q, cos, sin), q)[1](dy)[0]


def _gated(x: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    return jax.nn.sigmoid(a) * b


def _shifted(x: Any) -> Any:
    """The difference to the token before."""
    return x[1:] - x[:-1]


def qkv(y: Any, b: Any) -> Any:
    """Queries, keys and values of three heads from one projection, each with its heads outside."""
    parts = jnp.split(y + b, 3, -1)
    q, k, v = (x.reshape(x.shape[0], 3, -1).transpose(1, 0, 2) for x in parts)
    return q * 0.125, k, v


def qkv_grad(y: Any, b: Any, dq: Any, dk: Any, dv: Any) -> Any:
    return jax.vjp(lambda y: qkv(y, b), y)[1]((dq, dk, dv))[0]


def _losses(logits: Any, labels: Any) -> Any:
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return jax.nn.logsumexp(logits, -1) - picked


def _losses_grad(logits: Any, labels: Any, dy: Any) -> Any:
    return jax.vjp(lambda x: _losses(x, labels), logits)[1](dy)[0]


CUTTING: tuple[Case, ...] = (
    Case("rope-slices", rope_by_slices, (_HEADS, _TABLE, _TABLE), _TOKENS_T, _TOKENS_M, FLOATS),
    Case("rope-reshape", rope_by_reshape, (_HEADS, _TABLE, _TABLE), _TOKENS_T, _TOKENS_M, WIDE),
    Case("rope-pairs", rope_by_pairs, (_HEADS, _TABLE, _TABLE), _TOKENS_T, None, FLOATS),
    Case("rope-grad", rope_grad, (_HEADS, _TABLE, _TABLE, _HEADS), _MADE_T, _MADE_M, BRAIN),
    Case("pairs-grad", pairs_grad, (_HEADS, _TABLE, _TABLE, _HEADS), _MADE_T, None, WIDE),
    Case("gated", _gated, ((13, 256),), _ROWS_T, _ROWS_M, BRAIN),
    Case("gated-grad", jax.grad(lambda x: (_gated(x) ** 2).sum()), ((13, 256),), _ROWS_T, _ROWS_M, WIDE),
    Case(
        "three-parts",
        lambda x: tuple(jnp.tanh(y) for y in jnp.split(x, 3, -1)),
        ((13, 384),),
        _ROWS_T,
        _ROWS_M,
        BRAIN,
    ),
    Case(
        "joined-unevenly",
        lambda x, y: jnp.concatenate([x * 2, jnp.exp(y), x], -1),
        ((13, 128), (13, 256)),
        _ROWS_T,
        _ROWS_M,
        BRAIN,
    ),
    Case(
        "middle-part",
        lambda x: jax.nn.softmax(x[:, 128:384] * 2, -1),
        ((13, 512),),
        _ROWS_T,
        _ROWS_M,
        BRAIN,
    ),
    Case(
        "padded",
        lambda x: jnp.pad(jnp.tanh(x), ((0, 0), (128, 256)), constant_values=0.5) + 1,
        ((13, 128),),
        _ROWS_T,
        _ROWS_M,
        BRAIN,
    ),
    Case(
        "rows-of-parts",
        lambda x: (x[:16] - x[16:32], lax.dynamic_slice_in_dim(x, 32, 16) * 2),
        ((48, 130),),
        (Tiled(0, 1, P, 32),),
        (Tiled(0, 1, P, 128),),
        BRAIN,
    ),
    Case("shifted", _shifted, ((48, 130),), None, (Tiled(0, 1, P, 128),), BRAIN),
    Case(
        "unaligned",
        lambda x: jnp.pad(x[:, 3:120] * 2, ((0, 0), (5, 7))),
        ((16, 130),),
        None,
        (Tiled(0, 0, P, 8),),
        BRAIN,
    ),
    Case(
        "stacked",
        lambda x, y: jnp.stack([jnp.exp(x), y, x - y], 0),
        ((13, 257), (13, 257)),
        (Tiled(0, 0, P, 4), Tiled(0, 1, P, 64)),
        (Tiled(0, 0, P, 8), Tiled(0, 1, P, 128)),
        BRAIN,
    ),
    Case(
        "unstacked",
        lambda x: (x[0] * x[1], jnp.unstack(x)[2] + 1),
        ((3, 13, 257),),
        (Tiled(0, 1, P, 4), Tiled(0, 2, P, 64)),
        (Tiled(0, 1, P, 8), Tiled(0, 2, P, 128)),
        BRAIN,
    ),
    Case(
        "repeated",
        lambda x: jnp.tile(x, (3, 2)) + 1,
        ((16, 128),),
        (Tiled(0, 1, P, 128),),
        (),
        BRAIN,
    ),
    Case(
        "space-to-depth",
        lambda x: jnp.tanh(x).reshape(2, 4, 2, 8, 2, 128).transpose(0, 1, 3, 2, 4, 5).reshape(2, 4, 8, 512),
        ((2, 8, 16, 128),),
        (Tiled(0, 0, P, 1),),
        (Tiled(0, 0, P, 1),),
        WIDE,
    ),
    Case(
        "integers-cut",
        lambda x, m: (x[:, :64] + x[:, 64:], jnp.concatenate([m, ~m], -1)),
        ((13, 128, "int32"), (13, 128, "bool")),
        _ROWS_T,
        _ROWS_M,
        ("int32",),
    ),
    # Heads that are no power of two lie between the parts and the rest of a row.
    Case("qkv", qkv, ((40, 288), (288,)), (Tiled(0, 0, P, 4), Tiled(-1, 0, P, 1)), _ROWS_M, FLOATS),
    Case("qkv-all-heads", qkv, ((40, 288), (288,)), (Tiled(0, 0, P, 4), Tiled(-1, 0, P, 4)), None, WIDE),
    Case("qkv-two-heads", qkv, ((40, 288), (288,)), (Tiled(0, 0, P, 4), Tiled(-1, 0, P, 2)), None, WIDE),
    Case(
        "qkv-grad",
        qkv_grad,
        ((40, 288), (288,), (3, 40, 32), (3, 40, 32), (3, 40, 32)),
        (Tiled(-1, 0, P, 4), Tiled(2, 0, P, 2)),
        (Tiled(-1, 0, P, 8),),
        BRAIN,
    ),
    Case(
        "sums-between-parts",
        lambda x: (
            (y := x.reshape(40, 3, 5, 7) * 2).max((1, 3)),
            y.reshape(40, 105).sum(1),
            jnp.cumsum(x, 1),
        ),
        ((40, 105),),
        _ROWS_T,
        None,
        WIDE,
    ),
    Case(
        "every-third",
        lambda x: (x[:, ::3] * x[:, 2::3], jnp.tanh(x[:, 40:80])),
        ((13, 120),),
        _ROWS_T,
        None,
        WIDE,
    ),
    Case(
        "every-other-image",
        lambda x: lax.pad(x[::2] * x[1::2], jnp.zeros((), x.dtype), ((1, 0, 1), (0, 0, 0), (0, 0, 0))) - x,
        ((6, 16, 130),),
        (Tiled(0, 1, P, 4),),
        (Tiled(0, 1, P, 8),),
        WIDE,
    ),
    Case("losses", _losses, ((40, 130), (40, "int32")), _ROWS_T, (), BRAIN),
    Case(
        "losses-streamed",
        lambda x, i: jnp.exp(x).sum(-1) * jnp.take_along_axis(x, i[:, None], -1, mode="clip")[:, 0],
        ((40, 300), (40, "int32")),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
        (Tiled(0, 1, S, 128),),
        BRAIN,
    ),
    Case(
        "losses-passes",
        _losses,
        ((40, 300), (40, "int32")),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
        (Tiled(0, 1, S, 128),),
        BRAIN,
    ),
    Case("losses-grad", _losses_grad, ((40, 130), (40, "int32"), (40,)), _ROWS_T, (), BRAIN),
    Case(
        "losses-grad-passes",
        _losses_grad,
        ((40, 300), (40, "int32"), (40,)),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
        (Tiled(0, 1, S, 128),),
        BRAIN,
    ),
    # Labels are from -50 to 49: of 40 classes some are none, and the loss of their row is no number.
    Case("no-such-class", _losses, ((40, 40), (40, "int32")), _ROWS_T, (), WIDE),
)
