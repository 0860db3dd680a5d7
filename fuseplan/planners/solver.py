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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.graph import Graph
from fuseplan.absorb import absorb_moves, absorb_renames, contract
from fuseplan.candidates import enumerate_groups
from fuseplan.errors import FuseplanWarning
from fuseplan.join import cyclic_sets, execution_order, shortest_cycle
from fuseplan.partition import MAX_PORTS
from fuseplan.plan import PlanStats, already_optimal
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
from fuseplan.planners.certify import as_fast, make_proof
from fuseplan.planners.remembered import Remembered
from fuseplan.pricing import Nodes, Price, PriceBook, Pricing
from fuseplan.proof import Joint
from fuseplan.solver import Instance, Relaxation, exact_cover
from fuseplan.space import Mask, Space, bits
from fuseplan.twins import runs_of_twins

_FEW = 8
"""Groups that are priced at least before the relaxation is solved again: scheduling a
group and solving a small relaxation each take about a millisecond."""

_SMALL = 128
"""Positions of a component whose heuristic plans are made only where the relaxation does not lead
to a plan: for more they can take longer than a deadline may be overrun."""

_SHORT_S = 2.0
"""Under a deadline shorter than this the heuristics come first: to make their plans when it is
over takes up to 0.3 s for a training step of 24 layers."""

_TAIL_S = 2e-5
"""Seconds a node to set aside for joining, ordering and checking kernels, which come after the
search: twice what a training step of GPT-2 takes; less where taking the graph apart was faster."""

_MANY_GROUPS = 4_000
"""Groups of a component after which interchangeable operations are told apart no more: a training
step's largest has half as many. What is proven so cannot be verified without the solver."""

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
    steady: bool = True
    """Solving it once more gives the same, as far as this file knows: no solver was missing."""
    by_runs: bool = False
    """Whether groups that only swap twins (``fuseplan.twins``) are left out of ``columns``."""


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
    starts = Starts(parts.kinds)
    memo = Remembered(parts, "solver", budget, expires_at)
    recalled = {kind: memo.recall(kind) for kind in range(len(parts.kinds))}
    watch.lap("memo")
    if budget.deadline_s < _SHORT_S:
        for kind, known in recalled.items():
            if known is None:
                starts.make(kind)
        watch.lap("heuristics")
    solved: dict[int, Solved] = {}

    def solve(kind: int) -> None:
        solved[kind] = _solve_component(kind, starts, budget, expires_at, watch)
        memo.keep(kind, solved[kind])

    # Small ones first, so that one that hits the deadline costs no other its proof.
    for kind in sorted(recalled, key=lambda k: parts.kinds[k].n):
        known = recalled[kind]
        if known is None:
            solve(kind)
        else:
            groups, duals = list(known.groups), known.duals
            solved[kind] = Solved(groups, known.bound_ps, known.optimal, duals=duals, note=known.note)
    memo.close()
    refusals = memo.refusals()  # before others ask for groups that the search did not
    watch.lap("memo")

    def complete(kind: int) -> bool:
        """Find all columns of a kind, and tell whether they are."""
        if memo.recalled.pop(kind, None) is not None:
            solve(kind)
        return solved[kind].optimal

    certificate = make_proof(parts, [(s.bound_ps, s.duals) for _, s in sorted(solved.items())])
    ordered, bound_ps, optimal, joint_note, joint = _join(
        graph, book, parts, starts, solved, expires_at, complete
    )
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
    certified = ""
    if optimal and joint is None and time.monotonic() < expires_at:
        certified = as_fast(graph, parts, [s.bound_ps for _, s in sorted(solved.items())])
        notes += [already_optimal(certified)] if certified else []
    stats = PlanStats(
        len(graph.nodes),
        len(parts.instances),
        len(parts.kinds),
        sum(
            memo.recalled[kind].candidates if kind in memo.recalled else max(len(s.columns), 1)
            for kind, s in solved.items()
        ),
        tuple(watch.laps.items()),
        certified,
        len(memo.recalled),
    )
    return Grouping(
        kernels,
        "OPTIMAL" if optimal else "FEASIBLE",
        bound_ps,
        parts.crossable.refusals + refusals,
        tuple(dict.fromkeys(notes)),
        stats,
        replace(certificate, joint=joint),
    )


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


class Starts:
    """The plans of the heuristic planners for each distinct component, as they would make them;
    made when they are asked for."""

    def __init__(self, spaces: Sequence[Space]) -> None:
        self.spaces = spaces
        self._made: dict[int, Start] = {}

    def make(self, kind: int) -> Start:
        """All of them for a component."""
        if kind not in self._made:
            space = self.spaces[kind]
            whole = ideal(space)
            plans = (with_offers(space, heuristic.merge(space)) for _, heuristic in HEURISTICS)
            self._made[kind] = (whole,) if whole is not None else tuple(plans)
        return self._made[kind]

    def known(self, kind: int) -> list[Mask] | None:
        """The best of them, if they have been made."""
        return self.best(kind)[0] if kind in self._made else None

    def best(self, kind: int) -> tuple[list[Mask], str]:
        """The best of them, and whose it is."""
        start, space = self.make(kind), self.spaces[kind]
        h = min(range(len(start)), key=lambda h: space.total(start[h]).objectives)
        return start[h], HEURISTICS[h][0]


def _solve_component(
    kind: int, starts: Starts, budget: Budget, expires_at: float, watch: Stopwatch
) -> Solved:
    """Solve a component without what belongs to its readers anyway, and put that back."""
    space = starts.spaces[kind]
    if space.n == 1:
        time_ps = space.total([1]).time_ps
        return Solved([1], time_ps, True, duals=(time_ps,))
    floor_ps = space.floor(space.everything)
    whole = ideal(space)
    if whole is not None:
        return Solved(whole, floor_ps, True)
    if time.monotonic() >= expires_at:
        known, name = starts.best(kind)
        note = f"{_deadline_note(space)}: {name}'s plan stands there" if budget.deadline_s > 0 else ""
        return Solved(known, floor_ps, False, note=note)
    small = (absorb_moves if space.book.absorbs_moves else absorb_renames)(space)
    given = starts.known(kind)
    folded = _folded(space, given, small) if given is not None else None
    solved = _solve_space(small, folded, budget, expires_at, watch)
    if small is not space:
        duals = [0] * space.n
        for k, dual in enumerate(solved.duals):
            duals[space.position[_main(space, small.members[k])]] = dual
        solved.groups = [space.mask(small.nodes(mask)) for mask in solved.groups]
        solved.columns = {space.mask(small.nodes(mask)): cost for mask, cost in solved.columns.items()}
        solved.duals = tuple(duals) if solved.duals else ()
    if not solved.optimal:
        # What is not proven is at least no slower than any heuristic's plan.
        known, name = starts.best(kind)
        solved.groups = _better(space, solved.groups, known)
        if solved.groups == known and solved.note.startswith(_LATE):
            solved.note += f": {name}'s plan stands there"
        if solved.bound_ps == space.total(solved.groups).time_ps:
            # However it was found, nothing is faster.
            solved.optimal, solved.note, solved.columns, solved.duals = True, "", {}, ()
    return solved


def _main(space: Space, members: Nodes) -> int:
    """Of nodes that share a kernel for nothing, the one that the kernel is for: whoever has the
    others only, or it only, then pays no more than their prices (``fuseplan.verify`` asks)."""
    if space.book.absorbs_moves:
        return members[-1]
    return next((n for n in members if not space.book.renames(n)), members[0])


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
        time_ps = space.total(singles).time_ps
        return Solved(singles, time_ps, True, duals=(time_ps,))
    floor_ps = space.floor(space.everything)
    # A small component is rarely in need of a heuristic plan: the relaxation finds the best.
    best = known or (_heuristic(space) if space.n > _SMALL else singles)
    watch.lap("heuristics")
    offers = [mask for mask in space.offers if isinstance(space.price(mask), Price)]
    columns, complete, by_runs, note = _candidates(space, best + singles + offers, budget, expires_at)
    watch.lap("enumerate")
    if not complete:
        best = _better(space, best, _heuristic(space))
        columns = tuple(dict.fromkeys([*best, *columns]))
    try:
        result = _search(space, columns, best, expires_at)
    except _FAILURES as error:
        result = Solved(best, floor_ps, False, note=_failure(error), steady=False)
    watch.lap("solve")
    if by_runs:  # Prices that hold for these groups need not hold for others.
        result.by_runs, result.duals = True, ()
    if not complete:
        result.optimal = False
        result.bound_ps = floor_ps
        result.duals = ()
        result.note = result.note if result.note.startswith(_UNUSABLE) else note
    result.bound_ps = max(result.bound_ps, floor_ps)
    if result.bound_ps == space.total(result.groups).time_ps:
        result.optimal, result.note = True, ""
        if not complete:  # not what a joint search may rely on
            result.columns, result.duals = {}, ()
    return result


def _heuristic(space: Space) -> list[Mask]:
    """A good plan, found without enumerating groups."""
    singles = [1 << i for i in range(space.n)]
    return _better(space, singles, with_offers(space, best_first.merge(space)))


def _better(space: Space, one: list[Mask], other: list[Mask]) -> list[Mask]:
    return other if space.total(other) < space.total(one) else one


def _deadline_note(space: Space) -> str:
    return f"{_LATE} {space.n} operations from {_where(space)} on were proven"


def _where(space: Space) -> str:
    node = space.book.graph.nodes[space.component.nodes[0]]
    return f"{node.op} (n{node.id})"


def _candidates(
    space: Space, known: Sequence[Mask], budget: Budget, expires_at: float
) -> tuple[tuple[Mask, ...], bool, bool, str]:
    """The legal groups; if they are many, intervals of twins only; if still too many, those of the
    contracted component; whether no plan is lost; whether twins are; and what to tell the user."""
    runs: tuple[Mask, ...] = ()
    found = enumerate_groups(space, min(budget.max_groups, _MANY_GROUPS), expires_at, time.monotonic)
    if not found.complete and time.monotonic() < expires_at:
        runs = runs_of_twins(space)
        if runs or budget.max_groups > _MANY_GROUPS:
            found = enumerate_groups(space, budget.max_groups, expires_at, time.monotonic, runs)
    if found.complete:
        return tuple(dict.fromkeys([*known, *found.groups])), True, bool(runs), ""
    if time.monotonic() >= expires_at:
        return tuple(dict.fromkeys(known)), False, False, _deadline_note(space)
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
    return tuple(dict.fromkeys([*known, *groups])), False, False, f"{too_many}: {searched}"


def _search(space: Space, columns: Sequence[Mask], best: list[Mask], expires_at: float) -> Solved:
    """The cheapest partition of ``space`` into ``columns``, no worse than ``best``.

    Groups that the relaxation uses are priced until it uses none by its floor: dearer others
    change nothing about it, so that it is then what all prices would make it. Most groups cost
    their floor, and more are as good as others than are ever used: they are not asked for.
    """
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
    relaxation = Relaxation([bits(m) for m in masks], [cost[m] for m in masks], space.n)
    is_open = np.array([m in unpriced for m in masks], dtype=bool)
    while True:
        relaxation.solve(expires_at)
        extra = relaxation.reduced_costs()
        wanted = [k for k in relaxation.support if is_open[k]]
        if not wanted:
            break
        if time.monotonic() >= expires_at:
            return Solved(best, relaxation.bound, False, cost, relaxation.duals, _deadline_note(space))
        # With those that the relaxation uses, the most promising: a few at a time cost less than
        # the relaxations that ask for them one by one.
        open_ = np.flatnonzero(is_open)
        promising = open_[np.argsort(extra[open_], kind="stable")][:_FEW].tolist()
        for k in dict.fromkeys([*wanted, *promising]):
            if time.monotonic() >= expires_at:
                break
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
    for mask in best:  # a heuristic's group need not be among the columns
        cost.setdefault(mask, space.total([mask]).time_ps)
    forbidden: list[tuple[Mask, ...]] = []
    rounds = 0
    while len(forbidden) <= _MAX_ROUNDS:
        index = {mask: k for k, mask in enumerate(alive)}
        instance = Instance(
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
        try:
            selection = exact_cover(instance)
            if not selection.chosen:  # there is one: that of the heuristic
                raise RuntimeError(f"{selection.engine} finds no cover: {selection.status}")
        except _FAILURES as error:
            return Solved(best, bound, False, cost, duals, _failure(error), steady=False)
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
    graph: Graph,
    book: PriceBook,
    parts: Parts,
    starts: Starts,
    solved: dict[int, Solved],
    expires_at: float,
    complete: Callable[[int], bool],
) -> tuple[list[Nodes], int, bool, str, Joint | None]:
    """Groups in execution order, the bound, whether it is proven, a note if not, and what was
    proven of components that wait for each other. ``complete`` finds the columns of a kind that
    was recalled, which are remembered nowhere."""
    chosen = [place(solved[kind].groups, nodes) for kind, nodes in parts.instances]
    bounds = [solved[kind].bound_ps for kind, _ in parts.instances]
    optimal = all(s.optimal for s in solved.values())
    involved: set[int] = set()
    cuts: list[tuple[Nodes, ...]] = []
    joint_bound = 0
    proven: frozenset[int] = frozenset()
    failed = ""
    for _ in range(_MAX_ROUNDS):
        ranked, after = order_groups(graph, (g for groups in chosen for g in groups))
        cycles = cyclic_sets(after)
        outside = sum(b for i, b in enumerate(bounds) if i not in proven)
        if not cycles:
            ordered = [ranked[g] for g in execution_order(after)]
            return ordered, outside + joint_bound, optimal, "", _joint(parts, proven, joint_bound)
        if time.monotonic() >= expires_at or not optimal:
            break
        instance_of = {n: i for i, (_, nodes) in enumerate(parts.instances) for n in nodes}
        for cycle in cycles:
            circle = tuple(ranked[g] for g in shortest_cycle(after, cycle))
            cuts.append(circle)
            involved.update(instance_of[group[0]] for group in circle)
        if not all(complete(kind) for kind in sorted({parts.instances[i][0] for i in involved})):
            break
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
        proven = frozenset(involved)
        for i in involved:
            chosen[i] = [g for g in groups if instance_of[g[0]] == i]
    fallback, broken = break_cycles(graph, book, (g for groups in chosen for g in groups))
    for h in range(len(HEURISTICS)):
        # A heuristic's own groups may have fewer circles, and lose less.
        of_kind = [start[min(h, len(start) - 1)] for start in map(starts.make, range(len(parts.kinds)))]
        others = [place(of_kind[kind], nodes) for kind, nodes in parts.instances]
        apart, count = break_cycles(graph, book, (g for groups in others for g in groups))
        if sum_prices(book, apart) < sum_prices(book, fallback):
            fallback, broken = apart, count
    note = failed or f"{broken} groups that would wait for each other were taken apart"
    outside = sum(b for i, b in enumerate(bounds) if i not in proven)
    if sum(bounds) >= outside + joint_bound:
        return fallback, sum(bounds), False, note, None
    return fallback, outside + joint_bound, False, note, _joint(parts, proven, joint_bound)


def _joint(parts: Parts, proven: frozenset[int], bound_ps: int) -> Joint | None:
    return Joint(bound_ps, tuple(sorted(parts.instances[i][1][0] for i in proven))) if proven else None


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
    if any(solved[parts.instances[i][0]].by_runs for i in hint):
        return None  # Who waits for twins outside may tell them apart.
    known = [g for groups in hint.values() for g in groups]
    gap = sum_prices(book, known).time_ps
    for i in hint:
        kind = parts.instances[i][0]
        if not solved[kind].columns:
            found = _all_columns(parts.kinds[kind], expires_at)
            if found is None:
                return None
            solved[kind].columns = found
            solved[kind].duals = (0,) * parts.kinds[kind].n
        if not solved[kind].duals:  # only some of its groups are known
            return None
        gap -= sum(solved[kind].duals)
    columns: dict[Nodes, tuple[int, int, int]] = {}
    for i in sorted(hint):
        kind, nodes = parts.instances[i]
        result = solved[kind]
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
