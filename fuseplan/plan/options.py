"""The options of one planning: device, planner, deadline, constraints, and parts switched off.

Which parts of the decision are taken: an ablation switches them off one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.device import DeviceSpec
from fuseplan.plan.constraints import Constraints


@dataclass(frozen=True, slots=True)
class Features:
    """What a planner may decide beyond the plainest; all of it by default.

    Example:
        >>> Features(siblings=False).switched_off
        ('siblings',)
    """

    prologues: bool = True
    """Operands of a contraction are computed inside its kernel, block by block."""
    epilogues: bool = True
    """Work on the result of a contraction is done in its kernel."""
    siblings: bool = True
    """Operations that walk one array share a kernel, though no value passes between them."""
    several_results: bool = True
    """A kernel of several operations writes more than one array."""
    streaming: bool = True
    """An axis that is reduced, but for a contraction's, is streamed where it need not be whole, in
    several passes if one does not do."""
    choice_of_tile: bool = True
    """The tile is the cheapest of several, not the largest that fits."""
    loop_nests: bool = True
    """On the CPU, large intermediates exist a tile at a time."""
    recompute: bool = True
    """Values that several kernels need are computed by each that gains from it; on the CPU, large ones
    for distant readers."""
    splits: bool = True
    """On a GPU, sums down columns, and reductions with few results, are made in two steps where the first
    of them joins another kernel."""
    packs: bool = True
    """Small kernels that have no more in common than a scalar are one kernel, on one core."""
    rewrites: bool = True
    """The program may be rewritten before it is planned: columns, sums in steps, values computed again,
    packs. Without it, the program is planned as traced."""

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The names of the parts that are not taken."""
        return tuple(name for name in self.__slots__ if not getattr(self, name))


ALL_FEATURES = Features()
"""Nothing switched off."""


DEFAULT_DEADLINE_S = 20.0
"""Wall-clock seconds the planner may take before it settles for a heuristic's plan."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan: checked on construction, before any work is done."""

    device: DeviceSpec
    planner: str = "solver"
    deadline_s: float = DEFAULT_DEADLINE_S
    strict: bool = False
    constraints: Constraints | None = None
    features: Features = ALL_FEATURES
    asked_s: float | None = None
    """The user's deadline, of which ``deadline_s`` is left; None where the two are equal."""
    shares: int = 1
    """Into how many equal parts the counted work of plans within a limit of memory is divided; this planning
    may do one."""

    @property
    def whole_s(self) -> float:
        """The user's deadline."""
        return self.deadline_s if self.asked_s is None else self.asked_s
