"""Work over a rate as whole picoseconds: integers, so that a plan never depends on the
machine that made it."""

from __future__ import annotations

_PS_PER_S = 10**12


def time_ps(amount: int, rate: int) -> int:
    """Picoseconds for ``amount`` at ``rate`` a second, rounded up; a rate of 0 is no limit.

    The sum of rounded parts is no less than the rounded sum.

    Example:
        >>> time_ps(3, 2), time_ps(1, 3 * 10**12), time_ps(5, 0)
        (1500000000000, 1, 0)
    """
    return -(-amount * _PS_PER_S // rate) if rate else 0


def bytes_in(time: int, bytes_per_s: int) -> int:
    """The bytes that move in so many picoseconds."""
    return time * bytes_per_s // _PS_PER_S
