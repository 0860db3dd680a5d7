"""The table of primitives: every rule has hand-computed flops and an iteration space that
agrees with the shapes, whatever the function it is found in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from costmodel.graph import DimRole, Flops, OpKind
from fuseplan.extend import Rule, register_rule, rules
from fuseplan.frontend.lower import lower
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.ops.movement import common_factors
from fuseplan.frontend.trace import trace
from fuseplan.runtime.executor import make_runner
from fuseplan.settings import make_options
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.targets.calibrate import described_cpu
from fuseplan.workloads import WORKLOADS, get_workload
from tests.helpers.plans import plan_traced

X = jax.ShapeDtypeStruct((4, 6), "float32")
Y = jax.ShapeDtypeStruct((6, 5), "float32")
ROW = jax.ShapeDtypeStruct((1, 6), "float32")
I = jax.ShapeDtypeStruct((4, 6), "int32")  # noqa: E741
IMAGE = jax.ShapeDtypeStruct((2, 3, 8, 8), "float32")
KERNEL = jax.ShapeDtypeStruct((5, 3, 3, 3), "float32")
BATCH = jax.ShapeDtypeStruct((7, 4, 6), "float32")


def nodes(f, *args):
    return lower(trace(f, *args)).graph.nodes


def on_one_shard(f):
    mesh = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())


# By hand: an element is one operation of its unit; a sum of n has n - 1; 2 m n k for a matmul.
FLOPS = {
    "add": (lambda x: x + x, (X,), Flops(vector=24)),
    "broadcasting add": (lambda x, r: x + r, (X, ROW), Flops(vector=24)),
    "exp": (jnp.exp, (X,), Flops(transcendental=24)),
    "logistic": (lax.logistic, (X,), Flops(vector=48, transcendental=24)),
    "pow 3": (lambda x: lax.integer_pow(x, 3), (X,), Flops(vector=48)),
    "pow 4": (lambda x: lax.integer_pow(x, 4), (X,), Flops(vector=48)),
    "pow -2": (lambda x: lax.integer_pow(x, -2), (X,), Flops(vector=48)),
    "row sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), (X,), Flops(vector=20)),
    "whole max": (lambda x: x.max(), (X,), Flops(vector=23)),
    "transpose": (lambda x: x.T, (X,), Flops()),
    "reshape": (lambda x: x.reshape(3, 8), (X,), Flops()),
    "convert": (lambda x: x.astype("bfloat16"), (X,), Flops()),
    "matmul": (lambda x, y: x @ y, (X, Y), Flops(matrix=2 * 4 * 6 * 5)),
    "batched matmul": (
        lambda b, y: jnp.einsum("bij,jk->bik", b, y),
        (BATCH, Y),
        Flops(matrix=2 * 7 * 4 * 6 * 5),
    ),
    "experts": (
        lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3])),
        (X, jax.ShapeDtypeStruct((2, 6, 5), "float32")),
        Flops(matrix=2 * 4 * 6 * 5),
    ),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"),
        (IMAGE, KERNEL),
        Flops(matrix=2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)),
    ),
    "loop": (
        lambda x: lax.scan(lambda c, _: (jnp.exp(c), None), x, None, length=10)[0],
        (X,),
        Flops(transcendental=240),
    ),
    "cond": (
        lambda x: lax.cond(x[0, 0] > 0, jnp.exp, lambda y: y, x),
        (X,),
        Flops(transcendental=24),
    ),
    # One trip: the body, a sum of 24 and a comparison.
    "while": (
        lambda x: lax.while_loop(lambda c: c.sum() < 9, jnp.exp, x),
        (X,),
        Flops(vector=23 + 1, transcendental=24),
    ),
    "call of a shard": (lambda x: on_one_shard(jnp.exp)(x), (X,), Flops(transcendental=24)),
    # Three steps for a row of six: log2, rounded up. An argmax compares each element once.
    "cumulative sum": (lambda x: lax.cumsum(x, 1), (X,), Flops(vector=24 * 3)),
    "sort": (lambda x: lax.sort(x), (X,), Flops(vector=24 * 3)),
    "argmax": (lambda x: lax.argmax(x, 1, "int32"), (X,), Flops(vector=24)),
    # Three operations for each of six elements of a row but the first.
    "reduction by a function": (
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b - a * b, (1,)),
        (X,),
        Flops(vector=4 * 5 * 3),
    ),
    "top_k": (lambda x: lax.top_k(x, 2), (X,), Flops(vector=24)),
    "scatter": (lambda x: x.at[jnp.array([0, 2])].set(x[:2]), (X,), Flops(vector=2 * 6)),
    "fft": (lambda x: jnp.fft.fft(x), (jax.ShapeDtypeStruct((4, 8), "float32"),), Flops(vector=5 * 32 * 3)),
    "random bits": (
        lambda x: jax.random.bits(jax.random.key(0), (5,)) + x.astype("uint32")[0, :5],
        (X,),
        Flops(vector=56 * 5),
    ),
}

# Collectives, which stand only inside of a shard's part, and a fused function inside of another.
NOT_COUNTED = {
    "psum", "psum_invariant", "pmax", "pmin", "reduce_scatter", "fused", "pattern",
}  # fmt: skip


def test_every_formula_of_flops_is_counted_by_hand():
    """A formula is the code of ``Rule.flops``: elementwise rules, which differ in numbers, share one."""
    traced = [lower(trace(f, *args)) for f, args, _ in FLOPS.values()]
    counted = {rule_of(eqn).flops.__code__ for lowered in traced for eqn in lowered.equations}
    missing = {name for name, rule in rules().items() if rule.flops.__code__ not in counted}
    assert missing == NOT_COUNTED, "add a case to FLOPS for each new formula"


@pytest.mark.parametrize("name", FLOPS)
def test_flops_by_hand(name):
    f, args, want = FLOPS[name]
    found = nodes(f, *args)
    dearest = max(found, key=lambda n: n.flops.total)
    assert dearest.flops == want


KINDS = {
    OpKind.ELEMENTWISE: (lambda x: jnp.tanh(x), (X,)),
    OpKind.BROADCAST: (lambda x: jnp.broadcast_to(x, (3, 4, 6)), (X,)),
    OpKind.INJECTIVE: (lambda x: x.T, (X,)),
    OpKind.REDUCTION: (lambda x: x.sum(0), (X,)),
    OpKind.OUT_ELEMENTWISE_FUSABLE: (lambda x, y: x @ y, (X, Y)),
    OpKind.OPAQUE: (lambda x: jnp.sort(x), (X,)),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_kinds(kind):
    f, args = KINDS[kind]
    assert kind in {n.kind for n in nodes(f, *args)}


def test_reduced_dimension_is_consumed():
    (node,) = nodes(lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), X)
    assert node.dims == (4, 6)
    assert node.roles == (DimRole.REDUCED, DimRole.PARALLEL)
    assert node.input_maps == (((0,), (1,)),)
    assert node.output_maps == (((1,),),)


def test_transposed_contraction():
    (node,) = nodes(lambda x, y: jnp.einsum("ki,kj->ij", x, y), X, jax.ShapeDtypeStruct((4, 5), "float32"))
    assert node.roles.count(DimRole.REDUCED) == 1
    reduced = node.roles.index(DimRole.REDUCED)
    assert all(dim_map[0] == (reduced,) for dim_map in node.input_maps)


def test_sliced_dimension_is_whole_and_the_others_move_together():
    (node,) = nodes(lambda x: x[:, 1:4], X)
    assert node.output_maps[0][0] == node.input_maps[0][0]
    assert node.output_maps[0][1] != node.input_maps[0][1]
    (cut,) = node.output_maps[0][1]
    assert node.roles[cut] == DimRole.WHOLE


def test_constants_are_made_anew_by_each_consumer():
    graph = lower(trace(lambda x: (x + jnp.zeros_like(x) * jnp.ones((4, 6)), jnp.ones((4, 6)) - x), X)).graph
    filled = [n for n in graph.nodes if not n.inputs]
    assert all(len(graph.consumers[v]) <= 1 for n in filled for v in n.outputs)


@pytest.mark.parametrize(
    ("old", "new"),
    [((6, 4), (24,)), ((2, 3, 4), (6, 4)), ((1, 6), (6, 1)), ((4, 6), (2, 2, 3, 2)), ((), (1, 1))],
)
def test_common_factors_cover_both_shapes(old, new):
    found = common_factors(old, new)
    assert found is not None
    dims, old_map, new_map = found
    for shape, dim_map in ((old, old_map), (new, new_map)):
        assert [int(np.prod([dims[a] for a in m])) for m in dim_map] == list(shape)
        assert [a for m in dim_map for a in m] == list(range(len(dims)))


def test_a_reshape_without_common_factors_is_whole():
    (node,) = nodes(lambda x: x.reshape(3, 8), X)
    assert set(node.roles) == {DimRole.WHOLE}


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_lowers_without_opaque_surprises(name):
    f, args = get_workload(name).build(small=True)
    lowered = lower(trace(f, *args))  # check_graph runs inside.
    assert lowered.without_rule == ()


def test_every_rule_is_complete():
    for name, rule in rules().items():
        assert callable(rule.space), name
        assert callable(rule.flops), name
        assert rule.block is None or rule.kind != OpKind.OPAQUE, name
        # Of a scan nothing is combined across tiles: its axis is whole.
        if rule.kind == OpKind.REDUCTION and rule.block is not None and not name.startswith("cum"):
            assert rule.reduction is not None, name


def test_register_rule_wants_a_rule():
    with pytest.raises(InvalidArgumentError, match="Rule"):
        register_rule("mine", lambda eqn: None)
    before = rules()["tanh"]
    register_rule("tanh", Rule(OpKind.OPAQUE, before.space, before.flops))
    try:
        assert nodes(jnp.tanh, X)[0].kind == OpKind.OPAQUE
    finally:
        register_rule("tanh", before)


@pytest.mark.parametrize(
    "device", [described_cpu(), "h200", "h200:mosaic_gpu", "tpu_v5e"], ids=lambda d: getattr(d, "name", d)
)
def test_a_product_with_a_scalar_scales(device):
    """``jnp.vdot``'s gradient multiplies by a literal with ``dot_general``, which then contracts nothing."""

    def gradient(weights, x):
        return jax.grad(lambda y: jnp.vdot(weights, jnp.tanh(y) * weights))(x)

    weights, x = jnp.linspace(1, 2, 300), jnp.linspace(-2, 2, 300)
    lowered, plan = plan_traced(trace(gradient, weights, x), make_options(device))
    run = make_runner(lowered, plan, platform="cpu", interpret=isinstance(device, str))
    np.testing.assert_allclose(run(*lowered.consts, weights, x)[0], gradient(weights, x), rtol=1e-5)
    products = [node.kind for node in lowered.graph.nodes if node.op == "dot_general"]
    assert products == [OpKind.ELEMENTWISE]
