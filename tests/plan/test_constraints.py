"""Constraints: selectors, every planner against brute force, contradictions, and the ways in."""

import json
import os
import re
from dataclasses import replace
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fuseplan
from costmodel.calibrate import described_cpu
from costmodel.devices import TEST_DEVICE, get_device
from fuseplan import ConstraintError, Constraints, InvalidArgumentError, InvalidPlanError, Plan
from fuseplan.cli import app
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Apart, Resolved, Together
from fuseplan.plan.options import Features
from fuseplan.planners import Budget, get_planner, planner_names
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.search.components import crossable_edges
from fuseplan.search.constrained_pricing import ConstrainedPricing
from fuseplan.search.grouping import decompose
from fuseplan.search.must_fuse import MustFusePricing, plan_constrained, require_possible
from fuseplan.search.presolve import absorb_moves
from fuseplan.search.selectors import Selectors, joined, resolve
from fuseplan.support.errors import Verdict
from fuseplan.verify.plan import check_plan
from fuseplan.workloads import get_workload
from tests.helpers.arrays import normal
from tests.helpers.small_graphs import Bytes, brute_force, graph, graphs, is_connected, live_values
from tests.planners.test_planners import assert_legal, layers, objectives, programs
from tests.search.test_candidates import cheapest

pytestmark = pytest.mark.one_python

FUSING = ("greedy", "best_first", "solver")
CPU = replace(
    described_cpu(), core_count=2, cache_bytes=32 << 20, private_cache_bytes=1 << 20, onchip_bytes=17 << 20
)
"""A CPU whose caches are the same on any machine: which loops gain depends on them."""


def block(x, w):
    with jax.named_scope("block"):
        with jax.named_scope("attention"):
            y = jax.nn.softmax(x)
        z = jnp.tanh(y) * 2 + x
    return jnp.sin(z @ w) + 1


SHAPES = (jax.ShapeDtypeStruct((256, 128), "float32"), jax.ShapeDtypeStruct((128, 128), "float32"))
EXP, DIV, TANH, PRODUCT, SIN = 5, 8, 9, 12, 13  # nodes of it


def make(planner="solver", device="h200", f=block, args=SHAPES, **constraints):
    return fuseplan.make_plan(f, device=device, planner=planner, constraints=Constraints(**constraints))(
        *args
    )


def kernel_of(plan):
    return {n: k for k, kernel in enumerate(plan.kernels) for n in kernel.spec.nodes}


def shared(plan, a, b):
    return kernel_of(plan)[a] == kernel_of(plan)[b]


# --- against brute force ---------------------------------------------------------------------


def keeps(inside, apart, must):
    """Whether a kernel of the operations ``inside`` keeps what is ``apart`` apart, and what ``must`` be
    together together."""
    for a, b in apart:
        others = inside if b is None else inside & set(b)
        if any(x != y for x in inside & set(a) for y in others):
            return False
    return not any(inside & set(entry) and not inside >= set(entry) for entry in must)


class Filtered:
    """Prices of the groups that obey, by predicates of their own."""

    def __init__(self, g, pricing, apart, must, size, args):
        self.graph, self.pricing = g, pricing
        self.apart, self.must, self.size, self.args = apart, must, size, args

    def obeys(self, nodes):
        if not keeps(set(nodes), self.apart, self.must):
            return False
        reads, writes = live_values(self.graph, nodes)
        return len(nodes) == 1 or (len(nodes) <= self.size and len(reads) + len(writes) <= self.args)

    def price(self, nodes):
        return self.pricing.price(nodes) if self.obeys(nodes) else Verdict("constraint", "", nodes)

    @property
    def resolved(self):
        apart = tuple(
            Apart("apart", tuple(sorted(a)), None if b is None else tuple(sorted(b))) for a, b in self.apart
        )
        must = [Together("must", tuple(sorted(entry))) for entry in self.must]
        return Resolved(apart, joined(self.graph, must), None, self.size, self.args)


def filters(draw, g, pricing):
    some = st.sets(st.integers(0, len(g.nodes) - 1), min_size=1, max_size=3)
    apart = draw(st.lists(st.tuples(some, st.none() | some), max_size=2))
    must = draw(st.lists(some, max_size=2))
    size, args = draw(st.sampled_from([99, 99, 4, 3])), draw(st.sampled_from([99, 99, 4, 3]))
    return Filtered(g, pricing, apart, must, size, args)


def siblings_within(g, pricing, limits):
    """The pairs that planners see, of the nodes that atoms stand for; without atoms, where they cannot be,
    all that share a full-size operand."""
    try:
        require_possible(limits, g, pricing)
    except ConstraintError:
        return [(m, n) for m, n in combinations(range(len(g.nodes)), 2) if shares(pricing, m, n)]
    atoms = MustFusePricing(g, ConstrainedPricing(g, pricing, limits))
    pairs = crossable_edges(atoms.graph, PriceBook(atoms.graph, atoms)).siblings
    across = [(atoms.members[i][0], atoms.members[j][0]) for i, j in pairs]
    return across + [pair for nodes in atoms.members for pair in pairwise(nodes)]


def shares(pricing, m, n):
    return not set(pricing.full_size_operands(m)).isdisjoint(pricing.full_size_operands(n))


def check_against_brute_force(g, pricing, wanted):
    limits = wanted.resolved
    siblings = siblings_within(g, pricing, limits)
    try:
        best = brute_force(g, wanted, siblings)[0]
    except IndexError:  # no partition obeys
        best = None
    try:
        plans = {name: plan_constrained(limits, get_planner(name), g, pricing, Budget()) for name in FUSING}
    except ConstraintError:
        # What must be together must be possible by itself.
        alone = [t.nodes for t in limits.together]
        assert best is None or not all(
            is_connected(g, n, siblings) and wanted.obeys(n) and not isinstance(pricing.price(n), Verdict)
            for n in alone
        )
        return
    assert best is not None
    for name, plan in plans.items():
        assert_legal(g, plan, siblings)
        assert all(map(wanted.obeys, plan.groups)), name
        assert objectives(plan) >= best
    assert objectives(plans["solver"]) == best
    assert plans["solver"].status == "OPTIMAL"
    assert plans["solver"].bound_ps == best[0]


@settings(max_examples=250, deadline=None)
@given(graphs(max_nodes=7, kinds="eeeeerao"), st.booleans(), st.booleans(), st.data())
def test_every_planner_obeys_and_the_solver_is_optimal(g, floor, foresees, data):
    pricing = Bytes(g, 99, data.draw(st.sampled_from([99, 2])), floor, foresees)
    check_against_brute_force(g, pricing, filters(data.draw, g, pricing))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(graphs(max_nodes=7, kinds="eeeeerco"), st.data())
def test_the_solver_is_optimal_with_siblings_too(g, data):
    pricing = Bytes(g, 99, data.draw(st.sampled_from([99, 2])), fuses_siblings=True)
    check_against_brute_force(g, pricing, filters(data.draw, g, pricing))


@pytest.mark.parametrize("wanted", [{"must_fuse": [("sin", "tanh")]}, {"never_fuse": [("sin", "cos")]}])
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_what_the_best_plan_obeys_changes_nothing(wanted, device):
    x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4096, 1024), (8,)))

    def f(x, y):  # sin and exp read x side by side
        return jnp.tanh(jnp.sin(x)), jnp.exp(x), jnp.cos(y)

    free = fuseplan.make_plan(f, device=device)(x, y)
    bound = fuseplan.make_plan(f, device=device, constraints=Constraints(**wanted))(x, y)
    assert [k.spec.nodes for k in bound.kernels] == [k.spec.nodes for k in free.kernels] == [(0, 1, 2), (3,)]
    assert (bound.status, bound.objective_ps) == (free.status, free.objective_ps)


@settings(max_examples=50, deadline=None)
@given(programs(), st.data())
def test_with_real_prices(g, data):
    pricing = Scheduler(g, TEST_DEVICE)
    check_against_brute_force(g, pricing, filters(data.draw, g, pricing))


class WithoutRules(Bytes):
    def compatible(self, nodes):
        return None


class Offering(Bytes):
    """Some groups have a price although they are not compatible, as the CPU's loop nests."""

    offers = ()

    def price(self, nodes):
        return (WithoutRules(self.graph) if nodes in self.offers else super()).price(nodes)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(graphs(max_nodes=6, kinds="eeerrca"), st.data())
def test_offered_groups_obey(g, data):
    pricing = Offering(g)
    some = st.sets(st.integers(0, len(g.nodes) - 1), min_size=1, max_size=4)
    asked = [joined(g, [Together("", tuple(sorted(s)))]) for s in data.draw(st.lists(some, max_size=3))]
    pricing.offers = tuple(dict.fromkeys(t.nodes for (t,) in filter(None, asked) if is_connected(g, t.nodes)))
    check_against_brute_force(g, pricing, filters(data.draw, g, pricing))


@pytest.mark.parametrize(
    ("f", "apart"),
    [
        (lambda w: jnp.sin(jnp.exp(w).reshape(-1, 64).reshape(-1, 512)).sum(0), ("reshape", "reduce_sum")),
        (lambda w: (jnp.exp(w).T * 2).sum(1), ("transpose", "mul")),
        (lambda w: (jnp.exp(w).T * 2).sum(1), ("transpose", "reduce_sum")),
        (lambda w: (jnp.exp(w).T * 2).sum(1), ("transpose", "exp")),
        (lambda w: ((w * w.max(1, keepdims=True)).T * 2).sum(0), "transpose"),
        (lambda w: ((w * w.max(1, keepdims=True)).T * 2).sum(0), ("mul", "mul")),
    ],
)
def test_absorbing_moves_loses_no_plan_that_obeys(f, apart):
    lowered = lower(trace(f, jax.ShapeDtypeStruct((512, 1024), "float32")))
    limits = resolve(Constraints(never_fuse=[apart]), lowered)
    pricing = ConstrainedPricing(lowered.graph, Scheduler(lowered.graph, CPU, lowered), limits)
    atoms = MustFusePricing(lowered.graph, pricing)
    assert atoms.absorbs_moves
    for space in decompose(atoms.graph, PriceBook(atoms.graph, atoms)).spaces:
        assert cheapest(absorb_moves(space)) == cheapest(space)


@pytest.mark.parametrize(
    "limits", [{"max_kernel_args": 2}, {"max_kernel_args": 3}, {"max_group_size": 3}], ids=str
)
def test_absorbing_renames_loses_no_plan_that_obeys(limits):
    programs = [
        lambda x: jnp.exp(x.sum(1)[:, None]) + x,
        lambda x: (x.reshape(1, 64, 256).max(2), jnp.tanh(x)),
        lambda x: jnp.exp(x)[None].sum(1).reshape(256, 1) * 2,
        lambda x: ((x * 2)[None], (x * 2)[:, None].sum(2)),
        lambda x: jnp.tanh(jnp.exp(x)[None])[0] + jnp.sin(x[None])[0],
    ]
    for f in programs:
        lowered = lower(trace(f, jnp.zeros((64, 256))))
        scheduler = Scheduler(lowered.graph, get_device("h200"), features=Features(siblings=False))
        assert any(scheduler.renames(node.id) for node in lowered.graph.nodes)
        limited = ConstrainedPricing(lowered.graph, scheduler, Resolved(**limits))
        found = plan_constrained(
            limited.constraints, get_planner("solver"), lowered.graph, scheduler, Budget(60.0)
        )
        assert objectives(found)[0] == brute_force(lowered.graph, limited)[0][0]


def test_equal_layers_of_which_one_is_constrained():
    g = layers(2)
    pricing = Bytes(g, max_made=2)
    free = get_planner("solver")(g, pricing, Budget()).groups
    assert free == ((0, 1), (2, 3, 4), (5, 6), (7, 8, 9))
    for limits in (
        Resolved(apart=(Apart("two of them", (5,), (6,)),)),
        Resolved(apart=(Apart("one by itself", (5,), None),)),
        Resolved(together=(Together("another two", (6, 7)),)),
    ):
        for name in ("greedy", "solver"):
            groups = plan_constrained(limits, get_planner(name), g, pricing, Budget()).groups
            assert groups[:2] == free[:2]
            assert (5,) in groups


def test_what_lies_in_between_comes_along_wherever_it_stands():
    # 0 -> 5 with 1 and 2 between; 3 waits for 0, and 5 waits for 4: neither belongs to it.
    g = graph("eeeeee", [[], [0], [1], [0], [], [2, 4]])
    limits = Resolved(together=joined(g, [Together("", (0, 5))]))
    assert limits.together[0].nodes == (0, 1, 2, 5)
    plan = plan_constrained(limits, get_planner("solver"), g, Bytes(g, max_nodes=4), Budget())
    assert_legal(g, plan)
    assert (0, 1, 2, 5) in plan.groups
    assert joined(g, [Together("a", (0, 1)), Together("b", (1, 5)), Together("c", (3,))]) == (
        Together("a; b", (0, 1, 2, 5)),
    )


def test_atoms_are_alike_only_if_what_they_hold_is():
    def keys(g, *asked):
        limits = Resolved(together=joined(g, [Together("", nodes) for nodes in asked]))
        atoms = MustFusePricing(g, ConstrainedPricing(g, Bytes(g), limits))
        alike = Signatures(atoms.graph)
        return [alike.of((i,)).key for i, nodes in enumerate(atoms.members) if len(nodes) > 1]

    # Two chains of three; then 0 -> 3 around 1 and 2, which have no part in it, and 4 -> 5.
    one, two = keys(graph("eeeeee", [[], [0], [1], [], [3], [4]]), (0, 1, 2), (3, 4, 5))
    assert one == two
    one, two = keys(graph("eeeee", [[], [0], [1], [2], [3]]), (0, 1, 2), (3, 4))
    assert one != two
    # Prices are carried over node by node, so what stands in another order is not alike.
    one, two = keys(graph("eeeeee", [[], [], [], [0], [], [4]]), (0, 3), (4, 5))
    assert one != two


def test_a_planner_from_outside_obeys():
    from fuseplan import planners

    fuseplan.register_planner("mine", planners.unfused)
    plan = make("mine", must_fuse=["attention"])
    assert shared(plan, EXP, DIV)
    assert not shared(plan, DIV, TANH)


# --- selectors -------------------------------------------------------------------------------


def select(selector, f=block, args=SHAPES):
    return Selectors(lower(trace(f, *args))).select(selector)


def test_selectors():
    assert select(EXP) == select(f"n{EXP}") == select("exp") == select("attention/exp") == (EXP,)
    assert select("attention") == select("block/attention") == tuple(range(9))
    assert select("block") == tuple(range(12))
    assert select("add") == (11, 14)
    assert select("block/add") == (11,)


def test_scopes_of_transformed_functions():
    def f(x):
        return block(x, jnp.eye(128)).sum()

    forward = select("attention", f, SHAPES[:1])
    both = select("attention", jax.grad(f), SHAPES[:1])
    assert len(both) > len(forward)
    lowered = lower(trace(jax.jit(jax.vmap(f)), jax.ShapeDtypeStruct((3, 8, 128), "float32")))
    assert [lowered.graph.nodes[n].op for n in Selectors(lowered).select("attention/exp")] == ["exp"]


def test_a_scope_around_a_nested_jit():
    def f(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda y: jax.named_scope("inner")(jnp.exp)(y))(x) + 1

    assert select("outer/inner", f, SHAPES[:1]) == (0,)
    assert select("outer", f, SHAPES[:1]) == (0, 1)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("atention", "Did you mean 'attention' or 'block/attention'?"),
        ("blok/attention", "Did you mean 'block/attention'"),
        ("logg", "a primitive (here add, "),
        ("n99", "the function has nodes n0 to n14"),
        (-1, "no operation is called n-1"),
    ],
)
def test_a_selector_that_matches_nothing(selector, message):
    with pytest.raises(ConstraintError, match=re.escape(message)):
        make(never_fuse=[selector])
    with pytest.raises(ConstraintError, match=re.escape(message)):
        make("unfused", must_fuse=[selector])


def test_a_name_of_both_kinds_is_not_guessed():
    def f(x):
        with jax.named_scope("exp"):
            x = jnp.exp(x) + 1
        return jnp.exp(x)

    with pytest.raises(ConstraintError, match="'exp' is both a name scope"):
        select("exp", f, SHAPES[:1])
    assert select("exp/exp", f, SHAPES[:1]) == (0,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"never_fuse": "exp"}, "write ['exp']"),
        ({"must_fuse": 3}, "write [3]"),
        ({"never_fuse": [("a", "b", "c")]}, "a pair of selectors"),
        ({"must_fuse": [[]]}, "a selector or a sequence of selectors, got []"),
        ({"must_fuse": [True]}, "got True"),
        ({"max_group_size": 0}, "max_group_size expects a whole number from 1 on"),
        ({"max_kernel_args": 2.5}, "max_kernel_args"),
        ({"max_peak_bytes": True}, "max_peak_bytes"),
    ],
)
def test_wrong_constraints(wrong, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        Constraints(**wrong)


def test_lists_and_tuples_are_the_same():
    assert Constraints(never_fuse=[["a", "b"], "c"]) == Constraints(never_fuse=(("a", "b"), "c"))
    assert hash(Constraints(must_fuse=[["a"]])) == hash(Constraints(must_fuse=[("a",)]))
    assert not Constraints()
    assert make().constraints is None
    with pytest.raises(InvalidArgumentError, match=r"constraints expects a fuseplan\.Constraints, got dict"):
        fuseplan.make_plan(block, constraints={"never_fuse": []})
    with pytest.raises(InvalidArgumentError, match="got list"):
        fuseplan.jit(block, constraints=[])


# --- plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", planner_names(of_graphs=True))
@pytest.mark.parametrize("device", ["h200", "tpu_v5e", CPU], ids=["gpu", "tpu", "cpu"])
def test_every_planner_on_every_device(planner, device):
    apart = make(planner, device, never_fuse=[("exp", "tanh"), "sin"])
    assert not shared(apart, EXP, TANH)
    assert (SIN,) in [k.spec.nodes for k in apart.kernels]
    together = make(planner, device, must_fuse=["attention"])
    if planner == "unfused":
        assert "must_fuse does not hold" in together.notes[-1]
        assert not together.constraints.together
    else:
        assert all(shared(together, 0, n) for n in range(9))
    assert max(len(k.spec.nodes) for k in make(planner, device, max_group_size=3).kernels) <= 3
    for kernel in make(planner, device, max_kernel_args=3).kernels:
        assert len(kernel.spec.nodes) == 1 or len(kernel.spec.reads) + len(kernel.spec.writes) <= 3


CONTRADICTIONS = {
    "no device does it": ({"must_fuse": [("exp", "sin")]}, "shapes: "),
    "both": (
        {"must_fuse": [("div", "mul")], "never_fuse": [("div", "tanh")]},
        "keeps 'div' and 'tanh' apart",
    ),
    "by itself": ({"must_fuse": [("div", "tanh")], "never_fuse": ["div"]}, "keeps 'div' by itself"),
    "too many": ({"must_fuse": ["attention"], "max_group_size": 8}, "max_group_size allows 8"),
    "too many arrays": ({"must_fuse": [("mul", "block/add")], "max_kernel_args": 2}, "and it would have 3"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions(name):
    constraints, rule = CONTRADICTIONS[name]
    for planner in FUSING:
        with pytest.raises(ConstraintError) as error:
            make(planner, **constraints)
        text = str(error.value)
        assert rule in text
        assert "test_constraints.py:" in text  # where the operations come from
        assert text.startswith("must_fuse keeps ")
        assert re.search(r"Leave them out|Drop one|Ask for one kernel|Add what", text)  # the remedy


def test_two_kernels_that_would_wait_for_each_other():
    g = graph("eeooee", [[], [], [0], [1], [0, 3], [1, 2]])
    both = [Together("one", (0, 4)), Together("two", (1, 5))]
    with pytest.raises(ConstraintError, match=r"one; two.*cycle: the kernels would wait for each other"):
        plan_constrained(Resolved(together=joined(g, both)), get_planner("solver"), g, Bytes(g), Budget())


def test_what_nothing_ties_together():
    with pytest.raises(ConstraintError, match=r"producer-consumer: no value passes between .*\(n1 sin at "):
        make(f=lambda x, w: (jnp.exp(x), jnp.sin(w)), must_fuse=[("exp", "sin")])


def test_an_opaque_operation_shares_no_kernel():
    def f(x):
        return jnp.tanh(jnp.sort(jnp.exp(x)))

    with pytest.raises(
        ConstraintError, match=r"opaque: sort is a step of its own \(n1 sort at .*test_constr"
    ):
        make(f=f, args=SHAPES[:1], must_fuse=[("exp", "tanh")])


def test_explain_names_the_constraint():
    apart = make(never_fuse=[("exp", "tanh")]).explain("exp", "tanh")
    assert apart.verdict == Verdict("constraint", "never_fuse keeps 'exp' and 'tanh' apart", (EXP, TANH))
    assert "One kernel is impossible (constraint: never_fuse" in str(apart)
    together = make(must_fuse=["attention"]).explain("exp", "div")
    assert together.together
    assert "could not run (constraint: must_fuse keeps 'attention' together)" in str(together)
    size = make(max_group_size=3)
    assert "max_group_size allows 3" in str(size.explain("exp", "tanh"))
    assert any(v.rule == "constraint" for v in make(never_fuse=["sin"]).refusals)


def test_a_plan_keeps_its_constraints_as_json():
    plan = make(
        must_fuse=["attention"], never_fuse=[("exp", "tanh")], max_peak_bytes=10**9,
        max_group_size=9, max_kernel_args=4,
    )  # fmt: skip
    limits = plan.constraints
    assert limits.apart == (Apart("never_fuse keeps 'exp' and 'tanh' apart", (EXP,), (TANH,)),)
    assert limits.together == (Together("must_fuse keeps 'attention' together", tuple(range(9))),)
    assert (limits.max_peak_bytes, limits.max_group_size, limits.max_kernel_args) == (10**9, 9, 4)
    assert Plan.from_json(plan.to_json()) == plan
    document = json.loads(plan.to_json())
    document["plan"]["constraints"]["apart"][0]["b"] = [99]
    with pytest.raises(InvalidPlanError, match=r"plan.constraints.apart\[0\]: expected one of 15 nodes"):
        Plan.from_json(json.dumps(document))
    document["plan"]["constraints"]["apart"][0]["b"] = [DIV]
    with pytest.raises(InvalidPlanError, match="never_fuse keeps 'exp' and 'tanh' apart"):
        Plan.from_json(json.dumps(document))
    del document["plan"]["constraints"]
    assert Plan.from_json(json.dumps(document)).constraints is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Resolved(apart=(Apart("apart", (EXP,), (DIV, 10)),)), "kernel 0 .*: apart"),
        (Resolved(apart=(Apart("alone", (EXP,), None),)), "kernel 0 .*: alone"),
        (
            Resolved(together=(Together("one", (SIN, EXP)),)),
            r"kernels \[0, 1\] share what one is to hold: one",
        ),
        (Resolved(max_group_size=11), "holds 12 operations, max_group_size allows 11"),
        (Resolved(max_kernel_args=1), "reads and writes 2 arrays, max_kernel_args allows 1"),
    ],
)
def test_check_finds_a_plan_that_does_not_obey(limits, message):
    two_kernels = make(never_fuse=[("sin", "exp")])
    with pytest.raises(InvalidPlanError, match=message):
        check_plan(replace(two_kernels, constraints=limits))


def test_a_peak_that_an_unfused_plan_exceeds_is_noted():
    plan = make(max_peak_bytes=1000, planner="unfused")
    assert "more than max_peak_bytes allows (1.0 kB)" in plan.notes[-1]
    assert plan.constraints.max_peak_bytes is None
    assert not make(max_peak_bytes=10**9, planner="unfused").notes


# --- running ---------------------------------------------------------------------------------


def attention(q, k, v):
    with jax.named_scope("scores"):
        s = q @ k.T / 8
    with jax.named_scope("softmax"):
        p = jax.nn.softmax(s)
    return p @ v


QKV = tuple(normal(4096, 16, seed=i) for i in range(3))


def jitted(f=attention, **constraints):
    return fuseplan.jit(f, device=CPU, constraints=Constraints(**constraints))


@pytest.mark.parametrize(
    ("constraints", "tiled"),
    [
        ({"must_fuse": ["softmax"]}, True),
        ({"must_fuse": ["scores"]}, True),
        ({"must_fuse": [("softmax", "div")]}, True),
        ({"never_fuse": [("exp", "reduce_sum")]}, False),
        ({"never_fuse": ["scores/dot_general"]}, False),
        ({"max_group_size": 4}, False),
        ({"max_kernel_args": 2}, False),
    ],
    ids=str,
)
def test_results_on_the_cpu_and_offered_groups_obey(constraints, tiled):
    f = jitted(**constraints)
    assert any(k.spec.backend == "loops" for k in f.plan(*QKV).kernels) == tiled
    assert jnp.allclose(f(*QKV), attention(*QKV), rtol=1e-3, atol=1e-5)


def test_without_constraints_it_would_be_tiled():
    assert any(k.spec.backend == "loops" for k in fuseplan.jit(attention, device=CPU).plan(*QKV).kernels)


def test_a_nest_that_skips_tiles_costs_less_than_its_operations_would():
    def causal(q, k, v):
        with jax.named_scope("all"):
            s = q @ k.T
            i = jnp.arange(len(s))
            return jax.nn.softmax(jnp.where(i[:, None] >= i, s, -1e30)) @ v

    shapes = (jax.ShapeDtypeStruct((512, 512), "float32"),) * 3
    (kernel,) = make("solver", CPU, causal, shapes, must_fuse=["all"]).kernels
    assert kernel.spec.tiles_visited
    lowered = lower(trace(causal, *shapes))
    scheduler = Scheduler(lowered.graph, CPU, lowered)
    limits = resolve(Constraints(must_fuse=["all"]), lowered)
    atoms = MustFusePricing(lowered.graph, ConstrainedPricing(lowered.graph, scheduler, limits))
    assert atoms.floor((0,)) <= atoms.price((0,)).cost.time_ps < scheduler.floor(limits.together[0].nodes)


@pytest.mark.slow
def test_rewritten_graphs_obey_too():
    def f(x, y):
        with jax.named_scope("distance"):
            d = ((x[:, None] - y[None]) ** 2).sum(-1)
        return jnp.exp(-d).sum(1), d.min(1)

    x, y = jax.random.normal(jax.random.key(1), (2, 1200, 3))
    fused = jitted(f, never_fuse=[("distance", "exp")])
    plan = fused.plan(x, y)
    columns = plan.constraints.apart[0].a
    assert len(columns) > 10  # of every column
    (exp,) = plan.constraints.apart[0].b
    assert not any(shared(plan, n, exp) for n in columns)
    for got, expected in zip(fused(x, y), f(x, y), strict=True):
        assert jnp.allclose(got, expected, rtol=1e-4)


@pytest.mark.parametrize("measure", [False, True])
def test_a_wrong_request_is_an_error_not_a_fallback(measure):
    wrong = Constraints(must_fuse=["softmax"], max_group_size=2)
    with pytest.raises(ConstraintError, match="max_group_size allows 2"):
        fuseplan.jit(attention, device=CPU, measure=measure, constraints=wrong)(*QKV)


@pytest.mark.slow
def test_jit_with_other_transformations():
    f = jitted(never_fuse=[("scores", "softmax")])
    some = tuple(a[:64] for a in QKV)
    batched = jax.vmap(f, in_axes=(0, None, None))(jnp.stack([some[0]] * 2), *some[1:])
    assert jnp.allclose(batched[1], attention(*some), rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda *a: f(*a).sum())(*some)
    assert jnp.allclose(gradient, jax.grad(lambda *a: attention(*a).sum())(*some), rtol=1e-3, atol=1e-5)
    with pytest.raises(ConstraintError, match=r"'n1' names a node .* fuse the batched function"):
        jax.vmap(jitted(never_fuse=["n1"]))(*(jnp.stack([a] * 2) for a in some))
    as_decorator = fuseplan.jit(device=CPU, constraints=Constraints(max_group_size=1))(attention)
    assert all(len(k.spec.nodes) == 1 for k in as_decorator.plan(*some).kernels)


def test_compare_takes_constraints():
    frame = fuseplan.compare(
        block, device="h200", planners=("unfused", "solver"), constraints=Constraints(max_group_size=5)
    )(*SHAPES)
    assert list(frame.kernels) == [15, 3]


# --- the command line ------------------------------------------------------------------------


def run(*args, code=0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_line(tmp_path):
    text = run(
        "plan", "softmax", "--device", "test", "--json",
        "--never-fuse", "exp,div", "--never-fuse", "reduce_max",
        "--max-group-size", "6", "--max-kernel-args", "5", "--max-peak-bytes", "1000000000",
    ).stdout  # fmt: skip
    limits = Plan.from_json(text).constraints
    assert [entry.text for entry in limits.apart] == [
        "never_fuse keeps 'exp' and 'div' apart",
        "never_fuse keeps 'reduce_max' by itself",
    ]
    assert (limits.max_peak_bytes, limits.max_group_size, limits.max_kernel_args) == (10**9, 6, 5)
    rows = json.loads(
        run(
            "compare", "softmax", "--device", "test", "--planners", "unfused,solver", "--json",
            "--must-fuse", "exp, 1", "--max-group-size", "4",
        ).stdout
    )  # fmt: skip
    assert rows[1]["kernels"] < rows[0]["kernels"]
    page = tmp_path / "p.html"
    run(
        "report",
        "softmax",
        "--device",
        "test",
        "--planners",
        "solver",
        "--never-fuse",
        "exp",
        "--out",
        os.fspath(page),
    )
    assert "never_fuse keeps" in page.read_text()
    wrong = run("plan", "softmax", "--device", "test", "--must-fuse", "exp,divv", code=2)
    assert "Did you mean 'div'" in wrong.stderr
    wrong = run(
        "plan", "softmax", "--device", "test", "--must-fuse", "exp,div", "--max-group-size", "1", code=2
    )
    assert "max_group_size allows 1" in wrong.stderr


def test_under_constraints_xlas_priorities_follow_from_the_device_that_is_planned_for():
    """Arithmetic so slow that XLA's cost model computes less of it twice than on an H100."""
    a100 = get_device("a100")
    slow = replace(
        a100,
        name="slow",
        vector_flops_per_s=a100.vector_flops_per_s // 1000,
        transcendental_per_s=a100.transcendental_per_s // 1000,
    )
    f, args = get_workload("rope").build()
    free, bound = (
        fuseplan.make_plan(f, device=slow, planner="xla_priority", constraints=constraints)(*args)
        for constraints in (None, Constraints(max_group_size=1000))
    )
    assert [k.spec.nodes for k in bound.kernels] == [k.spec.nodes for k in free.kernels]
    assert len(free.kernels) > 1
