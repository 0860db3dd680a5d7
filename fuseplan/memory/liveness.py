"""Live ranges of a plan's temporaries for any order of its kernels, and lower bounds on the peak.

A buffer is live from the kernel that first writes it until its last user has run. The bytes that are live
after a set of kernels have run depend on the set and not on the order within it. The search for an order
(``order``) and the exact search (``exact``) rest on this. ``costmodel.memory.peak_bytes`` defines the peak;
``peak`` agrees with it. ``order_peak_bound`` bounds the peak of all orders of given kernels, and
``plan_peak_bound`` that of all plans of a graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from costmodel.graph import Graph, arrays_of
from costmodel.kernel import Access, KernelSpec
from costmodel.memory import buffers
from fuseplan.plan.fusion_plan import Kernel, tile_bytes
from fuseplan.schedule.pricing import PriceBook
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.support.bitset import bits
from fuseplan.support.digraph import ancestors, descendants

MAX_NODES = 20_000
"""Largest graph for which ``plan_peak_bound`` builds its two tables of reachable nodes: 100 MB of bits."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """One buffer and the kernels that use it; kernels are positions in an order that can run."""

    value: int
    """The first value stored in the buffer. Bitcasts may give it further names."""
    nbytes: int
    """Greater than 0."""
    writer: int
    """The kernel that first writes the buffer."""
    users: tuple[int, ...]
    """The kernels that write or read it, ascending."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """The live ranges of some kernels, and the dependences between the kernels."""

    ranges: tuple[LiveRange, ...]
    scratch_bytes: tuple[int, ...]
    """For each kernel, the bytes that it allocates for itself while it runs."""
    successors: tuple[tuple[int, ...], ...]
    """For each kernel, those that must run after it, ascending."""

    @property
    def n_kernels(self) -> int:
        return len(self.scratch_bytes)


def live_ranges(graph: Graph, kernels: Sequence[Kernel]) -> Liveness:
    """The live ranges of the temporaries of ``kernels``, which are in an order that can run.

    Temporaries are neither inputs nor outputs of the graph, and not empty. A result that a kernel computes
    once for several copies (``fuseplan.search.remat.duplicates``) is one temporary.
    """
    specs = _with_canonical_reads(graph, [kernel.spec for kernel in kernels])
    buffer = buffers(graph, specs)
    kept = set(graph.inputs) | {buffer[v] for v in graph.outputs}
    users: dict[int, list[int]] = {}
    writers: dict[int, int] = {}
    producer: dict[int, int] = {}
    successors: list[set[int]] = [set() for _ in specs]
    for k, spec in enumerate(specs):
        for access in spec.reads:
            if access.value in producer:
                successors[producer[access.value]].add(k)
        for access in spec.writes:
            producer[access.value] = k
            writers.setdefault(buffer[access.value], k)
        for v in dict.fromkeys(buffer[a.value] for a in spec.reads + spec.writes):
            users.setdefault(v, []).append(k)
    effects = effect_edges(graph)
    if effects:
        owner = {n: k for k, spec in enumerate(specs) for n in spec.nodes}
        for u, v in effects:
            successors[owner[u]].add(owner[v])
    return Liveness(
        tuple(
            LiveRange(v, graph.values[v].nbytes, writer, tuple(users[v]))
            for v, writer in writers.items()
            if v not in kept and graph.values[v].nbytes
        ),
        tuple(map(tile_bytes, kernels)),
        tuple(tuple(sorted(s)) for s in successors),
    )


def _with_canonical_reads(graph: Graph, specs: list[KernelSpec]) -> list[KernelSpec]:
    """Replace each read of a copy that no kernel writes by a read of the copy that its kernel does write."""
    if not graph.origins:
        return specs
    array = arrays_of(graph)
    written = {a.value for spec in specs for a in spec.writes}
    kernel_of = {n: k for k, spec in enumerate(specs) for n in spec.nodes}
    name = {(k, array[a.value]): a.value for k, spec in enumerate(specs) for a in spec.writes}

    def canonical(access: Access) -> Access:
        if access.value in written:
            return access
        kernel = kernel_of.get(graph.values[access.value].producer, -1)
        return replace(access, value=name.get((kernel, array[access.value]), access.value))

    return [replace(spec, reads=tuple(map(canonical, spec.reads))) for spec in specs]


def profile(lives: Liveness, order: Sequence[int]) -> list[int]:
    """The bytes in use while each kernel runs, in the order of execution."""
    position = [0] * lives.n_kernels
    for step, k in enumerate(order):
        position[k] = step
    change = [0] * (len(order) + 1)
    for r in lives.ranges:
        change[position[r.writer]] += r.nbytes
        change[1 + max(position[k] for k in r.users)] -= r.nbytes
    live = accumulate(change[:-1])
    return [now + lives.scratch_bytes[k] for now, k in zip(live, order, strict=True)]


def peak(lives: Liveness, order: Sequence[int]) -> int:
    """The most bytes in use at once."""
    return max(profile(lives, order), default=0)


def largest_use(lives: Liveness) -> int:
    """The most bytes that one kernel uses, which are in use at once in every order of the kernels."""
    used = list(lives.scratch_bytes)
    for r in lives.ranges:
        for k in r.users:
            used[k] += r.nbytes
    return max(used, default=0)


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
