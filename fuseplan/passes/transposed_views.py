"""Programs whose transposes are views: written to memory only where another operation reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from jax import lax

from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import EquationRewriter
from fuseplan.frontend.trace import Equation, Literal

Dims = tuple[int, ...]


class View(NamedTuple):
    """A value whose dimension ``i`` is dimension ``order[i]`` of ``source``."""

    source: int
    order: Dims
    like: Equation
    """The equation that computes it."""


class TransposedViews(EquationRewriter):
    """Rewrites contractions, whose operands and results may be views; transposes in a row become one."""

    def __init__(self, old: Lowered) -> None:
        super().__init__(old)
        self._views: dict[int, View] = {}
        """The results of transposes, written to memory only if another operation reads them."""
        self._standing: dict[tuple[int, Dims], int] = {}

    def contraction(self, eqn: Equation) -> Equation:
        """The contraction to compute instead of ``eqn``, or ``eqn``."""
        raise NotImplementedError

    def run(self) -> Lowered | None:
        """The rewritten program; None where no contraction changes."""
        old, changed = self.old, False
        for eqn in old.equations:
            if eqn.primitive is lax.transpose_p and not eqn.is_set_apart:
                (v,) = eqn.inputs
                assert not isinstance(v, Literal), "a literal is a scalar"
                view = self.view(v, eqn)
                order = tuple(view.order[d] for d in eqn.params["permutation"])
                self._views[eqn.outputs[0]] = view._replace(order=order)
                continue
            is_contraction = eqn.primitive is lax.dot_general_p and not eqn.is_set_apart
            new = self.contraction(eqn) if is_contraction else eqn
            changed |= new is not eqn
            inputs = tuple(v if isinstance(v, Literal) else self._read(v) for v in new.inputs)
            self.equations.append(replace(new, inputs=inputs))
        if not changed:
            return None
        outputs = tuple(v if isinstance(v, Literal) else self._read(v) for v in old.outputs)
        return self.lowered(outputs)

    def reordered(self, eqn: Equation, dims: Dims) -> Equation:
        """``eqn``, whose result has dimensions ``dims`` of the old one, which is a view of it."""
        (old,), (aval,) = eqn.outputs, eqn.out_avals
        if dims == tuple(range(len(dims))):
            return eqn
        new = self.new_value(_reordered(aval, dims))
        self._views[old] = View(new, tuple(dims.index(d) for d in range(len(dims))), eqn)
        return replace(eqn, outputs=(new,), out_avals=(self.avals[new],))

    def view(self, v: int, like: Equation) -> View:
        return self._views.get(v) or View(v, tuple(range(self.avals[v].ndim)), like)

    def _read(self, v: int) -> int:
        return self.transposed(*self._views[v]) if v in self._views else v

    def transposed(self, v: int, order: Dims, like: Equation) -> int:
        """A value with its dimensions in another order, once for all that read it so."""
        if order == tuple(range(len(order))):
            return v
        if (v, order) not in self._standing:
            aval = _reordered(self.avals[v], order)
            (self._standing[v, order],) = self.add(like, lax.transpose_p, {"permutation": order}, [v], [aval])
        return self._standing[v, order]


def _reordered(aval: Any, order: Dims) -> Any:
    return aval.update(shape=tuple(aval.shape[d] for d in order))
