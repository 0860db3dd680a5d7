"""Lookups by index arrays, sums into tables, counts and histograms: small results of many elements.

In plain JAX, the looked-up rows of all indices are in memory, and so are the values that are added to a
table.
Letters: ``E`` pairs or indices, ``N`` rows of a table, ``D`` coordinates or features.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax

BINS = 16
"""The bins of a histogram along each of its dimensions."""


def bond_energy(x: Array, stiffness: Array, i: Array, j: Array) -> Array:
    """``sum_e stiffness_e (|x_i - x_j| - 1)²`` over ``E`` bonds between points ``x[N, 3]``: a scalar."""
    stretch = jnp.sqrt(((x[i] - x[j]) ** 2).sum(-1) + 1e-6) - 1
    return (stiffness * stretch**2).sum()


def bond_forces(x: Array, stiffness: Array, i: Array, j: Array) -> Array:
    """The gradient of ``bond_energy`` by the points: ``[N, 3]``."""
    return jax.grad(bond_energy)(x, stiffness, i, j)


def embedding_bags(table: Array, weights: Array, indices: Array) -> Array:
    """Weighted sums of rows of ``table[N, D]``, by ``weights`` and ``indices`` ``[B, L]``: ``[B, D]``."""
    return (table[indices] * weights[..., None]).sum(1)


def embedding_bags_vjp(table: Array, weights: Array, indices: Array, cotangent: Array) -> tuple[Array, Array]:
    """The gradients of ``embedding_bags`` by the table and the weights."""
    return jax.vjp(lambda t, w: embedding_bags(t, w, indices), table, weights)[1](cotangent)


def column_histograms(x: Array) -> Array:
    """Two-dimensional histograms of all pairs of columns of ``x[M, C]``: ``[C(C-1)/2, 256]`` int32."""
    bins = jnp.clip((x * 4 + BINS // 2).astype(jnp.int32), 0, BINS - 1)
    empty = jnp.zeros(BINS * BINS, jnp.int32)
    pairs = itertools.combinations(range(x.shape[1]), 2)
    return jnp.stack([empty.at[bins[:, i] * BINS + bins[:, j]].add(1) for i, j in pairs])


def mean_gradient(w: Array, x: Array, y: Array) -> Array:
    """The mean over ``B`` batches of the gradients of a logistic regression of ``x[B, M, D]`` and ``y[B, M]``
    by ``w[D]``, batch after batch: ``[D]``."""

    def loss(w: Array, x: Array, y: Array) -> Array:
        return jnp.mean(jax.nn.softplus(-y * jnp.tanh(x @ w)))

    return lax.map(lambda batch: jax.grad(loss)(w, *batch), (x, y)).mean(0)
