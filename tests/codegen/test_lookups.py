"""Kernels that load by index, Triton's, in Pallas' interpreter against ``jax.jit``: lookups in tables."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import lax

import fuseplan
from costmodel import get_device
from costmodel.axes import unify
from costmodel.graph import DimRole, boundary
from costmodel.kernel import looked_up
from costmodel.traffic import bytes_moved
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.tolerance import check_results
from fuseplan.schedule.nests.accelerator import kernel_nests
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.settings import make_options
from fuseplan.support.errors import Verdict
from fuseplan.verify.plan import check_plan
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import kernel_function, whole_group

pytestmark = pytest.mark.usefixtures("compiled_quickly")

H200 = get_device("h200")
TILED = Features(xla_loops=False)
"""XLA's loops hold lookups as well."""


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")


def places(n, *shape, outside=0, seed=1, dtype="int32"):
    """Indices of ``n`` places, and of ``outside`` ones before and after them."""
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -outside
    return jnp.asarray(np.random.default_rng(seed).integers(low, n + outside, shape).astype(dtype))


def planned(f, *args, features=TILED):
    """The kernels of ours that look up, after the results of a plan for a GPU were compared with JAX's."""
    traced = trace(f, *args)
    options = make_options("h200", deadline_s=120, features=features)
    lowered, plan = plan_traced(traced, options)
    flat = [*lowered.consts, *jax.tree.leaves(args)]
    got = run_quickly(make_runner(lowered, plan, platform="cpu", interpret=True), *flat)
    check_results(str(plan), got, run_quickly(traced.evaluate, *flat))
    return [k for k in plan.kernels if k.spec.axes and looked_up(plan.graph, k.spec)]


def on_schedules(f, *args, most=5):
    """All of ``f`` as one kernel, by some of its schedules: the first and the last, and some between."""
    lowered = whole_group(f, *args)
    nodes = tuple(range(len(lowered.graph.nodes)))
    every = list(Scheduler(lowered.graph, H200, lowered).schedules(nodes))
    chosen = [every[i] for i in sorted({*range(0, len(every), -(-len(every) // most)), len(every) - 1})]
    want = jax.tree.leaves(run_quickly(f, *args))
    for spec in chosen:
        assert looked_up(lowered.graph, spec)
        got = run_quickly(kernel_function(spec, lowered, interpret=True), *args)
        check_results(str(spec.axes), list(got), want)
    return chosen


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def windows(x, i, *shape):
    return jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), shape))(i)


TABLE = normal(19, 13)
LOOKUPS = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "elements": lambda x, i: x[i, i[::-1]],
    "of a vector": lambda x, i: x.reshape(-1)[i],
    "many a row": lambda x, i: jnp.take_along_axis(x, jnp.stack([i, i + 1, i], 1)[:19], 1),
    "table of indices": lambda x, i: x[jnp.stack([i, i[::-1], i])],
    "long windows": lambda x, i: windows(x, i, 3, 13),
    "small windows": lambda x, i: windows(x, i, 2, 5),
    "batches of tables": lambda x, i: jax.vmap(lambda x, i: x[i])(jnp.stack([x, -x]), jnp.stack([i, i + 1])),
    "one table for batches": lambda x, i: jax.vmap(lambda i: x[i])(jnp.stack([i, i + 1])),
    "transposed": lambda x, i: x[i].T,
    "a row alone": lambda x, i: x[i[:1]],
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    """Of indices inside of the table, before it and behind it; the last tile reaches past the indices."""
    kernels = planned(lambda x, i: jnp.tanh(LOOKUPS[name](x, i)) * 2, TABLE, places(19, 21, outside=25))
    assert kernels or name == "a row alone", "it is a slice"


MODES = {
    "fill": {"mode": "fill"},
    "fill a number": {"mode": "fill", "fill_value": -2},
    "clip": {"mode": "clip"},
    "promise": {"mode": "promise_in_bounds"},
}


@pytest.mark.parametrize("table", ["float32", "bfloat16", "int8", "uint32", "bool"])
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, table):
    x = TABLE > 0 if table == "bool" else (TABLE * 9).astype("int32").astype(table)
    how = {**MODES[mode], **({"fill_value": True} if (mode, table) == ("fill a number", "bool") else {})}
    if table == "uint32" and "fill_value" in how:
        how["fill_value"] = 2
    (kernel,) = planned(
        lambda x, i: jnp.where(x.at[i].get(**how) != 0, 3, x.at[i].get(**how)), x, places(19, 21, outside=7)
    )
    assert len(kernel.spec.nodes) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "count"),
    # JAX takes no int8 indices of more places than they count.
    [("int8", 9), ("uint8", 9), ("uint8", 300), ("int16", 300), ("uint32", 300), ("int32", 9)],
)
def test_indices(dtype, count, mode):
    """Of every dtype, with the largest ones, and a table longer than some of them count."""
    i = places(min(count, 100), 21, outside=25, dtype=dtype)
    i = i.at[3].set(jnp.iinfo(dtype).max).at[4].set(jnp.iinfo(dtype).min)
    assert planned(lambda x, i: x.at[i].get(**MODES[mode]) * 2, normal(count, 5), i)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_indices_of_64_bits(dtype, mode):
    with jax.enable_x64(True):
        i = places(19, 21, outside=25, dtype=dtype)
        i = i.at[3].set(jnp.iinfo(dtype).max).at[4].set(jnp.iinfo(dtype).min).at[5].set((1 << 32) + 3)
        assert planned(lambda x, i: x.at[i].get(**MODES[mode]) * 2, TABLE, i)


def test_special_values_stay_in_their_rows():
    x = normal(19, 130).at[3, 5].set(jnp.nan).at[4].set(-jnp.inf).at[7, 129].set(jnp.inf)
    i = places(19, 21, outside=3)
    (kernel,) = planned(lambda x, i: jax.nn.softmax(jnp.take(x, i, 0, mode="fill"), -1), x, i)
    assert kernel.cost.hbm_write_bytes == 4 * 21 * 130


def energy(x, k, i, j):
    return k * (jnp.sqrt(((x[i] - x[j]) ** 2).sum(-1) + 1e-6) - 1) ** 2


def bags(table, weights, i):
    return (table[i] * weights[..., None]).sum(1)


def attention(q, k, v, i):
    return jax.nn.softmax(q @ k[i].T / 8, -1) @ v[i]


def row_logits(x, w, i):
    return x[i] @ w


PROGRAMS = {
    "normalised embeddings": (
        lambda t, i, p, s: norm(t[i] + p) * s,
        (normal(50, 130), places(50, 21), normal(21, 130, seed=2), normal(130, seed=3)),
    ),
    "softmax of rows": (lambda t, i: jax.nn.softmax(t[i], -1), (normal(50, 130), places(50, 5, 7))),
    "bags": (bags, (normal(50, 33), normal(9, 12, seed=2), places(50, 9, 12))),
    "pairs": (energy, (normal(50, 3), normal(77, seed=2), places(50, 77), places(50, 77, seed=4))),
    "computed indices": (
        lambda t, x: t[jnp.clip((x * 9).astype(jnp.int32), -3, 3) + 25] * x[..., None],
        (normal(50, 33), normal(9, 12, seed=2)),
    ),
    "the same rows of two tables": (
        lambda t, u, i: (t[i] * u[i]).sum(-1), (normal(50, 33), normal(50, 33, seed=2), places(50, 21)),
    ),
    "a table beside its rows": (lambda t, i: t[i] - t.sum(0), (normal(21, 33), places(21, 21))),
    "rows of logits": (row_logits, (normal(50, 64), normal(64, 33, seed=2), places(50, 40))),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_kernel_on_its_schedules(name):
    """Nothing that is gathered is written."""
    f, args = PROGRAMS[name]
    on_schedules(f, *args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans(name):
    f, args = PROGRAMS[name]
    planned(f, *args)


def test_attention_over_gathered_keys():
    """Is one kernel where that is faster, and each of its schedules computes it."""
    args = (*(normal(40, 16, seed=s) for s in range(3)), places(40, 50))
    lowered = whole_group(attention, *args)
    nodes = tuple(range(len(lowered.graph.nodes)))
    axes, edge = unify(lowered.graph, nodes, by_index=True), boundary(lowered.graph, nodes)
    specs = list(kernel_nests(lowered.graph, nodes, axes, edge, "triton"))
    for spec in specs[:: -(-len(specs) // 5)]:
        got = run_quickly(kernel_function(spec, lowered, interpret=True), *args)
        check_results(str(spec.axes), list(got), [run_quickly(attention, *args)])
    shapes = [jax.ShapeDtypeStruct((4096, 64), "bfloat16")] * 3
    (kernel,) = fuseplan.make_plan(attention, device="h200")(
        *shapes, jax.ShapeDtypeStruct((4096,), "int32")
    ).kernels
    assert kernel.spec.backend == "triton"
    assert planned(attention, *args)


@pytest.mark.parametrize("name", ["normalised embeddings", "bags", "pairs", "rows of logits"])
def test_gradients(name):
    """Of which sums into the table are left to XLA."""
    f, args = PROGRAMS[name]
    floats = tuple(n for n, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
    assert planned(jax.grad(lambda *args: (f(*args) ** 2).sum(), floats), *args)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_empty_indices(shape):
    assert not planned(lambda x, i: jnp.tanh(x[i]) * 2, TABLE, jnp.zeros(shape, "int32"))


def test_a_table_of_one_row_has_no_addresses():
    lowered = lower(trace(lambda x, i: x[i], TABLE[:1], places(19, 21)))
    (node,) = (n for n in lowered.graph.nodes if n.op == "gather")
    assert node.backends == ("xla", "loops")
    assert not planned(lambda x, i: jnp.tanh(x[i]) * 2, TABLE[:1], places(1, 21, outside=3))


def test_a_computed_table_is_written_first():
    def f(x, i):
        return jnp.tanh(jnp.exp(x)[i])

    lowered = whole_group(f, TABLE, places(19, 21))
    nodes = tuple(range(len(lowered.graph.nodes)))
    refused = Scheduler(lowered.graph, H200, lowered, TILED).price(nodes)
    assert refused.reason == (
        "gather reads f32[19,13] at addresses in memory, and exp would make it in the same kernel"
    )
    (kernel,) = planned(f, TABLE, places(19, 21))
    assert "exp" not in {lowered.graph.nodes[n].op for n in kernel.spec.nodes}


@pytest.mark.parametrize("device", ["tpu_v5e", "h200:mosaic_gpu"])
def test_other_kernels_have_no_lookups(device):
    lowered = lower(trace(lambda x, i: jnp.tanh(x[i]) * 2, TABLE, places(19, 21)))
    (node,) = (n for n in lowered.graph.nodes if n.op == "gather")
    assert DimRole.ADDRESSED in node.roles
    assert get_device(device).backend not in node.backends


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_lookups(data):
    """Chains of lookups by arguments or by what was computed, elementwise operations and reductions."""
    n, m = data.draw(st.sampled_from([2, 5, 33])), data.draw(st.sampled_from([2, 7, 16, 65]))
    rank = data.draw(st.integers(1, 2))
    i = places(n, *((9, 5)[:rank]), outside=data.draw(st.sampled_from([0, 3])), seed=n + m)
    mode = data.draw(st.sampled_from(sorted(MODES)))
    steps = data.draw(st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=4))

    def f(x, y, i):
        z = x.at[i].get(**MODES[mode])
        for step in steps:
            z = _STEPS[step](z, y, i)
        return z

    planned(f, normal(n, m), normal(n, m, seed=5), i)


_STEPS = {
    "tanh": lambda z, y, i: jnp.tanh(z),
    "norm": lambda z, y, i: norm(z),
    "softmax": lambda z, y, i: jax.nn.softmax(z, -1),
    "minus": lambda z, y, i: z - y[i],
    "sum": lambda z, y, i: z + z.sum(0, keepdims=True),
    "rows of the nearest": lambda z, y, i: z * y[jnp.nan_to_num(z[..., 0] * 2).astype(jnp.int32)],
    "mean": lambda z, y, i: z - z.mean(),
}


def embeddings(t, i, p):
    return norm(t[i] + p)


def plan_of_embeddings(rows, device="h200"):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((rows, 768), (8192, 768))]
    return fuseplan.make_plan(embeddings, device=device)(
        shapes[0], jax.ShapeDtypeStruct((8192,), "int32"), shapes[1]
    )


@pytest.mark.parametrize("rows", [64, 50_257])
def test_what_is_looked_up_counts_once(rows):
    """No more bytes of a table are read than it has, nor than the looked-up rows."""
    (kernel,) = plan_of_embeddings(rows).kernels
    array = 4 * 8192 * 768
    assert kernel.cost.hbm_read_bytes == min(array, 4 * rows * 768) + 4 * 8192 + array
    assert kernel.cost.hbm_write_bytes == array


def test_each_tile_loads_its_own_rows():
    """A product of looked-up rows loads them for each tile of its columns."""
    lowered = whole_group(
        lambda x, i, w: x[i] @ w,
        *(jax.ShapeDtypeStruct(s, d) for s, d in (((9000, 512), "float32"), ((4096,), "int32"))),
        jax.ShapeDtypeStruct((512, 1024), "float32"),
    )
    graph, nodes = lowered.graph, tuple(range(len(lowered.graph.nodes)))
    for spec in Scheduler(graph, H200, lowered).schedules(nodes):
        ((_, (rows,)),) = looked_up(graph, spec).items()
        columns = [a for a, axis in enumerate(spec.axes) if axis.size == 1024]
        without = replace(spec, axes=tuple(replace(a, tile=a.size) for a in spec.axes))
        loaded = bytes_moved(graph, spec, H200).loaded_bytes
        assert rows.axis_set.isdisjoint(columns)
        tiles = prod(spec.axes[a].n_tiles for a in columns)
        of_rows = 4 * 4096 * 512 * tiles
        assert of_rows <= loaded
        assert bytes_moved(graph, without, H200).hbm_read_bytes == 4 * (4096 * 512 + 512 * 1024 + 4096)


def test_plans_are_written_read_and_verified():
    plan = plan_of_embeddings(50_257)
    again = fuseplan.Plan.from_json(plan.to_json())
    assert again.kernels == plan.kernels
    again.verify()


def test_a_kernel_with_axes_of_places_is_refused():
    plan = plan_of_embeddings(64)
    (kernel,) = plan.kernels
    at = next(i for i, n in enumerate(kernel.spec.nodes) if DimRole.ADDRESSED in plan.graph.nodes[n].roles)
    roles = plan.graph.nodes[kernel.spec.nodes[at]].roles
    own = list(kernel.spec.node_axes)
    own[at] = tuple((0,) if role == DimRole.ADDRESSED else a for a, role in zip(own[at], roles, strict=True))
    forged = replace(plan, kernels=(replace(kernel, spec=replace(kernel.spec, node_axes=tuple(own))),))
    with pytest.raises(fuseplan.InvalidPlanError, match="looks up places"):
        check_plan(forged)


@pytest.mark.parametrize("name", [*PROGRAMS, "columns"])
def test_no_schedule_beats_its_bounds(name):
    """And no test of larger groups refuses a group that has a kernel."""
    f, args = PROGRAMS.get(name, (lambda x, i: jnp.exp(x[:, i]).sum(0), (normal(19, 50), places(50, 7))))
    lowered = whole_group(f, *args)
    scheduler = Scheduler(lowered.graph, H200, lowered, TILED)
    nodes = tuple(range(len(lowered.graph.nodes)))
    for first in nodes[:-1]:
        group, edge = nodes[first:], boundary(lowered.graph, nodes[first:])
        kernel = scheduler.price(group)
        if isinstance(kernel, Verdict):
            continue
        crossing = frozenset(edge.reads + edge.writes)
        assert scheduler.oversized(group, crossing) is None
        assert scheduler.oversized_beside(group, crossing, ()) is None
        assert scheduler.oversized_beside(group, crossing, nodes[:first]) is None
        assert scheduler.least(group) <= kernel.cost.time_ps
        floor = scheduler.partial_floor([(n,) for n in nodes])
        inside = np.array([[n in group for n in nodes]])
        assert floor(inside, inside)[0] <= kernel.cost.time_ps
