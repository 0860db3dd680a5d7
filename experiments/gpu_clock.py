"""Measure time on the device: durations of kernels from the driver (CUPTI, CUDA events), or else the
wall-clock time of queued calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

Clock = Callable[[], float]
"""Runs one program a few times; returns seconds a run."""

_QUEUED_S = 0.01
"""As many calls are queued as take this long: launching one takes 20 us, hidden behind the others."""
_MOST_CALLS = 100
_RUNS = 5
"""Runs in one sample of CUPTI's."""


def cupti_works(call: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether CUPTI tells the durations of kernels here."""
    try:
        from jax.experimental.mosaic.gpu import profiler

        return bool(profiler.measure(call)(*args)[1])
    except Exception:  # No GPU, no CUPTI, or no right to use it.
        return False


def by_cupti(call: Callable[..., Any], args: tuple[Any, ...]) -> Clock:
    """The sum of the durations of a compiled program's kernels: the median of a few runs."""
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.measure(call, iterations=_RUNS)  # type: ignore[arg-type]

    def clock() -> float:
        times_ms = measured(*args)[1]
        if not times_ms:
            raise RuntimeError("CUPTI has seen no kernel")
        return statistics.median(times_ms) / 1e3

    return clock


def kernels_by_cupti(call: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, float]]:
    """Each kernel of one run, and its microseconds."""
    from jax.experimental.mosaic.gpu import profiler

    kernels: Any = profiler.measure(call, aggregate=False)(*args)[1]
    return [(str(name), 1e3 * ms) for name, ms in kernels or ()]


def by_queue(call: Callable[..., Any], args: tuple[Any, ...]) -> Clock:
    """Wall-clock time of a run, of many queued at once."""
    jax.block_until_ready(call(*args))
    started = time.perf_counter()
    jax.block_until_ready(call(*args))
    count = min(max(1, round(_QUEUED_S / (time.perf_counter() - started))), _MOST_CALLS)

    def clock() -> float:
        started = time.perf_counter()
        for _ in range(count):
            result = call(*args)  # one at a time is kept: memory is that of one run
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / count

    return clock


def of_torch(torch: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> Clock:
    """CUDA events around replays of a CUDA graph of the program; around queued calls of it where it
    cannot be captured. ``call`` is run first, so that it is compiled."""
    for _ in range(3):
        call(*args)
    torch.cuda.synchronize()

    def timed(run: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    def plain() -> Any:
        return call(*args)

    run = plain
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            plain()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plain()
        run = graph.replay
    except Exception:  # What cannot be captured runs all the same.
        torch.cuda.synchronize()
    once = timed(run, 2)
    count = min(max(1, round(_QUEUED_S / max(once, 1e-6))), _MOST_CALLS)
    return lambda: timed(run, count)
