"""The solver: the cheapest legal partition of a graph into kernels, with a proof.

Each distinct component is an exact cover problem: its legal groups are the sets, its nodes the items. Most
groups are never scheduled: a group enters with a *floor* under its cost, and the duals of the linear
relaxation tell which groups could be part of a plan no slower than the best known. Only those are priced, the
relaxation is solved again, and in the end the few that remain are searched exhaustively.

A component that has too many groups to list is solved by column generation
(``fuseplan.search.column_generation``): a branch and bound finds the groups that its duals ask for.

Only the order of execution couples components. Groups that form a cycle are forbidden together, and the
components involved are solved again, jointly.

The deadline ends the search and the heuristics, whose plans are the fallback; the answer is never slower than
the heuristic plans that were made. Three steps cannot be cut short: dividing the graph into components, which
does not begin where it would end long after the deadline (``undivided``), a counted amount of heuristic work,
and ordering the kernels, for which time is set aside. A limit of counted work (``fuseplan.support.work``)
ends a search, too. Where OR-Tools is missing, broken or out of memory, the heuristic plan is the answer, with
a warning.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import PlanStats
from fuseplan.plan.notes import Note, NoteKind, limit_reached, note
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.schedule.shared_operands import MAX_PORTS
from fuseplan.search.component import HeuristicPlans, certifying_heuristic, make_proof, solve_component
from fuseplan.search.component_cache import ComponentCache
from fuseplan.search.grouping import Budget, Decomposition, Grouping, Solved, decompose
from fuseplan.search.heuristics import undivided
from fuseplan.search.joint import join
from fuseplan.support.errors import FuseplanWarning
from fuseplan.support.work import (
    DIVISION,
    TAIL,
    Limit,
    StageTimer,
    Work,
    lead_s,
    limit_of,
    may_begin,
    seconds_of,
)

_MANY_NOTES = 3
"""Notes on components that one limit left unproven, above which one note counts them."""

_MANY_CORES = 8
"""Refused groups, and neighbours of each, that are asked about again to see whether rules are monotone."""


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """The cheapest plan by time; of those that it compares, by HBM bytes and number of kernels, too.

    ``status`` is OPTIMAL if that is proven. Else it is FEASIBLE, no plan is faster than ``bound_ps``, and
    ``notes`` say which limit was hit. The plan is never slower than that of either heuristic, unless the
    deadline cut the heuristic short.

    Warns:
        FuseplanWarning: OR-Tools could not be used. A crash of its native code cannot be caught
            (``fuseplan.search.set_partitioning``).
    """
    budget = budget or Budget()
    watch = StageTimer()
    book = PriceBook(graph, pricing)
    if not (budget.known or may_begin(DIVISION, len(graph.nodes), budget.deadline_s)):
        return undivided(book, budget.deadline_s, watch)
    parts = decompose(graph, book)
    watch.lap("partition")
    tail_s = min(seconds_of(TAIL, len(graph.nodes)), budget.deadline_s / 2)
    expires_at = watch.started + budget.deadline_s - tail_s
    book.expires_at = watch.started + budget.deadline_s - lead_s(len(graph.nodes))
    book.work = budget.work or Work(limit_of(budget.whole_s))
    starts = HeuristicPlans(parts.spaces, budget.known)
    cache = ComponentCache(parts, "solver", budget, expires_at, starts.given)
    # Small components first: a large one that reaches the deadline then costs no other its proof.
    smallest_first = sorted(range(len(parts.spaces)), key=lambda k: parts.spaces[k].n)
    for part in smallest_first:  # Whatever ends a search, there is a plan to fall back on.
        if not cache.has(part):
            starts.best(part)
    watch.lap("heuristics")
    solved: dict[int, Solved] = {}

    def solve(part: int) -> None:
        before = book.work.spent
        starts.best(part)
        book.work.spend(starts.work[part])
        solved[part] = solve_component(part, starts, budget, expires_at, watch)
        with book.work.uncounted():
            cache.keep(part, solved[part], book.work.spent - before)

    for part in smallest_first:
        known = cache.recall(part)
        if known is None:
            solve(part)
        else:
            groups, duals = list(known.groups), known.duals
            solved[part] = Solved(
                groups, known.bound_ps, known.optimal, duals=duals, note=known.note, crowded=known.crowded
            )
        if solved[part].optimal:
            space = parts.spaces[part]
            time_ps = space.total(solved[part].groups).time_ps
            book.check_bound(space.component.nodes, time_ps, solved[part].bound_ps)
    cache.close()
    refusals = cache.refusals()  # before others ask for groups that the search did not
    watch.lap("cache")

    def complete(part: int) -> bool:
        """Find all columns of a part; whether its plan is proven."""
        entry = cache.recalled.pop(part, None)
        if entry is not None:
            with book.work.uncounted():  # It was counted when it was recalled.
                book.work.spent -= entry.work
                solve(part)
        return solved[part].optimal

    certificate = make_proof(parts, [(s.bound_ps, s.duals) for _, s in sorted(solved.items())])
    ordered, bound_ps, optimal, joint_note, joint = join(
        graph, book, parts, starts, solved, expires_at, complete
    )
    kernels = tuple(book.kernel(group) for group in ordered)
    watch.lap("join")
    notes = _summed([s.note for s in solved.values() if s.note])
    hubs = [v for v in parts.crossable.refusals if v.rule == "hub"]
    if hubs:
        # The floor of every plan of the graph, whether searched or not.
        least_ps = book.floor(tuple(range(len(graph.nodes))))
        notes.append(note(NoteKind.SCALAR_SPLIT, most=MAX_PORTS, least_ps=least_ps))
    if budget.deadline_s <= 0:
        notes.insert(0, note(NoteKind.DEADLINE_ZERO))
    elif joint_note is not None:
        notes.append(joint_note)
    _warn_of_failures(notes)
    certified = ""
    if optimal and joint is None and not budget.known and time.monotonic() < expires_at:
        with book.work.uncounted():  # How much of it is known depends on what is remembered.
            slower = cache.slower()
            bounds_ps = [s.bound_ps for _, s in sorted(solved.items())]
            certified = certifying_heuristic(graph, parts, starts, bounds_ps, slower)
            cache.add_slower(slower)
    if budget.deadline_s > 0 and book.is_past(expires_at) and limit_reached(notes) is None:
        notes.append(note(NoteKind.SEARCH_CUT, limit=book.work.ended_by))
    stats = PlanStats(
        len(graph.nodes),
        len(parts.instances),
        len(parts.spaces),
        sum(
            cache.recalled[part].candidates if part in cache.recalled else max(len(s.columns), 1)
            for part, s in solved.items()
        ),
        tuple(watch.seconds.items()),
        certified,
        cache.n_from_earlier_plans(),
    )
    grouping = Grouping(
        kernels,
        "OPTIMAL" if optimal else "FEASIBLE",
        bound_ps,
        parts.crossable.refusals + refusals,
        tuple(dict.fromkeys(notes)),
        stats,
        replace(certificate, joint=joint),
        frozenset(
            n for part, nodes in parts.instances if part in solved and solved[part].crowded for n in nodes
        ),
    )
    if kernels:
        book.check_bound(tuple(range(len(graph.nodes))), grouping.time_ps, bound_ps)
    if optimal:
        _check_rules(graph, book, parts, ordered)
    return grouping if book.fault is None else grouping.unproven(book.fault)


def _check_rules(graph: Graph, book: PriceBook, parts: Decomposition, groups: Sequence[Nodes]) -> None:
    """Look for rules that are not monotone: for a group of the plan that is refused, though a larger one was
    allowed, and for a refused group that one more neighbour makes a kernel. It is a sample."""
    offers = frozenset(book.offers)
    for group in groups:
        if len(group) > 1 and group not in offers:
            book.check_monotone(group, group)
    cores = [space.nodes(core) for space in parts.spaces for core in space.rules.cores[:_MANY_CORES]]
    pairs = [v.nodes for v in parts.crossable.refusals if v.rule not in ("hub", "cycle")]
    for nodes in [*cores, *pairs][:_MANY_CORES]:
        near = {c for n in nodes for v in graph.nodes[n].outputs for c in graph.consumers[v]}
        near |= {p for n in nodes for v in graph.nodes[n].inputs if (p := graph.values[v].producer) >= 0}
        for n in sorted(near.difference(nodes))[:_MANY_CORES]:
            book.check_monotone(nodes, tuple(sorted((*nodes, n))))


def _summed(notes: list[Note]) -> list[Note]:
    """Replace many notes about one limit by the first of them and a count of the others."""
    for limit in Limit:
        late = [n for n in notes if n.limit is limit]
        if len(late) > _MANY_NOTES:
            notes = [n for n in notes if n not in late[1:]]
            notes.append(note(NoteKind.OTHERS_UNPROVEN, limit=limit, count=len(late) - 1))
    return notes


def _warn_of_failures(notes: Sequence[Note]) -> None:
    failed = [n for n in notes if n.kind is NoteKind.SOLVER_FAILED]
    if failed:
        warnings.warn(
            f"{failed[0]}; the plan is the better of the heuristic ones where it was needed. "
            "Install ortools>=9.15, or choose planner='best_first'",
            FuseplanWarning,
            stacklevel=3,
        )
