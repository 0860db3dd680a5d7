"""The order of a plan's kernels in which its temporaries need the least memory at once.

The order that is given stays unless another is better. A floor under every order often proves it
the best; else a search over sets of kernels (``fuseplan.memory.order``) finds the best, or, cut
short, a good one, which is then improved where its peak is: a few kernels around it at a time,
while all others keep their place.

The order of least peak by best-first search over sets of kernels that have run.

The problem is register allocation's, and hard (Sethi, Complete register allocation problems,
1975). What is alive depends only on which kernels have run, so a search over such sets is exact:
sets wait by the least peak with which they can be reached, and the first complete one is an
answer. Two things keep it small:

- *What costs nothing is done at once.* A ready kernel that frees at least what it writes, and
  whose own step stays within the peak reached anyway, can be moved to the front of every order
  that remains: nothing that follows is worse, because it frees no less the later it runs.
- A set is reached once: how is of no matter to what follows.

A floor under the peak that no order of the kernels goes below.

While a kernel runs, every buffer is alive whose writer must come before it (or is it) and one
of whose users must come after it (or is it), in every order.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.graph import Graph
from fuseplan.memory.liveness import Lives, lives_of, peak, profile, window
from fuseplan.plan.fusion_plan import Kernel
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


Path = tuple  # (kernel, path before it), or () at the start


@dataclass(frozen=True, slots=True)
class Found:
    """``order`` is None where none better than the one known was found; no order has a peak
    below ``bound_bytes``."""

    order: tuple[int, ...] | None
    bound_bytes: int
    n_states: int


@dataclass(frozen=True, slots=True)
class State:
    """Some kernels have run: ``done`` and ``ready`` have a bit a kernel."""

    done: int
    ready: int
    alive_bytes: int
    path: Path


class Moves:
    """What running one more kernel does."""

    def __init__(self, lives: Lives) -> None:
        n = lives.n_kernels
        self.n, self.after = n, lives.after
        self.before = [0] * n
        for k, successors in enumerate(lives.after):
            for s in successors:
                self.before[s] |= 1 << k
        self.writes = [0] * n
        alive = lives.base_bytes
        uses: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for size, writer, users, held in zip(
            lives.sizes_bytes, lives.writers, lives.users, lives.held, strict=True
        ):
            if writer < 0:
                alive += size
            else:
                self.writes[writer] += size
            if not held:
                mask = sum(1 << k for k in users)
                for k in users:
                    uses[k].append((size, mask))
        self.uses = uses
        self.needs = [w + t for w, t in zip(self.writes, lives.tiles_bytes, strict=True)]
        """What a kernel needs while it runs, beside what is alive already."""
        self.everything = (1 << n) - 1
        self.start = State(0, sum(1 << k for k in range(n) if not self.before[k]), alive, ())

    def grows(self, done: int, k: int) -> int:
        """By how much more is alive after ``k`` than before, if ``done`` have run by then."""
        left = ~(done | 1 << k)
        return self.writes[k] - sum(size for size, mask in self.uses[k] if not mask & left)

    def run(self, state: State, k: int) -> State:
        """The state after ``k``, which must be ready."""
        done = state.done | 1 << k
        ready = state.ready ^ 1 << k
        for s in self.after[k]:
            if not self.before[s] & ~done:
                ready |= 1 << s
        return State(done, ready, state.alive_bytes + self.grows(state.done, k), (k, state.path))

    def settle(self, state: State, peak_bytes: int) -> State:
        """The state after all that costs nothing where ``peak_bytes`` are reached anyway."""
        again = True
        while again:
            again = False
            left = state.ready
            while left:
                low = left & -left
                left ^= low
                k = low.bit_length() - 1
                if state.alive_bytes + self.needs[k] <= peak_bytes and self.grows(state.done, k) <= 0:
                    known = state.ready
                    state = self.run(state, k)
                    left |= state.ready & ~known
                    again = True
        return state


def search(
    lives: Lives, floor_bytes: int, known_bytes: int, max_states: int, expires_at: float = math.inf
) -> Found:
    """An order with a peak below ``known_bytes``, the least if ``max_states`` suffice.

    ``floor_bytes`` must be a floor under every order's peak. Where the states run out, the best
    of them is completed step by step, always by what needs the least; where the time does
    (``time.monotonic()`` reaches ``expires_at``), none is.
    """
    moves = Moves(lives)
    waiting: list[tuple[int, int, int, State]] = [(floor_bytes, 0, 0, moves.start)]
    reached: dict[int, int] = {}
    n_states = n_entries = 0
    while waiting:
        peak, _, _, state = heapq.heappop(waiting)
        if reached.get(state.done, peak + 1) <= peak:
            continue
        reached[state.done] = peak
        settled = moves.settle(state, peak)
        if settled.done == moves.everything:
            return Found(_order(settled.path), peak, n_states)
        if settled.done != state.done:
            if reached.get(settled.done, peak + 1) <= peak:
                continue
            reached[settled.done] = peak
        state = settled
        n_states += 1
        if time.monotonic() >= expires_at:
            return Found(None, peak, n_states)
        if n_states > max_states:
            return Found(_complete(moves, state, peak, known_bytes), peak, n_states)
        for k in bits(state.ready):
            step = max(peak, state.alive_bytes + moves.needs[k])
            done = state.done | 1 << k
            if step >= known_bytes or reached.get(done, step + 1) <= step:
                continue
            n_entries += 1
            heapq.heappush(waiting, (step, -done.bit_count(), n_entries, moves.run(state, k)))
    return Found(None, known_bytes, n_states)


def _complete(moves: Moves, state: State, peak: int, known_bytes: int) -> tuple[int, ...] | None:
    """List scheduling from ``state`` on: the kernel that raises the peak least, then that leaves
    least alive; None once that is no better than what is known."""
    while state.done != moves.everything:
        best: tuple[int, int, int] | None = None
        for k in bits(state.ready):
            step = max(peak, state.alive_bytes + moves.needs[k])
            option = (step, moves.grows(state.done, k), k)
            if best is None or option < best:
                best = option
        assert best is not None, "kernels wait for each other"
        peak = best[0]
        if peak >= known_bytes:
            return None
        state = moves.settle(moves.run(state, best[2]), peak)
    return _order(state.path)


def _order(path: Path) -> tuple[int, ...]:
    order: list[int] = []
    while path:
        k, path = path
        order.append(k)
    return tuple(reversed(order))


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
