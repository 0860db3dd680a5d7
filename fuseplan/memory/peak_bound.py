"""Lower bounds on peak memory: of all orders of given kernels, and of all plans of a graph."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from costmodel.graph import Graph
from fuseplan.memory.liveness import Liveness, LiveRange
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import ancestors, descendants

MAX_NODES = 20_000
"""Largest graph for which ``plan_peak_bound`` builds its two tables of reachable nodes: 100 MB of bits."""


def order_peak_bound(lives: Liveness) -> int:
    """Bytes that are in use at once in every order of the kernels.

    While a kernel runs, every buffer is live whose writer is it or one of its predecessors, and of which
    some user is it or one of its successors.
    """
    n = lives.n_kernels
    if not n:
        return 0
    below, above = descendants(lives.successors), ancestors(lives.successors)
    needs = np.array(lives.scratch_bytes, dtype=np.int64)
    for r in lives.ranges:
        until = 0
        for k in r.users:
            until |= above[k]
        live = below[r.writer] & until
        first, end = r.writer, live.bit_length()
        packed = (live >> first).to_bytes((end - first + 7) // 8, "little")
        flags = np.unpackbits(np.frombuffer(packed, np.uint8), count=end - first, bitorder="little")
        needs[first:end][flags.view(bool)] += r.nbytes
    return int(needs.max())


def plan_peak_bound(graph: Graph, book: PriceBook, expires_at: float) -> int:
    """Bytes of temporaries that every plan of the graph has in use at once, in any grouping and order.

    A value is written to memory in every plan if one of its consumers can never share a kernel with its
    producer. Such a value is live while the kernel of any operation between the two runs. Of an operation
    that may be computed several times, only the first copy counts, since the others may be merged with it.
    The answer is 0, which always holds, for a graph of more than ``MAX_NODES`` nodes and once
    ``time.monotonic()`` reaches ``expires_at``.
    """
    n = len(graph.nodes)
    if n > MAX_NODES:
        return 0
    after: list[set[int]] = [set() for _ in range(n)]
    for u, v in data_edges(graph) + effect_edges(graph):
        after[u].add(v)
    successors = tuple(tuple(sorted(s)) for s in after)
    below, above = descendants(successors), ancestors(successors)
    offers = [frozenset(nodes) for nodes in book.offers]

    def may_share(u: int, v: int) -> bool:
        """Whether some group may hold both nodes, and so all between them."""
        if any(u in offer and v in offer for offer in offers):
            return True
        return book.compatible((u, v)) is None and book.compatible(tuple(bits(below[u] & above[v]))) is None

    ranges: list[LiveRange] = []
    duplicates = {n for copies in book.copies for n in copies[1:]}
    for v, readers in _temporaries(graph):
        producer = graph.values[v].producer
        if producer in duplicates:
            continue
        apart = [c for c in sorted(readers) if not may_share(producer, c)]
        if time.monotonic() >= expires_at:
            return 0
        if apart:
            ranges.append(LiveRange(v, graph.values[v].nbytes, producer, (producer, *apart)))
    return order_peak_bound(Liveness(tuple(ranges), (0,) * n, successors))


def _temporaries(graph: Graph) -> Iterator[tuple[int, set[int]]]:
    """The non-empty values that are neither inputs nor outputs, each with the nodes that read it.

    A value and its bitcasts are one temporary: in every plan one of them is stored, and all have one size.
    """
    first = list(range(len(graph.values)))
    for node in graph.nodes:
        if node.bitcast:
            for v in node.outputs:
                first[v] = first[node.inputs[0]]
    kept = {*graph.inputs, *(first[v] for v in graph.outputs)}
    readers: dict[int, set[int]] = {}
    for v, f in enumerate(first):
        if f not in kept and graph.values[v].nbytes:
            readers.setdefault(f, set()).update(c for c in graph.consumers[v] if not graph.nodes[c].bitcast)
    yield from readers.items()
