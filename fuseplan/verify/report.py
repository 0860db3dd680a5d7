"""Verify a plan without the planner that made it: legality, order, costs, and the bound.

Nothing here imports a planner, the enumeration of groups, the solver or OR-Tools. The definition of the
search space is the planner's own: components and crossable edges (``fuseplan.search.components``),
constraints (``fuseplan.search.constrained_pricing``) and copies (``fuseplan.search.remat``).
``fuseplan.verify.plan`` checks the kernels, ``fuseplan.verify.program`` the graph;
``fuseplan.verify.bound`` recomputes the bound from the plan's ``Proof``, and states what it trusts.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ParamSpec, TypeVar

from costmodel.device import UnknownDeviceError
from costmodel.devices import DEVICES, get_device
from costmodel.graph import Graph, GraphError, check_graph
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import with_one_copy
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.json_codec import CONTRADICTIONS, contradiction
from fuseplan.schedule.pricing import PriceBook, Pricing
from fuseplan.schedule.scheduler import Scheduler, whole_floor_ps
from fuseplan.search.constrained_pricing import limited
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import operations_of, roots_of, searched
from fuseplan.support.errors import InvalidPlanError
from fuseplan.support.format import time_text
from fuseplan.verify.bound import Counts, verify_proof
from fuseplan.verify.errors import NotCheckedError, RefutedError
from fuseplan.verify.plan import check_plan
from fuseplan.verify.program import check_program, check_waits

P = ParamSpec("P")
T = TypeVar("T")

VERIFIED, REFUTED, NOT_CHECKED = "verified", "refuted", "bound not re-checked"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a plan; ``str`` returns a report in 80 columns."""

    status: str
    """``verified``; ``refuted``: a claim of the plan is wrong; ``bound not re-checked``: the kernels are
    right, but the bound could not be checked."""
    reason: str
    """The fault, or the reason why something was not checked; empty if there is none."""
    device: str
    claims: str
    """The plan's status, ``OPTIMAL`` or ``FEASIBLE``."""
    kernels: int
    objective_us: float
    bound_us: float | None
    """The verified bound, or None."""
    components: int
    distinct_components: int
    groups: int
    """Legal groups of the distinct components that may cost less than the prices of their nodes, as far as
    lower bounds tell. Each is compared with these prices."""
    groups_priced: int
    """Of these, the groups that the scheduler priced."""
    covers: int
    """Partial covers searched for components whose prices add up to less than the bound."""
    seconds: float

    def __bool__(self) -> bool:
        """Whether everything was verified, as in ``if plan.verify():``."""
        return self.status == VERIFIED

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.status}: {self.claims} plan for {self.device}, {time_text(self.objective_us)} µs"]
        if self.reason:
            lines += textwrap.wrap(self.reason, 78, initial_indent="  ", subsequent_indent="  ")
        if self.status != REFUTED:
            lines.append(f"  kernels     {self.kernels:,}: legal, in order, at the cost they claim")
        if self.bound_us is not None:
            lines.append(
                f"  bound       {time_text(self.bound_us)} µs: no plan of the search space is faster"
            )
        if self.components:
            lines.append(f"  components  {self.components:,}, {self.distinct_components:,} distinct")
            lines.append(
                f"  groups      {self.groups:,} legal ones, none cheaper than its nodes' prices "
                f"({self.groups_priced:,} priced)"
                if self.status == VERIFIED
                else f"  groups      {self.groups:,} looked at"
            )
        if self.covers:
            lines.append(f"  covers      {self.covers:,} partial ones searched: none is below the bound")
        lines.append(f"  seconds     {self.seconds:.2f}")
        return "\n".join(lines)


def verify_plan(
    plan: FusionPlan,
    tell: Callable[[int, int], None] = lambda done, total: None,
    deadline_s: float = math.inf,
) -> Verification:
    """Check all claims of ``plan``: its kernels are legal, run in their order and have the claimed cost, and
    no plan of the search space is below its bound.

    Args:
        plan: a plan whose graph is consistent, as every plan read from a file is. The bound of a plan for a
            CPU is checked if the plan holds its program, as the tiled loops that are offered follow from it.
            The bound is then that of this program alone, not of rewritten ones.
        tell: called with the number of distinct components that are done, and of all.
        deadline_s: seconds after which the bound is not re-checked. Proofs of components with many legal
            groups can take longer to check than to find.
    """
    started, expires_at = time.perf_counter(), time.monotonic() + deadline_s
    counts = Counts()
    status, reason, bound_ps = VERIFIED, "", None
    try:
        _check_device(plan)
        unknown = _sound(check_program, plan.graph, plan.program) if plan.program is not None else ""
        _sound(check_waits, plan.graph)
        _sound(check_plan, plan)
        if unknown:
            raise NotCheckedError(unknown)
        if plan.bound_ps is not None:
            bound_ps = _sound(_verified_bound, plan, counts, tell, expires_at)
    except (InvalidPlanError, RefutedError) as error:
        status, reason = REFUTED, str(error)
    except NotCheckedError as error:
        status, reason = NOT_CHECKED, str(error)
    else:
        if plan.program is None and any(kernel.spec.tiles_visited for kernel in plan.kernels):
            reason = "how many tiles its masks leave out is taken from the file"
        if bound_ps is None:
            reason = f"the planner {plan.planner!r} claims no bound: a faster plan may exist"
        if any(kernel.spec.compiled is not None for kernel in plan.kernels):
            reason = "what XLA's own program launches and moves is taken from the plan"
    return Verification(
        status,
        reason,
        plan.device.name,
        plan.status,
        len(plan.kernels),
        plan.objective_us,
        None if bound_ps is None else bound_ps / 1e6,
        counts.components,
        counts.distinct,
        counts.groups,
        counts.priced,
        counts.covers,
        time.perf_counter() - started,
    )


def _sound(check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of ``check``. An exception of a plan that contradicts itself refutes it."""
    try:
        return check(*args, **kwargs)
    except InvalidPlanError:
        raise
    except CONTRADICTIONS as error:
        raise RefutedError(contradiction(error)) from None


def _check_device(plan: FusionPlan) -> None:
    """Check that a device of the device table has the figures of the table."""
    device = plan.device
    if device.name.partition(":")[0] not in DEVICES:
        return
    try:
        known = get_device(device.name)
    except UnknownDeviceError as error:
        raise RefutedError(str(error)) from None
    for field in fields(known):
        given, own = getattr(device, field.name), getattr(known, field.name)
        if given != own:
            raise RefutedError(
                f"the plan's {device.name} is not fuseplan's: its {field.name} is {given!r}, not {own!r}"
            )


def _verified_bound(
    plan: FusionPlan, counts: Counts, tell: Callable[[int, int], None], expires_at: float
) -> int:
    """The bound of the plan, after checking its proof."""
    assert plan.bound_ps is not None
    limits, proof = plan.constraints, plan.proof
    if not plan.device.capabilities.emits_kernels and plan.program is None:
        raise NotCheckedError(
            "a plan for a CPU may hold tiled loops; the loops that were offered follow from its program, "
            "which is not in the file"
        )
    if limits is not None and limits.together:
        raise NotCheckedError(
            "must_fuse contracts operations, and the proof has prices of contracted operations only"
        )
    if proof is None and plan.bound_ps <= whole_floor_ps(plan):
        return plan.bound_ps
    if proof is None:
        raise NotCheckedError(f"the planner {plan.planner!r} gave a bound and no proof of it")
    if proof.bound_ps < plan.bound_ps:
        if limits is not None and limits.max_peak_bytes is not None:
            raise NotCheckedError("a bound under max_peak_bytes comes from a search that leaves no proof")
        raise RefutedError(
            f"the plan claims that none takes less than {plan.bound_ps:,} ps, but its proof adds up to "
            f"{proof.bound_ps:,} ps"
        )
    graph, pricing = _pricing(plan)
    verify_proof(proof, PriceBook(graph, pricing), counts, tell, expires_at)
    return plan.bound_ps


def _pricing(plan: FusionPlan) -> tuple[Graph, Pricing]:
    """The graph and prices of the search space that the plan is from."""
    if plan.proof is not None and plan.proof.copied:
        _check_origins(plan.graph, plan.proof.origins)
        n_operations = len(set(plan.proof.origins or plan.graph.origins or range(len(plan.graph.nodes))))
        if not all(0 <= root < n_operations for root in plan.proof.copied):
            raise RefutedError(
                f"the proof rematerialises n{max(plan.proof.copied)}, of {n_operations:,} operations"
            )
        copies = searched(plan.graph, plan.proof.copied, plan.proof.origins)
        if copies is None or copies.copied != plan.proof.copied:
            raise RefutedError("the proof rematerialises an operation that has one reader")
        graph = copies.whole
        if not set(copies.roots) <= set(roots_of(graph, plan.device)):
            raise RefutedError("the proof rematerialises an operation that the search does not duplicate")
        pricing = DuplicatePricing(copies, Scheduler(graph, plan.device, _program(plan), plan.features))
        limits = plan.constraints
        if limits is not None:
            origins = plan.proof.origins or plan.graph.origins
            operations = operations_of(replace(plan.graph, origins=origins))
            limits = limits.moved(operations).moved(copies.places)
        return limited(copies.graph, pricing, limits)
    return limited(
        plan.graph, Scheduler(plan.graph, plan.device, plan.program, plan.features), plan.constraints
    )


def _program(plan: FusionPlan) -> Lowered | None:
    """The program that was searched for a plan with copies, if the file has it: it defines the masks."""
    if plan.program is None or plan.proof is None:
        return None
    origins = plan.proof.origins or plan.graph.origins
    return with_one_copy(replace(plan.program, graph=replace(plan.graph, origins=origins)))


def _check_origins(graph: Graph, origins: tuple[int, ...]) -> None:
    """Check that a proof takes for copies of one operation only what the graph does, or less."""
    if not origins:
        return
    if len(origins) != len(graph.nodes):
        raise RefutedError(f"the proof has {len(origins):,} origins for {len(graph.nodes):,} operations")
    own = graph.origins or range(len(graph.nodes))
    for n, origin in enumerate(origins):
        if not 0 <= origin <= n or own[origin] != own[n] or origins[origin] != origin:
            raise RefutedError(f"the proof takes n{n} {graph.nodes[n].op} for a copy of n{origin}")
    try:
        check_graph(replace(graph, origins=origins))
    except GraphError as error:
        raise RefutedError(f"the copies of the proof: {error}") from None
