"""Sums, minima and arguments of minima over all pairs of two sets of points.

In plain JAX, they hold the ``[M, N]`` matrix of pairs in memory. Letters: ``M`` rows, ``N``
columns, ``D`` coordinates. The *Gram form* of a squared distance is ``|x|² + |y|² - 2 x·y``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

SOFTENING = 1e-2
"""Added to squared distances of bodies, so that none attracts itself."""


def gram_distances(x: Array, y: Array) -> Array:
    """Squared distances of ``x[M, D]`` and ``y[N, D]`` in Gram form: ``[M, N]``."""
    return (x * x).sum(-1)[:, None] + (y * y).sum(-1)[None, :] - 2 * (x @ y.T)


def difference_distances(x: Array, y: Array) -> Array:
    """Squared distances of ``x[M, D]`` and ``y[N, D]`` from their differences: ``[M, N]``."""
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def gaussian_gram(x: Array, y: Array, b: Array) -> Array:
    """``sum_j exp(-|x_i - y_j|²) b_j`` in Gram form: ``[M]``."""
    return jnp.exp(-gram_distances(x, y)) @ b


def gaussian_gram_vjp(x: Array, y: Array, b: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """The gradients of ``gaussian_gram`` with respect to ``x``, ``y`` and ``b``."""
    return jax.vjp(gaussian_gram, x, y, b)[1](cotangent)


def gaussian_differences(x: Array, y: Array, b: Array) -> Array:
    """``sum_j exp(-|x_i - y_j|²) b_j`` from differences: ``[M]``."""
    return jnp.exp(-difference_distances(x, y)) @ b


def laplacian(x: Array, y: Array, b: Array) -> Array:
    """``sum_j exp(-|x_i - y_j|) b_j``: ``[M]``."""
    return jnp.exp(-jnp.sqrt(difference_distances(x, y))) @ b


def laplacian_vjp(x: Array, y: Array, b: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """The gradients of ``laplacian`` with respect to ``x``, ``y`` and ``b``."""
    return jax.vjp(laplacian, x, y, b)[1](cotangent)


def inverse_distance(x: Array, y: Array, b: Array) -> Array:
    """``sum_j b_j / |x_i - y_j|``, softened: ``[M]``."""
    return jax.lax.rsqrt(difference_distances(x, y) + SOFTENING) @ b


def distance_logsumexp(x: Array, y: Array) -> Array:
    """``log(sum_j exp(-|x_i - y_j|²))``, as in a kernel density: ``[M]``."""
    return jax.nn.logsumexp(-gram_distances(x, y), axis=1)


def distance_logsumexp_vjp(x: Array, y: Array, cotangent: Array) -> tuple[Array, Array]:
    """The gradients of ``distance_logsumexp`` with respect to ``x`` and ``y``."""
    return jax.vjp(distance_logsumexp, x, y)[1](cotangent)


def nearest(x: Array, y: Array) -> Array:
    """The index of the nearest of ``y[N, D]`` to each of ``x[M, D]``: nearest neighbours, and the
    assignment of points to centroids in k-means. ``[M]`` int32."""
    return jnp.argmin(gram_distances(x, y), axis=1)


def forces(x: Array, sources: Array, masses: Array) -> Array:
    """The softened gravity of ``sources[N, 3]`` at ``x[M, 3]``: ``[M, 3]``."""
    towards = sources[None] - x[:, None]
    cubed = ((towards**2).sum(-1) + SOFTENING) ** 1.5
    return (towards * (masses / cubed)[..., None]).sum(1)


def nbody(x: Array, masses: Array) -> Array:
    """The gravity on each of ``x[N, 3]`` of all the others: ``[N, 3]``."""
    return forces(x, x, masses)


def nbody_energy_grad(x: Array, masses: Array) -> tuple[Array, Array]:
    """The potential energy of ``x[N, 3]``, and its gradient: the forces by differentiation."""

    def energy(x: Array) -> Array:
        return -0.5 * masses @ inverse_distance(x, x, masses)

    return jax.value_and_grad(energy)(x)


def magnetic_field(x: Array, sources: Array, currents: Array) -> Array:
    """The field at ``x[M, 3]`` of ``currents[N, 3]`` at ``sources[N, 3]``, softened: ``[M, 3]``."""
    towards = x[:, None] - sources[None]
    distance = jnp.linalg.norm(towards, axis=-1, keepdims=True)
    return (jnp.cross(currents[None], towards) / (distance**3 + SOFTENING)).sum(1)


def chamfer(x: Array, y: Array) -> Array:
    """The mean squared distance of ``x[M, D]`` to the nearest of ``y[N, D]``, and of ``y`` to ``x``: a
    scalar."""
    distances = difference_distances(x, y)
    return distances.min(1).mean() + distances.min(0).mean()


def energy_distance(x: Array, y: Array) -> Array:
    """The energy distance of the samples ``x[M, D]`` and ``y[N, D]`` (Székely and Rizzo, 2013): a scalar."""

    def mean(a: Array, b: Array) -> Array:
        return jnp.sqrt(difference_distances(a, b) + SOFTENING).mean()

    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


def neighbour_counts(x: Array, y: Array) -> tuple[Array, Array]:
    """How many of ``y[N, D]`` are within one of each of ``x[M, D]``, and whether any is: ``[M]``."""
    near = difference_distances(x, y) < 1
    return near.sum(1), near.any(1)


def distance_moments(x: Array, y: Array) -> tuple[Array, Array]:
    """The mean and the variance of the squared distances of each of ``x[M, D]`` to all of ``y[N, D]``, in
    one reduction by the updates of B. P. Welford (Technometrics 4, 1962): ``[M]`` each."""

    def joined(a: Any, b: Any) -> Any:
        (count, mean, squares), (more, other, others) = a, b
        total, apart = count + more, other - mean
        share = more / jnp.maximum(total, 1)
        return total, mean + apart * share, squares + others + apart * apart * count * share

    d = difference_distances(x, y)
    parts = jnp.ones_like(d), d, jnp.zeros_like(d)
    count, mean, squares = jax.lax.reduce(parts, (0.0, 0.0, 0.0), joined, (1,))
    return mean, squares / count


def kernel_products(x: Array, masks: Array, b: Array) -> Array:
    """Sums of products of Gaussian kernels of the coordinates of ``x[M, D]`` that each of ``masks[K, D]``
    selects, with weights ``b[M]``: ``[K, M]``."""

    def of_mask(mask: Array) -> Array:
        kernels = jnp.exp(-((x[:, None] - x[None]) ** 2))
        return jnp.where(mask > 0, kernels, 1).prod(-1) @ b

    return jax.vmap(of_mask)(masks)


def structure_factor(x: Array, waves: Array, charges: Array) -> Array:
    """``|sum_j q_j exp(i k x_j)|²`` of ``N`` charges at ``x[N, 3]`` for each of ``waves[K, 3]``: ``[K]``."""
    return jnp.abs((charges * jnp.exp(1j * (waves @ x.T))).sum(1)) ** 2


def chosen_distances(args: tuple[Any, ...], index: Any) -> np.ndarray:
    """The squared distances of the points that ``nearest`` has chosen, in float64. They are equal for either
    choice between two points that are equally near within rounding."""
    x, y = (np.asarray(a, np.float64) for a in args)
    return np.square(x - y[np.asarray(index)]).sum(-1)


def exact_nearest_distances(args: tuple[Any, ...], rows: np.ndarray) -> np.ndarray:
    """The squared distances of ``x[rows]`` to the nearest of ``y``, in float64 NumPy: ``[R]``."""
    x, y = (np.asarray(a, np.float64) for a in args)
    return np.array([np.square(x[row] - y).sum(-1).min() for row in rows])
