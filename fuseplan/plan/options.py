"""Planning options: device, planner, deadline, constraints, and features that are switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from costmodel.device import DeviceSpec
from fuseplan.plan.constraints import Constraints
from fuseplan.support.work import DEFAULT_DEADLINE_S as DEFAULT_DEADLINE_S


@dataclass(frozen=True, slots=True)
class Features:
    """The parts of the planner that an ablation can switch off; all are on by default.

    Example:
        >>> Features(siblings=False).switched_off
        ('siblings',)
    """

    prologues: bool = True
    """Operands of a contraction are computed inside its kernel, block by block."""
    epilogues: bool = True
    """Work on the result of a contraction is done in its kernel. A product of XLA may have an epilogue by
    ``xla_loops``."""
    siblings: bool = True
    """Operations that read one array share a kernel, though no value passes between them."""
    several_results: bool = True
    """A kernel of several operations writes more than one array."""
    streaming: bool = True
    """An axis that is reduced, but not by a contraction, is streamed where no block has to hold all of it, in
    several passes if one is not enough."""
    choice_of_tile: bool = True
    """The tile is the cheapest of all, not the largest that fits."""
    loop_nests: bool = True
    """Kernels of several contractions, such as attention, hold large intermediates one tile at a time; on the
    CPU these are loops over tiles."""
    xla_loops: bool = True
    """On a GPU or a TPU, a group that no tiled kernel can hold, or none as fast, may be left to XLA as one
    loop; on a GPU also a matrix product with the elementwise operations after it."""
    recompute: bool = True
    """Values that several kernels read are rematerialised in each kernel that gains by it; on the CPU, large
    values for distant readers."""
    splits: bool = True
    """On a GPU, sums down columns, and reductions with few results, are computed in two steps where the first
    step can join another kernel."""
    packs: bool = True
    """Kernels that have no more in common than a scalar may be fused: small ones, on one core."""
    rewrites: bool = True
    """The program may be rewritten before it is planned: columns, sums in steps, rematerialised
    values. Otherwise the program is planned as traced."""

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The names of the parts that are switched off."""
        return tuple(name for name in self.__slots__ if not getattr(self, name))


ALL_FEATURES = Features()
"""All parts on."""


@dataclass(frozen=True, slots=True)
class Options:
    """How one program is planned."""

    device: DeviceSpec
    planner: str = "solver"
    deadline_s: float = DEFAULT_DEADLINE_S
    strict: bool = False
    constraints: Constraints | None = None
    features: Features = ALL_FEATURES
    peers: tuple[str, ...] = ()
    """Planners whose plans are made, too: the fastest plan is used."""
    patterns: tuple[Any, ...] = ()
    """The ``fuseplan.Pattern``s whose matches are replaced before planning, highest priority first."""
    only_loops: bool = False
    """Plan only what changes the program that runs on a CPU, the tiled loops: the components that may have
    one, without a bound. XLA regroups all other operations."""
    asked_s: float | None = None
    """The user's deadline, of which ``deadline_s`` seconds are left; None where the two are equal."""
    shares: int = 1
    """Into how many equal parts the counted work of plans within a limit of memory is divided; this planning
    may do one."""

    @property
    def whole_s(self) -> float:
        """The user's deadline."""
        return self.deadline_s if self.asked_s is None else self.asked_s
