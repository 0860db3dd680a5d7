"""Point out where the modelled and the measured times in a table differ by more than a factor of two."""

from __future__ import annotations

from collections.abc import Iterable

from fuseplan.support.format import times_text

FACTOR = 2.0
"""The ratio of the two times from which they are pointed out: the plan with the best modelled time then need
not have the best measured one."""

_LEFT_OUT = {
    "cpu": "The model of a CPU does not know how XLA fuses what is left to it, nor what its threads and its "
    "allocator take",
    "gpu": "The model of a GPU does not know its clock under load, nor what the compiler makes of a kernel",
    "tpu": "The model of a TPU does not know what the compiler makes of a kernel",
}
"""By ``DeviceSpec.platform``, what a modelled time leaves out."""


def are_apart(modelled: float | None, measured: float | None) -> bool:
    """Whether two times are known (not None, 0 or NaN) and differ by more than ``FACTOR``.

    Example:
        >>> are_apart(1.0, 2.5), are_apart(1.0, float("nan"))
        (True, False)
    """
    if not modelled or not measured:
        return False
    return max(measured / modelled, modelled / measured) > FACTOR


def divergence_lines(rows: Iterable[tuple[str, float | None, float | None]], platform: str) -> list[str]:
    """One sentence on the rows whose two times differ by more than ``FACTOR``, and one on what the model
    leaves out; nothing where there are none.

    Args:
        rows: a name, the modelled and the measured time in one unit; None or NaN where there is none.
        platform: the ``DeviceSpec.platform`` of the device on which they were measured.

    Example:
        >>> print(divergence_lines([("mlp", 1.0, 1.5), ("softmax", 1.0, 2.5)], "tpu")[0])
        Measured over modelled time, where they are more than a factor of 2 apart: softmax 2.50×.
    """
    apart = [
        f"{name} {times_text(measured / modelled)}"
        for name, modelled, measured in rows
        if modelled and measured and are_apart(modelled, measured)
    ]
    if not apart:
        return []
    where = f"where they are more than a factor of {FACTOR:g} apart"
    lines = [f"Measured over modelled time, {where}: {', '.join(apart)}."]
    return [*lines, f"{_LEFT_OUT[platform]}."] if platform in _LEFT_OUT else lines
