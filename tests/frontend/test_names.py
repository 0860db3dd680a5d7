"""The names of primitives that rules and tables are about."""

import jax
import jax.experimental.pallas  # it has primitives of its own
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.frontend import compared
from fuseplan.frontend.lower import lower
from fuseplan.frontend.ops import rules
from fuseplan.frontend.trace import trace
from fuseplan.support import jax_compat

LATER = {"log2", "one_minus_square"}
"""Primitives of the newest JAX that the oldest has not."""
EARLIER = {"closed_call"}
OURS = {"fused", "fused_tangents", "await_cotangents", "pattern"}


def test_every_rule_is_of_a_primitive():
    assert {name for name in rules() if name not in jax_compat.primitives()} <= LATER | EARLIER | OURS


X = jax.ShapeDtypeStruct((64, 16), "float32")


@pytest.mark.parametrize(
    "moved",
    [
        lambda m: m,
        lambda m: jnp.tile(m, (1, 16)),
        lambda m: jnp.stack([m] * 16, 1)[..., 0],
        lambda m: jax.lax.optimization_barrier(m),
        jnp.round,
        jnp.floor,
        jnp.ceil,
        lambda m: jnp.zeros_like(m).at[:].set(m),
    ],
)
def test_what_is_compared_with_itself_is_computed_once(moved):
    """However it was moved or rounded to whole numbers."""

    def f(x):
        y = jnp.exp(x)
        return y == moved(y.max(1, keepdims=True))

    graph = lower(trace(f, X)).graph
    assert {graph.nodes[n].op for n in compared.needed_once(graph)} == {"exp"}


@pytest.mark.parametrize("update", ["max", "min", "subtract", "add", "multiply", "set"])
def test_strict_allows_every_update_of_an_array(update):
    def f(x, i):
        return getattr(x.at[i], update)(2.0)

    indices = jax.ShapeDtypeStruct((5,), "int32")
    assert fuseplan.make_plan(f, device="test", strict=True)(X, indices).status == "OPTIMAL"
