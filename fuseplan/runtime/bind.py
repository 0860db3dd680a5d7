"""Bind a fused function as an equation that composes with ``jit``, ``grad``, ``vmap`` and ``shard_map``.

Inside ``jax.jit``'s trace the user's function is traced once more and becomes one equation
(``fuseplan.runtime.primitive``), which is planned when it is compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import compress
from typing import Any, TypeVar

import jax
from jax.interpreters import ad

from fuseplan.frontend.trace import trace_used
from fuseplan.patterns.choice import apply_patterns
from fuseplan.pipeline import plan_traced
from fuseplan.plan.options import Options
from fuseplan.runtime.derivative import differentiate
from fuseplan.runtime.primitive import PlanOf, Settings, call_of, can_be_equation, fused_p
from fuseplan.shape_families import ShapeFamilies
from fuseplan.support import jax_compat
from fuseplan.targets.detect import local_platform

_Key = TypeVar("_Key", int, str)

ad.primitive_jvps[fused_p] = differentiate


def fuse(
    f: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Options,
    platform: str,
    plan_of: PlanOf = plan_traced,
    families: ShapeFamilies | None = None,
) -> Any:
    """Evaluate ``f`` on tracers by the kernels of its plan.

    Arguments without a tracer in them are static: ``f`` gets them as they are. With symbolic
    shapes (``jax.export``) there is nothing to plan, and ``f`` is traced as it is; so it is where it
    writes to references (``jax.new_ref``) from outside, or takes or returns a type that is no array.
    Matches of ``options.patterns`` are replaced first. ``plan_of`` makes the plans, by default
    ``plan_traced``; ``families`` is what it knows of other sizes.
    """
    static, static_names = _static(enumerate(args)), _static(kwargs.items())
    named = {name: value for name, value in kwargs.items() if name not in static_names}
    dynamic = jax.tree.leaves(([a for i, a in enumerate(args) if i not in static], named))
    symbolic = any(not isinstance(n, int) for a in dynamic for n in getattr(a, "shape", ()))
    if not dynamic or symbolic or jax_compat.is_jit_disabled():
        return f(*args, **kwargs)
    name = getattr(f, "__name__", type(f).__name__)
    if static_names:
        f = functools.partial(f, **{name: kwargs[name] for name in static_names})
    rewrite = None
    if options.patterns:
        runs_here = platform == local_platform()
        rewrite = functools.partial(_with_replacements, options=options, name=name, runs_here=runs_here)
    traced, is_used = trace_used(f, args, named, static, rewrite)
    options = replace(options, patterns=()) if options.patterns else options
    bind = traced.evaluate
    if can_be_equation(traced):
        bind = call_of(traced, Settings(options, platform, plan_of=plan_of, families=families)).bind
    return jax.tree.unflatten(traced.out_tree, bind(*traced.consts, *compress(dynamic, is_used)))


def _with_replacements(closed: Any, options: Options, name: str, runs_here: bool) -> Any:
    return apply_patterns(closed, options, name, runs_here=runs_here).closed


def _static(arguments: Iterable[tuple[_Key, Any]]) -> list[_Key]:
    """The positions or names of the hashable arguments without a tracer in them."""

    def is_static(argument: Any) -> bool:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(argument)):
            return False
        with contextlib.suppress(TypeError):
            hash(argument)
            return True
        return False

    return [key for key, argument in arguments if is_static(argument)]
