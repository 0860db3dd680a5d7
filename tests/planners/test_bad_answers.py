"""Planners, rules and pricings that fail or contradict themselves: each is named, and nothing is claimed."""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.graph import Flops
from costmodel.partial_floor import Additive, PartialBounds
from fuseplan.extend import (
    Budget,
    Grouping,
    PricingWrapper,
    ProgramPlanner,
    SolutionCache,
    Verdict,
    get_planner,
    register_rule,
    rules,
    using_cache,
)
from fuseplan.plan.notes import NoteKind
from fuseplan.support.errors import ExtensionError, InvalidArgumentError, InvalidPlanError
from tests.helpers.small_graphs import Bytes, graph

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")
GRAPH = graph("ercc", [[], [0], [0], [0]])
X = jax.ShapeDtypeStruct((256, 512), jnp.float32)


def changed(pricing, **methods):
    """A pricing, called ``Strange``, that answers by ``methods``, which take the wrapped one first."""
    own = {name: lambda self, *a, f=f: f(self._pricing, *a) for name, f in methods.items()}
    return type("Strange", (PricingWrapper,), own)(pricing)


def failing(error):
    def fail(*_):
        raise error

    return fail


def costing(**parts):
    def price(inner, nodes):
        kernel = inner.price(nodes)
        return kernel if isinstance(kernel, Verdict) else replace(kernel, cost=replace(kernel.cost, **parts))

    return price


@pytest.mark.parametrize("planner", ["solver", "greedy", "best_first", "unfused"])
@pytest.mark.parametrize(
    ("price", "told"),
    [
        (costing(memory_ps=math.nan), "whole number, at least 0 .*, got nan"),
        (costing(memory_ps=math.inf), "got inf"),
        (costing(memory_ps=-(10**9)), "got -"),
        (costing(matrix_ps=math.nan), r"matrix_ps of price\(.*got nan"),
        (costing(memory_ps=1.5), "got 1.5"),
        (costing(hbm_read_bytes=-(10**9)), "hbm_read_bytes"),
        (lambda inner, nodes: None, "a Kernel, or of several nodes a Verdict, got None"),
        (lambda inner, nodes: Verdict("shapes", "never", nodes), "of several nodes a Verdict, got Verdict"),
        (lambda inner, nodes: inner.price((0,)), "a kernel of these nodes"),
        (failing(RuntimeError("no table")), "Strange to price.*RuntimeError: no table.*Mend Strange.price"),
    ],
)
def test_a_price_that_is_none_names_its_pricing(planner, price, told):
    with pytest.raises(ExtensionError, match=told) as caught:
        get_planner(planner)(GRAPH, changed(Bytes(GRAPH), price=price), Budget())
    assert "pricing Strange" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        ("compatible", failing(AttributeError("x")), "to compatible.*AttributeError: x"),
        ("compatible", lambda inner, nodes: False, "None, or a Verdict .*, got False"),
        ("oversized", lambda inner, nodes, crossing: True, "got True"),
        ("floor", lambda inner, nodes: math.nan, "floor of .* got nan"),
        ("floors", lambda inner, nodes: (-1, 0), r"floors\[0\] of .* got -1"),
        ("floors", lambda inner, nodes: (0, 0.5), r"floors\[1\] of .* got 0.5"),
        ("floors", failing(OSError("no file")), "OSError: no file"),
    ],
)
def test_an_answer_that_is_none_names_its_pricing(name, answer, told):
    with pytest.raises(ExtensionError, match=told) as caught:
        SOLVE(GRAPH, changed(Bytes(GRAPH), **{name: answer}), Budget())
    assert "pricing Strange" in str(caught.value)


def steep_floor(inner, nodes):
    return 9 * inner.floor(nodes)


CONTRADICTIONS = {
    "floor": {"floor": steep_floor},
    "floors": {"floors": lambda inner, nodes: (2 * inner.floor(nodes), 0)},
    "price": {"price": costing(scan_ps=1)},
    "refuses pairs": {
        "compatible": lambda inner, nodes: Verdict("shapes", "a pair", nodes) if len(nodes) == 2 else None
    },
    "refuses 2 without 0": {
        "compatible": lambda inner, nodes: (
            Verdict("shapes", "no 0", nodes) if {2} < {*nodes} - {0} == {*nodes} else inner.compatible(nodes)
        )
    },
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_nothing_is_proven_by_a_pricing_that_contradicts_itself(name):
    g = graph("eerc", [[], [0], [1], [0]])
    plan = SOLVE(g, changed(Bytes(g), **CONTRADICTIONS[name]), Budget())
    assert (plan.status, plan.bound_ps, plan.proof, plan.stats.certified) == ("FEASIBLE", None, None, "")
    assert sorted(n for nodes in plan.groups for n in nodes) == list(range(4))
    wanted = NoteKind.NOT_MONOTONE if name.startswith("refuses") else NoteKind.BELOW_FLOOR
    told = next(note for note in plan.notes if note.kind is wanted)
    assert "the pricing Strange" in told.text(g)


def planned(f=jax.nn.softmax, planner="mine", **options):
    with using_cache(SolutionCache()):
        return fuseplan.make_plan(f, device="h200", planner=planner, **options)(X)


def registered(plan_groups):
    fuseplan.register_planner("mine", plan_groups)


def test_a_plan_by_floors_that_are_too_high_says_so():
    def steep(graph, pricing, budget):
        return SOLVE(graph, changed(pricing, floors=lambda inner, nodes: (10**12, 0)), budget)

    registered(steep)
    plan = planned(lambda x: (jnp.sin(x).sum(0), (x * 2).sum(1), jnp.sin(x) * 3))
    assert plan.status == "FEASIBLE"
    assert plan.bound_us is None
    assert any("not proven" in note and "the pricing Strange" in note for note in plan.notes)


def test_a_floor_of_partial_groups_that_is_too_high_says_so():
    class Steep:
        def __init__(self, floor):
            self.floor = floor
            self.shares, self.executes = floor.shares, floor.executes
            self.stakes, self.idles = floor.stakes, floor.idles

        def __call__(self, known, possible):
            return self.bounds(known, possible).floor_ps

        def bounds(self, known, possible, several=None):
            bounds = self.floor.bounds(known, possible, several)
            twice = [Additive(2 * resource.known_ps, resource.added_ps) for resource in bounds.additive]
            return PartialBounds(2 * bounds.floor_ps, tuple(twice))

    def steep(graph, pricing, budget):
        budget = replace(budget, max_groups=2)
        pricing = changed(pricing, partial_floor=lambda inner, members: Steep(inner.partial_floor(members)))
        return SOLVE(graph, pricing, budget)

    def rows_and_columns(x):
        for _ in range(3):
            x = jnp.exp(x - x.max(-1, keepdims=True))
            x = x / x.sum(0, keepdims=True)
        return x

    registered(steep)
    plan = planned(rows_and_columns)
    assert plan.status == "FEASIBLE"
    assert any("not proven" in note and "the pricing Strange" in note for note in plan.notes)


@pytest.mark.parametrize("name", ["floors", "failing"])
def test_no_solution_by_bad_prices_is_cached(name):
    methods = CONTRADICTIONS.get(name, {"price": failing(ValueError("late"))})
    if name == "failing":
        calls = iter(range(10**9))

        def price(inner, nodes):
            if next(calls) > 12:
                raise ValueError("late")
            return inner.price(nodes)

        methods = {"price": price}
    g = graph("ercceercc", [[], [0], [0], [0], [3], [4], [5], [5], [5]])
    own = {"cache_key": lambda inner, nodes, signatures: f"key {len(nodes)}"}
    with using_cache(SolutionCache()) as cache:
        run = partial(SOLVE, g, changed(Bytes(g), **methods, **own), Budget())
        if name == "failing":
            with pytest.raises(ExtensionError, match="late"):
                run()
        else:
            run()
        assert len(cache) == 0
        SOLVE(g, changed(Bytes(g), **own), Budget())
        assert len(cache) > 0


def test_a_planner_that_fails_is_named():
    registered(failing(ZeroDivisionError("by zero")))
    with pytest.raises(ExtensionError, match="planner 'mine', and it raised ZeroDivisionError: by zero"):
        planned()
    registered(ProgramPlanner(failing(KeyError("n3"))))
    with pytest.raises(ExtensionError, match=r"'mine'.*KeyError"):
        planned()


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda kernels: kernels[:-1], InvalidPlanError, "are computed by no kernel"),
        (lambda kernels: (*kernels, kernels[0]), InvalidPlanError, "by more than one kernel"),
        (
            lambda kernels: (*kernels, replace(kernels[0], spec=replace(kernels[0].spec, nodes=(99,)))),
            InvalidPlanError,
            r"computes nodes \[99\]",
        ),
        (lambda kernels: (3,), InvalidArgumentError, "should be Kernels .*, and one is 3"),
    ],
)
@pytest.mark.parametrize("as_program", [False, True])
def test_a_grouping_that_is_no_partition_names_its_planner(change, error, told, as_program):
    def plan_groups(graph, pricing, budget):
        found = get_planner("greedy")(graph, pricing, budget)
        return Grouping(change(found.kernels), "OPTIMAL", found.time_ps)

    def plan_program(lowered, device):
        from fuseplan.schedule.scheduler import Scheduler

        return lowered, plan_groups(lowered.graph, Scheduler(lowered.graph, device), Budget())

    registered(ProgramPlanner(plan_program) if as_program else plan_groups)
    with pytest.raises(error, match=f"'mine'.*{told}"):
        # The value with two readers is one that the search for copies would ask about.
        planned(lambda x: (jnp.sin(x).sum(0), jnp.sin(x).sum(1)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"space": failing(IndexError("dim"))}, "raised IndexError: dim"),
        ({"space": lambda eqn: None}, "should be a Space, got None"),
        ({"space": lambda eqn: replace(rules()["sin"].space(eqn), input_maps=())}, "1 input_maps and 1 out"),
        ({"flops": lambda eqn: 3}, "should be Flops of whole numbers.*got 3"),
        ({"flops": lambda eqn: Flops(vector=math.nan)}, "got Flops.*nan"),
        ({"flops": lambda eqn: Flops(vector=-1)}, "got Flops.*-1"),
        ({"supports": failing(KeyError("f8"))}, "raised KeyError"),
        ({"special": failing(KeyError("n"))}, "raised KeyError"),
    ],
)
def test_a_rule_that_fails_is_named(changes, told):
    before = rules()["tanh"]
    register_rule("tanh", replace(before, **changes))
    try:
        with pytest.raises(ExtensionError, match=f"rule of 'tanh' in .*{told}"):
            planned(jnp.tanh, "solver")
    finally:
        register_rule("tanh", before)
