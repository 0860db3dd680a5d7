"""A floor under the peak that no order of the kernels goes below.

While a kernel runs, every buffer is alive whose writer must come before it (or is it) and one
of whose users must come after it (or is it), in every order.
"""

from __future__ import annotations

import numpy as np

from fuseplan.memory.liveness import Lives
from fuseplan.support.bitset import bits

_FEW = 24
"""Kernels that are sooner counted one by one than by a vector operation on all between."""


def peak_floor(lives: Lives) -> int:
    """Bytes that are in use at once in every order: the largest need of a single kernel."""
    n = lives.n_kernels
    if not n:
        return 0
    below, above = _reach(lives)
    everything = (1 << n) - 1
    needs = list(lives.tiles_bytes)
    many = np.zeros(n, dtype=np.int64)
    for size, writer, users, held in zip(
        lives.sizes_bytes, lives.writers, lives.users, lives.held, strict=True
    ):
        alive = everything if writer < 0 else below[writer]
        if not held:
            until = 0
            for k in users:
                until |= above[k]
            alive &= until
        if alive.bit_count() <= _FEW:
            for k in bits(alive):
                needs[k] += size
        else:
            first, end = max(writer, 0), alive.bit_length()
            packed = (alive >> first).to_bytes((end - first + 7) // 8, "little")
            flags = np.unpackbits(np.frombuffer(packed, np.uint8), count=end - first, bitorder="little")
            many[first:end][flags.view(bool)] += size
    return lives.base_bytes + max(map(sum, zip(needs, many.tolist(), strict=True)))


def _reach(lives: Lives) -> tuple[list[int], list[int]]:
    """For each kernel, itself with all that must run later, and with all that must run earlier:
    a bit a kernel."""
    n = lives.n_kernels
    below, above = [1 << k for k in range(n)], [1 << k for k in range(n)]
    for k in reversed(range(n)):
        for s in lives.after[k]:
            below[k] |= below[s]
    for k in range(n):
        for s in lives.after[k]:
            above[s] |= above[k]
    return below, above
