"""What is refused before it is scheduled could not have been scheduled, nor can more of it."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest

from costmodel.axes import unify
from costmodel.devices import TEST_DEVICE, get_device
from costmodel.graph import boundary
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.components import data_edges
from fuseplan.search.grouping import decompose
from fuseplan.support.bitset import bits, union_at
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python

DEVICES = [get_device("h200"), get_device("tpu_v5e"), TEST_DEVICE]
WORKLOADS = ["layernorm_grad", "softmax", "gpt2_block_grad", "cross_entropy_grad", "long_rows"]
CASES = [(w, d) for w in WORKLOADS for d in DEVICES]


def long_rows(x, y, g):
    """Statistics of rows and of columns that fit on no core, and what is computed of them."""
    p, q = jax.nn.softmax(x), jax.nn.softmax(y)
    r = (x - x.mean(1, keepdims=True)) * g
    return p, q * 2, r, r.sum(0), (p * q).sum(1), jnp.exp(x.max(1) - y.max(1))


LONG = [jax.ShapeDtypeStruct(s, "float32") for s in ((2**17, 2**17), (2**17, 2**17), (2**17,))]


def components(name, device):
    f, args = (long_rows, LONG) if name == "long_rows" else get_workload(name).build()
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, device)
    return scheduler, [nodes for _, nodes in decompose(graph, PriceBook(graph, scheduler)).instances]


def samples(graph, nodes, rng, count):
    """Pairs of a set of nodes and a larger one: every second pair connected, the others at random."""
    near = {n: set() for n in nodes}
    for u, v in data_edges(graph):
        if u in near and v in near:
            near[u].add(v)
            near[v].add(u)

    def connected(among, size):
        found = [rng.choice(sorted(among))]
        while len(found) < size and (around := {m for n in found for m in near[n] & among}.difference(found)):
            found.append(rng.choice(sorted(around)))
        return found

    for k in range(count):
        size = rng.randint(2, len(nodes))
        large = connected(set(nodes), size) if k % 2 else rng.sample(nodes, size)
        if len(large) > 1:
            size = rng.randint(2, len(large))
            small = connected(set(large), size) if k % 2 else rng.sample(large, size)
            yield tuple(sorted(small)), tuple(sorted(large))


@pytest.mark.parametrize(("name", "device"), CASES, ids=lambda c: getattr(c, "name", c))
def test_refusals_hold_for_every_larger_group(name, device):
    rng = random.Random(0)
    scheduler, parts = components(name, device)
    graph = scheduler.graph
    refused = 0
    for nodes in parts:
        if len(nodes) < 2:
            continue
        for_good = frozenset((edge := boundary(graph, nodes)).reads + edge.writes)
        for small, large in samples(graph, nodes, rng, 1_000):
            if scheduler.compatible(large):
                continue
            assert not scheduler.compatible(small)
            if scheduler.oversized(small, for_good):
                refused += 1
                assert scheduler.oversized(large, for_good)
    assert refused or device.name != "h200" or name == "softmax"


@pytest.mark.parametrize(("name", "device"), CASES, ids=lambda c: getattr(c, "name", c))
def test_what_is_refused_early_has_no_schedule(name, device):
    rng = random.Random(1)
    scheduler, parts = components(name, device)
    for nodes in parts:
        if len(nodes) < 2:
            continue
        for _, group in samples(scheduler.graph, nodes, rng, 60):
            if scheduler.compatible(group) is None:
                edge = boundary(scheduler.graph, group)
                if scheduler.oversized(group, frozenset(edge.reads + edge.writes)):
                    assert next(scheduler.schedules(group), None) is None


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
def test_two_rows_that_a_joiner_ties_are_streamed_as_one(device):
    """Alone, one of the two would have to be on chip whole, so that no schedule is found. That is
    no reason to refuse what ties them."""

    def f(x, y):
        p, q = jnp.exp(x), jnp.tanh(y)
        return p.sum(1) / q.sum(1), (p * q).max(1)

    x = jax.ShapeDtypeStruct((256, 2**20), "float32")
    graph = lower(trace(f, x, x)).graph
    scheduler = Scheduler(graph, device)
    everything = tuple(range(len(graph.nodes)))
    untied = tuple(n.id for n in graph.nodes if n.op not in ("mul", "reduce_max"))
    assert next(scheduler.schedules(untied), None) is None
    crossing = frozenset((edge := boundary(graph, untied)).reads + edge.writes)
    assert scheduler.capacity.refuse(untied, unify(graph, untied), crossing) is None
    assert next(scheduler.schedules(everything), None) is not None


@pytest.mark.parametrize(("name", "device"), CASES, ids=lambda c: getattr(c, "name", c))
def test_what_fits_by_masks_fits(name, device):
    """Of groups that are enumerated: what is said of masks is said of their nodes."""
    f, args = (long_rows, LONG) if name == "long_rows" else get_workload(name).build()
    graph = lower(trace(f, *args)).graph
    book = PriceBook(graph, Scheduler(graph, device))
    asked = roomy = 0
    for space in decompose(graph, book).spaces:
        for mask in enumerate_groups(space, 300).groups:
            crossing = space.crossing(mask)
            nodes = space.nodes(mask)
            touched = frozenset(v for n in nodes for v in graph.nodes[n].inputs + graph.nodes[n].outputs)
            crosses = space.given | (touched & {space.values[k] for k in bits(crossing)})
            asked += 1
            if space._room.is_roomy(mask, crossing):
                roomy += 1
                assert book.oversized(nodes, crosses) is None
    assert roomy > asked / 2, "it would spare nothing"


@pytest.mark.parametrize(("name", "device"), CASES, ids=lambda c: getattr(c, "name", c))
def test_no_group_with_a_schedule_is_refused_for_some_of_its_nodes(name, device):
    """Whatever part of a group is known, and whatever else than the group might join it."""
    rng = random.Random(2)
    scheduler, _ = components(name, device)
    graph = scheduler.graph
    book = PriceBook(graph, scheduler)
    refused = 0
    for space in decompose(graph, book).spaces:
        for mask in enumerate_groups(space, 300).groups:
            for keep, join in ((1.0, 0.0), (1.0, 0.5), (0.7, 0.1), (0.4, 0.5)):
                known = sum(1 << i for i in bits(mask) if rng.random() < keep)
                possible = mask | sum(1 << i for i in range(space.n) if rng.random() < join)
                needed = space.kept | union_at(space.everything & ~possible, space.read)
                never_made = union_at(space.everything & ~possible, space.made)
                crossing = union_at(known, space.made) & needed | union_at(known, space.read) & never_made
                if space.misfits.refused(space.question(known, possible, crossing)):
                    refused += 1
                    assert not isinstance(space.price(mask), Price)
    assert refused or name != "gpt2_block_grad" or device.name != "h200"
