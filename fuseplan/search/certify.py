"""From what the solver knows in the end to a proof that can be checked without it."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.graph import Graph
from fuseplan.plan.certificate import Part, Proof
from fuseplan.search.component import HEURISTICS, Starts
from fuseplan.search.grouping import Parts, order_groups, place
from fuseplan.support.digraph import cyclic_sets


def as_fast(
    graph: Graph, parts: Parts, starts: Starts, bounds_ps: Sequence[int], slower: dict[int, set[str]]
) -> str:
    """The simplest heuristic whose plan takes no longer than ``bounds_ps``, one a distinct component;
    empty if none does. It is tried on the largest components first, and given up on the first that
    it loses. ``slower`` has, by component, those that are known to lose it, and is added to."""
    if any(space.book.was_late for space in parts.kinds):
        return ""  # The heuristics' own plans are not known.
    largest_first = sorted(range(len(bounds_ps)), key=lambda kind: -parts.kinds[kind].n)
    for name in reversed(HEURISTICS):
        if any(name in names for names in slower.values()):
            continue
        for k in largest_first:
            if parts.kinds[k].total(starts.plan(k, name)).time_ps > bounds_ps[k]:
                slower.setdefault(k, set()).add(name)
                break
        else:
            placed = [g for kind, nodes in parts.instances for g in place(starts.plan(kind, name), nodes)]
            if not cyclic_sets(order_groups(graph, placed)[1]):
                return name
    return ""


def make_proof(parts: Parts, known: Sequence[tuple[int, tuple[int, ...]]]) -> Proof:
    """The proof of ``known``: the bound on each distinct component, and the prices of its
    positions, empty where there are none.

    Raises:
        AssertionError: it has prices, and not one for each operation of a component.
    """
    for space, (_, prices) in zip(parts.kinds, known, strict=True):
        n_nodes = len(space.component.nodes)
        assert len(prices) in (0, n_nodes), f"{len(prices)} prices for {n_nodes} operations"
    first_nodes: list[list[int]] = [[] for _ in parts.kinds]
    for kind, nodes in parts.instances:
        first_nodes[kind].append(nodes[0])
    return Proof(
        tuple(
            Part(
                bound_ps,
                tuple(first),
                # A floor is simpler to check than prices that do not reach it.
                () if sum(prices) < bound_ps == space.floor_ps else prices,
            )
            for (bound_ps, prices), first, space in zip(known, first_nodes, parts.kinds, strict=True)
        )
    )
