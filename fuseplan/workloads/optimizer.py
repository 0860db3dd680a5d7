"""Adam and gradient clipping of a pytree in plain JAX, equal to those of Optax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

LEARNING_RATE = 3e-4
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # the defaults of Kingma & Ba 2015


class AdamState(NamedTuple):
    """Steps taken, and the running means of the gradients and of their squares (float32)."""

    step: Array
    mu: Any
    nu: Any


def adam_init(params: Any) -> AdamState:
    """The state before the first step."""

    def zeros() -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros())


def adam_update(params: Any, state: AdamState, grads: Any) -> tuple[Any, AdamState]:
    """One step of Adam with bias correction: the new parameters and the new state."""
    step = state.step + 1
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    mu = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.mu, grads)
    nu = jax.tree.map(lambda n, g: BETA2 * n + (1 - BETA2) * jnp.square(g), state.nu, grads)
    correction1 = 1 - BETA1 ** step.astype(jnp.float32)
    correction2 = 1 - BETA2 ** step.astype(jnp.float32)

    def moved(p: Array, m: Array, n: Array) -> Array:
        change = (m / correction1) / (jnp.sqrt(n / correction2) + EPSILON)
        return (p - LEARNING_RATE * change).astype(p.dtype)

    return jax.tree.map(moved, params, mu, nu), AdamState(step, mu, nu)


def clip_by_global_norm(grads: Any, max_norm: float) -> Any:
    """The gradients, scaled down where their joint Euclidean norm exceeds ``max_norm``."""
    squares = [jnp.square(g.astype(jnp.float32)).sum() for g in jax.tree.leaves(grads)]
    factor = max_norm / jnp.maximum(jnp.sqrt(sum(squares)), max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
