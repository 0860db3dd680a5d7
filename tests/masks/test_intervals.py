"""Interval arithmetic: what XLA computes lies within the bounds, and masks within theirs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from costmodel.kernel import Access
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.masks.index_ranges import IndexArithmetic
from fuseplan.masks.intervals import OPERATIONS, apply

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

BINARY = [
    lax.add,
    lax.sub,
    lax.mul,
    lax.div,
    lax.max,
    lax.min,
    lax.lt,
    lax.le,
    lax.gt,
    lax.ge,
    lax.eq,
    lax.ne,
]
UNARY = [lax.neg, lax.abs, lax.exp, lax.exp2, lax.log, lax.sqrt, lax.rsqrt, lax.tanh, lax.sign, lax.floor]
UNARY += [lax.ceil, lax.logistic, lax.erf, lax.sin, lax.cos, lax.square, lax.is_finite]
POWERS = {f"power {y}": lambda x, y=y: lax.integer_pow(x, y) for y in (2, 3, -1, -2)}
CASTS = {t: lambda x, t=t: lax.convert_element_type(x, t) for t in ("int32", "bool", "bfloat16")}
FUNCTIONS = {f.__name__: f for f in (*BINARY, *UNARY)} | POWERS | CASTS
ENDS = np.float32([0, 1, -1, 2, 0.5, 1e-30, 1e30, -1e30, 3e38, -3e38, np.inf, -np.inf, 100, -100, -104, 88])


def sample(rng):
    """An interval, and values in it with both its ends."""
    lo, hi = sorted(
        rng.choice(ENDS, 2)
        if rng.random() < 0.5
        else np.float32(10.0 ** rng.integers(-3, 4) * rng.normal(size=2))
    )
    values = [lo, hi, *ENDS[(lo <= ENDS) & (hi >= ENDS)]]
    if np.isfinite([lo, hi]).all():
        values += list(np.clip(lo / 2 + hi / 2 + (hi / 2 - lo / 2) * rng.uniform(-1, 1, 20), lo, hi))
    return (np.float64(lo), np.float64(hi)), np.resize(rng.permutation(np.float32(values)), 64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_lie_within_the_bounds(name):
    f = FUNCTIONS[name]
    count = 2 if f in BINARY else 1
    rng = np.random.default_rng(0)
    (eqn,) = trace(f, *[jnp.ones(64)] * count).equations
    assert eqn.primitive.name in OPERATIONS
    compute, bounds = jax.jit(f), jax.jit(lambda *x: apply(jnp, eqn, x, exact=False))
    bounded = 0
    for _ in range(100):
        intervals, values = zip(*(sample(rng) for _ in range(count)), strict=True)
        lo, hi = map(float, bounds(*intervals))
        if np.isnan(lo):
            continue
        bounded += 1
        result = np.asarray(compute(*values)).astype(np.float64)
        assert ((result >= lo) & (result <= hi)).all(), (intervals, lo, hi)
    assert bounded > 10


def index(n):
    return jnp.arange(n)[:, None], jnp.arange(n)[None]


MASKS = {
    "causal": lambda i, j: j <= i,
    "window": lambda i, j: (j <= i) & (i - j < 7),
    "blocks": lambda i, j: i // 8 == j // 8,
    "strided": lambda i, j: (j % 5 == 0) | (jnp.abs(i - j) < 3),
    "bias": lambda i, j: 0.3 * (j - i) + jnp.where(j > i, -1e9, 0.0),
    "folded": lambda i, j: jnp.transpose((j <= i).reshape(6, 8, 48), (1, 0, 2)).reshape(48, 48),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile", [1, 5, 16])
def test_masks_lie_within_their_bounds(name, tile):
    n = 48
    lowered = lower(trace(lambda: MASKS[name](*index(n))))
    (v,) = lowered.graph.outputs
    arithmetic = IndexArithmetic(lowered)
    assert v in arithmetic
    whole = np.asarray(MASKS[name](*index(n))).astype(np.float64)
    start = np.minimum(np.arange(-(-n // tile)) * tile, n - tile)
    cells = {0: (start[:, None], start[:, None] + tile - 1), 1: (start[None], start[None] + tile - 1)}
    lo, hi = np.broadcast_arrays(
        *arithmetic.bounds(Access(v, ((0,), (1,))), cells, (n, n)), np.zeros((1, 1))
    )[:2]
    for a, b in np.ndindex(len(start), len(start)):
        block = whole[start[a] : start[a] + tile, start[b] : start[b] + tile]
        assert lo[a, b] <= block.min()
        assert block.max() <= hi[a, b]
        if tile == 1:  # nothing is lost on single elements
            np.testing.assert_allclose([lo[a, b], hi[a, b]], block.item(), rtol=1e-6)


COVERED = {
    **MASKS,
    "periodic": lambda i, j: (i % 7 != 3) & (i >= j),
    "every third": lambda i, j: (i + j) % 3 == 0,
    "one a row": lambda i, j: i == j,
    "nothing in the last row": lambda i, j: j > i,
}


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("along", [(0,), (1,), (0, 1)])
def test_what_covers_is_what_covers_element_by_element(name, along):
    n = 48
    lowered = lower(trace(lambda: COVERED[name](*index(n))))
    (v,) = lowered.graph.outputs
    whole = np.asarray(COVERED[name](*index(n))).astype(np.float64)
    for value in np.unique(whole)[:4].tolist():
        found = IndexArithmetic(lowered).covers([(Access(v, ((0,), (1,))), value)], frozenset(along), (n, n))
        covered = (whole == value).any(axis=along).all()
        assert found == covered or (name == "bias" and not found), "bounds of rounded numbers are not exact"


def count_cells(monkeypatch):
    counts = []
    decided = IndexArithmetic._decided

    def counted(self, keys, cells, sizes, count):
        counts.append(count)
        return decided(self, keys, cells, sizes, count)

    monkeypatch.setattr(IndexArithmetic, "_decided", counted)
    return counts


def test_all_schedules_of_a_group_share_what_covers(monkeypatch):
    counts = count_cells(monkeypatch)
    lowered = lower(trace(lambda: COVERED["periodic"](*index(48))))
    (v,) = lowered.graph.outputs
    arithmetic = IndexArithmetic(lowered)
    answers = {
        arithmetic.covers([(Access(v, ((a,), (b,))), 1.0)], frozenset({b, 9}), dict.fromkeys((a, b), 48))
        for a, b in ((0, 1), (3, 2), (5, 7))
    }
    assert len(answers) == 1
    asked = len(counts)
    arithmetic.covers([(Access(v, ((1,), (0,))), 1.0)], frozenset({0}), (48, 48))
    assert len(counts) == asked, "it was asked before, by other axes"
    arithmetic.covers([(Access(v, ((1,), (0,))), 1.0)], frozenset({1}), (48, 48))
    assert len(counts) > asked, "along the other axis it is another question"


@pytest.mark.parametrize("n", [4096, 8192, 65_536])
@pytest.mark.parametrize("name", ["periodic", "every third", "one a row"])
def test_what_covers_a_large_array_is_answered_from_few_cells(monkeypatch, name, n):
    """The work is counted, not timed: no more cells than a few million are looked at or made."""
    counts = count_cells(monkeypatch)

    def mask():
        i, j = jnp.arange(n)[:, None], jnp.arange(n)[None, :]
        return COVERED[name](i, j)

    lowered = lower(trace(mask))
    (v,) = lowered.graph.outputs
    found = IndexArithmetic(lowered).covers([(Access(v, ((0,), (1,))), 1.0)], frozenset({1}), (n, n))
    assert not found or name != "periodic"
    assert max(counts) <= 1 << 20
    assert sum(counts) <= 1 << 21
