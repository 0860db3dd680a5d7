"""Along which axes a kernel can be split over devices, and what its reductions then need.

- An axis along which all tiles are independent can be split, without communication.
- A reduction along a split axis leaves each device with a part of the result. If the only operations that
  follow move or scale the parts, or add up parts, and none is indexed along the axis, then the parts are
  combined once, at the end. If others follow, as in a softmax, loops of a CPU combine them within the kernel.
- Every other axis is whole on each device: those that some operation needs whole, and, in a kernel that is
  not told where its part begins, those that a mask or an index refers to.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from costmodel.axes import reduced_axes
from costmodel.graph import DimRole, Graph
from costmodel.kernel import Access, KernelSpec, block_shape, looked_up
from fuseplan.codegen.single_pass import literal_scalar
from fuseplan.codegen.tile import BlockTile, Step, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.schedule.nests.live_tiles import skips_of
from fuseplan.schedule.nests.multipass import program_of

Collective = Callable[[Any, tuple[str, ...]], Any]

_COLLECTIVES: dict[str, Collective] = {
    "reduce_sum": lax.psum,
    "dot_general": lax.psum,
    "gather": lax.psum,  # a sum over a one-hot mask
    "scatter-add": lax.psum,
    "reduce_max": lax.pmax,
    "reduce_min": lax.pmin,
}
"""How the parts of a reduction's result are combined, by primitive."""

_MOVES = frozenset({"broadcast_in_dim", "copy", "reshape", "squeeze", "transpose"})
"""Operations that change no element."""
_SUMS = frozenset({"add", "add_any", "sub"})
_SCALINGS = frozenset({"mul", "div", "neg"})
"""By a number, see ``_is_scaling``."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A value of which each device has a part, where axes that it was reduced along are split."""

    collective: Collective
    """Combines the parts."""
    axes: frozenset[int]
    makers: frozenset[int]
    """The nodes that reduce it along these axes, by position in the group."""


@dataclass(frozen=True, slots=True)
class SplitAxes:
    """How the axes of a kernel can be split."""

    whole: frozenset[int]
    """The axes that cannot be."""
    units: tuple[int, ...]
    """For each axis, the number of elements of which every part has a multiple."""
    results: Mapping[int, Partial]
    """The results of the kernel of which each device has a part at the end, by value."""
    inside: Mapping[int, Partial]
    """The reductions whose parts are combined within the kernel, by position in the group."""


def first_reads(spec: KernelSpec) -> dict[int, Access]:
    """The arrays that a kernel reads, by value, in order; of one that it reads in several ways, the first."""
    first: dict[int, Access] = {}
    for access in spec.reads:
        first.setdefault(access.value, access)
    return first


def split_axes(spec: KernelSpec, lowered: Lowered) -> SplitAxes:
    """How the axes of a kernel can be split."""
    masked = _masked_axes(spec, lowered)
    is_loop_nest = spec.capabilities.loop_nest
    # The tiles that a mask leaves of the stream are visited in an order of their own.
    whole = (
        {a for a in masked if a == spec.streamed} if is_loop_nest else masked | _indexed_axes(spec, lowered)
    )
    # A dimension that merges axes is split along the outermost of them, and a diagonal not at all.
    maps = [access.axes for access in (*spec.reads, *spec.writes)] + list(spec.node_axes)
    whole |= {a for axes in maps for dims in axes for a in dims[1:]}
    whole |= {a for axes in maps for a, n in Counter(a for dims in axes for a in dims).items() if n > 1}
    # An array that is read in several ways is split in one.
    first = first_reads(spec)
    for access in spec.reads:
        if first[access.value] != access:
            whole |= access.axis_set | first[access.value].axis_set

    def may_combine(i: int) -> bool:
        """Whether all devices complete the reduction equally often: else they would wait for each other."""
        node = lowered.graph.nodes[spec.nodes[i]]
        tiled = {a for a in reduced_axes(node, spec.node_axes[i]) if not spec.axes[a].role.is_whole}
        return is_loop_nest and tiled <= {spec.streamed} and (bool(tiled) or not masked)

    inside: set[int] = set()
    while True:
        partial, reductions, misread = _partial_values(spec, lowered, whole, inside)
        if not misread:
            break
        for part in misread:
            if all(map(may_combine, part.makers)):
                inside |= part.makers
            else:
                whole |= part.axes
    in_whole_tiles = spec.capabilities.warpgroup_blocks
    units = tuple(axis.tile if in_whole_tiles or a in masked else 1 for a, axis in enumerate(spec.axes))
    results = {w.value: partial[w.value] for w in spec.writes if w.value in partial}
    return SplitAxes(frozenset(whole), units, results, {i: reductions[i] for i in inside if i in reductions})


def _partial_values(
    spec: KernelSpec, lowered: Lowered, whole: set[int], inside: Collection[int]
) -> tuple[dict[int, Partial], dict[int, Partial], list[Partial]]:
    """The partial values of a kernel, the reductions by position, and the partial values that some operation
    reads without keeping parts, if the results of ``inside`` are complete. Adds the axes that an operation
    needs whole to ``whole``."""
    partial: dict[int, Partial] = {}
    reductions: dict[int, Partial] = {}
    misread: list[Partial] = []
    for i, (n, own_axes) in enumerate(zip(spec.nodes, spec.node_axes, strict=True)):
        node, collective = lowered.graph.nodes[n], _collective_of(lowered.equations[n])
        for dims, role in zip(own_axes, node.roles, strict=True):
            if role.is_whole or (role == DimRole.REDUCED and collective is None):
                whole.update(dims)
        parts = [partial[v] for v in node.inputs if v in partial]
        own = {a for dims in own_axes for a in dims}
        is_indexed = any(not own.isdisjoint(part.axes) for part in parts)
        if parts and (is_indexed or not _keeps_parts(lowered.equations[n], partial)):
            misread += parts
            parts = []
        reduced = frozenset(reduced_axes(node, own_axes) - whole)
        axes = reduced.union(*(part.axes for part in parts))
        if not axes:
            continue
        makers = frozenset({i} if reduced else ()).union(*(part.makers for part in parts))
        kind = parts[0].collective if parts else collective
        assert kind is not None, "an axis that is reduced otherwise is whole"
        reductions[i] = Partial(kind, axes, makers)
        if i not in inside:
            partial.update(dict.fromkeys(node.outputs, reductions[i]))
    return partial, reductions, misread


def _collective_of(equation: Equation) -> Collective | None:
    """How the parts of a reduction's result are combined; None if the operation is no such reduction."""
    collective = _COLLECTIVES.get(equation.primitive.name)
    is_bool = any(aval.dtype == jnp.bool_ for aval in equation.out_avals)
    return None if is_bool and collective is lax.psum else collective


def _keeps_parts(equation: Equation, partial: Mapping[int, Partial]) -> bool:
    """Whether an operation makes of parts of its operands parts of its result, combined in the same way. A
    factor that may be infinite is none: parts of both signs would add up to NaN."""
    arrays = [v for v in equation.inputs if not isinstance(v, Literal)]
    first, *others = [partial[v] for v in arrays if v in partial]
    name, is_sum = equation.primitive.name, first.collective is lax.psum
    if others:
        return is_sum and name in _SUMS and others == [first]
    if name in _COLLECTIVES:
        if name == "scatter-add" or rule_of(equation).reduction is None:
            return False  # It adds its first operand once, or fills in a number.
        is_factor = name == "dot_general" or (name == "gather" and equation.inputs[0] not in partial)
        return _collective_of(equation) is first.collective and not is_factor
    if name in _MOVES:
        return True
    if name == "convert_element_type":
        return _has_range_of(equation.out_avals[0], equation.in_avals[0])
    return name in _SCALINGS and is_sum and _is_scaling(equation)


def _is_scaling(equation: Equation) -> bool:
    """Whether an operation multiplies its first or only array by a finite number."""
    number = [v.val for v in equation.inputs if isinstance(v, Literal)]
    if len(number) != len(equation.inputs) - 1 or not np.isfinite(number).all():
        return False
    is_divisor = equation.primitive.name == "div" and isinstance(equation.inputs[0], Literal)
    return bool(jnp.issubdtype(equation.out_avals[0].dtype, jnp.floating)) and not is_divisor


def _has_range_of(wide: Any, narrow: Any) -> bool:
    """Whether every number of one floating-point type has a finite value in the other."""
    if not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (wide, narrow)):
        return False
    return bool(jnp.finfo(wide.dtype).maxexp >= jnp.finfo(narrow.dtype).maxexp)


class _IndexRecorder(BlockTile):
    """A tile that records along which axes an operation asks for indices."""

    def __init__(self, spec: KernelSpec, step: Step, axes: set[int]) -> None:
        super().__init__(spec, step, [0] * len(spec.axes))
        self.axes = axes

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        self.axes.update(self.step.node_axes[node_dim])
        return super().indices(shape, dim, node_dim)


@dataclass(frozen=True, slots=True)
class _AnyTable:
    """A table of which any elements are read (``fuseplan.frontend.ops.rule.Table``)."""

    ndim: int
    dtype: Any

    def load(self, places: Sequence[Any], inside: Any | None) -> Any:
        return jnp.zeros(jnp.shape(places[0]), self.dtype)


def _indexed_axes(spec: KernelSpec, lowered: Lowered) -> set[int]:
    """The axes along which the index of an element decides its value."""
    found: set[int] = set()
    by_index = looked_up(lowered.graph, spec)
    for i in range(len(spec.nodes)):
        step = make_step(spec, lowered, i)
        assert step.rule.block is not None, f"{step.equation.primitive} has no block form"
        tile = _IndexRecorder(spec, step, found)
        known: dict[int, Any] = {}
        blocks: dict[int, Any] = {}
        for k, (v, axes) in enumerate(zip(step.equation.inputs, step.in_axes, strict=True)):
            if isinstance(v, Literal):
                known[k] = literal_scalar(v)
            elif Access(v, axes or ()) in by_index:
                known[k] = _AnyTable(lowered.avals[v].ndim, lowered.avals[v].dtype)
            else:
                shape = block_shape(spec.axes, axes or ())
                blocks[k] = jax.ShapeDtypeStruct(shape, lowered.avals[v].dtype)
        jax.eval_shape(functools.partial(_evaluate, step.rule.block, tile, step.equation, known), blocks)
    return found


def _evaluate(
    block: Any, tile: BlockTile, equation: Equation, known: Mapping[int, Any], blocks: Mapping[int, Any]
) -> list[Any]:
    operands = {**known, **blocks}
    return list(block(tile, equation, [operands[k] for k in range(len(operands))]))


def _masked_axes(spec: KernelSpec, lowered: Lowered) -> set[int]:
    """The axes of the masks that decide which tiles are skipped."""
    may_skip = spec.passes or spec.capabilities.loop_nest
    program = program_of(lowered.graph, spec) if may_skip else None
    skips = [] if program is None else [s for s in skips_of(lowered, spec, program) if s is not None]
    if not skips:
        return set()
    known = _values_of_no_input(lowered.graph)
    reads: Iterable[Access] = (access for access in spec.reads if access.value in known)
    return (
        {a for s in skips for a in s.axes}
        | _indexed_axes(spec, lowered)
        | {a for r in reads for a in r.axis_set}
    )


def _values_of_no_input(graph: Graph) -> set[int]:
    """The values that follow from no input of the program, such as index arithmetic."""
    known: set[int] = set()
    for node in graph.nodes:
        if known.issuperset(node.inputs):
            known.update(node.outputs)
    return known
