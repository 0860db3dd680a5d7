"""Backends: what the kernels of each code generator can hold, address, reduce and stream.

The planner asks this record and never the name of a backend, so a new backend is one entry here (or one call
of ``register_backend``) and one module that emits its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """What kernels of one code generator can do.

    Example:
        >>> backend_of("triton").power_of_two_tiles, backend_of("mosaic_tpu").power_of_two_tiles
        (True, False)
    """

    name: str
    emitter: str
    """The module whose ``emit(spec, lowered, *, interpret)`` returns a kernel as a function of arrays."""
    dialect: str = ""
    """The language in which the operations on a tile are written, which decides how each primitive is
    lowered: ``xla`` (whole arrays), ``loops`` (tiles as arrays), ``triton``, ``mosaic_gpu`` or
    ``mosaic_tpu``. Empty: that of the backend's own name."""
    emits_kernels: bool = True
    """Whether groups become tiled kernels of ours; otherwise XLA compiles each group as it is."""
    loop_nest: bool = False
    """Whether a kernel is a nest of loops over tiles in main memory, as on a CPU."""
    in_registers: bool = False
    """Whether blocks are held in registers, with shared memory for what is exchanged (GPUs)."""
    power_of_two_tiles: bool = False
    """Whether a tile's extents are powers of two: the whole of an axis may be padded."""
    gathers_blocks: bool = False
    """Whether a block may lie in several places of memory, each element loaded from where it is."""
    lane_tiles: bool = False
    """Whether blocks are laid out in (sublane, lane) tiles and must be multiples of them (TPUs)."""
    warpgroup_blocks: bool = False
    """Whether blocks are spread over whole warpgroups, which limits the tiles that can be addressed."""
    most_elements: int | None = None
    """Elements of a block beyond which registers spill; None: no such limit."""
    matmul_tiles: tuple[int, ...] = ()
    """Tiles of the rows and columns of a contraction that become full matrix instructions."""
    depth_tiles: tuple[int, ...] = ()
    """Tiles of the contracted axis."""
    held_tiles: tuple[int, ...] = ()
    """Further tiles of a contraction whose depth is held whole on chip."""
    least_dot_tile: int = 1
    """The least tile of a contraction's axis; what is missing is masked."""
    accumulates_in_memory: bool = False
    """Whether accumulators are read and written again by each step, so that a step takes several short
    contracted axes at once."""
    regroups_elements: bool = True
    """Whether a reshape may give elements to other threads."""
    exchanges_bool: bool = True
    """Whether arrays of bool can be read and written."""
    fuses_operands: bool = True
    """Whether operations may be computed on the operands of a contraction, in its kernel."""
    walks_in_passes: bool = True
    """Whether a kernel may walk a stream more than once, or hold several contractions."""
    loops_inside: bool = False
    """Whether a contraction of what is read may have a loop of its own inside a kernel, where memory on chip
    is too small to hold its operands whole."""
    max_whole_axis: int = 1024
    """The longest axis that is whole in a kernel of several contractions beside a streamed one: 32 rows of it
    in float32 fill the half of a GPU core's 256 KiB of registers that values may have."""
    one_step_depth: int = 128
    """The longest contracted axis that a kernel of several contractions takes in one step: the width of an
    attention head."""
    max_accumulators: int = 4
    """Contractions in one kernel that each accumulate a tile of equal axes."""
    splits_reductions: bool = False
    """Whether a reduction of which no program sees all is made in two steps, each tile first."""
    ignores_unit_dims: bool = False
    """Whether dimensions of size one cost nothing: the layout of a block does not depend on them."""
    relayouts_operands: bool = False
    """Whether computed operands of a contraction are converted to another layout, beside the first."""
    scans_by_joining: bool = False
    """Whether scans along a block are made by joining halves, which lie beside the result."""
    batches_lead: bool = False
    """Whether batch dimensions of a contraction have to lead."""

    @property
    def is_compiled_apart(self) -> bool:
        """Whether a kernel is compiled by itself, by Pallas, so that its compiler may refuse it."""
        return self.emits_kernels and not self.loop_nest

    @property
    def language(self) -> str:
        """``dialect``, or the backend's name."""
        return self.dialect or self.name


_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Make a backend known, or replace what is known of one. Plans made afterwards use it.

    Raises:
        TypeError: anything but a ``Backend``.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register_backend expects a Backend, got {type(backend).__name__}")
    _BACKENDS[backend.name] = backend


def backend_of(name: str) -> Backend:
    """The capabilities of the backend called ``name``.

    Raises:
        KeyError: there is no such backend; the message lists those that there are.
    """
    try:
        return _BACKENDS[name]
    except KeyError:
        raise KeyError(f"unknown backend {name!r}: expected one of {', '.join(_BACKENDS)}") from None


def backend_names() -> tuple[str, ...]:
    """The names of all backends."""
    return tuple(_BACKENDS)


_WARP_TILE = 16 * 512
"""Elements that a block of 512 threads has 16 registers each for. Larger tiles read no less, but of twice as
many elements ptxas spills some, as it gives so many threads 64 registers each where it can."""

for _backend in (
    Backend(
        "mosaic_tpu",
        "fuseplan.codegen.mosaic_tpu.kernel",
        lane_tiles=True,
        matmul_tiles=(128, 256, 512),  # 128 rows is the systolic array of a TPU
        depth_tiles=(128, 256, 512),
        held_tiles=(1024, 2048, 4096),  # weights that are whole in VMEM are read once
        accumulates_in_memory=True,
        batches_lead=True,
    ),
    Backend(
        "triton",
        "fuseplan.codegen.triton.kernel",
        in_registers=True,
        power_of_two_tiles=True,
        gathers_blocks=True,
        most_elements=_WARP_TILE,
        matmul_tiles=(32, 64, 128, 256),
        depth_tiles=(32, 64, 128),
        least_dot_tile=16,  # mma.m16n8k16
        loops_inside=True,
        splits_reductions=True,
        ignores_unit_dims=True,
        relayouts_operands=True,
        scans_by_joining=True,
    ),
    Backend(
        "mosaic_gpu",
        "fuseplan.codegen.mosaic_gpu.kernel",
        in_registers=True,
        warpgroup_blocks=True,
        matmul_tiles=(64, 128, 256),
        depth_tiles=(64, 128),
        regroups_elements=False,
        exchanges_bool=False,
        fuses_operands=False,
        walks_in_passes=False,
    ),
    Backend("xla", "fuseplan.codegen.xla", emits_kernels=False),
    Backend("loops", "fuseplan.codegen.cpu_loops.kernel", loop_nest=True),
):
    register_backend(_backend)
