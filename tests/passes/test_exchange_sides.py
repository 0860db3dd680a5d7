"""Operands of contractions are exchanged where a transpose then moves no element within a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.passes.exchange_sides import exchange_sides

P, V = jax.ShapeDtypeStruct((2, 3, 16, 24), "float32"), jax.ShapeDtypeStruct((2, 24, 3, 40), "float32")


def shapes(f: Any, *args: Any) -> list[tuple[str, tuple[int, ...]]] | None:
    new = exchange_sides(lower(trace(f, *args)))
    return new and [(n.op, new.graph.values[n.outputs[0]].shape) for n in new.graph.nodes]


def mixed(p: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", p, v)


def test_the_product_of_an_attention():
    assert [op for op, _ in shapes(mixed, P, V)] == ["dot_general", "transpose"]
    assert shapes(mixed, P, V)[0][1] == (2, 3, 16, 40)


def test_a_transpose_of_a_matrix_product_disappears():
    x, y = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 4), "float32")
    assert shapes(lambda x, y: (x @ y).T, x, y) == [("dot_general", (4, 8))]


@pytest.mark.parametrize("more", [lambda y: y, lambda y: y.sum(), lambda y: y.transpose(0, 1, 2, 3) + 1])
def test_a_result_that_is_read_as_it_is_stays(more):
    def f(p: Any, v: Any) -> Any:
        y = jnp.einsum("bhts,bshd->bhdt", p, v)
        return y.transpose(0, 1, 3, 2), more(y)

    assert exchange_sides(lower(trace(f, P, V))) is None


def test_the_results_are_those_of_the_program():
    def f(q: Any, k: Any, v: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", scores, v)

    rng = np.random.default_rng(0)
    args = [rng.standard_normal((2, 33, 3, 16)).astype(np.float32) for _ in range(3)]
    plan = fuseplan.make_plan(f, device="h200")(*args)
    products = [plan.lowered.equations[n.id] for n in plan.graph.nodes if n.op == "dot_general"]
    assert [len(e.out_avals[0].shape) for e in products] == [4, 4]
    assert products[-1].out_avals[0].shape == (2, 3, 33, 16)
    np.testing.assert_allclose(plan.run(*args), f(*args), atol=2e-5)
