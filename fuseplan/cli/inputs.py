"""Load what a user names on the command line: workloads, devices and modules with planners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from costmodel.device import DeviceSpec
from fuseplan.cli.arguments import names_in
from fuseplan.planners import import_planners
from fuseplan.settings import read_device, resolve_device
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads import load_workload


def load(workload: str, dtype: str, small: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Build a workload: a function and its arguments. Raises as ``load_workload`` and ``Workload.build``."""
    return load_workload(workload).build(dtype, small=small)


def load_planners(modules: Sequence[str] | None) -> None:
    """Import the modules of ``--planner-module``."""
    for module in modules or ():
        import_planners(module)


def device_of(name: str | None, file: Path | None, otherwise: str | None = None) -> str | DeviceSpec | None:
    """The device of ``--device`` or ``--device-file``, or ``otherwise``. Raises ``InvalidArgumentError`` if
    both are given."""
    if name is not None and file is not None:
        raise InvalidArgumentError(f"--device {name} and --device-file {file}: expected one of the two")
    return read_device(file) if file is not None else otherwise if name is None else name


def devices_of(
    names: str | None, files: Sequence[Path] | None, otherwise: str | None = None
) -> list[DeviceSpec]:
    """The devices of ``--device`` and those of ``--device-file``; without either, ``otherwise``."""
    found: list[str | DeviceSpec | None] = []
    if names is not None:
        found += names_in(names, "--device")
    found += [read_device(file) for file in files or ()]
    return [resolve_device(device) for device in found or [otherwise]]
