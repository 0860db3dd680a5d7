"""What a planner computes several times: groups that overlap, as kernels of a program with copies.

The solver's copies are chosen first, and then planned (``fuseplan.search.rematerialise``). Another system's
planner may say at once which kernels compute what, an operation in several of them (XLA fuses a producer into
all of its users): the copies are those that its groups hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.graph import Graph
from fuseplan.frontend.compared import copies_apart
from fuseplan.frontend.lower import Lowered
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.decided import plan_decided
from fuseplan.search.duplicate_pricing import Recomputing
from fuseplan.search.duplicates import Copies, Copy, built
from fuseplan.search.materialise import realised
from fuseplan.search.rematerialise import Answer


def with_repeats(lowered: Lowered, scheduler: Scheduler, groups: Sequence[Nodes]) -> Answer | None:
    """The program in which each of ``groups`` computes for itself what it holds, and its kernels; None if a
    comparison would read two evaluations of one value."""
    copies, lifted = copies_within(lowered.graph, groups)
    if any(copies_apart(copies.graph)):
        return None
    found = plan_decided(copies.graph, Recomputing(copies, scheduler), lambda book: lifted)
    device, features = scheduler.device, scheduler.features
    program, grouping, _ = realised(
        lowered, copies, found, lambda new: Scheduler(new.graph, device, new, features)
    )
    return Answer(program, grouping, None)


def copies_within(graph: Graph, groups: Sequence[Nodes]) -> tuple[Copies, list[Nodes]]:
    """The graph with a copy of each operation for each group that it stands in, and the groups of the
    copies. What groups outside read is that of the group which ends with the operation, else of the first."""
    holders: list[list[int]] = [[] for _ in graph.nodes]
    for g, nodes in enumerate(groups):
        for n in nodes:
            holders[n].append(g)
    placed: list[list[int]] = [[] for _ in graph.nodes]
    """For each operation, the groups of its copies."""
    copies: list[list[tuple[Copy, ...]]] = [[] for _ in graph.nodes]
    for node in reversed(graph.nodes):
        inside = holders[node.id] or [-1]
        writer = next((g for g in inside if g >= 0 and max(groups[g]) == node.id), inside[0])
        readers: dict[int, list[Copy]] = {g: [] for g in inside}
        if not graph.results.isdisjoint(node.outputs):
            readers[writer].append((-1, 0))
        for r in dict.fromkeys(r for v in node.outputs for r in graph.consumers[v]):
            for k, g in enumerate(placed[r]):
                readers[g if g in readers else writer].append((r, k))
        if not any(readers.values()):  # for its side effects
            readers = {writer: []}
        needed = {g: tuple(some) for g, some in readers.items() if some or len(readers) == 1}
        placed[node.id], copies[node.id] = list(needed), list(needed.values())
    roots = [n for n, several in enumerate(copies) if len(several) > 1]
    lifted: list[list[int]] = [[] for _ in groups]
    for c, g in enumerate(g for several in placed for g in several):
        if g >= 0:
            lifted[g].append(c)
    return built(graph, copies, roots), [tuple(nodes) for nodes in lifted if nodes]
