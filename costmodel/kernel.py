"""A kernel to be: a group of nodes, how its axes are tiled, and what that costs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from costmodel.graph import DimMap, Flops


class AxisRole(enum.IntEnum):
    """What a kernel does with one axis of its group."""

    PARALLEL = 0
    """A grid axis: each tile is computed by itself."""
    STREAMED = 1
    """An inner loop over tiles with carried accumulators, such as the K of a matmul."""
    RESIDENT = 2
    """The whole extent is in the block."""
    INNER = 3
    """Contracted on every tile of the others, in a loop of its own over tiles of operands that are loaded
    for that: what is too long to be in the block, such as the features of a row whose classes are
    streamed."""

    @property
    def is_whole(self) -> bool:
        """Whether a tile of the other axes completes what is reduced along the axis."""
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
    axes that dimension merges, major first. ``()`` is a dimension of size one."""

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
    resident and inner ones. With ``backend == "xla"`` the group is XLA's to compile: ``axes`` is
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
    ``nodes``. Empty where no more than one pass is made, which completes reductions alone
    and writes nothing; of a loop nest there are always some."""
    keeps: bool = False
    """Whether the products of one pass are kept for later ones, for all of the stream, instead
    of being computed again."""
    walked: tuple[int, ...] = ()
    """For each pass, how many tiles are walked in all: fewer than there are where a mask
    leaves nothing of some."""
    compiled: Compiled | None = None
    """What XLA made of the group, where its program was looked at; None: that each array is moved once."""

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
    shape = []
    for dims in dim_map:
        n = 1
        for a in dims:
            n *= axes[a].tile
        shape.append(n)
    return tuple(shape)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kernel costs on one device. It keeps its parts."""

    launch_ps: int = 0
    memory_ps: int = 0
    cache_ps: int = 0
    matrix_ps: int = 0
    vector_ps: int = 0
    transcendental_ps: int = 0
    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    onchip_bytes: int = 0
    flops: Flops = field(default_factory=Flops)

    @property
    def time_ps(self) -> int:
        """Launch plus the slowest of memory, cache and compute (vector and
        transcendental work share an issue slot, so they add up)."""
        vector = self.vector_ps + self.transcendental_ps
        return self.launch_ps + max(self.memory_ps, self.cache_ps, self.matrix_ps, vector)

    @property
    def time_us(self) -> float:
        return self.time_ps / 1e6

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_read_bytes + self.hbm_write_bytes

    @property
    def bound_by(self) -> str:
        """``launch``, ``memory``, ``cache``, ``matrix``, ``vector`` or ``free``."""
        parts = {
            "launch": self.launch_ps,
            "memory": self.memory_ps,
            "cache": self.cache_ps,
            "matrix": self.matrix_ps,
            "vector": self.vector_ps + self.transcendental_ps,
        }
        worst = max(parts, key=lambda k: parts[k])
        return worst if parts[worst] else "free"
