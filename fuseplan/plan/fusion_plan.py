"""The decision: kernels in execution order, with their costs, refusals and proof."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import Cost, KernelSpec
from costmodel.memory import peak_bytes
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.certificate import Proof
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.support.errors import InvalidPlanError, Verdict


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a plan: what it computes and how, and what that costs."""

    spec: KernelSpec
    cost: Cost


def tile_bytes(kernel: Kernel) -> int:
    """HBM bytes that a kernel keeps to itself while it runs: the blocks of a CPU's loops are
    memory like any other."""
    return kernel.cost.onchip_bytes if kernel.spec.capabilities.loop_nest else 0


@dataclass(frozen=True, slots=True)
class PlanStats:
    """How the plan came to be: counts, and wall-clock seconds by stage."""

    equations: int = 0
    components: int = 0
    distinct_components: int = 0
    candidates: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    """Pairs of stage name (``trace``, ``lower``, ``cache``, ``enumerate``, ``solve``, ``packs``,
    ``order``, ``check``; ``compile`` of XLA's own plan) and seconds."""
    certified: str = ""
    """The simplest heuristic whose plan of the same program takes no longer than this proven plan; empty if
    there is none."""
    remembered: int = 0
    """Distinct components whose solution was remembered from an earlier plan."""
    refused: int = 0
    """Kernels that the device's compiler refused, of this plan and those before it."""
    replans: int = 0
    """How often it was planned anew for that."""
    bound_of: str = ""
    """``as traced`` or ``as rewritten`` if ``bound_ps`` and the proof hold for that form of the program
    alone, since the other was not searched; else empty."""


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """A partition of a graph's nodes into kernels, in an order that can run."""

    graph: Graph
    device: DeviceSpec
    planner: str
    kernels: tuple[Kernel, ...]
    refusals: tuple[Verdict, ...] = ()
    status: str = "FEASIBLE"
    """``OPTIMAL`` (proven: ``bound_ps == objective_ps``) or ``FEASIBLE``."""
    bound_ps: int | None = None
    """No plan of this planner's search space is faster, of the form of the program that ``stats.bound_of``
    names; None where nothing was proven."""
    notes: tuple[str, ...] = ()
    """What the user should know, such as that the deadline was hit and a fallback used."""
    stats: PlanStats = field(default_factory=PlanStats)
    constraints: Resolved | None = None
    """What it obeys of ``fuseplan.Constraints``, by node."""
    features: Features = ALL_FEATURES
    """Which parts of the decision were taken."""
    proof: Proof | None = None
    """What ``bound_ps`` rests on: ``fuseplan.verify.report`` re-checks it without the solver."""

    program: Lowered | None = field(default=None, compare=False, repr=False)
    """The program that ``graph`` is of: the equations behind its nodes, from which kernels are emitted. None
    in a plan that was read from a file that could not hold it."""

    @property
    def lowered(self) -> Lowered:
        """``program``, which has to be there.

        Raises:
            InvalidPlanError: the plan was read from a file without its program.
        """
        if self.program is None:
            raise InvalidPlanError(
                "the plan's program is needed, and the file that it was read from does not hold it: plan the "
                "function anew"
            )
        return self.program

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
        """``objective / bound - 1``: 0.0 when proven, 292.0 of a plan that takes 293 times its bound,
        infinite where the bound is 0, None without one. It is relative to the bound, so that it grows with
        what is not known; over the objective it could not exceed 1, however far the two are apart."""
        if self.bound_ps is None:
            return None
        if self.bound_ps == 0:
            return math.inf if self.objective_ps else 0.0
        return self.objective_ps / self.bound_ps - 1

    @property
    def hbm_bytes(self) -> int:
        return sum(k.cost.hbm_bytes for k in self.kernels)

    @property
    def peak_bytes(self) -> int:
        """The most HBM bytes that temporaries occupy at once, in this order of kernels."""
        return peak_bytes(self.graph, [k.spec for k in self.kernels], list(map(tile_bytes, self.kernels)))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The operations that some other kernel computes too, before them."""
        return tuple(n for n, origin in enumerate(self.graph.origins) if n != origin)

    @property
    def recomputed_flops(self) -> int:
        """Floating-point operations beyond those of the program: of what several kernels compute, and of
        what a kernel computes for several of its tiles, or beyond the edge of a ragged one."""
        flops = [node.flops.total for node in self.graph.nodes]
        again = sum(flops[n] for n in self.recomputed)
        return again + sum(
            max(k.cost.flops.total - sum(flops[n] for n in k.spec.nodes), 0) for k in self.kernels
        )

    @property
    def planning_s(self) -> float:
        """Wall-clock seconds of all stages."""
        return sum(seconds for _, seconds in self.stats.seconds)
