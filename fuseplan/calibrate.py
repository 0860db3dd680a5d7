"""This machine's CPU as a device, at the rates that XLA reaches on it.

What the operating system tells comes from ``costmodel.calibrate``, which knows no JAX; what
jitted programs reach on JAX's CPU backend is measured here, once for each version of JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

from costmodel.calibrate import cache_path, cached, cached_cpu, described_cpu
from costmodel.device import DeviceSpec

MADE_BY = f"jax-{jax.__version__}"
"""Stands in the cache file's key and name: another JAX brings another XLA."""

_COMPILE_S = 4.0
_SAMPLE_S = 3.0
_ROUNDS = 3
"""After these seconds no further program is compiled, and after so many rounds none is sampled again."""

_LEAST_S = 0.004
"""A sample takes this long or more: far above the clock's noise and a program's own start."""

_CHAIN = 8
"""Multiply-adds an element: enough to hide its load and store, few enough for a fused group."""

_TINY = 8
"""A dot of 8x8 is a kernel with next to no work; XLA makes 2x2 a part of the kernels around it."""
_MORE = 8

_TILE, _TILES = 16, 256
_ROW = 1024
_MEMORY_BYTES = (64 << 20, 512 << 20)
"""Least and most that is walked to measure main memory: past most caches, and soon done."""

_FRESH_BYTES = 64 << 20
"""An array so large is given back to the system when freed: twice glibc's largest threshold."""

_lock = threading.Lock()


def local_cpu(refresh: bool = False) -> DeviceSpec:
    """This machine's CPU as XLA drives it: from memory, else from the cache file, else
    measured in some seconds and written. ``refresh=True`` measures again.

    Without a CPU backend (``JAX_PLATFORMS=cuda``) the rates are NumPy's. Never raises.

    Example:
        >>> local_cpu().platform
        'cpu'
    """
    if not _has_backend():
        return cached_cpu(refresh)

    def announced() -> DeviceSpec:
        if not refresh and sys.stderr is not None and sys.stderr.isatty():
            print("fuseplan: measuring this CPU, once; `fuseplan calibrate` does it anew", file=sys.stderr)
        return measure()

    with _lock:  # two measurements at a time would each see half of the machine
        return cached(MADE_BY, announced, refresh)


def cache_file() -> Path:
    """Where ``local_cpu`` keeps its figures."""
    return cache_path(MADE_BY) if _has_backend() else cache_path()


def _has_backend() -> bool:
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


def measure() -> DeviceSpec:
    """Measure what XLA reaches on this CPU, in under ten seconds.

    Limits: the rates are those of a loop's steady state, in place. What the first touch of
    memory takes on top, which the system clears and maps, is ``fresh_bytes_per_s``.
    """
    # A thread of its own: the trace, the precision and the device that the caller is under
    # are not the measurement's.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, described_cpu()).result()


def _measure(known: DeviceSpec) -> DeviceSpec:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        loops = _sampled(_programs(known))
    found: dict[str, Any] = {}
    sources = dict(known.sources)

    def keep(field: str, value: float, how: str) -> int:
        """Note ``value`` where there is one; else, or where noise made it none, what is known stays."""
        if not value >= 1:  # nan too
            return int(getattr(known, field))
        found[field], sources[field] = int(value), f"measured: {how} (XLA of {MADE_BY})"
        return int(value)

    def rate(name: str) -> float:
        return loops[name].work / loops[name].turn_s if name in loops else float("nan")

    def turn_ps(name: str) -> float:
        return 1e12 * loops[name].turn_s if name in loops else float("nan")

    dot = f"{_TINY}x{_TINY} dot"
    launch_ps = keep("launch_ps", (turn_ps("dots") - turn_ps("dot")) / _MORE, f"one {dot} more in a loop")
    step_ps = turn_ps("tile") - launch_ps
    keep("step_ps", step_ps, f"a loop that copies one {_TILE}x{_TILE} tile a turn, without the {dot} beside")
    in_l2 = "in half of the second-level caches"
    keep("vector_flops_per_s", rate("vector"), f"{_CHAIN} fused multiply-adds, two flops each, {in_l2}")
    keep("transcendental_per_s", rate("exp"), f"exp in float32, {in_l2}")
    keep("reduction_per_s", rate("sums"), f"sums of rows of {_ROW} float32, {in_l2}")
    moved = "x*0.5+1 in place, read + written,"
    level = keep("hbm_bytes_per_s", rate("memory"), f"{moved} past the caches")
    for field, name, where in (
        ("cache_bytes_per_s", "shared", "in half of the last-level cache"),
        ("private_cache_bytes_per_s", "private", in_l2),
    ):
        # A level that a noisy neighbour slows down, or that is not known, is no slower than the next.
        level = found[field] = max(level, keep(field, rate(name), f"{moved} {where}, no less than the next"))
    fresh = f"x+1 of {_FRESH_BYTES >> 20} MiB into new memory, what it takes longer than in place"
    keep("fresh_bytes_per_s", rate("fresh"), fresh)
    matrix = {dtype: rate(dtype) for dtype in _MATRIX if dtype in loops}
    if matrix:
        assumed = "".join(f"; assumed: {dtype}" for dtype in _MATRIX if dtype not in matrix)
        sizes = "dots of 1024x1024x1024, 16-bit types of 512x512x512"
        found["matrix_flops_per_s"] = tuple((d, int(matrix.get(d, known.matrix_rate(d)))) for d in _MATRIX)
        sources["matrix_flops_per_s"] = f"measured: {sizes} (XLA of {MADE_BY}){assumed}"
    return dataclasses.replace(known, **found, sources=tuple(sources.items()))


# 16-bit types at a small size: where XLA has no kernel for them they run far slower.
_MATRIX = {"float32": 1024, "float64": 1024, "bfloat16": 512, "float16": 512}


class _Loop:
    """``state = turn(i, state)`` in a loop inside one program, timed at its fastest.

    ``tiny`` dots stand beside it: without one XLA may compile the whole loop into one kernel
    on one core, as it does to no loop that has more to do.
    """

    def __init__(self, work: float, turn: Callable[[Any, Any], Any], state: Any, tiny: int = 1) -> None:
        def body(i: Any, carry: Any) -> Any:
            inner, dot, weight = carry
            for _ in range(tiny):
                dot = dot @ weight
            return turn(i, inner), dot, weight

        self.work = work
        # Donated, or each sample starts with a copy into fresh memory.
        self._run = jax.jit(lambda turns, carry: lax.fori_loop(0, turns, body, carry), donate_argnums=1)
        dot, weight = (jnp.full((_TINY, _TINY), 1 / _TINY, jnp.float32) for _ in range(2))
        self._carry = (state, dot, weight)
        self._turns = 1
        self.turn_s = float("inf")
        self._seconds()  # compiles
        # Two long runs, not one: a single one may be another process's doing, after too few turns.
        while min(self.sample(), self.sample()) < _LEAST_S:
            pass

    def sample(self) -> float:
        """Run once more, for so many seconds; the fastest run counts, as whatever else runs here
        only adds."""
        seconds = self._seconds()
        self.turn_s = min(self.turn_s, seconds / self._turns)
        if seconds < _LEAST_S:
            # So short a run is mostly the program's own start: by no more than eight at a time.
            # Also later, if it was another process that made the first runs long.
            self._turns = 1 + min(int(1.5 * self._turns * _LEAST_S / seconds), 8 * self._turns)
        return seconds

    def _seconds(self) -> float:
        start = time.perf_counter()
        self._carry = jax.block_until_ready(self._run(self._turns, self._carry))
        return time.perf_counter() - start


class _Touch:
    """``x + 1`` into memory that the system has to find, against the same in place: ``turn_s``
    is what that takes longer, at the fastest of each, and ``work`` the bytes of the result."""

    def __init__(self, nbytes: int) -> None:
        self._x = jnp.zeros((nbytes // (4 * _ROW), _ROW), jnp.float32)
        self.work = float(self._x.nbytes)
        self._new = jax.jit(lambda x: x + 1)
        self._in_place = jax.jit(lambda x: x + 1, donate_argnums=0)
        self._times()  # compiles
        self._best = self._times()

    @property
    def turn_s(self) -> float:
        new, in_place = self._best
        # Where the allocator keeps what is freed there is no difference: as good as nothing.
        return max(new - in_place, 1e-9)

    def sample(self) -> float:
        """Run each once more, for so many seconds."""
        times = self._times()
        self._best = min(self._best[0], times[0]), min(self._best[1], times[1])
        return sum(times)

    def _times(self) -> tuple[float, float]:
        start = time.perf_counter()
        result = jax.block_until_ready(self._new(self._x))
        middle = time.perf_counter()
        result.delete()  # back to the system, before the next is asked for
        again = time.perf_counter()
        self._x = jax.block_until_ready(self._in_place(self._x))
        return middle - start, time.perf_counter() - again


def _sampled(programs: dict[str, Callable[[], _Loop | _Touch]]) -> dict[str, _Loop | _Touch]:
    """The programs that run here, sampled in turns, so that no passing load hits one alone."""
    end = time.monotonic() + _COMPILE_S
    loops: dict[str, _Loop | _Touch] = {}
    for name, program in programs.items():
        # Whatever XLA cannot do here, a default stands in for.
        with contextlib.suppress(Exception):
            if time.monotonic() < end:
                loops[name] = program()
    end = time.monotonic() + _SAMPLE_S
    with contextlib.suppress(Exception):
        for turn, loop in enumerate(itertools.cycle(loops.values())):
            if turn >= _ROUNDS * len(loops) and time.monotonic() >= end:
                break
            loop.sample()
    return loops


def _programs(known: DeviceSpec) -> dict[str, Callable[[], _Loop | _Touch]]:
    """What is measured, most important first; the work of a turn is in flops, results or bytes."""
    least, most = _MEMORY_BYTES
    memory_bytes = min(max(4 * known.cache_bytes, least), most, known.hbm_capacity_bytes // 16)
    in_l2 = known.private_cache_bytes // 2

    def matmul(dtype: str) -> _Loop:
        n = _MATRIX[dtype]
        pair = tuple(jnp.full((n, n), 1 / n, dtype) for _ in range(2))
        return _Loop(2 * n**3, lambda i, ab: (ab[0] @ ab[1], ab[1]), pair)

    def array(nbytes: int, value: float) -> Any:
        return jnp.full((max(nbytes // (4 * _ROW), 1), _ROW), value, jnp.float32)

    def fused(nbytes: int, work: float, function: Callable[[Any], Any]) -> _Loop:
        """``work`` is an element's."""
        x = array(nbytes, 0.5)
        return _Loop(work * x.size, lambda i, x: function(x), x)

    def chain(x: Any) -> Any:
        for _ in range(_CHAIN):
            x = x * 0.999 + 0.001
        return x

    def scale(x: Any) -> Any:
        return x * 0.5 + 1

    def sums() -> _Loop:
        x = array(in_l2, 1 / _ROW)
        # Times the sums of the turn before, or XLA would compute them once for all.
        return _Loop(x.size, lambda i, xs: (xs[0], (xs[0] * xs[1]).sum(1, keepdims=True)), (x, x[:, :1] + 1))

    def dots(tiny: int) -> _Loop:
        return _Loop(0, lambda i, x: x, jnp.zeros((), jnp.float32), tiny)

    def copy(i: Any, arrays: Any) -> Any:
        source, target = arrays
        start = (i % _TILES * _TILE, 0)
        tile = lax.dynamic_slice(source, start, (_TILE, _TILE))
        return source, lax.dynamic_update_slice(target, tile * 2, start)

    def tiles() -> _Loop:
        return _Loop(0, copy, tuple(jnp.zeros((_TILES * _TILE, _TILE), jnp.float32) for _ in range(2)))

    return {
        "float32": lambda: matmul("float32"),
        "vector": lambda: fused(in_l2, 2 * _CHAIN, chain),
        "exp": lambda: fused(in_l2, 1, lambda x: jnp.exp(-x)),
        "sums": sums,
        "dot": lambda: dots(1),
        "dots": lambda: dots(1 + _MORE),
        "tile": tiles,
        "memory": lambda: fused(memory_bytes, 8, scale),
        "fresh": lambda: _Touch(_FRESH_BYTES),
        "shared": lambda: fused(known.cache_bytes // 2, 8, scale),
        "private": lambda: fused(in_l2, 8, scale),
        "float64": lambda: matmul("float64"),
        "bfloat16": lambda: matmul("bfloat16"),
        "float16": lambda: matmul("float16"),
    }
