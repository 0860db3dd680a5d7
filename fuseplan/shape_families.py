"""Plan a program of many sizes once for all sizes that are close to each other.

Programs that differ only by the sizes of their arrays, such as a function at several batch sizes, are a
*family*. The solver's plan of one of them says which operations share a kernel. Another program of the family
takes these groups over if four guards hold:

1. each dimension of each array has at most twice and at least half of the planned size, and is 1 where that
   was 1;
2. the program, as traced or as rewritten for its own sizes (``fuseplan.passes.rewriting``), has the
   operations of the planned one;
3. every group is a legal kernel at these sizes;
4. on a GPU or a TPU, the plan takes no longer than a heuristic's of either form. On a CPU, where a
   heuristic takes as long as a search, it takes at most a twentieth longer than the searched plan, measured
   by the rooflines of the two programs (``costmodel.floor``). Other groups may be better where an
   intermediate array outgrows a cache, say, or where a smaller one fits on chip.

Each kernel is then scheduled for its own sizes: its tiles are those that a search would choose for this
group. No bound is proven but that of the whole program, since the best groups may differ from size to size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from costmodel.floor import floor_of
from costmodel.graph import Graph, Skeleton, skeleton, without_copies
from costmodel.memory import SUBLANES
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import Flat
from fuseplan.passes.array_to_columns import by_columns
from fuseplan.passes.estimate import UndecidedError, quick_ps
from fuseplan.passes.rewriting import rewritten_programs
from fuseplan.pipeline import plan_best
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.notes import NoteKind, note
from fuseplan.plan.options import Options
from fuseplan.report.debug import report_plan
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.scheduler import make_scheduler
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Answer
from fuseplan.search.remat.duplicates import operations_of
from fuseplan.search.remat.materialise import materialise_overlapping
from fuseplan.stages import Planning, assemble, check, order
from fuseplan.support.lru import LruCache
from fuseplan.support.work import DIVISION, StageTimer, may_begin, unlimited

MAX_FACTOR = 2
"""By how much a size may differ from the planned one."""

MAX_FAMILIES = 256
"""Families that are remembered of one function: its derivatives are others."""

MAX_MEMBERS = 64
"""Plans that are remembered of one family."""

LOSS_DIVISOR = 20
"""On a CPU, the fourth guard admits a loss of one twentieth: the model is no more exact."""

MOST_TRIES = 2
"""Plans of a family that are tried for one program."""

_SHARE = 4
"""At most this part of the deadline is for taking over."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of a program, without its sizes, and the groups of its operations, which may overlap."""

    skeleton: Skeleton
    groups: tuple[Nodes, ...]


@dataclass(frozen=True, slots=True)
class _Member:
    """The decisions of one plan, and the sizes that it was made for."""

    shapes: Shapes
    """Those of all arrays of the program as traced."""
    forms: tuple[_Form, ...]
    """The planned program, and that with one copy of each operation; none if it is left to ``jax.jit``."""
    time_ps: int = 0
    """The plan's time."""
    roofline_ps: int = 0
    """The least time that the program takes in as many kernels."""

    @classmethod
    def of(cls, lowered: Lowered, plan: FusionPlan | None) -> _Member:
        """The member of a program and its plan."""
        if plan is None:
            return cls(_shapes(lowered.graph), ())
        return cls(_shapes(lowered.graph), tuple(_forms(plan)), plan.objective_ps, _roofline_ps(plan))

    def admits(self, shapes: Shapes) -> bool:
        """Whether the first guard holds. What is left to ``jax.jit`` has no plan that the other guards could
        be asked about, and loops gain by large arrays: it admits sizes up to its own."""
        largest = MAX_FACTOR if self.forms else 1
        return all(
            (size == 1) == (planned == 1) and planned <= MAX_FACTOR * size and size <= largest * planned
            for old, new in zip(self.shapes, shapes, strict=True)
            for planned, size in zip(old, new, strict=True)
        )

    def is_as_near(self, plan: FusionPlan) -> bool:
        """Whether a plan is as near to its program's roofline as the searched one, but for a twentieth."""
        most_ps = self.time_ps + self.time_ps // LOSS_DIVISOR
        return plan.objective_ps * self.roofline_ps <= most_ps * _roofline_ps(plan)


class ShapeFamilies:
    """Plans one function's programs, and remembers the plans for later calls at other sizes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from costmodel.devices import get_device
        >>> from fuseplan.frontend.trace import trace
        >>> families, options = ShapeFamilies(), Options(get_device("h200"))
        >>> for rows in (4096, 5000, 10_000):
        ...     x = jax.ShapeDtypeStruct((rows, 512), "float32")
        ...     plan = families.plan(trace(lambda x: jax.nn.softmax(x) + 1, x), options)
        ...     print(plan.status, len(plan.kernels), plan.notes[-1][:73])
        OPTIMAL 1 greedy's plan takes no longer, and by the proof none is faster
        FEASIBLE 1 the groups are those of a plan for (4096, 512), taken over to (5000, 512)
        OPTIMAL 1 greedy's plan takes no longer, and by the proof none is faster
    """

    def __init__(self) -> None:
        self._members: LruCache[Hashable, tuple[_Member, ...]] = LruCache(MAX_FAMILIES)

    def __deepcopy__(self, memo: object) -> ShapeFamilies:
        return ShapeFamilies()  # It is a cache, and a lock cannot be copied.

    def plan(self, traced: Flat, options: Options, trace_s: float = 0.0) -> FusionPlan:
        """As ``fuseplan.pipeline.plan_traced``, by the groups of a plan of the program's family for which the
        guards hold."""
        clock = StageTimer(trace_s)
        lowered = clock.time("lower", lambda: lower(traced, strict=options.strict))
        if not _is_taken_over(options):
            return plan_best(lowered, options, clock)
        started = time.monotonic()
        members = list(itertools.islice(self._admitting(lowered, options), MOST_TRIES))
        plan = _taken_over(lowered, options, members, clock) if members else None
        if plan is not None:
            stats = replace(plan.stats, seconds=tuple(clock.seconds.items()))
            plan = replace(plan, stats=stats)
            report_plan(plan)
            return plan
        spent_s = time.monotonic() - started
        if members and options.deadline_s > 0:
            left_s = max(options.deadline_s - spent_s, options.deadline_s / _SHARE)
            plan = plan_best(lowered, replace(options, deadline_s=left_s, asked_s=options.whole_s), clock)
        else:
            plan = plan_best(lowered, options, clock)
        self._add(lowered, options, _Member.of(lowered, plan))
        return plan

    def may_plan(self, lowered: Lowered, options: Options) -> bool | None:
        """Whether a program of nearby sizes was planned, or left to ``jax.jit`` by ``leave``; None if neither
        is known."""
        if _is_taken_over(options):
            for member in self._admitting(lowered, options):
                return bool(member.forms)
        return None

    def leave(self, lowered: Lowered, options: Options) -> None:
        """Remember that a program is left to ``jax.jit``."""
        if _is_taken_over(options):
            self._add(lowered, options, _Member.of(lowered, None))

    def _admitting(self, lowered: Lowered, options: Options) -> Iterator[_Member]:
        """The members whose first guard holds, in the order in which they were planned; none if a plan was
        made for the program's own sizes, as the same plan is then made again."""
        members, shapes = self._members.get(_key(lowered, options)) or (), _shapes(lowered.graph)
        if not any(member.forms and member.shapes == shapes for member in members):
            yield from (member for member in members if member.admits(shapes))

    def _add(self, lowered: Lowered, options: Options, member: _Member) -> None:
        key = _key(lowered, options)
        others = [other for other in self._members.get(key) or () if other.shapes != member.shapes]
        self._members.update([(key, (*others[-MAX_MEMBERS + 1 :], member))])

    def clear(self) -> None:
        """Forget all of them."""
        self._members.clear()


def _is_taken_over(options: Options) -> bool:
    """Whether a plan follows from groups alone: not where constraints or other planners' plans count."""
    return options.planner == "solver" and options.constraints is None and not options.peers


def _key(lowered: Lowered, options: Options) -> Hashable:
    return skeleton(lowered.graph), options


def _shapes(graph: Graph) -> Shapes:
    return tuple([value.shape for value in graph.values])


def _roofline_ps(plan: FusionPlan) -> int:
    """The least time of the plan's program in as many kernels."""
    floor = floor_of(plan.graph, plan.device)(tuple(range(len(plan.graph.nodes))))
    return floor + max(len(plan.kernels) - 1, 0) * plan.device.launch_ps


def _forms(plan: FusionPlan) -> Iterator[_Form]:
    groups = tuple([kernel.spec.nodes for kernel in plan.kernels])
    yield _Form(skeleton(plan.graph), groups)
    if plan.graph.origins:
        number = operations_of(plan.graph)
        once = [tuple(sorted({number[n][0] for n in nodes})) for nodes in groups]
        yield _Form(skeleton(without_copies(plan.graph)), tuple(once))


def _taken_over(
    lowered: Lowered, options: Options, members: Sequence[_Member], clock: StageTimer
) -> FusionPlan | None:
    """The plan of a program by the groups of the first of ``members`` for which the guards hold; None if they
    hold for none, or there is no time."""
    deadline_s = options.deadline_s / _SHARE
    expires_at = time.monotonic() + deadline_s
    if deadline_s > 0 and not may_begin(DIVISION, len(lowered.graph.nodes), deadline_s):
        return None
    columns = None
    if options.device.capabilities.emits_kernels:
        columns = by_columns(lowered, options.device.least_large_bytes, SUBLANES, lookups=True)
    quick = [lowered] if columns is None else [lowered, columns]
    for program in itertools.chain(quick, _chosen_forms(lowered, options, clock, expires_at)):
        own = skeleton(program.graph)
        for member in members:
            groups = next((form.groups for form in member.forms if form.skeleton == own), None)
            if deadline_s > 0 and time.monotonic() >= expires_at:
                return None
            if groups is not None:
                plan = _by_groups(lowered, program, options, groups, clock, expires_at)
                forms = quick if any(program is form for form in quick) else [*quick, program]
                if plan is not None and _is_good(plan, forms, member, expires_at):
                    return _noted(plan, member.shapes, lowered.graph)
    return None


def _chosen_forms(
    lowered: Lowered, options: Options, clock: StageTimer, expires_at: float
) -> Iterator[Lowered]:
    """The forms that the rewrites choose for a program, which takes a heuristic's plans for kernels."""
    rewritten, _ = rewritten_programs(lowered, options, clock, expires_at)
    yield from (program for program in rewritten if program is not lowered)


def _by_groups(
    lowered: Lowered,
    program: Lowered,
    options: Options,
    groups: Sequence[Nodes],
    clock: StageTimer,
    expires_at: float,
) -> FusionPlan | None:
    """The plan of ``program``, a form of ``lowered``, by these groups; None if one of them is no kernel."""
    answer = clock.time("take over", lambda: _grouped(program, options, groups))
    if answer is None:
        return None
    state = Planning(program, options, clock, expires_at, answer=answer)
    for step in (order, assemble, check):
        step(state)
    assert state.plan is not None
    if program is lowered:
        return state.plan
    return replace(state.plan, stats=replace(state.plan.stats, bound_of="as rewritten"))


def _is_good(plan: FusionPlan, programs: Sequence[Lowered], member: _Member, expires_at: float) -> bool:
    """Whether the fourth guard holds, among plans of ``programs``, the forms of one program."""
    if not plan.device.capabilities.emits_kernels:
        return member.is_as_near(plan)
    work = replace(unlimited(), expires_at=expires_at)
    try:
        quick = (quick_ps(program, plan.device, plan.features, work) for program in programs)
        return all(plan.objective_ps <= time_ps for time_ps in quick)
    except UndecidedError:
        return False


def _grouped(program: Lowered, options: Options, groups: Sequence[Nodes]) -> Answer | None:
    """The kernels of ``groups``, with a bound on all plans; None if one of them is not a legal kernel."""
    scheduler = make_scheduler(program, options.device, options.features)
    n_nodes = len(program.graph.nodes)
    if sum(map(len, groups)) > n_nodes:
        answer = materialise_overlapping(program, scheduler, groups)
    else:
        answer = Answer(program, plan_decided(program.graph, scheduler, lambda book: groups), None)
    if answer is None or len(answer.grouping.kernels) != len(groups):
        return None
    floor_ps = min(scheduler.floor(tuple(range(n_nodes))), answer.grouping.time_ps)
    bound_ps = None if options.only_loops else floor_ps
    return replace(answer, grouping=replace(answer.grouping, bound_ps=bound_ps))


def _noted(plan: FusionPlan, planned: Shapes, traced: Graph) -> FusionPlan:
    here = _shapes(traced)
    changed = [v for v in range(len(here)) if planned[v] != here[v]]
    # Where no argument has another size, the program's own constants do.
    named = [v for v in traced.inputs if planned[v] != here[v]] or changed[:1]
    shown = dict.fromkeys((planned[v], here[v]) for v in named)
    told = note(
        NoteKind.FAMILY,
        planned=", ".join(str(old) for old, _ in shown),
        here=", ".join(str(new) for _, new in shown),
    )
    return replace(plan, notes=(*plan.notes, str(told)))
