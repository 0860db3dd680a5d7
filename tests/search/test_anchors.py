"""What is XLA's own step whatever surrounds it: planned alone, reported, and right, with elementwise
work fused on its neighbours' side."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import fuseplan
from fuseplan.runtime.tolerance import check_results
from tests.codegen.test_planned_kernels import run_planned

pytestmark = pytest.mark.one_python


def convolution(x, k, b):
    y = lax.conv_general_dilated(
        jnp.tanh(x) * 2, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + b) * 3


def lookup(table, i, s):
    return jnp.tanh((jnp.exp(table) * 2)[i]) * s


def scattered(x, i, u):
    return jnp.tanh((jnp.exp(x) * 2).at[i].add(jnp.cos(u) * 2)) + 1


def ordered(x):
    return jnp.exp(lax.sort(jnp.tanh(x) * 2)) + 1


def largest(x):
    values, where = lax.top_k(jnp.tanh(x) * 2, 3)
    return jnp.exp(values) + 1, where * 2 + 1


def spectrum(x):
    z = jnp.fft.rfft(jnp.tanh(x) * 2)
    return jnp.exp(jnp.real(z)) + 1


def looped(x):
    y = lax.scan(lambda c, row: (c * 0.5 + row, c), x[0], jnp.tanh(x) * 2)[1]
    return jnp.exp(y) + 1


ROWS = ((24, 130),)
CASES = {
    "conv_general_dilated": (convolution, ((2, 8, 8, 16), (3, 3, 16, 16), (16,)), None),
    "gather": (lookup, ((24, 130), (40,), (40, 130)), 24),
    "scatter-add": (scattered, ((24, 130), (40,), (40, 130)), 24),
    "sort": (ordered, ROWS, None),
    "top_k": (largest, ROWS, None),
    "fft": (spectrum, ROWS, None),
    "scan": (looped, ROWS, None),
}


def arguments(shapes, rows):
    rng = np.random.default_rng(0)
    return tuple(
        rng.integers(0, rows, s).astype("int32")
        if rows and len(s) == 1
        else rng.normal(size=s).astype("float32")
        for s in shapes
    )


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("op", CASES)
def test_anchors_stand_alone_between_fused_neighbours(op, device):
    f, shapes, rows = CASES[op]
    plan, got, want = run_planned(f, arguments(shapes, rows), device)
    check_results(op, got, want)
    ops = [(k.spec.backend, [plan.graph.nodes[n].op for n in k.spec.nodes]) for k in plan.kernels]
    can = plan.device.capabilities
    if op in can.loop_movers or (op == "scatter-add" and can.loop_scatters):
        # With what reads a gather, or makes the updates of a scatter.
        near = "tanh" if op in can.loop_movers else "cos"
        assert any(backend == "xla" and {op, near} <= set(inside) for backend, inside in ops)
        return
    assert ("xla", [op]) in ops
    assert any(backend != "xla" and "tanh" in inside for backend, inside in ops)
    (node,) = [n for n in plan.graph.nodes if n.op == op]
    producer = next(plan.graph.values[v].producer for v in node.inputs if plan.graph.values[v].producer >= 0)
    assert op in plan.explain(producer, node.id).verdict.reason
    assert op in str(plan)
    assert plan.status == "OPTIMAL"


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "d"), PartitionSpec()),
    "all_gather": (lambda x: lax.all_gather(x, "d", tiled=True), PartitionSpec()),
    "ppermute": (lambda x: lax.ppermute(x, "d", [(0, 0)]), PartitionSpec("d")),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("order", ["fused outside", "fused inside"])
def test_collectives(name, order):
    collective, out = COLLECTIVES[name]
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    wrap = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=out, check_vma=False
    )
    fuse = functools.partial(fuseplan.jit, device="test")

    def f(x):
        return jnp.tanh(collective(jnp.exp(x) * 2)) + 1

    fast = fuse(wrap(f)) if order == "fused outside" else wrap(fuse(f))
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    np.testing.assert_allclose(fast(x), jax.jit(wrap(f))(x), rtol=1e-6)
