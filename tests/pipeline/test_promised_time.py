"""Planning keeps its deadline on programs that are hard to plan in time, and its answer is true."""

import gc
import math
import random
import time
from types import SimpleNamespace

import pytest

from costmodel.axes import Conflict, Unifier
from experiments import deadlines
from experiments.deadlines import DEVICES, SMALL, chain, fan, runs, web
from fuseplan import pipeline, planners
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.passes import estimate
from fuseplan.plan.notes import NoteKind
from fuseplan.planners import Budget, get_planner, solver
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search import component, heuristic_plans, heuristics
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.grouping import decompose
from fuseplan.search.heuristics import Merging, best_first_groups
from fuseplan.search.nogoods import MonotoneRefusals
from fuseplan.settings import make_options
from fuseplan.support import work
from fuseplan.support.bitset import bits, pick, transposed
from fuseplan.support.digraph import cyclic_sets
from fuseplan.verify.plan import check_plan
from tests.helpers.plans import plan_best
from tests.helpers.small_graphs import Bytes, brute_force, graph
from tests.planners.test_planners import assert_legal

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")


@pytest.fixture(autouse=True)
def _few_objects():
    """Keep the objects of earlier tests out of garbage collections, which count as time of planning."""
    gc.freeze()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_planning_keeps_its_deadline(name):
    for run in runs(SMALL[name](), DEVICES, (0.0, 0.3)):
        check_plan(run.plan)
        # Twice the half second: beside other processes the same work takes more CPU time.
        assert run.over_s < 0.5, f"{run.plan_s:.2f} s of CPU under a deadline of {run.deadline_s} s"


@pytest.mark.slow
def test_random_programs_keep_their_deadlines(capsys):
    """One small program of each kind but one; the same as any time before."""
    assert deadlines.main(["--programs", "10", "--first", "60"]) in (0, 1)
    *_, worst, told = capsys.readouterr().out.splitlines()
    assert told.endswith("promises broken")
    assert worst.startswith("-") or float(worst.split()[0]) < 0.5


def test_a_random_program_is_the_same_every_time():
    for number in (4, 9):
        (kind, one, *more), (_, other, *same) = map(deadlines.random_task, [number] * 2)
        assert kind == [*deadlines.RANDOM][number]
        assert more == same
        graphs = [lower(trace(f, *args)).graph for f, args in (one, other)]
        assert graphs[0] == graphs[1]


def spaces(program, device="h200"):
    lowered = lower(trace(program[0], *program[1]))
    scheduler = Scheduler(lowered.graph, make_options(device).device, lowered)
    return decompose(lowered.graph, PriceBook(lowered.graph, scheduler)).spaces


@pytest.mark.slow
def test_a_long_chain_is_looked_at_a_few_times_for_each_doubling():
    """By counted work: twice the operations take little more than twice the looks."""
    looked = []
    for n in (3_000, 6_000):
        (space,) = spaces(chain(n))
        groups = best_first_groups(space)
        assert sum(mask.bit_count() for mask in groups) == space.n
        assert len(groups) < 20
        looked.append(space.book.looked)
    assert looked[1] < 3 * looked[0]


@pytest.mark.slow
def test_a_fan_becomes_few_kernels():
    (space,) = spaces(fan(300))
    groups = best_first_groups(space)
    assert space.total(groups).time_ps * 5 < space.total(space.singles).time_ps


def test_heuristics_do_the_same_after_their_deadline_on_any_machine(monkeypatch):
    """What is done after the deadline is counted: the clock has no say in it."""
    found = []
    for speed in (1.0, 1e-6):
        ticks = iter(range(10**9))
        monkeypatch.setattr(time, "monotonic", lambda ticks=ticks, speed=speed: 1e6 + next(ticks) * speed)
        (space,) = spaces(web(600))
        space.book.expires_at = 0.0
        found.append(best_first_groups(space))
    assert found[0] == found[1]


def some_partitions(count):
    rng = random.Random(5)
    for _ in range(count):
        n = rng.randint(4, 14)
        preds = [rng.sample(range(i), min(i, rng.randint(0, 3))) for i in range(n)]
        g = graph("".join(rng.choice("eeeeraoc") for _ in range(n)), preds, outputs=[rng.randrange(n)])
        for space in decompose(g, PriceBook(g, Bytes(g))).spaces:
            owner = [rng.randrange(1, 5) for _ in range(space.n)]
            yield (
                space,
                [m for k in range(1, 5) if (m := sum(1 << i for i in range(space.n) if owner[i] == k))],
            )


def test_followers_order_groups_as_all_successors_do():
    circles = 0
    for space, groups in some_partitions(300):
        every, few = space.successors(groups), space.followers(groups)
        assert cyclic_sets(every) == cyclic_sets(few)
        assert all(one >= other for one, other in zip(every, few, strict=True))
        assert space.can_run(groups) == (not cyclic_sets(every))
        circles += not space.can_run(groups)
    assert circles > 10


def test_crossing_is_what_others_read_or_write():
    for space, groups in some_partitions(200):
        for mask in groups:
            expected = 0
            for k in range(len(space.values)):
                maker = next(i for i in range(space.n) if space.made[i] >> k & 1)
                readers = [i for i in range(space.n) if space.read[i] >> k & 1]
                inside = bool(mask >> maker & 1)
                outside = space.kept >> k & 1 or any(not mask >> i & 1 for i in readers)
                taken = any(mask >> i & 1 for i in readers)
                if (inside and outside) or (not inside and taken):
                    expected |= 1 << k
            assert space.crossing(mask) == expected


def leads_around(space, groups, a, b):
    """Whether making ``a`` and ``b`` one would make groups wait in a circle."""
    rest = [mask for mask in groups if mask not in (a, b)]
    return not space.can_run([*rest, a | b])


def test_merging_knows_who_would_wait_in_a_circle():
    rng = random.Random(9)
    asked = refused = 0
    for space, _ in some_partitions(150):
        merging = Merging(space)
        while len(merging.groups()) > 1:
            groups = merging.groups()
            a, b = rng.sample(groups, 2)
            expected = leads_around(space, groups, a, b)
            assert merging.deadlocks(a, b) == merging.deadlocks(b, a) == expected
            asked, refused = asked + 1, refused + expected
            if not expected:
                merging.merge(a, b)
            elif rng.random() < 0.3:
                break
    assert asked > 200
    assert refused > 10


@pytest.mark.parametrize("n", [1, 7, 8, 65, 500])
def test_sets_of_bits(n):
    rng = random.Random(n)
    rows = [
        rng.getrandbits(n) & rng.getrandbits(n) if rng.random() < 0.9 else 1 << rng.randrange(n)
        for _ in range(n)
    ]
    for row in rows:
        expected = [i for i in range(n) if row >> i & 1]
        assert bits(row) == expected
        assert pick(row, range(100, 100 + n)) == [100 + i for i in expected]
    columns = transposed(rows)
    assert all((columns[v] >> u & 1) == (rows[u] >> v & 1) for u in range(n) for v in range(n))


def test_learning_from_a_large_set_is_limited():
    n, asked = 20_000, []

    def ask(mask):
        asked.append(mask.bit_count())
        return mask if any(mask >> i & 0b11 == 0b11 for i in range(0, n, 2)) else None

    learner = MonotoneRefusals(ask, (1 << n) - 1)
    assert not learner.refused(sum(1 << i for i in range(0, n, 4)))
    assert learner.refused(0b11)
    assert sum(asked) < 10 * n


def test_axes_of_siblings_are_tied_but_for_diagonals():
    """Of ``x`` and its transpose beside each other, and of many results of one array."""
    import jax.numpy as jnp

    x = jnp.ones((8, 8))
    lowered = lower(trace(lambda x: (jnp.exp(x), jnp.sin(x), jnp.cos(x.T + x)), x))
    axes = Unifier(lowered.graph)(tuple(range(len(lowered.graph.nodes))))
    assert not isinstance(axes, Conflict)
    assert any(len({a for dims in own for a in dims}) == 2 for own in axes.node_axes)


def test_a_rewrite_that_is_not_known_in_time_is_left_out():
    """The plan is that of the program as it is; nothing else is said of it."""
    from fuseplan.workloads import get_workload

    f, args = get_workload("layernorm_grad").build()
    lowered = lower(trace(f, *args))
    options = make_options("h200", deadline_s=1e-3)
    program, plan = plan_best(lowered, options)
    check_plan(plan)
    assert plan.bound_ps <= plan.objective_ps
    assert len(program.graph.nodes) >= len(lowered.graph.nodes)


def test_where_enumeration_reaches_the_deadline_no_columns_are_generated(monkeypatch):
    g = graph("e" * 10, [[], *([0] for _ in range(9))])
    ended = []

    def enumerated(*args, **limits):
        ended.append(True)
        return enumerate_groups(*args, **limits)

    def generate(*args):
        raise AssertionError("its tables take half a second")

    monkeypatch.setattr(component, "enumerate_groups", enumerated)
    monkeypatch.setattr(component, "_by_columns", generate)
    clock = SimpleNamespace(monotonic=lambda: math.inf if ended else time.monotonic())
    monkeypatch.setattr(component, "time", clock)
    plan = get_planner("solver")(g, Bytes(g, max_nodes=4, foresees=True), Budget(max_groups=5))
    assert ended
    assert plan.status == "FEASIBLE"


def undivided(monkeypatch, *, as_one):
    """There is no time to divide a graph, nor, unless ``as_one``, to ask about it as one kernel."""

    def divide(*_):
        raise AssertionError("there is no time to divide it")

    monkeypatch.setattr(work, "SLACK_S", 0.0 if as_one else -1.0)
    for module in (solver, heuristics):
        monkeypatch.setattr(module, "DIVISION", 10**9)
        monkeypatch.setattr(module, "decompose", divide)
    monkeypatch.setattr(pipeline, "DIVISION", 10**9)


@pytest.mark.parametrize("planner", ["solver", "greedy"])
@pytest.mark.parametrize(
    ("kinds", "max_nodes", "as_one", "n_kernels"),
    [("eee", 99, True, 1), ("eee", 99, False, 3), ("eee", 2, True, 3), ("eoe", 99, True, 3)],
)
def test_a_graph_that_there_is_no_time_to_divide(monkeypatch, planner, kinds, max_nodes, as_one, n_kernels):
    """It is one kernel where that is asked and possible, else a kernel for each operation."""
    g = graph(kinds, [[], [0], [1]])
    undivided(monkeypatch, as_one=as_one)
    plan = get_planner(planner)(g, Bytes(g, max_nodes), Budget(0.1))
    assert_legal(g, plan)
    assert len(plan.kernels) == n_kernels
    assert plan.bound_ps <= brute_force(g, Bytes(g, max_nodes))[0][0]
    assert [n.kind for n in plan.notes] == [NoteKind.DIVISION_CUT]


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_a_plan_of_a_program_that_there_is_no_time_to_divide_is_verified(monkeypatch, device):
    """No other planner is asked, as it would divide the program."""
    program, args = fan(6)
    undivided(monkeypatch, as_one=True)
    plan = plan_best(lower(trace(program, *args)), make_options(device, deadline_s=0.1))[1]
    assert plan.status == "OPTIMAL" or plan.bound_ps < plan.objective_ps
    assert plan.verify().status == "verified"
    assert any("the deadline came before 12 operations were divided" in note for note in plan.notes)


@pytest.mark.parametrize("planner", ["solver", "greedy"])
def test_heuristics_leave_time_to_order_and_check_many_kernels(monkeypatch, planner):
    """As much as these take longer than planning may outlast the deadline."""
    ends = []

    def merge(space):
        ends.append(space.book.expires_at - time.monotonic())
        return space.singles

    monkeypatch.setattr(heuristics, "greedy_groups", merge)
    monkeypatch.setitem(heuristic_plans.HEURISTICS, "best_first", merge)
    g = graph("ercc", [[], [0], [0], [0]])
    for units, least_s, most_s in ((work.TAIL, 59, 60), (work.UNITS_PER_S, 55, 56.5)):
        monkeypatch.setattr(work, "TAIL", units)
        get_planner(planner)(g, Bytes(g), Budget(60.0))
        assert least_s < ends.pop() <= most_s
        ends.clear()


def test_a_plan_that_there_was_no_time_for_is_no_estimate(monkeypatch):
    monkeypatch.setattr(estimate, "DIVISION", 10**9)
    program, args = fan(6)
    lowered = lower(trace(program, *args))
    options = make_options("h200", deadline_s=0.1)
    soon = work.Work(10**9, expires_at=time.monotonic() + 60)
    with pytest.raises(estimate.UndecidedError):
        estimate.quick_ps(lowered, options.device, options.features, soon)
    assert estimate.quick_ps(lowered, options.device, options.features) > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_rests_while_a_program_is_planned(monkeypatch, enabled):
    seen = []

    def plan_groups(g, prices, budget):
        seen.append(gc.isenabled())
        return SOLVE(g, prices, budget)

    monkeypatch.setitem(planners._PLANNERS, "solver", plan_groups)
    program, args = chain(3)
    (gc.enable if enabled else gc.disable)()
    try:
        plan_best(lower(trace(program, *args)), make_options("h200"))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen
    assert not any(seen)
