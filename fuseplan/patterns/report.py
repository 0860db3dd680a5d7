"""``fuseplan.match``: where a pattern matches a function, and what differs where it nearly does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from costmodel.device import DeviceSpec
from fuseplan.frontend.flat_view import function_of
from fuseplan.frontend.trace import closed_jaxpr
from fuseplan.patterns.matches import Match, NearMiss, Refusal
from fuseplan.patterns.pattern import Pattern, flattened
from fuseplan.patterns.replace import rewrite_closed
from fuseplan.settings import resolve_device
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.targets.detect import unmeasured_device

SHOWN = 5
"""Near misses in the text of a report; ``MatchReport.near_misses`` has all."""


@dataclass(frozen=True, slots=True)
class MatchReport:
    """Where patterns match a function."""

    function: str
    patterns: tuple[str, ...]
    matches: tuple[Match, ...]
    refusals: tuple[Refusal, ...]
    """Matches that a pattern's ``check`` refuses, or whose operations an earlier pattern has taken."""
    near_misses: tuple[NearMiss, ...]
    """Places where some equations match, the nearest first."""

    def __bool__(self) -> bool:
        return bool(self.matches)

    def __len__(self) -> int:
        return len(self.matches)

    def __str__(self) -> str:
        names = ", ".join(self.patterns)
        count = len(self.matches)
        said = [f"{names} in {self.function}: {count} match{'' if count == 1 else 'es'}"]
        said += [str(match) for match in self.matches]
        if self.refusals:
            said += ["refused:", *(f"  {refusal}" for refusal in self.refusals)]
        if self.near_misses:
            said += ["near misses:", *(f"  {miss}" for miss in self.near_misses[:SHOWN])]
            more = len(self.near_misses) - SHOWN
            said += [f"  … {more} more"] if more > 0 else []
        return "\n".join(said)


def match(patterns: Any, f: Callable[..., Any]) -> Callable[..., MatchReport]:
    """A function that says where a pattern, or each of several, matches ``f`` at its arguments.

    Nothing is planned or replaced. Arguments may be ``ShapeDtypeStruct``s.

    Raises:
        InvalidArgumentError: ``patterns`` are none, or ``f`` is no function.
        PatternError: a pattern overlaps itself, or cannot be traced.

    Example:
        >>> import fuseplan, jax, jax.numpy as jnp
        >>> softmax = fuseplan.Pattern("softmax", lambda x: jax.nn.softmax(x, axis=-1))
        >>> report = fuseplan.match(softmax, lambda x: jax.nn.softmax(2 * x))(jnp.ones((4, 8)))
        >>> len(report.matches), report.matches[0].arguments[0].shape
        (1, (4, 8))
        >>> report = fuseplan.match(softmax, lambda x: jnp.exp(x - x.max()) / x.sum())(jnp.ones((4, 8)))
        >>> len(report.matches), report.near_misses[0].expected
        (0, '`reduce_max`')
    """
    every = flattened(patterns)
    if not callable(f):
        raise InvalidArgumentError(f"fuseplan.match expects a function to look in, got {type(f).__name__}")

    @functools.wraps(f)
    def matched(*args: Any, **kwargs: Any) -> MatchReport:
        closed, _ = closed_jaxpr(f, args, kwargs)
        name = getattr(f, "__name__", type(f).__name__)
        found = rewrite_closed(closed, every, function=name, explain=True, replaces=False)
        return MatchReport(
            name,
            tuple(dict.fromkeys(p.name for p in every)),
            tuple(found.used),
            (*found.refusals, *found.passed_over),
            tuple(sorted(found.near_misses, key=lambda miss: -miss.n_matched)),
        )

    return matched


def rewrite(
    f: Callable[..., Any], patterns: Any, *, device: str | DeviceSpec | None = None
) -> Callable[..., Any]:
    """``f`` with the matches of ``patterns`` replaced, as a function that JAX can trace.

    Use it inside of a loss, before ``jax.grad``: a pattern no longer matches once the values inside of it are
    also read by a backward pass. ``fuseplan.jit`` of the result plans each replacement as a kernel of its
    own.
    ``device``, a name or a ``costmodel.DeviceSpec``, prices them by their ``cost``, and says which
    replacement of several is used; None is the device that JAX runs on. Patterns with ``choose="cost"`` are
    used where they match.

    Example:
        >>> import fuseplan, jax, jax.numpy as jnp
        >>> softmax = fuseplan.Pattern("softmax", lambda x: jax.nn.softmax(x, axis=-1))
        >>> g = fuseplan.patterns.rewrite(lambda x: jax.nn.softmax(x).max(), [softmax])
        >>> [str(eqn.primitive) for eqn in jax.make_jaxpr(g)(jnp.ones((2, 3))).eqns]
        ['pattern', 'reduce_max']
    """
    every = flattened(patterns)
    if not callable(f):
        raise InvalidArgumentError(f"patterns.rewrite expects a function, got {type(f).__name__}")

    @functools.wraps(f)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        return _evaluated(f, every, resolve_device(unmeasured_device(device)), args, kwargs)

    return rewritten


def _evaluated(
    f: Callable[..., Any], every: tuple[Pattern, ...], device: DeviceSpec, args: Any, kwargs: Any
) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [
        i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, jax.core.Tracer)) or hasattr(x, "shape")
    ]

    def flat(*arrays: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(dynamic, arrays, strict=True):
            filled[i] = x
        inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
        return f(*inner_args, **inner_kwargs)

    arrays = [leaves[i] for i in dynamic]
    closed, out_tree = closed_jaxpr(flat, arrays, {})
    name = getattr(f, "__name__", type(f).__name__)
    # The figures of a CPU take seconds to measure: its prices are left to the plan.
    found = rewrite_closed(closed, every, device, function=name, has_figures=device.platform != "cpu")
    return jax.tree.unflatten(out_tree, function_of(found.closed)(*arrays))
