"""Every rule's tile form under ``loops``: on the whole array and on tiles of every axis, the
last one shifted back, it gives what the primitive gives on the array."""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import fuseplan
from costmodel.axes import GroupAxes, unify
from costmodel.graph import DimRole, OpKind
from fuseplan.frontend.lower import lower
from fuseplan.frontend.ops import rule_of, rules
from fuseplan.frontend.trace import Literal, evaluate, trace
from fuseplan.targets.calibrate import described_cpu
from tests.helpers.quickly import QUICKLY

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

ROWS, COLUMNS = 5, 7


class LoopTile:
    """A tile as the loop nest cuts it: for each iteration dimension, where it starts, how many
    of its elements an earlier tile had, and its extent."""

    language = "loops"

    def __init__(self, eqn, space, extents, starts, had):
        self.space, self.extents, self.starts, self.had = space, extents, starts, had
        self.in_shapes = tuple(
            () if isinstance(v, Literal) else self.shape(m)
            for v, m in zip(eqn.inputs, space.input_maps, strict=True)
        )
        self.out_shapes = tuple(map(self.shape, space.output_maps))

    def shape(self, dim_map):
        return tuple(math.prod(self.extents[i] for i in dims) for dims in dim_map)

    def indices(self, shape, dim, node_dim):
        return lax.broadcasted_iota(jnp.int32, shape, dim) + self.starts[node_dim]

    def valid(self, operand, dim):
        dims, shape = self.space.input_maps[operand][dim], self.in_shapes[operand]
        if all(self.space.dims[i] % self.extents[i] == 0 for i in dims):
            return None
        fresh = jnp.ones((), bool)
        for i in dims:
            fresh = (fresh[..., None] & (jnp.arange(self.extents[i]) >= self.had[i])).reshape(-1)
        return jnp.broadcast_to(fresh.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)


def view(x, space, dim_map, extents, starts):
    """The block of an array, its dimensions not merged."""
    flat = [i for dims in dim_map for i in dims]
    window = (..., *(slice(starts[i], starts[i] + extents[i]) for i in flat))  # Always a view.
    return x.reshape([space.dims[i] for i in flat])[window]


def walk(size, tile):
    """The tiles of one axis, (start, elements had before); the last ends where the axis does."""
    return [(min(s, size - tile), max(s - (size - tile), 0)) for s in range(0, size, tile)]


def tilings(space):
    """All axes whole; those that are reduced in tiles that do not divide them; the others; all."""
    free = [i for i, role in enumerate(space.roles) if not role.is_whole and space.dims[i] > 1]
    uneven = {i: next((t for t in (3, 2) if t < space.dims[i] and space.dims[i] % t), 1) for i in free}
    reduced = tuple(i for i in free if space.roles[i] == DimRole.REDUCED)
    chosen = {(), reduced, tuple(i for i in free if i not in reduced), tuple(free)}
    for cut in sorted(chosen):
        yield [uneven[i] if i in cut else n for i, n in enumerate(space.dims)]


def on_tiles(eqn, operands, extents, options=None):
    """The results of an equation, evaluated tile by tile: parts combined over reduced axes."""
    rule = rule_of(eqn)
    space, reduction = rule.space(eqn), rule.reduction
    maps = [None if isinstance(v, Literal) else m for v, m in zip(eqn.inputs, space.input_maps, strict=True)]
    literals = [x for x, m in zip(operands, maps, strict=True) if m is None]
    arrays = [(np.asarray(x), m) for x, m in zip(operands, maps, strict=True) if m is not None]

    @partial(jax.jit, compiler_options=options)
    def turn(totals, starts, had, blocks):
        rest, made = iter(literals), iter(blocks)
        tile = LoopTile(eqn, space, extents, starts, had)
        args = [next(rest) if m is None else next(made).reshape(tile.shape(m)) for m in maps]
        parts = rule.block(tile, eqn, args)
        if reduction is None:
            return parts
        for total, part in zip(totals, parts, strict=True):
            assert [(x.shape, x.dtype) for x in jax.tree.leaves(part)] == [
                (x.shape, x.dtype) for x in jax.tree.leaves(total)
            ]
        return list(map(reduction.combine, totals, parts))

    walks = [walk(n, t) for n, t in zip(space.dims, extents, strict=True)]
    order = sorted(range(len(walks)), key=lambda i: space.roles[i] == DimRole.REDUCED)
    results = [np.zeros(a.shape, a.dtype) for a in eqn.out_avals]
    totals = {}
    for at in itertools.product(*(walks[i] for i in order)):
        starts, had = ([at[order.index(i)][k] for i in range(len(order))] for k in (0, 1))
        outer = tuple(s for s, role in zip(starts, space.roles, strict=True) if role != DimRole.REDUCED)
        blocks = [view(x, space, m, extents, starts) for x, m in arrays]
        if reduction is not None and outer not in totals:
            shapes = LoopTile(eqn, space, extents, starts, had).out_shapes
            totals[outer] = [reduction.init(shapes[0], eqn)]
        totals[outer] = turn(totals.get(outer), starts, had, blocks)
        parts = totals[outer] if reduction is None else reduction.finish(totals[outer][0], eqn)
        for result, dim_map, part, aval in zip(results, space.output_maps, parts, eqn.out_avals, strict=True):
            assert part.dtype == aval.dtype
            place = view(result, space, dim_map, extents, starts)
            place[...] = np.asarray(part).reshape(place.shape)
    return results


def bits(x):
    """Floats as integers: zeros differ in sign, and there is one NaN."""
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return np.where(x != x, np.asarray(np.nan, x.dtype), x).view(f"int{8 * x.dtype.itemsize}")


def check(f, *args, op=None, tolerance=0.0, options=QUICKLY):
    """Every equation of ``f`` that has a tile form, or only those of ``op``; ``options`` are XLA's."""
    traced = trace(f, *args)
    values = dict(zip(traced.inputs, [*traced.consts, *args], strict=True))
    checked = set()
    for eqn in traced.equations:
        operands = [
            np.asarray(v.val, v.aval.dtype)[()] if isinstance(v, Literal) else values[v] for v in eqn.inputs
        ]
        wanted = jax.jit(partial(evaluate, eqn), compiler_options=options)(operands)
        values.update(zip(eqn.outputs, wanted, strict=True))
        if "loops" not in rule_of(eqn).backends(eqn) or (op and eqn.primitive.name != op):
            continue
        checked.add(eqn.primitive.name)
        for tiles in tilings(rule_of(eqn).space(eqn)):
            got = on_tiles(eqn, operands, tiles, options)
            for g, w in zip(got, wanted, strict=True):
                assert g.dtype == w.dtype
                if tolerance:
                    wide = [np.asarray(x, np.result_type(np.asarray(x), "float64")) for x in (g, w)]
                    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)
                else:
                    np.testing.assert_array_equal(bits(g), bits(w), strict=True, err_msg=f"{eqn} in {tiles}")
    assert checked, "nothing was checked"
    assert op is None or op in checked
    return checked


def random(dtype="float32", shape=(ROWS, COLUMNS), seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.6
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(0 if dtype.startswith("u") else -9, 9, shape).astype(dtype)
    return (2 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


def _spread(x):
    """Elements with gaps between them, as the gradient of a strided slice has."""
    return lax.pad(x, np.zeros((), x.dtype), ((0, 0, 0), (1, 0, 1)))


F, I, B = random(), random("int32"), random("bool")  # noqa: E741
G, J, C = random(seed=1), random("int32", seed=1), random("bool", seed=1)
WIDE = random(shape=(3, 2, COLUMNS))

UNARY = (
    "abs", "sign", "neg", "floor", "ceil", "square", "exp", "log", "tanh", "sqrt", "rsqrt", "exp2", "log1p",
    "sin", "cos", "tan", "sinh", "cosh", "asinh", "acosh", "atanh", "asin", "acos", "atan", "lgamma",
    "digamma", "bessel_i0e", "bessel_i1e", "is_finite", "expm1", "cbrt", "erf", "erfc", "erf_inv", "round",
    "logistic",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "max", "min", "eq", "ne", "lt", "le", "gt", "ge", "atan2", "igamma", "igammac",
    "nextafter", "div", "rem", "pow", "zeta",
)  # fmt: skip
OF_INTEGERS = ("and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic")
OF_AN_INTEGER = ("not", "population_count", "clz")

# By primitive: a function and its operands; each primitive that it needs is checked as well.
SAMPLES = {
    **{name: (getattr(lax, name), (F,)) for name in UNARY},
    **{name: (getattr(lax, name), (F, G)) for name in BINARY},
    **{name: (getattr(lax, f"{name}_p").bind, (I, J)) for name in OF_INTEGERS},
    **{name: (getattr(lax, f"{name}_p").bind, (I,)) for name in OF_AN_INTEGER},
    "add_any": (jax.grad(lambda x: (jnp.sin(x) * jnp.cos(x)).sum()), (F,)),
    "polygamma": (lax.polygamma, (np.ones_like(F), abs(G))),
    "copy": (jnp.copy, (F,)),
    "stop_gradient": (lambda x: lax.stop_gradient(x) + 1, (F,)),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 7), (F,)),
    "integer_pow": (lambda x: lax.integer_pow(x, -3), (F,)),
    "select_n": (lambda c, x, y: lax.select_n(c, x, y), (B, F, G)),
    "clamp": (lambda x: lax.clamp(-1.0, x, 1.0), (F,)),
    "convert_element_type": (lambda x: x.astype("int8"), (F,)),
    "broadcast_in_dim": (lambda x: jnp.broadcast_to(x[:, None], (ROWS, 3, COLUMNS)), (F,)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (WIDE,)),
    "reshape": (lambda x: x.reshape(6, COLUMNS), (WIDE,)),
    "squeeze": (lambda x: lax.squeeze(x, (1,)), (F[:, None],)),
    "iota": (lambda x: x + lax.broadcasted_iota("float32", x.shape, 1), (F,)),
    "reduce_max": (lambda x: x.max(1), (F,)),
    "reduce_min": (lambda x: x.min((0, 2)), (WIDE,)),
    "reduce_and": (lambda x: x.all(1), (B | C,)),
    "reduce_or": (lambda x: x.any(0), (B & C,)),
    "slice": (
        lambda x: (x[:, 2:4], x[:, 1:7:2], x[1:], lax.dynamic_slice(x, (0, 4), (ROWS, 4))),
        (random(shape=(ROWS, 8)),),
    ),
    "split": (lambda x: jnp.split(x, [2, 6], 1), (random(shape=(ROWS, 8)),)),
    "unstack": (lambda x: jnp.unstack(x, axis=1), (WIDE,)),
    "concatenate": (lambda x, y: jnp.concatenate([x, y[:, :3], x], 1), (F, G)),
    "stack": (lambda x, y: jnp.stack([x, y, y], 1), (F, G)),
    "pad": (lambda x: (jnp.pad(x, ((1, 2), (0, 7)), constant_values=2.0), _spread(x)), (F,)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (F,)),
    "reduce_xor": (lambda x: lax.reduce_xor(x, (1,)), (I,)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, "int32"), (F,)),
    "cumsum": (lambda x: (lax.cumsum(x, 1), lax.cumsum(x, 0, reverse=True)), (F,)),
    "cumprod": (lambda x: lax.cumprod(x, 1), (F,)),
    "cummax": (lambda x: lax.cummax(x, 0), (F,)),
    "cummin": (lambda x: lax.cummin(x, 1, reverse=True), (F,)),
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), (F,)),
    "argmax": (lambda x: lax.argmax(x, 1, "int32"), (F,)),
    "argmin": (lambda x: lax.argmin(x, 0, "int8"), (F,)),
}  # fmt: skip
ROUNDED = {
    "reduce_sum": (lambda x: x.sum(1), (F,)),
    "reduce_prod": (lambda x: x.prod((0, 2)), (WIDE,)),
    "dot_general": (lambda x, y: x @ y.T, (F, G)),
    # It iterates until every element of the array has converged.
    "regularized_incomplete_beta": (lax.betainc, (abs(F), abs(G), abs(F) / 9)),
}
# Names that no public function of JAX emits any more, or only on complex numbers.
UNREACHED = {
    "eq_to", "le_to", "lt_to", "log2", "one_minus_square", "real", "imag", "conj",
    "complex",
}  # fmt: skip


def test_every_tile_form_is_sampled():
    assert {name for name, rule in rules().items() if rule.block is not None} == {
        *SAMPLES, *ROUNDED, *UNREACHED,
    }  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_tiles_get_the_bits_of_the_array(name):
    f, args = SAMPLES[name]
    with np.errstate(all="ignore"):
        assert name in check(f, *args, options=None)  # with all that LLVM does to a rounding


@pytest.mark.parametrize("name", ROUNDED)
def test_parts_of_sums_add_up(name):
    f, args = ROUNDED[name]
    check(f, *args, tolerance=1e-5)


NARROW = ("exp", "erf", "logistic", "div", "tanh", "pow", "max", "select_n", "broadcast_in_dim")


@pytest.mark.parametrize("name", NARROW)
def test_narrow_floats_are_not_widened(name):
    f, args = SAMPLES[name]
    args = [a.astype(ml_dtypes.bfloat16) if a.dtype == "float32" else a for a in args]
    check(f, *args, options=None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "int8", "uint8", "int64", "bool"])
def test_extrema_and_choices_of_any_dtype(dtype):
    with jax.enable_x64(True):
        x, y = random(dtype), random(dtype, seed=1)
        check(lambda x, y: (lax.max(x, y), lax.min(x, y), lax.select_n(x > y, x, y)), x, y)
        check(lambda x: (lax.argmax(x, 1, "int32"), lax.argmin(x, 0, "int64"), x.max(0), x.min(1)), x)


def _affine(first, second):
    """One map after the other: it does not commute."""
    return first[0] * second[0], first[1] * second[0] + second[1]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_function_of_the_user_combines_in_order(dim):
    x, y = random(), random(seed=1)
    checked = check(lambda x, y: lax.reduce((x, y), (1.0, 0.0), _affine, (dim,)), x, y, tolerance=1e-4)
    assert checked == {"reduce"}
    check(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b - a * b, (dim,)), x, tolerance=1e-4)


@pytest.mark.parametrize("n", [6000, 6007])
def test_initial_values_are_combined_once(n):
    """JAX allows only an identity, and combines others once, too."""

    def f(x, y):
        d = jnp.exp(-((x[:, None] - y) ** 2))
        return lax.reduce((d, d), (1000.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))

    x, y = random(shape=(n,)), random(shape=(n,), seed=1)
    np.testing.assert_allclose(fuseplan.jit(f, device=described_cpu())(x, y), jax.jit(f)(x, y), rtol=1e-4)


def test_a_function_of_the_user_may_choose_and_hold_calls():
    def later(a, b):
        return jnp.where(b[0] >= a[0], b[0], a[0]), jnp.where(b[0] >= a[0], b[1], a[1])

    x, at = random("int32"), np.arange(ROWS * COLUMNS, dtype="int32").reshape(ROWS, COLUMNS)
    check(lambda x, at: lax.reduce((x % 3, at), (-9, 0), later, (1,)), x, at, op="reduce")


def test_a_reduction_from_a_start_that_is_no_number_is_xlas():
    x = random()
    for f, args in (
        (lambda x, start: lax.reduce(x, start, lambda a, b: a + b - a * b, (1,)), (x, np.float32(0))),
        (lambda x: lax.reduce((x, x), (1.0, 0.0), _affine, (0, 1)), (x,)),
        (lambda x: lax.reduce((x, x), (1.0, 0.0), _affine, (0,)), (x[:0],)),
    ):
        (*_, eqn) = trace(f, *args).equations
        assert eqn.primitive.name == "reduce"
        assert rule_of(eqn).backends(eqn) == ()


def test_sums_of_narrow_floats_are_carried_in_float32():
    x = random("bfloat16", (3, 300))
    check(lambda x: x.sum(1), x, tolerance=1e-2, op="reduce_sum")
    (eqn,) = trace(lambda x: lax.reduce_sum(x, axes=(1,)), x).equations
    reduction = rule_of(eqn).reduction
    assert reduction.init((3,), eqn).dtype == jnp.float32
    (total,) = reduction.finish(reduction.init((3,), eqn), eqn)
    assert total.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 9000), (2, 3, 90, 100), (1, 4, 1, 8192), (5, 4000)])
def test_long_rows_are_added_as_the_primitive_adds_them(shape, dtype):
    """They become a product with ones: special values and all."""
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    rows = x.reshape(-1, x.shape[-1])
    rows[0, :3], rows[1, 1:5], rows[-1, 4] = np.nan, np.inf, -np.inf
    axes = tuple(range(len(shape) - (1 if len(shape) == 2 else 2)))
    with jax.enable_x64(True):
        (eqn,) = trace(lambda x: lax.reduce_sum(x, axes), x).equations
        rule = rule_of(eqn)
        space = rule.space(eqn)
        tile = LoopTile(eqn, space, space.dims, [0] * len(space.dims), [0] * len(space.dims))
        text = str(jax.make_jaxpr(lambda x: rule.block(tile, eqn, [x]))(x))
        assert ("dot_general" in text) == (shape != (5, 4000))
        (got,) = rule.block(tile, eqn, [x])
    with np.errstate(invalid="ignore"):
        expected = x.sum(axes)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_complex_numbers_have_a_tile_form_in_loops():
    z = F + 1j * F[::-1]
    (eqn,) = trace(lambda x: x * x, z).equations
    assert rule_of(eqn).backends(eqn) == ("xla", "loops")
    check(lambda z: (z * jnp.conj(z) + jnp.exp(1j * z.real), abs(z), z.imag), z, tolerance=1e-6)
    check(lambda z: (z.sum(0), z.sum(1), z.prod(1), z @ z.T), z, tolerance=1e-4)
    for f in (lambda z: jnp.max(z, 0), lambda z: jnp.min(z, 1), lambda z: lax.cummax(z, 0)):
        for eqn in trace(f, z).equations:  # With a NaN, they depend on the order of their operands.
            assert "loops" not in rule_of(eqn).backends(eqn)


def test_keys_and_tokens_have_no_tile_form():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
    traced = trace(lambda k: k.reshape(2, 2), keys)
    assert all("loops" not in rule_of(e).backends(e) for e in traced.equations)


@pytest.mark.parametrize("combine", [jnp.bitwise_and, jnp.bitwise_or])
@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_bitwise_reductions_of_integers(combine, dtype):
    check(lambda x: (combine.reduce(x, axis=1), combine.reduce(x, axis=0)), random(dtype))


EINSUMS = {
    "bij,bjk->bik": ((2, 5, 7), (2, 7, 4)),
    "bqhd,bkhd->bhqk": ((2, 5, 3, 4), (2, 7, 3, 4)),
    "bhqk,bkhd->bqhd": ((2, 3, 5, 7), (2, 7, 3, 4)),
    "ija,kaj->ik": ((5, 3, 4), (7, 4, 3)),
    "i,i->": ((7,), (7,)),
    "i,j->ij": ((5,), (7,)),
}
PAIRS = [("bfloat16", "bfloat16"), ("int8", "int8"), ("bfloat16", "float32"), ("bool", "bool")]


@pytest.mark.parametrize("equation", EINSUMS)
def test_contractions_of_any_rank(equation):
    x, y = (random(shape=s, seed=seed) for seed, s in enumerate(EINSUMS[equation]))
    check(partial(jnp.einsum, equation, precision="highest"), x, y, op="dot_general", tolerance=1e-5)


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_contractions_of_any_dtype(dtypes):
    x, y = (random(d, (2, 5, 7), seed) for seed, d in enumerate(dtypes))
    tolerance = 0.0 if dtypes[0] in ("int8", "bool") else 2e-2
    check(partial(jnp.einsum, "bij,bkj->ik"), x, y, op="dot_general", tolerance=tolerance)


def test_mixed_operands_keep_the_type_of_the_primitive():
    numbers = (((1,), (1,)), ((), ()))
    check(
        lambda x, y: lax.dot_general(x, y, numbers), random("bfloat16"), F, op="dot_general", tolerance=1e-5
    )
    wide = partial(lax.dot_general, dimension_numbers=numbers, preferred_element_type="int32")
    check(wide, random("int8"), random("int8", seed=1), op="dot_general")


def test_what_an_earlier_tile_counted_is_masked_on_both_sides():
    """0 * inf is no number: an infinity that counted once must not come back."""
    x, y = np.ones((2, 7), "float32"), np.ones((7, 2), "float32")
    x[0, 5], y[5, 1] = np.inf, -np.inf
    check(jnp.matmul, x, y, op="dot_general", tolerance=1e-6)


def test_arg_extrema_take_the_first_of_equals_and_any_nan():
    x = np.zeros((6, 8), "float32")
    x[1, 3:] = 1
    x[2] = -np.inf
    x[3] = np.inf
    x[4, [2, 5, 7]] = np.nan
    x[5, 6], x[5, 7] = np.nan, np.inf
    check(lambda x: (lax.argmax(x, 1, "int32"), lax.argmin(x, 1, "int32")), x)
    check(lambda x: (lax.argmax(x, 0, "int32"), lax.argmin(x, 0, "int32")), x.T)
    check(lambda x: lax.argmax(x, 1, "int32"), np.full((3, 8), np.iinfo("int32").min, "int32"))
    check(lambda x: lax.argmin(x, 1, "int32"), np.ones((3, 8), bool))


def test_iota_counts_on_along_the_tiles():
    for dtype in ("int32", "int8", "float32", "bfloat16"):
        check(lambda x, d=dtype: x + lax.broadcasted_iota(d, x.shape, 0), random(dtype), op="iota")


LABELS = np.array([3, 0, 4, 6, 5], "int32")  # Tiles of 3 share 4 and 5.
OUTSIDE = np.array([3, -8, 5, 7, -1], "int32")
BATCH = random(shape=(2, ROWS, COLUMNS))


def along(x, labels, mode=None):
    return jnp.take_along_axis(x, labels[..., None], -1, mode=mode)


def per_row(x, labels):
    return jax.vmap(lambda row, i: row[i])(x, labels)


PICKS = {
    "fill": (along, F, OUTSIDE),
    "clip": (partial(along, mode="clip"), F, OUTSIDE),
    "promised": (partial(along, mode="promise_in_bounds"), F, LABELS),
    "vmap": (per_row, F, OUTSIDE),
    "batched": (along, BATCH, np.stack([LABELS, OUTSIDE])),
    "first axis": (lambda x, i: jnp.take_along_axis(x.T, i[None], 0), F, OUTSIDE),
    "middle axis": (
        lambda x, i: jnp.take_along_axis(x.transpose(0, 2, 1), i[:, None], 1),
        BATCH, np.stack([LABELS, OUTSIDE]),
    ),
    "narrow": (along, F.astype(ml_dtypes.bfloat16), OUTSIDE),
    "small index": (partial(along, mode="clip"), F, OUTSIDE.astype("int8")),
    "one column": (lambda x, i: x[:, :1][..., 0] + along(x, i)[..., 0], F, LABELS),
    "transposed pairs": (
        lambda x, i: jax.vmap(lambda m, j: m[j], in_axes=(1, 0))(x, i), F.T, LABELS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKS)
def test_one_element_a_row_is_a_reduction(name):
    f, x, labels = PICKS[name]
    check(f, x, labels, op="gather")
    gathers = [n for n in lower(trace(f, x, labels)).graph.nodes if n.op == "gather"]
    picked = [n for n in gathers if n.kind == OpKind.REDUCTION]
    assert len(picked) == 1
    assert picked[0].roles.count(DimRole.REDUCED) == 1
    assert DimRole.WHOLE not in picked[0].roles
    assert picked[0].backends == ("mosaic_tpu", "triton", "xla", "loops")


@pytest.mark.parametrize("name", [n for n in PICKS if n not in ("narrow", "one column")])
def test_its_gradient_is_elementwise(name):
    f, x, labels = PICKS[name]
    gradient = jax.grad(
        lambda x, i: (f(x, i) * jnp.arange(1.0, 1 + f(x, i).size).reshape(f(x, i).shape)).sum()
    )
    check(gradient, x, labels, op="scatter-add")
    (node,) = (n for n in lower(trace(gradient, x, labels)).graph.nodes if n.op == "scatter-add")
    assert node.kind == OpKind.ELEMENTWISE
    assert set(node.backends) >= {"triton", "loops"}
    assert "xla" not in node.backends
    assert set(node.roles) == {DimRole.PARALLEL}
    assert node.output_maps == node.input_maps[:1]


def test_integers_are_picked_where_nothing_is_filled_in():
    check(partial(along, mode="clip"), I, OUTSIDE, op="gather")
    (node,) = (n for n in lower(trace(along, I, LABELS)).graph.nodes if n.op == "gather")
    assert (node.kind, node.backends) == (OpKind.INJECTIVE, ("triton", "xla", "loops"))


def window(x, i):
    return jax.vmap(lambda i: lax.dynamic_slice(x, (i, i), (2, 3)))(i)


LOOKUPS = {
    "rows": (lambda x, i: x[i], F, OUTSIDE),
    "columns": (lambda x, i: x[:, i], F, LABELS),
    "elements": (lambda x, i: x[i, i], F, LABELS % 5),
    "many a row": (lambda x, i: jnp.take_along_axis(x, jnp.stack([i, i + 1], 1), 1), F, LABELS),
    "table of indices": (lambda x, i: x[jnp.stack([i, i[::-1], i])], F, LABELS % 5),
    "windows": (window, F, OUTSIDE),
    "fill": (lambda x, i: jnp.take(x, i, axis=0, mode="fill"), F, OUTSIDE),
    "clip": (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), F, OUTSIDE),
    "batches of tables": (jax.vmap(lambda x, i: x[i]), BATCH, np.stack([LABELS, OUTSIDE]) % 5),
    "one table for batches": (jax.vmap(lambda x, i: x[i], (None, 0)), F, np.stack([LABELS, OUTSIDE])),
    "table of one row": (lambda x, i: x[:1][i - i], F, LABELS),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_fetch_what_the_indices_of_a_tile_name(name, dtype):
    f, x, i = LOOKUPS[name]
    x = (x > 0) if dtype == "bool" else x.astype(jnp.dtype(dtype))
    check(f, x, i, op="gather")
    gathers = [n for n in lower(trace(f, x, i)).graph.nodes if n.op == "gather"]
    by_index = ("triton",) if dtype != "complex64" and name != "table of one row" else ()
    for node in gathers:
        assert (node.kind, node.backends) == (OpKind.INJECTIVE, (*by_index, "xla", "loops"))
    assert any(DimRole.PARALLEL in node.roles for node in gathers)


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_a_lookup_is_a_sum_over_indices(name):
    f, *arrays = LOOKUPS[name]
    x, i = map(jnp.asarray, arrays)
    weights = jnp.arange(1.0, 1 + f(x, i).size).reshape(f(x, i).shape)
    gradient = jax.grad(lambda x, i: (f(x, i) * weights).sum())
    check(gradient, x, i, op="scatter-add", tolerance=1e-6)
    nodes = [n for n in lower(trace(gradient, x, i)).graph.nodes if n.op == "scatter-add"]
    for node in nodes:
        assert (node.kind, node.backends) == (OpKind.REDUCTION, ("loops",))
    assert any(DimRole.REDUCED in node.roles for node in nodes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
@pytest.mark.parametrize("mode", ["drop", "clip", None])
def test_a_sum_into_a_table_adds_the_table_once(dtype, mode):
    x, more = (random("int32", seed=seed).astype(jnp.dtype(dtype)) for seed in (0, 1))
    check(lambda x, i, y: x.at[i].add(y, mode=mode), x, OUTSIDE, more, op="scatter-add")
    check(lambda x, i, y: x.at[:, i].add(y[:, :5], mode=mode), x, OUTSIDE, more, op="scatter-add")
    check(lambda x, i, y: x.at[i, i].add(y[:, 0], mode=mode), x, OUTSIDE, more, op="scatter-add")


def test_a_loss_has_rows_to_tile_and_classes_to_stream():
    """``logits @ w`` never needs to be stored: every node moves with rows or classes."""

    def loss(x, w, labels):
        logits = x @ w
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked

    x, w = random(shape=(ROWS, 4)), random(shape=(4, COLUMNS))
    graph = lower(trace(jax.grad(lambda *a: loss(*a).sum(), (0, 1)), x, w, LABELS)).graph
    for f in (graph, lower(trace(loss, x, w, LABELS)).graph):
        group = tuple(n.id for n in f.nodes if "loops" in n.backends)
        assert {"gather", "scatter-add"} & {f.nodes[n].op for n in group}
        axes = unify(f, group)
        assert isinstance(axes, GroupAxes), axes
        assert not any(axes.whole)
        assert sorted(axes.sizes) == [4, ROWS, COLUMNS]
