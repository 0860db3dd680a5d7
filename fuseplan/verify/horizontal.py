"""Check the part of a proof on horizontal fusion: its pieces may be fused, and no fused kernel takes less
than the shares of its pieces.

The check trusts the rules of horizontal fusion and their lower bounds (``fuseplan.schedule.packs``), and the
scheduler's price. It takes the lines of pieces, which define the space that was searched, as given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import Kernel, Piece
from fuseplan.schedule.packs import Line, OneTilePricing, PackCapacity
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.shared_operands import wide_hubs
from fuseplan.search.components import Crossable, crossable_edges, data_edges, effect_edges
from fuseplan.support.digraph import cyclic_sets, group_successors, reachable


def faults(lines: Sequence[Sequence[Piece]], graph: Graph, scheduler: Scheduler) -> Iterator[str]:
    """Yield the faults of the lines as texts; nothing if the lines prove their claim."""
    n_nodes = len(graph.nodes)
    kernels = [nodes for line in lines for piece in line for nodes in piece.kernels]
    if not scheduler.device.capabilities.emits_kernels:
        yield "a CPU has no kernels of one tile to pack"
        return
    there = all(nodes and min(nodes) >= 0 and max(nodes) < n_nodes for nodes in kernels)
    if not there or not all(piece.kernels for line in lines for piece in line):
        yield "a piece of a pack holds operations that are not there"
        return
    if any(list(nodes) != sorted(set(nodes)) for nodes in kernels):
        yield "a piece of a pack lists its operations in no order"
        return
    if len({n for nodes in kernels for n in nodes}) < sum(map(len, kernels)):
        yield "two pieces of packs hold one operation"
        return
    inside = {n for nodes in kernels for n in nodes}
    others = [(n,) for n in range(n_nodes) if n not in inside]
    if cyclic_sets(group_successors(data_edges(graph) + effect_edges(graph), [*kernels, *others])):
        yield "the kernels of pieces would wait for each other"
        return
    book = PriceBook(graph, scheduler)
    tiles = PriceBook(graph, OneTilePricing(scheduler))
    near = _near(graph, crossable_edges(graph, book))
    ports = wide_hubs(graph).at
    for line in lines:
        hubs = [{hub for n in piece.nodes for hub in ports[n]} for piece in line]
        if len(line) < 2 or not set.intersection(*hubs):
            yield "the pieces of a line share no scalar"
            return
        for piece in line:
            yield from _piece_faults(piece, book, near)
        yield from _run_faults(line, graph, scheduler, tiles)


def _piece_faults(piece: Piece, book: PriceBook, near: Sequence[set[int]]) -> Iterator[str]:
    """Check that the kernels of a piece are legal without horizontal fusion, at the claimed price."""
    alone_ps = 0
    for nodes in piece.kernels:
        price = book.price(nodes)
        if not isinstance(price, Price) or not _is_connected(nodes, near):
            yield f"a piece of packs counts on a kernel of n{nodes[0]} that is none"
            return
        alone_ps += price.time_ps
    if alone_ps != piece.alone_ps or piece.share_ps > alone_ps:
        yield (
            f"the piece of n{piece.kernels[0][0]} takes {alone_ps:,} ps alone, not {piece.alone_ps:,}, and "
            f"pays {piece.share_ps:,} ps in a pack"
        )


def _run_faults(line: Sequence[Piece], graph: Graph, scheduler: Scheduler, tiles: PriceBook) -> Iterator[str]:
    """Check that no run of pieces takes less, as one kernel, than their shares."""
    try:
        runs = Line(graph, scheduler.device, [piece.nodes for piece in line])
    except ValueError as error:
        yield f"no pack may hold what the proof says: {error}"
        return
    alone = [scheduler.in_one_tile(nodes) for nodes in runs.pieces]
    specs = [kernel.spec for kernel in alone if isinstance(kernel, Kernel)]
    if len(specs) < len(line):
        yield "one core has no room for a piece of packs"
        return
    capacity = PackCapacity(graph, scheduler.device, specs)
    shares = list(accumulate((piece.share_ps for piece in line), initial=0))
    last = len(line)
    for a in reversed(range(len(line))):
        last = last if a else len(line)  # more pieces may fit together with the first one
        for b in range(a + 1, last + 1):
            if not runs.allows(a, b) or not capacity.holds(a, b):
                last = b - 1
                break
            worth_ps = shares[b] - shares[a]
            if runs.least_ps(a, b) >= worth_ps:
                continue
            price = tiles.price(runs.nodes(a, b))
            if not isinstance(price, Price):
                last = b - 1  # a run that does not fit does not fit with more pieces
                break
            if price.time_ps < worth_ps:
                yield (
                    f"a pack of {b - a} pieces from that of n{runs.pieces[a][0]} on takes "
                    f"{price.time_ps:,} ps, less than the {worth_ps:,} ps of their shares"
                )
                return


def _near(graph: Graph, crossable: Crossable) -> list[set[int]]:
    """For each operation, its neighbours by crossable edges and siblings."""
    near: list[set[int]] = [set() for _ in graph.nodes]
    for u, v in crossable.kept + crossable.siblings:
        near[u].add(v)
        near[v].add(u)
    return near


def _is_connected(nodes: Nodes, near: Sequence[set[int]]) -> bool:
    inside = set(nodes)
    return inside == {nodes[0]} | reachable(nodes[:1], lambda n: near[n] & inside)
