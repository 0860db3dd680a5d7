"""Find operations that are connected through large values, for several definitions of large.

A tiled loop gains where large values pass between operations without going to memory. Which values are large
depends on the program, so that each size that occurs is tried as the limit (a *level*).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import rustworkx as rx

from costmodel.graph import Graph, Node
from fuseplan.schedule.padding import can_regroup, regroups
from fuseplan.schedule.streaming import walks_in_passes

Nodes = tuple[int, ...]

_SMALLER = (1, 4)
"""Values of this part of the largest one's size count as large, too: the summands of a squared
distance are three times the distances (test_regions.py::test_broadcast_differences)."""

LEAST_PART = max(_SMALLER)


def levels(graph: Graph, min_bytes: int) -> Iterator[IsLarge]:
    """Ways to call a value large, from the largest size that an operation makes downwards."""
    for size in reversed(_large_sizes(graph, min_bytes)):
        for part in _SMALLER:
            yield IsLarge(size, part)


@dataclass(frozen=True, slots=True)
class IsLarge:
    """Whether a value of some size is as large as ``most``, or by less than the factor ``part``
    smaller."""

    most: int
    part: int

    def __call__(self, size: int) -> bool:
        return self.most // self.part < size + (self.part == 1) and size <= self.most


def _large_sizes(graph: Graph, min_bytes: int) -> list[int]:
    """The sizes of the large values that operations make, ascending."""
    return sorted({v.size for v in graph.values if v.producer >= 0 and v.nbytes >= min_bytes})


def tied(graph: Graph, is_large: IsLarge, backend: str = "loops") -> Iterator[Nodes]:
    """The operations of ``backend`` that large values tie together, set by set."""
    yield from _together(_ties(graph, is_large, backend))


def tied_at_any_level(graph: Graph, min_bytes: int, backend: str = "loops") -> Iterator[Nodes]:
    """The sets that are ``tied`` at any of the ``levels``, each once, in the order of the levels.

    Most operations are tied to few others, whose sizes few levels tell apart: only these are looked at.
    """
    sizes = _large_sizes(graph, min_bytes)
    if not sizes:
        return
    least, most = sizes[0] // LEAST_PART, sizes[-1]
    ties = _ties(graph, lambda size: least < size <= most, backend)
    part_of = {n: k for k, nodes in enumerate(_together(ties)) for n in nodes}
    parts: dict[int, list[Tie]] = {}
    for tie in ties:
        if len(tie.nodes) > 1:
            parts.setdefault(part_of[tie.nodes[0]], []).append(tie)
    found: dict[Nodes, int] = {}
    for part in parts.values():
        for level, is_large in _told_apart({tie.size for tie in part}, sizes):
            for nodes in _together([tie for tie in part if is_large(tie.size)]):
                found[nodes] = min(level, found.get(nodes, level))
    yield from sorted(found, key=lambda nodes: (found[nodes], nodes))


def _told_apart(own: set[int], sizes: Sequence[int]) -> Iterator[tuple[int, IsLarge]]:
    """Of all levels, those that call different sets of the sizes ``own`` large, each with its position among
    ``levels``."""
    for k, part in enumerate(_SMALLER):
        # A level's set of large sizes changes only where its largest size passes one of these.
        steps = sorted({*own, *(part * (size + (part == 1)) for size in own)})
        for low, high in itertools.pairwise([*steps, sizes[-1] + 1]):
            i = bisect_left(sizes, high) - 1
            if i >= 0 and sizes[i] >= low:
                yield (len(sizes) - 1 - i) * len(_SMALLER) + k, IsLarge(sizes[i], part)


class Tie(NamedTuple):
    """A value's size in elements, and the nodes that it connects: its producer and its consumers."""

    size: int
    nodes: Nodes


def _ties(graph: Graph, is_large: Callable[[int], bool], backend: str) -> list[Tie]:
    holds = [loopable(node, backend) for node in graph.nodes]
    # Readers of a value that is made elsewhere are not tied: nothing passes between them.
    return [
        Tie(size, (value.producer, *(n for n in graph.consumers[value.id] if holds[n])))
        for value in graph.values
        if value.producer >= 0 and holds[value.producer] and is_large(size := value.size)
    ]


def _together(ties: Iterable[Tie]) -> list[Nodes]:
    """The connected components of several nodes, in ascending order."""
    graph = rx.PyGraph(multigraph=False)
    index: dict[int, int] = {}
    for _, nodes in ties:
        for n in nodes:
            if n not in index:
                index[n] = graph.add_node(n)
        graph.add_edges_from_no_data([(index[nodes[0]], index[n]) for n in nodes[1:]])
    groups = (sorted(graph[i] for i in component) for component in rx.connected_components(graph))
    return [tuple(group) for group in sorted(groups) if len(group) > 1]


def loopable(node: Node, backend: str = "loops") -> bool:
    """Whether a tiled loop, or another nest of ``backend``, can hold the node."""
    movable = not regroups(node) or can_regroup(node, backend)
    return backend in node.backends and not node.effects and walks_in_passes(backend) and movable
