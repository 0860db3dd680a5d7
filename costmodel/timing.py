"""Time programs interleaved, so that the load of the machine affects all of them equally.

``in_turns`` compares programs, by samples side by side. ``settle`` repeats timings until they agree, and
``Figure`` derives a device's rates from them.

``settle`` takes batches of ``ROUNDS`` samples of each program; the time of a batch is its fastest sample,
since another process only adds to a time. A program's time is *settled* when its three fastest batches agree
within ``AGREEMENT``: one lucky or disturbed batch settles nothing, and neither does a machine that becomes
faster from batch to batch. A steady load makes every sample slow, and all of them agree. A sample therefore
counts only if the threads of this process had a core whenever they could run, but for ``AGREEMENT`` of its
time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROUNDS = 3
AGREEING = 3
"""Batches that have to agree."""

AGREEMENT = 0.10
"""How much longer than the fastest the slowest of them may take, as a part of it."""

MOST_BATCHES = 40
"""Batches after which a program that has not settled is given up: an end that needs no clock."""


def repeated(run: Callable[[], object], sample_s: float) -> Callable[[], float]:
    """A function that returns the seconds of one ``run``, as the mean of so many that they take about
    ``sample_s`` seconds. ``run`` is called once to tell how many; it should be warm by then."""
    count = max(1, math.ceil(sample_s / max(_seconds(run, 1), 1e-9)))
    return lambda: _seconds(run, count)


def _seconds(run: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


def in_turns(
    programs: Sequence[Callable[[], float]], enough: Callable[[list[list[float]]], bool]
) -> list[list[float]]:
    """The samples of each program, in seconds, taken one program after the other until there are ``enough``.

    Every other round is in reverse, since a program may find warmer caches if it runs second.
    """
    samples: list[list[float]] = [[] for _ in programs]
    order = list(range(len(programs)))
    while not enough(samples):
        for i in order:
            samples[i].append(programs[i]())
        order.reverse()
    return samples


def rounds(count: int) -> Callable[[list[list[float]]], bool]:
    """Enough for ``in_turns``: ``count`` samples of each program."""
    return lambda samples: len(samples[0]) >= count


@dataclass(frozen=True, slots=True)
class Timing:
    """The fastest time of each batch of one program, in seconds, the fastest batch first."""

    batches_s: tuple[float, ...] = ()
    failure: str = ""
    """Why the program could not be run, or run again."""
    samples: int = 0
    disturbed: int = 0
    """Samples that do not count because other processes had the cores."""

    @property
    def seconds(self) -> float:
        """The fastest time; infinite where there is none."""
        return self.batches_s[0] if self.batches_s else math.inf

    @property
    def spread(self) -> float:
        """How much longer the third fastest batch took than the fastest, as a part of it."""
        if len(self.batches_s) < AGREEING:
            return math.inf
        return self.batches_s[AGREEING - 1] / self.batches_s[0] - 1

    @property
    def is_settled(self) -> bool:
        """Whether the fastest batches agree."""
        return self.spread <= AGREEMENT

    @property
    def problem(self) -> str:
        """Why the time is not settled; empty where it is."""
        if self.is_settled:
            return ""
        if self.failure:
            return self.failure
        if len(self.batches_s) < AGREEING:
            found = f"{len(self.batches_s)} of {AGREEING} batches of samples were made in the time"
            busy = f"; other processes had the cores in {self.disturbed} of {self.samples} samples"
            return found + (busy if self.disturbed else "")
        return (
            f"the {AGREEING} fastest of {len(self.batches_s)} batches of samples differ by "
            f"{100 * self.spread:.0f} %, more than {100 * AGREEMENT:.0f} %"
        )


def waited_s() -> float:
    """Seconds that the threads of this process have been ready to run and had no core, so far; 0 where
    the system does not tell (it is Linux that does)."""
    nanoseconds = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end while they are read
            nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


def settle(
    programs: Mapping[str, Callable[[], float]],
    limit_s: float,
    clock: Callable[[], float] = lambda: time.monotonic(),
    waited: Callable[[], float] = waited_s,
) -> dict[str, Timing]:
    """Sample each program until its time is settled, or ``limit_s`` seconds or ``MOST_BATCHES`` are over.

    A program returns the seconds that one sample of it took. One that raises is not sampled again. The
    end of the time is looked at before each sample, so the call takes ``limit_s`` and one sample at most.
    """
    end = clock() + limit_s
    timings = {name: Timing() for name in programs}
    for _ in range(MOST_BATCHES):
        left = [name for name, known in timings.items() if not (known.is_settled or known.failure)]
        if not left:
            break
        batch = dict.fromkeys(left, math.inf)
        for _ in range(ROUNDS):
            for name in left:
                if timings[name].failure:
                    continue
                if clock() >= end:
                    return timings
                timings[name], time_s = _sampled(programs[name], timings[name], clock, waited)
                batch[name] = min(batch[name], time_s)
        for name, time_s in batch.items():
            if time_s < math.inf:
                known = timings[name]
                timings[name] = replace(known, batches_s=tuple(sorted((*known.batches_s, time_s))))
    return timings


def _sampled(
    program: Callable[[], float], known: Timing, clock: Callable[[], float], waited: Callable[[], float]
) -> tuple[Timing, float]:
    """The timing after one more sample, and that sample's time; infinite if the sample does not count."""
    start_s, waited_before_s = clock(), waited()
    try:
        time_s = program()
    except Exception as error:  # XLA's errors have no common base
        return replace(known, failure=f"{type(error).__name__}: {error}"), math.inf
    if not 0 < time_s < math.inf:
        return replace(known, failure=f"the clock gave {time_s} s"), math.inf
    is_disturbed = waited() - waited_before_s > AGREEMENT * (clock() - start_s)
    known = replace(known, samples=known.samples + 1, disturbed=known.disturbed + is_disturbed)
    return known, math.inf if is_disturbed else time_s


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that was measured, or the reason that it was not."""

    value: float
    spread: float = 0.0
    problem: str = ""

    @classmethod
    def missing(cls, problem: str) -> Figure:
        """No number, for that reason."""
        return cls(math.nan, math.inf, problem)


def rate(timing: Timing, work: float) -> Figure:
    """``work`` a second."""
    if timing.problem:
        return Figure.missing(timing.problem)
    return Figure(work / timing.seconds, timing.spread)


def duration_ps(timing: Timing) -> Figure:
    """The time in picoseconds."""
    if timing.problem:
        return Figure.missing(timing.problem)
    return Figure(1e12 * timing.seconds, timing.spread)


def difference(more: Figure, less: Figure, parts: int = 1) -> Figure:
    """One of ``parts`` equal parts of what ``more`` has and ``less`` has not. A difference that is not
    larger than the spread of the two is no measurement."""
    if problem := more.problem or less.problem:
        return Figure.missing(problem)
    found = more.value - less.value
    doubt = more.value * more.spread + less.value * less.spread
    if found <= doubt:
        return Figure.missing(
            f"{more.value:.4g} and {less.value:.4g}, of which it is the difference, "
            "are no further apart than their samples"
        )
    return Figure(found / parts, doubt / found)
