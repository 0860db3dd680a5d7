"""A pattern does not match arithmetic that wraps, rounds or is differentiated otherwise than its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from fuseplan import Pattern, patterns

I8, I32, U8 = jnp.int8, jnp.int32, jnp.uint8


def above(x, indices):
    return (x[:, None] > indices).sum(-1)


def quantised(dtype):
    return lambda x: jnp.exp(x).astype(dtype).astype(jnp.float32) * 2


BYTES = (jnp.array([1, 200, 30], U8), jnp.array([3, 100, 31], U8))
SIGNED = (jnp.array([100, -100, 3], I8), jnp.array([2, 3, 4], I8))
FLOATS = (jnp.array([300.0, -300.0, 5.0]),)
LARGE = (jnp.array([200, 299]),)
ROWS, CUBE = jnp.ones((4, 6)), jnp.zeros((2, 2, 6))
MATRIX = jnp.full((2, 2), 100, I8)

# The pattern, its arguments, a program that computes something else, arguments, and that program's result.
OTHERS = {
    "a difference that wraps": (
        lambda a, b: jnp.abs(a.astype(I32) - b.astype(I32)), ("uint8[n]", "uint8[n]"),
        lambda a, b: jnp.abs((a - b).astype(I32)), BYTES, [254, 100, 255],
    ),
    "a product that wraps": (
        lambda a, b: (a.astype(I32) * b.astype(I32)).sum(), ("int8[n]", "int8[n]"),
        lambda a, b: (a * b).astype(I32).sum(), SIGNED, -56 - 44 + 12,
    ),
    "a double that wraps": (
        lambda a: (a.astype(I32) * 2).sum(), ("int8[n]",),
        lambda a: (a * 2).astype(I32).sum(), SIGNED[:1], -56 + 56 + 6,
    ),
    "a change of sign": (
        lambda a: (a * 2).astype(jnp.float32), ("int32[n]",),
        lambda a: (a * 2).astype(I32).astype(jnp.float32), (jnp.array([2**31 + 5], jnp.uint32),), [10],
    ),
    "a narrower conversion": (
        lambda x: jnp.round(x).astype(I32), ("n",),
        lambda x: jnp.round(x).astype(I8), FLOATS, [127, -128, 5],
    ),
    "a wider conversion": (
        lambda x: jnp.round(x).astype(I8), ("n",),
        lambda x: jnp.round(x).astype(I32), FLOATS, [300, -300, 5],
    ),
    "another float of eight bits": (
        quantised(jnp.float8_e4m3fn), ("n",), quantised(jnp.float8_e5m2), (jnp.log(jnp.array([1.1])),), [2.0],
    ),
    "a wider product of matrices": (
        lax.dot, ("int8[m k]", "int8[k n]"),
        lambda a, b: lax.dot(a, b, preferred_element_type=I32), (MATRIX, MATRIX), np.full((2, 2), 20000),
    ),
    "a narrower product of matrices": (
        lambda a, b: lax.dot(a, b, preferred_element_type=I32).astype(jnp.float32),
        ("int8[m k]", "int8[k n]"),
        lambda a, b: lax.dot(a, b).astype(jnp.float32), (MATRIX, MATRIX), np.full((2, 2), 32),
    ),
    "an operand of another rank": (
        lambda x: jnp.exp(x).reshape(-1) * x.sum(), ("a b",),
        lambda x, z: jnp.exp(z).reshape(-1) * x.sum(), (ROWS, CUBE), np.full(24, 24.0),
    ),
    "indices that wrap": (
        lambda x: above(x, jnp.arange(300)), ("int32[n]",),
        lambda x: above(x, jnp.arange(300, dtype=U8).astype(I32)), LARGE, [244, 300],
    ),
    "indices that are rounded": (
        lambda x: above(x, jnp.arange(300.0)), ("n",),
        lambda x: above(x, jnp.arange(300, dtype=jnp.bfloat16)), (jnp.array([257.0]),), [258],
    ),
    "indices that are rounded by a cast": (
        lambda x: above(x, jnp.arange(300.0)), ("n",),
        lambda x: above(x, jnp.arange(300.0).astype(jnp.bfloat16).astype(jnp.float32)),
        (jnp.array([257.0]),), [258],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_arithmetic_is_no_match(case):
    f, args, program, given, expected = OTHERS[case]
    pattern = Pattern("p", f, args=args)
    assert not fuseplan.match(pattern, program)(*given).matches
    np.testing.assert_array_equal(program(*given), expected)
    np.testing.assert_array_equal(patterns.rewrite(program, [pattern])(*given), expected)


SAME = {
    "arguments that are wider": (
        lambda a, b: jnp.abs((a - b).astype(I32)), ("uint8[n]", "uint8[n]"),
        lambda a, b: jnp.abs(a.astype(I32) - b.astype(I32)), BYTES, [2, 100, 1],
    ),
    "casts of arguments": (
        lambda a, b: jnp.abs(a.astype(I32) - b.astype(I32)), ("uint8[n]", "uint8[n]"),
        lambda a, b: jnp.abs(b.astype(I32) - a.astype(I32)), BYTES, [2, 100, 1],
    ),
    "arguments of another dtype": (
        lambda a, b: (a - b) ^ b, ("int32[n]", "int32[n]"),
        lambda a, b: (a - b) ^ b, BYTES, [254 ^ 3, 100 ^ 100, 255 ^ 31],
    ),
    "a wide product of matrices": (
        lambda a, b: lax.dot(a, b, preferred_element_type=I32), ("int8[m k]", "int8[k n]"),
        lambda a, b: lax.dot(a.astype(I32), b.astype(I32)), (MATRIX, MATRIX), np.full((2, 2), 20000),
    ),
    "indices of another dtype": (
        lambda x: above(x, jnp.arange(200)), ("int32[n]",),
        lambda x: above(x, jnp.arange(200, dtype=U8).astype(I32)), LARGE, [200, 200],
    ),
    "the same narrow conversion": (
        lambda x: jnp.round(x).astype(I8), ("n",),
        lambda x: jnp.round(x).astype(I8), FLOATS, [127, -128, 5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_the_same_arithmetic_is_a_match(case):
    f, args, program, given, expected = SAME[case]
    pattern = Pattern("p", f, args=args)
    assert len(fuseplan.match(pattern, program)(*given)) == 1
    np.testing.assert_array_equal(patterns.rewrite(program, [pattern])(*given), expected)


@pytest.mark.parametrize(
    ("mine", "theirs", "used"),
    [
        (None, None, 1),
        (None, "default", 1),
        ("highest", "highest", 1),
        (None, "highest", 0),
        ("highest", None, 0),
        ("high", "highest", 0),
    ],
)
def test_a_product_keeps_the_precision_that_the_program_asks_for(mine, theirs, used):
    pattern = Pattern("product", lambda a, b: jnp.dot(a, b, precision=mine), args=("m k", "k n"))
    report = fuseplan.match(pattern, lambda a, b: jnp.dot(a, b, precision=theirs))(ROWS, ROWS.T)
    assert len(report) == used
