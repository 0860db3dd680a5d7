"""A program's plan is the same on a busy machine and an idle one, for any hash seed, and whatever is
remembered; where the deadline or a limit of counted work cuts it short, it says so."""

import os
import random
import subprocess
import sys
import time

import pytest

from fuseplan.pipeline import plan_function
from fuseplan.plan.options import DEFAULT_DEADLINE_S
from fuseplan.planners import solver
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search import cache
from fuseplan.search.component import solve_component
from fuseplan.search.grouping import Budget, decompose
from fuseplan.search.heuristic_plans import HeuristicPlans
from fuseplan.settings import make_options
from fuseplan.support import work
from fuseplan.support.errors import MemoryLimitError
from fuseplan.support.work import LEAST_S, Limit, StageTimer, Work, first_reached, limit_of, unlimited
from fuseplan.workloads import get_workload
from tests.helpers.cpus import SERVER_CPU
from tests.helpers.plan_process import PROGRAMS, digest, digests, planned, planned_together
from tests.helpers.small_graphs import Bytes, graph

pytestmark = pytest.mark.one_python

CASES = [
    ("layernorm_grad", SERVER_CPU),
    ("adam_update", "h200"),
    ("gpt2_block", "tpu_v5e"),
    ("norms", "h200"),
    ("mlp", "h200"),
    ("attention", SERVER_CPU),
]
"""By groups, by packs, with values computed again, and within a limit of memory."""

IDS = [f"{name}-{getattr(device, 'name', device)}" for name, device in CASES]


def in_process(times, seed, device):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu", "FUSEPLAN_CACHE": ""}
    command = [sys.executable, "-m", "tests.helpers.plan_process", str(times), device]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_busy_machine_and_another_hash_seed_plan_the_same():
    idle, busy = in_process(1.0, 1, "h200"), in_process(3.0, 2, "h200")
    assert len(idle.splitlines()) == len(PROGRAMS) + 1
    assert idle == busy


@pytest.mark.slow
def test_what_is_remembered_is_what_would_be_found():
    kept = cache.SolutionCache()
    first = digests("tpu_v5e", kept)
    assert len(kept) > 0
    again = digests("tpu_v5e", kept)
    assert first == again


class Clock:
    """Stands still for so many looks, then jumps far ahead, and goes on."""

    def __init__(self, looks):
        self.looks, self.looked = looks, 0

    def __call__(self):
        self.looked += 1
        return 0.0 if self.looked <= self.looks else 1e6 + 1e-3 * self.looked


def says(answer):
    """Which limit cut a plan short, as it says itself."""
    if isinstance(answer, MemoryLimitError):
        return answer.ended_by
    told = [limit for limit in Limit for note in answer.notes if str(note).startswith(limit.value)]
    return first_reached(told)


def assert_cut_is_told(monkeypatch, plan, n_cuts):
    """The deadline at some looks at the clock: the plan is as without, or says that it is not."""

    def cut(looks):
        clock = Clock(looks)
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", clock)
            return plan(), clock.looked

    whole, n_looks = cut(10**9)
    assert says(whole) != Limit.DEADLINE
    early, late = range(min(n_cuts // 2, n_looks)), range(max(n_looks - 3, 0), n_looks)
    anywhere = random.Random(0).sample(range(n_looks), min(n_cuts // 2, n_looks))
    told = 0
    for looks in sorted({*early, *anywhere, *late}):
        answer, _ = cut(looks)
        told += says(answer) == Limit.DEADLINE
        assert digest(answer) == digest(whole) or says(answer) == Limit.DEADLINE, f"cut at look {looks}"
    assert told > 0


@pytest.mark.parametrize(("name", "device"), CASES, ids=IDS)
def test_a_plan_that_the_clock_cut_says_so(monkeypatch, name, device):
    assert_cut_is_told(monkeypatch, lambda: planned(name, device), n_cuts=8)


def test_components_that_the_clock_left_apart_say_so(monkeypatch):
    assert_cut_is_told(monkeypatch, planned_together, n_cuts=200)


@pytest.mark.parametrize(("name", "device"), CASES, ids=IDS)
def test_every_deadline_that_lets_the_search_end_gives_one_plan(monkeypatch, name, device):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    plans = [planned(name, device, deadline_s) for deadline_s in (1.0, LEAST_S, 60.0)]
    assert not any(map(says, plans))
    assert len(set(map(digest, plans))) == 1


@pytest.mark.parametrize(("name", "device"), CASES[:-1], ids=IDS[:-1])
def test_a_plan_that_counted_work_cut_says_so_and_is_the_same_with_a_memo(monkeypatch, name, device):
    kept = cache.SolutionCache()
    whole = planned(name, device, kept=kept)
    assert not says(whole)
    told = 0
    for limit in (1, 30_000):
        with monkeypatch.context() as patch:
            patch.setattr(work, "UNITS_PER_S", work.SHARE * limit / LEAST_S)
            assert limit_of(LEAST_S) == limit
            small = cache.SolutionCache()
            cut = planned(name, device, kept=small)
            # What a longer search has found is not known before a short one would find it.
            assert digest(planned(name, device, kept=kept)) == digest(cut)
        told += says(cut) == Limit.WORK
        assert digest(cut) == digest(whole) or says(cut) == Limit.WORK, f"limit {limit}"
        # Nor does a longer one take for found what a short one was left with.
        assert digest(planned(name, device, kept=small)) == digest(whole)
        kept = cache.SolutionCache()
        planned(name, device, kept=kept)
    assert told > 0


def test_components_are_solved_together_by_counted_work():
    whole, told = planned_together(), 0
    assert whole.proof.joint is not None
    for limit in (1, 500, 2_000, 5_000, 10_000, 20_000):
        cut = planned_together(Budget(work=Work(limit)))
        told += says(cut) == Limit.WORK
        assert digest(cut) == digest(whole) or says(cut) == Limit.WORK
    assert told > 0


def large():
    rng = random.Random(4)
    n = 22
    return graph("e" * n, [rng.sample(range(i), min(i, 2)) for i in range(n)])


def solved_with(limit, monkeypatch, speed):
    g = large()
    (space,) = decompose(g, PriceBook(g, Bytes(g, 5, 4))).spaces
    space.book.work = Work(limit)
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) * speed)
    found = solve_component(0, HeuristicPlans([space]), Budget(), 1e12, StageTimer())
    return found, space


@pytest.mark.parametrize("limit", [1, 2_000, 20_000, 100_000, 10**9])
def test_counted_work_ends_a_search_at_the_same_place(monkeypatch, limit):
    one, space = solved_with(limit, monkeypatch, 1e-6)
    other, _ = solved_with(limit, monkeypatch, 100.0)
    assert (one.groups, one.bound_ps, one.note) == (other.groups, other.bound_ps, other.note)
    assert one.bound_ps <= space.total(one.groups).time_ps
    if limit == 1:
        assert one.optimal or one.note.limit is Limit.WORK


def test_the_searches_of_one_planning_share_a_limit(monkeypatch):
    counted = []

    class Recorded(solver._Solver):
        def grouping(self, found):
            counted.append((self.book.work, self.book.work.spent))
            return super().grouping(found)

    monkeypatch.setattr(solver, "_Solver", Recorded)
    f, args = get_workload("softmax").build()
    plan_function(f, args, {}, make_options("h200"))
    works, spent = zip(*counted, strict=True)
    assert len(works) > 1
    assert len(set(map(id, works))) == 1
    assert works[0].limit == limit_of(DEFAULT_DEADLINE_S), "each search gave back what it left"
    assert spent[0] > 0
    assert list(spent) == sorted(set(spent))


def test_a_part_of_the_work_is_a_part_of_what_is_left():
    some = Work(100, spent=20)
    with some.within(0.5):
        some.spend(30)
        assert (some.limit, some.left, some.is_spent) == (60, 10, False)
        with some.within(0.5):
            some.spend(5)
            assert some.is_spent
        assert not some.is_spent
    assert (some.limit, some.left) == (100, 45)
    some.spend(50)
    assert some.left == 0, "what was overdrawn is not owed"


def test_large_components_share_the_work_and_leave_what_they_do_not_need(monkeypatch):
    sizes, limit, lefts = (20, 3, 22, 17), 10**9, {}

    def search(part, starts, *args):
        space, work = starts.spaces[part], starts.spaces[part].book.work
        lefts[space.n] = work.left / limit
        if space.n == 20:
            work.spend(work.left)
        return solve_component(part, starts, *args)

    monkeypatch.setattr(solver, "solve_component", search)
    first = {sum(sizes[:k]) for k in range(len(sizes))}
    chains = graph("e" * sum(sizes), [[] if i in first else [i - 1] for i in range(sum(sizes))])
    solver.plan_groups(chains, Bytes(chains, 5, 4), Budget(work=Work(limit)))
    assert list(lefts) == sorted(sizes)
    # All groups of three operations are listed, whatever that takes.
    assert list(lefts.values()) == pytest.approx([1, 1 / 3, 1 / 2, 1 / 2], rel=1e-3)


def test_a_short_deadline_does_not_change_what_is_counted():
    assert limit_of(0.0) == limit_of(1.0) == limit_of(LEAST_S) < limit_of(2 * LEAST_S)
    assert limit_of(LEAST_S) <= LEAST_S * 1e6 / 4, "at 2 µs a unit, on a machine half as fast"


def test_what_ended_first_is_said():
    assert (Work(0).is_over, Work(0).ended_by) == (True, Limit.WORK)
    late = Work(10, expires_at=time.monotonic())
    assert (late.is_over, late.is_spent, late.ended_by) == (True, False, Limit.DEADLINE)
    assert not unlimited().is_over
    assert first_reached([None, Limit.WORK]) is Limit.WORK
    assert first_reached([Limit.WORK, Limit.DEADLINE]) is Limit.DEADLINE
    assert first_reached([]) is first_reached([None]) is None
