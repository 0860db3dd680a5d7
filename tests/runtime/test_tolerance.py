"""Two results are compared as the tolerances say, and a difference is described."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuseplan import MismatchError
from fuseplan.runtime.tolerance import TOLERANCES, check_results, largest_difference, tolerance


def test_equal_pytrees_pass():
    tree = {"a": jnp.ones(3), "b": [jnp.arange(2), True, 1.5, None], "key": jax.random.key(0)}
    check_results("f", tree, tree)
    check_results("f", (), ())
    check_results("f", jnp.zeros((0, 3)), jnp.zeros((0, 3)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_rounding_passes_and_more_does_not(dtype):
    rule, eps = tolerance(jnp.dtype(dtype)), float(jnp.finfo(dtype).eps)
    b = jnp.ones(16, dtype)
    assert 2 * rule.epsilons * eps <= 8 or dtype == "float8_e4m3fn"
    check_results("f", (b.astype("float32") * (1 + eps)).astype(dtype), b)
    beyond = b.at[3].set(1 + 4 * rule.epsilons * eps)
    with pytest.raises(MismatchError, match=r"1 of 16 elements beyond .* worst at \[3\]"):
        check_results("f", beyond, b)


def test_a_cancelled_sum_is_measured_by_its_terms():
    b = jnp.array([1e-9, 1.0, -1.0, 1.0], "float32")
    check_results("f", b.at[0].set(1e-6), b)
    with pytest.raises(MismatchError, match=r"\[0\]"):
        check_results("f", b.at[0].set(1e-2), b)


def test_a_block_of_zeros_is_found():
    b = jax.random.normal(jax.random.key(0), (64, 64))
    with pytest.raises(MismatchError, match="1024 of 4096 elements"):
        check_results("f", b.at[:, 48:].set(0.0), b)


def test_large_values_do_not_overflow_the_scale():
    b = jnp.array([3e38, 1.0], "float32")
    with pytest.raises(MismatchError):
        check_results("f", b.at[0].set(1e38), b)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0, np.nan], [1.0, 2.0], r"finite in one only, first at \[1\]: expected 2.0, got nan .*got 1;"),
        ([1.0, np.inf], [1.0, -np.inf], r"infinite: expected 1, got 1"),
        ([1.0, 2.0], [np.nan, 2.0], r"NaN: expected 1, got 0"),
    ],
)
def test_nan_and_infinity_must_be_where_they_were(a, b, message):
    with pytest.raises(MismatchError, match=message):
        check_results("f", jnp.array(a), jnp.array(b))


def test_the_same_nan_and_infinity_pass():
    a = jnp.array([np.nan, np.inf, -np.inf, 1.0])
    check_results("f", a, a)
    check_results("f", a[:3], a[:3])


def test_integers_and_keys_must_be_equal():
    with pytest.raises(MismatchError, match=r"int32\[3\]: 1 of 3 .* first at \[2\]: expected 2, got 5"):
        check_results("f", jnp.array([0, 1, 5]), jnp.arange(3))
    with pytest.raises(MismatchError):
        check_results("f", jax.random.key(1), jax.random.key(0))
    with pytest.raises(MismatchError, match="bool"):
        check_results("f", jnp.array([True]), jnp.array([False]))


def test_structure_shape_dtype_and_path_are_named():
    with pytest.raises(MismatchError, match="structure"):
        check_results("f", (jnp.ones(2),), [jnp.ones(2)])
    with pytest.raises(MismatchError, match=r"f: 1 of 1 .*\n  \['w'\]\[1\]: expected float32\[3\]"):
        check_results("f", {"w": [None, jnp.ones(2)]}, {"w": [None, jnp.ones(3)]})
    with pytest.raises(MismatchError, match=r"the result: expected float32\[2\], got float16\[2\]"):
        check_results("f", jnp.ones(2, "float16"), jnp.ones(2))


def test_many_differences_are_counted():
    with pytest.raises(MismatchError, match=r"12 of 12(.|\n)*… and 4 more"):
        check_results("f", [jnp.ones(1)] * 12, [jnp.zeros(1)] * 12)


def test_complex_parts_are_compared():
    b = jnp.ones(3, "complex64")
    check_results("f", b, b)
    with pytest.raises(MismatchError):
        check_results("f", b + 1j, b)


def test_every_tolerance_says_why():
    assert all(rule.because and rule.epsilons > 0 for rule in TOLERANCES.values())
    assert tolerance(jnp.dtype("int32")) is None


def test_a_result_that_is_all_rounding_has_no_difference():
    reference = [jnp.array([3.0, 4.0]), jnp.array([1e-13])]
    assert largest_difference([reference[0], jnp.array([7e-13])], reference)[1] < 1e-6


def test_largest_difference():
    assert largest_difference([jnp.array([3.0, 4.0]), 1], [jnp.array([3.0, 4.5]), 1]) == pytest.approx(
        (0.5, 0.5 / np.sqrt((9 + 20.25) / 2))
    )
    assert largest_difference(jnp.zeros(2), jnp.zeros(2)) == (0.0, 0.0)
