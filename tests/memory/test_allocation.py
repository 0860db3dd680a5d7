"""Where temporaries lie: never two in one place at once, and in little more than the peak."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

import fuseplan
from costmodel.devices import TEST_DEVICE
from fuseplan import Plan
from fuseplan.memory.allocation import Buffer, arena_bytes, live_bytes, pack, place_buffers
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import check_buffers
from tests.helpers.memory_graphs import peak, programs

pytestmark = pytest.mark.one_python


def assert_apart(buffers):
    for a, b in combinations(buffers, 2):
        together = a.first <= b.last and b.first <= a.last
        overlap = a.offset_bytes < b.end_bytes and b.offset_bytes < a.end_bytes
        assert not (together and overlap), (a, b)


@pytest.mark.slow
@settings(max_examples=300)
@given(programs())
def test_every_temporary_has_a_place_of_its_own(program):
    g, kernels = program
    buffers = place_buffers(g, kernels)
    assert_apart(buffers)
    assert all(b.offset_bytes % 256 == 0 and b.nbytes > 0 for b in buffers)
    # Whatever runs finds what it reads, writes and keeps: the peak of the definition.
    in_use = [sum(b.nbytes for b in buffers if b.first <= k <= b.last) for k in range(len(kernels))]
    assert max(in_use) == peak(g, kernels) <= live_bytes(buffers) <= arena_bytes(buffers)
    assert not {b.value for b in buffers} & {*g.inputs, *g.outputs}
    assert place_buffers(g, kernels) == buffers
    plan = Plan(g, TEST_DEVICE, "test", kernels)
    assert plan.buffers == check_buffers(plan, buffers) == buffers
    assert plan.arena_bytes == arena_bytes(buffers)


@settings(max_examples=100)
@given(programs())
def test_a_wrong_place_is_noticed(program):
    g, kernels = program
    plan = Plan(g, TEST_DEVICE, "test", kernels)
    buffers = plan.buffers
    for i, b in enumerate(buffers):
        rest = (*buffers[:i], *buffers[i + 1 :])
        for wrong in (
            rest,
            (*buffers, b),
            (*rest, replace(b, last=b.last + 1)),
            (*rest, replace(b, first=b.first - 1)),
            (*rest, replace(b, nbytes=b.nbytes + 1)),
            (*rest, replace(b, offset_bytes=b.offset_bytes + 1)),
            (*rest, replace(b, offset_bytes=-256)),
        ):
            with pytest.raises(InvalidPlanError):
                check_buffers(plan, wrong)
        for other in rest:
            if b.first <= other.last and other.first <= b.last:
                with pytest.raises(InvalidPlanError, match="overlaps"):
                    check_buffers(plan, (*rest, replace(b, offset_bytes=other.offset_bytes)))


def test_what_dies_makes_room():
    a, b, c = (Buffer(v, 0, 1000, v, v + 1) for v in range(3))
    placed = pack([a, b, c])
    assert arena_bytes(placed) == 2048
    assert placed[0].offset_bytes == placed[2].offset_bytes != placed[1].offset_bytes


def test_the_smallest_gap_that_fits_is_taken():
    # Two gaps between long-lived buffers, of 5 and of 2 units; the last one fits both.
    sizes = {0: 50, 1: 40, 2: 30}
    held = [Buffer(v, 0, 256 * n, 0, 9) for v, n in sizes.items()]
    freed = [Buffer(3, 0, 256 * 35, 0, 1), Buffer(4, 0, 256 * 20, 0, 1)]
    late = [Buffer(5, 0, 256 * 20, 2, 9), Buffer(6, 0, 256 * 35, 2, 9)]
    placed = pack([*held, *freed, *late])
    assert_apart(placed)
    assert arena_bytes(placed) == live_bytes(placed) == 256 * 175


def test_nothing_to_place():
    assert pack([]) == ()
    assert (arena_bytes(()), live_bytes(())) == (0, 0)


@pytest.mark.parametrize(("n", "loss"), [(30, 0.05), (300, 0.05), (1500, 0.08)])
def test_an_arena_is_little_larger_than_the_peak(n, loss):
    r = random.Random(n)
    wanted = []
    for v in range(n):
        first = r.randrange(n)
        wanted.append(
            Buffer(v, 0, r.choice((4, 4096, 2**16, 2**20, 3 * 2**20)), first, first + r.choice((1, 3, 20)))
        )
    placed = pack(wanted)
    assert [replace(b, offset_bytes=0) for b in placed] == wanted
    assert_apart(placed)
    assert live_bytes(placed) <= arena_bytes(placed) <= live_bytes(placed) * (1 + loss)


@pytest.fixture(scope="module")
def plan():
    def f(x, w):
        for _ in range(3):
            x = jax.nn.gelu(jnp.sort(x @ w)) + x
        return x.sum()

    x = jax.ShapeDtypeStruct((256, 256), "float32")
    return fuseplan.make_plan(jax.grad(f), device="test")(x, x)


@pytest.mark.slow
def test_a_plan_read_from_a_file_has_the_same_buffers(plan):
    assert len(plan.buffers) > 5
    assert_apart(plan.buffers)
    again = Plan.from_json(plan.to_json())
    assert (again.buffers, again.arena_bytes) == (plan.buffers, plan.arena_bytes)
    assert plan.peak_bytes <= plan.arena_bytes


def test_the_summary_names_the_peak(plan):
    line = next(line for line in plan.summary().splitlines() if line.startswith("  memory"))
    assert "at the peak, unfused" in line
    assert len(line) <= 80
