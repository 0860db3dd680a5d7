"""Functions whose large intermediates a loop nest keeps on chip, at small sizes: rows of 17,
columns of 33, channels of 4. Arrays are float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

M, N, D = 17, 33, 4
TILES = {M: 5, N: 7}
HEADS = {**TILES, 3: 1}
"""With the heads of an attention, one at a time."""

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """The result, and the gradient in all arguments for the cotangent that is the last."""

    def g(*args: Any) -> Any:
        *args, ct = args
        out, vjp = jax.vjp(f, *args)
        return out, *vjp(ct)

    return g


def attention(q, k, v, change=lambda s: s):
    s = jnp.einsum("hqd,hkd->hqk", q, k) * 0.35
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(change(s), -1), v)


def _distance():
    return jnp.arange(M)[:, None] - jnp.arange(N)


def masked(value):
    return lambda q, k, v: attention(q, k, v, lambda s: jnp.where(_distance() >= -5, s, value))


def sliding(q, k, v):
    return attention(q, k, v, lambda s: jnp.where(abs(_distance()) < 6, s, -jnp.inf))


def alibi(q, k, v):
    slope = 2.0 ** -jnp.arange(1, 4)
    return attention(q, k, v, lambda s: s - slope[:, None, None] * abs(_distance()))


def capped(q, k, v):
    return attention(q, k, v, lambda s: 3 * jnp.tanh(s / 3))


def lost_rows(q, k, v):
    """Rows from the seventh on see nothing: NaN."""
    return attention(q, k, v, lambda s: jnp.where(jnp.arange(M)[:, None] < 7, s, -jnp.inf))


def guarded_rows(q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k)
    s = jnp.where((jnp.arange(M)[:, None] < 7) & (_distance() > -9), s, -jnp.inf)
    m = s.max(-1, keepdims=True)
    p = jnp.exp(s - jnp.where(jnp.isfinite(m), m, 0))
    total = p.sum(-1, keepdims=True)
    return jnp.einsum("hqk,hkd->hqd", p / jnp.where(total == 0, 1, total), v)


def grouped(q, k, v):
    """Two heads of queries for each of three heads of keys."""
    s = jnp.einsum("ghqd,hkd->ghqk", q, k)
    return jnp.einsum("ghqk,hkd->ghqd", jax.nn.softmax(s, -1), v)


def with_weights(q, k, v):
    p = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k), -1)
    return jnp.einsum("hqk,hkd->hqd", p, v), p


def over_queries(q, k, v):
    """The softmax runs along the other axis."""
    p = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k), 1)
    return jnp.einsum("hqk,hkd->hqd", p, v)


def two_softmaxes(q, k, v):
    s = jnp.einsum("hqd,hkd->hqk", q, k)
    p, r = jax.nn.softmax(s, -1), jax.nn.softmax(-2 * s, -1)
    return jnp.einsum("hqk,hkd->hqd", p - 0.5 * r, v), (p * s).sum(-1)


def entropy(q, k):
    s = q @ k.T
    p = jax.nn.softmax(s, -1)
    return -(p * jax.nn.log_softmax(s, -1)).sum(-1)


def foreign_maximum(q, k):
    """The maximum is that of a part of x: no running maximum bounds exp(x - m)."""
    s = q @ k.T
    m = jnp.where(jnp.arange(N) % 3 == 0, s, -jnp.inf).max(-1, keepdims=True)
    return jnp.exp(s - m).sum(-1), m


def used_maximum(q, k):
    s = q @ k.T
    m = s.max(-1, keepdims=True)
    e = jnp.exp(s - m)
    return (e * s).sum(-1) / e.sum(-1), m[:, 0] ** 2, s.sum(0), (s * m).sum(-1)


def shifted_twice(q, k):
    s = q @ k.T
    m = s.max(-1, keepdims=True)
    guard = jnp.where(jnp.isfinite(m), m, 0)
    return jnp.exp(s - m).sum(-1), jnp.exp(s - guard).sum(-1) + jnp.exp(s - jnp.maximum(m, 0.5)).sum(-1)


def live_guard(q, k, floor):
    s = q @ k.T
    m = jnp.maximum(s.max(-1), floor)[:, None]
    return jnp.exp(s - m).sum(-1)


def cross_entropy(x, w, labels):
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def cross_entropy_gradient(x, w, labels):
    return jax.value_and_grad(cross_entropy, (0, 1))(x, w, labels)


def mlp(x, w1, w2):
    return jax.nn.gelu(x @ w1) @ w2


def gated(x, w1, w2, w3):
    return (jax.nn.silu(x @ w1) * (x @ w2)) @ w3


def squared_distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def gram(x, y):
    return (x * x).sum(-1)[:, None] + (y * y).sum(-1) - 2 * x @ y.T


def gaussian(x, y, b):
    return jnp.exp(-gram(x, y)) @ b


def gaussian_of_differences(x, y, b):
    return jnp.exp(-squared_distances(x, y)) @ b


def laplacian(x, y, b):
    return jnp.exp(-abs(x[:, None] - y[None]).sum(-1)) @ b


def inverse_distance(x, y, b):
    return (1 / jnp.sqrt(squared_distances(x, y) + 0.1)) @ b


def nearest(x, y):
    return jnp.argmin(squared_distances(x, y), -1), jnp.argmax(gram(x, y), 0)


def k_means(x, y):
    d = squared_distances(x, y)
    near = jnp.argmin(d, -1)[:, None] == jnp.arange(N)
    return near.astype(x.dtype).T @ x, near.sum(0), d.min(-1).sum()


def soft_minimum(x, y):
    return -jax.nn.logsumexp(-squared_distances(x, y), -1)


def forces(x, y, mass):
    r = y[None] - x[:, None]
    d2 = (r * r).sum(-1) + 0.01
    return jnp.einsum("ijd,ij->id", r, mass / (d2 * jnp.sqrt(d2)))


def monoids(x, y):
    """A mean with its variance, a sum of exponentials with its maximum, and affine maps one after the other
    (which do not commute), each by a function of the user; of the last pair only the second result."""

    def moments(a, b):
        (n, mean, squares), (more, other, others) = a, b
        count, apart = n + more, other - mean
        share = more / jnp.maximum(count, 1.0)
        return count, mean + apart * share, squares + others + apart * apart * n * share

    def exponentials(a, b):
        top = jnp.maximum(a[0], b[0])
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        return top, a[1] * jnp.exp(a[0] - shift) + b[1] * jnp.exp(b[0] - shift)

    def then(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    d = ((x[:, None] - y[None]) ** 2).sum(-1)
    one, zero = jnp.ones_like(d), jnp.zeros_like(d)
    return (
        lax.reduce((one, d, zero), (0.0, 0.0, 0.0), moments, (1,)),
        lax.reduce((-d, one), (-jnp.inf, 0.0), exponentials, (0,)),
        lax.reduce((jnp.cos(d), d), (1.0, 0.0), then, (1,))[1],
    )


def statistics(x, y):
    z = jnp.sin(x @ y.T)
    mean = z.mean(-1, keepdims=True)
    var = ((z - mean) ** 2).mean(-1, keepdims=True)
    return (z - mean) / jnp.sqrt(var + 1e-3) @ y, z.var(0), z.std(), mean


def reductions(x, y):
    z = x[:, None] * y
    return (
        *(z.mean(), z.max(), z.min(1), z.max(0), jnp.prod(z, 1), jnp.prod(z)),
        *((z > -2).all(1), (z > 2).any(0), (z > 2).any(), z.argmin(), (z > 0).sum(1), z.sum((0, 1))),
    )


def softmax_columns(x, y, w):
    """What a row is divided by is not constant along the rows that are summed."""
    p = jax.nn.softmax(x @ y.T, -1)
    return (jnp.exp(p).sum(0) * w).sum(), (p * w).sum(), (p.sum(0) * w).sum()


def lost_sums(x, y):
    """Rows from the seventh on see nothing, the others none of the first columns."""
    seen = (jnp.arange(M)[:, None] < 7) & (jnp.arange(N) > 15)
    s = jnp.where(seen, x @ y.T, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e.sum(-1), e @ y


def contracted_weights(x, y):
    """A product of weights before and after they have their norm."""
    p = jax.nn.softmax(x @ y.T, -1)
    w = jnp.einsum("mnd,d->mn", p[:, :, None] * jnp.sin(x[:, None] + y), jnp.arange(1.0, 4))
    return w.sum(-1), w


def reciprocal(x, y):
    p = jax.nn.softmax(x @ y.T, -1)
    return (0.5 / p).sum(-1), (p / 0.5).sum(-1), (2 * p).sum(-1), (p * p).sum(-1)


def late_factor(x, y, w):
    """Variances are known after two passes; what they divide is summed up in the first."""
    z = x[:, None] * y
    r = jax.lax.rsqrt(((z - z.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (z * r * w).sum(-1), (z * (1 / z.sum())).sum(0)


def partial_totals(x, y, z):
    """Sums over axes that other results do not have."""
    t = x[:, None, None] * y[:, None] * z
    return jnp.sin(t).sum(), jnp.cos(x).sum(), (x[:, None] * y).sum(), (y[:, None] + z).sum(1), z.max()


def looked_up(table, x, y, at):
    """Rows of a table, one for each pair."""
    return ((table[at] * jnp.exp(x[:, None] - y)[..., None]) ** 2).sum((1, 2))


def summed_up(table, x, y, at):
    """Sums of pairs, in the places that the pairs name, on top of what is there."""
    return table[:, 0].at[at].add(jnp.exp(x[:, None] - y)), (x[:, None] - y).max(1)


QKV = (normal(3, M, D), normal(3, N, D), normal(3, N, D, seed=1))
CT = normal(3, M, D, seed=2)
XY = (normal(M, 3), normal(N, 3))
LOOKUP = (normal(9, 3), normal(M), normal(N), (np.arange(M)[:, None] * 5 + np.arange(N) * 3) % 9)
CASES: dict[str, Case] = {
    **{f.__name__: (f, QKV) for f in (attention, sliding, alibi, capped, lost_rows, guarded_rows)},
    **{f.__name__: (f, QKV) for f in (with_weights, over_queries, two_softmaxes)},
    **{f"masked {v}": (masked(v), QKV) for v in (-np.inf, np.finfo("d").min)},
    "grouped": (grouped, (normal(2, 3, M, D), *QKV[1:])),
    **{f"gradient of {f.__name__}": (with_gradient(f), (*QKV, CT)) for f in (attention, capped, sliding)},
    "gradient of masked": (with_gradient(masked(-1e30)), (*QKV, CT)),
    "gradient of grouped": (
        with_gradient(grouped), (normal(2, 3, M, D), *QKV[1:], normal(2, 3, M, D, seed=2)),
    ),
    **{f.__name__: (f, XY) for f in (entropy, foreign_maximum, used_maximum, shifted_twice)},
    "live_guard": (live_guard, (*XY, normal(M))),
    "gradient of entropy": (with_gradient(entropy), (*XY, normal(M))),
    **{
        f.__name__: (f, (normal(M, D), normal(D, N), np.arange(M) * 7 % N))
        for f in (cross_entropy, cross_entropy_gradient)
    },
    "mlp": (mlp, (normal(M, D), normal(D, N), normal(N, D))),
    "gradient of mlp": (with_gradient(mlp), (normal(M, D), normal(D, N), normal(N, D), normal(M, D))),
    "gated": (gated, (normal(M, D), normal(D, N), normal(D, N, seed=1), normal(N, D))),
    "gradient of gated": (
        with_gradient(gated),
        (normal(M, D), normal(D, N), normal(D, N, seed=1), normal(N, D), normal(M, D, seed=3)),
    ),
    **{
        f.__name__: (f, (*XY, normal(N)))
        for f in (gaussian, gaussian_of_differences, laplacian, inverse_distance, forces)
    },
    **{
        f"gradient of {f.__name__}": (with_gradient(f), (*XY, normal(N), normal(M)))
        for f in (gaussian, gaussian_of_differences, laplacian, inverse_distance)
    },
    "gradient of forces": (with_gradient(forces), (*XY, normal(N), normal(M, 3, seed=2))),
    **{f.__name__: (f, XY) for f in (nearest, k_means, soft_minimum, statistics, monoids)},
    "reciprocal": (reciprocal, XY),
    **{f.__name__: (f, XY) for f in (lost_sums, contracted_weights)},
    "gradient of soft_minimum": (with_gradient(soft_minimum), (*XY, normal(M))),
    "gradient of statistics": (jax.grad(lambda *a: sum(z.sum() for z in statistics(*a)), (0, 1)), XY),
    "reductions": (reductions, (normal(M), normal(N))),
    "softmax_columns": (softmax_columns, (*XY, normal(N))),
    "late_factor": (late_factor, (normal(M), normal(N), normal(N, seed=1))),
    **{f.__name__: (f, LOOKUP) for f in (looked_up, summed_up)},
    "gradient of looked_up": (
        jax.grad(lambda *a: (looked_up(*a) ** 2).sum(), (0, 1, 2)), LOOKUP,
    ),
    "partial_totals": (partial_totals, (normal(M), normal(N), normal(40))),
}  # fmt: skip
