"""The order of least peak by best-first search over sets of kernels that have run.

The problem is register allocation's, and hard (Sethi, Complete register allocation problems,
1975). What is alive depends only on which kernels have run, so a search over such sets is exact:
sets wait by the least peak with which they can be reached, and the first complete one is an
answer. Two things keep it small:

- *What costs nothing is done at once.* A ready kernel that frees at least what it writes, and
  whose own step stays within the peak reached anyway, can be moved to the front of every order
  that remains: nothing that follows is worse, because it frees no less the later it runs.
- A set is reached once: how is of no matter to what follows.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass

from fuseplan.memory.liveness import Lives
from fuseplan.support.bitset import bits

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
