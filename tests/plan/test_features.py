"""Each part of the decision can be switched off, and is worth something somewhere."""

from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.plan.options import Features
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads import get_workload

pytestmark = pytest.mark.one_python


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def dequantised(x, w, scale):
    return x @ (w.astype(x.dtype) * scale)


def row_maxima(x):
    y = jnp.sort(x)
    return jnp.exp(y).sum(1), (y * y).max(1)


def flat(workload):
    f, args = workload.build()
    return f, *args


HALF = [array(1024, 768, dtype="bfloat16"), array(768, 768, dtype="bfloat16"), array(768, dtype="bfloat16")]
QKV = [array(2048, 64)] * 3

WORTH = {
    "prologues": (
        "h200",
        dequantised,
        array(64, 4096, dtype="bfloat16"),
        array(4096, 4096, dtype="int8"),
        array(4096, dtype="bfloat16"),
    ),
    # XLA's own products take what reads them once.
    "epilogues": ("h200", lambda x, w: (y := x @ w) * jnp.tanh(y), *HALF[:2]),
    "siblings": ("h200", row_maxima, array(1024, 1024)),
    "several_results": ("h200", lambda x: ((y := jnp.exp(x)), y.sum(1)), array(1024, 1024)),
    "streaming": ("h200", lambda x: jnp.exp(x).sum(1), array(1024, 65536)),
    "choice_of_tile": ("h200", lambda x, w: (y := x @ w) * jnp.tanh(y), *HALF[:2]),
    "loop_nests": ("cpu", attention, *QKV),
    "xla_loops": ("h200", lambda x: jnp.roll(x, 1, 0) - x, array(2048, 2048)),
    # Its backward pass is too far from its forward pass for one nest of both.
    "recompute": ("cpu", *flat(get_workload("gpt2_block_grad"))),
    "splits": ("h200", *flat(get_workload("layernorm_grad"))),
    "packs": ("h200", lambda xs, rate: [x - rate * x for x in xs], [array(100)] * 5, array()),
    "rewrites": ("tpu_v5e", *flat(get_workload("attention"))),
}


@pytest.mark.parametrize("name", WORTH)
def test_without_it_a_plan_is_slower(name):
    device, f, *args = WORTH[name]
    patient = partial(fuseplan.make_plan, f, device=device, deadline_s=100)
    plan, without = patient()(*args), patient(features=Features(**{name: False}))(*args)
    assert plan.status == without.status == "OPTIMAL"
    assert plan.objective_ps < without.objective_ps


def test_every_part_is_tested():
    assert list(WORTH) == [field.name for field in fields(Features)]
    assert Features(siblings=False, recompute=False).switched_off == ("siblings", "recompute")


def test_features_are_features():
    with pytest.raises(InvalidArgumentError, match=r"features expects a fuseplan\.Features, got str"):
        fuseplan.make_plan(row_maxima, device="h200", features="siblings")(array(8, 8))


def test_a_plan_says_what_was_switched_off():
    plan = fuseplan.make_plan(row_maxima, device="h200", features=Features(siblings=False))(array(8, 8))
    assert "switched off: siblings" in plan.notes[0]
