"""Rewrite scans so that they stack no large array that the program only reduces over the steps.

A result that a scan stacks, and of which the program only uses a sum or an extremum over the steps, is
carried: each step combines its own part with the carry, and no stack is written. The mean of the gradients of
many batches is the usual case. An operand that is the same array for each step, as in the gradient of such a
sum, is passed once.

Sums of 16-bit floats are carried in float32. The steps are added up in their order; what each addition rounds
off is carried, too, so that a sum of many steps is as exact as one of a stack (D. E. Knuth, The Art of
Computer Programming 2, section 4.2.2, theorem B; T. Ogita et al., "Accurate Sum and Dot Product", 2005).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax import numpy as jnp

from fuseplan.frontend.ops.reduction import accumulator, highest, lowest
from fuseplan.frontend.trace import Equation, Flat, Literal, Operand, live, trace
from fuseplan.support import jax_compat
from fuseplan.support.memo import memoised

LEAST_BYTES = 32 << 20
"""Smaller stacks stay as they are: a cache may hold them, and allocators keep their memory for the next run
(the largest dynamic M_MMAP_THRESHOLD of glibc, mallopt(3))."""

Combine = Callable[[Any, Any], Any]


_COMBINED: dict[str, tuple[Combine, Callable[[Any], Any]]] = {
    "reduce_sum": (lax.add, lambda dtype: 0),
    "reduce_prod": (lax.mul, lambda dtype: 1),
    "reduce_max": (lax.max, lowest),
    "reduce_min": (lax.min, highest),
}
"""By reduction, how two results are combined, and the neutral element of a dtype."""


@dataclass(frozen=True, slots=True)
class _Carried:
    """A stacked result that is only reduced: its position among the stacked ones, the dtype that it is
    converted to, and the reduction."""

    place: int
    dtype: Any
    reduction: Equation


@dataclass(frozen=True, slots=True)
class _Scan:
    """A scan with what its arguments and results are."""

    equation: Equation
    n_consts: int
    n_carry: int

    @classmethod
    def of(cls, equation: Equation) -> _Scan:
        return cls(equation, *jax_compat.scan_counts(equation.params))

    @property
    def n_fixed(self) -> int:
        """The number of arguments before those that are sliced step by step."""
        return self.n_consts + self.n_carry

    def rewritten(self, carried: Sequence[_Carried], repeated: Collection[int]) -> Callable[..., list[Any]]:
        """The scan as a function of its arguments, of which those at the positions ``repeated`` among the
        sliced ones are given as one step reads them. Its results are the carries, the stacked results that
        are not ``carried``, and the reductions."""
        params = self.equation.params
        body, n_carry, n_fixed = jax_compat.closed(params["jaxpr"]), self.n_carry, self.n_fixed
        kept_out = {c.place for c in carried}

        def run(*given: Any) -> list[Any]:
            consts, init = given[: self.n_consts], given[self.n_consts : n_fixed]
            xs = given[n_fixed:]
            sliced = [x for i, x in enumerate(xs) if i not in repeated]

            def step(state: Any, own: Any) -> Any:
                carry, totals = state
                rest = iter(own)
                parts = [xs[i] if i in repeated else next(rest) for i in range(len(xs))]
                results = jax_compat.eval_jaxpr(body.jaxpr, body.consts, *consts, *carry, *parts)
                stacked = results[n_carry:]
                totals = [
                    _combined(total, _reduced(stacked[c.place], c), c)
                    for c, total in zip(carried, totals, strict=True)
                ]
                return (results[:n_carry], totals), [y for k, y in enumerate(stacked) if k not in kept_out]

            start = (list(init), [_initial(c) for c in carried])
            (carry, totals), stacked = lax.scan(
                step, start, sliced, length=params["length"], reverse=params["reverse"],
                unroll=params["unroll"],
            )  # fmt: skip
            ends = [
                lax.convert_element_type(_finished(total), c.reduction.out_avals[0].dtype)
                for c, total in zip(carried, totals, strict=True)
            ]
            return [*carry, *stacked, *ends]

        return run


def _reduced(y: Any, carried: _Carried) -> Any:
    """A step's part of a reduction, in the dtype of its carry."""
    eqn = carried.reduction
    y = lax.convert_element_type(lax.convert_element_type(y, carried.dtype), accumulator(carried.dtype))
    axes = tuple(a - 1 for a in eqn.params["axes"] if a)
    return eqn.primitive.bind(y, **{**eqn.params, "axes": axes}) if axes else y


Total = tuple[Any, ...]
"""The carry of a reduction; of a sum of floats also the sum of what was rounded off."""


def _initial(carried: _Carried) -> Total:
    dtype, name = accumulator(carried.dtype), carried.reduction.primitive.name
    start = jnp.full(carried.reduction.out_avals[0].shape, _COMBINED[name][1](dtype), dtype)
    rounds = name == "reduce_sum" and jnp.issubdtype(dtype, jnp.inexact)
    return (start, start) if rounds else (start,)


def _combined(total: Total, part: Any, carried: _Carried) -> Total:
    old, *rounded = total
    new = _COMBINED[carried.reduction.primitive.name][0](old, part)
    if not rounded:
        return (new,)
    added = new - old
    return new, rounded[0] + ((old - (new - added)) + (part - added))


def _finished(total: Total) -> Any:
    whole, *rounded = total
    # What an infinity rounds off is not a number.
    return jnp.where(jnp.isfinite(whole), whole + rounded[0], whole) if rounded else whole


@memoised
def with_lean_scans(flat: Flat) -> Flat:
    """``flat``, whose scans stack no large array that is only reduced over the steps, and slice none that is
    the same in each; ``flat`` itself if there is nothing to change.

    Example:
        >>> import jax
        >>> x = jax.ShapeDtypeStruct((9, 1000000), "float32")
        >>> flat = trace(lambda x: lax.map(jnp.sin, x).sum(0), x)
        >>> [str(e) for e in with_lean_scans(flat).equations if e.primitive.name == "scan"]
        ['float32[1000000], float32[1000000] = scan float32[1000000], float32[1000000], float32[9,1000000]']
    """
    if not any(eqn.primitive.name == "scan" for eqn in flat.equations):
        return flat
    return _Rewriter(flat).run()


class _Rewriter:
    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.readers: dict[int, list[Equation]] = {}
        self.maker: dict[int, Equation] = {}
        for eqn in flat.equations:
            self.maker.update(dict.fromkeys(eqn.outputs, eqn))
            for v in {v for v in eqn.inputs if not isinstance(v, Literal)}:
                self.readers.setdefault(v, []).append(eqn)
        self.results = {v for v in flat.outputs if not isinstance(v, Literal)}
        self.avals = list(flat.avals)
        self.gone: set[int] = set()
        """Results of equations that a scan computes instead."""

    def run(self) -> Flat:
        changed: dict[int, list[Equation]] = {}
        for k, eqn in enumerate(self.flat.equations):
            if eqn.primitive.name == "scan" and _may_change(eqn):
                scan = _Scan.of(eqn)
                carried, repeated = self._carried(scan), self._repeated(scan)
                new = self._rewritten(scan, carried, repeated) if carried or repeated else None
                if new is not None:
                    changed[k] = new
                    self.gone.update(c.reduction.outputs[0] for c in carried)
        if not changed:
            return self.flat
        equations: list[Equation] = []
        for k, eqn in enumerate(self.flat.equations):
            if k in changed:
                equations += changed[k]
            elif self.gone.isdisjoint(eqn.outputs):
                equations.append(eqn)
        kept = live(equations, self.flat.outputs)
        return replace(self.flat, equations=kept, avals=tuple(self.avals))

    def _carried(self, scan: _Scan) -> list[_Carried]:
        found = []
        for place, v in enumerate(scan.equation.outputs[scan.n_carry :]):
            is_large = _nbytes(self.avals[v]) >= LEAST_BYTES
            every = self._reductions(v) if is_large else None
            if every and scan.equation.params["length"] > 0:
                found += [_Carried(place, dtype, reduction) for dtype, reduction in every]
        return found

    def _reductions(self, v: int) -> list[tuple[Any, Equation]] | None:
        """The reductions over the steps that alone read a stacked array, each with the dtype that it is
        converted to first; None if something else reads it."""
        if v in self.results:
            return None
        found: list[tuple[Any, Equation]] = []
        for eqn in self.readers.get(v, ()):
            if eqn.effects or eqn.is_set_apart:
                return None
            name, aval = eqn.primitive.name, eqn.in_avals[0]
            if name == "convert_element_type":
                inner = self._reductions(eqn.outputs[0])
                if inner is None:
                    return None
                found += inner
            elif name in _COMBINED and 0 in eqn.params["axes"] and _is_number(aval.dtype, name):
                found.append((aval.dtype, eqn))
            else:
                return None
        return found or None

    def _repeated(self, scan: _Scan) -> dict[int, tuple[int, ...]]:
        """The operands, by position, that are an array repeated for each step, each with the dimensions of
        its slice that the array has."""
        found = {}
        for i, v in enumerate(scan.equation.inputs[scan.n_fixed :]):
            maker = None if isinstance(v, Literal) else self.maker.get(v)
            if maker is None or maker.primitive.name != "broadcast_in_dim" or len(maker.inputs) != 1:
                continue
            dims = maker.params["broadcast_dimensions"]
            is_along_steps = 0 in dims and maker.in_avals[0].shape[dims.index(0)] != 1
            is_large = _nbytes(maker.out_avals[0]) >= LEAST_BYTES
            if is_large and not is_along_steps and not maker.is_set_apart:
                found[i] = tuple(dims)
        return found

    def _rewritten(
        self, scan: _Scan, carried: Sequence[_Carried], repeated: dict[int, tuple[int, ...]]
    ) -> list[Equation] | None:
        """The equations in the place of a scan; None if its body has constants of its own."""
        eqn = scan.equation
        given: list[Operand] = list(eqn.inputs)
        avals = list(eqn.in_avals)
        shapes: dict[int, tuple[int, ...]] = {}
        for i in repeated:
            place = scan.n_fixed + i
            v = given[place]
            assert not isinstance(v, Literal), "a broadcast makes it"
            maker = self.maker[v]
            shapes[i] = tuple(avals[place].shape[1:])
            given[place], avals[place] = maker.inputs[0], maker.in_avals[0]
        run = scan.rewritten(carried, repeated)

        def program(*arrays: Any) -> list[Any]:
            every = list(arrays)
            for i, dims in repeated.items():
                x = every[scan.n_fixed + i]
                if 0 in dims:
                    x = lax.squeeze(x, (dims.index(0),))
                inner = tuple(d - 1 for d in dims if d)
                every[scan.n_fixed + i] = lax.broadcast_in_dim(x, shapes[i], inner)
            return run(*every)

        kept_out = {c.place for c in carried}
        stacked = [v for k, v in enumerate(eqn.outputs[scan.n_carry :]) if k not in kept_out]
        results = [*eqn.outputs[: scan.n_carry], *stacked, *(c.reduction.outputs[0] for c in carried)]
        return self._spliced(eqn, program, given, avals, results)

    def _spliced(
        self,
        eqn: Equation,
        program: Callable[..., list[Any]],
        given: Sequence[Operand],
        avals: Sequence[Any],
        results: Sequence[int],
    ) -> list[Equation] | None:
        """The equations of ``program`` at ``given``, with the numbers ``results``."""
        inner = trace(program, *avals)
        if inner.consts:
            return None
        number: dict[int, Operand] = dict(zip(inner.inputs, given, strict=True))
        made = dict(zip(inner.outputs, results, strict=True))
        equations = []
        for new in inner.equations:
            outputs = []
            for v in new.outputs:
                if v not in made:
                    self.avals.append(inner.avals[v])
                outputs.append(made.get(v, len(self.avals) - 1))
            number.update(zip(new.outputs, outputs, strict=True))
            inputs = tuple([v if isinstance(v, Literal) else number[v] for v in new.inputs])
            here = replace(new, frames=eqn.frames, context=eqn.context, scope=eqn.scope)
            equations.append(replace(here, inputs=inputs, outputs=tuple(outputs)))
        return equations


def _nbytes(aval: Any) -> int:
    # Random keys have no item size, and are small.
    return int(aval.size * getattr(aval.dtype, "itemsize", 0))


def _may_change(eqn: Equation) -> bool:
    """Whether a scan can be traced anew: it has no side effects, and no array that differs between shards."""
    avals = (*eqn.in_avals, *eqn.out_avals)
    return not (eqn.effects or eqn.is_set_apart or any(map(jax_compat.varying_axes, avals)))


def _is_number(dtype: Any, name: str) -> bool:
    """Whether numbers of a dtype are combined by a reduction as ``_COMBINED`` says."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return name in ("reduce_sum", "reduce_prod")
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
