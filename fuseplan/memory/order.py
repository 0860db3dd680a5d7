"""Order a plan's kernels so that its temporaries need the least memory at once.

This is the problem of register allocation by ordering, and NP-hard (Sethi, Complete register allocation
problems, 1975). The given order stays unless another one is better. A lower bound
(``liveness.order_peak_bound``) often proves it optimal. Otherwise a best-first search over sets of kernels
that have run finds an optimal order or, at its limit, a good one.

The search is exact because the live bytes depend on the set alone. Sets are expanded by the least peak with
which they can be reached, each once, so the first complete set is optimal. A ready kernel that frees at least
as much as it writes, and whose own step stays within the peak reached, runs at once: moving it to the front
makes no order of the remaining kernels worse.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Graph
from fuseplan.memory.liveness import Liveness, largest_use, live_ranges, order_peak_bound, peak
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.support.bitset import bits


@dataclass(frozen=True, slots=True)
class OrderOptions:
    """Limits of the search for an order."""

    max_states: int = 4_000
    """Sets of kernels to expand: 0.2 s. No plan of the workloads needs 100, but for training steps of GPT-2,
    whose bound is missed by millionths."""
    many_kernels: int = 512
    """A plan of more kernels than this expands at most ``max_states_of_many`` sets, and accepts a peak within
    ``tolerance`` of the bound."""
    max_states_of_many: int = 200
    tolerance: float = 1e-4
    """Share of the peak. 0: look for the least peak, however many kernels there are."""


DEFAULTS = OrderOptions()


@dataclass(frozen=True, slots=True)
class Order:
    """Kernels in an order that can run, with their peak and a bound on every order."""

    kernels: tuple[Kernel, ...]
    peak_bytes: int
    bound_bytes: int
    """No order of these kernels has a lower peak."""

    @property
    def status(self) -> str:
        """``OPTIMAL`` (proven: ``bound_bytes == peak_bytes``) or ``FEASIBLE``."""
        return "OPTIMAL" if self.bound_bytes == self.peak_bytes else "FEASIBLE"


def minimise_peak(
    graph: Graph, kernels: Sequence[Kernel], options: OrderOptions = DEFAULTS, expires_at: float = math.inf
) -> Order:
    """``kernels``, which are in an order that can run, in the order of least peak that was found.

    The given order is kept where none better was found. Values are read after they are written, and side
    effects keep their order. The answer depends on the arguments only, unless ``time.monotonic()`` reaches
    ``expires_at``; then it is the best order found by then.
    """
    order, peak_bytes, bound_bytes = order_kernels(live_ranges(graph, kernels), options, expires_at)
    return Order(tuple(kernels[k] for k in order), peak_bytes, bound_bytes)


def order_kernels(
    lives: Liveness, options: OrderOptions = DEFAULTS, expires_at: float = math.inf
) -> tuple[tuple[int, ...], int, int]:
    """An order of the kernels by position, its peak in bytes, and a lower bound on that of every order."""
    given = tuple(range(lives.n_kernels))
    known = peak(lives, given)
    if known <= largest_use(lives):  # without tables that grow with the square of the number of kernels
        return given, known, known
    bound = order_peak_bound(lives)
    relaxed = lives.n_kernels > options.many_kernels and options.tolerance > 0
    if known <= bound or (relaxed and known - bound <= known * options.tolerance):
        return given, known, bound
    states = min(options.max_states, options.max_states_of_many) if relaxed else options.max_states
    order, bound = search_order(lives, bound, known, states, expires_at)
    return (given, known, bound) if order is None else (order, peak(lives, order), bound)


@dataclass(frozen=True, slots=True)
class _State:
    """A set of kernels that have run; ``done`` and ``ready`` have a bit for each kernel."""

    done: int
    ready: int
    live_bytes: int
    path: tuple
    """The last kernel and the path before it; () at the start."""


class _Transitions:
    """The effect of running one more kernel on a state."""

    def __init__(self, lives: Liveness) -> None:
        n = lives.n_kernels
        self.successors = lives.successors
        self.predecessors = [0] * n
        for k, successors in enumerate(lives.successors):
            for s in successors:
                self.predecessors[s] |= 1 << k
        self.written_bytes = [0] * n
        self.uses: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        """For each kernel, the bytes and the mask of users of each buffer that it uses."""
        for r in lives.ranges:
            self.written_bytes[r.writer] += r.nbytes
            mask = sum(1 << k for k in r.users)
            for k in r.users:
                self.uses[k].append((r.nbytes, mask))
        self.step_bytes = [w + s for w, s in zip(self.written_bytes, lives.scratch_bytes, strict=True)]
        """Bytes that a kernel allocates while it runs."""
        self.everything = (1 << n) - 1
        self.start = _State(0, sum(1 << k for k in range(n) if not self.predecessors[k]), 0, ())

    def growth_bytes(self, done: int, k: int) -> int:
        """By how much running ``k`` after ``done`` changes the live bytes."""
        left = ~(done | 1 << k)
        return self.written_bytes[k] - sum(size for size, mask in self.uses[k] if not mask & left)

    def run(self, state: _State, k: int) -> _State:
        """The state after ``k``, which must be ready."""
        done = state.done | 1 << k
        ready = state.ready ^ 1 << k
        for s in self.successors[k]:
            if not self.predecessors[s] & ~done:
                ready |= 1 << s
        return _State(done, ready, state.live_bytes + self.growth_bytes(state.done, k), (k, state.path))

    def run_free(self, state: _State, peak_bytes: int) -> _State:
        """Run every kernel that frees what it writes and stays within ``peak_bytes``, until there is none."""
        again = True
        while again:
            again = False
            left = state.ready
            while left:
                low = left & -left
                left ^= low
                k = low.bit_length() - 1
                if (
                    state.live_bytes + self.step_bytes[k] <= peak_bytes
                    and self.growth_bytes(state.done, k) <= 0
                ):
                    known = state.ready
                    state = self.run(state, k)
                    left |= state.ready & ~known
                    again = True
        return state


def search_order(
    lives: Liveness, bound_bytes: int, known_bytes: int, max_states: int, expires_at: float = math.inf
) -> tuple[tuple[int, ...] | None, int]:
    """An order with a peak below ``known_bytes``, or None where none was found, and a lower bound on the peak
    of every order. The order is optimal if ``max_states`` suffice.

    ``bound_bytes`` must be a lower bound on every order's peak. At the limit of states, the best state is
    completed by list scheduling; at ``expires_at`` (``time.monotonic()``), no order is returned.
    """
    moves = _Transitions(lives)
    waiting: list[tuple[int, int, int, _State]] = [(bound_bytes, 0, 0, moves.start)]
    reached: dict[int, int] = {}
    n_states = n_entries = 0
    while waiting:
        peak, _, _, state = heapq.heappop(waiting)
        if reached.get(state.done, peak + 1) <= peak:
            continue
        reached[state.done] = peak
        advanced = moves.run_free(state, peak)
        if advanced.done == moves.everything:
            return _order_of(advanced), peak
        if advanced.done != state.done:
            if reached.get(advanced.done, peak + 1) <= peak:
                continue
            reached[advanced.done] = peak
        state = advanced
        n_states += 1
        if time.monotonic() >= expires_at:
            return None, peak
        if n_states > max_states:
            return _list_schedule(moves, state, peak, known_bytes), peak
        for k in bits(state.ready):
            step = max(peak, state.live_bytes + moves.step_bytes[k])
            done = state.done | 1 << k
            if step >= known_bytes or reached.get(done, step + 1) <= step:
                continue
            n_entries += 1
            heapq.heappush(waiting, (step, -done.bit_count(), n_entries, moves.run(state, k)))
    return None, known_bytes


def _list_schedule(moves: _Transitions, state: _State, peak: int, known_bytes: int) -> tuple[int, ...] | None:
    """Complete ``state`` greedily: next is the kernel that raises the peak least, then the one that leaves
    the fewest bytes live. None once the peak reaches ``known_bytes``."""
    while state.done != moves.everything:
        peak, _, k = min(
            (max(peak, state.live_bytes + moves.step_bytes[k]), moves.growth_bytes(state.done, k), k)
            for k in bits(state.ready)
        )
        if peak >= known_bytes:
            return None
        state = moves.run_free(moves.run(state, k), peak)
    return _order_of(state)


def _order_of(state: _State) -> tuple[int, ...]:
    order: list[int] = []
    path = state.path
    while path:
        k, path = path
        order.append(k)
    return tuple(reversed(order))
