"""This machine's CPU as a device: what the operating system tells, what NumPy reaches, and
the files that keep a measurement.

A file is ``$XDG_CACHE_HOME/fuseplan/cpu-MADE_BY.json`` (``~/.cache`` without the variable),
of NumPy or of a version of JAX (``fuseplan.calibrate``). It is made anew when it is missing,
unreadable, of another version, another CPU or another maker. Nothing here raises: what
cannot be read or measured takes a documented default.
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

VERSION = 4
"""Of the file and of how it is measured: a file of another version is measured anew."""

_SAMPLES = 5
_SAMPLE_S = 0.01
"""A sample repeats its work for this long, far above the clock's and the scheduler's noise."""

# What stands in for a number that this machine does not give: a small server of about 2020.
DEFAULTS = {
    "l2_bytes": 1 << 20,
    "l3_bytes": 16 << 20,
    "capacity_bytes": 8 << 30,
    "hbm_bytes_per_s": 20 * 10**9,
    "cache_bytes_per_s": 100 * 10**9,
    "private_cache_bytes_per_s": 200 * 10**9,
    "float32": 100 * 10**9,
    "float64": 50 * 10**9,
    "vector": 20 * 10**9,
    "transcendental": 2 * 10**9,
    "reduction_per_s": 5 * 10**9,
    "fresh_bytes_per_s": 25 * 10**8,
}

_LAUNCH_PS = 400_000
"""One operation of an XLA CPU program: 0.38 us for a 16x16 dot in a loop, between 0.04 us
for one fused slice and update of 128 elements and 1.4 us for a cumulative sum of 256
(jax 0.12, loops of 2,000 to 5,000 steps on two server cores)."""

_STEP_PS = 150_000
"""One turn of an XLA CPU loop that slices a tile of 16x16 and writes it (jax 0.10 and 0.12)."""

_memory: dict[Path, DeviceSpec] = {}


def cached_cpu(refresh: bool = False) -> DeviceSpec:
    """This machine's CPU by NumPy's measure (``cached``)."""
    return cached("numpy", measure, refresh)


def cached(made_by: str, measure: Callable[[], DeviceSpec], refresh: bool = False) -> DeviceSpec:
    """What ``measure()`` gave to ``made_by``: from memory, else from its file, else measured
    and written. ``refresh=True`` measures again."""
    path = cache_path(made_by)
    if not refresh:
        known = _memory.get(path) or _read(path, made_by)
        if known is not None:
            _memory[path] = known
            return known
    device = _memory[path] = measure()
    _write(path, made_by, device)
    return device


def cache_path(made_by: str = "numpy") -> Path:
    """Where the measurement by ``made_by`` is kept."""
    name = f"cpu-{made_by}.json"
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "fuseplan" / name
    try:
        return Path.home() / ".cache" / "fuseplan" / name
    except RuntimeError:  # no home directory, as in some containers
        return Path(tempfile.gettempdir()) / "fuseplan" / name


def described_cpu() -> DeviceSpec:
    """This CPU as the operating system describes it, at the rates in ``DEFAULTS``."""
    cores = core_count()
    private, shared = cache_sizes(cores)
    sysfs = "size from /sys/devices/system/cpu/cpu0/cache"
    assumed = "assumed: a small server of about 2020"
    f32 = DEFAULTS["float32"]
    return DeviceSpec(
        name="cpu",
        description=f"{cpu_model()}, {cores} cores",
        platform="cpu",
        backend="xla",
        core_count=cores,
        hbm_capacity_bytes=capacity_bytes(),
        hbm_bytes_per_s=DEFAULTS["hbm_bytes_per_s"],
        cache_bytes=shared,
        cache_bytes_per_s=DEFAULTS["cache_bytes_per_s"],
        onchip_bytes=private + shared // 2,
        register_bytes=0,
        launch_ps=_LAUNCH_PS,
        matrix_flops_per_s=(
            ("float32", f32),
            ("bfloat16", f32),
            ("float16", f32),
            ("float64", DEFAULTS["float64"]),
        ),
        vector_flops_per_s=DEFAULTS["vector"],
        transcendental_per_s=DEFAULTS["transcendental"],
        private_cache_bytes=private,
        private_cache_bytes_per_s=DEFAULTS["private_cache_bytes_per_s"],
        fresh_bytes_per_s=DEFAULTS["fresh_bytes_per_s"],
        reduction_per_s=DEFAULTS["reduction_per_s"],
        step_ps=_STEP_PS,
        sources=(
            ("core_count", "CPUs that this process may run on"),
            ("hbm_capacity_bytes", "sysconf: physical pages"),
            ("hbm_bytes_per_s", assumed),
            ("cache_bytes", sysfs),
            ("cache_bytes_per_s", assumed),
            (
                "onchip_bytes",
                f"{sysfs}: XLA runs one tile at a time on all cores, so a tile may fill every core's "
                "second-level cache and half of the shared one",
            ),
            ("launch_ps", "measured once: one 16x16 dot of an XLA CPU program, in a loop (jax 0.12)"),
            ("matrix_flops_per_s", assumed),
            ("vector_flops_per_s", assumed),
            ("transcendental_per_s", assumed),
            ("private_cache_bytes", f"{sysfs}, times the cores that do not share it"),
            ("private_cache_bytes_per_s", assumed),
            ("fresh_bytes_per_s", f"{assumed}, pages of 4 KiB"),
            ("reduction_per_s", assumed),
            ("step_ps", "measured once: a loop of XLA that copies a 16x16 tile each turn (jax 0.12)"),
        ),
    )


def measure() -> DeviceSpec:
    """Measure this CPU with NumPy, in some two seconds.

    Limits: matrix rates are those of NumPy's BLAS, not XLA's; the vector rate is that of
    ``np.multiply`` in the first-level cache, bound by its loads and stores, so XLA's fused
    loops exceed it; bandwidths count the bytes that a copy reads and writes, not the
    lines that a store fetches first.
    """
    known = described_cpu()
    cores, shared = known.core_count, known.cache_bytes
    with ThreadPoolExecutor(cores) as pool:
        f32 = _measured("float32", lambda: _matmul_rate(np.float32))
        f64 = _measured("float64", lambda: _matmul_rate(np.float64))
        # Far past the cache, within 256 MiB an array; and half of the cache for both arrays.
        hbm = _measured(
            "hbm_bytes_per_s", lambda: _copy_rate(pool, cores, min(max(4 * shared, 64 << 20), 256 << 20))
        )
        cache = _measured("cache_bytes_per_s", lambda: _copy_rate(pool, cores, shared // 4))
        vector = _measured("vector", lambda: cores * _elementwise_rate(np.multiply))
        transcendental = _measured("transcendental", lambda: cores * _elementwise_rate(np.exp))
    cache = max(cache, hbm)  # no slower than memory, whatever a noisy neighbour does
    by_copy = "measured: np.copyto within the last-level cache, a thread a core"
    sources = {
        "hbm_bytes_per_s": "measured: np.copyto past the cache, a thread a core, read + written",
        "cache_bytes_per_s": by_copy,
        "private_cache_bytes_per_s": f"no faster than the shared cache ({by_copy})",
        "matrix_flops_per_s": "measured: np.matmul; assumed: 16-bit types run at the rate of float32, to "
        "which XLA converts them on CPUs without matrix instructions for them",
        "vector_flops_per_s": "measured: np.multiply in the first-level cache, one core times their number",
        "transcendental_per_s": "measured: np.exp in float32, one core times their number",
    }
    return dataclasses.replace(
        known,
        hbm_bytes_per_s=hbm,
        cache_bytes_per_s=cache,
        private_cache_bytes_per_s=cache,
        matrix_flops_per_s=(("float32", f32), ("bfloat16", f32), ("float16", f32), ("float64", f64)),
        vector_flops_per_s=vector,
        transcendental_per_s=transcendental,
        sources=tuple({**dict(known.sources), **sources}.items()),
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


def cache_sizes(cores: int = 1, root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[int, int]:
    """Bytes of (the second-level caches of that many cores, the last-level cache)."""
    found: dict[int, int] = {}
    sharing = 1  # logical CPUs that have one second-level cache in common
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        for index in sorted(root.glob("index*")):
            if (index / "type").read_text().strip() != "Instruction":
                size = (index / "size").read_text().strip()
                unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
                level = int((index / "level").read_text())
                found[level] = int(size[:-1]) * unit[size[-1]]
                if level == 2:
                    sharing = _count_cpus((index / "shared_cpu_list").read_text())
    l2 = found.get(2) or DEFAULTS["l2_bytes"]
    return -(-cores // sharing) * l2, found.get(3) or (l2 if 2 in found else DEFAULTS["l3_bytes"])


def _count_cpus(text: str) -> int:
    """How many CPUs the kernel's list names: 6 in ``0-3,8-9``."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return max(count, 1)


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


def _key(made_by: str) -> str:
    return f"{cpu_model()} x {core_count()}, {made_by}"


def _read(path: Path, made_by: str) -> DeviceSpec | None:
    """The device in the file, or None if it is missing, damaged, old, or of another
    CPU or maker."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION or data["key"] != _key(made_by):
            return None
        fields = data["device"]
        for name in ("matrix_flops_per_s", "sources"):
            fields[name] = tuple((str(a), b) for a, b in fields[name])
        device = DeviceSpec(**fields)
        numbers = [getattr(device, f.name) for f in dataclasses.fields(device) if f.type == "int"]
        rates = [device.hbm_bytes_per_s, device.cache_bytes_per_s, device.private_cache_bytes_per_s]
        rates += [device.vector_flops_per_s, device.transcendental_per_s]
        rates += [rate for _, rate in device.matrix_flops_per_s]
        return device if all(type(n) is int and n >= 0 for n in numbers + rates) and all(rates) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, made_by: str, device: DeviceSpec) -> None:
    """Write the file in one step, so that no reader sees half of it. A directory that
    cannot be written costs only the next measurement."""
    data = {"version": VERSION, "key": _key(made_by), "device": dataclasses.asdict(device)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cpu-", suffix=".json")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file, indent=1)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
