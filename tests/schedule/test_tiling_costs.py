"""The lower bounds of a group are below its price, and all tilings at once cost what each costs."""

import functools
import itertools
import random

import numpy as np
import pytest

from costmodel.devices import DEVICES
from costmodel.graph import OpKind
from costmodel.onchip import KernelFootprint
from costmodel.roofline import estimate, work_of
from costmodel.tiling_costs import tiling_costs
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.layout import is_nest
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.grouping import decompose
from fuseplan.support.errors import Verdict
from fuseplan.workloads import get_workload
from tests.helpers.graphs import GraphBuilder

pytestmark = pytest.mark.one_python

NAMES = ["mlp", "gated_mlp", "linear_cross_entropy_grad", "gpt2_block", "gpt2_block_grad"]


@functools.cache
def workload_graph(name, small):
    f, args = get_workload(name).build(small=small)
    return lower(trace(f, *args)).graph


@functools.cache
def enumerated(name, device, small):
    """A scheduler, and of each part of a workload the groups that no monotone rule refuses."""
    graph = workload_graph(name, small)
    scheduler = Scheduler(graph, device)
    spaces = decompose(graph, PriceBook(graph, scheduler)).spaces
    return scheduler, [[space.nodes(m) for m in enumerate_groups(space, 2_000).groups] for space in spaces]


def legal_groups(name, device, seed=0, per_part=40, small=False):
    """A scheduler, and some of the groups."""
    scheduler, parts = enumerated(name, device, small)
    rng = random.Random(seed)
    return scheduler, [g for some in parts for g in rng.sample(some, min(per_part, len(some)))]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(d, id=d.name, marks=pytest.mark.xdist_group(f"tilings of {d.name}"))
        for d in DEVICES.values()
    ],
)
def device(request):
    """All tests of one device follow each other, in one process: its groups are found once."""
    yield request.param
    enumerated.cache_clear()


def anchored(graph, groups):
    return [g for g in groups if any(graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE for n in g)]


@pytest.mark.slow
def test_the_floor_is_below_every_price(device):
    n_priced = 0
    for name, small in itertools.product(NAMES, (True, False)):
        scheduler, groups = legal_groups(name, device, small=small)
        for nodes in groups:
            kernel = scheduler.price(nodes)
            if not isinstance(kernel, Verdict):
                n_priced += 1
                assert scheduler.floor(nodes) <= scheduler.least(nodes) <= kernel.cost.time_ps, (name, nodes)
                assert scheduler.floors(nodes)[1] <= kernel.cost.hbm_bytes
    assert n_priced > 100


def form_of(spec):
    """All of a schedule but its tiles."""
    return [axis.role for axis in spec.axes], spec.node_axes, spec.passes


@pytest.mark.slow
def test_all_tilings_at_once_cost_what_each_costs(device):
    """The costs of all tilings of a kernel are those of ``estimate``, and the fastest is chosen."""
    n_priced = 0
    for name, small in itertools.product(
        [*NAMES, "softmax", "add_transpose", "layernorm_grad"], (True, False)
    ):
        scheduler, groups = legal_groups(name, device, seed=1, per_part=10, small=small)
        graph = scheduler.graph
        for nodes in groups:
            if len(nodes) == 1:
                continue
            specs = list(scheduler.schedules(nodes))
            costs = [estimate(graph, spec, device) for spec in specs]
            found = []
            for _, alike in itertools.groupby(
                specs, lambda s: ([a.role for a in s.axes], s.node_axes, s.passes)
            ):
                spec, *others = alike
                tiles = np.array([[axis.tile for axis in s.axes] for s in (spec, *others)])
                need = KernelFootprint(graph, spec, device.sequential_grid)
                every = tiling_costs(graph, spec, device, tiles, need, work_of(graph, spec))
                assert every.rows == list(range(len(tiles)))
                found += zip(every.time_ps, every.hbm_bytes, every.onchip_bytes, strict=True)
            assert found == [(c.time_ps, c.hbm_bytes, c.onchip_bytes) for c in costs]
            kernel = scheduler.price(nodes)
            if isinstance(kernel, Verdict) or not kernel.spec.axes or is_nest(graph, kernel.spec):
                continue
            at_floor = [k for k, cost in enumerate(costs) if cost.time_ps <= scheduler.least(nodes)]
            onchip = [0 if device.sequential_grid else cost.onchip_bytes for cost in costs]
            ranks = [
                (cost.time_ps, cost.hbm_bytes, nbytes) for cost, nbytes in zip(costs, onchip, strict=True)
            ]
            best = at_floor[0] if at_floor else ranks.index(min(ranks))
            assert (kernel.spec, kernel.cost) == (specs[best], costs[best])
            n_priced += 1
    assert n_priced > 20


def test_the_floor_of_a_contraction_is_its_loads_not_its_arrays():
    """A square matmul, whose tiles could cover the cores evenly, within what tiles there are."""
    b = GraphBuilder()
    x, y = (b.input((1024, 1024), "bfloat16") for _ in range(2))
    graph = b.build(b.elementwise(b.matmul(x, y), op="neg"))
    scheduler = Scheduler(graph, DEVICES["h200"])
    kernel = scheduler.price((0, 1))
    assert kernel.cost.bound_by == "cache"
    assert 0.9 * kernel.cost.time_ps < scheduler.least((0, 1)) <= kernel.cost.time_ps
