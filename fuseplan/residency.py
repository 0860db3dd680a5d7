"""What a group must hold on chip whatever its tiles, and whatever joins it.

An axis that a member reduces is never a grid axis again, however the group grows. It is
streamed or it is resident; only one axis can be streamed, and none that a value written
for good is indexed by. If what remains resident exceeds a core, no schedule of this group
or of any larger one can fit: that prunes a search early.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from costmodel import dtypes
from costmodel.axes import GroupAxes, compose
from costmodel.device import DeviceSpec
from costmodel.graph import DimMap, Graph, OpKind
from fuseplan.errors import Verdict
from fuseplan.layout import repeats


def refuse_resident(
    graph: Graph,
    device: DeviceSpec,
    nodes: tuple[int, ...],
    axes: GroupAxes,
    written_for_good: Set[int],
) -> Verdict | None:
    """Why no tile of ``nodes`` or of a larger group can fit on a core, or None.

    ``written_for_good`` are values that are written however the group grows: results of the
    function, and operands of nodes that can never join.
    """
    written = [
        compose(dim_map, own)
        for n, own in zip(nodes, axes.node_axes, strict=True)
        for v, dim_map in zip(graph.nodes[n].outputs, graph.nodes[n].output_maps, strict=True)
        if v in written_for_good
    ]
    indexed = [{a for dims in w for a in dims} for w in written]
    # That an axis is missing from a written value proves nothing: joiners may yet tie it to
    # one that is there (test_residency.py::test_refusals_hold_for_every_larger_group).
    held = [a for a in range(len(axes.sizes)) if axes.reduced[a] or axes.whole[a]]
    if not held:
        return None
    limit_bytes = device.register_bytes // 2 or device.onchip_bytes
    blocks = list(_blocks(graph, nodes, axes, written_for_good))
    if _largest(blocks, axes, held) <= limit_bytes:
        return None
    for a in held:
        streamable = axes.reduced[a] and not axes.whole[a] and not any(a in s for s in indexed)
        rest = [b for b in held if b != a]
        if streamable and _largest(blocks, axes, rest) <= limit_bytes and not repeats(graph, nodes, axes, a):
            return None
    names = " and ".join(dict.fromkeys(graph.nodes[n].op for n in (nodes[0], nodes[-1])))
    return Verdict(
        "on-chip",
        f"{names} would hold more whole rows and columns than fit on chip ({limit_bytes:,} bytes a core)",
        nodes,
    )


def _blocks(
    graph: Graph, nodes: tuple[int, ...], axes: GroupAxes, written_for_good: Set[int]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Blocks that every schedule has on a core: element bytes and axes of each value that is
    written for good, comes from outside the graph, or is reduced."""

    def block(v: int, dim_map: DimMap, own: tuple[tuple[int, ...], ...]) -> tuple[int, frozenset[int]]:
        width = -(-dtypes.bits(graph.values[v].dtype) // 8)
        return width, frozenset(a for dims in compose(dim_map, own) for a in dims)

    for n, own in zip(nodes, axes.node_axes, strict=True):
        node = graph.nodes[n]
        for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
            producer = graph.values[v].producer
            # A broadcast is never held: it is made where it is used.
            real = producer < 0 or graph.nodes[producer].kind != OpKind.BROADCAST
            if producer < 0 or (node.kind == OpKind.REDUCTION and real):
                yield block(v, dim_map, own)
        for v, dim_map in zip(node.outputs, node.output_maps, strict=True):
            if v in written_for_good:
                yield block(v, dim_map, own)


def _largest(blocks: list[tuple[int, frozenset[int]]], axes: GroupAxes, held: list[int]) -> int:
    """Bytes of the largest block when the axes ``held`` are whole and every other is one."""
    largest = 0
    for width, own in blocks:
        size = width
        for a in held:
            if a in own:
                size *= axes.sizes[a]
        largest = max(largest, size)
    return largest
