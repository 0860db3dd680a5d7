"""Estimate the memory that a program of XLA:CPU allocates for its intermediate results.

XLA allocates all of it at once, for each run. Memory of ``LARGE_BYTES`` or more comes as new pages from the
system, and touching them takes several times as long as writing to memory that is there; less is reused from
one run to the next (``are_new_pages``).

The estimate does not depend on the order of operations, nor on copies of them (``Graph.origins``), so that a
search may add copies and prices stay the same. A value lives from the level of its producer to that of its
last reader, where the level of an operation is the length of the longest path to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from costmodel.graph import Graph, Node, OpKind, arrays_of, once
from costmodel.xla_loops import absorbed_nodes, is_scatter, is_written_before, library_rows

LARGE_BYTES = 32 << 20
"""Memory of this size or more is returned to the system when freed (the largest dynamic M_MMAP_THRESHOLD of
glibc, mallopt(3)). Measured: a program with 30 MiB of temporaries touches no new page, one with 32 touches
8,192 of 4 KiB in each run, and takes three times as long."""

_PRODUCT = OpKind.OUT_ELEMENTWISE_FUSABLE


@once
def are_new_pages(graph: Graph) -> bool:
    """Whether the intermediate results of a program are new pages in each run."""
    return temporary_bytes(graph) >= LARGE_BYTES


def temporary_bytes(graph: Graph) -> int:
    """An estimate of the bytes that XLA:CPU allocates for the intermediate results of a program.

    Example:
        >>> from costmodel.graph import make_graph
        >>> temporary_bytes(make_graph((), (), (), ()))
        0
    """
    program = _Program(graph)
    lives: list[_Life] = []
    for n in program.nodes:
        for v in graph.nodes[n].outputs if program.is_allocated(n) else ():
            if v not in program.results:
                lives.append(_Life(graph.values[v].nbytes, program.level[n], program.last_reader(n, v)))
    change = [0] * (len(program.nodes) + 2)
    written_over = set[int]()
    for life in sorted(lives, reverse=True):
        # An elementwise operation that reads a value last writes its result over it, if it is the largest. A
        # result of the program has memory of its own, in which the operand is then.
        last = graph.nodes[life.last]
        is_over = last.kind < OpKind.REDUCTION and life.last not in written_over
        if is_over:
            written_over.add(life.last)
            if any(v in program.results and graph.values[v].nbytes >= life.nbytes for v in last.outputs):
                continue
        change[life.level] += life.nbytes
        change[max(program.level[life.last] + (not is_over), life.level + 1)] -= life.nbytes
    return max(accumulate(change))


class _Life(NamedTuple):
    """How long a value is needed."""

    nbytes: int
    level: int
    """The level of its producer."""
    last: int
    """The node whose loop reads it last: of ``y`` in ``(jnp.tanh(y) * 2).sum()`` the sum."""


class _Program:
    """The operations of a graph, each once, and which of them XLA:CPU writes to memory."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        origins = graph.origins or range(len(graph.nodes))
        array = arrays_of(graph) if graph.origins else range(len(graph.values))
        self.nodes = sorted(set(origins))
        self.results = {array[v] for v in graph.results}
        self._absorbed = absorbed_nodes(graph)
        self._readers: dict[int, dict[int, None]] = {}
        self.level: dict[int, int] = {}
        for node, origin in zip(graph.nodes, origins, strict=True):
            for v in node.inputs:
                self._readers.setdefault(array[v], {})[origin] = None
        for n in self.nodes:
            made = [graph.values[v].producer for v in graph.nodes[n].inputs]
            self.level[n] = 1 + max([self.level[origins[p]] for p in made if p >= 0], default=-1)
        self._is_operand: dict[int, bool] = {}
        """Whether a reader of the node reads its result from memory."""
        self._materialised_at: dict[int, int] = {}
        """The node whose loop computes the node: itself if its result is written to memory, else the last of
        the loops of its readers."""
        for n in reversed(self.nodes):
            node = graph.nodes[n]
            readers = [graph.nodes[r] for v in node.outputs for r in self._readers.get(v, ())]
            is_result = not self.results.isdisjoint(node.outputs)
            self._is_operand[n] = any(self._reads_memory(node, reader) for reader in readers)
            is_written = node.kind >= OpKind.REDUCTION or self._is_operand[n] or is_result
            if node.bitcast or _is_part_of_products(node, readers):
                is_written = False
            self._materialised_at[n] = n if is_written else self._latest((r.id for r in readers), default=n)

    def is_allocated(self, n: int) -> bool:
        """Whether XLA writes the results of a node to memory that it allocates; its library has its own."""
        return self._materialised_at[n] == n and n not in self._absorbed

    def last_reader(self, n: int, v: int) -> int:
        """The node whose loop reads ``v``, a result of ``n``, last."""
        return self._latest(self._readers.get(v, ()), default=n)

    def _latest(self, readers: Iterable[int], default: int = -1) -> int:
        def when(n: int) -> tuple[int, int]:
            return self.level[n], self.graph.nodes[n].kind

        return max((self._materialised_at[r] for r in readers), key=when, default=default)

    def _reads_memory(self, node: Node, reader: Node) -> bool:
        if reader.kind >= _PRODUCT or is_scatter(reader):
            return True
        if reader.id in self._absorbed or library_rows(self.graph, reader):
            return node.id not in self._absorbed
        if reader.bitcast or reader.op == "transpose":
            return self._is_operand[reader.id]
        return reader.kind == OpKind.REDUCTION and is_written_before(self.graph, reader, node)


def _is_part_of_products(node: Node, readers: list[Node]) -> bool:
    """Whether matrix products alone read a transposed array, which they do in any order."""
    return node.op == "transpose" and bool(readers) and all(r.kind == _PRODUCT for r in readers)
