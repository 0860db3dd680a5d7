"""Bounds: what every value of a group is bounded by, from bounds of the arrays it reads.

Bounds may be *assumed*: of the elements where a mask has a certain value, whatever else is
computed there. Two facts that intervals alone lose are kept: nothing exceeds its own
maximum, and a sum of exp(x - max(x)) is at least one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.graph import DimRole
from costmodel.kernel import Access
from fuseplan.frontend.trace import Literal
from fuseplan.masks.index_ranges import constant
from fuseplan.masks.interval_operations import UNKNOWN, Interval, product
from fuseplan.masks.intervals import MOVES, apply, rounded, unknown
from fuseplan.masks.masked_group import Assumption, MaskedGroup, Operand

_MAX_CASES = 64


class Bounds:
    """Bounds of a group's values, computed by ``xp``: NumPy, or jax.numpy on traced scalars.

    ``inputs`` bounds what the group reads, by value; ``masks`` what is index arithmetic, and
    ``choices`` are values that masks take. ``dead`` are the assumptions under which elements
    are going to be skipped.
    """

    def __init__(
        self,
        group: MaskedGroup,
        xp: Any,
        inputs: Callable[[int], Interval],
        masks: Mapping[Access, Interval],
        choices: Mapping[Access, Sequence[float]],
        dead: Sequence[Assumption],
    ) -> None:
        self.group, self.xp, self.inputs, self.masks = group, xp, inputs, masks
        self.choices, self.dead = choices, dead
        self._known: dict[tuple[Any, Assumption], Interval] = {}

    def neutral(self, i: int, assumed: Assumption) -> Any:
        """Whether a reduction's result is the same without the elements that are as assumed."""
        with np.errstate(all="ignore"):
            return self._neutral(i, assumed)

    def _neutral(self, i: int, assumed: Assumption) -> Any:
        operands = [self.value(x, assumed) for x in self.group.operands[i]]
        lo, hi = operands[0]
        match self.group.nodes[i].op:
            case "reduce_sum" | "reduce_or":
                return (lo == 0) & (hi == 0)
            case "dot_general":
                lo, hi = product(self.xp, self.group.equations[i], *operands)
                return (lo == 0) & (hi == 0)
            case "reduce_prod" | "reduce_and":
                return (lo == 1) & (hi == 1)
            case "reduce_max":
                return hi <= self._live(i)[0]
            case "reduce_min":
                return lo >= self._live(i)[1]
        return False

    def value(self, x: Operand, assumed: Assumption = ()) -> Interval:
        """Bounds of an operand, at the elements that are as assumed."""
        if isinstance(x, Literal):
            return constant(x)
        if x.value in self.group.index:
            value = dict(assumed).get(x)
            return self.masks[x] if value is None else (np.float64(value), np.float64(value))
        i = self.group.maker.get(x.value)
        key = (x.value, () if i is None else assumed)
        if key not in self._known:
            self._known[key] = self.inputs(x.value) if i is None else self._result(i, assumed)
        return self._known[key]

    def _result(self, i: int, assumed: Assumption) -> Interval:
        group, xp = self.group, self.xp
        node, eqn = group.nodes[i], group.equations[i]
        if len(node.outputs) != 1:
            return UNKNOWN
        gathered = group.axes_of(i, DimRole.REDUCED, DimRole.WHOLE)
        whole = group.axes_of(i, DimRole.WHOLE)
        if whole or any(gathered & mask.axis_set for mask, _ in assumed):
            assumed = ()  # An element of the result may depend on any of the operands'.
        operands = [self.value(x, assumed) for x in group.operands[i]]
        match node.op:
            case "reduce_sum":
                return self._sum(i, operands[0])
            case "dot_general":
                return self._total(i, product(xp, eqn, *operands))
            case "reduce_max":
                lo, hi = operands[0]
                return xp.maximum(lo, self._live(i)[0]), hi
            case "reduce_min":
                lo, hi = operands[0]
                return lo, xp.minimum(hi, self._live(i)[1])
            case "reduce_and" | "reduce_or":
                return operands[0]
            case "sub":
                lo, hi = apply(xp, eqn, operands, exact=False)
                above = self._above(group.operands[i][1], group.operands[i][0], assumed, None)
                return lo, hi if above is False else xp.where(above, xp.minimum(hi, 0.0), hi)
        if group.axes_of(i, DimRole.REDUCED):
            return unknown(eqn.out_avals[0].dtype)
        return apply(xp, eqn, operands, exact=False)

    def _live(self, i: int) -> Interval:
        """What an extremum is at least, and at most, by elements that are not skipped: by any
        case that some element of every row is in."""
        lo: Any = -np.inf
        hi: Any = np.inf
        for case in self._cases(i):
            if not any(_compatible(case, dead) for dead in self.dead) and self.group.covers(i, case):
                bounds = self.value(self.group.operands[i][0], case)
                lo, hi = self.xp.maximum(lo, bounds[0]), self.xp.minimum(hi, bounds[1])
        return lo, hi

    def _cases(self, i: int) -> Iterator[Assumption]:
        """All values that the masks behind node ``i`` may have together."""
        masks = [mask for mask in self.choices if mask in self.group.masks_behind(i)]
        if masks and math.prod(len(self.choices[mask]) for mask in masks) <= _MAX_CASES:
            for values in itertools.product(*(self.choices[mask] for mask in masks)):
                yield tuple(zip(masks, values, strict=True))

    def _total(self, i: int, term: Interval) -> Interval:
        n = self.group.depth(i)
        bad = self.xp.isinf(term[0]) | self.xp.isinf(term[1])
        lo, hi = self.xp.where(bad, np.nan, term[0]) * n, self.xp.where(bad, np.nan, term[1]) * n
        return rounded(self.xp, self.group.equations[i].out_avals[0].dtype, (lo, hi), exact=False, terms=n)

    def _sum(self, i: int, term: Interval) -> Interval:
        lo, hi = self._total(i, term)
        group = self.group
        j = self._behind(group.operands[i][0])
        if j is None or group.nodes[j].op != "exp" or (j := self._behind(group.operands[j][0])) is None:
            return lo, hi
        if group.nodes[j].op != "sub":
            return lo, hi
        x, top = group.operands[j]
        reached = self._above(top, x, (), group.axes_of(i, DimRole.REDUCED))
        if reached is False:
            return lo, hi
        finite = self.xp.isfinite(self.value(top)[0]) & self.xp.isfinite(self.value(top)[1])
        return self.xp.where(reached & finite, self.xp.maximum(lo, 1.0), lo), hi

    def _behind(self, x: Operand) -> int | None:
        """The node that makes ``x``, looking through conversions and moves."""
        i = None if isinstance(x, Literal) else self.group.maker.get(x.value)
        while i is not None and (self.group.nodes[i].op == "convert_element_type" or self._moves(i)):
            source = self.group.operands[i][0]
            i = None if isinstance(source, Literal) else self.group.maker.get(source.value)
        return i

    def _moves(self, i: int) -> bool:
        """Whether the node renames dimensions, and each element keeps its axes."""
        return self.group.nodes[i].op in MOVES and not self.group.axes_of(i, DimRole.WHOLE)

    def _above(self, top: Operand, x: Operand, assumed: Assumption, reduced: frozenset[int] | None) -> Any:
        """Whether ``top`` is at least a maximum that ``x`` went into; with ``reduced``, whether
        it equals one over some of these axes. False, or a condition."""
        group = self.group
        i = None if isinstance(top, Literal) else group.maker.get(top.value)
        if i is None or isinstance(x, Literal) or len(group.nodes[i].outputs) != 1:
            return False
        operands = group.operands[i]

        def above(k: int) -> Any:
            return self._above(operands[k], x, assumed, reduced)

        def both(a: Any, b: Any) -> Any:
            return False if a is False else a & b

        def either(a: Any, b: Any) -> Any:
            return b if a is False else a if b is False else a | b

        if group.axes_of(i, DimRole.WHOLE):
            return False
        if group.nodes[i].op in MOVES:
            return above(0)
        match group.nodes[i].op:
            case "reduce_max":
                if operands[0] != x or not (reduced is None or group.axes_of(i, DimRole.REDUCED) <= reduced):
                    return False
                return np.bool_(True)
            case "max":
                if reduced is None:
                    return either(above(0), above(1))
                low = [self.value(o)[1] == -np.inf for o in operands]
                return either(both(above(0), low[1]), both(above(1), low[0]))
            case "select_n" if len(operands) == 3:
                lo, hi = self.value(operands[0], assumed)
                return either(both(above(1), hi <= 0), both(above(2), lo >= 1))
            case "add" | "add_any" if reduced is None:
                least = [self.value(o, assumed)[0] >= 0 for o in operands]
                return either(both(above(0), least[1]), both(above(1), least[0]))
            case "sub" if reduced is None:
                return both(above(0), self.value(operands[1], assumed)[1] <= 0)
        return False


def input_bounds(array: Any) -> Interval:
    """The smallest and largest element of a whole array: NaN if any is, or if it has none."""
    dtype = array.dtype
    known = dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if not known or array.size == 0:
        return UNKNOWN
    lo, hi = (f(array).astype(jnp.result_type(float)) for f in (jnp.min, jnp.max))
    if dtype == jnp.bool_:
        return lo, hi
    if not jnp.issubdtype(dtype, jnp.floating):
        return rounded(jnp, dtype, (lo, hi), exact=False)
    # Processors that flush denormals cannot tell them from zero.
    tiny = max(float(jnp.finfo(dtype).tiny), float(jnp.finfo(lo.dtype).tiny))
    return jnp.where(abs(lo) < tiny, -tiny, lo), jnp.where(abs(hi) < tiny, tiny, hi)


def _compatible(case: Assumption, other: Assumption) -> bool:
    """Whether an element may be in both."""
    values = dict(other)
    return all(values.get(mask, value) == value for mask, value in case)
