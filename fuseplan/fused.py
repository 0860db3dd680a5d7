"""A fused function as a citizen of JAX: it composes with ``jit``, ``grad`` and ``vmap``.

Inside ``jax.jit``'s trace the user's function is traced once more, planned, and replaced by
its kernels. Differentiated, it falls back on its own equations, which JAX knows how to
differentiate, custom rules included; batched, the batched function is planned anew, as one
with another axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from fuseplan.config import Options
from fuseplan.lower import Lowered
from fuseplan.plan import Plan
from fuseplan.planner import plan_traced
from fuseplan.runtime import make_runner
from fuseplan.selectors import require_names
from fuseplan.trace import Literal, Traced, trace

PlanOf = Callable[..., tuple[Lowered, Plan]]
"""Plans, as ``planner.plan_traced``."""


def fuse(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Options,
    platform: str,
    plan_of: PlanOf | None = None,
) -> Any:
    """Evaluate ``f`` on tracers by the kernels of its plan.

    Arguments without a tracer in them are static: ``f`` gets them as they are. With symbolic
    shapes (``jax.export``) there is nothing to plan, and ``f`` is traced as it is. ``plan_of`` makes
    the plans, by default ``plan_traced``.
    """
    dynamic, rebuild = _split(args, kwargs)
    symbolic = any(not isinstance(n, int) for a in dynamic for n in getattr(a, "shape", ()))
    if not dynamic or symbolic:
        return f(*args, **kwargs)

    def flat_f(*arrays: Any) -> Any:
        inner_args, inner_kwargs = rebuild(arrays)
        return f(*inner_args, **inner_kwargs)

    traced = trace(flat_f, *dynamic)
    lowered, plan = (plan_of or plan_traced)(traced, options)
    results = call_fused(traced, lowered, plan, options, platform, plan_of)(*traced.consts, *dynamic)
    return jax.tree.unflatten(traced.out_tree, results)


def _split(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The arrays of the arguments that hold tracers, and how to put others in their place."""
    arguments = [*args, *kwargs.values()]
    arrays: list[Any] = []
    trees: list[tuple[Any, slice] | None] = []
    for argument in arguments:
        leaves, tree = jax.tree.flatten(argument)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            trees.append((tree, slice(len(arrays), len(arrays) + len(leaves))))
            arrays += leaves
        else:
            trees.append(None)

    def rebuild(new: Sequence[Any]) -> tuple[Any, Any]:
        filled = [
            argument if where is None else jax.tree.unflatten(where[0], new[where[1]])
            for argument, where in zip(arguments, trees, strict=True)
        ]
        return filled[: len(args)], dict(zip(kwargs, filled[len(args) :], strict=True))

    return arrays, rebuild


def call_fused(
    traced: Traced,
    lowered: Lowered,
    plan: Plan,
    options: Options,
    platform: str,
    plan_of: PlanOf | None = None,
) -> Callable[..., Any]:
    """The flat function of a plan, with its rules for ``jax.grad`` and ``jax.vmap``."""
    run = make_runner(lowered, plan, platform=platform)
    if any(eqn.effects for eqn in lowered.equations):
        # Custom rules would hide the effects from JAX; the kernels are left as they are.
        return run
    plain = traced.evaluate

    @jax.custom_batching.custom_vmap
    def batchable(*flat: Any) -> Any:
        return tuple(run(*flat))

    @batchable.def_vmap
    def _batched(axis_size: int, in_batched: Any, *flat: Any) -> Any:
        out_batched = depends_on(traced, in_batched)
        in_axes = [0 if batched else None for batched in in_batched]
        out_axes = [0 if batched else None for batched in out_batched]
        require_names(options.constraints)
        batched_f = jax.vmap(plain, in_axes=in_axes, out_axes=out_axes, axis_size=axis_size)
        return tuple(fuse(batched_f, flat, {}, options, platform, plan_of)), tuple(out_batched)

    @jax.custom_jvp
    def differentiable(*flat: Any) -> Any:
        return batchable(*flat)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def _tangents(primals: Any, tangents: Any) -> Any:
        # Only what varies is differentiated: the derivative of a constant may be infinite, and
        # infinity times its zero tangent is no number.
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def of_moving(*some: Any) -> tuple[Any, ...]:
            filled = list(primals)
            for i, value in zip(moving, some, strict=True):
                filled[i] = value
            return tuple(plain(*filled))

        return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])

    return differentiable


def depends_on(traced: Traced, inputs: Sequence[bool]) -> list[bool]:
    """Which results depend on one of the marked inputs."""
    marked = {v for v, mark in zip(traced.inputs, inputs, strict=True) if mark}
    for eqn in traced.equations:
        if any(not isinstance(v, Literal) and v in marked for v in eqn.inputs):
            marked.update(eqn.outputs)
    return [not isinstance(v, Literal) and v in marked for v in traced.outputs]
