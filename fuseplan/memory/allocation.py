"""Where each temporary lies: offsets in one arena, so that what is alive at once never overlaps.

This is dynamic storage allocation, and hard to do best. Each buffer goes to the lowest gap that
holds it among those placed before it, the largest first: the best-fit heuristic for profiled
memory of Sekiyama et al. (Profile-guided memory optimization for deep neural networks, 2018) with
the order of Pisarchyk and Lee's greedy by size (Efficient memory management for deep neural net
inference, 2020). No arena is smaller than what is alive at once; where the first one is larger,
other orders are tried, and buffers at its top are placed earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from costmodel.graph import Graph
from fuseplan.memory.liveness import lives_of
from fuseplan.plan.fusion_plan import Kernel

ALIGNMENT_BYTES = 256
"""Addresses of GPU allocations are multiples of at least 256 (CUDA C++ programming guide, device
memory accesses), and XLA's BFC allocator hands out multiples of 256 (``kMinAllocationSize``)."""

_PLACED, _MANY, _CLOSE = 8_000, 400, 200
"""So many times a buffer is placed while the arena is larger than what is alive at once, 20 µs
each. Of many buffers, an arena is good enough that is larger by half a percent."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A stretch of the arena and the kernels, first and last, between which it is in use.

    ``value`` is the array that lies in it first, which bitcasts may give other names; -1 is what
    a kernel of tiled loops keeps to itself while it runs.
    """

    value: int
    offset_bytes: int
    nbytes: int
    first: int
    last: int

    @property
    def end_bytes(self) -> int:
        """The offset behind its last byte."""
        return self.offset_bytes + self.nbytes


def place_buffers(graph: Graph, kernels: Sequence[Kernel]) -> tuple[Buffer, ...]:
    """A place for every temporary of ``kernels``, which run in this order, by first kernel.

    Inputs and outputs of the graph are not in the arena, and arrays without elements need no
    place. Offsets are multiples of ``ALIGNMENT_BYTES``.
    """
    lives = lives_of(graph, kernels)
    wanted = [
        Buffer(v, 0, size, writer, users[-1])
        for v, size, writer, users in zip(
            lives.values, lives.sizes_bytes, lives.writers, lives.users, strict=True
        )
    ]
    wanted += [Buffer(-1, 0, size, k, k) for k, size in enumerate(lives.tiles_bytes) if size]
    return pack(sorted(wanted, key=lambda b: (b.first, b.last, b.value)))


def arena_bytes(buffers: Sequence[Buffer]) -> int:
    """How large an arena has to be that holds ``buffers`` where they lie: a multiple of
    ``ALIGNMENT_BYTES``, at least ``alive_bytes``."""
    return _aligned(max((b.end_bytes for b in buffers), default=0))


def alive_bytes(buffers: Sequence[Buffer]) -> int:
    """The most aligned bytes in use at once: no arena is smaller, wherever the buffers lie."""
    change = [0] * (2 + max((b.last for b in buffers), default=0))
    for b in buffers:
        change[b.first] += _aligned(b.nbytes)
        change[b.last + 1] -= _aligned(b.nbytes)
    return max(accumulate(change))


def pack(wanted: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """``wanted`` in their order, with offsets."""
    n, least = len(wanted), alive_bytes(wanted)
    enough = least + (least // _CLOSE if n > _MANY else 0)
    lengths = [_aligned(b.nbytes) for b in wanted]
    best, best_bytes = [0] * n, sum(lengths)
    tries = max(_PLACED // max(n * len(_RANKS), 1), 1)
    for rank in _RANKS:
        order = sorted(range(n), key=lambda i: (*rank(wanted[i]), i))
        for _ in range(tries):
            offsets = _place(wanted, lengths, order)
            ends = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
            top = max(ends, default=0)
            if top <= best_bytes:
                best, best_bytes = offsets, top
            if best_bytes <= enough:
                break
            # What sticks out is placed before what it had to lie above.
            order = sorted(order, key=lambda i: ends[i] < top)
        if best_bytes <= enough:
            break
    return tuple(
        Buffer(b.value, offset, b.nbytes, b.first, b.last) for b, offset in zip(wanted, best, strict=True)
    )


_RANKS: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.nbytes, b.first),
    lambda b: (b.first - b.last, -b.nbytes),
    lambda b: (b.nbytes * (b.first - b.last - 1),),
    lambda b: (b.first, -b.last),
)
"""Orders in which buffers are placed: the largest first, the longest alive, both, the earliest."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _place(wanted: Sequence[Buffer], lengths: Sequence[int], order: Sequence[int]) -> list[int]:
    """The offset of each buffer when they are placed in ``order``, each in the smallest gap that
    holds it among those that it meets, else above them."""
    offsets = [0] * len(wanted)
    # First and last kernel, start and end of what is placed, by start.
    placed = np.empty((4, len(wanted)), dtype=np.int64)
    for count, i in enumerate(order):
        first, last, length = wanted[i].first, wanted[i].last, lengths[i]
        known = placed[:, :count]
        starts, ends = known[2:, (known[0] <= last) & (known[1] >= first)]
        at = 0
        if len(starts):
            ends = np.maximum.accumulate(ends)
            gaps = starts - np.concatenate(([0], ends[:-1]))
            fits = np.flatnonzero(gaps >= length)
            gap = fits[gaps[fits].argmin()] if len(fits) else len(starts)
            at = int(ends[gap - 1]) if gap else 0
        offsets[i] = at
        k = int(np.searchsorted(known[2], at))
        placed[:, k + 1 : count + 1] = placed[:, k:count].copy()
        placed[:, k] = first, last, at, at + length
    return offsets
