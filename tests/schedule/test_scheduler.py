"""Schedules: what is legal, what fits, and which tiles are chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.devices import TEST_DEVICE, get_device
from costmodel.graph import boundary
from costmodel.kernel import Access, AxisRole
from costmodel.onchip import footprint
from costmodel.roofline import estimate
from fuseplan import Kernel
from fuseplan.codegen import emit
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.passes.array_to_columns import by_columns
from fuseplan.plan.options import Features
from fuseplan.schedule.layout import Layout
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.tilings import MOST_ROW_TILINGS, addressing
from fuseplan.support.errors import Verdict
from fuseplan.targets.calibrate import described_cpu
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python

A100, H200, V5E = get_device("a100"), get_device("h200"), get_device("tpu_v5e")


def shape(*extents, dtype="float32"):
    return jax.ShapeDtypeStruct(extents, dtype)


def priced(f, *args, device=H200):
    """The kernel in one pass of a whole function, or why there is none."""
    graph = lower(trace(f, *args)).graph
    in_one_pass = Features(xla_loops=False, loop_nests=False)
    return Scheduler(graph, device, features=in_one_pass).price(tuple(range(len(graph.nodes))))


def layernorm(x, g):
    m = x.mean(-1, keepdims=True)
    return (x - m) * jax.lax.rsqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-5) * g


def gelu_matmul(x, w, b):
    return jax.nn.gelu(x @ w + b)


def test_rows_are_parallel_and_the_reduced_axis_resident():
    kernel = priced(layernorm, shape(4096, 768), shape(768))
    assert isinstance(kernel, Kernel)
    assert [(a.size, a.role) for a in kernel.spec.axes] == [
        (4096, AxisRole.PARALLEL),
        (768, AxisRole.RESIDENT),
    ]
    # Read x once, write y once, and the scale: the compulsory traffic and no more.
    assert kernel.cost.hbm_bytes == 2 * 4096 * 768 * 4 + 768 * 4


def test_column_sum_streams_the_rows():
    kernel = priced(lambda x: (x * 2).sum(0), shape(65536, 256))
    assert isinstance(kernel, Kernel)
    assert kernel.spec.axes[kernel.spec.streamed].size == 65536


def test_matmul_streams_what_it_contracts():
    kernel = priced(gelu_matmul, shape(4096, 768), shape(768, 3072), shape(3072))
    assert isinstance(kernel, Kernel)
    assert kernel.spec.axes[kernel.spec.streamed].size == 768
    assert all(a.tile & (a.tile - 1) == 0 for a in kernel.spec.axes)


@pytest.mark.parametrize(
    ("columns", "tiles"),
    [
        (2816, {128, 512, 1408, 2816}),
        (3072, {128, 512, 1536, 3072}),
        (8704, {128, 512, 1792, 4352, 8704}),
        (50257, {128, 512, 2048, 7296, 25216, 50257}),
        (300_000, {128, 512, 2048, 8192, 30080}),
    ],
)
def test_tiles_of_a_tpu_are_even(columns, tiles):
    """Two of 2,048 are a third more than 3,072, and the vector unit computes them."""
    args = (shape(8, columns),) * 2
    graph = lower(trace(lambda x, y: x * jax.nn.silu(y), *args)).graph
    schedules = Scheduler(graph, V5E).schedules(tuple(range(len(graph.nodes))))
    assert {axis.tile for spec in schedules for axis in spec.axes if axis.size == columns} == tiles


def layernorm_of_heads(x, g):
    return layernorm(x.astype("float32"), g).astype(x.dtype)


@pytest.mark.parametrize(
    ("f", "args", "tiles"),
    [
        (layernorm, (shape(262_144, 128), shape(128)), (4096, 128)),
        (layernorm_of_heads, (shape(4096, 64, 128, dtype="bfloat16"), shape(128)), (64, 64, 128)),
        (lambda x: jnp.exp(x) + x * x, (shape(2**24),), (131_072,)),
        (lambda x: jnp.exp(x) + x * x, (shape(3_072_000),), (128_000,)),
    ],
    ids=["rows", "heads", "vector", "even parts of a vector"],
)
def test_blocks_of_a_tpu_are_large(f, args, tiles):
    """Its one core runs every step, each of which takes a third of a microsecond by itself: blocks of 256
    rows, or one of the outer axis, take two to five times as long (libtpu)."""
    kernel = priced(f, *args, device=V5E)
    assert isinstance(kernel, Kernel)
    assert tuple(axis.tile for axis in kernel.spec.axes) == tiles
    assert kernel.cost.time_us < 1.3 * kernel.cost.hbm_bytes / V5E.hbm_bytes_per_s * 1e6


def test_a_vector_that_is_no_whole_number_of_tiles_is_left_to_xla():
    """A kernel would read it as a matrix of one row, for which XLA copies it: 13 times the cycles."""
    assert isinstance(priced(lambda x: jnp.exp(x) + x * x, shape(2**24), device=V5E), Kernel)
    refused = priced(lambda x: jnp.exp(x) + x * x, shape(2**24 + 1), device=V5E)
    assert isinstance(refused, Verdict)
    assert refused.rule == "backend"


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(("heads", "width", "tile"), [(24, 64, 12), (12, 128, 6), (5, 64, 5), (3, 520, 1)])
def test_a_step_contracts_several_heads(heads, width, tile):
    """The output projection of an attention whose result lies [batch, heads, width, tokens]: 12 steps of 64
    take 3.7 times the cycles of XLA's own kernel, 2 steps of 384 twice (libtpu)."""

    def project(x, w):
        return jnp.transpose(x, (0, 3, 1, 2)).reshape(1, 256, heads * width) @ w

    lowered = lower(trace(project, shape(1, heads, width, 256), shape(heads * width, 128)))
    kernel = Scheduler(lowered.graph, V5E).price(tuple(range(len(lowered.graph.nodes))))
    assert isinstance(kernel, Kernel)
    streamed = kernel.spec.axes[kernel.spec.streamed]
    assert (streamed.size, streamed.tile) == (heads, tile)
    x, w = (jax.random.normal(jax.random.key(k), a.shape) for k, a in enumerate(lowered.avals[:2]))
    (got,) = emit(kernel.spec, lowered, interpret=True)(x, w)
    assert jnp.allclose(got, project(x, w), rtol=1e-4, atol=1e-3)


def test_row_statistics_keep_small_tiles():
    """A row statistic is written along the rows, but rows need not be tiled by 128 for it."""
    kernel = priced(lambda x: (jnp.exp(x), x.sum(1)), shape(4096, 2048))
    assert isinstance(kernel, Kernel)
    assert kernel.spec.axes[0].tile < 128


REFUSED = {
    "opaque": (lambda x: jnp.sort(x) * 2, (shape(8, 128),), "opaque"),
    "side effects": (lambda x: (jax.debug.print("{}", x.sum()), x * 2)[1], (shape(8, 128),), "side-effects"),
    "two matmuls": (lambda x, w: (x @ w) @ w, (shape(64, 64), shape(64, 64)), "shapes"),
    "an operand that is a result": (
        lambda x, w: (lambda y: (y @ w, y))(jnp.exp(x)),
        (shape(64, 64), shape(64, 64)),
        "shapes",
    ),
    "an operand along two axes": (
        lambda x, w: (lambda y: y @ w + y)(jnp.exp(x)),
        (shape(64, 64), shape(64, 64)),
        "shapes",
    ),
    "rows into an operand": (
        lambda x, w: ((y := x / x.sum(1, keepdims=True)) @ w, y),
        (shape(64, 64), shape(64, 64)),
        "shapes",
    ),
    "rows of a matmul": (lambda x, w: (x @ w).sum(1), (shape(64, 64), shape(64, 64)), "shapes"),
    "no rule for the backend": (lambda x: jax.lax.lgamma(x) * 2, (shape(64, 64),), "backend"),
    "an empty array": (
        lambda x: jnp.pad(x[:0] + 1, ((0, 3), (0, 0)), constant_values=2.0),
        (shape(8, 128),),
        "backend",
    ),
    "on chip": (
        lambda x: x - x.max(1, keepdims=True) + x.sum(0, keepdims=True),
        (shape(4096, 4096),),
        "on-chip",
    ),
    "no common tiling": (
        lambda x: (lambda y: (y.reshape(64, 96) * 2, y.reshape(96, 64) * 2))(jnp.tanh(x)),
        (shape(64 * 96),),
        "shapes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_refusal_names_its_rule(name):
    f, args, rule = REFUSED[name]
    verdict = priced(f, *args)
    assert isinstance(verdict, Verdict)
    assert verdict.rule == rule
    assert len(verdict.reason) > 10


@pytest.mark.parametrize("device", [H200, V5E, TEST_DEVICE], ids=lambda d: d.name)
@pytest.mark.parametrize("name", ["softmax", "layernorm", "gelu_bias", "mlp", "add_transpose", "rmsnorm"])
def test_every_schedule_fits_and_can_be_addressed(name, device):
    f, args = get_workload(name).build()
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, device)
    seen = 0
    everything = tuple(range(len(graph.nodes)))
    for nodes in [*itertools.pairwise(everything), everything]:
        if scheduler.compatible(nodes):
            continue
        for spec in scheduler.schedules(nodes):
            seen += 1
            assert footprint(graph, spec, device).fits(device)
            written = [a.axis_set for a in spec.writes]
            for i, axis in enumerate(spec.axes):
                if axis.role == AxisRole.PARALLEL:
                    assert all(i in w for w in written)
                if axis.role == AxisRole.STREAMED:
                    assert spec.passes or all(i not in w for w in written)
                if axis.role == AxisRole.RESIDENT:
                    assert axis.tile >= axis.size
    assert seen


def test_inner_tile_divides():
    """Two axes merged in one dimension: a block of the inner one that does not divide it
    would write over its neighbour's first elements."""
    merged = Access(0, ((0, 1),))
    layout = Layout((4, 6), (merged,), (merged,), (merged,), None)
    addressable = addressing(layout, "triton")
    assert addressable((1, 3))
    assert addressable((2, 6))
    assert not addressable((1, 4))
    assert not addressable((2, 3))
    assert not addressable((4, 8))


@pytest.mark.parametrize("depth", [768, 200])
def test_of_equally_fast_steps_a_sequential_grid_takes_the_fewest(depth):
    graph = lower(trace(lambda x, w: jnp.tanh(x) @ w, shape(1024, depth), shape(depth, 512))).graph
    scheduler = Scheduler(graph, V5E, features=Features(xla_loops=False))
    chosen = scheduler.price((0, 1))
    costs = [(spec, estimate(graph, spec, V5E)) for spec in scheduler.schedules((0, 1))]
    alike = [
        spec.axes[-1].n_tiles
        for spec, cost in costs
        if spec.grid == chosen.spec.grid and cost.time_ps == chosen.cost.time_ps
    ]
    assert chosen.spec.axes[-1].n_tiles == min(alike)
    assert chosen.cost.time_ps == min(cost.time_ps for _, cost in costs)


def test_a_small_array_has_smaller_tiles_than_the_largest_that_fit():
    """The largest four leave most cores idle."""
    graph = lower(trace(lambda x: jnp.tanh(x) * 2 - jnp.exp(x), shape(2, 128, 256))).graph
    scheduler = Scheduler(graph, A100)
    nodes = tuple(range(len(graph.nodes)))
    times = [estimate(graph, spec, A100).time_ps for spec in scheduler.schedules(nodes)]
    chosen = scheduler.price(nodes)
    assert chosen.cost.time_ps == min(times) < min(times[:4])


def sums_of_many(x, y, *others):
    """Sums along rows and down columns, and of vectors that share no axis with them."""
    return (x * y).sum(0), (x + y).sum(1), *(jnp.tanh(v).sum() for v in others)


@pytest.mark.parametrize(
    ("device", "rows", "length", "fits"),
    [(A100, 8, 100, True), (A100, 100, 900, False), (V5E, 100, 900, True), (V5E, 100, 2_000_000, False)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_resident_axis_needs_no_less_than_a_streamed_one(device, rows, length, fits):
    """So a schedule is left out where its least tiles do not fit with the axis resident."""
    args = [shape(rows, 5 * rows, dtype="bfloat16")] * 2 + [shape(length + k) for k in range(3)]
    graph = lower(trace(sums_of_many, *args)).graph
    scheduler = Scheduler(graph, device, features=Features(loop_nests=False))
    nodes = tuple(range(len(graph.nodes)))
    first, *others = scheduler._forms(nodes, scheduler.axes(nodes), boundary(graph, nodes))
    others = [form for form in others if form.tilings and not form.in_passes]
    assert others
    for form in others:
        assert first.leaves_room(form) == fits
        assert any(map(form._fits, range(len(form.tilings)))) == fits
        for tiles in form.tilings:
            resident, streamed = (f._footprint(f._make_spec(tiles).axes) for f in (first, form))
            assert resident.onchip_bytes <= streamed.onchip_bytes
            assert resident.register_bytes <= streamed.register_bytes


@pytest.mark.parametrize("name", ["softmax", "layernorm_grad", "mlp", "gated_mlp"])
def test_floor_is_below_every_price(name):
    f, args = get_workload(name).build()
    graph = lower(trace(f, *args)).graph
    scheduler = Scheduler(graph, H200)
    everything = tuple(range(len(graph.nodes)))
    singles = sum(scheduler.price((n,)).cost.time_ps for n in everything)
    assert scheduler.floor(everything) <= singles
    for nodes in itertools.chain(itertools.pairwise(everything), [everything]):
        kernel = scheduler.price(nodes)
        if isinstance(kernel, Kernel):
            assert scheduler.floor(nodes) <= kernel.cost.time_ps
            assert estimate(graph, kernel.spec, H200) == kernel.cost


@pytest.mark.parametrize(
    ("f", "allowed"),
    [(lambda w: w, True), (lambda w: w * 3, False), (jnp.exp, False), (lambda w: 3 / w, False)],
)
def test_xla_writes_what_two_reductions_read(f, allowed):
    """As the compiled program does: it holds the array that both read, unless that was given."""

    def two(w):
        x = f(w)
        return x.sum(1), x.max(1)

    w = shape(2048, 2048)
    graph = lower(trace(two, w)).graph
    verdict = Scheduler(graph, get_device("cpu")).compatible(tuple(range(len(graph.nodes))))
    assert (verdict is None) == allowed
    assert verdict is None or "for two reductions" in verdict.reason
    temp_bytes = jax.jit(two).lower(w).compile().memory_analysis().temp_size_in_bytes
    assert (temp_bytes < 2048 * 2048) == allowed


def test_of_tiles_that_nothing_beats_the_first_is_taken():
    """Though a vector takes more bytes in a TPU's memory than an array of so many numbers must."""
    f, args = get_workload("residual_norm").build("bfloat16")
    (kernel,) = fuseplan.make_plan(f, device="tpu_v5e")(*args).kernels
    assert kernel.spec.axes[0].tile == 512


def test_an_array_of_many_long_axes_has_few_tilings():
    """Four tiles of each of six outer axes alone would be 4,096 combinations."""
    graph = lower(trace(lambda x: jnp.tanh(x) * 2 - jnp.exp(x), shape(*(65,) * 7, 128))).graph
    found = list(Scheduler(graph, V5E).schedules(tuple(range(len(graph.nodes)))))
    tiled = {axis for spec in found for axis in range(8) if spec.axes[axis].tile > 1}
    assert 1 < len(found) < 2 * MOST_ROW_TILINGS
    assert 7 in tiled
    assert 0 not in tiled


def test_an_array_of_many_short_axes_has_few_tilings():
    """The state of twenty qubits: a choice for each axis would make a million."""
    graph = lower(trace(lambda x: jnp.tanh(x) * 2 - jnp.exp(x), shape(*(2,) * 20))).graph
    scheduler = Scheduler(graph, V5E)
    nodes = tuple(range(len(graph.nodes)))
    assert 1 < len(list(scheduler.schedules(nodes))) < 20_000
    assert isinstance(scheduler.price(nodes), Kernel)


def test_loops_of_a_cpu_take_the_place_of_a_slower_kernel_of_xla():
    """XLA could compute the group in one kernel, too: a library's sum of what it moves through a cache."""
    points = [jax.ShapeDtypeStruct((n, 8), "float32") for n in (4000, 3000)]
    lowered = lower(trace(lambda x, y: jnp.sqrt(((x[:, None] - y[None]) ** 2).sum(-1) + 1).mean(), *points))
    columns = by_columns(lowered, 1 << 20)
    cpu = replace(described_cpu(), private_cache_bytes_per_s=50 * 10**9)
    scheduler = Scheduler(columns.graph, cpu, columns)
    (offer,) = scheduler.offers
    found = scheduler.price(offer)
    without = Scheduler(columns.graph, cpu, features=Features(loop_nests=False)).price(offer)
    assert without.spec.backend == "xla"
    assert found.spec.capabilities.loop_nest
    assert found.cost.time_ps < without.cost.time_ps
