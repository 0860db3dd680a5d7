"""Regions: what large intermediates tie together; and what is computed again for distant readers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import Literal, run_equations, trace
from fuseplan.passes.recompute_large import recompute
from fuseplan.schedule.nests.regions import regions
from tests.helpers.nest_cases import normal

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

BIG = 256


def region_ops(f, *args, min_bytes):
    """The operations of each region."""
    graph = lower(trace(f, *args)).graph
    return [[graph.nodes[n].op for n in nodes] for nodes in regions(graph, min_bytes)], graph


def attention(q, k, v):
    s = jnp.where(jnp.arange(BIG)[:, None] >= jnp.arange(BIG), q @ k.T, -jnp.inf)
    return jax.nn.softmax(s, -1) @ v


def block(x, wq, wk, wv, w1, w2):
    y = attention(x @ wq, x @ wk, x @ wv)
    return jnp.sin(jax.nn.gelu(y @ w1) @ w2 @ wq)


X = np.float32(normal(BIG, 8))
BLOCK = (
    X,
    *(np.float32(normal(8, 8, seed=i)) for i in range(3)),
    *map(np.float32, (normal(8, BIG), normal(BIG, 8))),
)


def test_attention():
    found, graph = region_ops(attention, X, X + 1, X - 1, min_bytes=BIG * BIG * 4)
    assert [op for op in found[0] if op == "dot_general"] == ["dot_general"] * 2
    assert "iota" in found[0]  # each tile makes its own mask
    assert len(found[0]) == len([n for n in graph.nodes if n.op != "transpose"])


def test_layers_are_regions_of_their_own():
    found, _ = region_ops(block, *BLOCK, min_bytes=BIG * BIG * 4)
    assert [ops.count("dot_general") for ops in found] == [2, 2]
    assert ["reduce_max" in ops for ops in found] == [True, False]


def test_broadcast_differences():
    """Summands are three times as large as what is computed from their sum: all are tied."""

    def f(x, y, b):
        d2 = ((x[:, None] - y[None]) ** 2).sum(-1)
        return (jnp.exp(-d2) + jnp.sqrt(d2)) @ b

    x = np.float32(normal(BIG, 3))
    found, _ = region_ops(f, x, x + 1, x[:, 0], min_bytes=BIG * BIG * 4)
    assert any({"sub", "reduce_sum", "exp", "sqrt", "dot_general"} <= set(ops) for ops in found)


def test_what_reduces_nothing_is_no_region():
    found, _ = region_ops(lambda x: jnp.sin(x[:, None] * x) + 1, X[:, 0], min_bytes=BIG * BIG * 4)
    assert not found


def evaluated(lowered, args):
    values = dict(zip(lowered.graph.inputs, (*lowered.consts, *args), strict=True))
    run_equations(lowered.equations, values)
    return [v.val if isinstance(v, Literal) else values[v] for v in lowered.outputs]


def test_recompute():
    """Results are equal, and no large value crosses from the forward to the backward pass."""

    def step(*args):
        return jax.grad(lambda *a: (block(*a) ** 2).sum(), (1, 4))(*args)

    lowered = lower(trace(step, *BLOCK))
    again = recompute(lowered, BIG * BIG * 4)
    assert again is not None
    for x, y in zip(evaluated(again, BLOCK), evaluated(lowered, BLOCK), strict=True):
        np.testing.assert_allclose(x, y, 1e-5, 1e-6)
    assert most_alive_bytes(again.graph) < most_alive_bytes(lowered.graph)
    assert most_alive_bytes(again.graph) <= 8 * BIG * 8 * 4


def most_alive_bytes(graph):
    """Bytes made before and read after the loss: what waits from forward to backward."""
    loss = max(n.id for n in graph.nodes if n.op == "sin")
    return sum(
        v.nbytes
        for v in graph.values
        if 0 <= v.producer <= loss and any(c > loss for c in graph.consumers[v.id])
    )


def test_nothing_to_recompute():
    assert recompute(lower(trace(attention, X, X, X)), BIG * BIG * 4) is None


def test_layernorm_is_left_to_xla():
    """Nothing inside is larger than what is read and written: a nest would gain nothing."""
    layernorm = jax.nn.standardize
    assert region_ops(layernorm, np.float32(normal(BIG, BIG)), min_bytes=BIG * BIG * 4)[0] == []


def test_a_copy_may_read_what_is_made_after_other_readers():
    def f(x, y, w, big):
        rows = jnp.exp(x)
        scaled = rows * (big @ rows.sum(1))[:, None]
        late = jnp.tanh(w)  # made after `rows`' readers begin, and read by another copy
        return (scaled + jnp.exp(y * late[:, None])).sum(1)

    args = tuple(np.float32(normal(*shape, seed=i)) for i, shape in enumerate([(BIG, BIG)] * 2 + [(BIG,)]))
    args += (np.float32(normal(BIG, BIG, seed=9)),)
    lowered = lower(trace(f, *args))
    again = recompute(lowered, BIG * BIG * 4)
    assert again is not None
    np.testing.assert_allclose(evaluated(again, args)[0], f(*args), rtol=1e-5)
