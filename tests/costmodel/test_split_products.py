"""Products of few tiles and a long contracted axis are computed in parts on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import get_device
from costmodel.split_products import contracted_parts, product_extents
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace

# Of each product, whether XLA (jax 0.10) computes it in parts, read from the module it compiles.
SHAPES = {(1024, 3072, 768): True, (256, 8192, 256): True, (4096, 768, 3072): False, (1024, 768, 768): False}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def product(rows, depth, columns):
    graph = lower(trace(jnp.matmul, array(rows, depth), array(depth, columns))).graph
    return graph, next(node for node in graph.nodes if node.op == "dot_general")


@pytest.mark.parametrize("shape", SHAPES)
def test_products_with_few_tiles_for_the_cores_are_divided(shape):
    graph, node = product(*shape)
    assert (contracted_parts(graph, node, get_device("h200")) > 1) == SHAPES[shape]


def test_other_devices_and_other_operations_divide_nothing():
    graph, node = product(256, 8192, 256)
    assert contracted_parts(graph, node, get_device("tpu_v5e")) == 1
    graph = lower(trace(jnp.tanh, array(8, 8))).graph
    assert product_extents(graph, graph.nodes[0]) is None
    assert contracted_parts(graph, graph.nodes[0], get_device("h200")) == 1


def test_a_batch_has_more_tiles():
    graph = lower(trace(jnp.matmul, array(64, 256, 8192), array(64, 8192, 256))).graph
    node = graph.nodes[-1]
    assert product_extents(graph, node) == (64, 256, 256, 8192)
    assert contracted_parts(graph, node, get_device("h200")) == 1
