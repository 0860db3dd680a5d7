"""The order of least peak: against every order of small programs, and quickly on large ones."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.memory.liveness import Liveness, LiveRange, largest_use, live_ranges, order_peak_bound, peak
from fuseplan.memory.order import OrderOptions, minimise_peak, order_kernels, search_order
from fuseplan.support.digraph import execution_order
from tests.helpers.memory_graphs import kernel, least_peak_by_force, programs
from tests.helpers.memory_graphs import peak as defined_peak
from tests.helpers.small_graphs import edges_after, graph

pytestmark = pytest.mark.one_python


def assert_can_run(g, kernels):
    step = {n: i for i, k in enumerate(kernels) for n in k.spec.nodes}
    assert sorted(step) == list(range(len(g.nodes)))
    for n, successors in enumerate(edges_after(g)):
        assert all(step[n] <= step[s] for s in successors)
    effects = [step[node.id] for node in g.nodes if node.effects]
    assert all(a < b for a, b in pairwise(effects))


@pytest.mark.slow
@settings(max_examples=300)
@given(programs())
def test_the_order_is_the_best_of_all(program):
    g, kernels = program
    order = minimise_peak(g, kernels)
    assert_can_run(g, order.kernels)
    assert sorted(order.kernels, key=lambda k: k.spec.nodes) == sorted(kernels, key=lambda k: k.spec.nodes)
    assert order.peak_bytes == defined_peak(g, order.kernels) <= defined_peak(g, kernels)
    assert order.status == "OPTIMAL"
    best = least_peak_by_force(g, kernels)
    assert best is None or order.peak_bytes == best
    if order.peak_bytes == defined_peak(g, kernels):
        assert order.kernels == kernels
    assert minimise_peak(g, kernels) == order


@settings(max_examples=150)
@given(programs(), st.integers(0, 3))
def test_cut_short_the_bound_still_holds(program, max_states):
    g, kernels = program
    order = minimise_peak(g, kernels, OrderOptions(max_states=max_states))
    assert_can_run(g, order.kernels)
    assert order.bound_bytes <= order.peak_bytes == defined_peak(g, order.kernels)
    assert order.peak_bytes <= defined_peak(g, kernels)
    best = least_peak_by_force(g, kernels)
    assert best is None or order.bound_bytes <= best
    assert order.status == ("OPTIMAL" if order.bound_bytes == order.peak_bytes else "FEASIBLE")


@settings(max_examples=150)
@given(programs())
def test_live_ranges_agree_with_the_definition(program):
    g, kernels = program
    lives = live_ranges(g, kernels)
    assert peak(lives, range(len(kernels))) == defined_peak(g, kernels)
    best = least_peak_by_force(g, kernels)
    assert largest_use(lives) <= order_peak_bound(lives)
    assert best is None or order_peak_bound(lives) <= best


def test_an_order_that_needs_no_more_than_one_kernel_is_optimal_without_tables(monkeypatch):
    """The tables of ``order_peak_bound`` grow with the square of the number of kernels."""
    g = graph("eeeee", [[], [0], [1], [2], [3]])
    kernels = [kernel(g, (n,)) for n in range(5)]

    def make_tables(_):
        raise AssertionError("one kernel alone needs as much")

    monkeypatch.setattr("fuseplan.memory.order.order_peak_bound", make_tables)
    order = minimise_peak(g, kernels)
    assert order.kernels == tuple(kernels)
    assert order.bound_bytes == order.peak_bytes == defined_peak(g, kernels) > 0


def test_copies_that_a_kernel_writes_are_as_many_buffers():
    """In a rewritten program a kernel may hold several copies of an operation, and computes each."""
    g = replace(graph("eeeee", [[], [], [0], [1], [2]]), origins=(0, 0, 2, 3, 4))
    kernels = [kernel(g, nodes) for nodes in ((0, 1), (2,), (4,), (3,))]
    assert peak(live_ranges(g, kernels), range(len(kernels))) == defined_peak(g, kernels)


def random_lives(n: int, reach: float, seed: int) -> Liveness:
    """Kernels that each write a buffer and read some of those shortly before."""
    r = random.Random(seed)
    users = [[k] for k in range(n)]
    after: list[set[int]] = [set() for _ in range(n)]
    for k in range(1, n):
        for p in {max(0, k - 1 - int(r.expovariate(1 / reach))) for _ in range(r.choice((1, 1, 2, 2, 3)))}:
            users[p].append(k)
            after[p].add(k)
    ranges = tuple(LiveRange(k, r.choice((1, 4, 16, 64, 100)), k, tuple(users[k])) for k in range(n))
    return Liveness(ranges, (0,) * n, tuple(tuple(sorted(s)) for s in after))


@pytest.mark.parametrize(("n", "reach"), [(40, 3), (40, 20), (300, 5), (500, 10)])
def test_many_kernels(n, reach):
    lives = random_lives(n, reach, seed=n)
    order, highest, bound = order_kernels(lives)
    assert sorted(order) == list(range(n))
    step = {k: i for i, k in enumerate(order)}
    assert all(step[k] < step[s] for k in range(n) for s in lives.successors[k])
    assert bound <= highest == peak(lives, order) < peak(lives, range(n))
    assert order_kernels(lives) == (order, highest, bound)


def test_thousands_of_kernels_get_no_worse_order():
    lives = random_lives(2000, 10, seed=0)
    order, highest, bound = order_kernels(lives)
    assert sorted(order) == list(range(2000))
    assert bound <= highest == peak(lives, order) <= peak(lives, range(2000))


def test_a_plan_close_to_the_floor_is_good_enough_only_if_large():
    small, large = random_lives(60, 4, 1), random_lives(600, 4, 1)
    for lives, stays in ((small, False), (large, True)):
        given_order = tuple(range(lives.n_kernels))
        order, _, bound = order_kernels(lives, OrderOptions(tolerance=1))
        assert (order == given_order) is stays
        assert bound <= peak(lives, order)
        assert order_kernels(lives, OrderOptions(tolerance=0))[1] < peak(lives, given_order)


def test_a_chain_beside_another_runs_to_its_end_first():
    # Two sources, each reduced: one after the other needs room for one of them alone.
    g = graph("eerr", [[], [], [0], [1]])
    kernels = [kernel(g, (n,)) for n in range(4)]
    order = minimise_peak(g, kernels)
    assert [k.spec.nodes for k in order.kernels] == [(0,), (2,), (1,), (3,)]
    assert (order.peak_bytes, order.status) == (65_536, "OPTIMAL")


def test_the_given_order_stays_where_no_other_is_better():
    g = graph("eee", [[], [], [0, 1]])
    kernels = [kernel(g, (n,)) for n in (1, 0, 2)]
    assert [k.spec.nodes for k in minimise_peak(g, kernels).kernels] == [(1,), (0,), (2,)]


def test_side_effects_keep_their_order():
    # n4 would free n0 before n2 is made, but must wait for n3, which reads n2.
    g = graph("eeeff", [[], [0], [], [1, 2], [0]])
    order = minimise_peak(g, [kernel(g, (n,)) for n in range(5)])
    assert (order.peak_bytes, order.status) == (3 * 65_536, "OPTIMAL")
    assert_can_run(g, order.kernels)


def test_no_kernels():
    g = graph("e", [[]])
    assert minimise_peak(g, []).peak_bytes == 0
    assert execution_order([]) == []


def test_nothing_better_is_found_where_there_is_nothing():
    lives = random_lives(12, 2, 0)
    best = order_kernels(lives)[1]
    assert search_order(lives, order_peak_bound(lives), best, 10_000) == (None, best)
