"""When each buffer must be there, whatever the order of the kernels.

A buffer is alive from the kernel that first writes it until all of its users have run. What is
alive after a set of kernels therefore depends on the set alone, not on the order within it: that
is what every search for an order rests on. ``costmodel.memory.peak_bytes`` is the definition;
``peak(lives, order)`` equals it.
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
class Lives:
    """The buffers of some kernels, which are named by their position in an order that can run."""

    sizes_bytes: tuple[int, ...]
    """Of each buffer; none is empty."""
    values: tuple[int, ...]
    """The value that each buffer is named after: the first one that lies in it."""
    writers: tuple[int, ...]
    """The kernel that first writes it, or -1 where it is alive from the start."""
    users: tuple[tuple[int, ...], ...]
    """The kernels that write or read it, ascending."""
    held: tuple[bool, ...]
    """Whether it stays alive when all of these have run: others will read it."""
    tiles_bytes: tuple[int, ...]
    """For each kernel, what it keeps beside them while it runs."""
    after: tuple[tuple[int, ...], ...]
    """For each kernel those that must wait for it, ascending."""
    base_bytes: int = 0
    """What is alive beside all of these, from start to end."""

    @property
    def n_kernels(self) -> int:
        return len(self.tiles_bytes)


def lives_of(graph: Graph, kernels: Sequence[Kernel]) -> Lives:
    """The temporaries of kernels that are in an order that can run: neither inputs nor outputs of
    the graph, nor arrays without elements. What a kernel computes once for several copies
    (``fuseplan.search.remat.duplicates``) is one of them."""
    specs = _as_written(graph, [kernel.spec for kernel in kernels])
    buffer = buffers(graph, specs)
    kept = set(graph.inputs) | {buffer[v] for v in graph.outputs}
    users: dict[int, list[int]] = {}
    writers: dict[int, int] = {}
    maker: dict[int, int] = {}
    after: list[set[int]] = [set() for _ in specs]
    for k, spec in enumerate(specs):
        for access in spec.reads:
            if access.value in maker:
                after[maker[access.value]].add(k)
        for access in spec.writes:
            maker[access.value] = k
            writers.setdefault(buffer[access.value], k)
        for v in dict.fromkeys(buffer[a.value] for a in spec.reads + spec.writes):
            users.setdefault(v, []).append(k)
    effects = effect_edges(graph)
    if effects:
        owner = {n: k for k, spec in enumerate(specs) for n in spec.nodes}
        for u, v in effects:
            after[owner[u]].add(owner[v])
    values = [v for v in writers if v not in kept and graph.values[v].nbytes]
    return Lives(
        sizes_bytes=tuple(graph.values[v].nbytes for v in values),
        values=tuple(values),
        writers=tuple(writers[v] for v in values),
        users=tuple(tuple(users[v]) for v in values),
        held=(False,) * len(values),
        tiles_bytes=tuple(map(tile_bytes, kernels)),
        after=tuple(tuple(sorted(s)) for s in after),
    )


def _as_written(graph: Graph, specs: list[KernelSpec]) -> list[KernelSpec]:
    """Kernels that read, of copies that one kernel makes, the one that it writes, if it writes one only."""
    if not graph.origins:
        return specs
    array = arrays_of(graph)
    there = {a.value for spec in specs for a in spec.writes}
    kernel_of = {n: k for k, spec in enumerate(specs) for n in spec.nodes}
    name = {(k, array[a.value]): a.value for k, spec in enumerate(specs) for a in spec.writes}

    def written(access: Access) -> Access:
        if access.value in there:
            return access
        maker = kernel_of.get(graph.values[access.value].producer, -1)
        return replace(access, value=name.get((maker, array[access.value]), access.value))

    return [replace(spec, reads=tuple(map(written, spec.reads))) for spec in specs]


def profile(lives: Lives, order: Sequence[int]) -> list[int]:
    """The bytes in use while each kernel runs, in the order of running."""
    position = [0] * lives.n_kernels
    for step, k in enumerate(order):
        position[k] = step
    change = [0] * (len(order) + 1)
    change[0] = lives.base_bytes
    for size, writer, users, held in zip(
        lives.sizes_bytes, lives.writers, lives.users, lives.held, strict=True
    ):
        change[0 if writer < 0 else position[writer]] += size
        if not held:
            change[1 + max(position[k] for k in users)] -= size
    alive = accumulate(change[:-1])
    return [now + lives.tiles_bytes[k] for now, k in zip(alive, order, strict=True)]


def peak(lives: Lives, order: Sequence[int]) -> int:
    """The most bytes in use at once."""
    return max(profile(lives, order), default=0)


def window(lives: Lives, order: Sequence[int], start: int, stop: int) -> Lives:
    """The kernels at ``order[start:stop]`` by themselves, renumbered in that order; all others
    run before or after them as they do."""
    inside = {k: i for i, k in enumerate(order[start:stop])}
    position = {k: step for step, k in enumerate(order)}
    base = 0
    rows: list[tuple[int, int, int, tuple[int, ...], bool]] = []
    for size, v, writer, users, held in zip(
        lives.sizes_bytes, lives.values, lives.writers, lives.users, lives.held, strict=True
    ):
        first = -1 if writer < 0 else position[writer]
        last = len(order) if held else max(position[k] for k in users)
        if first >= stop or last < start:
            continue
        own = tuple(sorted(inside[k] for k in users if k in inside))
        if own:
            rows.append((size, v, inside.get(writer, -1), own, last >= stop))
        else:
            base += size
    return Lives(
        sizes_bytes=tuple(row[0] for row in rows),
        values=tuple(row[1] for row in rows),
        writers=tuple(row[2] for row in rows),
        users=tuple(row[3] for row in rows),
        held=tuple(row[4] for row in rows),
        tiles_bytes=tuple(lives.tiles_bytes[k] for k in order[start:stop]),
        after=tuple(
            tuple(sorted(inside[s] for s in lives.after[k] if s in inside)) for k in order[start:stop]
        ),
        base_bytes=lives.base_bytes + base,
    )
