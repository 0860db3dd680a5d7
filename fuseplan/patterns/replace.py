"""Replace the matches of patterns in a jaxpr, in the bodies of its loops and branches, too."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from costmodel.device import DeviceSpec
from fuseplan.frontend.flat_view import (
    Call,
    ClosedJaxpr,
    FlatView,
    Insertion,
    as_param,
    body_key,
    closed_body,
    function_of,
    rebuilt,
    spliced,
)
from fuseplan.frontend.trace import Literal, Operand, closed_jaxpr
from fuseplan.patterns.claims import claimed
from fuseplan.patterns.matches import Found, Match, NearMiss, Refusal
from fuseplan.patterns.matching import Search
from fuseplan.patterns.pattern import Pattern, constant_p, name_p
from fuseplan.patterns.primitive import bind
from fuseplan.patterns.sides import NONE, Dims
from fuseplan.support import jax_compat
from fuseplan.support.errors import FuseplanError, FuseplanWarning, PatternError, first_line

_BODIES = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches"}
"""The parameter of each primitive that holds bodies."""

PS_PER_S = 1e12


@dataclass(slots=True)
class Rewritten:
    """A jaxpr with replaced matches."""

    closed: ClosedJaxpr
    used: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    passed_over: list[Refusal] = field(default_factory=list)
    """Matches whose operations a pattern of higher priority has taken."""
    near_misses: list[NearMiss] = field(default_factory=list)
    failed: list[tuple[Match, str]] = field(default_factory=list)
    """Matches whose replacement raised an error when it was traced, and the error."""

    def count(self, pattern: Pattern) -> int:
        """The number of matches of a pattern that are used."""
        return sum(match.pattern is pattern for match in self.used)

    def is_mentioned(self, pattern: Pattern) -> bool:
        """Whether there was a match of a pattern, used or not."""
        others = [*(r.match for r in (*self.refusals, *self.passed_over)), *(m for m, _ in self.failed)]
        return any(match.pattern is pattern for match in (*self.used, *others))


def rewrite_closed(
    closed: ClosedJaxpr,
    patterns: Sequence[Pattern],
    device: DeviceSpec | None = None,
    *,
    function: str = "the function",
    explain: bool = False,
    runs_here: bool = False,
    replaces: bool = True,
    has_figures: bool = True,
) -> Rewritten:
    """``closed`` with the matches of ``patterns`` (in order of priority) replaced.

    With ``explain`` near misses are found, too; with ``replaces=False`` nothing else happens. ``runs_here``:
    the result is to be compiled for this process's platform, so that a replacement that does not even lower
    for it is left out, as one that cannot be traced. Without ``has_figures``, those of ``device`` are not
    measured, and the replacements have no price of their own.

    Raises:
        PatternError: a pattern overlaps itself, or a replacement has another result than what it replaces.
    """
    settings = _Settings(tuple(patterns), device, function, explain, runs_here, replaces, has_figures)
    result = Rewritten(closed)
    result.closed = _rewritten(closed, settings, "", result)
    return result


@dataclass(frozen=True, slots=True)
class _Settings:
    patterns: tuple[Pattern, ...]
    device: DeviceSpec | None
    function: str
    explain: bool
    runs_here: bool
    replaces: bool
    has_figures: bool

    @property
    def platform(self) -> str:
        return self.device.platform if self.device is not None else "cpu"


def _rewritten(closed: ClosedJaxpr, settings: _Settings, where: str, result: Rewritten) -> ClosedJaxpr:
    flat = FlatView(closed)
    search = Search(flat, settings.device, where, settings.explain)
    found: list[tuple[Pattern, Found]] = [(p, search.find(p)) for p in settings.patterns]
    used, passed_over = claimed(found, flat, settings.function)
    near_misses: list[NearMiss] = []
    for _, own in found:
        result.refusals += own.refusals
        near_misses += own.near_misses
    result.passed_over += passed_over
    insertions = []
    for match in used:
        made = _insertion(flat, match, settings, result) if settings.replaces else None
        if made is not None:
            insertions.append(made)
        if made is not None or not settings.replaces:
            result.used.append(match)
    gone = flat.needed - flat.live({v: i.reads for i in insertions for v in i.results})
    taken = {n for m in used for n in m.place.equations}
    result.near_misses += [miss for miss in near_misses if miss.at not in taken]
    bodies: dict[int, Mapping[str, Any]] = {}
    of_calls: dict[Call, Mapping[str, Any]] = {}
    inner = functools.partial(_rewritten_body, settings=settings, result=result, around=where)
    for n in sorted(flat.needed - gone):
        if any(call.has_rules for call in flat.call_of[n].around):
            continue  # It is in a body that is rewritten below.
        params = _new_bodies(flat, n, inner)
        if params is not None:
            bodies[n] = params
    for call in flat.program.calls():
        if not call.has_rules or any(outer.has_rules for outer in call.around[1:]):
            continue
        if any(n in taken for n in call.within()) or not any(n in flat.needed for n in call.within()):
            continue
        body = closed_body(call)
        new = inner(body, call.eqn.primitive.name)
        old = call.eqn.params[body_key(call.eqn)]
        if new is not body and as_param(old, new) is not None:
            of_calls[call] = {body_key(call.eqn): as_param(old, new)}
    if not insertions and not bodies and not of_calls:
        return closed
    return rebuilt(flat, insertions, bodies, of_calls)


def _rewritten_body(
    body: ClosedJaxpr, primitive: str, *, settings: _Settings, result: Rewritten, around: str
) -> ClosedJaxpr:
    if any(isinstance(value, jax.core.Tracer) for value in body.consts):
        return body
    where = f"{primitive} in {around}" if around else primitive
    return _rewritten(body, settings, where, result)


def _new_bodies(
    flat: FlatView, n: int, inner: Callable[[ClosedJaxpr, str], ClosedJaxpr]
) -> dict[str, Any] | None:
    eqn = flat.equations[n]
    name = eqn.primitive.name
    if name not in _BODIES:
        return None
    body = eqn.params[_BODIES[name]]
    every = body if isinstance(body, tuple) else (body,)
    new = tuple([inner(b, name) for b in every])
    if all(a is b for a, b in zip(new, every, strict=True)):
        return None
    return {_BODIES[name]: new if isinstance(body, tuple) else new[0]}


def _insertion(flat: FlatView, match: Match, settings: _Settings, result: Rewritten) -> Insertion | None:
    """The equations that compute the results of a match by its replacement; None, with a warning, if that
    cannot be traced."""
    place = match.place
    try:
        jaxpr = _replacement(match, settings)
    except (FuseplanError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        result.failed.append((match, reason))
        warnings.warn(
            f"the replacement of the pattern {match.pattern.name!r} at {match.source or 'an unknown line'} "
            f"raised {reason}: {settings.function} is left as it is there",
            FuseplanWarning,
            stacklevel=2,
        )
        return None
    if jaxpr is None:
        platform = settings.platform
        result.failed.append((match, f"it has no replacement for {platform}"))
        return None
    seconds = None
    if settings.device is not None and settings.has_figures:
        seconds = match.pattern.seconds(match, settings.device)
    time_ps = None if seconds is None else round(seconds * PS_PER_S)
    # Two results of the pattern may be one value of the program, which has one variable.
    roots = tuple(dict.fromkeys(place.roots))
    firsts = [place.roots.index(v) for v in roots]

    def whole(*values: Any) -> list[Any]:
        """The replacement with the transposes around it, which are then its own: XLA merges them with those
        that it begins with."""
        arrays = iter(values)
        operands = [
            _as_argument(b.root.val if isinstance(b.root, Literal) else next(arrays), b.dims, shape, a.dtype)
            for b, shape, a in zip(place.arguments, place.shapes, match.arguments, strict=True)
        ]
        results = run(*operands)
        return [
            _as_value(results[k], place.layouts[k], flat.avals[v]) for k, v in zip(firsts, roots, strict=True)
        ]

    run = function_of(jaxpr)
    reads = place.reads
    types = [flat.avals[v] for v in reads]
    inner = jax.make_jaxpr(whole)(*types)
    made = jax.make_jaxpr(lambda *x: bind(match.pattern.name, inner, time_ps, match.flops, *x))(*types)
    source = flat.source_info(flat.producer[place.roots[-1]][0])

    def equations(atom: Callable[[Operand], Any], results: Sequence[Any]) -> list[Any]:
        return spliced(made, [atom(v) for v in reads], results, source)

    return Insertion(roots, reads, equations)


def _as_argument(x: Any, dims: Dims, shape: tuple[int, ...], dtype: Any) -> Any:
    """A value of the program as an argument of the pattern: transposed, with dimensions of size one, and
    broadcast where the pattern needs that."""
    x = jnp.asarray(x, dtype)
    kept = [d for d in dims if d != NONE]
    dropped = tuple([d for d in range(x.ndim) if d not in kept])
    x = lax.squeeze(x, dropped) if dropped else x
    rank = sorted(kept)
    order = tuple([rank.index(d) for d in kept])
    x = lax.transpose(x, order) if order != tuple(range(len(order))) else x
    if x.shape == shape:
        return x
    places = tuple([i for i, d in enumerate(dims) if d != NONE])
    return lax.broadcast_in_dim(x, shape, places)


def _as_value(x: Any, layout: Dims, aval: Any) -> Any:
    """A result of the pattern as the value of the program that it takes the place of."""
    dropped = tuple([i for i, d in enumerate(layout) if d == NONE])
    x = lax.squeeze(x, dropped) if dropped else x
    places = [d for d in layout if d != NONE]
    order = tuple(np.argsort(places).tolist())
    x = lax.transpose(x, order) if order != tuple(range(len(order))) else x
    if x.shape != aval.shape:
        x = lax.reshape(x, aval.shape)
    if x.dtype == aval.dtype and getattr(jax.typeof(x), "weak_type", False) == aval.weak_type:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def _replacement(match: Match, settings: _Settings) -> ClosedJaxpr | None:
    """The jaxpr of the replacement; None if there is none for the platform.

    Raises:
        PatternError: its results have other shapes or dtypes.
    """
    pattern = match.pattern
    function = pattern.replacement
    if isinstance(function, Mapping):
        function = function.get(settings.platform)
        if function is None:
            return None
    if function is None:
        closed = _own(match)
    else:
        given: dict[str, Any] = dict(match.constants)
        if _takes_match(function):
            given["match"] = match
        closed, _ = closed_jaxpr(functools.partial(function, **given), match.arguments, {})
    wanted = [f"{r.dtype}{list(r.shape)}" for r in match.results]
    got = [f"{a.dtype}{list(a.shape)}" for a in closed.out_avals]
    if wanted != got:
        raise PatternError(
            f"the replacement of the pattern {pattern.name!r} returns {', '.join(got) or 'nothing'} where "
            f"the pattern has {', '.join(wanted)}, at {match.source or 'an unknown line'}: let it return the "
            "pattern's shapes and dtypes"
        )
    if settings.runs_here:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in match.arguments]
        jax.jit(function_of(closed)).lower(*types)
    return closed


def _takes_match(function: Callable[..., Any]) -> bool:
    try:
        return "match" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _own(match: Match) -> ClosedJaxpr:
    """The pattern itself, with its constants bound and without the names of its values."""
    closed, _ = closed_jaxpr(match.pattern.f, match.arguments, {})

    def run(*flat: Any) -> list[Any]:
        return _evaluated(closed.jaxpr, closed.consts, flat, match.constants)

    return jax.make_jaxpr(run)(*match.arguments)


def _evaluated(
    jaxpr: Any, consts: Sequence[Any], flat: Sequence[Any], constants: Mapping[str, Any]
) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *flat), strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
        if eqn.primitive is constant_p:
            results: Sequence[Any] = [jnp.asarray(constants[eqn.params["name"]])]
        elif eqn.primitive is name_p:
            results = operands
        elif eqn.primitive.name in ("jit", "closed_call") and _has_marks(eqn.params[body_key(eqn)]):
            inner = jax_compat.closed(eqn.params[body_key(eqn)])
            results = _evaluated(inner.jaxpr, inner.consts, operands, constants)
        else:
            with eqn.ctx.manager:
                bound = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            results = bound if eqn.primitive.multiple_results else [bound]
        env.update(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _has_marks(body: Any) -> bool:
    """Whether a jaxpr has named values or constants of a pattern."""
    jaxpr = jax_compat.closed(body).jaxpr
    return any(
        eqn.primitive in (constant_p, name_p)
        or (eqn.primitive.name in ("jit", "closed_call") and _has_marks(eqn.params[body_key(eqn)]))
        for eqn in jaxpr.eqns
    )
