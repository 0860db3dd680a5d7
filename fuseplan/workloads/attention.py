"""Variants of attention in plain JAX, which hold all scores in memory.

Shapes are those of ``functions``: queries ``q[B, T, H, D]``, keys and values ``[B, S, H, D]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fuseplan.workloads.functions import attention, causal_attention

Attention = Callable[[Array, Array, Array], Array]


def grouped_attention(q: Array, k: Array, v: Array) -> Array:
    """Grouped queries (Ainslie et al. 2023), causal: ``H / K`` heads of ``q[B, T, H, D]`` share
    each of the ``K`` heads of ``k[B, S, K, D]`` and ``v[B, S, K, D]``."""
    batch, tokens, heads, width = q.shape
    shared = k.shape[2]
    grouped = q.reshape(batch, tokens, shared, heads // shared, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k) / math.sqrt(width)
    weights = jax.nn.softmax(jnp.where(_earlier(tokens, k.shape[1]), scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)


def window_attention(q: Array, k: Array, v: Array, window: int) -> Array:
    """Causal attention to the last ``window`` keys alone (Beltagy et al. 2020)."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    scores = jnp.where((j <= i) & (j > i - window), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def alibi_attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention with a bias linear in the distance, steeper in each head (ALiBi, Press et
    al. 2022)."""
    heads = q.shape[2]
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = scores + slopes[:, None, None] * (j - i)
    weights = jax.nn.softmax(jnp.where(j <= i, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def full_attention_vjp(q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
    """Attention without a mask, and its three gradients: ``out, dq, dk, dv``."""
    return _with_gradients(attention, q, k, v, cotangent)


def causal_attention_vjp(q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
    """Causal attention and its three gradients: ``out, dq, dk, dv``."""
    return _with_gradients(causal_attention, q, k, v, cotangent)


def grouped_attention_vjp(q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
    """Grouped queries and their three gradients: ``out, dq, dk, dv``."""
    return _with_gradients(grouped_attention, q, k, v, cotangent)


def exact_causal_rows(args: tuple[Any, ...], rows: np.ndarray) -> np.ndarray:
    """Rows of causal attention of one batch element in float64 NumPy, one head at a time:
    ``out[0, rows]``, of shape ``[R, H, D]``."""
    q, k, v = (np.asarray(a)[0] for a in args)
    hidden = np.arange(k.shape[0]) > rows[:, None]
    out = np.empty((len(rows), *q.shape[1:]))
    for head in range(q.shape[1]):
        keys, values = (a[:, head].astype(np.float64) for a in (k, v))
        scores = q[rows, head].astype(np.float64) @ keys.T / math.sqrt(q.shape[-1])
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights @ values / weights.sum(axis=-1, keepdims=True)
    return out


def _earlier(tokens: int, keys: int) -> Array:
    """Whether a query attends to a key, as ``[T, S]``: the causal mask."""
    return jnp.arange(keys) <= jnp.arange(tokens)[:, None]


def _with_gradients(f: Attention, q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
    out, pullback = jax.vjp(f, q, k, v)
    return (out, *pullback(cotangent))
