"""Nogood learning: infer whether a group is legal from minimal refused and maximal allowed groups.

If a set is refused, so is every superset. The smallest refused sets (*cores*) and the largest allowed ones
are remembered, so that a few questions answer for thousands of sets.
"""

from __future__ import annotations

from collections.abc import Callable

from fuseplan.search.limits import LIMITS


class MonotoneRefusals:
    """``refused(mask)`` for sets as bitmasks, by asking ``ask`` as rarely as possible.

    Args:
        ask: None for a set that is allowed; for a refused one a subset to suspect, which need
            not be refused itself. Every set that contains a refused one must be refused.
        universe: every bit that a set may have; 0 if allowed sets are not to be widened, because there are
            too many largest ones.
        is_late: whether the deadline has passed. Nothing is learnt from then on, but for the first
            ``LIMITS.late_learning_bits``: what is learnt saves questions, and changes no answer.
        max_bits: learning ends when the sets that it asked about have so many bits together.

    Example:
        >>> asked = []
        >>> def ask(mask):
        ...     asked.append(mask)
        ...     return 0b11 if mask & 0b11 == 0b11 else None
        >>> both = MonotoneRefusals(ask, 0b11111)
        >>> [both.refused(m) for m in (0b111, 0b11011, 0b01, 0b11101, 0b10110)], len(asked) < 9
        ([True, True, False, False, False], True)
    """

    def __init__(
        self,
        ask: Callable[[int], int | None],
        universe: int,
        is_late: Callable[[], bool] = lambda: False,
        max_bits: int = LIMITS.max_learning_bits,
    ) -> None:
        self._ask, self._is_late, self._max_bits = ask, is_late, max_bits
        self._universe = universe
        self.allowed: list[int] = []
        """Allowed sets, each widened as far as was found."""
        self._asked = self._asked_large = 0
        """Bits of all sets, and of all large ones, asked about in order to learn."""
        self.cores: list[int] = []
        """Refused sets, each minimal unless ``max_bits`` ended its reduction."""

    def refused(self, mask: int) -> bool:
        """Whether ``ask`` refuses the set."""
        if self.holds_core(mask):
            return True
        for wide in self.allowed:
            if not mask & ~wide:
                return False
        suspect = self._ask(mask)
        if not self._full:
            if suspect is None:
                if self._universe:
                    self.allowed.append(self._widen(mask, self._universe & ~mask))
            elif not self._confirm(suspect):
                self.cores.append(self._core(0, 0, mask))
        return suspect is not None

    def holds_core(self, mask: int) -> bool:
        """Whether the set is known to be refused; asks nothing."""
        # Called for every group that is enumerated: faster than any().
        for core in self.cores:  # noqa: SIM110
            if not core & ~mask:
                return True
        return False

    @property
    def _full(self) -> bool:
        return len(self.allowed) + len(self.cores) >= LIMITS.max_learnt_sets or self._is_tired

    def _refuses(self, mask: int) -> bool:
        """As ``refused``, but learns no more than a suspected pair."""
        if self.holds_core(mask):
            return True
        if any(not mask & ~wide for wide in self.allowed):
            return False
        size = mask.bit_count()
        self._asked += size
        if size > LIMITS.large_learnt_set:
            self._asked_large += size
        suspect = self._ask(mask)
        if suspect is not None and not self._full:
            self._confirm(suspect)
        return suspect is not None

    @property
    def _is_tired(self) -> bool:
        if self._asked > self._max_bits or self._asked_large > LIMITS.max_large_learning_bits:
            return True
        return self._asked > LIMITS.late_learning_bits and self._is_late()

    def _confirm(self, suspect: int) -> bool:
        """Learn a pair that is suspected, if it is refused by itself."""
        guilty = suspect.bit_count() == 2 and self._ask(suspect) is not None
        if guilty:
            self.cores.append(suspect)
        return guilty

    def _widen(self, mask: int, more: int) -> int:
        """``mask`` with as much of ``more`` as is allowed, tried in halves."""
        for core in self.cores:
            missing = core & ~mask
            if not missing & (missing - 1):
                more &= ~missing
        if self._is_tired:
            return mask
        if not more or not self._refuses(mask | more):
            return mask | more
        if not more & (more - 1):
            return mask
        low = _lower_half(more)
        return self._widen(self._widen(mask, low), more ^ low)

    def _core(self, base: int, added: int, rest: int) -> int:
        """A smallest part of ``rest`` that is refused together with ``base``; ``added`` is the last part that
        was added to ``base`` (QuickXplain: Junker, "Preferred explanations and relaxations for
        over-constrained problems", AAAI 2004)."""
        if self._is_tired:
            return rest
        if added and self._refuses(base):
            return 0
        if not rest & (rest - 1):
            return rest
        low = _lower_half(rest)
        high = self._core(base | low, low, rest ^ low)
        return high | self._core(base | high, high, low)


def _lower_half(mask: int) -> int:
    """The lower half of the bits that are set."""
    low = 0
    for _ in range(mask.bit_count() // 2):
        bit = mask & -mask
        low |= bit
        mask ^= bit
    return low
