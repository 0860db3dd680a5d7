"""Rewrite the program so that every copy that a plan chose is an operation of its own.

A planner of a graph with copies (``fuseplan.search.remat.duplicates``) says which kernels compute which
copies. The copies of one operation in one kernel become one operation; those in several kernels become one
operation in each.

The solver chooses what to copy first, and then plans. A planner that imitates another system may give
overlapping groups at once, with an operation in several of them (XLA fuses a producer into all of its users):
``materialise_overlapping`` makes a copy for each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from costmodel.graph import ORIGINAL, Graph, Item, boundary
from costmodel.kernel import Access
from fuseplan.frontend.compared import copies_apart
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import with_copies
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.plan.notes import NoteKind, note, renumbered
from fuseplan.schedule.pricing import Nodes, Pricing
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Answer, Grouping
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import Copy, SplitGraph, built, searched


def materialised(
    lowered: Lowered, copies: SplitGraph, grouping: Grouping, scheduler: Scheduler
) -> tuple[Lowered, Grouping, list[list[int]]]:
    """The program that computes the copies as ``grouping``, a plan of ``copies.graph``, says; the plan of
    that program; and for each operation of ``copies.whole`` the nodes of the program that compute it.

    If nothing is computed twice, the program is ``lowered`` itself. The proof stays about the copies.
    ``scheduler``, that of the whole graph, gives device and features to the program's own.
    """
    places = _Placement(copies, grouping.groups)
    program, node_id = places.program(lowered)
    proof = grouping.proof
    if proof is not None:
        proof = replace(proof, copied=copies.copied, origins=_origins(copies, node_id))
        # Prices are given node by node of the graph with copies, which no plan holds.
        again = searched(program.graph, proof.copied, proof.origins)
        if again is None or again.graph != copies.graph:
            grouping, proof = grouping.unproven(note(NoteKind.UNVERIFIABLE)), None
    kernels: list[Kernel] = []
    pricing: Pricing | None = None
    for kernel in grouping.kernels:
        moved = places.moved(kernel, program.graph, node_id)
        nodes = moved.spec.nodes
        is_whole = len(nodes) == len(moved.spec.node_axes)
        if is_whole and {a.value for a in moved.spec.writes} == set(boundary(program.graph, nodes).writes):
            kernels.append(moved)
            continue
        # No plan of least cost has such a kernel, but for what ties it together.
        pricing = pricing or Scheduler(program.graph, scheduler.device, program, scheduler.features)
        kernels += _priced_anew(pricing, nodes)
    by_operation = _by_operation(copies, node_id)
    # Of a copy that is not needed, another one of its operation.
    number = {n: node_id.get(item, by_operation[item[0]][0]) for n, item in enumerate(places.items)}
    answer = replace(
        grouping,
        kernels=tuple(kernels),
        refusals=tuple(
            [replace(v, nodes=tuple(sorted({number[n] for n in v.nodes}))) for v in grouping.refusals]
        ),
        notes=renumbered(grouping.notes, number.__getitem__),
        stats=replace(grouping.stats, equations=len(copies.whole.nodes)),
        proof=proof,
    )
    return program, answer, by_operation


def rewritten(
    lowered: Lowered, copies: SplitGraph, groups: Sequence[Nodes]
) -> tuple[Lowered, list[list[int]]]:
    """The program in which each of ``groups``, a partition of the copies, computes each operation of its
    copies once; and for each operation of ``copies.whole`` the nodes that compute it."""
    program, node_id = _Placement(copies, groups).program(lowered)
    return program, _by_operation(copies, node_id)


def _origins(copies: SplitGraph, node_id: dict[Item, int]) -> Nodes:
    """For each node of the program, the first that computes the same operation of ``copies.whole``; empty if
    ``copies.whole`` has no copies itself, since the program's own ``Graph.origins`` then say it."""
    if not copies.whole.origins:
        return ()
    first: dict[int, int] = {}
    ordered = sorted(node_id.items(), key=lambda item: item[1])
    return tuple(first.setdefault(n, node) for (n, _), node in ordered)


def _by_operation(copies: SplitGraph, node_id: dict[Item, int]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in copies.whole.nodes]
    for (n, _), node in node_id.items():
        found[n].append(node)
    return found


def _priced_anew(pricing: Pricing, nodes: Nodes) -> Iterator[Kernel]:
    kernel = pricing.price(nodes) if nodes else None
    apart = [kernel] if isinstance(kernel, Kernel) else [pricing.price((n,)) for n in nodes]
    for one in apart:
        assert isinstance(one, Kernel), "an operation alone always has a price"
        yield one


class _Placement:
    """Which kernel computes which operation. An operation, or a value, with a kernel is an item."""

    def __init__(self, copies: SplitGraph, groups: Sequence[Nodes]) -> None:
        self.copies = copies
        graph = copies.graph
        kernel_of = {n: g for g, nodes in enumerate(groups) for n in nodes}
        self.items: list[tuple[int, int]] = [(copies.node[n], kernel_of[n]) for n in range(len(graph.nodes))]
        """For each copy, its item."""
        self._source: dict[Item, int | None] = {}
        """For each value that a kernel reads, the kernel that makes it: of several the first."""
        for node in graph.nodes:
            g = kernel_of[node.id]
            for v in node.inputs:
                maker = graph.values[v].producer
                inside = maker >= 0 and kernel_of[maker] == g
                made_by = ORIGINAL if maker < 0 else kernel_of[maker]
                if inside or (copies.value[v], g) not in self._source:
                    self._source[copies.value[v], g] = made_by
        self.results = {
            copies.value[v]: kernel_of[p] if (p := graph.values[v].producer) >= 0 else ORIGINAL
            for v in graph.outputs
        }
        """For each result of the program, the kernel that makes it."""

    def program(self, lowered: Lowered) -> tuple[Lowered, dict[Item, int]]:
        """The program with an operation for each item that is needed, and the ids of those."""
        every = sorted(set(self.items))
        if len(every) == len(self.copies.whole.nodes):
            return lowered, {item: item[0] for item in self.items}
        return with_copies(
            lowered, every, lambda item, v: self._source[v, item[1]], lambda v: self.results[v]
        )

    def moved(self, kernel: Kernel, graph: Graph, node_id: dict[Item, int]) -> Kernel:
        """A kernel of copies as one of the program's operations."""
        value, spec = self.copies.value, kernel.spec
        items = sorted({self.items[n] for n in spec.nodes} & node_id.keys())
        nodes = [(self.copies.whole.nodes[item[0]], graph.nodes[node_id[item]]) for item in items]
        made = {v: w for old, new in nodes for v, w in zip(old.outputs, new.outputs, strict=True)}
        inputs = {v: w for old, new in nodes for v, w in zip(old.inputs, new.inputs, strict=True)}
        reads = [Access(inputs[v], a.axes) for a in spec.reads if (v := value[a.value]) in inputs]
        writes = [Access(made[v], a.axes) for a in spec.writes if (v := value[a.value]) in made]
        placed = tuple(sorted(new.id for _, new in nodes))
        return Kernel(replace(spec, nodes=placed, reads=tuple(reads), writes=tuple(writes)), kernel.cost)


def materialise_overlapping(lowered: Lowered, scheduler: Scheduler, groups: Sequence[Nodes]) -> Answer | None:
    """The program in which each of ``groups``, which may overlap, computes all of its operations itself, and
    the plan of it; None if a comparison would read two evaluations of one value. A group may be a loop of
    XLA where no tiled kernel is nearly as fast."""
    copies, lifted = split_by_groups(lowered.graph, groups)
    if any(copies_apart(copies.graph)):
        return None
    pricing = DuplicatePricing(copies, scheduler, also=[group for group in lifted if len(group) > 1])
    found = plan_decided(copies.graph, pricing, lambda book: lifted)
    program, grouping, _ = materialised(lowered, copies, found, scheduler)
    return Answer(program, grouping, None)


def split_by_groups(graph: Graph, groups: Sequence[Nodes]) -> tuple[SplitGraph, list[Nodes]]:
    """The graph with a copy of each operation for each group that holds it, and the groups of the copies.
    Readers in other groups read the copy of the group whose last operation it is, else of the first group."""
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
