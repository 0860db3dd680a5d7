"""Hubs: scalars that tie many operations on arrays together.

One-element values that scalar arithmetic connects are one hub; its *ports* are the operations on
arrays that make or read one of them. A norm of all gradients is a hub, and so is Adam's bias
correction: each ties a whole optimizer step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rustworkx as rx

from costmodel.graph import Graph

MAX_PORTS = 4
"""A scalar may tie so many operations on arrays together in the groups that are searched. Normalising
a single row needs 3 (its mean is made once and read twice). Groups that meet only in a scalar of more
would be horizontal fusion, and their number is exponential in the number of parameters: of those, only
packs are searched (``fuseplan.search.horizontal.rules``)."""

NOT_SEARCHED = "plans that fuse across it were not searched, and"
ONLY_PACKS = "of plans that fuse across it only packs were searched; others"
"""What a note says of the rest."""


@dataclass(frozen=True, slots=True)
class Hubs:
    """The hubs of a graph that have more than ``MAX_PORTS`` ports."""

    ports: dict[int, int]
    """For each value of one, how many ports the hub has."""
    arithmetic: frozenset[int]
    """The operations that touch scalars alone."""
    at: tuple[tuple[int, ...], ...]
    """For each operation, the hubs that it is a port of, by their lowest value."""


def wide_hubs(graph: Graph) -> Hubs:
    """The hubs of ``graph`` that tie too much together to be searched."""
    values = graph.values
    scalars = [value.id for value in values if value.shape.count(1) == len(value.shape)]
    is_scalar, number = set(scalars), {v: i for i, v in enumerate(scalars)}
    arithmetic: set[int] = set()
    links: list[tuple[int, int]] = []
    mixed: list[tuple[int, set[int]]] = []
    for node in graph.nodes:
        touched = node.inputs + node.outputs
        if is_scalar.issuperset(touched):
            arithmetic.add(node.id)
            links += [(number[touched[0]], number[v]) for v in touched[1:]]
        elif not is_scalar.isdisjoint(touched):
            mixed.append((node.id, is_scalar.intersection(touched)))
    hub_of = _connected(scalars, links)
    ports: dict[int, set[int]] = {}
    for n, touched_scalars in mixed:
        # Copies of an operation are one port: what may share a kernel without them may do so with them.
        port = graph.origins[n] if graph.origins else n
        for v in touched_scalars:
            ports.setdefault(hub_of[v], set()).add(port)
    wide = {hub: len(nodes) for hub, nodes in ports.items() if len(nodes) > MAX_PORTS}
    at: list[tuple[int, ...]] = [()] * len(graph.nodes)
    for n, touched_scalars in mixed if wide else ():
        at[n] = tuple(sorted({hub_of[v] for v in touched_scalars} & wide.keys()))
    return Hubs({v: wide[hub] for v, hub in hub_of.items() if hub in wide}, frozenset(arithmetic), tuple(at))


def _connected(scalars: Sequence[int], links: Sequence[tuple[int, int]]) -> dict[int, int]:
    """For each scalar, the lowest that it is connected with; links are by position."""
    undirected: rx.PyGraph = rx.PyGraph(multigraph=False)
    undirected.add_nodes_from(range(len(scalars)))
    undirected.add_edges_from_no_data(links)
    hub_of: dict[int, int] = {}
    for members in rx.connected_components(undirected):
        lowest = scalars[min(members)]
        hub_of.update((scalars[i], lowest) for i in members)
    return hub_of
