"""Order kernels across components; jointly solve components whose kernels form a cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import Joint
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.component import HEURISTICS, HeuristicPlans
from fuseplan.search.grouping import (
    FAILURES,
    Decomposition,
    Solved,
    break_cycles,
    failure,
    order_groups,
    place,
    sum_prices,
)
from fuseplan.search.limits import LIMITS
from fuseplan.search.set_partitioning import Instance, exact_cover
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import cyclic_sets, execution_order, shortest_cycle


def join(
    graph: Graph,
    book: PriceBook,
    parts: Decomposition,
    starts: HeuristicPlans,
    solved: dict[int, Solved],
    expires_at: float,
    complete: Callable[[int], bool],
) -> tuple[list[Nodes], int, bool, Note | None, Joint | None]:
    """Groups in execution order, the bound, whether the plan is proven optimal, a note if not, and the proof
    about components that were solved together. ``complete`` enumerates the columns of a part whose solution
    came from the cache, which holds no columns."""
    chosen = [place(solved[part].groups, nodes) for part, nodes in parts.instances]
    bounds = [solved[part].bound_ps for part, _ in parts.instances]
    optimal = all(s.optimal for s in solved.values())
    involved: set[int] = set()
    cuts: list[tuple[Nodes, ...]] = []
    joint_bound = 0
    proven: frozenset[int] = frozenset()
    failed: Note | None = None
    for _ in range(LIMITS.max_cuts):
        ranked, after = order_groups(graph, (g for groups in chosen for g in groups))
        cycles = cyclic_sets(after)
        outside = sum(b for i, b in enumerate(bounds) if i not in proven)
        if not cycles:
            ordered = [ranked[g] for g in execution_order(after)]
            return ordered, outside + joint_bound, optimal, None, _joint(parts, proven, joint_bound)
        if book.is_past(expires_at) or not optimal:
            break
        instance_of = {n: i for i, (_, nodes) in enumerate(parts.instances) for n in nodes}
        for cycle in cycles:
            circle = tuple(ranked[g] for g in shortest_cycle(after, cycle))
            cuts.append(circle)
            involved.update(instance_of[group[0]] for group in circle)
        if not all(complete(part) for part in sorted({parts.instances[i][0] for i in involved})):
            break
        # Taking groups apart gives a plan that runs, and so an upper bound on the joint cost.
        hint: dict[int, list[Nodes]] = {i: [] for i in involved}
        fallback, _ = break_cycles(graph, book, ranked)
        for group in fallback:
            if instance_of[group[0]] in involved:
                hint[instance_of[group[0]]].append(group)
        try:
            joint = _solve_jointly(book, parts, solved, hint, cuts, expires_at)
        except FAILURES as error:
            joint, failed = None, failure(error)
        if joint is None:
            break
        groups, joint_bound = joint
        proven = frozenset(involved)
        for i in involved:
            chosen[i] = [g for g in groups if instance_of[g[0]] == i]
    fallback, broken = break_cycles(graph, book, (g for groups in chosen for g in groups))
    for name in HEURISTICS:
        # A heuristic's own groups may have fewer cycles, and lose less.
        others = [place(starts.plan(part, name), nodes) for part, nodes in parts.instances]
        apart, count = break_cycles(graph, book, (g for groups in others for g in groups))
        if sum_prices(book, apart) < sum_prices(book, fallback):
            fallback, broken = apart, count
    told = failed or note(NoteKind.CYCLES_SPLIT, count=broken)
    outside = sum(b for i, b in enumerate(bounds) if i not in proven)
    if sum(bounds) >= outside + joint_bound:
        return fallback, sum(bounds), False, told, None
    return fallback, outside + joint_bound, False, told, _joint(parts, proven, joint_bound)


def _joint(parts: Decomposition, proven: frozenset[int], bound_ps: int) -> Joint | None:
    return Joint(bound_ps, tuple(sorted(parts.instances[i][1][0] for i in proven))) if proven else None


def _solve_jointly(
    book: PriceBook,
    parts: Decomposition,
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
        part = parts.instances[i][0]
        if not solved[part].columns or not solved[part].lists_all:
            # Its plan was proven without enumerating its groups.
            space = parts.spaces[part]
            found = enumerate_groups(space, LIMITS.max_groups, expires_at)
            if not found.complete:
                return None
            solved[part].columns = {mask: space.floor(mask) for mask in found.groups}
            solved[part].duals, solved[part].lists_all = (0,) * space.n, True
        if not solved[part].duals:  # only some of its groups are known
            return None
        gap -= sum(solved[part].duals)
    columns: dict[Nodes, tuple[int, int, int]] = {}
    for i in sorted(hint):
        part, nodes = parts.instances[i]
        result = solved[part]
        for mask, time_ps in result.columns.items():
            if book.is_past(expires_at):
                return None
            if time_ps - sum(result.duals[k] for k in bits(mask)) <= gap:
                price = parts.spaces[part].price(mask)
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
            max(expires_at - book.clock(), 0),
            tuple(tuple(sorted(index[g] for g in cut)) for cut in cuts if all(g in index for g in cut)),
        )
    )
    book.work.spend(selection.counted_us)
    if selection.status != "OPTIMAL":
        return None
    groups = list(columns)
    return [groups[k] for k in selection.chosen], selection.bound
