"""A contraction and the statistics of its rows in one kernel, in Pallas' interpreter against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.axes import unify
from costmodel.devices import get_device
from costmodel.graph import boundary
from costmodel.kernel import AxisRole, KernelSpec
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.nests.accelerator import kernel_nests
from fuseplan.schedule.nests.regions import joined_contractions, normalised_contractions
from fuseplan.workloads.functions import layernorm, rmsnorm
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import kernel_function

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

ROWS, COLUMNS = 77, 50
DEVICES = ("h200", "tpu_v5e")


def rms(x: Any, s: Any, w: Any) -> Any:
    return rmsnorm(x, s) @ w


def rms_gated(x: Any, s: Any, g: Any, u: Any) -> Any:
    h = rmsnorm(x, s)
    return jax.nn.silu(h @ g) * (h @ u)


def layer(x: Any, s: Any, t: Any, w: Any) -> Any:
    return layernorm(x, s, t) @ w


def layer_gelu(x: Any, s: Any, t: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(layernorm(x, s, t) @ w + b)


def softmax(x: Any, w: Any) -> Any:
    return jax.nn.softmax(x, -1) @ w


def cosine(x: Any, w: Any) -> Any:
    """Both operands are divided by their lengths."""
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ (w / jnp.linalg.norm(w, axis=0))


FUNCTIONS = {
    "rms": (rms, "xkw"),
    "rms_gated": (rms_gated, "xkww"),
    "layer": (layer, "xkkw"),
    "layer_gelu": (layer_gelu, "xkkwn"),
    "softmax": (softmax, "xw"),
    "cosine": (cosine, "xw"),
}
SHAPES = {
    "x": lambda k: (ROWS, k),
    "k": lambda k: (k,),
    "w": lambda k: (k, COLUMNS),
    "n": lambda k: (COLUMNS,),
}


def arrays(name: str, k: int, dtype: str, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng([seed, k])
    return tuple(jnp.asarray(rng.standard_normal(SHAPES[letter](k)), dtype) for letter in FUNCTIONS[name][1])


def offered(name: str, args: tuple[Any, ...], device: str) -> tuple[Lowered, list[KernelSpec]]:
    """The whole function as one kernel: of each choice of roles, the smallest and the largest tiles."""
    lowered = lower(trace(FUNCTIONS[name][0], *args))
    graph, backend = lowered.graph, get_device(device).backend
    group = max(normalised_contractions(graph, joined_contractions(graph, backend), backend), key=len)
    assert len(group) == len(graph.nodes)
    by_roles: dict[Any, list[KernelSpec]] = {}
    for spec in kernel_nests(graph, group, unify(graph, group), boundary(graph, group), backend):
        by_roles.setdefault(tuple(a.role for a in spec.axes), []).append(spec)
    return lowered, [spec for specs in by_roles.values() for spec in dict.fromkeys((specs[0], specs[-1]))]


def exact(name: str, args: tuple[Any, ...]) -> np.ndarray:
    """In float64, and so in NumPy."""
    x, *rest = (np.asarray(a, np.float64) for a in args)
    epsilon = 1e-5
    with np.errstate(all="ignore"):
        if name == "softmax":
            e = np.exp(x - x.max(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True) @ rest[0]
        if name == "cosine":
            return (x / np.linalg.norm(x, axis=-1, keepdims=True)) @ (
                rest[0] / np.linalg.norm(rest[0], axis=0)
            )
        if name.startswith("layer"):
            x = x - x.mean(-1, keepdims=True)
        h = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * rest[0]
        if name == "rms":
            return h @ rest[1]
        if name == "rms_gated":
            g = h @ rest[1]
            return g / (1 + np.exp(-g)) * (h @ rest[2])
        y = (h + rest[1]) @ rest[2]
        if name == "layer":
            return y
        y = y + rest[3]
        return y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) / 2


def assert_close(got: Any, want: np.ndarray, dtype: str, what: str) -> None:
    """Not numbers where the truth is none, and elsewhere within what a row's products may be rounded by."""
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), what)
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-5
    scale = np.nanmax(np.abs(np.where(np.isfinite(want), want, 0)), axis=-1, keepdims=True)
    error = np.where(np.isnan(want), 0, abs(got - want)) / (scale + 1e-3)
    assert error.max() < tolerance, f"{what}: {error.max()}"


@pytest.mark.parametrize(("k", "dtype"), [(768, "float32"), (1000, "bfloat16"), (100, "float32")])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_agrees(name, device, k, dtype):
    args = arrays(name, k, dtype)
    lowered, specs = offered(name, args, device)
    held = [all(a.role != AxisRole.STREAMED for a in spec.axes) for spec in specs]
    assert any(held)
    assert not all(held), "no row is walked"
    want = exact(name, args)
    for spec in specs:
        (got,) = run_quickly(kernel_function(spec, lowered, interpret=True), *args)
        assert_close(got, want, dtype, f"{name} {[a.tile for a in spec.axes]}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rms", "layer", "softmax"])
def test_rows_of_all_kinds(name, device, dtype):
    """No number and infinities stay where they are; of a large mean nothing cancels; the last tiles of a row
    are as good as the first."""
    x, *rest = arrays(name, 200, dtype)
    mean = 1e4 if dtype == "float32" else 100
    rows = np.array(x, np.float32)
    rows[3, 7], rows[4, -1], rows[5, 0], rows[6, -1] = np.nan, np.nan, np.inf, -np.inf
    rows[7], rows[8], rows[9] = 0, rows[8] * 1e15, rows[9] * 1e-15
    rows[10:20] += mean
    rows[20] = np.inf
    args = (jnp.asarray(rows, dtype), *rest)
    lowered, specs = offered(name, args, device)
    want = exact(name, args)
    assert np.isnan(want).any()
    for spec in specs:
        (got,) = run_quickly(kernel_function(spec, lowered, interpret=True), *args)
        what = f"{name} {[a.tile for a in spec.axes]}"
        near = np.r_[:10, 20:ROWS]
        assert_close(np.asarray(got)[near], want[near], dtype, what)
        # A mean of 1e4 is known to a unit of 1e-3 in float32: to less than a cancelling sum would leave.
        assert_close(np.asarray(got)[10:20], want[10:20], "bfloat16", what)


def plan_of(
    f: Any, *shapes: tuple[int, ...], device: str, dtype: str = "bfloat16", **options: Any
) -> fuseplan.Plan:
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return fuseplan.make_plan(f, device=device, deadline_s=100, **options)(*args)


MATRIX = (1024, 768), (768,), (768, 3072)
WITH_BIAS = (1024, 768), (768,), (768,), (768, 3072)


@pytest.mark.parametrize(
    ("f", "shapes", "device", "kernels"),
    [
        *((rms, MATRIX, d, 1) for d in ("h200", "tpu_v5e", "tpu_v6e")),
        *((layer, WITH_BIAS, d, 1) for d in ("tpu_v5e", "tpu_v6e")),
        # A GPU would read each row three times for each of 24 tiles of columns.
        (layer, WITH_BIAS, "h200", 2),
    ],
)
def test_a_norm_is_in_the_kernel_of_its_product_where_that_is_faster(f, shapes, device, kernels):
    plan = plan_of(f, *shapes, device=device)
    assert len(plan.kernels) == kernels
    assert plan.status == "OPTIMAL"
    assert plan.verify().status == "verified"
    assert fuseplan.Plan.from_json(plan.to_json()) == plan
    apart = plan_of(
        f,
        *shapes,
        device=device,
        constraints=fuseplan.Constraints(never_fuse=[("reduce_sum", "dot_general")]),
    )
    assert len(apart.kernels) >= 2
    assert plan.objective_ps <= apart.objective_ps


def test_what_must_be_one_kernel_can_be():
    def named(*args):
        with jax.named_scope("together"):
            return layer(*args)

    must = fuseplan.Constraints(must_fuse=["together"])
    plan = plan_of(named, *WITH_BIAS, device="h200", constraints=must)
    (kernel,) = plan.kernels
    assert len(kernel.spec.passes) == 3, "a mean, a variance, a product"
    assert plan.objective_ps > plan_of(layer, *WITH_BIAS, device="h200").objective_ps


def test_what_is_needed_elsewhere_is_no_part():
    def both(x, s, w):
        h = rmsnorm(x, s)
        return h @ w, h

    def statistics(x, s, w):
        mean = jnp.square(x).mean(-1, keepdims=True)
        return (x * jax.lax.rsqrt(mean) * s) @ w, mean

    def residual(x, y, s, w):
        """The sum is read twice from memory, and made once."""
        return rmsnorm(x + y, s) @ w

    def groups(f, *shapes):
        graph = lower(trace(f, *(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))).graph
        return graph, list(normalised_contractions(graph, (), "triton"))

    assert groups(both, *MATRIX)[1] == []
    assert groups(statistics, *MATRIX)[1] == []
    graph, (group,) = groups(residual, MATRIX[0], *MATRIX)
    assert [n.op for n in graph.nodes if n.id not in group] == ["add"]
