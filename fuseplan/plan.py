"""The decision: kernels in execution order, with their costs, refusals and proof."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import Cost, KernelSpec
from fuseplan.errors import Verdict


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a plan: what it computes and how, and what that costs."""

    spec: KernelSpec
    cost: Cost


@dataclass(frozen=True, slots=True)
class PlanStats:
    """How the plan came to be: counts, and wall-clock seconds by stage."""

    equations: int = 0
    components: int = 0
    distinct_components: int = 0
    candidates: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    """Pairs of stage name (``trace``, ``lower``, ``enumerate``, ``solve``, ``check``) and seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A partition of a graph's nodes into kernels, in an order that can run."""

    graph: Graph
    device: DeviceSpec
    planner: str
    kernels: tuple[Kernel, ...]
    refusals: tuple[Verdict, ...] = ()
    status: str = "FEASIBLE"
    """``OPTIMAL`` (proven: ``bound_ps == objective_ps``) or ``FEASIBLE``."""
    bound_ps: int | None = None
    """No plan of this planner's search space is faster; None where nothing was proven."""
    notes: tuple[str, ...] = ()
    """What the user should know, such as that the deadline was hit and a fallback used."""
    stats: PlanStats = field(default_factory=PlanStats)

    @property
    def objective_ps(self) -> int:
        return sum(k.cost.time_ps for k in self.kernels)

    @property
    def objective_us(self) -> float:
        return self.objective_ps / 1e6

    @property
    def bound_us(self) -> float | None:
        return None if self.bound_ps is None else self.bound_ps / 1e6

    @property
    def gap(self) -> float | None:
        """``(objective - bound) / objective``, 0.0 when proven, None without a bound."""
        if self.bound_ps is None:
            return None
        return (self.objective_ps - self.bound_ps) / self.objective_ps if self.objective_ps else 0.0

    @property
    def hbm_bytes(self) -> int:
        return sum(k.cost.hbm_bytes for k in self.kernels)
