"""Arrays on the device that are made by NumPy: JAX would compile a program for each shape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def ramp(first: float, last: float, *shape: int) -> jax.Array:
    """Equally spaced numbers in float32, row by row."""
    return jnp.asarray(np.linspace(first, last, int(np.prod(shape))).reshape(shape), "float32")
