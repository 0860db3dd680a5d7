"""Transpose operands of contractions so that their batch dimensions come first.

Mosaic for TPUs lays out the last two dimensions of a block in registers. A tile of one head of
``q[B, T, H, D]`` has no such layout, so a kernel that streams the keys of an attention reads
``q[B, H, T, D]``. XLA transposes such operands itself. This pass makes the transposes operations of the
planned program, for operands that are small compared with the contraction. Where an operand has several
dimensions that are kept, or several that are contracted, all but the longest are moved to the front, too:
in grouped-query attention, the heads of queries that share a head of keys. Existing transposes are combined
with the new ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.passes.transposed_views import Dims, TransposedViews

_MIN_RATIO = 4
"""An operand is transposed if the largest array of its contraction is so many times larger: two passes over
the operand then cost little compared with one over that array."""


def batches_first(lowered: Lowered) -> Lowered | None:
    """``lowered`` with small operands of batched contractions transposed; None where none need be.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> q = jax.ShapeDtypeStruct((1, 512, 8, 64), "float32")
        >>> new = batches_first(lower(trace(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), q, q)))
        >>> [(node.op, new.graph.values[node.outputs[0]].shape) for node in new.graph.nodes]
        [('transpose', (1, 8, 512, 64)), ('transpose', (1, 8, 512, 64)), ('dot_general', (1, 8, 512, 512))]
    """
    return _Rewriter(lowered).run()


class _Side(NamedTuple):
    """An operand of a contraction."""

    value: int
    contract: Dims
    batch: Dims
    results: list[int]
    """The dimensions of the result that index the others."""


class _Rewriter(TransposedViews):
    def contraction(self, eqn: Equation) -> Equation:
        """The same contraction of operands whose batch dimensions come first."""
        contracts, batches = eqn.params["dimension_numbers"]
        if not batches[0]:
            return eqn
        largest = max(aval.size for aval in (*eqn.in_avals, *eqn.out_avals))
        sides: list[_Side] = []
        place = len(batches[0])
        for v, contract, batch in zip(eqn.inputs, contracts, batches, strict=True):
            assert not isinstance(v, Literal), "a literal is a scalar"
            new, dims = self._operand(v, contract, batch, eqn, largest)
            kept = [d for d in dims if d not in contract and d not in batch]
            results = [place + sorted(kept).index(d) for d in kept]
            contract, batch = (tuple(dims.index(d) for d in some) for some in (contract, batch))
            sides.append(_Side(new, contract, batch, results))
            place += len(kept)
        # Several dimensions of one operand come before the one of the other, so that those two are last.
        several = [sum(eqn.out_avals[0].shape[i] > 1 for i in side.results) > 1 for side in sides]
        precision = eqn.params["precision"]
        if several == [False, True] and not (isinstance(precision, tuple) and len(set(precision)) > 1):
            sides.reverse()
        inputs = tuple(side.value for side in sides)
        if inputs == eqn.inputs:
            return eqn
        (x, y), avals = sides, tuple(self.avals[v] for v in inputs)
        numbers = ((x.contract, y.contract), (x.batch, y.batch))
        params = {**eqn.params, "dimension_numbers": numbers}
        new_eqn = replace(eqn, inputs=inputs, in_avals=avals, params=params)
        return self.reordered(new_eqn, (*range(len(x.batch)), *x.results, *y.results))

    def _operand(self, v: int, contract: Dims, batch: Dims, eqn: Equation, largest: int) -> tuple[int, Dims]:
        """The value to read instead of ``v``, and for each of its dimensions the equal dimension of ``v``."""
        source, order, _ = self.view(v, eqn)
        shape = tuple(self.avals[source].shape[d] for d in order)
        every = range(len(shape))
        kept = [d for d in every if d not in contract and d not in batch]
        matrix = {max(some, key=lambda d: (shape[d], d)) for some in (kept, contract) if some}
        dims = tuple(order.index(d) for d in every)
        if all(shape[d] == 1 or d in matrix or i < len(dims) - 2 for i, d in enumerate(dims)):
            return source, dims
        if self.avals[source].size * _MIN_RATIO > largest:
            return v, tuple(every)
        shorter = [d for d in every if d not in batch and d not in matrix]
        dims = (*batch, *shorter, *sorted(matrix))
        return self.transposed(source, tuple(order[d] for d in dims), eqn), dims
