"""Moves of copies between the kernels of a plan: which plans they make, and what they gain."""

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings

from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.grouping import decompose, order_groups, sum_prices
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import roots_of, split
from fuseplan.search.remat.moves import Moves
from fuseplan.search.remat.search import Search
from fuseplan.support.digraph import cyclic_sets
from fuseplan.support.work import StageTimer, Work, unlimited
from fuseplan.workloads import get_workload
from tests.planners.test_planners import programs
from tests.search.test_duplicates import QUICK, split_programs

pytestmark = pytest.mark.one_python


def moved(graph, device, work, planner="best_first"):
    """The graph with copies, a price book of it, a plan with each operation once, and that plan improved."""
    scheduler = Scheduler(graph, device)
    copies = split(graph, roots_of(graph, device))
    pricing = DuplicatePricing(copies, scheduler)
    once = copies.lifted(get_planner(planner)(graph, scheduler, Budget()).groups)
    groups = Moves(copies, pricing, once, None).improved(work, math.inf)
    return copies.graph, PriceBook(copies.graph, pricing), once, groups


@settings(max_examples=60, deadline=None)
@given(programs())
def test_moves_lead_to_plans_that_are_searched(g):
    if split_programs(g) is None:
        return
    graph, book, once, groups = moved(g, QUICK, unlimited(), "unfused")
    assert sorted(n for group in groups for n in group) == list(range(len(graph.nodes)))
    assert not cyclic_sets(order_groups(graph, groups)[1])
    assert sum_prices(book, groups).time_ps <= sum_prices(book, once).time_ps
    parts = decompose(graph, book)
    searched = {
        tuple(sorted(nodes[i] for i in range(len(nodes)) if mask >> i & 1))
        for part, nodes in parts.instances
        for mask in enumerate_groups(parts.spaces[part], 10**6).groups
    }
    assert searched.issuperset(set(groups).difference(once))


@pytest.mark.parametrize(("name", "device", "gain"), [("clip_loss_grad", "tpu_v5e", 0.05)])
def test_moves_gain_in_little_work(name, device, gain):
    f, args = get_workload(name).build()
    work = unlimited()
    _, book, once, groups = moved(lower(trace(f, *args)).graph, get_device(device), work)
    assert sum_prices(book, groups).time_ps < (1 - gain) * sum_prices(book, once).time_ps
    assert 0 < work.spent < 100_000


def test_no_move_is_made_where_work_is_spent():
    f, args = get_workload("clip_loss_grad").build()
    _, _, once, groups = moved(lower(trace(f, *args)).graph, get_device("tpu_v5e"), Work(0))
    assert groups == tuple(once)


def test_a_search_that_has_no_time_keeps_the_plan_that_it_starts_from():
    f, args = get_workload("clip_loss_grad").build()
    graph, device = lower(trace(f, *args)).graph, get_device("tpu_v5e")
    scheduler = Scheduler(graph, device)
    once = get_planner("best_first")(graph, scheduler, Budget())

    def no_time(graph, pricing, budget):
        return dataclasses.replace(get_planner("unfused")(graph, pricing), bound_ps=1)

    search = Search(lambda _: no_time, Budget(), time.monotonic() + 60, StageTimer(), improves_start=True)
    _, found = search(graph, scheduler, once.groups, roots_of(graph, device), None)
    assert (found.status, found.bound_ps) == ("FEASIBLE", 1)
    assert found.time_ps < 0.95 * once.time_ps
