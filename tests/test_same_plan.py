"""A program's plan is the same on a busy machine and an idle one, for any hash seed, and whatever is
remembered."""

import os
import subprocess
import sys
import time

import pytest

from fuseplan import memo
from fuseplan.planners.base import Budget, Stopwatch, take_apart
from fuseplan.planners.component import Starts, solve_component
from fuseplan.planners.solved import SPENT
from fuseplan.pricing import PriceBook
from fuseplan.work import LEAST_S, Work, limit_of
from tests.plan_process import PROGRAMS, digests
from tests.small_graphs import Bytes, graph

pytestmark = pytest.mark.one_python


def in_process(times, seed, device):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu", "FUSEPLAN_MEMO": ""}
    command = [sys.executable, "-m", "tests.plan_process", str(times), device]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def test_a_busy_machine_and_another_hash_seed_plan_the_same():
    idle, busy = in_process(1.0, 1, "h200"), in_process(3.0, 2, "h200")
    assert len(idle) == len(PROGRAMS)
    assert idle == busy


def test_what_is_remembered_is_what_would_be_found():
    kept = memo.Memo()
    first = digests("tpu_v5e", kept)
    assert len(kept) > 0
    again = digests("tpu_v5e", kept)
    assert first == again


def large():
    import random

    rng = random.Random(4)
    n = 22
    return graph("e" * n, [rng.sample(range(i), min(i, 2)) for i in range(n)])


def solved_with(limit, monkeypatch, speed):
    g = large()
    (space,) = take_apart(g, PriceBook(g, Bytes(g, 5, 4))).kinds
    space.book.work = Work(limit)
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) * speed)
    found = solve_component(0, Starts([space]), Budget(), 1e12, Stopwatch())
    return found, space


@pytest.mark.parametrize("limit", [1, 2_000, 20_000, 100_000, 10**9])
def test_counted_work_ends_a_search_at_the_same_place(monkeypatch, limit):
    one, space = solved_with(limit, monkeypatch, 1e-6)
    other, _ = solved_with(limit, monkeypatch, 100.0)
    assert (one.groups, one.bound_ps, one.note) == (other.groups, other.bound_ps, other.note)
    assert one.bound_ps <= space.total(one.groups).time_ps
    if limit == 1:
        assert one.optimal or one.note.startswith(SPENT)


def test_a_short_deadline_does_not_change_what_is_counted():
    assert limit_of(0.0) == limit_of(1.0) == limit_of(LEAST_S) < limit_of(2 * LEAST_S)
    assert limit_of(LEAST_S) <= LEAST_S * 1e6 / 2, "a machine half as fast comes to the same end"
