"""Values of one program that another computes, too: they can be given to it.

Two values are the same if they are the same expression of the same inputs: operations are numbered by
what they do and by the numbers of their operands (value numbering: Cocke and Schwartz, 1970).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.trace import Equation, Flat, Literal, live


class Expressions:
    """Numbers the values of programs that are alive all the while."""

    def __init__(self) -> None:
        self._describe = Describer()
        self._numbers: dict[Hashable, int] = {}

    def number(self, equations: Iterable[Equation], inputs: Mapping[int, Hashable]) -> dict[int, int]:
        """The number of each value that ``inputs`` lead to; these have names that all programs know
        them by."""
        found = {v: self._of(("input", name)) for v, name in inputs.items()}
        for eqn in equations:
            if eqn.effects or eqn.is_set_apart or not all(self._is_known(v, found) for v in eqn.inputs):
                continue
            operands = tuple([self._operand(v, found) for v in eqn.inputs])
            params = self._describe.params(eqn.primitive.name, eqn.params)
            name = (eqn.primitive.name, params, operands)
            for k, v in enumerate(eqn.outputs):
                found[v] = self._of((k, *name))
        return found

    @staticmethod
    def _is_known(v: int | Literal, found: Mapping[int, int]) -> bool:
        return isinstance(v, Literal) or v in found

    def _operand(self, v: int | Literal, found: Mapping[int, int]) -> Hashable:
        return (self._describe.literal(v.val), str(v.aval)) if isinstance(v, Literal) else found[v]

    def _of(self, expression: Hashable) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))


def given(flat: Flat, values: Sequence[int | None], avals: Sequence[Any]) -> Flat:
    """The program with ``values`` as further inputs, of these avals, and without what led to them
    alone; None is an input that it does not read."""
    unread = itertools.count(len(flat.avals))
    numbers = [next(unread) if v is None else v for v in values]
    taken = set(numbers)
    return Flat(
        live([eqn for eqn in flat.equations if taken.isdisjoint(eqn.outputs)], flat.outputs),
        (*flat.avals, *(a for v, a in zip(values, avals, strict=True) if v is None)),
        (*flat.inputs, *numbers),
        flat.outputs,
        flat.consts,
        flat.out_tree,
    )
