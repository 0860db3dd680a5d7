"""Planners against brute force, the cases where greedy loses, cycles, copies, limits."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.devices import TEST_DEVICE
from costmodel.floor import Floor
from fuseplan import planners
from fuseplan.plan.notes import NoteKind, note
from fuseplan.plan.options import Features
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import FuseplanWarning, InvalidArgumentError, UnknownNameError
from tests.helpers.brute_force import small_program
from tests.helpers.small_graphs import (
    LAUNCH_PS,
    Bytes,
    brute_force,
    can_run,
    edges_after,
    graph,
    graphs,
    is_connected,
    is_convex,
    siblings_of,
)

pytestmark = pytest.mark.one_python

SOLVE, GREEDY, BEST_FIRST, UNFUSED = map(get_planner, ("solver", "greedy", "best_first", "unfused"))


def objectives(grouping):
    costs = [k.cost for k in grouping.kernels]
    return (sum(c.time_ps for c in costs), sum(c.hbm_bytes for c in costs), len(costs))


def assert_legal(g, grouping, siblings=()):
    assert sorted(n for nodes in grouping.groups for n in nodes) == list(range(len(g.nodes)))
    after = edges_after(g)
    assert can_run(after, grouping.groups)
    done = set()
    for nodes in grouping.groups:
        assert is_connected(g, nodes, siblings)
        assert is_convex(after, nodes)
        for n in nodes:
            producers = {g.values[v].producer for v in g.nodes[n].inputs} - {-1}
            assert producers <= done | set(nodes), "a kernel reads what a later one makes"
        done.update(nodes)


@settings(max_examples=250, deadline=None)
@given(graphs(), st.sampled_from([99, 3, 2]), st.sampled_from([99, 2]), st.booleans(), st.booleans())
def test_solver_is_optimal(g, max_nodes, max_made, floor, foresees):
    pricing = Bytes(g, max_nodes, max_made, floor, foresees)
    expected, _ = brute_force(g, pricing)
    plan = SOLVE(g, pricing, Budget())
    assert_legal(g, plan)
    assert objectives(plan) == expected
    assert plan.status == "OPTIMAL"
    assert plan.bound_ps == expected[0]


@settings(max_examples=100, deadline=None)
@given(graphs(max_nodes=14), st.sampled_from(["unfused", "greedy", "best_first"]), st.sampled_from([99, 3]))
def test_heuristics_are_legal_and_no_better_than_the_optimum(g, name, max_nodes):
    pricing = Bytes(g, max_nodes)
    plan = get_planner(name)(g, pricing, Budget())
    assert_legal(g, plan)
    best = SOLVE(g, pricing, Budget())
    assert_legal(g, best)
    assert objectives(plan) >= objectives(best)
    assert objectives(plan)[0] <= objectives(UNFUSED(g, pricing, Budget()))[0]


# Kinds, predecessors, limits; cost of greedy, best-first and the optimum. The second is
# lost only by a greedy that merges without asking for the price; this one asks.
LOSING = {
    "reductions_of_both_kinds": ("ercc", [[], [0], [0], [0]], {}, (286_348, 286_348, 213_000)),
    "chain_of_reductions": ("erec", [[], [0], [1], [2]], {}, (81_928, 81_928, 81_928)),
    "two_ways_into_an_anchor": ("eeae", [[], [0], [0], [1, 2]], {}, (408_840, 277_768, 277_768)),
    "two_anchors": ("aaeee", [[], [0], [0], [1, 2], [1, 2]], {}, (539_912, 539_912, 408_840)),
    "diamond_of_at_most_three": (
        "eeeee",
        [[], [0], [0, 1], [0, 1], [2, 3]],
        {"max_nodes": 3},
        (539_912, 547_724, 408_840),
    ),
    "on_chip_for_two_tiles": (
        "eeerrr",
        [[], [0], [0, 1], [2], [2], [1]],
        {"max_made": 2},
        (344_072, 213_000, 213_000),
    ),
}


@pytest.mark.parametrize("name", LOSING)
def test_the_six_smallest_cases_where_greedy_loses(name):
    kinds, preds, limits, (greedy, best_first, optimum) = LOSING[name]
    g = graph(kinds, preds)
    pricing = Bytes(g, **limits)
    assert objectives(SOLVE(g, pricing, Budget()))[0] == optimum
    assert objectives(GREEDY(g, pricing, Budget()))[0] == greedy
    assert objectives(BEST_FIRST(g, pricing, Budget()))[0] == best_first


def test_groups_that_would_wait_for_each_other():
    # 0 -> 4 and 1 -> 5 are each best as one kernel, but 0 -> 2(opaque) -> 5 and
    # 1 -> 3(opaque) -> 4: each kernel would wait for the other.
    g = graph("eeooee", [[], [], [0], [1], [0, 3], [1, 2]])
    pricing = Bytes(g)
    plan = SOLVE(g, pricing, Budget())
    assert_legal(g, plan)
    assert not {(0, 4), (1, 5)} <= set(plan.groups)
    assert plan.status == "OPTIMAL"
    assert objectives(plan) == brute_force(g, pricing)[0]
    greedy = GREEDY(g, pricing, Budget())
    assert_legal(g, greedy)
    assert greedy.notes == (note(NoteKind.CYCLES_SPLIT, count=1),)


def layers(n, kinds="aeere", preds=((-1,), (0,), (0, 1), (2,), (2, 3))):
    """``n`` copies of one layer in a row; -1 is the layer before."""
    letters, before, last = "", [], None
    for _ in range(n):
        base = len(letters)
        for kind, ps in zip(kinds, preds, strict=True):
            before.append([base + p if p >= 0 else last for p in ps if p >= 0 or last is not None])
            letters += kind
        last = len(letters) - 1
    return graph(letters, before)


def test_equal_layers_are_planned_once():
    one, many = layers(3), layers(24)
    small, large = Bytes(one), Bytes(many)
    plan = SOLVE(many, large, Budget())
    assert plan.stats.components == 24
    assert plan.stats.distinct_components == SOLVE(one, small, Budget()).stats.distinct_components <= 3
    assert len(large.asked) == len(small.asked)
    assert plan.status == "OPTIMAL"
    for layer in range(2, 23):
        before = [tuple(n - 5 for n in nodes) for nodes in plan.groups if nodes[0] // 5 == layer]
        assert before == [nodes for nodes in plan.groups if nodes[0] // 5 == layer - 1]


def test_kernels_of_equal_groups_name_their_own_arrays():
    g = layers(4)
    pricing = Bytes(g)
    for kernel in SOLVE(g, pricing, Budget()).kernels:
        own = pricing.price(kernel.spec.nodes)
        assert set(kernel.spec.reads) == set(own.spec.reads)
        assert set(kernel.spec.writes) == set(own.spec.writes)
        assert kernel.cost == own.cost


@pytest.mark.parametrize("seed", range(3))
def test_the_same_plan_every_time(seed):
    rng = random.Random(seed)
    n = 18
    preds = [rng.sample(range(i), min(i, rng.randint(0, 2))) for i in range(n)]
    g = graph("".join(rng.choice("eeeerc") for _ in range(n)), preds)
    plans = [SOLVE(g, Bytes(g, max_nodes=4), Budget()) for _ in range(2)]
    assert plans[0].groups == plans[1].groups
    assert plans[0].status == "OPTIMAL"


def test_a_deadline_of_zero_gives_the_better_heuristic_plan():
    g = graph(*LOSING["reductions_of_both_kinds"][:2])
    plan = SOLVE(g, Bytes(g), Budget(deadline_s=0))
    assert plan.status == "FEASIBLE"
    assert objectives(plan)[0] == 286_348
    # One launch, the input once, three rows of results: what no plan can avoid.
    assert plan.bound_ps == LAUNCH_PS + 65_536 + 3 * 256
    assert plan.notes[0] == note(NoteKind.DEADLINE_ZERO)


def test_a_limit_on_candidates_leaves_a_valid_plan_and_bound():
    width = 9
    g = graph("e" * (width + 1), [[], *([0] for _ in range(width))], outputs=[0])
    pricing = Bytes(g, max_nodes=5)
    full = SOLVE(g, pricing, Budget())
    assert full.status == "OPTIMAL"
    limited = SOLVE(g, pricing, Budget(max_groups=40))
    assert_legal(g, limited)
    assert limited.status == "FEASIBLE"
    assert limited.bound_ps <= full.bound_ps <= objectives(limited)[0]
    assert dict(limited.notes[0].figures)["most"] == 40


def test_without_ortools_the_plan_is_heuristic(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.linear_solver", None)
    g = graph(*LOSING["reductions_of_both_kinds"][:2])
    with pytest.warns(FuseplanWarning, match="Install ortools"):
        plan = SOLVE(g, Bytes(g), Budget())
    assert plan.status == "FEASIBLE"
    assert objectives(plan)[0] == 286_348


def test_few_groups_are_priced_when_the_floor_is_tight():
    rng = random.Random(0)
    n = 18
    preds = [rng.sample(range(i), min(i, rng.randint(1, 2))) for i in range(n)]
    g = graph("".join(rng.choice("eeeeerc") for _ in range(n)), preds)
    tight, none = Bytes(g), Bytes(g, floor=False)
    assert objectives(SOLVE(g, tight, Budget())) == objectives(SOLVE(g, none, Budget()))
    assert len(none.asked) > 1000
    assert len(tight.asked) < len(none.asked) / 10


def test_refusals_name_the_reason():
    g = graph("eoerc", [[], [0], [1], [2], [2]])
    rules = {v.rule: v for v in SOLVE(g, Bytes(g), Budget()).refusals}
    assert rules["opaque"].nodes == (0, 1)
    assert "2 such edges" in rules["opaque"].reason


def test_planners_by_name():
    first, *_, last = planners.planner_names()
    assert (first, last) == ("unfused", "solver")
    with pytest.raises(UnknownNameError, match="Did you mean 'greedy'"):
        get_planner("greeedy")
    with pytest.raises(InvalidArgumentError, match="got 3"):
        planners.register_planner("three", 3)


def test_a_registered_planner_is_found():
    planners.register_planner("mine", UNFUSED)
    assert get_planner("mine") is UNFUSED


@st.composite
def programs(draw):
    """Up to seven real operations on matrices and their rows and columns."""
    return small_program(lambda options: draw(st.sampled_from(options)), most=7)


class WithFloor(Scheduler):
    def __init__(self, g, device):
        super().__init__(g, device)
        self.floor = Floor(g, device)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(programs(), st.sampled_from([Scheduler, WithFloor]))
def test_solver_is_optimal_with_real_prices(g, scheduler):
    pricing = scheduler(g, TEST_DEVICE)
    plan = SOLVE(g, pricing, Budget())
    assert_legal(g, plan, siblings_of(g, pricing))
    assert plan.status == "OPTIMAL"
    assert objectives(plan) == brute_force(g, pricing)[0]


@settings(max_examples=120, deadline=None)
@given(programs(), st.booleans(), st.data())
def test_the_scheduler_keeps_its_promise_that_refusals_are_monotone(g, prologues, data):
    pricing = Scheduler(g, TEST_DEVICE, features=Features(prologues=prologues))
    members = st.sets(st.integers(0, len(g.nodes) - 1), min_size=1)
    small = data.draw(members)
    large = small | data.draw(members)
    if len(small) > 1 and pricing.compatible(tuple(sorted(small))) is not None:
        assert pricing.compatible(tuple(sorted(large))) is not None
