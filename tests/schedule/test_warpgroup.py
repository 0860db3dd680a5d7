"""What the planner knows of Mosaic GPU: which blocks, dtypes and groups its kernels may have."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from costmodel import AxisRole, footprint, get_device
from fuseplan import make_plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.passes.recompute_streams import along_streams
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.schedule.addressing import block_order, is_addressable
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import check_plan
from fuseplan.workloads import get_workload
from tests.helpers.specs import P, S, Tiled, hand_spec, whole_group

pytestmark = pytest.mark.one_python

H200 = get_device("h200:mosaic_gpu")
TILED = Features(xla_loops=False)
ROWS, COLUMNS = ((0,), (1,)), ((1,), (0,))


@pytest.mark.parametrize(
    ("tiles", "maps", "held"),
    [
        ((4, 32), [ROWS, ((0,),), ((1,),), ()], True),
        ((6, 32), [ROWS], False),  # a row for each of four warps
        ((4, 48), [ROWS], False),  # a column for each of 32 lanes
        ((1, 128), [ROWS, ((0,),)], True),
        ((1, 96), [ROWS], False),  # an element for each of 128 threads
        ((1, 1), [ROWS, ()], True),
        ((4, 32), [ROWS, COLUMNS], False),  # exchanged between threads
        ((1, 128), [ROWS, COLUMNS], True),
        ((4, 32), [((0,),), ((1,),)], False),  # no value has both
        ((4, 32, 2), [((0,), (1,), (2,))], False),
        ((4, 32), [((0, 1),)], False),  # a vector of rows
        ((1, 128), [((0, 1),), ROWS], True),
    ],
)
def test_blocks_that_threads_hold(tiles, maps, held):
    assert is_addressable([n * 2 for n in tiles], tiles, maps) is held


@pytest.mark.parametrize(
    ("sizes", "tiles", "fits"),
    [
        ((256, 128, 512), (128, 64, 64), True),
        ((256, 128, 512), (32, 64, 64), False),  # less than the rows of a wgmma
        ((200, 128, 512), (64, 64, 64), False),  # rows past the end
        ((256, 128, 100), (64, 64, 64), False),
        ((512, 128, 512), (512, 64, 64), False),  # more than one copy takes
    ],
)
def test_blocks_that_are_multiplied(sizes, tiles, fits):
    maps = [((0,), (2,)), ((2,), (1,)), ((0,), (1,)), ((1,),)]
    assert is_addressable(sizes, tiles, maps, depth=(2,)) is fits
    # An operand whose innermost dimension is cut to one element is no matrix in memory.
    assert not is_addressable((*sizes, 2), (*tiles, 1), [((0,), (2,), (3,)), *maps[1:]], depth=(2,))


def test_order_of_axes():
    assert block_order((1, 8, 64), [((0,), (1,)), ((1,), (2,)), ()]) == (1, 2)
    assert block_order((1, 1), [ROWS]) == ()


def planned(f, *shapes, dtype="float32", device=H200):
    """The plan without loops of XLA, which also has products with epilogues."""
    arrays = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return make_plan(f, device=device, features=Features(xla_loops=False))(*arrays)


def groups(plan):
    """What each kernel of Mosaic GPU evaluates."""
    ops = [node.op for node in plan.graph.nodes]
    return [[ops[n] for n in k.spec.nodes] for k in plan.kernels if k.spec.backend == "mosaic_gpu"]


def epilogue(x, w):
    return jnp.tanh(x @ w) * 2


def test_sixteen_bit_matmuls_take_an_epilogue_and_no_prologue():
    assert groups(planned(epilogue, (256, 256), (256, 256), dtype="bfloat16")) == [
        ["dot_general", "tanh", "mul"]
    ]
    (only,) = groups(
        planned(lambda x, w: epilogue(jnp.exp(x) + 1, w), (256, 256), (256, 256), dtype="bfloat16")
    )[1:]
    assert only[0] == "dot_general"


@pytest.mark.parametrize(
    ("shape", "dtype"), [((256, 256), "float32"), ((250, 256), "bfloat16"), ((256, 200), "float16")]
)
def test_other_matmuls_are_left_to_xla(shape, dtype):
    plan = planned(epilogue, shape, (shape[1], 256), dtype=dtype)
    assert all("dot_general" not in group for group in groups(plan))
    assert groups(plan)


def test_a_matmul_of_xla_keeps_its_epilogue():
    """Of float32 no warpgroup multiplies, and XLA's product has the operations after it."""
    args = [jax.ShapeDtypeStruct((rows, 256), "float32") for rows in (4096, 256)]
    (kernel,) = make_plan(epilogue, device=H200)(*args).kernels
    assert (kernel.spec.backend, len(kernel.spec.nodes)) == ("xla", 3)


def test_booleans_stay_inside():
    def f(x, y):
        mask = x > y
        return jnp.where(mask, x, y) * 2, mask

    plan = planned(f, (256, 256), (256, 256))
    assert groups(plan) == []
    assert any("arrays of bool" in v.reason for v in plan.refusals)
    assert len(groups(planned(lambda x, y: f(x, y)[0], (256, 256), (256, 256)))) == 1


def test_rows_that_threads_cannot_share_are_left_to_xla():
    (whole,) = groups(planned(jax.nn.softmax, (64, 1024)))
    assert {"reduce_max", "reduce_sum", "div"} <= set(whole)
    assert all("reduce_sum" not in group for group in groups(planned(jax.nn.softmax, (64, 1000))))
    # Nor are rows walked in passes.
    assert all(k.spec.passes == () for k in planned(jax.nn.softmax, (512, 2**19)).kernels)


BESIDE = 16 * 4 * 128
"""Sixteen registers of each thread of a kernel of one warpgroup."""


def test_a_warpgroup_has_half_of_the_registers():
    lowered = whole_group(jax.nn.softmax, jnp.zeros((64, 1024)))
    spec = hand_spec(lowered, "mosaic_gpu", Tiled(0, 0, P, 8))
    triton = dataclasses.replace(spec, backend="triton")
    need, whole = (footprint(lowered.graph, s, H200) for s in (spec, triton))
    assert need.register_bytes == 2 * (whole.register_bytes + BESIDE)


@pytest.mark.parametrize(("rows", "share"), [(64, 2), (128, 1), (192, 2), (256, 1)])
def test_two_warpgroups_multiply_multiples_of_128_rows(rows, share):
    lowered = whole_group(epilogue, jnp.zeros((768, 256), "bfloat16"), jnp.zeros((256, 256), "bfloat16"))
    spec = hand_spec(lowered, "mosaic_gpu", Tiled(-1, 0, P, rows), Tiled(-1, 1, P, 64), Tiled(0, 1, S, 64))
    triton = dataclasses.replace(spec, backend="triton")
    need, whole = (footprint(lowered.graph, s, H200) for s in (spec, triton))
    assert need.register_bytes == share * (whole.register_bytes + (share - 1) * BESIDE)
    assert need.onchip_bytes == whole.onchip_bytes == 2 * (rows + 64) * 64 * 2


def test_schedules_of_a_contraction_divide_it():
    args = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((384, 320), (320, 192)))
    scheduler = Scheduler(lower(trace(epilogue, *args)).graph, H200)
    specs = list(scheduler.schedules((0, 1, 2)))
    assert specs
    for spec in specs:
        assert all(axis.tile % 64 == 0 and axis.size % axis.tile == 0 for axis in spec.axes)
        assert [axis.role for axis in spec.axes].count(AxisRole.STREAMED) == 1


@pytest.mark.parametrize("name", ["causal_attention", "gated_mlp", "cross_entropy"])
def test_no_kernel_walks_in_passes_or_holds_two_contractions(name):
    f, args = get_workload(name).build(dtype="bfloat16")
    lowered = lower(trace(f, *args))
    for device, has_any in ((H200, False), (get_device("h200"), True)):
        offers = Scheduler(lowered.graph, device, lowered, TILED).offers
        assert bool(offers) is (has_any and name != "cross_entropy")
    assert along_streams(lowered, H200, ALL_FEATURES) == (None, False)
    plan = make_plan(f, device=H200)(*args)
    assert groups(plan)
    for kernel in plan.kernels:
        assert kernel.spec.passes == ()
        assert sum(plan.graph.nodes[n].flops.matrix > 0 for n in kernel.spec.nodes) <= 1


def test_a_kernel_in_passes_is_refused():
    plan = planned(jax.nn.softmax, (512, 2**19), device=get_device("h200"))
    assert any(kernel.spec.passes for kernel in plan.kernels)
    check_plan(plan)
    kernels = tuple(
        dataclasses.replace(k, spec=dataclasses.replace(k.spec, backend=H200.backend)) for k in plan.kernels
    )
    with pytest.raises(InvalidPlanError, match="in passes"):
        check_plan(dataclasses.replace(plan, device=H200, kernels=kernels))


def test_what_cuts_or_picks_is_left_to_xla():
    def f(x, y, i):
        pairs = jnp.concatenate([x[:, 512:], x[:, :512]], 1) * y
        return jnp.tanh(pairs) + jnp.take_along_axis(x, i[:, None], 1), jnp.cumsum(y, 1) * 2

    args = (jax.ShapeDtypeStruct(s, d) for s, d in (((64, 1024), "float32"),) * 2 + (((64,), "int32"),))
    plan = make_plan(f, device=H200, features=TILED)(*args)
    held = {op for group in groups(plan) for op in group}
    assert {"tanh", "add"} <= held
    assert held.isdisjoint({"slice", "concatenate", "gather", "cumsum"})
