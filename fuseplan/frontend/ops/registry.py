"""The table of primitives: look up the rule of an equation, or declare one."""

from __future__ import annotations

from jax.extend import core as jex_core

from costmodel.graph import Flops, OpKind
from fuseplan.frontend.ops.rule import Rule, in_size, out_size, whole_space
from fuseplan.frontend.trace import Equation
from fuseplan.support.errors import InvalidArgumentError

_RULES: dict[str, Rule] = {}

_WITHOUT_RULE = Rule(
    OpKind.OPAQUE,
    whole_space,
    # Nothing is known of it: one operation an element touched, so that it is never free.
    lambda eqn: Flops(vector=in_size(eqn) + out_size(eqn)),
)


def rule_of(eqn: Equation) -> Rule:
    """The rule of an equation's primitive, or of the equation itself where its parameters and
    shapes say more; one without a rule is OPAQUE, never free."""
    rule = _RULES.get(eqn.primitive.name, _WITHOUT_RULE)
    special = rule.special(eqn) if rule.special is not None else None
    return special or rule


def has_rule(eqn: Equation) -> bool:
    """Whether its primitive is declared."""
    return eqn.primitive.name in _RULES


def rules() -> dict[str, Rule]:
    """Every declared primitive by name (a copy)."""
    return dict(_RULES)


def register_rule(primitive: jex_core.Primitive | str, rule: Rule) -> None:
    """Declare a primitive, or replace what is known of one.

    Plans made afterwards use it. Raises ``InvalidArgumentError`` for anything but a
    ``Rule``.

    Example:
        >>> from fuseplan.frontend.ops import register_rule, rules
        >>> register_rule("my_gelu", rules()["tanh"])
    """
    if not isinstance(rule, Rule):
        raise InvalidArgumentError(
            f"register_rule expects a fuseplan.extend.Rule, got {type(rule).__name__}. "
            "Build one with fuseplan.extend.elementwise(...), or one with Rule(kind, space, flops, block)."
        )
    name = primitive if isinstance(primitive, str) else primitive.name
    _RULES[name] = rule
