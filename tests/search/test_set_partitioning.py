"""Exact cover against trying every combination, its engines against each other, limits."""

import itertools
import os
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.search import set_partitioning as solver
from fuseplan.search.limits import LIMITS
from fuseplan.search.set_partitioning import Instance, Relaxation, exact_cover

pytestmark = pytest.mark.one_python


@st.composite
def instances(draw, singles=True):
    n = draw(st.integers(1, 7))
    item_sets = st.lists(st.integers(0, n - 1), min_size=1, max_size=4, unique=True).map(sorted).map(tuple)
    sets = draw(st.lists(item_sets, max_size=14, unique=True))
    if singles:
        sets = list(dict.fromkeys([*sets, *((i,) for i in range(n))]))
    # Small costs make ties, which the later objectives must break.
    costs = draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 3), st.just(1)),
            min_size=len(sets),
            max_size=len(sets),
        )
    )
    return Instance(tuple(sets), tuple(costs), n)


def covers(instance):
    for size in range(1, instance.n_items + 1):
        for chosen in itertools.combinations(range(len(instance.sets)), size):
            if sorted(i for k in chosen for i in instance.sets[k]) == list(range(instance.n_items)):
                yield chosen


def total(instance, chosen):
    return tuple(map(sum, zip(*(instance.costs[k] for k in chosen), strict=True)))


def assert_optimal(instance, selection, possible):
    best = min(total(instance, c) for c in possible)
    assert selection.status == "OPTIMAL"
    assert selection.objective == best == total(instance, selection.chosen)
    assert selection.bound == best[0]
    assert selection.chosen in possible


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(instances(singles=False))
def test_dynamic_programming_is_exact(instance):
    possible = list(covers(instance))
    selection = exact_cover(instance)
    if not possible:
        assert selection.status == "INFEASIBLE"
        return
    assert selection.engine == "dynamic programming"
    assert_optimal(instance, selection, possible)


@settings(max_examples=60, deadline=None)
@given(instances(), st.data())
def test_cp_sat_is_exact_and_respects_forbidden_combinations(instance, data):
    possible = list(covers(instance))
    forbidden = tuple(c for c in data.draw(st.lists(st.sampled_from(possible), max_size=3)) if len(c) > 1)
    hint = data.draw(st.sampled_from(possible))
    asked = Instance(instance.sets, instance.costs, instance.n_items, hint, 60.0, forbidden or ((0, 0),))
    if not forbidden:  # a combination of one set, so that dynamic programming is passed over
        forbidden = ((0,),)
    possible = [c for c in possible if not any(set(f) <= set(c) for f in forbidden)]
    selection = exact_cover(asked)
    if not possible:
        assert selection.status == "INFEASIBLE"
        return
    assert selection.engine == "CP-SAT"
    assert_optimal(instance, selection, possible)


@settings(max_examples=200, deadline=None)
@given(instances())
def test_dual_prices_are_a_proof(instance):
    costs = [c[0] for c in instance.costs]
    relaxation = Relaxation(instance.sets, [0] * len(costs), instance.n_items)
    relaxation.solve()
    assert relaxation.bound == 0
    for k, cost in enumerate(costs):
        relaxation.set_cost(k, cost)
    possible = list(covers(instance))
    if len(possible[0]) < instance.n_items:  # without the first set, another cover is left
        relaxation.drop(possible[0][0])
        possible = [c for c in possible if possible[0][0] not in c]
    relaxation.solve()
    duals = relaxation.duals
    assert relaxation.bound == sum(duals)
    for k, (items, cost) in enumerate(zip(instance.sets, costs, strict=True)):
        assert relaxation.reduced_costs()[k] == cost - sum(duals[i] for i in items)
    for chosen in possible:
        assert relaxation.bound <= total(instance, chosen)[0]
        assert all(relaxation.reduced_costs()[k] >= 0 for k in chosen)


def test_dual_prices_are_tight_on_intervals():
    # Sets of neighbours: the relaxation is integral, so the bound is the optimum but for
    # rounding, at most two units an item.
    rng = random.Random(0)
    n = 20
    sets = [tuple(range(i, j)) for i in range(n) for j in range(i + 1, n + 1)]
    costs = [10**9 + rng.randrange(10**9) for _ in sets]
    relaxation = Relaxation(sets, costs, n)
    relaxation.solve()
    best = exact_cover(Instance(tuple(sets), tuple((c,) for c in costs), n)).objective[0]
    assert best - 2 * n <= relaxation.bound <= best


def wide(n=16, n_sets=120, seed=1):
    rng = random.Random(seed)
    sets = {tuple(sorted(rng.sample(range(n), 3))) for _ in range(n_sets)} | {(i,) for i in range(n)}
    ordered = tuple(sorted(sets))
    costs = tuple((rng.randint(80, 120) * (1 if len(s) == 1 else 2), 10 * len(s), 1) for s in ordered)
    return Instance(ordered, costs, n)


def test_engines_agree_when_there_are_too_many_states(monkeypatch):
    instance = wide()
    by_states = exact_cover(instance)
    assert by_states.engine == "dynamic programming"
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=10))
    by_cp_sat = exact_cover(instance)
    assert by_cp_sat.engine == "CP-SAT"
    assert (by_cp_sat.status, by_cp_sat.objective) == ("OPTIMAL", by_states.objective)


def test_the_same_selection_every_time(monkeypatch):
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=10))
    assert exact_cover(wide()) == exact_cover(wide())


def test_no_time_returns_the_hint():
    instance = wide()
    singles = tuple(k for k, s in enumerate(instance.sets) if len(s) == 1)
    selection = exact_cover(Instance(instance.sets, instance.costs, 16, singles, deadline_s=0))
    assert (selection.status, selection.chosen, selection.bound) == ("FEASIBLE", singles, 0)
    assert selection.is_late
    assert exact_cover(Instance(instance.sets, instance.costs, 16, deadline_s=0)).status == "UNKNOWN"


@pytest.mark.parametrize("counted_s", [1e-6, 1e-5, 1e-4])
def test_counted_work_ends_the_solvers_at_the_same_place(monkeypatch, counted_s):
    """A relaxation that is cut short proves less, and nothing false; no cover is dearer than the hint."""
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=10))
    instance = wide(40, 2000)
    singles = tuple(k for k, s in enumerate(instance.sets) if len(s) == 1)
    hinted = replace(instance, hint=singles)
    whole = Relaxation(instance.sets, [c[0] for c in instance.costs], 40)
    whole.solve()
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=10, solver_work_s=counted_s))
    bounds = []
    for _ in range(2):
        cut = Relaxation(instance.sets, [c[0] for c in instance.costs], 40)
        cut.solve()
        assert all(cut.reduced_costs() >= 0)
        assert cut.bound == sum(cut.duals) <= whole.bound
        bounds.append(cut.bound)
    assert bounds[0] == bounds[1] < whole.bound
    one, other = exact_cover(hinted), exact_cover(hinted)
    assert one == other
    assert (one.engine, one.status, one.is_late) == ("CP-SAT", "FEASIBLE", False)
    assert one.counted_us >= 1e6 * counted_s
    assert one.bound <= one.objective[0] <= total(instance, singles)[0]


def test_a_deadline_covers_building_and_presolve(monkeypatch):
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=10))
    instance = wide(60, 6000)
    singles = tuple(k for k, s in enumerate(instance.sets) if len(s) == 1)
    limited = Instance(instance.sets, instance.costs, 60, singles, deadline_s=0.3)
    exact_cover(wide())  # loads CP-SAT, which the deadline is not about
    selection = exact_cover(limited)
    assert sorted(i for k in selection.chosen for i in instance.sets[k]) == list(range(60))
    assert selection.bound <= selection.objective[0] <= total(instance, singles)[0]


def test_ctrl_c_ends_the_solver_at_once(monkeypatch):
    monkeypatch.setattr(solver, "LIMITS", replace(LIMITS, max_states=10, solver_work_s=1e9))
    exact_cover(wide())  # after which Python still handles the signal
    instance = wide(60, 6000)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # the signal may come in between
        timer.start()
        exact_cover(instance)
        time.sleep(60)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (Instance(((0, 2),), ((1,),), 2), "ascending items below 2"),
        (Instance(((1, 0),), ((1,),), 2), "ascending items"),
        (Instance(((0,),), ((-1,),), 1), "negative"),
        (Instance(((0,),), (), 1), "1 sets but 0 costs"),
        (Instance(((0,), (1,)), ((1,), (1,)), 2, (0,)), "not a cover"),
        (Instance(((0,), (1,)), ((1,), (1, 2)), 2), "same number of objectives"),
    ],
)
def test_a_malformed_instance_is_named(instance, message):
    with pytest.raises(ValueError, match=message):
        exact_cover(instance)


def test_nothing_to_cover():
    assert exact_cover(Instance((), (), 0)).status == "OPTIMAL"
