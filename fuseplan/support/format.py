"""Format numbers with their units, and text in aligned columns or wrapped lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

TIED = "\N{NO-BREAK SPACE}"
"""Holds a number and its unit on one line while text is wrapped."""


def time_text(us: float) -> str:
    """Microseconds in four or so significant digits: ``0.42``, ``12.3``, ``1,204``."""
    if us >= 1000:
        return f"{us:,.0f}"
    return f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def bytes_text(n: float) -> str:
    """``512 B``, ``3.1 kB``, ``58.3 MB``, ``1.2 GB`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000 or unit == "GB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def seconds_text(s: float) -> str:
    """``3 ms``, ``0.51 s``, ``12 s``."""
    if s < 0.1:
        return f"{s * 1000:.0f} ms"
    return f"{s:.2f} s" if s < 10 else f"{s:.0f} s"


def factor_text(factor: float) -> str:
    """``1.03``, ``28.6``, ``293``; rounded up, so that no bound is stated that does not hold."""
    digits = 2 if factor < 10 else 1 if factor < 100 else 0
    return f"{math.ceil(round(factor * 10**digits, 6)) / 10**digits:,.{digits}f}"


def times_text(ratio: float) -> str:
    """``0.53×``, ``1.00×``, ``28.6×``, ``293×``: an estimate of how many times as much."""
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×" if ratio < 100 else f"{ratio:,.0f}×"


def counted(n: int, noun: str) -> str:
    """``1 kernel``, ``3 kernels``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """The text in lines of so many characters, all but the first indented."""
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False)
    return [line.replace(TIED, " ") for line in lines]


def cut(text: str, width: int) -> str:
    """The text in at most ``width`` characters, with an ellipsis where it is longer."""
    return text if len(text) <= width else text[: width - 1] + "…"


def columns(cells: Sequence[Sequence[str]], right: Iterable[int] = (), limit: int = 0) -> list[str]:
    """Text in aligned columns two spaces apart. With ``limit``, the widest text column is cut
    until a line fits that many characters."""
    right = set(right)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    text = [i for i in range(len(widths)) if i not in right]
    while limit and text and sum(widths) + 2 * (len(widths) - 1) > limit:
        widest = max(text, key=lambda i: widths[i])
        if widths[widest] <= 8:  # no column of words is of use any narrower
            break
        widths[widest] -= 1
    lines = []
    for row in cells:
        padded = [
            cut(cell, width).rjust(width) if i in right else cut(cell, width).ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines
