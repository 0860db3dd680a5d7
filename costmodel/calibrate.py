"""This machine's CPU as a device: measured with NumPy in a few seconds, then cached.

The file is ``$XDG_CACHE_HOME/fuseplan/cpu.json`` (``~/.cache`` without the variable). It
is measured anew when it is missing, unreadable, of another version or of another CPU.
Nothing here raises: what cannot be read or measured takes a documented default.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.device import DeviceSpec

VERSION = 2
"""Of the file and of how it is measured: a file of another version is measured anew."""

_SAMPLES = 7
_SAMPLE_S = 0.01
"""A sample repeats its work for this long, far above the clock's and the scheduler's noise."""

# What stands in for a number that this machine does not give: a small server of about 2020.
DEFAULTS = {
    "l2_bytes": 1 << 20,
    "l3_bytes": 16 << 20,
    "capacity_bytes": 8 << 30,
    "hbm_bytes_per_s": 20 * 10**9,
    "cache_bytes_per_s": 100 * 10**9,
    "float32": 100 * 10**9,
    "float64": 50 * 10**9,
    "vector": 20 * 10**9,
    "transcendental": 2 * 10**9,
}

_LAUNCH_PS = 400_000
"""One operation of an XLA CPU program: 0.38 us for a 16x16 dot in a loop, between 0.04 us
for one fused slice and update of 128 elements and 1.4 us for a cumulative sum of 256
(jax 0.12, loops of 2,000 to 5,000 steps on two server cores)."""

_memory: dict[Path, DeviceSpec] = {}


def cached_cpu(refresh: bool = False) -> DeviceSpec:
    """This machine's CPU: from memory, else from the cache file, else measured and written.
    ``refresh=True`` measures again."""
    path = cache_path()
    if not refresh:
        known = _memory.get(path) or _read(path)
        if known is not None:
            _memory[path] = known
            return known
    device = _memory[path] = measure()
    _write(path, device)
    return device


def cache_path() -> Path:
    """Where the measurement is kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "fuseplan" / "cpu.json"
    try:
        return Path.home() / ".cache" / "fuseplan" / "cpu.json"
    except RuntimeError:  # no home directory, as in some containers
        return Path(tempfile.gettempdir()) / "fuseplan" / "cpu.json"


def measure() -> DeviceSpec:
    """Measure this CPU, in under six seconds.

    Limits: matrix rates are those of NumPy's BLAS, not XLA's; the vector rate is that of
    ``np.multiply`` in the first-level cache, bound by its loads and stores, so XLA's fused
    loops exceed it; bandwidths count the bytes that a copy reads and writes, not the
    lines that a store fetches first.
    """
    cores = core_count()
    l2, l3 = cache_sizes()
    with ThreadPoolExecutor(cores) as pool:
        f32 = _measured("float32", lambda: _matmul_rate(np.float32))
        f64 = _measured("float64", lambda: _matmul_rate(np.float64))
        # Far past the cache, within 256 MiB an array; and half of the cache for both arrays.
        hbm = _measured(
            "hbm_bytes_per_s", lambda: _copy_rate(pool, cores, min(max(4 * l3, 64 << 20), 256 << 20))
        )
        cache = _measured("cache_bytes_per_s", lambda: _copy_rate(pool, cores, l3 // 4))
        vector = _measured("vector", lambda: cores * _elementwise_rate(np.multiply))
        transcendental = _measured("transcendental", lambda: cores * _elementwise_rate(np.exp))
    cached = "size from /sys/devices/system/cpu/cpu0/cache"
    return DeviceSpec(
        name="cpu",
        description=f"{cpu_model()}, {cores} cores",
        platform="cpu",
        backend="xla",
        core_count=cores,
        hbm_capacity_bytes=capacity_bytes(),
        hbm_bytes_per_s=hbm,
        cache_bytes=l3,
        # A cache that copies no faster than memory (a noisy neighbour) is no slower either.
        cache_bytes_per_s=max(cache, hbm),
        onchip_bytes=cores * l2 + l3 // 2,
        register_bytes=0,
        launch_ps=_LAUNCH_PS,
        matrix_flops_per_s=(("float32", f32), ("bfloat16", f32), ("float16", f32), ("float64", f64)),
        vector_flops_per_s=vector,
        transcendental_per_s=transcendental,
        sources=(
            ("core_count", "CPUs that this process may run on"),
            ("hbm_capacity_bytes", "sysconf: physical pages"),
            ("hbm_bytes_per_s", "measured: np.copyto past the cache, a thread a core, read + written"),
            ("cache_bytes", cached),
            ("cache_bytes_per_s", "measured: np.copyto within the last-level cache, a thread a core"),
            (
                "onchip_bytes",
                f"{cached}: XLA runs one tile at a time on all cores, so a tile may fill every core's "
                "second-level cache and half of the shared one",
            ),
            ("launch_ps", "measured once: one 16x16 dot of an XLA CPU program, in a loop (jax 0.12)"),
            (
                "matrix_flops_per_s",
                "measured: np.matmul; assumed: 16-bit types run at the rate of float32, to which "
                "XLA converts them on CPUs without matrix instructions for them",
            ),
            (
                "vector_flops_per_s",
                "measured: np.multiply within the first-level cache, one core times their number",
            ),
            ("transcendental_per_s", "measured: np.exp in float32, one core times their number"),
        ),
    )


def core_count() -> int:
    """CPUs that this process may run on."""
    with contextlib.suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def cpu_model() -> str:
    """The CPU's model name, as the kernel reports it."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def cache_sizes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[int, int]:
    """Bytes of (one core's second-level cache, the last-level cache)."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        for index in sorted(root.glob("index*")):
            if (index / "type").read_text().strip() != "Instruction":
                size = (index / "size").read_text().strip()
                unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
                found[int((index / "level").read_text())] = int(size[:-1]) * unit[size[-1]]
    l2 = found.get(2) or DEFAULTS["l2_bytes"]
    return l2, found.get(3) or (l2 if 2 in found else DEFAULTS["l3_bytes"])


def capacity_bytes() -> int:
    """Bytes of main memory."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DEFAULTS["capacity_bytes"]


def _measured(name: str, rate: Callable[[], float]) -> int:
    """``rate()`` as a positive integer, or the default where it cannot be had."""
    try:
        return max(int(rate()), 1)
    except (OSError, MemoryError, ValueError, ArithmeticError, RuntimeError):
        return DEFAULTS[name]


def _seconds(work: Callable[[], object]) -> float:
    """The shortest time of one call of ``work``, after one call to warm up: what the machine
    can do; whatever else runs on it only adds."""
    work()
    start = time.perf_counter()
    work()
    repeats = max(1, int(_SAMPLE_S / max(time.perf_counter() - start, 1e-9)))
    samples = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        samples.append((time.perf_counter() - start) / repeats)
    return min(samples)


def _matmul_rate(dtype: type[np.floating[Any]]) -> float:
    n = 1024
    a, b, out = (np.full((n, n), 0.5, dtype) for _ in range(3))
    return 2 * n**3 / _seconds(lambda: np.matmul(a, b, out=out))


def _on_all(pool: ThreadPoolExecutor, cores: int, work: Callable[[int], object]) -> Callable[[], object]:
    """``work(core)`` on every core at once (NumPy releases the interpreter lock)."""
    return lambda: list(pool.map(work, range(cores)))


def _copy_rate(pool: ThreadPoolExecutor, cores: int, nbytes: int) -> float:
    """Bytes a second read plus written, copying arrays of ``nbytes`` in all."""
    count = max(nbytes // 4 // cores, 1024)
    pairs = [(np.ones(count, np.float32), np.zeros(count, np.float32)) for _ in range(cores)]
    # Small copies are repeated inside the thread, or handing out the work is what is timed.
    inner = max(1, (8 << 20) // (4 * count))

    def copy(core: int) -> None:
        source, target = pairs[core]
        for _ in range(inner):
            np.copyto(target, source)

    return 2 * 4 * count * cores * inner / _seconds(_on_all(pool, cores, copy))


def _elementwise_rate(function: np.ufunc) -> float:
    """Elements a second of ``function`` on float32 arrays of 16 KiB, on one core: threads
    would queue for the interpreter lock at every call."""
    source, target = np.full(4096, 0.5, np.float32), np.empty(4096, np.float32)
    operands = (source,) * function.nin
    return source.size / _seconds(lambda: function(*operands, out=target))


def _key() -> str:
    return f"{cpu_model()} x {core_count()}"


def _read(path: Path) -> DeviceSpec | None:
    """The device in the file, or None if it is missing, damaged, old, or of another CPU."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION or data["key"] != _key():
            return None
        fields = data["device"]
        for name in ("matrix_flops_per_s", "sources"):
            fields[name] = tuple((str(a), b) for a, b in fields[name])
        device = DeviceSpec(**fields)
        rates = [device.hbm_bytes_per_s, device.vector_flops_per_s, device.transcendental_per_s]
        rates += [rate for _, rate in device.matrix_flops_per_s]
        return device if all(isinstance(r, int) and r > 0 for r in rates) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, device: DeviceSpec) -> None:
    """Write the file in one step, so that no reader sees half of it. A directory that
    cannot be written costs only the next measurement."""
    data = {"version": VERSION, "key": _key(), "device": dataclasses.asdict(device)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cpu-", suffix=".json")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=1)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
