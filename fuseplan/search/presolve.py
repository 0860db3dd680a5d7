"""Presolve: merge operations that share a kernel in some best plan, so that a component has fewer groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from costmodel.axes import Conflict, unify
from costmodel.graph import Node, OpKind
from costmodel.traffic import part_bytes
from costmodel.xla_loops import is_written_before
from fuseplan.search.components import Component
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, union_at
from fuseplan.support.digraph import execution_order
from fuseplan.support.errors import Verdict


def absorb_moves(space: Space) -> Space:
    """``space`` with each operation that only moves data merged into its reader, where it has
    one that reads all that it makes, reads one other member at most, and makes no less than it
    reads. For kernels that need not fit on chip (``Pricing.absorbs_moves``).

    No plan is lost: the operation computes nothing, so in its reader's kernel it costs the bytes that it
    reads instead of those that it makes, and the kernel that it leaves writes no more and stays connected. It
    is not merged into a reader that takes only a part, as a slice does: that reader costs less alone, and the
    bound would not hold. A reshape that splits or merges axes ties axes of its reader, which can prevent
    fusions of the reader: it is merged only where the axes of all of ``space`` can be unified. What XLA
    writes before a reduction would keep the reader from being fused with the reduction. What reads a copy is
    not merged (``_reads_copy``).
    """
    graph = space.book.graph
    reductions = [graph.nodes[n] for n in space.component.nodes if graph.nodes[n].kind == OpKind.REDUCTION]

    def prevents_fusion(node: Node, reader: int) -> bool:
        """Whether a reduction may be fused with a reader, and not with what moves the reader's operand."""
        readers = [graph.nodes[n] for n in space.nodes(1 << reader)]
        return any(
            is_written_before(graph, reduction, node)
            and not any(is_written_before(graph, reduction, other) for other in readers)
            for reduction in reductions
        )

    @cache
    def axes_conflict() -> bool:
        return isinstance(unify(space.book.graph, space.component.nodes), Conflict)

    values = space.book.graph.values
    merged = _Contraction(space)
    for i in reversed(range(space.n)):
        if space.book.is_late():
            break
        node = _single(space, i)
        if node is None or node.kind > OpKind.INJECTIVE or node.flops.total:
            continue
        if _reads_copy(space, i):
            continue
        reader = _only_reader(space, i)
        read = sum(values[v].nbytes for v in set(node.inputs))
        made = sum(values[v].nbytes for v in node.outputs)
        if reader < 0 or len(space.producers[i]) > 1 or read > made:
            continue
        if not _reads_all(space, reader, node.outputs) or (_splits(node) and axes_conflict()):
            continue
        together = merged.together(i, reader)
        if _is_cut(space, together) or prevents_fusion(node, reader):
            continue
        # What XLA takes into a library's call is no kernel with what moves its operand.
        if space.allows(together) and not isinstance(space.price(together), Verdict):
            merged.merge(i, reader)
    return merged.space()


def absorb_renames(space: Space) -> Space:
    """``space`` with each renaming (``Pricing.renames``) merged into its only consumer, or
    into a producer that it is the only consumer of.

    No plan is lost: a renaming is free and of equal size on both sides, so moving it across a border between
    two kernels changes the cost of neither. It is not merged into its producer where it alone connects
    several consumers: a kernel of these without the producer would be lost. What reads a copy is not merged
    (``_reads_copy``).
    """
    merged = _Contraction(space)
    for renaming in space.singles:  # copies are merged for all readers alike, or none is
        if space.book.is_late():
            break
        copies = bits(renaming)
        node = _single(space, copies[0])
        if node is None or not space.book.renames(node.id):
            continue
        if any(_reads_copy(space, i) for i in copies):
            continue
        readers = [_only_reader(space, i) for i in copies]
        makers = [
            next((p for p in space.producers[i] if _only_reader(space, p) == i), -1)
            if _are_neighbours(space, _readers(space, i))
            else -1
            for i in copies
        ]
        for around in (readers, makers):
            if -1 in around:
                continue
            pairs = list(zip(copies, around, strict=True))
            every = [merged.together(i, other) for i, other in pairs]
            if any(_is_cut(space, m) for m in every):
                continue
            if all(not space.clashes(m) and not isinstance(space.price(m), Verdict) for m in every):
                for i, other in pairs:
                    merged.merge(i, other)
                break
    return merged.space()


def fold(space: Space, parts: Iterable[Sequence[int]]) -> Space:
    """``space`` with the positions of each of ``parts``, which must form no cycle, merged."""
    merged = _Contraction(space)
    for part in parts:
        merged.merge(*part)
    return merged.space()


def _is_cut(space: Space, together: Mask) -> bool:
    """Whether an offered group holds a part of ``together`` only."""
    return any(offer & together not in (0, together) for offer in space.offers)


def _single(space: Space, i: int) -> Node | None:
    """The node at a position that stands for one."""
    return space.book.graph.nodes[space.members[i][0]] if len(space.members[i]) == 1 else None


def _splits(node: Node) -> bool:
    """Whether an operation makes several axes of a dimension, or one of several."""
    return any(len(dims) > 1 for m in node.input_maps + node.output_maps for dims in m)


def _reads_copy(space: Space, i: int) -> bool:
    """Whether a position reads a copy of an operation. The rules of copies name this reader: if it were
    merged with another operation, the search would miss groups that the rules allow."""
    rules = space.duplicate_rules
    copied = sum(rules.classes) if rules is not None else 0
    return any(copied >> p & 1 for p in space.producers[i])


def _reads_all(space: Space, reader: int, made: Iterable[int]) -> bool:
    """Whether the operations at a position read the whole of each of these values, or none of it."""
    graph = space.book.graph
    nodes = [graph.nodes[n] for n in space.members[reader]]
    parts = {v: [part_bytes(graph, n, v) for n in nodes if v in n.inputs] for v in made}
    # A slice that makes an empty array reads nothing of its operand.
    return all(not read or sum(read) >= graph.values[v].nbytes for v, read in parts.items())


def _only_reader(space: Space, i: int) -> int:
    """The position that alone reads what position ``i`` makes, if a group may hold both; else -1."""
    if space.kept & space.made[i]:
        return -1
    readers = _readers(space, i)
    is_only = readers.bit_count() == 1 and space.neighbours[i] & readers
    return readers.bit_length() - 1 if is_only else -1


def _readers(space: Space, i: int) -> Mask:
    """The positions that read what position ``i`` makes."""
    return union_at(space.made[i], space.readers)


def _are_neighbours(space: Space, mask: Mask) -> bool:
    """Whether each two positions are connected, by a value that one makes for the other or that is a
    full-size operand of both."""
    return all(mask & ~(space.neighbours[i] | 1 << i) == 0 for i in bits(mask))


class _Contraction:
    """A space whose positions are being merged."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._groups: list[Mask] = [1 << i for i in range(space.n)]
        """For each position, those that it is merged with, itself among them."""

    def together(self, i: int, j: int) -> Mask:
        """The group that merging ``i`` and ``j`` would make."""
        return self._groups[i] | self._groups[j]

    def merge(self, *positions: int) -> None:
        """Merge the groups of ``positions``."""
        group = 0
        for i in positions:
            group |= self._groups[i]
        for k in bits(group):
            self._groups[k] = group

    def space(self) -> Space:
        """The space in which each group is one position; the same one if nothing was merged."""
        old = self._space
        groups = list(dict.fromkeys(self._groups))
        if len(groups) == old.n:
            return old
        # Positions are in topological order, as nodes are.
        groups = [groups[g] for g in execution_order(old.followers(groups))]
        index = {i: k for k, mask in enumerate(groups) for i in bits(mask)}
        edges, siblings = (
            tuple(sorted({(index[u], index[v]) for u, v in pairs if index[u] != index[v]}))
            for pairs in (old.component.edges, old.component.siblings)
        )
        apart = [0] * len(groups)
        moved: dict[Mask, Mask] = {0: 0}
        """Caches ``apart`` masks translated to new positions: most positions share theirs with others."""
        for u, old_apart in enumerate(old.component.apart):
            if old_apart not in moved:
                moved[old_apart] = sum(1 << k for k in {index[v] for v in bits(old_apart)})
            apart[index[u]] |= moved[old_apart]
        return Space(
            Component(old.component.nodes, edges, siblings, tuple(apart)),
            old.book,
            tuple(old.nodes(mask) for mask in groups),
        )
