"""``fuseplan.compare``: a row a planner, modelled, and measured where that is asked for."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fuseplan
from fuseplan import contest
from fuseplan.cli import app
from fuseplan.cli.arguments import ALL_PLANNERS
from fuseplan.errors import InvalidArgumentError, MismatchError
from fuseplan.planners import planner_names

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((1024, 1024), "float32")
ARRAY = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
MEASURED = ["measured_us", "measured_ratio", "temp_bytes", "temp_ratio"]


def softmax(x):
    e = jnp.exp(x - jax.lax.reduce_max(x, (1,))[:, None])
    return e / e.sum(1)[:, None]


def test_every_planner_by_default():
    frame = fuseplan.compare(softmax, device="h200")(X)
    assert tuple(frame.planner) == planner_names(of_graphs=True)
    assert tuple(ALL_PLANNERS.split(",")) == planner_names(of_graphs=True)
    assert not set(MEASURED) & set(frame.columns)


def test_what_is_computed_again():
    frame = fuseplan.compare(softmax, device="h200", planners=("greedy", "xla_priority"))(X)
    # A difference and an exponential of each element.
    assert frame.recomputed_flops.tolist() == [0, 2 * 1024 * 1024]


def test_what_was_measured():
    frame = fuseplan.compare(softmax, planners=("unfused", "solver"), measure=True)(ARRAY)
    assert frame.columns[-4:].tolist() == MEASURED
    assert (frame.measured_us > 0).all()
    assert (frame.measured_ratio > 0).all()


@pytest.mark.parametrize("planner", ["unfused", "xla_priority"])
def test_what_is_left_to_xla_on_a_cpu_is_fused_as_xla_likes(planner):
    def kernels(jitted):
        entry = jitted.lower(ARRAY).compile().as_text().partition("ENTRY")[2]
        return [line.count("fusion(") for line in entry.splitlines()].count(1)

    assert kernels(fuseplan.jit(softmax, planner=planner)) == kernels(jax.jit(softmax))


def test_a_wrong_result_is_told(monkeypatch):
    monkeypatch.setattr(contest, "fuse", lambda f, args, kwargs, *_: f(*args, **kwargs) * 1.01)
    with pytest.raises(MismatchError, match="softmax by 'solver': 1 of 1 results differ"):
        fuseplan.compare(softmax, planners=("solver",), measure=True)(ARRAY)


def test_what_has_side_effects_is_not_run():
    ran = []

    def f(x):
        jax.debug.callback(ran.append, x.sum())
        return x + 1

    frame = fuseplan.compare(f, planners=("solver",), measure=True)(ARRAY)
    jax.effects_barrier()
    assert ran == []
    assert all(math.isnan(frame[name][0]) for name in MEASURED)


@pytest.mark.parametrize(
    ("device", "argument", "message"),
    [
        ("h200", ARRAY, "runs the programs here, on 'cpu', but they are to be planned for 'h200'"),
        (None, X, "expects arrays, got ShapeDtypeStruct"),
    ],
)
def test_what_cannot_be_measured(device, argument, message):
    with pytest.raises(InvalidArgumentError, match=message):
        fuseplan.compare(softmax, device=device, measure=True)(argument)


def test_no_planner_is_none_to_compare():
    with pytest.raises(InvalidArgumentError, match="planners expects one or more names"):
        fuseplan.compare(softmax, device="h200", planners=())


def test_the_commands_lines_fit_80_columns():
    result = CliRunner().invoke(app, ["compare", "softmax", "--small", "--planners", "inductor,solver"])
    assert "inductor: 1 of its groups are several kernels here" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_command_measures():
    command = ["compare", "softmax", "--small", "--measure", "--planners", "greedy,solver"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "softmax here, measured" in result.output
    there = CliRunner().invoke(app, [*command, "--device", "h200"])
    assert there.exit_code != 0
    assert "leave out device, or measure" in there.output + str(there.exception)
