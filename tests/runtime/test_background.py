"""``fuseplan.jit(background=True)``: ``jax.jit``'s program answers until the fused one is compiled."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan.runtime import background, primitive
from tests.helpers.arrays import ramp

J = functools.partial(fuseplan.jit, device="test", background=True)
X = ramp(0, 11, 3, 4)


def f(x, scale=2.0):
    return jnp.tanh(x) * scale


@pytest.fixture
def planning(monkeypatch):
    """Planning waits for ``planning.set()``, and counts in ``planning.plans``."""
    event = threading.Event()
    event.plans = []
    planned = primitive.planned

    def waiting(*args, **kwargs):
        event.plans.append(threading.current_thread().name)
        assert event.wait(60)
        return planned(*args, **kwargs)

    monkeypatch.setattr(primitive, "planned", waiting)
    yield event
    event.set()


def copied(x):
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def wait_for(fast, *args, **kwargs):
    until = time.monotonic() + 60
    while not fast.is_ready(*args, **kwargs):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_calls_do_not_wait_for_the_plan(planning):
    fast = J(f)
    for _ in range(3):
        np.testing.assert_allclose(fast(X), f(X), rtol=1e-6)
        assert not fast.is_ready(X)
    planning.set()
    wait_for(fast, X)
    np.testing.assert_allclose(fast(X), f(X), rtol=1e-6)
    assert len(planning.plans) == 1
    assert planning.plans[0].startswith("fuseplan")


def test_the_caller_compiles_nothing_but_jax_jits_program(planning, compilations):
    fast, x = J(lambda x: jnp.tanh(x) * 3), jax.block_until_ready(X + 0)
    compilations.clear()
    fast(x)
    assert len(compilations) == 1
    planning.set()
    wait_for(fast, x)
    assert len(compilations) == 2
    fast(x), fast(x)
    assert len(compilations) == 2


def test_each_signature_has_its_own_plan(planning):
    planning.set()
    fast = J(f, static_argnames="scale", donate_argnums=0)
    for x, kwargs in ((X, {}), (X[:2], {"scale": 3.0}), (np.float32(2), {}), (1, {})):
        for _ in range(2):
            np.testing.assert_allclose(fast(copied(x), **kwargs), f(x, **kwargs), rtol=1e-6)
            wait_for(fast, x, **kwargs)
    assert not fast.is_ready(X[1:])


def test_many_threads_start_one_planning(planning):
    fast = J(f)
    results = []
    threads = [threading.Thread(target=lambda: results.append(fast(X))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    planning.set()
    wait_for(fast, X)
    assert len(results) == 8
    assert len(planning.plans) == 1
    for result in results:
        np.testing.assert_allclose(result, f(X), rtol=1e-6)


def after_jobs():
    """Wait until the thread has done all jobs so far."""
    done = threading.Event()
    background._WORKER.submit(done.set)
    assert done.wait(60)


def test_tracers_are_planned_where_they_are(planning):
    planning.set()
    fast = J(f)
    np.testing.assert_allclose(jax.grad(lambda x: fast(x).sum())(X), 2 - 2 * np.tanh(X) ** 2, atol=1e-5)


def test_with_settings_of_its_own_a_thread_runs_jax_jits_program(planning):
    """The thread that plans does not know them, and no call waits for a plan."""
    fast = J(f)
    with jax.numpy_dtype_promotion("strict"):
        for _ in range(2):
            np.testing.assert_allclose(fast(X), f(X), rtol=1e-6)
            after_jobs()
        assert not fast.is_ready(X)
    assert planning.plans == []
    planning.set()
    fast(X)
    wait_for(fast, X)


def test_what_the_user_asks_for_and_cannot_be_is_raised_at_the_next_call():
    fast = J(f, constraints=fuseplan.Constraints(must_fuse=["no such operation"]))
    fast(X)
    after_jobs()
    with pytest.raises(fuseplan.ConstraintError, match="no such operation"):
        fast(X)


def test_a_process_that_ends_waits_for_no_planning_that_has_not_begun():
    script = """
        import threading, time
        from fuseplan.runtime.background import _WORKER
        begun = threading.Event()
        def job(n):
            begun.set()
            time.sleep(0.5)
            print("job", n, flush=True)
        for n in range(20):
            _WORKER.submit(lambda n=n: job(n))
        assert begun.wait(60)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=True)
    assert ran.stdout.decode().split() == ["job", "0"]


def test_a_job_that_raises_ends_no_other(monkeypatch):
    """As where the user's filters make errors of warnings."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_type))
    background._WORKER.submit(lambda: 1 / 0)
    after_jobs()
    assert raised == [ZeroDivisionError]


def test_a_failure_is_a_warning(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such luck")

    def called_and_tried():
        fast(X)
        after_jobs()

    fast = J(f)
    monkeypatch.setattr(fast._jitted, "lower", broken)
    with pytest.warns(fuseplan.FuseplanWarning, match="f: it was not planned in the background.*no such"):
        called_and_tried()
    np.testing.assert_allclose(fast(X), f(X), rtol=1e-6)
    assert not fast.is_ready(X)


def test_with_measure(planning):
    planning.set()
    fast = J(f, measure=True)
    fast(X)
    wait_for(fast, X)
    assert fast.measured(X) is None
    fast(X)
    assert fast.measured(X) is not None


def test_without_background_it_is_always_ready():
    fast = fuseplan.jit(f, device="test")
    assert fast.is_ready(X)
    assert "background=True" in repr(J(f))
    assert "background" not in repr(fast)
    again = J(f)
    again(X)
    wait_for(again, X)
    again.clear_cache()
    assert not again.is_ready(X)


def test_once_all_are_ready_calls_ask_nothing_until_shapes_are_new(planning, monkeypatch):
    fast = J(f)
    fast(X)
    planning.set()
    wait_for(fast, X)
    fast(X)
    key = fast._background._calls.key
    asked = []
    monkeypatch.setattr(fast._background._calls, "key", lambda *call: asked.append(call) or key(*call))
    np.testing.assert_allclose(fast(X), f(X), rtol=1e-6)
    assert not asked
    planning.clear()
    np.testing.assert_allclose(fast(X[:2]), f(X[:2]), rtol=1e-6)  # jax.jit's program, without waiting
    assert asked
    assert not fast.is_ready(X[:2])
    planning.set()
    wait_for(fast, X[:2])


@pytest.mark.parametrize("options", [{"background": True}, {"measure": True}], ids=["background", "measure"])
@pytest.mark.parametrize("value", [2**40, "text", object()], ids=["large", "text", "object"])
def test_what_is_no_array_is_refused_as_by_jax_jit(options, value):
    with pytest.raises((TypeError, OverflowError)) as wanted:
        jax.jit(f)(value)
    with pytest.raises(wanted.type, match=re.escape(str(wanted.value)[:20])):
        fuseplan.jit(f, device="test", **options)(value)
