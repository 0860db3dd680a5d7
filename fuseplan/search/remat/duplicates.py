"""The graph in which operations have a copy for each reader, and the groups of copies that are searched.

A value that several kernels read is either written once and read by each, or computed by each from what it
reads anyway or from less, and never written. To leave the choice to the solver, ``split`` gives each
operation that may be worth it one *copy* for each reader. A partition of the copies then says which kernel
computes what: a kernel that holds several copies of an operation computes it once, so "computed once, for all
readers" is one of these partitions, "computed by every reader" another. (Rematerialisation: Chen et al.,
arXiv:1604.06174. XLA's PriorityFusion copies a producer into all of its users or into none.) ``roots_of``
says which operations are copied.

``DuplicateRules`` says which sets of copies are searched as one kernel. A kernel computes an operation once,
for whichever readers. Therefore

1. a group that holds a reader, and some copy of what it reads, holds that reader's own copy.

Two more rules keep the number of groups near what it is without copies:

2. An operation with three or more copies is computed once for all readers, or by each reader for itself: a
   group that holds a copy without its reader holds all copies.
3. An operation that only leads to a copied one, and renames (``Pricing.renames``) or makes no less, is
   computed again together with it: a group that holds some copies of an operation but not all holds, with
   each, these operations, also those behind a renaming. An operation that makes less, such as the mean of a
   row that is subtracted from it, may instead be computed once, and read by each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from costmodel.device import DeviceSpec, bytes_in
from costmodel.graph import ORIGINAL, DimRole, Graph, GraphRewriter, Item, Node, OpKind, without_copies
from fuseplan.frontend.compared import needed_once
from fuseplan.search.limits import LIMITS
from fuseplan.support.bitset import bits

Mask = int

Copy = tuple[int, int]
"""A node of the whole graph, and which of its copies."""


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A graph, and the graph in which some of its operations have a copy for each reader."""

    whole: Graph
    graph: Graph
    node: tuple[int, ...]
    """For each node of ``graph``, that of ``whole``."""
    value: tuple[int, ...]
    """For each value of ``graph``, that of ``whole``."""
    copies: tuple[int, ...]
    """For each node of ``whole``, the number of its copies in ``graph``."""
    roots: tuple[int, ...]
    """The nodes of ``whole`` that were chosen to be copied; other copied nodes only lead to them."""

    @property
    def copied(self) -> tuple[int, ...]:
        """The nodes of ``whole`` that have several copies."""
        return tuple([n for n, count in enumerate(self.copies) if count > 1])

    @property
    def places(self) -> list[list[int]]:
        """For each node of ``whole``, its copies."""
        every: list[list[int]] = [[] for _ in self.whole.nodes]
        for c, n in enumerate(self.node):
            every[n].append(c)
        return every

    def lifted(self, groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Groups of nodes of ``whole``, each with all copies of its nodes."""
        every = self.places
        return tuple(tuple(sorted(c for n in nodes for c in every[n])) for nodes in groups)


def roots_of(graph: Graph, device: DeviceSpec) -> tuple[int, ...]:
    """The operations that may be worth computing again.

    These are elementwise operations, broadcasts, moves and reductions of few terms, with two to
    ``max_copies`` readers (the caller of the function counts as one), whose result takes a noticeable part of
    a launch of ``device`` to read, and that can be computed, by operations of these kinds alone, from at most
    ``max_feed_ratio`` times the bytes they make (``fuseplan.search.limits``).
    """
    min_bytes = bytes_in(device.launch_ps, device.hbm_bytes_per_s) // LIMITS.launch_divisor
    large = [
        (node.id, made)
        for node in graph.nodes
        if (made := _made_bytes(graph, node)) >= min_bytes
        and 1 < _n_readers(graph, node) <= LIMITS.max_copies
    ]
    sources = _source_bytes(graph) if large else []
    read = ((n, made, sources[n]) for n, made in large)
    return tuple([n for n, made, some in read if some is not None and some <= LIMITS.max_feed_ratio * made])


def _n_readers(graph: Graph, node: Node) -> int:
    readers = {r for v in node.outputs for r in graph.consumers[v]}
    return len(readers) + (not graph.results.isdisjoint(node.outputs))


def split(graph: Graph, roots: Collection[int], once: Collection[int] = ()) -> SplitGraph | None:
    """The graph with a copy of each of ``roots`` for each of its readers; None if nothing is copied.

    An operation that only leads to copied ones is copied with them, up to ``LIMITS.max_copies`` times. The
    nodes ``once`` and ``needed_once`` are not copied.
    """
    once = needed_once(graph).union(once)
    copies = readers_of_copies(graph, frozenset(roots) - once, once)
    if all(len(readers) == 1 for readers in copies):
        return None
    return built(graph, copies, roots)


def readers_of_copies(
    graph: Graph, roots: frozenset[int], once: frozenset[int] = frozenset()
) -> list[list[tuple[Copy, ...]]]:
    """For each node, for each of its copies, its readers; ``(-1, 0)`` is the caller."""
    copies: list[list[tuple[Copy, ...]]] = [[] for _ in graph.nodes]
    sources = _source_bytes(graph)
    for node in reversed(graph.nodes):
        readers = [r for v in node.outputs for r in graph.consumers[v]]
        found: list[Copy] = [(r, k) for r in dict.fromkeys(readers) for k in range(len(copies[r]))]
        if not graph.results.isdisjoint(node.outputs):
            found.insert(0, (-1, 0))
        wanted = node.id in roots or (_n_readers(graph, node) == 1 and node.id not in once)
        splits = sources[node.id] is not None and wanted and 1 < len(found) <= LIMITS.max_copies
        copies[node.id] = [(reader,) for reader in found] if splits else [tuple(found)]
    return copies


def _source_bytes(graph: Graph) -> list[int | None]:
    """For each operation that a kernel may compute again, the bytes of the arrays from which such operations
    alone can compute it; None for all others.

    An operation computed from indices alone has 0 bytes; one computed from more than ``max_sources`` arrays
    has more bytes than any memory holds. A reduction may be computed again if it has at most
    ``max_copied_terms`` terms, and if its sources have at most ``max_feed_ratio`` times the bytes of its
    result. That holds of the squared distances of points, and not of the means of rows.
    """
    fed: list[int | None] = []
    sources: list[frozenset[int] | None] = []
    for node in graph.nodes:
        feeding: list[frozenset[int] | None] = []
        for v in node.inputs:
            producer = graph.values[v].producer
            leads = producer >= 0 and fed[producer] is not None
            feeding.append(sources[producer] if leads else frozenset((v,)))
        own = frozenset[int]().union(*(some for some in feeding if some is not None))
        is_wide = None in feeding or len(own) > LIMITS.max_sources
        n_bytes = 1 << 62 if is_wide else sum(graph.values[v].nbytes for v in own)
        is_cheap = _has_few_terms(node) and (
            node.kind <= OpKind.INJECTIVE or n_bytes <= LIMITS.max_feed_ratio * _made_bytes(graph, node)
        )
        sources.append(None if is_wide else own)
        fed.append(n_bytes if is_cheap else None)
    return fed


def _has_few_terms(node: Node) -> bool:
    """Whether each element of the node's results depends on few elements of its operands."""
    if node.effects or not node.backends or node.kind > OpKind.REDUCTION:
        return False
    is_whole = node.kind == OpKind.REDUCTION and DimRole.WHOLE in node.roles
    return not is_whole and node.reduction_size <= LIMITS.max_copied_terms


def _made_bytes(graph: Graph, node: Node) -> int:
    """The bytes of the node's results."""
    return sum([graph.values[v].nbytes for v in node.outputs])


def built(graph: Graph, copies: Sequence[Sequence[tuple[Copy, ...]]], roots: Collection[int]) -> SplitGraph:
    """The graph with copies, given the readers of each copy of each node (``readers_of_copies``)."""
    rewriter = GraphRewriter(replace(graph, origins=()))

    def read(reader: Copy, v: int) -> Item:
        producer = graph.values[v].producer
        if producer < 0:
            return v, ORIGINAL
        return v, next(k for k, readers in enumerate(copies[producer]) if reader in readers)

    for node in graph.nodes:
        for k in range(len(copies[node.id])):
            rewriter.add(node.id, k, partial(read, (node.id, k)))
    split_graph = rewriter.finished([rewriter.ids[read((-1, 0), v)] for v in graph.outputs])
    counts = tuple(map(len, copies))
    split_roots = tuple(sorted(n for n in roots if counts[n] > 1))
    node_of, value_of = tuple(rewriter.node_of), tuple(rewriter.value_of)
    return SplitGraph(graph, split_graph, node_of, value_of, counts, split_roots)


def small_leading(copies: SplitGraph) -> Iterator[int]:
    """The copied nodes of ``whole`` that only lead to another one, and make less than it (rule 3)."""
    graph = copies.whole
    for n in set(copies.copied).difference(copies.roots):
        readers = {r for v in graph.nodes[n].outputs for r in graph.consumers[v]}
        if all(_made_bytes(graph, graph.nodes[n]) < _made_bytes(graph, graph.nodes[r]) for r in readers):
            yield n


def operations_of(graph: Graph) -> list[tuple[int]]:
    """For each node, the one of ``without_copies(graph)``."""
    number = {n: i for i, n in enumerate(sorted(set(graph.origins)))}
    return [(number[n],) for n in graph.origins] or [(node.id,) for node in graph.nodes]


def searched(graph: Graph, copied: Collection[int], origins: tuple[int, ...] = ()) -> SplitGraph | None:
    """Rebuild, from the graph of a plan, the graph with copies that was searched for it; None if no operation
    could be computed twice.

    Args:
        graph: the graph of the plan.
        copied: ``SplitGraph.copied`` of the search.
        origins: for each node of ``graph``, the first that computes the same operation of the graph that
            was searched, where that is not ``graph.origins`` (``fuseplan.plan.fusion_plan.Proof.origins``).
    """
    whole = without_copies(replace(graph, origins=origins or graph.origins))
    roots = [n for n in copied if _n_readers(whole, whole.nodes[n]) > 1]
    return split(whole, roots, frozenset(range(len(whole.nodes))).difference(copied))


class DuplicateRules:
    """The rules above: which other positions a group with some positions must hold or leave out."""

    def __init__(
        self,
        graph: Graph,
        copies_of: Sequence[Sequence[int]],
        members: Sequence[Sequence[int]],
        renames: Callable[[int], bool],
    ) -> None:
        position = {n: i for i, nodes in enumerate(members) for n in nodes}
        n_positions = len(members)
        self.own: list[list[tuple[Mask, Mask]]] = [[] for _ in members]
        """For each reader, its own copy of an operand's operation, and all copies of that (rule 1)."""
        self.served: list[list[tuple[Mask, Mask]]] = [[] for _ in members]
        """For each copy of an operation with three or more, its readers, and all copies (rule 2)."""
        self.led: list[list[tuple[Mask, Mask]]] = [[] for _ in members]
        """For each copy, an operation that leads to it alone, and all copies of that (rule 3)."""
        self.classes: list[Mask] = []
        """The copies of each operation that has several."""
        outside = 1 << n_positions
        origin = graph.origins
        every = {copies[0]: copies for copies in copies_of if copies[0] in position}
        mask_of = {
            first: sum(1 << i for i in {position[n] for n in copies}) for first, copies in every.items()
        }
        for first, copies in every.items():
            together = mask_of[first]
            # What is merged into a reader that has no copies is no operation to decide about.
            if any(mask_of.get(origin[m]) != together for n in copies for m in members[position[n]]):
                continue
            if together not in self.classes:
                self.classes.append(together)
            for n in copies:
                i, node = position[n], graph.nodes[n]
                readers = 0 if graph.results.isdisjoint(node.outputs) else outside
                for reader in {r for v in node.outputs for r in graph.consumers[v]}:
                    readers |= 1 << position[reader] if reader in position else outside
                    if reader in position and position[reader] != i:
                        self.own[position[reader]].append((1 << i, together))
                if len(copies) > LIMITS.max_partial_copies and not readers >> i & 1:
                    self.served[i].append((readers, together))
                for maker in _leading(graph, every, n, renames):
                    if position[maker] != i:
                        self.led[i].append((1 << position[maker], together))
        self.ruled = sum(1 << i for i in range(n_positions) if self.own[i] or self.served[i] or self.led[i])
        self.outside = outside
        """A bit for readers that are in no group: the caller, and other components."""

    def decided(self, group: Mask, out: Mask) -> tuple[Mask, Mask]:
        """The positions that ``group`` must hold too, and those that it must leave out too, if it leaves out
        ``out``. If the two overlap, or contradict ``group`` or ``out``, there is no such group."""
        out |= self.outside
        wanted = unwanted = 0
        for i in bits(group & self.ruled):
            for own, together in self.own[i]:
                if group & together:
                    wanted |= own
                elif own & out:
                    unwanted |= together
            for readers, together in self.served[i]:
                if together & out:
                    wanted |= readers
                elif readers & out and not readers & group:
                    wanted |= together
            for own, together in self.led[i]:
                if together & out:
                    wanted |= own
                elif own & out:
                    wanted |= together
        return wanted & ~group, unwanted & ~out

    def allows(self, group: Mask) -> bool:
        """Whether the rules allow a group of exactly these positions."""
        return not self.decided(group, ~group)[0]


def _leading(
    graph: Graph, every: dict[int, Sequence[int]], n: int, renames: Callable[[int], bool]
) -> Iterator[int]:
    """The operations whose results only copy ``n`` needs, and that rename or make no less than it."""
    least = _made_bytes(graph, graph.nodes[_renamed_for(graph, n, renames)])
    for v in graph.nodes[n].inputs:
        maker = graph.values[v].producer
        makers = every.get(graph.origins[maker], ()) if maker >= 0 else ()
        if not makers or _readers(graph, makers) != {graph.origins[n]}:
            continue
        if renames(maker) or _made_bytes(graph, graph.nodes[maker]) >= least:
            yield maker
        if renames(maker):
            yield from _leading(graph, every, maker, renames)


def _renamed_for(graph: Graph, n: int, renames: Callable[[int], bool]) -> int:
    """The operation that reads what ``n`` makes, if ``n`` renames for it alone, and so on; else ``n``."""
    readers = {r for v in graph.nodes[n].outputs for r in graph.consumers[v]}
    is_for_one = renames(n) and len(readers) == 1 and graph.results.isdisjoint(graph.nodes[n].outputs)
    return _renamed_for(graph, readers.pop(), renames) if is_for_one else n


def _readers(graph: Graph, copies: Sequence[int]) -> set[int]:
    """The operations that read copies of one; -1 is the caller."""
    made = [v for n in copies for v in graph.nodes[n].outputs]
    readers = {graph.origins[r] for v in made for r in graph.consumers[v]}
    return readers if graph.results.isdisjoint(made) else readers | {-1}
