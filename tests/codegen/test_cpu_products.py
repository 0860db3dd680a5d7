"""Matrix products on a CPU: which side is given to XLA first, and that it is the same product."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from costmodel.loops import Sides, swap_is_faster
from fuseplan.frontend.lower import lower
from fuseplan.frontend.ops import contraction
from fuseplan.frontend.trace import trace
from fuseplan.passes.exchange_sides import exchange_sides
from tests.helpers.nest_cases import normal
from tests.helpers.nests import every_nest, function_of, groups
from tests.helpers.quickly import run_quickly

pytestmark = pytest.mark.one_python

ROWS, DEPTH, COLUMNS = (0,), (1,), (2,)
NATURAL = ((ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS))


@pytest.mark.parametrize("extents", [(64, 1024, 4096), (4096, 64, 1024), (1, 7, 1)])
def test_what_lies_as_xla_reads_it_stays(extents):
    assert not swap_is_faster(NATURAL, extents)


@pytest.mark.parametrize(
    ("left", "right", "extents", "better"),
    [
        ((DEPTH, ROWS), (DEPTH, COLUMNS), (4096, 1024, 64), True),  # Pᵀ dO of attention's gradient
        ((DEPTH, ROWS), (DEPTH, COLUMNS), (64, 1024, 4096), False),  # it is the left side that is small
        ((ROWS, DEPTH), (COLUMNS, DEPTH), (1024, 64, 4096), False),  # q kᵀ: the result is the largest
        ((DEPTH, ROWS), (COLUMNS, DEPTH), (4096, 1024, 512), True),  # both sides would be transposed
        ((DEPTH, ROWS), (DEPTH, COLUMNS), (4096, 1024, 1), False),  # a matrix times a vector
    ],
)
def test_the_large_side_is_not_transposed(left, right, extents, better):
    assert swap_is_faster((left, right, (ROWS, COLUMNS)), extents) == better


def test_a_batch_of_one_changes_nothing():
    batch = (3,)
    left, right = (batch, DEPTH, ROWS), (batch, DEPTH, COLUMNS)
    assert swap_is_faster((left, right, (batch, ROWS, COLUMNS)), (4096, 1024, 64, 1))
    # Heads beside tokens, as [B, T, H, D] has them: with one head nothing is moved.
    assert not swap_is_faster(
        ((ROWS, batch, DEPTH), (batch, DEPTH, COLUMNS), (batch, ROWS, COLUMNS)), (9, 8, 7, 1)
    )


def test_sides():
    sides = Sides.of((((3,), (0,), (1,)), ((3,), (1,), (2,)), ((3,), (0,), (2,))))
    assert [sorted(s) for s in (sides.batch, sides.rows, sides.depth, sides.columns)] == [[3], [0], [1], [2]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exchanged_sides_give_the_same_product(data):
    """Any number and order of batch, free and contracted dimensions, against einsum."""
    batch, rows, depth, columns = (
        letters[: data.draw(st.integers(0, 2))] for letters in ("ab", "mn", "jk", "xy")
    )
    size = {c: 2 + i for i, c in enumerate("abmnjkxy")}
    left = "".join(data.draw(st.permutations(batch + rows + depth)))
    right = "".join(data.draw(st.permutations(batch + depth + columns)))
    free = [c for c in left if c in rows], [c for c in right if c in columns]
    numbers = tuple(tuple([tuple(map(s.index, part)) for s in (left, right)]) for part in (depth, batch))
    x, y = (np.float32(normal(*(size[c] for c in s), seed=i)) for i, s in enumerate((left, right)))

    def product(x, y):
        return lax.dot_general(x, y, numbers)

    (eqn,) = trace(product, x, y).equations
    got = run_quickly(lambda x, y: contraction.exchanged_dot(eqn, x, y, dict(eqn.params)), x, y)
    result = batch + "".join(free[0]) + "".join(free[1])
    np.testing.assert_allclose(got, np.einsum(f"{left},{right}->{result}", x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "may"),
    [
        (None, True),
        (("highest", "highest"), True),
        (("default", "highest"), False),
        (lax.DotAlgorithmPreset.F32_F32_F32, False),
    ],
)
def test_what_asks_more_of_one_side_stays(precision, may):
    x = jnp.ones((4, 4))
    (eqn,) = trace(
        lambda x: lax.dot_general(x, x, (((0,), (0,)), ((), ())), precision=precision), x
    ).equations
    assert contraction.treats_sides_alike(eqn) == may


def compiled(spec, lowered, args) -> str:
    """XLA's program of a group's nest."""
    lowering = jax.jit(function_of(spec, lowered)).lower(*args)
    # What XLA does is asked for, and no machine code.
    return lowering.compile({"xla_backend_optimization_level": 0}).as_text()


def results_of(operation: str, program: str) -> list[tuple[int, ...]]:
    """The shapes of the results of an operation in a program of XLA."""
    lines = [line.split(f" {operation}(")[0] for line in program.splitlines() if f" {operation}(" in line]
    return [tuple(map(int, re.search(r"f32\[([\d,]*)\]", line)[1].split(","))) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_a_nest_gives_the_large_side_as_it_lies(exchange, monkeypatch):
    """The gradient of softmax(q kᵀ) v in v: the weights are contracted along their columns. As the second
    side they are multiplied as they lie, and the rows of the result are long."""
    tokens, width, tile = 256, 4, 64

    def gradient(q, k, ct):
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return lax.dot_general(p, ct, (((2,), (1,)), ((0, 1), (0, 2))))

    if not exchange:
        monkeypatch.setattr(contraction, "treats_sides_alike", lambda eqn: False)
    args = [np.float32(normal(1, tokens, 2, width, seed=i)) for i in range(3)]
    lowered = lower(trace(gradient, *args))
    nodes = max(groups(lowered), key=len)
    specs = [spec for spec in every_nest(lowered, nodes, {2: 1, tokens: tile}) if cuts_heads(spec)]
    narrow = [
        any(shape[-1] == width for shape in results_of("dot", compiled(spec, lowered, args)))
        for spec in specs
    ]
    assert narrow
    assert any(narrow) != exchange


def cuts_heads(spec) -> bool:
    """Whether each tile has one head."""
    return any(axis.size == 2 and axis.tile == 1 for axis in spec.axes)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_an_attention_transposes_no_tile(exchange):
    """Its einsums give ``v`` as the first side, and the one head of a tile is a batch of one."""
    tokens, width, tile = 256, 4, 64

    def attend(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", p, v)

    args = [np.float32(normal(1, tokens, 2, width, seed=i)) for i in range(3)]
    lowered = lower(trace(attend, *args))
    if exchange:
        lowered = exchange_sides(lowered)
    nodes = max(groups(lowered), key=len)
    specs = [spec for spec in every_nest(lowered, nodes, {2: 1, tokens: tile}) if cuts_heads(spec)]
    moved = [results_of("transpose", compiled(spec, lowered, args)) for spec in specs]
    assert moved
    assert any(moved) != exchange
