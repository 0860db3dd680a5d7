"""Derivatives of fused functions: JAX's own numbers in every mode and inside every transformation,
by a pass back that is planned together with the pass forward."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core

import fuseplan
from fuseplan.runtime.min_cut import sides
from fuseplan.targets.calibrate import described_cpu
from tests.helpers.arrays import normal, ramp
from tests.helpers.graphs import GraphBuilder
from tests.helpers.quickly import on_both

pytestmark = pytest.mark.usefixtures("compiled_quickly")

J = functools.partial(fuseplan.jit, device="test", planner="greedy")
X = ramp(-1.5, 2, 2, 3)
W = ramp(-1, 1, 3, 3)


def layer(x, w):
    return jnp.tanh(x @ w) * x


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.1, 0.1),))


@jax.custom_jvp
def kinked(x):
    return jnp.maximum(x, 0)


kinked.defjvp(lambda primals, tangents: (kinked(*primals), jnp.where(primals[0] > 0, 3.0, 0.0) * tangents[0]))


@jax.custom_batching.custom_vmap
def by_rule(x):
    return jnp.sin(x)


by_rule.def_vmap(lambda n, batched, x: (3 * jnp.sin(x), True))


@jax.custom_vjp
def tripled(x):
    return by_rule(x)


tripled.defvjp(lambda x: (by_rule(x), by_rule(2 * x)), lambda y, g: (g * y * by_rule(g),))


def total(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


def twice(h):
    return lambda x, w: jax.grad(lambda x: (jax.grad(total(h))(x, w) ** 2).sum())(x)


def layers(h):
    def f(x, w):
        return lax.scan(lambda c, w: (h(c, w), c.sum()), x, jnp.stack([w, 2 * w]))[0]

    return jax.grad(total(f), (0, 1))


def branches(h):
    f = lambda x, w: lax.cond(x[0, 0] < 0, lambda: h(x, w), lambda: x)  # noqa: E731
    return jax.grad(total(f), (0, 1))


def in_a_loop(h):
    return lambda x, w: lax.fori_loop(0, 2, lambda _, x: x - 0.1 * jax.grad(total(h))(x, w), x)


def aux(h):
    f = lambda x, w: (lambda y: ((y * y).sum(), (y, jnp.log(y - y))))(h(x, w))  # noqa: E731
    return jax.grad(f, (0, 1), has_aux=True)


MODES = {
    "grad": lambda h: jax.grad(total(h), (0, 1)),
    "value_and_grad": lambda h: jax.jit(jax.value_and_grad(total(h), 1)),
    "jvp": lambda h: lambda x, w: jax.jvp(h, (x, w), (w[:2], x[:1] * w)),
    "linearize": lambda h: lambda x, w: jax.linearize(h, x, w)[1](x + 1, w),
    "jacfwd": lambda h: jax.jacfwd(h, 1),
    "jacrev": lambda h: jax.jacrev(h, (0, 1)),
    "hessian": lambda h: jax.hessian(total(h)),
    "reverse over reverse": twice,
    "reverse over forward": lambda h: jax.grad(lambda x, w: jax.jvp(total(h), (x, w), (x, w))[1]),
    "third": lambda h: jax.grad(lambda x, w: twice(h)(x, w).sum()),
    "scan": layers,
    "cond": branches,
    "in a loop": in_a_loop,
    "checkpoint": lambda h: jax.grad(total(jax.checkpoint(h)), (0, 1)),
    "checkpoint of two": lambda h: jax.grad(total(jax.checkpoint(lambda x, w: h(h(x, w), w))), (0, 1)),
    "grad of vmap": lambda h: jax.grad(total(jax.vmap(h, (0, None))), (0, 1)),
    "vmap of grad": lambda h: jax.vmap(jax.grad(total(h), (0, 1)), (0, None)),
    "vmap of vmap": lambda h: (
        lambda x, w: jax.vmap(jax.vmap(jax.value_and_grad(total(h)), (0, None)), (None, 1), out_axes=1)(
            x, jnp.stack([w, 2 * w], 1)
        )
    ),
    "vmap of jvp": lambda h: jax.vmap(lambda x, w: jax.jvp(h, (x, w), (x, w)), (0, None)),
    "vmap of hessian": lambda h: jax.vmap(jax.hessian(total(h), 1), (0, None)),
    "auxiliary": aux,
}


@pytest.mark.parametrize("mode", MODES)
def test_numbers_are_those_of_jax(mode):
    got = MODES[mode](J(layer))(X, W)
    want = MODES[mode](jax.jit(layer))(X, W)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


FUNCTIONS = {
    "integers": lambda x, n: (x * n).sum() + n.sum(),
    "custom_vjp": lambda x, n: (clipped(x) * 5 * n).sum(),
    "custom_jvp": lambda x, n: (kinked(x) * n).sum(),
    "checkpoint": lambda x, n: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y * n)))(x).sum(),
    "own batching": lambda x, n: (tripled(x) * n).sum(),
    "scan": lambda x, n: lax.scan(lambda c, y: (c * jnp.cos(y), c), n.astype(x.dtype).sum(), x.ravel())[0],
    "stopped": lambda x, n: (lax.stop_gradient(x * n) * x).sum(),
    "identity": lambda x, n: x[0, 0],
    "constant": lambda x, n: jnp.float32(3.0) + 0 * n.sum(),
    "guarded": lambda x, n: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0).sum(),
}


@pytest.mark.parametrize("outer", on_both(["grad", "second", "vmap"], ["second"]))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_rules_at_every_order(name, outer):
    transform = {
        "grad": lambda f: jax.value_and_grad(f),
        "second": lambda f: jax.grad(lambda x, n: (jax.grad(f)(x, n) ** 2).sum()),
        "vmap": lambda f: jax.vmap(jax.grad(f), (0, None)),
    }[outer]
    if name == "own batching" and outer == "second":
        pytest.skip("JAX has no derivative of custom_vmap")
    f, n = FUNCTIONS[name], jnp.arange(1, 4)
    x = jnp.stack([X, -X]) if outer == "vmap" else X
    got, want = transform(J(f))(x, n), transform(jax.jit(f))(x, n)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def attention(q, k, v):
    scores = jnp.einsum("qd,kd->qk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -1e30)
    return jax.nn.softmax(scores) @ v


CPU = described_cpu()
QKV = [normal(2048, 16, seed=i) for i in range(3)]
SCORES = 2048 * 2048 * 4
N_ROWS = 2048 * 4


def fused_equations(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "fused":
            yield eqn
        else:
            yield from (e for inner in jex_core.jaxprs_in_params(eqn.params) for e in fused_equations(inner))


@pytest.mark.slow
def test_the_pass_back_of_attention_keeps_statistics_of_rows():
    fast = fuseplan.jit(attention, device=CPU)
    passes = fast.plan_vjp(*QKV)
    assert passes.plan.status == "OPTIMAL"
    assert passes.plan.recomputed
    assert passes.kept_bytes == 2 * N_ROWS  # of the softmax, the maximum and the sum
    for part in (passes.forward, passes.back):
        assert "loops" in {k.spec.backend for k in part.kernels}
    compiled = jax.jit(jax.grad(total(fast), (0, 1, 2))).lower(*QKV).compile()
    plain = jax.jit(jax.grad(total(attention), (0, 1, 2))).lower(*QKV).compile()
    assert plain.memory_analysis().temp_size_in_bytes > 2 * SCORES
    assert compiled.memory_analysis().temp_size_in_bytes < SCORES
    for got, want in zip(compiled(*QKV), plain(*QKV), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_what_is_kept_is_what_the_plan_says():
    x = [jnp.ones((256, 256)), jnp.ones((256, 256))]
    f = lambda x, w: jnp.tanh(jnp.exp(x) @ w)  # noqa: E731
    fast = fuseplan.jit(f, device="test")
    passes = fast.plan_vjp(*x)
    assert passes.kept_bytes == sum(passes.plan.graph.values[v].nbytes for v in passes.kept)
    jaxpr = jax.make_jaxpr(lambda *x: jax.vjp(fast, *x)[1](x[0]))(*x).jaxpr
    forward, back = fused_equations(jaxpr)
    assert len(forward.outvars) == 1 + len(passes.kept)
    assert len(back.invars) == 2 + 1 + len(passes.hints)
    # Each kernel on its side, and none on both; but for what stands between.
    nodes = [n for part in (passes.forward, passes.back) for k in part.kernels for n in k.spec.nodes]
    assert len(nodes) == len(set(nodes)) == len(passes.plan.graph.nodes) - 1


def test_what_nobody_reads_is_not_kept():
    fast = J(lambda x: jnp.tanh(jnp.exp(x) @ x))
    f = jax.checkpoint(lambda x: fast(fast(x)))
    closed = jax.make_jaxpr(jax.vjp, static_argnums=0)(f, jnp.ones((8, 8)))
    assert [len(eqn.outvars) for eqn in fused_equations(closed.jaxpr)][:2] == [1, 1]


def test_free_kernels_go_where_least_is_kept():
    """Against all ways to place them."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        graph, kernels, wait, results = two_passes(rng)
        plan = types.SimpleNamespace(graph=graph, kernels=kernels)
        forward, back = sides(plan, wait, results)
        names = {k.spec.nodes[0] for k in forward}
        assert names | {k.spec.nodes[0] for k in back} == set(range(len(graph.nodes))) - {wait}
        assert kept_bytes(graph, names, wait, results) == least_kept(graph, wait, results)


def two_passes(rng):
    """A random program, an operation a kernel, and which values are results before ``wait``."""
    b = GraphBuilder()
    values = [b.input((4,)), b.input((8,))]
    n, wait = 9, 4
    for node in range(n):
        reads = rng.choice(len(values), size=min(2, len(values)), replace=False)
        reads = [values[i] for i in reads]
        if node == wait:
            reads = [values[-1]]
        if node == n - 1:
            reads = [values[2 + wait], values[-1]]
        values.append(b.opaque(*reads, shape=(int(rng.integers(1, 9)),)))
    graph = b.build(values[1 + wait], values[-1])
    spec = lambda node: types.SimpleNamespace(  # noqa: E731
        nodes=(node.id,),
        reads=[types.SimpleNamespace(value=v) for v in node.inputs],
        writes=[types.SimpleNamespace(value=v) for v in node.outputs],
    )
    kernels = [types.SimpleNamespace(spec=spec(node)) for node in graph.nodes]
    return graph, kernels, wait, {values[1 + wait]}


def kept_bytes(graph, forward, wait, results):
    read = {v for node in graph.nodes if node.id not in forward and node.id != wait for v in node.inputs}
    made = {v for n in forward for v in graph.nodes[n].outputs}
    return sum(graph.values[v].nbytes for v in (read & made) - results)


def least_kept(graph, wait, results):
    """Over every legal set of operations before ``wait``."""
    n = len(graph.nodes)
    makers = [{graph.values[v].producer for v in node.inputs} - {-1} for node in graph.nodes]
    must = makers[wait] | {graph.values[v].producer for v in results}
    best = None
    for bits in range(1 << n):
        before = {k for k in range(n) if bits >> k & 1}
        if wait in before or not must <= before or any(not makers[k] <= before for k in before):
            continue
        kept = kept_bytes(graph, before, wait, results)
        best = kept if best is None else min(best, kept)
    return best


def test_constraints_of_a_function_hold_for_its_derivative_by_name():
    limits = fuseplan.Constraints(never_fuse=[("exp", "tanh"), "n0"], must_fuse=[("exp", "mul")])
    f = lambda x: jnp.tanh(jnp.exp(x) * 2)  # noqa: E731
    fast = fuseplan.jit(f, device="test", constraints=limits)
    x = jnp.linspace(-3.0, -1.0, 64 * 64).reshape(
        64, 64
    )  # where tanh has a slope: 1 - tanh**2 cancels near one
    np.testing.assert_allclose(jax.grad(total(fast))(x), jax.grad(total(f))(x), rtol=1e-5)
    plan = fast.plan_vjp(x).plan
    for kernel in plan.kernels:
        assert not {"exp", "tanh"} <= {plan.graph.nodes[n].op for n in kernel.spec.nodes}


def test_no_reverse_mode_is_jax_own_error():
    f = lambda x: lax.while_loop(lambda c: c[0].sum() < 9, lambda c: (c[0] * 2, c[1] + 1), (x, 0))[0]  # noqa: E731
    x = jnp.ones(3)
    np.testing.assert_array_equal(jax.jvp(J(f), (x,), (x,))[1], jax.jvp(f, (x,), (x,))[1])
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: J(f)(x).sum())(x)
    assert J(f).plan_vjp(x) is None


def test_a_plan_of_both_passes_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("FUSEPLAN_DEBUG", "1")
    jax.grad(total(J(jnp.tanh)))(jnp.ones(8))
    said = capsys.readouterr().err
    assert "passes   1 kernels forward, " in said
    assert said.count("planned by greedy") == 1  # the function by itself is never planned


def test_what_was_fused_before_is_seen_through():
    """``jax.jit`` remembers a trace in which the inner function is an equation of its own."""
    outer = jax.jit(lambda x: J(jnp.tanh)(x) + 1)
    outer(jnp.ones(8))
    plan = fuseplan.jit(outer, device="test").plan(jnp.ones(8))
    assert [node.op for node in plan.graph.nodes] == ["tanh", "add"]
    grad = jax.jit(jax.grad(total(J(lambda x: jnp.tanh(jnp.exp(x))))))
    want = grad(X)
    plan = fuseplan.jit(grad, device="test").plan(X)  # halves of a derivative stay as they are
    assert [node.op for node in plan.graph.nodes].count("fused") == 2
    np.testing.assert_allclose(fuseplan.jit(grad, device="test")(X), want, rtol=1e-6)


def test_a_pass_back_from_some_results_uses_what_is_kept(monkeypatch, capsys):
    def f(x):
        y = jnp.tanh(jnp.exp(x) @ x)
        return (y * y).sum(), jnp.cos(y) @ x

    want = jax.grad(f, has_aux=True)(X[:, :2])
    monkeypatch.setenv("FUSEPLAN_DEBUG", "4")
    got = jax.grad(J(f), has_aux=True)(X[:, :2])
    said = capsys.readouterr().err
    assert said.count("planned by greedy") == 2  # both passes, and the pass back from one result
    assert said.count("= exp ") == said.count("= cos ") == 1
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


@pytest.mark.slow
def test_closures_kinds_of_numbers_and_results_without_derivative():
    def outer(j):
        inner = lambda s, x: jax.grad(lambda y: j(lambda y: jnp.sin(y * s) * s)(y).sum())(x).sum()  # noqa: E731
        return jax.jit(jax.grad(inner))(2.0, X)

    np.testing.assert_allclose(outer(J), outer(jax.jit), rtol=1e-5)
    z = jnp.array([1 + 2j, 3 - 1j])
    f = lambda z: jnp.abs(jnp.exp(z) * z).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(J(f))(z), jax.grad(f)(z), rtol=1e-6)
    half = jnp.linspace(-1, 1, 8, dtype=jnp.bfloat16)
    got = jax.grad(lambda x: J(jnp.tanh)(x).sum())(half)
    assert got.dtype == jnp.bfloat16
    none = np.zeros((), jax.dtypes.float0)
    back = jax.vjp(J(lambda x: (x * 2, jnp.argmax(x))), X)[1]
    np.testing.assert_array_equal(back((X, none))[0], 2 * X)
    with jax.checking_leaks():
        jax.jit(jax.grad(total(J(jnp.tanh))))(X)
