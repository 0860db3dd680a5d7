"""Validate every field of a ``DeviceSpec``: its accepted range, and the error for any other value.

A rate of zero, a negative size or a NaN would not fail in the cost model: the plan would be for a machine
that cannot exist. Rates have a lower limit because times are integers in picoseconds, which the solver holds
in 64 bits.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.backends import backend_names


class InvalidDeviceError(ValueError):
    """A field of a ``DeviceSpec`` has a value that no device can have.

    ``field`` is its name, empty where a file is no description of a device; ``file`` is the file that was
    read, if there is one. The message also gives the value, the accepted range and the remedy.
    """

    def __init__(self, field: str, problem: str, file: str = "") -> None:
        where = f"{file}: {field}" if file and field else file or f"DeviceSpec.{field}"
        super().__init__(f"{where}: {problem}")
        self.field, self.problem, self.file = field, problem, file

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.problem, self.file)


@dataclass(frozen=True, slots=True)
class Whole:
    """Accepts an integer from ``low`` to ``high`` inclusive, in ``unit``; with ``or_none`` also 0, for a
    device without this feature."""

    low: int
    high: int
    unit: str
    remedy: str
    """What the error message advises."""
    or_none: bool = False

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        words = f"an integer from {self.low:,} to {self.high:,} {self.unit}"
        return f"{words}, or 0 for none" if self.or_none else words

    def check(self, field: str, value: Any) -> int:
        """``value`` as a Python integer. Integers of NumPy are accepted, booleans are not."""
        try:
            number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
        except TypeError:
            number = None
        if number is None:
            raise _refused(field, self.accepted, value, f"write an integer, such as int(...); {self.remedy}")
        if not (self.low <= number <= self.high or (self.or_none and number == 0)):
            raise _refused(field, self.accepted, number, self.remedy)
        return number


@dataclass(frozen=True, slots=True)
class Text:
    """Accepts a text that is not empty; one of ``choices`` if there are any."""

    remedy: str
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()

    @property
    def _known(self) -> tuple[str, ...]:
        return self.choices() if callable(self.choices) else self.choices

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return f"one of {', '.join(map(repr, self._known))}" if self.choices else "a text that is not empty"

    def check(self, field: str, value: Any) -> str:
        """``value`` as it is."""
        if not isinstance(value, str) or not value or (self.choices and value not in self._known):
            raise _refused(field, self.accepted, value, self.remedy)
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Accepts True and False."""

    remedy: str
    accepted: str = "True or False"

    def check(self, field: str, value: Any) -> bool:
        """``value`` as a Python boolean. Integers are not accepted."""
        if not isinstance(value, (bool, np.bool_)):
            raise _refused(field, self.accepted, value, self.remedy)
        return bool(value)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Accepts a tuple of pairs: a text, each at most once, and a value that ``item`` accepts."""

    item: Whole | Text
    remedy: str
    least: int = 0

    @property
    def accepted(self) -> str:
        """The accepted values in words."""
        return f"a tuple of pairs (text, {self.item.accepted})" + (", at least one" if self.least else "")

    def check(self, field: str, value: Any) -> tuple[tuple[str, Any], ...]:
        """``value``, the second element of each pair converted by ``item``."""
        if not isinstance(value, tuple) or len(value) < self.least:
            raise _refused(field, self.accepted, value, self.remedy)
        pairs: dict[str, Any] = {}
        for pair in value:
            if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
                raise _refused(field, self.accepted, pair, self.remedy)
            if pair[0] in pairs:
                raise _refused(
                    field, f"each name once in {self.accepted}", pair[0], "leave one of the two out"
                )
            pairs[pair[0]] = self.item.check(f"{field}[{pair[0]!r}]", pair[1])
        return tuple(pairs.items())


def _refused(field: str, accepted: str, value: Any, remedy: str) -> InvalidDeviceError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:59]}…"
    return InvalidDeviceError(field, f"expected {accepted}, got {shown} ({type(value).__name__}): {remedy}")


_MOST_BYTES = 10**18
_LEAST_RATE = 10**6
_MOST_BYTES_PER_S, _MOST_PER_S = 10**16, 10**19
"""Some thousand times the rates of today's devices."""
_MOST_PS = 10**12


def _size(low: int, remedy: str) -> Whole:
    return Whole(low, _MOST_BYTES, "bytes", remedy)


def _rate(unit: str, remedy: str, or_none: bool = False) -> Whole:
    most = _MOST_BYTES_PER_S if unit == "bytes" else _MOST_PER_S
    return Whole(_LEAST_RATE, most, f"{unit} per second", remedy, or_none)


def _overhead(remedy: str) -> Whole:
    return Whole(0, _MOST_PS, "picoseconds", remedy)


_BYTES_PER_S = "4.8 TB/s is 4_800 * 10**9"
_FLOPS_PER_S = "494.7 Tflop/s is 494_700 * 10**9"
_CACHE_RATE = _rate("bytes", f"{_BYTES_PER_S}; a device without this cache has 0 bytes of it, too", True)

FIELDS: Mapping[str, Whole | Text | Flag | Pairs] = {
    "name": Text("give the device a name"),
    "description": Text("describe the device in a few words"),
    "platform": Text("choose the platform on which JAX runs it", ("gpu", "tpu", "cpu")),
    "backend": Text("choose what its kernels are written in; 'xla' leaves all of them to XLA", backend_names),
    "core_count": Whole(1, 10**7, "cores", "count a GPU's SMs, a TPU's TensorCores or a CPU's cores"),
    "hbm_capacity_bytes": _size(1, "80 GB are 80 * 10**9"),
    "hbm_bytes_per_s": _rate("bytes", _BYTES_PER_S),
    "cache_bytes": _size(0, "50 MiB are 50 * 2**20; 0 where no cache is shared by all cores"),
    "cache_bytes_per_s": _CACHE_RATE,
    "onchip_bytes": _size(1, "give what one kernel may use on a core: 227 KiB are 227 * 1024"),
    "register_bytes": _size(0, "256 KiB are 256 * 1024; 0 where registers do not limit a kernel"),
    "launch_ps": _overhead("1 µs is 10**6"),
    "matrix_flops_per_s": Pairs(
        _rate("flops", _FLOPS_PER_S), 'write (("float32", 494_700 * 10**9), ("bfloat16", ...))', least=1
    ),
    "vector_flops_per_s": _rate("flops", _FLOPS_PER_S),
    "transcendental_per_s": _rate("results", "a core's results a clock, times its clock, times the cores"),
    "sequential_grid": Flag("True for a TPU's pipeline, False for others"),
    "private_cache_bytes": _size(0, "2 MiB are 2 * 2**20; 0 where each core has no cache of its own"),
    "private_cache_bytes_per_s": _CACHE_RATE,
    "fresh_bytes_per_s": _rate("bytes", f"{_BYTES_PER_S}; 0 where memory is allocated once for all", True),
    "reduction_per_s": _rate("elements", "0 where a reduction is like other vector operations", True),
    "reduction_row_ps": _overhead("3 ns are 3_000; 0 where a short row takes no longer than its elements"),
    "step_ps": _overhead("1 µs is 10**6; 0 where an iteration of a loop costs nothing beside its kernels"),
    "grid_step_ps": _overhead("1 µs is 10**6; used for a sequential grid only"),
    "hbm_latency_ps": _overhead("1 µs is 10**6; used for a GPU only"),
    "handoff_ps": _overhead("1 µs is 10**6; used for a CPU only"),
    "large_bytes": _size(0, "2 MiB are 2 * 2**20; 0 stands for what follows from the private caches"),
    "sources": Pairs(Text("say where the number comes from"), 'write (("launch_ps", "datasheet, page 3"),)'),
}
"""The accepted values of each field of ``DeviceSpec``. Every field must have an entry."""

_CACHES = (("cache_bytes", "cache_bytes_per_s"), ("private_cache_bytes", "private_cache_bytes_per_s"))
"""Pairs of the size and the rate of a cache: a size above 0 needs a rate above 0."""


def check_fields(device: Any) -> None:
    """Check every field of a new ``DeviceSpec``, and convert NumPy scalars to Python's.

    Raises:
        InvalidDeviceError: a field is outside its range, or a cache has bytes and no rate.
    """
    for field in dataclasses.fields(device):
        value = getattr(device, field.name)
        checked = FIELDS[field.name].check(field.name, value)
        if checked is not value:
            object.__setattr__(device, field.name, checked)
    for size, rate in _CACHES:
        if getattr(device, size) and not getattr(device, rate):
            accepted = f"a rate above 0 beside {size}={getattr(device, size):,}"
            raise _refused(rate, accepted, 0, f"give the rate, or set {size}=0")
