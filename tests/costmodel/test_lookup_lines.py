"""A CPU loads whole cache lines of a table that it reads by index."""

from dataclasses import replace

import jax
import pytest

import fuseplan
from costmodel.kernel import Axis, AxisRole, KernelSpec
from costmodel.loops import Block, Lookup, _lookup_ps
from fuseplan.workloads.lookups import embedding_bags
from tests.helpers.cpus import SERVER_CPU

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
        return _lookup_ps(spec, SERVER_CPU, Block((0, 1), 32, Lookup(((1,),), runs)), 1000 * tile * 4)

    few, many = 100, 100_000_000
    assert cost_of(64, few) == 64 * 1000 * 4 * 10**12 // SERVER_CPU.private_cache_bytes_per_s + 1
    assert cost_of(16, few) * 4 == pytest.approx(cost_of(64, few), rel=1e-6)
    assert cost_of(1, few) == cost_of(16, few)
    assert cost_of(1, many) / cost_of(1, few) == pytest.approx(140 / 26, rel=1e-6)
