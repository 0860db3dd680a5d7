"""Batches first: what a contraction reads is transposed so that its batch dimensions lead.

Mosaic lays out the last two dimensions of a block, so that a tile of one head of ``q[B, T, H, D]``
has none: a kernel of a TPU that streams the keys of an attention reads ``q[B, H, T, D]``. XLA
transposes such operands itself; here the transposes are operations that the planner sees, for operands
that are small beside what is contracted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax import lax

from fuseplan.lower import Lowered, lower
from fuseplan.trace import Equation, Flat, Literal, Operand

_SMALL = 4
"""An operand is transposed if it is so many times smaller than the largest array of its contraction:
two passes over it are then little beside one over that."""


def batches_first(lowered: Lowered) -> Lowered | None:
    """``lowered`` with small operands of batched contractions transposed; None where none need be.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.trace import trace
        >>> q = jax.ShapeDtypeStruct((1, 512, 8, 64), "float32")
        >>> new = batches_first(lower(trace(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), q, q)))
        >>> [(node.op, new.graph.values[node.outputs[0]].shape) for node in new.graph.nodes]
        [('transpose', (1, 8, 512, 64)), ('transpose', (1, 8, 512, 64)), ('dot_general', (1, 8, 512, 512))]
    """
    return _Rewriter(lowered).run()


class _Rewriter:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.avals = list(lowered.avals)
        self.equations: list[Equation] = []
        self._transposed: dict[tuple[int, tuple[int, ...]], int] = {}

    def run(self) -> Lowered | None:
        for eqn in self.lowered.equations:
            is_dot = eqn.primitive is lax.dot_general_p and not eqn.is_set_apart
            self.equations.append(self._with_batches_first(eqn) if is_dot else eqn)
        old = self.lowered
        if not self._transposed:
            return None
        return lower(
            Flat(tuple(self.equations), tuple(self.avals), old.graph.inputs, old.outputs, old.consts,
                 old.out_tree)
        )  # fmt: skip

    def _with_batches_first(self, eqn: Equation) -> Equation:
        contracts, batches = eqn.params["dimension_numbers"]
        largest = max(aval.size for aval in (*eqn.in_avals, *eqn.out_avals))
        inputs: list[Operand] = []
        avals: list[Any] = []
        numbers = []
        for v, aval, contract, batch in zip(eqn.inputs, eqn.in_avals, contracts, batches, strict=True):
            order = (*batch, *(d for d in range(aval.ndim) if d not in batch))
            leads = all(aval.shape[d] == 1 or d < aval.ndim - 2 for d in batch)
            if isinstance(v, Literal) or leads or aval.size * _SMALL > largest:
                order = tuple(range(aval.ndim))
            else:
                v = self._transpose(v, order, eqn)
            inputs.append(v)
            avals.append(aval if isinstance(v, Literal) else self.avals[v])
            numbers.append(tuple(tuple(order.index(d) for d in dims) for dims in (contract, batch)))
        (lhs_contract, lhs_batch), (rhs_contract, rhs_batch) = numbers
        dims = ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))
        params = {**eqn.params, "dimension_numbers": dims}
        return replace(eqn, inputs=tuple(inputs), in_avals=tuple(avals), params=params)

    def _transpose(self, v: int, order: tuple[int, ...], like: Equation) -> int:
        """A value with its dimensions in another order, once for all that read it so."""
        if (v, order) not in self._transposed:
            aval = self.avals[v]
            out = aval.update(shape=tuple(aval.shape[d] for d in order))
            self.avals.append(out)
            new = self._transposed[v, order] = len(self.avals) - 1
            self.equations.append(
                replace(like, primitive=lax.transpose_p, params={"permutation": order}, inputs=(v,),
                        outputs=(new,), in_avals=(aval,), out_avals=(out,))
            )  # fmt: skip
        return self._transposed[v, order]
