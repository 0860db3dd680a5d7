"""What all kernel backends share: phases, masks, literals, narrow types, special values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from costmodel.backends import backend_names
from costmodel.kernel import Axis, AxisRole, KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import make_body
from fuseplan.codegen.tile import first_index, valid_extent
from fuseplan.frontend.ops import composed
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.support.errors import InvalidPlanError, UnknownNameError
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import P, S, Tiled, hand_spec, kernel_function, whole_group

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PALLAS = ("triton", "mosaic_tpu")
TILES = {"triton": (Tiled(0, 0, P, 4),), "mosaic_tpu": (Tiled(0, 0, P, 8),)}


def run(f: Callable[..., Any], backend: str, *args: Any, tiled: tuple[Tiled, ...] | None = None) -> Any:
    lowered = whole_group(f, *args)
    spec = hand_spec(lowered, backend, *(TILES[backend] if tiled is None else tiled))
    return run_quickly(kernel_function(spec, lowered, interpret=True), *args)


def names(steps: tuple[Any, ...]) -> list[str]:
    return [step.equation.primitive.name for step in steps]


def test_phases() -> None:
    def f(x: Any, b: Any, scale: Any) -> Any:
        gate = jnp.exp(b)  # needed by the loop, but the same in every turn
        return jnp.tanh((x * gate).sum(0)) * scale

    x = jnp.ones((64, 32))
    lowered = whole_group(f, x, jnp.ones(32), jnp.ones(32))
    body = make_body(hand_spec(lowered, "triton", Tiled(0, 0, S, 16)), lowered)
    assert names(body.before) == ["exp", "broadcast_in_dim"]
    assert names(body.loop) == ["broadcast_in_dim", "mul"] or names(body.loop) == ["mul"]
    assert names(body.accumulators) == ["reduce_sum"]
    assert names(body.after) == ["tanh", "mul"]


def product_plus(x: Any, w: Any, *terms: Any) -> Any:
    y = x @ w
    for term in terms:
        y = y + term
    return jnp.tanh(y)


PRODUCT = (Tiled(0, 0, P, 16), Tiled(0, 1, S, 16), Tiled(1, 1, P, 16))


@pytest.mark.parametrize("term", [(32,), (64, 32)], ids=["bias", "residual"])
def test_what_is_added_is_where_the_accumulator_starts(term: tuple[int, ...]) -> None:
    args = (jnp.ones((64, 48)), jnp.ones((48, 32)), jnp.full(term, jnp.inf), jnp.ones((64, 32)))
    lowered = whole_group(product_plus, *args)
    body = make_body(hand_spec(lowered, "triton", *PRODUCT), lowered)
    assert list(body.seeds) == [0]
    assert names(body.after)[-2:] == ["add", "tanh"]  # the second term's
    assert names((body.final_step(0),)) == ["add"]
    for backend in ("triton", "mosaic_tpu"):
        (got,) = run(product_plus, backend, *args, tiled=PRODUCT)
        np.testing.assert_array_equal(got, product_plus(*args))


def test_a_narrower_sum_is_rounded_first() -> None:
    args = [jnp.ones(shape, "bfloat16") for shape in ((64, 48), (48, 32), (64, 32))]
    lowered = whole_group(product_plus, *args)
    assert not make_body(hand_spec(lowered, "triton", *PRODUCT), lowered).seeds


def test_second_pass_is_refused() -> None:
    lowered = whole_group(lambda x: x - x.sum(0), jnp.ones((64, 32)))
    with pytest.raises(InvalidPlanError, match="expected a single pass"):
        make_body(hand_spec(lowered, "triton", Tiled(0, 0, S, 16)), lowered)


def test_invariant_reads_are_loaded_once() -> None:
    lowered = whole_group(lambda x, b: (x * b).sum(0), jnp.ones((64, 32)), jnp.ones((64, 32)))
    body = make_body(hand_spec(lowered, "triton", Tiled(0, 0, S, 16)), lowered)
    assert body.invariant_reads == ()
    lowered = whole_group(lambda x, b: (x * b).sum(0), jnp.ones((64, 32)), jnp.ones((1, 32)))
    body = make_body(hand_spec(lowered, "triton", Tiled(0, 0, S, 16)), lowered)
    assert [r.value for r in body.invariant_reads] + [s.reads[0].value for s in body.before] == [1]


# A dimension of 6 x 10 elements tiled by 4 along the minor axis, and one of 5 x 8 by 2 along the major.
_SPEC = KernelSpec(
    (),
    (
        Axis(6, AxisRole.PARALLEL, 1),
        Axis(10, AxisRole.PARALLEL, 4),
        Axis(5, AxisRole.PARALLEL, 2),
        Axis(8, AxisRole.RESIDENT, 8),
        Axis(12, AxisRole.PARALLEL, 4),
    ),
    (),
    (),
    (),
)


@pytest.mark.parametrize(
    ("axes", "position", "start", "extent"),
    [
        ((0, 1), (0, 0, 0, 0, 0), 0, 10),
        ((0, 1), (3, 2, 0, 0, 0), 38, 2),
        ((2, 3), (0, 0, 1, 0, 0), 16, 24),
        ((2, 3), (0, 0, 2, 0, 0), 32, 8),
        ((4,), (0, 0, 0, 0, 2), 8, None),
        ((), (0, 0, 0, 0, 0), 0, None),
    ],
)
def test_windows(axes: Any, position: Any, start: int, extent: int | None) -> None:
    assert first_index(_SPEC, axes, position) == start
    assert valid_extent(_SPEC, axes, position) == extent


SIXTEEN_BIT: dict[str, Callable[..., Any]] = {
    "exp": jnp.exp,
    "log": lambda x: jnp.log(jnp.abs(x)),
    "tanh": jnp.tanh,
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x)),
    "logistic": jax.nn.sigmoid,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "expm1": jnp.expm1,
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "div": lambda x: x / 3,
    "reciprocal_cube": lambda x: lax.integer_pow(x, -3),
    "pow": lambda x: jnp.abs(x) ** 1.7,
    "round": jnp.round,
    "rem": lambda x: lax.rem(x, jnp.full_like(x, 0.7)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", PALLAS)
def test_sixteen_bit_math(backend: str, dtype: str) -> None:
    """One kernel of them all. Each is within one unit in the last place of the function of
    the same inputs in float64; a 16-bit polynomial would be off by several."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((24, 128)), dtype)
    results = run(lambda x: tuple(g(x) for g in SIXTEEN_BIT.values()), backend, x)
    eps = float(jnp.finfo(dtype).eps)
    tiny = float(jnp.finfo(dtype).smallest_normal)
    wide = x.astype(jnp.float32)
    for (name, g), got in zip(SIXTEEN_BIT.items(), results, strict=True):
        # abs() and constants are exact in 16 bits, save for these, which round their constant.
        constant_rounds = name in ("pow", "rem")
        want = np.asarray(jax.jit(g)(wide) if not constant_rounds else jax.jit(g)(x), np.float64)
        assert got.dtype == x.dtype, name
        error = np.abs(np.asarray(got, np.float64) - want)
        finite = np.isfinite(want) & (np.abs(want) < float(jnp.finfo(dtype).max))
        limit = (2 if constant_rounds else 1) * eps * np.abs(want) + tiny
        assert (error <= limit)[finite].all(), (
            f"{name}: off by {np.nanmax((error / limit)[finite]):.2f} units"
        )


def _relative(got: Any, want: Any) -> float:
    return float(np.max(np.abs(np.asarray(got, np.float64) - want) / np.maximum(np.abs(want), 1e-37)))


@pytest.mark.slow
def test_composed_accuracy() -> None:
    """Against float64, over the range in which results are normal numbers. Near the bottom
    of erfc the rounding of x * x in exp(-x * x) is what is left."""
    x = np.concatenate([np.linspace(-9.0, 9.0, 20_001), np.geomspace(1e-30, 1.0, 2_001)]).astype(np.float32)
    assert _relative(composed.erf(x), np.array([math.erf(v) for v in x])) < 5e-7
    assert _relative(composed.expm1(x), np.array([math.expm1(v) for v in x])) < 5e-7
    assert _relative(composed.erfc(x), np.array([math.erfc(v) for v in x])) < 1e-5
    positive = np.concatenate([np.geomspace(1e-30, 1e30, 2_001), -np.geomspace(1e-30, 0.99, 2_001)])
    positive = positive.astype(np.float32)
    assert _relative(composed.log1p(positive), np.log1p(positive.astype(np.float64))) < 5e-7
    assert _relative(composed.sqrt(positive[:2_001]), np.sqrt(positive[:2_001].astype(np.float64))) < 5e-7
    np.testing.assert_array_equal(
        composed.log1p(jnp.float32([-1, 0, np.inf, np.nan, -2])), [-np.inf, 0, np.inf, np.nan, np.nan]
    )
    np.testing.assert_array_equal(
        composed.sqrt(jnp.float32([0, np.inf, np.nan, -1])), [0, np.inf, np.nan, np.nan]
    )
    for g, limits in ((composed.erf, (-1, 1)), (composed.erfc, (2, 0)), (composed.expm1, (-1, np.inf))):
        ends = np.asarray(g(jnp.asarray([-np.inf, np.inf, np.nan])))
        np.testing.assert_array_equal(ends, [*limits, np.nan])


@pytest.mark.parametrize("method", list(lax.RoundingMethod))
def test_composed_rounding(method: lax.RoundingMethod) -> None:
    x = np.array(
        [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 8388609.0, 1e30, -np.inf, np.inf, np.nan], np.float32
    )
    np.testing.assert_array_equal(composed.round_to(jnp.asarray(x), method), lax.round(x, method))


def test_composed_floors() -> None:
    x = np.array([-2.5, -1.0, -0.3, -0.0, 0.0, 0.3, 0.7, 1.5, 8388609.0, -np.inf, np.inf, np.nan], np.float32)
    for g, want in ((composed.floor, np.floor(x)), (composed.ceil, np.ceil(x))):
        np.testing.assert_array_equal(g(jnp.asarray(x)), want)
        np.testing.assert_array_equal(np.signbit(g(jnp.asarray(x))[:-1]), np.signbit(want[:-1]))
    np.testing.assert_array_equal(composed.is_finite(jnp.asarray(x)), np.isfinite(x))


SPECIAL: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "extrema": lambda x: (x.max(1), x.min(1), jnp.maximum(x, 0.0), jnp.minimum(x, 1.0)),
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "signs": lambda x: (1 / -x, jnp.abs(x), jnp.sign(x), jnp.where(jnp.isfinite(x), x, 0.0)),
    "sums": lambda x: (x.sum(1), jnp.isnan(x).any(1), jnp.isinf(x).sum(1)),
    "gelu": lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False), jax.nn.silu(x), jax.nn.softplus(x)),
}


@pytest.mark.parametrize("backend", PALLAS)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str, backend: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((13, 130)).astype(np.float32)
    x[rng.random(x.shape) < 0.02] = np.nan
    x[3:6, :5] = [np.inf, -np.inf, 0.0, -0.0, 1e38]
    x[7] = -np.inf
    x[8, 0] = np.inf
    got = run(SPECIAL[name], backend, jnp.asarray(x))
    want = jax.tree.leaves(jax.jit(SPECIAL[name])(x))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(np.signbit(g) & (g == 0), np.signbit(w) & (w == 0))


@pytest.mark.parametrize("backend", PALLAS)
def test_special_values_of_operands_stay_in_their_rows_and_columns(backend: str) -> None:
    """Beside the padding of a contraction whose operands are computed: what is next to a NaN or
    an infinity is not touched by it, nor what is next to the end of an array by what follows."""

    def f(x: Any, w: Any) -> Any:
        return (x / jnp.abs(x)) @ jnp.exp(w)

    rng = np.random.default_rng(6)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((13, 130), (130, 70)))
    x[3, 129], x[5, 0], x[7], x[12, 128] = np.nan, 0.0, -np.inf, np.inf
    w[129, 69], w[0, 5], w[128, 31] = np.nan, np.inf, -np.inf
    depth = {"triton": 16, "mosaic_tpu": 128}[backend]
    rows, columns = {"triton": (16, 32), "mosaic_tpu": (8, 70)}[backend]
    tiled = (Tiled(-1, 0, P, rows), Tiled(-1, 1, P, columns), Tiled(0, 1, S, depth))
    (got,) = run(f, backend, jnp.asarray(x), jnp.asarray(w), tiled=tiled)
    np.testing.assert_allclose(got, jax.jit(f)(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", PALLAS)
def test_outside_the_array_does_not_leak(backend: str) -> None:
    """Rows past the end hold whatever memory holds: a streamed sum must not see them."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal((37, 130)), jnp.float32)
    tiled = {"triton": (Tiled(0, 0, S, 16),), "mosaic_tpu": (Tiled(0, 0, S, 16),)}[backend]
    # exp(0) is one: rows that are masked only when they are loaded would count.
    (got,) = run(lambda x: jnp.exp(x).sum(0), backend, x, tiled=tiled)
    np.testing.assert_allclose(got, np.exp(np.asarray(x)).sum(0), rtol=1e-5)


@pytest.mark.parametrize("backend", PALLAS)
def test_literals_keep_their_dtype(backend: str) -> None:
    x = jnp.asarray(np.random.default_rng(3).standard_normal((24, 128)), jnp.bfloat16)
    (got,) = run(lambda x: jnp.where(x > 0.3, x * 0.1 + 1, 2.0), backend, x)
    want = jnp.where(x > 0.3, x * 0.1 + 1, 2.0)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.01)


def test_sixty_four_bits_on_triton() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(4)
        x, w = rng.standard_normal((40, 70)), rng.standard_normal((70, 33))
        i = rng.integers(-(2**40), 2**40, (40, 70))
        tiles = (Tiled(-1, 0, P, 16), Tiled(-1, 1, P, 16), Tiled(0, 1, S, 16))
        (got,) = run(lambda x, w: jnp.tanh(x @ w), "triton", x, w, tiled=tiles)
        np.testing.assert_allclose(got, np.tanh(x @ w), rtol=1e-12)
        (got,) = run(lambda i: (i + lax.broadcasted_iota(jnp.int64, i.shape, 0)).sum(1), "triton", i)
        np.testing.assert_array_equal(got, (i + np.arange(40)[:, None]).sum(1))


def test_xla_evaluates_any_primitive() -> None:
    def f(x: Any, n: Any) -> Any:
        total, rows = lax.scan(lambda c, row: (c + row.sum(), row * c), 0.0, x)
        y = lax.cond(total > 0, jnp.sin, jnp.cos, rows)
        z = lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 0.5), (0, y))[1]
        return jax.nn.relu(jnp.sort(z, -1)), jnp.linalg.norm(z), lax.stop_gradient(total)

    x = jnp.asarray(np.random.default_rng(5).standard_normal((6, 10)), jnp.float32)
    lowered = whole_group(f, x, jnp.int32(3))
    spec = whole_array_spec(lowered.graph, tuple(range(len(lowered.graph.nodes))))
    got = jax.jit(kernel_function(spec, lowered, interpret=False))(x, jnp.int32(3))
    for g, w in zip(got, jax.jit(f)(x, jnp.int32(3)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-6)


def test_unknown_backend() -> None:
    lowered = whole_group(jnp.sin, jnp.ones((8, 128)))
    spec = hand_spec(lowered, "triton")
    assert backend_names() == ("mosaic_tpu", "triton", "mosaic_gpu", "xla", "loops")
    other = KernelSpec(spec.nodes, spec.axes, spec.node_axes, spec.reads, spec.writes, "metal")
    with pytest.raises(
        UnknownNameError, match=r"for one of mosaic_tpu, triton, mosaic_gpu, xla, loops, got one for 'metal'"
    ):
        emit(other, lowered)
