"""One equation of a group, with the kernel axes of what it reads and makes.

Names of emitted kernels, as profilers and compiler dumps show them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from costmodel.axes import compose
from costmodel.graph import DimMap
from costmodel.kernel import Access, KernelSpec
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.ops.rule import Rule
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.plan import kernel_names as names


@dataclass(frozen=True, slots=True)
class Step:
    """One equation of a group, with the kernel axes of each of its operands and results.

    ``in_dims`` are the iteration dimensions of each operand, ``in_axes`` the kernel axes;
    None stands for a literal.
    """

    equation: Equation
    rule: Rule
    node_axes: tuple[tuple[int, ...], ...]
    in_dims: tuple[DimMap | None, ...]
    in_axes: tuple[DimMap | None, ...]
    out_axes: tuple[DimMap, ...]

    @property
    def reads(self) -> tuple[Access, ...]:
        """Its array operands."""
        pairs = zip(self.equation.inputs, self.in_axes, strict=True)
        return tuple(Access(v, axes) for v, axes in pairs if axes is not None)  # type: ignore[arg-type]

    def accumulator_dtypes(self) -> tuple[Any, ...]:
        """The dtype in which partial results of each result are carried."""
        assert self.rule.reduction is not None
        return tuple(self.rule.reduction.accumulator(a.dtype) for a in self.equation.out_avals)


def make_step(spec: KernelSpec, lowered: Lowered, position: int) -> Step:
    """The node at a position of the group, with the kernel axes of its operands."""
    node = lowered.graph.nodes[spec.nodes[position]]
    equation = lowered.equations[node.id]
    node_axes = spec.node_axes[position]
    arrays = iter(node.input_maps)
    in_dims = tuple(None if isinstance(v, Literal) else next(arrays) for v in equation.inputs)
    return Step(
        equation,
        rule_of(equation),
        node_axes,
        in_dims,
        tuple(None if m is None else compose(m, node_axes) for m in in_dims),
        tuple(compose(m, node_axes) for m in node.output_maps),
    )


def kernel_name(spec: KernelSpec, lowered: Lowered) -> str:
    """The name that tables give the kernel, in letters and digits, and how many operations it has.

    Example: ``fuseplan_softmax_5``.
    """
    name = re.sub(r"\W+", "_", names.kernel_name(lowered.graph, spec.nodes), flags=re.ASCII).strip("_")
    return f"fuseplan_{name}_{len(spec.nodes)}"
