"""Groups that are left to XLA as one loop: which they are, and that they are used where they are faster."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from costmodel.graph import Boundary, boundary
from costmodel.xla_loops import epilogues_of_product, is_one_loop
from fuseplan import Features
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.legality import refuse_loop
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.digraph import between
from fuseplan.workloads import get_workload


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def refusal(f, *args, device="h200"):
    graph = lower(trace(f, *args)).graph
    return refuse_loop(graph, tuple(range(len(graph.nodes))), get_device(device).backend)


def rolled(x):
    """A step of diffusion on a periodic grid."""
    near = [jnp.roll(x, shift, axis) for shift in (1, -1) for axis in (0, 1)]
    return x + 0.1 * (sum(near) - 4 * x)


X = array(512, 512)
ROWS = np.arange(512) % 100
KEY = jax.eval_shape(lambda: jax.random.key(0))

REFUSED = {
    "ends a loop": (lambda x: x - x.sum(0), "h200"),
    "loops over other elements": (lambda x: ((y := jnp.tanh(x))[1:], y), "h200"),
    "reduce other dimensions": (lambda x: ((y := jnp.tanh(x)).sum(0), y.sum(1)), "h200"),
    "runs transpose on its own": (lambda x: jnp.tanh(x).T + 1, "h200"),
    "runs sort on its own": (lambda x: jnp.sort(x) + 1, "h200"),
    "before concatenate moves it": (rolled, "tpu_v5e"),
    "before slice moves it": (lambda x: jnp.tanh(x)[1:] * 2, "tpu_v5e"),
    "mul before concatenate moves it": (lambda x: jnp.concatenate([x * 2, x + 1]) * 2, "tpu_v5e"),
    "runs pad on its own": (lambda x: jnp.pad(x, 1) * 2, "tpu_v5e"),
    "runs reshape on its own": (lambda x: jnp.tanh(x).reshape(-1, 64) * 2, "tpu_v5e"),
    "does not evaluate tanh more than once": (lambda x: (y := jnp.tanh(x))[1:] - y[:-1], "h200"),
    "runs dot_general on its own": (lambda x: jnp.exp(x) @ x, "h200"),
    "runs conv_general_dilated on its own": (
        lambda x: jnp.tanh(jax.lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME")),
        "tpu_v5e",
    ),
    "xla kernels cannot contain scatter-add": (
        lambda x: jax.grad(lambda x: jnp.take_along_axis(x, ROWS[:, None], 1).sum())(x)[1:] * 2,
        "h200",
    ),
    "does not evaluate reduce_sum more than once": (
        lambda x: jnp.tanh(x.reshape(-1, 8).sum(1))[:, None] + x.reshape(-1, 8),
        "h200",
    ),
    "ends a loop at reduce_sum": (lambda x: jnp.tanh(x.reshape(-1, 16).sum(1)), "h200"),
    "XLA ends a loop at": (lambda x: jnp.tanh(x.reshape(-1, 8).sum(1)), "tpu_v5e"),
    "writes nothing else": (lambda x: ((y := x * 2), x.at[ROWS].add(y)), "h200"),
    "writes the table of mul before": (lambda x: (x * 2).at[ROWS].add(x), "h200"),
    "cannot contain scatter-add": (lambda x: x.at[ROWS].add(x * 2), "tpu_v5e"),
    "more than 96 arrays": (lambda x: [x * k for k in range(2, 99)], "h200"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_loop_says_why(reason):
    f, device = REFUSED[reason]
    refused = refusal(f, X, device=device)
    assert refused is not None
    if reason != "runs sort on its own":  # sort is a step of its own everywhere
        assert reason in refused.reason


@pytest.mark.parametrize(
    ("f", "device"),
    [
        (rolled, "h200"),
        (lambda x: ((y := x * x).sum(0), y), "h200"),
        (lambda x: ((y := x * x).sum(0), y.max(0)), "tpu_v5e"),
        (lambda x: x[1:] - x[:-1], "tpu_v5e"),
        (lambda x: jnp.pad(x, 1) * 2, "h200"),
        (lambda x: jnp.tanh(x @ x), "h200"),
        (lambda x: x.at[ROWS].add(x * 2), "h200"),
        (lambda x: jnp.tanh(x.reshape(-1, 8).sum(1)), "h200"),
        (lambda x: x[ROWS].reshape(-1, 8).max(1) * 2, "h200"),
        (lambda x: jnp.tanh(x * 2 @ x.T + 1).max(1), "tpu_v5e"),
        (lambda x: jnp.concatenate([x * 2, x + 1]), "tpu_v5e"),
    ],
)
def test_what_is_a_loop(f, device):
    assert refusal(f, X, device=device) is None


def test_loops_that_read_one_array_are_one_loop():
    def shifted(x, y):
        return jnp.roll(x, 1, 0) * 2 + y, jnp.roll(x, 1, 1) - y

    plan = fuseplan.make_plan(shifted, device="h200")(X, X)
    assert [len(kernel.spec.writes) for kernel in plan.kernels] == [2]
    apart = fuseplan.make_plan(lambda x, y: (shifted(x, x)[0], shifted(y, y)[1]), device="h200")(X, X)
    assert len(apart.kernels) == 2


def test_random_bits_are_made_in_the_loop_of_their_reader():
    for device, count in (("h200", 1), ("tpu_v5e", 1), ("cpu", 2)):
        plan = fuseplan.make_plan(lambda key, x: x * jax.random.bits(key, X.shape), device=device)(KEY, X)
        assert len(plan.kernels) == count, device
        assert any("random_bits" in v.reason for v in plan.refusals) == (device == "cpu")


def test_random_bits_of_other_generators_are_kernels_of_their_own():
    key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    plan = fuseplan.make_plan(lambda key, x: x * jax.random.bits(key, X.shape), device="h200")(key, X)
    assert [len(kernel.spec.nodes) for kernel in plan.kernels] == [1, 2]


def test_many_keys_make_the_leading_dimensions_of_random_bits():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 512))
    graph = lower(trace(jax.vmap(lambda key: jax.random.bits(key, (64,)) >> 3), keys)).graph
    node = next(node for node in graph.nodes if node.op == "random_bits")
    assert (node.dims, node.input_maps, node.output_maps) == ((512, 64), (((0,),),), (((0,), (1,)),))


def test_two_contractions_are_two_loops():
    refused = refusal(lambda x: jnp.tanh(x @ x) @ x, X, device="tpu_v5e")
    assert "runs dot_general on its own" in refused.reason


def test_the_nearest_of_many_points_writes_no_distances():
    def nearest(x, y):
        return ((x * x).sum(1)[:, None] + (y * y).sum(1) - 2 * x @ y.T).argmin(1)

    plan = fuseplan.make_plan(nearest, device="tpu_v5e")(array(20_000, 3), array(20_000, 3))
    assert plan.status == "OPTIMAL"
    assert max(plan.graph.values[a.value].size for k in plan.kernels for a in k.spec.writes) == 20_000
    products = [k for k in plan.kernels if k.cost.flops.matrix]
    assert products[0].cost.matrix_ps > 0


def shifted(x, y):
    a = rolled(x) * y
    b = jnp.concatenate([a[1:], y[:1]])
    return b, (a - b.mean(0)).sum(0), jnp.pad(jnp.tanh(b), 1)


def recurrence(a, b):
    """h[t] = a[t] * h[t - 1] + b[t], in steps over pairs, pairs of pairs and so on."""
    return jax.lax.associative_scan(lambda s, t: (s[0] * t[0], t[0] * s[1] + t[1]), (a, b))[1]


@pytest.mark.parametrize("f", [shifted, recurrence])
@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "rtx4090"])
def test_offered_loops_are_convex_and_no_slower_than_tiles(device, f):
    lowered = lower(trace(f, X, X))
    graph = lowered.graph
    scheduler = Scheduler(graph, get_device(device), lowered)
    loops = scheduler._loops
    assert loops.offers
    for nodes in loops.offers:
        edge = boundary(graph, nodes)
        after = lambda n: (r for v in graph.nodes[n].outputs for r in graph.consumers[v])  # noqa: E731
        before = lambda n: (  # noqa: E731
            m for v in graph.nodes[n].inputs if (m := graph.values[v].producer) >= 0
        )
        assert between(nodes, after, before) == set(nodes)
        kernel = scheduler.price(nodes)
        assert kernel.cost.time_ps <= loops.kernel(nodes, edge).cost.time_ps
        assert kernel.cost.time_ps >= scheduler.floor(nodes)
        assert kernel.cost.time_ps >= scheduler.floors(nodes)[0]
        assert kernel.cost.time_ps >= scheduler.least(nodes)


def test_a_stencil_is_one_loop_on_a_gpu():
    plan = fuseplan.make_plan(rolled, device="h200")(array(2048, 2048))
    assert len(plan.kernels) == 1
    assert plan.status == "OPTIMAL"
    spec = plan.kernels[0].spec
    assert spec.backend == "xla"
    assert is_one_loop(plan.graph, spec.nodes)
    device = get_device("h200")
    least_us = 2 * 2048 * 2048 * 4 / device.hbm_bytes_per_s * 1e6 + device.launch_ps / 1e6
    assert plan.objective_us == pytest.approx(least_us, rel=1e-6)
    assert plan.verify().status == "verified"


def test_a_step_of_a_scan_over_pairs_is_one_loop():
    """Both results of a step read the same slices of the step before. No kernel writes these, unless they are
    a few rows, which take no longer than a launch."""
    plan = fuseplan.make_plan(recurrence, device="tpu_v5e")(array(1024, 2048), array(1024, 2048))
    assert plan.status == "OPTIMAL"
    graph = plan.graph
    first = next(k for k in plan.kernels if 0 in k.spec.nodes)
    assert sorted(graph.nodes[n].op for n in first.spec.nodes) == ["add", "mul", "mul", *["slice"] * 4]
    written = [graph.values[access.value] for k in plan.kernels for access in k.spec.writes]
    assert not [v for v in written if graph.nodes[v.producer].op == "slice" and v.shape[0] > 8]
    assert plan.verify().status == "verified"


def test_values_that_two_loops_read_are_computed_in_each():
    """The differences from a mean are squared and summed in one loop, and scaled in another."""

    def batchnorm(x):
        centred = x - x.mean((0, 1, 2))
        return centred * jax.lax.rsqrt((centred * centred).mean((0, 1, 2)) + 1e-5)

    for device in ("h200", "tpu_v5e"):
        make = fuseplan.make_plan(batchnorm, device=device, deadline_s=100)
        plan = make(array(16, 56, 56, 64))
        assert plan.status == "OPTIMAL"
        large = [
            v
            for kernel in plan.kernels
            for v in {access.value for access in kernel.spec.writes}
            if plan.graph.values[v].size == 16 * 56 * 56 * 64
        ]
        assert len(large) == 1, "only the result is written"


def test_a_plan_with_loops_runs():
    def f(x):
        y = rolled(x)
        return y, (y * y).sum(0)

    x = np.random.default_rng(0).normal(size=(200, 70)).astype("float32")
    plan = fuseplan.make_plan(f, device="h200")(x)
    assert any(is_one_loop(plan.graph, k.spec.nodes) and k.spec.backend == "xla" for k in plan.kernels)
    wide = x.astype("float64")
    near = sum(np.roll(wide, shift, axis) for shift in (1, -1) for axis in (0, 1))
    expected = wide + 0.1 * (near - 4 * wide)
    got = plan.run(x, interpret=True)
    np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], (expected**2).sum(0), rtol=1e-5)


def test_a_long_program_is_looked_at_in_little_work():
    """Candidates of a web of shifts are cut off by counted work, not by the clock."""

    def web(x):
        found = [x, x * 2]
        for k in range(600):
            a, b = found[-1], found[-1 - k % 7 % len(found)]
            found.append(jnp.concatenate([a[1:], b[:1]]) + (a if k % 3 else b))
        return found[-1], found[-50], found[-100]

    lowered = lower(trace(web, array(64)))
    scheduler = Scheduler(lowered.graph, get_device("h200"), lowered)
    twice = [Scheduler(lowered.graph, get_device("h200"), lowered).offers for _ in range(2)]
    assert twice[0] == twice[1] == scheduler.offers


def test_switched_off_nothing_is_left_to_a_loop():
    plan = fuseplan.make_plan(rolled, device="h200", features=Features(xla_loops=False))(X)
    assert not any(k.spec.backend == "xla" and is_one_loop(plan.graph, k.spec.nodes) for k in plan.kernels)


def test_readers_of_one_element_are_no_siblings():
    """A group must hang together by the values or whole arrays that its operations share."""

    def f(x, at):
        return jnp.take(x, jnp.clip(at.astype("int32"), 0, 0), axis=0), at * at, jnp.argmax(x, 0)

    args = jax.ShapeDtypeStruct((1,), "float32"), jax.ShapeDtypeStruct((1,), "uint8")
    for planner in ("solver", "best_first"):
        plan = fuseplan.make_plan(f, device="h200", planner=planner)(*args)
        assert plan.verify()


W, B = array(512, 256), array(256)


@pytest.mark.parametrize(
    ("f", "args", "chain"),
    [
        (lambda x, w, b: jnp.tanh(x @ w + b) * 2, (X, W, B), ["dot_general", "add", "tanh", "mul"]),
        (lambda x, w, b: (y := x @ w + b) * jnp.tanh(y), (X, W, B), ["dot_general", "add"]),
        (lambda x, w, b: (y := x @ w + b, jnp.tanh(y)), (X, W, B), ["dot_general", "add"]),
        (lambda x, w, y: jnp.tanh(x @ w) + y, (X, W, array(512, 256)), ["dot_general", "tanh"]),
        (lambda x, w, b: x @ w + b.astype("float32"), (X, W, array(256, dtype="bfloat16")), []),
        (lambda x, w, b: (x @ w).sum(0) + b, (X, W, B), []),
        (lambda x, w, s: jnp.exp(x @ w) * s, (X, W, array()), ["dot_general", "exp", "mul"]),
        (
            lambda x, w: jnp.tanh(x @ w).astype("float32") + 1,
            (array(512, 512, dtype="bfloat16"), array(512, 256, dtype="bfloat16")),
            ["dot_general", "tanh"],
        ),
        (lambda x, w: jnp.square(x @ w), (X, W), []),
        (lambda x, w: jax.lax.lgamma(x @ w), (X, W), []),
        (lambda x, w: x @ w + jax.lax.broadcasted_iota("float32", (512, 256), 1), (X, W), []),
        (lambda x, w: abs(x @ w), (array(8, 8, dtype="int8"), array(8, 8, dtype="int8")), []),
    ],
    ids=[
        "bias",
        "read twice",
        "a result",
        "another array",
        "a computed bias",
        "a sum",
        "a scalar",
        "a wider result",
        "an operation that reads twice",
        "an operation that XLA expands",
        "positions",
        "integers",
    ],
)
def test_the_epilogue_of_a_matrix_product_is_the_chain_that_alone_reads_it(f, args, chain):
    graph = lower(trace(f, *args)).graph
    (product,) = [node.id for node in graph.nodes if node.op == "dot_general"]
    longest = max(epilogues_of_product(graph, product), key=len, default=())
    assert [graph.nodes[n].op for n in longest if graph.nodes[n].op != "broadcast_in_dim"] == chain
    if chain:
        assert refuse_loop(graph, longest, "triton") is None


@pytest.mark.parametrize("name", ["mlp", "norm_mlp", "neural_ode"])
def test_products_with_epilogues_cost_no_less_than_their_bounds(name):
    f, args = get_workload(name).build()
    plan = fuseplan.make_plan(f, device="h200")(*args)
    scheduler = Scheduler(plan.graph, plan.device, plan.program)
    offered = [nodes for nodes in scheduler.offers if any(plan.graph.nodes[n].flops.matrix for n in nodes)]
    assert offered
    for nodes in offered:
        price_ps = scheduler.price(nodes).cost.time_ps
        assert max(scheduler.floors(nodes)[0], scheduler.least(nodes)) <= price_ps
    assert plan.status == "OPTIMAL"
    assert any(kernel.spec.nodes in offered for kernel in plan.kernels)


def test_a_product_that_is_written_has_no_epilogue():
    graph = lower(trace(lambda x, w: jnp.tanh(x @ w), X, W)).graph
    nodes = tuple(range(len(graph.nodes)))
    edge = boundary(graph, nodes)
    assert refuse_loop(graph, nodes, "triton", edge) is None
    both = Boundary(edge.reads, (*graph.nodes[0].outputs, *edge.writes))
    assert "runs dot_general on its own" in refuse_loop(graph, nodes, "triton", both).reason


def test_an_empty_product_has_no_epilogue():
    refused = refusal(lambda x, w: jnp.tanh(x @ w), array(0, 512), W)
    assert "empty array" in refused.reason
