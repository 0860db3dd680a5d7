"""A fused function as a citizen of JAX: it composes with ``jit``, ``grad`` and ``vmap``.

Inside ``jax.jit``'s trace the user's function is traced once more, planned, and replaced by
its kernels. Differentiated, it falls back on its own equations, which JAX knows how to
differentiate; batched, the batched function is planned anew, as one with another axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fuseplan.config import Options
from fuseplan.lower import Lowered
from fuseplan.plan import Plan
from fuseplan.planner import plan_traced
from fuseplan.runtime import make_runner, reference
from fuseplan.trace import trace


def fuse(f: Callable[..., Any], args: Any, kwargs: Any, options: Options, platform: str) -> Any:
    """Evaluate ``f`` on tracers by the kernels of its plan.

    Leaves of ``args`` and ``kwargs`` that are not tracers are static: ``f`` sees them as
    they are.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    if not dynamic:
        return f(*args, **kwargs)

    def flat_f(*arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(dynamic, arrays, strict=True):
            filled[i] = array
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return f(*inner_args, **inner_kwargs)

    arrays = [leaves[i] for i in dynamic]
    traced = trace(flat_f, *arrays)
    lowered, plan = plan_traced(traced, options)
    results = call_fused(lowered, plan, options, platform)(*lowered.consts, *arrays)
    return jax.tree.unflatten(lowered.out_tree, results)


def call_fused(lowered: Lowered, plan: Plan, options: Options, platform: str) -> Callable[..., Any]:
    """The flat function of a plan, with its rules for ``jax.grad`` and ``jax.vmap``."""
    run = make_runner(lowered, plan, platform=platform)
    if any(eqn.effects for eqn in lowered.equations):
        # Custom rules would hide the effects from JAX; the kernels are left as they are.
        return run
    plain = reference(lowered)

    @jax.custom_batching.custom_vmap
    def batchable(*flat: Any) -> Any:
        return tuple(run(*flat))

    @batchable.def_vmap
    def _batched(axis_size: int, in_batched: Any, *flat: Any) -> Any:
        in_axes = [0 if batched else None for batched in in_batched]
        batched_f = jax.vmap(plain, in_axes=in_axes, axis_size=axis_size)
        results = fuse(batched_f, flat, {}, options, platform)
        return tuple(results), (True,) * len(results)

    @jax.custom_jvp
    def differentiable(*flat: Any) -> Any:
        return batchable(*flat)

    @differentiable.defjvp
    def _tangents(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *flat: tuple(plain(*flat)), primals, tangents)

    return differentiable
