"""Calls that are unusual for a function of arrays, and what else ``jax.jit``'s functions can do."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan.runtime.autoselect import decide
from fuseplan.targets.calibrate import described_cpu
from tests.helpers.arrays import ramp

J = functools.partial(fuseplan.jit, device="test")
X = ramp(0, 11, 3, 4)


def of_names(self, f, device, args=1.0):
    return self * f + device * args


NAMES = {"self": X, "f": X + 1, "device": X + 2, "args": X + 3}


@pytest.mark.parametrize("how", [{}, {"background": True}], ids=lambda how: "".join(how))
def test_parameters_may_have_any_name(how):
    fast = J(of_names, **how)
    np.testing.assert_allclose(fast(**NAMES), of_names(**NAMES), rtol=1e-6)
    assert fast.lower(**NAMES).out_info.shape == X.shape
    assert fast.trace(**NAMES).out_info.shape == fast.eval_shape(**NAMES).shape == X.shape
    assert fast.plan(**NAMES).status == fuseplan.make_plan(of_names, device="test")(**NAMES).status
    assert fast.is_ready(**NAMES) in (True, False)


def tree(x):
    return {"a": jnp.tanh(x), "b": (x * 2, None)}


def test_the_plan_of_a_jitted_function_has_its_results():
    for plan in (J(tree).plan(X), fuseplan.Plan.from_json(J(tree).plan(X).to_json())):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), plan.run(X), tree(X))


@pytest.mark.parametrize("how", [{}, {"background": True}, {"measure": True}], ids=lambda how: "".join(how))
def test_copies_are_functions_like_the_first(how):
    fast = J(tree, static_argnums=(), **how)
    fast(X)
    for again in (copy.copy(fast), copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert repr(again) == repr(fast)
        assert again is not fast
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), again(X), tree(X))


def test_checks_let_tracers_through(monkeypatch):
    """A function may close over a tracer: then its arguments are none."""
    monkeypatch.setenv("FUSEPLAN_CHECK", "1")

    def outer(w):
        return J(lambda x: jnp.tanh(x * w))(np.asarray(X)).sum()

    for f in (outer, jax.jit(outer), jax.grad(outer)):
        assert np.isfinite(f(2.0))


@pytest.mark.filterwarnings("ignore:backend and device argument on jit is deprecated")
def test_to_name_this_cpu_measures_nothing(monkeypatch):
    def measured(*_):
        raise AssertionError("measured")

    monkeypatch.setattr("fuseplan.targets.detect.local_cpu", measured)
    for device in (None, "cpu", jax.devices("cpu")[0]):
        fuseplan.jit(tree, device=device)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arg", [jnp.argmax, jnp.argmin])
def test_the_place_of_an_extremum_of_small_floats(dtype, arg):
    def f(u, v):
        return arg((u @ v.T).astype(dtype), axis=1)

    u, v = (np.random.default_rng(0).standard_normal((n, 16)).astype("float32") for n in (1000, 20_000))
    fast = fuseplan.jit(f, device=described_cpu())
    assert any(kernel.spec.capabilities.loop_nest for kernel in fast.plan(u, v).kernels)
    found = fast(u, v)
    values = np.asarray((u @ v.T).astype(dtype).astype("float32"))
    picked = values[np.arange(len(u)), np.asarray(found)]
    np.testing.assert_array_equal(picked, (values.max if arg is jnp.argmax else values.min)(axis=1))


def test_unknown_memory_decides_nothing():
    assert decide(1.0, 1.01, None, 100).kept == "plain"
    assert decide(1.0, 1.01, 50, None).kept == "plain"
    assert decide(1.0, 1.01, 50, 100).kept == "fused"


def test_a_program_for_another_platform_has_no_loops():
    """The loops of this CPU, or the kernels of this GPU, are of no use there."""

    def f(x, y):
        return jnp.exp(-((x[:, None] - y) ** 2).sum(-1)) @ y

    args = [jax.ShapeDtypeStruct((8192, 4), "float32")] * 2
    fast = fuseplan.jit(f, device=described_cpu())
    exported = [jax.export.export(fast._jitted.fused, platforms=[p])(*args) for p in ("cpu", "tpu")]
    here, there = (program.mlir_module() for program in exported)
    assert "stablehlo.while" in here
    assert "stablehlo.while" not in there
