"""What may be done to blocks that are padded: the rule, and plans that break it."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from costmodel.graph import Graph
from costmodel.roofline import estimate
from fuseplan import Kernel, Plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.schedule.addressing import can_regroup, keeps_ranks, regroups
from fuseplan.schedule.legality import refuse_nest
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import check_plan
from fuseplan.verify.report import REFUTED, verify_plan

pytestmark = pytest.mark.one_python

RESHAPES = [
    ((3, 5), (5, 3)),
    ((6, 8, 7), (7, 8, 6)),
    ((6, 6), (4, 9)),
    ((12, 10), (10, 12)),
    ((6, 10), (10, 6)),
    ((8, 6, 6), (6, 6, 8)),
    ((3, 1000), (1000, 3)),
    ((3, 5, 7), (7, 15)),
]


def reshaped(old, new):
    return trace(lambda x: jnp.sin(x).reshape(new) * 2, jax.ShapeDtypeStruct(old, "float32"))


def unchecked(graph: Graph, name: str) -> Plan:
    """All operations in one kernel, as its schedule is without the rules."""
    device = get_device(name)
    nodes = tuple(range(len(graph.nodes)))
    spec = next(Scheduler(graph, device).schedules(nodes))
    return Plan(
        graph, device, "by hand", (Kernel(spec, estimate(graph, spec, device)),), (), "FEASIBLE", None
    )


@pytest.mark.parametrize(("old", "new"), RESHAPES)
def test_a_kernel_that_reshapes_padding_is_refuted(old, new):
    plan = unchecked(lower(reshaped(old, new)).graph, "h200")
    with pytest.raises(InvalidPlanError, match=r"in row-major order, but its block .* has padding between"):
        check_plan(plan)
    with pytest.raises(InvalidPlanError, match="has padding between"):
        Plan.from_json(plan.to_json())
    report = verify_plan(plan)
    assert report.status == REFUTED
    assert "has padding between" in report.reason


@pytest.mark.parametrize(("old", "new"), RESHAPES)
def test_what_is_not_padded_is_one_kernel(old, new):
    plan = unchecked(lower(reshaped(old, new)).graph, "tpu_v5e")
    assert check_plan(plan) is plan
    made = fuseplan.make_plan(lambda x: jnp.sin(x).reshape(new) * 2, device="tpu_v5e")
    assert len(made(jax.ShapeDtypeStruct(old, "float32")).kernels) == 1


@pytest.mark.parametrize("backend", ["triton", "mosaic_gpu"])
@pytest.mark.parametrize(("old", "new"), RESHAPES)
def test_the_reason_names_value_and_block(old, new, backend):
    graph = lower(reshaped(old, new)).graph
    device = get_device("h200" if backend == "triton" else "h200:mosaic_gpu")
    scheduler = Scheduler(graph, device, features=Features(xla_loops=False))
    for nodes in ((0, 1), (1, 2), (0, 1, 2)):
        verdict = scheduler.compatible(nodes)
        assert verdict == scheduler.price(nodes) == refuse_nest(graph, backend, nodes, scheduler.axes)
        assert verdict.nodes == (1,)
        assert f"{graph.values[1]} to {graph.values[2]}" in verdict.reason
        if backend == "triton":
            blocks = [[1 << (n - 1).bit_length() for n in shape] for shape in (old, new)]
            assert all(str(b).replace(" ", "") in verdict.reason for b in blocks)


def test_the_plan_says_why():
    make = fuseplan.make_plan(
        lambda x: jnp.sin(x).reshape(5, 3) * 2, device="h200", features=Features(xla_loops=False)
    )
    plan = make(jax.ShapeDtypeStruct((3, 5), "float32"))
    assert "would move the padding of its block [4,8]" in str(plan.explain(0, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [((6, 35), (6, 5, 7)), ((3, 5, 7), (15, 7)), ((8, 16), (4, 32)), ((6, 8), (3, 16)), ((5,), (5, 1))],
)
@pytest.mark.parametrize("backend", ["triton", "mosaic_tpu"])
def test_whole_axes_are_split_and_merged_whatever_the_padding(old, new, backend):
    node = lower(reshaped(old, new)).graph.nodes[1]
    assert not regroups(node)


def test_ranks_are_kept_exactly_where_numpy_keeps_them():
    """By enumeration: blocks of three axes, every tile at least as long as its axis."""
    for sizes in np.ndindex(4, 4, 4):
        sizes = tuple(n + 1 for n in sizes)
        for extra in np.ndindex(2, 2, 2):
            tiles = tuple(n + more for n, more in zip(sizes, extra, strict=True))
            block = np.full(tiles, -1)
            block[tuple(map(slice, sizes))] = np.arange(math.prod(sizes)).reshape(sizes)
            flat = block.reshape(-1)[: math.prod(sizes)]
            kept = np.array_equal(flat, np.arange(math.prod(sizes)))
            assert keeps_ranks(sizes, tiles, (0, 1, 2)) <= kept
            if all(n > 1 for n in sizes):  # Padding after the only element is before none.
                assert keeps_ranks(sizes, tiles, (0, 1, 2)) == kept


@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (lambda x: x[1:3], (5,)),
        (lambda x: jnp.pad(x, (1, 2)), (5,)),
        (lambda x: x.T, (3, 5)),
        (lambda x: jnp.broadcast_to(x[:, None], (3, 1, 5)), (3, 5)),
        (lambda x: jnp.flip(x), (3, 5)),
        (lambda x: x.sum(0), (1, 5)),
    ],
)
def test_other_moves_do_not_regroup(f, shape):
    graph = lower(trace(f, jax.ShapeDtypeStruct(shape, "float32"))).graph
    assert not any(map(regroups, graph.nodes))


def test_powers_of_two_are_not_padded():
    """No reshape of JAX between them lacks common factors; a rule of the user's may say so all the same."""
    node = lower(reshaped((6, 10), (10, 6))).graph.nodes[1]
    powers = replace(node, dims=(3, 8, 6, 4))
    assert regroups(powers)
    assert can_regroup(powers, "triton")
    assert not can_regroup(replace(node, dims=(8, 3, 4, 6)), "triton")
    assert not can_regroup(powers, "mosaic_gpu")


def with_tiles(plan, size, tile):
    """``plan`` with other tiles of the axis of ``size``."""
    (kernel,) = plan.kernels
    axes = tuple(replace(a, tile=tile) if a.size == size else a for a in kernel.spec.axes)
    assert axes != kernel.spec.axes
    return replace(plan, kernels=(replace(kernel, spec=replace(kernel.spec, axes=axes)),))


@pytest.mark.parametrize(
    ("f", "shape", "device", "size", "tile", "why"),
    [
        # Of a row of three parts in four pieces, or in six, none begins where a part does.
        (lambda x: jnp.sin(x[:, 4:8]) * 2, (16, 12), "tpu_v5e", 3, 4, "an axis of 3 resident in tiles of 4"),
        (lambda x: jnp.sin(x[:, 4:8]) * 2, (16, 12), "h200", 3, 8, "an axis of 3 resident in tiles of 8"),
        (lambda x: jnp.sin(x) * 2, (16, 12), "h200", 12, 12, "those of triton kernels are powers of two"),
        # An inner tile that reaches past its end lies over its neighbour.
        (lambda x: jnp.sin(x.reshape(40, 128)) * 2, (5, 8, 128), "tpu_v5e", 8, 3, "has gaps"),
        (lambda x: jnp.sin(x.reshape(40, 128)) * 2, (5, 8, 128), "h200:mosaic_gpu", 8, 3, "has gaps"),
    ],
)
def test_blocks_of_other_lengths_are_refuted(f, shape, device, size, tile, why):
    made = fuseplan.make_plan(f, device=device)(jax.ShapeDtypeStruct(shape, "float32"))
    plan = unchecked(made.graph, device)
    assert check_plan(plan) is plan
    with pytest.raises(InvalidPlanError, match=why):
        check_plan(with_tiles(plan, size, tile))
