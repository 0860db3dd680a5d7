"""XLA makes of the groups that are left to it as one loop the kernels that they are priced as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fuseplan
import fuseplan.extend
from costmodel.split_products import contracted_parts
from costmodel.xla_loops import EPILOGUE_OPS, epilogues_of_product, is_one_loop
from fuseplan.codegen import emit
from fuseplan.targets.compile_only import compile_for
from fuseplan.workloads import get_workload

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot")]


def shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def narrow(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


def diffused(x: Any) -> Any:
    near = [jnp.roll(x, shift, axis) for shift in (1, -1) for axis in (0, 1)]
    return x + 0.1 * (sum(near) - 4 * x)


def centred(x: Any) -> Any:
    y = x - x.mean((0, 1, 2))
    return y * jax.lax.rsqrt((y * y).mean((0, 1, 2)) + 1e-5)


def padded(x: Any) -> Any:
    y = jnp.pad(x * x, 1)
    return y[2:, 1:-1] + y[:-2, 1:-1] - y[1:-1, 2:]


def nearest(x: Any, y: Any) -> Any:
    return ((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * x @ y.T).argmin(1)


def dropped(key: Any, x: Any, y: Any) -> Any:
    return y + jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def layers(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    h = jnp.maximum(x @ w + b, 0) * 0.5
    return (h @ v).astype(jnp.float32) - c


def accumulated(x: Any, w: Any, b: Any, v: Any) -> Any:
    h = (jnp.dot(x, w, preferred_element_type=jnp.float32) + b).astype(x.dtype)
    return jax.nn.sigmoid(jnp.einsum("nk,kd->nd", h, v))


KEY = jax.eval_shape(lambda: jax.random.key(0))

CASES: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    "diffused": ("h200", diffused, (shaped(1024, 1024),)),
    "centred": ("h200", centred, (shaped(16, 56, 56, 64),)),
    "centred on a TPU": ("tpu_v5e", centred, (shaped(16, 56, 56, 64),)),
    "nearest": ("tpu_v5e", nearest, (shaped(20_000, 3), shaped(5_000, 3))),
    "mlp": ("tpu_v5e", *get_workload("mlp").build()),
    "padded": ("h200", padded, (shaped(1000, 300),)),
    "gray_scott": ("h200", *get_workload("gray_scott").build()),
    "shallow_water": ("h200", *get_workload("shallow_water").build()),
    "dropped": ("h200", dropped, (KEY, shaped(4096, 1024), shaped(4096, 1024))),
    "dropped on a TPU": ("tpu_v5e", dropped, (KEY, shaped(4096, 1024), shaped(4096, 1024))),
    "products": ("h200", *get_workload("mlp").build()),
    "products of a small network": ("h200", *get_workload("neural_ode").build()),
    "products of bfloat16": (
        "h200",
        layers,
        (*narrow((8192, 512), (512, 1024), (1024,), (1024, 256)), shaped(256)),
    ),
    "products that add in float32": (
        "h200",
        accumulated,
        (*narrow((8192, 512), (512, 1024)), shaped(1024), *narrow((1024, 256))),
    ),
    "selective_scan": ("h200", *get_workload("selective_scan").build()),
}


SEARCHED_LONG = "selective_scan"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.one_python] if n == SEARCHED_LONG else []) for n in CASES]
)
def test_a_loop_is_compiled_to_what_it_is_priced_as(name: str) -> None:
    device, f, args = CASES[name]
    plan = fuseplan.make_plan(f, device=device, deadline_s=100)(*args)
    graph, seen = plan.graph, set()
    for kernel in plan.kernels:
        spec = kernel.spec
        key = (len(spec.nodes), kernel.cost.time_ps)
        if spec.backend != "xla" or not is_one_loop(graph, spec.nodes) or key in seen:
            continue
        seen.add(key)
        group = emit(spec, plan.program)
        arrays = [graph.values[v] for v in dict.fromkeys(access.value for access in spec.reads)]
        shapes = [plan.program.avals[value.id] for value in arrays]
        xla = fuseplan.make_plan(lambda *xs, group=group: group(*xs), device=device, planner="xla")(*shapes)
        launches = sum(k.spec.compiled.launches for k in xla.kernels)
        # Random bits start from a mixed key and the first index of each row, which small kernels prepare.
        has_bits = any(graph.nodes[n].op == "random_bits" for n in spec.nodes)
        extra = launches - kernel.cost.launch_ps // plan.device.launch_ps
        assert 0 <= extra <= 8 * has_bits
        small_ps = extra * (plan.device.launch_ps + 2 * plan.device.hbm_latency_ps)
        assert xla.objective_ps == pytest.approx(
            kernel.cost.time_ps, rel=0.05, abs=plan.device.hbm_latency_ps + small_ps
        )
    assert seen, "the plan has a loop"


def test_xla_makes_the_updates_of_a_scatter_in_its_loop_on_a_gpu() -> None:
    """As the gradient of a weighted lookup does: three kernels, the last of which writes no updates."""

    def bags(table: Any, indices: Any, weights: Any) -> Any:
        return ((table[indices] * weights[..., None]).sum(1) ** 2).sum()

    indices = jax.ShapeDtypeStruct((4096, 32), "int32")
    args = shaped(50_000, 128), indices, shaped(4096, 32)
    plan, xla = (
        fuseplan.make_plan(jax.grad(bags), device="h200", planner=planner)(*args)
        for planner in ("solver", "xla")
    )
    assert len(plan.kernels) == len(xla.kernels) == 3
    for made in (plan, xla):
        scattering = [{made.graph.nodes[n].op for n in kernel.spec.nodes} for kernel in made.kernels]
        assert [ops >= {"mul", "scatter-add"} for ops in scattering].count(True) == 1
    assert plan.verify().status == "verified"
    assert plan.objective_ps == pytest.approx(xla.objective_ps, rel=0.05)


APPLIED: dict[str, Callable[[Any], Any]] = {
    "add": lambda y: y + 1,
    "convert_element_type": lambda y: y.astype("float16"),
    "div": lambda y: 1 / y,
    "exp2": jax.lax.exp2,
    "logistic": jax.nn.sigmoid,
    "max": lambda y: jnp.maximum(y, 0),
    "min": lambda y: jnp.minimum(y, 1),
    "mul": lambda y: y * 3,
    "neg": jax.lax.neg,
    "sub": lambda y: 2 - y,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", sorted(EPILOGUE_OPS))
def test_xla_fuses_the_operations_of_epilogues_into_a_product(op: str, dtype: str) -> None:
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((2048, 512), (512, 256)))
    apply = APPLIED.get(op) or getattr(jax.lax, op)

    def f(x: Any, w: Any) -> Any:
        return apply(x @ w)

    program = fuseplan.extend.lower(fuseplan.extend.trace(f, x, w))
    assert [node.op for node in program.graph.nodes] == ["dot_general", op]
    assert list(epilogues_of_product(program.graph, 0)) == [(0, 1)]
    plan = fuseplan.make_plan(f, device="h200", planner="xla")(x, w)
    assert sum(kernel.spec.compiled.launches for kernel in plan.kernels) == 1


@pytest.mark.parametrize("shape", [(1024, 3072, 768), (256, 8192, 256), (4096, 768, 3072), (1024, 768, 768)])
def test_xla_computes_products_in_parts_where_the_model_says_so(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    args = shaped(rows, depth), shaped(depth, columns)
    plan = fuseplan.make_plan(jnp.matmul, device="h200")(*args)
    (node,) = plan.graph.nodes
    text = compile_for(jnp.matmul, *args, device="h200").as_text()
    assert (" reduce(" in text) == (contracted_parts(plan.graph, node, plan.device) > 1)
