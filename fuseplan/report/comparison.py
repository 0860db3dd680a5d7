"""Compare planners on one program: the plan of each, as traced and rewritten, beside XLA's own plan.

Two ratios separate the sources of a gain. What *rewriting* gains is, for one planner, the time of its plan of
the program as traced over that of its best plan (``fuseplan.passes.rewriting``). What *solving* gains is the
time of greedy's best plan over that of the solver's, both given the same rewrites.

``divergence_lines`` lists the programs whose measured time differs from the modelled one by more than a
factor of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.notes import all_notes
from fuseplan.support.errors import FuseplanError
from fuseplan.support.format import times_text

NO_PLAN = "NONE"
"""The status of a planner that has made no plan; ``Compared.reason`` says why."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The measured median time of a program in seconds, the bytes of its temporaries as the compiler reports
    them, and the ratios of both to those of ``jax.jit``'s program, run in turns with it. None where
    unknown."""

    time_s: float | None = None
    time_ratio: float | None = None
    temp_bytes: int | None = None
    temp_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """One planner's plan of a program, or the reason why it has none."""

    planner: str
    plan: FusionPlan | None
    unrewritten_ps: int | None = None
    """Picoseconds of its plan of the program as traced, with ``Features(rewrites=False)``. None if it has no
    such plan, for example within ``max_peak_bytes``."""
    reason: str = ""
    """Why there is no plan."""
    error: FuseplanError | None = field(default=None, compare=False, repr=False)
    """The error of a planner of graphs that made no plan."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the plan, or the reason why there is none."""
        return (self.reason,) if self.plan is None else all_notes(self.plan)

    @property
    def rewriting_gains(self) -> float | None:
        """The time of its plan of the program as traced over that of its best plan."""
        if self.plan is None or not self.plan.objective_ps or self.unrewritten_ps is None:
            return None
        return self.unrewritten_ps / self.plan.objective_ps


def baseline_of(plans: Iterable[FusionPlan]) -> FusionPlan | None:
    """The plan that speed-ups are relative to: XLA's own, which runs without fuseplan; else the ``unfused``
    one; else the first plan that takes any time."""
    timed = [plan for plan in plans if plan.objective_ps]
    by_name = {plan.planner: plan for plan in reversed(timed)}
    return by_name.get("xla") or by_name.get("unfused") or (timed[0] if timed else None)


def speed_up(plan: FusionPlan | None, baseline: FusionPlan | None) -> float | None:
    """The time of the baseline over that of a plan."""
    if plan is None or baseline is None or not plan.objective_ps:
        return None
    return baseline.objective_ps / plan.objective_ps


def gains_text(rows: Sequence[Compared]) -> str:
    """One sentence on the gains of rewriting, one on the gain of solving; empty where neither is known."""
    rewriting = [
        f"{row.planner} {times_text(gains)}"
        for row in rows
        if row.planner in ("greedy", "solver") and (gains := row.rewriting_gains) is not None
    ]
    plans = {row.planner: row.plan for row in rows}
    solving = speed_up(plans.get("solver"), plans.get("greedy"))
    found = [f"Rewriting gains {' and '.join(rewriting)}."] if rewriting else []
    if solving is not None:
        same = "With the same rewrites,"
        if solving >= 1:
            found.append(f"{same} solving gains {times_text(solving)} over greedy.")
        else:  # a search that the deadline or the limit of counted work cut short
            found.append(f"{same} the solver's plan takes {times_text(1 / solving)} as long as greedy's.")
    return " ".join(found)


DIVERGENCE_FACTOR = 2.0
"""The ratio of two times above which they are reported. So far apart, the plan with the best modelled time
need not be the fastest."""


_LEFT_OUT = {
    "cpu": "The model of a CPU does not know how XLA fuses what is left to it, nor what its threads and its "
    "allocator take",
    "gpu": "The model of a GPU does not know its clock under load, nor what the compiler makes of a kernel",
    "tpu": "The model of a TPU does not know what the compiler makes of a kernel",
}
"""By ``DeviceSpec.platform``, the effects that a modelled time leaves out."""


def are_apart(modelled: float | None, measured: float | None) -> bool:
    """Whether two times are known (not None, 0 or NaN) and differ by more than ``DIVERGENCE_FACTOR``.

    Example:
        >>> are_apart(1.0, 2.5), are_apart(1.0, float("nan"))
        (True, False)
    """
    if not modelled or not measured:
        return False
    return max(measured / modelled, modelled / measured) > DIVERGENCE_FACTOR


def divergence_lines(rows: Iterable[tuple[str, float | None, float | None]], platform: str) -> list[str]:
    """One sentence with the rows whose two times differ by more than ``DIVERGENCE_FACTOR``, and one with the
    effects that the model leaves out; empty if there are no such rows.

    Args:
        rows: a name, and the modelled and the measured time in one unit; None or NaN if unknown.
        platform: the ``DeviceSpec.platform`` of the device on which they were measured.

    Example:
        >>> print(divergence_lines([("mlp", 1.0, 1.5), ("softmax", 1.0, 2.5)], "tpu")[0])
        Measured over modelled time, where they are more than a factor of 2 apart: softmax 2.50×.
    """
    apart = [
        f"{name} {times_text(measured / modelled)}"
        for name, modelled, measured in rows
        if modelled and measured and are_apart(modelled, measured)
    ]
    if not apart:
        return []
    where = f"where they are more than a factor of {DIVERGENCE_FACTOR:g} apart"
    lines = [f"Measured over modelled time, {where}: {', '.join(apart)}."]
    return [*lines, f"{_LEFT_OUT[platform]}."] if platform in _LEFT_OUT else lines
