"""Measure the rates that XLA reaches on this machine's CPU, once for each version of JAX.

``costmodel.calibrate`` gives the sizes that the operating system reports, and keeps the measurements.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel import calibrate as by_numpy
from costmodel.calibrate import (
    ASKED_FOR_S,
    FIRST_USE_S,
    MATRIX,
    Calibration,
    cache_path,
    cached,
    described_cpu,
    measured_cpu,
    recalibrated,
)
from costmodel.device import DeviceSpec
from costmodel.timing import Figure, Timing, difference, duration_ps, rate, settle

MADE_BY = f"jax-{jax.__version__}"
"""Part of the cache file's key and name, as each version of JAX has its own XLA."""

_COMPILE_SHARE = 0.6
"""The share of the time limit after which no further program is compiled; the rest is for samples."""

_LEAST_S = 0.004
"""The least length of a sample, far above the noise of the clock and the start of a program."""

_CHAIN = 8
"""Multiply-adds per element: enough to hide its load and store, few enough for one fused group."""

_TINY = 8
"""The side of a dot that takes next to no work and still is a kernel; XLA fuses a 2x2 one into its
neighbours."""
_MORE = 8

_TILE, _TILES = 16, 256
_ROW, _SHORT_ROW = 1024, 4
MEMORY_BYTES = (64 << 20, 512 << 20)
"""The least and the greatest size of the array that measures main memory: larger than most caches, and
fast."""

_FRESH_BYTES = 64 << 20
"""The size of an array that is returned to the system when freed: twice the largest threshold of glibc."""

_lock = threading.Lock()


def local_cpu() -> DeviceSpec:
    """This machine's CPU with the rates of XLA: from memory, else from the cache file, else measured in at
    most ``FIRST_USE_S`` seconds and written. ``recalibrate_cpu`` measures again.

    ``DeviceSpec.assumed`` names the figures that could not be measured. Without a CPU backend
    (``JAX_PLATFORMS=cuda``) the rates are NumPy's. Never raises.

    Example:
        >>> local_cpu().platform
        'cpu'
    """

    def announced(limit_s: float) -> DeviceSpec:
        if sys.stderr is not None and sys.stderr.isatty():
            print("fuseplan: measuring this CPU, once; `fuseplan calibrate` does it anew", file=sys.stderr)
        return measure(limit_s)

    with _lock:  # two measurements at a time would disturb each other
        return cached(MADE_BY, announced) if _has_backend() else by_numpy.cached_cpu()


_described_cpu = functools.cache(described_cpu)


def unmeasured_cpu() -> DeviceSpec:
    """This machine's CPU without a measurement: the stored figures, or else the operating system's
    description with assumed rates, which ``measured`` replaces."""
    return by_numpy.known(MADE_BY if _has_backend() else "numpy") or _described_cpu()


def measured(device: DeviceSpec) -> DeviceSpec:
    """``local_cpu()`` if ``device`` is the unmeasured device of ``unmeasured_cpu``, else ``device``. An equal
    ``DeviceSpec`` of the user is returned unchanged."""
    return local_cpu() if device is _described_cpu() else device


def recalibrate_cpu(limit_s: float = ASKED_FOR_S) -> Calibration:
    """Measure this CPU again. A figure whose timings do not settle within ``limit_s`` seconds keeps its
    earlier measured value."""
    with _lock:
        if not _has_backend():
            return recalibrated("numpy", by_numpy.measure, limit_s)
        return recalibrated(MADE_BY, measure, limit_s)


def cache_file() -> Path:
    """The file with the figures of ``local_cpu``."""
    return cache_path(MADE_BY) if _has_backend() else cache_path()


def _has_backend() -> bool:
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


def measure(limit_s: float = FIRST_USE_S) -> DeviceSpec:
    """Measure the rates of XLA on this CPU, in ``limit_s`` seconds and at most one compilation or sample
    more; about seven seconds on an idle machine of two cores. Figures that do not settle are assumed.

    Limits: the rates are those of a loop in its steady state, in place. The first touch of memory, which the
    system clears and maps, is measured by itself as ``fresh_bytes_per_s``.
    """
    # In another thread, which does not inherit the trace, the precision and the default device of the caller.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, described_cpu(), limit_s).result()


def _measure(known: DeviceSpec, limit_s: float) -> DeviceSpec:
    end = time.monotonic() + limit_s
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        loops, failures = _compiled(_programs(known), limit_s)
        timings = settle({name: loop.sample for name, loop in loops.items()}, end - time.monotonic())
    works = {name: loop.work for name, loop in loops.items()}
    return measured_cpu(known, figures_of(failures | timings, works), HOW_MEASURED, f"XLA of {MADE_BY}")


_DOT = f"{_TINY}x{_TINY} dot"
_IN_L2 = "in half of the second-level caches"
_MOVED = "x*0.5+1 in place, read + written,"
HOW_MEASURED = {
    "hbm_bytes_per_s": f"{_MOVED} past the caches",
    "cache_bytes_per_s": f"{_MOVED} in half of the last-level cache",
    "private_cache_bytes_per_s": f"{_MOVED} {_IN_L2}",
    f"{MATRIX}.float32": "dots of 1024x1024x1024",
    f"{MATRIX}.bfloat16": "dots of 512x512x512",
    f"{MATRIX}.float16": "dots of 512x512x512",
    f"{MATRIX}.float64": "dots of 1024x1024x1024",
    "vector_flops_per_s": f"{_CHAIN} fused multiply-adds, two flops each, {_IN_L2}",
    "transcendental_per_s": f"exp in float32, {_IN_L2}",
    "reduction_per_s": f"sums of rows of {_ROW} float32, {_IN_L2}",
    "reduction_row_ps": f"sums of rows of {_SHORT_ROW} float32, {_IN_L2}, what a row takes longer than there",
    "fresh_bytes_per_s": f"x+1 of {_FRESH_BYTES >> 20} MiB into new memory, what it takes longer than in "
    "place",
    "launch_ps": f"one {_DOT} more in a loop",
    "step_ps": f"a loop that copies one {_TILE}x{_TILE} tile a turn, without the {_DOT} beside",
}
"""For each figure, a description of the timed program."""

_PROGRAM_OF = {
    "hbm_bytes_per_s": "memory",
    "cache_bytes_per_s": "shared",
    "private_cache_bytes_per_s": "private",
    "vector_flops_per_s": "vector",
    "transcendental_per_s": "exp",
    "reduction_per_s": "sums",
}
"""For each figure that is work over time, the key of its program in ``_programs``."""


def figures_of(timings: dict[str, Timing], works: dict[str, float]) -> dict[str, Figure]:
    """Compute the figures from the times and the work of the programs."""

    def of(name: str) -> Timing:
        return timings.get(name, Timing(failure="its program was not run"))

    found = {figure: rate(of(name), works.get(name, 0)) for figure, name in _PROGRAM_OF.items()}
    for dtype in MATRIX_EXTENTS:
        found[f"{MATRIX}.{dtype}"] = rate(of(dtype), works.get(dtype, 0))
    launch = difference(duration_ps(of("dots")), duration_ps(of("dot")), _MORE)
    found["launch_ps"] = launch
    rows = max(int(works.get("rows", 0)), 1)
    found["reduction_row_ps"] = difference(duration_ps(of("rows")), duration_ps(of("sums")), rows)
    found["step_ps"] = difference(duration_ps(of("tile")), launch)
    found["fresh_bytes_per_s"] = fresh_rate(of("fresh"), of("in place"), works.get("fresh", 0))
    return found


def fresh_rate(fresh: Timing, in_place: Timing, nbytes: float) -> Figure:
    """Bytes per second by the additional time for new memory. With an allocator that keeps freed memory there
    is next to none."""
    if problem := fresh.problem or in_place.problem:
        return Figure.missing(problem)
    return Figure(nbytes / max(fresh.seconds - in_place.seconds, 1e-9), fresh.spread + in_place.spread)


# 16-bit types are timed at a smaller size, as they are far slower where XLA has no kernel for them.
MATRIX_EXTENTS = {"float32": 1024, "float64": 1024, "bfloat16": 512, "float16": 512}


class Loop:
    """Times a program that runs ``state = turn(i, state)`` in a loop; a sample is the seconds of one
    iteration.

    The loop also runs ``tiny`` small dots: without one, XLA may compile the whole loop into one kernel on one
    core, which it does not do with larger loops.
    """

    def __init__(self, work: float, turn: Callable[[Any, Any], Any], state: Any, tiny: int = 1) -> None:
        def body(i: Any, carry: Any) -> Any:
            inner, dot, weight = carry
            for _ in range(tiny):
                dot = dot @ weight
            return turn(i, inner), dot, weight

        self.work = work
        # Donate the state, so that a sample does not start with a copy into new memory.
        self._run = jax.jit(lambda turns, carry: lax.fori_loop(0, turns, body, carry), donate_argnums=1)
        dot, weight = (jnp.full((_TINY, _TINY), 1 / _TINY, jnp.float32) for _ in range(2))
        self._carry = (state, dot, weight)
        self._turns = 1
        self._seconds()  # compiles

    def sample(self) -> float:
        """Run the loop; the seconds of one iteration. The number of iterations grows until a run is long
        enough."""
        while True:
            seconds, turns = self._seconds(), self._turns
            if seconds >= _LEAST_S:
                return seconds / turns
            # The start of the program dominates a short run, so grow by a factor of at most eight. This may
            # happen after the first samples too, if another process made these long.
            self._turns = 1 + min(int(1.5 * turns * _LEAST_S / max(seconds, 1e-9)), 8 * turns)

    def _seconds(self) -> float:
        start = time.perf_counter()
        self._carry = jax.block_until_ready(self._run(self._turns, self._carry))
        return time.perf_counter() - start


class Touch:
    """Times ``x + 1`` into newly allocated memory, or in place; ``work`` is the bytes of the result."""

    def __init__(self, nbytes: int, in_place: bool) -> None:
        self._x = jnp.zeros((nbytes // (4 * _ROW), _ROW), jnp.float32)
        self.work = float(self._x.nbytes)
        self._in_place = in_place
        self._run = jax.jit(lambda x: x + 1, donate_argnums=0) if in_place else jax.jit(lambda x: x + 1)
        self.sample()  # compiles

    def sample(self) -> float:
        """Run once; the seconds that it took."""
        start = time.perf_counter()
        result = jax.block_until_ready(self._run(self._x))
        seconds = time.perf_counter() - start
        if self._in_place:
            self._x = result
        else:
            result.delete()  # returned to the system before the next allocation
        return seconds


def _compiled(
    programs: dict[str, Callable[[], Loop | Touch]], limit_s: float
) -> tuple[dict[str, Loop | Touch], dict[str, Timing]]:
    """The compiled programs, and for the others the reason why they cannot be timed."""
    end = time.monotonic() + _COMPILE_SHARE * limit_s
    loops: dict[str, Loop | Touch] = {}
    failures: dict[str, Timing] = {}
    for name, program in programs.items():
        if time.monotonic() >= end:
            failures[name] = Timing(failure="no time was left to compile its program")
            continue
        try:
            loops[name] = program()
        except Exception as error:  # a program that XLA cannot compile here leaves its figure assumed
            first_line = (str(error).splitlines() or [""])[0]
            failures[name] = Timing(failure=f"{type(error).__name__}: {first_line}")
    return loops, failures


def _programs(known: DeviceSpec) -> dict[str, Callable[[], Loop | Touch]]:
    """The programs that are timed, most important first. The work of an iteration is in flops, results or
    bytes."""
    least, most = MEMORY_BYTES
    memory_bytes = min(max(4 * known.cache_bytes, least), most, known.hbm_capacity_bytes // 16)
    in_l2 = known.private_cache_bytes // 2

    def matmul(dtype: str) -> Loop:
        n = MATRIX_EXTENTS[dtype]
        pair = tuple(jnp.full((n, n), 1 / n, dtype) for _ in range(2))
        return Loop(2 * n**3, lambda i, ab: (ab[0] @ ab[1], ab[1]), pair)

    def array(nbytes: int, value: float) -> Any:
        return jnp.full((max(nbytes // (4 * _ROW), 1), _ROW), value, jnp.float32)

    def fused(nbytes: int, work: float, function: Callable[[Any], Any]) -> Loop:
        """``work`` is that of one element."""
        x = array(nbytes, 0.5)
        return Loop(work * x.size, lambda i, x: function(x), x)

    def chain(x: Any) -> Any:
        for _ in range(_CHAIN):
            x = x * 0.999 + 0.001
        return x

    def scale(x: Any) -> Any:
        return x * 0.5 + 1

    def sums() -> Loop:
        x = array(in_l2, 1 / _ROW)
        # Multiply by the sums of the previous iteration, or XLA would move them out of the loop.
        return Loop(x.size, lambda i, xs: (xs[0], (xs[0] * xs[1]).sum(1, keepdims=True)), (x, x[:, :1] + 1))

    def rows() -> Loop:
        x = jnp.full((in_l2 // (4 * _SHORT_ROW), _SHORT_ROW), 1 / _SHORT_ROW, jnp.float32)
        return Loop(len(x), lambda i, xs: (xs[0], (xs[0] * xs[1]).sum(1, keepdims=True)), (x, x[:, :1] + 1))

    def dots(tiny: int) -> Loop:
        return Loop(0, lambda i, x: x, jnp.zeros((), jnp.float32), tiny)

    def copy(i: Any, arrays: Any) -> Any:
        source, target = arrays
        start = (i % _TILES * _TILE, 0)
        tile = lax.dynamic_slice(source, start, (_TILE, _TILE))
        return source, lax.dynamic_update_slice(target, tile * 2, start)

    def tiles() -> Loop:
        return Loop(0, copy, tuple(jnp.zeros((_TILES * _TILE, _TILE), jnp.float32) for _ in range(2)))

    return {
        "float32": lambda: matmul("float32"),
        "vector": lambda: fused(in_l2, 2 * _CHAIN, chain),
        "exp": lambda: fused(in_l2, 1, lambda x: jnp.exp(-x)),
        "sums": sums,
        "rows": rows,
        "dot": lambda: dots(1),
        "dots": lambda: dots(1 + _MORE),
        "tile": tiles,
        "memory": lambda: fused(memory_bytes, 8, scale),
        "fresh": lambda: Touch(_FRESH_BYTES, in_place=False),
        "in place": lambda: Touch(_FRESH_BYTES, in_place=True),
        "shared": lambda: fused(known.cache_bytes // 2, 8, scale),
        "private": lambda: fused(in_l2, 8, scale),
        "float64": lambda: matmul("float64"),
        "bfloat16": lambda: matmul("bfloat16"),
        "float16": lambda: matmul("float16"),
    }
