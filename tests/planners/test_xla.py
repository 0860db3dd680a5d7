"""The planner ``xla`` on this machine's CPU: what XLA launches and moves, as a plan."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from costmodel.devices import TEST_DEVICE
from costmodel.graph import check_graph
from costmodel.kernel import Compiled, Cost
from costmodel.roofline import estimate
from fuseplan import Kernel, Plan
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.planners import Budget, get_planner, planner_names, xla
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.support.errors import InvalidArgumentError, InvalidPlanError
from fuseplan.targets.compile_only import MissingCompilerError
from fuseplan.verify.plan import check_plan
from tests.helpers.graphs import GraphBuilder


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def make(f, *args, **settings):
    """The plan, which is legal, and the same when it is read again."""
    plan = fuseplan.make_plan(f, device="cpu", planner="xla", **settings)(*args)
    check_graph(plan.graph)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.planner == "xla"
    return plan


def launches(plan):
    return sum(kernel.spec.compiled.launches for kernel in plan.kernels)


def all_show(plan):
    return any("100 % of the bytes" in note for note in plan.notes)


SQUARE = shaped(256, 256)


def test_softmax():
    x = shaped(4096, 1024)
    plan = make(jax.nn.softmax, x)
    assert all_show(plan)
    moved = [k.spec.compiled for k in plan.kernels]
    assert plan.hbm_bytes == sum(m.read_bytes + m.write_bytes for m in moved) >= 2 * 4 * 4096 * 1024
    assert plan.objective_ps >= launches(plan) * plan.device.launch_ps
    apart = fuseplan.make_plan(jax.nn.softmax, device="cpu", planner="unfused")(x)
    assert plan.objective_ps < apart.objective_ps
    assert (plan.status, plan.bound_ps) == ("FEASIBLE", None)
    assert dict(plan.stats.seconds)["compile"] > 0
    assert "taken from the plan" in plan.verify().reason


def test_a_product_and_its_epilogue():
    plan = make(lambda x, w, b: jax.nn.gelu(x @ w + b), SQUARE, SQUARE, shaped(256))
    assert all_show(plan)
    (product,) = [k for k in plan.kernels if any(plan.graph.nodes[n].flops.matrix for n in k.spec.nodes)]
    assert product.cost.flops.matrix == 2 * 256**3
    assert len(plan.kernels) < len(plan.graph.nodes)


def test_what_xla_computes_twice():
    # Two loops over other arrays, each of which adds the rows up for itself.
    plan = make(lambda v, w, x, y: (x * (v + w), (y + 1).T * (v + w)), *[SQUARE] * 4)
    assert all_show(plan)
    assert [plan.graph.nodes[n].op for n in plan.recomputed] == ["add"]
    groups = [{plan.graph.nodes[n].op for n in k.spec.nodes} for k in plan.kernels]
    assert all("add" in group for group in groups)
    assert {a.value for k in plan.kernels for a in k.spec.writes} == plan.graph.results


def test_scatter():
    plan = make(lambda x, i, u: x.at[i].add(u), shaped(1000, 64), shaped(50, dtype="int32"), shaped(50, 64))
    # The array is copied, then updated in place: its values are no operation's, its bytes are moved.
    assert 2 * 4 * 64 * 1000 <= plan.hbm_bytes < 3 * 4 * 64 * 1000
    assert "copies and auxiliary steps" in plan.notes[1]


def test_a_copy_that_belongs_to_no_operation_is_counted():
    plain = make(lambda x: x * 2, SQUARE)
    copied = make(lambda x: (x * 2, x), SQUARE)
    assert launches(copied) == launches(plain) + 1
    assert copied.hbm_bytes == plain.hbm_bytes + 2 * 4 * 256**2
    assert copied.objective_ps > plain.objective_ps
    assert "XLA, 2×" in str(copied)
    assert "1 of XLA's 2 kernels are matched with operations: they move 50 % of" in copied.notes[0]


def effects(x):
    jax.debug.print("{}", x.sum())
    y = jnp.sin(x)
    jax.debug.print("{}", y.sum())
    return y * 2


CLOSED_OVER = np.linspace(0, 1, 64, dtype="float32").reshape(8, 8)
PROGRAMS = {
    "nothing": (lambda: (), ()),
    "an input": (lambda x: (x, x), (SQUARE,)),
    "one operation": (jnp.exp, (SQUARE,)),
    "a constant": (lambda x: (jnp.ones((3, 3)), 2.0, x + 1), (shaped(4),)),
    "constants alone": (lambda: jnp.arange(10.0), ()),
    "known before": (lambda x: (jnp.sin(CLOSED_OVER) @ x, jnp.cos(CLOSED_OVER)), (shaped(8, 8),)),
    "no elements": (lambda x, y: (jnp.exp(x).sum(), jnp.exp(x), y + 1), (shaped(0, 4), shaped(5))),
    "a renaming": (lambda x: x.reshape(-1), (SQUARE,)),
    "side effects": (effects, (shaped(64),)),
    "an unused argument": (lambda x, y: x * 2, (SQUARE, SQUARE)),
    "loops": (
        lambda x: lax.while_loop(
            lambda c: c.sum() < 9, jnp.exp, lax.scan(lambda c, a: (jnp.tanh(c + a), c.sum()), x[0] * 2, x)[0]
        ),
        (SQUARE,),
    ),
    "a branch": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x) + 1, (SQUARE,)),
    "keys": (
        lambda key, x: x * jax.random.normal(key, (64,)),
        (jax.eval_shape(lambda: jax.random.key(0)), shaped(64)),
    ),
    "several results": (lambda x: lax.top_k(jnp.sort(x), 3), (SQUARE,)),
    "a decomposition": (lambda x: jnp.linalg.cholesky(x @ x.T) * 2, (shaped(16, 16),)),
    "what is read in part": (lambda x, i: jnp.sin(x[i]) + x[:2], (SQUARE, shaped(2, dtype="int32"))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_program_has_a_legal_plan(name, tmp_path):
    f, args = PROGRAMS[name]
    plan = make(f, *args)
    assert plan.notes
    assert (plan.kernels == ()) == (not plan.graph.nodes)
    assert plan.summary()
    assert str(plan)
    plan.to_html(tmp_path / "plan.html")


def test_it_runs_as_xla_does():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")
    planned = fuseplan.jit(lambda x: (jax.nn.softmax(x), (x + x[0]).sum(1)), device="cpu", planner="xla")
    results, expected = planned(x), (jax.nn.softmax(x), (x + x[0]).sum(1))
    for result, value in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5)


@pytest.mark.slow
def test_both_passes_are_one_program_and_cut_in_two():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")

    def loss(x):
        return jnp.tanh(jax.nn.softmax(x)).sum()

    planned = fuseplan.jit(loss, device="cpu", planner="xla")
    np.testing.assert_allclose(jax.jit(jax.grad(planned))(x), jax.grad(loss)(x), rtol=1e-4, atol=1e-6)
    passes = planned.plan_vjp(x)
    graph = passes.plan.graph
    assert len(passes.forward.kernels) + len(passes.back.kernels) == len(passes.plan.kernels) - 1
    (wait,) = [k for k in passes.plan.kernels if graph.nodes[k.spec.nodes[0]].op == "await_cotangents"]
    assert (len(wait.spec.nodes), wait.cost) == (1, Cost())


def test_a_shards_part_is_no_program():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    along, whole = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
    x = jnp.ones((4, 4))

    def run(strict):
        f = fuseplan.jit(lambda x: lax.psum(jnp.tanh(x), "i"), device="cpu", planner="xla", strict=strict)
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=along, out_specs=whole))(x)

    # On a CPU a call that plans nothing runs jax.jit's program; ``strict`` always plans.
    np.testing.assert_allclose(run(strict=False), jnp.tanh(x), rtol=1e-6)
    with pytest.raises(InvalidArgumentError, match="a shard's part"):
        run(strict=True)


def test_beside_other_planners():
    frame = fuseplan.compare(jax.nn.softmax, device="cpu", planners=("xla", "solver"))(SQUARE)
    assert list(frame["planner"]) == ["xla", "solver"]
    assert frame["time_us"].gt(0).all()


def test_constraints_are_not_for_it():
    limits = fuseplan.Constraints(never_fuse=["exp"], max_peak_bytes=1)
    plan = make(jax.nn.softmax, SQUARE, constraints=limits)
    assert plan.constraints is None
    assert plan.notes[-1] == "constraints do not hold: the planner 'xla' takes none"
    assert plan.kernels == make(jax.nn.softmax, SQUARE).kernels


def test_a_graph_is_no_program():
    b = GraphBuilder()
    graph = b.build(b.elementwise(b.input((8,))))
    assert "xla" in planner_names()
    assert "xla" not in planner_names(of_graphs=True)
    with pytest.raises(InvalidArgumentError, match="needs the program behind the graph"):
        get_planner("xla")(graph, Scheduler(graph, TEST_DEVICE), Budget())


@pytest.mark.parametrize("device", [TEST_DEVICE, "b200", "tpu_v4"])
def test_devices_without_a_compiler(device):
    with pytest.raises(InvalidArgumentError, match=r"needs XLA's compiler .* one of h200"):
        fuseplan.make_plan(jnp.exp, device=device, planner="xla")(SQUARE)


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (MissingCompilerError("pip install 'fuseplan[aot]'"), MissingCompilerError, "pip install"),
        (RuntimeError("Unknown backend: 'gpu'"), InvalidArgumentError, "Unknown backend.*Plan on the device"),
    ],
)
def test_compilers_that_fail(monkeypatch, raised, expected, words):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(xla, "compile_for", fail)
    with pytest.raises(expected, match=words):
        fuseplan.make_plan(jnp.exp, device="h200", planner="xla")(SQUARE)


# --- the cost of XLA's own kernels, and what is checked of them --------------------------------


def test_it_costs_what_xla_launches_and_moves():
    b = GraphBuilder()
    graph = b.build(b.elementwise(b.input((1000,)), op="exp"))
    spec = replace(whole_array_spec(graph, (0,)), compiled=Compiled(3, 7_000, 1_000))
    cost = estimate(graph, spec, TEST_DEVICE)
    assert (cost.launch_ps, cost.memory_ps) == (3 * TEST_DEVICE.launch_ps, 8_000)
    assert (cost.hbm_read_bytes, cost.hbm_write_bytes) == (7_000, 1_000)
    assert cost.flops.transcendental == 1_000
    assert estimate(graph, replace(spec, compiled=Compiled(0, 0, 0)), TEST_DEVICE) == Cost()
    copied = estimate(graph, replace(spec, compiled=Compiled(0, 500, 0)), TEST_DEVICE)
    assert (copied.launch_ps, copied.memory_ps) == (0, 500)
    renamed = lower(trace(lambda x: x.reshape(2, 4), jnp.ones(8))).graph
    spec = replace(whole_array_spec(renamed, (0,)), compiled=Compiled(1, 32, 32))
    assert estimate(renamed, spec, TEST_DEVICE).time_ps == TEST_DEVICE.launch_ps + 64


def claimed(plan, is_priced=True, **changes):
    """A plan whose first kernel claims other things of XLA, at the cost that these have or at its own."""
    first = plan.kernels[0]
    spec = replace(first.spec, **changes)
    cost = estimate(plan.graph, spec, plan.device) if is_priced else first.cost
    return replace(plan, kernels=(Kernel(spec, cost), *plan.kernels[1:]))


def test_what_is_checked():
    plan = make(lambda x: jnp.exp(x) + 1, SQUARE)
    made = plan.kernels[0].spec.compiled
    less = replace(made, read_bytes=1)
    assert check_plan(claimed(plan, compiled=less))
    with pytest.raises(InvalidPlanError, match=r"claims .* but costs"):
        check_plan(claimed(plan, is_priced=False, compiled=less))
    with pytest.raises(InvalidPlanError, match="XLA's own and has a schedule of ours"):
        check_plan(claimed(plan, backend="loops"))
    with pytest.raises(InvalidPlanError, match=r"kernels\[0\].spec.compiled: expected at least 0, got -1"):
        Plan.from_json(claimed(plan, compiled=replace(made, launches=-1)).to_json())
