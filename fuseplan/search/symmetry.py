"""Interchangeable operations: where many read the same, which of them share a kernel is moot.

*Twins* are operations that nothing in their component reads and that do the same: to the same
values, or to arrays from outside of their own. Swapping two of them maps every legal group to
one of equal structure, and so of equal price. Those that follow each other in the order of the
component form a *run*, and no plan is lost if a group may hold a run only from one position to
another without a gap: given any plan, deal the run out anew, to the first group as many of its
first positions as the group had of the run, to the second of the next, and so on. Groups are
then as large as before and differ by swaps only. That turns 2**n groups around n readers of an
array into n * (n + 1) / 2 (test_twins.py).

Being neighbours matters: the order of operations decides what is alive on a core at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.graph import Node
from fuseplan.search.space import Mask, Space
from fuseplan.support.bitset import bits, transposed

_SHORTEST = 5
"""Twins of a run: fewer have 16 subsets at most, 10 of which are intervals."""


def runs_of_twins(space: Space) -> tuple[Mask, ...]:
    """The runs of a space, as masks of adjacent positions; none if groups are offered, which may
    tell twins apart."""
    if space.offers:
        return ()
    runs: list[Mask] = []
    before = transposed(space.component.apart)
    start = 0
    for i in range(1, space.n + 1):
        if i < space.n and _are_twins(space, before, i - 1, i):
            continue
        if i - start >= _SHORTEST:
            runs.append((1 << i) - (1 << start))
        start = i
    return tuple(runs)


def _are_twins(space: Space, before: Sequence[Mask], i: int, j: int) -> bool:
    """Whether swapping two adjacent positions changes nothing; an equivalence. ``before``
    has, for each position, the positions from which a path through the outside leads to it."""
    one, other = _leaf(space, i), _leaf(space, j)
    if one is None or other is None or not space.book.signatures.alike(one.id, other.id):
        return False
    both = 1 << i | 1 << j
    around = space.neighbours[i] ^ space.neighbours[j] | space.conflicts[i] ^ space.conflicts[j]
    if around & ~both:
        return False
    apart = space.component.apart
    if apart[i] != apart[j] or before[i] != before[j]:
        return False
    if bool(space.made[i] & space.kept) != bool(space.made[j] & space.kept):
        return False
    if any(len(set(node.inputs)) < len(node.inputs) for node in (one, other)):
        return False
    return all(
        v == w or (_private(space, v) and _private(space, w))
        for v, w in zip(one.inputs, other.inputs, strict=True)
    )


def _leaf(space: Space, i: int) -> Node | None:
    """The only node of a position that makes one value, which no other position reads."""
    if len(space.members[i]) != 1 or space.inner_below[i]:
        return None
    if space.closure is not None and space.closure.ruled >> i & 1:
        return None
    node = space.book.graph.nodes[space.members[i][0]]
    one = len(node.outputs) == 1 and not any(space.readers[k] for k in bits(space.made[i]))
    return node if one else None


def _private(space: Space, v: int) -> bool:
    """Whether a value comes from outside and one node alone of the space reads it."""
    graph = space.book.graph
    inside = [c for c in graph.consumers[v] if c in space.position]
    return graph.values[v].producer not in space.position and len(inside) == 1
