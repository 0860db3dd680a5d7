"""JAX's options that change what is traced: those of this thread, to compare and to send elsewhere."""

from __future__ import annotations

from typing import Any

import jax

_DEFAULTS = {
    "jax_enable_x64": False,
    "jax_explicit_x64_dtypes": 1,  # WARN
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_default_prng_impl": "threefry2x32",
    "jax_enable_custom_prng": False,
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_high_dynamic_range_gumbel": False,
    "jax_softmax_custom_jvp": False,
    "jax_use_direct_linearize": True,
    "jax_disable_jit": False,
}
"""The options, and their values in a JAX that nobody has configured."""


def trace_settings() -> dict[str, Any]:
    """The values of the options in this thread, in an order that is always the same."""
    return {name: getattr(jax.config, name) for name in _DEFAULTS}


def changed_settings() -> dict[str, Any]:
    """Of ``trace_settings()`` those that are not JAX's defaults."""
    return {name: value for name, value in trace_settings().items() if value != _DEFAULTS[name]}


def set_trace_settings(settings: dict[str, Any]) -> None:
    """Give all threads of this process the values that ``trace_settings()`` had, there or elsewhere."""
    for name, value in settings.items():
        jax.config.update(name, value)
