"""Functions whose loops are partitioned over devices, and how their arguments are sharded over the axes ``d``
(data) and ``m`` (model) of a mesh. Importing this makes arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def attention(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e30)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def pairwise(x, y, w):
    return jnp.exp(-((x[:, None] - y[None]) ** 2).sum(-1)) @ w


def cross_entropy(h, w, labels):
    logits = h @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def training_step(params, x, y):
    """A step of gradient descent on a transformer's layer."""

    def loss(params):
        q, k, v = (jnp.einsum("bsd,dhe->bhse", x, params[name]) for name in "qkv")
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k) / 4
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
        a = jnp.einsum("bhqk,bhke->bhqe", jax.nn.softmax(scores), v)
        h = x + jnp.einsum("bhse,hed->bsd", a, params["out"])
        return ((h + jax.nn.gelu(h @ params["up"]) @ params["down"] - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape) / 4


def squared(f):
    return lambda *args: (f(*args) ** 2).sum()


HEADS = (normal(4, 1024, 16),) * 3
POINTS = (normal(2048, 4), normal(4096, 4), normal(4096, 3))
TOKENS = (normal(1024, 32), normal(32, 4096), jnp.arange(1024) * 3 % 4096)
PARAMS = {"q": normal(64, 4, 16), "k": normal(64, 4, 16), "v": normal(64, 4, 16), "out": normal(4, 16, 64)}
PARAMS |= {"up": normal(64, 256), "down": normal(256, 64)}
BY_HEADS = {"q": P(None, "m"), "k": P(None, "m"), "v": P(None, "m"), "out": P("m")}
BY_HEADS |= {"up": P(None, "m"), "down": P("m")}
PARTITIONED = {
    "attention by batch": (attention, HEADS, (P("d"), P("d"), P("d"))),
    "attention by batch and queries": (attention, HEADS, (P("d", "m"), P("d"), P("d"))),
    "gradient of attention": (jax.grad(squared(attention), (0, 1, 2)), HEADS, (P("d"), P("d"), P("d"))),
    "pairwise by rows": (pairwise, POINTS, (P(("d", "m")), P(), P())),
    "pairwise by both": (pairwise, POINTS, (P("d"), P("m"), P("m"))),
    "gradient of pairwise": (jax.grad(squared(pairwise), (0, 1, 2)), POINTS, (P("d"), P(), P())),
    "cross-entropy by tokens and classes": (
        jax.value_and_grad(cross_entropy, (0, 1)), TOKENS, (P("d"), P(None, "m"), P("d")),
    ),
    "training step": (
        training_step, (PARAMS, normal(4, 1024, 64), normal(4, 1024, 64)), (BY_HEADS, P("d"), P("d")),
    ),
}  # fmt: skip
"""Functions whose loops are partitioned, their arguments, and how these are sharded over data and model."""
EXPLICITLY = ("attention by batch and queries", "gradient of attention", "pairwise by rows")
"""Those that JAX also has on explicit meshes, without further annotations."""
