"""Bounds of every value of a group, from bounds of the arrays that it reads.

Bounds may hold under an assumption: for the elements at which masks have given values. Two facts that
interval arithmetic loses are kept: no element exceeds its maximum, and a sum of exp(x - max(x)) is at least
one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.axes import compose
from costmodel.graph import DimRole
from costmodel.kernel import Access, KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.masks.index_ranges import IndexArithmetic, constant
from fuseplan.masks.intervals import MOVES, UNKNOWN, Interval, apply, product, rounded, unknown

Assumption = tuple[tuple[Access, float], ...]
"""Masks, each with a value."""
Operand = Access | Literal

_WHOLE = tuple(role for role in DimRole if role.is_whole)


class MaskedGroup:
    """The equations of a kernel with the kernel axes of their operands, and its masks.

    A mask is index arithmetic that other equations read.
    """

    def __init__(self, lowered: Lowered, spec: KernelSpec, index: IndexArithmetic | None = None) -> None:
        self.spec = spec
        self.index = index or IndexArithmetic(lowered)
        self.sizes = tuple(axis.size for axis in spec.axes)
        self.nodes = [lowered.graph.nodes[n] for n in spec.nodes]
        self.equations: list[Equation] = [lowered.equations[n] for n in spec.nodes]
        self.maker = {v: i for i, node in enumerate(self.nodes) for v in node.outputs}
        self.operands = [self._operands(i) for i in range(len(self.nodes))]
        self.avals = lowered.avals
        self._covered: dict[tuple[int, Assumption], bool] = {}

    def _operands(self, i: int) -> tuple[Operand, ...]:
        node, own = self.nodes[i], self.spec.node_axes[i]
        arrays = (Access(v, compose(m, own)) for v, m in zip(node.inputs, node.input_maps, strict=True))
        return tuple(v if isinstance(v, Literal) else next(arrays) for v in self.equations[i].inputs)

    def axes_of(self, i: int, *roles: DimRole) -> frozenset[int]:
        """The kernel axes of a node's dimensions that have one of ``roles``."""
        pairs = zip(self.spec.node_axes[i], self.nodes[i].roles, strict=True)
        return frozenset(a for axes, role in pairs if role in roles for a in axes)

    def steps(self) -> int:
        """The length of the longest chain of operations."""
        steps: list[int] = []
        for node in self.nodes:
            before = (steps[i] for v in node.inputs if (i := self.maker.get(v)) is not None)
            steps.append(1 + max(before, default=0))
        return max(steps, default=0)

    def masks(self) -> tuple[Access, ...]:
        """All masks of the group."""
        found: dict[Access, None] = {}
        for node, operands in zip(self.nodes, self.operands, strict=True):
            if node.outputs[0] not in self.index:
                found |= {x: None for x in operands if not isinstance(x, Literal) and x.value in self.index}
        return tuple(found)

    def masks_behind(self, i: int) -> frozenset[Access]:
        """The masks that the elements which node ``i`` combines depend on, element by element."""
        found: set[Access] = set()
        seen: set[int] = set()
        queue = [i]
        while queue:
            for x in self.operands[queue.pop()]:
                if isinstance(x, Literal):
                    continue
                if x.value in self.index:
                    found.add(x)
                elif (j := self.maker.get(x.value)) is not None and j not in seen:
                    seen.add(j)
                    if not self.axes_of(j, DimRole.REDUCED, *_WHOLE):
                        queue.append(j)
        return frozenset(found)

    def covers(self, i: int, assumed: Assumption) -> bool:
        """Whether every row that reduction ``i`` combines has an element at which ``assumed`` holds."""
        key = (i, assumed)
        if key not in self._covered:
            reduced = self.axes_of(i, DimRole.REDUCED)
            self._covered[key] = self.index.covers(assumed, reduced, self.sizes)
        return self._covered[key]


MAX_CASES = 64
"""The most combinations of values of masks that are examined: each is evaluated when the plan is run."""


@dataclass(eq=False)
class Bounds:
    """Bounds of a group's values, computed by ``xp``: NumPy, or jax.numpy on traced scalars.

    ``inputs`` has the bounds of the arrays that the group reads, by value, ``masks`` those of masks, and
    ``choices`` the values of masks. Elements at which one of the assumptions ``dead`` holds will be skipped.
    """

    group: MaskedGroup
    xp: Any
    inputs: Callable[[int], Interval]
    masks: Mapping[Access, Interval]
    choices: Mapping[Access, Sequence[float]]
    dead: Sequence[Assumption]
    _known: dict[tuple[Any, Assumption], Interval] = field(default_factory=dict, init=False)

    @np.errstate(all="ignore")
    def neutral(self, i: int, assumed: Assumption) -> Any:
        """Whether a reduction's result is the same without the elements at which ``assumed`` holds."""
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
        """Bounds of an operand at the elements at which ``assumed`` holds."""
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
        gathered = group.axes_of(i, DimRole.REDUCED, *_WHOLE)
        whole = group.axes_of(i, *_WHOLE)
        if whole or any(gathered & mask.axis_set for mask, _ in assumed):
            assumed = ()  # an element of the result may depend on all elements of the operands
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
        """A lower bound of a maximum and an upper bound of a minimum, by elements that are not skipped: those
        of any live case that every row has an element in."""
        lo: Any = -np.inf
        hi: Any = np.inf
        for case in self._cases(i):
            if not any(_compatible(case, dead) for dead in self.dead) and self.group.covers(i, case):
                bounds = self.value(self.group.operands[i][0], case)
                lo, hi = self.xp.maximum(lo, bounds[0]), self.xp.minimum(hi, bounds[1])
        return lo, hi

    def _cases(self, i: int) -> Iterator[Assumption]:
        """All combinations of values of the masks behind node ``i``; none if there are too many."""
        masks = [mask for mask in self.choices if mask in self.group.masks_behind(i)]
        if masks and math.prod(len(self.choices[mask]) for mask in masks) <= MAX_CASES:
            for values in itertools.product(*(self.choices[mask] for mask in masks)):
                yield tuple(zip(masks, values, strict=True))

    def _total(self, i: int, term: Interval) -> Interval:
        n = self.group.nodes[i].reduction_size
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
        """The node that makes ``x``, skipping conversions and moves."""
        i = None if isinstance(x, Literal) else self.group.maker.get(x.value)
        while i is not None and (self.group.nodes[i].op == "convert_element_type" or self._moves(i)):
            source = self.group.operands[i][0]
            i = None if isinstance(source, Literal) else self.group.maker.get(source.value)
        return i

    def _moves(self, i: int) -> bool:
        """Whether the node only renames dimensions, so that each element keeps its axes."""
        return self.group.nodes[i].op in MOVES and not self.group.axes_of(i, *_WHOLE)

    def _above(self, top: Operand, x: Operand, assumed: Assumption, reduced: frozenset[int] | None) -> Any:
        """Whether ``top`` is at least a maximum over ``x``; with ``reduced``, whether it equals a maximum
        over some of these axes. False, or a condition on the data."""
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

        if group.axes_of(i, *_WHOLE):
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
    """The extrema of a whole array: NaN if an element is NaN, or if the array is empty."""
    dtype = array.dtype
    known = dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if not known or array.size == 0:
        return UNKNOWN
    lo, hi = (f(array).astype(jnp.result_type(float)) for f in (jnp.min, jnp.max))
    if dtype == jnp.bool_:
        return lo, hi
    if not jnp.issubdtype(dtype, jnp.floating):
        return rounded(jnp, dtype, (lo, hi), exact=False)
    # A processor that flushes denormals reports them as zero.
    tiny = max(float(jnp.finfo(dtype).tiny), float(jnp.finfo(lo.dtype).tiny))
    return jnp.where(abs(lo) < tiny, -tiny, lo), jnp.where(abs(hi) < tiny, tiny, hi)


def _compatible(case: Assumption, other: Assumption) -> bool:
    """Whether an element may satisfy both assumptions."""
    values = dict(other)
    return all(values.get(mask, value) == value for mask, value in case)
