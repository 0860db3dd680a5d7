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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import Joint, PlanStats, Proof
from fuseplan.plan.notes import Note, NoteKind, limit_reached, note
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.schedule.shared_operands import MAX_PORTS
from fuseplan.search.component import make_proof, solve_component
from fuseplan.search.component_cache import ComponentCache
from fuseplan.search.grouping import (
    Budget,
    Decomposition,
    Grouping,
    Solved,
    break_cycles,
    decompose,
    place,
)
from fuseplan.search.heuristic_plans import HeuristicPlans, certifying_heuristic
from fuseplan.search.heuristics import undivided
from fuseplan.search.joint import join
from fuseplan.search.limits import LIMITS
from fuseplan.search.space import Mask, Space
from fuseplan.support import progress
from fuseplan.support.errors import FuseplanWarning, Verdict
from fuseplan.support.work import (
    DIVISION,
    STEP,
    TAIL,
    Limit,
    StageTimer,
    Work,
    lead_s,
    limit_of,
    may_begin,
    seconds_of,
)

_SHARE_APART = 0.25
"""The part of the counted work for a search of groups that do not fuse across hubs, from whose plan that of
all groups starts."""

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
    solver = _Solver(graph, pricing, budget)
    may_divide = budget.deadline_s <= 0 or may_begin(DIVISION, len(graph.nodes), budget.deadline_s)
    if not (budget.known or may_divide):
        return undivided(solver.book, budget.deadline_s, solver.watch)
    parts = decompose(graph, solver.book, at_hubs=False)
    solver.watch.lap("partition")
    starts = HeuristicPlans(parts.spaces, budget.known)
    if not (parts.splits_hubs and solver.book.crosses_hubs):
        return solver.grouping(solver.solve(parts, starts, {}))
    wide = decompose(graph, solver.book) if solver.has_time else None
    solver.watch.lap("partition")
    with solver.partly(_SHARE_APART):
        found = solver.solve(parts, starts, {}, () if wide is None else _joined(parts, wide))
    if wide is not None and solver.has_time:
        found = solver.fuse_across_hubs(found, wide)
    return solver.grouping(found)


def _without_offers(parts: Decomposition, starts: HeuristicPlans) -> dict[int, Solved]:
    """The plans of a heuristic of the parts that have no offer."""
    return {
        part: Solved(starts.plan(part, "best_first"), space.floor_ps, False)
        for part, space in enumerate(parts.spaces)
        if not space.offers
    }


def _is_surely_listed(space: Space) -> bool:
    """Whether a component is so small that the limit of work never ends the list of its groups."""
    return STEP << space.n <= LIMITS.max_listing_work


def _joined(parts: Decomposition, wide: Decomposition) -> list[int]:
    """The parts whose components all belong to larger components of ``wide``."""
    others = {nodes for _, nodes in wide.instances}
    there = {part for part, nodes in parts.instances if nodes in others}
    return [part for part in range(len(parts.spaces)) if part not in there]


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan of some division into components."""

    parts: Decomposition
    starts: HeuristicPlans
    cache: ComponentCache
    solved: dict[int, Solved]
    """The solution of each part."""
    refusals: tuple[Verdict, ...]
    certificate: Proof
    groups: list[Nodes]
    """In an order that can run."""
    bound_ps: int
    is_optimal: bool
    joint_note: Note | None
    joint: Joint | None


class _Solver:
    """Plans one graph within one budget."""

    def __init__(self, graph: Graph, pricing: Pricing, budget: Budget) -> None:
        self.watch = watch = StageTimer()
        self.book = book = PriceBook(graph, pricing)
        watch.lap("offers")
        self.graph, self.budget = graph, budget
        tail_s = min(seconds_of(TAIL, len(graph.nodes)), budget.deadline_s / 2)
        self.expires_at = watch.started + budget.deadline_s - tail_s
        book.expires_at = watch.started + budget.deadline_s - lead_s(len(graph.nodes))
        book.work = budget.work or Work(limit_of(budget.whole_s))

    @contextmanager
    def partly(self, share: float) -> Iterator[None]:
        """Search within a part of the counted work and, at most, a third of the time."""
        expires_at = self.expires_at
        self.expires_at = self.watch.started + (expires_at - self.watch.started) / 3
        with self.book.work.within(share):
            yield
        self.expires_at = expires_at

    @property
    def has_time(self) -> bool:
        """Whether time and counted work are left for a search of another division into components."""
        left_s = self.watch.started + self.budget.deadline_s - time.monotonic()
        may_divide = may_begin(DIVISION, len(self.graph.nodes), left_s)
        return self.budget.deadline_s > 0 and may_divide and not self.book.is_past(self.expires_at)

    def solve(
        self,
        parts: Decomposition,
        starts: HeuristicPlans,
        known: Mapping[int, Solved],
        to_start_from: Collection[int] = (),
    ) -> _Found:
        """Solve each part but those ``known``, and put the groups in order. Of the parts ``to_start_from``, a
        plan is enough."""
        book, budget, expires_at, watch = self.book, self.budget, self.expires_at, self.watch
        if budget.only_loops:
            known = {**known, **_without_offers(parts, starts)}
            to_start_from = range(len(parts.spaces))
        begun = {**starts.earlier, **starts.given}
        cache = ComponentCache(parts, "solver", budget, expires_at, begun, to_start_from)
        # Small components first: a large one that reaches the deadline then costs no other its proof.
        smallest_first = sorted(
            (k for k in range(len(parts.spaces)) if k not in known), key=lambda k: parts.spaces[k].n
        )
        for part in smallest_first:  # Whatever ends a search, there is a plan to fall back on.
            if not cache.has(part):
                starts.best(part)
        watch.lap("heuristics")
        solved = dict(known)

        def solve(part: int) -> None:
            before = book.work.spent
            starts.best(part)
            book.work.spend(starts.work[part])
            is_start = part in to_start_from
            solved[part] = solve_component(part, starts, budget, expires_at, watch, is_start)
            if part not in starts.skipped:
                with book.work.uncounted():
                    cache.keep(part, solved[part], book.work.spent - before)
            tell()

        def tell() -> None:
            """Say how fast the best plan of the graph is, but for what the order of execution changes."""
            waiting = [part for part in smallest_first if part not in solved]
            if not progress.is_followed() or any(map(cache.has, waiting)):
                return
            known = {part: (found.groups, found.bound_ps) for part, found in solved.items()}
            with book.work.uncounted():  # A display changes no plan.
                known |= {part: (starts.best(part)[0], parts.spaces[part].floor_ps) for part in waiting}
                times_ps = {part: parts.spaces[part].total(best).time_ps for part, (best, _) in known.items()}
            every = [part for part, _ in parts.instances]
            progress.found(sum(times_ps[part] for part in every), sum(known[part][1] for part in every))

        tell()
        for k, part in enumerate(smallest_first):
            # What a component does not need is left to those after it.
            is_small = _is_surely_listed(parts.spaces[part])
            with book.work.within(1 if is_small else 1 / (len(smallest_first) - k)):
                entry = cache.recall(part)
                if entry is None:
                    solve(part)
                else:
                    solved[part] = Solved(
                        list(entry.groups),
                        entry.bound_ps,
                        entry.optimal,
                        duals=entry.duals,
                        note=entry.note,
                        has_too_many_copies=entry.has_too_many_copies,
                        cases=entry.cases,
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
                    book.work.spent = book.work.limit - entry.left  # Its search had so much left.
                    solve(part)
            return solved[part].optimal

        certificate = make_proof(parts, [s for _, s in sorted(solved.items())])
        joined = join(self.graph, book, parts, starts, solved, expires_at, complete)
        watch.lap("join")
        return _Found(parts, starts, cache, solved, refusals, certificate, *joined)

    def fuse_across_hubs(self, apart: _Found, parts: Decomposition) -> _Found:
        """Solve the components ``parts`` that scalars of many readers connect, from a plan ``apart`` in which
        these are passed between kernels. The other components stay as they are."""
        part_of = {nodes: part for part, nodes in apart.parts.instances}
        earlier = dict(enumerate(parts.groups_within(apart.groups)))
        known: dict[int, Solved] = {}
        for part, nodes in parts.instances:
            before = part_of.get(nodes)
            if before is not None and part not in known:
                same = apart.parts.spaces[before].component, parts.spaces[part].component
                if same[0].apart == same[1].apart and same[0].siblings == same[1].siblings:
                    known[part] = apart.solved[before]

        def own(name: str) -> Mapping[int, list[Mask]]:
            """The plan of a heuristic alone, in the place of ``apart``."""
            groups = [
                group
                for part, nodes in apart.parts.instances
                for group in place(apart.starts.plan(part, name), nodes)
            ]
            ordered, _ = break_cycles(self.graph, self.book, groups)
            return dict(enumerate(parts.groups_within(ordered)))

        starts = HeuristicPlans(parts.spaces, self.budget.known, earlier, own)
        return self.solve(parts, starts, known)

    def grouping(self, found: _Found) -> Grouping:
        """The plan with its bound, proof and notes."""
        graph, book, budget, parts, solved = self.graph, self.book, self.budget, found.parts, found.solved
        kernels = tuple(book.kernel(group) for group in found.groups)
        notes = _summed([s.note for s in solved.values() if s.note])
        bound_ps, is_optimal = found.bound_ps, found.is_optimal
        proof: Proof | None = replace(found.certificate, joint=found.joint)
        is_cut = parts.splits_hubs and book.crosses_hubs  # There was no time for plans that fuse across them.
        if is_cut or any(verdict.rule == "hub" for verdict in parts.crossable.refusals):
            # The floor of every plan of the graph, whether searched or not.
            least_ps = book.floor(tuple(range(len(graph.nodes))))
            notes.append(note(NoteKind.SCALAR_SPLIT, most=MAX_PORTS, least_ps=least_ps))
            if is_cut:
                bound_ps, is_optimal, proof = least_ps, False, None
        if budget.deadline_s <= 0:
            notes.insert(0, note(NoteKind.DEADLINE_ZERO))
        elif found.joint_note is not None:
            notes.append(found.joint_note)
        _warn_of_failures(notes)
        certified = ""
        may_certify = not budget.known and not found.starts.earlier
        if is_optimal and found.joint is None and may_certify and time.monotonic() < self.expires_at:
            with book.work.uncounted():  # How much of it is known depends on what is remembered.
                slower = found.cache.slower()
                bounds_ps = [s.bound_ps for _, s in sorted(solved.items())]
                certified = certifying_heuristic(graph, parts, found.starts, bounds_ps, slower)
                found.cache.add_slower(slower)
        if budget.deadline_s > 0 and book.is_past(self.expires_at) and limit_reached(notes) is None:
            notes.append(note(NoteKind.SEARCH_CUT, limit=book.work.ended_by))
        recalled = found.cache.recalled
        stats = PlanStats(
            len(graph.nodes),
            len(parts.instances),
            len(parts.spaces),
            sum(
                recalled[part].candidates if part in recalled else max(len(s.columns), 1)
                for part, s in solved.items()
            ),
            tuple(self.watch.seconds.items()),
            certified,
            found.cache.n_from_earlier_plans(),
        )
        too_many_copies = {part for part, s in solved.items() if s.has_too_many_copies}
        grouping = Grouping(
            kernels,
            "OPTIMAL" if is_optimal else "FEASIBLE",
            bound_ps,
            parts.crossable.refusals + found.refusals,
            tuple(dict.fromkeys(notes)),
            stats,
            proof,
            tuple([nodes for part, nodes in parts.instances if part in too_many_copies]),
        )
        if kernels:
            book.check_bound(tuple(range(len(graph.nodes))), grouping.time_ps, bound_ps)
        if is_optimal:
            _check_rules(graph, book, parts, found.groups)
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
