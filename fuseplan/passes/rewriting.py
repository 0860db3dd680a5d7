"""Rewrite a traced program into equivalent programs whose plans may be faster.

Short rows become columns (``array_to_columns``): for XLA's loops on a CPU always, for kernels where a quick
plan is faster. Operands of contractions are exchanged where a transpose then keeps rows (``exchange_sides``).
For loops, large values are rematerialised for distant readers (``recompute_large``). For kernels, reductions
are split into steps (``split_reductions``), and large values are rematerialised for each axis along which
they are streamed (``recompute_streams``). All planners that form groups get the same programs, so that their
plans differ only by their groups.
"""

from __future__ import annotations

import time
from dataclasses import replace

from costmodel.memory import SUBLANES
from fuseplan.frontend.compared import copies_apart
from fuseplan.frontend.lower import Lowered
from fuseplan.passes.array_to_columns import by_columns
from fuseplan.passes.estimate import UndecidedError, quick_ps
from fuseplan.passes.exchange_sides import exchange_sides
from fuseplan.passes.recompute_large import recompute
from fuseplan.passes.recompute_streams import along_streams, with_less_memory
from fuseplan.passes.split_reductions import split_sums
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.plan.options import Options
from fuseplan.planners import has_fixed_kernels
from fuseplan.schedule.scheduler import make_scheduler
from fuseplan.search.grouping import left_s
from fuseplan.search.must_fuse import require_possible
from fuseplan.search.selectors import resolve
from fuseplan.support.errors import ConstraintError
from fuseplan.support.work import UNCUT, StageTimer, Work, limit_of, seconds_of, unlimited


def rewritten_programs(
    lowered: Lowered, options: Options, clock: StageTimer, expires_at: float
) -> tuple[list[Lowered], tuple[Note, ...]]:
    """The programs to plan, of which the fastest plan counts; the constraints can hold in each of them.

    ``lowered`` itself is left out where a rewritten program is very likely faster. Rewriting takes at most
    half of the time until ``expires_at``, and half of a search's counted work; the rest is for the search.
    Notes name the rewrites that there was no time for."""
    if not may_rewrite(options):
        return [lowered], ()
    if options.device.capabilities.emits_kernels:
        if not may_stream(options, lowered):
            return [lowered], _no_time(options, lowered) if _has_streams(options) else ()
        until = time.monotonic() + left_s(expires_at) / 2
        work = Work(limit_of(options.deadline_s) // 2, expires_at=until)
        found, is_cut = clock.time("streams", lambda: _for_kernels(lowered, options, work))
        notes = (note(NoteKind.REWRITES_CUT, limit=work.ended_by),) if is_cut or work.is_over else ()
        return [_possible(found, options) or lowered], notes
    min_bytes = options.device.least_large_bytes
    base = clock.time("lower", lambda: _for_loops(lowered, min_bytes, options))
    if not (options.features.recompute and options.features.loop_nests):
        return [base], ()
    again = _possible(clock.time("lower", lambda: recompute(base, min_bytes)), options)
    return [base] if again is None else [base, again], ()


def _for_loops(lowered: Lowered, min_bytes: int, options: Options) -> Lowered:
    """The program with operands of contractions exchanged, and with short rows as columns."""
    products = exchange_sides(lowered) or lowered
    columns = _possible(by_columns(products, min_bytes), options)
    return columns or _possible(products, options) or lowered


def leaner_programs(lowered: Lowered, options: Options) -> list[Lowered | None]:
    """``lowered`` with large values rematerialised to save memory; None in the place of a program in which
    the constraints cannot hold."""
    return [_possible(p, options) for p in with_less_memory(lowered, options.device, options.features)]


def is_faster_as_traced(lowered: Lowered, options: Options, time_ps: float, expires_at: float) -> bool:
    """Whether to plan the program as traced, too, after a rewritten one has a plan of ``time_ps``.

    A heuristic always plans it, which takes little time. The solver would need as long as for its first
    search, and plans it only if the plan of ``best_first`` takes less than ``time_ps``."""
    if options.planner != "solver":
        return True
    work = replace(unlimited(), expires_at=expires_at)
    try:
        return quick_ps(lowered, options.device, options.features, work) < time_ps
    except UndecidedError:
        return False


def may_rewrite(options: Options) -> bool:
    """Whether the planner may plan other programs than the one as traced."""
    return options.features.rewrites and not has_fixed_kernels(options.planner)


def may_recompute(options: Options) -> bool:
    """Whether a second search follows, which also decides about rematerialisation."""
    return may_rewrite(options) and options.features.recompute and options.deadline_s > 0


def may_stream(options: Options, lowered: Lowered) -> bool:
    """Whether the deadline leaves time to choose, before the search, large values to rematerialise."""
    return _has_streams(options) and not _no_time(options, lowered)


def _has_streams(options: Options) -> bool:
    is_for_kernels = options.device.capabilities.emits_kernels and options.features.loop_nests
    return is_for_kernels and may_recompute(options)


def _no_time(options: Options, lowered: Lowered) -> tuple[Note, ...]:
    """A note where the deadline is too short to rewrite a program for kernels."""
    n_nodes = len(lowered.graph.nodes)
    if options.deadline_s >= seconds_of(UNCUT, n_nodes):
        return ()
    return (note(NoteKind.NO_TIME_TO_REWRITE, deadline_s=options.deadline_s, count=n_nodes),)


def _for_kernels(lowered: Lowered, options: Options, work: Work) -> tuple[Lowered | None, bool]:
    """The program with operands of contractions exchanged, and with short rows as columns, reductions in
    steps and large values rematerialised where kernels gain by that; None where nothing changes. The second
    result says whether there was no time to decide about all. Then the rewrites that are finished count."""
    # Where batch dimensions have to lead, another pass orders the operands.
    found = None if options.device.capabilities.batches_lead else exchange_sides(lowered)
    try:
        found = _faster_by_columns(found or lowered, options, work) or found
        found = split_sums(found or lowered, options.device, options.features, work) or found
        streamed, is_cut = along_streams(found or lowered, options.device, options.features, work)
        return streamed or found, is_cut
    except UndecidedError:
        return found, True


def _faster_by_columns(lowered: Lowered, options: Options, work: Work) -> Lowered | None:
    """The program with short rows as columns, if a heuristic plan of it is faster than one of ``lowered``.

    A short row fills few lanes of a TPU's vector. Rows of up to a tile's sublanes are tried.

    Raises:
        UndecidedError: ``work`` was over before it was known which is faster.
    """
    columns = _possible(
        by_columns(lowered, options.device.least_large_bytes, SUBLANES, lookups=True), options
    )
    if columns is None:
        return None
    rows_ps = quick_ps(lowered, options.device, options.features, work)
    return columns if quick_ps(columns, options.device, options.features, work) < rows_ps else None


def _possible(lowered: Lowered | None, options: Options) -> Lowered | None:
    """A rewritten program; None where there is none, a comparison would read two evaluations of one value, or
    the constraints cannot hold in it."""
    if lowered is None or any(copies_apart(lowered.graph)):
        return None
    if options.constraints is None:
        return lowered
    scheduler = make_scheduler(lowered, options.device, options.features)
    try:
        require_possible(resolve(options.constraints, lowered), lowered.graph, scheduler)
    except ConstraintError:
        return None
    return lowered
