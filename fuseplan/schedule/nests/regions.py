"""Candidate groups for kernels in several passes or of several contractions; ``offered`` prices them.

There are four kinds:

- *Regions* keep large intermediates out of memory: a region has the operations that write or read one of
  several connected large values, and all operations between these. How large is large depends on the program,
  so every size that occurs is tried as a limit (a *level*).
- *Normalised contractions*: a contraction with the statistics of the rows that it contracts, such as those of
  a layer norm. In one kernel, the normalised rows are not written and read again.
- *Narrow contractions* have operands of few columns that another contraction computes, as in a low-rank
  adapter: in ``x @ w + (x @ a) @ b`` one kernel reads ``x`` once and stores no product (Houlsby et al.,
  arXiv:1902.00751; Hu et al., arXiv:2106.09685).
- *Joined contractions* have equal axes, and their results meet in an elementwise operation, as in a gated
  layer ``act(x @ g) * (x @ u)``: one kernel reads ``x`` once and stores neither product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from costmodel.axes import Conflict, unify
from costmodel.backends import backend_of
from costmodel.graph import DimRole, Graph, Node, OpKind, boundary
from fuseplan.schedule.addressing import can_regroup, regroups
from fuseplan.schedule.layout import contraction_axes
from fuseplan.schedule.pricing import Nodes
from fuseplan.support.digraph import between, connected_sets, reachable
from fuseplan.support.work import Work

_LARGE_FRACTIONS = (1, 4)
"""At each level, values of the largest size are large, or those of more than a quarter of it: the terms of a
squared distance in three dimensions are three times as large as the distances."""

MAX_SIZE_RATIO = max(_LARGE_FRACTIONS)

NARROWING = 4
"""A narrow operand has at most this fraction of the elements of its own operands, so that it may be
recomputed for each tile of the result's columns."""

_LAYOUT_OPS = frozenset({"transpose", "convert_element_type", "reshape", "squeeze"})


@dataclass(frozen=True, slots=True)
class IsLarge:
    """A level: whether a size is at most ``most`` and more than ``most // fraction``, or ``most`` itself."""

    most: int
    fraction: int

    def __call__(self, size: int) -> bool:
        return self.most // self.fraction < size + (self.fraction == 1) and size <= self.most


def levels(graph: Graph, min_bytes: int) -> Iterator[IsLarge]:
    """All levels for values of at least ``min_bytes`` that operations write, the largest sizes first."""
    sizes = {v.size for v in graph.values if v.producer >= 0 and v.nbytes >= min_bytes}
    for size in sorted(sizes, reverse=True):
        for fraction in _LARGE_FRACTIONS:
            yield IsLarge(size, fraction)


def can_nest(node: Node, backend: str = "loops") -> bool:
    """Whether tiled loops, or kernels of ``backend`` in several passes, can hold the node."""
    movable = not regroups(node) or can_regroup(node, backend)
    can_nest = backend in node.backends and backend_of(backend).walks_in_passes
    return can_nest and not node.effects and movable


def connected_groups(graph: Graph, is_large: IsLarge, backend: str = "loops") -> list[Nodes]:
    """The sets of operations that are connected by large values that one of them writes."""
    large = [v for v in graph.values if v.producer >= 0 and is_large(v.size)]
    # Consumers of a value that is written elsewhere are not linked: it is in memory anyway.
    edges = [
        (v.producer, n)
        for v in large
        if can_nest(graph.nodes[v.producer], backend)
        for n in graph.consumers[v.id]
        if can_nest(graph.nodes[n], backend)
    ]
    return [tuple(nodes) for nodes in connected_sets(len(graph.nodes), edges) if len(nodes) > 1]


LEVEL = 10
"""Units of work (``fuseplan.support.work``) that finding the groups of one level takes for each operation."""


def regions(
    graph: Graph, min_bytes: int, backend: str = "loops", work: Work | None = None
) -> Iterator[Nodes]:
    """Groups for ``backend`` connected by intermediates of at least ``min_bytes``, each once; those of as
    many levels as ``work`` allows."""
    found: set[Nodes] = set()
    is_index = is_index_arithmetic(graph, backend)

    def within_limit() -> Iterator[IsLarge]:
        for level in levels(graph, min_bytes):
            if work is not None:
                work.spend(LEVEL * len(graph.nodes))
                if work.is_spent:
                    return
            yield level

    groups = (connected_groups(graph, is_large, backend) for is_large in within_limit())
    for nodes in dict.fromkeys(itertools.chain.from_iterable(groups)):
        region = _with_index_arithmetic(graph, nodes, is_index)
        region = _with_index_arithmetic(graph, convex(graph, region), is_index)
        if region in found:
            continue
        found.add(region)
        reduces = any(graph.nodes[n].kind >= OpKind.REDUCTION for n in nodes)
        new = [graph.nodes[n] for n in set(region).difference(nodes)]
        # A contraction between two large values belongs to another layer.
        whole = all(can_nest(node, backend) and not node.flops.matrix for node in new)
        may_gain = reduces and whole and (not backend_of(backend).loop_nest or expands(graph, region))
        if may_gain and _needs_nest(graph, region, backend):
            yield region
            extended = _with_layout_changes(graph, region, backend)
            with_lookups = [_with_lookups(graph, group, backend) for group in (region, extended)]
            for other in (extended, *with_lookups):
                if other != region and other not in found:
                    found.add(other)
                    yield other


def _needs_nest(graph: Graph, nodes: Nodes, backend: str) -> bool:
    """Whether the group is refused as a kernel in one pass (``fuseplan.schedule.legality``): on a CPU,
    always; otherwise, if it has a contraction and another reduction."""
    kinds = [graph.nodes[n].kind for n in nodes]
    several = OpKind.OUT_ELEMENTWISE_FUSABLE in kinds and sum(k >= OpKind.REDUCTION for k in kinds) > 1
    return several or backend_of(backend).loop_nest


def expands(graph: Graph, nodes: Nodes) -> bool:
    """Whether an intermediate is larger than every array that the group reads or writes as a whole. On a CPU,
    XLA's own loops otherwise touch no more memory than a nest would. Of a table, a nest reads what indices
    choose."""
    edge = boundary(graph, nodes)
    whole = {v for n in nodes for v in _read_whole(graph.nodes[n])}.intersection(edge.reads)
    outside = max((graph.values[v].size for v in (*whole, *edge.writes)), default=0)
    kept = {v for n in nodes for v in graph.nodes[n].outputs}.difference(edge.writes)
    return max((graph.values[v].size for v in kept), default=0) > outside


def _read_whole(node: Node) -> tuple[int, ...]:
    """The operands of a node but for a table that it reads by index."""
    is_lookup = bool(node.inputs) and node.addresses(node.input_maps[0])
    return node.inputs[1:] if is_lookup else node.inputs


def is_index_arithmetic(graph: Graph, backend: str = "loops") -> list[bool]:
    """For each node, whether it depends on positions and literals only."""
    known: list[bool] = []
    for node in graph.nodes:
        producers = [graph.values[v].producer for v in node.inputs]
        known.append(can_nest(node, backend) and all(p >= 0 and known[p] for p in producers))
    return known


def _with_index_arithmetic(graph: Graph, nodes: Nodes, is_index: Sequence[bool]) -> Nodes:
    """``nodes`` with the index arithmetic that only they read: each tile computes its own."""
    return tuple(sorted({*nodes, *_private_producers(graph, nodes, is_index.__getitem__)}))


def _private_producers(
    graph: Graph,
    nodes: Nodes,
    may_take: Callable[[int], bool],
    sources: Iterable[int] | None = None,
    is_last: Callable[[int], bool] = lambda _: False,
) -> set[int]:
    """Producers of ``nodes``, and in turn their producers, whose results nothing else reads.

    ``may_take`` says which nodes may be taken. The walk starts from the producers of ``nodes``, or from
    ``sources`` only, and does not pass nodes that are ``is_last``.
    """
    inside, found = set(nodes), set[int]()
    queue = [-p for p in (sources or {p for n in nodes for p in _producers(graph, n)})]
    heapify(queue)
    while queue:  # in descending order, so that a node's readers are decided before it is
        n = -heappop(queue)
        if n < 0 or n in inside or not (may_take(n) and _is_private(graph, n, inside)):
            continue
        inside.add(n)
        found.add(n)
        if not is_last(n):
            for p in _producers(graph, n):
                heappush(queue, -p)
    return found


def _is_private(graph: Graph, n: int, inside: set[int]) -> bool:
    """Whether only nodes ``inside`` read the results of node ``n``."""
    outputs = graph.nodes[n].outputs
    return graph.results.isdisjoint(outputs) and all(inside.issuperset(graph.consumers[v]) for v in outputs)


def _producers(graph: Graph, n: int) -> set[int]:
    """The producers of a node's operands; -1 for arguments."""
    return {graph.values[v].producer for v in graph.nodes[n].inputs}


def _with_layout_changes(graph: Graph, nodes: Nodes, backend: str) -> Nodes:
    """``nodes`` with the transposes and conversions that are the only readers of their results, so that
    results are written in their final layout."""
    inside = set(nodes)
    queue = [v for n in nodes for v in graph.nodes[n].outputs]
    while queue:
        v = queue.pop()
        readers = graph.consumers[v]
        if v in graph.results or len(readers) != 1 or readers[0] in inside:
            continue
        node = graph.nodes[readers[0]]
        if node.op in _LAYOUT_OPS and can_nest(node, backend):
            inside.add(node.id)
            queue += node.outputs
    return tuple(sorted(inside))


def _with_lookups(graph: Graph, nodes: Nodes, backend: str) -> Nodes:
    """``nodes`` with the lookups whose results they alone read, what moves these results, and what computes
    the indices: each tile fetches its own rows."""
    if not backend_of(backend).loads_by_index:
        return nodes

    def looks_up(n: int) -> bool:
        return DimRole.ADDRESSED in graph.nodes[n].roles

    def moves(n: int) -> bool:
        node = graph.nodes[n]
        return can_nest(node, backend) and (node.op in _LAYOUT_OPS or looks_up(n))

    def readers(n: int) -> Iterator[int]:
        return (r for v in graph.nodes[n].outputs for r in graph.consumers[v] if r in moved)

    def may_compute(n: int) -> bool:
        return graph.nodes[n].kind <= OpKind.INJECTIVE and can_nest(graph.nodes[n], backend)

    moved = _private_producers(graph, nodes, moves, is_last=looks_up)
    lookups = {n for n in moved if looks_up(n)}
    if not lookups:
        return nodes
    moved &= lookups | reachable(lookups, readers)
    of_indices = {graph.values[v].producer for n in lookups for v in graph.nodes[n].inputs[1:]}
    computed = _private_producers(graph, (*nodes, *moved), may_compute, of_indices)
    extended = tuple(sorted({*nodes, *moved, *computed}))
    return extended if convex(graph, extended) == extended else nodes


def descendants_up_to_last(graph: Graph, nodes: Nodes) -> list[int]:
    """``nodes`` (ascending) and all nodes before the last of them that depend on one of them, in order."""
    last = nodes[-1]
    after = reachable(
        nodes, lambda m: (n for v in graph.nodes[m].outputs for n in graph.consumers[v] if n < last)
    )
    return sorted(after.union(nodes))


def convex(graph: Graph, nodes: Nodes) -> Nodes:
    """``nodes`` with all nodes on paths between them."""

    def after(n: int) -> Iterator[int]:
        return (c for v in graph.nodes[n].outputs for c in graph.consumers[v])

    return tuple(sorted(between(nodes, after, lambda n: _producers(graph, n))))


def normalised_contractions(graph: Graph, groups: Iterable[Nodes], backend: str) -> Iterator[Nodes]:
    """Groups with contractions and the private producers of their operands, from the first reductions on.

    Their contractions are each single contraction, alone and with the elementwise operations on its result,
    and those of each of ``groups``.
    """
    found: set[Nodes] = set()
    alone = [(n.id,) for n in graph.nodes if _is_contraction(n, backend)]
    alone = [group for group in alone if _with_statistics(graph, group, backend) != group]
    for group in (*alone, *(_with_epilogue(graph, n, backend) for (n,) in alone), *groups):
        whole = _with_statistics(graph, group, backend)
        if whole != group and whole not in found and convex(graph, whole) == whole:
            found.add(whole)
            yield whole


def _with_epilogue(graph: Graph, contraction: int, backend: str) -> Nodes:
    """A contraction and the largest number of elementwise operations on its result that leave one value."""
    inside = {contraction}
    found: Nodes = (contraction,)
    open_values = set(graph.nodes[contraction].outputs)
    waiting = [n for v in open_values for n in graph.consumers[v]]
    heapify(waiting)
    while waiting:
        node = graph.nodes[heappop(waiting)]
        producers = {graph.values[v].producer for v in node.inputs} - inside
        fits = node.kind <= OpKind.BROADCAST and can_nest(node, backend)
        # Values computed from arguments only, such as a row of biases, do not delay the contraction.
        ready = all(p < contraction or max(_producers(graph, p), default=-1) < 0 for p in producers)
        if node.id in inside or not (fits and ready):
            continue
        inside.add(node.id)
        open_values.update(node.outputs)
        open_values = {
            v for v in open_values if v in graph.results or not inside.issuperset(graph.consumers[v])
        }
        if len(open_values) == 1:
            found = tuple(sorted(inside))
        for v in node.outputs:
            for n in graph.consumers[v]:
                heappush(waiting, n)
    return found


def _with_statistics(graph: Graph, group: Nodes, backend: str) -> Nodes:
    """``group`` with its private producers from the first reductions on, and those before the reductions that
    read no more than they write."""

    def may_take(n: int) -> bool:
        return graph.nodes[n].kind <= OpKind.REDUCTION and can_nest(graph.nodes[n], backend)

    private = _private_producers(graph, group, may_take)
    after: set[int] = set()
    for n in sorted(private):
        if graph.nodes[n].kind == OpKind.REDUCTION or not after.isdisjoint(_producers(graph, n)):
            after.add(n)
    if not after:
        return group
    kept = _private_producers(
        graph, group, lambda n: n in after or (n in private and _reads_no_more_than_it_writes(graph, n))
    )
    return tuple(sorted({*group, *kept}))


def _reads_no_more_than_it_writes(graph: Graph, n: int) -> bool:
    node = graph.nodes[n]
    written = max(graph.values[v].size for v in node.outputs)
    return sum(graph.values[v].size >= written for v in set(node.inputs)) <= 1


def narrow_contractions(graph: Graph, backend: str) -> Iterator[Nodes]:
    """Pairs of contractions, the second of which contracts few columns of the first, with the elementwise
    operations between them; and each pair with a contraction to whose result its own is added. Only the last
    result has other readers."""
    for node in graph.nodes:
        if not _is_contraction(node, backend) or node.reduction_size > backend_of(backend).one_step_depth:
            continue
        for v in node.inputs:
            before = _narrow_operand(graph, v, node.id, backend)
            pair = tuple(sorted({*before, node.id}))
            if before and convex(graph, pair) == pair:
                yield pair
                three = _with_summand(graph, pair, backend)
                if three != pair and convex(graph, three) == three:
                    yield three


def _is_contraction(node: Node, backend: str) -> bool:
    return node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and can_nest(node, backend)


def _narrow_operand(graph: Graph, v: int, reader: int, backend: str) -> set[int]:
    """The operations that compute ``v`` from one contraction, if only ``reader`` reads their results."""

    def is_contraction(n: int) -> bool:
        return _is_contraction(graph.nodes[n], backend)

    def may_take(n: int) -> bool:
        node = graph.nodes[n]
        return is_contraction(n) or (node.kind <= OpKind.BROADCAST and can_nest(node, backend))

    found = _private_producers(graph, (reader,), may_take, [graph.values[v].producer], is_contraction)
    contractions = [graph.nodes[n] for n in found if graph.nodes[n].flops.matrix > 0]
    return found if len(contractions) == 1 and _narrows(graph, contractions[0]) else set()


def _narrows(graph: Graph, node: Node) -> bool:
    largest = max(graph.values[v].size for v in node.inputs)
    return graph.values[node.outputs[0]].size * NARROWING <= largest


def _with_summand(graph: Graph, pair: Nodes, backend: str) -> Nodes:
    """``pair`` with the elementwise operations on its result, up to a sum with another contraction's."""
    inside, last = set(pair), pair[-1]
    while True:
        (v, *_) = graph.nodes[last].outputs
        readers = graph.consumers[v]
        if v in graph.results or len(readers) != 1 or graph.nodes[readers[0]].kind != OpKind.ELEMENTWISE:
            return pair
        last = readers[0]
        inside.add(last)
        producers = _producers(graph, last) - inside
        others = {p for p in producers if p >= 0 and _is_contraction(graph.nodes[p], backend)}
        if len(others) == 1 and _is_private(graph, min(others), inside):
            return tuple(sorted(inside | others))


def joined_contractions(graph: Graph, backend: str) -> Iterator[Nodes]:
    """Groups of contractions over the same axes, with the elementwise operations between them and the one in
    which they meet, each once."""
    most = backend_of(backend).max_accumulators
    feeding: dict[int, Nodes] = {}
    found: set[Nodes] = set()
    for node in graph.nodes:
        if not can_nest(node, backend):
            continue
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            feeding[node.id] = (node.id,)
            continue
        if node.kind > OpKind.BROADCAST:
            continue
        sources = {feeding[p] for p in _producers(graph, node.id) if p in feeding}
        together = tuple(sorted({n for some in sources for n in some}))
        if not together or sum(graph.nodes[n].flops.matrix > 0 for n in together) > most:
            continue
        group = feeding[node.id] = (*together, node.id)
        if (
            len(sources) > 1
            and group not in found
            and all(_is_private(graph, n, set(group)) for n in group[:-1])
            and _have_equal_axes(graph, group, most)
        ):
            found.add(group)
            yield group


def _have_equal_axes(graph: Graph, group: Nodes, most: int) -> bool:
    """Whether the two to ``most`` contractions of a group have equal axes in equal roles."""
    contractions = [n for n in group if graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE]
    axes = unify(graph, group)
    if not 1 < len(contractions) <= most or isinstance(axes, Conflict):
        return False
    own = [contraction_axes(graph.nodes[n], axes.node_axes[group.index(n)]) for n in contractions]
    return bool(own[0].depth) and all(one == own[0] for one in own)
