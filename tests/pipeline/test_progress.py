"""Long planning says on a terminal what it does, and the display changes no plan."""

import io
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan import console
from fuseplan.support import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Puts a terminal in the place of stderr; in a test, as pytest sets stderr anew after fixtures."""

    def begin(patience_s=0.0):
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setattr(console, "PATIENCE_S", patience_s)
        monkeypatch.setenv("COLUMNS", "120")
        return sys.stderr

    return begin


def net(x, w):
    for _ in range(3):
        x = jnp.tanh(x @ w) * jax.nn.softmax(x)
    return x.sum(0)


ARGS = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")


def test_a_line_says_what_was_found(terminal):
    stderr = terminal()
    plan = fuseplan.make_plan(net, device="h200")(*ARGS)
    last = stderr.getvalue().strip().splitlines()[-1]
    found = re.search(r"fuseplan planned (\d+) operations for h200 in \d+ s: (\S+) µs, proven", last)
    assert found is not None, last
    assert found.groups() == (str(len(plan.graph.nodes)), f"{plan.objective_us:,.4g}")


def test_nothing_is_said_in_a_pipe_or_of_short_planning(terminal, monkeypatch):
    stderr = terminal(patience_s=60.0)
    fuseplan.make_plan(net, device="h200")(*ARGS)
    assert not stderr.getvalue()
    monkeypatch.setattr(console, "PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    fuseplan.make_plan(net, device="h200")(*ARGS)
    assert not sys.stderr.getvalue()


def test_the_display_changes_no_plan(terminal):
    stderr = terminal()
    with_display = fuseplan.make_plan(net, device="tpu_v5e")(*ARGS)
    assert "fuseplan planned" in stderr.getvalue()
    terminal(patience_s=60.0)
    without = fuseplan.make_plan(net, device="tpu_v5e")(*ARGS)
    assert with_display.kernels == without.kernels
    assert with_display.notes == without.notes


def test_stage_best_and_gap_are_followed(monkeypatch):
    seen = []
    found, enter = progress.found, progress.enter

    def record(time_ps, bound_ps):
        found(time_ps, bound_ps)
        seen.append((time_ps, bound_ps))

    monkeypatch.setattr(progress, "found", record)
    stages = []
    monkeypatch.setattr(progress, "enter", lambda stage: (stages.append(stage), enter(stage)))
    with progress.followed() as state:
        plan = fuseplan.make_plan(net, device="h200")(*ARGS)
    assert all(0 <= bound_ps <= time_ps for time_ps, bound_ps in seen)
    assert seen[-1] == (plan.objective_ps, plan.bound_ps)
    assert {"rewrite", "search", "order", "check"} <= set(stages)
    assert str(state).startswith(f"{stages[-1]}, {plan.objective_us:,.4g} µs")
    assert not progress.is_followed()


def test_the_bar_says_stage_best_gap_and_time_left(terminal, monkeypatch):
    stderr = terminal()
    seen = []
    found = progress.found

    def record(time_ps, bound_ps):
        found(time_ps, bound_ps)
        seen.append((str(progress._followed.get()), progress._followed.get().left))

    monkeypatch.setattr(progress, "found", record)
    with console.progress(2) as steps:
        steps.start("first")
        fuseplan.make_plan(net, device="h200", deadline_s=40)(*ARGS)
        steps.done()
        state = progress._followed.get()
        assert state.best_ps < float("inf")
        steps.start("second")  # A program that is not planned yet has no figures of the first.
        assert (str(state), state.left) == ("", "")
    assert re.fullmatch(r"search, \S+ µs, (gap \d+%|proven)", seen[0][0])
    assert all(re.fullmatch(r"(3\d|40) s left", left) for _, left in seen)
    assert "first" in stderr.getvalue()


def test_the_best_plan_is_one_of_the_program_that_is_planned():
    small = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    with progress.followed() as state:
        fuseplan.make_plan(net, device="h200")(*small)
        fast_ps = state.best_ps
        plan = fuseplan.make_plan(net, device="h200")(*ARGS)
        assert state.best_ps == plan.objective_ps > fast_ps


def test_one_display_at_a_time(terminal):
    stderr = terminal()
    with console.progress(2) as steps:
        steps.start("first")
        fuseplan.make_plan(net, device="h200")(*ARGS)
        steps.done()
    assert "fuseplan planned" not in stderr.getvalue()
