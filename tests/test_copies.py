"""Operations that are computed again for their readers: the search space, the optimum, the program."""

import dataclasses

import pytest
from hypothesis import given, settings

from fuseplan.candidates import enumerate_groups
from fuseplan.copies import split
from fuseplan.planners import Budget, get_planner
from fuseplan.planners.base import take_apart
from fuseplan.pricing import PriceBook
from fuseplan.recomputing import Recomputing
from fuseplan.schedule import Scheduler
from tests.copies_by_hand import ByHand, ties
from tests.graphs import TEST_DEVICE
from tests.small_graphs import brute_force, edges_after, is_connected, is_convex, siblings_of
from tests.test_planners import objectives, programs

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")
QUICK = dataclasses.replace(TEST_DEVICE, launch_ps=TEST_DEVICE.launch_ps // 1000)
"""So that small arrays are worth computing again."""

MOST = 9
"""Positions that brute force can look at."""


def split_programs(g):
    copies = split(g, QUICK)
    return copies if copies is not None and len(copies.graph.nodes) <= MOST else None


@settings(max_examples=150, deadline=None)
@given(programs())
def test_what_is_computed_again_is_decided_optimally(g):
    copies = split_programs(g)
    if copies is None:
        return
    pricing = Recomputing(copies, Scheduler(g, QUICK))
    plan = SOLVE(copies.graph, pricing, Budget())
    assert plan.status == "OPTIMAL"
    pairs = {*siblings_of(copies.graph, pricing), *ties(copies.graph)}
    assert objectives(plan) == brute_force(copies.graph, ByHand(copies.graph, QUICK), tuple(pairs))[0]


@settings(max_examples=100, deadline=None)
@given(programs())
def test_groups_of_copies_are_those_of_the_definition(g):
    copies = split_programs(g)
    if copies is None:
        return
    graph, by_hand = copies.graph, ByHand(copies.graph, QUICK)
    pricing = Recomputing(copies, Scheduler(g, QUICK))
    parts = take_apart(graph, PriceBook(graph, pricing))
    pairs = parts.crossable.siblings
    after = edges_after(graph)
    for space in parts.kinds:
        found = {space.nodes(mask) for mask in enumerate_groups(space, 10**6).groups}
        for nodes in found:
            assert by_hand.is_searched(set(nodes))
            assert is_connected(graph, nodes, pairs)
            assert is_convex(after, nodes)
            one, other = pricing.price(nodes), by_hand.price(nodes)
            assert type(one) is type(other)
            if hasattr(one, "cost"):
                assert one.cost == other.cost
                assert pricing.floor(nodes) <= one.cost.time_ps
                assert pricing.floor_bytes(nodes) <= one.cost.hbm_bytes
