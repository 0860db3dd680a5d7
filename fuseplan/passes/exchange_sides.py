"""Exchange the operands of a contraction whose transposed result is what a program reads.

``jnp.einsum("bhts,bshd->bthd", p, v)`` contracts ``v`` with ``p``, so that the result is
``[B, H, D, T]``, and transposes it. The product of ``p`` and ``v`` is ``[B, H, T, D]``: the transpose that
remains moves no element within a row. A kernel of a GPU then multiplies by the rows ``p`` that its registers
hold, and a loop of a CPU adds up products as XLA computes them, without a transpose in each turn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from jax import lax

from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.ops.contraction import treats_sides_alike
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.passes.transposed_views import TransposedViews


def exchange_sides(lowered: Lowered) -> Lowered | None:
    """``lowered`` with the operands of contractions exchanged where the rows of the result then stay rows in
    every transpose that reads it; None where there is no such contraction.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> p, v = jnp.ones((2, 4, 8, 8)), jnp.ones((2, 8, 4, 16))
        >>> new = exchange_sides(lower(trace(lambda p, v: jnp.einsum("bhts,bshd->bthd", p, v), p, v)))
        >>> [(node.op, new.graph.values[node.outputs[0]].shape) for node in new.graph.nodes]
        [('dot_general', (2, 4, 8, 16)), ('transpose', (2, 8, 4, 16))]
    """
    return _Rewriter(lowered).run()


class _Rewriter(TransposedViews):
    def __init__(self, old: Lowered) -> None:
        super().__init__(old)
        self._readers: dict[int, list[Equation | None]] = defaultdict(list)
        """The equations that read each value, None for the program's results."""
        for eqn in old.equations:
            for v in eqn.inputs:
                if not isinstance(v, Literal):
                    self._readers[v].append(eqn)
        for v in old.outputs:
            if not isinstance(v, Literal):
                self._readers[v].append(None)

    def contraction(self, eqn: Equation) -> Equation:
        """``eqn`` with its operands exchanged, where that keeps rows in place."""
        contracts, batches = eqn.params["dimension_numbers"]
        x, y = (aval.ndim - len(c) - len(batches[0]) for aval, c in zip(eqn.in_avals, contracts, strict=True))
        place = len(batches[0])
        last_of_x = place + x - 1
        if not (x and y and treats_sides_alike(eqn) and self._rows_become(eqn.outputs[0], last_of_x)):
            return eqn
        params = {**eqn.params, "dimension_numbers": (contracts[::-1], batches[::-1])}
        exchanged = replace(eqn, inputs=eqn.inputs[::-1], in_avals=eqn.in_avals[::-1], params=params)
        dims = (*range(place), *range(place + x, place + x + y), *range(place, place + x))
        return self.reordered(exchanged, dims)

    def _rows_become(self, v: int, dim: int) -> bool:
        """Whether ``v`` is read by transposes alone, which all make ``dim`` the last dimension."""
        return bool(self._readers[v]) and all(
            reader is not None
            and reader.primitive is lax.transpose_p
            and not reader.is_set_apart
            and reader.params["permutation"][-1] == dim
            for reader in self._readers[v]
        )
