"""Small programs around hubs, at random, and the best plan with packs by trying every one."""

from __future__ import annotations

import itertools
import random
from functools import cache

from costmodel.graph import Graph
from fuseplan import Kernel, Plan
from fuseplan.planners.solver import plan_groups
from fuseplan.schedule.packs import MAX_ARRAYS
from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.components import components, crossable_edges
from fuseplan.search.horizontal import with_packs
from fuseplan.support.work import unlimited
from fuseplan.verify.groups import Groups
from tests.helpers.graphs import GraphBuilder

SHAPES = [(16,), (100,), (768,), (768,), (3072,), (8, 128), (20_000,), (64, 512), (300, 1000)]


def hub_program(seed: int) -> Graph:
    """Arrays whose norm, or a scalar from outside, scales some of them."""
    rng = random.Random(seed)
    b = GraphBuilder()
    kinds = [rng.choice(SHAPES) for _ in range(rng.choice((1, 2, 3)))]
    arrays = [
        b.input(rng.choice(kinds), rng.choice(("float32", "bfloat16"))) for _ in range(rng.randint(4, 6))
    ]
    for i, x in enumerate(arrays):
        if rng.random() < 0.3:  # something before the hub
            arrays[i] = b.elementwise(x, op=rng.choice(("exp", "neg")))
    results = []
    scale = b.input(())
    if rng.random() < 0.7:
        total = None
        for x in arrays:
            norm = b.reduce(b.elementwise(x, op="square"), range(len(b.shape(x))))
            norm = norm if b.values[norm].dtype == "float32" else b.elementwise(norm, dtype="float32")
            total = norm if total is None else b.elementwise(total, norm)
        scale = b.elementwise(total, op="rsqrt")
        results.append(scale)
        arrays = arrays[: rng.choice((0, 1, 3))]
    elif rng.random() < 0.5:
        scale = b.elementwise(scale, op="exp")
    for x in arrays:
        y = b.elementwise(x, b.broadcast(scale, b.shape(x), ()), op="mul")
        results.append(b.elementwise(y, op="tanh") if rng.random() < 0.3 else y)
    return b.build(*results)


def planned(graph: Graph, device) -> Plan:
    """The solver's plan with packs."""
    scheduler = Scheduler(graph, device)
    found = with_packs(graph, scheduler, plan_groups(graph, scheduler), unlimited())
    return Plan(
        graph, device, "solver", found.kernels,
        status=found.status, bound_ps=found.bound_ps, proof=found.proof,
    )  # fmt: skip


def brute_force(plan: Plan) -> int:
    """The picoseconds of the best plan with packs of the pieces in its proof."""
    graph, scheduler = plan.graph, Scheduler(plan.graph, plan.device)
    book = PriceBook(graph, scheduler)
    parts = [
        _partitions(Groups(component, book), book)
        for component in components(graph, crossable_edges(graph, book))
    ]

    @cache
    def rest_ps(k: int, inside: frozenset) -> float:
        """What the best plan of a component takes beside kernels that are inside of packs."""
        costs = [
            sum(cost for group, cost in p.items() if group not in inside)
            for p in parts[k]
            if inside <= p.keys()
        ]
        return min(costs, default=float("inf"))

    best = float("inf")
    for cuts in itertools.product(*[_cuts(line, graph, scheduler) for line in plan.proof.packs]):
        inside = {kernel for _, kernels in cuts for kernel in kernels}
        packs_ps = sum(cost for cost, _ in cuts)
        places = [frozenset(g for g in inside if any(g in p for p in part)) for part in parts]
        assert sum(map(len, places)) == len(inside)
        best = min(best, packs_ps + sum(rest_ps(k, place) for k, place in enumerate(places)))
    return best


def _partitions(groups: Groups, book: PriceBook) -> list[dict]:
    """All partitions of a component: each kernel with what it takes."""
    costs = {mask: book.price(groups.members(mask)) for mask in groups}
    legal = {mask: price.time_ps for mask, price in costs.items() if isinstance(price, Price)}

    def covers(left: int) -> list[list[int]]:
        if not left:
            return [[]]
        lowest = left & -left
        fitting = [mask for mask in legal if mask & lowest and not mask & ~left]
        return [[mask, *more] for mask in fitting for more in covers(left & ~mask)]

    every = (1 << groups.n) - 1
    return [{groups.members(mask): legal[mask] for mask in cover} for cover in covers(every)]


def _cuts(line, graph: Graph, scheduler: Scheduler) -> list[tuple[int, tuple]]:
    """All ways to pack runs of a line: what the packs take, and the kernels in them."""
    n = len(line)
    prices = {}
    for a, b in itertools.combinations(range(n + 1), 2):
        nodes = tuple(sorted(x for piece in line[a:b] for x in piece.nodes))
        kernel = scheduler.in_one_tile(nodes)
        if isinstance(kernel, Kernel):
            arrays = len({x.value for x in kernel.spec.reads}) + len(kernel.spec.writes)
            assert arrays <= MAX_ARRAYS, "the test is too large for the rule not to matter"
            prices[a, b] = kernel.cost.time_ps

    def ways(a: int) -> list[tuple[int, tuple]]:
        if a == n:
            return [(0, ())]
        found = list(ways(a + 1))
        for b in range(a + 1, n + 1):
            if (a, b) in prices:
                kernels = tuple(kernel for piece in line[a:b] for kernel in piece.kernels)
                found += [(prices[a, b] + cost, kernels + more) for cost, more in ways(b)]
        return found

    return ways(0)
