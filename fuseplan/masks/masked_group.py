"""A kernel's group with its masks: index arithmetic that other equations read."""

from __future__ import annotations

import math

from costmodel.axes import compose
from costmodel.graph import DimRole
from costmodel.kernel import Access, KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.masks.index_ranges import IndexArithmetic

Assumption = tuple[tuple[Access, float], ...]
"""Masks, and the value that each of them has."""
Operand = Access | Literal


class MaskedGroup:
    """The equations of a kernel, with the kernel axes of their operands."""

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
        """The kernel axes of a node's dimensions of certain roles."""
        pairs = zip(self.spec.node_axes[i], self.nodes[i].roles, strict=True)
        return frozenset(a for axes, role in pairs if role in roles for a in axes)

    def depth(self, i: int) -> int:
        """How many elements a reduction combines into one."""
        node = self.nodes[i]
        return math.prod(n for n, role in zip(node.dims, node.roles, strict=True) if role == DimRole.REDUCED)

    def steps(self) -> int:
        """The most operations that follow one another."""
        steps: list[int] = []
        for node in self.nodes:
            before = (steps[i] for v in node.inputs if (i := self.maker.get(v)) is not None)
            steps.append(1 + max(before, default=0))
        return max(steps, default=0)

    def masks(self) -> tuple[Access, ...]:
        """Index arithmetic that other equations read."""
        found: dict[Access, None] = {}
        for node, operands in zip(self.nodes, self.operands, strict=True):
            if node.outputs[0] not in self.index:
                found |= {x: None for x in operands if not isinstance(x, Literal) and x.value in self.index}
        return tuple(found)

    def masks_behind(self, i: int) -> frozenset[Access]:
        """The masks that decide elements of what node ``i`` combines."""
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
                    if not self.axes_of(j, DimRole.REDUCED, DimRole.WHOLE):
                        queue.append(j)
        return frozenset(found)

    def covers(self, i: int, assumed: Assumption) -> bool:
        """Whether what reduction ``i`` combines always has an element that is as assumed."""
        key = (i, assumed)
        if key not in self._covered:
            reduced = self.axes_of(i, DimRole.REDUCED)
            self._covered[key] = self.index.covers(assumed, reduced, self.sizes)
        return self._covered[key]
