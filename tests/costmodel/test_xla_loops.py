"""How often a loop of XLA evaluates its operations, and what that costs."""

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import get_device
from costmodel.roofline import estimate
from costmodel.xla_loops import evaluations_in_loop, is_one_loop
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.layout import whole_array_spec


def graph_of(f, *shapes):
    return lower(trace(f, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))).graph


def shares(f, *shapes):
    """How often each operation is evaluated, by its name."""
    graph = graph_of(f, *shapes)
    nodes = tuple(range(len(graph.nodes)))
    found = evaluations_in_loop(graph, nodes, 32)
    return {graph.nodes[n].op: done / once for n, (done, once) in zip(nodes, found, strict=True)}


def test_an_elementwise_chain_is_evaluated_once():
    assert set(shares(lambda x: jnp.tanh(x) * 2 + x, (64, 32)).values()) == {1}


def test_a_stencil_evaluates_a_computed_array_at_each_point():
    found = shares(lambda x: (y := jnp.tanh(x))[2:] - 2 * y[1:-1] + y[:-2], (1002,))
    assert found["tanh"] == pytest.approx(3 * 1000 / 1002)
    assert found["sub"] == 1


def test_readers_at_one_index_share_an_evaluation():
    found = shares(lambda x: (y := jnp.tanh(x)) * y + jnp.sin(y), (64,))
    assert found["tanh"] == 1


def test_each_element_of_a_rolled_array_is_evaluated_once():
    found = shares(lambda x: jnp.roll(jnp.tanh(x), 3), (100,))
    assert found["tanh"] == 1


def test_a_broadcast_value_is_evaluated_for_each_element():
    found = shares(lambda x, m: x - jnp.tanh(m), (100, 8), (8,))
    assert found["tanh"] == 100
    assert found["sub"] == 1


def test_an_operation_before_a_sum_is_evaluated_once():
    assert shares(lambda x: jnp.tanh(x).sum(0), (100, 8))["tanh"] == 1


def test_an_array_that_is_written_and_read_elsewhere_is_evaluated_for_both():
    def f(x):
        y = jnp.tanh(x)
        return y, y[::-1] + x

    assert shares(f, (64,))["tanh"] == 2


def test_too_many_indices_are_no_loop():
    def stencils(x, depth):
        for _ in range(depth):
            x = jnp.tanh(x)
            x = x[2:] - x[1:-1] * x[:-2]
        return x

    def evaluated(depth, most_indices):
        graph = graph_of(lambda x: stencils(x, depth), (1000,))
        return evaluations_in_loop(graph, tuple(range(len(graph.nodes))), most_indices)

    assert evaluated(3, 3**3) is not None
    assert evaluated(4, 3**3) is None
    assert evaluated(4, 3**4) is not None


def test_one_operation_beside_a_bitcast_is_no_loop():
    graph = graph_of(lambda x: jnp.tanh(x).reshape(64, 2), (128,))
    assert not is_one_loop(graph, range(len(graph.nodes)))
    graph = graph_of(lambda x: jnp.tanh(x) + 1, (128,))
    assert is_one_loop(graph, range(len(graph.nodes)))


@pytest.mark.parametrize("name", ["h200", "tpu_v5e"])
def test_a_loop_costs_its_evaluations(name):
    """Of a stencil the arithmetic grows with its points, and its traffic does not."""
    device = get_device(name)

    def cost_of(points):
        graph = graph_of(lambda x: sum(jnp.tanh(x)[k : k + 4096] for k in range(points)), (4096 + 30,))
        return estimate(graph, whole_array_spec(graph, tuple(range(len(graph.nodes)))), device)

    few, many = cost_of(2), cost_of(20)
    assert many.transcendental_ps >= 9 * few.transcendental_ps
    assert many.hbm_bytes == few.hbm_bytes


def test_a_sum_on_a_gpu_is_two_kernels():
    def cost_of(f, name):
        graph = graph_of(f, (4096, 4096))
        return estimate(graph, whole_array_spec(graph, tuple(range(len(graph.nodes)))), get_device(name))

    for name, count in (("h200", 2), ("tpu_v5e", 1)):
        device = get_device(name)
        assert cost_of(lambda x: (x * x).sum(0), name).launch_ps == count * device.launch_ps
        assert cost_of(lambda x: (x * x) + 1, name).launch_ps == device.launch_ps
