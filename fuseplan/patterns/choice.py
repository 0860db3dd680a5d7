"""Apply the patterns of a call's options: replace, choose by cost, and say what was done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuseplan.frontend.flat_view import ClosedJaxpr
from fuseplan.frontend.trace import flatten
from fuseplan.patterns.pattern import Pattern
from fuseplan.patterns.replace import Rewritten, rewrite_closed
from fuseplan.pipeline import plan_traced
from fuseplan.plan.attempt import Attempt
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.notes import NoteKind, note
from fuseplan.plan.options import Options
from fuseplan.settings import with_figures
from fuseplan.support.errors import PatternError


@dataclass(frozen=True, slots=True)
class Applied:
    """A traced function with its matches replaced."""

    closed: ClosedJaxpr
    notes: tuple[str, ...] = ()
    plan: FusionPlan | None = None
    """The plan, with the notes, where one was made to choose by cost."""


_NAMED = 3
"""The most patterns without a match that a note names."""


def apply_patterns(
    closed: ClosedJaxpr,
    options: Options,
    function: str,
    *,
    runs_here: bool = False,
    out_tree: Any = None,
    plan_of: Callable[..., FusionPlan] = plan_traced,
    trace_s: float = 0.0,
) -> Applied:
    """``closed`` with the matches of ``options.patterns`` replaced.

    A pattern with ``choose="cost"`` is used if the plan is faster with it than without it; the bound of the
    plan then holds for both programs. ``runs_here``, as in ``rewrite_closed``.

    Raises:
        PatternError: a required pattern matches nothing, overlaps itself, or its replacement has another
            result than it.
    """
    patterns: tuple[Pattern, ...] = options.patterns
    if not patterns:
        return Applied(closed)
    found = rewrite_closed(closed, patterns, options.device, function=function, replaces=False)
    absent = [p for p in patterns if not found.is_mentioned(p)]
    _require_matches(closed, absent, options, function)
    optional = [p for p in patterns if p.choose == "cost" and p not in absent]
    if optional or any(p.cost for p in patterns if p not in absent):
        options = with_figures(options)
    options = replace(
        options,
        deadline_s=options.deadline_s / (1 + len(optional)),
        asked_s=options.whole_s,
        patterns=(),
    )

    def rewritten(active: Sequence[Pattern]) -> Rewritten:
        chosen = [p for p in patterns if p in active]
        return rewrite_closed(closed, chosen, options.device, function=function, runs_here=runs_here)

    active = [p for p in patterns if p.choose == "always" and p not in absent]
    best = rewritten(active) if active else Rewritten(closed)
    failed = list(best.failed)
    attempt: Attempt | None = None
    notes: list[str] = []
    for pattern in optional:
        other = rewritten([*active, pattern])
        failed += [f for f in other.failed if f[0].pattern is pattern]
        if not other.count(pattern):
            continue
        if attempt is None:
            attempt = Attempt(plan_of(flatten(best.closed, out_tree), options, trace_s))
        with_it = Attempt(plan_of(flatten(other.closed, out_tree), options, trace_s))
        times: dict[str, Any] = {"with_ps": int(with_it.time_ps), "without_ps": int(attempt.time_ps)}
        is_faster = with_it.time_ps < attempt.time_ps
        kind = NoteKind.PATTERN_FASTER if is_faster else NoteKind.PATTERN_SLOWER
        notes.append(str(note(kind, pattern=pattern.name, **times)))
        attempt = attempt.faster(with_it)
        if is_faster:
            best, active = other, [*active, pattern]
    notes += _told(patterns, best, found.refusals, failed, absent)
    plan = None if attempt is None else attempt.required()
    if plan is not None:
        plan = replace(plan, notes=(*plan.notes, *notes))
    return Applied(best.closed, tuple(notes), plan)


def plan_patterned(
    closed: ClosedJaxpr, out_tree: Any, options: Options, function: str, trace_s: float = 0.0
) -> FusionPlan:
    """The plan of a traced function, whose matches are replaced."""
    applied = apply_patterns(closed, options, function, out_tree=out_tree, trace_s=trace_s)
    if applied.plan is not None:
        return applied.plan
    plan = plan_traced(flatten(applied.closed, out_tree), options, trace_s)
    return replace(plan, notes=(*plan.notes, *applied.notes))


def _told(
    patterns: Sequence[Pattern],
    best: Rewritten,
    refusals: Sequence[Any],
    failed: Sequence[Any],
    absent: Sequence[Pattern],
) -> list[str]:
    """Notes on the matches that are used, and on those that are not."""
    notes = []
    for pattern in patterns:
        count = best.count(pattern)
        if count:
            notes.append(str(note(NoteKind.PATTERN_USED, pattern=pattern.name, count=count)))
    for refusal in refusals:
        match, reason = refusal.match, refusal.verdict.reason
        where = match.source or "an unknown line"
        told = note(NoteKind.PATTERN_REFUSED, pattern=match.pattern.name, place=where, reason=reason)
        notes.append(str(told))
    for match, reason in failed:
        where = match.source or "an unknown line"
        told = note(NoteKind.PATTERN_FAILED, pattern=match.pattern.name, place=where, reason=reason)
        notes.append(str(told))
    if absent:
        found = {p.name for p in patterns if p not in absent}
        names = list(dict.fromkeys(p.name for p in absent if p.name not in found))
        if names:
            more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
            notes.append(str(note(NoteKind.PATTERN_ABSENT, patterns=", ".join([*names[:_NAMED], *more]))))
    return list(dict.fromkeys(notes))


def _require_matches(closed: ClosedJaxpr, absent: Sequence[Pattern], options: Options, function: str) -> None:
    required = [p for p in absent if p.required]
    if not required:
        return
    pattern = required[0]
    looked = rewrite_closed(
        closed, [pattern], options.device, function=function, explain=True, replaces=False
    )
    nearest = f" Nearest: {looked.near_misses[0]}." if looked.near_misses else ""
    raise PatternError(
        f"the pattern {pattern.name!r} matches nothing in {function}.{nearest} fuseplan.match(pattern, "
        "function)(*args) says what differs; Pattern(..., required=False) makes this a note"
    )
