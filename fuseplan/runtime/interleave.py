"""Race: the same function compiled twice, run in turns on the same arguments."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

Side = Literal["fused", "plain"]
SIDES: tuple[Side, Side] = ("fused", "plain")
OTHER: dict[Side, Side] = {"fused": "plain", "plain": "fused"}

_LONG_RUN_S = 1.0
"""A run that takes longer is not repeated."""
_ENOUGH_S, _MOST_S, _FEWEST = 0.2, 2.0, 3
"""Rounds of one run each are repeated this long; never longer; and so often if time allows."""


class Program:
    """A compiled side, and what the compiler says of its memory on each device."""

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
        """Delete what the runs consumed of the copies: to the caller it was donated."""
        for i in self._consumed:
            self._donated[i].delete()


class RunError(Exception):
    """One side raised ``error`` while it ran; the caller's arguments are as they were."""

    def __init__(self, side: Side, error: Exception) -> None:
        super().__init__(side)
        self.side, self.error = side, error


def race(programs: dict[Side, Program], inputs: Inputs) -> tuple[dict[Side, list[float]], dict[Side, Any]]:
    """Seconds of each run, side by side in turns, and the last result of each."""
    times: dict[Side, list[float]] = {side: [] for side in SIDES}
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
    order: Sequence[Side] = SIDES
    began = time.perf_counter()
    warm = {side: run(side) for side in order}
    round_s = spent_s = time.perf_counter() - began
    while max(warm.values()) <= _LONG_RUN_S and spent_s + round_s <= _MOST_S:
        if len(times["plain"]) >= _FEWEST and spent_s >= _ENOUGH_S:
            break
        order = order[::-1]  # Fused first, then plain first: a drift hits both alike.
        for side in order:
            times[side].append(run(side))
        spent_s = time.perf_counter() - began
    for side in SIDES:
        if len(times[side]) < _FEWEST:
            times[side].append(warm[side])  # Few, slow runs: the first counts too.
    return times, results


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
    return min((f for f in (_free_of_host(), *map(_free_of_group, _GROUPS)) if f is not None), default=None)


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


def _free_of_group(names: tuple[str, str, str, str]) -> int | None:
    folder, limit, usage, cache = Path(names[0]), *names[1:]
    with contextlib.suppress(OSError, ValueError):  # Not in such a group, or one without a limit.
        used = int((folder / usage).read_text()) - _field(folder / "memory.stat", cache)
        return int((folder / limit).read_text()) - used
    return None


def _field(path: Path, name: str) -> int:
    """The number behind ``name`` in a file of lines ``name number …``; 0 without it."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(words[1]) for words in lines if words[0] == name), 0)
