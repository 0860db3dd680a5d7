"""Storage size and short name of an element type, given by name."""

from __future__ import annotations

import re
from functools import cache

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@cache
def bits(dtype: str) -> int:
    """Storage bits of one element of the NumPy or ml_dtypes type ``dtype``.

    Example:
        >>> bits("bfloat16"), bits("bool"), bits("int4"), bits("float8_e4m3fn")
        (16, 8, 4, 8)
    """
    if dtype == "bool":
        return 8
    if dtype.startswith("key<"):
        return 64 if "fry" in dtype else 128
    found = re.match(r"[a-z]+?(\d+)", dtype)
    return int(found[1]) if found else 0


@cache
def short(dtype: str) -> str:
    """The abbreviation that jaxprs use: ``f32`` for ``float32``, ``bf16`` for ``bfloat16``."""
    found = re.fullmatch(r"([a-z]+?)(\d+)(.*)", dtype)
    if not found or found[1] not in _SHORT:
        return dtype
    return _SHORT[found[1]] + found[2] + found[3]
