"""Passes: how often a stream is walked, and what is put right afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fuseplan.schedule.nests.multipass import program_of
from tests.helpers.nest_cases import CASES, CT, QKV, TILES, M, N, attention, normal, with_gradient
from tests.helpers.nests import S, specs_of

X, Y, W = normal(M), normal(N), normal(N, seed=1)


def programs(f, args, stream=N, keeps=False):
    """Of the nests that walk the axis of this size innermost, and cut no other."""
    with jax.enable_x64(True):
        lowered, specs = specs_of(f, args, TILES)
    found = []
    for spec in specs:
        cut = [axis for axis in spec.axes if axis.n_tiles > 1]
        if len(cut) == 1 and cut[0].role == S and cut[0].size == stream and spec.keeps == keeps:
            found.append((lowered.graph, spec, program_of(lowered.graph, spec)))
    return found


def walks(f, *args, stream=N):
    ((_, _, program),) = programs(f, args, stream)
    return len(program.passes)


def product(x, y):
    return jnp.sin(x[:, None] * y)


ONE = ("attention", "guarded_rows", "mlp", "gradient of mlp", "cross_entropy", "gradient of gaussian")
TWO = ("two_softmaxes", "live_guard", "foreign_maximum", "gradient of attention", "statistics")


@pytest.mark.parametrize(("name", "expected"), [*((name, 1) for name in ONE), *((name, 2) for name in TWO)])
def test_number_of_passes(name, expected):
    f, args = CASES[name]
    assert walks(f, *args) == expected


def test_weights_that_are_returned_take_a_second_pass():
    """Only the second stores them: those of the first have no final maximum."""
    f, args = CASES["with_weights"]
    ((graph, spec, program),) = programs(f, args)
    assert [len(p.stored) for p in program.passes] == [0, 1]
    (stored,) = program.passes[1].stored
    assert graph.nodes[spec.nodes[stored]].op == "div"


def test_softmax_is_repaired_online():
    f, args = CASES["attention"]
    ((graph, spec, program),) = programs(f, args)
    (p,) = program.passes
    ops = [graph.nodes[n].op for n in spec.nodes]
    shift = next(scale.shift for _, scale in p.sinks if scale.shift is not None)
    assert {(ops[i], scale.shift, len(scale.factors)) for i, scale in p.sinks} == {
        ("reduce_max", None, 0),
        ("reduce_sum", shift, 0),
        ("dot_general", shift, 1),
    }
    assert [ops[i] for i in p.pending] == ["div"]
    assert ops[program.shifts[shift].maximum] == "reduce_max"


def test_only_floats_are_scaled():
    """A quotient of integers does not commute with a sum, nor does rounding to integers."""

    def floored(x, y):
        z = product(x, y)
        return (z / abs(z).sum(-1, keepdims=True)).astype(jnp.int32).sum(-1)

    def real(x, y):
        z = product(x, y)
        return (z / abs(z).sum(-1, keepdims=True)).sum(-1)

    assert walks(real, X, Y) == 1
    assert walks(floored, X, Y) == 2


def test_a_literal_over_a_sum_is_not_linear():
    f = lambda x, y: (0.5 / jax.nn.softmax(product(x, y), -1)).sum(-1)  # noqa: E731
    assert walks(f, X, Y) == 2


def test_factors_that_may_be_infinite_stay_inside():
    maximum = lambda x, y: (product(x, y) * product(x, y).max(-1, keepdims=True)).sum(-1)  # noqa: E731
    norm = lambda x, y: (product(x, y) * jax.lax.rsqrt((product(x, y) ** 2).sum(-1, keepdims=True))).sum(-1)  # noqa: E731
    assert walks(maximum, X, Y) == 2
    assert walks(norm, X, Y) == 1


def test_a_scale_is_constant_along_what_is_summed():
    """Each row has its own norm: it cannot be left for the sum over rows."""
    f = lambda x, y, w: (jax.nn.softmax(product(x, y), -1) * w).sum()  # noqa: E731
    assert walks(f, X, Y, W) == 2
    rows = lambda x, y, w: (jax.nn.softmax(product(x, y), -1) * w).sum(-1)  # noqa: E731
    assert walks(rows, X, Y, W) == 1


def test_float16_waits_for_its_factor():
    def f(x, y):
        z = product(x, y)
        return (z.astype("float16") / (z * z).sum(-1, keepdims=True).astype("float16")).sum(-1)

    assert walks(f, X, Y) == 2


def test_sums_over_an_outer_axis_are_not_read_inside():
    """They are complete only when the nest is over."""

    def f(x, y):
        z = product(x, y)
        return (z - z.sum(0)).sum(-1)

    with jax.enable_x64(True):
        lowered, specs = specs_of(f, (X, Y), TILES)
    assert specs
    for spec in specs:
        program = program_of(lowered.graph, spec)
        (column_sum,) = (
            i
            for i, n in enumerate(spec.nodes)
            if lowered.graph.nodes[n].op == "reduce_sum" and i < len(spec.nodes) - 1
        )
        outer = [a for a, axis in enumerate(spec.axes) if axis.n_tiles > 1 and a != program.stream]
        assert not any(a in spec.node_axes[column_sum][0] for a in outer)


def test_products_are_kept_once_they_are_final():
    f, args = with_gradient(attention), (*QKV, CT)
    ((graph, spec, program),) = programs(f, args, keeps=True)
    first, second = program.passes
    assert first.kept
    assert first.kept == tuple(i for i in second.recalled if i in first.kept)
    assert not set(second.recalled) & set(second.loop)
    assert all(graph.nodes[spec.nodes[i]].op == "dot_general" for i in second.recalled)


def test_products_of_what_is_scaled_are_not_kept():
    """A product of weights that still lack their norm is not that of the next pass."""
    found = programs(*CASES["contracted_weights"], keeps=True)
    assert found
    for _, _, program in found:
        final = {i for p in program.passes[1:] for i in p.stored}
        assert not final & set(program.passes[0].kept)


def softmax_over(divide):
    """Softmax times a vector, with the sum of the exponentials divided by as asked."""

    def f(x, y, w):
        s = product(x, y)
        p = jnp.exp(s - s.max(1, keepdims=True))
        return divide(p, p.sum(1, keepdims=True)) @ w

    return f


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        (lambda p, total: p / total, 1),
        (lambda p, total: p * (1 / total), 1),
        (lambda p, total: p * (jnp.inf / total), 2),
        (lambda p, total: p * jax.lax.integer_pow(total, -2), 1),
        (lambda p, total: p * jax.lax.rsqrt(total), 1),
        (lambda p, total: p * jax.lax.integer_pow(total, 2), 2),  # 1e20 squared is infinite in float32
        (lambda p, total: p * total, 2),
    ],
)
def test_only_divisors_are_left_for_later(divide, expected):
    assert walks(softmax_over(divide), X, Y, W) == expected
