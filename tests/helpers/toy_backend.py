"""A backend of its own: each group runs as JAX's operations on whole arrays, and is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costmodel.kernel import KernelSpec
from fuseplan.codegen import xla
from fuseplan.frontend.lower import Lowered

EMITTED: list[KernelSpec] = []


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    EMITTED.append(spec)
    return xla.emit(spec, lowered)
