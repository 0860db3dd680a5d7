"""Plan the bodies of loops, branches and ``jax.shard_map``, each by itself.

A body is planned when the program around it is compiled. In the plan of that program, the loop or branch is
one opaque operation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax

from fuseplan.frontend.trace import Equation, Traced, flatten
from fuseplan.support import jax_compat

Fuse = Callable[[Traced], Callable[..., Any] | None]
"""Plans a traced function: returns a function of its constants and arguments, or None to keep the body."""

# The parameter of each primitive that holds its bodies.
_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}


def with_planned_bodies(equations: tuple[Equation, ...], fuse: Fuse) -> tuple[Equation, ...]:
    """The equations with fused bodies; the same tuple if no body is fused."""
    new = tuple([_planned(eqn, fuse) for eqn in equations])
    return equations if all(map(operator.is_, new, equations)) else new


def bodies(equations: Iterable[Equation]) -> Iterator[Traced]:
    """The bodies of loops, branches and shards that ``with_planned_bodies`` would pass to ``fuse``."""
    found: list[Traced] = []
    for eqn in equations:
        _planned(eqn, found.append)
        yield from found
        found.clear()


def _planned(eqn: Equation, fuse: Fuse) -> Equation:
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        shards = _of_shards(eqn, fuse)
        return eqn if shards is None else replace(eqn, params=shards)
    if name not in _BODIES:
        return eqn
    body = params[_BODIES[name]]
    every = body if isinstance(body, tuple) else (body,)
    new = tuple([_fused(b, fuse) for b in every])
    if all(map(operator.is_, new, every)):
        return eqn
    return replace(eqn, params={**params, _BODIES[name]: new if isinstance(body, tuple) else new[0]})


def _fused(closed: Any, fuse: Fuse) -> Any:
    traced = flatten(closed)
    if not closed.effects <= jax_compat.axis_effects(closed.effects):
        return closed
    call = fuse(traced)
    if call is None:
        return closed
    return jax.make_jaxpr(lambda *flat: list(call(*traced.consts, *flat)))(*closed.in_avals)


def _of_shards(eqn: Equation, fuse: Fuse) -> dict[str, Any] | None:
    params = eqn.params
    body = params["jaxpr"]
    if not body.effects <= jax_compat.axis_effects(body.effects):
        return None
    traced = flatten(jax_compat.closed(body))
    call = fuse(traced)
    if call is None:
        return None
    shards = jax.shard_map(
        lambda *flat: tuple(call(*traced.consts, *flat)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    new: dict[str, Any] = jax.make_jaxpr(shards)(*eqn.in_avals).jaxpr.eqns[-1].params
    return new
