"""The cheapest legal partition, with a proof.

Each distinct component is an exact cover problem: its legal groups are the sets, its
nodes the items. Most groups are never scheduled: a group enters with a *floor* under its
cost, and the dual prices of the linear relaxation tell which groups could be part of a
plan no slower than the best known. Only those are priced, the relaxation is solved again,
and in the end the few that remain are searched exhaustively.

What couples components is the order of execution. Groups that would wait for each other
in a circle are forbidden together, and the components involved are solved again, jointly.
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
from fuseplan.twins import runs_of_twins

_FEW = 8
"""Groups that are priced at least before the relaxation is solved again: scheduling a
group and solving a small relaxation each take about a millisecond."""

_SMALL = 128
"""Positions of a component whose heuristic plan is made only where the relaxation does not lead
to a plan: for more it can take longer than a deadline may be overrun."""

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
    by_runs: bool = False
    """Whether groups that only swap twins (``fuseplan.twins``) are left out of ``columns``."""


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """The cheapest plan by time, then HBM bytes, then number of kernels.

    ``status`` is OPTIMAL if that is proven; else FEASIBLE, ``bound_ps`` says how much
    better a plan could be at most, and ``notes`` say which limit was hit.
    """
    budget = budget or Budget()
    watch = Stopwatch()
    expires_at = watch.started + budget.deadline_s
    book = PriceBook(graph, pricing)
    parts = take_apart(graph, book)
    watch.lap("partition")
    solved: dict[int, Solved] = {}
    # Small ones first, so that one that hits the deadline costs no other its proof.
    for kind in sorted(range(len(parts.kinds)), key=lambda k: parts.kinds[k].n):
        solved[kind] = _solve_component(parts.kinds[kind], budget, expires_at, watch)
    ordered, bound_ps, optimal, joint_note = _join(graph, book, parts, solved, expires_at)
    kernels = tuple(book.kernel(group) for group in ordered)
    watch.lap("join")
    notes = [s.note for s in solved.values() if s.note]
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


def _solve_component(space: Space, budget: Budget, expires_at: float, watch: Stopwatch) -> Solved:
    """Solve a component without what belongs to its readers anyway, and put that back."""
    small = (absorb_moves if space.book.absorbs_moves else absorb_renames)(space)
    solved = _solve_space(small, budget, expires_at, watch)
    if small is space:
        return solved
    duals = [0] * space.n
    for k, dual in enumerate(solved.duals):
        duals[space.position[small.members[k][0]]] = dual
    solved.groups = [space.mask(small.nodes(mask)) for mask in solved.groups]
    solved.columns = {space.mask(small.nodes(mask)): cost for mask, cost in solved.columns.items()}
    solved.duals = tuple(duals) if solved.duals else ()
    return solved


def _solve_space(space: Space, budget: Budget, expires_at: float, watch: Stopwatch) -> Solved:
    singles = [1 << i for i in range(space.n)]
    if space.n == 1:
        return Solved(singles, space.total(singles).time_ps, True)
    floor_ps = space.floor(space.everything)
    whole = ideal(space)
    if whole is not None:
        return Solved(whole, floor_ps, True)
    # A small component is rarely in need of a heuristic plan: the relaxation finds the best.
    best = singles
    if space.n > _SMALL or time.monotonic() >= expires_at:
        best = _heuristic(space)
    watch.lap("heuristics")
    if time.monotonic() >= expires_at:
        note = _deadline_note(space) if budget.deadline_s > 0 else ""
        return Solved(_better(space, best, greedy.merge(space)), floor_ps, False, note=note)
    offers = [mask for mask in space.offers if isinstance(space.price(mask), Price)]
    columns, complete, note = _candidates(space, best + singles + offers, budget, expires_at)
    watch.lap("enumerate")
    if not complete:
        best = _better(space, best, _heuristic(space))
        columns = tuple(dict.fromkeys([*best, *columns]))
    try:
        result = _search(space, columns, best, expires_at)
    except (ImportError, OverflowError, RuntimeError) as error:
        warnings.warn(
            f"the solver could not be used ({error}); the plan is the better of the heuristic ones. "
            "Install ortools>=9.15, or choose planner='best_first'",
            FuseplanWarning,
            stacklevel=3,
        )
        result = Solved(best, floor_ps, False, note=f"the solver could not be used: {error}")
    watch.lap("solve")
    result.by_runs = bool(runs_of_twins(space))
    if not complete:
        result.optimal = False
        result.bound_ps = floor_ps
        result.note = note
    result.bound_ps = max(result.bound_ps, floor_ps)
    if not result.optimal:
        # What is not proven is at least no slower than any heuristic's plan.
        result.groups = _better(space, result.groups, greedy.merge(space))
    if result.bound_ps == space.total(result.groups).time_ps:
        # However it was found, nothing is faster.
        result.optimal, result.note = True, ""
    return result


def _heuristic(space: Space) -> list[Mask]:
    """A good plan, found without enumerating groups."""
    singles = [1 << i for i in range(space.n)]
    return with_offers(space, _better(space, singles, best_first.merge(space)))


def _better(space: Space, one: list[Mask], other: list[Mask]) -> list[Mask]:
    return other if space.total(other) < space.total(one) else one


def _deadline_note(space: Space) -> str:
    return f"the deadline came before {space.n} operations from {_where(space)} on were proven"


def _where(space: Space) -> str:
    node = space.book.graph.nodes[space.component.nodes[0]]
    return f"{node.op} (n{node.id})"


def _candidates(
    space: Space, known: Sequence[Mask], budget: Budget, expires_at: float
) -> tuple[tuple[Mask, ...], bool, str]:
    """The legal groups; if they are too many, those of the contracted component; whether
    they are all; and what to tell the user if not."""
    runs = runs_of_twins(space)
    all_of_them = enumerate_groups(space, budget.max_groups, expires_at, runs=runs)
    if all_of_them.complete:
        return tuple(dict.fromkeys([*known, *all_of_them.groups])), True, ""
    smaller = contract(space)
    some = enumerate_groups(smaller, budget.max_groups, expires_at)
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
    """The cheapest partition of ``space`` into ``columns``, no worse than ``best``.

    Groups that the relaxation uses are priced until it uses none by its floor: dearer others
    change nothing about it, so that it is then what all prices would make it. Most groups cost
    their floor, and more are as good as others than are ever used: they are not asked for.
    """
    cost: dict[Mask, int] = {}
    unpriced: set[Mask] = set()
    for mask in columns:
        known = space.known_price(mask)
        floor_ps = space.floor(mask) if known is None else 0
        if floor_ps:
            cost[mask] = floor_ps
            unpriced.add(mask)
        else:
            _price(space, mask, cost, unpriced)
    masks = list(cost)
    relaxation = Relaxation([bits(m) for m in masks], [cost[m] for m in masks], space.n)
    is_open = np.array([m in unpriced for m in masks], dtype=bool)
    while True:
        relaxation.solve()
        extra = relaxation.reduced_costs()
        wanted = [k for k in relaxation.support if is_open[k]]
        if not wanted:
            break
        if time.monotonic() > expires_at:
            best = _better(space, best, _heuristic(space))
            return Solved(best, relaxation.bound, False, cost, relaxation.duals, _deadline_note(space))
        # With those that the relaxation uses, the most promising: a few at a time cost less than
        # the relaxations that ask for them one by one.
        open_ = np.flatnonzero(is_open)
        promising = open_[np.argsort(extra[open_], kind="stable")][:_FEW].tolist()
        for k in dict.fromkeys([*wanted, *promising]):
            _price(space, masks[k], cost, unpriced)
            is_open[k] = False
            if masks[k] in cost:
                relaxation.set_cost(k, cost[masks[k]])
            else:
                relaxation.drop(k)
    used = [masks[k] for k in relaxation.support]
    best = _better(space, best, used if _is_plan(space, used) else _heuristic(space))
    # A group whose reduced cost exceeds the gap is in no plan as fast as the best known.
    gap = space.total(best).time_ps - relaxation.bound
    left = [m for m, more in zip(masks, extra.tolist(), strict=True) if more <= gap and m in cost]
    return _prove(space, left, cost, unpriced, relaxation.duals, relaxation.bound, best, expires_at)


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
    cost: dict[Mask, int],
    unpriced: set[Mask],
    duals: tuple[int, ...],
    bound: int,
    best: list[Mask],
    expires_at: float,
) -> Solved:
    """Search the groups that are left, pricing those that are chosen by their floor and cutting
    off cycles until there is neither."""
    alive = list(dict.fromkeys([*alive, *best]))
    forbidden: list[tuple[Mask, ...]] = []
    rounds = 0
    while len(forbidden) <= _MAX_ROUNDS:
        index = {mask: k for k, mask in enumerate(alive)}
        selection = exact_cover(
            Instance(
                tuple(tuple(bits(m)) for m in alive),
                tuple(
                    (cost[m], space.floor_bytes(m), 1) if m in unpriced else space.total([m]).objectives
                    for m in alive
                ),
                space.n,
                tuple(sorted(index[m] for m in best)),
                max(expires_at - time.monotonic(), 0),
                tuple(tuple(sorted(index[m] for m in cut)) for cut in forbidden if index.keys() >= set(cut)),
            )
        )
        bound = max(bound, selection.bound)
        chosen = sorted((alive[k] for k in selection.chosen), key=lambda mask: mask & -mask)
        asked = [mask for mask in chosen if mask in unpriced]
        if asked:
            rounds += 1
            # Floors that are no good are not asked for one plan at a time.
            for mask in asked if rounds < _FEW else unpriced.intersection(alive):
                _price(space, mask, cost, unpriced)
            alive = [mask for mask in alive if mask in cost]
            if selection.status == "OPTIMAL":
                continue
            chosen = best
        after = space.successors(chosen)
        cycles = cyclic_sets(after)
        if not cycles:
            optimal = selection.status == "OPTIMAL"
            return Solved(chosen, bound, optimal, cost, duals, "" if optimal else _deadline_note(space))
        for cycle in cycles:
            forbidden.append(tuple(chosen[g] for g in shortest_cycle(after, cycle)))
    note = f"{space.n} operations from {_where(space)} on kept waiting for each other: heuristic groups"
    return Solved(best, bound, False, cost, duals, note)


def _join(
    graph: Graph, book: PriceBook, parts: Parts, solved: dict[int, Solved], expires_at: float
) -> tuple[list[Nodes], int, bool, str]:
    """Groups in execution order, the bound, whether it is proven, and a note if not."""
    chosen = [place(solved[kind].groups, nodes) for kind, nodes in parts.instances]
    bounds = [solved[kind].bound_ps for kind, _ in parts.instances]
    optimal = all(s.optimal for s in solved.values())
    involved: set[int] = set()
    cuts: list[tuple[Nodes, ...]] = []
    joint_bound = 0
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
        joint = _solve_jointly(book, parts, solved, hint, cuts, expires_at)
        if joint is None:
            break
        groups, joint_bound = joint
        for i in involved:
            chosen[i] = [g for g in groups if instance_of[g[0]] == i]
    fallback, broken = break_cycles(graph, book, (g for groups in chosen for g in groups))
    note = f"{broken} groups that would wait for each other were taken apart"
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
    bound; None if that could not be proven."""
    if any(solved[parts.instances[i][0]].by_runs for i in hint):
        return None  # Who waits for twins outside may tell them apart.
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
            result.columns = _all_columns(parts.kinds[kind])
            result.duals = (0,) * parts.kinds[kind].n
            gap += result.bound_ps
        for mask, time_ps in result.columns.items():
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


def _all_columns(space: Space) -> dict[Mask, int]:
    """Columns of a component whose plan was certified without enumerating them."""
    found = enumerate_groups(space, 10**9).groups
    return {mask: space.floor(mask) for mask in found}
