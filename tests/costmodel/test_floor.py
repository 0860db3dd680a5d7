"""``Floor`` is below every partition, and tight where nothing is wasted."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import TEST_DEVICE
from costmodel.floor import Floor
from costmodel.roofline import estimate
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import Verdict
from tests.helpers.graphs import TPU, GraphBuilder

pytestmark = pytest.mark.one_python


def gather(x, i):
    """Rows of ``x``, without the operations that wrap negative indices: each doubles the number of groups."""
    return x.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)


def programs():
    b = GraphBuilder()
    x = b.input((64, 128))
    m = b.broadcast(b.reduce(x, (1,)), (64, 128), (0,))
    yield "rows", b.build(b.elementwise(b.elementwise(x, m, op="sub"), op="exp"))
    b = GraphBuilder()
    x, w = b.input((64, 128)), b.input((128, 256))
    y = b.elementwise(b.matmul(x, w), op="tanh")
    yield "matmul", b.build(y, b.reduce(y, (0,)))
    b = GraphBuilder()
    x = b.input((64, 128))
    flat = b.reshape(b.elementwise(x, op="exp"), (8192,))
    back = b.reshape(flat, (64, 128))
    yield "bitcasts", b.build(b.elementwise(back, x), flat)
    b = GraphBuilder()
    x = b.input((6, 4))
    yield "only_a_bitcast", b.build(b.reshape(x, (24,)))
    x = jax.ShapeDtypeStruct((64, 128), "float32")
    yield "slices", lower(trace(lambda x: (jnp.exp(x[:8]) + x[8:16], x[3].sum(), -x[:, ::2]), x)).graph
    rows = jax.ShapeDtypeStruct((5,), "int32")
    b = GraphBuilder()
    heads = b.elementwise(b.input((16, 12, 4)), op="exp")
    yield "short_rows", b.build(b.elementwise(b.reshape(heads, (16, 48)), op="tanh"), b.reduce(heads, (0,)))
    yield "gathers", lower(trace(lambda x, i: (jnp.exp(gather(x, i)), gather(x, 2 * i)), x, rows)).graph


@pytest.mark.parametrize("device", [TEST_DEVICE, TPU], ids=lambda device: device.name)
@pytest.mark.parametrize("graph", [pytest.param(g, id=name) for name, g in programs()])
def test_no_partition_beats_the_floor(graph, device):
    scheduler, floor = Scheduler(graph, device), Floor(graph, device)
    n = len(graph.nodes)
    times = {}
    for size in range(1, n + 1):
        for nodes in itertools.combinations(range(n), size):
            kernel = scheduler.price(nodes)
            if not isinstance(kernel, Verdict):
                times[nodes] = kernel.cost.time_ps
                assert floor.parts(nodes)[1] <= scheduler.floors(nodes)[1] <= kernel.cost.hbm_bytes
                assert scheduler.floors(nodes)[0] <= kernel.cost.time_ps
    best = {(): 0}
    for size in range(1, n + 1):
        for nodes in itertools.combinations(range(n), size):
            best[nodes] = min(
                time + best[tuple(sorted(set(nodes) - set(part)))]
                for part, time in times.items()
                if set(part) <= set(nodes)
            )
            assert floor(nodes) <= best[nodes]


def test_the_floor_of_a_streaming_kernel_is_its_cost():
    b = GraphBuilder()
    graph = b.build(b.elementwise(b.input((4096, 1024)), op="neg"))
    spec = Scheduler(graph, TEST_DEVICE).price((0,)).spec
    cost = estimate(graph, spec, TEST_DEVICE)
    assert cost.bound_by == "memory"
    assert Floor(graph, TEST_DEVICE)((0,)) == cost.time_ps


def test_the_floor_of_a_tpus_kernel_has_the_padding():
    b = GraphBuilder()
    graph = b.build(b.elementwise(b.elementwise(b.input((4096, 16, 64)), op="neg"), op="abs"))
    cost = Scheduler(graph, TPU, features=Features(xla_loops=False)).price((0, 1)).cost
    floor = Floor(graph, TPU)
    assert floor.parts((0, 1), together=True)[1] == cost.hbm_bytes == 2 * 4096 * 16 * 128 * 4
    assert floor.parts((0, 1))[1] == 2 * 4096 * 16 * 64 * 4  # XLA's own kernels pad nothing


def test_bitcasts_alone_are_free():
    graph = dict(programs())["only_a_bitcast"]
    assert Floor(graph, TEST_DEVICE)((0,)) == 0
