"""A limit of memory holds for the program that XLA compiles for a CPU, and not only for the plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan import Constraints
from fuseplan.support.errors import MemoryLimitError
from tests.helpers.cpus import SERVER_CPU

X = jnp.arange(1 << 14, dtype=jnp.float32)
SCALES = (1.0, 2.0, 3.0, 4.0)


def orders(x):
    """XLA sorts in memory of their own what a plan sorts one after the other."""
    return sum(jnp.sort(x * scale)[5] for scale in SCALES)


def limited(most: int):
    return fuseplan.jit(orders, device=SERVER_CPU, constraints=Constraints(max_peak_bytes=most))


def test_what_xla_allocates_is_counted():
    counted = jax.jit(orders).lower(X).compile().memory_analysis().temp_size_in_bytes
    most = counted * 3 // 4
    plan = fuseplan.make_plan(orders, device=SERVER_CPU, constraints=Constraints(max_peak_bytes=most))(X)
    assert plan.peak_bytes <= most < counted
    with pytest.raises(MemoryLimitError, match=f"at most {most:,} bytes") as error:
        limited(most)(X)
    assert error.value.smallest_bytes == counted


def test_a_program_within_the_limit_runs():
    counted = jax.jit(orders).lower(X).compile().memory_analysis().temp_size_in_bytes
    compiled = limited(counted).lower(X).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= counted
    assert limited(counted)(X) == orders(X)


def test_chains_wait_for_each_other_under_a_limit():
    """XLA alone gives all sorts memory of their own."""
    x = jax.ShapeDtypeStruct((1 << 22,), "float32")

    def sums(x):
        return [jnp.sort(x * scale)[::2].sum() for scale in (*SCALES, 5.0, 6.0, 7.0, 8.0)]

    def count(f):
        return f.lower(x).compile().memory_analysis().temp_size_in_bytes

    most = count(jax.jit(sums)) * 3 // 4
    constraints = Constraints(max_peak_bytes=most)
    assert count(fuseplan.jit(sums, device=SERVER_CPU, constraints=constraints)) <= most
