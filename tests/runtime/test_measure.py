"""``fuseplan.jit(measure=True)``: the better program is kept, and nobody notices the timing."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fuseplan
from fuseplan.runtime import autoselect as measure
from fuseplan.runtime.autoselect import decide
from tests.helpers.arrays import ramp

pytestmark = pytest.mark.one_python

J = functools.partial(fuseplan.jit, device="test", measure=True)
X = ramp(0, 11, 3, 4)


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(measure, "ENOUGH_S", 0.005)


def slow(x):
    """``tanh(x) + 1`` behind a sleep: nothing can be faster than this is slow."""

    def host(x):
        time.sleep(0.01)
        return np.tanh(x) + 1

    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def fast(x):
    return jnp.tanh(x) + 1


def failing(x):
    def host(_):
        raise RuntimeError("no such luck")

    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def rigged(*, fused=fast, plain=fast, **options):
    """A function that is ``fused`` where fuseplan runs its kernels and ``plain`` under jax.jit."""
    f = J(fast, **options)
    f._jitted.fused = jax.jit(f._known.watched(fused), **options)
    f._choices.plain = f._reference = jax.jit(f._known.watched(plain), **options)
    return f


@pytest.mark.parametrize(
    ("sides", "kept"), [({"fused": slow}, "plain"), ({"plain": slow}, "fused")], ids=["plain", "fused"]
)
def test_the_faster_side_is_kept(sides, kept):
    f = rigged(**sides)
    np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)
    found = f.measured(X)
    assert found.kept == kept
    assert (found.fused_ms > found.plain_ms) == (kept == "plain")
    assert max(found.fused_ms, found.plain_ms) >= 10
    assert "as fast" in found.reason
    # From then on the other never runs.
    setattr(f._choices, "fused" if kept == "plain" else "plain", None)
    np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("fused", "plain", "kept"),
    [
        ((1.00, 0), (1.04, 0), "fused"),
        ((1.04, 0), (1.00, 9), "plain"),
        ((1.02, 4), (1.00, 8), "fused"),
        ((1.00, 8), (1.02, 4), "plain"),
        ((1.00, 4), (1.00, 4), "plain"),
        ((1.00, None), (1.00, None), "plain"),
        ((0.0, 0), (0.0, 0), "plain"),
    ],
)
def test_ties_go_to_less_memory_and_then_to_jax(fused, plain, kept):
    found = decide(fused[0], plain[0], fused[1], plain[1])
    assert found.kept == kept
    assert ("temporary memory" in found.reason) == (abs(fused[0] - plain[0]) <= 0.03)


def test_one_compilation_a_side_and_none_later(compilations):
    f, x = J(lambda x: jnp.sin(x) @ x.T), X + 0
    x.T.block_until_ready()
    f(jnp.ones((2, 2)))  # The clock's own probe is compiled, too.
    compilations.clear()
    f(x)
    assert len(compilations) == 2
    f(x), f(x)
    assert len(compilations) == 2


def test_runs_are_few_and_the_result_is_one_of_them(monkeypatch):
    monkeypatch.setattr(measure, "LONG_RUN_S", 0.005)
    calls = []

    def counted(side):
        def f(x):
            def host(x):
                calls.append(side)
                time.sleep(0.01)
                return np.float32(len(calls))

            return jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), x)

        return f

    f = rigged(fused=counted("fused"), plain=counted("plain"))
    assert int(f(X)) in (1, 2)
    assert sorted(calls) == ["fused", "plain"]


@pytest.mark.parametrize("slow_side", ["fused", "plain"])
def test_the_first_result_is_of_the_side_that_is_kept(slow_side):
    f = rigged(**{slow_side: lambda x: slow(x) + 100})
    np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)


def test_tracers_do_not_inherit_a_choice():
    f = rigged(fused=slow)
    f(X)
    assert f.measured(X).kept == "plain"
    assert "pure_callback" in str(jax.make_jaxpr(f)(X))


def test_choices_are_kept_by_what_jax_compiles_anew():
    f = J(lambda x, n, *, k=1: x * n * k, static_argnums=1)
    seen = []

    def is_new(*args, **kwargs):
        known = f.measured(*args, **kwargs) is not None
        f(*args, **kwargs)
        seen.append(f.measured(*args, **kwargs))
        return not known

    assert is_new(X, 2)
    assert not is_new(X + 1, 2)
    assert is_new(X[:2], 2)
    assert is_new(X.astype("bfloat16"), 2)
    assert not is_new(np.asarray(X), 2)  # It is put where X is.
    assert is_new(X, 3)
    assert is_new(X, 3.0)  # Equal, and another program.
    assert is_new(X, n=3)
    assert is_new(1.5, 2)
    assert not is_new(2.5, 2)  # A Python scalar is not static.
    assert not is_new(jnp.asarray(1.5), 2)  # Weakly typed, too.
    assert is_new(jnp.float32(1.5), 2)
    assert not is_new(np.float32(1.5), 2)
    assert is_new(X, 2, k=2.0)
    assert not is_new(X, 2, k=3.0)
    assert is_new({"a": X, "b": X}["a"], 2, k=X[0])
    assert all(isinstance(m, measure.Measurement) for m in seen)
    f.clear_cache()
    assert f.measured(X, 2) is None


def test_static_names_and_negative_positions():
    by_name = J(lambda x, n: x * n, static_argnames="n")
    by_name(X, 2)  # By position: jax.jit takes it for static all the same.
    assert by_name.measured(X, 2)
    assert by_name.measured(X, 3) is None
    last = J(lambda x, n: x * n, static_argnums=-1)
    last(X, 2)
    assert last.measured(X, 3) is None
    many = J(lambda *a: a[0] * a[-1], static_argnums=-1)
    many(X, 2)
    assert many.measured(X, 2)
    assert many.measured(X, 3) is None
    assert many.measured(X, X) is None  # Not hashable: no call either.
    assert int(J(lambda n, m=3: n * m, static_argnums=-1)(2)) == 6


SHARDED = """
import fuseplan, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

f, g = (fuseplan.jit(h, device="test", measure=True) for h in (lambda x: jnp.tanh(x) + 1, lambda x, n: x * n))
x = jnp.ones((4, 4))
sharded = jax.device_put(x, NamedSharding(jax.make_mesh((2,), ("d",)), PartitionSpec("d")))
f(x), g(x, 2)
print(f.measured(x) is None, f.measured(sharded) is None)
print(g.measured(x, 2) is None, g.measured(sharded, 2) is None)
"""


def test_shardings_are_told_apart():
    """In a process of its own, which has two devices."""
    flags = "--xla_force_host_platform_device_count=2"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found = subprocess.run(
        [sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == ["False", "True"] * 2, found.stderr


def test_results_are_like_those_of_jax():
    def f(tree, *, key):
        return {"a": [tree["x"] * 2, None], "b": tree["n"] + 1, "k": jax.random.split(key)}, jnp.int8(3)

    args, kwargs = ({"x": X, "n": 4},), {"key": jax.random.key(0)}
    for got in (J(f)(*args, **kwargs), *(g(*args, **kwargs) for g in [J(f)] * 2)):
        want = jax.jit(f)(*args, **kwargs)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (g.aval, g.sharding, g.committed) == (w.aval, w.sharding, w.committed)
            assert bool((g == w).all())


def test_committed_and_sharded_arguments():
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("d")))
    f, want = J(fast), jax.jit(fast)(x)
    for _ in range(2):
        assert f(x).sharding.is_equivalent_to(want.sharding, 2)
        assert f(x).committed == want.committed
    assert f.measured(x).fused_ms is not None


def test_no_transfer_is_hidden():
    f = J(fast)
    with jax.transfer_guard("disallow"):
        f(X)
    assert f.measured(X).fused_ms is not None


def test_nan_results_are_no_reason():
    f = J(lambda x: jnp.log(x) * 0)
    for _ in range(2):
        np.testing.assert_array_equal(f(-X), jnp.log(-X) * 0)
    assert f.measured(X).fused_ms is not None


@pytest.mark.parametrize("kept", ["fused", "plain"])
def test_donated_arguments_are_consumed_once(kept, recwarn):
    sides = {"plain" if kept == "fused" else "fused": slow}
    f = rigged(donate_argnums=0, **sides)
    reference = X + 0
    jax.jit(fast, donate_argnums=0)(reference)
    for _ in range(2):  # The measuring call, and the next.
        x = X + 0
        np.testing.assert_allclose(f(x), fast(X), rtol=1e-6)
        assert x.is_deleted() == reference.is_deleted()
    assert f.measured(x).kept == kept
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        f(x)


def test_only_donated_arguments_are_consumed():
    f = J(lambda state, x: ({"w": state["w"] + x}, x * 2), donate_argnames="state")
    state, x = {"w": X + 0}, X + 1
    got, _ = f(state, x)
    np.testing.assert_array_equal(got["w"], X + X + 1)
    assert state["w"].is_deleted()
    assert not x.is_deleted()


def test_a_buffer_donated_twice_is_refused_as_by_jax():
    def twice(a, b):
        return a + 1, b + 2

    x = X + 0
    with pytest.raises(Exception, match="donate") as want:
        jax.jit(twice, donate_argnums=(0, 1))(x, x)
    y = X + 0
    with pytest.raises(want.type, match="donate"):
        J(twice, donate_argnums=(0, 1))(y, y)


def test_side_effects_happen_once_a_call():
    seen = []

    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return x + 1

    fused = J(f)
    fused(X)
    jax.effects_barrier()
    assert len(seen) == 1
    found = fused.measured(X)
    assert (found.kept, found.fused_ms, found.plain_ms) == ("plain", None, None)
    assert "side effects" in found.reason
    fused(X)
    jax.effects_barrier()
    assert len(seen) == 2


def test_mutable_arrays_change_once():
    if not hasattr(jax, "new_ref"):
        pytest.skip("no mutable arrays in this JAX")
    counter = jax.new_ref(jnp.zeros(3))

    def bump(ref):
        ref[...] += 1

    J(bump)(counter)
    np.testing.assert_array_equal(counter[...], 1.0)


def test_a_failing_fused_program_is_a_warning(recwarn):
    f = rigged(fused=failing)
    with pytest.warns(fuseplan.FuseplanWarning, match="fused program failed") as warned:
        np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)
    assert warned[0].filename == __file__
    assert f.measured(X).kept == "plain"
    assert "failed" in f.measured(X).reason
    f(X)


def test_a_failing_plain_program_is_a_warning():
    f = rigged(plain=failing)
    with pytest.warns(fuseplan.FuseplanWarning, match="plain program failed"):
        np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)
    assert f.measured(X).kept == "fused"


def test_a_planner_that_raises_is_a_warning():
    def refuse(*_):
        raise fuseplan.InvalidPlanError("a bug")

    fuseplan.register_planner("refusing", refuse)
    with pytest.warns(fuseplan.FuseplanWarning, match="a bug"):
        np.testing.assert_allclose(J(fast, planner="refusing")(X), fast(X), rtol=1e-6)


def test_donated_arguments_survive_a_failure():
    f = rigged(fused=failing, donate_argnums=0)
    with pytest.warns(fuseplan.FuseplanWarning, match="fused"):
        np.testing.assert_allclose(f(X + 0), fast(X), rtol=1e-6)


def test_errors_of_the_function_are_raised():
    with pytest.raises(ValueError, match="Incompatible shapes for broadcasting"):
        J(lambda x: x + jnp.ones(7))(X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        J(lambda x: 1 if x.sum() > 0 else 2)(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such luck"):
        J(failing)(X)
    with pytest.raises(ValueError, match="hashable"):
        J(lambda x, n: x, static_argnums=1)(X, [1])
    with pytest.raises(fuseplan.UnsupportedOperationError):
        J(lambda x: jnp.linalg.cholesky(x @ x.T), strict=True)(X)


def test_no_lock_stays_behind_an_error():
    with pytest.raises(ValueError, match="Incompatible"):
        J(lambda x: x + jnp.ones(7))(X)
    f = J(fast)
    f(X)
    assert f.measured(X) is not None


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.vmap(f)], ids=["jit", "grad", "vmap"])
def test_tracers_are_not_timed(transform, monkeypatch):
    monkeypatch.setattr(measure, "race", None)
    f = J(lambda x: (jnp.tanh(x) ** 2).sum())
    want = transform(lambda x: (jnp.tanh(x) ** 2).sum())(X)
    np.testing.assert_allclose(transform(f)(X), want, rtol=1e-6)
    assert not f._choices._measurements


def test_recorded_and_interpreted_calls_are_not_timed(monkeypatch):
    monkeypatch.setattr(measure, "race", None)
    f = J(fast)
    np.testing.assert_allclose(jax.jit(lambda y: f(X) + y)(1.0), fast(X) + 1, rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)
    assert f.measured(X) is None


@pytest.mark.parametrize(
    ("fused", "plain", "kept"), [(10, 2000, "fused"), (2000, 10, "plain"), (2000, 3000, "fused")]
)
def test_what_does_not_fit_is_not_run(monkeypatch, fused, plain, kept):
    """``failing`` on the side that must not run; its need is rigged."""
    f = rigged(**{"plain" if kept == "fused" else "fused": failing})
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1000)
    needs = iter((fused, plain))
    real = measure.Program

    def program(compiled):
        made = real(compiled)
        made.temp_bytes = next(needs)
        return made

    monkeypatch.setattr(measure, "Program", program)
    np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)
    found = f.measured(X)
    assert (found.kept, found.fused_temp_bytes, found.plain_temp_bytes) == (kept, fused, plain)
    assert found.fused_ms is None
    assert "free" in found.reason


def test_the_compilers_memory_counts(monkeypatch):
    """Without rigging: a program with a temporary, and room for less than that."""
    monkeypatch.setattr(measure, "free_bytes", lambda device: 100_000)
    f = J(lambda x: jnp.sort(x @ x.T).sum(0))
    x = jnp.ones((300, 2))
    f(x)
    found = f.measured(x)
    assert found.plain_temp_bytes >= 300 * 300 * 4
    assert found.plain_ms is None


def test_free_memory_is_of_this_machine(tmp_path):
    free = measure.free_bytes(jax.devices("cpu")[0])
    assert free is None or 2**24 < free < 2**50
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "now").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert measure.free_of_group((str(tmp_path), "max", "now", "inactive_file")) == 450
    (tmp_path / "max").write_text("max\n")
    assert measure.free_of_group((str(tmp_path), "max", "now", "inactive_file")) is None


def test_several_processes_run_the_same(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    f = J(fast)
    f(X)
    assert (f.measured(X).kept, f.measured(X).plain_ms) == ("plain", None)


def test_threads_that_call_first_together():
    f, gate = rigged(plain=slow), threading.Barrier(4)
    results = [None] * 4

    def call(i):
        gate.wait()
        results[i] = f(X + i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, fast(X + i), rtol=1e-6)
    assert f.measured(X).kept == "fused"


def test_a_callback_into_the_function_does_not_wait():
    inner = J(fast)

    def outer(x):
        return jax.pure_callback(lambda v: np.asarray(inner(v)), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    np.testing.assert_allclose(J(outer)(X), fast(X), rtol=1e-6)


def test_environment_switches(monkeypatch, capfd):
    monkeypatch.setenv("FUSEPLAN_DISABLE", "1")
    f = J(fast)
    f(X)
    assert f.measured(X) is None
    monkeypatch.setenv("FUSEPLAN_DISABLE", "0")
    monkeypatch.setenv("FUSEPLAN_DEBUG", "1")
    f(X)
    assert f"measured fast: {f.measured(X)}" in capfd.readouterr().err
    monkeypatch.setenv("FUSEPLAN_CHECK", "1")
    wrong = rigged(fused=lambda x: x, plain=slow)
    wrong._undonating = jax.jit(fast)
    for _ in range(2):
        with pytest.raises(fuseplan.MismatchError):
            wrong(X)


def test_ways_to_ask():
    @fuseplan.jit(device="test", measure=True)
    def double(x):
        return x * 2

    double(X)
    assert double.measured(X) is not None
    assert "measure=True" in repr(double)
    plain = fuseplan.jit(fast, device="test")
    plain(X)
    assert plain.measured(X) is None
    assert "measure" not in repr(plain)


def test_bound_methods():
    class Model:
        @functools.partial(J, static_argnums=0)
        def __call__(self, x):
            return jnp.tanh(x)

    model = Model()
    np.testing.assert_allclose(model(X), jnp.tanh(X), rtol=1e-6)
    assert Model.__call__.measured(model, X) is not None
    assert Model.__call__.measured(Model(), X) is None


def asks(f, monkeypatch):
    """The calls of ``f`` that looked for their measurement."""
    found = []
    key = f._choices._calls.key
    monkeypatch.setattr(f._choices._calls, "key", lambda *call: found.append(call) or key(*call))
    return found


@pytest.mark.parametrize("slow_side", ["fused", "plain"])
def test_where_one_side_is_always_kept_later_calls_ask_nothing(slow_side, monkeypatch):
    f = rigged(**{slow_side: slow})
    f(X)
    asked = asks(f, monkeypatch)
    for _ in range(3):
        np.testing.assert_allclose(f(X), fast(X), rtol=1e-6)
    assert not asked
    np.testing.assert_allclose(f(X[:2]), fast(X[:2]), rtol=1e-6)  # new shapes
    assert f.measured(X[:2]).kept != slow_side
    del asked[:]
    f(X), f(X[:2])
    assert not asked


def test_where_either_side_is_kept_every_call_asks(monkeypatch):
    f = rigged(fused=lambda x: slow(x) if len(x) == 3 else fast(x),
               plain=lambda x: fast(x) if len(x) == 3 else slow(x))  # fmt: skip
    f(X), f(X[:2])
    assert (f.measured(X).kept, f.measured(X[:2]).kept) == ("plain", "fused")
    asked = asks(f, monkeypatch)
    for x in (X, X[:2]):
        np.testing.assert_allclose(f(x), fast(x), rtol=1e-6)
    assert len(asked) == 2


@pytest.mark.parametrize("look", ["plan", "lower", "trace", "eval_shape"])
def test_shapes_that_were_only_looked_at_are_measured(look):
    f = J(fast)
    f(X)
    getattr(f, look)(X[:2])
    f(X[:2])
    assert f.measured(X[:2]) is not None


def test_new_shapes_consume_nothing_before_they_are_measured():
    f = J(lambda x: x + 1, donate_argnums=0)
    f(X + 0)
    new = X[:2] + 0
    np.testing.assert_allclose(f(new), X[:2] + 1)
    assert f.measured(X[:2]) is not None
    assert new.is_deleted()


def test_measurements_of_few_shapes_are_kept(monkeypatch):
    f = J(lambda x: x + 1)
    f._choices._measurements.max_entries = 2
    for n in (1, 2, 3):
        f(X[:n])
    assert [f.measured(X[:n]) is not None for n in (1, 2, 3)] == [False, True, True]
