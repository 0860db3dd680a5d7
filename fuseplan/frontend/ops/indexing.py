"""Gathers, scatters, dynamic slices, sorts: left to XLA as they are, but for those that touch
one element a row (``picking``)."""

from __future__ import annotations

import math
from dataclasses import replace

from costmodel.graph import Flops, OpKind
from fuseplan.frontend.ops.one_hot_gather import gather_rule, scatter_flops, scatter_rule
from fuseplan.frontend.ops.rule import PALLAS, Rule, in_size, no_flops, whole_space
from fuseplan.frontend.ops.slices import constant_slice
from fuseplan.frontend.trace import Equation


def _sort_flops(eqn: Equation) -> Flops:
    """A comparison network of ``n log2 n`` comparisons a row (Batcher's bound, one pass)."""
    rows = in_size(eqn)
    longest = max((a.shape[eqn.params.get("dimension", -1)] for a in eqn.in_avals if a.ndim), default=1)
    return Flops(vector=rows * max(math.ceil(math.log2(max(longest, 2))), 1))


_MOVE = Rule(OpKind.INJECTIVE, whole_space, no_flops, None, PALLAS)
_SCATTER = Rule(OpKind.OPAQUE, whole_space, scatter_flops, None, PALLAS)

RULES: dict[str, Rule] = {
    "gather": replace(_MOVE, special=gather_rule),
    "dynamic_slice": replace(_MOVE, special=constant_slice),
    **dict.fromkeys(("dynamic_update_slice", "take_along_axis"), _MOVE),
    **dict.fromkeys(("scatter-add", "scatter_add"), replace(_SCATTER, special=scatter_rule)),
    **dict.fromkeys(("scatter", "scatter_mul", "scatter-mul", "scatter_min", "scatter_max"), _SCATTER),
    "sort": Rule(OpKind.OPAQUE, whole_space, _sort_flops, None, PALLAS),
    "top_k": Rule(OpKind.OPAQUE, whole_space, lambda eqn: Flops(vector=in_size(eqn)), None, PALLAS),
}
