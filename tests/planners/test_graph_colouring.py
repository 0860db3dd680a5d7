"""Fusion as graph colouring: what conflicts, the colours, and the repair that makes them convex."""

from __future__ import annotations

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import fuseplan
from fuseplan.planners.graph_colouring import colours, conflicts, convex, plan_groups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.grouping import Budget, decompose
from fuseplan.support.bitset import bits
from tests.helpers.small_graphs import Bytes, graph, graphs

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((1024, 1024), "float32")


def spaces(g):
    return decompose(g, PriceBook(g, Bytes(g))).spaces


def groups(g, objective="bytes"):
    return sorted(plan_groups(g, Bytes(g), Budget(), objective=objective).groups)


def test_what_conflicts():
    # A row sum and a column sum of one array, and what is elementwise before them.
    (space,) = spaces(graph("eerc", [[], [0], [1], [1]]))
    assert [sorted(bits(mask)) for mask in conflicts(space)] == [[], [], [3], [2]]


def test_two_conflict_by_what_stands_between_them():
    # 1 is on the way from 0 to 3, and a row sum; 3 is a column sum: neither 0 nor 2 may stand with both.
    (space,) = spaces(graph("ereec", [[], [0], [0], [2, 1], [3]]))
    assert 1 << 4 & conflicts(space)[1]
    assert 1 << 4 & conflicts(space)[0], "1 would be between them"
    assert not 1 << 4 & conflicts(space)[2]


@given(graphs(), st.sampled_from(["bytes", "kernels"]))
def test_no_two_of_a_colour_conflict(g, objective):
    for space in spaces(g):
        found = colours(space, objective)
        assert sum(found) == space.everything, "each operation has one colour"
        assert sum(map(int.bit_count, found)) == space.n
        conflict = conflicts(space)
        assert all(not conflict[v] & colour for colour in found for v in bits(colour))


@given(graphs(), st.data())
def test_parts_are_convex(g, data):
    for space in spaces(g):
        colour = data.draw(st.integers(0, space.everything))
        parts = convex(space, colour)
        assert sum(parts) == colour
        for part in parts:
            for v in bits(space.everything & ~part):
                assert not (space.inner_above[v] & part and space.inner_below[v] & part)


def test_a_part_is_not_smaller_than_it_must_be():
    (space,) = spaces(graph("eeeee", [[], [0], [1], [2], [3]]))
    assert convex(space, 0b11011) == [0b00011, 0b11000]
    assert convex(space, 0b11110) == [0b11110]


def test_few_colours_or_few_bytes():
    # A column sum of two arrays, one of which has a row sum as well. Two colours do, and the array that
    # nobody else reads is best beside the column sum; the first colour that is free is the row sum's.
    g = graph("eerc", [[], [], [1], [0, 1]])
    assert groups(g, "bytes") == [(0, 3), (1, 2)]
    assert groups(g, "kernels") == [(0,), (1, 2), (3,)]


@given(graphs())
def test_colourings_are_made_into_plans(g):
    for objective in ("bytes", "kernels"):
        found = groups(g, objective)
        assert sorted(n for group in found for n in group) == list(range(len(g.nodes)))


def test_it_plans_softmax_as_one_kernel_and_attention_as_three():
    assert len(fuseplan.make_plan(jax.nn.softmax, device="h200", planner="graph_colouring")(X).kernels) == 1

    def attention(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    plan = fuseplan.make_plan(attention, device="h200", planner="graph_colouring")(X, X, X)
    assert len(plan.kernels) == 3
    assert plan.verify()


def test_the_other_objective_is_registered_in_one_line():
    fuseplan.register_planner("fewest_colours", partial(plan_groups, objective="kernels"))

    def f(x):
        return jnp.exp(x).sum(0), jnp.tanh(x).sum(1)

    frame = fuseplan.compare(f, device="h200", planners=("graph_colouring", "fewest_colours"))(X)
    assert frame.kernels.tolist() == [2, 2]
