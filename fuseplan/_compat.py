"""The few names of JAX that have no public home, each with its reason.

``tests/test_compat.py`` exercises every one of them on each supported JAX.
"""

from __future__ import annotations

import inspect
from typing import Any

from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.lax.lax import optimization_barrier_p
from jax._src.sharding_impls import UnspecifiedValue as _UnspecifiedValue
from jax.extend import core as jex_core

__all__ = [
    "all_unspecified",
    "eval_jaxpr",
    "interpret_gpu",
    "load_gmem",
    "optimization_barrier_p",
    "scope_names",
    "source_line",
    "store_gmem",
]


def source_line(source_info: Any) -> str:
    """``file:line (function)`` of an equation's ``source_info``.

    ``jax.extend`` shows the traceback but not the rule that skips JAX's own frames.
    """
    return _source_info_util.summarize(source_info)


def scope_names(source_info: Any) -> tuple[str, ...]:
    """The ``jax.named_scope``s around an equation, outermost first, without the transformations
    (``jvp``, ``vmap``) that stand between them.

    ``jax.extend`` has no name for an equation's name stack.
    """
    stack = source_info.name_stack.stack
    return tuple(entry.name for entry in stack if isinstance(entry, _source_info_util.Scope))


def all_unspecified(shardings: Any) -> bool:
    """Whether a nested ``jit``'s shardings were left open, so that inlining it loses none.

    ``jax.jit`` records "not given" as a private sentinel.
    """
    return all(isinstance(s, _UnspecifiedValue) for s in shardings)


def eval_jaxpr(jaxpr: jex_core.Jaxpr, consts: Any, *args: Any) -> list[Any]:
    """Evaluate an open jaxpr on values; ``jax.core.eval_jaxpr`` is deprecated."""
    return _core.eval_jaxpr(jaxpr, consts, *args)


def load_gmem(ref: Any, layout: Any) -> Any:
    """A block of an array in global memory, dealt to the threads of a Mosaic GPU kernel.

    JAX 0.10 wants an index beside the reference.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def store_gmem(ref: Any, block: Any) -> None:
    """Write a block to global memory, straight from the registers of a Mosaic GPU kernel.

    JAX 0.10 does so with a plain assignment, which is refused since as slow.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, block, optimized=False)
    else:
        ref[...] = block


def interpret_gpu(*, detect_races: bool) -> Any:
    """The settings under which a Mosaic GPU kernel is interpreted on any device.

    JAX 0.10 has them under a private name.
    """
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=detect_races)
