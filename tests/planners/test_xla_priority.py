"""XLA's priority fusion: its formula, its refusals, and what it computes in several kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from costmodel.devices import TEST_DEVICE, get_device
from costmodel.xla_loops import evaluations_in_loop
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.planners.xla_priority import MAX_ARRAYS, _Queue, fuse_by_priority, plan_groups
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.remat.materialise import split_by_groups
from fuseplan.support.work import unlimited
from tests.helpers.small_graphs import Bytes, graph

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((1024, 1024), "float32")
ROW = jax.ShapeDtypeStruct((1024,), "float32")
MANY = tuple(jax.ShapeDtypeStruct((8, 8), "float32") for _ in range(MAX_ARRAYS + 4))


def book(f, *args):
    lowered = lower(trace(f, *args))
    return PriceBook(lowered.graph, Scheduler(lowered.graph, TEST_DEVICE, lowered))


def fusions(f, *args):
    """The operations of each fusion, by name."""
    prices = book(f, *args)
    found = fuse_by_priority(prices, TEST_DEVICE)
    return sorted([prices.graph.nodes[n].op for n in nodes] for nodes in found)


def softmax(x):
    e = jnp.exp(x - lax.reduce_max(x, (1,))[:, None])
    return e / e.sum(1)[:, None]


RULES = {
    # exp is computed in two kernels, for no kernel reduces twice.
    "softmax": (
        softmax,
        (X,),
        [
            ["broadcast_in_dim", "sub", "exp", "broadcast_in_dim", "div"],
            ["broadcast_in_dim", "sub", "exp", "reduce_sum"],
        ],
    ),
    "all users": (
        lambda x: (jnp.exp(x).sum(0), jnp.exp(x) + 1),
        (X,),
        [["exp", "add"], ["exp", "reduce_sum"]],
    ),
    "or none": (lambda x: (jnp.exp(x) @ x, jnp.exp(x) + 1), (X,), []),
    "results are written": (lambda x: ((y := jnp.exp(x)), y + 1), (X,), []),
    "one operation after another": (lambda x: jnp.tanh(jnp.exp(x) + 1), (X,), [["exp", "add", "tanh"]]),
    "a unary operation after a reduction": (lambda x: jnp.exp(x.sum(1)), (X,), [["reduce_sum", "exp"]]),
    "no binary one": (lambda x, r: x.sum(1) + r, (X, ROW), []),
    "nor a wider one": (lambda x: x.sum(1)[:, None] + x, (X,), [["broadcast_in_dim", "add"]]),
    "small reductions are loops": (
        lambda x: x.reshape(-1, 8).sum(1).sum(),
        (X,),
        [["reshape", "reduce_sum", "reduce_sum"]],
    ),
    "no loops": (lambda x: jnp.exp(lax.sort(x + 1)) * 2, (X,), [["exp", "mul"]]),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    f, args, expected = RULES[name]
    assert fusions(f, *args) == sorted(expected)


def test_a_fusion_has_no_more_arrays_than_a_kernel_may_take():
    def f(*xs):
        return sum(xs[1:], xs[0])

    found = fusions(f, *MANY)
    assert found
    assert max(map(len, found)) <= MAX_ARRAYS
    assert sum(map(len, found)) == len(MANY) - 1


def test_of_equal_gain_the_last_made_goes_first():
    """Each addition gains a launch, and less than a tick more or less: the last fusion is filled first."""
    prices = book(lambda *xs: sum(xs[1:], xs[0]), *MANY)
    first, last = fuse_by_priority(prices, TEST_DEVICE)
    assert (first, last) == (tuple(range(5)), tuple(range(5, len(MANY) - 1)))


def test_the_time_of_a_kernel():
    prices = book(lambda x: jnp.exp(x), X)
    n = 1024 * 1024
    compute_s = n / TEST_DEVICE.transcendental_per_s
    memory_s = 2 * 4 * n / TEST_DEVICE.hbm_bytes_per_s
    queue = _Queue(prices, TEST_DEVICE, unlimited())
    expected = memory_s + compute_s - 0.95 * compute_s
    assert queue.runtime_s(prices.graph.nodes[0], {0}) == pytest.approx(expected)


def test_what_is_read_again_comes_from_a_cache():
    # 1,024 numbers of 4 bytes are read 1,024 times: 4 KB fit the cores' own caches.
    prices = book(lambda r: jnp.broadcast_to(r, (1024, 1024)), ROW)
    queue = _Queue(prices, TEST_DEVICE, unlimited())
    once_s, all_s = (4 * 1024 / TEST_DEVICE.hbm_bytes_per_s, 4 * 1024**2 / TEST_DEVICE.hbm_bytes_per_s)
    expected = once_s + (all_s - once_s) / (2.5 * 8) + all_s
    assert queue.runtime_s(prices.graph.nodes[0], {0}) == pytest.approx(expected)


def test_what_is_computed_once_for_each_reader_costs_so_often():
    prices = book(lambda r: jnp.exp(r)[None] * jnp.ones((1024, 1)), ROW)
    queue = _Queue(prices, TEST_DEVICE, unlimited())
    exp, wide = (next(n for n in prices.graph.nodes if n.op == op) for op in ("exp", "mul"))
    everything = {node.id for node in prices.graph.nodes}
    more_s = queue.runtime_s(wide, everything) - queue.runtime_s(wide, everything - {exp.id})
    # A million exponentials, of which the memory hides all but a twentieth.
    assert more_s == pytest.approx(0.05 * 1024**2 / TEST_DEVICE.transcendental_per_s, rel=0.1)


def test_what_does_not_gain_is_left():
    def f(r):
        for _ in range(400):
            r = jnp.tanh(r)
        return jnp.broadcast_to(r[:, None], (1024, 4096)) + 1

    found = fusions(f, ROW)
    assert found == [["broadcast_in_dim", "broadcast_in_dim", "add"], ["tanh"] * 400]


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_what_several_kernels_compute(device):
    plan = fuseplan.make_plan(softmax, device=device, planner="xla_priority")(X)
    assert plan.verify()
    assert [node.op for node in plan.graph.nodes].count("exp") == 2
    assert len(plan.kernels) == 3


def test_once_where_nothing_may_be_computed_again():
    features = Features(recompute=False)
    plan = fuseplan.make_plan(softmax, device="h200", planner="xla_priority", features=features)(X)
    assert [node.op for node in plan.graph.nodes].count("exp") == 1
    assert "3 operations that several of the planner's groups compute are computed once" in plan.notes
    assert plan.verify()


def test_the_function_is_right():
    x = np.random.default_rng(0).standard_normal((33, 70)).astype(np.float32)
    x[3, 4], x[5, 6] = np.inf, np.nan
    f = fuseplan.jit(softmax, planner="xla_priority")
    np.testing.assert_allclose(f(x), softmax(x), rtol=2e-6)


def test_copies_of_groups_that_overlap():
    def f(x):
        y = jnp.exp(x)
        return (z := jnp.sin(y)), z * jnp.cos(y)

    g = lower(trace(f, X)).graph
    copies, groups = split_by_groups(g, [(0, 1), (0, 2, 3)])
    assert [copies.node[c] for c in groups[0]] == [0, 1]
    assert [copies.node[c] for c in groups[1]] == [0, 2, 3]
    assert copies.copies == (2, 1, 1, 1)
    assert copies.roots == (0,)


def test_what_nobody_reads_there_is_no_copy_of():
    # The sine is in both, but what reads it in the second alone.
    g = lower(trace(lambda x: jnp.cos(jnp.sin(jnp.exp(x))), X)).graph
    copies, groups = split_by_groups(g, [(0, 1), (1, 2)])
    assert copies.copies == (1, 1, 1)
    assert [[copies.node[c] for c in nodes] for nodes in groups] == [[0], [1, 2]]


def test_a_graph_without_a_device_is_planned_as_for_a_gpu():
    g = graph("eer", [[], [0], [1]])
    assert plan_groups(g, Bytes(g)).groups == ((0, 1, 2),)


def test_a_loop_has_code_for_few_indices():
    """Each stencil reads three neighbours of the one before it: seven of them would have code for 2,187."""

    def stencils(x):
        for _ in range(7):
            x = jnp.tanh(x)
            x = x[2:] - x[1:-1] * x[:-2]
        return x

    lowered = lower(trace(stencils, jax.ShapeDtypeStruct((4096,), "float32")))
    device = get_device("h200")
    scheduler = Scheduler(lowered.graph, device, lowered)
    found = list(fuse_by_priority(PriceBook(lowered.graph, scheduler), device))
    assert found
    for nodes in found:
        assert len(nodes) < len(lowered.graph.nodes)
        assert evaluations_in_loop(lowered.graph, nodes, device.capabilities.loop_indices) is not None


def test_its_groups_may_be_loops_of_xla():
    """The levels of a scan are slices, pads and sums of each other, which no tiled kernel holds."""

    def scan(a, b):
        return lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b))

    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.uniform(-1, 1, (64, 4096)), "float32") for _ in range(2))
    plan = fuseplan.make_plan(scan, device="h200", planner="xla_priority")(a, b)
    assert plan.verify()
    of_xla = [k for k in plan.kernels if k.spec.backend == "xla" and len(k.spec.nodes) > 8]
    assert of_xla
    assert len(plan.kernels) < 8
    for got, want in zip(plan.run(a, b), jax.jit(scan)(a, b), strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


PAIRS = jax.ShapeDtypeStruct((4_000_000,), "int32")
POINTS = jax.ShapeDtypeStruct((100_000, 3), "float32")


def forces(x, i, j):
    d = x[i] - x[j]
    return jnp.zeros_like(x).at[i].add(d / (1 + (d * d).sum(-1, keepdims=True)))


def test_a_scatter_ends_its_fusion_and_a_short_reduction_is_computed_once():
    """The differences are computed in both kernels; the table is made before."""
    summed, added = sorted(fusions(forces, POINTS, PAIRS, PAIRS), key=len)
    if "scatter-add" in summed:
        summed, added = added, summed
    assert {"gather", "sub", "mul", "reduce_sum", "add"} <= set(summed)
    assert {"gather", "sub", "div", "scatter-add"} <= set(added)
    assert not {"reduce_sum"} & set(added)
    assert "scatter-add" not in summed


def test_the_solver_plans_a_scatter_no_slower_than_these_fusions():
    plan = fuseplan.make_plan(forces, device="h200")(POINTS, PAIRS, PAIRS)
    costly = [kernel for kernel in plan.kernels if kernel.cost.time_ps]
    assert len(costly) == 3
    assert plan.verify().status == "verified"


def test_heuristics_take_offers_whose_rest_stays_together():
    def bags(table, indices, weights):
        return ((table[indices] * weights[..., None]).sum(1) ** 2).sum()

    args = (
        jax.ShapeDtypeStruct((50_000, 128), "float32"),
        jax.ShapeDtypeStruct((4096, 32), "int32"),
        jax.ShapeDtypeStruct((4096, 32), "float32"),
    )
    best_first, solver = (
        fuseplan.make_plan(jax.grad(bags), device="h200", planner=planner)(*args)
        for planner in ("best_first", "solver")
    )
    assert best_first.objective_ps < 1.2 * solver.objective_ps
