"""Skipping: dead tiles add exactly nothing, and data that would break that is recognised."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.axes import Conflict, unify
from costmodel.graph import DimRole, boundary
from costmodel.kernel import AxisRole
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import Literal, trace
from fuseplan.masks import dead_tiles
from fuseplan.masks.dead_tiles import find_skips
from fuseplan.masks.index_ranges import IndexArithmetic
from fuseplan.schedule.layout import group_layout
from fuseplan.schedule.scheduler import Scheduler, SpecMaker
from tests.helpers.quickly import QUICKLY

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

N, D, TILE = 160, 8, 16
COMPILED = {}


def loop_spec(lowered, stream, *, n=N, tile=TILE, nodes=None):
    """The group with every axis of extent ``n`` cut; ``stream`` (a dimension of an input, as
    (input, dim)) is the inner loop."""
    graph = lowered.graph
    nodes = tuple(range(len(graph.nodes))) if nodes is None else nodes
    axes = unify(graph, nodes)
    assert not isinstance(axes, Conflict)
    layout = group_layout(graph, nodes, axes, boundary(graph, nodes))
    cut = [size == n for size in axes.sizes]
    roles = tuple(AxisRole.STREAMED if c else AxisRole.RESIDENT for c in cut)
    tiles = tuple(tile if c else size for c, size in zip(cut, axes.sizes, strict=True))
    value, dim = graph.inputs[stream[0]], stream[1]
    (inner,) = next(r.axes[dim] for r in layout.reads if r.value == value)
    spec = SpecMaker(nodes, axes, layout, roles, "loops", inner)(tiles)
    return spec, sum(c for c in cut) - 1


def carried(spec, inner, lowered):
    """The nodes of one pass: all that carry the stream, but what waits for the nest to end."""
    graph, late, kept = lowered.graph, set(), []
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node = graph.nodes[n]
        roles = zip(own, node.roles, strict=True)
        gone = {a for axes, role in roles if role == DimRole.REDUCED for a in axes}
        if late.intersection(node.inputs):
            late.update(node.outputs)
            continue
        if any(a != inner and spec.axes[a].n_tiles > 1 for a in gone):
            late.update(node.outputs)
        if any(inner in axes for axes in own):
            kept.append(n)
    return kept


def plan(f, args, stream=(1, 0), **options):
    lowered = lower(trace(f, *args))
    spec, inner = loop_spec(lowered, stream, **options)
    return lowered, spec, inner, find_skips(lowered, spec, inner, carried(spec, inner, lowered))


def evaluate(lowered, args):
    """Every value of the graph."""
    values = dict(zip(lowered.graph.inputs, (*lowered.consts, *args), strict=True))
    for eqn in lowered.equations:
        operands = [
            jnp.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else values[v] for v in eqn.inputs
        ]
        out = eqn.primitive.bind(*operands, **eqn.params)
        values.update(zip(eqn.outputs, out if eqn.primitive.multiple_results else [out], strict=True))
    return values


def is_safe(lowered, skips, args):
    if id(skips) not in COMPILED:
        inputs = lowered.graph.inputs
        safe = lambda *xs: skips.safe(dict(zip(inputs, xs, strict=True)))  # noqa: E731
        check = jax.jit(safe, compiler_options=QUICKLY)
        COMPILED[id(skips)] = skips, check
    return bool(COMPILED[id(skips)][1](*lowered.consts, *args))


def dead_elements(spec, skips, dims, shape):
    """Of an array whose dimensions are kernel axes: what lies on dead tiles (an element
    belongs to the first tile that covers it)."""
    index = []
    for a in skips.axes:
        if (a,) not in dims:
            return np.zeros(shape, bool)
        d = dims.index((a,))
        along = np.arange(shape[d]) // spec.axes[a].tile
        index.append(along.reshape([-1 if k == d else 1 for k in range(len(shape))]))
    return np.broadcast_to(~skips.live[tuple(index)], shape)


def assert_neutral(lowered, spec, inner, skips, args):
    """What each sink gets from dead tiles is its neutral element, exactly."""
    values, checked = evaluate(lowered, args), 0
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        node, eqn = lowered.graph.nodes[n], lowered.equations[n]
        gone = {
            a for axes, role in zip(own, node.roles, strict=True) if role == DimRole.REDUCED for a in axes
        }
        if n not in carried(spec, inner, lowered) or not any(spec.axes[a].n_tiles > 1 for a in gone):
            continue
        parts = []
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            x = np.asarray(values[v])
            dims = [tuple(a for d in merged for a in own[d]) for merged in dim_map]
            parts.append((x, dead_elements(spec, skips, dims, x.shape)))
        checked += 1
        if node.op == "dot_general":
            assert any(dead.any() and not x[dead].any() for x, dead in parts), eqn
            assert all(np.isfinite(x).all() for x, _ in parts)
        elif node.op == "reduce_sum":
            assert parts[0][1].any()
            assert not parts[0][0][parts[0][1]].any(), eqn
        else:
            assert node.op == "reduce_max"
            x, dead = parts[0]
            alive = np.where(dead, -np.inf, x).max(axis=tuple(eqn.params["axes"]))
            np.testing.assert_array_equal(alive, np.asarray(values[node.outputs[0]]))
    assert checked


def normal(*shapes, scale=1.0):
    return [scale * jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]


def lower_triangle(n=N):
    i, j = jnp.arange(n)[:, None], jnp.arange(n)[None]
    return j <= i


def attention(scores, v):
    return jax.nn.softmax(scores, axis=-1) @ v


def causal(q, k, v):
    n = len(q)
    return attention(jnp.where(jnp.tril(jnp.ones((n, n), bool)), q @ k.T / D**0.5, -jnp.inf), v)


def causal_finite(q, k, v):
    return attention(jnp.where(lower_triangle(len(q)), q @ k.T, -1e9), v)


def added_mask(q, k, v):
    return attention(q @ k.T + jnp.where(lower_triangle(), 0.0, -1e9), v)


def scaled_mask(q, k, v):
    return attention(q @ k.T + (1.0 - lower_triangle().astype(jnp.float32)) * -1e9, v)


def window(q, k, v):
    i, j = jnp.arange(len(q))[:, None], jnp.arange(len(q))[None]
    return attention(jnp.where((j <= i) & (i - j < 8), q @ k.T, jnp.finfo(jnp.float32).min), v)


def window_of_two(q, k, v):
    i, j = jnp.arange(N)[:, None], jnp.arange(N)[None]
    return attention(jnp.where(j <= i, jnp.where(i - j < 8, q @ k.T, -jnp.inf), -jnp.inf), v)


def alibi(q, k, v, slope):
    i, j = jnp.arange(N)[:, None], jnp.arange(N)[None]
    return attention(jnp.where(j <= i, q @ k.T + slope * (j - i), -jnp.inf), v)


def soft_capped(q, k, v):
    s = jnp.where(lower_triangle(), jnp.tanh(q @ k.T / 50.0) * 50.0, jnp.finfo(jnp.float32).min)
    return jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True)) @ v


def padded(q, k, v, kept):
    s = jnp.where(kept > 0, q @ k.T, -1e9)
    return attention(jnp.where(lower_triangle(), s, -jnp.inf), v)


def blocks(q, k, v):
    i, j = jnp.arange(N)[:, None], jnp.arange(N)[None]
    return attention(jnp.where(i // 32 == j // 32, q @ k.T, -jnp.inf), v)


QKV = ((N, D),) * 3
TRIANGLE = np.tri(10, dtype=bool)
BAND = TRIANGLE & ~np.tri(10, k=-2, dtype=bool)
CASES = {
    "causal": (causal, QKV, TRIANGLE),
    "causal_finite": (causal_finite, QKV, TRIANGLE),
    "added_mask": (added_mask, QKV, TRIANGLE),
    "scaled_mask": (scaled_mask, QKV, TRIANGLE),
    "window": (window, QKV, BAND),
    "window_of_two": (window_of_two, QKV, BAND),
    "alibi": (alibi, (*QKV, ()), TRIANGLE),
    "soft_capped": (soft_capped, QKV, TRIANGLE),
    "padded": (padded, (*QKV, (N,)), TRIANGLE),
    "blocks": (blocks, QKV, np.kron(np.eye(5, dtype=bool), np.ones((2, 2), bool))),
}


@pytest.mark.parametrize("name", CASES)
def test_dead_tiles_add_nothing(name):
    f, shapes, live = CASES[name]
    args = normal(*shapes)
    lowered, spec, inner, skips = plan(f, args)
    assert skips is not None
    assert skips.axes[-1] == inner
    np.testing.assert_array_equal(skips.live, live)
    assert is_safe(lowered, skips, args)
    assert_neutral(lowered, spec, inner, skips, args)


@pytest.mark.parametrize("f", [causal, causal_finite, soft_capped])
def test_backward_pass(f):
    def backward(q, k, v, g):
        return jax.vjp(f, q, k, v)[1](g)

    args = normal(*QKV, (N, D))
    lowered, spec, inner, skips = plan(backward, args)
    assert skips is not None
    np.testing.assert_array_equal(skips.live, TRIANGLE)
    assert is_safe(lowered, skips, args)
    assert_neutral(lowered, spec, inner, skips, args)
    for i in range(4):
        broken = [np.array(x) for x in args]
        broken[i][3, 3] = np.inf
        assert not is_safe(lowered, skips, broken)


@pytest.mark.slow
def test_heads_of_dot_product_attention():
    def f(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    args = normal(*((2, N, 4, D),) * 3)
    lowered, spec, inner, skips = plan(f, args, stream=(1, 1))
    assert skips is not None
    np.testing.assert_array_equal(skips.live, TRIANGLE)
    assert is_safe(lowered, skips, args)
    assert_neutral(lowered, spec, inner, skips, args)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_floats(dtype):
    args = [x.astype(dtype) for x in normal(*QKV)]
    lowered, _, _, skips = plan(causal, args)
    assert skips is not None
    assert is_safe(lowered, skips, args)
    assert not is_safe(lowered, skips, [args[0], args[1], args[2].at[0, 0].set(jnp.nan)])


def test_a_ragged_axis():
    args = normal(*((150, D),) * 3)
    lowered, spec, inner, skips = plan(causal, args, n=150)
    # The last tile starts at 134 and reaches back into the one before.
    assert skips is not None
    np.testing.assert_array_equal(skips.live, TRIANGLE | (np.indices((10, 10)).min(0) >= 8))
    assert is_safe(lowered, skips, args)
    assert_neutral(lowered, spec, inner, skips, args)


def test_infinities_are_not_safe():
    args = normal(*QKV)
    lowered, _, _, skips = plan(causal, args)
    assert skips is not None
    for value, k in itertools.product((np.nan, np.inf, -np.inf), range(3)):
        broken = [np.array(x) for x in args]
        broken[k][N - 1, 2] = value
        assert not is_safe(lowered, skips, broken)


def test_huge_scores_are_not_safe():
    lowered, _, _, skips = plan(causal_finite, normal(*QKV))
    assert skips is not None
    assert is_safe(lowered, skips, normal(*QKV, scale=1e3))
    # Scores below the mask's -1e9: masked elements may have weight.
    assert not is_safe(lowered, skips, normal(*QKV, scale=1e5))
    lowered, _, _, skips = plan(causal, normal(*QKV))
    assert skips is not None
    assert is_safe(lowered, skips, normal(*QKV, scale=1e5))
    assert not is_safe(lowered, skips, normal(*QKV, scale=1e19))


@pytest.mark.parametrize("f", [causal, causal_finite])
def test_the_condition_is_one_maximum_an_array_and_implies_that_of_the_data_s_bounds(f, monkeypatch):
    lowered, _, _, skips = plan(f, normal(*QKV))
    inputs = lowered.graph.inputs
    safe = jax.make_jaxpr(lambda *xs: skips.safe(dict(zip(inputs, xs, strict=True))))(*normal(*QKV))
    assert len(safe.eqns) <= 6 * len(QKV)
    monkeypatch.setattr(dead_tiles, "_limits", lambda group, holds: None)
    answers = set()
    for exponent in range(-6, 36, 3):
        args = normal(*QKV, scale=10.0**exponent)
        lowered, _, _, of_data = plan(f, args)
        answers.add((is_safe(lowered, skips, args), is_safe(lowered, of_data, args)))
    assert answers >= {(True, True), (False, False)}
    assert (True, False) not in answers


def test_a_row_without_elements_is_not_skipped():
    def strict(value):
        def f(q, k, v):
            i, j = jnp.arange(N)[:, None], jnp.arange(N)[None]
            return attention(jnp.where(j < i, q @ k.T, value), v)

        return f

    for value in (-jnp.inf, -1e9):
        assert plan(strict(value), normal(*QKV))[-1] is None


def test_a_data_dependent_row_is_not_skipped():
    def f(q, k, v, kept):
        return attention(jnp.where(lower_triangle() & (kept > 0), q @ k.T, -jnp.inf), v)

    assert plan(f, normal(*QKV, (N,)))[-1] is None


def test_without_a_mask_nothing_is_skipped():
    assert plan(lambda q, k, v: attention(q @ k.T, v), normal(*QKV))[-1] is None


def test_chains_longer_than_the_stack():
    """What is computed before a mask is asked for does not recurse; inside the group, a chain
    that would is not skipped."""

    def f(steps, inside):
        def scores(q, k, v):
            for _ in range(steps):
                q = q + 0.5 * q
            s = jnp.where(lower_triangle(), q @ k.T, -jnp.inf)
            for _ in range(inside):
                s = s * 1.25
            return attention(s, v)

        return scores

    assert plan(f(0, 3), normal(*QKV))[-1] is not None
    assert plan(f(0, 400), normal(*QKV))[-1] is None
    lowered = lower(trace(f(1500, 0), *normal(*QKV)))
    index = IndexArithmetic(lowered)
    (masks,) = ([v for v in n.inputs if v in index] for n in lowered.graph.nodes if n.op == "select_n")
    assert masks
    assert lowered.graph.outputs[0] not in index


@pytest.mark.parametrize(("steps", "known"), [(3, True), (1500, False)])
def test_masks_of_long_chains_are_not_looked_through(steps, known):
    def f(q, k, v):
        rows = jnp.arange(N)
        for _ in range(steps):
            rows = rows + 1
        mask = (rows - steps)[:, None] >= jnp.arange(N)
        return attention(jnp.where(mask, q @ k.T, -jnp.inf), v)

    assert (plan(f, normal(*QKV))[-1] is not None) == known


def test_tiles_that_are_written_are_not_skipped():
    def f(q, k):
        p = jax.nn.softmax(jnp.where(lower_triangle(), q @ k.T, -jnp.inf), axis=-1)
        return p, p.sum(-1)

    assert plan(f, normal((N, D), (N, D)))[-1] is None


def test_a_maximum_does_not_rest_on_what_is_skipped():
    """Two masks of one constant, which the second attains in every row: it has to stay."""

    def f(q, k):
        i, j = jnp.arange(N)[:, None], jnp.arange(N)[None]
        s = jnp.where((j >= 32) | (i >= 80), q @ k.T, -1e9)
        return jnp.where(j < 32, s, -1e9).max(-1)

    skips = plan(f, normal((N, D), (N, D)))[-1]
    assert skips is not None
    rows, columns = np.indices(skips.live.shape)
    np.testing.assert_array_equal(skips.live, (rows >= 5) | (columns >= 2))


def test_an_infinite_mask_is_neutral_for_a_maximum():
    """Even where a row has no other element."""

    def f(q, k):
        return jnp.where(~lower_triangle(), q @ k.T, -jnp.inf).max(-1)

    skips = plan(f, normal((N, D), (N, D)))[-1]
    assert skips is not None
    np.testing.assert_array_equal(skips.live, TRIANGLE.T)


def test_row_statistics_from_outside():
    def f(q, k, v, top, total):
        s = jnp.where(lower_triangle(), q @ k.T, -1e9)
        return jnp.exp(s - top[:, None]) / total[:, None] @ v

    args = [*normal(*QKV), jnp.full(N, 5.0), jnp.full(N, 2.0)]
    lowered, spec, inner, skips = plan(f, args)
    assert skips is not None
    assert is_safe(lowered, skips, args)
    assert_neutral(lowered, spec, inner, skips, args)
    assert not is_safe(lowered, skips, [*args[:3], args[3].at[1].set(-1e9), args[4]])
    assert not is_safe(lowered, skips, [*args[:4], args[4].at[1].set(0.0)])


@pytest.mark.parametrize("f", [causal, window])
def test_a_mask_made_outside_the_group(f):
    """The group reads the mask as an array; its index arithmetic is upstream."""
    args = normal(*QKV)
    lowered = lower(trace(f, *args))
    graph = lowered.graph
    masking = next(
        n for n in graph.nodes if n.op == "select_n" and graph.values[n.outputs[0]].dtype == "float32"
    )
    upstream, queue = set(), [graph.values[masking.inputs[0]].producer]
    while queue:
        n = queue.pop()
        upstream.add(n)
        queue += [graph.values[v].producer for v in graph.nodes[n].inputs]
    nodes = tuple(n for n in range(len(graph.nodes)) if n not in upstream)
    spec, inner = loop_spec(lowered, (2, 0), nodes=nodes)
    assert masking.inputs[0] in {r.value for r in spec.reads}
    skips = find_skips(lowered, spec, inner, carried(spec, inner, lowered))
    assert skips is not None
    np.testing.assert_array_equal(skips.live, TRIANGLE if f is causal else BAND)
    values = evaluate(lowered, args)
    assert bool(skips.safe(values))
    values[graph.inputs[2]] = values[graph.inputs[2]] * jnp.nan
    assert not bool(skips.safe(values))


def test_long_sequences_are_cheap():
    """65,536 tiles: no element of the mask is looked at that a larger cell decides."""
    n = 32768
    args = [jax.ShapeDtypeStruct((n, D), jnp.float32)] * 3
    skips = plan(causal, args, n=n, tile=128)[-1]
    assert skips is not None
    assert skips.live.sum() == 256 * 257 // 2
    skips = plan(window, args, n=n, tile=128)[-1]
    assert skips is not None
    assert skips.live.sum() == 511


N_LONG = 4_096


def two_layers(masks):
    """Attention behind each of ``masks``, which the function returns, too, so that no kernel makes them."""

    def f(q, k, v):
        rows, columns = jnp.arange(N_LONG)[:, None], jnp.arange(N_LONG)[None, :]
        given = [mask(rows, columns) for mask in masks]
        for mask in given:
            scores = jnp.where(mask, q @ jnp.swapaxes(k, 1, 2), -1e30)
            q = jnp.tanh(jax.nn.softmax(scores, axis=-1) @ v)
        return q, *given

    return f


def before(rows, columns):
    return columns <= rows


def in_window(rows, columns):
    return (columns <= rows) & (columns > rows - 256)


@pytest.mark.parametrize("masks", [(before, in_window), (in_window, before)])
def test_groups_of_one_structure_skip_the_tiles_of_their_own_masks(masks):
    x = jax.ShapeDtypeStruct((4, N_LONG, 64), "float32")
    plan = fuseplan.make_plan(two_layers(masks), device="h200")(x, x, x)
    scheduler = Scheduler(plan.graph, plan.device, plan.program, plan.features)
    skipping = [kernel for kernel in plan.kernels if kernel.spec.tiles_visited]
    assert len({kernel.spec.tiles_visited for kernel in skipping}) == len(skipping) == 2
    for kernel in skipping:
        assert scheduler.price(kernel.spec.nodes).cost == kernel.cost
