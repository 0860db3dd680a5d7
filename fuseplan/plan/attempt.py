"""Attempts to plan equivalent programs of one function, and how their plans, bounds and notes are merged."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.support.errors import MemoryLimitError
from fuseplan.support.work import ended


@dataclass(frozen=True, slots=True)
class Attempt:
    """The plan of a program, or the reason why it has none within a limit of memory."""

    outcome: FusionPlan | MemoryLimitError

    @property
    def plan(self) -> FusionPlan | None:
        """The plan, if there is one."""
        return self.outcome if isinstance(self.outcome, FusionPlan) else None

    @property
    def time_ps(self) -> float:
        """Picoseconds of the plan; infinite without one."""
        return math.inf if self.plan is None else self.plan.objective_ps

    @property
    def ended(self) -> str:
        """Which limit cut the search short (one of ``fuseplan.support.work.ENDED``), or an empty text."""
        return ended(self.outcome.notes) if isinstance(self.outcome, FusionPlan) else self.outcome.ended

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
        best = best.cut_short(loser.ended)
        plan = best.plan
        assert plan is not None, "one of the two is a plan, and takes less than forever"
        bound_ps = plan.bound_ps
        if not loser._is_impossible:
            bound_ps = _lower(bound_ps, loser.outcome.bound_ps)
        if bound_ps is not None and bound_ps >= plan.objective_ps:
            return replace(best, outcome=replace(plan, bound_ps=plan.objective_ps, status="OPTIMAL"))
        return replace(best, outcome=replace(plan, bound_ps=bound_ps, status="FEASIBLE"))

    @property
    def _is_impossible(self) -> bool:
        """Whether no plan of the program keeps to the limit."""
        found = self.outcome
        return isinstance(found, MemoryLimitError) and found.limit_bytes < found.least_bytes

    def bound_of(self, form: str) -> Attempt:
        """The same, whose bound holds for this form of the program alone (``PlanStats.bound_of``)."""
        if self.plan is None:
            return self
        return replace(self, outcome=replace(self.plan, stats=replace(self.plan.stats, bound_of=form)))

    def cut_short(self, why: str) -> Attempt:
        """The same with a note that a limit (``fuseplan.support.work.ENDED``) cut the search of an equivalent
        program short, if one did and nothing says so yet."""
        if not why or self.ended:
            return self
        if isinstance(self.outcome, MemoryLimitError):
            found = self.outcome
            numbers = found.limit_bytes, found.smallest_bytes, found.least_bytes, found.bound_ps
            return replace(self, outcome=MemoryLimitError(*numbers, why))
        note = f"{why} all equivalent programs had been searched"
        return replace(self, outcome=replace(self.outcome, notes=(*self.outcome.notes, note)))


def _lower(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else min(one, other)
