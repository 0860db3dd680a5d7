"""Dimensions that must move together become one axis; what cannot is refused."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from costmodel.axes import Conflict, GroupAxes, unify
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace


def axes_of(f, *shapes):
    graph = lower(trace(f, *(jnp.zeros(s) for s in shapes))).graph
    return graph, unify(graph, tuple(range(len(graph.nodes))))


def test_softmax_has_two_axes_one_of_them_reduced():
    _, axes = axes_of(
        lambda x: jnp.exp(x - x.max(1, keepdims=True)) / jnp.exp(x).sum(1, keepdims=True), (4, 6)
    )
    assert isinstance(axes, GroupAxes)
    assert sorted(zip(axes.sizes, axes.reduced, strict=True)) == [(4, False), (6, True)]


def test_a_reshape_splits_the_axes_of_its_neighbours():
    _, axes = axes_of(lambda x: jnp.tanh(x).reshape(4, 2, 3) * 2, (4, 6))
    assert isinstance(axes, GroupAxes)
    assert sorted(axes.sizes) == [2, 3, 4]
    assert axes.node_axes[0][1] == axes.node_axes[-1][1] + axes.node_axes[-1][2]


def test_split_and_merge_back():
    _, axes = axes_of(lambda x: jnp.exp(jnp.tanh(x).reshape(4, 2, 3).reshape(8, 3)), (4, 6))
    assert isinstance(axes, GroupAxes)
    assert sorted(axes.sizes) == [2, 3, 4]


def test_two_splits_without_a_common_one_conflict():
    def f(x):
        y = jnp.tanh(x)
        return y.reshape(2, 3) * 2, y.reshape(3, 2) * 2

    graph, axes = axes_of(f, (6,))
    assert isinstance(axes, Conflict)
    assert "no tiling splits both alike" in axes.reason
    assert graph.values[axes.value].shape == (6,)


def test_two_splits_of_an_outside_value_are_two_reads():
    _, axes = axes_of(lambda x: jnp.exp(x.reshape(2, 3)) * 2 + jnp.exp(x.reshape(3, 2)).T, (6,))
    assert isinstance(axes, GroupAxes)


def test_x_plus_its_transpose_reads_two_blocks():
    """The classic silent error: one block of x serves both only on the diagonal."""
    graph, axes = axes_of(lambda x: x + x.T, (6, 6))
    assert isinstance(axes, GroupAxes)
    assert len(axes.sizes) == 2
    assert not any(axes.whole)
    (transpose, add) = axes.node_axes
    assert transpose != add or graph.nodes[0].op == "add"


def test_diagonal_is_whole():
    _, axes = axes_of(lambda x: (lambda y: y + y.T)(jnp.tanh(x)), (6, 6))
    assert isinstance(axes, GroupAxes)
    assert axes.sizes == (6,)
    assert axes.whole == (True,)


def test_residual_does_not_tie_the_contracted_axis():
    graph, axes = axes_of(lambda x, w: x @ w + x, (4, 6), (6, 6))
    assert isinstance(axes, GroupAxes)
    assert sorted(zip(axes.sizes, axes.reduced, strict=True)) == [(4, False), (6, False), (6, True)]
    assert graph.nodes[0].op == "dot_general"


def test_shared_operand_is_read_once():
    """Two readers of one outside value share its block where nothing contradicts it."""
    _, axes = axes_of(lambda x: x - x.mean(1, keepdims=True), (4, 6))
    assert isinstance(axes, GroupAxes)
    assert len(axes.sizes) == 2


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_size_one_has_no_axes(shape):
    _, axes = axes_of(lambda x: jnp.tanh(x) + 1, shape)
    assert isinstance(axes, GroupAxes)
    assert axes.sizes == ()


def test_a_program_of_no_operations_has_no_axes():
    _, axes = axes_of(lambda x, y: x, (24, 128), (24, 128))
    assert isinstance(axes, GroupAxes)
    assert (axes.sizes, axes.node_axes) == ((), ())
