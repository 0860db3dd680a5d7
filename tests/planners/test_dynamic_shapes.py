"""Groups decided once for symbolic sizes: the guards, what they admit, what falls apart at other sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.graph import skeleton
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners.nnc_tensorexpr import (
    DynamicShapes,
    SymbolicPlan,
    make_planner,
    symbolic_dims,
)
from tests.helpers.small_graphs import Bytes
from tests.helpers.small_graphs import graph as small_graph

pytestmark = pytest.mark.one_python


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def f(x, r):
    return jnp.exp(x) * r + 1


def graph(*shapes, of=f):
    return lower(trace(of, *(array(*shape) for shape in shapes))).graph


@pytest.fixture
def dynamic():
    """A planner that counts what it decides, by name."""
    planner = make_planner(fuse_to_dynamic_shapes=True)
    assert isinstance(planner, DynamicShapes)
    fuseplan.register_planner("dynamic", planner)
    return planner


def n_decided(dynamic):
    return sum(map(len, dynamic.plans.values()))


def test_one_size_is_one_symbol_and_one_is_one():
    assert symbolic_dims(graph((8, 128), (128,))) == (("s0", "s1"), ("s1",))
    assert symbolic_dims(graph((8, 128), (1, 128))) == (("s0", "s1"), (1, "s1"))
    assert symbolic_dims(graph((8, 8), (8,))) == (("s0", "s0"), ("s0",))


PLAN = SymbolicPlan((), (("s0", "s1"), (1, "s1")))


@pytest.mark.parametrize(
    ("shapes", "refused"),
    [
        (((8, 128), (1, 128)), None),
        (((3, 5), (1, 5)), None),
        (((7, 7), (1, 7)), None),
        (((8, 128), (8, 128)), "dimension 0 of input 1 is 8, expected 1"),
        (((8, 128), (1, 1)), "dimension 1 of input 1 is 1, expected s1, which is more than 1"),
        (((1, 128), (1, 128)), "dimension 0 of input 0 is 1, expected s0, which is more than 1"),
    ],
)
def test_guards(shapes, refused):
    found = PLAN.refuse(graph(*shapes, of=lambda x, r: x + r))
    assert (found and found.reason) == refused


def test_a_symbol_is_one_size():
    plan = SymbolicPlan((), (("s0", "s0"),))
    refused = plan.refuse(graph((4, 6), of=jnp.exp))
    assert refused is not None
    assert refused.reason == "dimension 1 of input 0 is 6, expected s0 = 4"


def test_programs_of_other_sizes_have_one_skeleton():
    assert skeleton(graph((8, 128), (128,))) == skeleton(graph((9, 33), (33,)))
    assert skeleton(graph((8, 128), (128,))) != skeleton(graph((8, 128), (128,), of=lambda x, r: x * r))
    # Broadcasting an array of one row takes another operation.
    assert skeleton(graph((8, 128), (128,))) != skeleton(graph((8, 128), (8, 128)))


def test_what_is_decided_once_is_specialised(dynamic):
    plan = fuseplan.make_plan(f, device="h200", planner="dynamic")
    first, second = plan(array(8, 128), array(128)), plan(array(4096, 1024), array(1024))
    assert n_decided(dynamic) == 1
    assert first.notes[-1] == "fused for s0 = 8, s1 = 128, and for all sizes for which 3 guards hold"
    assert second.notes[-1] == "fused before for other sizes: the guards hold for s0 = 4096, s1 = 1024"
    assert [k.spec.nodes for k in first.kernels] == [k.spec.nodes for k in second.kernels]
    assert second.verify()
    static = fuseplan.make_plan(f, device="h200", planner="nnc_tensorexpr")(array(4096, 1024), array(1024))
    assert static.kernels == second.kernels, "scheduled for its own sizes"


def test_what_no_guard_admits_is_decided_anew(dynamic):
    plan = fuseplan.make_plan(f, device="h200", planner="dynamic")
    plan(array(8, 8), array(8))
    assert "s0 = 8, s1 = 9" in plan(array(8, 9), array(9)).notes[-1]
    assert n_decided(dynamic) == 2
    plan(array(5, 7), array(7))
    assert n_decided(dynamic) == 2


def test_a_group_that_is_no_kernel_at_other_sizes_falls_apart():
    planner = DynamicShapes(lambda book: [(0, 1, 2)])
    g = small_graph("eee", [[], [0], [1]])
    assert planner(g, Bytes(g)).groups == ((0, 1, 2),)
    apart = planner(g, Bytes(g, max_nodes=2))
    assert apart.groups == ((0, 1), (2,))
    assert "1 of the planner's groups are several kernels here" in str(apart.notes[0])
    assert n_decided(planner) == 1


def test_calls_of_all_sizes_are_right(dynamic):
    fused = fuseplan.jit(f, planner="dynamic")
    for rows, columns in ((3, 5), (8, 128), (1, 7), (2, 1), (0, 4), (64, 64)):
        x = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
        np.testing.assert_allclose(fused(x, x[:1].sum(0)), f(x, x[:1].sum(0)), rtol=1e-6, atol=1e-6)
    assert 1 < n_decided(dynamic) < 6
