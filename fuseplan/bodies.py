"""Bodies of loops, of branches and of ``jax.shard_map``: each is a function of its own, planned when
the one around it is compiled. For that one it is an operation like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from fuseplan import _compat
from fuseplan.lower import Lowered
from fuseplan.trace import Equation, Traced, flatten

Fuse = Callable[[Traced], Callable[..., Any]]
"""From a traced function to one of its constants and arguments, planned."""

# Where each primitive keeps its bodies.
_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}


def with_planned_bodies(lowered: Lowered, fuse: Fuse) -> Lowered:
    """The program with the bodies of its operations fused."""
    return replace(lowered, equations=tuple([_planned(eqn, fuse) for eqn in lowered.equations]))


def _planned(eqn: Equation, fuse: Fuse) -> Equation:
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        return replace(eqn, params=_of_shards(eqn, fuse))
    if name not in _BODIES:
        return eqn
    body = params[_BODIES[name]]
    new = tuple(_fused(b, fuse) for b in body) if isinstance(body, tuple) else _fused(body, fuse)
    return replace(eqn, params={**params, _BODIES[name]: new})


def _fused(closed: Any, fuse: Fuse) -> Any:
    traced = flatten(closed)
    if not closed.effects <= _compat.axis_effects(closed.effects):
        return closed
    call = fuse(traced)
    return jax.make_jaxpr(lambda *flat: list(call(*traced.consts, *flat)))(*closed.in_avals)


def _of_shards(eqn: Equation, fuse: Fuse) -> dict[str, Any]:
    params = eqn.params
    body = params["jaxpr"]
    if not body.effects <= _compat.axis_effects(body.effects):
        return params
    traced = flatten(_compat.closed(body))
    call = fuse(traced)
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
