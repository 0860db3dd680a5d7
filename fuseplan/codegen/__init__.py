"""Emit: a kernel of a plan becomes a function of arrays, one module a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from costmodel.kernel import KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.support.errors import UnknownNameError

Emitter = Callable[..., Callable[..., tuple[Any, ...]]]

_MODULES = {
    "xla": "fuseplan.codegen.xla",
    "loops": "fuseplan.codegen.cpu_loops.kernel",
    "mosaic_gpu": "fuseplan.codegen.mosaic_gpu.kernel",
    "mosaic_tpu": "fuseplan.codegen.mosaic_tpu.kernel",
    "triton": "fuseplan.codegen.triton.kernel",
}


def backends() -> tuple[str, ...]:
    """The names of the kernel backends."""
    return tuple(_MODULES)


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: Any = False) -> Callable[..., tuple[Any, ...]]:
    """The function that computes one kernel of a plan.

    It takes the arrays of ``emit.body.live_ins(spec)``, the distinct values that the kernel
    reads in order of first appearance, and returns those of ``spec.writes``, in order.
    Nothing is traced until it is called. ``interpret=True`` runs Pallas kernels on any
    device, slowly; those for a TPU also with the ``InterpretParams`` of
    ``jax.experimental.pallas.tpu``, which tell races. XLA groups ignore it. Raises
    ``UnknownNameError`` for a backend that is not known.
    """
    if spec.backend not in _MODULES:
        raise UnknownNameError(
            f"expected a kernel for one of {', '.join(_MODULES)}, got one for {spec.backend!r}. "
            "Use a device whose backend is among them."
        )
    # Imported on demand: Pallas takes a third of a second, and each process needs one backend.
    module = importlib.import_module(_MODULES[spec.backend])
    emitter: Emitter = module.emit
    return emitter(spec, lowered, interpret=interpret)
