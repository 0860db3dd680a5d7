"""TorchInductor's scheduler: rounds of pairwise fusion, pairs that share the most bytes first.

After ``torch._inductor.scheduler`` (PyTorch 2: Ansel et al., ASPLOS 2024). An elementwise operation with one
reader is inlined in it, as Inductor's lowering does. The remaining operations are loops over a number of
elements, or over rows of a number of elements. Each of ten rounds scores all pairs that touch a common buffer
by whether both reduce, the bytes that they share, and their distance in the program. In that order, pairs are
fused if their loops agree and the result has no cycle. Contractions are library calls.

Not modelled: inlining an elementwise value in each of several readers, which recomputes it; templates with
epilogues (``max_autotune``) and loop reordering after fusion, both off by default; limits of peak memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import rustworkx as rx

from costmodel.graph import Graph, Node, OpKind, boundary
from fuseplan.schedule.pricing import Nodes, Pricing
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping

ROUNDS = 10
"""Rounds of fusion (``Scheduler.fuse_nodes``)."""

MAX_FUSION_SIZE = 64
"""Loops in one kernel (``config.max_fusion_size``)."""

PAIRWISE_ATTEMPTS = 64
"""Loops that each loop is paired with among those that touch one buffer
(``config.max_fusion_buffer_group_pairwise_attempts``)."""

MIN_SHARED_BYTES = 10
"""Bytes that two loops must share (``config.score_fusion_memory_threshold``)."""


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Plan with the groups of TorchInductor. ``budget`` is unused: there are at most ten rounds."""
    return plan_decided(graph, pricing, lambda book: fuse_pairwise(book.graph))


def fuse_pairwise(graph: Graph) -> Iterator[Nodes]:
    """The groups, by node ids.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> graph = lower(trace(lambda x: jnp.exp(x) / jnp.exp(x).sum(1)[:, None], x)).graph
        >>> [[graph.nodes[n].op for n in group] for group in fuse_pairwise(graph)]
        [['exp', 'reduce_sum', 'broadcast_in_dim', 'div']]
    """
    for loop in _Scheduler(graph).run():
        if len(loop.nodes) > 1:
            yield tuple(sorted(loop.nodes))


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop nest over ``rows`` elements, or over rows of ``reduced`` elements each."""

    nodes: frozenset[int]
    rows: int
    reduced: int
    count: int = 1
    """Number of loops fused into it."""
    is_extern: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return min(self.nodes), max(self.nodes)


class _Scheduler:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._dag: rx.PyDiGraph = rx.PyDiGraph(multigraph=False)
        loops = [_loop_of(graph, node) for node in graph.nodes]
        self._index = list(self._dag.add_nodes_from(loops))
        """For each operation, its loop's index in the DAG."""
        self._dag.add_edges_from_no_data([*data_edges(graph), *effect_edges(graph)])

    def run(self) -> list[_Loop]:
        self._inline()
        for _ in range(ROUNDS):
            before = self._dag.num_nodes()
            self._fuse_once()
            if self._dag.num_nodes() == before:
                break
        return sorted(self._dag.nodes(), key=lambda loop: loop.place)

    def _inline(self) -> None:
        """Merge each elementwise or data-movement operation that has a single reader into the reader's
        loop."""
        graph = self.graph
        for node in reversed(graph.nodes):
            readers = {n for v in node.outputs for n in graph.consumers[v]}
            wanted = not graph.results.isdisjoint(node.outputs)
            if node.kind > OpKind.INJECTIVE or node.effects or wanted or len(readers) != 1:
                continue
            (reader,) = readers
            loop: _Loop = self._dag[self._index[reader]]
            if not loop.is_extern:
                self._contract(self._index[node.id], self._index[reader], loop.rows, loop.reduced, 1)

    def _fuse_once(self) -> None:
        """Fuse the pairs that may be fused, best first (``fuse_nodes_once``)."""
        pairs = sorted(self._pairs(), key=lambda pair: self._score(*pair), reverse=True)
        for m, n in pairs:
            a, b = self._index[m], self._index[n]
            if a != b and self._may_fuse(self._dag[a], self._dag[b]):
                first, second = self._dag[a], self._dag[b]
                most = max((first, second), key=lambda loop: loop.reduced)
                self._contract(a, b, most.rows, most.reduced, first.count + second.count)

    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of loops that touch a common buffer, each loop given by its first operation."""
        loops = sorted(self._dag.nodes(), key=lambda loop: loop.place)
        touching: defaultdict[int, list[_Loop]] = defaultdict(list)
        for loop in loops:
            for v in self._touched(loop):
                touching[v].append(loop)
        found: dict[tuple[int, int], None] = {}
        for several in touching.values():
            for i, first in enumerate(several):
                for second in several[i + 1 : i + 1 + PAIRWISE_ATTEMPTS]:
                    if self._may_fuse(first, second):
                        found[first.place[0], second.place[0]] = None
        return list(found)

    def _score(self, m: int, n: int) -> tuple[bool, int, int]:
        first, second = self._dag[self._index[m]], self._dag[self._index[n]]
        shared = self._shared_bytes(first, second)
        (first_low, first_high), (second_low, second_high) = first.place, second.place
        near = -max(abs(first_low - second_high), abs(second_low - first_high))
        return (first.reduced > 1) == (second.reduced > 1) and shared > 0, shared, near

    def _may_fuse(self, first: _Loop, second: _Loop) -> bool:
        """Whether the loops agree, share enough bytes and keep to the limits (``can_fuse``)."""
        if first.is_extern or second.is_extern or first.count + second.count > MAX_FUSION_SIZE:
            return False
        if not _agree(first, second) or self._is_permuted(first, second):
            return False
        return self._shared_bytes(first, second) >= MIN_SHARED_BYTES

    def _is_permuted(self, first: _Loop, second: _Loop) -> bool:
        """Whether one loop transposes a result of the other."""
        graph = self.graph
        for maker, reader in ((first, second), (second, first)):
            made = {v for n in maker.nodes for v in graph.nodes[n].outputs}
            nodes = (graph.nodes[n] for n in reader.nodes)
            if any(node.op == "transpose" and not made.isdisjoint(node.inputs) for node in nodes):
                return True
        return False

    def _shared_bytes(self, first: _Loop, second: _Loop) -> int:
        return sum(self.graph.values[v].nbytes for v in self._touched(first) & self._touched(second))

    def _touched(self, loop: _Loop) -> set[int]:
        """The buffers that a loop reads or writes."""
        edge = boundary(self.graph, tuple(sorted(loop.nodes)))
        return {*edge.reads, *edge.writes}

    def _contract(self, a: int, b: int, rows: int, reduced: int, count: int) -> None:
        both = _Loop(self._dag[a].nodes | self._dag[b].nodes, rows, reduced, count)
        try:
            at = self._dag.contract_nodes([a, b], both, check_cycle=True)
        except rx.DAGWouldCycle:
            return
        for n in both.nodes:
            self._index[n] = at


def _loop_of(graph: Graph, node: Node) -> _Loop:
    """The loop of one operation: over its result, or for a reduction over its operand."""
    rows = graph.values[node.outputs[0]].size if node.outputs else 0
    if node.kind == OpKind.REDUCTION:
        whole = max((graph.values[v].size for v in node.inputs), default=rows)
        return _Loop(frozenset({node.id}), rows, max(whole // max(rows, 1), 1))
    is_extern = node.kind > OpKind.REDUCTION or node.effects
    return _Loop(frozenset({node.id}), rows, 1, is_extern=is_extern)


def _agree(first: _Loop, second: _Loop) -> bool:
    """Whether two loops have the same extents, or one is elementwise over the other's elements or rows
    (``SIMDScheduling.can_fuse``)."""
    if first.reduced > 1 and second.reduced > 1:
        return (first.rows, first.reduced) == (second.rows, second.reduced)
    if first.reduced == second.reduced:
        return first.rows == second.rows
    flat, rows = sorted((first, second), key=lambda loop: loop.reduced)
    return flat.rows in (rows.rows * rows.reduced, rows.rows)
