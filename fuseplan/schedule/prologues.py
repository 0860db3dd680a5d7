"""Prologues: operations whose results are operands of a contraction in the same kernel.

They are evaluated in the loop over the contracted axis, on the block that the next step of
the loop multiplies. Nothing that they make there can be written: it is made again for each
tile of the axis that it lacks. So a kernel may hold an operation of this kind only if every
reader of its results, and every reader of theirs, ends in the one contraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodel.axes import GroupAxes
from costmodel.backends import backend_names, backend_of
from costmodel.graph import DimRole, Graph, Node, OpKind
from fuseplan.support.errors import Verdict

Gates = Sequence[bool] | Mapping[int, bool]
"""By node, whether it is ``gated``."""


def gated(graph: Graph) -> tuple[bool, ...]:
    """For each node, whether all that follows from it passes through one contraction, and
    nothing on the way there must be a kernel of its own.

    Together with a path from the node to a contraction inside a group, it is that one. It is a
    fact about a node's surroundings, not about a group: what it refuses, it refuses for every
    larger group too.
    """
    if not any(node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE for node in graph.nodes):
        return (False,) * len(graph.nodes)
    fusing = {b for b in map(backend_of, backend_names()) if b.is_compiled_apart and b.fuses_operands}
    kernels = {backend.name for backend in fusing}
    outputs = set(graph.outputs)
    gates: list[int | None] = [None] * len(graph.nodes)
    for node in reversed(graph.nodes):
        if node.kind > OpKind.INJECTIVE or node.effects or not kernels.intersection(node.backends):
            continue
        if not outputs.isdisjoint(node.outputs):
            continue
        reached = {
            r if graph.nodes[r].kind == OpKind.OUT_ELEMENTWISE_FUSABLE else gates[r]
            for v in node.outputs
            for r in graph.consumers[v]
        }
        if len(reached) == 1:
            gates[node.id] = reached.pop()
    return tuple(gate is not None for gate in gates)


def behind(members: Sequence[Node], anchor: Node) -> list[Node]:
    """Those of ``members`` (ascending) that ``anchor`` depends on by a path among them."""
    needed = set(anchor.inputs)
    found = []
    for node in reversed(members):
        if node.id < anchor.id and not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            found.append(node)
    return found


def _inside(members: Sequence[Node], anchor: Node, axes: GroupAxes) -> list[Node]:
    """Those of ``members`` that are evaluated in the loop over what ``anchor`` contracts."""
    position = {node.id: i for i, node in enumerate(members)}
    own = axes.node_axes[position[anchor.id]]
    depth = {a for dims, role in zip(own, anchor.roles, strict=True) if role == DimRole.REDUCED for a in dims}
    return [
        node
        for node in behind(members, anchor)
        if any(a in depth for dims in axes.node_axes[position[node.id]] for a in dims)
    ]


def refuse_prologue(
    members: Sequence[Node], anchor: Node, axes: GroupAxes, is_gated: Gates
) -> Verdict | None:
    """Why the operands of ``anchor`` cannot be computed with it in one kernel, or None.

    Monotone: only ties inside the group make two axes of a contraction one, or give an
    operation that leads to it the contracted axis, and a larger group has them too
    (test_planners.py::test_the_scheduler_keeps_its_promise_that_refusals_are_monotone).
    """
    position = {node.id: i for i, node in enumerate(members)}
    own = axes.node_axes[position[anchor.id]]
    every = [a for dims in own for a in dims]
    if len(set(every)) < len(every):
        reason = f"a value would be needed by {anchor.op} and beside it along different axes"
        return Verdict("shapes", reason, (anchor.id,))
    for node in _inside(members, anchor, axes):
        if not is_gated[node.id]:
            return Verdict(
                "shapes",
                f"{node.op} is needed elsewhere too: inside {anchor.op} it would be made once a tile and "
                "never written",
                (node.id, anchor.id),
            )
    return None


def refuse_leak(
    members: Sequence[Node], anchor: Node, axes: GroupAxes, writes: Sequence[int]
) -> Verdict | None:
    """Why what is computed inside ``anchor``'s loop is needed beside it too, or None: asked where an
    operation is computed for some of its readers only, so that the gates of all do not tell."""
    inside = _inside(members, anchor, axes)
    inner = {node.id for node in inside}
    made = {v for node in inside for v in node.outputs}
    for node in members:
        beside = node.id not in inner and node is not anchor and not made.isdisjoint(node.inputs)
        if beside or (node.id in inner and not set(writes).isdisjoint(node.outputs)):
            reason = f"what {node.op} needs or makes is computed inside {anchor.op}, once a tile"
            return Verdict("shapes", reason, (node.id, anchor.id))
    return None
