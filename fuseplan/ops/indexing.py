"""Gathers, scatters, dynamic slices, sorts: left to XLA as they are."""

from __future__ import annotations

import math

from costmodel.graph import Flops, OpKind
from fuseplan.ops.rule import PALLAS, Rule, in_size, no_flops, whole_space
from fuseplan.trace import Equation


def _scatter_flops(eqn: Equation) -> Flops:
    return Flops(vector=eqn.in_avals[-1].size)


def _sort_flops(eqn: Equation) -> Flops:
    """A comparison network of ``n log2 n`` comparisons a row (Batcher's bound, one pass)."""
    rows = in_size(eqn)
    longest = max((a.shape[eqn.params.get("dimension", -1)] for a in eqn.in_avals if a.ndim), default=1)
    return Flops(vector=rows * max(math.ceil(math.log2(max(longest, 2))), 1))


_MOVE = Rule(OpKind.INJECTIVE, whole_space, no_flops, None, PALLAS)
_SCATTER = Rule(OpKind.OPAQUE, whole_space, _scatter_flops, None, PALLAS)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("gather", "dynamic_slice", "dynamic_update_slice", "take_along_axis"), _MOVE),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter-mul", "scatter_min", "scatter_max"),
        _SCATTER,
    ),
    "sort": Rule(OpKind.OPAQUE, whole_space, _sort_flops, None, PALLAS),
    "top_k": Rule(OpKind.OPAQUE, whole_space, lambda eqn: Flops(vector=in_size(eqn)), None, PALLAS),
}
