"""Timings that are repeated until they agree: quiet, noisy, drifting and disturbed machines, by a clock of
the test's own."""

import itertools
import math
import random

import pytest

from costmodel.timing import (
    AGREEMENT,
    MOST_BATCHES,
    ROUNDS,
    Figure,
    Timing,
    difference,
    duration_ps,
    rate,
    settle,
    waited_s,
)


class Machine:
    """Programs that take a time each, by a clock that nothing else moves."""

    def __init__(self, **times):
        self.now = self.waited = 0.0
        self.counts = dict.fromkeys(times, 0)
        self.programs = {name: self._program(name, iter(values)) for name, values in times.items()}

    def _program(self, name, values):
        def sample():
            value = next(values)
            if isinstance(value, Exception):
                raise value
            seconds, waited = value if isinstance(value, tuple) else (value, 0.0)
            self.now += seconds if 0 < seconds < math.inf else 0.0
            self.waited += waited
            self.counts[name] += 1
            return seconds

        return sample

    def settle(self, limit_s=1e6):
        return settle(self.programs, limit_s, clock=lambda: self.now, waited=lambda: self.waited)


def test_a_quiet_machine_needs_three_batches():
    machine = Machine(a=itertools.repeat(2.0), b=itertools.cycle([1.0, 1.01, 1.02]))
    found = machine.settle()
    assert found["a"].seconds == 2.0
    assert found["b"].seconds == 1.0
    assert all(timing.is_settled and not timing.problem for timing in found.values())
    assert machine.counts == {"a": 3 * ROUNDS, "b": 3 * ROUNDS}


def test_what_has_settled_is_not_sampled_again():
    slow_to_agree = [1.0] * ROUNDS + [2.0] * ROUNDS + [3.0] * ROUNDS + [1.0] * 2 * ROUNDS
    machine = Machine(a=itertools.repeat(2.0), b=slow_to_agree)
    assert machine.settle()["b"].seconds == 1.0
    assert machine.counts == {"a": 3 * ROUNDS, "b": 5 * ROUNDS}


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_only_adds_settles_on_what_the_machine_can_do(seed):
    """A passing load lengthens most samples, by up to ten times."""
    rng = random.Random(seed)
    noisy = (1.0 if rng.random() < 0.2 else rng.uniform(1.0, 10.0) for _ in itertools.count())
    timing = Machine(a=noisy).settle()["a"]
    assert timing.is_settled
    assert 1.0 <= timing.seconds <= 1 + AGREEMENT


def test_noise_in_which_no_three_batches_agree_settles_nothing():
    machine = Machine(a=(1.25**-n for n in itertools.count()))
    timing = machine.settle()["a"]
    assert not timing.is_settled
    assert "differ by" in timing.problem
    assert machine.counts["a"] == MOST_BATCHES * ROUNDS


@pytest.mark.parametrize("factor", [0.95, 1.0 / 1.5, 0.5])
def test_a_machine_that_becomes_faster_is_not_settled_before_it_stays(factor):
    """A load that goes away sample by sample, and is gone after 60 of them."""
    timing = Machine(a=(factor ** min(n, 60) for n in itertools.count())).settle()["a"]
    assert timing.is_settled
    assert timing.seconds == factor**60


def test_a_machine_that_becomes_slower_and_slower_is_not_settled():
    assert not Machine(a=(1.1**n for n in itertools.count())).settle()["a"].is_settled


def test_one_time_that_is_too_short_settles_nothing():
    """A glitch of the clock is the fastest, and nothing agrees with it."""
    timing = Machine(a=itertools.chain([0.001], itertools.repeat(1.0))).settle()["a"]
    assert not timing.is_settled


def test_a_steady_load_settles_nothing_however_well_its_samples_agree():
    """Seven processes more on the core: every sample takes eight times as long, and waits in between."""
    machine = Machine(a=itertools.repeat((8.0, 7.0)))
    timing = machine.settle()["a"]
    assert not timing.is_settled
    assert timing.samples == timing.disturbed == MOST_BATCHES * ROUNDS
    assert "other processes had the cores in 120 of 120 samples" in timing.problem


def test_undisturbed_samples_between_disturbed_ones_count():
    machine = Machine(a=itertools.cycle([(8.0, 7.0), (9.0, 8.0), (1.0, 0.01), (7.0, 6.0)]))
    timing = machine.settle()["a"]
    assert timing.is_settled
    assert timing.seconds == 1.0


@pytest.mark.parametrize("limit_s", [0.0, 0.5, 1.0, 7.0, 100.0])
def test_it_ends_in_time_but_for_one_sample(limit_s):
    machine = Machine(a=(10 * 1.25**-n for n in itertools.count()), b=itertools.repeat(3.0))
    found = machine.settle(limit_s)
    assert machine.now <= limit_s + 10
    assert not found["a"].is_settled
    if not limit_s:
        assert machine.counts == {"a": 0, "b": 0}
        assert "0 of 3 batches" in found["b"].problem


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_is_a_failure(value):
    machine = Machine(a=itertools.chain([1.0], itertools.repeat(value)), b=itertools.repeat(1.0))
    found = machine.settle()
    assert "the clock gave" in found["a"].problem
    assert machine.counts["a"] == 2
    assert found["b"].is_settled


def test_a_program_that_fails_later_is_not_sampled_again_and_says_why():
    machine = Machine(a=[1.0, 1.0, MemoryError("no room")], b=itertools.repeat(1.0))
    found = machine.settle()
    assert found["a"].problem == "MemoryError: no room"
    assert found["b"].is_settled


def test_rates_and_differences_carry_the_problem_of_their_timings():
    quiet, alone = Timing((1.0, 1.02, 1.05)), Timing((1.0,))
    assert rate(quiet, 10).value == 10
    assert rate(quiet, 10).spread == pytest.approx(0.05)
    for figure in (rate(alone, 10), duration_ps(alone), difference(duration_ps(alone), duration_ps(quiet))):
        assert "1 of 3 batches" in figure.problem
        assert math.isnan(figure.value)


@pytest.mark.parametrize(
    ("more", "less", "value"), [(10.0, 2.0, 4.0), (2.0, 2.0, None), (2.0, 10.0, None), (2.1, 2.0, None)]
)
def test_a_difference_within_the_noise_is_no_measurement(more, less, value):
    figure = difference(Figure(more, 0.05), Figure(less, 0.05), parts=2)
    if value is None:
        assert "no further apart" in figure.problem
    else:
        assert figure.value == value
        assert figure.spread == pytest.approx(0.6 / 8)


def test_waiting_only_grows():
    before = waited_s()
    assert 0 <= before <= waited_s()
