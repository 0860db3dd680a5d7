"""Order kernels across components; jointly solve components whose kernels form a cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import Joint
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.search.candidates import enumerate_groups
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
from fuseplan.search.heuristic_plans import HEURISTICS, HeuristicPlans
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
    joint_bound, n_moved = 0, 0
    proven: frozenset[int] = frozenset()
    failed: Note | None = None
    apart: list[tuple[list[Nodes], int]] = []
    """Plans that run because groups were taken apart, and how many were."""

    def cost(plan: tuple[list[Nodes], int]) -> Price:
        return sum_prices(book, plan[0])

    for _ in range(LIMITS.max_cuts):
        ranked, after = order_groups(graph, (g for groups in chosen for g in groups))
        cycles = cyclic_sets(after)
        outside = sum(b for i, b in enumerate(bounds) if i not in proven)
        if not cycles:
            ordered = [ranked[g] for g in execution_order(after)]
            told = note(NoteKind.CYCLES_SPLIT, count=n_moved) if n_moved else None
            bound = outside + joint_bound
            # A plan may reach the bound though not all groups are known.
            is_best = optimal or cost((ordered, 0)).time_ps == bound
            return ordered, bound, is_best, told, _joint(parts, proven, joint_bound)
        if book.is_past(expires_at):
            break
        instance_of = {n: i for i, (_, nodes) in enumerate(parts.instances) for n in nodes}
        for cycle in cycles:
            circle = tuple(ranked[g] for g in shortest_cycle(after, cycle))
            cuts.append(circle)
            involved.update(instance_of[group[0]] for group in circle)
        listed = [complete(part) for part in sorted({parts.instances[i][0] for i in involved})]
        # Taking groups apart gives a plan that runs, and so an upper bound on the joint cost.
        hint: dict[int, list[Nodes]] = {i: [] for i in involved}
        apart.append(break_cycles(graph, book, ranked))
        for group in min(apart, key=cost)[0]:
            if instance_of[group[0]] in involved:
                hint[instance_of[group[0]]].append(group)
        try:
            joint = _solve_jointly(book, parts, solved, hint, cuts, expires_at, optimal and all(listed))
        except FAILURES as error:
            joint, failed = None, failure(error)
        if joint is None:
            break
        groups, bound_ps = joint
        if bound_ps is None:
            # Not all groups are known: others might be faster, and wait in no circle.
            if sum_prices(book, groups) >= sum_prices(book, [g for known in hint.values() for g in known]):
                break
            optimal, proven, joint_bound, n_moved = False, frozenset(), 0, len(cuts)
        else:
            proven, joint_bound = frozenset(involved), bound_ps
        for i in involved:
            chosen[i] = [g for g in groups if instance_of[g[0]] == i]
    apart.append(break_cycles(graph, book, (g for groups in chosen for g in groups)))
    for name in HEURISTICS:
        # A heuristic's own groups may have fewer cycles, and lose less.
        others = [place(starts.plan(part, name), nodes) for part, nodes in parts.instances]
        apart.append(break_cycles(graph, book, (g for groups in others for g in groups)))
    fallback, broken = min(apart, key=cost)
    told = failed or note(NoteKind.CYCLES_SPLIT, count=broken)
    alone = sum(bounds)
    together = sum(b for i, b in enumerate(bounds) if i not in proven) + joint_bound
    proof = _joint(parts, proven, joint_bound) if together > alone else None
    bound = max(together, alone)
    # The bounds hold whether or not the kernels wait for each other.
    return fallback, bound, cost((fallback, broken)).time_ps == bound, told, proof


def _joint(parts: Decomposition, proven: frozenset[int], bound_ps: int) -> Joint | None:
    return Joint(bound_ps, tuple(sorted(parts.instances[i][1][0] for i in proven))) if proven else None


def _solve_jointly(
    book: PriceBook,
    parts: Decomposition,
    solved: dict[int, Solved],
    hint: dict[int, list[Nodes]],
    cuts: Sequence[tuple[Nodes, ...]],
    expires_at: float,
    prove: bool,
) -> tuple[list[Nodes], int | None] | None:
    """The cheapest groups of several components together that avoid all ``cuts``, and a bound; None for the
    bound if not all groups are known or ``prove`` is false, None for both if there was no time."""
    known = [g for groups in hint.values() for g in groups]
    gap = sum_prices(book, known).time_ps
    for i in hint:
        part = parts.instances[i][0]
        if not solved[part].columns or not solved[part].lists_all:
            # Its plan was proven without enumerating its groups.
            space = parts.spaces[part]
            found = enumerate_groups(space, LIMITS.max_groups, expires_at)
            if found.complete:
                solved[part].columns = {mask: space.floor(mask) for mask in found.groups}
                solved[part].duals, solved[part].lists_all = (0,) * space.n, True
            else:
                solved[part].columns = {**space.priced_ps, **solved[part].columns}
        prove = prove and solved[part].lists_all and bool(solved[part].duals)
        gap -= sum(solved[part].duals)
    columns: dict[Nodes, tuple[int, int, int]] = {}
    for i in sorted(hint):
        part, nodes = parts.instances[i]
        result = solved[part]
        for mask, time_ps in result.columns.items():
            if book.is_past(expires_at):
                return None
            worth = sum(result.duals[k] for k in bits(mask)) if result.duals else 0
            if time_ps - worth <= gap:
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
    return [groups[k] for k in selection.chosen], selection.bound if prove else None
