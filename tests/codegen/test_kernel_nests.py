"""Kernels of several contractions for GPUs and TPUs, in Pallas' interpreter: they compute what XLA
computes, in tiles of several sizes, smaller than a device would have them, and ragged."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.axes import Conflict, unify
from costmodel.backends import backend_of, register_backend
from costmodel.devices import get_device
from costmodel.graph import boundary
from costmodel.kernel import AxisRole
from costmodel.roofline import estimate
from fuseplan import Features, Plan
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import run_equations, trace
from fuseplan.passes import recompute_streams as streams
from fuseplan.passes.recompute_streams import along_streams, with_less_memory
from fuseplan.plan.options import ALL_FEATURES
from fuseplan.schedule import tilings as tiles
from fuseplan.schedule.nests.accelerator import kernel_nests
from fuseplan.schedule.nests.live_tiles import tiles_visited_in_ranges
from fuseplan.schedule.nests.multipass import program_of
from fuseplan.schedule.nests.regions import joined_contractions, regions
from fuseplan.workloads import get_workload
from tests.helpers.nest_cases import CASES, D, M, N, normal, with_gradient
from tests.helpers.nests import assert_close, describe
from tests.helpers.quickly import run_quickly

# The same cases are run as CPU loops on both Pythons.
pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

LARGE_BYTES = 512
NAMES = [
    *("attention", "sliding", "lost_rows", "guarded_rows", "grouped", "over_queries", "two_softmaxes"),
    *("cross_entropy", "gated", "gaussian", "forces", "k_means"),
    *("gradient of attention", "gradient of grouped", "gradient of masked", "gradient of gaussian"),
]
MASKED = ("sliding", "masked -inf", "gradient of masked")


def tiny(name):
    """A device for which small values are large."""
    return replace(get_device(name), large_bytes=LARGE_BYTES)


def in_kernels(f, args, device):
    """The program, and the first and the last kernel of each group that large values tie together."""
    lowered = lower(trace(f, *args))
    lowered = along_streams(lowered, device, ALL_FEATURES)[0] or lowered
    graph, found = lowered.graph, []
    for nodes in regions(graph, LARGE_BYTES, device.backend):
        axes = unify(graph, nodes)
        if not isinstance(axes, Conflict):
            specs = list(kernel_nests(graph, nodes, axes, boundary(graph, nodes), device.backend))
            found += dict.fromkeys(
                [*specs[:1], *specs[len(specs) // 2 :: max(len(specs) // 2, 1)], *specs[-1:]]
            )
    return lowered, found


def in_ranges(lowered, specs):
    """Those of which a mask leaves out tiles, without these."""
    visits = [tiles_visited_in_ranges(lowered, spec, program_of(lowered.graph, spec)) for spec in specs]
    return [replace(spec, tiles_visited=count) for spec, count in zip(specs, visits, strict=True) if count]


def evaluated(lowered, args):
    values = dict(zip(lowered.graph.inputs, [*lowered.consts, *jax.tree.leaves(args)], strict=True))
    run_equations(lowered.equations, values)
    return values


def check(spec, lowered, values):
    got = run_quickly(emit(spec, lowered, interpret=True), *(values[v] for v in live_ins(spec)))
    for x, write in zip(got, spec.writes, strict=True):
        assert_close(np.asarray(x), np.asarray(values[write.value]), 2e-4, 2e-5, describe(spec, lowered))


def in_float32(args):
    return jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, args)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles are small."""
    monkeypatch.setattr(tiles, "LANES", 1)
    monkeypatch.setattr(tiles, "SUBLANES", 1)
    known = [backend_of(name) for name in ("triton", "mosaic_tpu")]
    for backend, matmul_tiles in zip(known, ((16,), (8, 16)), strict=True):
        register_backend(replace(backend, matmul_tiles=matmul_tiles))
    yield
    for backend in known:
        register_backend(backend)


# A TPU gains nothing from a nest over its few scores.
ON_TPUS = [name for name in NAMES if name != "gradient of grouped"]


@pytest.mark.parametrize(
    ("name", "device"), [*((n, "h200") for n in NAMES), *((n, "tpu_v5e") for n in ON_TPUS)]
)
def test_agrees(name, device, small_tiles):
    f, args = CASES[name]
    args = in_float32(args)
    lowered, specs = in_kernels(f, args, tiny(device))
    assert any(spec.axes[spec.streamed].n_tiles > 1 for spec in specs), "no stream was walked"
    values = evaluated(lowered, args)
    for spec in specs:
        check(spec, lowered, values)


def heads_inside(q, k, v):
    """Causal, with the heads of a query beside each other, as a projection makes them."""
    s = jnp.einsum("qhgd,khd->hgqk", q, k)
    s = jnp.where(jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0]), s, -jnp.inf)
    return jnp.einsum("hgqk,khd->qhgd", jax.nn.softmax(s, -1), v)


SHARED_KEYS = {
    "heads_outside": CASES["gradient of grouped"],
    "heads_inside": (
        with_gradient(heads_inside),
        (normal(M, 3, 2, D), normal(N, 3, D), normal(N, 3, D, seed=1), normal(M, 3, 2, D, seed=2)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", SHARED_KEYS)
def test_heads_that_share_keys(name, device, small_tiles, monkeypatch):
    """The gradient by keys is streamed for each head of queries, and then summed up."""
    monkeypatch.setattr(streams, "quick_ps", lambda lowered, *_, **__: -len(lowered.graph.nodes))
    f, args = SHARED_KEYS[name]
    args = in_float32(args)
    lowered, specs = in_kernels(f, args, tiny(device))
    assert max(spec.axes[spec.streamed].size for spec in specs) == N
    by_keys = [s for s in specs if s.axes[s.streamed].size == M]
    assert min(len(s.writes) for s in by_keys) == 2, "both gradients are of one kernel"
    values = evaluated(lowered, args)
    for spec in (specs[0], *by_keys[:2]):
        check(spec, lowered, values)
    want = f(*args)
    for v, x in zip(lowered.outputs, jax.tree.leaves(want), strict=True):
        assert_close(np.asarray(values[v]), np.asarray(x), 2e-4, 2e-5, name)


@pytest.mark.parametrize("name", ["cross_entropy_gradient", "gradient of masked"])
def test_programs_that_need_less_memory(name, small_tiles):
    """The same results, by products that stand and by products that are computed again."""
    f, args = CASES[name]
    args = in_float32(args)
    lowered = lower(trace(f, *args))
    programs = list(with_less_memory(lowered, tiny("h200"), ALL_FEATURES))
    counts = [sum(n.flops.matrix > 0 for n in p.graph.nodes) for p in (lowered, *programs)]
    assert counts[0] == counts[1] < counts[2]
    for program in programs:
        assert len(program.graph.nodes) > len(lowered.graph.nodes)
        values = evaluated(program, args)
        for v, x in zip(program.outputs, jax.tree.leaves(f(*args)), strict=True):
            assert_close(np.asarray(values[v]), np.asarray(x), 2e-4, 2e-5, name)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", MASKED)
def test_tiles_behind_a_mask_are_left_out(name, device, small_tiles):
    f, args = CASES[name]
    args = in_float32(args)
    lowered, specs = in_kernels(f, args, tiny(device))
    ranged = in_ranges(lowered, specs)
    assert ranged, "no tile was left out"
    values = evaluated(lowered, args)
    for spec in ranged:
        check(spec, lowered, values)
        estimates = [
            estimate(lowered.graph, s, get_device(device)) for s in (spec, replace(spec, tiles_visited=()))
        ]
        assert estimates[0].flops.matrix < estimates[1].flops.matrix


def classes(x, w):
    return jax.nn.logsumexp(x @ w, axis=-1), (x @ w).max(-1)


def test_features_are_contracted_tile_by_tile(small_tiles):
    """A row that is too long to be held while its classes are streamed."""
    args = in_float32((normal(150, 140), normal(140, 170)))
    device = tiny("h200")
    lowered, specs = in_kernels(classes, args, device)
    inner = [s for s in specs if any(a.role == AxisRole.INNER and a.n_tiles > 1 for a in s.axes)]
    assert inner, "no kernel contracts tile by tile"
    values = evaluated(lowered, args)
    for spec in inner:
        check(spec, lowered, values)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_an_infinity_behind_a_mask_is_seen(operand, device, small_tiles):
    """Zero times infinity is no number, wherever the zero comes from."""
    f, args = CASES["masked -inf"]
    args = [np.array(x) for x in in_float32(args)]
    args[operand][:, -1] = np.inf
    lowered, specs = in_kernels(f, tuple(args), tiny(device))
    values = evaluated(lowered, tuple(args))
    for spec in in_ranges(lowered, specs):
        check(spec, lowered, values)


def plan_of(name, device, **options):
    f, args = get_workload(name).build(dtype="bfloat16")
    return fuseplan.make_plan(f, device=device, deadline_s=100, **options)(*args)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize(("name", "kernels"), [("causal_attention", 1), ("causal_attention_grad", 2)])
def test_no_scores_are_stored(name, kernels, device):
    """Attention is a kernel that streams its keys, and its gradient one by queries and one by keys."""
    plan = plan_of(name, device)
    assert_no_scores(plan, kernels)
    without = plan_of(name, device, features=Features(loop_nests=False))
    assert 2 * plan.objective_ps < without.objective_ps
    assert plan.verify().status == "verified"
    assert Plan.from_json(plan.to_json()) == plan


def assert_no_scores(plan, kernels):
    products = [k for k in plan.kernels if any(plan.graph.nodes[n].flops.matrix for n in k.spec.nodes)]
    assert len(products) == kernels
    assert all(k.spec.passes for k in products)
    # A TPU's pipeline copies every block: what its copies bound gains nothing by walking less.
    some = all if plan.device.platform == "gpu" else any
    assert some(k.spec.tiles_visited for k in products)
    written = [plan.graph.values[w.value].size for k in plan.kernels for w in k.spec.writes]
    assert max(written) < 4096 * 4096
    assert plan.status == "OPTIMAL"


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_no_scores_are_stored_of_heads_that_share_keys(device):
    assert_no_scores(plan_of("grouped_attention_vjp", device), 2)


def test_a_gate_and_what_it_gates_share_a_loop(small_tiles):
    def gated(x, gate, up):
        return jax.nn.silu(x @ gate) * (x @ up)

    args = in_float32((normal(20, 40), normal(40, 36), normal(40, 36, seed=1)))
    lowered = lower(trace(gated, *args))
    graph, values = lowered.graph, evaluated(lowered, args)
    (group,) = joined_contractions(graph, "triton")
    assert len(group) == len(graph.nodes)
    specs = list(kernel_nests(graph, group, unify(graph, group), boundary(graph, group), "triton"))
    assert {len(spec.passes) for spec in specs} == {0, 1}, "held, or walked once"
    check(specs[0], lowered, values)
    check(specs[-1], lowered, values)


def test_what_is_constrained_is_not_settled():
    """A group that may not be one kernel leaves its operations to others."""
    plan = plan_of("causal_attention", "h200", constraints=fuseplan.Constraints(max_group_size=6))
    assert max(len(k.spec.nodes) for k in plan.kernels) == 6


def test_batches_come_first_on_a_tpu():
    plan = plan_of("causal_attention", "tpu_v5e")
    (nest,) = (k.spec for k in plan.kernels if k.spec.passes)
    shapes = [plan.graph.values[r.value].shape for r in nest.reads]
    assert shapes == [(1, 8, 4096, 64)] * 3
