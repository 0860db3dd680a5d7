"""The order of a plan's kernels in which its temporaries need the least memory at once.

The order that is given stays unless another is better. A floor under every order often proves it
the best; else a search over sets of kernels (``fuseplan.memory.order_search``) finds the best, or, cut
short, a good one, which is then improved where its peak is: a few kernels around it at a time,
while all others keep their place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Graph
from fuseplan.memory.liveness import Lives, lives_of, peak, profile, window
from fuseplan.memory.order_bound import peak_floor
from fuseplan.memory.order_search import search
from fuseplan.plan.fusion_plan import Kernel

MAX_STATES = 4_000
"""Sets of kernels that the search looks at before it settles for a good order: 0.2 s at most.
No plan of the workloads needs 100 but the training steps of GPT-2, whose floor is met but for
millionths."""

_LARGE, _FEW_STATES = 512, 200
"""From so many kernels on a good order is wanted soon."""

CLOSE = 10_000
"""And one is good whose peak exceeds the floor by a ten-thousandth: 18 ms for 2,000 kernels."""

_WINDOWS = (16, 48)
"""Kernels around the peak that are ordered anew together."""

_WINDOW_STATES, _MAX_ROUNDS = 200, 16

Steps = tuple[int, ...]
"""Kernels by position, in an order that can run."""


@dataclass(frozen=True, slots=True)
class Order:
    """Kernels in an order that can run, and how sure it is that none needs less memory."""

    kernels: tuple[Kernel, ...]
    peak_bytes: int
    bound_bytes: int
    """No order of these kernels has a lower peak."""

    @property
    def status(self) -> str:
        """``OPTIMAL`` (proven: ``bound_bytes == peak_bytes``) or ``FEASIBLE``."""
        return "OPTIMAL" if self.bound_bytes == self.peak_bytes else "FEASIBLE"


def least_peak(
    graph: Graph,
    kernels: Sequence[Kernel],
    max_states: int = MAX_STATES,
    close: int = CLOSE,
    expires_at: float = math.inf,
) -> Order:
    """``kernels``, which are in an order that can run, in the one of least peak that was found:
    never worse than the order given, and that order where none better was found.

    Values are read after they are written, and side effects keep their order. The answer depends
    on nothing but the arguments. Of many kernels, a peak is good enough that exceeds the floor by
    one part in ``close``; 0 asks for the least. Where ``time.monotonic()`` reaches ``expires_at`` the
    best order known by then is the answer.
    """
    order, peak_bytes, bound_bytes = arrange(lives_of(graph, kernels), max_states, close, expires_at)
    return Order(tuple(kernels[k] for k in order), peak_bytes, bound_bytes)


def arrange(
    lives: Lives, max_states: int = MAX_STATES, close: int = CLOSE, expires_at: float = math.inf
) -> tuple[Steps, int, int]:
    """An order of ``lives``' kernels, its peak, and a bound under that of every order."""
    given = tuple(range(lives.n_kernels))
    known, floor = peak(lives, given), peak_floor(lives)
    large = lives.n_kernels > _LARGE
    if known <= floor or (large and close and (known - floor) * close <= known):
        return given, known, floor
    states = min(max_states, _FEW_STATES) if large and close else max_states
    found = search(lives, floor, known, states, expires_at)
    order = found.order or given
    if found.bound_bytes < peak(lives, order):
        order = _improve(lives, order, found.bound_bytes, expires_at)
    return order, peak(lives, order), found.bound_bytes


def _improve(lives: Lives, order: Steps, floor: int, expires_at: float) -> Steps:
    """Order the kernels around the peak anew, until that helps no more."""
    for _ in range(_MAX_ROUNDS):
        needs = profile(lives, order)
        highest = max(needs)
        if highest <= floor or time.monotonic() >= expires_at:
            break
        middle = needs.index(highest)
        for size in _WINDOWS:
            start = max(middle - size // 2, 0)
            part = window(lives, order, start, min(start + size, len(order)))
            found = search(part, min(floor, highest - 1), highest, _WINDOW_STATES, expires_at)
            if found.order is not None:
                inner = tuple(order[start + k] for k in found.order)
                order = (*order[:start], *inner, *order[start + len(inner) :])
                break
        else:
            break
    return order
