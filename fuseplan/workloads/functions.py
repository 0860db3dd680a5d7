"""Small programs in plain JAX: one operation or layer each.

Statistics and probabilities are computed in float32 whatever the dtype of the arrays, as
training code does, and results are returned in the dtype of the first argument.

Parameters come in a dict, as in a model; ``workloads.make_args`` scales them by their names.

Letters in shapes: ``B`` batch, ``T`` tokens (queries), ``S`` keys, ``H`` heads, ``D`` width
of a head, ``M`` rows, ``N`` columns, ``F`` hidden features, ``V`` classes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Params = dict[str, Array]
EPSILON = 1e-5  # of GPT-2's LayerNorm


def add_transpose(x: Array) -> Array:
    """``x + x.T`` for ``x[N, N]``: no single tiling serves both operands."""
    return x + x.T


def gelu_bias(x: Array, bias: Array) -> Array:
    """GELU by its tanh form (Hendrycks & Gimpel 2016) of ``x[M, N] + bias[N]``."""
    return jax.nn.gelu(x + bias, approximate=True)


def gelu_exact(x: Array, bias: Array) -> Array:
    """GELU by the error function of ``x[M, N] + bias[N]``."""
    return jax.nn.gelu(x + bias, approximate=False)


def softmax(x: Array) -> Array:
    """Softmax over the last dimension, stable."""
    h = x.astype(jnp.float32)
    e = jnp.exp(h - lax.stop_gradient(h.max(axis=-1, keepdims=True)))
    return (e / e.sum(axis=-1, keepdims=True)).astype(x.dtype)


def logsumexp(x: Array) -> Array:
    """``log(sum(exp(x)))`` over the last dimension, stable, in float32."""
    h = x.astype(jnp.float32)
    top = lax.stop_gradient(h.max(axis=-1))
    return top + jnp.log(jnp.exp(h - top[..., None]).sum(axis=-1))


def layernorm(x: Array, scale: Array, bias: Array) -> Array:
    """LayerNorm (Ba et al. 2016) over the last dimension of ``x[..., N]``."""
    h = x.astype(jnp.float32)
    centred = h - h.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + EPSILON)).astype(x.dtype) * scale + bias


def layernorm_grad(x: Array, scale: Array, bias: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """The gradients of LayerNorm with respect to ``x``, ``scale`` and ``bias``."""
    return jax.vjp(layernorm, x, scale, bias)[1](cotangent)


def rmsnorm(x: Array, scale: Array) -> Array:
    """RMSNorm (Zhang & Sennrich 2019) over the last dimension of ``x[..., N]``."""
    h = x.astype(jnp.float32)
    return (h * lax.rsqrt(jnp.square(h).mean(axis=-1, keepdims=True) + EPSILON)).astype(x.dtype) * scale


def residual_norm(x: Array, branch: Array, scale: Array, bias: Array) -> tuple[Array, Array]:
    """Add a branch to the residual stream and normalise: both results are kept."""
    y = x + branch
    return y, layernorm(y, scale, bias)


def dropout_residual(key: Array, x: Array, branch: Array) -> Array:
    """``x`` plus ``branch`` with a tenth of its elements dropped, the rest scaled up."""
    kept = jax.random.bernoulli(key, 0.9, branch.shape)
    return x + jnp.where(kept, branch / 0.9, 0).astype(x.dtype)


def batchnorm_relu(x: Array, scale: Array, bias: Array) -> tuple[Array, Array, Array]:
    """BatchNorm in training (Ioffe & Szegedy 2015) and ReLU of images ``x[B, height, width, N]``.

    Returns the result and the mean and variance by channel.
    """
    h = x.astype(jnp.float32)
    mean = h.mean(axis=(0, 1, 2))
    variance = jnp.square(h - mean).mean(axis=(0, 1, 2))
    y = (h - mean) * lax.rsqrt(variance + EPSILON) * scale + bias
    return jnp.maximum(y, 0).astype(x.dtype), mean, variance


def conv_block(x: Array, p: Params) -> Array:
    """A 3×3 convolution of ``x[B, height, width, N]``, BatchNorm, ReLU and the residual."""
    y = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x + batchnorm_relu(y, p["scale"], p["bias"])[0]


def mlp(x: Array, p: Params) -> Array:
    """``gelu(x[..., N] @ w_in[N, F] + b_in) @ w_out[F, N] + b_out``."""
    return gelu_bias(x @ p["w_in"], p["b_in"]) @ p["w_out"] + p["b_out"]


def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up`` (Shazeer 2020)."""
    return jax.nn.silu(gate) * up


def gated_mlp(x: Array, p: Params) -> Array:
    """The SwiGLU feed-forward layer of Llama: ``(silu(x @ w_gate) * (x @ w_up)) @ w_down``."""
    return swiglu(x @ p["w_gate"], x @ p["w_up"]) @ p["w_down"]


def norm_mlp(x: Array, p: Params) -> Array:
    """``mlp`` of LayerNorm of ``x[..., N]``, as in GPT-2, without the residual."""
    return mlp(layernorm(x, p["scale"], p["bias"]), p)


def norm_qkv(x: Array, p: Params) -> Array:
    """``rmsnorm(x[..., N]) @ w[N, 3 * N]``: the first operations of Llama's attention."""
    return rmsnorm(x, p["scale"]) @ p["w"]


def attention(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of ``q[B, T, H, D]`` to ``k[B, S, H, D]`` and ``v[B, S, H, D]``."""
    return _attend(q, k, v, causal=False)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Attention in which a query attends to no later key."""
    return _attend(q, k, v, causal=True)


def causal_attention_grad(q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """The gradients of causal attention with respect to ``q``, ``k`` and ``v``."""
    return jax.vjp(causal_attention, q, k, v)[1](cotangent)


def _attend(q: Array, k: Array, v: Array, causal: bool) -> Array:
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
    scores = scores * (1 / math.sqrt(q.shape[-1]))
    if causal:
        seen = jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", softmax(scores).astype(q.dtype), v)


def rope(x: Array) -> Array:
    """Rotary position embedding (Su et al. 2021) of ``x[B, T, H, D]``, by halves as Llama."""
    _, tokens, _, width = x.shape
    frequency = 10_000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def token_losses(logits: Array, labels: Array) -> Array:
    """``logsumexp(logits[M, V]) - logits[labels[M]]`` of each row, in float32: ``[M]``."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return logsumexp(logits) - picked.astype(jnp.float32)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over rows of ``logsumexp(logits[M, V]) - logits[labels[M]]``, in float32."""
    return token_losses(logits, labels).mean()


def cross_entropy_grad(logits: Array, labels: Array) -> tuple[Array, Array]:
    """The cross-entropy and its gradient with respect to the logits."""
    return jax.value_and_grad(cross_entropy)(logits, labels)


def linear_cross_entropy(x: Array, head: Params, labels: Array) -> Array:
    """The cross-entropy of ``x[M, N] @ w[N, V]``: its logits are larger than all other arrays."""
    return cross_entropy(jnp.matmul(x, head["w"], preferred_element_type=jnp.float32), labels)


def linear_token_losses(x: Array, head: Params, labels: Array) -> Array:
    """The cross-entropy of each row of ``x[M, N] @ w[N, V]``, not averaged: ``[M]``."""
    return token_losses(jnp.matmul(x, head["w"], preferred_element_type=jnp.float32), labels)


def exact_token_losses(args: tuple[Any, ...], rows: np.ndarray) -> np.ndarray:
    """``linear_token_losses`` of some rows in float64 NumPy: ``[R]``."""
    x, head, labels = args
    logits = np.asarray(x)[rows].astype(np.float64) @ np.asarray(head["w"], np.float64)
    top = logits.max(axis=-1)
    picked = logits[np.arange(len(rows)), np.asarray(labels)[rows]]
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=-1)) - picked


def linear_cross_entropy_grad(x: Array, head: Params, labels: Array) -> tuple[Array, tuple[Array, Params]]:
    """The linear cross-entropy and its gradients with respect to ``x`` and ``w``."""
    return jax.value_and_grad(linear_cross_entropy, argnums=(0, 1))(x, head, labels)


def gaussian_kernel_sum(x: Array, y: Array, weights: Array) -> Array:
    """``sum_j exp(-|x_i - y_j|² / 2) weights_j`` for points ``x[M, D]``, ``y[N, D]``."""
    a, b = x.astype(jnp.float32), y.astype(jnp.float32)
    squares = jnp.square(a).sum(axis=-1)[:, None] + jnp.square(b).sum(axis=-1)
    distances = jnp.maximum(squares - 2 * (a @ b.T), 0)
    return (jnp.exp(-0.5 * distances) @ weights.astype(jnp.float32)).astype(x.dtype)
