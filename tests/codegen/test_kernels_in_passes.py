"""Rows too long for a core: kernels that walk them in passes, from the plan to the numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.device import DeviceSpec
from costmodel.devices import DEVICES
from costmodel.graph import Graph
from costmodel.kernel import AxisRole, KernelSpec
from costmodel.traffic import bytes_moved
from fuseplan import Plan
from fuseplan.codegen.mosaic_tpu import blocks as mosaic_blocks
from fuseplan.codegen.mosaic_tpu.kernel import passes_of_writes
from fuseplan.codegen.pass_evaluator import Nest
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.runtime.executor import make_runner
from fuseplan.schedule.nests.multipass import program_of
from fuseplan.settings import make_options
from fuseplan.support.errors import InvalidPlanError
from fuseplan.verify.plan import check_plan
from tests.helpers.emit_cases import layernorm, layernorm_rows, rmsnorm, softmax_grad
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import P, S, Tiled, hand_spec, whole_group

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

ROWS, LONG = 24, 3001


def small(name: str, launch_ps: int = 10**9) -> DeviceSpec:
    """A device with room for some hundred elements a core, few cores and slow launches."""
    device = replace(DEVICES[name], name="small", core_count=1, launch_ps=launch_ps, cache_bytes=0)
    if device.register_bytes:
        return replace(device, register_bytes=2 * 16 * 1024)
    return replace(device, onchip_bytes=250_000)


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rmsnorm_rows(x: Any, g: Any, dy: Any) -> Any:
    return jax.vjp(lambda x: rmsnorm(x, g), x)[1](dy)[0]


FUNCTIONS = {
    "softmax": (lambda x: jax.nn.softmax(x, -1), 1, 0),
    "log_softmax": (lambda x: jax.nn.log_softmax(x, -1), 1, 0),
    "softmax_grad": (softmax_grad, 2, 0),
    "layernorm": (layernorm, 1, 2),
    "layernorm_grad": (lambda x, dy, g: layernorm_rows(x, g, dy), 2, 1),
    "rmsnorm": (rmsnorm, 1, 1),
    "rmsnorm_grad": (lambda x, dy, g: rmsnorm_rows(x, g, dy), 2, 1),
}
"""The function, how many of its arguments are rows, and how many are one row for all."""


def arguments(name: str, dtype: str) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    shapes = [(ROWS, LONG)] * FUNCTIONS[name][1] + [(LONG,)] * FUNCTIONS[name][2]
    return tuple(jnp.asarray(rng.standard_normal(s) * 3, dtype) for s in shapes)


def run(f: Any, args: tuple[Any, ...], device: DeviceSpec) -> tuple[Plan, list[Any]]:
    lowered, plan = plan_traced(trace(f, *args), make_options(device, "solver"))
    assert check_plan(plan)
    runner = make_runner(lowered, plan, platform="cpu", interpret=True)
    return plan, run_quickly(runner, *lowered.consts, *args)


def passes(plan: Plan) -> list[int]:
    return [len(kernel.spec.passes) for kernel in plan.kernels]


def in_float64(f: Any, args: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    with jax.enable_x64(True):
        return np.asarray(f(*(jnp.asarray(np.asarray(a, np.float64)) for a in args)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_long_rows_are_what_float64_says(name: str, device: str, dtype: str) -> None:
    f, args = FUNCTIONS[name][0], arguments(name, dtype)
    plan, (got,) = run(f, args, small(device))
    assert max(passes(plan)) > 1
    want = in_float64(f, args)
    # A handful of operations that round once each; of 16 bits, relative to the largest of a row.
    tolerance = {"float32": 2e-5, "bfloat16": 4e-2}[dtype]
    scale = np.abs(want).max(-1, keepdims=True)
    assert np.max(np.abs(np.asarray(got, np.float64) - want) / scale) < tolerance


def squared_distances(x: Any, y: Any) -> Any:
    return ((x[:, None, :] - y[None, :, :]) ** 2).sum(-1)


PAIRWISE = {
    "soft_minimum": lambda x, y: -jax.nn.logsumexp(-squared_distances(x, y), 1),
    "soft_nearest": lambda x, y: (jax.nn.softmax(-squared_distances(x, y), 1)[:, :, None] * y[None]).sum(1),
    "normalised": lambda x, y: squared_distances(x, y) / squared_distances(x, y).max(1, keepdims=True),
    "soft_minimum_grad": lambda x, y: jax.grad(lambda x: jax.nn.logsumexp(-squared_distances(x, y), 1).sum())(
        x
    ),
}


@pytest.mark.parametrize("dims", [3, 4])
@pytest.mark.parametrize("name", PAIRWISE)
def test_short_axes_are_whole_beside_a_long_one_in_passes(name: str, dims: int) -> None:
    """Coordinates of points, which each tile of distances reduces."""
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.standard_normal((n, dims)), "float32") for n in (37, 1501))
    f = PAIRWISE[name]
    want = in_float64(f, args)
    plan, (got,) = run(f, args, small("h200"))
    assert len(plan.kernels) == 1
    assert max(passes(plan)) >= 1
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) / np.abs(want).max() < 2e-6
    plan, (got,) = run(f, args, small("tpu_v5e"))
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) / np.abs(want).max() < 2e-6


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layernorm", "softmax_grad"])
def test_what_is_no_number_stays_in_its_row(name: str, device: str) -> None:
    """Wherever in a row it is: in the first tile or the last, alone or all over."""
    f, args = FUNCTIONS[name][0], arguments(name, "float32")
    x = np.array(args[0])
    x[0, 0], x[1, -1], x[2, 1500] = np.nan, np.nan, np.nan
    x[3, 0], x[4, -1], x[5, 7] = np.inf, np.inf, -np.inf
    x[6], x[7, :2900], x[8, 100:], x[9] = -np.inf, -np.inf, -np.inf, np.inf
    x[10, 5], x[10, -5], x[11], x[12, ::2] = np.inf, -np.inf, 1e30, -1e30
    args = (jnp.asarray(x), *args[1:])
    plan, (got,) = run(f, args, small(device))
    assert max(passes(plan)) > 1
    want = np.asarray(f(*args))  # operation by operation: fused, XLA loses some NaNs on the CPU
    assert np.isfinite(want[13:]).all()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_rows_stay_on_chip_where_they_fit(device: str) -> None:
    for f in (jax.nn.softmax, rmsnorm):
        for n, k in ((4096, 0), (2**20, 2)):
            args = (array(512, n), array(n))[: 2 if f is rmsnorm else 1]
            (kernel,) = fuseplan.make_plan(f, device=device)(*args).kernels
            assert len(kernel.spec.passes) == k
            (row,) = (a for a in kernel.spec.axes if a.size == n)
            assert row.role == (AxisRole.STREAMED if k else AxisRole.RESIDENT)


def test_passes_are_a_choice_by_price() -> None:
    """Few rows leave a GPU's cores idle: then it is better to cut them, and write in between. A
    TPU has one core."""
    assert passes(fuseplan.make_plan(jax.nn.softmax, device="h200")(array(2, 2**20))) != [2]
    assert passes(fuseplan.make_plan(jax.nn.softmax, device="tpu_v5e")(array(8, 2**20))) == [2]


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_streaming_is_worth_it(device: str) -> None:
    x = array(256, 2**20)

    def time_ps(f: Any, **options: Any) -> int:
        plan = fuseplan.make_plan(f, device=device, **options)(x)
        return plan.objective_ps

    for f in (jax.nn.softmax, jax.nn.log_softmax):
        best = time_ps(f)
        assert best < 0.51 * time_ps(f, features=Features(streaming=False, xla_loops=False))
        assert best < 0.38 * time_ps(f, planner="unfused")


def test_each_pass_reads_what_it_needs() -> None:
    plan = fuseplan.make_plan(layernorm, device="h200")(array(512, 2**20), array(2**20), array(2**20))
    (kernel,) = plan.kernels
    nbytes, row = 512 * 2**22, 2**22
    assert len(kernel.spec.passes) == 3
    # The scale and the bias of 4 MB stay in the shared cache.
    assert kernel.cost.hbm_read_bytes == 3 * nbytes + 2 * row
    assert kernel.cost.hbm_write_bytes == nbytes


def test_each_pass_computes_again_what_it_needs() -> None:
    plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(array(512, 2**20))
    (kernel,) = plan.kernels
    assert [sum(plan.graph.nodes[i].op == "exp" for i in p) for p in kernel.spec.passes] == [1, 1]
    assert kernel.cost.flops.transcendental == 2 * 512 * 2**20


MUTATIONS = {
    "a pass less": lambda spec: replace(spec, passes=spec.passes[:-1]),
    "in the wrong order": lambda spec: replace(spec, passes=spec.passes[::-1]),
    "a node less": lambda spec: replace(spec, passes=(spec.passes[0][:-1], *spec.passes[1:])),
    "a node too early": lambda spec: replace(spec, passes=(spec.passes[-1], *spec.passes[1:])),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_plan_with_other_passes_is_refused(name: str) -> None:
    plan = fuseplan.make_plan(layernorm, device="h200")(array(512, 2**20), array(2**20), array(2**20))
    assert Plan.from_json(plan.to_json()) == plan
    (kernel,) = plan.kernels
    wrong = replace(plan, kernels=(replace(kernel, spec=MUTATIONS[name](kernel.spec)),))
    with pytest.raises(InvalidPlanError):
        check_plan(wrong)


def test_a_contraction_has_no_passes() -> None:
    square = array(512, 512, dtype="bfloat16")
    features = fuseplan.Features(xla_loops=False)
    plan = fuseplan.make_plan(lambda x, w: jnp.tanh(x @ w), device="h200", features=features)(square, square)
    (kernel,) = plan.kernels
    wrong = replace(kernel, spec=replace(kernel.spec, passes=((0,),)))
    with pytest.raises(InvalidPlanError, match="in passes beside a contraction"):
        check_plan(replace(plan, kernels=(wrong,)))


def test_only_a_kernel_that_streams_has_passes() -> None:
    plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(array(512, 4096))
    (kernel,) = plan.kernels
    text = replace(plan, kernels=(replace(kernel, spec=replace(kernel.spec, passes=((0,),))),)).to_json()
    with pytest.raises(InvalidPlanError, match="expected none of a kernel that streams no axis"):
        Plan.from_json(text)


def mosaic_kernels() -> list[Any]:
    walked = (Tiled(0, 0, P, 8), Tiled(0, 1, S, 128))

    def each(x: Any, g: Any) -> Any:
        e = jnp.exp(x - x.max(1, keepdims=True)) * g
        q = e - e.mean(1, keepdims=True)
        return e, q, q.min(1), x * 2

    shapes = {"layernorm": ((32, 512), (512,), (512,)), "softmax": ((32, 512),), "each": ((32, 512), (512,))}
    found = []
    for name, f in (("layernorm", layernorm), ("softmax", jax.nn.softmax), ("each", each)):
        lowered = whole_group(f, *(array(*s) for s in shapes[name]))
        found.append((lowered, hand_spec(lowered, "mosaic_tpu", *walked)))
    return found


def blocks_in_order(spec: KernelSpec, block_spec: Any) -> list[tuple[int, ...]]:
    steps = itertools.product(*map(range, mosaic_blocks.grid(spec)))
    return [tuple(int(i) for i in block_spec.index_map(*map(jnp.int32, step))) for step in steps]


@pytest.mark.parametrize(("lowered", "spec"), mosaic_kernels(), ids=["layernorm", "softmax", "each"])
def test_a_tpu_writes_back_no_block_before_it_is_computed(lowered: Any, spec: KernelSpec) -> None:
    """Its pipeline writes a block back when the next step has another: each has one run of steps,
    with the step in it that computes it."""
    made = passes_of_writes(Nest(spec, lowered))
    grid = mosaic_blocks.grid(spec)
    for access, block_spec in zip(spec.writes, mosaic_blocks.write_specs(spec, made), strict=True):
        blocks = blocks_in_order(spec, block_spec)
        runs = [block for block, _ in itertools.groupby(blocks)]
        assert len(runs) == len(set(runs))
        for step, block in zip(itertools.product(*map(range, grid)), blocks, strict=True):
            rows, p, k = step
            if access.value in made and p == made[access.value]:
                assert block == (rows, k)
    assert made


@pytest.mark.parametrize(("lowered", "spec"), mosaic_kernels(), ids=["layernorm", "softmax", "each"])
def test_a_tpu_copies_what_the_model_counts(lowered: Any, spec: KernelSpec) -> None:
    graph: Graph = lowered.graph
    copied = 0
    for access, block_spec in zip(spec.reads, mosaic_blocks.read_specs(graph, spec), strict=True):
        runs = len(list(itertools.groupby(blocks_in_order(spec, block_spec))))
        copied += runs * math.prod(spec.block_shape(access)) * 4
    modelled = bytes_moved(graph, spec, DEVICES["tpu_v5e"]).hbm_read_bytes
    # A block that is at hand when a pass starts again is not copied twice.
    assert 0.9 * modelled < copied <= modelled
    program = program_of(graph, spec)
    assert program is not None
    assert len(program.passes) > 1


def test_a_gpu_walks_rows_and_a_tpu_columns_too() -> None:
    """Tiles of columns are so long that a GPU has too few of them for its cores."""
    x = array(2**16, 4096)
    f = jax.tree_util.Partial(jax.nn.softmax, axis=0)
    assert max(passes(fuseplan.make_plan(f, device="tpu_v5e")(x))) == 2
    assert max(passes(fuseplan.make_plan(f, device="h200")(x))) == 0


def test_no_axis_is_walked_beside_another_that_is_reduced() -> None:
    def f(x: Any) -> Any:
        y = jax.nn.softmax(x)
        return y, y.sum(0)

    plan = fuseplan.make_plan(f, device="h200")(array(4096, 2**16))
    assert 2 in passes(plan)
    for kernel in plan.kernels:
        if kernel.spec.passes:
            nodes = [plan.graph.nodes[n] for n in kernel.spec.nodes]
            sums = {n.outputs[0] for n in nodes if n.op.startswith("reduce")}
            assert {plan.graph.values[v].shape for v in sums} == {(4096,)}


def layernorm_grads(x: Any, g: Any, b: Any, dy: Any) -> Any:
    return jax.vjp(layernorm, x, g, b)[1](dy)


@pytest.mark.slow
def test_a_tpu_adds_up_columns_while_it_writes_rows() -> None:
    """One core walks the grid: what is added up over all rows can be beside what each row becomes."""
    args = [array(4096, 768), array(768), array(768), array(4096, 768)]
    plan = fuseplan.make_plan(layernorm_grads, device="tpu_v5e")(*args)
    assert passes(plan) == [1]
    apart = fuseplan.make_plan(layernorm_grads, device="tpu_v5e", features=Features(streaming=False))(*args)
    assert plan.objective_ps < 0.6 * apart.objective_ps
    assert max(passes(fuseplan.make_plan(layernorm_grads, device="h200")(*args))) == 0


def test_columns_beside_rows_are_what_float64_says() -> None:
    rng = np.random.default_rng(0)
    args = tuple(
        jnp.asarray(rng.standard_normal(s), "float32") for s in ((203, 300), (300,), (300,), (203, 300))
    )
    plan, got = run(layernorm_grads, args, small("tpu_v5e"))
    (kernel,) = plan.kernels
    assert (len(kernel.spec.passes), len(kernel.spec.writes)) == (1, 3)
    with jax.enable_x64(True):
        want = jax.tree.map(
            np.asarray, layernorm_grads(*(jnp.asarray(np.asarray(a, np.float64)) for a in args))
        )
    for g, w in zip(got, want, strict=True):
        assert np.max(np.abs(np.asarray(g, np.float64) - w) / np.max(np.abs(w))) < 2e-6
