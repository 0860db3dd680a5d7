"""Walks: which axis of a group may be streamed in passes, or written to on the way.

It is the only axis that the group reduces: with another resident beside it, few rows would be
left to walk side by side. (A core of a TPU walks its grid by itself: there another may be
resident beside one that is walked once.) On a GPU it lies along the rows of arrays: tiles of
columns have to be long to be loaded well, so that there are too few of them to occupy all cores.
Both are asked of the whole graph, but for its contractions, which no such group has. So what
forbids it to a group forbids it to every larger one.
"""

from __future__ import annotations

from costmodel.backends import backend_of
from costmodel.device import DeviceSpec
from costmodel.graph import DimRole, Graph, OpKind
from fuseplan.schedule.axis_classes import Classes, axis_classes


def walks_in_passes(backend: str) -> bool:
    """Whether kernels of ``backend`` may walk a stream more than once, or hold several contractions. Of
    Mosaic GPU a kernel is one loop, if any, and its only contraction reads what lies in memory."""
    return backend_of(backend).walks_in_passes


class Walks:
    """The axes of a graph that kernels of a device may walk in passes."""

    def __init__(self, graph: Graph, device: DeviceSpec, classes: Classes | None = None) -> None:
        """``classes``: ``axis_classes`` of all of the graph, if known."""
        self.graph = graph
        others = [n for n in graph.nodes if n.kind != OpKind.OUT_ELEMENTWISE_FUSABLE]
        known = classes if len(others) == len(graph.nodes) else None
        self._classes: Classes = known or axis_classes(graph, others)
        self._rows = None if device.sequential_grid else _rows(graph, self._classes)
        if not walks_in_passes(device.backend):
            self._rows = frozenset()
        self._held = [self._held_by(n) for n in range(len(graph.nodes))]

    def held(self, n: int) -> frozenset[int]:
        """The axes that node ``n`` reduces; -1 where it needs one whole, or is a contraction."""
        return self._held[n]

    def _held_by(self, n: int) -> frozenset[int]:
        node = self.graph.nodes[n]
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE or DimRole.WHOLE in node.roles:
            return frozenset((-1,))
        own = zip(self._classes[n], node.roles, strict=True)
        return frozenset(c for c, role in own if role == DimRole.REDUCED)

    def allowed(self, nodes: tuple[int, ...]) -> bool:
        """Whether the axis that ``nodes`` reduce may be walked in passes, as far as can be told
        of every larger group."""
        held: frozenset[int] = frozenset().union(*[self._held[n] for n in nodes])
        return len(held) == 1 and all(map(self.is_allowed, held))

    def is_allowed(self, axis: int) -> bool:
        """Whether the axis may be walked in passes where it is all that is ``held``."""
        return axis >= 0 and (self._rows is None or axis in self._rows)


def _rows(graph: Graph, classes: Classes) -> frozenset[int]:
    """The axes along which some array lies that has others, and those of vectors alone."""
    rows: set[int] = set()
    others: set[int] = set()
    every: set[int] = set()
    for node in graph.nodes:
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            continue
        for dim_map in (*node.input_maps, *node.output_maps):
            dims = [classes[node.id][d] for dims in dim_map for d in dims]
            every.update(dims)
            if len(dims) > 1:
                others.update(dims[:-1])
                rows.add(dims[-1])
    return frozenset(rows | (every - others))
