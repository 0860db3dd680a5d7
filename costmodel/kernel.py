"""Kernel specifications: a group of nodes, the tiling of its axes, and its cost."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from costmodel.axes import compose
from costmodel.backends import Backend, backend_of
from costmodel.graph import DimMap, DimRole, Flops, Graph, once


class AxisRole(enum.IntEnum):
    """What a kernel does with one axis of its group."""

    PARALLEL = 0
    """A grid axis: each tile is computed by itself."""
    STREAMED = 1
    """An inner loop over tiles with carried accumulators, such as the K of a matmul."""
    RESIDENT = 2
    """The whole extent is in the block."""
    INNER = 3
    """An axis that is too long to be in the block, contracted on every tile of the others in a loop of its
    own over tiles of the operands, such as the features of a row whose classes are streamed."""

    @property
    def is_whole(self) -> bool:
        """Whether a reduction along the axis is complete on every tile of the other axes."""
        return self >= AxisRole.RESIDENT


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a kernel. ``tile`` is the extent in one block; it may exceed ``size``
    where a backend wants powers of two (the rest is masked)."""

    size: int
    role: AxisRole
    tile: int

    @property
    def n_tiles(self) -> int:
        return -(-self.size // self.tile)

    @property
    def ragged(self) -> bool:
        """Whether the tile does not divide the axis. The last block reaches past the end; that of
        a CPU's loop is shifted back instead."""
        return self.n_tiles * self.tile != self.size


@dataclass(frozen=True, slots=True)
class Access:
    """One array that a kernel reads or writes: for each of its dimensions, the kernel
    axes that dimension merges, major first. ``()`` is a dimension of size one, or, in a kernel that loads by
    index, one in which indices choose places (``looked_up``)."""

    value: int
    axes: DimMap

    @property
    def axis_set(self) -> frozenset[int]:
        return frozenset(a for dims in self.axes for a in dims)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA's own program does for a group of nodes, read from that program."""

    launches: int
    """Its kernels, with copies and steps that belong to no node."""
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A group of nodes with a schedule. Blocks, index maps, on-chip bytes and traffic
    all follow from ``axes`` and the accesses.

    ``axes`` is in grid order: parallel axes outermost first, then streamed ones, then
    resident and inner ones. With ``backend == "xla"`` XLA compiles the group: ``axes`` is
    empty, and every access is of the whole array, once. A loop nest of the CPU (``"loops"``)
    may have several streamed axes, the innermost of them its *stream*; a kernel of any
    other backend has at most one.
    """

    nodes: tuple[int, ...]
    axes: tuple[Axis, ...]
    node_axes: tuple[tuple[tuple[int, ...], ...], ...]
    """For each node, for each of its iteration dimensions, the axes it splits into."""
    reads: tuple[Access, ...]
    """Distinct (value, axes) pairs: ``x + x.T`` reads ``x`` twice."""
    writes: tuple[Access, ...]
    backend: str = "xla"
    passes: tuple[tuple[int, ...], ...] = ()
    """For each pass along the stream, the nodes evaluated on every tile, as positions in
    ``nodes``. Empty for a kernel with at most one pass, which only completes reductions and writes
    nothing; never empty for a loop nest."""
    keeps: bool = False
    """Whether the products of one pass are kept for later ones, for all of the stream, instead
    of being computed again."""
    tiles_visited: tuple[int, ...] = field(default=(), metadata={"former_name": "walked"})
    """For each pass, the number of tiles that it visits: fewer than all if a mask leaves some out. Empty if
    every pass visits all tiles."""
    compiled: Compiled | None = None
    """The kernels that XLA made of the group, read from its program; None: each array is moved once."""

    @property
    def capabilities(self) -> Backend:
        """What kernels of its backend can do."""
        return backend_of(self.backend)

    @property
    def grid(self) -> tuple[int, ...]:
        """Tiles along each parallel axis."""
        return tuple(a.n_tiles for a in self.axes if a.role == AxisRole.PARALLEL)

    @property
    def streamed(self) -> int | None:
        """The index of the innermost streamed axis, if there is one: a nest's stream."""
        return max((i for i, a in enumerate(self.axes) if a.role == AxisRole.STREAMED), default=None)

    def block_shape(self, access: Access) -> tuple[int, ...]:
        """The shape of one tile's data of ``access``: a merged dimension is the product."""
        return block_shape(self.axes, access.axes)


def block_shape(axes: tuple[Axis, ...], dim_map: DimMap) -> tuple[int, ...]:
    """For each dimension of ``dim_map``, the product of its axes' tiles."""
    return tuple([math.prod([axes[a].tile for a in dims]) for dims in dim_map])


def pass_count(spec: KernelSpec) -> int:
    """The number of passes along the streamed axis."""
    return len(spec.passes) or 1


def evaluations(spec: KernelSpec) -> tuple[tuple[int, int], ...]:
    """For each node, how often it is computed on a tile on average, as (numerator, denominator): the tiles
    that its passes visit over all tiles; (1, 1) for a node outside the passes."""
    every = tile_count(spec)
    counts = [0] * len(spec.nodes)
    for positions, visits in zip(spec.passes, visits_of_passes(spec), strict=True):
        for i in positions:
            counts[i] += visits
    return tuple([(count, every) if count else (1, 1) for count in counts])


def tile_count(spec: KernelSpec) -> int:
    """The number of tiles of all axes together."""
    return math.prod([axis.n_tiles for axis in spec.axes])


def visits_of_passes(spec: KernelSpec) -> tuple[int, ...]:
    """For each pass, the number of tiles of all axes together that it visits."""
    return spec.tiles_visited or (tile_count(spec),) * len(spec.passes)


def visited_share(spec: KernelSpec, passes: Sequence[int]) -> tuple[int, int]:
    """The share of the tiles that ``passes`` visit, as (numerator, denominator)."""
    if not spec.tiles_visited or not passes:
        return 1, 1
    return sum(spec.tiles_visited[k] for k in passes), tile_count(spec) * len(passes)


def reading_passes(graph: Graph, spec: KernelSpec) -> dict[Access, tuple[int, ...]]:
    """For each access that reads, the passes whose nodes read it."""
    found: dict[Access, list[int]] = {access: [] for access in spec.reads}
    for k, positions in enumerate(spec.passes):
        for i in positions:
            node = graph.nodes[spec.nodes[i]]
            for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
                passes = found.get(Access(v, compose(dim_map, spec.node_axes[i])))
                if passes is not None and k not in passes:
                    passes.append(k)
    return {access: tuple(passes) for access, passes in found.items()}


@once
def _looking_up(graph: Graph) -> frozenset[int]:
    """The nodes with an operand that indices choose places of."""
    return frozenset([node.id for node in graph.nodes if DimRole.ADDRESSED in node.roles])


def looked_up(graph: Graph, spec: KernelSpec) -> dict[Access, tuple[Access, ...]]:
    """The arrays that a tiled kernel reads by index, of which it holds no block: for each, the results that
    nodes make of its elements, one for each node."""
    found: dict[Access, tuple[Access, ...]] = {}
    looking = _looking_up(graph)
    if not spec.capabilities.loads_by_index or looking.isdisjoint(spec.nodes):
        return found
    for n, own in zip(spec.nodes, spec.node_axes, strict=True):
        if n not in looking:
            continue
        node = graph.nodes[n]
        result = Access(node.outputs[0], compose(node.output_maps[0], own))
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            if node.addresses(dim_map):
                access = Access(v, compose(dim_map, own))
                found[access] = (*found.get(access, ()), result)
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kernel costs on one device, part by part; times in picoseconds.

    Some parts always add up: ``launch_ps``, ``scan_ps``, ``sync_ps``, ``fresh_ps``, ``surcharge_ps``. The
    others are work of units that run at the same time: the slowest unit counts. In a CPU's loops
    (``in_turns``) little overlaps: steps and contractions add to the slower of traffic and arithmetic.
    """

    launch_ps: int = 0
    """Launches: of the kernel itself, and of each contraction that a CPU's loops call."""
    scan_ps: int = 0
    """Scanning the arrays for infinities, launches included, before masked tiles are left out."""
    sync_ps: int = 0
    """Handing work to all cores of a CPU and waiting for them."""
    fresh_ps: int = 0
    """Touching pages of memory for the first time."""
    surcharge_ps: int = 0
    """A deliberate addition to the price: a tenth of the time of a CPU's loops without their contractions,
    because the model is not exact; in a search for less memory, the charge for live values."""
    step_ps: int = 0
    """The steps of a TPU's grid or of a CPU's loops, beside their work."""
    memory_ps: int = 0
    """Bytes through the device's memory at its bandwidth."""
    latency_ps: int = 0
    """Waiting for loads that too few tiles of a GPU hide."""
    cache_ps: int = 0
    """Bytes through the cache."""
    sums_ps: int = 0
    """Adding up elements one by one, as reductions on a CPU do."""
    matrix_ps: int = 0
    vector_ps: int = 0
    transcendental_ps: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    onchip_bytes: int = 0
    flops: Flops = field(default_factory=Flops)
    in_turns: bool = False
    """Whether contractions and the rest take turns, as in a CPU's loops."""

    @property
    def time_ps(self) -> int:
        """The sum of ``parts_ps``: the parts that always add up, plus the slowest of those that overlap."""
        fixed = self.launch_ps + self.scan_ps + self.sync_ps + self.fresh_ps + self.surcharge_ps
        cached = self.cache_ps + self.sums_ps
        vector = self.vector_ps + self.transcendental_ps
        if self.in_turns:
            return fixed + self.step_ps + self.matrix_ps + max(self.memory_ps + cached, vector)
        return fixed + max(self.memory_ps, self.latency_ps, cached, self.matrix_ps, vector + self.step_ps)

    @property
    def time_us(self) -> float:
        return self.time_ps / 1e6

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read_bytes + self.hbm_write_bytes

    @property
    def parts_ps(self) -> dict[str, int]:
        """The parts whose sum is ``time_ps``, by name (``BOUNDS``, and ``surcharge``): parts that overlap
        with slower ones are left out. Vector and transcendental operations share an issue slot, so they add
        up."""
        vector = {"vector": self.vector_ps + self.transcendental_ps}
        cached = {"cache": self.cache_ps, "sums": self.sums_ps}
        fixed = {
            "launch": self.launch_ps,
            "scan": self.scan_ps,
            "sync": self.sync_ps,
            "pages": self.fresh_ps,
            "surcharge": self.surcharge_ps,
        }
        chains: tuple[dict[str, int], ...]
        if self.in_turns:
            fixed |= {"steps": self.step_ps, "matrix": self.matrix_ps}
            chains = ({"memory": self.memory_ps} | cached, vector)
        else:
            chains = (
                {"memory": self.memory_ps},
                {"latency": self.latency_ps},
                cached,
                {"matrix": self.matrix_ps},
                vector | {"steps": self.step_ps},
            )
        slowest = max(chains, key=lambda chain: sum(chain.values()))
        return {name: ps for name, ps in (fixed | slowest).items() if ps}

    @property
    def bound_by(self) -> str:
        """The largest part of the time: one of ``BOUNDS``, or ``free``."""
        parts = self.parts_ps
        return max((name for name in BOUNDS if name in parts), key=lambda name: parts[name], default="free")


BOUNDS = (
    "launch", "memory", "latency", "cache", "matrix", "vector", "steps", "scan", "sync", "pages", "sums",
)  # fmt: skip
"""Names of the parts that a kernel may be bound by. The surcharge is not one: it is no work."""
