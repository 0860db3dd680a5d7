"""Measure a fused function against ``jax.jit`` on the caller's own arguments, and keep the faster.

That is done once for each set of shapes. A model may misjudge; a measurement on the spot cannot, but for its
noise. Both programs are run in turns where their memory allows it. ``jax.jit`` runs a function that cannot be
measured without notice: one with side effects, or in several processes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from costmodel.timing import in_turns
from fuseplan.report.debug import report_measurement
from fuseplan.runtime.recovering import MAX_SIGNATURES, CallSignatures
from fuseplan.support import jax_compat
from fuseplan.support.errors import ConstraintError, FuseplanWarning, UnsupportedOperationError, first_line
from fuseplan.support.lru import LruCache

Side = Literal["fused", "plain"]
SIDES: tuple[Side, Side] = ("fused", "plain")
OTHER: dict[Side, Side] = {"fused": "plain", "plain": "fused"}

LONG_RUN_S = 1.0
"""A run that takes longer is not repeated."""
ENOUGH_S, _MOST_S, _FEWEST = 0.2, 2.0, 3
"""Rounds of one run each are repeated this long; never longer; and so often if time allows."""


class Program:
    """A compiled program, and its memory on each device according to the compiler."""

    def __init__(self, compiled: Any) -> None:
        self.call = compiled
        analysis = None
        with contextlib.suppress(Exception):  # Not every backend has it.
            analysis = compiled.memory_analysis()
        self.temp_bytes = None if analysis is None else int(analysis.temp_size_in_bytes)
        self.output_bytes = 0 if analysis is None else int(analysis.output_size_in_bytes)


class Inputs:
    """The dynamic arguments, given out as copies where a run would consume them."""

    def __init__(self, dynamic: Any, args_info: Any) -> None:
        self._leaves, self._tree = jax.tree.flatten(dynamic)
        donated = [info.donated for info in jax.tree.leaves(args_info)]
        # By identity, so that a buffer donated twice is refused as jax.jit refuses it.
        self._donated = {
            id(x): x for x, d in zip(self._leaves, donated, strict=True) if d and isinstance(x, jax.Array)
        }
        self._consumed: set[int] = set()

    @property
    def arrays(self) -> Iterable[jax.Array]:
        return (x for x in self._leaves if isinstance(x, jax.Array))

    @property
    def copied_bytes(self) -> int:
        return sum(x.nbytes for x in self._donated.values())

    def ready(self) -> None:
        jax.block_until_ready(self._leaves)

    @contextlib.contextmanager
    def lent(self) -> Iterator[Any]:
        """Arguments for one run: ``(args, kwargs)``."""
        copies = jax.block_until_ready({i: x.copy() for i, x in self._donated.items()})
        yield jax.tree.unflatten(self._tree, [copies.get(id(x), x) for x in self._leaves])
        self._consumed |= {i for i, x in copies.items() if x.is_deleted()}

    def donate(self) -> None:
        """Delete the arguments whose copies the runs consumed: the caller has donated them."""
        for i in self._consumed:
            self._donated[i].delete()


class RunError(Exception):
    """One side raised ``error`` while it ran; the caller's arguments are as they were."""

    def __init__(self, side: Side, error: Exception) -> None:
        super().__init__(side)
        self.side, self.error = side, error


def race(programs: dict[Side, Program], inputs: Inputs) -> tuple[dict[Side, list[float]], dict[Side, Any]]:
    """Seconds of each run, side by side in turns, and the last result of each."""
    results: dict[Side, Any] = {}

    def run(side: Side) -> float:
        results.pop(side, None)  # Before the run, so that its memory is free.
        try:
            with inputs.lent() as (args, kwargs):
                started = time.perf_counter()
                results[side] = jax.block_until_ready(programs[side].call(*args, **kwargs))
                return time.perf_counter() - started
        except Exception as error:
            raise RunError(side, error) from error

    inputs.ready()
    began = time.perf_counter()
    first_round_s = 0.0

    def enough(samples: list[list[float]]) -> bool:
        nonlocal first_round_s
        spent_s, count = time.perf_counter() - began, len(samples[0]) - 1
        if count < 0:
            return False
        first_round_s = first_round_s or spent_s
        is_long = max(times[0] for times in samples) > LONG_RUN_S or spent_s + first_round_s > _MOST_S
        return is_long or (count >= _FEWEST and spent_s >= ENOUGH_S)

    samples = in_turns([partial(run, side) for side in SIDES], enough)
    # The first run counts only where there are few, slow ones.
    skipped = int(len(samples[0]) > _FEWEST)
    return {side: times[skipped:] for side, times in zip(SIDES, samples, strict=True)}, results


def too_large(fused: Program, plain: Program, inputs: Inputs) -> tuple[Side, str] | None:
    """Which side to run, untimed, where both do not fit in memory.

    While one side runs, the last result of the other is held; arguments are there already.
    """
    devices: set[Any] = {d for x in inputs.arrays for d in x.sharding.device_set} or {jax.devices()[0]}
    shared = len(devices) if next(iter(devices)).platform == "cpu" else 1
    needs = {
        side: shared * ((program.temp_bytes or 0) + fused.output_bytes + plain.output_bytes)
        + inputs.copied_bytes
        for side, program in zip(SIDES, (fused, plain), strict=True)
    }
    free = min((f for f in map(free_bytes, devices) if f is not None), default=None)
    if free is None or max(needs.values()) <= free:
        return None
    kept: Side = "fused" if needs["fused"] <= needs["plain"] else "plain"
    need = needs[OTHER[kept]]
    return kept, f"the {OTHER[kept]} program needs {need / 1e9:.3g} GB of {free / 1e9:.3g} GB free: not run"


def free_bytes(device: Any) -> int | None:
    """Bytes that can be had on a device now; None where nothing says so."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else int(limit - stats.get("bytes_in_use", 0))
    return min((f for f in (_free_of_host(), *map(free_of_group, _GROUPS)) if f is not None), default=None)


def _free_of_host() -> int | None:
    with contextlib.suppress(OSError):
        return _field(Path("/proc/meminfo"), "MemAvailable:") * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):  # No Linux.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


# Where a container's limit stands: folder, limit, usage, and of that the cache that can go.
_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_of_group(names: tuple[str, str, str, str]) -> int | None:
    """Bytes left to a control group: an entry of ``_GROUPS`` names its files. None without a limit."""
    folder, limit, usage, cache = Path(names[0]), *names[1:]
    with contextlib.suppress(OSError, ValueError):  # Not in such a group, or one without a limit.
        used = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
        return int((folder / limit).read_text()) - used
    return None


def _field(path: Path, name: str) -> int:
    """The number behind ``name`` in a file of lines ``name number …``; 0 without it."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)


_TIE = 0.03
"""Medians this close, relative to the smaller, are told apart by noise alone."""

# One measurement at a time, of any function: two would slow each other.
_clock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of a measurement at one set of shapes, and the program that runs from then on.

    Times are medians in milliseconds, None where a side was not timed; temporary bytes are
    the compiler's own figure, None where it gives none.
    """

    kept: Side
    reason: str
    fused_ms: float | None = None
    plain_ms: float | None = None
    fused_temp_bytes: int | None = None
    plain_temp_bytes: int | None = None

    def __str__(self) -> str:
        kept = "the fused function" if self.kept == "fused" else "jax.jit's"
        if self.fused_ms is None or self.plain_ms is None:
            return f"kept {kept}: {self.reason}"
        return f"fused {self.fused_ms:.3g} ms, jax.jit {self.plain_ms:.3g} ms; kept {kept}: {self.reason}"


def decide(
    fused_ms: float, plain_ms: float, fused_temp_bytes: int | None, plain_temp_bytes: int | None
) -> Measurement:
    """The faster side; within 3 % the one with less temporary memory, and else ``jax.jit``'s.

    Example:
        >>> decide(1.0, 2.0, 0, 0).kept, decide(1.0, 1.02, 8, 4).kept, decide(1.02, 1.0, 4, 8).kept
        ('fused', 'plain', 'fused')
    """
    kept: Side = "fused" if fused_ms < plain_ms else "plain"
    low, high = sorted((fused_ms, plain_ms))
    reason = f"{high / low:.2f}× as fast" if low else "faster"
    if high - low <= _TIE * low:
        spare = 0
        if fused_temp_bytes is not None and plain_temp_bytes is not None:
            spare = plain_temp_bytes - fused_temp_bytes
        kept = "fused" if spare > 0 else "plain"
        reason = f"as fast, with {'less' if spare else 'as much'} temporary memory"
    return Measurement(kept, reason, fused_ms, plain_ms, fused_temp_bytes, plain_temp_bytes)


class Choices:
    """Calls the better of two jitted functions, ``fused`` and ``plain``, which give the same
    results; measures them first at each new set of shapes, dtypes, shardings and statics."""

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        fused: Any,
        plain: Any,
        options: dict[str, Any],
        are_same: Callable[[Any], bool],
    ) -> None:
        """``are_same`` says of a jaxpr whether the fused program is the plain one."""
        self.fused, self.plain, self._are_same = fused, plain, are_same
        self._name = name
        self._calls = CallSignatures(f, options)
        self._measurements: LruCache[Hashable, Measurement] = LruCache(MAX_SIGNATURES)
        self._sides: set[Side] = set()
        """The sides that run; both if a call could not be measured."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            key = self._calls.key(args, kwargs)
            measurement = self._measurements.get(key)
        except (TypeError, ValueError):  # No key, no cache: jax.jit raises the error.
            return self.fused(*args, **kwargs)
        if measurement is not None:
            return (self.fused if measurement.kept == "fused" else self.plain)(*args, **kwargs)
        # Never wait: the measurement that holds the clock may wait for a callback into this function.
        if _is_staging(args, kwargs) or not _clock.acquire(blocking=False):
            self._sides.update(SIDES)
            return self.fused(*args, **kwargs)
        try:
            measurement, result = self._measure(args, kwargs)
            self._measurements.update([(key, measurement)])
            self._sides.add(measurement.kept)
        finally:
            _clock.release()
        report_measurement(self._name, measurement)
        return result

    def measured(self, args: Any, kwargs: Any) -> Measurement | None:
        """The measurement at arguments like these, if there was one."""
        try:
            return self._measurements.get(self._calls.key(args, kwargs))
        except (TypeError, ValueError):  # As in a call: no key.
            return None

    @property
    def settled(self) -> Side | None:
        """The side that runs at the shapes of all earlier calls, if it is one."""
        (*sides,) = self._sides
        return sides[0] if len(sides) == 1 else None

    def clear(self) -> None:
        """Forget, and measure anew."""
        self._measurements.clear()
        self._sides.clear()

    def _measure(self, args: Any, kwargs: Any) -> tuple[Measurement, Any]:
        jitted = {"fused": self.fused, "plain": self.plain}

        def settle(measurement: Measurement) -> tuple[Measurement, Any]:
            return measurement, jitted[measurement.kept](*args, **kwargs)

        def without(side: Side, error: Exception) -> tuple[Measurement, Any]:
            said = first_line(error)
            other = OTHER[side]
            try:
                settled = settle(Measurement(other, f"the {side} program failed: {said}"))
                jax.block_until_ready(settled[1])
            except Exception as second:
                # Both fail, so it is the function that does: jax.jit's error is the one expected.
                raise (error if side == "plain" else second) from None
            text = f"{self._name}: the {side} program failed, so the {other} one is used. It said: {said}"
            warnings.warn(text, FuseplanWarning, stacklevel=5)
            return settled

        # The function's own errors come from here, as jax.jit raises them.
        traced = self.plain.trace(*args, **kwargs)
        if traced.jaxpr.effects:
            return settle(Measurement("plain", "it has side effects, so it is run once, by jax.jit"))
        if self._are_same(traced.jaxpr):
            return settle(Measurement("plain", "it is jax.jit's own program: no tiled loop could gain"))
        if jax.process_count() > 1:
            return settle(Measurement("plain", "several processes must agree, so it is not timed"))
        dynamic = self._calls.split(args, kwargs)[1:]
        if len(jax.tree.leaves(dynamic)) != len(jax.tree.leaves(traced.args_info)):
            # Versions of JAX differ in the meaning of a negative position where defaults are left out.
            return settle(Measurement("plain", "which arguments are static is unclear, so it is not timed"))
        inputs = Inputs(dynamic, traced.args_info)
        programs: dict[Side, Program] = {}
        for side in SIDES:
            try:
                programs[side] = Program(jitted[side].lower(*args, **kwargs).compile())
            except (UnsupportedOperationError, ConstraintError):
                raise  # by strict=True, or an impossible constraint
            except Exception as error:
                return without(side, error)
        fused, plain = programs["fused"], programs["plain"]
        refused = too_large(fused, plain, inputs)
        if refused is not None:
            kept, reason = refused
            return settle(Measurement(kept, reason, None, None, fused.temp_bytes, plain.temp_bytes))
        try:
            times, results = race(programs, inputs)
        except RunError as failure:
            return without(failure.side, failure.error)
        inputs.donate()
        medians = [1e3 * statistics.median(times[side]) for side in SIDES]
        measurement = decide(medians[0], medians[1], fused.temp_bytes, plain.temp_bytes)
        return measurement, results[measurement.kept]


def _is_staging(args: Any, kwargs: Any) -> bool:
    """Whether a call is now recorded (inside ``jax.jit``), transformed, or interpreted,
    instead of compiled and run."""
    # An operation without operands is treated like any other, and transfers nothing.
    values = (jax.lax.iota("int32", 1), *jax.tree.leaves((args, kwargs)))
    return jax_compat.is_jit_disabled() or any(isinstance(x, jax.core.Tracer) for x in values)
