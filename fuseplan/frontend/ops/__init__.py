"""The table of JAX primitives: one ``Rule`` for each, one file for each family of primitives.

In: an equation. Out: its kind, iteration space, flops, and how a kernel evaluates it on one tile. ``rule``
defines ``Rule`` and the table. Open ``rule`` first, then ``elementwise``.
"""

from __future__ import annotations

from fuseplan.frontend.ops import (
    contraction,
    elementwise,
    monoid,
    movement,
    one_hot_gather,
    opaque,
    random_bits,
    reduction,
    slices,
)
from fuseplan.frontend.ops.rule import has_rule, register_rule, rule_of, rules

__all__ = ["has_registered_rules", "has_rule", "register_rule", "rule_of", "rules"]

_FAMILIES = (
    *(elementwise, movement, slices, reduction, monoid, contraction),
    *(one_hot_gather, opaque, random_bits),
)

for _family in _FAMILIES:
    for _name, _rule in _family.RULES.items():
        register_rule(_name, _rule)

_BUILT_IN = rules()


def has_registered_rules() -> bool:
    """Whether a rule is not fuseplan's own: another process may lack it."""
    return any(rule is not _BUILT_IN.get(name) for name, rule in rules().items())
