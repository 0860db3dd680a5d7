"""Sums down columns in two steps: the first of them in the kernel that has the rows on chip."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from fuseplan import pipeline as planner
from fuseplan.frontend.lower import lower
from fuseplan.frontend.rewrite import part
from fuseplan.frontend.trace import run_equations, trace
from fuseplan.passes import split_reductions as splits
from fuseplan.passes.split_reductions import Split, in_two_steps, split_sums
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.runtime.executor import make_runner
from fuseplan.settings import make_options
from fuseplan.verify.plan import check_plan
from fuseplan.workloads import get_workload
from tests.helpers.emit_cases import layernorm
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import run_quickly

pytestmark = pytest.mark.one_python

H200 = get_device("h200")
TILED = Features(xla_loops=False)
"""Without XLA's loops, which add up columns in two steps of their own."""


def backward(x, g, dy):
    return jax.vjp(layernorm, x, g, g)[1](dy)


def two_columns(x):
    y = jnp.tanh(x)
    return y, y.sum((0, 1)), (y * y).sum((0, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_in_two_steps_is_the_sum(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((12, 48, 7)), dtype)
    lowered = lower(trace(lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0, 1), out_sharding=None), x))
    new = in_two_steps(lowered, {0: Split((12, 3, 16, 7), (2,), (0, 1))})
    values = {new.graph.inputs[0]: x}
    run_equations(new.equations, values)
    (got,) = (values[v] for v in new.outputs)
    assert (got.shape, got.dtype) == ((7,), x.dtype)
    want = np.asarray(x, np.float64).sum((0, 1))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, 1e-2 if dtype == "bfloat16" else 1e-5)
    # Partial sums of 16 bits would be rounded before they are added.
    assert [v.dtype for v in new.graph.values if v.shape == (12, 3, 7)] == ["float32"]


def test_what_is_rewritten_again_keeps_its_steps_apart():
    lowered = lower(trace(two_columns, jax.ShapeDtypeStruct((2, 64, 7), "float32")))
    sums = {
        n: Split((2, 16, 4, 7), (2,), (0, 1))
        for n, node in enumerate(lowered.graph.nodes)
        if node.op == "reduce_sum"
    }
    split = in_two_steps(lowered, sums)
    again = part(split, range(len(split.graph.nodes)))
    assert len(split.graph.waits) == 2
    assert again.graph.waits == split.graph.waits
    first, _ = split.graph.waits[0]
    alone = part(split, [n for n in range(len(split.graph.nodes)) if n != first])
    assert len(alone.graph.waits) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [76])
@pytest.mark.parametrize(("f", "way"), [(backward, 0), (two_columns, 0), (two_columns, 2)])
def test_kernels_agree(f, way, rows, dtype, monkeypatch):
    """On a device on which small arrays take long; of rows that are no power of two."""
    monkeypatch.setattr(splits._Splits, "_fastest", lambda *_: way)
    monkeypatch.setattr(planner, "is_faster_as_traced", lambda *_: False)
    monkeypatch.setattr(planner, "COPYING_PEERS", ())
    device = replace(H200, launch_ps=10, core_count=8, hbm_bytes_per_s=10**9, cache_bytes=0)
    rng = np.random.default_rng(0)
    shapes = [(2, rows, 520)] if f is two_columns else [(2 * rows, 520), (520,), (2 * rows, 520)]
    args = [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]
    lowered, plan = plan_traced(trace(f, *args), make_options(device, "solver", deadline_s=3))
    assert first_steps(plan)
    assert check_plan(plan)
    got = run_quickly(make_runner(lowered, plan, platform="cpu", interpret=True), *lowered.consts, *args)
    want = f(*(a.astype("float32") for a in args))
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-4
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(y).max())
        np.testing.assert_allclose(np.asarray(x, np.float32), y, tolerance, tolerance * scale)


WHOLE = {
    "norm": lambda x: jnp.sqrt((x * x).sum(dtype="float32")),
    "mean_error": lambda x: jnp.abs(x - 1).mean(),
    "largest": lambda x: (jnp.tanh(x).max(), (x - 1).min((0, 2))),
    "any": lambda x: (jnp.isnan(x).any(), (x < 9).all()),
    "whole_numbers": lambda x: (x.astype("int8") // 2).sum(dtype="int8"),
    "few_rows": lambda x: jax.nn.logsumexp(2 * x, axis=-1),
    "softmax": lambda x: jax.nn.softmax(2 * x, axis=-1),
}


ROWS, PIECES = (1, 301, 130), (2, 3, 8192)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        *((name, "float32", ROWS) for name in list(WHOLE)[:5]),
        *((name, "float32", PIECES) for name in ("largest", "few_rows", "softmax")),
        ("norm", "bfloat16", ROWS),
        ("softmax", "bfloat16", PIECES),
    ],
)
def test_whole_arrays_and_long_rows(name, dtype, shape, monkeypatch):
    """With a NaN, and without: by rows, be they ragged, or by pieces of rows."""
    monkeypatch.setattr(splits._Splits, "_fastest", lambda *_: 0)
    monkeypatch.setattr(planner, "is_faster_as_traced", lambda *_: False)
    monkeypatch.setattr(planner, "COPYING_PEERS", ())
    device = replace(H200, launch_ps=10, core_count=8, hbm_bytes_per_s=10**9, cache_bytes=0)
    f, x = WHOLE[name], jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    lowered, plan = plan_traced(trace(f, x), make_options(device, "solver", deadline_s=3))
    assert plan.graph.waits
    assert check_plan(plan)
    run = make_runner(lowered, plan, platform="cpu", interpret=True)
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    # XLA:CPU's maxima of rows miss some NaNs.
    has_nan = [] if name in ("whole_numbers", "largest") else [x.at[0, 1, 7].set(jnp.nan)]
    for arg in (x, *has_nan):
        for got, want in zip(run_quickly(run, *lowered.consts, arg), jax.tree.leaves(f(arg)), strict=True):
            assert got.dtype == want.dtype
            got, want = (np.asarray(y, np.float64) for y in (got, want))
            np.testing.assert_allclose(got, want, tolerance, tolerance * 1e-2)


def test_a_loss_and_a_norm_read_their_arrays_once():
    x = jax.ShapeDtypeStruct((4096, 768), "float32")
    for f, args in ((lambda x, y: jnp.mean((x - y) ** 2), (x, x)), (WHOLE["norm"], (x,))):
        plan = fuseplan.make_plan(f, device="h200", deadline_s=100)(*args)
        read = len(args) * 4096 * 768 * 4
        assert plan.status == "OPTIMAL"
        assert len(plan.kernels) == 2
        assert read <= sum(k.cost.hbm_bytes for k in plan.kernels) < 1.01 * read


def test_a_batch_norm_adds_up_many_rows():
    """The mean of each channel, of which each row is short: a first step adds up those of several lines of an
    image, and what it writes is small beside the images."""

    def batch_norm(x, scale):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale

    def gradient(x, scale, dy):
        return jax.vjp(batch_norm, x, scale)[1](dy)

    shapes = (jax.ShapeDtypeStruct(s, "float32") for s in ((16, 28, 28, 128), (128,), (16, 28, 28, 128)))
    lowered = lower(trace(gradient, *shapes))
    new = split_sums(lowered, H200, ALL_FEATURES)
    assert new is not None
    for first, _ in new.graph.waits:
        node = new.graph.nodes[first]
        whole, parts = (new.graph.values[v].size for v in (*node.inputs, *node.outputs))
        assert whole >= 28 * parts


@pytest.mark.parametrize(
    ("shape", "axes", "rows", "want"),
    [
        ((4096, 768), (0,), 32, Split((128, 32, 768), (1,), (0,))),
        ((2, 48, 7), (0, 1), 32, Split((2, 2, 24, 7), (2,), (0, 1))),
        ((6, 8, 7), (0, 1), 16, Split((3, 2, 8, 7), (1, 2), (0,))),
        ((5, 8, 7), (0, 1), 16, Split((5, 8, 7), (1,), (0,))),
        ((31, 7), (0,), 16, None),
        ((8, 7), (0,), 16, None),
    ],
)
def test_rows_of_the_innermost_dimensions_are_added_up_first(shape, axes, rows, want):
    assert splits._of_rows(shape, axes, rows) == want


def test_a_norm_of_all_is_decided_where_it_is_made():
    """What waits for it, through the rest of a program, is not taken for its neighbour."""

    def clipped(*grads):
        norm = jnp.sqrt(sum((g * g).sum() for g in grads))
        return [g / norm for g in grads]

    grads = [jax.ShapeDtypeStruct((4096, 768), "float32")] * 3
    new = split_sums(lower(trace(clipped, *grads)), H200, TILED)
    assert len(new.graph.waits) == 3


def first_steps(plan):
    """First steps that share a kernel with other operations; no kernel has both steps of a sum."""
    kernel = {n: k.spec.nodes for k in plan.kernels for n in k.spec.nodes}
    assert all(kernel[first] != kernel[second] for first, second in plan.graph.waits)
    return [first for first, _ in plan.graph.waits if len(kernel[first]) > 3]


def test_a_layer_norm_reads_its_rows_once():
    """Without, its gradient reads them three times: for the rows, and for either sum down columns."""
    f, args = get_workload("layernorm_grad").build()
    plan = fuseplan.make_plan(f, device="h200", deadline_s=100)(*args)
    assert plan.status == "OPTIMAL"
    assert len(first_steps(plan)) == 2
    rows = 4096 * 768 * 4
    assert 3.5 * rows <= plan.kernels[0].cost.hbm_bytes < 3.6 * rows
    assert fuseplan.Plan.from_json(plan.to_json()).verify()


def test_only_what_gains_is_split():
    x = jax.ShapeDtypeStruct((4096, 768), "float32")
    small = jax.ShapeDtypeStruct((64, 768), "float32")
    for f, *args in (
        (lambda x: x.sum(0), x),  # alone
        (lambda x: jnp.exp(x).sum(()), x),
        (lambda x: (x.sum(1), jnp.exp(x)), x),  # along rows
        (two_columns, jax.ShapeDtypeStruct((2, 32, 768), "float32")),
        (lambda x: (jnp.tanh(x), jnp.tanh(x).sum(0)), small),
    ):
        assert split_sums(lower(trace(f, *args)), H200, ALL_FEATURES) is None
    assert split_sums(lower(trace(two_columns, jax.ShapeDtypeStruct((4, 1024, 768), "float32"))), H200, TILED)
    norm = lower(trace(*(lambda w: (w[0], *w[1]))(get_workload("layernorm_grad").build())))
    assert split_sums(norm, get_device("tpu_v5e"), ALL_FEATURES) is None  # its grid runs in order


def test_in_a_deep_network_few_reductions_are_planned(monkeypatch):
    """Those of equal layers have equal surroundings, though other layers are further around."""
    planned = []
    fastest = splits._Splits._fastest
    monkeypatch.setattr(splits._Splits, "_fastest", lambda *asked: planned.append(asked) or fastest(*asked))

    def count(n_layers):
        def loss(x, scales):
            for scale in scales:
                x = x + jnp.tanh(scale * (x - x.mean(-1, keepdims=True)))
            return (x * x).sum()

        planned.clear()
        x = jax.ShapeDtypeStruct((16_384, 1_024), "float32")
        scales = [jax.ShapeDtypeStruct((1_024,), "float32")] * n_layers
        lowered = lower(trace(jax.grad(loss, 1), x, scales))
        split_sums(lowered, get_device("a100"), ALL_FEATURES)
        return len(planned)

    few = count(4)
    assert few == count(8)
    assert few < 5
