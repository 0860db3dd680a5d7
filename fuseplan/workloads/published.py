"""Blocks of published models and right-hand sides of equations, at the published sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fuseplan.workloads.workload import Built, Workload, array, of_shapes

Params = dict[str, Array]


def moe_routing(x: Array, w: Array, top: int) -> tuple[Array, Array, Array]:
    """Router of a mixture of experts: for tokens ``x`` [T, D] and weights ``w`` [D, E], each token's ``top``
    experts and their weights (Mixtral: Jiang et al., arXiv:2401.04088), and the loss that balances the load
    (Switch Transformer: Fedus et al., arXiv:2101.03961, equation 4)."""
    probabilities = jax.nn.softmax((x @ w).astype(jnp.float32))
    weights, experts = lax.top_k(probabilities, top)
    weights = weights / weights.sum(-1, keepdims=True)
    n_experts = w.shape[1]
    load = jax.nn.one_hot(experts[:, 0], n_experts).mean(0)
    return weights.astype(x.dtype), experts, n_experts * jnp.sum(load * probabilities.mean(0))


def moe_combine(x: Array, outputs: Array, weights: Array, experts: Array) -> Array:
    """Residual ``x`` [T, D] and the weighted outputs of the chosen experts; all ``outputs`` [E, T, D] are
    there (Mixtral, without capacity)."""
    chosen = jax.nn.one_hot(experts, outputs.shape[0], dtype=x.dtype) * weights[..., None]
    return x + jnp.einsum("te,etd->td", chosen.sum(1), outputs)


def selective_scan(x: Array, delta: Array, a: Array, b: Array, c: Array, skip: Array) -> Array:
    """The state-space layer of Mamba (Gu & Dao, arXiv:2312.00752, section 3.2): inputs ``x`` and step sizes
    ``delta`` [T, D], states ``a`` [D, N], ``b`` and ``c`` [T, N]; by an associative scan over time."""
    step = jax.nn.softplus(delta)
    decay = jnp.exp(step[:, :, None] * -jnp.exp(a))
    drive = (step * x)[:, :, None] * b[:, None]

    def join(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        return before[0] * after[0], after[0] * before[1] + after[1]

    _, states = lax.associative_scan(join, (decay, drive))
    return jnp.einsum("tdn,tn->td", states, c) + skip * x


def _group_norm(x: Array, scale: Array, bias: Array, groups: int) -> Array:
    """GroupNorm of images [B, H, W, C] (Wu & He, arXiv:1803.08494)."""
    parts = x.reshape(*x.shape[:3], groups, -1)
    mean = parts.mean((1, 2, 4), keepdims=True)
    var = jnp.square(parts - mean).mean((1, 2, 4), keepdims=True)
    return ((parts - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale + bias


def unet_block(x: Array, time: Array, p: dict[str, Params], groups: int) -> Array:
    """A residual block of a diffusion U-Net (Rombach et al., arXiv:2112.10752): GroupNorm, SiLU and a 3×3
    convolution twice, the embedding ``time`` [B, F] added between them, for images ``x`` [B, H, W, C]."""

    def half(x: Array, p: Params) -> Array:
        y = jax.nn.silu(_group_norm(x, p["scale"], p["bias"], groups))
        y = lax.conv_general_dilated(y, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y + p["b"]

    y = half(x, p["first"])
    y = y + (jax.nn.silu(time) @ p["time"]["w"] + p["time"]["b"])[:, None, None]
    return x + half(y, p["second"])


def gray_scott(u: Array, v: Array, feed: float = 0.037, kill: float = 0.06) -> tuple[Array, Array]:
    """Rates of two reacting, diffusing substances on a periodic grid (Pearson, Science 261, 1993), by the
    five-point Laplacian."""

    def laplacian(z: Array) -> Array:
        return sum(jnp.roll(z, s, axis) for s in (-1, 1) for axis in (0, 1)) - 4 * z

    reaction = u * v * v
    return (
        0.16 * laplacian(u) - reaction + feed * (1 - u),
        0.08 * laplacian(v) + reaction - (feed + kill) * v,
    )


def lorenz_96(x: Array, forcing: float = 8.0) -> Array:
    """Rates of an ensemble ``x`` [M, N] of Lorenz-96 systems (Lorenz 1996)."""
    return (jnp.roll(x, -1, -1) - jnp.roll(x, 2, -1)) * jnp.roll(x, 1, -1) - x + forcing


def neural_ode(x: Array, t: Array, p: Params) -> Array:
    """The right-hand side of a neural ODE (Chen et al., arXiv:1806.07366): an MLP of state ``x`` [B, D] and
    time."""
    times = jnp.broadcast_to(t, (x.shape[0], 1))
    h = jnp.tanh(jnp.concatenate([x, times], -1) @ p["w1"] + p["b1"])
    return jnp.tanh(h @ p["w2"] + p["b2"]) @ p["w3"] + p["b3"]


def clip_loss_grad(x: Array, y: Array, scale: Array) -> tuple[Array, ...]:
    """The contrastive loss of CLIP and its gradients by both embeddings [B, D] and the scale (Radford et
    al., arXiv:2103.00020, figure 3)."""

    def loss(x: Array, y: Array, scale: Array) -> Array:
        unit = [z * lax.rsqrt(jnp.sum(jnp.square(z), -1, keepdims=True) + 1e-6) for z in (x, y)]
        logits = jnp.exp(scale) * unit[0] @ unit[1].T
        diagonal = jnp.sum(unit[0] * unit[1], -1) * jnp.exp(scale)
        both = jax.nn.logsumexp(logits, 0) + jax.nn.logsumexp(logits, 1)
        return jnp.mean(both / 2 - diagonal)

    return jax.grad(loss, (0, 1, 2))(x, y, scale)


def _moe_combine(dtype: str, tokens: int, width: int, experts: int, top: int) -> Built:
    a = partial(array, dtype)
    chosen = (a(tokens, top), array("int32", tokens, top))
    return moe_combine, (a(tokens, width), a(experts, tokens, width), *chosen)


def _neural_ode(dtype: str, m: int, n: int, hidden: int) -> Built:
    a = partial(array, dtype)
    params = {"w1": a(n + 1, hidden), "b1": a(hidden), "w2": a(hidden, hidden), "b2": a(hidden)}
    return neural_ode, (a(m, n), a(), params | {"w3": a(hidden, n), "b3": a(n)})


def _unet_block(dtype: str, batch: int, side: int, channels: int, groups: int, features: int) -> Built:
    a = partial(array, dtype)
    vector = a(channels)
    half = {"scale": vector, "bias": vector, "w": a(3, 3, channels, channels), "b": vector}
    params: dict[str, Any] = {
        "first": half,
        "second": half,
        "time": {"w": a(features, channels), "b": vector},
    }
    images = a(batch, side, side, channels)
    return partial(unet_block, groups=groups), (images, a(batch, features), params)


def _moe_routing(dtype: str, tokens: int, width: int, experts: int, top: int) -> Built:
    return partial(moe_routing, top=top), (array(dtype, tokens, width), array(dtype, width, experts))


_EXPERTS = {"tokens": 4096, "width": 4096, "experts": 8, "top": 2}
_SMALL_EXPERTS = {"tokens": 13, "width": 30, "experts": 5, "top": 2}
_GRID, _SMALL_GRID = {"m": 2048, "n": 2048}, {"m": 7, "n": 10}

_ALL = (
    Workload("moe_routing", "the router of Mixtral 8x7B and its balance", _EXPERTS, _SMALL_EXPERTS,
             _moe_routing),
    Workload("moe_combine", "the combination of the results of Mixtral 8x7B's experts", _EXPERTS,
             _SMALL_EXPERTS, _moe_combine),
    Workload("selective_scan", "the state-space scan of Mamba 130M",
             {"tokens": 2048, "width": 1536, "states": 16}, {"tokens": 13, "width": 10, "states": 3},
             of_shapes(selective_scan, "tokens width", "tokens width", "width states", "tokens states",
                       "tokens states", "width")),
    Workload("unet_block", "a residual block of Stable Diffusion's U-Net, at 64 x 64",
             {"batch": 2, "side": 64, "channels": 320, "groups": 32, "features": 1280},
             {"batch": 2, "side": 5, "channels": 6, "groups": 3, "features": 10}, _unet_block),
    Workload("gray_scott", "reaction and diffusion on a periodic grid", _GRID, _SMALL_GRID,
             of_shapes(gray_scott, "m n", "m n")),
    Workload("lorenz_96", "an ensemble of Lorenz-96 systems", {"m": 4096, "n": 40}, {"m": 5, "n": 13},
             of_shapes(lorenz_96, "m n")),
    Workload("neural_ode", "the right-hand side of a neural ODE", {"m": 4096, "n": 64, "hidden": 256},
             {"m": 5, "n": 13, "hidden": 30}, _neural_ode),
    Workload("clip_loss_grad", "the gradients of CLIP's contrastive loss", {"m": 4096, "n": 512},
             {"m": 5, "n": 30}, of_shapes(clip_loss_grad, "m n", "m n", "")),
    )  # fmt: skip

PUBLISHED: dict[str, Workload] = {workload.name: workload for workload in _ALL}
