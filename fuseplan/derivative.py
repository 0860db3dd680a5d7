"""Derivatives of fused functions: the pass back is planned too, together with the pass forward.

A derivative is linear in the tangents, so forward mode evaluates one equation on tangents, and
reverse mode transposes that equation into the planned pass back. Derivatives of either are those of
the function itself, never of how it is computed: what is kept for the pass back has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from fuseplan.call import Call, bound, closed_call, fused_p
from fuseplan.halves import Halves, await_cotangents, evaluate, halves
from fuseplan.linear import Linear, linear_p, moves
from fuseplan.planner import plan_traced
from fuseplan.runtime import FlatFunction, Part, make_runner
from fuseplan.selectors import require_names
from fuseplan.trace import trace

class Derivative:
    """Of a call without hints, with respect to the arguments ``moving``."""

    def __init__(self, call: Call, avals: Sequence[Any], moving: tuple[int, ...]) -> None:
        self.call, self.avals, self.moving = call, list(avals), moving
        marks = call.reaches([i in moving for i in range(len(avals))])
        varies = [mark and jnp.issubdtype(a.dtype, jnp.inexact) for mark, a in zip(marks, call.out_avals)]
        self.moved = tuple(j for j, varying in enumerate(varies) if varying)
        """Which results have a tangent."""
        self.tangents = [avals[i].to_tangent_aval() for i in moving]
        self.out_tangents = [call.out_avals[j].to_tangent_aval() for j in self.moved]

    def pull(self, *flat: Any, results: tuple[int, ...]) -> Any:
        """From arguments and cotangents of some results to cotangents of ``moving``."""
        n = len(self.avals)
        return self._vjp(flat[:n], results)[1](list(flat[n : n + len(results)]))

    def push(self, *flat: Any) -> Any:
        """From arguments and tangents of ``moving`` to those of ``moved``."""
        n = len(self.avals)
        f, moving = self._of_moving(flat[:n], self.moved)
        return jax.jvp(f, moving, list(flat[n:]), has_aux=True)[1]

    def _both(self, *flat: Any) -> Any:
        n = len(self.avals)
        outs, pull = self._vjp(flat[:n], self.moved)
        return [*outs, *pull(await_cotangents(outs, flat[n:]))]

    def _vjp(self, flat: Sequence[Any], results: tuple[int, ...]) -> tuple[Any, Any]:
        f, moving = self._of_moving(flat, results)
        _, pull, outs = jax.vjp(f, *moving, has_aux=True)
        return outs, pull

    def _of_moving(self, flat: Sequence[Any], results: tuple[int, ...]) -> tuple[Callable[..., Any], Any]:
        # Only what varies is differentiated: the derivative of a constant may be infinite, and
        # infinity times its zero tangent is no number.
        def of_moving(*some: Any) -> Any:
            filled = list(flat)
            for i, value in zip(self.moving, some, strict=True):
                filled[i] = value
            outs = self.call.evaluate(*filled)
            return [outs[j] for j in results], outs

        return of_moving, [flat[i] for i in self.moving]

    @functools.cached_property
    def halves(self) -> tuple[Halves, tuple[Any, ...]] | None:
        """The planned passes, and their first arguments, which are constants; None where JAX has no
        pass back."""
        require_names(self.call.settings.options.constraints)
        try:
            traced = trace(self._both, *self.avals, *self.out_tangents)
        except Exception:  # a loop of unknown length, say: JAX says so when a pass back is asked for
            return None
        if any(isinstance(value, jax.core.Tracer) for value in traced.consts):
            return None
        lowered, plan = plan_traced(traced, self.call.settings.options)
        n_args = len(traced.consts) + len(self.avals)
        return halves(lowered, plan, n_args, len(self.call.out_avals)), traced.consts

    @functools.cached_property
    def forward(self) -> Call:
        """The call that also keeps what the pass back will read."""
        if self.halves is None:
            return self.call
        cut, _ = self.halves
        kept = [cut.lowered.avals[v] for v in cut.kept]

        def by_rule(*flat: Any) -> Any:
            return [*self.call.evaluate(*flat), *(jnp.zeros(a.shape, a.dtype) for a in kept)]

        return self._part(cut.forward, [*self.call.out_avals, *kept], lambda: self.call, by_rule)

    def hints(self, results: Sequence[Any]) -> list[Any]:
        """Those of the results of ``forward`` that the pass back reads."""
        if self.halves is None:
            return []
        cut, _ = self.halves
        value = dict(zip(cut.forward.outputs, results, strict=True))
        return [value[v] for v in cut.hints]

    def back(self, results: tuple[int, ...]) -> tuple[Call | None, bool]:
        """The call from arguments and cotangents of some ``results`` to those of ``moving``, and whether
        it takes hints; None if it closes over a tracer."""
        if results == self.moved and self.halves is not None:
            return self._back, True
        return self._bare_back(results), False

    @functools.cached_property
    def _back(self) -> Call:
        assert self.halves is not None
        bare = functools.cache(functools.partial(self._bare_back, self.moved))
        by_rule = functools.partial(self.pull, results=self.moved)
        return self._part(self.halves[0].back, self.tangents, bare, by_rule)

    def _bare_back(self, results: tuple[int, ...]) -> Call | None:
        cotangents = [self.call.out_avals[j].to_tangent_aval() for j in results]
        back = functools.partial(self.pull, results=results)
        return closed_call(back, [*self.avals, *cotangents], self.call.settings)

    def _part(
        self, part: Part, out_avals: Sequence[Any], bare: Callable[[], Call | None], by_rule: Any
    ) -> Call:
        assert self.halves is not None
        (cut, consts), platform = self.halves, self.call.settings.platform

        def make() -> FlatFunction:
            return make_runner(cut.lowered, cut.plan, platform=platform, part=part)

        call = replace(
            self.call,
            out_avals=tuple(out_avals),
            evaluate=evaluate(cut.lowered, part),
            reaches=functools.partial(cut.reaches, part),
            make=make,
            n_args=len(part.inputs) - (len(cut.hints) if part is cut.back else 0),
            bare=bare,
        )
        call = bound(call, consts)
        # Equations do not show a batching rule of the user's; with one, nobody reads hints.
        return replace(call, evaluate=by_rule) if call.batches_by_rule else call

    @functools.cached_property
    def linear(self) -> Linear:
        """From arguments, hints and tangents of ``moving`` to tangents of ``moved``."""
        return Linear(
            self.call.settings,
            self.call.effects,
            self.avals,
            self.tangents,
            self.out_tangents,
            self.push,
            self._transpose,
        )

    def _transpose(self, known: Sequence[Any], places: Sequence[int], cotangents: Sequence[Any]) -> Any:
        results, n = tuple(self.moved[k] for k in places), len(self.avals)
        call, hinted = self.back(results)
        args = (*known[:n], *cotangents)
        if call is None:
            return self.pull(*args, results=results)
        return fused_p.bind(*args, *(known[n:] if hinted else ()), call=call)


def _derivative(base: Call, flat: Sequence[Any], moving: tuple[int, ...]) -> Derivative:
    if moving not in base.derivatives:
        base.derivatives[moving] = Derivative(base, [jax.typeof(x) for x in flat], moving)
    return base.derivatives[moving]


def _rule(flat: Any, tangents: Any, *, call: Call) -> tuple[Any, Any]:
    base, n = call.base, call.n_args
    args, moving = flat[:n], tuple(i for i, t in enumerate(tangents[:n]) if moves(t))
    still = [ad.Zero(aval.to_tangent_aval()) for aval in call.out_avals]
    if not moving:
        return fused_p.bind(*flat, call=call), still
    assert base is not None
    derivative = _derivative(base, args, moving)
    results = fused_p.bind(*args, call=derivative.forward)
    some = [tangents[i] for i in moving]
    moved = linear_p.bind(*args, *derivative.hints(results), *some, linear=derivative.linear)
    results = results[: len(base.out_avals)]
    if len(call.out_avals) > len(results):
        results = [*results, *fused_p.bind(*flat, call=call)[len(results) :]]
    for j, tangent in zip(derivative.moved, moved, strict=True):
        still[j] = tangent
    return results, still


ad.primitive_jvps[fused_p] = _rule
