"""GPT-2 (Radford et al. 2019): a block, its gradient and a complete training step.

The layers are in a Python loop, not in a scan, so that a planner sees every equation. Queries, keys and
values have a matrix each, where GPT-2 has one of three times the width: three products share an operand.
Parameters are nested dicts of arrays; matrices multiply from the right, ``[in, out]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fuseplan.workloads.functions import causal_attention, cross_entropy, layernorm, mlp
from fuseplan.workloads.optimizer import AdamState, adam_update, clip_by_global_norm

Params = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a GPT-2."""

    layers: int
    width: int = 768
    heads: int = 12
    tokens: int = 1024
    vocabulary: int = 50257
    batch: int = 1


def block_params(config: Config, dtype: str) -> Params:
    """The parameters of one block, as ``jax.ShapeDtypeStruct``."""
    n = config.width
    return {
        "ln1": _norm(n, dtype),
        "attention": {
            name: _array(dtype, *shape)
            for part in ("q", "k", "v", "out")
            for name, shape in ((f"w_{part}", (n, n)), (f"b_{part}", (n,)))
        },
        "ln2": _norm(n, dtype),
        "mlp": {
            "w_in": _array(dtype, n, 4 * n),
            "b_in": _array(dtype, 4 * n),
            "w_out": _array(dtype, 4 * n, n),
            "b_out": _array(dtype, n),
        },
    }


def params(config: Config, dtype: str) -> Params:
    """The parameters of the whole model, as ``jax.ShapeDtypeStruct``."""
    return {
        "w_tokens": _array(dtype, config.vocabulary, config.width),
        "w_positions": _array(dtype, config.tokens, config.width),
        "blocks": [block_params(config, dtype) for _ in range(config.layers)],
        "ln_final": _norm(config.width, dtype),
    }


def block(p: Params, x: Array, heads: int) -> Array:
    """A pre-LayerNorm transformer block of ``x[batch, tokens, width]``."""
    batch, tokens, width = x.shape
    attention, h = p["attention"], layernorm(x, **p["ln1"])
    q, k, v = (
        (h @ attention[f"w_{part}"] + attention[f"b_{part}"]).reshape(batch, tokens, heads, width // heads)
        for part in ("q", "k", "v")
    )
    mixed = causal_attention(q, k, v).reshape(batch, tokens, width)
    x = x + mixed @ attention["w_out"] + attention["b_out"]
    return x + mlp(layernorm(x, **p["ln2"]), p["mlp"])


def block_loss(p: Params, x: Array, target: Array, heads: int) -> Array:
    """The mean squared distance of the block's result from ``target``."""
    return jnp.square(block(p, x, heads).astype(jnp.float32) - target.astype(jnp.float32)).mean()


def block_train_step(
    p: Params, state: AdamState, x: Array, target: Array, heads: int
) -> tuple[Array, Params, AdamState]:
    """One step of training a block alone: the loss, the new parameters, the new state."""
    value, grads = jax.value_and_grad(block_loss)(p, x, target, heads)
    return value, *adam_update(p, state, grads)


def loss(p: Params, tokens: Array, labels: Array, heads: int) -> Array:
    """The mean cross-entropy of predicting ``labels[batch, tokens]`` from ``tokens``.

    As in GPT-2, the logits are computed with the embedding table.
    """
    x = p["w_tokens"][tokens] + p["w_positions"][: tokens.shape[1]]
    for layer in p["blocks"]:
        x = block(layer, x, heads)
    x = layernorm(x, **p["ln_final"])
    logits = jnp.einsum("btn,vn->btv", x, p["w_tokens"], preferred_element_type=jnp.float32)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def train_step(
    p: Params, state: AdamState, tokens: Array, labels: Array, heads: int
) -> tuple[Array, Params, AdamState]:
    """One step of training with clipped Adam: the loss, the new parameters, the new state."""
    value, grads = jax.value_and_grad(loss)(p, tokens, labels, heads)
    return value, *adam_update(p, state, clip_by_global_norm(grads, 1.0))


def _array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _norm(n: int, dtype: str) -> Params:
    return {"scale": _array(dtype, n), "bias": _array(dtype, n)}
