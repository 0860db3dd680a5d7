"""Merge the plans, bounds and notes of equivalent programs of one function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.support.errors import MemoryLimitError
from fuseplan.support.work import Limit


@dataclass(frozen=True, slots=True)
class Attempt:
    """The plan of a program, or the reason why it has none within a limit of memory."""

    outcome: FusionPlan | MemoryLimitError
    cut_by: Limit | None = None
    """The limit that cut the search for the plan short, if one did."""

    @property
    def plan(self) -> FusionPlan | None:
        """The plan, if there is one."""
        return self.outcome if isinstance(self.outcome, FusionPlan) else None

    @property
    def time_ps(self) -> float:
        """Picoseconds of the plan; infinite without one."""
        return math.inf if self.plan is None else self.plan.objective_ps

    @property
    def ended_by(self) -> Limit | None:
        """The limit that cut the search short, whether it found a plan or not."""
        return self.outcome.ended_by if isinstance(self.outcome, MemoryLimitError) else self.cut_by

    def required(self) -> FusionPlan:
        """The plan.

        Raises:
            MemoryLimitError: there is no plan.
        """
        if isinstance(self.outcome, MemoryLimitError):
            raise self.outcome
        return self.outcome

    def faster(self, other: Attempt) -> Attempt:
        """The faster of two plans of one function, this one if they are equal. A bound of the result holds
        for both programs: it is the lower one, but a program that provably has no plan within the limit
        bounds nothing."""
        if isinstance(self.outcome, MemoryLimitError) and isinstance(other.outcome, MemoryLimitError):
            return replace(self, outcome=self.outcome.joined(other.outcome))
        best, loser = (other, self) if other.time_ps < self.time_ps else (self, other)
        best = best.cut_short(loser.ended_by)
        plan = best.plan
        assert plan is not None, "one of the two is a plan, and takes less than forever"
        bound_ps = plan.bound_ps
        if not loser._is_impossible:
            bound_ps = _lower(bound_ps, loser.outcome.bound_ps)
        if bound_ps is not None and bound_ps >= plan.objective_ps:
            return replace(best, outcome=replace(plan, bound_ps=plan.objective_ps, status="OPTIMAL"))
        return replace(best, outcome=replace(plan, bound_ps=bound_ps, status="FEASIBLE"))

    def or_faster_of(self, peer: Attempt, name: str, floor_ps: Callable[[FusionPlan], int]) -> Attempt:
        """This one, or the plan that the planner ``name`` made of an equivalent program where it is faster.

        The bound stays if it is below that plan and of the same graph; else it is ``floor_ps`` of that plan,
        which no plan of its program beats but one of XLA's own kernels, or the time of the plan if it does.
        """
        plan, other = self.plan, peer.plan
        if plan is None or other is None or other.objective_ps >= plan.objective_ps:
            return self
        told = str(note(NoteKind.PEER, planner=name))
        stats = replace(plan.stats, certified="")
        notes = tuple(dict.fromkeys((*plan.notes, told)))
        used = replace(other, planner=plan.planner, status="FEASIBLE", notes=notes, stats=stats)
        bound_ps = plan.bound_ps
        if bound_ps is None or bound_ps > other.objective_ps or other.graph is not plan.graph:
            bound_ps = min(floor_ps(other), other.objective_ps)
            return replace(self, outcome=replace(used, bound_ps=bound_ps, proof=None))
        return replace(self, outcome=replace(used, bound_ps=bound_ps, proof=plan.proof))

    @property
    def _is_impossible(self) -> bool:
        """Whether no plan of the program keeps to the limit."""
        found = self.outcome
        return isinstance(found, MemoryLimitError) and found.limit_bytes < found.least_bytes

    def uncertified(self) -> Attempt:
        """The same without the name of a heuristic whose plan is as fast."""
        plan = self.plan
        return (
            self
            if plan is None
            else replace(self, outcome=replace(plan, stats=replace(plan.stats, certified="")))
        )

    def noted(self, *notes: Note) -> Attempt:
        """The same with more notes on its plan."""
        if self.plan is None:
            return self
        return replace(self, outcome=replace(self.plan, notes=(*self.plan.notes, *map(str, notes))))

    def bound_of(self, form: str) -> Attempt:
        """The same, whose bound holds for this form of the program alone (``PlanStats.bound_of``)."""
        if self.plan is None:
            return self
        return replace(self, outcome=replace(self.plan, stats=replace(self.plan.stats, bound_of=form)))

    def cut_short(self, limit: Limit | None) -> Attempt:
        """The same with a note that ``limit`` cut the search of an equivalent program short, if one did and
        nothing says so yet."""
        if limit is None or self.ended_by is not None:
            return self
        found = self.outcome
        if isinstance(found, MemoryLimitError):
            numbers = found.limit_bytes, found.smallest_bytes, found.least_bytes, found.bound_ps
            return Attempt(MemoryLimitError(*numbers, limit))
        told = str(note(NoteKind.PROGRAMS_CUT, limit=limit))
        return Attempt(replace(found, notes=(*found.notes, told)), limit)


def _lower(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)
