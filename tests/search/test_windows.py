"""Windows: what too many groups leave unsearched, against brute force and full enumeration."""

import random
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fuseplan.planners.solver import plan_groups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.components import components, crossable_edges
from fuseplan.search.group_search import connected_parts
from fuseplan.search.grouping import Budget
from fuseplan.search.heuristics import heuristic_plan
from fuseplan.search.presolve import fold
from fuseplan.search.space import Space
from fuseplan.search.windows import choose_window, improve
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import cyclic_sets
from fuseplan.support.errors import Verdict
from tests.helpers.small_graphs import Bytes, brute_force, graph, graphs, is_connected, is_convex
from tests.search.test_column_generation import spaces_with_copies

pytestmark = pytest.mark.one_python


def spaces(g, **limits):
    book = PriceBook(g, Bytes(g, **limits))
    return [Space(c, book) for c in components(g, crossable_edges(g, book))]


def web(count, seed, kinds="e"):
    """Operations on up to two of the six before them, some of other kinds among them."""
    rng = random.Random(seed)
    letters = "e" + "".join(rng.choice(kinds) for _ in range(count - 1))
    return graph(
        letters, [sorted({rng.randrange(max(i - 6, 0), i) for _ in "ab"}) if i else [] for i in range(count)]
    )


def singles(space):
    return [1 << i for i in range(space.n)]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(graphs(max_nodes=8, kinds="eeeerc"), st.integers(3, 9))
def test_a_window_as_wide_as_the_component_finds_its_best_plan(g, max_nodes):
    found = spaces(g, max_nodes=max_nodes)
    assume(len(found) == 1)
    (space,) = found
    groups = improve(space, singles(space), 0, float("inf"))
    assert space.total(groups).objectives == brute_force(g, Bytes(g, max_nodes=max_nodes))[0]


@pytest.mark.parametrize("seed", range(6))
def test_windows_only_ever_improve_and_leave_a_plan_that_can_run(seed):
    g = web(30, seed, "eeeerc")
    for space in spaces(g, max_made=7):
        start = heuristic_plan(space)
        groups = improve(space, start, 0, float("inf"))
        assert space.total(groups) <= space.total(start)
        assert sum(groups) == space.everything, "a position is in two groups, or in none"
        assert not cyclic_sets(space.successors(groups))
        assert all(is_connected(g, space.nodes(mask)) for mask in groups)
        assert improve(space, start, 0, float("inf")) == groups, "not the same plan twice"


class OddPairs(Bytes):
    """Kernels whose parts need not be kernels, as those that stream an axis: of two operations none has a
    price whose ids add up to an odd number."""

    def price(self, nodes):
        if len(nodes) == 2 and sum(nodes) % 2:
            return Verdict("on-chip", "a part of a kernel", nodes)
        return super().price(nodes)


@pytest.mark.parametrize("seed", range(6))
def test_a_window_may_cut_a_kernel_into_parts_of_no_price(seed):
    g = web(30, seed, "eeeerc")
    book = PriceBook(g, OddPairs(g, max_made=4))
    for component in components(g, crossable_edges(g, book)):
        space = Space(component, book)
        start = heuristic_plan(space)
        groups = improve(space, start, 0, float("inf"))
        assert space.total(groups) <= space.total(start)
        assert sum(groups) == space.everything


@pytest.mark.slow
def test_windows_find_what_the_heuristics_miss():
    """With fewer groups than there are, the optimum of all of them."""
    missed = found = 0
    for seed in range(8):
        g = web(16, seed, "eeeeerc")
        best = plan_groups(g, Bytes(g, max_made=5), Budget())
        assert best.status == "OPTIMAL"
        few = plan_groups(g, Bytes(g, max_made=5), Budget(max_groups=40))
        least, got = (sum(k.cost.time_ps for k in plan.kernels) for plan in (best, few))
        heuristic = sum(s.total(heuristic_plan(s)).time_ps for s in spaces(g, max_made=5))
        assert least <= got
        assert few.bound_ps <= least
        missed += heuristic > least
        found += heuristic > least == got
    assert missed >= 3
    assert found == missed


@given(st.integers(0, 10**6), st.integers(2, 12), st.sampled_from([0.0, 0.5]))
@settings(max_examples=50, deadline=None)
def test_a_window_is_convex_and_around_a_border(seed, width, sideways):
    rng = random.Random(seed)
    g = web(20, seed % 7)
    for space in spaces(g):
        groups = heuristic_plan(space) if seed % 2 else singles(space)
        free = choose_window(space, groups, width, sideways, rng)
        if not free:
            assert len(groups) == 1
            continue
        after = [set(bits(below)) for below in space.below]
        assert is_convex(after, bits(free))
        assert sum(bool(mask & free) for mask in groups) > 1


def test_after_the_deadline_the_plan_is_as_it_was():
    for space in spaces(web(20, 1)):
        assert improve(space, singles(space), 0, time.monotonic() - 1) == singles(space)


@settings(max_examples=100, deadline=None)
@given(graphs(max_nodes=9), st.integers(0, 2**9 - 1), st.booleans())
def test_groups_within_a_set_are_those_of_all_that_it_holds(g, chosen, foresees):
    for space in spaces(g, max_made=3, foresees=foresees):
        within = chosen & space.everything
        some = enumerate_groups(space, 10**6, within=within)
        assert some.complete
        every = enumerate_groups(space, 10**6).groups
        assert sorted(some.groups) == sorted(mask for mask in every if not mask & ~within)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_copies_that_share_a_position_are_searched_as_copies(device):
    """As where a window leaves out the readers of two copies that its plan computes together."""
    shared = 0
    for space in (space for seed in range(8) for space in spaces_with_copies(seed, device)):
        origins = space.book.graph.origins
        of = {}
        for i, (n, *_) in enumerate(space.members):
            of.setdefault(origins[n], []).append(i)
        pairs = [copies[-2:] for copies in of.values() if len(copies) > 2]
        if not pairs or space.duplicate_rules is None:
            continue
        small = fold(space, pairs)
        shared += small.n < space.n
        whole = {space.nodes(mask) for mask in enumerate_groups(space, 20_000).groups}
        for mask in enumerate_groups(small, 20_000).groups:
            assert len(list(connected_parts(mask, small.neighbours))) == 1
            assert small.nodes(mask) in whole
    assert shared
