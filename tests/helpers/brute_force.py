"""Random small graphs, and the best plan of each by trying every plan, with and without copies of operations.

``python -m experiments.brute_force`` compares the solver with it. Nothing here is the search's: a plan is a
sequence of kernels each of which finds what it reads, and a kernel with copies costs what the plain scheduler
says of the graph in which they are one (``copies_by_hand``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from costmodel.devices import TEST_DEVICE, get_device
from costmodel.graph import Graph
from fuseplan import Kernel
from fuseplan.extend import lower, trace
from fuseplan.planners import Budget, get_planner
from fuseplan.schedule.pricing import Pricing
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.cache import using_cache
from fuseplan.search.grouping import Grouping
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import SplitGraph, roots_of, split
from fuseplan.support.errors import Verdict
from tests.helpers.copies_by_hand import ByHand, ties
from tests.helpers.graphs import GraphBuilder
from tests.helpers.random_programs import M, N, Pick, random_program
from tests.helpers.small_graphs import Bytes, edges_after, graph, siblings_of

MOST_NODES = 9
MOST_COPIES = 12
"""Operations of a graph with copies, each copy counted, that brute force takes at most."""

DEVICES = {
    "h200": get_device("h200"),
    "tpu_v5e": get_device("tpu_v5e"),
    "test": TEST_DEVICE,
    "quick": replace(TEST_DEVICE, launch_ps=TEST_DEVICE.launch_ps // 1000),
}
"""With ``quick``, whose launches are short, small arrays are worth computing again."""

Objectives = tuple[int, int, int]
"""Time in picoseconds, HBM bytes, kernels."""
PriceOf = Callable[[tuple[int, ...]], Objectives | None]


def small_program(pick: Pick, most: int) -> Graph:
    """A graph of up to ``most`` operations on matrices and their rows and columns."""
    b = GraphBuilder()
    shape = pick([(64, 256), (2048, 4096)])
    matrices = [b.input(shape)]
    vectors: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(pick(range(1, most + 1))):
        what = pick(["unary", "binary", "reduce", "reduce", "broadcast", "matmul"])
        x = pick(matrices)
        axis = pick([0, 1])
        if what == "reduce":
            vectors[axis].append(b.reduce(x, (axis,)))
        elif what == "broadcast" and vectors[axis]:
            matrices.append(b.broadcast(pick(vectors[axis]), shape, (1 - axis,)))
        elif what == "matmul" and pick([False, True]):
            matrices.append(b.matmul(b.input((shape[0], shape[0])), x))
        elif what == "matmul":
            matrices.append(b.matmul(x, b.input((shape[1], shape[1]))))
        elif what == "binary":
            matrices.append(b.elementwise(x, pick(matrices), op="mul"))
        else:
            matrices.append(b.elementwise(x, op="exp"))
    used = {v for node in b.nodes for v in node.inputs}
    return b.build(*(v for node in b.nodes for v in node.outputs if v not in used))


def lettered_graph(pick: Pick, most: int) -> Graph:
    """A graph of ``small_graphs.graph``: opaque operations and side effects, so that kernels may wait for
    each other."""
    letters = "".join(pick("eeeercaof") for _ in range(pick(range(1, most + 1))))
    preds = [
        sorted({pick(range(i)) for _ in range(pick(range(4)))}) if i else [] for i in range(len(letters))
    ]
    outputs = [pick(range(len(letters))) for _ in range(pick(range(3)))]
    return graph(letters, preds, outputs)


def lowered_program(pick: Pick, most: int) -> Graph:
    """The graph of a program of ``random_programs``, of up to ``most`` operations."""
    sizes = [(M, 1), (1, N), (M, N)]
    while True:
        f, _ = random_program(pick, pick(range(1, 6)))
        found = lower(trace(f, *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes])).graph
        if 0 < len(found.nodes) <= most:
            return found


@dataclass(frozen=True, slots=True)
class Case:
    """One random graph, and what it is priced for."""

    seed: int
    kind: str
    graph: Graph
    device: str
    """``bytes``: ``small_graphs.Bytes`` by the four settings."""
    settings: tuple[int, int, bool, bool] = (99, 99, True, False)


def random_case(seed: int, most: int = MOST_NODES) -> Case:
    """The graph of a seed: most are of arrays, every fourth is lettered, every fifth is a program's."""
    rng = random.Random(seed)
    if seed % 4 == 0:
        found = lettered_graph(rng.choice, most)
        settings = (rng.choice([99, 3, 2]), rng.choice([99, 2]), rng.random() < 0.5, rng.random() < 0.5)
        return Case(seed, "letters", found, "bytes", settings)
    device = rng.choice([*DEVICES])
    if seed % 5 == 0:
        return Case(seed, "program", lowered_program(rng.choice, most), device)
    return Case(seed, "arrays", small_program(rng.choice, most), device)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came out of one case."""

    wrong: tuple[str, ...] = ()
    """Each disagreement about the least time or its proof, in words."""
    ties: tuple[str, ...] = ()
    """Plans of the least time, of which others move fewer bytes or have fewer kernels: optimal by definition,
    which is about time alone."""
    copies: str = "none"
    """``compared``: plans with copies of operations were, too; ``too many``: there are more of them than
    brute force takes; ``none``."""
    gains: bool = False
    """Whether the best plan has copies."""
    is_slower: bool = False
    """Whether loop nests that break the rules and are not offered make a faster plan, which is not in the
    search space."""


def compare(case: Case) -> Comparison:
    """Compare the solver's plans with the best of all, without copies and with them."""
    if case.device == "bytes":
        pricing: Pricing = Bytes(case.graph, *case.settings)
        return _sorted(_faults(case.graph, pricing, best(case.graph, pricing)))
    device = DEVICES[case.device]
    scheduler = Scheduler(case.graph, device)
    least = best(case.graph, scheduler)
    is_slower = best(case.graph, scheduler, all_nests=True)[0] < least[0]
    faults = [*_faults(case.graph, scheduler, least)]
    copies = split(case.graph, roots_of(case.graph, device))
    if copies is None or len(copies.graph.nodes) > MOST_COPIES:
        there = "none" if copies is None else "too many"
        return replace(_sorted(faults), copies=there, is_slower=is_slower)
    pricing = DuplicatePricing(copies, scheduler)
    again = best_with_copies(copies, scheduler, pricing.offers)
    faults += _faults(copies.graph, pricing, again)
    if again[0] > least[0]:
        faults.append((False, f"the best plan with copies takes {again[0]} ps, without {least[0]}"))
    return replace(_sorted(faults), copies="compared", gains=again[0] < least[0], is_slower=is_slower)


def _sorted(faults: Iterable[tuple[bool, str]]) -> Comparison:
    known = list(faults)
    wrong, ties = (tuple(text for is_tie, text in known if is_tie == tied) for tied in (False, True))
    return Comparison(wrong, ties)


def _faults(g: Graph, pricing: Pricing, least: Objectives) -> Iterator[tuple[bool, str]]:
    """Each difference from the best plan, and whether it is a tie."""
    with using_cache(None):
        plan = get_planner("solver")(g, pricing, Budget())
    found = objectives(plan)
    if found != least:
        yield found[0] == least[0], f"the solver's plan costs {found}, the best {least}: {plan.groups}"
    if plan.status != "OPTIMAL":
        yield False, f"the plan is {plan.status}: {[str(note) for note in plan.notes]}"
    if plan.bound_ps != least[0]:
        yield False, f"the bound is {plan.bound_ps}, the best plan takes {least[0]}"


def objectives(grouping: Grouping) -> Objectives:
    """The cost of a plan."""
    costs = [k.cost for k in grouping.kernels]
    return (sum(c.time_ps for c in costs), sum(c.hbm_bytes for c in costs), len(costs))


def best(g: Graph, pricing: Pricing, all_nests: bool = False) -> Objectives:
    """The least objectives of all plans that compute each operation once; ``all_nests``: also by groups that
    break the rules and are not offered, but have a price."""
    offers = frozenset(pricing.offers)

    def price(nodes: tuple[int, ...]) -> Objectives | None:
        if not all_nests and len(nodes) > 1 and nodes not in offers and pricing.compatible(nodes):
            return None
        return _figures(pricing.price(nodes))

    return best_sequence(g, price, siblings_of(g, pricing), offers)


def best_with_copies(
    copies: SplitGraph, scheduler: Scheduler, offers: Sequence[tuple[int, ...]]
) -> Objectives:
    """The least objectives of all plans of a graph with copies: which kernels compute what. ``scheduler`` is
    of the whole graph: the groups that it offers, with all of their copies, are kernels here, too."""
    g = copies.graph
    by_hand = ByHand(g, scheduler.device, offers)
    pairs = {*siblings_of(g, DuplicatePricing(copies, scheduler)), *ties(g)}
    offered = dict(zip(copies.lifted(scheduler.offers), scheduler.offers, strict=True))

    def price(nodes: tuple[int, ...]) -> Objectives | None:
        if nodes in offered:
            return _figures(scheduler.price(offered[nodes]))
        return _figures(by_hand.price(nodes))

    return best_sequence(g, price, tuple(pairs), frozenset(offered))


def _figures(kernel: Kernel | Verdict) -> Objectives | None:
    return (kernel.cost.time_ps, kernel.cost.hbm_bytes, 1) if isinstance(kernel, Kernel) else None


def best_sequence(
    g: Graph,
    price: PriceOf,
    pairs: Sequence[tuple[int, int]],
    offers: Collection[tuple[int, ...]] = (),
) -> Objectives:
    """The least objectives of all sequences of kernels that compute each node once, each after what it waits
    for. A kernel is a set of nodes that has a price, and that is one of ``offers`` or that edges and
    ``pairs`` connect."""
    n = len(g.nodes)
    before, near = [0] * n, [0] * n
    for i, later in enumerate(edges_after(g)):
        for k in later:
            before[k] |= 1 << i
    for node in g.nodes:
        for v in node.outputs:
            for reader in g.consumers[v]:
                near[node.id] |= 1 << reader
                near[reader] |= 1 << node.id
    for a, b in pairs:
        near[a] |= 1 << b
        near[b] |= 1 << a
    # Every set of nodes that may have run, from the empty one on: it only grows.
    ready = {0}
    for done in range(1 << n):
        if done in ready:
            ready.update(done | 1 << i for i in range(n) if not done >> i & 1 and not before[i] & ~done)
    kernels: dict[int, Objectives | None] = {}
    least: dict[int, Objectives] = {0: (0, 0, 0)}
    for done in sorted(ready):
        if done not in least:
            continue
        time_ps, nbytes, count = least[done]
        for later in ready:
            group = later & ~done
            if done & ~later or not group:
                continue
            if group not in kernels:
                nodes = tuple(i for i in range(n) if group >> i & 1)
                is_one = nodes in offers or _is_connected(group, near)
                kernels[group] = price(nodes) if is_one else None
            cost = kernels[group]
            if cost is not None:
                total = (time_ps + cost[0], nbytes + cost[1], count + cost[2])
                least[later] = min(least.get(later, total), total)
    return least[(1 << n) - 1]


def _is_connected(group: int, near: Sequence[int]) -> bool:
    reached = group & -group
    while True:
        more = reached
        for i, neighbours in enumerate(near):
            if reached >> i & 1:
                more |= neighbours & group
        if more == reached:
            return reached == group
        reached = more
