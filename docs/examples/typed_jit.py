"""How type checkers see ``fuseplan.jit``: the parameters and the result of the function are kept."""

from typing import assert_type

import jax
import jax.numpy as jnp

import fuseplan


def scaled(x: jax.Array, factor: float = 2.0) -> jax.Array:
    """A function with parameters and a result for type checkers."""
    return jnp.tanh(x) * factor


fast = fuseplan.jit(scaled, device="h200")


@fuseplan.jit
def plain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decorated without options."""
    return x, x + 1


@fuseplan.jit(device="h200", static_argnames="n")
def with_options(x: jax.Array, n: int) -> jax.Array:
    """Decorated with options, also those of ``jax.jit``."""
    return x * n


if __name__ == "__main__":
    x = jnp.ones((8, 16))
    assert_type(fast(x, factor=3.0), jax.Array)
    assert_type(plain(x), tuple[jax.Array, jax.Array])
    assert_type(with_options(x, n=3), jax.Array)
    assert_type(fuseplan.make_plan(scaled, device="h200")(x), fuseplan.Plan)
