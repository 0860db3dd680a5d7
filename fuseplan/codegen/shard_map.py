"""Kernels under ``jax.shard_map``: what a shard computes by itself is the same wherever it is.

JAX tracks which arrays differ between shards (``check_vma``). A kernel has no collectives, so that
its loops and its ``pallas_call`` need not know: it is traced without, and its results are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from fuseplan.frontend.trace import Primitive
from fuseplan.support import jax_compat

kernel_p = Primitive("kernel_of_a_shard")
kernel_p.multiple_results = True

Kernel = Callable[..., tuple[Any, ...]]


def apart(kernel: Kernel, out_avals: Sequence[Any]) -> Kernel:
    """``kernel``, or one that is traced apart where its results differ between shards."""
    if not any(map(jax_compat.varying_axes, out_avals)):
        return kernel
    return lambda *arrays: tuple(kernel_p.bind(*arrays, kernel=kernel, out_avals=tuple(out_avals)))


@kernel_p.def_abstract_eval
def _shapes(*_: Any, kernel: Kernel, out_avals: Sequence[Any]) -> Sequence[Any]:
    return out_avals


def _lowered(ctx: Any, *operands: Any, kernel: Kernel, out_avals: Sequence[Any]) -> Any:
    plain = [jax.core.ShapedArray(a.shape, a.dtype, a.weak_type) for a in ctx.avals_in]
    with jax_compat.same_in_all_shards():
        return mlir.lower_fun(lambda *arrays: list(kernel(*arrays)))(ctx.replace(avals_in=plain), *operands)


mlir.register_lowering(kernel_p, _lowered, cacheable=False)
