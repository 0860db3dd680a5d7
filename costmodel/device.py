"""``DeviceSpec``: the memory sizes, bandwidths and compute rates of a device; and the time of work at a rate.

All figures are integers, so that a plan does not depend on the machine that makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from costmodel.backends import Backend, backend_of
from costmodel.device_fields import InvalidDeviceError, check_fields
from costmodel.device_toml import read_fields, written

TRANSPOSED = " transposed"
"""Follows the dtype of a contraction's operands of which one does not lie along the contracted dimension."""

# Prefixes of dtypes without a matrix rate of their own, and the types whose rate applies: a dtype that no
# matrix unit takes is converted to the next wider one that has a rate.
_MATRIX_FALLBACK = (
    ("float8", ("float8", "float16", "bfloat16")),
    ("float4_", ("float8", "float16", "bfloat16")),
    ("float6_", ("float8", "float16", "bfloat16")),
    ("complex64", ("float32",)),
    ("complex128", ("float64",)),
    ("uint8", ("int8",)),
    ("int4", ("int8",)),
    ("uint4", ("int8",)),
    ("int2", ("int8",)),
    ("uint2", ("int8",)),
)


PS_PER_S = 10**12


def time_ps(amount: int, rate: int) -> int:
    """Picoseconds that ``amount`` takes at ``rate`` per second, rounded up; 0 for a rate of 0.

    Rounding up keeps sums monotone: the sum of rounded parts is no less than the rounded sum.

    Example:
        >>> time_ps(3, 2), time_ps(1, 3 * 10**12), time_ps(5, 0)
        (1500000000000, 1, 0)
    """
    return -(-amount * PS_PER_S // rate) if rate else 0


def bytes_in(time: int, bytes_per_s: int) -> int:
    """The bytes that move in ``time`` picoseconds."""
    return time * bytes_per_s // PS_PER_S


class UnknownDeviceError(ValueError):
    """The name of a device is unknown. The message lists the known names."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The figures of one device that the cost model uses.

    ``_per_s`` rates are of the whole device; ``onchip_bytes`` and ``register_bytes`` are
    of one core (a GPU's SM, a TPU's TensorCore, a CPU's core).

    Raises:
        InvalidDeviceError: a field is outside its range (``costmodel.device_fields.FIELDS``), or
            two fields contradict each other. ``dataclasses.replace`` checks the fields, too.
    """

    name: str
    description: str
    platform: str
    """``gpu``, ``tpu`` or ``cpu``."""
    backend: str
    """The name of the code generator of fused kernels, one of ``costmodel.backends.backend_names()``. A CPU
    has ``xla``, and its loops are kernels of ``loops`` beside it."""
    core_count: int
    hbm_capacity_bytes: int
    hbm_bytes_per_s: int
    cache_bytes: int
    """The cache that all cores share (L2 of a GPU, L3 of a CPU); 0 where there is none."""
    cache_bytes_per_s: int
    onchip_bytes: int
    """On-chip memory that one kernel may use on a core: shared memory, VMEM, or a CPU's caches."""
    register_bytes: int
    """The register file of one core; 0 where registers do not limit a kernel."""
    launch_ps: int
    """The time to dispatch one kernel inside a running program."""
    matrix_flops_per_s: tuple[tuple[str, int], ...]
    """(dtype of the operands, rate); ``matrix_rate`` resolves every other dtype. The rate of a dtype
    followed by ``TRANSPOSED`` is of a tiled kernel that transposes an operand on its way to the matrix
    unit."""
    vector_flops_per_s: int
    transcendental_per_s: int
    sequential_grid: bool = False
    """Grid steps run in order on a core, and a block whose index did not change since the
    last step is not fetched again (the TPU's pipeline)."""
    private_cache_bytes: int = 0
    """The private caches of all cores together (a CPU's L2); 0 where the cores have none beside
    ``onchip_bytes``."""
    private_cache_bytes_per_s: int = 0
    fresh_bytes_per_s: int = 0
    """The rate at which a program touches new pages of memory for the first time; 0 where memory is
    allocated once and reused."""
    reduction_per_s: int = 0
    """Elements per second that a reduction along a row adds up from cache; 0 where reductions run at
    ``vector_flops_per_s``."""
    reduction_row_ps: int = 0
    """The time that a sum or an extremum takes for each row, beside that of the row's elements: what a CPU's
    library does before and after a row."""
    step_ps: int = 0
    """The overhead of one iteration of a loop in an XLA program, beside its kernels."""
    grid_step_ps: int = 400_000
    """The overhead of one step of a sequential grid: index arithmetic, semaphores and DMA descriptors. The
    default is that of a TPU v5e by the cycle estimates of its compiler: a 4096x1024 float32 rmsnorm in 512
    steps and in 16 differ by 655 cycles at 1.5 GHz a step, work included."""
    hbm_latency_ps: int = 600_000
    """The time that a GPU's tile waits for a load from HBM. The default is about twice the unloaded latency
    of 480 cycles (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024), and
    more, for a loaded memory."""
    handoff_ps: int = 6_000_000
    """The time in which a CPU hands a kernel to all cores and waits for them. The default is measured on two
    cores (jax 0.10): 5 us in a loop of similar kernels, up to 20 us where two thread pools alternate."""
    large_bytes: int = 0
    """Bytes of an intermediate from which on a kernel gains by keeping it on chip, tile by tile. 0 stands for
    twice the private caches, and at least 2 MiB."""
    sources: tuple[tuple[str, str], ...] = ()
    """Pairs of a field and the source of its figure. The rate of one dtype is ``matrix_flops_per_s.DTYPE``.
    The source of a figure that is neither measured nor published starts with ``assumed``."""
    cost_model: ClassVar[Any] = None
    """The user's cost model, a ``costmodel.model.CostModel``, of a device that has one."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> DeviceSpec:
        """Read a device from a TOML file, as ``to_toml`` writes it.

        A field with a default may be missing. Numbers are integers, or whole fractions such as ``4.8e12``.

        Raises:
            OSError: the file cannot be read.
            InvalidDeviceError: it is not TOML, a field is unknown or missing, or a value is outside its
                range. The message names the file, the field and the accepted range.

        Example:
            >>> import pathlib, tempfile
            >>> from costmodel.devices import get_device
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "mine.toml")
            ...     text = get_device("h200").to_toml().replace('name = "h200"', 'name = "mine"')
            ...     _ = path.write_text(text, encoding="utf-8")
            ...     DeviceSpec.from_toml(path).core_count
            132
        """
        try:
            return cls(**read_fields(Path(path), cls))
        except InvalidDeviceError as error:
            raise InvalidDeviceError(error.field, error.problem, str(path)) from None

    def to_toml(self) -> str:
        """The device as the text of a TOML file, with the unit of each number; fields that have their default
        are left out.

        Example:
            >>> from costmodel.devices import get_device
            >>> print(get_device("h200").to_toml().splitlines()[4])
            core_count = 132  # cores
        """
        return written(self)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The fields whose figures are assumed: neither measured on the device nor published.

        Example:
            >>> from costmodel.devices import get_device
            >>> get_device("b200").assumed
            ('cache_bytes_per_s',)
        """
        return tuple(name for name, text in self.sources if text.startswith("assumed"))

    @property
    def least_large_bytes(self) -> int:
        """``large_bytes``, or what 0 stands for.

        Example:
            >>> from costmodel.devices import get_device
            >>> get_device("h200").least_large_bytes
            2097152
        """
        return self.large_bytes or 2 * max(self.private_cache_bytes, 2**20)

    @property
    def block_limit_bytes(self) -> int:
        """Bytes that the blocks of one tile may occupy on a core: half of the registers, as in
        ``onchip.Footprint.fits``, or the on-chip memory where registers do not limit a kernel."""
        return self.register_bytes // 2 or self.onchip_bytes

    def matrix_rate(self, dtype: str) -> int:
        """Flops a second of a contraction with operands of ``dtype``, which may end in ``TRANSPOSED``. A type
        without a matrix unit runs on the vector unit.

        Example:
            >>> from costmodel.devices import TEST_DEVICE
            >>> TEST_DEVICE.matrix_rate("bfloat16") // TEST_DEVICE.matrix_rate("float32")
            2
        """
        rates, plain = dict(self.matrix_flops_per_s), dtype.removesuffix(TRANSPOSED)
        wider = (families for prefix, families in _MATRIX_FALLBACK if plain.startswith(prefix))
        known = (rates[name] for name in chain((dtype, plain), *wider) if name in rates)
        return next(known, self.vector_flops_per_s)

    @property
    def capabilities(self) -> Backend:
        """The capabilities of the device's backend."""
        return backend_of(self.backend)

    @property
    def ridge_point(self) -> float:
        """Matrix flops per HBM byte (bfloat16) above which a kernel is compute-bound."""
        return self.matrix_rate("bfloat16") / self.hbm_bytes_per_s

    def source(self, name: str) -> str:
        """The source of the figure in the field ``name``, or of the rate ``matrix_flops_per_s.DTYPE``."""
        known = dict(self.sources)
        return known.get(name) or known.get(name.partition(".")[0], "not stated")
