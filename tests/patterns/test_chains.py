"""Matches that read each other's results: each that is used is a kernel, and nothing is computed again."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import fuseplan
from fuseplan import Pattern, PatternError
from fuseplan.patterns.replace import rewrite_closed

X = jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(4, 6)

SOFTMAX = Pattern("softmax", lambda x: jax.nn.softmax(x, axis=-1))
TANH = Pattern("tanh", jnp.tanh)
GATE = Pattern("gate", lambda x: jnp.tanh(x) * x)
WAVE = Pattern("wave", lambda x: jnp.sin(x) * x)
PAIR = Pattern("pair", lambda p, q: (jnp.sin(p), jnp.cos(q)), args=("a b", "a b"))
TWO = [SOFTMAX, TANH]


def operations(jaxpr):
    """The equations of a jaxpr, those in calls and bodies in the place of these, and not those in kernels."""
    for eqn in jaxpr.eqns:
        inner = [
            getattr(value, "jaxpr", value)
            for value in jax.tree.leaves(
                eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
            )
        ]
        inner = [body for body in inner if hasattr(body, "eqns")]
        if eqn.primitive.name == "pattern" or not inner:
            yield eqn
        else:
            for body in inner:
                yield from operations(body)


def rewritten(f, patterns, *args):
    """What is used, and the names of the kernels and of all other operations after it is."""
    closed = jax.make_jaxpr(f)(*args)
    result = rewrite_closed(closed, patterns)
    eqns = list(operations(result.closed.jaxpr))
    kernels = sorted(eqn.params["name"] for eqn in eqns if eqn.primitive.name == "pattern")
    others = Counter(eqn.primitive.name for eqn in eqns if eqn.primitive.name != "pattern")
    got = jax.core.eval_jaxpr(result.closed.jaxpr, result.closed.consts, *args)
    for value, expected in zip(got, jax.tree.leaves(f(*args)), strict=True):
        assert value.dtype == expected.dtype
        # Casts that are seen through round elsewhere.
        np.testing.assert_allclose(value.astype("float32"), expected.astype("float32"), rtol=0.03, atol=0.03)
    return result, kernels, others


def cast_twice(x):
    narrow = jax.nn.softmax(x).astype(jnp.bfloat16)
    return jnp.tanh(narrow).astype(jnp.float32) * narrow.astype(jnp.float32)


def several(x):
    s, c = jnp.sin(x), jnp.cos(x)
    return jnp.tanh(s.T), jax.nn.softmax(c.T.astype(jnp.bfloat16))


def read_twice(x):
    moved = jax.nn.softmax(x).T
    return jnp.tanh(moved), jnp.sqrt(moved)


def in_a_scan(x):
    def step(c, _):
        return jnp.tanh(jax.nn.softmax(c).T).T, None

    return lax.scan(step, x, None, length=3)[0]


# The program, the patterns, and the kernels.
CHAINS = {
    "transposed": (lambda x: jnp.tanh(jax.nn.softmax(x).T), TWO, ["softmax", "tanh"]),
    "transposed back": (lambda x: jnp.tanh(jax.nn.softmax(x).T).T, TWO, ["softmax", "tanh"]),
    "transposed twice": (lambda x: jnp.tanh(jax.nn.softmax(x).T.T), TWO, ["softmax", "tanh"]),
    "of another shape": (lambda x: jnp.tanh(jax.nn.softmax(x)[:, None].T), TWO, ["softmax", "tanh"]),
    "cast": (lambda x: jnp.tanh(jax.nn.softmax(x).astype(jnp.bfloat16)), TWO, ["softmax", "tanh"]),
    "cast, transposed": (
        lambda x: jnp.tanh(jax.nn.softmax(x).astype(jnp.bfloat16).T), TWO, ["softmax", "tanh"],
    ),
    "transposed, cast": (
        lambda x: jnp.tanh(jax.nn.softmax(x).T.astype(jnp.bfloat16)), TWO, ["softmax", "tanh"],
    ),
    "before and after a cast": (cast_twice, [SOFTMAX, GATE], ["gate", "softmax"]),
    "three": (
        lambda x: jnp.tanh(jax.nn.softmax(jnp.tanh(x.T).T).T), TWO, ["softmax", "tanh", "tanh"],
    ),
    "three patterns": (
        lambda x: jnp.tanh(jax.nn.softmax((jnp.sin(x) * x).T).T), [WAVE, *TWO], ["softmax", "tanh", "wave"],
    ),
    "several results": (several, [PAIR, *TWO], ["pair", "softmax", "tanh"]),
    "of the lowest priority": (several, [*TWO, PAIR], ["pair", "softmax", "tanh"]),
    "read by another operation": (read_twice, TWO, ["softmax", "tanh"]),
    "in a call": (lambda x: jnp.tanh(jax.jit(jax.nn.softmax)(x).T), TWO, ["softmax", "tanh"]),
    "in one call": (
        lambda x: jnp.tanh(jax.jit(lambda y: jax.nn.softmax(y).T)(x)), TWO, ["softmax", "tanh"],
    ),
    "in a scan": (in_a_scan, TWO, ["softmax", "tanh"]),
}  # fmt: skip


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("case", CHAINS)
def test_a_match_that_is_read_through_moves_is_a_kernel(case, is_reverse):
    f, patterns, names = CHAINS[case]
    result, kernels, others = rewritten(f, patterns[::-1] if is_reverse else patterns, X)
    assert kernels == names
    assert sorted(match.pattern.name for match in result.used) == names
    assert not {"exp", "tanh", "sin", "cos", "div", "reduce_max"}.intersection(others)


def test_a_match_owns_the_moves_up_to_where_another_reads_it():
    f = CHAINS["cast, transposed"][0]
    alone = fuseplan.match(SOFTMAX, f)(X).matches[0]
    softmax, tanh = fuseplan.match(TWO, f)(X).matches
    assert [d.name for d in alone.read_dtypes] == [d.name for d in softmax.read_dtypes] == ["bfloat16"]
    assert softmax.results == alone.results
    assert softmax.flops == alone.flops
    assert len(alone.place.removed - softmax.place.removed) == 1  # The transpose.
    assert softmax.place.removed < alone.place.removed
    assert softmax.place.removed.isdisjoint(tanh.place.removed)
    assert softmax.place.removed | tanh.place.removed == tanh.program.needed


def test_of_the_moves_of_one_match_alone_nothing_is_left():
    _, kernels, others = rewritten(CHAINS["cast, transposed"][0], [SOFTMAX], X)
    assert kernels == ["softmax"]
    assert others == {"tanh": 1}


@pytest.mark.parametrize("move", [jnp.transpose, lambda t: t.astype(jnp.bfloat16), lambda t: t[None]])
def test_a_move_that_is_set_apart_stays(move):
    def f(x):
        t = jnp.tanh(x)
        with set_xla_metadata(place="here"):
            t = move(t)
        return jnp.sin(t)

    result, kernels, others = rewritten(f, [TANH], X)
    assert kernels == ["tanh"]
    (kept,) = (eqn for eqn in operations(result.closed.jaxpr) if eqn.primitive.name not in ("pattern", "sin"))
    assert dict(kept.ctx.xla_metadata) == {"place": "here"}
    assert others.total() == 2


def test_a_match_that_nothing_needs_any_more_is_told():
    """The second softmax is the first one's value: the argument of the gate is the first."""
    f = lambda x: jnp.tanh(jax.nn.softmax(x)) * jax.nn.softmax(x)  # noqa: E731
    result, kernels, _ = rewritten(f, [SOFTMAX, GATE], X)
    assert kernels == ["gate", "softmax"]
    assert sorted(match.pattern.name for match in result.used) == kernels
    (refusal,) = result.passed_over
    assert "nothing needs" in str(refusal)


def test_of_two_matches_of_one_value_the_first_is_used():
    """The operation stays for its other result."""
    first = Pattern("first", lambda x: lax.top_k(x, 2)[0])
    second = Pattern("second", lambda x: lax.top_k(x, 2)[0])
    result, kernels, _ = rewritten(lambda x: lax.top_k(x, 2), [first, second], X)
    assert kernels == ["first"]
    assert [match.pattern.name for match in result.used] == kernels


MOVES = {
    "T": lambda v: v.T,
    "bfloat16": lambda v: v.astype(jnp.bfloat16),
    "float32": lambda v: v.astype(jnp.float32),
    "reshape": lambda v: v.reshape(v.shape[::-1]),
    "one": lambda v: v[:, None].reshape(v.shape),
}
POINTWISE = {"softmax": jax.nn.softmax, "tanh": jnp.tanh, "sin": jnp.sin, "cos": jnp.cos}


@st.composite
def programs(draw):
    """A program of the patterns' own operations and of moves. Most operations follow the one before; each
    result is one of its values."""
    names = st.sampled_from([*POINTWISE, *MOVES, *MOVES, "add", "mul"])
    back = st.sampled_from([1, 1, 1, 2, 3])
    steps = draw(st.lists(st.tuples(names, back, st.integers(1, 4)), min_size=2, max_size=9))
    results = draw(st.lists(st.integers(1, 3), max_size=2))
    in_scan = draw(st.booleans())

    def f(x):
        values = [x]
        for name, one, other in steps:
            a, b = (values[-min(k, len(values))] for k in (one, other))
            if name in ("add", "mul"):
                b = b if b.shape == a.shape else b.T
                values.append(a + b if name == "add" else a * b)
            else:
                values.append({**POINTWISE, **MOVES}[name](a))
        return [values[-1], *(values[-min(k, len(values))] for k in results)]

    if in_scan:
        return lambda x: lax.scan(lambda c, row: (c, f(row)), 0.0, x[None])[1]
    return f


CHOSEN = st.lists(st.sampled_from([SOFTMAX, TANH, GATE, PAIR]), min_size=2, max_size=3, unique=True)


@given(programs(), CHOSEN)
@settings(max_examples=60)
def test_every_match_that_is_used_is_a_kernel(f, patterns):
    try:
        result, kernels, others = rewritten(f, patterns, X)
    except PatternError as error:
        assert "overlaps itself" in str(error)  # noqa: PT017
        return
    assert kernels == sorted(match.pattern.name for match in result.used)
    gone = [match.program.equations[n] for match in result.used for n in match.place.gone]
    assert len({id(eqn) for eqn in gone}) == len(gone), "an equation is of two matches"
    left = Counter(eqn.primitive.name for eqn in operations(jax.make_jaxpr(f)(X).jaxpr))
    left.subtract(eqn.primitive.name for eqn in gone)
    assert not others - left, "an operation of a match is computed again"
