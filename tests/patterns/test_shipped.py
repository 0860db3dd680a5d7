"""The shipped patterns: right where they match, and silent where a function only looks alike."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from fuseplan import patterns
from fuseplan.patterns import shipped
from fuseplan.workloads.attention import grouped_attention
from fuseplan.workloads.functions import attention, causal_attention

SIZES = {"b": 2, "h": 3, "t": 8, "s": 8, "d": 16}
RNG = np.random.default_rng(0)


def array(dims, dtype=jnp.float32, **sizes):
    return jnp.asarray(RNG.normal(size=[{**SIZES, **sizes}[c] for c in dims]), dtype)


def exact(q, k, v, bias=None, mask=None, scale=None):
    """Attention of ``[b, h, t, d]`` in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = q @ np.swapaxes(k, -1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    scores = scores if bias is None else scores + np.asarray(bias, np.float64)
    scores = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def found(f, *args, which=patterns.attention):
    return fuseplan.match(which, f)(*args)


def bhtd(q, k, v, mask=None, bias=None, fill=-jnp.inf, softmax=jax.nn.softmax):
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else jnp.where(mask, scores, fill)
    return jnp.einsum("bhts,bhsd->bhtd", softmax(scores, axis=-1), v)


def exps(scores, axis):
    e = jnp.exp(scores)
    return e / jnp.sum(e, axis=axis, keepdims=True)


def last(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    e = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (e @ v) / e.sum(-1, keepdims=True)


CAUSAL = jnp.tril(jnp.ones((8, 8), bool))
MASK = jnp.asarray(RNG.random((2, 1, 8, 8)) < 0.7).at[..., 0].set(True)
BIAS = array("hts")
FORMS = {
    "plain": (lambda q, k, v: bhtd(q, k, v), {}, "attention"),
    "by exponentials": (lambda q, k, v: bhtd(q, k, v, softmax=exps), {}, "attention"),
    "divided last": (last, {}, "attention"),
    "scaled queries": (lambda q, k, v: jax.nn.softmax((q / 4) @ k.mT, -1) @ v, {"scale": 0.25}, "attention"),
    "unscaled": (lambda q, k, v: jax.nn.softmax(q @ k.mT, -1) @ v, {"scale": 1.0}, "attention"),
    "scaled twice": (
        lambda q, k, v: jax.nn.softmax(((q / 2) @ (k / 4).mT) * 3, -1) @ v, {"scale": 0.375}, "attention"
    ),
    "causal by indices": (
        lambda q, k, v: bhtd(q, k, v, jnp.arange(8)[:, None] >= jnp.arange(8)),
        {"mask": CAUSAL}, "attention causal",
    ),
    "causal by tril": (
        lambda q, k, v: bhtd(q, k, v, jnp.tril(jnp.ones((8, 8), bool))), {"mask": CAUSAL}, "attention causal"
    ),
    "causal, hidden": (
        lambda q, k, v: jax.nn.softmax(
            jnp.where(jnp.arange(8)[:, None] < jnp.arange(8), -1e30, q @ k.mT / 4), -1
        ) @ v,
        {"mask": CAUSAL}, "attention causal",
    ),
    "a mask": (lambda q, k, v: bhtd(q, k, v, MASK, fill=-1e9), {"mask": MASK}, "attention mask"),
    "a bias": (lambda q, k, v: bhtd(q, k, v, bias=BIAS), {"bias": BIAS}, "attention bias"),
    "both": (lambda q, k, v: bhtd(q, k, v, MASK, BIAS), {"bias": BIAS, "mask": MASK}, "attention mask+bias"),
    "in float32 inside": (
        lambda q, k, v: (jax.nn.softmax((q @ k.mT).astype(jnp.float32) / 4, -1).astype(q.dtype) @ v),
        {}, "attention",
    ),
    "by a vmap": (
        lambda q, k, v: jax.vmap(jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T / 4, -1) @ v))(q, k, v),
        {}, "attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_found_and_right(form):
    f, options, name = FORMS[form]
    q, k, v = (array("bhtd") for _ in range(3))
    report = found(f, q, k, v)
    assert [m.pattern.name for m in report.matches] == [name], str(report)
    got = jax.jit(patterns.rewrite(f, patterns.attention))(q, k, v)
    np.testing.assert_allclose(got, exact(q, k, v, **options), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", ["plain", "causal by indices", "a bias", "both"])
def test_the_gradient_is_that_of_the_plain_function(form):
    f = FORMS[form][0]
    q, k, v, ct = (array("bhtd") for _ in range(4))
    fast = patterns.rewrite(f, patterns.attention)
    got = jax.grad(lambda *a: (fast(*a) * ct).sum(), (0, 1, 2))(q, k, v)
    expected = jax.grad(lambda *a: (f(*a) * ct).sum(), (0, 1, 2))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("f", [attention, causal_attention, grouped_attention])
def test_the_workloads_attention_is_found(f):
    shape = (2, 8, 4, 16)
    q, k, v = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for _ in range(3))
    if f is grouped_attention:
        k, v = k[:, :, :2], v[:, :, :2]
    assert len(found(f, q, k, v)) == 1
    got = patterns.rewrite(f, patterns.attention)(q, k, v)
    np.testing.assert_allclose(got, f(q, k, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "dims", [("td", "sd"), ("btd", "bsd"), ("bthd", "bshd"), ("tbhd", "hbsd"), ("hdt", "hsd")]
)
def test_any_layout(dims):
    to_q, to_k = dims
    batch = "".join(c for c in to_q if c not in "td")
    scores = "".join(batch[::-1]) + "ts"
    q, k, v = array(to_q), array(to_k), array(to_k)

    def f(q, k, v):
        w = jax.nn.softmax(jnp.einsum(f"{to_q},{to_k}->{scores}", q, k) / 4, axis=-1)
        return jnp.einsum(f"{scores},{to_k}->{to_q}", w, v)

    assert len(found(f, q, k, v)) == 1
    np.testing.assert_allclose(
        patterns.rewrite(f, patterns.attention)(q, k, v), f(q, k, v), rtol=2e-5, atol=2e-5
    )


def test_heads_that_share_keys():
    q, k = array("bhtd"), array("bsd")
    f = lambda q, k: jnp.einsum(  # noqa: E731
        "bhts,bsd->bhtd", jax.nn.softmax(jnp.einsum("bhtd,bsd->bhts", q, k), axis=-1), k
    )
    (match,) = found(f, q, k).matches
    assert match.arguments[1].shape == (2, 1, 8, 16)
    np.testing.assert_allclose(patterns.rewrite(f, patterns.attention)(q, k), f(q, k), rtol=2e-5, atol=2e-5)


KEY = jax.random.key(0)
ALIKE = {
    "along the queries": lambda q, k, v: jax.nn.softmax(q @ k.mT, axis=-2) @ v,
    "over heads": lambda q, k, v: jax.nn.softmax(q @ k.mT, axis=1) @ v,
    "without a division": lambda q, k, v: jnp.exp(q @ k.mT - (q @ k.mT).max(-1, keepdims=True)) @ v,
    "divided by another sum": lambda q, k, v: (
        lambda e: (e / e.sum(axis=-2, keepdims=True)) @ v
    )(jnp.exp(q @ k.mT)),
    "the maximum of others": lambda q, k, v: (
        lambda s: (lambda e: e / jnp.exp(s).sum(-1, keepdims=True))(jnp.exp(s - s.max(-1, keepdims=True))) @ v
    )(q @ k.mT),
    "a dropout between": lambda q, k, v: (
        jax.nn.softmax(q @ k.mT, -1) * jax.random.bernoulli(KEY, 0.9, (2, 3, 8, 8))
    ) @ v,
    "a cap": lambda q, k, v: jax.nn.softmax(jnp.tanh(q @ k.mT), -1) @ v,
    "transposed weights": lambda q, k, v: jax.nn.softmax(q @ k.mT, -1).mT @ v,
    "stopped": lambda q, k, v: lax.stop_gradient(jax.nn.softmax(q @ k.mT, -1)) @ v,
    "scores read elsewhere": lambda q, k, v: (lambda s: (jax.nn.softmax(s, -1) @ v, s.sum()))(q @ k.mT),
    "weights read elsewhere": lambda q, k, v: (lambda w: (w @ v, w[0, 0]))(jax.nn.softmax(q @ k.mT, -1)),
    "hidden scores that count": lambda q, k, v: jax.nn.softmax(jnp.where(MASK, q @ k.mT, -1.0), -1) @ v,
    "rounded": lambda q, k, v: jax.nn.softmax(jnp.round(q @ k.mT), -1) @ v,
    "integers": lambda q, k, v: jax.nn.softmax(
        (q.astype(jnp.int32) @ k.astype(jnp.int32).mT).astype(jnp.float32), -1
    ) @ v,
}  # fmt: skip


@pytest.mark.parametrize("form", ALIKE)
def test_what_only_looks_alike_is_not_attention(form):
    q, k, v = (array("bhtd") for _ in range(3))
    assert not found(ALIKE[form], q, k, v).matches


def test_a_window_is_no_causal_mask():
    def window(q, k, v):
        i, j = jnp.arange(8)[:, None], jnp.arange(8)
        return bhtd(q, k, v, (j <= i) & (j > i - 3))

    def later(q, k, v):
        return bhtd(q, k, v, jnp.arange(8)[:, None] + 1 >= jnp.arange(8))

    q, k, v = (array("bhtd") for _ in range(3))
    for f in (window, later):
        report = found(f, q, k, v)
        assert [m.pattern.name for m in report.matches] == ["attention mask"]
        np.testing.assert_allclose(
            patterns.rewrite(f, patterns.attention)(q, k, v), f(q, k, v), rtol=2e-5, atol=2e-5
        )


def test_a_causal_mask_that_is_not_square_is_a_mask():
    f = lambda q, k, v: bhtd(q, k, v, jnp.arange(8)[:, None] >= jnp.arange(12))  # noqa: E731
    q, k, v = array("bhtd"), array("bhsd", s=12), array("bhsd", s=12)
    report = found(f, q, k, v)
    assert [m.pattern.name for m in report.matches] in ([], ["attention mask"])
    np.testing.assert_allclose(
        patterns.rewrite(f, patterns.attention)(q, k, v), f(q, k, v), rtol=2e-5, atol=2e-5
    )


def test_cudnn_takes_narrow_floats_of_some_widths():
    for dtype, width, used in ((jnp.float32, 64, 0), (jnp.bfloat16, 64, 1), (jnp.bfloat16, 60, 0)):
        shape = jax.ShapeDtypeStruct((2, 8, 512, width), dtype)
        plan = fuseplan.make_plan(bhtd, device="h200", deadline_s=1.0, patterns=patterns.attention)(
            shape, shape, shape
        )
        told = "\n".join(plan.notes)
        assert ("pattern 'attention' is" in told and "with it and" in told) == bool(used), told
        assert ("cuDNN" in told) == (not used)


@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_a_plan_with_cudnns_attention_is_chosen_by_cost(layout):
    shape = jax.ShapeDtypeStruct((4, 2048, 16, 128) if layout == "bthd" else (4, 16, 2048, 128), jnp.bfloat16)
    args = (shape, shape, shape)
    f = attention if layout == "bthd" else bhtd
    plan = fuseplan.make_plan(f, device="h200", deadline_s=5.0, patterns=patterns.attention)(*args)
    plain = fuseplan.make_plan(f, device="h200", deadline_s=5.0)(*args)
    assert plan.objective_us <= plain.objective_us
    (note,) = [n for n in plan.notes if "with it and" in n]
    ops = [node.op for node in plan.graph.nodes]
    assert ("is used" in note) == (ops == ["attention"]), note


def grouped(ids, x, w):
    return jnp.einsum("te,td,edf->tf", jax.nn.one_hot(ids, w.shape[0], dtype=x.dtype), x, w)


def looped(ids, x, w):
    return jnp.where(
        (ids[:, None] == jnp.arange(w.shape[0]))[..., None], jnp.einsum("td,edf->tef", x, w), 0
    ).sum(1)


@pytest.mark.parametrize("ids", [[0, 2, 1, 0, 2, 2], [3, -1, 0, 0, 1, 2], [0] * 6])
def test_grouped_products(ids):
    ids, x, w = jnp.array(ids), array("td", t=6), jnp.asarray(RNG.normal(size=(3, 16, 5)), jnp.float32)
    assert len(found(looped, ids, x, w, which=patterns.ragged_dot)) == 1
    got = patterns.rewrite(looped, patterns.ragged_dot)(ids, x, w)
    np.testing.assert_allclose(got, looped(ids, x, w), rtol=1e-5, atol=1e-5)
    grads = [jax.grad(lambda x, w, f=f: jnp.sin(f(ids, x, w)).sum(), (0, 1))(x, w)
             for f in (looped, patterns.rewrite(looped, patterns.ragged_dot))]  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *grads)
    other = lambda ids, x, w: looped(ids, x, w) + jnp.einsum("td,edf->tef", x, w).sum()  # noqa: E731
    assert not found(other, ids, x, w, which=patterns.ragged_dot).matches


@pytest.mark.skipif(not shipped.has_tokamax(), reason="tokamax is not installed")
def test_tokamax_attention():
    q, k, v = (array("bhtd") for _ in range(3))
    for form in ("plain", "causal by indices", "a mask", "a bias"):
        f, options, name = FORMS[form]
        assert [m.pattern.name for m in found(f, q, k, v, which=patterns.tokamax_attention).matches] == [
            f"tokamax {name}"
        ]
        got = patterns.rewrite(f, patterns.tokamax_attention)(q, k, v)
        np.testing.assert_allclose(got, exact(q, k, v, **options), rtol=2e-5, atol=2e-5)


HIDES_A_ROW = MASK.at[0, 0, 3].set(False)
# The attention of a mask; whether it is replaced where -inf hides, and where -1e9 does.
HIDDEN = {
    "a row is hidden": (lambda q, k, v, m, fill: bhtd(q, k, v, HIDES_A_ROW, fill=fill), 0, 1),
    "no row is hidden": (lambda q, k, v, m, fill: bhtd(q, k, v, MASK, fill=fill), 1, 1),
    "a row of each head is hidden": (
        lambda q, k, v, m, fill: bhtd(q, k, v, (jnp.arange(8) != 2)[:, None], fill=fill), 0, 1,
    ),
    "keys are hidden": (lambda q, k, v, m, fill: bhtd(q, k, v, jnp.arange(8) != 2, fill=fill), 1, 1),
    "before the diagonal": (
        lambda q, k, v, m, fill: bhtd(q, k, v, jnp.arange(8)[:, None] > jnp.arange(8), fill=fill), 0, 1,
    ),
    "a mask that is not known": (lambda q, k, v, m, fill: bhtd(q, k, v, m, fill=fill), 0, 1),
    "hidden that is not known": (
        lambda q, k, v, m, fill: jax.nn.softmax(jnp.where(~m, fill, q @ k.mT), -1) @ v, 0, 1,
    ),
    "with a bias": (lambda q, k, v, m, fill: bhtd(q, k, v, m, BIAS, fill=fill), 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("fill", [-jnp.inf, -1e9])
@pytest.mark.parametrize("case", HIDDEN)
def test_a_row_that_is_hidden_as_a_whole_keeps_its_value(case, fill):
    f, by_infinity, by_number = HIDDEN[case]
    q, k, v = (array("bhtd") for _ in range(3))
    run = lambda q, k, v, m: f(q, k, v, m, fill)  # noqa: E731
    report = found(run, q, k, v, HIDES_A_ROW)
    used = by_infinity if fill == -jnp.inf else by_number
    assert len(report) == used, str(report)
    assert used or any("-inf" in refusal.verdict.reason for refusal in report.refusals)
    got = jax.jit(patterns.rewrite(run, patterns.attention))(q, k, v, HIDES_A_ROW)
    np.testing.assert_allclose(got, run(q, k, v, HIDES_A_ROW), rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_bias_that_is_wider_than_the_queries(is_wide):
    def f(q, k, v, bias):
        weights = jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", q, k) * 0.25 + bias, -1)
        if is_wide:
            return jnp.einsum("bhts,bhsd->bhtd", weights, v)
        return jnp.einsum("bhts,bhsd->bhtd", weights.astype(v.dtype), v)

    args = (*(array("bhtd", jnp.bfloat16) for _ in range(3)), array("ts"))
    report = found(f, *args)
    assert len(report) == (0 if is_wide else 1), str(report)
    assert not is_wide or "read in float32" in str(report.refusals[0])
    got = patterns.rewrite(f, patterns.attention)(*args)
    assert got.dtype == f(*args).dtype
    np.testing.assert_allclose(got.astype(jnp.float32), f(*args).astype(jnp.float32), rtol=2e-2, atol=2e-2)
    plan = fuseplan.make_plan(f, device="test", planner="greedy", patterns=patterns.attention)(*args)
    assert any("attention bias" in note for note in plan.notes), plan.notes
