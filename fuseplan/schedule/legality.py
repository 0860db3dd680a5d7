"""Decide whether operations may share a kernel; each refusal (``Verdict``) names the rule and the reason.

- ``refuse``: the *monotone* rules, by which a refused group refuses every larger one, so that a search prunes
  all of them. Each operation must be one that the backend can hold (no side effects, no opaque call, no
  reshape that ``addressing`` refuses); the operations must have common axes (``costmodel.axes``). A
  contraction takes elementwise operations, broadcasts and data movement on its operands and its result, and
  no reduction and no second contraction; what its operands are computed from must not be needed elsewhere
  (``possible_prologues``).
- ``refuse_results``, ``refuse_exchange``: what the kernel may read and write; not monotone.
  ``scheduler.Scheduler.schedule`` asks both.
- ``refuse_loop``: the rules for a loop into which XLA fuses a group of a GPU's or TPU's program.
- ``refuse_nest``: the rules for a nest (``nests``), a kernel in several passes or of several contractions.

Other modules refuse a group for more than its operations:

- it fits on chip in no tile: ``footprint.Capacity.refuse``, and ``Scheduler.schedule`` once it is priced;
- the user forbids it: ``fuseplan.search.constrained_pricing``;
- it meets only in a scalar with many readers (``shared_operands.wide_hubs``), and groups are not fused across
  those: ``fuseplan.search.components.crossable_edges`` drops the edge;
- its kernel would wait for itself: ``crossable_edges`` drops an edge beside a path that leaves the group, and
  ``fuseplan.search.candidates`` finds convex groups only;
- it and other groups would wait for each other: ``fuseplan.search.column_pricing`` and, across components,
  ``fuseplan.search.joint`` forbid them together; heuristics split one of them
  (``fuseplan.search.grouping.break_cycles``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from costmodel.axes import Conflict, GroupAxes, reduced_axes
from costmodel.backends import backend_names, backend_of
from costmodel.graph import Boundary, DimRole, Graph, Node, OpKind, boundary
from costmodel.xla_loops import (
    SCATTERS,
    absorbed,
    ends_loop,
    epilogues_of_product,
    goes_on,
    is_expensive,
    is_library_call,
    is_one_loop,
    is_scatter,
    is_written_before,
    loops_of_results,
    repeated_in_loop,
)
from fuseplan.plan.options import ALL_FEATURES, Features
from fuseplan.schedule.addressing import refuse_regrouping
from fuseplan.support.errors import Verdict

MAX_LOOP_ARRAYS = 96
"""Arrays that a loop of XLA reads and writes at most (``MaxOperandsAndOutputsPerFusion``)."""

Prologues = Sequence[bool] | Mapping[int, bool]
"""By node, whether it may be a prologue, as ``possible_prologues`` says."""


def refuse(
    graph: Graph,
    backend: str,
    nodes: tuple[int, ...],
    axes_of: Callable[[tuple[int, ...]], GroupAxes | Conflict],
    prologues: Prologues,
    features: Features = ALL_FEATURES,
) -> Verdict | None:
    """Why ``nodes`` (ascending ids) can share no kernel in one pass of ``backend``, or None; monotone.

    ``axes_of`` gives a group's axes (``costmodel.axes.unify``), ``prologues`` are the ``possible_prologues``.
    """
    members = [graph.nodes[n] for n in nodes]
    if len(members) == 1:
        return None
    refused = _barriers(graph, members, backend) or _contractions(members, features, backend)
    if refused is None and not backend_of(backend).emits_kernels:
        refused = _xla_loops(graph, members)
    if refused is not None:
        return refused
    axes = axes_of(nodes)
    if isinstance(axes, Conflict):
        return Verdict("shapes", axes.reason, (axes.producer, axes.consumer))
    anchor = next((n for n in members if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE), None)
    return None if anchor is None else _refuse_prologue(members, anchor, axes, prologues)


def refuse_nest(
    graph: Graph,
    backend: str,
    nodes: tuple[int, ...],
    axes_of: Callable[[tuple[int, ...]], GroupAxes | Conflict],
) -> Verdict | None:
    """Why ``nodes`` can be no nest of ``backend``, or None. Whether the nest can be split into passes is not
    monotone; ``nests.multipass`` tests it."""
    refused = _barriers(graph, [graph.nodes[n] for n in nodes], backend)
    axes = axes_of(nodes)
    if refused is None and isinstance(axes, Conflict):
        return Verdict("shapes", axes.reason, (axes.producer, axes.consumer))
    return refused


def refuse_loop(
    graph: Graph, nodes: tuple[int, ...], backend: str, edge: Boundary | None = None
) -> Verdict | None:
    """Why XLA does not fuse ``nodes`` (ascending ids) into one loop of the device of ``backend``, or None.

    A loop has elementwise operations, broadcasts, data movement, and reductions that end it; on some devices
    also a contraction, whose operands may be transposed. All that it writes has one iteration space: with
    several reductions, that of each. On a GPU, the group may also be a matrix product with its epilogue.
    ``edge`` is what it reads and writes; without it, its ``boundary``. Not monotone.
    """
    members, can = [graph.nodes[n] for n in nodes], backend_of(backend)
    edge = edge or boundary(graph, nodes)
    # A scatter of one update a row has another rule, which no loop of XLA's is known to follow.
    may_scatter = can.loop_scatters and all(is_scatter(n) for n in members if n.op in SCATTERS)
    refused = _barriers(graph, members, "xla", can.loop_generators | (SCATTERS if may_scatter else set()))
    may_be_product = refused is None and can.fuses_epilogues and len(edge.writes) == 1
    if may_be_product and any(nodes in epilogues_of_product(graph, n) for n in nodes):
        return None
    ends = [n for n in members if ends_loop(graph, n, can)]
    refused = refused or _loop_ends(members, ends, can.loop_products) or _movers(graph, members, backend)
    refused = refused or _tables(graph, members, edge)
    if refused is not None:
        return refused
    if len(edge.reads) + len(edge.writes) > MAX_LOOP_ARRAYS:
        return Verdict("backend", f"its loop would read and write more than {MAX_LOOP_ARRAYS} arrays", nodes)
    makers = [graph.nodes[graph.values[v].producer] for v in edge.writes]
    for first, node in pairwise(makers):
        if _elements(graph, node)[0] != _elements(graph, first)[0]:
            reason = f"{first.op} and {node.op} would be written by loops over other elements"
            return Verdict("shapes", reason, (first.id, node.id))
    reductions = [node for node in makers if node.kind == OpKind.REDUCTION]
    for first, node in pairwise(reductions):
        if _elements(graph, node) != _elements(graph, first):
            return Verdict("shapes", f"{first.op} and {node.op} reduce other dimensions", (first.id, node.id))
    repeated = repeated_in_loop(graph, nodes, can.loop_indices)
    if repeated is None:
        return Verdict("backend", "its loop would evaluate an operation at too many indices", nodes)
    if repeated:
        reason = f"XLA does not evaluate {graph.nodes[repeated[0]].op} more than once"
        return Verdict("backend", reason, repeated[:1])
    return None


def refuse_results(nodes: tuple[int, ...], edge: Boundary, features: Features) -> Verdict | None:
    """Why a kernel of ``nodes`` may not write the arrays of ``edge``, or None. Not monotone."""
    if len(edge.writes) > 1 and not features.several_results:
        return Verdict("backend", f"its kernel would write {len(edge.writes)} arrays", nodes)
    return None


def refuse_exchange(graph: Graph, backend: str, nodes: tuple[int, ...], edge: Boundary) -> Verdict | None:
    """Why a kernel of ``nodes`` cannot read or write the arrays of ``edge``, or None. Not monotone: these may
    be intermediates of a larger group."""
    can = backend_of(backend)
    exchanged = [graph.values[v] for v in (*edge.reads, *edge.writes)]
    if can.max_arrays is not None and len(exchanged) > can.max_arrays:
        return Verdict("backend", f"its kernel would read and write {len(exchanged)} arrays", nodes)
    if not can.exchanges_bool and any(value.dtype == "bool" for value in exchanged):
        return Verdict("backend", f"{backend} kernels neither read nor write arrays of bool", nodes)
    return None


def _barriers(graph: Graph, members: list[Node], backend: str, also: Collection[str] = ()) -> Verdict | None:
    """Why kernels of ``backend``, which can contain the primitives ``also``, contain no group with one of
    ``members``, or None."""
    for node in members:
        if node.effects:
            return Verdict("side-effects", f"{node.op} has side effects", (node.id,))
        if 0 in node.dims:
            return Verdict("backend", f"{node.op} has an empty array, which XLA leaves out", (node.id,))
        if node.kind == OpKind.OPAQUE:
            return Verdict("opaque", f"{node.op} is a step of its own", (node.id,))
        if backend not in node.backends and node.op not in also:
            return Verdict("backend", f"{backend} kernels cannot contain {node.op}", (node.id,))
        refused = refuse_regrouping(graph, node, backend)
        if refused is not None:
            return refused
    return None


def _contractions(members: list[Node], features: Features, backend: str) -> Verdict | None:
    """A contraction takes elementwise operations and data movement on its operands and its result, and no
    other contraction or reduction. Some backends copy operands from memory to the matrix units directly."""
    anchors = [n for n in members if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE]
    if not anchors:
        return None
    anchor = anchors[0]
    if len(anchors) > 1:
        return Verdict(
            "shapes",
            f"{anchor.op} and {anchors[1].op} would each need the other's result whole",
            tuple(n.id for n in anchors),
        )
    made = {v for n in members for v in n.outputs}
    prologues = features.prologues and backend_of(backend).fuses_operands
    if not prologues and made.intersection(anchor.inputs):
        return Verdict("shapes", f"nothing is fused into the operands of {anchor.op}", (anchor.id,))
    if not features.epilogues and any(set(anchor.outputs).intersection(n.inputs) for n in members):
        return Verdict("shapes", f"nothing is fused onto the result of {anchor.op}", (anchor.id,))
    for node in members:
        if node.kind == OpKind.REDUCTION:
            if node in ancestors_among(members, anchor):
                reason = f"{node.op} needs whole rows of an operand of {anchor.op}"
            elif anchor in ancestors_among(members, node):
                reason = f"{node.op} needs whole rows of the result of {anchor.op}"
            else:
                reason = f"{node.op} needs whole rows beside {anchor.op}, which has tiles of them"
            return Verdict("shapes", reason, (anchor.id, node.id))
    return None


def _xla_loops(graph: Graph, members: list[Node]) -> Verdict | None:
    """XLA's CPU loops fuse elementwise operations and data movement with each other and some of them into a
    reduction, but nothing around a contraction; only calls of a library go on after a reduction of rows."""
    if is_library_call(graph, [node.id for node in members]):
        return None
    return _classic_loops(graph, members)


def refuse_call(graph: Graph, backend: str, nodes: tuple[int, ...], edge: Boundary) -> Verdict | None:
    """Why XLA:CPU compiles a group that ``refuse`` allows otherwise than as its loops that write ``edge``, or
    None: a call of its library writes one array, and takes in what leads to its reductions. Not monotone."""
    if backend_of(backend).emits_kernels or not is_one_loop(graph, nodes):
        return None
    if len(edge.writes) > 1:
        refused = _classic_loops(graph, [graph.nodes[n] for n in nodes])
        if refused is not None:
            return replace(refused, reason=f"{refused.reason}, but for one result")
        loops = loops_of_results(graph, nodes, edge.writes)
        for n, count in Counter(n for loop in loops.values() for n in loop).items():
            if count > 1 and is_expensive(graph.nodes[n]):
                reason = f"XLA writes what {graph.nodes[n].op} makes for two results"
                return Verdict("backend", reason, (n,))
    for n in sorted({graph.values[v].producer for v in edge.writes}):
        reader = absorbed(graph, graph.nodes[n])
        if reader is not None and _is_read_outside(graph, nodes, n):
            reason = f"XLA takes {graph.nodes[n].op} into a call of its library, with {reader.op}"
            return Verdict("backend", reason, (n, reader.id))
    return None


def _is_read_outside(graph: Graph, nodes: Collection[int], n: int) -> bool:
    """Whether none of the readers of a node, which may be copies of one, is in a group."""
    return all(r not in nodes for v in graph.nodes[n].outputs for r in graph.consumers[v])


def _classic_loops(graph: Graph, members: list[Node]) -> Verdict | None:
    """As ``_xla_loops``, without calls of a library that go on after a reduction."""
    reductions = [node for node in members if node.kind == OpKind.REDUCTION]
    ends = [node for node in reductions if not goes_on(graph, node)]
    refused = _loop_ends(members, ends) or _wider_than_rows(graph, members) or _shared_operands(members)
    if refused is not None:
        return refused
    for reduction in members:
        for node in members if reduction.kind == OpKind.REDUCTION else ():
            if node.kind != OpKind.REDUCTION and is_written_before(graph, reduction, node):
                reason = f"XLA writes what {node.op} makes before {reduction.op} reads it"
                return Verdict("backend", reason, (node.id, reduction.id))
    return None


def _wider_than_rows(graph: Graph, members: list[Node]) -> Verdict | None:
    """Why a loop with reductions is none of XLA:CPU's, or None: one of its nodes makes another number of
    elements of a reduction's result."""
    rows: dict[int, Node] = {}
    for node in members:
        end = next((rows[v] for v in node.inputs if v in rows), None)
        if end is not None:
            is_same = all(graph.values[v].size == graph.values[end.outputs[0]].size for v in node.outputs)
            if not is_same or not (node.kind == OpKind.ELEMENTWISE or node.bitcast):
                reason = f"XLA ends a loop at {end.op}: {node.op} starts another"
                return Verdict("backend", reason, (end.id, node.id))
        elif node.kind == OpKind.REDUCTION:
            end = node
        if end is not None:
            rows.update(dict.fromkeys(node.outputs, end))
    return None


def _loop_ends(members: list[Node], ends: list[Node], may_hold: Collection[str] = ()) -> Verdict | None:
    """Why ``members`` are no loop, or None: one reads the result of one of ``ends``, or there are several
    contractions, or one that is not of the primitives ``may_hold``."""
    made_by = {v: n for n in ends for v in n.outputs}
    products = 0
    for node in members:
        is_product = node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE
        products += is_product
        if is_product and (products > 1 or node.op not in may_hold):
            return Verdict("backend", f"XLA runs {node.op} on its own on this device", (node.id,))
        for v in node.inputs:
            if v in made_by:
                return Verdict(
                    "backend",
                    f"XLA ends a loop at {made_by[v].op}: {node.op} starts another",
                    (made_by[v].id, node.id),
                )
    return None


def _tables(graph: Graph, members: list[Node], edge: Boundary) -> Verdict | None:
    """Why a loop cannot end in a scatter of ``members``, or None: it writes the scatter's table alone, which
    was made before."""
    for node in filter(is_scatter, members):
        if len(edge.writes) > 1:
            return Verdict("backend", f"{node.op} ends a loop that writes nothing else", (node.id,))
        maker = graph.values[node.inputs[0]].producer
        if any(n.id == maker for n in members):
            reason = f"XLA writes the table of {graph.nodes[maker].op} before {node.op} adds to it"
            return Verdict("backend", reason, (maker, node.id))
    return None


def _elements(graph: Graph, node: Node) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The shape over which a loop that ends in ``node`` runs, and which dimensions are reduced."""
    if node.kind != OpKind.REDUCTION:
        shape = graph.values[node.outputs[0]].shape
        return shape, (False,) * len(shape)
    reduced = [any(node.roles[d] == DimRole.REDUCED for d in dims) for dims in node.input_maps[0]]
    return graph.values[node.inputs[0]].shape, tuple(reduced)


def _movers(graph: Graph, members: list[Node], backend: str) -> Verdict | None:
    """What moves data inside of a loop; what is moved may have to be written first."""
    can = backend_of(backend)
    operands = {v for n in members if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE for v in n.inputs}
    computed: dict[int, Node] = {}
    """The values that are more than other names of what was written before, and the nodes that make them."""
    for node in members:
        is_name = node.bitcast and computed.keys().isdisjoint(node.inputs)
        if not is_name:
            computed.update(dict.fromkeys(node.outputs, node))
        if node.kind != OpKind.INJECTIVE:
            continue
        if node.op == "transpose" and not operands.isdisjoint(node.outputs):
            continue  # A contraction takes its operands in any order of dimensions.
        if node.bitcast and not (can.lane_tiles and changes_rows(graph, node)):
            continue
        if node.op not in can.loop_movers:
            return Verdict("backend", f"XLA runs {node.op} on its own on this device", (node.id,))
        for v in node.inputs if not can.loops_move_computed else ():
            if v in computed and (computed[v].takes_part or not joins_at_end(graph, node, members)):
                reason = f"XLA writes the result of {computed[v].op} before {node.op} moves it"
                return Verdict("backend", reason, (computed[v].id, node.id))
    return None


def joins_at_end(graph: Graph, node: Node, members: Collection[Node]) -> bool:
    """Whether ``node`` joins arrays of one shape, and none of ``members`` reads the result: a loop then
    writes the parts to their places."""
    shapes = {graph.values[v].shape for v in node.inputs}
    is_read = any(not set(node.outputs).isdisjoint(other.inputs) for other in members)
    return node.op == "concatenate" and len(shapes) == 1 and not is_read


def changes_rows(graph: Graph, node: Node) -> bool:
    """Whether a reshape does more than add or drop dimensions of size one."""
    source, made = ([d for d in graph.values[v].shape if d != 1] for v in (node.inputs[0], node.outputs[0]))
    return source != made


def _shared_operands(members: list[Node]) -> Verdict | None:
    """Each reduction is a loop of its own in XLA: a computed value that two of them read is written to
    memory."""
    if sum(node.kind == OpKind.REDUCTION for node in members) < 2:
        return None
    loops: dict[int, set[int]] = {}
    for node in reversed(members):
        read_by = set().union(*(loops.get(v, ()) for v in node.outputs))
        if len(read_by) > 1 and node.flops.total:
            first, second = sorted(read_by)[:2]
            return Verdict("backend", f"XLA writes what {node.op} makes for two reductions", (first, second))
        if node.kind == OpKind.REDUCTION:
            read_by = {node.id}
        for v in node.inputs:
            loops.setdefault(v, set()).update(read_by)
    return None


def possible_prologues(graph: Graph) -> tuple[bool, ...]:
    """For each node, whether it may be a *prologue*: an operation whose result becomes an operand of a
    contraction in the same kernel.

    A prologue is evaluated in the loop over the contracted axis, on the block that the next step multiplies,
    and again for each tile of the axes that it lacks, so its result is never written. Therefore all paths
    from it must lead to one contraction, by nodes that may share its kernel. This depends on the graph and
    not on a group, so refusals are monotone.
    """
    if not any(node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE for node in graph.nodes):
        return (False,) * len(graph.nodes)
    fusing = {b for b in map(backend_of, backend_names()) if b.is_compiled_apart and b.fuses_operands}
    kernels = {backend.name for backend in fusing}
    outputs = set(graph.outputs)
    ends_in: list[int | None] = [None] * len(graph.nodes)  # the contraction that all paths lead to
    for node in reversed(graph.nodes):
        if node.kind > OpKind.INJECTIVE or node.effects or not kernels.intersection(node.backends):
            continue
        if not outputs.isdisjoint(node.outputs):
            continue
        reached = {
            r if graph.nodes[r].kind == OpKind.OUT_ELEMENTWISE_FUSABLE else ends_in[r]
            for v in node.outputs
            for r in graph.consumers[v]
        }
        if len(reached) == 1:
            ends_in[node.id] = reached.pop()
    return tuple(end is not None for end in ends_in)


def ancestors_among(members: Sequence[Node], anchor: Node) -> list[Node]:
    """Those of ``members`` (ascending) that ``anchor`` depends on by a path among them."""
    needed = set(anchor.inputs)
    found = []
    for node in reversed(members):
        if node.id < anchor.id and not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            found.append(node)
    return found


def _inside(members: Sequence[Node], anchor: Node, axes: GroupAxes) -> list[Node]:
    """Those of ``members`` that are evaluated in the loop over the axes that ``anchor`` contracts."""
    position = {node.id: i for i, node in enumerate(members)}
    depth = reduced_axes(anchor, axes.node_axes[position[anchor.id]])
    return [
        node
        for node in ancestors_among(members, anchor)
        if any(a in depth for dims in axes.node_axes[position[node.id]] for a in dims)
    ]


def _refuse_prologue(
    members: Sequence[Node], anchor: Node, axes: GroupAxes, prologues: Prologues
) -> Verdict | None:
    """Why the operands of ``anchor`` cannot be computed with it in one kernel, or None.

    Monotone: values inside the group unify two axes of a contraction, or give a prologue the contracted axis,
    and a larger group has the same values inside.
    """
    own = axes.node_axes[members.index(anchor)]
    every = [a for dims in own for a in dims]
    if len(set(every)) < len(every):
        reason = f"a value would be needed by {anchor.op} and beside it along different axes"
        return Verdict("shapes", reason, (anchor.id,))
    for node in _inside(members, anchor, axes):
        if not prologues[node.id]:
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
    """Why a result computed inside ``anchor``'s loop is needed outside of it, or None; for groups of copies,
    each of which is computed for some readers only, so that ``possible_prologues`` do not decide it."""
    inside = _inside(members, anchor, axes)
    inner = {node.id for node in inside}
    made = {v for node in inside for v in node.outputs}
    for node in members:
        beside = node.id not in inner and node is not anchor and not made.isdisjoint(node.inputs)
        if beside or (node.id in inner and not set(writes).isdisjoint(node.outputs)):
            reason = f"what {node.op} needs or makes is computed inside {anchor.op}, once a tile"
            return Verdict("shapes", reason, (node.id, anchor.id))
    return None
