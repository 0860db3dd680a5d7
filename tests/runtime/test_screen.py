"""What no tiled loop can gain in is run by ``jax.jit``'s own program, unplanned; what one may is planned."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan import api, pipeline
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.notes import NoteKind
from fuseplan.runtime import derivative, primitive, screen
from fuseplan.runtime.screen import is_screened, may_loop
from fuseplan.schedule.nests.offered import Nests
from fuseplan.settings import make_options
from fuseplan.support.work import ONLY_LOOPS, Work
from fuseplan.targets import calibrate
from fuseplan.targets.calibrate import described_cpu
from fuseplan.workloads import WORKLOADS, get_workload
from tests.helpers import random_programs
from tests.helpers.arrays import ramp
from tests.helpers.plans import plan_traced

CPU = described_cpu()
X = ramp(-1, 1, 12, 12)


def has_loops(plan):
    return any(kernel.spec.backend == "loops" for kernel in plan.kernels)


def small(x):
    y = jax.nn.softmax(jnp.tanh(x @ x))
    y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c @ x), None), y, None, length=3)
    return jnp.where(y > 0, y, x).sum()


def of_points(x):
    """What the scores of 1,536 points need is more than the largest second-level caches of two cores."""
    return (jax.nn.softmax(x @ x.T, axis=-1) @ x).sum(0)


@pytest.fixture
def unplanned(monkeypatch):
    def refuse(*_):
        raise AssertionError("the program is planned")

    monkeypatch.setattr(primitive, "planned", refuse)


def random_case(seed):
    """A generated program at sizes of which some have arrays as large as a nest keeps on chip."""
    pick = random.Random(seed)
    m, n = pick.choice([(17, 33), (1024, 768), (2048, 4096), (4096, 640)])
    program, _ = random_programs.random_program(pick.choice, pick.choice([4, 8, 12]))
    if pick.random() < 0.4:
        return (m, n), program, [jax.ShapeDtypeStruct(s, "float32") for s in [(m, 1), (1, n), (m, n)]]

    def f(x, y):  # The whole array is an intermediate, and results are vectors.
        return [a.sum(-1) for a in program(x, y, jnp.sin(x * y))]

    return (m, n), f, [jax.ShapeDtypeStruct(s, "float32") for s in [(m, 1), (1, n)]]


@pytest.mark.slow
def test_no_program_that_a_plan_puts_loops_into_is_handed_over(monkeypatch):
    """And next to none is planned in vain for want of an offer: of 100 programs, both kinds occur."""
    seen: Counter[tuple[bool, bool]] = Counter()
    for seed in range(100):
        (m, n), f, args = random_case(seed)
        monkeypatch.setattr(random_programs, "M", m)
        monkeypatch.setattr(random_programs, "N", n)
        planner = ("best_first", "greedy", "inductor", "solver")[seed % 4]
        options = make_options(CPU, planner=planner, deadline_s=2)
        traced = trace(f, *args)
        seen[may_loop(traced, options), has_loops(plan_traced(traced, options)[1])] += 1
    assert not seen[False, True]
    assert seen[False, False] > seen[True, False]
    assert seen[True, True] > 0


@pytest.mark.one_python
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_with_loops_is_not_handed_over(name):
    f, args = get_workload(name).build()
    traced = trace(f, *args)
    if len(traced.equations) > 300:
        pytest.skip("planned elsewhere: layers are alike")
    options = make_options(CPU, planner="best_first")
    if has_loops(plan_traced(traced, options)[1]):
        assert may_loop(traced, options)
        assert may_loop(traced, make_options(CPU))


def of_distances(x):
    """The sum of a Matérn kernel matrix of points on a line: XLA's loop of it is faster than tiled ones."""
    r = jnp.abs(x[:, None, 0] - x[None, :, 1])
    return ((1 + r + r * r / 3) * jnp.exp(-r)).sum()


def test_the_solver_is_not_asked_where_a_heuristic_finds_no_loop(unplanned):
    """An offer alone is no reason."""
    x = jax.ShapeDtypeStruct((2048, 8), "float32")
    assert may_loop(trace(of_distances, x), make_options(CPU, planner="greedy"))
    fuseplan.jit(of_distances, device=CPU).lower(x)


def test_a_plan_says_where_the_call_does_not_run_its_loops(monkeypatch):
    x = jax.ShapeDtypeStruct((2048, 64), "float32")
    told = NoteKind.LEFT_BY_HEURISTIC.value
    assert told not in fuseplan.jit(of_points, device=CPU).plan(x).notes
    monkeypatch.setattr(screen, "best_first_groups", lambda space: space.singles)
    monkeypatch.setattr(screen, "heuristic_groups", lambda space, merge: merge(space))
    assert told in fuseplan.jit(of_points, device=CPU).plan(x).notes


def instructions(compiled):
    """What XLA made of a program, whatever things are called and in which order they stand."""
    lines = re.findall(r"^\s*(?:ROOT )?%[^\n]*", compiled.as_text(), re.M)
    plain = (re.sub(r"metadata=\{[^}]*\}|origin=\{\{.*?\}\}|%[\w.\-]+", "", line) for line in lines)
    return Counter(line.strip(" ,") for line in plain)


TRANSFORMED = {
    "plain": lambda f: f,
    "gradient": jax.grad,
    "gradients of a batch": lambda f: jax.vmap(jax.grad(f)),
    "in a jit": lambda f: jax.jit(lambda x: 2 * jax.jit(f)(x)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_what_is_handed_over_is_the_program_that_jax_compiles(name, unplanned):
    f = TRANSFORMED[name](small)
    x = jnp.stack([X, 2 * X]) if "batch" in name else X
    ours, plain = (g.lower(x).compile() for g in (fuseplan.jit(f, device=CPU), jax.jit(f)))
    assert instructions(ours) == instructions(plain)
    assert ours.memory_analysis().temp_size_in_bytes == plain.memory_analysis().temp_size_in_bytes
    jax.tree.map(np.testing.assert_array_equal, ours(x), plain(x))


def test_constants_are_seen_where_jax_shows_them(unplanned):
    c = jnp.array([3.0, 5.0, 7.0])
    f = lambda x: jnp.sin(x / c).sum()  # noqa: E731
    ours, plain = (g.lower(c).as_text() for g in (fuseplan.jit(f, device=CPU), jax.jit(f)))
    assert ours == plain


@pytest.mark.parametrize("inside", [fuseplan.jit, lambda f, **_: f], ids=["fused", "plain"])
def test_a_fused_function_is_traced_once(inside, unplanned):
    traced = []

    def f(x):
        traced.append(x)
        return small(x)

    fuseplan.jit(inside(f, device=CPU), device=CPU)(X)
    assert len(traced) == 1


@pytest.mark.slow
def test_the_derivative_of_what_is_handed_over_is_not_planned(monkeypatch):
    planners = []

    def noted(flat, settings, only_loops=False):
        planners.append(settings.options.planner)
        return plan_traced(flat, settings.options)[1]

    monkeypatch.setattr(derivative, "planned", noted)
    f = fuseplan.jit(small, device=CPU)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: lambda x: jax.vjp(f, x)[1](1.0)[0]):
        np.testing.assert_allclose(transform(f)(X), jax.grad(small)(X), rtol=1e-5, atol=1e-6)
    assert planners
    assert set(planners) == {"unfused"}
    assert f.plan_vjp(X).plan.planner == "solver"


def test_a_derivative_with_something_to_gain_is_planned(monkeypatch):
    planners = []
    monkeypatch.setattr(
        derivative,
        "planned",
        lambda flat, s, only_loops: (planners.append(s.options.planner), plan_traced(flat, s.options)[1])[1],
    )
    n = int(np.sqrt(CPU.private_cache_bytes)) + 1024
    x = jax.ShapeDtypeStruct((n, 8), "float32")
    jax.jit(jax.grad(lambda x: fuseplan.jit(of_points, device=CPU)(x).sum())).lower(x)
    assert planners == ["solver"]


def test_options_of_jit_hold_for_what_is_handed_over(unplanned):
    def f(x, tree, n):
        return {"y": x * n + tree["b"][0], "n": n}

    ours = fuseplan.jit(f, device=CPU, static_argnums=2, donate_argnums=0)
    plain = jax.jit(f, static_argnums=2, donate_argnums=0)
    args = {"b": [jnp.ones(12), None]}
    x, y = jnp.array(X), jnp.array(X)
    jax.tree.map(np.testing.assert_array_equal, ours(x, args, 3), plain(y, args, 3))
    assert x.is_deleted() == y.is_deleted()
    assert ours.trace(X, args, 3).out_info == plain.trace(X, args, 3).out_info


def test_a_body_is_planned_where_what_is_around_it_is_not(monkeypatch):
    n = int(np.sqrt(CPU.private_cache_bytes)) + 1024
    x = jax.ShapeDtypeStruct((n, 8), "float32")
    asked = []

    def noted(flat, settings, only_loops):
        asked.append(flat)
        return plan_traced(flat, settings.options)[1]

    monkeypatch.setattr(primitive, "planned", noted)
    f = lambda x: jax.lax.scan(lambda c, _: (c + of_points(c), None), x, None, length=2)[0]  # noqa: E731
    fuseplan.jit(f, device=CPU).lower(x)
    assert [any(e.primitive.name == "scan" for e in flat.equations) for flat in asked] == [False]


def test_a_plan_says_where_the_call_runs_another_program():
    assert any(note == NoteKind.RUNS_AS_JAX.value for note in fuseplan.jit(jnp.sin, device=CPU).plan(X).notes)
    assert not any(
        note.startswith(NoteKind.RUNS_AS_JAX.value)
        for note in fuseplan.jit(jnp.sin, device="h200").plan(X).notes
    )
    n = int(np.sqrt(CPU.private_cache_bytes)) + 1024
    x = jax.ShapeDtypeStruct((n, 8), "float32")
    scanned = lambda x: jax.lax.scan(lambda c, _: (c + of_points(c), None), x, None, length=2)[0]  # noqa: E731
    assert NoteKind.RUNS_AS_JAX_BUT_BODIES.value in fuseplan.jit(scanned, device=CPU).plan(x).notes
    plan = fuseplan.jit(of_points, device=CPU).plan(x)
    assert has_loops(plan)
    assert not any(note.startswith(NoteKind.RUNS_AS_JAX.value) for note in plan.notes)


def test_two_programs_that_are_one_are_not_timed(unplanned):
    f = fuseplan.jit(small, device=CPU, measure=True)
    np.testing.assert_array_equal(f(X), jax.jit(small)(X))
    found = f.measured(X)
    assert (found.kept, found.fused_ms, found.plain_ms) == ("plain", None, None)


def test_what_asks_for_more_than_offers_is_planned():
    assert is_screened(make_options(CPU))
    assert not is_screened(make_options(CPU, strict=True))
    assert not is_screened(make_options(CPU, constraints=Constraints(max_group_size=2)))
    assert not is_screened(make_options("h200"))


def test_a_planner_of_the_users_own_is_asked():
    asked = []

    def own(graph, pricing, budget):
        asked.append(graph)
        return fuseplan.planners.get_planner("greedy")(graph, pricing, budget)

    fuseplan.register_planner("own", own)
    fuseplan.jit(small, device=CPU, planner="own")(X)
    assert asked


def test_nothing_is_measured_where_nothing_can_gain(tmp_path, monkeypatch):
    """A first call on a new machine, with and without a derivative, waits for no calibration."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    monkeypatch.setattr(
        calibrate, "measure", lambda limit_s: asked.append(limit_s) or calibrate.unmeasured_cpu()
    )
    x = jnp.arange(12.0).reshape(3, 4)
    fast = fuseplan.jit(lambda x: jnp.tanh(x @ x.T).sum())
    np.testing.assert_allclose(fast(x), jnp.tanh(x @ x.T).sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(fast)(x), jax.grad(lambda x: jnp.tanh(x @ x.T).sum())(x), rtol=1e-6)
    assert not asked
    fast.plan(x)  # has prices
    assert asked


def test_a_call_searches_no_bound(monkeypatch):
    """Its loops are those of the proven plan, which ``plan`` shows."""
    x = jax.ShapeDtypeStruct((2048, 64), "float32")
    made = []
    plan_of = primitive.planned
    monkeypatch.setattr(primitive, "planned", lambda *a, **kw: made.append(plan_of(*a, **kw)) or made[-1])
    fused = fuseplan.jit(of_points, device=CPU)
    fused.lower(x)
    plan = fused.plan(x)
    assert [p.status for p in made] == ["FEASIBLE"] * 2, "of the call, and of what plan says about it"
    assert NoteKind.ONLY_LOOPS.value in made[0].notes
    assert has_loops(plan)
    assert plan.status == "OPTIMAL"
    assert screen.has_same_loops(plan, made[0])
    assert NoteKind.OTHER_LOOPS.value not in plan.notes
    monkeypatch.setattr(api, "has_same_loops", lambda *_: False)
    assert NoteKind.OTHER_LOOPS.value in fused.plan(x).notes


def test_a_call_finds_the_offers_of_each_form_once(monkeypatch):
    """Of the program as traced and of its columns: the screen, the search and the estimate share them."""
    looked = Counter()
    gains = Nests._gains

    def counted(nests, nodes):
        looked[id(nests.graph), nodes] += 1
        return gains(nests, nodes)

    monkeypatch.setattr(Nests, "_gains", counted)

    def energy(x):
        return (1 / (1 + ((x[:, None] - x[None]) ** 2).sum(-1))).sum()

    x = ramp(-1, 1, 2000, 3)
    call = fuseplan.jit(jax.grad(energy), device=CPU)
    call(x)
    assert len({graph for graph, _ in looked}) == 2
    assert max(looked.values()) == 1


@pytest.mark.one_python
@pytest.mark.parametrize("name", ["norm_mlp", "gpt2_block", "gaussian_gram_vjp", "laplacian"])
def test_a_call_runs_the_loops_of_the_proven_plan(name):
    f, args = get_workload(name).build()
    traced, options = trace(f, *args), make_options(CPU)
    (_, proven), (_, called) = (
        plan_traced(traced, replace(options, only_loops=only_loops)) for only_loops in (False, True)
    )
    assert has_loops(proven)
    assert proven.status == "OPTIMAL"
    assert screen.has_same_loops(proven, called)


@pytest.mark.parametrize("name", ["nbody", "laplacian", "inverse_distance", "gaussian_differences"])
def test_a_call_finds_the_loops_of_the_whole_search_in_a_tenth_of_its_work(name, monkeypatch):
    """Its search ends after ``ONLY_LOOPS`` units for each operation, less than XLA's compiler takes, once
    there are the heuristics' plans."""
    made = []

    class Recorded(Work):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    f, args = get_workload(name).build()
    traced, options = trace(f, *args), make_options(CPU, deadline_s=100)
    monkeypatch.setattr(pipeline, "Work", Recorded)
    for_call = plan_traced(traced, replace(options, only_loops=True))[1]
    of_call = made[0]
    made.clear()
    whole = plan_traced(traced, options)[1]
    of_whole = made[0]
    assert of_call.limit == ONLY_LOOPS * len(lower(traced).graph.nodes)
    assert of_call.spent < of_whole.spent / 10
    assert has_loops(whole)
    assert screen.has_same_loops(for_call, whole)


@pytest.mark.parametrize("name", ["nbody", "gaussian_differences"])
def test_the_gradient_of_a_call_finds_its_loops_in_little_work(name, monkeypatch):
    found = []

    def recorded(flat, settings, only_loops=False):
        found.append((only_loops, planned(flat, settings, only_loops)))
        return found[-1][1]

    planned = primitive.planned
    monkeypatch.setattr(derivative, "planned", recorded)
    f, args = get_workload(name).build()
    call = fuseplan.jit(lambda *xs: sum(map(jnp.sum, jax.tree.leaves(f(*xs)))), device=CPU)
    jax.jit(jax.grad(call)).lower(*args)
    ((only_loops, plan),) = found
    assert only_loops
    assert has_loops(plan)


def squared_distances(x, y):
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def test_what_is_left_to_xla_has_columns_for_rows():
    x, y = ramp(-1, 1, 600, 3), ramp(-2, 1, 601, 3)
    f = fuseplan.jit(squared_distances, device=CPU)
    assert " reduce(" not in f.lower(x, y).as_text("hlo")
    assert " reduce(" in jax.jit(squared_distances).lower(x, y).as_text("hlo")
    np.testing.assert_allclose(f(x, y), squared_distances(x, y), rtol=1e-5, atol=1e-6)
    assert NoteKind.RUNS_AS_JAX_BUT_ROWS.value in f.plan(x, y).notes


def test_rows_of_sharded_arrays_stay():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(ramp(-1, 1, 600, 3), jax.P("x"))
        got = fuseplan.jit(squared_distances, device=CPU)(x, ramp(-2, 1, 601, 3))
        np.testing.assert_allclose(got, squared_distances(np.asarray(x), ramp(-2, 1, 601, 3)), rtol=1e-5)
