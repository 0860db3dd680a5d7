"""Live ranges of a plan's temporaries, for any order of its kernels.

A buffer is live from the kernel that first writes it until its last user has run. The bytes that are live
after a set of kernels have run depend on the set and not on the order within it. The search for an order
(``order``) and the exact search (``exact``) rest on this. ``costmodel.memory.peak_bytes`` defines the peak;
``peak`` agrees with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from costmodel.graph import Graph, arrays_of
from costmodel.kernel import Access, KernelSpec
from costmodel.memory import buffers
from fuseplan.plan.fusion_plan import Kernel, tile_bytes
from fuseplan.search.components import effect_edges


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


def needs_of(graph: Graph, kernels: Sequence[Kernel]) -> list[int]:
    """The bytes of temporaries in use while each of ``kernels`` runs, in the order given."""
    return profile(live_ranges(graph, kernels), range(len(kernels)))


def peak(lives: Liveness, order: Sequence[int]) -> int:
    """The most bytes in use at once."""
    return max(profile(lives, order), default=0)
