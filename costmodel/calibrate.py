"""Describe and measure this machine's CPU as a device, and keep the measurements in files.

The operating system gives sizes; NumPy measures rates here, and XLA in ``fuseplan.targets.calibrate``. Each
of the two (``made_by``) has a file ``$XDG_CACHE_HOME/fuseplan/cpu-MADE_BY.json`` (``~/.cache`` without the
variable), which is written anew if it is missing, unreadable, or of another version, CPU or ``made_by``.

A figure is measured if its timings settle (``costmodel.timing``) and contradict no other figure. Otherwise it
keeps its earlier measured value, or is assumed (``DEFAULTS``), and its source gives the reason. Nothing here
raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.device import DeviceSpec
from costmodel.timing import Figure, Timing, rate, repeated, settle

VERSION = 6
"""The version of the file and of the method of measurement; other versions are measured anew."""

FIRST_USE_S = 10.0
"""The time limit of a measurement on first use; one compilation or sample may exceed it."""

ASKED_FOR_S = 60.0
"""The time limit of a measurement that the user requests."""

MOST_ATTEMPTS = 3
"""The number of processes that try to measure figures that are still assumed; later ones use the file."""

_SAMPLE_S = 0.01
"""The length of a sample, far above the noise of clock and scheduler."""

MATRIX = "matrix_flops_per_s"
FIGURES = (
    "hbm_bytes_per_s",
    "cache_bytes_per_s",
    "private_cache_bytes_per_s",
    *(f"{MATRIX}.{dtype}" for dtype in ("float32", "bfloat16", "float16", "float64")),
    "vector_flops_per_s",
    "transcendental_per_s",
    "reduction_per_s",
    "reduction_row_ps",
    "fresh_bytes_per_s",
    "launch_ps",
    "step_ps",
)
"""The measured figures, by field of ``DeviceSpec``; matrix rates also by dtype."""

_NO_FASTER = (
    ("hbm_bytes_per_s", "cache_bytes_per_s"),
    ("cache_bytes_per_s", "private_cache_bytes_per_s"),
    ("transcendental_per_s", "vector_flops_per_s"),
    ("reduction_per_s", "vector_flops_per_s"),
)
"""Pairs of rates, the first of which is no higher than the second on any CPU: an exponential takes longer
than a multiplication, and a level of memory is no faster than the nearer one."""
CONTENTION = 2.0
"""Two rates in the wrong order are still taken if they differ by less than this factor: two cores of a large
machine may read memory as fast as the last cache, and other programs may take half of either while one of
them is timed."""

# Assumed figures, where this machine gives none: those of a small server of about 2020.
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
    "reduction_row_ps": 3_000,
    "fresh_bytes_per_s": 25 * 10**8,
}

_LAUNCH_PS = 400_000
"""The time of one operation of an XLA CPU program: 0.38 us for a 16x16 dot in a loop, 0.04 us for a fused
slice and update of 128 elements, 1.4 us for a cumulative sum of 256 (jax 0.12, loops of 2,000 to 5,000 steps
on two server cores)."""

_STEP_PS = 150_000
"""The time of one iteration of an XLA CPU loop that copies a tile of 16x16 (jax 0.10 and 0.12)."""

_memory: dict[Path, DeviceSpec] = {}


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a measurement: the device, and the origin of each of ``FIGURES``."""

    device: DeviceSpec
    measured: tuple[str, ...]
    """Measured now."""
    kept: tuple[str, ...]
    """Measured earlier, and kept because this measurement did not settle."""
    assumed: tuple[str, ...]
    """Never measured."""
    problems: tuple[tuple[str, str], ...]
    """Each figure that was not measured now, and why."""
    is_stored: bool
    """Whether the file has been written."""


def cached_cpu() -> DeviceSpec:
    """This machine's CPU with rates that NumPy measured (``cached``)."""
    return cached("numpy", measure)


def cached(made_by: str, measure: Callable[[float], DeviceSpec]) -> DeviceSpec:
    """The device measured by ``made_by``: from memory, else from its file, else from
    ``measure(FIRST_USE_S)``.

    Up to ``MOST_ATTEMPTS`` processes measure a file's assumed figures again."""
    found = known(made_by)
    if found is None:
        stored = _read(cache_path(made_by), made_by)
        attempts = 1 + (stored.attempts if stored is not None else 0)
        found = recalibrated(made_by, measure, FIRST_USE_S, attempts).device
    return found


def known(made_by: str) -> DeviceSpec | None:
    """The device that ``cached`` returns; None if it would measure."""
    path = cache_path(made_by)
    if path not in _memory:
        stored = _read(path, made_by)
        if stored is not None:
            sources = map(stored.device.source, _assumed(stored.device))
            if stored.attempts >= MOST_ATTEMPTS or not any(_NOT_MEASURED in source for source in sources):
                _memory[path] = stored.device
    return _memory.get(path)


def recalibrated(
    made_by: str, measure: Callable[[float], DeviceSpec], limit_s: float, attempts: int = 0
) -> Calibration:
    """Measure for at most ``limit_s`` seconds, and merge the figures that settle into the file of
    ``made_by``.

    ``attempts`` counts the measurements that the user did not request, this one included."""
    path = cache_path(made_by)
    new = measure(limit_s)
    # Read the file now: another process may have written it during the measurement.
    stored = _read(path, made_by)
    device, refused = (new, "") if stored is None else merged(stored.device, new)
    assumed = _assumed(device)
    measured = () if refused else tuple(name for name in FIGURES if name not in _assumed(new))
    attempts = max(attempts, stored.attempts if stored is not None else 0)
    is_stored = stored != _Stored(device, attempts) and _write(path, made_by, _Stored(device, attempts))
    _memory[path] = device
    kept = tuple(name for name in FIGURES if name not in measured and name not in assumed)
    whys = {name: new.source(name).partition(_NOT_MEASURED)[2] for name in (*kept, *assumed)}
    problems = tuple((name, why or refused or "nothing measures it") for name, why in whys.items())
    return Calibration(device, measured, kept, assumed, problems, is_stored)


def _assumed(device: DeviceSpec) -> tuple[str, ...]:
    return tuple(name for name in FIGURES if device.source(name).startswith("assumed"))


_NOT_MEASURED = "; not measured: "


def figure_of(device: DeviceSpec, name: str) -> int:
    """The value of one of ``FIGURES``."""
    field, _, dtype = name.partition(".")
    return device.matrix_rate(dtype) if dtype else int(getattr(device, field))


def _with_figures(device: DeviceSpec, values: Mapping[str, int], sources: Mapping[str, str]) -> DeviceSpec:
    """``device`` with other values and sources of some of ``FIGURES``."""
    fields: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    fields[MATRIX] = tuple(
        (dtype, values.get(f"{MATRIX}.{dtype}", known)) for dtype, known in device.matrix_flops_per_s
    )
    return dataclasses.replace(device, **fields, sources=tuple({**dict(device.sources), **sources}.items()))


def measured_cpu(
    known: DeviceSpec, figures: Mapping[str, Figure], how: Mapping[str, str], made_by: str
) -> DeviceSpec:
    """``known`` with the measured figures; the others stay assumed, and their sources give the reason.
    ``how`` describes the program that was timed for each figure."""
    figures = without_contradictions(figures)
    values: dict[str, int] = {}
    sources: dict[str, str] = {}
    date = datetime.now(UTC).date().isoformat()
    for name in how:
        figure = figures.get(name, Figure.missing("its program could not be made"))
        if figure.problem:
            sources[name] = f"{known.source(name)}{_NOT_MEASURED}{figure.problem}"
            continue
        values[name] = int(figure.value)
        sources[name] = (
            f"measured: {how[name]} ({made_by}, {date}; samples within {100 * figure.spread:.0f} %)"
        )
    return _with_figures(known, values, sources)


def without_contradictions(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """``figures``, with those that contradict each other marked as not measured. Two rates of ``_NO_FASTER``
    in the wrong order that differ by less than ``CONTENTION`` are both the higher one, as other programs only
    make a rate lower."""
    found = dict(figures)
    for name, figure in found.items():
        if not figure.problem and not figure.value >= 1:
            found[name] = Figure.missing(f"the timings give {figure.value:.3g}")
    wrong = set()
    for slow, fast in _NO_FASTER:
        low, high = (found.get(name, Figure.missing("")) for name in (slow, fast))
        if low.value > high.value * CONTENTION:  # false where one of them is missing
            wrong |= {(slow, f"{low.value:.3g}, more than {fast}, {high.value:.3g}")}
            wrong |= {(fast, f"{high.value:.3g}, less than {slow}, {low.value:.3g}")}
        elif low.value > high.value:
            found[fast] = Figure(low.value, high.spread)
    for name, text in wrong:
        found[name] = Figure.missing(f"the timings give {text}, which no CPU can")
    return found


def contradictions(device: DeviceSpec) -> str:
    """The pairs of measured rates that contradict each other, in words; empty if there are none."""
    assumed = _assumed(device)
    return ", ".join(
        f"{slow} is higher than {fast}"
        for slow, fast in _NO_FASTER
        if slow not in assumed and fast not in assumed and figure_of(device, slow) > figure_of(device, fast)
    )


def merged(old: DeviceSpec, new: DeviceSpec) -> tuple[DeviceSpec, str]:
    """``new``, with the figures that only ``old`` measured, and an empty text. If these contradict each
    other, ``old`` and the contradiction."""
    assumed, known = _assumed(new), _assumed(old)
    kept = [name for name in assumed if name not in known]
    device = _with_figures(
        new, {name: figure_of(old, name) for name in kept}, {name: old.source(name) for name in kept}
    )
    found = contradictions(device)
    return (old, f"with the figures that are kept, {found}") if found else (device, "")


def cache_path(made_by: str = "numpy") -> Path:
    """The file with the measurement by ``made_by``."""
    name = f"cpu-{made_by}.json"
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "fuseplan" / name
    try:
        return Path.home() / ".cache" / "fuseplan" / name
    except RuntimeError:  # no home directory, as in some containers
        return Path(tempfile.gettempdir()) / "fuseplan" / name


def described_cpu() -> DeviceSpec:
    """This CPU as described by the operating system, with the rates of ``DEFAULTS``."""
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
        reduction_row_ps=DEFAULTS["reduction_row_ps"],
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
            ("launch_ps", "assumed: one 16x16 dot of an XLA CPU program in a loop took as long on a server"),
            (MATRIX, "of each dtype by itself"),
            *((f"{MATRIX}.{dtype}", assumed) for dtype in ("float32", "bfloat16", "float16", "float64")),
            ("vector_flops_per_s", assumed),
            ("transcendental_per_s", assumed),
            ("private_cache_bytes", f"{sysfs}, times the cores that do not share it"),
            ("private_cache_bytes_per_s", assumed),
            ("fresh_bytes_per_s", f"{assumed}, pages of 4 KiB"),
            ("reduction_per_s", assumed),
            ("reduction_row_ps", assumed),
            ("step_ps", "assumed: a turn of an XLA loop that copies a 16x16 tile took as long on a server"),
        ),
    )


def measure(limit_s: float = FIRST_USE_S) -> DeviceSpec:
    """Measure this CPU with NumPy, in at most ``limit_s`` seconds; about two on an idle machine.

    Limits: matrix rates are those of NumPy's BLAS, not XLA's; the vector rate is that of
    ``np.multiply`` in the first-level cache, bound by its loads and stores, so XLA's fused
    loops exceed it; bandwidths count the bytes that a copy reads and writes, not the
    lines that a store fetches first.
    """
    known = described_cpu()
    cores, shared = known.core_count, known.cache_bytes
    with ThreadPoolExecutor(cores) as pool:
        # Main memory: arrays much larger than the cache, up to 256 MiB. Cache: both arrays fill half of it.
        far = min(max(4 * shared, 64 << 20), 256 << 20)
        timed = {
            f"{MATRIX}.float32": functools.partial(_matmul, np.float32),
            f"{MATRIX}.float64": functools.partial(_matmul, np.float64),
            "hbm_bytes_per_s": functools.partial(_copy, pool, cores, far),
            "cache_bytes_per_s": functools.partial(_copy, pool, cores, shared // 4),
            "vector_flops_per_s": functools.partial(_elementwise, np.multiply, cores),
            "transcendental_per_s": functools.partial(_elementwise, np.exp, cores),
        }
        figures = _timed(timed, limit_s)
    by_copy = "np.copyto within the last-level cache, a thread a core"
    how = {
        "hbm_bytes_per_s": "np.copyto past the cache, a thread a core, read + written",
        "cache_bytes_per_s": by_copy,
        f"{MATRIX}.float32": "np.matmul of 1024x1024x1024",
        f"{MATRIX}.float64": "np.matmul of 1024x1024x1024",
        "vector_flops_per_s": "np.multiply in the first-level cache, one core times their number",
        "transcendental_per_s": "np.exp in float32, one core times their number",
    }
    cpu = measured_cpu(known, figures, how, f"NumPy {np.__version__}")
    # Figures that are copied from others count as assumed.
    follows = {
        "private_cache_bytes_per_s": ("cache_bytes_per_s", "as fast as the shared cache"),
        f"{MATRIX}.bfloat16": (f"{MATRIX}.float32", "at the rate of float32, to which XLA converts it"),
        f"{MATRIX}.float16": (f"{MATRIX}.float32", "at the rate of float32, to which XLA converts it"),
    }
    return _with_figures(
        cpu,
        {name: figure_of(cpu, other) for name, (other, _) in follows.items()},
        {name: f"assumed: {text}" for name, (_, text) in follows.items()},
    )


def _timed(
    programs: Mapping[str, Callable[[], tuple[Callable[[], float], float]]], limit_s: float
) -> dict[str, Figure]:
    """The rate of each program. Each function returns a sampler, and the work of one call."""
    end = time.monotonic() + limit_s
    samplers: dict[str, Callable[[], float]] = {}
    works: dict[str, float] = {}
    figures: dict[str, Figure] = {}
    for name, make in programs.items():
        if time.monotonic() >= end:
            figures[name] = Figure.missing("no time was left for it")
            continue
        try:
            samplers[name], works[name] = make()
        except (OSError, MemoryError, ValueError, ArithmeticError, RuntimeError) as error:
            figures[name] = Figure.missing(f"{type(error).__name__}: {error}")
    timings: dict[str, Timing] = settle(samplers, end - time.monotonic())
    return figures | {name: rate(timing, works[name]) for name, timing in timings.items()}


def core_count() -> int:
    """The number of CPUs that this process may run on."""
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
    sharing = 1  # logical CPUs that share one second-level cache
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
    """The number of CPUs in a list of the kernel: 6 in ``0-3,8-9``."""
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


def _warm(work: Callable[[], object]) -> Callable[[], float]:
    """Samples of ``work``, which has run once."""
    work()
    return repeated(work, _SAMPLE_S)


def _matmul(dtype: type[np.floating[Any]]) -> tuple[Callable[[], float], float]:
    n = 1024
    a, b, out = (np.full((n, n), 0.5, dtype) for _ in range(3))
    return _warm(lambda: np.matmul(a, b, out=out)), 2 * n**3


def _copy(pool: ThreadPoolExecutor, cores: int, nbytes: int) -> tuple[Callable[[], float], float]:
    """Copies arrays of ``nbytes`` in all; the work is the bytes read plus written."""
    count = max(nbytes // 4 // cores, 1024)
    pairs = [(np.ones(count, np.float32), np.zeros(count, np.float32)) for _ in range(cores)]
    # Small copies are repeated inside the thread, so that the hand-off does not count.
    inner = max(1, (8 << 20) // (4 * count))

    def copy(core: int) -> None:
        source, target = pairs[core]
        for _ in range(inner):
            np.copyto(target, source)

    # On every core at once: NumPy releases the interpreter lock.
    return _warm(lambda: list(pool.map(copy, range(cores)))), 2 * 4 * count * cores * inner


def _elementwise(function: np.ufunc, cores: int) -> tuple[Callable[[], float], float]:
    """``function`` on float32 arrays of 16 KiB, on one core, as threads would wait for the interpreter
    lock at every call. The work is that of all cores."""
    source, target = np.full(4096, 0.5, np.float32), np.empty(4096, np.float32)
    operands = (source,) * function.nin
    return _warm(lambda: function(*operands, out=target)), source.size * cores


def _key(made_by: str) -> str:
    return f"{cpu_model()} x {core_count()}, {made_by}"


@dataclass(frozen=True, slots=True)
class _Stored:
    """The content of a file."""

    device: DeviceSpec
    attempts: int
    """The number of measurements so far that left a figure assumed."""


def _read(path: Path, made_by: str) -> _Stored | None:
    """Read the file. None if it is missing, damaged, old, or of another CPU or ``made_by``."""
    try:
        data = json.loads(path.read_text())
        if data["version"] != VERSION or data["key"] != _key(made_by):
            return None
        fields, attempts = data["device"], data["attempts"]
        for name in (MATRIX, "sources"):
            fields[name] = tuple((name, value) for name, value in fields[name])
        device = DeviceSpec(**fields)
        if type(attempts) is not int or attempts < 0 or device.platform != "cpu":
            return None
        stated = all(device.source(name).startswith(("measured: ", "assumed: ")) for name in FIGURES)
        return _Stored(device, attempts) if stated and not contradictions(device) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write(path: Path, made_by: str, stored: _Stored) -> bool:
    """Write the file atomically. Returns whether it was written; if not, the next process measures again."""
    data = {
        "version": VERSION,
        "key": _key(made_by),
        "attempts": stored.attempts,
        "assumed": _assumed(stored.device),
        "device": dataclasses.asdict(stored.device),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".cpu-", suffix=".json")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink(missing_ok=True)
    return True
