"""PyTorch's ``FuseTensorExprs`` (NNC): greedy fusion of producers into their consumer, in reverse order.

After the overview of TorchScript's ``tensorexpr_fuser`` (NNC). Operations are scanned in reverse. A supported
operation becomes a group and takes in its producers, the nearest first, as long as one can be moved next to
it. Then adjacent groups that do not depend on each other are merged, and groups of fewer than
``min_group_size`` operations are dissolved. Supported are arithmetic, broadcasts and data movement, and
reductions if enabled (``setTexprReductionsEnabled``), but no contractions. Prices are not used. With dynamic
shapes, groups are decided once for symbolic sizes (``DynamicShapes``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import rustworkx as rx

from costmodel.graph import Graph, Node, OpKind, Skeleton, boundary, skeleton
from fuseplan.plan.notes import NoteKind, note
from fuseplan.schedule.pricing import Nodes, Pricing
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping, PlanGroups
from fuseplan.support.errors import InvalidArgumentError, Verdict

MIN_GROUP_SIZE = 2
MAX_ARGUMENTS = 128
"""Arrays that a group may read and write (``subgraphArgLimit``): the space for a CUDA kernel's arguments."""

_STARTS_NONE = frozenset({"slice", "dynamic_slice", "split", "broadcast_in_dim", "iota"})
"""Supported, but not the first operation of a group: ``aten::slice``, ``unsqueeze``, ``ConstantChunk``,
constants."""

_VIEWS = frozenset({"reshape", "squeeze"})
"""Aliases such as ``aten::view``, which are not fused."""


def make_planner(
    *, min_group_size: int = MIN_GROUP_SIZE, reductions: bool = False, fuse_to_dynamic_shapes: bool = False
) -> PlanGroups:
    """A ``FuseTensorExprs`` planner with these settings, for ``fuseplan.register_planner``.

    Args:
        min_group_size: groups of fewer operations are dissolved.
        reductions: whether groups may hold reductions (``setTexprReductionsEnabled``).
        fuse_to_dynamic_shapes: decide once for symbolic sizes (``DynamicShapes``).

    Raises:
        InvalidArgumentError: ``min_group_size`` is not a positive integer.
    """
    if isinstance(min_group_size, bool) or not isinstance(min_group_size, int) or min_group_size < 1:
        raise InvalidArgumentError(f"min_group_size expects a positive integer, got {min_group_size!r}")

    fuse = functools.partial(fuse_tensor_exprs, min_group_size=min_group_size, reductions=reductions)
    if fuse_to_dynamic_shapes:
        return DynamicShapes(fuse)

    def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
        return plan_decided(graph, pricing, lambda book: fuse(book.graph))

    return plan_groups


def fuse_tensor_exprs(
    graph: Graph, *, min_group_size: int = MIN_GROUP_SIZE, reductions: bool = False
) -> Iterator[Nodes]:
    """The groups, by node ids, of a graph without dead code.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> graph = lower(trace(lambda x, w: jnp.tanh(x @ w) * jnp.exp(x), x, x)).graph
        >>> [[graph.nodes[n].op for n in group] for group in fuse_tensor_exprs(graph)]
        [['tanh', 'exp', 'mul']]
    """
    fuser = _Fuser(graph, functools.partial(can_handle, reductions=reductions))
    fuser.create_groups()
    fuser.merge_adjacent()
    for unit in fuser.units:
        if len(unit.nodes) >= max(min_group_size, 2):
            yield tuple(sorted(unit.nodes))


def can_handle(node: Node, reductions: bool = False) -> bool:
    """Whether a group may hold the node (``canHandle``)."""
    if node.effects or node.op in _VIEWS:
        return False
    return node.kind <= OpKind.INJECTIVE or (reductions and node.kind == OpKind.REDUCTION)


@dataclass(slots=True, eq=False)
class _Unit:
    """An operation or a group, at the position of its last operation."""

    nodes: list[int]
    last: int
    reads: frozenset[int]
    """The values that it reads from outside."""
    writes: frozenset[int]
    """The values that it must write."""
    at: int
    """Its index in the DAG of units."""

    @property
    def n_arguments(self) -> int:
        return len(self.reads) + len(self.writes)


class _Fuser:
    """The graph during fusion: a DAG of units.

    A merge takes time in the arguments of the two units, of which there are few, and in the operations of the
    smaller one.
    """

    def __init__(self, graph: Graph, can_handle: Callable[[Node], bool]) -> None:
        self.graph, self._can_handle = graph, can_handle
        self._unit_of = [self._alone(node) for node in graph.nodes]
        self._dag: rx.PyDiGraph = rx.PyDiGraph(multigraph=False)
        for unit, at in zip(self._unit_of, self._dag.add_nodes_from(self._unit_of), strict=True):
            unit.at = at
        self._dag.add_edges_from_no_data([*data_edges(graph), *effect_edges(graph)])

    def _alone(self, node: Node) -> _Unit:
        edge = boundary(self.graph, (node.id,))
        return _Unit([node.id], node.id, frozenset(edge.reads), frozenset(edge.writes), node.id)

    @property
    def units(self) -> list[_Unit]:
        return sorted(self._dag.nodes(), key=lambda unit: unit.last)

    def create_groups(self) -> None:
        """Scan from the last operation to the first until nothing changes (``createFusionGroups``)."""
        changed = True
        while changed:
            changed = False
            for n in reversed(range(len(self.graph.nodes))):
                while self._starts(n) and self._pull(self._unit_of[n]):
                    changed = True

    def _starts(self, n: int) -> bool:
        """Whether a group may begin with the unit at the position of node ``n`` (``scanNode``)."""
        unit, node = self._unit_of[n], self.graph.nodes[n]
        begins = self._can_handle(node) and node.op not in _STARTS_NONE
        return unit.last == n and (len(unit.nodes) > 1 or begins)

    def _pull(self, unit: _Unit) -> bool:
        """Take in one more producer, the nearest that can be (``createFusionGroup``)."""
        makers = {self.graph.values[v].producer for v in unit.reads} - {-1}
        producers = {self._unit_of[n].last: self._unit_of[n] for n in makers}
        return any(self._try_merge(unit, producers[last]) for last in sorted(producers, reverse=True))

    def merge_adjacent(self) -> None:
        """Merge each group with the one before it, unless it depends on it."""
        for one, other in itertools.pairwise([unit for unit in self.units if len(unit.nodes) > 1]):
            before, at = self._unit_of[one.last], self._unit_of[other.last]
            if not rx.has_path(self._dag, before.at, at.at):
                self._try_merge(before, at)

    def _try_merge(self, group: _Unit, other: _Unit) -> bool:
        """Merge two units if the second is supported and can be moved next to the first (``tryMerge``)."""
        is_supported = len(other.nodes) > 1 or self._can_handle(self.graph.nodes[other.last])
        if not is_supported or group.n_arguments + other.n_arguments > MAX_ARGUMENTS:
            return False
        larger, smaller = (group, other) if len(group.nodes) >= len(other.nodes) else (other, group)
        try:
            at = self._dag.contract_nodes([group.at, other.at], larger, check_cycle=True)
        except rx.DAGWouldCycle:
            return False
        for n in smaller.nodes:
            self._unit_of[n] = larger
        larger.at = at
        larger.nodes += smaller.nodes
        larger.last = max(group.last, other.last)
        larger.reads = frozenset(v for v in group.reads | other.reads if not self._makes(larger, v))
        larger.writes = frozenset(v for v in group.writes | other.writes if self._is_read_outside(larger, v))
        return True

    def _makes(self, unit: _Unit, v: int) -> bool:
        maker = self.graph.values[v].producer
        return maker >= 0 and self._unit_of[maker] is unit

    def _is_read_outside(self, unit: _Unit, v: int) -> bool:
        readers = self.graph.consumers[v]
        return v in self.graph.results or any(self._unit_of[n] is not unit for n in readers)


@dataclass(frozen=True, slots=True)
class SymbolicPlan:
    """Groups of a graph, and guards for the sizes that they hold for."""

    groups: tuple[Nodes, ...]
    dims: tuple[tuple[int | str, ...], ...]
    """The dimensions of each input: ``1``, or the name of a symbol."""

    def sizes(self, graph: Graph) -> dict[str, int]:
        """The size of each symbol in ``graph``: that of its first dimension."""
        found: dict[str, int] = {}
        for v, dims in zip(graph.inputs, self.dims, strict=True):
            for size, dim in zip(graph.values[v].shape, dims, strict=True):
                if isinstance(dim, str):
                    found.setdefault(dim, size)
        return found

    def refuse(self, graph: Graph) -> Verdict | None:
        """The guard that the sizes of ``graph``, a graph of this skeleton, violate; None if they pass all."""
        sizes = self.sizes(graph)
        for k, (v, dims) in enumerate(zip(graph.inputs, self.dims, strict=True)):
            for d, (size, dim) in enumerate(zip(graph.values[v].shape, dims, strict=True)):
                wanted = _guard(size, dim, sizes)
                if wanted is not None:
                    return Verdict("guard", f"dimension {d} of input {k} is {size}, expected {wanted}", ())
        return None


class DynamicShapes:
    """A planner that decides groups once for all sizes that their guards admit.

    After ``fuse_to_dynamic_shapes`` of ``FuseTensorExprs``. Dimensions of equal size at the first call become
    one symbol; those of size one stay, since they broadcast. Later graphs of the same skeleton reuse the
    groups if their sizes pass the guards; otherwise groups are decided for new symbols. Kernels are scheduled
    and priced for the actual sizes, so a group that does not fit is split like any other.

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

    def __init__(self, decide: Callable[[Graph], Iterable[Nodes]]) -> None:
        self._decide = decide
        self.plans: dict[Skeleton, list[SymbolicPlan]] = {}

    def __call__(self, graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
        """Plan with known groups whose guards pass, or decide groups."""
        known = self.plans.setdefault(skeleton(graph), [])
        plan = next((plan for plan in known if plan.refuse(graph) is None), None)
        if plan is not None:
            told = note(NoteKind.GUARDS_HOLD, sizes=_text(plan.sizes(graph)))
        else:
            plan = SymbolicPlan(tuple(self._decide(graph)), symbolic_dims(graph))
            told = note(NoteKind.GUARDED, sizes=_text(plan.sizes(graph)), guards=sum(map(len, plan.dims)))
            known.append(plan)
        groups = plan.groups
        grouping = plan_decided(graph, pricing, lambda book: groups)
        return replace(grouping, notes=(*grouping.notes, told))


def _guard(size: int, dim: int | str, sizes: Mapping[str, int]) -> str | None:
    """The size that a dimension is expected to have; None if ``size`` passes."""
    if isinstance(dim, int):
        return None if size == dim else f"{dim}"
    if size == 1:
        return f"{dim}, which is more than 1"
    return None if size == sizes[dim] else f"{dim} = {sizes[dim]}"


def symbolic_dims(graph: Graph) -> tuple[tuple[int | str, ...], ...]:
    """The dimensions of each input, with a symbol for each size greater than one."""
    names: dict[int, str] = {}
    return tuple(
        tuple(1 if size == 1 else names.setdefault(size, f"s{len(names)}") for size in graph.values[v].shape)
        for v in graph.inputs
    )


def _text(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no sizes"
