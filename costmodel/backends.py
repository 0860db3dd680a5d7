"""The capabilities of each code generator: the kernels that it can emit, and the tiles that suit it.

The planner depends on these records and never on the name of a backend, so a new backend is one entry here
(or one call of ``register_backend``) and one module that emits its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backend:
    """The capabilities of one code generator.

    Example:
        >>> backend_of("triton").power_of_two_tiles, backend_of("mosaic_tpu").power_of_two_tiles
        (True, False)
    """

    name: str
    emitter: str
    """The module whose ``emit(spec, lowered, *, interpret)`` returns a kernel as a function of arrays."""
    dialect: str = ""
    """The language of the operations on a tile, which determines the lowering of each primitive: one of
    ``LANGUAGES``. If empty, the backend's name."""
    emits_kernels: bool = True
    """Whether groups become tiled kernels; otherwise XLA compiles each group."""
    loop_nest: bool = False
    """Whether a kernel is a nest of loops over tiles in main memory, as on a CPU."""
    in_registers: bool = False
    """Whether blocks are held in registers, with shared memory for what is exchanged (GPUs)."""
    power_of_two_tiles: bool = False
    """Whether the extents of a tile must be powers of two, so that a whole axis may be padded."""
    gathers_blocks: bool = False
    """Whether a block may have gaps in memory, each element loaded from its own address."""
    loads_by_index: bool = False
    """Whether a kernel may load each element of an array at an address that it computes from indices, so that
    it looks up rows of a table in memory (``DimRole.ADDRESSED``)."""
    lane_tiles: bool = False
    """Whether blocks have a layout of (sublane, lane) tiles, of which they must be multiples (TPUs)."""
    warpgroup_blocks: bool = False
    """Whether blocks are distributed over whole warpgroups, which limits the possible tiles."""
    most_elements: int | None = None
    """The number of elements of a block beyond which registers spill; None: no such limit."""
    most_elements_in_passes: int | None = None
    """The number of elements of a block beyond which a kernel that walks its stream in several passes is
    slower; None: no such limit."""
    matmul_tiles: tuple[int, ...] = ()
    """Candidate tiles of the rows and columns of a contraction: multiples of matrix instructions."""
    depth_tiles: tuple[int, ...] = ()
    """Candidate tiles of the contracted axis."""
    held_tiles: tuple[int, ...] = ()
    """Further candidate tiles for a contraction with its whole contracted axis on chip."""
    contiguous_tiles: tuple[int, ...] = (32, 128, 512, 2048)
    """Candidate tiles of the axis along which the largest arrays of a kernel without contractions are
    contiguous."""
    transpose_tiles: tuple[int, ...] = (32, 64, 128, 512)
    """Candidate tiles of the contiguous axes, if two axes are contiguous in different arrays: square tiles of
    a few cache lines a side serve both."""
    row_tiles: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 128, 256)
    """Candidate tiles of the innermost parallel axes that are not contiguous."""
    outer_tiles: tuple[int, ...] = (1,)
    """Candidate tiles of the parallel axes outside of those of ``row_tiles``. A short axis may be whole."""
    stream_tiles: tuple[int, ...] = (8, 64, 256, 1024)
    """Candidate tiles of a streamed axis that a kernel without contractions walks once."""
    pass_tiles: tuple[int, ...] = (8, 32, 128, 512, 2048, 8192, 32768)
    """Candidate tiles of an axis that a kernel reads in several passes: its rows are too long for the chip.
    They are long, since each step waits for its loads. In a nest of loops, the candidate tiles of every axis
    that is longer than the first of them."""
    least_dot_tile: int = 1
    """The smallest tile of an axis of a contraction; a shorter axis is padded and masked."""
    accumulates_in_memory: bool = False
    """Whether each step reads and writes the accumulators in memory; a step then takes several short
    contracted axes at once."""
    regroups_elements: bool = True
    """Whether a reshape may move elements between threads."""
    max_arrays: int | None = None
    """Arrays that a kernel can read and write; None: any number."""
    exchanges_bool: bool = True
    """Whether kernels can read and write arrays of bool."""
    fuses_operands: bool = True
    """Whether the kernel of a contraction may compute its operands (a prologue)."""
    walks_in_passes: bool = True
    """Whether a kernel may iterate over a streamed axis more than once, or hold several contractions."""
    loops_inside: bool = False
    """Whether a contraction of arrays from memory may have a loop of its own inside a kernel, because its
    operands do not fit on chip."""
    max_whole_axis: int = 1024
    """The longest axis that is whole in a kernel of several contractions beside a streamed one: 32 rows of it
    in float32 fill the half of a GPU core's 256 KiB of registers that values may have."""
    one_step_depth: int = 128
    """The longest contracted axis that a kernel of several contractions takes in one step: the width of an
    attention head."""
    max_accumulators: int = 4
    """Contractions in one kernel that each accumulate a tile of equal axes."""
    splits_reductions: bool = False
    """Whether a reduction along a parallel axis is split in two steps: within each tile, then over the
    tiles."""
    ignores_unit_dims: bool = False
    """Whether dimensions of size one do not affect the layout of a block."""
    relayouts_operands: bool = False
    """Whether a computed operand of a contraction needs a second copy in another layout."""
    scans_by_joining: bool = False
    """Whether a scan along a block is computed by joining halves, which need space beside the result."""
    loop_movers: frozenset[str] = frozenset()
    """The primitives that move data inside of XLA's loops for the device. Every other one, such as a
    transpose, is a kernel of its own."""
    loops_move_computed: bool = True
    """Whether these loops move what they compute, as in a rolled array, rather than only arrays that were
    written before. Any loop may end by joining what it computes."""
    loop_generators: frozenset[str] = frozenset()
    """The primitives that these loops evaluate from the indices of an element, and no other kernel can."""
    loop_scatters: bool = False
    """Whether such a loop may end with a scatter, which adds each element to one of a table in memory."""
    loop_reductions: bool = False
    """Whether these loops compute a reduction of few elements where its result is read
    (``costmodel.xla_loops.ends_loop``)."""
    loop_indices: int = 32
    """Indices at which one of these loops may evaluate one operation: XLA's limit on emitted code, or, where
    that is not known, an assumption."""
    loop_products: frozenset[str] = frozenset()
    """The contractions of which such a loop may hold one, with what its operands are computed from and what
    is computed from its result."""
    fuses_epilogues: bool = False
    """Whether XLA compiles a matrix product and the elementwise operations after it to one kernel on the
    device (``costmodel.xla_loops.epilogues_of_product``)."""
    reduction_loop_kernels: int = 1
    """The number of kernels that XLA makes of a loop that ends in a reduction: one reduces each block, and a
    second one the results of the blocks."""
    batches_lead: bool = False
    """Whether the batch dimensions of a contraction must come first."""

    @property
    def is_compiled_apart(self) -> bool:
        """Whether Pallas compiles each kernel by itself, so that its compiler may refuse one."""
        return self.emits_kernels and not self.loop_nest

    @property
    def language(self) -> str:
        """``dialect``, or the name of the backend."""
        return self.dialect or self.name


LANGUAGES = ("xla", "loops", "triton", "mosaic_gpu", "mosaic_tpu")
"""The languages into which rules lower primitives: ``xla`` of whole arrays, ``loops`` of tiles as arrays, and
those of three Pallas compilers."""

_BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """Add a backend, or replace the one of that name. Later plans use it.

    Raises:
        TypeError: ``backend`` is not a ``Backend``.
        ValueError: no rule is lowered into its language.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"register_backend expects a Backend, got {type(backend).__name__}")
    if backend.language not in LANGUAGES:
        known = ", ".join(LANGUAGES)
        raise ValueError(f"the dialect of {backend.name!r} is {backend.language!r}, expected one of {known}")
    _BACKENDS[backend.name] = backend


def unregister_backend(name: str) -> None:
    """Forget the backend called ``name``, which ``register_backend`` added."""
    _BACKENDS.pop(name, None)


def backend_of(name: str) -> Backend:
    """The record of the backend ``name``.

    Raises:
        KeyError: there is no such backend; the message lists the known ones.
    """
    try:
        return _BACKENDS[name]
    except KeyError:
        raise KeyError(f"unknown backend {name!r}: expected one of {', '.join(_BACKENDS)}") from None


def backend_names() -> tuple[str, ...]:
    """The names of all backends."""
    return tuple(_BACKENDS)


_WARP_TILE = 16 * 512
"""Elements of a block at 16 registers for each of 512 threads. Of twice as many elements ptxas spills some,
as it limits so many threads to 64 registers each, and larger tiles save no traffic."""

_FEW_WARPS_TILE = 16 * 128
"""Elements of a block at 16 registers for each of 128 threads: at each turn all threads of a program wait for
its reductions, and several small programs on a core wait at different times. On an H200 a log-sum-exp of
50,257 elements a row took 531 us with such blocks, and 716 with four times as many threads."""

_POINTERS = 4096 // 8 - 2
"""A launch on a GPU passes 4,096 bytes of parameters (CUDA C++ programming guide): a pointer to each array,
and two of the compiler's own."""

_SHIFTS = frozenset({"slice", "split", "concatenate", "pad"})
_GENERATORS = frozenset({"random_bits"})
_BRANCHED_INDICES = 1 << 10
"""XLA's ``kMaxBasicBlockSplitsPerFusion`` is 10, and each split doubles the code (``GpuHloCostAnalysis``)."""

for _backend in (
    Backend(
        "mosaic_tpu",
        "fuseplan.codegen.mosaic_tpu.kernel",
        lane_tiles=True,
        matmul_tiles=(128, 256, 512, 1024),  # the systolic array of a TPU has 128 rows
        depth_tiles=(128, 256, 512, 1024),
        held_tiles=(2048, 4096),  # weights that fit whole into VMEM are read once
        # One core runs all steps, and each step has a fixed cost. So the largest blocks that fit into VMEM
        # (16 MiB or more) are best.
        contiguous_tiles=(32, 128, 512, 2048, 8192, 32768, 131072),
        transpose_tiles=(32, 64, 128, 512, 1024),
        row_tiles=(1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        outer_tiles=(1, 4, 16, 64),
        stream_tiles=(8, 64, 256, 1024, 4096, 16384, 65536),
        accumulates_in_memory=True,
        loop_movers=_SHIFTS - {"pad"},
        loop_generators=_GENERATORS,
        loops_move_computed=False,
        loop_products=frozenset({"dot_general"}),
        batches_lead=True,
    ),
    Backend(
        "triton",
        "fuseplan.codegen.triton.kernel",
        in_registers=True,
        power_of_two_tiles=True,
        max_arrays=_POINTERS,
        gathers_blocks=True,
        loads_by_index=True,
        most_elements=_WARP_TILE,
        most_elements_in_passes=_FEW_WARPS_TILE,
        matmul_tiles=(32, 64, 128, 256),
        depth_tiles=(32, 64, 128, 256, 512),
        least_dot_tile=16,  # mma.m16n8k16
        loops_inside=True,
        splits_reductions=True,
        ignores_unit_dims=True,
        relayouts_operands=True,
        scans_by_joining=True,
        loop_movers=_SHIFTS | {"gather", "rev", "dynamic_slice"},
        loop_generators=_GENERATORS,
        loop_scatters=True,
        loop_reductions=True,
        loop_indices=_BRANCHED_INDICES,
        fuses_epilogues=True,
        reduction_loop_kernels=2,
    ),
    Backend(
        "mosaic_gpu",
        "fuseplan.codegen.mosaic_gpu.kernel",
        in_registers=True,
        warpgroup_blocks=True,
        max_arrays=_POINTERS,
        matmul_tiles=(64, 128, 256),
        depth_tiles=(64, 128),
        regroups_elements=False,
        exchanges_bool=False,
        fuses_operands=False,
        walks_in_passes=False,
        loop_movers=_SHIFTS | {"gather", "rev", "dynamic_slice"},
        loop_generators=_GENERATORS,
        loop_scatters=True,
        loop_reductions=True,
        loop_indices=_BRANCHED_INDICES,
        fuses_epilogues=True,
        reduction_loop_kernels=2,
    ),
    Backend("xla", "fuseplan.codegen.xla", emits_kernels=False),
    Backend(
        "loops",
        "fuseplan.codegen.cpu_loops.kernel",
        loop_nest=True,
        # A matrix product of smaller tiles is dominated by overhead; larger tiles gain nothing.
        pass_tiles=(64, 128, 256, 512, 1024, 2048, 4096),
    ),
):
    register_backend(_backend)
