"""Drop the dimensions of size one from the blocks of a kernel.

A block of a batch of arrays, such as one head of attention, has dimensions of size one before those that its
tile has. Triton's compiler chooses the layout of a block by its rank, and exchanges the elements of the
registers of a program through shared memory between operations whose layouts differ: with blocks of rank
four it does so several times in each turn of an attention's loop, and never with the same blocks of rank two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from fuseplan.frontend.trace import Literal

Shape = tuple[int, ...]
Evaluate = Callable[[Any, list[Any]], Sequence[Any]]
"""The results of an equation, from its operands; both without dimensions of size one."""


def without_unit_dims(kernel: Any) -> Callable[..., None]:
    """The body of a Pallas kernel, from its jaxpr, as a function of its references, evaluated on blocks that
    have no dimension of size one."""

    def run(*refs: Any) -> None:
        _run(kernel, (), refs)

    return run


def _kept(shape: Shape) -> tuple[int, ...]:
    """The dimensions of a block that are kept: those longer than one, or the last of several of size one,
    since a block is no scalar."""
    return tuple(d for d, n in enumerate(shape) if n != 1) or tuple(range(len(shape)))[-1:]


def _short(shape: Shape) -> Shape:
    return tuple(shape[d] for d in _kept(shape))


def _at(shape: Shape, dim: int) -> int:
    """The position of a dimension of ``shape`` among those that are kept."""
    return sum(d < dim for d in _kept(shape))


def _reshaped(x: Any, shape: Shape) -> Any:
    return x if not shape or x.shape == shape else lax.reshape(x, shape)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for eqn in jaxpr.eqns:
        evaluate = _RULES.get(eqn.primitive.name, _elementwise)
        results = evaluate(eqn, [read(v) for v in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _results(eqn: Any, made: Any) -> Sequence[Any]:
    return made if eqn.primitive.multiple_results else [made]


def _unchanged(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """Any primitive, on operands with all their dimensions; references, such as that of a load, have no
    others."""
    full = [
        _reshaped(x, v.aval.shape) if _is_block(v) else x for v, x in zip(eqn.invars, operands, strict=True)
    ]
    made = _results(eqn, eqn.primitive.bind(*full, **eqn.params))
    return [
        _reshaped(x, _short(v.aval.shape)) if _is_block(v) else x
        for v, x in zip(eqn.outvars, made, strict=True)
    ]


def _is_block(v: Any) -> bool:
    return type(v.aval) is jax.core.ShapedArray


def _elementwise(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """A primitive that computes each element of its results from the same one of its operands, where a
    dimension of size one, or a scalar, stands for all; any other as it is."""
    shape = eqn.outvars[0].aval.shape if eqn.outvars else ()
    alike = all(
        _is_block(v) and (not v.aval.shape or _spreads(v.aval.shape, shape)) for v in eqn.invars
    ) and all(_is_block(v) and v.aval.shape == shape for v in eqn.outvars)
    if not alike or not shape or eqn.primitive.name in _NOT_ELEMENTWISE:
        return _unchanged(eqn, operands)
    kept = _kept(shape)
    short = [
        _reshaped(x, tuple(v.aval.shape[d] for d in kept)) if v.aval.shape else x
        for v, x in zip(eqn.invars, operands, strict=True)
    ]
    return _results(eqn, eqn.primitive.bind(*short, **eqn.params))


def _spreads(shape: Shape, over: Shape) -> bool:
    return len(shape) == len(over) and all(n in (1, m) for n, m in zip(shape, over, strict=True))


def _broadcast(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    (x,), own, shape = operands, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    to = eqn.params["broadcast_dimensions"]
    long = [d for d, n in enumerate(own) if n != 1]
    if not own:
        return [lax.broadcast(x, _short(shape))]
    if not long:  # one element, whose dimension may become any
        return [lax.broadcast_in_dim(x, _short(shape), [len(_short(shape)) - 1])]
    x = _reshaped(x, tuple(own[d] for d in long))
    return [lax.broadcast_in_dim(x, _short(shape), [_at(shape, to[d]) for d in long])]


def _reshape(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    if not eqn.outvars[0].aval.shape or not eqn.invars[0].aval.shape:
        return _unchanged(eqn, operands)
    return [_reshaped(operands[0], _short(eqn.outvars[0].aval.shape))]


def _transpose(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    own, kept = eqn.invars[0].aval.shape, _kept(eqn.invars[0].aval.shape)
    order = [_at(own, d) for d in eqn.params["permutation"] if d in kept]
    x = operands[0]
    return [x if order == sorted(order) else lax.transpose(x, order)]


def _reduce(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    own = eqn.invars[0].aval.shape
    axes = [d for d in eqn.params["axes"] if own[d] != 1]
    if not eqn.outvars[0].aval.shape or len(_short(own)) != sum(n != 1 for n in own):
        return _unchanged(eqn, operands)
    x = operands[0]
    if axes:
        x = eqn.primitive.bind(x, **{**eqn.params, "axes": tuple(_at(own, d) for d in axes)})
    return [_reshaped(x, _short(eqn.outvars[0].aval.shape))]


def _iota(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    if operands or shape[dim] == 1:
        return _unchanged(eqn, operands)
    return [lax.broadcasted_iota(eqn.params["dtype"], _short(shape), _at(shape, dim))]


def _concatenate(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    dim, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    kept = _kept(shape)
    if dim not in kept:
        return _unchanged(eqn, operands)
    parts = [
        _reshaped(x, tuple(v.aval.shape[d] for d in kept)) for v, x in zip(eqn.invars, operands, strict=True)
    ]
    return [lax.concatenate(parts, _at(shape, dim))]


def _split(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    own, dim = eqn.invars[0].aval.shape, eqn.params["axis"]
    if dim not in _kept(own) or math.prod(own) == 1:
        return _unchanged(eqn, operands)
    parts = lax.split(operands[0], eqn.params["sizes"], _at(own, dim))
    return [_reshaped(x, _short(v.aval.shape)) for v, x in zip(eqn.outvars, parts, strict=True)]


def _called(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return _run(inner.jaxpr, inner.consts, operands)


def _scan(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """A loop of a known number of turns, which neither reads nor writes stacked arrays: all its results are
    carried."""
    inner, n_consts = eqn.params["jaxpr"], len(operands) - len(eqn.outvars)
    consts, start = operands[:n_consts], operands[n_consts:]

    def turn(carry: Any, _: None) -> tuple[Any, None]:
        return _run(inner.jaxpr, inner.consts, [*consts, *carry]), None

    return lax.scan(turn, start, None, length=eqn.params["length"])[0]


def _while(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_condition, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    known, own = operands[:n_condition], operands[n_condition : n_condition + n_body]

    def goes_on(carry: Any) -> Any:
        return _run(condition.jaxpr, condition.consts, [*known, *carry])[0]

    def turn(carry: Any) -> Any:
        return _run(body.jaxpr, body.consts, [*own, *carry])

    return lax.while_loop(goes_on, turn, operands[n_condition + n_body :])


_NOT_ELEMENTWISE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev"})

_RULES: dict[str, Evaluate] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _reduce),
    "iota": _iota,
    "concatenate": _concatenate,
    "split": _split,
    **dict.fromkeys(("jit", "closed_call", "custom_jvp_call", "custom_vjp_call"), _called),
    "scan": _scan,
    "while": _while,
}
