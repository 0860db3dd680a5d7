"""Groups that are decided once for symbolic sizes, with guards, and specialised when they are asked for.

After ``fuse_to_dynamic_shapes`` of PyTorch's ``FuseTensorExprs``: dimensions of one size at the first call
become one symbol, those of size one stay as they are, for they broadcast; a guard before the group checks
that the symbols fit, and otherwise the function is run as it was. Here the groups are what is kept, and a
program whose sizes are refused is decided anew, for its own symbols. Kernels are always scheduled and priced
for the sizes at hand, so that a group which then fits no more falls apart like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from costmodel.graph import Graph
from fuseplan.plan.notes import NoteKind, note
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping
from fuseplan.support.errors import Verdict

Skeleton: TypeAlias = tuple[object, ...]
"""A graph without its sizes."""


@dataclass(frozen=True, slots=True)
class SymbolicPlan:
    """The groups of a graph for all sizes that ``refuse`` does not."""

    groups: tuple[Nodes, ...]
    dims: tuple[tuple[int | str, ...], ...]
    """The dimensions of each input: ``1``, or the name of a symbol."""

    def sizes(self, graph: Graph) -> dict[str, int]:
        """What each symbol stands for in ``graph``, by the first dimension that has it."""
        found: dict[str, int] = {}
        for v, dims in zip(graph.inputs, self.dims, strict=True):
            for size, dim in zip(graph.values[v].shape, dims, strict=True):
                if isinstance(dim, str):
                    found.setdefault(dim, size)
        return found

    def refuse(self, graph: Graph) -> Verdict | None:
        """The guard that the sizes of ``graph``, a graph of this skeleton, do not pass."""
        sizes = self.sizes(graph)
        for k, (v, dims) in enumerate(zip(graph.inputs, self.dims, strict=True)):
            for d, (size, dim) in enumerate(zip(graph.values[v].shape, dims, strict=True)):
                wanted = _guard(size, dim, sizes)
                if wanted is not None:
                    return Verdict("guard", f"dimension {d} of input {k} is {size}, expected {wanted}", ())
        return None


class DynamicShapes:
    """A planner that decides by ``decide`` once for all sizes that its guards admit.

    Example:
        >>> import jax, jax.numpy as jnp, fuseplan
        >>> from fuseplan.planners import nnc_tensorexpr
        >>> planner = nnc_tensorexpr.make_planner(fuse_to_dynamic_shapes=True)
        >>> fuseplan.register_planner("nnc_dynamic", planner)
        >>> plan = fuseplan.make_plan(lambda x: jnp.exp(x) + 1, device="h200", planner="nnc_dynamic")
        >>> for rows in (8, 16):
        ...     print(plan(jax.ShapeDtypeStruct((rows, 128), "float32")).notes[-1])
        fused for s0 = 8, s1 = 128, and for all sizes for which 2 guards hold
        fused before for other sizes: the guards hold for s0 = 16, s1 = 128
    """

    def __init__(self, decide: Callable[[PriceBook], Iterable[Sequence[int]]]) -> None:
        self._decide = decide
        self.plans: dict[Skeleton, list[SymbolicPlan]] = {}

    def __call__(self, graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
        """The groups that are known for graphs like this one, or those that are decided now."""
        known = self.plans.setdefault(skeleton(graph), [])
        fitting = next((plan for plan in known if plan.refuse(graph) is None), None)
        if fitting is not None:
            grouping = plan_decided(graph, pricing, lambda book: fitting.groups)
            told = note(NoteKind.GUARDS_HOLD, sizes=_text(fitting.sizes(graph)))
        else:
            decided: list[Nodes] = []

            def decide(book: PriceBook) -> list[Nodes]:
                decided[:] = [tuple(sorted(group)) for group in self._decide(book)]
                return decided

            grouping = plan_decided(graph, pricing, decide)
            plan = SymbolicPlan(tuple(decided), symbolic_dims(graph))
            told = note(NoteKind.GUARDED, sizes=_text(plan.sizes(graph)), guards=sum(map(len, plan.dims)))
            known.append(plan)
        return replace(grouping, notes=(*grouping.notes, told))


def _guard(size: int, dim: int | str, sizes: Mapping[str, int]) -> str | None:
    """What a size should be instead; None where it is what a dimension may be."""
    if isinstance(dim, int):
        return None if size == dim else f"{dim}"
    if size == 1:
        return f"{dim}, which is more than 1"
    return None if size == sizes[dim] else f"{dim} = {sizes[dim]}"


def skeleton(graph: Graph) -> Skeleton:
    """What is the same in programs that differ in nothing but sizes."""
    values = tuple((len(v.shape), v.dtype) for v in graph.values)
    nodes = tuple((node.op, node.kind, node.inputs, node.outputs) for node in graph.nodes)
    return (values, nodes, graph.inputs, graph.outputs)


def symbolic_dims(graph: Graph) -> tuple[tuple[int | str, ...], ...]:
    """The dimensions of each input: a symbol for each size but one."""
    names: dict[int, str] = {}
    return tuple(
        tuple(1 if size == 1 else names.setdefault(size, f"s{len(names)}") for size in graph.values[v].shape)
        for v in graph.inputs
    )


def _text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no sizes"
