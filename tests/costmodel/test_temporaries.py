"""The memory that XLA:CPU allocates for intermediate results: as its compiler counts it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from costmodel.graph import GraphRewriter
from costmodel.loops import fresh_ps
from costmodel.temporaries import LARGE_BYTES, are_new_pages, temporary_bytes
from costmodel.xla_loops import absorbed_nodes
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.targets.calibrate import described_cpu


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def batch_norm(x, w):
    h = x @ w
    return jax.nn.relu((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)).sum(0)


def loss(weights, x, y):
    first, second = weights
    return ((jax.nn.relu(x @ first) @ second - y) ** 2).mean()


WEIGHTS = shaped(256, 1024), shaped(1024, 64)
PROGRAMS = {
    "one product": (batch_norm, (shaped(8192, 128), shaped(128, 512))),
    "two hidden arrays at once": (jax.grad(loss), (WEIGHTS, shaped(4096, 256), shaped(4096, 64))),
    "a transpose of a product": (lambda x: (x - x.mean(0)).T @ (x - x.mean(0)), (shaped(50_000, 100),)),
    "rows that are looked up": (
        lambda table, i, w: (table[i] * w[..., None]).sum(1),
        (shaped(20_000, 64), shaped(3000, 64, dtype="int32"), shaped(3000, 64)),
    ),
    "a call of the library": (lambda x, w: jnp.tanh(x @ w).sum(0), (shaped(4000, 256), shaped(256, 2000))),
    "elementwise alone": (lambda x: jnp.tanh(jnp.sin(x) * 2), (shaped(4096, 4096),)),
    "a product in the memory of a result": (lambda x, w: jnp.tanh(x @ w), (shaped(4096, 9), shaped(9, 4096))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_estimate_is_near_the_compilers_count(name):
    f, args = PROGRAMS[name]
    estimated = temporary_bytes(lower(trace(f, *args)).graph)
    counted = jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert (estimated >= LARGE_BYTES) == (counted >= LARGE_BYTES)
    assert abs(estimated - counted) <= max(counted, estimated) / 3 + 2**21


def test_copies_of_an_operation_change_nothing():
    """Each reader of a tanh computes it again."""

    def f(x, w):
        y = jnp.tanh(x)
        return (y @ w).sum(0), y.max(1) * 2

    graph = lower(trace(f, shaped(4096, 2048), shaped(2048, 64))).graph
    (tanh,) = [node.id for node in graph.nodes if node.op == "tanh"]
    rewriter = GraphRewriter(graph)
    rewriter.add(tanh, 1, lambda v: (v, None))
    for node in graph.nodes:
        copied = set(graph.nodes[tanh].outputs if node.op == "reduce_max" else ())
        rewriter.add(node.id, None, lambda v, copied=copied: (v, 1 if v in copied else None))
    results = [rewriter.ids[v, None] for v in graph.outputs]
    other = rewriter.finished(results)
    assert other.origins
    assert temporary_bytes(other) == temporary_bytes(graph) >= 2**25
    assert are_new_pages(other)
    # The copy has one reader, a sum of the library, which takes it in; the operation has two.
    for g in (graph, other):
        assert [g.nodes[n].op for n in absorbed_nodes(g)] == ["dot_general"]


def test_the_order_of_operations_changes_nothing():
    def one(x, w, v):
        p = x @ w
        e = jnp.tanh(p)
        return e @ v + 1, p @ v

    def other(x, w, v):
        p = x @ w
        q = p @ v
        return jnp.tanh(p) @ v + 1, q

    args = shaped(4096, 64), shaped(64, 1024), shaped(1024, 8)
    counted = jax.jit(one).lower(*args).compile().memory_analysis().temp_size_in_bytes
    for f in (one, other):
        assert temporary_bytes(lower(trace(f, *args)).graph) == counted == 2**25


def test_less_than_the_largest_threshold_is_reused():
    cpu = dataclasses.replace(described_cpu(), fresh_bytes_per_s=10**9)
    for rows, is_new in ((4096, False), (32_768, True)):
        graph = lower(trace(batch_norm, shaped(rows, 128), shaped(128, 512))).graph
        (product,) = [node.id for node in graph.nodes if node.op == "dot_general"]
        assert are_new_pages(graph) == is_new
        assert (fresh_ps(graph, whole_array_spec(graph, (product,)), cpu) > 0) == is_new


def test_new_pages_do_not_depend_on_the_numbers_of_results():
    """Of two results of one size, the one that stays inside of the program takes the operand's memory."""

    def sorted_pair(place):
        def f(x, y):
            pair = jax.lax.sort((x * 2, y), num_keys=1)
            return jnp.tanh(pair[place]) @ y, pair[1 - place]

        return f

    cpu = dataclasses.replace(described_cpu(), fresh_bytes_per_s=10**9)
    found = []
    for place in (0, 1):
        graph = lower(trace(sorted_pair(place), shaped(6_000_000), shaped(6_000_000))).graph
        assert are_new_pages(graph)
        (sort,) = [node.id for node in graph.nodes if node.op == "sort"]
        found.append(fresh_ps(graph, whole_array_spec(graph, (sort,)), cpu))
    assert found[0] == found[1]
