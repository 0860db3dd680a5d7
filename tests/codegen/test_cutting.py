"""Where the parts of a dimension lie, and what is one kernel for that."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import fuseplan
from costmodel.kernel import Axis, AxisRole, KernelSpec
from fuseplan.codegen.tile import is_scattered, scattered_index
from fuseplan.frontend.ops.slices import windows_in
from fuseplan.workloads import get_workload
from tests.helpers.cutting_cases import qkv, rope_by_pairs, rope_by_reshape, rope_by_slices

pytestmark = pytest.mark.one_python


@pytest.mark.parametrize(("extent", "stride"), [(12, 1), (12, 2), (12, 3), (7, 1), (16, 4)])
def test_windows_are_slices(extent, stride):
    x = np.arange(extent)
    for start, end in itertools.combinations(range(extent + 1), 2):
        taken = x[start:end:stride]
        (w,) = windows_in(extent, [(start, len(taken))], stride)
        whole = x.reshape(w.parts, w.rest, w.stride)
        np.testing.assert_array_equal(whole[w.first : w.first + w.count, :, w.phase].reshape(-1), taken)


SIZES = (3, 5, 7)


@pytest.mark.parametrize("tiles", [(4, 8, 8), (1, 2, 8), (2, 4, 8), (4, 1, 4), (2, 8, 2)])
def test_scattered_blocks_cover_the_array_once(tiles):
    axes = tuple(Axis(n, AxisRole.PARALLEL, t) for n, t in zip(SIZES, tiles, strict=True))
    spec = KernelSpec((), axes, (), (), ())
    assert is_scattered(spec, (0, 1, 2))
    shape = (int(np.prod(tiles)),)
    at = []
    for position in itertools.product(*(range(a.n_tiles) for a in axes)):
        index, inside = scattered_index(spec, (0, 1, 2), position, shape, 0)
        at += np.asarray(index)[np.asarray(inside)].tolist()
    assert sorted(at) == list(range(3 * 5 * 7))


@pytest.mark.parametrize("tiles", [(1, 1, 4), (1, 1, 7), (1, 2, 7), (2, 5, 7)])
def test_runs_of_neighbours_are_not_scattered(tiles):
    axes = tuple(Axis(n, AxisRole.PARALLEL, t) for n, t in zip((4, 5, 7), tiles, strict=True))
    scattered = is_scattered(KernelSpec((), axes, (), (), ()), (0, 1, 2))
    assert scattered == any(a.ragged for a in axes[1:])


def kernels(f, shapes, device):
    plan = fuseplan.make_plan(f, device=device)(*(jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes))
    assert plan.status == "OPTIMAL"
    alone = [plan.graph.nodes[k.spec.nodes[0]] for k in plan.kernels if len(k.spec.nodes) == 1]
    return len(plan.kernels) - sum(node.bitcast for node in alone)


HEADS, TABLE = (1024, 12, 64), (1024, 1, 64)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("f", [rope_by_slices, rope_by_reshape, rope_by_pairs], ids=lambda f: f.__name__)
def test_rotary_embedding_is_one_kernel(f, device):
    # Neighbours in a lane are taken apart by XLA on a TPU, which also joins them for its own last loop.
    assert kernels(f, (HEADS, TABLE, TABLE), device) == (
        4 if (f, device) == (rope_by_pairs, "tpu_v5e") else 1
    )


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_heads_of_one_projection_are_one_kernel(device):
    assert kernels(qkv, ((1024, 2304), (2304,)), device) == 1


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize(("name", "most"), [("rope", 1), ("cross_entropy", 2), ("cross_entropy_grad", 2)])
def test_workloads(name, most, device):
    f, args = get_workload(name).build()
    plan = fuseplan.make_plan(f, device=device)(*args)
    assert plan.status == "OPTIMAL"
    assert sum(k.spec.backend != "xla" for k in plan.kernels) <= most
    assert all(plan.graph.nodes[k.spec.nodes[0]].bitcast for k in plan.kernels if k.spec.backend == "xla")
