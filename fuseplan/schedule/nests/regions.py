"""Regions: the groups that are offered to the planners as tiled loops.

A loop nest pays where it keeps large intermediates from memory. A region therefore is what
such values tie together: all operations that make or read one of them, and what lies between
these. How large is large is tried at several levels; whether a region has a nest, and whether
it is worth it, is for the scheduler to say.

Normed: a contraction and the statistics of the rows that it contracts, such as a layer norm's.

A row's mean and variance are sums along the axis that the contraction sums along. In one kernel the
row is not written once it is normed, and read again: it is whole on chip, or walked in passes, and
what is divided by (an RMS norm's root) is left for the end of the one walk (``scaling``).

Narrow: a contraction along the few columns that another one makes, as those of a low-rank adapter.

In ``x @ w + (x @ a) @ b`` the rows of ``x @ a`` are short: a kernel that has a tile of ``x`` makes them
beside ``x @ w``, and multiplies them by ``b`` when all of ``x`` has been seen; ``x`` is read once, and no
product is stored. So it is with ``gelu(x @ a) @ b`` (Houlsby et al., arXiv:1902.00751; Hu et al.,
arXiv:2106.09685).

Joined: contractions whose results meet in an elementwise operation, as a gate and what it gates.

``silu(x @ g) * (x @ u)`` has two products of the same rows; in one kernel both are accumulated in one
loop over what they contract, ``x`` is read once, and neither product is stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import prod

from costmodel.axes import Conflict, unify
from costmodel.backends import backend_of
from costmodel.graph import DimRole, Graph, Node, OpKind, boundary
from fuseplan.schedule.layout import contraction_axes
from fuseplan.schedule.nests.connected import Nodes, loopable, tied_at_any_level

_ARRANGING = frozenset({"transpose", "convert_element_type", "reshape", "squeeze", "expand_dims"})


def regions(graph: Graph, min_bytes: int, backend: str = "loops") -> Iterator[Nodes]:
    """Groups of ``backend`` tied together by intermediates of at least ``min_bytes``, each once."""
    found: set[Nodes] = set()
    positions = is_index_arithmetic(graph, backend)
    for nodes in tied_at_any_level(graph, min_bytes, backend):
        region = convex(graph, with_positions(graph, nodes, positions))
        region = with_positions(graph, region, positions)
        if region in found:
            continue
        found.add(region)
        reduces = any(graph.nodes[n].kind >= OpKind.REDUCTION for n in nodes)
        new = [graph.nodes[n] for n in set(region).difference(nodes)]
        # A product between two large values belongs to another layer.
        whole = all(loopable(node, backend) and not node.flops.matrix for node in new)
        if reduces and whole and _expands(graph, region) and _is_new(graph, region, backend):
            yield region
            arranged = with_arrangement(graph, region, backend)
            if arranged != region and arranged not in found:
                found.add(arranged)
                yield arranged


def _is_new(graph: Graph, nodes: Nodes, backend: str) -> bool:
    """Whether the rules refuse the group, so that it is possible as a nest only: a contraction that
    something else is reduced beside (``fuseplan.schedule.legality``); on a CPU, any."""
    kinds = [graph.nodes[n].kind for n in nodes]
    several = OpKind.OUT_ELEMENTWISE_FUSABLE in kinds and sum(k >= OpKind.REDUCTION for k in kinds) > 1
    return several or backend_of(backend).loop_nest


def _expands(graph: Graph, nodes: Nodes) -> bool:
    """Whether something made and used up inside is larger than all that is read and written.
    Where nothing is, XLA's own loops already touch no more memory than a nest would
    (test_regions.py::test_layernorm_is_left_to_xla)."""
    edge = boundary(graph, nodes)
    outside = max((graph.values[v].size for v in (*edge.reads, *edge.writes)), default=0)
    kept = {v for n in nodes for v in graph.nodes[n].outputs}.difference(edge.writes)
    return max((graph.values[v].size for v in kept), default=0) > outside


def is_used_up(graph: Graph, n: int, inside: set[int]) -> bool:
    """Whether nothing but nodes ``inside`` wants what node ``n`` makes."""
    outputs = graph.nodes[n].outputs
    return graph.results.isdisjoint(outputs) and all(inside.issuperset(graph.consumers[v]) for v in outputs)


def with_arrangement(graph: Graph, nodes: Nodes, backend: str = "loops") -> Nodes:
    """``nodes`` with the transposes and conversions that alone read one of their results, so
    that results are written where they belong at once."""
    inside = set(nodes)
    results = graph.results
    queue = [v for n in nodes for v in graph.nodes[n].outputs]
    while queue:
        v = queue.pop()
        readers = graph.consumers[v]
        if v in results or len(readers) != 1 or readers[0] in inside:
            continue
        node = graph.nodes[readers[0]]
        if node.op in _ARRANGING and loopable(node, backend):
            inside.add(node.id)
            queue += node.outputs
    return tuple(sorted(inside))


def paths(graph: Graph, nodes: Nodes) -> list[int]:
    """``nodes`` and everything between the first and the last of them that depends on one, in
    order."""
    after, last = set(nodes), nodes[-1]
    queue = list(nodes)
    while queue:
        for v in graph.nodes[queue.pop()].outputs:
            new = [n for n in graph.consumers[v] if n < last and n not in after]
            after.update(new)
            queue += new
    return sorted(after)


def convex(graph: Graph, nodes: Nodes) -> Nodes:
    """``nodes`` with everything on paths between them."""
    found = set(nodes)
    for n in reversed(paths(graph, nodes)):
        if any(c in found for v in graph.nodes[n].outputs for c in graph.consumers[v]):
            found.add(n)
    return tuple(sorted(found))


def is_index_arithmetic(graph: Graph, backend: str = "loops") -> list[bool]:
    """For each node, whether it depends on nothing but positions and literals."""
    known: list[bool] = []
    for node in graph.nodes:
        makers = [graph.values[v].producer for v in node.inputs]
        known.append(loopable(node, backend) and all(m >= 0 and known[m] for m in makers))
    return known


def with_positions(graph: Graph, nodes: Nodes, positions: Sequence[bool]) -> Nodes:
    """``nodes`` with the index arithmetic (where ``positions``) that they alone read: each
    tile computes its own."""
    inside = set(nodes)

    def made_for(n: int) -> Iterator[int]:
        makers = (graph.values[v].producer for v in graph.nodes[n].inputs)
        return (-m for m in makers if m >= 0 and positions[m] and m not in inside)

    # The last first: whoever reads it is inside by then, or never will be.
    queue = [m for n in nodes for m in made_for(n)]
    heapify(queue)
    while queue:
        n = -heappop(queue)
        if n not in inside and is_used_up(graph, n, inside):
            inside.add(n)
            for m in made_for(n):
                heappush(queue, m)
    return tuple(sorted(inside))


def normed(graph: Graph, groups: Iterable[Nodes], backend: str) -> Iterator[Nodes]:
    """Contractions, each with what is elementwise on its result and without, and the contractions of
    ``groups``, where some sum is needed for what they multiply; with what they follow from from there
    on, none of it wanted elsewhere."""
    found: set[Nodes] = set()
    products = (
        n.id for n in graph.nodes if n.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and loopable(n, backend)
    )
    alone = [(n,) for n in products if _with_statistics(graph, (n,), backend) != (n,)]
    for group in (*alone, *(_followed(graph, n, backend) for (n,) in alone), *groups):
        whole = _with_statistics(graph, group, backend)
        if whole != group and whole not in found and convex(graph, whole) == whole:
            found.add(whole)
            yield whole


def _followed(graph: Graph, product: int, backend: str) -> Nodes:
    """A contraction and as much of what is elementwise of its result as leaves one value."""
    inside = {product}
    found: Nodes = (product,)
    open_values = set(graph.nodes[product].outputs)
    waiting = [n for v in open_values for n in graph.consumers[v]]
    heapq.heapify(waiting)
    while waiting:
        node = graph.nodes[heapq.heappop(waiting)]
        makers = {graph.values[v].producer for v in node.inputs} - inside
        fits = node.kind <= OpKind.BROADCAST and loopable(node, backend)
        # What is made from arguments alone, as a row of biases is, does not wait for the product.
        first = all(m < product or max(_makers(graph, m), default=-1) < 0 for m in makers)
        if node.id in inside or not (fits and first):
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
                heapq.heappush(waiting, n)
    return found


def _with_statistics(graph: Graph, group: Nodes, backend: str) -> Nodes:
    """``group`` with all before it that only it needs, from the first reductions on: of what is before
    these, what reads no more than it makes."""
    behind = _used_up(graph, group, lambda n: loopable(graph.nodes[n], backend))
    after: set[int] = set()
    for n in sorted(behind):
        if graph.nodes[n].kind == OpKind.REDUCTION or not after.isdisjoint(_makers(graph, n)):
            after.add(n)
    if not after:
        return group
    kept = _used_up(graph, group, lambda n: n in after or (n in behind and _reads_once(graph, n)))
    return tuple(sorted({*group, *kept}))


def _used_up(graph: Graph, group: Nodes, may_be: Callable[[int], bool]) -> set[int]:
    """The nodes before ``group`` whose results nothing but it needs, or another of them."""
    inside, found = set(group), set[int]()
    waiting = [-m for n in group for m in _makers(graph, n) if m >= 0]
    heapq.heapify(waiting)
    while waiting:  # the last first: who reads it is known then
        node = graph.nodes[-heapq.heappop(waiting)]
        if node.id in inside or node.kind > OpKind.REDUCTION:
            continue
        if may_be(node.id) and is_used_up(graph, node.id, inside):
            inside.add(node.id)
            found.add(node.id)
            for m in _makers(graph, node.id):
                if m >= 0:
                    heapq.heappush(waiting, -m)
    return found


def _makers(graph: Graph, n: int) -> set[int]:
    """The nodes that make what a node reads; -1 for arguments."""
    return {graph.values[v].producer for v in graph.nodes[n].inputs}


def _reads_once(graph: Graph, n: int) -> bool:
    node = graph.nodes[n]
    made = max(graph.values[v].size for v in node.outputs)
    return sum(graph.values[v].size >= made for v in set(node.inputs)) <= 1


_NARROW = 128
"""So many columns are whole in a tile: a head of an attention has no more."""


_SMALLER = 4
"""What is made narrow is so many times smaller than what it is made of: it may be made again for each
tile of columns of the result."""


def narrow(graph: Graph, backend: str) -> Iterator[Nodes]:
    """Pairs of contractions, with what is elementwise between them, and with a third to whose result theirs
    is added; nothing but the last result is wanted elsewhere."""
    for node in graph.nodes:
        if not _is_product(node, backend) or _depth(node) > _NARROW:
            continue
        for v in node.inputs:
            before = _made_by_a_product(graph, v, node.id, backend)
            pair = tuple(sorted({*before, node.id}))
            if before and convex(graph, pair) == pair:
                yield pair
                beside = _added(graph, pair, backend)
                if beside != pair and convex(graph, beside) == beside:
                    yield beside


def _is_product(node: Node, backend: str) -> bool:
    return node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE and loopable(node, backend)


def _depth(node: Node) -> int:
    """How many products each element of its result sums up."""
    return prod(n for n, role in zip(node.dims, node.roles, strict=True) if role == DimRole.REDUCED)


def _made_by_a_product(graph: Graph, v: int, reader: int, backend: str) -> set[int]:
    """What makes ``v`` from the operands of one contraction, if nothing but ``reader`` needs any of it."""
    inside, found, products = {reader}, set[int](), 0
    waiting = [graph.values[v].producer]
    while waiting:
        n = max(waiting)  # the last first: who reads it is known then
        waiting.remove(n)
        if n < 0 or n in found or not is_used_up(graph, n, inside):
            continue
        node = graph.nodes[n]
        if _is_product(node, backend):
            products += _shrinks(graph, node)
        elif node.kind <= OpKind.BROADCAST and loopable(node, backend):
            waiting += [graph.values[u].producer for u in node.inputs]
        else:
            continue
        found.add(n)
        inside.add(n)
    one = sum(graph.nodes[n].flops.matrix > 0 for n in found) == products == 1
    return found if one else set()


def _shrinks(graph: Graph, node: Node) -> bool:
    largest = max(graph.values[v].size for v in node.inputs)
    return graph.values[node.outputs[0]].size * _SMALLER <= largest


def _added(graph: Graph, pair: Nodes, backend: str) -> Nodes:
    """``pair`` with what is elementwise of its result, up to a sum with another contraction's."""
    inside, last = set(pair), pair[-1]
    while True:
        (v, *_) = graph.nodes[last].outputs
        readers = graph.consumers[v]
        if v in graph.results or len(readers) != 1 or graph.nodes[readers[0]].kind != OpKind.ELEMENTWISE:
            return pair
        last = readers[0]
        inside.add(last)
        makers = {graph.values[u].producer for u in graph.nodes[last].inputs} - inside
        others = {m for m in makers if m >= 0 and _is_product(graph.nodes[m], backend)}
        if len(others) == 1 and is_used_up(graph, min(others), inside):
            return tuple(sorted(inside | others))


_MOST = 4
"""So many contractions meet at most: each holds an accumulator of a tile in registers."""


def joined(graph: Graph, backend: str) -> Iterator[Nodes]:
    """Groups of two to four contractions of the same rows and columns, with what is elementwise between
    them and the operation in which they meet, each once."""
    feeding: dict[int, Nodes] = {}
    found: set[Nodes] = set()
    for node in graph.nodes:
        if not loopable(node, backend):
            continue
        if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
            feeding[node.id] = (node.id,)
            continue
        if node.kind > OpKind.BROADCAST:
            continue
        makers = {graph.values[v].producer for v in node.inputs}
        sources = {feeding[m] for m in makers if m in feeding}
        together = tuple(sorted({n for some in sources for n in some}))
        if not together or sum(graph.nodes[n].flops.matrix > 0 for n in together) > _MOST:
            continue
        group = feeding[node.id] = (*together, node.id)
        if (
            len(sources) > 1
            and group not in found
            and all(is_used_up(graph, n, set(group)) for n in group[:-1])
            and _is_one_loop(graph, group)
        ):
            found.add(group)
            yield group


def _is_one_loop(graph: Graph, group: Nodes) -> bool:
    """Whether the contractions of a group have the same axes, and what they contract is one, too."""
    dots = [n for n in group if graph.nodes[n].kind == OpKind.OUT_ELEMENTWISE_FUSABLE]
    axes = unify(graph, group)
    if not 1 < len(dots) <= _MOST or isinstance(axes, Conflict):
        return False
    own = {n: contraction_axes(graph.nodes[n], axes.node_axes[group.index(n)]) for n in dots}
    first = own[dots[0]]
    return bool(first.depth) and all(dot == first for dot in own.values())
