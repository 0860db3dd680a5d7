"""What XLA:CPU computes in one call of its library, and what it writes before: as its compiler does."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from costmodel.axes import unify
from costmodel.graph import OpKind, boundary
from costmodel.kernel import Compiled
from costmodel.roofline import estimate
from costmodel.xla_loops import (
    absorbed_nodes,
    is_call_with_product,
    is_library_call,
    is_written_before,
    library_rows,
    shared_broadcasts,
)
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.legality import possible_prologues, refuse, refuse_call
from fuseplan.targets.calibrate import described_cpu

X = jax.ShapeDtypeStruct((4096, 256), "float32")
FEW = jax.ShapeDtypeStruct((4095, 256), "float32")


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def kernels_of(f, *args):
    """The fusions, and other loops, of the program that XLA compiles."""
    text = jax.jit(f).lower(*args).compile().as_text()
    entry = text[text.index("ENTRY") :]
    return len(re.findall(r" (?:fusion|reduce|reduce-window|convert|copy|transpose)\(", entry))


CALLS = {
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, -1),
    "norm": norm,
    "norm of a softmax": lambda x: norm(jax.nn.softmax(x, -1)),
    "gradient of a softmax": lambda x: jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](jnp.tanh(x))[0],
    "rms": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "variance": lambda x: x.var(-1),
    "two sums": lambda x: x.sum(-1) * (x * x).max(-1),
}
"""Each is one call."""

SEVERAL = {
    "columns": lambda x: jax.nn.softmax(x, 0),
    "all": lambda x: x - x.mean(),
    "a selection": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -9.0), -1),
    "a transpose": lambda x: jax.nn.softmax(x.T, -1),
    "a slice": lambda x: jnp.exp(x[:, 1:]).sum(-1),
    "a product of rows": lambda x: jnp.tanh(x).prod(-1),
    "integers": lambda x: (x > 0).sum(-1),
}
"""None is."""


@pytest.mark.parametrize("name", [*CALLS, *SEVERAL])
def test_calls_are_those_of_the_compiler(name):
    f = {**CALLS, **SEVERAL}[name]
    graph = lower(trace(f, X)).graph
    is_call = is_library_call(graph, range(len(graph.nodes)))
    assert is_call == (name in CALLS)
    assert (kernels_of(f, X) == 1) == is_call


def test_of_few_rows_each_reduction_is_a_call():
    graph = lower(trace(CALLS["softmax"], FEW)).graph
    assert not is_library_call(graph, range(len(graph.nodes)))
    assert kernels_of(CALLS["softmax"], FEW) > 1


WRITTEN = {
    "select": (True, lambda x: jnp.where(x > 0, x, 0.5).sum(0)),
    "transpose": (True, lambda x: jnp.exp(x.T).sum(0)),
    "reverse": (True, lambda x: (x[::-1] * 2).max(0)),
    "arithmetic": (False, lambda x: (jnp.exp(x) * 2 - 1).sum(0)),
    "pad": (False, lambda x: jax.lax.pad(x, 0.0, [(1, 1, 0), (0, 0, 0)]).sum(0)),
    "anything before a product": (True, lambda x: (x * 2).prod(0)),
    "anything before positions": (False, lambda x: jnp.where(x > 0, x, 0.5).argmax(0)),
    "a short product": (False, lambda x: (x.reshape(-1, 16) * 2).prod(1)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_before_a_reduction(name):
    is_written, f = WRITTEN[name]
    graph = lower(trace(f, X)).graph
    *before, reduction = [n for n in graph.nodes if not n.bitcast]
    assert any(is_written_before(graph, reduction, node) for node in before) == is_written
    assert (kernels_of(f, X) > 1) == is_written


@pytest.mark.parametrize(
    ("f", "rows"),
    [
        (lambda x: x.sum(-1), 4096),
        (lambda x: x.sum(), 1),
        (lambda x: x.sum(0), 4096),
        (lambda x: x.reshape(-1, 4, 4).sum((1, 2)), 4096 * 16),
        (lambda x: x.reshape(-1, 4).max(-1), 4096 * 64),
        (lambda x: (x > 0).sum(-1), 0),
        (lambda x: x.prod(-1), 0),
        (lambda x: x.argmax(-1), 0),
    ],
)
def test_rows_of_a_library(f, rows):
    graph = lower(trace(f, X)).graph
    assert sum(library_rows(graph, n) for n in graph.nodes if n.kind == OpKind.REDUCTION) == rows


def test_each_kernel_has_one_result():
    """XLA:CPU merges no kernels that have different results, and computes what both need for each."""
    several = {
        "of one array": lambda x: (x + 1, x * 2),
        "of one value": lambda x: ((y := jnp.exp(x)) * 2, y + x),
        "one of the other": lambda x: (y := jnp.exp(x), y * 2),
        "two sums": lambda x: ((x * 2).sum(0), (x + 1).sum(0)),
    }
    for f in several.values():
        graph, cpu = lower(trace(f, X)).graph, described_cpu()
        every = tuple(range(len(graph.nodes)))
        if refuse_call(graph, "xla", every, boundary(graph, every)) is None:
            cost = estimate(graph, whole_array_spec(graph, every), cpu)
            assert cost.launch_ps == kernels_of(f, X) * cpu.launch_ps
        else:
            assert kernels_of(f, X) > len(graph.outputs)


def test_each_of_several_results_is_computed_for_itself():
    """What two results need is evaluated for both, and a result that another needs is read."""
    cpu = described_cpu()
    shared = lower(trace(lambda x: ((y := x * 2) + 1, y - 3), X)).graph
    apart = lower(trace(lambda x: (x * 2 + 1, x * 3 - 3), X)).graph
    costs = [estimate(g, whole_array_spec(g, tuple(range(len(g.nodes)))), cpu) for g in (shared, apart)]
    assert costs[0] == costs[1]
    chained = lower(trace(lambda x: (y := x * 2, y + 1), X)).graph
    cost = estimate(chained, whole_array_spec(chained, (0, 1)), cpu)
    assert cost.flops.vector == 2 * X.size
    assert cost.hbm_bytes == 4 * 4 * X.size


def test_what_a_library_takes_into_its_call():
    """XLA writes a lookup, and squares it in the call that sums it: the two are no loop without the sum."""

    def f(table, i):
        return (table[i] ** 2).sum(-1)

    args = jax.ShapeDtypeStruct((5000, 64), "float32"), jax.ShapeDtypeStruct((4096,), "int32")
    graph = lower(trace(f, *args)).graph
    at = {node.op: node.id for node in graph.nodes}
    power, gather, total = at["integer_pow"], at["gather"], at["reduce_sum"]
    assert absorbed_nodes(graph) == {power}
    for nodes, is_refused in (((gather, power), True), ((power, total), False)):
        assert (refuse_call(graph, "xla", nodes, boundary(graph, nodes)) is not None) == is_refused
    text = jax.jit(f).lower(*args).compile().as_text()
    call = next(part for part in text.split("\n\n") if " reduce(" in part)
    assert " multiply(" in call
    assert " gather(" not in call


def squares(x, y):
    return (x[:, None] - y[None]) ** 2


POINTS = jax.ShapeDtypeStruct((2000,), "float32")
SHARED = {
    "in one call": (0, lambda x, y, z: (squares(x, y) * jnp.exp(-squares(x, y))).sum()),
    "by two calls": (1, lambda x, y, z: jnp.exp(-squares(x, y)).sum() * jnp.abs(squares(x, y) - 1).sum()),
    "a broadcast": (1, lambda x, y, z: jnp.exp(-squares(x, y)).sum() + jnp.abs(squares(x, z)).sum()),
    "nothing": (0, lambda x, y, z: jnp.exp(-squares(x, y)).sum() + jnp.abs(squares(y, z)).sum()),
}
"""The arrays that two operations before sums need, and how many of them are written."""


@pytest.mark.parametrize("name", SHARED)
def test_what_two_calls_need_is_written(name):
    written, f = SHARED[name]
    compiled = jax.jit(f).lower(POINTS, POINTS, POINTS).compile()
    assert compiled.memory_analysis().temp_size_in_bytes // (2000 * 2000 * 4) == written
    graph = lower(trace(f, POINTS, POINTS, POINTS)).graph
    taken = absorbed_nodes(graph)
    large = [n for n in graph.nodes if graph.values[n.outputs[0]].size == 2000 * 2000]
    ends = [n for n in large if n.id not in taken and any(r in taken for r in graph.consumers[n.outputs[0]])]
    assert len(ends) == (written if name == "by two calls" else 0)
    shared = {calls for own in shared_broadcasts(graph).values() for _, calls in own}
    assert shared == ({2} if name == "a broadcast" else set())


def test_a_broadcast_that_two_calls_share_costs_memory():
    """Each call reads it, and pays half of writing it."""
    cpu = described_cpu()
    apart, shared = (
        lower(trace(SHARED[n][1], POINTS, POINTS, POINTS)).graph for n in ("nothing", "a broadcast")
    )

    def cost_of(graph):
        first = next(n for n in graph.nodes if n.op == "reduce_sum")
        nodes = tuple(sorted({first.id, *(n for n in absorbed_nodes(graph) if n < first.id)}))
        return estimate(graph, whole_array_spec(graph, nodes), cpu)

    more = cost_of(shared).memory_ps - cost_of(apart).memory_ps
    assert more == pytest.approx(1.5 * 4 * 2000 * 2000 / cpu.hbm_bytes_per_s * 1e12, rel=1e-3)


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, WEIGHTS, BACK = shaped(512, 64), shaped(64, 256), shaped(256, 32)
PRODUCTS = {
    "a sum of rows": (1, lambda x, w: (x @ w).sum(1), (ROWS, WEIGHTS)),
    "after a function": (1, lambda x, w: jnp.tanh(x @ w).max(0), (ROWS, WEIGHTS)),
    "two, one after the other": (2, lambda x, w, v: (jnp.tanh(x @ w) @ v).sum(), (ROWS, WEIGHTS, BACK)),
    "of a transposed right side": (1, lambda x: (x @ x.T).sum(1), (ROWS,)),
    "of a transposed left side": (0, lambda x: (x.T @ x).sum(1), (ROWS,)),
    "with a vector": (0, lambda x, v: (x @ v).sum(), (shaped(5000, 64), shaped(64))),
    "of a batch": (
        1,
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b).sum(1),
        (shaped(4, 99, 64),) * 1 + (shaped(4, 64, 99),),
    ),
    "that two read": (0, lambda x, w: ((p := x @ w).sum(1), p.max(1)), (ROWS, WEIGHTS)),
    "that is a result": (0, lambda x, w: (p := x @ w, p.sum(1)), (ROWS, WEIGHTS)),
    "in half precision": (
        0,
        lambda x, w: (x @ w).sum(1),
        (shaped(512, 64, dtype="float16"), shaped(64, 256, dtype="float16")),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_a_library_takes_into_its_call(name):
    count, f, args = PRODUCTS[name]
    graph = lower(trace(f, *args)).graph
    taken = [graph.nodes[n].op for n in absorbed_nodes(graph)]
    assert taken.count("dot_general") == count
    text = jax.jit(f).lower(*args).compile().as_text()
    calls = [part for part in text.split("\n\n") if " reduce(" in part and "ENTRY" not in part]
    assert sum(part.count(" dot(") for part in calls) == count


def test_a_call_with_products_runs_one_operation_after_the_other():
    """Each into memory of its own, where a loop of XLA keeps the results in registers."""
    graph = lower(trace(lambda x, w: jnp.tanh(x @ w).sum(1), shaped(4096, 64), shaped(64, 4096))).graph
    cpu = described_cpu()
    every = tuple(n.id for n in graph.nodes)
    alone = [estimate(graph, whole_array_spec(graph, (n,)), cpu) for n in every]
    call = estimate(graph, whole_array_spec(graph, every), cpu)
    for part in ("fresh_ps", "matrix_ps", "memory_ps", "transcendental_ps"):
        assert getattr(call, part) == sum(getattr(cost, part) for cost in alone)
    assert call.fresh_ps > 0
    assert call.launch_ps == cpu.launch_ps
    assert call.fresh_ps + call.matrix_ps < call.time_ps <= sum(cost.time_ps for cost in alone)


SHORT = jax.ShapeDtypeStruct((100, 30), "float32")
GOES_ON = {
    "arithmetic": (True, lambda x: jnp.sqrt((x * x).sum(-1)) * 2 + 1),
    "comparison": (True, lambda x: x.max(-1) > 0),
    "integers": (True, lambda x: (x > 0).sum(-1) * 3),
    "broadcast back": (False, lambda x: x - x.max(-1, keepdims=True)),
    "positions": (False, lambda x: x.argmax(-1) + 1),
    "long rows": (False, lambda x: x.T.sum(-1) * 2),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_what_is_computed_in_the_loop_of_short_rows(name):
    goes_on, f = GOES_ON[name]
    graph = lower(trace(f, SHORT)).graph
    every = tuple(range(len(graph.nodes)))
    refused = refuse(graph, "xla", every, lambda nodes: unify(graph, nodes), possible_prologues(graph))
    assert (refused is None) == goes_on
    assert (kernels_of(f, SHORT) == 1) == goes_on


def test_a_product_that_is_read_after_a_sum_is_in_its_call():
    """Its intermediates are written to memory, each by itself, as the compiled program's time shows, too."""

    def f(x, y):
        squares = (x * x).sum(-1)[:, None] + (y * y).sum(-1)
        return jnp.exp(2 * (x @ y.T) - squares)

    points = jax.ShapeDtypeStruct((5000, 3), "float32")
    text = jax.jit(f).lower(points, points).compile().as_text()
    call = next(part for part in text.split("\n\n") if " exponential(" in part)
    assert " dot(" in call
    assert " reduce(" in call

    graph, cpu = lower(trace(f, points, points)).graph, described_cpu()
    every = tuple(range(len(graph.nodes)))
    assert is_call_with_product(graph, every)
    compiled = replace(whole_array_spec(graph, every), compiled=Compiled(1, 0, 4 * 5000**2))
    whole = estimate(graph, compiled, cpu)
    alone = [estimate(graph, whole_array_spec(graph, (n,)), cpu) for n in every]
    assert whole.memory_ps == sum(cost.memory_ps for cost in alone)
    large = [n for n in graph.nodes if graph.values[n.outputs[0]].size == 5000**2 and not n.bitcast]
    assert whole.hbm_write_bytes >= len(large) * 4 * 5000**2
    without = tuple(n.id for n in graph.nodes if n.op != "dot_general")
    assert not is_call_with_product(graph, without)
