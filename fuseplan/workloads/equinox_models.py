"""Workloads written with Equinox and Optax, as users write them. Both are optional, imported when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def mlp(dtype: str, rows: int, features: int, hidden: int, depth: int) -> tuple[Callable, tuple]:
    """The forward pass of ``equinox.nn.MLP`` over ``x[rows, features]``, vectorised by ``vmap``."""
    forward, params = _model(dtype, features, hidden, depth)
    return forward, (params, jax.ShapeDtypeStruct((rows, features), jnp.dtype(dtype)))


def mlp_train(dtype: str, rows: int, features: int, hidden: int, depth: int) -> tuple[Callable, tuple]:
    """One step of ``optax.adam`` on the squared error of that MLP."""
    import optax

    forward, params = _model(dtype, features, hidden, depth)
    optimizer = optax.adam(1e-3)

    def loss(params: Any, x: Array, target: Array) -> Array:
        return jnp.square((forward(params, x) - target).astype(jnp.float32)).mean()

    def train_step(params: Any, state: Any, x: Array, target: Array) -> tuple[Array, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, x, target)
        updates, state = optimizer.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    x = jax.ShapeDtypeStruct((rows, features), jnp.dtype(dtype))
    return train_step, (params, jax.eval_shape(optimizer.init, params), x, x)


def _model(dtype: str, features: int, hidden: int, depth: int) -> tuple[Callable, Any]:
    import equinox as eqx

    model = eqx.filter_eval_shape(
        lambda key: eqx.nn.MLP(
            features, features, hidden, depth, jax.nn.gelu, dtype=jnp.dtype(dtype), key=key
        ),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def forward(params: Any, x: Array) -> Array:
        return jax.vmap(eqx.combine(params, static))(x)

    return forward, params
