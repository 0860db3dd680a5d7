"""Columns: large arrays of short rows are computed one array an element; results are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.xla_metadata import set_xla_metadata

from fuseplan import Features, make_plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.passes.array_to_columns import by_columns, with_columns
from fuseplan.workloads import pairwise
from tests.helpers.nest_cases import normal
from tests.helpers.quickly import run_quickly
from tests.schedule.test_regions import evaluated

pytestmark = pytest.mark.one_python

M, N = 9, 14
X, Y, B = (np.float32(normal(*shape, seed=i)) for i, shape in enumerate([(M, 3), (N, 3), (N,)]))
KEY = jax.random.key(0)
LARGE = 4 * M * N
"""Bytes from which on an array is large here: that of all pairs."""


SHORT = 4
"""Elements of a short row here: less than along the axes of all pairs."""


def check(f, *args, splits=True, **options):
    """Compare ``f`` by columns with ``f``; or nothing is to be split."""
    options = {"max_row": SHORT, **options}
    args = jax.tree.map(jnp.asarray, args)
    lowered = lower(trace(f, *args))
    new = by_columns(lowered, LARGE, **options)
    assert (new is not None) == splits
    if new is None:
        return
    large = [a for a in new.avals if a.size > M * N]
    assert not any(a.ndim and 1 < a.shape[-1] <= 4 for a in large), [str(a) for a in large]
    results = run_quickly(lambda *arrays: evaluated(new, arrays), *args)
    for got, want in zip(results, jax.tree.leaves(run_quickly(f, *args)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


@pytest.mark.parametrize("name", ["gaussian_differences", "laplacian", "inverse_distance"])
def test_pairwise(name):
    f = getattr(pairwise, name)
    check(f, X, Y, B)
    check(lambda x, y, b, ct: jax.vjp(f, x, y, b)[1](ct), X, Y, B, normal(M, seed=3))


def test_bodies():
    points = normal(12, 3)
    check(pairwise.nbody, points, abs(normal(12, seed=1)))
    check(pairwise.nbody_energy_grad, points, abs(normal(12, seed=1)))


@pytest.mark.parametrize("axes", [-1, 0, 1, (0, 2), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.mean])
def test_reductions(reduce, axes):
    check(lambda x, y: reduce(jnp.sin(x[:, None] - y[None]), axis=axes), X, Y)
    check(lambda x, y: reduce(x[:, None] * y[None] + 2, axis=axes, keepdims=True), X, Y)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_widths(width):
    check(distances, normal(M, width), normal(N, width, seed=1))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.bool_])
def test_dtypes(dtype):
    x, y = (np.asarray(a * 3).astype(dtype) for a in (X, Y))

    def f(x, y):
        apart = x[:, None] != y[None]
        return jnp.where(apart, x[:, None] * 1.5, 0.5).sum(-1), apart.astype(jnp.int32).max(-1)

    check(f, x, y)


def test_operands_of_one_element_and_scalars():
    scale = normal(1, 1, 3)
    check(lambda x, y, s: (jnp.minimum(x[:, None] - y[None], 2.0) * s * s.sum()).sum(-1), X, Y, scale)
    check(lambda x, y: ((x[:, None] - y[None]) * y.mean(-1, keepdims=True)[None]).sum(-1), X, Y)


def test_special_values():
    x = X.copy()
    x[0], x[1, 1], x[2, 2] = np.nan, np.inf, -np.inf
    check(lambda x, y: (x[:, None] - y[None]).max(-1), x, Y)
    check(distances, x, Y)


def test_one_array_read_by_columns_and_as_a_whole():
    check(lambda x, y: (distances(x, y) * x.sum(), x * 2, x @ y.T), X, Y)


KEY = jax.random.key(0)


def set_apart(x, y):
    z = (x[:, None] - y[None]) * 2
    with set_xla_metadata(mark="1"):
        return z.sum(-1)


def refused():
    long = normal(M, 5), normal(N, 5, seed=1)
    half = X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)
    return {
        "long rows": (distances, *long),
        "16 bits would be rounded after each column": (distances, *half),
        "a result": (lambda x, y: x[:, None] - y[None], X, Y),
        "reshaped": (lambda x, y: (x[:, None] - y[None]).reshape(M, -1).sum(1), X, Y),
        "sorted": (lambda x, y: jnp.sort(x[:, None] - y[None])[..., 0], X, Y),
        "read from memory": (lambda z: (z * 2).sum(-1), normal(M, N, 3)),
        "keys": (
            lambda k: jax.vmap(jax.vmap(jax.random.uniform))(jax.random.split(k, (N * M, 2))).sum(),
            KEY,
        ),
        "set apart": (set_apart, X, Y),
        "random bits": (lambda k, x: (jax.random.bits(k, (M * N, 3)) >> 1).max(-1), KEY, X),
        "random numbers": (lambda k, x: (jax.random.uniform(k, (M * N, 3)) * 2).max(-1), KEY, X),
        "small": (lambda x: (x * 2).sum(-1), X),
    }


@pytest.mark.parametrize("why", refused())
def test_left_alone(why):
    check(*refused()[why], splits=False)


def between(x, i, j):
    return jnp.exp(-((x[i] - x[j]) ** 2).sum(-1)).sum()


def pulled(x, i, j):
    d = x[i] - x[j]
    return jnp.zeros_like(x).at[i].add(d / (1 + (d * d).sum(-1, keepdims=True)))


def filled(x, i, j):
    return (x.at[i].get(mode="fill", fill_value=7.0) * x.at[j].get(mode="clip")).sum(-1)


def of_two_indices(x, i, j):
    return jnp.sin(jnp.stack([x, x * 2])[i % 2, j]).max(-1)


ROWS, COLS = (np.random.default_rng(k).integers(-12, 20, 5 * M * N).astype("int32") for k in (1, 2))
"""Some indices are negative, and some outside of the table."""


@pytest.mark.parametrize("f", [between, pulled, filled, jax.grad(between)])
def test_rows_that_are_looked_up_and_added_to_a_table(f):
    check(f, X, ROWS, COLS, lookups=True)
    check(f, X, ROWS, COLS, splits=False)


def test_rows_at_two_indices_are_looked_up_by_column():
    new = by_columns(lower(trace(of_two_indices, X, ROWS, COLS)), LARGE, SHORT, lookups=True)
    (gather,) = {eqn.out_avals[0].shape for eqn in new.equations if eqn.primitive.name == "gather"}
    assert gather == ROWS.shape
    (got,) = evaluated(new, (X, ROWS, COLS))
    np.testing.assert_allclose(got, of_two_indices(X, ROWS, COLS), rtol=1e-6)


def own_index(x, i, j):
    y = jnp.broadcast_to(i[:2] % 3, (20, 30, 2)) * 1
    numbers = jax.lax.GatherDimensionNumbers((2,), (0, 1), (0, 1))
    return (jax.lax.gather(y, y, numbers, (1, 1, 2)) * 2).sum(-1)


NOT_BY_COLUMN = {
    "columns are indexed": lambda x, i, j: jnp.sin(x[i, j[:, None] % 3]).sum(-1),
    "the table is as large": lambda x, i, j: jnp.zeros((40 * M * N, 3)).at[i].add(x[j] * 2),
    "a row is an index": lambda x, i, j: jnp.arange(50.0)[(x[i] * 3).astype("int32")].sum(-1),
    "the table is its index": own_index,
    "one row is added to": lambda x, i, j: jax.lax.scatter_add(
        jnp.zeros(3),
        jnp.zeros((5 * M * N, 0), "int32"),
        x[i] * 2,
        jax.lax.ScatterDimensionNumbers((1,), (), ()),
    ),
    "other rows are added": lambda x, i, j: jnp.zeros((9, 3)).at[:, i % 3].add(x[:, j % 3]),
}


@pytest.mark.parametrize("why", NOT_BY_COLUMN)
def test_lookups_that_are_left_alone(why):
    check(NOT_BY_COLUMN[why], X, ROWS, COLS, splits=False, lookups=True)


def test_columns_are_those_of_the_points_and_not_of_what_is_broadcast():
    """Each column of the points is taken once, however often it is broadcast."""
    points = jax.ShapeDtypeStruct((2000, 3), "float32")
    new = by_columns(
        lower(trace(lambda x: jnp.exp(((x[:, None] - x[None]) ** 2).sum(-1)).sum(1), points)), 1 << 20
    )
    slices = [eqn for eqn in new.equations if eqn.primitive.name == "slice"]
    assert [eqn.inputs for eqn in slices] == [new.graph.inputs] * 3
    read = {v for eqn in new.equations for v in eqn.inputs if isinstance(v, int)} | {*new.outputs}
    assert all(not read.isdisjoint(eqn.outputs) for eqn in new.equations)


@pytest.mark.parametrize(("device", "is_split"), [("tpu_v5e", True), ("h200", False)])
def test_kernels_compute_by_columns_where_that_is_faster(device, is_split):
    """A row of four coordinates fills four of a TPU's 128 lanes."""
    points = jax.ShapeDtypeStruct((2000, 4), "float32")

    def soft_minimum(x, y):
        return -jax.nn.logsumexp(-((x[:, None] - y[None]) ** 2).sum(-1), 1)

    plan = make_plan(soft_minimum, device=device)(points, points)
    largest = max(v.size for v in plan.graph.values)
    assert largest == (2000 * 2000 if is_split else 2000 * 2000 * 4)
    as_traced = make_plan(soft_minimum, device=device, features=Features(rewrites=False))(points, points)
    assert plan.objective_ps <= as_traced.objective_ps
    assert (plan.objective_ps * 2 < as_traced.objective_ps) == is_split


_UNARY = (jnp.sin, jnp.abs, jnp.square, lambda x: x * 0.5, lambda x: jnp.where(x > 0, x, 0.1), jnp.tanh)
_BINARY = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
@pytest.mark.slow
def test_random_programs(choices):
    def f(x, y):
        pool = [x[:, None] + jnp.zeros_like(y), y[None] * jnp.ones_like(x)[:, None], x[:, None] - y[None]]
        for kind, i, j in choices:
            a, b = pool[i % len(pool)], pool[j % len(pool)]
            pool.append(_UNARY[kind](a) if kind < 6 else _BINARY[kind - 6](a, b))
        return pool[-1].sum(-1), pool[-2].sum((0, 1)), pool[len(pool) // 2].max(1)

    lowered = lower(trace(f, X, Y))
    new = by_columns(lowered, LARGE, SHORT)
    for got, want in zip(evaluated(new or lowered, (X, Y)), f(X, Y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_columns_that_are_stacked():
    """``jnp.cross`` takes columns of its operands, and stacks those of its result."""

    def field(x, y, currents):
        towards = x[:, None] - y[None]
        return (jnp.cross(currents[None], towards) / (jnp.square(towards).sum(-1, keepdims=True) + 1)).sum(1)

    check(field, X, Y, normal(N, 3, seed=4))
    check(lambda x, y: jnp.stack([distances(x, y), x @ y.T], -1).prod(-1), X, Y)
    check(lambda x, y: jnp.stack([distances(x, y), x @ y.T], 0).transpose(1, 2, 0).sum(-1), X, Y)


def test_columns_that_are_taken():
    def first(x, y):
        towards = x[:, None] - y[None]
        return towards[..., 0] * towards.sum(-1) + towards[..., 1:2].sum(-1)

    check(first, X, Y)
    # Two of three columns at once, and every other row, are no column.
    check(lambda x, y: (x[:, None] - y[None])[..., :2].sum(-1), X, Y, splits=False)
    check(lambda x, y: (x[:, None] - y[None])[::2, :, 0], X, Y, splits=False)


def test_what_xla_is_left_with_has_columns():
    """A row of a few elements takes XLA:CPU as long as one of eight."""
    points = [jax.ShapeDtypeStruct((700, 3), "float32") for _ in range(2)]
    flat = trace(distances, *points)
    assert with_columns(flat) is not flat
    few = trace(distances, *[jax.ShapeDtypeStruct((70, 3), "float32") for _ in range(2)])
    assert with_columns(few) is few
    long = trace(distances, *[jax.ShapeDtypeStruct((700, 9), "float32") for _ in range(2)])
    assert with_columns(long) is long
