"""What fuseplan knows of each primitive of JAX: one ``Rule`` each, a file a family.

In: an equation. Out: its kind, iteration space, flops, and how a kernel evaluates it on one tile. ``rule``
says what a rule is, ``registry`` looks one up and takes new ones. Open ``rule`` first, then ``elementwise``.
"""

from __future__ import annotations

from fuseplan.frontend.ops import (
    contraction,
    control,
    elementwise,
    indexing,
    movement,
    random,
    reduction,
    scans,
    slices,
)
from fuseplan.frontend.ops.registry import has_rule, register_rule, rule_of, rules

__all__ = ["has_rule", "register_rule", "rule_of", "rules"]

for _family in (elementwise, movement, slices, reduction, scans, contraction, indexing, control, random):
    for _name, _rule in _family.RULES.items():
        register_rule(_name, _rule)
