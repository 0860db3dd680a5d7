"""The cheapest legal partition, with a proof.

Each distinct component is an exact cover problem: its legal groups are the sets, its
nodes the items. Most groups are never scheduled: a group enters with a *floor* under its
cost, and the dual prices of the linear relaxation tell which groups could be part of a
plan no slower than the best known. Only those are priced, the relaxation is solved again,
and in the end the few that remain are searched exhaustively.

What couples components is the order of execution. Groups that would wait for each other
in a circle are forbidden together, and the components involved are solved again, jointly.

The deadline ends whatever is searched. What cannot be cut short is to take the graph apart, the
two heuristics (their plans are what there is to fall back on, and the answer is never slower than
either), and to put the kernels in order; time for the last is set aside. Where OR-Tools is missing,
broken or out of memory the heuristic plan is the answer, with a warning.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.graph import Graph
from fuseplan.absorb import absorb_moves, absorb_renames, contract
from fuseplan.candidates import enumerate_groups
from fuseplan.errors import FuseplanWarning, Verdict
from fuseplan.join import cyclic_sets, execution_order, shortest_cycle
from fuseplan.partition import MAX_PORTS
from fuseplan.plan import PlanStats
from fuseplan.planners import best_first, greedy
from fuseplan.planners.base import (
    Budget,
    Grouping,
    Parts,
    Stopwatch,
    break_cycles,
    ideal,
    order_groups,
    place,
    sum_prices,
    take_apart,
    with_offers,
)
from fuseplan.pricing import Nodes, Price, PriceBook, Pricing
from fuseplan.solver import Instance, Relaxation, exact_cover
from fuseplan.space import Mask, Space, bits

_FEW = 8
"""Groups that are priced at least before the relaxation is solved again: scheduling a
group and solving a small relaxation each take about a millisecond."""

_TAIL_S = 2e-5
"""Seconds a node to set aside for joining, ordering and checking kernels, which come after the
search: twice what a training step of GPT-2 takes; less where taking the graph apart was faster."""

_MAX_ROUNDS = 20
"""Rounds of cycle cuts before the plan falls back to taking groups apart. No graph of the
tests needs more than 3."""


@dataclass(slots=True)
class Solved:
    """The best partition found of one distinct component, and what is known about others."""

    groups: list[Mask]
    bound_ps: int
    optimal: bool
    columns: dict[Mask, int] = field(default_factory=dict)
    """Every legal group that has not been refused, with its time or a floor under it."""
    duals: tuple[int, ...] = ()
    """A price for each position such that no column costs less than its positions."""
    note: str = ""


Start = tuple[list[Mask], ...]
"""What the heuristics make of a distinct component, one entry each."""

HEURISTICS = (("best_first", best_first), ("greedy", greedy))

_FAILURES = (ImportError, MemoryError, RuntimeError, OverflowError, OSError, AttributeError)
"""What a missing, broken or overwhelmed OR-Tools raises; a library that does not load, OSError."""

_LATE, _MANY = "the deadline came before", 3
_UNUSABLE = "the solver could not be used"


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """The cheapest plan by time, then HBM bytes, then number of kernels.

    ``status`` is OPTIMAL if that is proven; else FEASIBLE, ``bound_ps`` says how much
    better a plan could be at most, and ``notes`` say which limit was hit. It is never slower than
    the plan of either heuristic.

    Warns:
        FuseplanWarning: OR-Tools could not be used. A crash of its native code cannot be caught
            (``fuseplan.solver``).
    """
    budget = budget or Budget()
    watch = Stopwatch()
    book = PriceBook(graph, pricing)
    parts = take_apart(graph, book)
    watch.lap("partition")
    tail_s = min(watch.laps["partition"], _TAIL_S * len(graph.nodes), budget.deadline_s / 2)
    expires_at = watch.started + budget.deadline_s - tail_s
    starts = [_heuristics(space) for space in parts.kinds]
    watch.lap("heuristics")
    solved: dict[int, Solved] = {}
    # Small ones first, so that one that hits the deadline costs no other its proof.
    for kind in sorted(range(len(parts.kinds)), key=lambda k: parts.kinds[k].n):
        solved[kind] = _solve_component(parts.kinds[kind], starts[kind], budget, expires_at, watch)
    ordered, bound_ps, optimal, joint_note = _join(graph, book, parts, starts, solved, expires_at)
    kernels = tuple(book.kernel(group) for group in ordered)
    watch.lap("join")
    notes = _summed([s.note for s in solved.values() if s.note])
    hubs = [v for v in parts.crossable.refusals if v.rule == "producer-consumer"]
    if hubs:
        notes.append(
            f"a scalar that ties more than {MAX_PORTS} operations together is passed between their kernels: "
            "plans that fuse across it were not searched"
        )
    if budget.deadline_s <= 0:
        notes.insert(0, "the deadline is 0: this is the better of the heuristic plans")
    elif joint_note:
        notes.append(joint_note)
    _warn_of_failures(notes)
    stats = PlanStats(
        len(graph.nodes),
        len(parts.instances),
        len(parts.kinds),
        sum(max(len(s.columns), 1) for s in solved.values()),
        tuple(watch.laps.items()),
    )
    return Grouping(
        kernels,
        "OPTIMAL" if optimal else "FEASIBLE",
        bound_ps,
        parts.crossable.refusals + _refusals(parts),
        tuple(dict.fromkeys(notes)),
        stats,
    )


def _refusals(parts: Parts) -> tuple[Verdict, ...]:
    """For each component and rule, the smallest group that was refused when priced."""
    found: dict[tuple[int, str], tuple[Nodes, Verdict]] = {}
    for kind, space in enumerate(parts.kinds):
        for mask, verdict in space.refusals:
            nodes = space.nodes(mask)
            key = (kind, verdict.rule)
            if key not in found or (len(nodes), nodes) < (len(found[key][0]), found[key][0]):
                found[key] = (nodes, verdict)
    return tuple(replace(verdict, nodes=nodes) for nodes, verdict in found.values())


def _summed(notes: list[str]) -> list[str]:
    """``notes`` with one in the place of many about the deadline."""
    late = [note for note in notes if note.startswith(_LATE)]
    if len(late) <= _MANY:
        return notes
    return [n for n in notes if n not in late[1:]] + [
        f"{_LATE} {len(late) - 1} other kinds of parts were proven"
    ]


def _warn_of_failures(notes: Sequence[str]) -> None:
    failed = [note for note in notes if note.startswith(_UNUSABLE)]
    if failed:
        warnings.warn(
            f"{failed[0]}; the plan is the better of the heuristic ones where it was needed. "
            "Install ortools>=9.15, or choose planner='best_first'",
            FuseplanWarning,
            stacklevel=3,
        )


def _failure(error: BaseException) -> str:
    return f"{_UNUSABLE} ({str(error) or type(error).__name__})"


def _heuristics(space: Space) -> Start:
    """The plans of the heuristic planners, as they would make them."""
    whole = ideal(space)
    if whole is not None:
        return (whole,)
    return tuple(with_offers(space, heuristic.merge(space)) for _, heuristic in HEURISTICS)


def _solve_component(
    space: Space, start: Start, budget: Budget, expires_at: float, watch: Stopwatch
) -> Solved:
    """Solve a component without what belongs to its readers anyway, and put that back."""
    known = min(start, key=lambda groups: space.total(groups).objectives)
    floor_ps = space.floor(space.everything)
    if space.n == 1 or (len(start) == 1 and len(known) == 1):
        return Solved(known, space.total(known).time_ps, True)
    name = HEURISTICS[start.index(known)][0]
    if time.monotonic() >= expires_at:
        note = f"{_deadline_note(space)}: {name}'s plan stands there" if budget.deadline_s > 0 else ""
        return Solved(known, floor_ps, False, note=note)
    small = (absorb_moves if space.book.absorbs_moves else absorb_renames)(space)
    solved = _solve_space(small, _folded(space, known, small), budget, expires_at, watch)
    if small is not space:
        duals = [0] * space.n
        for k, dual in enumerate(solved.duals):
            duals[space.position[small.members[k][0]]] = dual
        solved.groups = [space.mask(small.nodes(mask)) for mask in solved.groups]
        solved.columns = {space.mask(small.nodes(mask)): cost for mask, cost in solved.columns.items()}
        solved.duals = tuple(duals) if solved.duals else ()
    if not solved.optimal:
        # What is not proven is at least no slower than any heuristic's plan.
        solved.groups = _better(space, solved.groups, known)
        if solved.groups == known and solved.note.startswith(_LATE):
            solved.note += f": {name}'s plan stands there"
        if solved.bound_ps == space.total(solved.groups).time_ps:
            # However it was found, nothing is faster.
            solved.optimal, solved.note, solved.columns, solved.duals = True, "", {}, ()
    return solved


def _folded(space: Space, groups: list[Mask], small: Space) -> list[Mask] | None:
    """``groups`` as groups of ``small``, unless they cut what is one position there."""
    if small is space:
        return groups
    folded = [small.mask(space.nodes(mask)) for mask in groups]
    return folded if sum(mask.bit_count() for mask in folded) == small.n else None


def _solve_space(
    space: Space, known: list[Mask] | None, budget: Budget, expires_at: float, watch: Stopwatch
) -> Solved:
    singles = [1 << i for i in range(space.n)]
    if space.n == 1:
        return Solved(singles, space.total(singles).time_ps, True)
    floor_ps = space.floor(space.everything)
    best = _better(space, singles, known or with_offers(space, best_first.merge(space)))
    watch.lap("heuristics")
    offers = [mask for mask in space.offers if isinstance(space.price(mask), Price)]
    columns, complete, note = _candidates(space, best + singles + offers, budget, expires_at)
    watch.lap("enumerate")
    try:
        result = _search(space, columns, best, expires_at)
    except _FAILURES as error:
        result = Solved(best, floor_ps, False, note=_failure(error))
    watch.lap("solve")
    if not complete:
        result.optimal = False
        result.bound_ps = floor_ps
        result.note = result.note if result.note.startswith(_UNUSABLE) else note
    result.bound_ps = max(result.bound_ps, floor_ps)
    if result.bound_ps == space.total(result.groups).time_ps:
        result.optimal, result.note = True, ""
        if not complete:  # not what a joint search may rely on
            result.columns, result.duals = {}, ()
    return result


def _better(space: Space, one: list[Mask], other: list[Mask]) -> list[Mask]:
    return other if space.total(other) < space.total(one) else one


def _deadline_note(space: Space) -> str:
    return f"{_LATE} {space.n} operations from {_where(space)} on were proven"


def _where(space: Space) -> str:
    node = space.book.graph.nodes[space.component.nodes[0]]
    return f"{node.op} (n{node.id})"


def _candidates(
    space: Space, known: Sequence[Mask], budget: Budget, expires_at: float
) -> tuple[tuple[Mask, ...], bool, str]:
    """The legal groups; if they are too many, those of the contracted component; whether
    they are all; and what to tell the user if not."""
    all_of_them = enumerate_groups(space, budget.max_groups, expires_at, time.monotonic)
    if all_of_them.complete:
        return tuple(dict.fromkeys([*known, *all_of_them.groups])), True, ""
    if time.monotonic() >= expires_at:
        return tuple(dict.fromkeys(known)), False, _deadline_note(space)
    smaller = contract(space)
    some = enumerate_groups(smaller, budget.max_groups, expires_at, time.monotonic)
    groups = [space.mask(smaller.nodes(mask)) for mask in some.groups]
    too_many = (
        f"{space.n} operations from {_where(space)} on have more than {budget.max_groups:,} legal groups"
    )
    searched = (
        "only those that keep single-use producers with their consumer were searched"
        if some.complete
        else "only some were searched"
    )
    return tuple(dict.fromkeys([*known, *groups])), False, f"{too_many}: {searched}"


def _search(space: Space, columns: Sequence[Mask], best: list[Mask], expires_at: float) -> Solved:
    """The cheapest partition of ``space`` into ``columns``, no worse than ``best``."""
    cost: dict[Mask, int] = {}
    unpriced: set[Mask] = set()
    for mask in columns:
        if time.monotonic() >= expires_at:
            return Solved(best, 0, False, note=_deadline_note(space))
        known = space.known_price(mask)
        floor_ps = space.floor(mask) if known is None else 0
        if floor_ps:
            cost[mask] = floor_ps
            unpriced.add(mask)
        else:
            _price(space, mask, cost, unpriced)
    masks = list(cost)
    items = {mask: tuple(bits(mask)) for mask in masks}
    relaxation = Relaxation([items[m] for m in masks], [cost[m] for m in masks], space.n)
    alive = np.ones(len(masks), dtype=bool)
    is_open = np.array([m in unpriced for m in masks], dtype=bool)
    batch = _FEW
    while True:
        relaxation.solve(expires_at)
        used = [masks[k] for k in relaxation.support]
        if not unpriced.intersection(used) and _is_plan(space, used):
            best = min(best, used, key=lambda groups: space.total(groups).objectives)
        gap = space.total(best).time_ps - relaxation.bound
        extra = relaxation.reduced_costs()
        # A group whose reduced cost exceeds the gap is in no plan as fast as the best known.
        for k in np.flatnonzero(alive & (extra > gap)).tolist():
            relaxation.drop(k)
            alive[k] = False
        open_ = np.flatnonzero(alive & is_open)
        if not len(open_):
            break
        if time.monotonic() >= expires_at:
            return Solved(best, relaxation.bound, False, cost, relaxation.duals, _deadline_note(space))
        # Next to those that the relaxation uses, the most promising; a quarter more each time,
        # so that floors which are no good cost a few relaxations, not thousands.
        promising = open_[np.argsort(extra[open_], kind="stable")][:batch].tolist()
        wanted = [k for k in relaxation.support if is_open[k]]
        for k in dict.fromkeys([*wanted, *promising]):
            if time.monotonic() >= expires_at:
                break
            _price(space, masks[k], cost, unpriced)
            is_open[k] = False
            if masks[k] in cost:
                relaxation.set_cost(k, cost[masks[k]])
            else:
                relaxation.drop(k)
                alive[k] = False

    left = [masks[k] for k in np.flatnonzero(alive).tolist()]
    return _prove(space, left, items, cost, relaxation.duals, relaxation.bound, best, expires_at)


def _is_plan(space: Space, groups: Sequence[Mask]) -> bool:
    """Whether the groups are a partition that can run."""
    covered = 0
    for mask in groups:
        if covered & mask:
            return False
        covered |= mask
    return covered == space.everything and not cyclic_sets(space.successors(groups))


def _price(space: Space, mask: Mask, cost: dict[Mask, int], unpriced: set[Mask]) -> None:
    price = space.price(mask)
    unpriced.discard(mask)
    if isinstance(price, Price):
        cost[mask] = price.time_ps
    else:
        cost.pop(mask, None)


def _prove(
    space: Space,
    alive: list[Mask],
    items: dict[Mask, tuple[int, ...]],
    cost: dict[Mask, int],
    duals: tuple[int, ...],
    bound: int,
    best: list[Mask],
    expires_at: float,
) -> Solved:
    """Search the groups that are left, cutting off cycles until there is none."""
    alive = list(dict.fromkeys([*alive, *best]))
    index = {mask: k for k, mask in enumerate(alive)}
    objectives = tuple(space.total([mask]).objectives for mask in alive)
    forbidden: list[tuple[int, ...]] = []
    for _ in range(_MAX_ROUNDS):
        instance = Instance(
            tuple(items[m] for m in alive),
            objectives,
            space.n,
            tuple(sorted(index[m] for m in best)),
            max(expires_at - time.monotonic(), 0),
            tuple(forbidden),
        )
        try:
            selection = exact_cover(instance)
            if not selection.chosen:  # there is one: that of the heuristic
                raise RuntimeError(f"{selection.engine} finds no cover: {selection.status}")
        except _FAILURES as error:
            return Solved(best, bound, False, cost, duals, _failure(error))
        bound = max(bound, selection.bound)
        chosen = sorted((alive[k] for k in selection.chosen), key=lambda mask: mask & -mask)
        after = space.successors(chosen)
        cycles = cyclic_sets(after)
        if not cycles:
            optimal = selection.status == "OPTIMAL"
            return Solved(chosen, bound, optimal, cost, duals, "" if optimal else _deadline_note(space))
        for cycle in cycles:
            forbidden.append(tuple(sorted(index[chosen[g]] for g in shortest_cycle(after, cycle))))
    note = f"{space.n} operations from {_where(space)} on kept waiting for each other: heuristic groups"
    return Solved(best, bound, False, cost, duals, note)


def _join(
    graph: Graph,
    book: PriceBook,
    parts: Parts,
    starts: Sequence[Start],
    solved: dict[int, Solved],
    expires_at: float,
) -> tuple[list[Nodes], int, bool, str]:
    """Groups in execution order, the bound, whether it is proven, and a note if not."""
    chosen = [place(solved[kind].groups, nodes) for kind, nodes in parts.instances]
    bounds = [solved[kind].bound_ps for kind, _ in parts.instances]
    optimal = all(s.optimal for s in solved.values())
    involved: set[int] = set()
    cuts: list[tuple[Nodes, ...]] = []
    joint_bound = 0
    failed = ""
    for _ in range(_MAX_ROUNDS):
        ranked, after = order_groups(graph, (g for groups in chosen for g in groups))
        cycles = cyclic_sets(after)
        outside = sum(b for i, b in enumerate(bounds) if i not in involved)
        if not cycles:
            return [ranked[g] for g in execution_order(after)], outside + joint_bound, optimal, ""
        if time.monotonic() >= expires_at or not optimal:
            break
        instance_of = {n: i for i, (_, nodes) in enumerate(parts.instances) for n in nodes}
        for cycle in cycles:
            circle = tuple(ranked[g] for g in shortest_cycle(after, cycle))
            cuts.append(circle)
            involved.update(instance_of[group[0]] for group in circle)
        # Taking groups apart gives a plan that runs, and so an upper bound on the joint cost.
        hint: dict[int, list[Nodes]] = {i: [] for i in involved}
        fallback, _ = break_cycles(graph, book, ranked)
        for group in fallback:
            if instance_of[group[0]] in involved:
                hint[instance_of[group[0]]].append(group)
        try:
            joint = _solve_jointly(book, parts, solved, hint, cuts, expires_at)
        except _FAILURES as error:
            joint, failed = None, _failure(error)
        if joint is None:
            break
        groups, joint_bound = joint
        for i in involved:
            chosen[i] = [g for g in groups if instance_of[g[0]] == i]
    fallback, broken = break_cycles(graph, book, (g for groups in chosen for g in groups))
    for h in range(len(HEURISTICS)):
        # A heuristic's own groups may have fewer circles, and lose less.
        others = [
            place(starts[kind][min(h, len(starts[kind]) - 1)], nodes) for kind, nodes in parts.instances
        ]
        apart, count = break_cycles(graph, book, (g for groups in others for g in groups))
        if sum_prices(book, apart) < sum_prices(book, fallback):
            fallback, broken = apart, count
    note = failed or f"{broken} groups that would wait for each other were taken apart"
    return fallback, max(sum(bounds), outside + joint_bound), False, note


def _solve_jointly(
    book: PriceBook,
    parts: Parts,
    solved: dict[int, Solved],
    hint: dict[int, list[Nodes]],
    cuts: Sequence[tuple[Nodes, ...]],
    expires_at: float,
) -> tuple[list[Nodes], int] | None:
    """The cheapest groups of several components together that avoid all ``cuts``, and a
    bound; None if that could not be proven in time."""
    known = [g for groups in hint.values() for g in groups]
    gap = sum_prices(book, known).time_ps
    for i in hint:
        kind = parts.instances[i][0]
        gap -= sum(solved[kind].duals) if solved[kind].duals else solved[kind].bound_ps
    columns: dict[Nodes, tuple[int, int, int]] = {}
    for i in sorted(hint):
        kind, nodes = parts.instances[i]
        result = solved[kind]
        if not result.columns:
            found = _all_columns(parts.kinds[kind], expires_at)
            if found is None:
                return None
            result.columns = found
            result.duals = (0,) * parts.kinds[kind].n
            gap += result.bound_ps
        for mask, time_ps in result.columns.items():
            if time.monotonic() >= expires_at:
                return None
            if time_ps - sum(result.duals[k] for k in bits(mask)) <= gap:
                price = parts.kinds[kind].price(mask)
                if isinstance(price, Price):
                    columns[place([mask], nodes)[0]] = price.objectives
    for group in known:
        columns.setdefault(group, sum_prices(book, [group]).objectives)
    item = {n: k for k, n in enumerate(sorted(n for i in hint for n in parts.instances[i][1]))}
    index = {group: k for k, group in enumerate(columns)}
    selection = exact_cover(
        Instance(
            tuple(tuple(item[n] for n in group) for group in columns),
            tuple(columns.values()),
            len(item),
            tuple(sorted(index[g] for g in known)),
            max(expires_at - time.monotonic(), 0),
            tuple(tuple(sorted(index[g] for g in cut)) for cut in cuts if all(g in index for g in cut)),
        )
    )
    if selection.status != "OPTIMAL":
        return None
    groups = list(columns)
    return [groups[k] for k in selection.chosen], selection.bound


def _all_columns(space: Space, expires_at: float) -> dict[Mask, int] | None:
    """Columns of a component whose plan was certified without enumerating them; None if the
    deadline comes first."""
    found = enumerate_groups(space, 10**9, expires_at, time.monotonic)
    return {mask: space.floor(mask) for mask in found.groups} if found.complete else None
