"""Constraints on plans that compute operations again: a copy is its operation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuseplan
from fuseplan import Constraints, Plan
from fuseplan.plan.constraints import Apart, Resolved, Together
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.constrained_pricing import ConstrainedPricing
from fuseplan.search.grouping import decompose
from fuseplan.search.must_fuse import MustFusePricing, plan_constrained, require_possible
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import roots_of, split
from fuseplan.search.selectors import joined
from fuseplan.support.errors import ConstraintError, Verdict
from fuseplan.workloads import get_workload
from tests.helpers.copies_by_hand import ByHand, merged_in, ties
from tests.helpers.small_graphs import brute_force, is_connected, live_values
from tests.plan.test_constraints import keeps, siblings_within
from tests.planners.test_planners import assert_legal, objectives, programs
from tests.search.test_duplicates import LARGE, MOST, QUICK, read_early_and_late

pytestmark = pytest.mark.one_python

SOLVE = get_planner("solver")


class Obeying(ByHand):
    """Prices of the groups that obey, by predicates about operations."""

    def __init__(self, copies, apart, must, size, args):
        super().__init__(copies.graph, QUICK)
        self.components = ()
        self.node, self.apart, self.must, self.size, self.args = copies.node, apart, must, size, args

    def obeys(self, nodes):
        inside = {self.node[n] for n in nodes}
        if not keeps(inside, self.apart, self.must):
            return False
        merged, new = merged_in(self.graph, nodes)
        reads, writes = live_values(merged, sorted({new[n] for n in nodes}))
        return len(inside) == 1 or (len(inside) <= self.size and len(reads) + len(writes) <= self.args)

    def _leads_to_this_alone(self, maker, n):
        # What constraints keep apart anyway is not decided about together.
        together = any({maker, n} <= set(nodes) for nodes in self.components)
        return together and super()._leads_to_this_alone(maker, n)

    def price(self, nodes):
        return super().price(nodes) if self.obeys(nodes) else Verdict("constraint", "", tuple(nodes))


def wanted(draw, g):
    """The copies of a graph, what obeys, and the same as constraints on the graph; None without copies."""
    some = st.sets(st.integers(0, len(g.nodes) - 1), min_size=1, max_size=3)
    apart = draw(st.lists(st.tuples(some, st.none() | some), max_size=2))
    must = draw(st.lists(some, max_size=1))
    size, args = draw(st.sampled_from([99, 99, 4, 3, 2])), draw(st.sampled_from([99, 99, 4, 3]))
    limits = Resolved(
        tuple(Apart("apart", tuple(sorted(a)), None if b is None else tuple(sorted(b))) for a, b in apart),
        joined(g, [Together("must", tuple(sorted(entry))) for entry in must]),
        None,
        size,
        args,
    )
    copies = split(g, roots_of(g, QUICK), limits.fused)
    if copies is None or len(copies.graph.nodes) > MOST:
        return None
    return copies, Obeying(copies, apart, must, size, args), limits.moved(copies.places)


def components_within(graph, pricing, limits):
    """What planners decide about together; nothing where the constraints cannot hold."""
    try:
        require_possible(limits, graph, pricing)
    except ConstraintError:
        return []
    atoms = MustFusePricing(graph, ConstrainedPricing(graph, pricing, limits))
    parts = decompose(atoms.graph, PriceBook(atoms.graph, atoms))
    return [atoms.expanded(nodes) for _, nodes in parts.instances]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(programs(), st.data())
def test_what_is_computed_again_within_constraints_is_decided_optimally(g, data):
    given_case = wanted(data.draw, g)
    if given_case is None:
        return
    copies, obeying, limits = given_case
    graph, pricing = copies.graph, DuplicatePricing(copies, Scheduler(g, QUICK))
    pairs = [*siblings_within(graph, pricing, limits), *ties(graph)]
    obeying.components = components_within(graph, pricing, limits)
    obeying.loops = frozenset(pricing.offers)
    try:
        best = brute_force(graph, obeying, pairs)[0]
    except IndexError:  # no partition obeys
        best = None
    try:
        plan = plan_constrained(limits, SOLVE, graph, pricing, Budget())
    except ConstraintError:
        alone = [t.nodes for t in limits.together]
        assert best is None or not all(
            is_connected(graph, n, pairs) and obeying.obeys(n) and not isinstance(pricing.price(n), Verdict)
            for n in alone
        )
        return
    assert_legal(graph, plan, pairs)
    assert all(map(obeying.obeys, plan.groups))
    assert (objectives(plan), plan.status, plan.bound_ps) == (best, "OPTIMAL", best[0])


def planned(f, args, device="h200", **constraints):
    return fuseplan.make_plan(f, device=device, constraints=Constraints(**constraints))(*args)


LIMITS = [
    ({"max_group_size": 4}, 2),
    ({"max_group_size": 2}, 0),
    ({"max_kernel_args": 3}, 2),
    ({"max_kernel_args": 2}, 0),
    ({"never_fuse": [("mul", "add")]}, 0),
    ({"never_fuse": ["sort"]}, 2),
    ({"must_fuse": [("convert_element_type", "mul")]}, 0),
]


@pytest.mark.parametrize(("constraints", "again"), LIMITS, ids=str)
def test_constraints_are_about_operations_however_often_they_are_computed(constraints, again):
    plan = planned(read_early_and_late, LARGE, **constraints)
    assert len(plan.recomputed) == again
    assert plan.status == "OPTIMAL"
    assert Plan.from_json(plan.to_json()) == plan
    checked = plan.verify()
    assert checked.status == ("bound not re-checked" if "must_fuse" in constraints else "verified")


def test_every_copy_is_kept_apart():
    plan = planned(read_early_and_late, LARGE, never_fuse=[("mul", "sort"), "sort"])
    (apart, _) = plan.constraints.apart
    assert [plan.graph.nodes[n].op for n in apart.a] == ["mul", "mul"]
    assert set(plan.recomputed) & set(apart.a)


@pytest.mark.parametrize(
    "constraints", [{"max_kernel_args": 6}, {"never_fuse": [("add", "mul")]}, {"max_group_size": 6}], ids=str
)
@pytest.mark.slow
def test_what_constraints_leave_to_be_computed_again(constraints):
    f, args = get_workload("gpt2_block").build()

    def made(recompute):
        # Within loops masks are computed tile by tile anyway, and XLA's products add their biases.
        features = fuseplan.Features(recompute=recompute, loop_nests=False, xla_loops=False)
        limits = Constraints(**constraints)
        # To prove it takes a little more counted work than the default deadline allows.
        how = {"constraints": limits, "features": features, "deadline_s": 60}
        return fuseplan.make_plan(f, device="h200", **how)(*args)

    plan, without = made(True), made(False)
    assert plan.recomputed
    assert plan.status == without.status == "OPTIMAL"
    assert plan.objective_ps < without.objective_ps
