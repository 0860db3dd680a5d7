"""Place the temporaries of a plan in one arena, so that buffers that are live at once do not overlap.

This is dynamic storage allocation, which is NP-hard. Each buffer goes to the smallest gap that holds it among
the buffers already placed, large buffers first: the best-fit heuristic of Sekiyama et al. (Profile-guided
memory optimization for deep neural networks, 2018) with the order of Pisarchyk and Lee's greedy-by-size
(Efficient memory management for deep neural net inference, 2020). No arena is smaller than the bytes that are
live at once. Where the first arena is larger, other orders are tried, and buffers at its top are placed
earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from costmodel.graph import Graph
from fuseplan.memory.liveness import live_ranges
from fuseplan.plan.fusion_plan import Kernel

ALIGNMENT_BYTES = 256
"""Addresses of GPU allocations are multiples of at least 256 (CUDA C++ programming guide, device
memory accesses), and XLA's BFC allocator hands out multiples of 256 (``kMinAllocationSize``)."""

MAX_PLACEMENTS = 8_000
"""How often ``pack`` places a buffer, at 20 µs each, while the arena is larger than its lower bound."""

MANY_BUFFERS = 400
"""Of more buffers, ``pack`` accepts an arena that exceeds its lower bound by 0.5 %."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An interval of the arena and the kernels, first and last, between which it is in use.

    ``value`` is the first array stored there, which bitcasts may give further names; -1 for scratch memory
    that a kernel of tiled loops allocates while it runs.
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
    """Offsets for every temporary of ``kernels``, which run in this order; by first kernel.

    Inputs, outputs and empty arrays are not in the arena. Offsets are multiples of ``ALIGNMENT_BYTES``.
    """
    lives = live_ranges(graph, kernels)
    buffers = [Buffer(r.value, 0, r.nbytes, r.writer, r.users[-1]) for r in lives.ranges]
    buffers += [Buffer(-1, 0, size, k, k) for k, size in enumerate(lives.scratch_bytes) if size]
    return pack(sorted(buffers, key=lambda b: (b.first, b.last, b.value)))


def arena_bytes(buffers: Sequence[Buffer]) -> int:
    """The size of an arena that holds ``buffers`` at their offsets: a multiple of ``ALIGNMENT_BYTES``, at
    least ``live_bytes``."""
    return _aligned(max((b.end_bytes for b in buffers), default=0))


def live_bytes(buffers: Sequence[Buffer]) -> int:
    """The most aligned bytes in use at once: a lower bound on the arena for any offsets."""
    change = [0] * (2 + max((b.last for b in buffers), default=0))
    for b in buffers:
        change[b.first] += _aligned(b.nbytes)
        change[b.last + 1] -= _aligned(b.nbytes)
    return max(accumulate(change))


def pack(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """``buffers`` in their order, with offsets."""
    n, least = len(buffers), live_bytes(buffers)
    enough = least + (least // 200 if n > MANY_BUFFERS else 0)
    lengths = [_aligned(b.nbytes) for b in buffers]
    best, best_bytes = [0] * n, sum(lengths)
    tries = max(MAX_PLACEMENTS // max(n * len(_PRIORITIES), 1), 1)
    for priority in _PRIORITIES:
        order = sorted(range(n), key=lambda i: (*priority(buffers[i]), i))
        for _ in range(tries):
            offsets = _place(buffers, lengths, order)
            ends = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
            top = max(ends, default=0)
            if top <= best_bytes:
                best, best_bytes = offsets, top
            if best_bytes <= enough:
                break
            # Next time, place the buffers at the top first.
            order = sorted(order, key=lambda i: ends[i] < top)
        if best_bytes <= enough:
            break
    return tuple(
        Buffer(b.value, offset, b.nbytes, b.first, b.last) for b, offset in zip(buffers, best, strict=True)
    )


_PRIORITIES: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
    lambda b: (-b.nbytes, b.first),
    lambda b: (b.first - b.last, -b.nbytes),
    lambda b: (b.nbytes * (b.first - b.last - 1),),
    lambda b: (b.first, -b.last),
)
"""Orders of placement: by size, by length of the live range, by their product, by first kernel."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _place(buffers: Sequence[Buffer], lengths: Sequence[int], order: Sequence[int]) -> list[int]:
    """The offset of each buffer if they are placed in ``order``, each in the smallest gap that holds it
    among the placed buffers that it overlaps in time, else above them."""
    offsets = [0] * len(buffers)
    # One column for each placed buffer, by start: first and last kernel, start and end.
    placed = np.empty((4, len(buffers)), dtype=np.int64)
    for count, i in enumerate(order):
        first, last, length = buffers[i].first, buffers[i].last, lengths[i]
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
