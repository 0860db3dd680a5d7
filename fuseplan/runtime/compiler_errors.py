"""What a device's compiler says when it refuses a kernel, and how much it would have needed."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNIT_BYTES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = r"(0x[0-9a-f]+|[\d.]+[BKMG]?)"

# Needed, then available.
_ONCHIP = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Shared memory size limit exceeded: requested {_SIZE}, available: {_SIZE}",  # XLA, Triton
        rf"smem_bytes={_SIZE} > max_smem_bytes={_SIZE}",  # Pallas, Mosaic GPU
        rf"too much shared data \({_SIZE} bytes, {_SIZE} max\)",  # ptxas
        rf"Scoped allocation with size {_SIZE} and limit {_SIZE}",  # XLA, TPU: what a kernel may ask for
        rf"Used {_SIZE} of {_SIZE} vmem",  # XLA, TPU: all that there is
    )
)
_REGISTERS = re.compile(r"(?i)too many registers|register allocation failed|out of registers")
_PRIMITIVE = re.compile(r"Unimplemented primitive in Pallas [^:]*: (\w+)")
_WORDS = ("Mosaic", "Triton", "triton", "ptxas", "Pallas", "pallas", "scoped vmem")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the compiler refused a kernel, as far as its message can be understood."""

    said: str
    """The first line of the message that tells it."""
    needed_bytes: int = 0
    """Of on-chip memory; 0 where that is not the reason."""
    available_bytes: int = 0
    registers: bool = False
    primitive: str = ""
    """The operation that the compiler does not know, if that is the reason."""


def read_refusal(error: Exception) -> Refusal:
    """The reason in an error that was raised while a kernel was compiled.

    Example:
        >>> read_refusal(ValueError("smem_bytes=4096 > max_smem_bytes=1024")).needed_bytes
        4096
    """
    text = str(error)
    lines = text.splitlines() or [type(error).__name__]
    for pattern in _ONCHIP:
        if found := pattern.search(text):
            needed, available = map(_bytes, found.groups())
            return Refusal(found.group(), needed, available)
    if found := _PRIMITIVE.search(text):
        return Refusal(lines[0], primitive=found.group(1))
    return Refusal(lines[0], registers=bool(_REGISTERS.search(text)))


def is_refusal(error: Exception) -> bool:
    """Whether an error is one of the compilers' of kernels, from its words alone."""
    text = str(error)
    told = any(pattern.search(text) for pattern in _ONCHIP)
    return told or "pallas" in type(error).__module__ or any(word in text for word in _WORDS)


def _bytes(text: str) -> int:
    """``"458752"``, ``"0xd000"`` or ``"28.01M"`` as a number."""
    if text.startswith("0x"):
        return int(text, 16)
    unit = text[-1] if text[-1] in _UNIT_BYTES else ""
    return round(float(text.removesuffix(unit)) * _UNIT_BYTES[unit])
