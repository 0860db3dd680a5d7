"""What is known of all tilings at once holds of each, and the promising ones hold the best."""

import itertools
import random

import pytest

from costmodel.axes import unify
from costmodel.devices import DEVICES
from costmodel.graph import OpKind
from costmodel.onchip import Footprint
from costmodel.roofline import estimate
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule import tilings as tilings
from fuseplan.schedule.layout import SpecMaker
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.grouping import decompose
from fuseplan.support.errors import Verdict
from fuseplan.workloads import get_workload
from tests.helpers.graphs import GraphBuilder

pytestmark = pytest.mark.one_python

NAMES = ["mlp", "gated_mlp", "linear_cross_entropy_grad", "gpt2_block", "gpt2_block_grad"]


def legal_groups(name, device, seed=0, per_part=40, small=False):
    """A scheduler, and groups of a workload that no monotone rule refuses."""
    f, args = get_workload(name).build(small=small)
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, device)
    rng = random.Random(seed)
    groups = []
    for space in decompose(graph, PriceBook(graph, scheduler)).spaces:
        some = [space.nodes(mask) for mask in enumerate_groups(space, 2_000).groups]
        groups += rng.sample(some, min(per_part, len(some)))
    return scheduler, groups


def anchored(graph, groups):
    return [g for g in groups if any(graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE for n in g)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
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


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda d: d.name)
def test_no_tiling_beats_its_least_time(device, monkeypatch):
    """And some are met: by those for which nothing else takes longer."""
    original = tilings.least_times_ps
    ratios = []

    def compare(graph, device, layout, roles, anchor, rows):
        found = original(graph, device, layout, roles, anchor, rows)
        make_spec = SpecMaker(nodes, axes, layout, roles, device.backend)
        for tiles, least_ps in zip(rows.tolist(), found.tolist(), strict=True):
            # What a tile needs on chip only ever costs time.
            time_ps = estimate(graph, make_spec(tuple(tiles)), device, Footprint(0)).time_ps
            assert least_ps <= time_ps, (nodes, tiles)
            ratios.append(least_ps / time_ps)
        return found

    monkeypatch.setattr(tilings, "least_times_ps", compare)
    for name in NAMES:
        scheduler, groups = legal_groups(name, device)
        for nodes in anchored(scheduler.graph, groups):
            axes = unify(scheduler.graph, nodes)
            scheduler.price(nodes)
    assert len(ratios) > 100
    assert max(ratios) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "l4", "tpu_v4", "tpu_v5e"])
def test_the_most_promising_first_is_the_best_of_all(device):
    n_priced = 0
    for name in NAMES:
        scheduler, groups = legal_groups(name, DEVICES[device], seed=1)
        for nodes in anchored(scheduler.graph, groups):
            kernel = scheduler.price(nodes)
            if isinstance(kernel, Verdict) or kernel.spec.backend == "xla":
                continue
            costs = [
                (spec, estimate(scheduler.graph, spec, DEVICES[device]))
                for spec in scheduler.schedules(nodes)
            ]
            floor_ps = scheduler.least(nodes)
            at_floor = [(spec, cost) for spec, cost in costs if cost.time_ps <= floor_ps]
            best = at_floor[:1] or [
                min(costs, key=lambda c: (c[1].time_ps, c[1].hbm_bytes, c[1].onchip_bytes))
            ]
            assert [(kernel.spec, kernel.cost)] == best
            n_priced += 1
    assert n_priced > 20


def test_the_floor_of_a_contraction_is_its_loads_not_its_arrays():
    """A square matmul, whose tiles could cover the cores evenly, within what tiles there are."""
    b = GraphBuilder()
    graph = b.build(b.elementwise(b.matmul(b.input((1024, 1024)), b.input((1024, 1024))), op="neg"))
    scheduler = Scheduler(graph, DEVICES["h200"])
    kernel = scheduler.price((0, 1))
    assert kernel.cost.bound_by == "cache"
    assert 0.9 * kernel.cost.time_ps < scheduler.least((0, 1)) <= kernel.cost.time_ps
