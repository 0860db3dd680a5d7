"""The table of devices, with the source of every figure, and the look-up by name.

Rates are the published peaks of dense (not 2:4 sparse) arithmetic. No kernel reaches them, but all plans of a
function are priced by the same peaks.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from costmodel.calibrate import cached_cpu
from costmodel.device import TRANSPOSED, DeviceSpec, UnknownDeviceError

_KIB = 1024
_MIB = 1024 * _KIB
_GB = 10**9
_TERA = 10**12
_US_PS = 10**6

# A jitted program launches its kernels from a CUDA graph (XLA command buffers); a launch from the host costs
# 2-3 us.
_GPU_LAUNCH_PS = 1 * _US_PS
_GPU_LAUNCH_SOURCE = (
    "XLA's kKernelLaunchOverhead (xla/service/gpu/model/gpu_performance_model_base.h): 1 us, "
    "the gap between kernels of one CUDA graph"
)

_TF32_SOURCE = "dense rates; float32 operands run as TF32, the default precision of XLA on GPUs"
_TRANSPOSED_SOURCE = (
    "measured on an H200: 69 Tflop/s of a gated MLP and 53 of an MLP in one Triton kernel each; wgmma reads "
    "operands of 32 bits along the contracted dimension alone (PTX ISA)"
)
_SMEM_SOURCE = "CUDA C++ programming guide, compute capabilities: maximum shared memory a block (opt-in)"
_REGISTER_SOURCE = "CUDA C++ programming guide: 64 Ki 32-bit registers per SM"
_MUFU_SOURCE = "CUDA C++ programming guide, arithmetic instructions: 16 a clock and SM, at boost clock"


def _nvidia(
    name: str,
    description: str,
    *,
    sms: int,
    boost_mhz: int,
    datasheet: str,
    hbm: tuple[int, int],
    cache: tuple[int, int, str],
    smem_kib: int,
    tflops: dict[str, float],
    vector_tflops: float,
) -> DeviceSpec:
    """``hbm`` is (bytes, bytes per second), ``cache`` is (bytes, bytes per second, source)."""
    return DeviceSpec(
        name=name,
        description=description,
        platform="gpu",
        backend="triton",
        core_count=sms,
        hbm_capacity_bytes=hbm[0],
        hbm_bytes_per_s=hbm[1],
        cache_bytes=cache[0],
        cache_bytes_per_s=cache[1],
        onchip_bytes=smem_kib * _KIB,
        register_bytes=256 * _KIB,
        launch_ps=_GPU_LAUNCH_PS,
        matrix_flops_per_s=tuple((d, round(t * _TERA)) for d, t in tflops.items()),
        vector_flops_per_s=round(vector_tflops * _TERA),
        transcendental_per_s=sms * 16 * boost_mhz * 10**6,
        sources=(
            ("core_count", datasheet),
            ("hbm_capacity_bytes", datasheet),
            ("hbm_bytes_per_s", datasheet),
            ("cache_bytes", datasheet),
            ("cache_bytes_per_s", cache[2]),
            ("onchip_bytes", _SMEM_SOURCE),
            ("register_bytes", _REGISTER_SOURCE),
            ("launch_ps", _GPU_LAUNCH_SOURCE),
            ("matrix_flops_per_s", f"{datasheet}; {_TF32_SOURCE}"),
            *((f"matrix_flops_per_s.{d}", _TRANSPOSED_SOURCE) for d in tflops if d.endswith(TRANSPOSED)),
            ("vector_flops_per_s", f"{datasheet}; non-tensor FP32, a fused multiply-add counted as two"),
            ("transcendental_per_s", f"{_MUFU_SOURCE} ({boost_mhz} MHz)"),
        ),
    )


_BENCHES = "measured: github.com/te42kyfo/gpu-benches, gpu-l2-cache"

_HOPPER_TFLOPS = {
    "float32": 494.7,
    f"float32{TRANSPOSED}": 65,
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8": 1978.9,
    "int8": 1978.9,
    "float64": 66.9,
}

_GPUS = (
    _nvidia(
        "a100",
        "NVIDIA A100 SXM 80GB",
        sms=108,
        boost_mhz=1410,
        datasheet="NVIDIA A100 datasheet and Ampere architecture whitepaper",
        hbm=(80 * _GB, 2039 * _GB),
        cache=(40 * _MIB, 5400 * _GB, f"{_BENCHES}/a100_80.txt, 2 to 28 MB"),
        smem_kib=163,
        tflops={"float32": 156, "bfloat16": 312, "float16": 312, "int8": 624, "float64": 19.5},
        vector_tflops=19.5,
    ),
    _nvidia(
        "h100",
        "NVIDIA H100 SXM 80GB",
        sms=132,
        boost_mhz=1830,
        datasheet="NVIDIA H100 datasheet and Hopper architecture whitepaper",
        hbm=(80 * _GB, 3350 * _GB),
        cache=(50 * _MIB, 9700 * _GB, f"{_BENCHES}/h200.txt, 12 to 40 MB: the same die and clock"),
        smem_kib=227,
        tflops=_HOPPER_TFLOPS,
        vector_tflops=66.9,
    ),
    _nvidia(
        "h200",
        "NVIDIA H200 SXM 141GB",
        sms=132,
        boost_mhz=1830,
        datasheet="NVIDIA H200 datasheet and Hopper architecture whitepaper",
        hbm=(141 * _GB, 4800 * _GB),
        cache=(50 * _MIB, 9700 * _GB, f"{_BENCHES}/h200.txt, 12 to 40 MB"),
        smem_kib=227,
        tflops=_HOPPER_TFLOPS,
        vector_tflops=66.9,
    ),
    _nvidia(
        "b200",
        "NVIDIA B200 SXM 180GB",
        sms=148,
        boost_mhz=1965,
        datasheet="NVIDIA HGX B200 datasheet, an eighth of it, and Blackwell architecture brief",
        hbm=(180 * _GB, 8000 * _GB),
        cache=(126 * _MIB, 10_900 * _GB, "assumed: H200's measured 9.7 TB/s times 148/132 SMs"),
        smem_kib=227,
        tflops={
            "float32": 1125,
            "bfloat16": 2250,
            "float16": 2250,
            "float8": 4500,
            "int8": 4500,
            "float64": 37,
        },
        vector_tflops=75,
    ),
    _nvidia(
        "l4",
        "NVIDIA L4 24GB",
        sms=58,
        boost_mhz=2040,
        datasheet="NVIDIA L4 datasheet and Ada architecture whitepaper",
        hbm=(24 * _GB, 300 * _GB),
        cache=(48 * _MIB, 2100 * _GB, f"{_BENCHES}/l40.txt: 5.2 TB/s, times 58/142 SMs"),
        smem_kib=99,
        tflops={"float32": 60, "bfloat16": 121, "float16": 121, "float8": 242, "int8": 242, "float64": 0.47},
        vector_tflops=30.3,
    ),
    _nvidia(
        "rtx4090",
        "NVIDIA GeForce RTX 4090 24GB",
        sms=128,
        boost_mhz=2520,
        datasheet="NVIDIA Ada architecture whitepaper, GeForce RTX 4090 (FP32 accumulation)",
        hbm=(24 * _GB, 1008 * _GB),
        cache=(72 * _MIB, 4700 * _GB, f"{_BENCHES}/l40.txt: 5.2 TB/s of the same die, times 128/142 SMs"),
        smem_kib=99,
        tflops={
            "float32": 82.6,
            "bfloat16": 165.2,
            "float16": 165.2,
            "float8": 330.3,
            "int8": 660.6,
            "float64": 1.29,
        },
        vector_tflops=82.6,
    ),
)


def _tpu(
    name: str,
    description: str,
    *,
    cores: int,
    clock_mhz: int,
    hbm: tuple[int, int],
    vmem_mib: int,
    bf16_tflops: int,
    int8_tops: int = 0,
    float8_tflops: int = 0,
) -> DeviceSpec:
    """``hbm`` is (bytes, bytes per second) of the chip."""
    bf16 = bf16_tflops * _TERA
    # float32 operands run as one bfloat16 pass: jax_default_matmul_precision on TPUs.
    rates = [("float32", bf16), ("bfloat16", bf16), ("float16", bf16)]
    if int8_tops:
        rates.append(("int8", int8_tops * _TERA))
    if float8_tflops:
        rates.append(("float8", float8_tflops * _TERA))
    lanes_per_s = cores * 8 * 128 * clock_mhz * 10**6
    datasheet = "Google Cloud TPU documentation, system architecture"
    return DeviceSpec(
        name=name,
        description=description,
        platform="tpu",
        backend="mosaic_tpu",
        core_count=cores,
        hbm_capacity_bytes=hbm[0],
        hbm_bytes_per_s=hbm[1],
        cache_bytes=0,
        cache_bytes_per_s=0,
        onchip_bytes=vmem_mib * _MIB,
        register_bytes=0,
        launch_ps=_US_PS,
        matrix_flops_per_s=tuple(rates),
        vector_flops_per_s=4 * lanes_per_s,
        transcendental_per_s=lanes_per_s,
        sequential_grid=True,
        sources=(
            ("core_count", f"{datasheet}: TensorCores a chip; two run as one device (megacore)"),
            ("hbm_capacity_bytes", datasheet),
            ("hbm_bytes_per_s", datasheet),
            ("cache_bytes", "none: HBM is read into VMEM by explicit copies"),
            ("onchip_bytes", "measured: the compiler's default scoped VMEM limit (CompileTimeScopedVmemOom)"),
            ("register_bytes", "not a limit: 64 vector registers a core, spilled to VMEM"),
            ("launch_ps", "assumed: 1 us between kernels, the size of one DMA's latency"),
            ("matrix_flops_per_s", f"{datasheet}; float32 runs as one bfloat16 pass, JAX's default"),
            (
                "vector_flops_per_s",
                f"assumed: 8x128 lanes x 4 ALUs at {clock_mhz} MHz a core ('How to scale your model', TPUs)",
            ),
            (
                "transcendental_per_s",
                f"assumed: one 8x128 result a clock from the transcendental unit at {clock_mhz} MHz",
            ),
        ),
    )


_TPUS = (
    _tpu(
        "tpu_v4",
        "Google TPU v4",
        cores=2,
        clock_mhz=1050,
        hbm=(32 * _GB, 1228 * _GB),
        vmem_mib=16,
        bf16_tflops=275,
    ),
    _tpu(
        "tpu_v5e",
        "Google TPU v5e",
        cores=1,
        clock_mhz=1500,
        hbm=(16 * _GB, 819 * _GB),
        vmem_mib=16,
        bf16_tflops=197,
        int8_tops=394,
    ),
    _tpu(
        "tpu_v5p",
        "Google TPU v5p",
        cores=2,
        clock_mhz=1750,
        hbm=(95 * _GB, 2765 * _GB),
        vmem_mib=16,
        bf16_tflops=459,
        int8_tops=918,
    ),
    _tpu(
        "tpu_v6e",
        "Google TPU v6e (Trillium)",
        cores=1,
        clock_mhz=1750,
        hbm=(32 * _GB, 1640 * _GB),
        vmem_mib=32,
        bf16_tflops=918,
        int8_tops=1836,
        float8_tflops=918,
    ),
)


TEST_DEVICE = DeviceSpec(
    name="test",
    description="round numbers for tests: 1 TB/s, 100 Tflop/s, never recalibrated",
    platform="gpu",
    backend="triton",
    core_count=100,
    hbm_capacity_bytes=16 * 10**9,
    hbm_bytes_per_s=10**12,
    cache_bytes=32 * 2**20,
    cache_bytes_per_s=4 * 10**12,
    onchip_bytes=128 * 1024,
    register_bytes=256 * 1024,
    launch_ps=2 * _US_PS,
    matrix_flops_per_s=(
        ("float32", 100 * 10**12),
        ("bfloat16", 200 * 10**12),
        ("float16", 200 * 10**12),
        ("float8", 400 * 10**12),
        ("int8", 400 * 10**12),
        ("float64", 10 * 10**12),
    ),
    vector_flops_per_s=10 * 10**12,
    transcendental_per_s=2 * 10**12,
    sources=(("all", "chosen: round numbers near a 2020s data-centre GPU"),),
)


DEVICES: dict[str, DeviceSpec] = {d.name: d for d in (*_GPUS, *_TPUS, TEST_DEVICE)}
"""The devices with fixed figures, by name. ``cpu``, whose figures are measured, is not among them."""


def device_names() -> tuple[str, ...]:
    """The names that ``get_device`` accepts, ``cpu`` last."""
    return (*DEVICES, "cpu")


# Mosaic GPU needs Hopper: its matrix products use instructions that neither earlier nor later devices have.
_FURTHER_BACKENDS = {"h100": ("mosaic_gpu",), "h200": ("mosaic_gpu",)}


def backends_of(device: DeviceSpec) -> tuple[str, ...]:
    """The backends of a device, the default one first.

    Example:
        >>> backends_of(get_device("h200"))
        ('triton', 'mosaic_gpu')
    """
    own, _, _ = device.name.partition(":")
    further = _FURTHER_BACKENDS.get(own, ())
    base = DEVICES.get(own, device)
    return (base.backend, *further)


def with_backend(device: DeviceSpec, backend: str) -> DeviceSpec:
    """The device with another of its backends, named ``device:backend``; ``""`` stands for its own.

    Raises:
        UnknownDeviceError: the device has no such backend; the message lists those it has.
    """
    if backend in ("", device.backend):
        return device
    known = backends_of(device)
    if backend not in known:
        names = " or ".join(repr(f"{device.name}:{b}") for b in known)
        raise UnknownDeviceError(
            f"unknown backend {backend!r} of the device {device.name!r}: expected {names}"
        )
    return replace(device, name=f"{device.name}:{backend}", backend=backend)


def get_device(name: str | DeviceSpec) -> DeviceSpec:
    """The device ``name``, or ``name:backend`` with another of its backends (``backends_of``).

    ``cpu`` is this machine: NumPy measures it on first use, and a file keeps the figures
    (``costmodel.calibrate``). fuseplan uses the rates of XLA instead
    (``fuseplan.targets.calibrate.local_cpu``). A ``DeviceSpec`` is returned unchanged.

    Raises:
        UnknownDeviceError: no such device, or no such backend of it; the message lists all and
            the closest.

    Example:
        >>> get_device("h200").core_count
        132
        >>> get_device("h200:mosaic_gpu").backend
        'mosaic_gpu'
    """
    if isinstance(name, DeviceSpec):
        return name
    device, _, backend = str(name).partition(":")
    if device == "cpu":
        return with_backend(cached_cpu(), backend)
    if device in DEVICES:
        return with_backend(DEVICES[device], backend)
    known = device_names()
    close = difflib.get_close_matches(device.lower().replace("-", "_"), known, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UnknownDeviceError(
        f"unknown device {name!r}: expected one of {', '.join(known)}, or a DeviceSpec.{hint}"
    )
