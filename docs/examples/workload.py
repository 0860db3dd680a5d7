"""A program of your own.

fuseplan plan docs/examples/workload.py:gated --device h200
fuseplan compare docs/examples/workload.py:sized --small --device h200,tpu_v5e
"""

import jax
import jax.numpy as jnp

from fuseplan.workloads import Workload, of_shapes


def gated_sum(x, w):
    """The function to plan: a gate, and the sum of each row."""
    gate = jax.nn.sigmoid(x @ w)
    return (gate * jnp.tanh(x @ w)).sum(-1)


def gated():
    """A gated sum at one size."""
    shapes = ((4096, 512), (512, 512))
    return gated_sum, tuple(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)


sized = Workload(
    "gated_sum",
    "a gated sum, at any size and dtype",
    sizes={"rows": 4096, "columns": 512},
    small_sizes={"rows": 33, "columns": 20},
    make=of_shapes(gated_sum, "rows columns", "columns columns"),
)
