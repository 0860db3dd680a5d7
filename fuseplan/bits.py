"""Sets of small numbers as the bits of an integer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, count
from typing import TypeVar

T = TypeVar("T")

_DIGITS = bytes(c == ord("1") for c in range(256))


def bits(mask: int) -> list[int]:
    """The positions of the bits that are set, ascending."""
    return pick(mask, count())


def pick(mask: int, of: Iterable[T]) -> list[T]:
    """Those of ``of`` at the positions that are set."""
    # Two million positions a step of 12,000 equations: all digits at once take half the time.
    return list(compress(of, bin(mask)[:1:-1].encode().translate(_DIGITS)))
