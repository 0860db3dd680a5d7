"""Directed graphs of small numbers: reachability, connected sets, topological order and cycles."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import rustworkx as rx


def descendants(after: Sequence[Iterable[int]]) -> list[int]:
    """For each node, itself and all that paths from it lead to, a bit a node. ``after[n]`` are the nodes that
    edges lead to from ``n``, all of them higher."""
    found = [1 << n for n in range(len(after))]
    for n in reversed(range(len(after))):
        for later in after[n]:
            found[n] |= found[later]
    return found


def ancestors(after: Sequence[Iterable[int]]) -> list[int]:
    """For each node, itself and all from which paths lead to it; as ``descendants``."""
    found = [1 << n for n in range(len(after))]
    for n, heads in enumerate(after):
        for later in heads:
            found[later] |= found[n]
    return found


def between(
    nodes: Iterable[int], after: Callable[[int], Iterable[int]], before: Callable[[int], Iterable[int]]
) -> set[int]:
    """``nodes`` and all on paths between two of them: the least convex set that holds them. Edges lead to
    higher numbers."""
    ends = set(nodes)
    low, high = min(ends), max(ends)
    below = reachable(ends, lambda n: (m for m in after(n) if m < high))
    return ends | (below & reachable(ends, lambda n: (m for m in before(n) if m > low)))


def connected_sets(n_nodes: int, edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The sets of nodes that edges connect, whatever their direction, each ascending, by lowest node."""
    undirected: rx.PyGraph = rx.PyGraph(multigraph=False)
    undirected.add_nodes_from(range(n_nodes))
    undirected.add_edges_from_no_data(edges)
    return sorted(sorted(nodes) for nodes in rx.connected_components(undirected))


def reachable(starts: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """The nodes that paths of one or more edges lead to from ``starts``; ``following(n)`` are the heads of
    the edges of ``n``."""
    found: set[int] = set()
    waiting = list(starts)
    while waiting:
        new = set(following(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def group_successors(edges: Iterable[tuple[int, int]], groups: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each group, the groups that read from it, by index."""
    owner = {n: g for g, nodes in enumerate(groups) for n in nodes}
    after: list[set[int]] = [set() for _ in groups]
    for u, v in edges:
        g, s = owner[u], owner[v]
        if g != s:
            after[g].add(s)
    return after


def execution_order(after: Sequence[set[int]]) -> list[int]:
    """A topological order, lowest index first among those that are ready. Groups on or
    behind a cycle are missing from it."""
    waits_for = [0] * len(after)
    for successors in after:
        for g in successors:
            waits_for[g] += 1
    ready = [g for g, n in enumerate(waits_for) if n == 0]
    order: list[int] = []
    while ready:
        g = heapq.heappop(ready)
        order.append(g)
        for s in after[g]:
            waits_for[s] -= 1
            if waits_for[s] == 0:
                heapq.heappush(ready, s)
    return order


def cyclic_sets(after: Sequence[set[int]]) -> list[tuple[int, ...]]:
    """The sets of groups that wait for each other (strongly connected, more than one)."""
    directed: rx.PyDiGraph = rx.PyDiGraph()
    directed.add_nodes_from(range(len(after)))
    directed.add_edges_from_no_data([(g, s) for g, later in enumerate(after) for s in sorted(later)])
    return sorted(tuple(sorted(c)) for c in rx.strongly_connected_components(directed) if len(c) > 1)


def shortest_cycle(after: Sequence[set[int]], among: Iterable[int]) -> tuple[int, ...]:
    """A shortest cycle through the lowest of ``among``, which are strongly connected."""
    allowed = set(among)
    start = min(allowed)
    came_from = {start: start}
    frontier = [start]
    while frontier:
        following: list[int] = []
        for g in frontier:
            for s in sorted(after[g] & allowed):
                if s == start:
                    cycle = [g]
                    while cycle[-1] != start:
                        cycle.append(came_from[cycle[-1]])
                    return tuple(sorted(cycle))
                if s not in came_from:
                    came_from[s] = g
                    following.append(s)
        frontier = following
    raise AssertionError(f"no cycle through {start}: the groups are not strongly connected")
