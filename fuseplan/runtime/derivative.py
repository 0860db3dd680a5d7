"""Derivatives of fused functions: the forward and the backward pass are planned as one program.

A derivative is linear in the tangents. ``linear_p`` is that linear function as one equation: forward mode
evaluates it on tangents, and reverse mode transposes it into the planned backward pass. Higher derivatives
are those of the function itself, not of its kernels: residuals of the backward pass have no derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from fuseplan.frontend.simplify import Expressions, fold, given
from fuseplan.frontend.trace import (
    Literal,
    Primitive,
    Traced,
    depends_on,
    evaluator,
    trace,
    without_shardings,
)
from fuseplan.plan.options import Options
from fuseplan.report.debug import report_passes
from fuseplan.runtime.executor import Part
from fuseplan.runtime.min_cut import Halves, await_cotangents, halves
from fuseplan.runtime.primitive import (
    Call,
    Settings,
    bound,
    call_of,
    holds_tracer,
    maker_of,
    planned,
    runner_of,
    with_axis,
)
from fuseplan.runtime.screen import is_screened, may_loop, may_loop_anywhere
from fuseplan.support import jax_compat

linear_p = Primitive("fused_tangents")
linear_p.multiple_results = True


@dataclass(eq=False)
class Linear:
    """A function of primal arrays and of tangents that is linear in the tangents."""

    effects: frozenset[Any]
    n_tangents: int
    out_avals: Sequence[Any]
    push: Callable[..., Sequence[Any]]
    """From primal arrays and tangents to the tangents of results."""
    transpose: Callable[[Sequence[Any], Sequence[int], Sequence[Any]], Sequence[Any]]
    """From primal arrays, and the positions and cotangents of some results, to the cotangents of all input
    tangents."""

    is_high: bool = False
    """Whether the function has high-level types."""

    def __repr__(self) -> str:
        return f"{self.n_tangents} tangents to {len(self.out_avals)}"


def _is_nonzero(tangent: Any) -> bool:
    """Whether a tangent is not a symbolic zero."""
    return not isinstance(tangent, ad.Zero) and jax.typeof(tangent).dtype != jax.dtypes.float0


@linear_p.def_impl
def _evaluated(*flat: Any, linear: Linear) -> Any:
    return jax.jit(linear.push)(*flat)


@linear_p.def_effectful_abstract_eval
def _shapes(*_: Any, linear: Linear) -> Any:
    return list(linear.out_avals), set(linear.effects)


mlir.register_lowering(
    linear_p, mlir.lower_fun(lambda *flat, linear: linear.push(*flat), multiple_results=True), cacheable=False
)
jax_compat.register_low(
    linear_p, lambda *flat, linear: linear.push(*flat), lambda *avals, linear: linear.is_high
)


def _transposed(cotangents: Any, *flat: Any, linear: Linear) -> Any:
    split = len(flat) - linear.n_tangents
    places = [k for k, ct in enumerate(cotangents) if _is_nonzero(ct)]
    if not places:
        return [*[None] * split, *(ad.Zero(t.aval) for t in flat[split:])]
    return [*[None] * split, *linear.transpose(flat[:split], places, [cotangents[k] for k in places])]


ad.primitive_transposes[linear_p] = _transposed


def _jvp(flat: Any, tangents: Any, *, linear: Linear) -> tuple[Any, Any]:
    split = len(flat) - linear.n_tangents
    if not any(map(_is_nonzero, tangents[:split])):
        results = linear_p.bind(*flat, linear=linear)
        moved = [ad.instantiate_zeros(t) for t in tangents[split:]]
        return results, linear_p.bind(*flat[:split], *moved, linear=linear)
    moving = [i for i, t in enumerate(tangents) if _is_nonzero(t)]

    def of_moving(*some: Any) -> Any:
        filled = list(flat)
        for i, value in zip(moving, some, strict=True):
            filled[i] = value
        return list(linear.push(*filled))

    return jax.jvp(of_moving, [flat[i] for i in moving], [tangents[i] for i in moving])


ad.primitive_jvps[linear_p] = _jvp


def _batching_rule(axis: Any, flat: Any, dims: Any, *, linear: Linear) -> Any:
    split = len(flat) - linear.n_tangents
    known, inner = flat[:split], list(dims[:split])
    size, mesh_axis = axis.size, axis.explicit_mesh_axis
    # All tangents get the axis, so that all cotangents do.
    tangents = [
        batching.bdim_at_front(t, dim, size, mesh_axis)
        for t, dim in zip(flat[split:], dims[split:], strict=True)
    ]

    def transpose(known: Sequence[Any], places: Sequence[int], cotangents: Sequence[Any]) -> Any:
        f = lambda *both: linear.transpose(both[:split], places, both[split:])  # noqa: E731
        back = with_axis(f, axis, [*inner, *[0] * len(places)], [0] * len(tangents))
        return back(*known, *cotangents)

    new = Linear(
        linear.effects - jax_compat.axis_effects(linear.effects, axis.name),
        linear.n_tangents,
        [jax_compat.with_leading(aval, size, mesh_axis) for aval in linear.out_avals],
        with_axis(linear.push, axis, [*inner, *[0] * len(tangents)], [0] * len(linear.out_avals)),
        transpose,
        linear.is_high,
    )
    return linear_p.bind(*known, *tangents, linear=new), [0] * len(linear.out_avals)


batching.fancy_primitive_batchers[linear_p] = _batching_rule


class Derivative:
    """The derivative of a call without hints, with respect to the arguments ``moving``."""

    def __init__(
        self, call: Call, avals: Sequence[Any], moving: tuple[int, ...], plans_all: bool = False
    ) -> None:
        """With ``plans_all``, both passes are planned even if no tiled loop can gain."""
        self.plans_all = plans_all
        self.call, self.avals, self.moving = call, list(avals), moving
        self.settings = call.settings._replace(derived=True)
        marks = call.reaches([i in moving for i in range(len(avals))])
        self.moved = tuple(j for j, mark in enumerate(marks) if mark and _varies(call.out_avals[j]))
        """The results that have a tangent."""
        self.tangents = [avals[i].to_tangent_aval() for i in moving]
        self.out_tangents = [call.out_avals[j].to_tangent_aval() for j in self.moved]
        self.cotangents = [call.out_avals[j].to_ct_aval() for j in self.moved]

    def vjp(self, *flat: Any, results: tuple[int, ...]) -> Any:
        """The vector-Jacobian product: from arguments and cotangents of some results to those of
        ``moving``."""
        n = len(self.avals)
        return self._vjp(flat[:n], results)[1](list(flat[n : n + len(results)]))

    def jvp(self, *flat: Any) -> Any:
        """The Jacobian-vector product: from arguments and tangents of ``moving`` to those of ``moved``."""
        n = len(self.avals)
        return self.unplanned(flat[:n], flat[n:])[1]

    def unplanned(self, flat: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        """The results and the tangents of ``moved``, by JAX's own operations. Used for functions with side
        effects, which JAX assigns to the passes."""
        f, moving = self._of_moving(flat, self.moved)
        _, moved, results = jax.jvp(f, moving, list(tangents), has_aux=True)
        return results, moved

    def _results(self, *flat: Any) -> Any:
        """The results of the forward pass, by the forward rules of any ``custom_vjp``, which can be
        differentiated again."""
        return self._vjp(flat, self.moved)[0]

    def _both(self, *flat: Any) -> Any:
        n = len(self.avals)
        outs, pull = self._vjp(flat[:n], self.moved)
        return [*outs, *pull(await_cotangents(outs, flat[n:]))]

    def _vjp(self, flat: Sequence[Any], results: tuple[int, ...]) -> tuple[Any, Any]:
        f, moving = self._of_moving(flat, results)
        _, pull, outs = jax.vjp(f, *moving, has_aux=True)
        return outs, pull

    def _of_moving(self, flat: Sequence[Any], results: tuple[int, ...]) -> tuple[Callable[..., Any], Any]:
        # Only ``moving`` is differentiated: the derivative with respect to a constant may be infinite, and
        # infinity times its zero tangent is NaN.
        def of_moving(*some: Any) -> Any:
            filled = list(flat)
            for i, value in zip(self.moving, some, strict=True):
                filled[i] = value
            outs = self.call.evaluate(*filled)
            return [outs[j] for j in results], outs

        return of_moving, [flat[i] for i in self.moving]

    @functools.cached_property
    def halves(self) -> tuple[Halves, Traced] | None:
        """The planned passes, and the program of both; None if JAX has no backward pass, or if arrays have
        explicit shardings."""
        try:
            traced = trace(self._both, *self.avals, *self.cotangents)
        except Exception:  # e.g. a loop of unknown length: JAX raises when the backward pass is used
            return None
        if holds_tracer(traced):
            return None
        unsharded = without_shardings(traced)
        if unsharded is not None and may_loop(unsharded, self.settings.options):
            return None  # what is kept between the passes would need a sharding
        settings = self.settings
        if not self.plans_all and not may_loop_anywhere(traced, settings.options):
            settings = settings._replace(options=replace(settings.options, planner="unfused"))
        # As in a call without a derivative (``plan_to_run``), only the loops of a CPU change what runs.
        plan = planned(traced, settings, only_loops=not self.plans_all and is_screened(settings.options))
        n_args = len(traced.consts) + len(self.avals)
        cut = halves(plan.lowered, plan, n_args, len(self.call.out_avals))
        report_passes(len(cut.forward.kernels), len(cut.back.kernels), len(cut.kept), cut.kept_bytes)
        return cut, traced

    @functools.cached_property
    def forward(self) -> Call:
        """The call that also returns the residuals of the backward pass."""
        if self.halves is None:
            return self.call
        cut, _ = self.halves
        kept = [cut.lowered.avals[v] for v in cut.kept]
        return self._part(cut.forward, len(self.avals), self._results, self.call.out_avals, kept)

    def hints(self, results: Sequence[Any]) -> list[Any]:
        """The results of ``forward`` that the backward pass reads."""
        if self.halves is None:
            return []
        cut, _ = self.halves
        pairs = zip(cut.forward.outputs, results, strict=True)
        value = {v: result for v, result in pairs if not isinstance(v, Literal)}
        return [value[v] for v in cut.hints]

    @functools.cached_property
    def linear(self) -> Linear:
        """The linear function from arguments, hints and tangents of ``moving`` to tangents of ``moved``."""
        high = jax_compat.is_high(self.call.jaxpr)
        return Linear(
            self.call.effects, len(self.moving), self.out_tangents, self._push, self._transpose, high
        )

    def _push(self, *flat: Any) -> Any:
        n, split = len(self.avals), len(flat) - len(self.moving)
        args = (*flat[:n], *flat[split:])
        call = self._call_with_hints(self.jvp, self.tangents)
        return self.jvp(*args) if call is None else call.bind(*args, *flat[n:split])

    def _transpose(self, known: Sequence[Any], places: Sequence[int], cotangents: Sequence[Any]) -> Any:
        n, results = len(self.avals), tuple([self.moved[k] for k in places])
        args = (*known[:n], *cotangents)
        call = self.back(results)
        return self.vjp(*args, results=results) if call is None else call.bind(*args, *known[n:])

    def back(self, results: tuple[int, ...]) -> Call | None:
        """The call from arguments, cotangents of ``results`` and hints to cotangents of ``moving``; None if
        it closes over a tracer."""
        back = functools.partial(self.vjp, results=results)
        cotangents = [self.call.out_avals[j].to_ct_aval() for j in results]
        if self.halves is None or results != self.moved:
            return self._call_with_hints(back, cotangents)
        cut, traced = self.halves
        # Not those of ``tangents``: the user's rule may return a cotangent of another dtype.
        out_avals = [v.aval for v in traced.jaxpr.outvars[len(self.call.out_avals) :]]
        return self._part(cut.back, len(self.avals) + len(cotangents), back, out_avals)

    def _part(
        self,
        part: Part,
        n_args: int,
        plain: Callable[..., Any],
        results: Sequence[Any],
        kept: Sequence[Any] = (),
    ) -> Call:
        """The call of one pass, with ``n_args`` arguments before its hints."""
        assert self.halves is not None
        (cut, traced), settings = self.halves, self.settings
        call = Call(
            settings,
            (*results, *kept),
            self.call.effects,
            evaluator(cut.equations(part), part.inputs, part.outputs),
            functools.partial(cut.reaches, part),
            lambda: runner_of(cut.plan, settings, part),
            n_args + len(traced.consts),
            traced.jaxpr,
            traced.low,
            traced.batches_by_rule,
            plain,
            n_results=len(results),
        )
        return _by_rule(bound(call, traced.consts))

    def _call_with_hints(self, f: Callable[..., Any], avals: Sequence[Any]) -> Call | None:
        """The call of ``f``, a function of the arguments and of arrays of these ``avals``, with the hints
        that it can use instead of computing them; None if it closes over a tracer."""
        traced = fold(trace(f, *self.avals, *avals))
        assert isinstance(traced, Traced)
        if holds_tracer(traced):
            return None
        plain = bound(call_of(traced, self.settings), traced.consts)
        if self.halves is None:
            return plain
        cut, _ = self.halves
        flat = given(traced, self._hinted_values(traced), [cut.lowered.avals[v] for v in cut.hints])
        evaluate = evaluator(flat.equations, flat.inputs, flat.outputs)
        call = replace(
            call_of(traced, self.settings),
            evaluate=evaluate,
            reaches=functools.partial(depends_on, flat.equations, flat.inputs, flat.outputs),
            make=maker_of(flat, self.settings, evaluate),
            plain=plain.evaluate,
            bare=plain,
            n_results=len(plain.out_avals),
        )
        return _by_rule(bound(call, traced.consts))

    def _hinted_values(self, traced: Traced) -> list[int | None]:
        """For each hint, a value that the forward pass hands over, the equal value of ``traced`` or None."""
        assert self.halves is not None
        cut, both = self.halves
        expressions = Expressions()
        there = expressions.number(cut.lowered.equations, self._names(cut.lowered.graph.inputs, both))
        here = expressions.number(traced.equations, self._names(traced.inputs, traced))
        made = [e.outputs[0] for e in traced.equations if len(e.outputs) == 1 and e.outputs[0] in here]
        values = {here[v]: v for v in made}
        return [values.get(there.get(v, -1)) for v in cut.hints]

    def _names(self, inputs: Sequence[int], traced: Traced) -> dict[int, Hashable]:
        """Names of the inputs that both programs have."""
        constants = [("constant", id(value)) for value in traced.consts]
        return dict(zip(inputs, [*constants, *range(len(self.avals))], strict=False))


def _by_rule(call: Call) -> Call:
    """``call`` with an ``evaluate`` that contains the user's batching rules, which equations do not show. Its
    residuals are zeros, which are not read."""
    if not call.batches_by_rule or call.plain is None:
        return call
    plain, kept = call.plain, call.out_avals[call.n_results :]

    def evaluate(*flat: Any) -> Any:
        return [*plain(*flat[: call.n_args]), *(jnp.zeros(aval.shape, aval.dtype) for aval in kept)]

    def reaches(marks: Sequence[bool]) -> list[bool]:
        return [any(marks)] * call.n_results + [False] * len(kept)

    return replace(call, evaluate=evaluate, reaches=reaches)


def plan_passes(traced: Traced, options: Options) -> Halves | None:
    """The plan of a function and its derivative with respect to all inexact arguments; None if JAX has no
    backward pass."""
    call, avals = call_of(traced, Settings(options, "")), [v.aval for v in traced.jaxpr.invars]
    avals = [*(jax.typeof(value) for value in traced.consts), *avals]
    moving = tuple(i for i, aval in enumerate(avals) if i >= len(traced.consts) and _varies(aval))
    passes = Derivative(call, avals, moving, plans_all=True).halves
    return None if passes is None else passes[0]


def _varies(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)  # a token has none
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def differentiate(flat: Any, tangents: Any, *, call: Call, jaxpr: Any) -> tuple[Any, Any]:
    """The JVP rule of fused equations: the results, and their tangents as one linear equation."""
    n = call.n_args
    args, moving = flat[:n], tuple(i for i, t in enumerate(tangents[:n]) if _is_nonzero(t))
    still = [ad.Zero(aval.to_tangent_aval()) for aval in call.out_avals]
    if not moving:
        return call.bind(*flat), still
    base, some = call.base(args), [tangents[i] for i in moving]
    if moving not in base.derivatives:
        base.derivatives[moving] = Derivative(base, [jax.typeof(x) for x in args], moving)
    derivative = base.derivatives[moving]
    if call.has_side_effects:
        results, moved = derivative.unplanned(args, some)
    else:
        results = derivative.forward.bind(*args)
        moved = linear_p.bind(*args, *derivative.hints(results), *some, linear=derivative.linear)
    results = results[: len(base.out_avals)]
    if len(call.out_avals) > len(results):
        results = [*results, *call.bind(*flat)[len(results) :]]
    for j, tangent in zip(derivative.moved, moved, strict=True):
        still[j] = tangent
    return results, still
