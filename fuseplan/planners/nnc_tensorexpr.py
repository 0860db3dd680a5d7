"""PyTorch's ``FuseTensorExprs``: from the last operation to the first, each group takes in its producers.

After the overview of TorchScript's ``tensorexpr_fuser`` (NNC). Operations are scanned in reverse. A supported
operation becomes a group and takes in its producers, the nearest first, as long as one can be moved next to
it. Then adjacent groups that do not depend on each other are merged, and groups of fewer than
``min_group_size`` operations are dissolved. Supported are arithmetic, broadcasts and data movement, and
reductions if enabled (``setTexprReductionsEnabled``), but no contractions. Prices are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import rustworkx as rx

from costmodel.graph import Graph, Node, OpKind, boundary
from fuseplan.planners.dynamic_shapes import DynamicShapes
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping, PlanGroups
from fuseplan.support.errors import InvalidArgumentError

MIN_GROUP_SIZE = 2
MAX_ARGUMENTS = 128
"""Arrays that a group may read and write (``subgraphArgLimit``): the space for a CUDA kernel's arguments."""

_STARTS_NONE = frozenset({"slice", "dynamic_slice", "expand_dims", "split", "broadcast_in_dim", "iota"})
"""Supported, but not the first operation of a group: ``aten::slice``, ``unsqueeze``, ``ConstantChunk``,
constants."""

_VIEWS = frozenset({"reshape", "squeeze"})
"""Aliases such as ``aten::view``, which are not fused."""


def make_planner(
    *, min_group_size: int = MIN_GROUP_SIZE, reductions: bool = False, fuse_to_dynamic_shapes: bool = False
) -> PlanGroups:
    """A ``FuseTensorExprs`` planner with these settings, for ``fuseplan.register_planner``.

    Args:
        min_group_size: groups of fewer operations are dissolved.
        reductions: whether groups may hold reductions (``setTexprReductionsEnabled``).
        fuse_to_dynamic_shapes: decide once for symbolic sizes (``dynamic_shapes.DynamicShapes``).

    Raises:
        InvalidArgumentError: ``min_group_size`` is not a positive integer.
    """
    if isinstance(min_group_size, bool) or not isinstance(min_group_size, int) or min_group_size < 1:
        raise InvalidArgumentError(f"min_group_size expects a positive integer, got {min_group_size!r}")

    def decide(book: PriceBook) -> Iterator[Nodes]:
        return fuse_tensor_exprs(book.graph, min_group_size=min_group_size, reductions=reductions)

    if fuse_to_dynamic_shapes:
        return DynamicShapes(decide)

    def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
        return plan_decided(graph, pricing, decide)

    return plan_groups


def fuse_tensor_exprs(
    graph: Graph, *, min_group_size: int = MIN_GROUP_SIZE, reductions: bool = False
) -> Iterator[Nodes]:
    """The groups, by node ids, of a graph without dead code.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> graph = lower(trace(lambda x, w: jnp.tanh(x @ w) * jnp.exp(x), x, x)).graph
        >>> [[graph.nodes[n].op for n in group] for group in fuse_tensor_exprs(graph)]
        [['tanh', 'exp', 'mul']]
    """
    fuser = _Fuser(graph, functools.partial(can_handle, reductions=reductions))
    fuser.create_groups()
    fuser.merge_adjacent()
    for unit in fuser.units:
        if len(unit.nodes) >= max(min_group_size, 2):
            yield tuple(sorted(unit.nodes))


def can_handle(node: Node, reductions: bool = False) -> bool:
    """Whether a group may hold the node (``canHandle``)."""
    if node.effects or node.op in _VIEWS:
        return False
    return node.kind <= OpKind.INJECTIVE or (reductions and node.kind == OpKind.REDUCTION)


@dataclass(slots=True)
class _Unit:
    """An operation or a group, at the position of its last operation."""

    nodes: set[int]

    @property
    def place(self) -> int:
        return max(self.nodes)


class _Fuser:
    """The graph during fusion."""

    def __init__(self, graph: Graph, can_handle: Callable[[Node], bool]) -> None:
        self.graph, self._can_handle = graph, can_handle
        self._dag: rx.PyDiGraph = rx.PyDiGraph(multigraph=False)
        self._index = list(self._dag.add_nodes_from([_Unit({node.id}) for node in graph.nodes]))
        """For each operation, its unit's index in the DAG."""
        self._dag.add_edges_from_no_data([*data_edges(graph), *effect_edges(graph)])

    @property
    def units(self) -> list[_Unit]:
        return sorted(self._dag.nodes(), key=lambda unit: unit.place)

    def create_groups(self) -> None:
        """Scan from the last operation to the first until nothing changes (``createFusionGroups``)."""
        changed = True
        while changed:
            changed = False
            for n in reversed(range(len(self.graph.nodes))):
                while self._starts(n) and self._pull(self._index[n]):
                    changed = True

    def _starts(self, n: int) -> bool:
        """Whether a group may begin with the unit at the position of node ``n`` (``scanNode``)."""
        unit: _Unit = self._dag[self._index[n]]
        node = self.graph.nodes[n]
        return unit.place == n and (len(unit.nodes) > 1 or self._begins(node))

    def _begins(self, node: Node) -> bool:
        return self._can_handle(node) and node.op not in _STARTS_NONE

    def _pull(self, at: int) -> bool:
        """Take in one more producer, the nearest that can be (``createFusionGroup``)."""
        read = {
            self.graph.values[v].producer for n in self._dag[at].nodes for v in self.graph.nodes[n].inputs
        }
        makers = {self._index[m] for m in read if m >= 0} - {at}
        nearest = sorted(makers, key=lambda i: -self._dag[i].place)
        return any(self._try_merge(at, maker) for maker in nearest)

    def merge_adjacent(self) -> None:
        """Merge each group with the one before it, unless it depends on it."""
        groups = [unit for unit in self.units if len(unit.nodes) > 1]
        if not groups:
            return
        before = self._index[groups[0].place]
        for unit in groups[1:]:
            at = self._index[unit.place]
            if rx.has_path(self._dag, before, at) or not self._try_merge(before, at):
                before = at
            else:
                before = self._index[unit.place]

    def _try_merge(self, group: int, other: int) -> bool:
        """Merge two units if the second is supported and can be moved next to the first (``tryMerge``)."""
        a, b = self._dag[group], self._dag[other]
        is_supported = len(b.nodes) > 1 or self._can_handle(self.graph.nodes[b.place])
        if not is_supported or self._arguments(a.nodes) + self._arguments(b.nodes) > MAX_ARGUMENTS:
            return False
        both = _Unit(a.nodes | b.nodes)
        try:
            at = self._dag.contract_nodes([group, other], both, check_cycle=True)
        except rx.DAGWouldCycle:
            return False
        for n in both.nodes:
            self._index[n] = at
        return True

    def _arguments(self, nodes: set[int]) -> int:
        """Number of arrays that a unit reads and writes."""
        edge = boundary(self.graph, tuple(sorted(nodes)))
        return len(edge.reads) + len(edge.writes)
