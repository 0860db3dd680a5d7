"""Emit: a kernel of a plan becomes a function of arrays, one module a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from costmodel.backends import backend_names
from costmodel.kernel import KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.support.errors import UnknownNameError

Emitter = Callable[..., Callable[..., tuple[Any, ...]]]


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: Any = False) -> Callable[..., tuple[Any, ...]]:
    """The function that computes one kernel of a plan.

    It takes the arrays of ``emit.body.live_ins(spec)``, the distinct values that the kernel
    reads in order of first appearance, and returns those of ``spec.writes``, in order.
    Nothing is traced until it is called. ``interpret=True`` runs Pallas kernels on any
    device, slowly; those for a TPU also with the ``InterpretParams`` of
    ``jax.experimental.pallas.tpu``, which tell races. XLA groups ignore it. Raises
    ``UnknownNameError`` for a backend that is not known.
    """
    if spec.backend not in backend_names():
        raise UnknownNameError(
            f"expected a kernel for one of {', '.join(backend_names())}, got one for {spec.backend!r}. "
            "Use a device whose backend is among them."
        )
    # Imported on demand: Pallas takes a third of a second, and each process needs one backend.
    module = importlib.import_module(spec.capabilities.emitter)
    emitter: Emitter = module.emit
    return emitter(spec, lowered, interpret=interpret)
