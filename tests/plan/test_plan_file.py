"""A plan's file holds its program: what is read from it runs, explains and verifies itself."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from fuseplan.frontend.program_codec import MAX_CONSTANT_BYTES
from fuseplan.support.errors import InvalidPlanError
from fuseplan.targets.calibrate import described_cpu
from fuseplan.workloads import WORKLOADS, get_workload, make_args


def through_file(plan):
    return fuseplan.Plan.from_json(plan.to_json())


# A step of two layers has every operation of the steps of 4 and 24 layers.
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "gpt2_train_24"])
def test_a_plan_that_was_read_gives_the_same_results(name):
    sizes = {"layers": 2} if name == "gpt2_train_4" else {}
    f, shapes = get_workload(name).build(small=True, **sizes)
    args = make_args(shapes)
    plan = fuseplan.make_plan(f, device="cpu", planner="greedy")(*shapes)
    read = through_file(plan)
    assert read == plan
    for expected, got in zip(jax.tree.leaves(plan.run(*args)), jax.tree.leaves(read.run(*args)), strict=True):
        np.testing.assert_array_equal(expected, got)


def of_points(x):
    """What the scores of 1,536 points need is more than the largest second-level caches of two cores."""
    return (jax.nn.softmax(x @ x.T, axis=-1) @ x).sum(0)


def test_a_plan_with_loops_of_a_cpu_is_verified_from_its_file():
    device = described_cpu()
    n = int(np.sqrt(device.private_cache_bytes)) + 3072
    x = jnp.linspace(0, 1, n * 8, dtype="float32").reshape(n, 8)
    read = through_file(fuseplan.make_plan(of_points, device=device)(x))
    assert any(kernel.spec.backend == "loops" for kernel in read.kernels)
    assert read.verify()
    np.testing.assert_allclose(read.run(x), of_points(x), rtol=1e-4)
    document = json.loads(read.to_json())
    del document["program"]
    assert read.verify().bound_us is not None
    without = fuseplan.Plan.from_json(json.dumps(document))
    assert "not in the file" in without.verify().reason
    with pytest.raises(InvalidPlanError, match="plan the function anew"):
        without.run(x)


TABLE = np.arange(7.0, dtype="float32")

PROGRAMS = {
    "a scan and a branch": lambda x: jax.lax.cond(
        x[0] > 0, lambda x: jax.lax.scan(lambda c, y: (c * 0.5 + y, c), 0.0, x)[1], jnp.cumsum, x
    ),
    "random bits": lambda x: jax.random.normal(jax.random.key(3), x.shape) * x,
    "a gather": lambda x: jnp.take(x, jnp.argsort(x)),
    "a window": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3,), (1,), "SAME"),
    "special values": lambda x: jnp.where(x > 0.5, jnp.nan, jnp.where(x < -0.5, -jnp.inf, x)),
    "narrow types": lambda x: (x.astype(jnp.bfloat16) * jnp.bfloat16(1.5)).astype(jnp.float8_e4m3fn),
    "a captured array": lambda x: x[:, None] * jnp.asarray(TABLE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_parameters_of_all_kinds(name):
    f, x = PROGRAMS[name], jnp.linspace(-1, 1, 40, dtype="float32")
    plan = fuseplan.make_plan(f, device="cpu")(x)
    read = through_file(plan)
    if jax.__version_info__ >= (0, 12) and name == "a scan and a branch":
        assert "FTTuple" in json.loads(plan.to_json())["no_program"], "a loop's own record of its trees"
        return
    assert read.program is not None
    expected, got = jax.jit(f)(x), read.run(x)
    np.testing.assert_allclose(got.astype("float32"), expected.astype("float32"), rtol=1e-6)


def callback(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2


LARGE = np.zeros(MAX_CONSTANT_BYTES, "float32")


@pytest.mark.parametrize(
    ("f", "why"),
    [(callback, "a parameter has no form in a file"), (lambda x: x + jnp.asarray(LARGE)[:40], "closes over")],
)
def test_what_has_no_form_in_a_file_is_said(f, why):
    plan = fuseplan.make_plan(f, device="cpu")(jnp.ones(40))
    document = json.loads(plan.to_json())
    assert why in document["no_program"]
    read = fuseplan.Plan.from_json(json.dumps(document))
    assert read.program is None
    assert read == plan


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p["equations"][0].update(primitive="nosuch"),
        lambda p: p["equations"][0].update(primitive="sin"),
        lambda p: p["equations"].pop(),
        lambda p: p["equations"][0].update(outputs=[99]),
        lambda p: p.update(avals=[]),
        lambda p: p["avals"][0].__setitem__(0, [3, 3]),
        lambda p: p["equations"][0]["params"].update(x={"record": "os:system", "items": {}}),
        lambda p: p["equations"][0]["params"].update(x={"record": "jax.numpy:save", "items": {}}),
        lambda p: p["equations"][0]["params"].update(x={"enum": "jax.numpy:ndarray", "name": "x"}),
        lambda p: p.pop("outputs"),
    ],
)
def test_a_program_that_was_edited_is_refused(edit):
    document = json.loads(fuseplan.make_plan(jax.nn.softmax, device="h200")(jnp.ones((8, 9))).to_json())
    edit(document["program"])
    with pytest.raises(InvalidPlanError, match=r"plan\.program: not a program of JAX"):
        fuseplan.Plan.from_json(json.dumps(document))


def test_arrays_of_other_shapes_are_refused():
    plan = fuseplan.make_plan(jax.nn.softmax, device="h200")(jnp.ones((8, 9)))
    with pytest.raises(TypeError, match=r"expected arrays float32\[8, 9\], got float32\[9\]"):
        plan.run(jnp.ones(9))
