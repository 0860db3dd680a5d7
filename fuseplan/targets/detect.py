"""Look up a device by name, or detect the one that JAX runs on by default."""

from __future__ import annotations

import re
import warnings

import jax

from costmodel.device import DeviceSpec
from costmodel.devices import get_device, with_backend
from fuseplan.support.errors import FuseplanWarning
from fuseplan.targets.calibrate import local_cpu, unmeasured_cpu

# Words of jax.Device.device_kind, in lower case, and the names of the devices.
_KINDS = {
    "a100": "a100",
    "h100": "h100",
    "h200": "h200",
    "b200": "b200",
    "gb200": "b200",  # the same chip
    "l4": "l4",
    "rtx 4090": "rtx4090",
    "tpu v4": "tpu_v4",
    "tpu v5 lite": "tpu_v5e",
    "tpu v5e": "tpu_v5e",
    "tpu v5p": "tpu_v5p",
    "tpu v5": "tpu_v5p",
    "tpu v6 lite": "tpu_v6e",
    "tpu v6e": "tpu_v6e",
}
_NEAREST = {"gpu": "h100", "tpu": "tpu_v5e"}


def local_platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``: the platform of JAX's default backend."""
    return _platform(jax.default_backend())


def find_device(name: str | DeviceSpec) -> DeviceSpec:
    """``costmodel.get_device``, where ``cpu`` has the rates of XLA.

    Raises:
        costmodel.UnknownDeviceError: no such device, or no such backend of it.
    """
    device, _, backend = str(name).partition(":")
    return with_backend(local_cpu(), backend) if device == "cpu" else get_device(name)


def unmeasured_device(device: str | DeviceSpec | None) -> str | DeviceSpec | None:
    """``device``, where this machine's CPU is replaced by ``unmeasured_cpu()``."""
    is_here = device == "cpu" or (device is None and local_platform() == "cpu")
    return unmeasured_cpu() if is_here else device


def local_device() -> DeviceSpec:
    """The device of JAX's default backend. An unknown one is replaced by a similar known device, with a
    warning."""
    return device_of(jax.devices()[0])


def device_of(device: jax.Device) -> DeviceSpec:
    """The description of one of JAX's devices. An unknown one is replaced by a similar known device, with a
    warning."""
    if device.platform == "cpu":
        return local_cpu()
    kind = device.device_kind.lower()
    for words, name in _KINDS.items():
        if re.search(rf"\b{words}\b", kind):  # whole words: an L40S is no L4
            return get_device(name)
    nearest = _NEAREST.get(_platform(device.platform), "cpu")
    warnings.warn(
        f"fuseplan does not know the device {kind!r} and plans for {nearest!r}; "
        "pass device= with a costmodel.DeviceSpec of your own to say what it can do",
        FuseplanWarning,
        stacklevel=3,
    )
    return find_device(nearest)


def _platform(name: str) -> str:
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
