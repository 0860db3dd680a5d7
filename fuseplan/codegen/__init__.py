"""Emit a kernel of a plan as a function of arrays, one module for each backend.

In: a ``KernelSpec`` and the lowered program. Out: a function of the arrays that the kernel reads. ``tile``,
``single_pass`` and ``pass_evaluator`` are shared by all backends. Open ``single_pass`` first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from costmodel.backends import backend_names
from costmodel.kernel import KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.support.errors import UnknownNameError

Emitter = Callable[..., Callable[..., tuple[Any, ...]]]


def emit(
    spec: KernelSpec, lowered: Lowered, *, interpret: Any = False, **options: Any
) -> Callable[..., tuple[Any, ...]]:
    """The function that computes one kernel of a plan.

    It takes the arrays of ``single_pass.live_ins(spec)``, the distinct values that the kernel reads in order
    of first appearance, and returns those of ``spec.writes``, in order. Nothing is traced until it is called.
    ``interpret=True`` runs Pallas kernels on any device, slowly; TPU kernels also take the
    ``InterpretParams`` of ``jax.experimental.pallas.tpu``, which detect races. XLA groups ignore it.
    Loops of a CPU also take a ``part``, which they are of a larger loop nest.

    Raises:
        UnknownNameError: the backend is not registered.
    """
    if spec.backend not in backend_names():
        raise UnknownNameError(
            f"expected a kernel for one of {', '.join(backend_names())}, got one for {spec.backend!r}. "
            "Use a device whose backend is among them."
        )
    # Imported on demand: Pallas takes a third of a second to import, and a process needs one backend.
    module = importlib.import_module(spec.capabilities.emitter)
    emitter: Emitter = module.emit
    return emitter(spec, lowered, interpret=interpret, **options)
