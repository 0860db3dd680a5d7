"""A floor under the peak of every plan, however it groups the operations and orders them.

Of an array that may be computed again, the first copy counts only: others may be one with it.

A value is written to memory in every plan if one of its consumers can never be in its producer's
kernel. While any operation's kernel runs that lies on a path between the two, such a value is
there: made before or by that kernel, and read after or by it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from costmodel.graph import Graph
from fuseplan.memory.liveness import Lives
from fuseplan.memory.order import peak_floor
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.support.bitset import bits

_MAX_NODES = 20_000
"""Of a graph that is looked at: a set of nodes takes a bit for each, and there are as many. A
training step of 12,000 takes 2 s."""


def least_peak_of_any(graph: Graph, book: PriceBook, expires_at: float) -> int:
    """Bytes of temporaries that every plan has in use at once; 0, which is always true, of a graph
    that is too large, or once ``time.monotonic()`` reaches ``expires_at``."""
    n = len(graph.nodes)
    if n > _MAX_NODES:
        return 0
    after: list[set[int]] = [set() for _ in range(n)]
    for u, v in data_edges(graph) + effect_edges(graph):
        after[u].add(v)
    below, above = [1 << u for u in range(n)], [1 << u for u in range(n)]
    for u in reversed(range(n)):
        for v in after[u]:
            below[u] |= below[v]
    for u in range(n):
        for v in after[u]:
            above[v] |= above[u]
    offers = [frozenset(nodes) for nodes in book.offers]

    def together(u: int, v: int) -> bool:
        """Whether some group may hold both, and so all between them."""
        if any(u in offer and v in offer for offer in offers):
            return True
        return book.compatible((u, v)) is None and book.compatible(tuple(bits(below[u] & above[v]))) is None

    sizes: list[int] = []
    values: list[int] = []
    users: list[tuple[int, ...]] = []
    others = {n for copies in book.copies for n in copies[1:]}
    for v, readers in _written(graph):
        maker = graph.values[v].producer
        if maker in others:
            continue
        apart = [c for c in sorted(readers) if not together(maker, c)]
        if time.monotonic() >= expires_at:
            return 0
        if apart:
            sizes.append(graph.values[v].nbytes)
            values.append(v)
            users.append((maker, *apart))
    return peak_floor(
        Lives(
            sizes_bytes=tuple(sizes),
            values=tuple(values),
            writers=tuple(u[0] for u in users),
            users=tuple(users),
            held=(False,) * len(sizes),
            tiles_bytes=(0,) * n,
            after=tuple(tuple(sorted(s)) for s in after),
        )
    )


def _written(graph: Graph) -> Iterator[tuple[int, set[int]]]:
    """Values that are made, neither inputs nor outputs, with those who read them. A value and its
    bitcasts are one: whichever kernels those are in, one of them is there, and all are as large."""
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
