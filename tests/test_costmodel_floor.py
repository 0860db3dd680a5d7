"""``Floor`` is below every partition, and tight where nothing is wasted."""

import itertools

import pytest

from costmodel.device import TEST_DEVICE
from costmodel.floor import Floor
from costmodel.roofline import estimate
from fuseplan.errors import Verdict
from fuseplan.schedule import Scheduler
from tests.graphs import GraphBuilder

pytestmark = pytest.mark.one_python


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


@pytest.mark.parametrize("graph", [pytest.param(g, id=name) for name, g in programs()])
def test_no_partition_beats_the_floor(graph):
    scheduler, floor = Scheduler(graph, TEST_DEVICE), Floor(graph, TEST_DEVICE)
    n = len(graph.nodes)
    times = {}
    for size in range(1, n + 1):
        for nodes in itertools.combinations(range(n), size):
            kernel = scheduler.price(nodes)
            if not isinstance(kernel, Verdict):
                times[nodes] = kernel.cost.time_ps
                assert floor.parts(nodes)[1] <= kernel.cost.hbm_bytes
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


def test_bitcasts_alone_are_free():
    graph = dict(programs())["only_a_bitcast"]
    assert Floor(graph, TEST_DEVICE)((0,)) == 0
