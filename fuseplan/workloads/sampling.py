"""Random arrays for the arguments of a workload."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WEIGHT_SCALE = 0.02  # the standard deviation with which GPT-2 initialises its weights


def make_args(args: Any, seed: int = 0, integers_below: int = 64) -> Any:
    """Arrays for a pytree of ``jax.ShapeDtypeStruct``, the same for the same seed.

    Normally distributed; parameters named ``w…`` have the scale of initialised weights, and
    Adam's mean squares (``nu``) are not negative. Integers are uniform in
    ``[0, integers_below)``, which is valid as a token or label of every workload.
    """
    return jax.tree_util.tree_map_with_path(
        partial(_sample, np.random.default_rng(seed), integers_below), args
    )


def _sample(
    rng: np.random.Generator, integers_below: int, path: tuple, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, leaf)
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, bits.shape, np.uint32)))
    if leaf.dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, integers_below, leaf.shape), leaf.dtype)
    # A key of a dict, or a field of a named tuple or module; "" for a position.
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    values = rng.standard_normal(leaf.shape, np.float32)
    if "nu" in names:
        values = np.square(values)
    elif names and names[-1].startswith("w"):
        values *= WEIGHT_SCALE
    return jnp.asarray(values, leaf.dtype)
