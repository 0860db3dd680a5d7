"""Components that are divided by the axis along which their members reduce."""

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search import axis_cut as by_axis
from fuseplan.search.grouping import take_apart
from fuseplan.search.heuristics import best_first_groups
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import cyclic_sets
from fuseplan.workloads.stress import fan_out, random_sums

pytestmark = pytest.mark.one_python

ARRAY = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)


def largest(f, *args, device="h200"):
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, get_device(device))
    return scheduler, max(take_apart(graph, PriceBook(graph, scheduler)).kinds, key=lambda space: space.n)


def axes(space, mask):
    held = (space.book.residency.held(n) for n in space.nodes(mask))
    return frozenset().union(*held)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_sums_along_two_axes_are_two_sides_of_the_fewest_bytes(device):
    _, space = largest(lambda x: fan_out(x, 6), ARRAY, device=device)
    sides = by_axis.divided(space)
    assert sum(sides) == space.everything
    assert [len(axes(space, side)) for side in sides] == [1, 1]
    # What only one sum needs is on its side: one array passes between the two.
    ops = [sorted(space.book.graph.nodes[n].op for n in space.nodes(side)) for side in sides]
    one_sum = ["mul"] * 3 + ["reduce_sum"] * 3
    assert sorted(ops) == [["exp", *one_sum], one_sum]


def test_what_no_single_move_finds_is_found():
    """Where there are too many groups, a plan with one kernel a direction, instead of one that writes
    what each sum along the other axis reads."""
    f = lambda x: fan_out(x, 16)  # noqa: E731
    scheduler, space = largest(f, ARRAY)
    groups = by_axis.merge(space)
    assert len(groups) == 2
    assert space.total(groups).time_ps < space.total(best_first_groups(space)).time_ps / 2
    plan = get_planner("solver")(scheduler.graph, scheduler, Budget(max_groups=2_000))
    assert sum(kernel.cost.time_ps for kernel in plan.kernels) <= space.total(groups).time_ps
    assert plan.status == "FEASIBLE"


@pytest.mark.parametrize("seed", range(4))
def test_the_groups_are_a_plan(seed):
    _, space = largest(lambda x, y: random_sums(x, y, 14, seed), ARRAY, ARRAY)
    groups = by_axis.merge(space)
    if groups is None:
        return
    assert sorted(i for mask in groups for i in bits(mask)) == list(range(space.n))
    assert all(isinstance(space.price(mask), Price) for mask in groups)
    assert not cyclic_sets(space.successors(groups))


def test_one_direction_is_not_divided():
    _, space = largest(lambda x: jax.nn.softmax(x) * 2, ARRAY)
    assert by_axis.divided(space) == [space.everything]
    assert by_axis.merge(space) is None
