"""``DeviceSpec``: what a device can move, hold and compute, in integers with their units in the names."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.backends import Backend, backend_of
from costmodel.device_fields import check_fields

# How a dtype finds its matrix rate: exact name first, then the family whose unit runs it.
# A type that no unit takes natively is converted to the next wider one that has a rate.
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


class UnknownDeviceError(ValueError):
    """No device of that name is known: the message lists those that are."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device as the cost model sees it.

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
    """What fused kernels are written in: ``triton``, ``mosaic_gpu``, ``mosaic_tpu`` or ``xla``."""
    core_count: int
    hbm_capacity_bytes: int
    hbm_bytes_per_s: int
    cache_bytes: int
    """The cache that all cores share (L2 of a GPU, L3 of a CPU); 0 where there is none."""
    cache_bytes_per_s: int
    onchip_bytes: int
    """What one kernel may use on a core: shared memory, VMEM, or a CPU core's own L2."""
    register_bytes: int
    """The register file of one core; 0 where it is not what limits a kernel."""
    launch_ps: int
    """What dispatching one kernel costs, inside a program that runs."""
    matrix_flops_per_s: tuple[tuple[str, int], ...]
    """(dtype of the operands, rate); ``matrix_rate`` resolves every other dtype."""
    vector_flops_per_s: int
    transcendental_per_s: int
    sequential_grid: bool = False
    """Grid steps run in order on a core, and a block whose index did not change since the
    last step is not fetched again (the TPU's pipeline)."""
    private_cache_bytes: int = 0
    """The caches that each core has to itself (a CPU's L2), of all cores together; 0 where
    a kernel's on-chip memory is all that a core has."""
    private_cache_bytes_per_s: int = 0
    fresh_bytes_per_s: int = 0
    """How fast memory is touched that no program has touched before, page by page; 0 where
    memory is allocated once for all."""
    reduction_per_s: int = 0
    """Elements a second that the sum of a row takes in where they come from cache; 0 where
    reductions are vector operations like any other."""
    step_ps: int = 0
    """What one turn of a loop inside an XLA program costs beside its kernels."""
    sources: tuple[tuple[str, str], ...] = ()
    """(field, the source of its number). The rate of one dtype is ``matrix_flops_per_s.DTYPE``. The
    source of a number that is neither measured nor published starts with ``assumed``."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The fields whose numbers are assumed: neither measured on the device nor published.

        Example:
            >>> get_device("b200").assumed
            ('cache_bytes_per_s',)
        """
        return tuple(name for name, text in self.sources if text.startswith("assumed"))

    @property
    def block_limit_bytes(self) -> int:
        """What the blocks of one tile may occupy on a core: half of the registers, as in
        ``memory.Footprint.fits``, or on-chip memory where there are none."""
        return self.register_bytes // 2 or self.onchip_bytes

    def matrix_rate(self, dtype: str) -> int:
        """Flops a second of a contraction with operands of ``dtype``. A type without a
        matrix unit runs on the vector unit.

        Example:
            >>> TEST_DEVICE.matrix_rate("bfloat16") // TEST_DEVICE.matrix_rate("float32")
            2
        """
        for name, rate in self.matrix_flops_per_s:  # a scan of six beats building a dict
            if name == dtype:
                return rate
        rates = dict(self.matrix_flops_per_s)
        for prefix, families in _MATRIX_FALLBACK:
            if dtype.startswith(prefix):
                for family in families:
                    if family in rates:
                        return rates[family]
        return self.vector_flops_per_s

    @property
    def capabilities(self) -> Backend:
        """What kernels of its backend can do."""
        return backend_of(self.backend)

    @property
    def ridge_point(self) -> float:
        """Matrix flops per HBM byte (bfloat16) above which a kernel is compute-bound."""
        return self.matrix_rate("bfloat16") / self.hbm_bytes_per_s

    def source(self, name: str) -> str:
        """Where the number in the field ``name`` comes from; ``matrix_flops_per_s.DTYPE`` is one
        dtype's, where that differs from the others'."""
        known = dict(self.sources)
        return known.get(name) or known.get(name.partition(".")[0], "not stated")
