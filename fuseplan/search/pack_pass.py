"""Pack small kernels that a scalar ties together: the last step, on a plan that has none.

What may be packed with what is in lines (``fuseplan.search.pack_lines``), and each line is cut into
the runs that are fastest together (``fuseplan.search.pack_runs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from costmodel.graph import Graph
from fuseplan.plan.certificate import Piece
from fuseplan.schedule.pricing import Nodes, PriceBook
from fuseplan.schedule.scalar_hubs import NOT_SEARCHED, ONLY_PACKS, wide_hubs
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.grouping import Grouping, order_groups
from fuseplan.search.horizontal import InOneTile, Line
from fuseplan.search.horizontal_capacity import Room
from fuseplan.search.pack_lines import Kernels, Lines, union
from fuseplan.search.pack_runs import Runs
from fuseplan.support.digraph import execution_order
from fuseplan.support.work import Work

_Packed = tuple[list[Nodes], tuple[Piece, ...]]
"""The packs of a line, and its pieces with their shares."""


def with_packs(graph: Graph, scheduler: Scheduler, grouping: Grouping, work: Work) -> Grouping:
    """``grouping`` with small kernels packed, and a bound on every plan with packs of its kernels.

    What ``work`` leaves no time for stays as it is, and a note says so.
    """
    if not wide_hubs(graph).ports:
        return grouping
    if work.is_over:
        return _cut_short(grouping, work)
    book = PriceBook(graph, InOneTile(scheduler))
    found = Lines(graph, scheduler, book, grouping)

    def best(pieces: Sequence[Kernels]) -> _Packed:
        alone = list(map(found.alone, pieces))
        line = Line(graph, scheduler.device, list(map(union, pieces)))
        room = Room(graph, scheduler.device, [book.kernel(nodes).spec for nodes in line.pieces])
        cut = Runs(line, room, alone, book).cut(work)
        packs = [line.nodes(a, b) for a, b in cut.packs]
        shares = zip(pieces, alone, cut.shares_ps, strict=True)
        return packs, tuple([Piece(kernels, price.time_ps, share) for kernels, price, share in shares])

    lines = found.lines()
    if not lines:
        return grouping
    answer = _with(graph, book, grouping, list(map(best, found.wider(lines))))
    if answer is None:  # with the arithmetic inside, packs would wait for each other
        answer = _with(graph, book, grouping, list(map(best, lines)))
    assert answer is not None, "nothing between pieces of a line waits for any of them"
    return _cut_short(answer, work) if work.is_over else answer


def _cut_short(grouping: Grouping, work: Work) -> Grouping:
    return replace(grouping, notes=(*grouping.notes, f"{work.why} all packs of small kernels had been tried"))


def _with(graph: Graph, book: PriceBook, grouping: Grouping, best: Sequence[_Packed]) -> Grouping | None:
    """``grouping`` with the packs of all lines; None if they would wait for each other."""
    packs = [nodes for packs, _ in best for nodes in packs]
    inside = {n for nodes in packs for n in nodes}
    others = [nodes for nodes in grouping.groups if inside.isdisjoint(nodes)]
    ranked, after = order_groups(graph, [*packs, *others])
    order = execution_order(after)
    if len(order) < len(ranked):
        return None
    kernel_of = {kernel.spec.nodes: kernel for kernel in grouping.kernels}
    kernel_of.update((nodes, book.kernel(nodes)) for nodes in packs)
    kernels = tuple([kernel_of[ranked[g]] for g in order])
    lines = tuple(pieces for _, pieces in best)
    saved_ps = sum(piece.alone_ps - piece.share_ps for pieces in lines for piece in pieces)
    bound_ps = None if grouping.bound_ps is None else grouping.bound_ps - saved_ps
    n_packed = len(grouping.groups) - len(others)
    if packs:
        grouping = grouping.uncertified()
    notes = [note.replace(NOT_SEARCHED, ONLY_PACKS) for note in grouping.notes]
    if packs:
        notes.append(f"{n_packed} kernels that a scalar ties together are packed into {len(packs)}")
    packed = replace(
        grouping,
        kernels=kernels,
        bound_ps=bound_ps,
        proof=None if grouping.proof is None else replace(grouping.proof, packs=lines),
        notes=tuple(notes),
    )
    return replace(packed, status="OPTIMAL" if bound_ps == packed.time_ps else "FEASIBLE")
