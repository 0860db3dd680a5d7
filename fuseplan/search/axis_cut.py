"""A plan for components whose members reduce along different axes, which few kernels can do at once.

Whoever merges one operation after the other fills the first kernel with what belongs to another:
of 40 sums of one array, along rows and columns in turns, it takes in what all sums need, and
writes it for those along the other axis. Each single operation that moves over gains nothing, so
that no search around that plan leaves it. Here the members are divided first, by a minimum cut: those
that reduce an axis on one side, those that reduce another on the other, and whatever else where the
fewest bytes have to pass between the sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fuseplan.schedule.pricing import Price
from fuseplan.search.heuristics import best_first_groups
from fuseplan.search.set_partitioning import minimum_cut
from fuseplan.search.space import Mask, Space
from fuseplan.search.windows import connected
from fuseplan.support.bitset import bits


def merge(space: Space) -> list[Mask] | None:
    """Each side as one kernel, or as the best-first groups of it; None if all members reduce one axis,
    or groups would wait for each other."""
    sides = divided(space)
    if len(sides) < 2:
        return None
    apart = best_first_groups(space, sides)
    groups: list[Mask] = []
    for side in sides:
        smaller = [mask for mask in apart if mask & side]
        groups += [side] if _is_better(space, side, smaller) else smaller
    return groups if space.can_run(groups) else None


def _is_better(space: Space, side: Mask, groups: Sequence[Mask]) -> bool:
    """Whether the positions ``side`` are better one kernel than ``groups``, if they can be one."""
    parts = list(connected(space, side))
    if len(parts) > 1 or space.clashes(side) or space.refused(side, space.crossing(side)):
        return False
    price = space.price(side)
    return isinstance(price, Price) and price < space.total(groups)


def divided(space: Space) -> list[Mask]:
    """The positions by the axis along which they are best reduced, those of the commonest first."""
    residency = space.book.residency
    if residency is None:
        return [space.everything]
    by_axis: dict[int, Mask] = {}
    for i, nodes in enumerate(space.members):
        axes = {a for n in nodes for a in residency.held(n)}
        if len(axes) == 1:
            (axis,) = axes
            by_axis[axis] = by_axis.get(axis, 0) | 1 << i
    fixed = sorted(by_axis.values(), key=lambda mask: (-mask.bit_count(), mask))
    sides: list[Mask] = []
    rest = space.everything
    for k, near in enumerate(fixed[:-1]):
        far = sum(fixed[k + 1 :])
        side = _near(space, rest, near, far)
        sides.append(side)
        rest &= ~side
    return [*sides, rest]


def _near(space: Space, among: Mask, near: Mask, far: Mask) -> Mask:
    """Of the positions ``among``, those that belong to ``near`` rather than to ``far``."""
    graph, position = space.book.graph, space.position
    source, sink = space.n, space.n + 1
    unlimited = 1 + 2 * sum(value.nbytes for value in graph.values)
    arcs: Counter[tuple[int, int]] = Counter()
    for i in bits(near):
        arcs[source, i] = unlimited
    for i in bits(far):
        arcs[i, sink] = unlimited
    n = sink + 1
    values = {v for nodes in space.members for m in nodes for v in graph.nodes[m].inputs}
    for v in sorted(values):
        value = graph.values[v]
        maker = position.get(value.producer, -1)
        readers = {position[r] for r in graph.consumers[v] if r in position} - {maker}
        readers = {i for i in readers if among >> i & 1}
        if maker < 0 or not among >> maker & 1:
            # What comes from elsewhere is read once a side.
            arcs[n, n + 1] = value.nbytes
            for i in readers:
                arcs[i, n] = arcs[n + 1, i] = unlimited
        else:
            # What is made on one side is read on the other, and written for it.
            outside = v in graph.results or any(r not in position for r in graph.consumers[v])
            arcs[maker, n] = arcs[n + 1, maker] = value.nbytes * (1 if outside else 2)
            for i in readers:
                arcs[n, i] = arcs[i, n + 1] = unlimited
        n += 2
    side = minimum_cut(arcs, source, sink)
    return among & sum(1 << i for i in side if i < space.n)
