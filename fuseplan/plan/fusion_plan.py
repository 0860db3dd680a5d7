"""A plan: kernels in execution order with their costs, the refusals, and the proof of its bound.

The proof can be checked against the prices of groups, without the solver. A plan is an exact cover of the
nodes by legal groups. Give each node a price such that no legal group costs less than its nodes' prices
together: then no cover costs less than all nodes' prices, because each of its groups pays for its own nodes
(weak duality of linear programming; set partitioning as in Balas and Padberg, "Set Partitioning: A Survey",
SIAM Review 18, 1976). This holds for each component by itself, because no group spans two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from costmodel.kernel import Cost, KernelSpec
from costmodel.memory import peak_bytes
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.constraints import Resolved
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.support.errors import InvalidPlanError, Verdict


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a plan: what it computes and how, and what that costs."""

    spec: KernelSpec
    cost: Cost


def tile_bytes(kernel: Kernel) -> int:
    """HBM bytes that a kernel uses for itself while it runs: a CPU has the blocks of loops in main memory."""
    return kernel.cost.onchip_bytes if kernel.spec.capabilities.loop_nest else 0


@dataclass(frozen=True, slots=True)
class Case:
    """Some plans of a component, and a bound on these. Nodes are positions in the component's nodes."""

    together: tuple[tuple[int, int], ...]
    """Pairs of nodes that are in one kernel."""
    apart: tuple[tuple[int, int], ...]
    """Pairs of nodes that are in different kernels."""
    prices_ps: tuple[int, ...]
    """As ``Part.prices_ps``, for kernels that such a plan may have. No such plan costs less than their
    sum."""


@dataclass(frozen=True, slots=True)
class Part:
    """A bound on one component of a graph, and on every other that is equal to it."""

    bound_ps: int
    """Picoseconds that no plan of one such component beats."""
    first_nodes: tuple[int, ...]
    """The lowest node of each of these components."""
    prices_ps: tuple[int, ...] = ()
    """A price for each node of such a component, in order of the nodes, such that no legal group costs less
    than its nodes. Where the prices add up to less than ``bound_ps``, a check has to rule out the few covers
    that cost less than ``bound_ps``. Empty where ``costmodel.floor`` of all nodes together is the bound."""
    cases: tuple[Case, ...] = ()
    """Cases that cover all plans of the component, if these prove the bound. ``prices_ps`` beside them are
    for a joint bound."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A bound on several components together, whose cheapest groups would wait for each other."""

    bound_ps: int
    first_nodes: tuple[int, ...]
    """The lowest node of each."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound on every plan of the search space, component by component. Each component is in one part. The
    bounds of those in ``joint`` are counted there, and their parts hold prices only."""

    parts: tuple[Part, ...]
    joint: Joint | None = None
    copied: tuple[int, ...] = ()
    """The operations that may be rematerialised, as nodes of the graph in which each operation is one node
    (``costmodel.graph.without_copies``). Where there are any, all other numbers are those of nodes of the
    graph in which they are split into copies."""
    origins: tuple[int, ...] = ()
    """For each node of the plan's graph, the first that computes the same operation of that graph, as
    ``Graph.origins`` does; empty where that is the same. The graph may have had copies before the search
    (``fuseplan.passes.recompute_streams``)."""

    @property
    def bound_ps(self) -> int:
        """Picoseconds that no plan beats."""
        together = frozenset(self.joint.first_nodes) if self.joint is not None else frozenset()
        alone = sum(part.bound_ps * len(set(part.first_nodes) - together) for part in self.parts)
        return alone + (self.joint.bound_ps if self.joint is not None else 0)


@dataclass(frozen=True, slots=True)
class PlanStats:
    """Counts of one planning, and its wall-clock seconds by stage."""

    equations: int = 0
    components: int = 0
    distinct_components: int = 0
    candidates: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    """Pairs of a stage's name and its seconds; docs/reading-a-plan.md says what each stage does. XLA's own
    plan has the stage ``compile``."""
    certified: str = ""
    """The simplest heuristic whose plan of the same program takes no longer than this proven plan; empty if
    there is none."""
    remembered: int = 0
    """Distinct components whose solution was in the cache."""
    refused: int = 0
    """Kernels that the device's compiler refused, of this plan and those before it."""
    replans: int = 0
    """How often the program was planned anew for that."""
    bound_of: str = ""
    """``as traced`` or ``as rewritten`` if only that form of the program was searched, so that ``bound_ps``
    and the proof hold for it alone; else empty."""


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
    """Facts that the user should read, such as that the deadline ended the search
    (``fuseplan.plan.notes``)."""
    stats: PlanStats = field(default_factory=PlanStats)
    constraints: Resolved | None = None
    """The constraints that the plan obeys, by node."""
    features: Features = ALL_FEATURES
    """The parts of the decision that were switched on."""
    proof: Proof | None = None
    """The proof of ``bound_ps``, which ``fuseplan.verify.report`` checks without the solver."""

    program: Lowered | None = field(default=None, compare=False, repr=False)
    """The lowered program of ``graph``: the equations of its nodes, from which kernels are emitted. None in a
    plan that was read from a file without it."""

    @property
    def lowered(self) -> Lowered:
        """``program``, or an error where there is none.

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
        infinite where the bound is 0, None without one."""
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
        """The nodes whose operation an earlier node computes, too."""
        return tuple(n for n, origin in enumerate(self.graph.origins) if n != origin)

    @property
    def recomputed_flops(self) -> int:
        """Floating-point operations beyond those of the program: of operations that several kernels compute,
        that one kernel computes for several of its tiles, or beyond the edge of a ragged tile."""
        flops = [node.flops.total for node in self.graph.nodes]
        again = sum(flops[n] for n in self.recomputed)
        return again + sum(
            max(k.cost.flops.total - sum(flops[n] for n in k.spec.nodes), 0) for k in self.kernels
        )

    @property
    def planning_s(self) -> float:
        """Wall-clock seconds of all stages."""
        return sum(seconds for _, seconds in self.stats.seconds)
