"""Where a pattern matches: through commuted operands, casts, broadcasts and transposes, and nowhere else."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback

import fuseplan
from fuseplan import Pattern, PatternError, patterns

X = jnp.linspace(-1, 1, 24, dtype=jnp.float32).reshape(4, 6)
Y = jnp.linspace(0, 2, 24, dtype=jnp.float32).reshape(4, 6)

SOFTMAX = Pattern("softmax", lambda x: jax.nn.softmax(x, axis=-1))
GATE = Pattern("gate", lambda x, y: jnp.tanh(x) * y + y)
HEAD = Pattern(
    "head",
    lambda q, k: patterns.name(jnp.einsum("...td,...sd->...ts", q, k), "product") / math.sqrt(q.shape[-1]),
    args=("... t d", "... s d"),
)


def count(pattern, f, *args):
    return len(fuseplan.match(pattern, f)(*args))


GATES = {
    "as written": lambda x, y: jnp.tanh(x) * y + y,
    "commuted": lambda x, y: y + y * jnp.tanh(x),
    "transposed": lambda x, y: (jnp.tanh(x).T * y.T + y.T).T,
    "in another function": jax.jit(lambda x, y: jax.jit(jnp.tanh)(x) * y + y),
    "narrower inside": lambda x, y: jnp.tanh(x.astype(jnp.bfloat16)).astype(jnp.float32) * y + y,
    "with size-one dimensions": lambda x, y: (jnp.tanh(x)[:, None] * y[:, None] + y[:, None])[:, 0],
    "of a row": lambda x, y: jnp.tanh(x) * y[:1] + y[:1],
    "of a number": lambda x, y: jnp.tanh(x) * 3.0 + 3.0,
    "by a vmap": lambda x, y: jax.vmap(lambda a, b: jnp.tanh(a) * b + b, (1, 1), 0)(x, y),
    "twice one": lambda x, y: jnp.tanh(x) * x + x,
}
NO_GATES = {
    "another function": lambda x, y: jnp.sin(x) * y + y,
    "another operation": lambda x, y: jnp.tanh(x) * y - y,
    "two values for one argument": lambda x, y: jnp.tanh(x) * y + x,
    "another row": lambda x, y: jnp.tanh(x) * y[:1] + y[1:2],
    "a permuted square": lambda x, y: (lambda s: jnp.tanh(x[:, :4]) * s + s.T)(y[:, :4]),
    "integers": lambda x, y: lax.round(jnp.tanh(x)).astype(int) * 2 + 2,
    "a truncation between": lambda x, y: jnp.tanh(x).astype(int).astype(jnp.float32) * y + y,
    "eight bits between": lambda x, y: jnp.tanh(x).astype(jnp.float8_e4m3fn).astype(jnp.float32) * y + y,
}


@pytest.mark.parametrize("form", GATES)
def test_a_pattern_is_found_in_other_forms(form):
    report = fuseplan.match(GATE, GATES[form])(X, Y)
    assert len(report) == 1, str(report)


@pytest.mark.parametrize("form", NO_GATES)
def test_a_pattern_is_not_found_in_what_computes_something_else(form):
    assert count(GATE, NO_GATES[form], X, Y) == 0


def test_an_argument_matches_anything_and_says_what():
    report = fuseplan.match(GATE, lambda x, y: jnp.tanh(jnp.sin(x)).T * y.T + y.T)(X, Y)
    (match,) = report.matches
    assert [a.shape for a in match.arguments] in ([(4, 6), (4, 6)], [(6, 4), (6, 4)])
    assert [str(e).split(" = ")[1].split()[0] for e in match.equations] == ["tanh", "mul", "add"]
    assert "test_matching.py" in match.source
    assert not match.is_used_outside


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_softmax_along_any_axis_is_one_up_to_transposes(axis):
    (match,) = fuseplan.match(SOFTMAX, lambda x: jax.nn.softmax(x, axis=axis))(jnp.ones((2, 3, 5))).matches
    assert match.arguments[0].shape[-1] == (2, 3, 5)[axis]


def test_numbers_have_to_be_equal_at_the_shapes_that_are_found():
    q, k = jnp.ones((2, 3, 5, 64)), jnp.ones((2, 3, 7, 64))
    scaled = lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k) * 0.125  # noqa: E731
    (match,) = fuseplan.match(HEAD, scaled)(q, k).matches
    assert match.named["product"].shape == (2, 3, 5, 7)
    assert count(HEAD, lambda q, k: jnp.einsum("bhtd,bhsd->bhts", q, k) * 0.25, q, k) == 0
    assert count(HEAD, scaled, q[..., :32], k[..., :32]) == 0


@pytest.mark.parametrize("order", list(itertools.permutations("bhtd")))
def test_a_product_is_found_in_any_order_of_dimensions(order):
    to = "".join(order)
    q = jnp.ones([{"b": 2, "h": 3, "t": 5, "d": 4}[c] for c in to])
    k = jnp.ones([{"b": 2, "h": 3, "t": 7, "d": 4}[c] for c in to[::-1]])
    f = lambda q, k: jnp.einsum(f"{to[::-1].replace('t', 's')},{to}->htbs", k, q) / 2  # noqa: E731
    (match,) = fuseplan.match(HEAD, f)(q, k).matches
    assert match.arguments[0].shape[-2:] == (5, 4)
    assert match.arguments[1].shape[-2:] == (7, 4)


def test_dimensions_of_one_name_are_equal():
    square = Pattern("square", lambda x, y: x @ y, args=("n n", "n n"))
    assert count(square, jnp.matmul, jnp.ones((3, 3)), jnp.ones((3, 3))) == 1
    report = fuseplan.match(square, jnp.matmul)(jnp.ones((3, 4)), jnp.ones((4, 3)))
    assert not report.matches
    assert "'n' is 3 in argument 0 and 4 in argument 0" in report.near_misses[0].found


def test_constants_are_bound_and_equal_where_they_have_one_name():
    twice = Pattern("twice", lambda x: patterns.constant("c") * x + patterns.constant("c"))
    (match,) = fuseplan.match(twice, lambda x: x / 4 + 0.25)(X).matches
    assert match.constants == {"c": 0.25}
    assert count(twice, lambda x: x / 4 + 0.5, X) == 0
    assert count(twice, lambda x: x * x[0, 0] + x[0, 0], X) == 0, "it is no number that is known"


def test_a_default_stands_for_a_multiplication_that_is_missing():
    pattern = Pattern("cosine", lambda x: jnp.cos(x * patterns.constant("c", default=1.0)))
    for f, c in ((lambda x: jnp.cos(x), 1.0), (lambda x: jnp.cos(3 * x), 3.0)):
        assert fuseplan.match(pattern, f)(X).matches[0].constants == {"c": c}


def scaled(name, x):
    return patterns.constant(name, default=1.0) * x


FACTOR = Pattern("factor", lambda x: scaled("c", jnp.tanh(x)))
TWO_FACTORS = Pattern("two", lambda x, y: (scaled("c", jnp.tanh(x)), scaled("d", jnp.sin(y))))
SAME = Pattern("same", lambda x: (lambda t: (t, scaled("c", t.T)))(jnp.tanh(x)))
TOP = Pattern("top", lambda x: scaled("c", lax.top_k(x, 2)[1].astype(jnp.float32)), args=("a b",))

# The pattern, the program, and the constants of each match.
AT_RESULTS = {
    "missing": (FACTOR, lambda x: jnp.tanh(x) + 1, [{"c": 1.0}]),
    "missing, transposed": (FACTOR, lambda x: jnp.tanh(x).T + 1, [{"c": 1.0}]),
    "missing, narrow": (FACTOR, lambda x: jnp.tanh(x.astype(jnp.bfloat16)) + 1, [{"c": 1.0}]),
    "there": (FACTOR, lambda x: 3 * jnp.tanh(x) + 1, [{"c": 3.0}]),
    "there, in another rank": (FACTOR, lambda x: 3 * jnp.tanh(x)[None] + 1, [{"c": 3.0}]),
    "there, and read without it": (
        FACTOR, lambda x: (lambda t: (3 * t + 1, t + 1))(jnp.tanh(x)), [{"c": 3.0}],
    ),
    "once of two": (TWO_FACTORS, lambda x: jnp.tanh(x) - 2 * jnp.sin(x + 1), [{"c": 1.0, "d": 2.0}]),
    "the other of two": (TWO_FACTORS, lambda x: 2 * jnp.tanh(x) - jnp.sin(x + 1), [{"c": 2.0, "d": 1.0}]),
    "both of two": (TWO_FACTORS, lambda x: jnp.tanh(x) - jnp.sin(x + 1), [{"c": 1.0, "d": 1.0}]),
    "neither of two": (
        TWO_FACTORS, lambda x: 3 * jnp.tanh(x) - 2 * jnp.sin(x + 1), [{"c": 3.0, "d": 2.0}],
    ),
    "of the other result": (SAME, lambda x: jnp.tanh(x) + 1, [{"c": 1.0}]),
    "of a second result": (TOP, lambda x: lax.top_k(x, 2)[1].astype(jnp.float32) + x[:, :2], [{"c": 1.0}]),
    "of an argument alone": (
        Pattern("alone", lambda x: scaled("c", scaled("d", x))), lambda x: jnp.tanh(x) * jnp.sin(x), [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_RESULTS)
def test_the_multiplication_of_a_result_may_be_missing(case):
    pattern, f, constants = AT_RESULTS[case]
    assert [m.constants for m in fuseplan.match(pattern, f)(X).matches] == constants
    got = patterns.rewrite(f, [pattern])(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, f(X))


@pytest.mark.parametrize(("f", "op"), [(jnp.tanh, "tanh"), (lambda x: 3 * jnp.tanh(x), "mul")])
def test_a_named_product_has_its_name_without_its_factor(f, op):
    pattern = Pattern("named", lambda x: jnp.cos(patterns.name(scaled("c", jnp.tanh(x)), "scaled")))
    (match,) = fuseplan.match(pattern, lambda x: jnp.cos(f(x)))(X).matches
    assert match.named["scaled"].op == op


def test_an_argument_without_its_factor_is_not_inside():
    pattern = Pattern("cosine", lambda x: jnp.cos(scaled("c", x)))
    (match,) = fuseplan.match(pattern, lambda x: jnp.cos(jnp.sin(x)))(X).matches
    assert not match.is_used_outside


def test_arrays_that_a_pattern_closes_over_have_to_be_equal():
    weights = np.arange(6, dtype=np.float32)
    pattern = Pattern("weighted", lambda x: jnp.tanh(x * weights), args=(X,))
    assert count(pattern, lambda x: jnp.tanh(x * weights.copy()), X) == 1
    assert count(pattern, lambda x: jnp.tanh(x * (weights + 1)), X) == 0


def test_several_results():
    both = Pattern("both", lambda x: (jnp.sin(x), jnp.sin(x) * jnp.cos(x)))
    report = fuseplan.match(both, lambda x: jnp.cos(x) * jnp.sin(x) + jnp.sin(x))(X)
    assert len(report) == 1
    assert len(report.matches[0].results) == 2
    assert count(both, lambda x: jnp.cos(x) * jnp.sin(x + 1) + jnp.sin(x), X) == 0


def test_values_used_outside_are_told_to_check():
    seen = []

    def check(match):
        seen.append([value.op for value in match.used_outside])
        return fuseplan.Verdict("pattern", "its tanh is read elsewhere") if match.is_used_outside else True

    pattern = Pattern("gate", GATE.f, check=check)
    f = lambda x, y: (lambda t: (t * y + y, t.sum()))(jnp.tanh(x))  # noqa: E731
    report = fuseplan.match(pattern, f)(X, Y)
    assert seen == [["tanh"]]
    assert not report.matches
    assert str(report.refusals[0]).endswith("its tanh is read elsewhere")


@pytest.mark.parametrize(("answer", "used"), [(None, 1), (True, 1), ("", 1), (False, 0), ("too hot", 0)])
def test_answers_of_a_check(answer, used):
    pattern = Pattern("gate", GATE.f, check=lambda match: answer)
    assert count(pattern, GATES["as written"], X, Y) == used


@pytest.mark.parametrize("check", [lambda match: 3, lambda match: 1 / 0])
def test_a_check_that_fails_is_named(check):
    with pytest.raises(fuseplan.ExtensionError, match="check of the pattern 'gate'"):
        fuseplan.match(Pattern("gate", GATE.f, check=check), GATES["as written"])(X, Y)


def test_the_first_pattern_has_the_operation():
    tanh = Pattern("tanh", jnp.tanh)
    report = fuseplan.match([tanh, Pattern("gate", GATE.f, priority=1)], GATES["as written"])(X, Y)
    assert [m.pattern.name for m in report.matches] == ["gate"]
    assert "'gate' has replaced a part of it" in str(report.refusals[0])
    report = fuseplan.match([tanh, GATE], GATES["as written"])(X, Y)
    assert [m.pattern.name for m in report.matches] == ["tanh"]


def test_a_pattern_that_overlaps_itself_names_both_places():
    pattern = Pattern("three", lambda a, b, c: (a + b) + c)

    def four(x, y):
        first = x + y
        second = first + 2 * x
        return second + 3 * y

    with pytest.raises(
        PatternError,
        match=r"'three' overlaps itself in four: .*test_matching.py:\d+.* and the one at .*test_match",
    ):
        fuseplan.match(pattern, four)(X, Y)


def test_two_results_of_one_shared_value_do_not_overlap():
    pattern = Pattern("product", lambda x, y: jnp.tanh(x) * y)
    report = fuseplan.match(pattern, lambda x, y: (lambda t: (t * y, t * (y + 1)))(jnp.tanh(x)))(X, Y)
    assert len(report) == 2
    assert all(m.is_used_outside for m in report.matches)


def test_a_near_miss_says_what_differs_first():
    report = fuseplan.match(GATE, NO_GATES["another function"])(X, Y)
    (miss,) = report.near_misses
    assert (miss.n_matched, miss.n_equations) == (2, 3)
    assert "tanh" in miss.expected
    assert "sin" in miss.found
    assert "test_matching.py" in miss.source
    assert "near misses" in str(report)


def test_a_report_is_readable():
    text = str(fuseplan.match(GATE, GATES["as written"])(X, Y))
    assert text.startswith("gate in <lambda>: 1 match\ngate at ")
    assert "arguments: float32[4, 6], float32[4, 6]" in text


def test_bodies_and_calls_are_looked_into():
    def f(x, y):
        def step(c, row):
            return jnp.tanh(c) * row + row, c.sum()

        return lax.scan(step, x[0], y)

    (match,) = fuseplan.match(GATE, f)(X, Y).matches
    assert match.where == "scan"
    looped = lambda x, y: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c) * y + y, x)  # noqa: E731
    assert fuseplan.match(GATE, looped)(X, Y).matches[0].where in ("while", "scan")
    branch = lambda x, y: lax.cond(x[0, 0] > 0, GATES["as written"], lambda x, y: x, x, y)  # noqa: E731
    assert fuseplan.match(GATE, branch)(X, Y).matches[0].where == "cond"


BAD = {
    "no function": lambda: Pattern("p", 3),
    "no name": lambda: Pattern("", jnp.tanh),
    "a name with markup": lambda: Pattern("<b>", jnp.tanh),
    "no check": lambda: Pattern("p", jnp.tanh, check="x"),
    "no cost": lambda: Pattern("p", jnp.tanh, cost=1.0),
    "no replacement": lambda: Pattern("p", jnp.tanh, replacement={"cuda": jnp.tanh}),
    "no choice": lambda: Pattern("p", jnp.tanh, choose="best"),
    "no priority": lambda: Pattern("p", jnp.tanh, priority="high"),
    "no dimensions": lambda: Pattern("p", jnp.tanh, args=("t [d",)),
    "no dtype": lambda: Pattern("p", jnp.tanh, args=("floaty[t]",)),
    "no list": lambda: Pattern("p", jnp.tanh, args="t d"),
    "no patterns": lambda: fuseplan.jit(jnp.tanh, patterns=[jnp.tanh]),
    "no program": lambda: fuseplan.match(GATE, 3),
    "no constant": lambda: patterns.constant("a b"),
    "no name of a value": lambda: patterns.name(1.0, ""),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    with pytest.raises(fuseplan.InvalidArgumentError):
        BAD[case]()


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x, y: jnp.dot(x, y), "cannot be looked for"),
        (lambda x: x, "a result is an argument"),
        (lambda x: jax.debug.callback(print, x), "cannot be looked for"),
        (lambda x: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_pattern_that_cannot_be_traced_says_so(f, reason):
    args = ("a b", "c d") if f.__code__.co_argcount == 2 else None
    with pytest.raises(PatternError, match=reason):
        fuseplan.match(Pattern("p", f, args=args), lambda x: x)(X)


@st.composite
def programs(draw):
    """A program with a gate in it, in a form that was drawn: casts, transposes, order of operands, and
    operations around it."""
    swap, casts, layout = (
        draw(st.booleans()),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(["", "T", "1", "r"])),
    )
    before = draw(st.lists(st.sampled_from(["sin", "exp", "neg"]), max_size=2))
    after = draw(st.lists(st.sampled_from(["sin", "sum", "neg", "T"]), max_size=3))
    in_jit = draw(st.booleans())

    def moved(v):
        return {"": v, "T": v.T, "1": v[None], "r": v.reshape(v.shape[0], 1, v.shape[1])}[layout]

    def cast(v, bit):
        return v.astype(jnp.bfloat16).astype(jnp.float32) if casts & bit else v

    def f(x, y):
        for name in before:
            x = getattr(jnp, {"neg": "negative"}.get(name, name))(x)
        inner = jax.jit(jnp.tanh) if in_jit else jnp.tanh
        t, v = cast(inner(moved(x)), 1), moved(y)
        out = cast(v * t if swap else t * v, 2)
        out = v + out if swap else out + v
        for name in after:
            out = out.T if name == "T" else getattr(jnp, {"neg": "negative"}.get(name, name))(out)
        return out

    return f


@given(programs())
@settings(max_examples=60)
def test_a_planted_pattern_is_found(f):
    assert count(GATE, f, X, Y) == 1


@given(
    st.lists(st.sampled_from(["tanh", "sin", "mul", "add", "T"]), min_size=1, max_size=8), st.integers(0, 99)
)
@settings(max_examples=60)
def test_what_is_found_is_what_the_program_computes(ops, seed):
    """Random programs of the pattern's own operations: whatever matches may be replaced by the pattern."""

    def f(x, y):
        values = [x, y]
        picks = np.random.default_rng(seed)
        for op in ops:
            a, b = (values[picks.integers(len(values))] for _ in range(2))
            if op == "T":
                values.append(a.T)
            elif op in ("mul", "add"):
                b = b if b.shape == a.shape else b.T
                values.append(a * b if op == "mul" else a + b)
            else:
                values.append(getattr(jnp, op)(a))
        return values[-1] + values[-1].sum()

    try:
        found = patterns.rewrite(f, [GATE])
        got = found(X, Y)
    except PatternError as error:
        assert "overlaps itself" in str(error)  # noqa: PT017
        return
    np.testing.assert_allclose(got, f(X, Y), rtol=1e-6, atol=1e-6)


ONE = Pattern("one", lambda p, q: (jnp.sin(p), jnp.cos(q)), args=("a b", "a b"))
OTHER = Pattern("other", lambda p, q: (jnp.tan(p), jnp.exp(q)), args=("a b", "a b"))


def in_a_kept_call(w, z):
    """Of the call, the first result is needed for the last operation, and does not depend on the first."""
    a, b = jax.jit(lambda x, y: (jnp.tanh(x), y * 3))(z, jnp.sin(w))
    return jnp.cos(a), b


def with_effects(w, z):
    """The callbacks keep their order."""
    shape = jax.ShapeDtypeStruct(z.shape, z.dtype)
    io_callback(lambda x: None, None, jnp.sin(w), ordered=True)
    return jnp.cos(io_callback(lambda x: x, shape, z, ordered=True))


# The program, the patterns whose matches are used, and the number that are passed over.
CROSSED = {
    "two patterns": (lambda w, z: (jnp.tan(jnp.sin(w)), jnp.cos(jnp.exp(z))), ["one"], 1),
    "apart": (lambda w, z: (jnp.tan(w), jnp.cos(z), jnp.sin(w), jnp.exp(z)), ["one", "other"], 0),
    "one after the other": (lambda w, z: (jnp.tan(jnp.sin(w)), jnp.exp(jnp.cos(z))), ["one", "other"], 0),
    "in a kept call": (in_a_kept_call, [], 1),
    "with effects": (with_effects, [], 1),
}


@pytest.mark.parametrize("case", CROSSED)
def test_matches_of_several_results_do_not_wait_for_each_other(case):
    f, names, passed_over = CROSSED[case]
    report = fuseplan.match([ONE, OTHER], f)(X, Y)
    assert sorted(m.pattern.name for m in report.matches) == names
    assert len(report.refusals) == passed_over
    assert all("depend on a result" in str(refusal) for refusal in report.refusals)
    got = patterns.rewrite(f, [ONE, OTHER])(X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, f(X, Y))


def test_results_are_paired_so_that_matches_do_not_overlap():
    f = lambda a, b: (jnp.sin(a), jnp.cos(b), jnp.sin(b), jnp.cos(a))  # noqa: E731
    assert count(ONE, f, X, Y) == 2
    got = patterns.rewrite(f, [ONE])(X, Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, f(X, Y))
