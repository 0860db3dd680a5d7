"""The deadline, wherever it falls, and an OR-Tools that fails, however it does."""

import random
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.memory.order import minimise_peak
from fuseplan.plan.notes import NoteKind
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule import pricing
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search import column_pricing as search
from fuseplan.search import component, heuristic_plans
from fuseplan.search import set_partitioning as solver
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.grouping import decompose
from fuseplan.search.limits import LIMITS
from fuseplan.search.set_partitioning import Instance, Relaxation, Selection, exact_cover
from fuseplan.settings import make_options
from fuseplan.support.errors import FuseplanWarning
from fuseplan.workloads import get_workload
from tests.helpers.memory_graphs import peak, programs
from tests.helpers.plans import plan_function
from tests.helpers.small_graphs import Bytes, brute_force, graph
from tests.planners.test_planners import assert_legal, objectives

pytestmark = pytest.mark.one_python

SOLVE, GREEDY, BEST_FIRST = map(get_planner, ("solver", "greedy", "best_first"))
LOSING = ("ercc", [[], [0], [0], [0]])  # the heuristics make a dearer plan than there is
FRACTIONAL = ("eree", [[], [0], [], [1, 2, 0]])  # of kernels of three at most: the relaxation proves nothing
CIRCLE = ("eeooee", [[], [], [0], [1], [0, 3], [1, 2]])  # two components that wait for each other


class Clock:
    """Stands still, and jumps far ahead after so many looks."""

    def __init__(self, looks):
        self.left, self.looked = looks, 0

    def __call__(self):
        self.looked += 1
        self.left -= 1
        return 0.0 if self.left >= 0 else 1e9


def some_graphs(count):
    rng = random.Random(7)
    yield graph(*LOSING)
    yield graph(*CIRCLE)
    for _ in range(count):
        n = rng.randint(3, 8)
        preds = [rng.sample(range(i), min(i, rng.randint(0, 3))) for i in range(n)]
        yield graph("".join(rng.choice("eeeerca") for _ in range(n)), preds, outputs=[rng.randrange(n)])


def expire_everywhere(monkeypatch, g, pricing_of, budget):
    """Plan with the deadline at each look at the clock; the plans."""
    expected = brute_force(g, pricing_of())[0]
    heuristic = min(objectives(plan(g, pricing_of(), budget))[0] for plan in (GREEDY, BEST_FIRST))
    looks, found = 0, []
    while True:
        clock = Clock(looks)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", clock)
            plan = SOLVE(g, pricing_of(), budget)
        assert_legal(g, plan)
        time_ps = objectives(plan)[0]
        assert plan.bound_ps <= expected[0] <= time_ps <= heuristic
        if plan.status == "OPTIMAL":
            assert time_ps == plan.bound_ps
        else:
            assert plan.notes
        found.append(plan)
        if clock.left >= 0:
            assert plan.status == "OPTIMAL"
            assert objectives(plan) == expected
            return found
        looks += 1


@pytest.mark.parametrize("max_states", [LIMITS.max_states, 0])
@pytest.mark.parametrize("floor", [True, False])
def test_the_deadline_may_fall_anywhere(monkeypatch, floor, max_states):
    limits = replace(LIMITS, max_states=max_states, states_per_clock_look=1)  # with no states, by CP-SAT
    monkeypatch.setattr(solver, "LIMITS", limits)
    monkeypatch.setattr("fuseplan.search.candidates.LIMITS", replace(LIMITS, steps_per_clock_look=1))
    stages = set()
    for g in some_graphs(4 if max_states == 0 else 14):
        plans = expire_everywhere(monkeypatch, g, lambda g=g: Bytes(g, 4, 3, floor), Budget(10.0))
        assert len(plans) > 3
        stages.update(plan.status for plan in plans)
    assert stages == {"OPTIMAL", "FEASIBLE"}


@pytest.mark.slow
def test_small_components_are_proven_before_a_large_one():
    rng = random.Random(1)
    n = 24
    preds = [rng.sample(range(i), min(i, 2)) for i in range(n)]
    kinds = "".join(rng.choice("eeeerc") for _ in range(n))
    alone = graph(kinds, preds)
    both = graph(kinds + "ercc", [*preds, [], [n], [n], [n]])
    plan = SOLVE(both, Bytes(both), Budget(max_groups=50))
    small = [nodes for nodes in plan.groups if nodes[0] >= n]
    assert sorted(small) == sorted(
        tuple(i + n for i in nodes) for nodes in brute_force(graph(*LOSING), Bytes(graph(*LOSING)))[1]
    )
    assert SOLVE(alone, Bytes(alone), Budget(max_groups=50)).status == "FEASIBLE"


def test_the_search_of_one_component_costs_no_other_its_heuristic_plan(monkeypatch):
    """The deadline comes as soon as the first group is enumerated: every component has a plan by then."""
    g = graph("erccercce", [[], [0], [0], [0], [], [4], [4], [4], [7]])
    heuristic = min(objectives(plan(g, Bytes(g), Budget()))[0] for plan in (GREEDY, BEST_FIRST))
    late = [0.0]
    listed = component.enumerate_groups

    def enumerate_late(*args, **limits):
        late[0] = 1e9
        return listed(*args, **limits)

    monkeypatch.setattr(pricing, "OPERATIONS_BEFORE_DEADLINE", 0)
    monkeypatch.setattr(component, "enumerate_groups", enumerate_late)
    monkeypatch.setattr(time, "monotonic", lambda: late[0])
    plan = SOLVE(g, Bytes(g), Budget(10.0))
    assert late[0]
    assert objectives(plan)[0] <= heuristic
    assert NoteKind.UNPROVEN_PARTIAL not in [n.kind for n in plan.notes]


def test_a_heuristic_that_the_deadline_cut_is_named_so(monkeypatch):
    g = graph("erccercce", [[], [0], [0], [0], [], [4], [4], [4], [7]])
    looks = [0.0]
    monkeypatch.setattr(pricing, "OPERATIONS_BEFORE_DEADLINE", 0)

    def cut(space):
        looks.append(1e9)
        assert space.book.has_expired()
        return space.singles

    monkeypatch.setitem(heuristic_plans.HEURISTICS, "best_first", cut)
    monkeypatch.setattr(time, "monotonic", lambda: looks[-1])
    plan = SOLVE(g, Bytes(g), Budget(10.0))
    assert_legal(g, plan)
    assert NoteKind.UNPROVEN_PARTIAL in [n.kind for n in plan.notes]


def test_a_relaxation_without_time_keeps_prices_that_still_hold():
    sets, costs = [(0,), (1,), (0, 1)], [5, 5, 7]
    relaxation = Relaxation(sets, costs, 2)
    relaxation.solve()
    assert relaxation.bound == 7
    relaxation.set_cost(2, 9)
    relaxation.solve(expires_at=time.monotonic())
    assert relaxation.bound == 7
    assert sum(relaxation.duals) == 7
    relaxation.set_cost(2, 4)
    relaxation.solve(expires_at=time.monotonic())
    assert relaxation.bound == 0


@settings(max_examples=100, deadline=None)
@given(programs(), st.integers(0, 12))
def test_the_order_of_kernels_is_legal_wherever_the_deadline_falls(program, looks):
    g, kernels = program
    best = minimise_peak(g, kernels)
    clock = Clock(looks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        order = minimise_peak(g, kernels, expires_at=10.0)
    assert sorted(k.spec.nodes for k in order.kernels) == sorted(k.spec.nodes for k in kernels)
    assert order.bound_bytes <= best.peak_bytes <= order.peak_bytes
    assert order.peak_bytes <= peak(g, kernels)


def test_a_whole_plan_in_no_time_is_the_better_heuristic():
    f, args = get_workload("gpt2_block").build(small=True)
    for deadline_s in (1e-9, 0.03):
        plan = plan_function(f, args, {}, make_options("h200", deadline_s=deadline_s))[1]
        assert plan.bound_ps <= plan.objective_ps
        for name in ("greedy", "best_first"):
            other = plan_function(f, args, {}, make_options("h200", name))[1]
            assert plan.objective_ps <= other.objective_ps
        assert plan.status == "OPTIMAL" or any("the deadline came before" in note for note in plan.notes)
        assert deadline_s > 1e-6 or any("'s plan is used there" in note for note in plan.notes)


def test_enumeration_looks_at_the_clock_between_groups_too(monkeypatch):
    g = graph("e" * 12, [[], *([0] for _ in range(11))], outputs=[0])
    book = PriceBook(g, Bytes(g))
    (space,) = decompose(g, book).spaces
    clock = Clock(3)
    monkeypatch.setattr(book, "clock", clock)
    found = enumerate_groups(space, 10**9, 10.0)
    assert not found.complete
    assert clock.looked == 4
    assert set(found.groups) >= {1 << i for i in range(12)}


def test_cp_sat_keeps_to_its_limit_presolve_included(monkeypatch):
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=0))
    rng = random.Random(3)
    n = 60
    sets = {tuple(sorted(rng.sample(range(n), 4))) for _ in range(4000)} | {(i,) for i in range(n)}
    ordered = tuple(sorted(sets))
    costs = tuple((rng.randint(80, 120) * (1 if len(s) == 1 else 3), len(s), 1) for s in ordered)
    singles = tuple(k for k, s in enumerate(ordered) if len(s) == 1)
    exact_cover(Instance(((0,), (1,), (0, 1)), ((1,), (1,), (1,)), 2))  # loads OR-Tools
    started = time.monotonic()
    selection = exact_cover(Instance(ordered, costs, n, singles, deadline_s=0.5))
    assert time.monotonic() - started < 2.0  # far less on a machine of its own
    assert selection.bound <= selection.objective[0]


FAILURES = (
    ImportError("no ortools"),
    MemoryError(),
    RuntimeError("it broke"),
    OverflowError("too large"),
    OSError("libortools.so.9: undefined symbol"),
    AttributeError("module 'ortools' has no attribute 'Solver'"),
)


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


def assert_heuristic(g, match):
    with pytest.warns(FuseplanWarning, match=match) as caught:
        plan = SOLVE(g, Bytes(g, 3), Budget())
    assert len(caught) == 1
    assert_legal(g, plan)
    assert plan.status == "FEASIBLE"
    heuristics = [objectives(p(g, Bytes(g, 3), Budget())) for p in (GREEDY, BEST_FIRST)]
    best = brute_force(g, Bytes(g, 3))[0]
    assert best <= objectives(plan) <= min(heuristics)
    assert plan.bound_ps <= best[0]
    assert NoteKind.SOLVER_FAILED in [n.kind for n in plan.notes]
    return plan


@pytest.mark.parametrize("error", FAILURES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("where", "shape"),
    [
        ("ortools.linear_solver.pywraplp.Solver.CreateSolver", LOSING),
        ("ortools.linear_solver.pywraplp.Solver.Solve", LOSING),
        ("ortools.sat.python.cp_model.CpModel.new_bool_var", CIRCLE),
        ("ortools.sat.python.cp_model.CpSolver.solve", CIRCLE),
    ],
)
def test_whatever_the_solver_raises_the_heuristic_plan_is_the_answer(monkeypatch, where, shape, error):
    g = graph(*shape)
    with monkeypatch.context() as patch:
        patch.setattr(where, raises(error))
        assert_heuristic(g, "Install ortools")
    assert SOLVE(g, Bytes(g, 3), Budget()).status == "OPTIMAL", "a failure must not be remembered"


@pytest.mark.parametrize(("module", "shape"), [("linear_solver", LOSING), ("sat.python", CIRCLE)])
def test_a_missing_part_of_ortools(monkeypatch, module, shape):
    monkeypatch.setitem(sys.modules, f"ortools.{module}", None)
    assert_heuristic(graph(*shape), "could not be used")


def test_a_build_without_glop(monkeypatch):
    from ortools.linear_solver import pywraplp

    monkeypatch.setattr(pywraplp.Solver, "CreateSolver", staticmethod(lambda name: None))
    assert_heuristic(graph(*LOSING), "has no GLOP")


@pytest.mark.parametrize("status", ["MODEL_INVALID", "UNKNOWN", "INFEASIBLE"])
def test_an_answer_of_cp_sat_that_is_none(monkeypatch, status):
    from ortools.sat.python import cp_model

    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda self, model: getattr(cp_model, status))
    monkeypatch.setattr(cp_model.CpSolver, "wall_time", 0.0, raising=False)
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=0))
    assert_heuristic(graph(*FRACTIONAL), "could not be used")


def test_a_cover_that_is_none_is_not_taken(monkeypatch):
    monkeypatch.setattr(search, "exact_cover", lambda _: Selection("UNKNOWN", (), (), 0, "a stub"))
    assert_heuristic(graph(*FRACTIONAL), "a stub finds no cover")
