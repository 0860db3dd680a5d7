"""Estimate the time and memory traffic of a kernel on a device.

In: a ``Graph`` of operations, a ``KernelSpec`` (a group of operations and its schedule) and a ``DeviceSpec``.
Out: a ``Cost``. Uses the standard library and NumPy alone. Open ``graph`` and ``kernel`` for the data, then
``roofline``.
"""

from costmodel.device import DeviceSpec, UnknownDeviceError
from costmodel.device_fields import InvalidDeviceError
from costmodel.devices import DEVICES, TEST_DEVICE, backends_of, device_names, get_device, with_backend
from costmodel.graph import (
    DimMap,
    DimRole,
    Flops,
    Graph,
    GraphError,
    Node,
    OpKind,
    Value,
    check_graph,
    make_graph,
)
from costmodel.kernel import Access, Axis, AxisRole, Cost, KernelSpec, block_shape
from costmodel.memory import peak_bytes
from costmodel.model import CostModel, CostModelError
from costmodel.onchip import Footprint, footprint, onchip_bytes
from costmodel.roofline import estimate
from costmodel.traffic import Traffic, bytes_moved

__all__ = [
    "DEVICES",
    "TEST_DEVICE",
    "Access",
    "Axis",
    "AxisRole",
    "Cost",
    "CostModel",
    "CostModelError",
    "DeviceSpec",
    "DimMap",
    "DimRole",
    "Flops",
    "Footprint",
    "Graph",
    "GraphError",
    "InvalidDeviceError",
    "KernelSpec",
    "Node",
    "OpKind",
    "Traffic",
    "UnknownDeviceError",
    "Value",
    "backends_of",
    "block_shape",
    "bytes_moved",
    "check_graph",
    "device_names",
    "estimate",
    "footprint",
    "get_device",
    "make_graph",
    "onchip_bytes",
    "peak_bytes",
    "with_backend",
]
