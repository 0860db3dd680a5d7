"""TVM's ``FuseOps``: fuse each operation with its post-dominator if the kinds of operations allow it.

After "Operator Fusion" of TVM's documentation and its ``graph_partitioner``. Operations have kinds from
elementwise to opaque (``OpKind``), and a path has the kind of its most complex operation. Whether an
operation, its post-dominator and all operations between them become one group depends on three kinds: that of
the operation, of the paths, and of the post-dominator. The first of three phases fuses elementwise operations
into contractions, the second fuses data movement. Reductions end a group. The third phase is about tuples,
which a graph here has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from costmodel.graph import Graph, Node, OpKind
from fuseplan.schedule.pricing import Pricing
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping
from fuseplan.support.digraph import reachable

MAX_FUSED_OPS = 256
"""Operations of a group (``kMaxFusedOps``). Only OpenCL and Metal targets limit arguments
(``max_function_args``)."""


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Plan with the groups of ``FuseOps``. ``budget`` is unused: each phase visits each operation once."""
    return plan_decided(graph, pricing, lambda book: fuse_ops(book.graph))


def fuse_ops(graph: Graph) -> Iterator[tuple[int, ...]]:
    """The groups, by node ids.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> x = jax.ShapeDtypeStruct((1, 10, 20), "float32")
        >>> graph = lower(trace(lambda x: jnp.exp(x + 1).squeeze(0), x)).graph
        >>> [[graph.nodes[n].op for n in group] for group in fuse_ops(graph)]
        [['add', 'exp', 'squeeze']]
    """
    yield from _Partitioner(graph).run()


@dataclass(slots=True)
class _Dominator:
    """A node of the post-dominator tree."""

    parent: int
    """The post-dominator; -1 if the paths meet only at the end of the function."""
    depth: int
    kind: OpKind
    """Kind of the paths to the parent."""


def post_dominators(graph: Graph) -> list[_Dominator]:
    """The post-dominator tree: the parent of a node is the least common ancestor of its readers."""
    tree: list[_Dominator] = [_Dominator(-1, 1, OpKind.OPAQUE)] * len(graph.nodes)
    for node in reversed(graph.nodes):
        if not graph.results.isdisjoint(node.outputs):
            continue  # A result has readers outside the graph.
        readers = sorted({n for v in node.outputs for n in graph.consumers[v]})
        if not readers:
            continue
        parent, kind = readers[0], _edge(graph, node, graph.nodes[readers[0]])
        for reader in readers[1:]:
            kind = max(kind, _edge(graph, node, graph.nodes[reader]))
            parent, kind = _common(tree, parent, reader, kind)
        depth = tree[parent].depth + 1 if parent >= 0 else 1
        tree[node.id] = _Dominator(parent, depth, kind)
    return tree


def _edge(graph: Graph, node: Node, reader: Node) -> OpKind:
    """The kind of one edge: a broadcast between arrays of one shape is elementwise."""
    if reader.effects:
        return OpKind.OPAQUE  # It may have no output, as ``jax.debug.print``.
    alike = graph.values[node.outputs[0]].shape == graph.values[reader.outputs[0]].shape
    return OpKind.ELEMENTWISE if reader.kind == OpKind.BROADCAST and alike else reader.kind


def _common(tree: Sequence[_Dominator], a: int, b: int, kind: OpKind) -> tuple[int, OpKind]:
    """The least common ancestor of two nodes, -1 if there is none, and the kind of the paths to it."""
    while a != b:
        if a < 0 or b < 0:
            return -1, kind
        deeper = max(tree[a].depth, tree[b].depth)
        if tree[b].depth == deeper:
            kind, next_b = max(kind, tree[b].kind), tree[b].parent
        else:
            next_b = b
        if tree[a].depth == deeper:
            kind, a = max(kind, tree[a].kind), tree[a].parent
        b = next_b
    return a, kind


@dataclass(slots=True)
class _Group:
    """The nodes of one group; ``nodes`` grows as groups are merged into it."""

    nodes: set[int]
    kind: OpKind


class _Partitioner:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        kinds = [OpKind.OPAQUE if node.effects else node.kind for node in graph.nodes]
        self.groups = [_Group({n}, kind) for n, kind in enumerate(kinds)]
        """The group of each node."""

    def run(self) -> Iterator[tuple[int, ...]]:
        tree = post_dominators(self.graph)
        for phase in (0, 1):
            for n, dominator in enumerate(tree):
                if dominator.parent >= 0:
                    self._visit(n, dominator, phase)
        for n, group in enumerate(self.groups):
            if len(group.nodes) > 1 and n == min(group.nodes):
                yield tuple(sorted(group.nodes))

    def _visit(self, n: int, dominator: _Dominator, phase: int) -> None:
        """Fuse a node with its post-dominator if this phase fuses its kind."""
        kind, sink = self.groups[n].kind, dominator.parent
        if self.groups[n] is self.groups[sink]:
            return
        if kind <= OpKind.BROADCAST:
            if dominator.kind <= OpKind.REDUCTION:
                self._try(n, sink, lambda k, last: k < OpKind.TUPLE if last else k <= OpKind.INJECTIVE)
        elif kind == OpKind.INJECTIVE:
            if phase == 1:
                self._try(n, sink, lambda k, last: k <= OpKind.INJECTIVE)
        elif kind == OpKind.OUT_ELEMENTWISE_FUSABLE and phase == 0 and dominator.kind == OpKind.ELEMENTWISE:
            self._try(n, sink, lambda k, last: k <= OpKind.BROADCAST)

    def _try(self, n: int, sink: int, allowed: Callable[[OpKind, bool], bool]) -> None:
        """Merge a node and the nodes up to ``sink`` if ``allowed(kind, is sink)`` holds for each
        (``CheckPath``, ``CommitFuse``)."""
        nodes, consumers = self.graph.nodes, self.graph.consumers

        def readers(m: int) -> set[int]:
            return set() if m == sink else {r for v in nodes[m].outputs for r in consumers[v]}

        path = {sink} | reachable([n], readers)
        if not all(allowed(self.groups[m].kind, m == sink) for m in path):
            return
        members = set().union(*(self.groups[m].nodes for m in (n, *path)))
        if len(members) > MAX_FUSED_OPS:
            return
        target = self.groups[sink]
        for m in (n, *path):
            child = self.groups[m]
            if child is target:
                continue
            target.nodes |= child.nodes
            if child.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:  # The anchor's kind is the group's.
                target.kind = max(target.kind, child.kind)
            for fused in child.nodes:
                self.groups[fused] = target
