"""A CPU loads whole cache lines of a table that it reads by index."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.kernel import Axis, AxisRole, KernelSpec
from costmodel.loops import Block, Lookup, _lookup_ps, nest_cost
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.workloads.lookups import embedding_bags
from tests.helpers.cpus import SERVER_CPU
from tests.helpers.nests import every_nest, groups

TABLE = jax.ShapeDtypeStruct((50_000, 64), "float32")
WEIGHTS = jax.ShapeDtypeStruct((20_000, 32), "float32")
INDICES = jax.ShapeDtypeStruct((20_000, 32), "int32")


@pytest.mark.one_python
@pytest.mark.parametrize("cache_bytes_per_s", [36 * 10**9, 150 * 10**9])
def test_rows_of_a_table_are_taken_whole(cache_bytes_per_s):
    """A tile of some columns would load the lines of the whole table again for each of them."""
    cpu = replace(SERVER_CPU, cache_bytes_per_s=cache_bytes_per_s, private_cache_bytes_per_s=150 * 10**9)
    plan = fuseplan.make_plan(embedding_bags, device=cpu)(TABLE, WEIGHTS, INDICES)
    (loops,) = [k for k in plan.kernels if k.spec.capabilities.loop_nest]
    columns = [a for a in loops.spec.axes if a.size == 64]
    assert [a.tile for a in columns] == [64]
    assert all(a.role == AxisRole.PARALLEL or a.n_tiles == 1 for a in columns)


def test_elements_of_a_table_cost_a_line_each():
    """Runs of a line or more cost their bytes, shorter ones a line, of the memory that holds all of them."""

    def cost_of(tile, runs):
        axes = (Axis(1000, AxisRole.PARALLEL, 1000), Axis(64, AxisRole.PARALLEL, tile))
        spec = KernelSpec((), axes, (), (), ())
        return _lookup_ps(spec, SERVER_CPU, Block((0, 1), 32, Lookup(((1,),), runs, ())), 1000 * tile * 4)

    few, many = 100, 100_000_000
    assert cost_of(64, few) == 64 * 1000 * 4 * 10**12 // SERVER_CPU.private_cache_bytes_per_s + 1
    assert cost_of(16, few) * 4 == pytest.approx(cost_of(64, few), rel=1e-6)
    assert cost_of(1, few) == cost_of(16, few)
    assert cost_of(1, many) / cost_of(1, few) == pytest.approx(140 / 26, rel=1e-6)


def test_the_tables_of_a_batch_are_held_together():
    """Each index along a batch dimension, and along one behind a cut run, has runs of its own."""

    cpu = replace(SERVER_CPU, cache_bytes_per_s=36 * 10**9)

    def cost_of(batch, heads, columns):
        axes = (Axis(64, AxisRole.PARALLEL, batch), Axis(8, AxisRole.PARALLEL, heads),
                Axis(64, AxisRole.PARALLEL, columns))  # fmt: skip
        spec = KernelSpec((), axes, (), (), ())
        block = Block((0, 1, 2), 32, Lookup(((2,), (1,)), 1000, (0,)))
        return _lookup_ps(spec, cpu, block, 10**6)

    near, shared = cpu.private_cache_bytes_per_s, cpu.cache_bytes_per_s
    assert cost_of(1, 1, 64) == -(-(10**18) // near)  # 1,000 rows of 256 bytes
    assert cost_of(64, 1, 64) == -(-(10**18) // shared)  # 64 such tables
    assert cost_of(1, 8, 16) == -(-(10**18) // near)
    assert cost_of(8, 8, 16) == -(-(10**18) // shared)


def test_rows_that_nothing_looks_up_are_not_loaded():
    """Of a table of 1 GB, a loop nest loads no more bytes than it looks up."""
    table = jax.ShapeDtypeStruct((4_000_000, 64), "float32")
    plan = fuseplan.make_plan(embedding_bags, device=SERVER_CPU)(table, WEIGHTS, INDICES)
    (loops,) = [k for k in plan.kernels if k.spec.capabilities.loop_nest]
    looked_up = 20_000 * 32 * 64 * 4
    assert looked_up < loops.cost.hbm_read_bytes < 1.2 * looked_up


@pytest.mark.one_python
def test_a_lookup_does_not_hide_what_others_read():
    """The price of a softmax beside the lookup of one of its elements, whichever comes first."""

    def first(logits, labels):
        at = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jax.nn.logsumexp(logits, -1) - at

    def last(logits, labels):
        total = jax.nn.logsumexp(logits, -1)
        return total - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]

    logits, labels = jax.ShapeDtypeStruct((4096, 8192), "float32"), jax.ShapeDtypeStruct((4096,), "int32")
    costs = []
    for f in (first, last):
        lowered = lower(trace(f, logits, labels))
        nests = [spec for nodes in groups(lowered) for spec in every_nest(lowered, nodes, {4096: 64})]
        assert nests
        costs.append({nest_cost(lowered.graph, spec, SERVER_CPU).time_ps for spec in nests})
    assert costs[0] == costs[1]
