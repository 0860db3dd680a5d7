"""Compile for a GPU or TPU without the device, from its description."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fuseplan.support.errors import FuseplanError, UnknownNameError


class MissingCompilerError(FuseplanError, ImportError):
    """The compiler of a platform is not installed on this machine."""


@dataclass(frozen=True, slots=True)
class Target:
    """The description of a device for its compiler: an XLA topology, and for a GPU a ``GpuTargetConfigProto``
    as text."""

    platform: str
    topology: str
    config: str = ""


def _hopper(name: str, bandwidth: int, memory: int) -> Target:
    """A ``GpuTargetConfigProto`` of compute capability 9.0; its fields are what CUDA's ``cudaDeviceProp``
    reports."""
    return Target(
        "cuda",
        "1x1x1",
        f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_core: 233472
          threads_per_core_limit: 2048
          core_count: 132
          fpus_per_core: 128
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {bandwidth}
          l2_cache_size: 52428800
          clock_rate_ghz: 1.98
          device_memory_size: {memory}
          shared_memory_per_block_optin: 232448
          cuda_compute_capability {{ major: 9 minor: 0 }}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{name}"
        """,
    )


# NVIDIA H200 and H100 data sheets (bandwidth, memory); CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability" (shared memory, registers, threads).
_TARGETS: dict[str, Target] = {
    "h200": _hopper("NVIDIA H200", 4_800_000_000_000, 150_754_820_096),
    "h100": _hopper("NVIDIA H100 80GB HBM3", 3_350_000_000_000, 85_520_809_984),
    "tpu_v5e": Target("tpu", "v5e:2x2"),
    "tpu_v6e": Target("tpu", "v6e:2x2"),
    "tpu_v5p": Target("tpu", "v5p:2x2x1"),
}


_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin")}
"""For each platform, the packages that contain its compiler."""


def targets() -> tuple[str, ...]:
    """The names of the devices that can be compiled for without the device."""
    return tuple(_TARGETS)


def _target(device: str) -> Target:
    # "h200:mosaic_gpu" is an H200 to the compiler.
    device = device.partition(":")[0]
    if device not in _TARGETS:
        raise UnknownNameError(
            f"expected a device to compile for among {', '.join(_TARGETS)}, got {device!r}. "
            "Plan for it without compiling, or compile on the device itself."
        )
    return _TARGETS[device]


def is_installed(device: str) -> bool:
    """Whether a package with the compiler of ``device`` is installed. Imports nothing."""
    return any(find_spec(name) is not None for name in _PACKAGES[_target(device).platform])


@cache
def topology_device(device: str) -> Any:
    """The compile-only ``jax.Device`` of ``device``.

    Raises ``MissingCompilerError`` where the platform's compiler is not installed, and
    ``UnknownNameError`` for other names.
    """
    target = _target(device)
    from jax.experimental import topologies

    options: dict[str, Any]
    if target.platform == "tpu":
        _prepare_libtpu()
        options = {"topology_name": target.topology}
    else:
        # Without a driver, its version cannot be checked.
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        options = {"target_config": target.config, "topology": target.topology}
    try:
        description = topologies.get_topology_desc(platform=target.platform, **options)
    except Exception as error:
        raise MissingCompilerError(
            f"expected the {target.platform} compiler of {device!r}, which could not start: {error}. "
            "Install it with `pip install 'fuseplan[aot]'`, and set JAX_PLATFORMS=cpu where there is no "
            "such device."
        ) from error
    return description.devices[0]


def _prepare_libtpu() -> None:
    """Set the environment variables that libtpu reads when it is loaded only to compile."""
    # By default it queries a metadata server for the machine type, which takes long to time out.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    if "tpu" not in (getattr(jax.config, "jax_platforms", None) or "tpu"):
        # Without access to a TPU, several processes may compile at a time.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def compile_for(f: Callable[..., Any], *avals: Any, device: str, **compiler_options: Any) -> Any:
    """Compile ``f`` for a device that need not be present.

    ``avals`` are arrays or ``ShapeDtypeStruct``s, pytrees of them too. Returns JAX's
    compiled object: ``memory_analysis()``, ``cost_analysis()`` and ``as_text()`` work,
    calling it does not. A kernel that the compiler refuses raises the compiler's error.

    Example (needs the extra ``aot``)::

        compile_for(jnp.sin, jax.ShapeDtypeStruct((8, 128), "float32"), device="tpu_v5e")
    """
    # The sharding of the results selects the device, also for a function without arguments.
    jitted = jax.jit(f, out_shardings=_placement(device))
    return lower_for(jitted, avals, {}, device).compile(compiler_options or None)


@cache
def compiler_for(device: str) -> Callable[[Callable[..., Any], Sequence[Any]], Any]:
    """``compile_for`` for ``device``, as a function of ``f`` and its arguments' shapes. The same object at
    each call."""
    return lambda f, avals: compile_for(f, *avals, device=device)


def lower_for(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Any:
    """Lower a ``jax.jit``ted function for a device that need not be present.

    Arrays and ``ShapeDtypeStruct``s among the arguments are placed on the device; others
    (static arguments, say) are passed on. Returns a ``jax.stages.Lowered``.
    """
    placement = _placement(device)

    def place(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        weak = bool(getattr(leaf, "weak_type", False))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement, weak_type=weak)

    args, kwargs = jax.tree.map(place, (args, kwargs))
    with jax.sharding.use_abstract_mesh(placement.mesh.abstract_mesh):
        return jitted.lower(*args, **kwargs)


def _placement(device: str) -> NamedSharding:
    """A sharding that puts whole arrays on ``device``."""
    devices = np.asarray([topology_device(device)], dtype=object)
    # Automatic axes: with explicit ones, lowering for a GPU needs its backend.
    return NamedSharding(Mesh(devices, ("device",), axis_types=(AxisType.Auto,)), PartitionSpec())
