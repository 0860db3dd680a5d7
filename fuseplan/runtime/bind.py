"""Bind a fused function as an equation that composes with ``jit``, ``grad``, ``vmap`` and ``shard_map``.

Inside ``jax.jit``'s trace the user's function is traced once more and becomes one equation
(``fuseplan.runtime.primitive``), which is planned when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from fuseplan.frontend.trace import trace
from fuseplan.pipeline import plan_traced
from fuseplan.plan.options import Options
from fuseplan.runtime.derivative import differentiate
from fuseplan.runtime.primitive import PlanOf, Settings, call_of, can_be_equation, fused_p

ad.primitive_jvps[fused_p] = differentiate


def fuse(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Options,
    platform: str,
    plan_of: PlanOf = plan_traced,
) -> Any:
    """Evaluate ``f`` on tracers by the kernels of its plan.

    Arguments without a tracer in them are static: ``f`` gets them as they are. With symbolic
    shapes (``jax.export``) there is nothing to plan, and ``f`` is traced as it is; so it is where it
    writes to references (``jax.new_ref``) from outside, or takes or returns a type that is no array.
    ``plan_of`` makes the plans, by default ``plan_traced``.
    """
    dynamic, rebuild = _split(args, kwargs)
    symbolic = any(not isinstance(n, int) for a in dynamic for n in getattr(a, "shape", ()))
    if not dynamic or symbolic:
        return f(*args, **kwargs)

    def flat_f(*arrays: Any) -> Any:
        inner_args, inner_kwargs = rebuild(arrays)
        return f(*inner_args, **inner_kwargs)

    traced = trace(flat_f, *dynamic)
    bind = traced.evaluate
    if can_be_equation(traced):
        bind = call_of(traced, Settings(options, platform, plan_of=plan_of)).bind
    return jax.tree.unflatten(traced.out_tree, bind(*traced.consts, *dynamic))


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
