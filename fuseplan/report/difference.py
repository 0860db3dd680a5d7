"""Compare two plans: the kernels that differ, what each costs, and the operations that moved.

An operation of one plan is found in the other by its number if both plans have one graph. Otherwise the
programs were traced or rewritten differently, and the k-th operation of a name, shapes and source line is
taken for the k-th of the same in the other plan. Kernels that share operations without being equal are
listed together, as one *difference*.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from costmodel.graph import Graph, without_copies
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.text import bound_text, grid, tile
from fuseplan.support.format import bytes_text, columns, time_text, times_text

_WIDTH = 80
"""Characters of a line of the text."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one of the plans."""

    planner: str
    device: str
    kernels: int
    operations: int
    time_us: float
    hbm_bytes: int
    peak_bytes: int
    status: str
    gap: float | None


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel of one of the plans."""

    kernel: int
    """Its position in its plan."""
    name: str
    operations: int
    time_us: float
    hbm_bytes: int
    grid: str
    tile: str


@dataclass(frozen=True, slots=True)
class Moved:
    """An operation that is in another kernel than most of those that it shares one with."""

    operation: str
    """Number and name in the first plan, such as ``n3 exp``."""
    one: int
    """The position of its kernel in the first plan."""
    other: int
    """The position of its kernel in the second plan."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Kernels of both plans that hold the same operations in another division, or in another schedule."""

    one: tuple[KernelFacts, ...]
    other: tuple[KernelFacts, ...]
    moved: tuple[Moved, ...]
    only_in_one: tuple[str, ...]
    """Operations that the second plan has not."""
    only_in_other: tuple[str, ...]
    """Operations that the first plan has not, such as those that it does not compute again."""

    @property
    def extra_us(self) -> float:
        """The time of the second plan's kernels beyond that of the first one's."""
        return sum(k.time_us for k in self.other) - sum(k.time_us for k in self.one)

    @property
    def extra_hbm_bytes(self) -> int:
        return sum(k.hbm_bytes for k in self.other) - sum(k.hbm_bytes for k in self.one)


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The result of ``compare_plans``."""

    one: Figures
    other: Figures
    same_program: bool | None
    """Whether the plans are of one program, whatever they compute again. None where that cannot be told: the
    arguments and results are alike, and the operations differ, as they do in two rewritten forms of one."""
    equal_kernels: int
    """The number of kernels that both plans have: of the same operations, schedule and cost."""
    differences: tuple[Difference, ...]
    """The largest change of time first."""

    @property
    def is_empty(self) -> bool:
        """Whether the plans have the same kernels."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        read = asdict(self)
        for entry, difference in zip(read["differences"], self.differences, strict=True):
            entry |= {"extra_us": difference.extra_us, "extra_hbm_bytes": difference.extra_hbm_bytes}
        return read

    def text(self, one: str = "A", other: str = "B") -> str:
        """A report in 80 columns; ``one`` and ``other`` name the plans."""
        a, b = self.one, self.other
        rows = [_head(label, figures) for label, figures in (("A", a), ("B", b))]
        lines = textwrap.wrap(_ON_PROGRAMS[self.same_program], _WIDTH)
        lines += [f"A  {one}", f"B  {other}", ""]
        lines += columns([_HEAD, *rows], {3, 4, 5, 6}, _WIDTH)
        lines += ["", *textwrap.wrap(self._summary(), _WIDTH)]
        for i, difference in enumerate(self.differences):
            lines += ["", *_difference_lines(i + 1, difference)]
        return "\n".join(lines)

    def _summary(self) -> str:
        a, b = self.one, self.other
        equal = f"{self.equal_kernels:,} kernel{'s are' if self.equal_kernels != 1 else ' is'} equal"
        if self.is_empty:
            return f"The plans have the same kernels: {equal}."
        if not a.time_us or not b.time_us or a.time_us == b.time_us:
            said = "Both plans take as long"
        elif b.time_us < a.time_us:
            said = f"B is {times_text(a.time_us / b.time_us)} as fast as A"
        else:
            said = f"B takes {times_text(b.time_us / a.time_us)} as long as A"
        of_a = sum(len(difference.one) for difference in self.differences)
        of_b = sum(len(difference.other) for difference in self.differences)
        return f"{said}. {equal}; {of_a:,} of A's and {of_b:,} of B's differ."


_ON_PROGRAMS = {
    True: "",
    False: "The plans are of different programs.",
    None: "The plans have different operations: two programs, or one that was rewritten in two ways.",
}

_HEAD = ("", "planner", "device", "kernels", "µs", "HBM MB", "peak MB", "bound")


def _head(label: str, figures: Figures) -> tuple[str, ...]:
    return (
        label,
        figures.planner,
        figures.device,
        str(figures.kernels),
        time_text(figures.time_us),
        f"{figures.hbm_bytes / 1e6:,.1f}",
        f"{figures.peak_bytes / 1e6:,.1f}",
        bound_text(figures.status, figures.gap),
    )


def _difference_lines(number: int, difference: Difference) -> Iterator[str]:
    """The lines of one difference."""
    us, n = difference.extra_us, difference.extra_hbm_bytes
    time = f"{'+' if us > 0 else '−'}{time_text(abs(us))} µs" if us else "equal time"
    moved = f"{'+' if n > 0 else '−'}{bytes_text(abs(n))}" if n else "equal bytes"
    yield f"difference {number}: {time}, {moved}"
    rows = [
        (label, str(k.kernel), k.name, time_text(k.time_us), bytes_text(k.hbm_bytes), k.tile)
        for label, kernels in (("A", difference.one), ("B", difference.other))
        for k in kernels
    ]
    head = ("", "kernel", "operations", "µs", "HBM", "tile")
    yield from (f"  {line}" for line in columns([head, *rows], {1, 3, 4}, _WIDTH - 2))
    every = [f"{m.operation} (A {m.one}, B {m.other})" for m in difference.moved]
    for what, names in (
        ("moved", every),
        ("only in A", difference.only_in_one),
        ("only in B", difference.only_in_other),
    ):
        if names:
            text = f"{what}: {_some(names)}"
            yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _some(names: Sequence[str], most: int = 12) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def compare_plans(one: FusionPlan, other: FusionPlan) -> PlanDifference:
    """Compare the kernels of two plans, which may be of different planners, devices or programs.

    Example:
        >>> import fuseplan, jax
        >>> x = jax.ShapeDtypeStruct((4096, 1024), "float32")
        >>> plans = [
        ...     fuseplan.make_plan(jax.nn.softmax, device="h200", planner=planner)(x)
        ...     for planner in ("solver", "unfused")
        ... ]
        >>> found = compare_plans(*plans)
        >>> len(found.differences), found.equal_kernels, compare_plans(plans[0], plans[0]).is_empty
        (1, 0, True)
    """
    keys_of = _keys(one.graph, other.graph)
    a, b = (_Side(plan, keys) for plan, keys in zip((one, other), keys_of, strict=True))
    equal, left, right = _equal_kernels(a, b)
    found = [_difference(a, b, *group) for group in _joined(a, b, left, right)]
    found.sort(key=lambda d: (-abs(d.extra_us), [k.kernel for k in (*d.one, *d.other)]))
    same = _are_of_one_program(one.graph, other.graph)
    return PlanDifference(_figures(one), _figures(other), same, equal, tuple(found))


def _are_of_one_program(one: Graph, other: Graph) -> bool | None:
    """See ``PlanDifference.same_program``."""
    if _unplaced(one) == _unplaced(other):
        return True
    if _signature(one) != _signature(other):
        return False
    sources = [{node.source for node in graph.nodes if node.source} for graph in (one, other)]
    # A rewritten operation keeps its place in the user's code.
    return False if all(sources) and sources[0].isdisjoint(sources[1]) else None


def _unplaced(graph: Graph) -> Graph:
    """The graph with each operation once, and without places in the user's code."""
    graph = without_copies(graph)
    nodes = tuple([replace(node, source="", scope="") for node in graph.nodes])
    return replace(graph, nodes=nodes, waits=())


def _signature(graph: Graph) -> tuple[Any, ...]:
    """The shapes and dtypes of a graph's arguments and results."""
    ends = (graph.inputs, graph.outputs)
    return tuple([[(graph.values[v].shape, graph.values[v].dtype) for v in values] for values in ends])


class _Side:
    """One of the plans, with a key for each operation that is the same in the other plan."""

    def __init__(self, plan: FusionPlan, keys: Sequence[Hashable]) -> None:
        self.plan, self.keys = plan, keys
        self.kernel_of = {keys[n]: k for k, kernel in enumerate(plan.kernels) for n in kernel.spec.nodes}
        self.node_of = {key: n for n, key in enumerate(keys)}

    def members(self, k: int) -> list[Hashable]:
        return [self.keys[n] for n in self.plan.kernels[k].spec.nodes]

    def name(self, key: Hashable) -> str:
        n = self.node_of[key]
        return f"n{n} {self.plan.graph.nodes[n].op}"

    def facts(self, k: int) -> KernelFacts:
        kernel = self.plan.kernels[k]
        spec, cost = kernel.spec, kernel.cost
        name = kernel_name(self.plan.graph, spec.nodes)
        return KernelFacts(k, name, len(spec.nodes), cost.time_us, cost.hbm_bytes, grid(spec), tile(spec))

    def schedule(self, k: int) -> tuple[Any, ...]:
        """What two kernels of the same operations may differ in."""
        kernel = self.plan.kernels[k]
        spec = kernel.spec
        return spec.backend, spec.axes, spec.passes, spec.tiles_visited, kernel.cost


def _keys(one: Graph, other: Graph) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    if one.nodes == other.nodes and one.values == other.values:
        return range(len(one.nodes)), range(len(other.nodes))
    return _signatures(one), _signatures(other)


def _signatures(graph: Graph) -> list[Hashable]:
    """For each operation its name, shapes and source line, and how many such there are before it."""
    seen: Counter[Hashable] = Counter()
    keys: list[Hashable] = []
    for node in graph.nodes:
        shapes = tuple((graph.values[v].shape, graph.values[v].dtype) for v in (*node.inputs, *node.outputs))
        key = (node.op, shapes, node.source)
        keys.append((key, seen[key]))
        seen[key] += 1
    return keys


def _equal_kernels(one: _Side, other: _Side) -> tuple[int, list[int], list[int]]:
    """The number of kernels that both plans have, and the others of each."""
    by_members = {frozenset(other.members(k)): k for k in range(len(other.plan.kernels))}
    equal: set[int] = set()
    left = []
    for k in range(len(one.plan.kernels)):
        same = by_members.get(frozenset(one.members(k)))
        if same is not None and one.schedule(k) == other.schedule(same):
            equal.add(same)
        else:
            left.append(k)
    return len(equal), left, [k for k in range(len(other.plan.kernels)) if k not in equal]


def _joined(
    one: _Side, other: _Side, left: Iterable[int], right: Iterable[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The kernels of both plans that share operations, directly or through others."""
    waiting, rest = list(left), set(right)
    seen: set[int] = set()
    for start in waiting:
        if start in seen:
            continue
        own, others, new = [start], set[int](), [start]
        seen.add(start)
        while new:
            k = new.pop()
            touched = {other.kernel_of[key] for key in one.members(k) if key in other.kernel_of} - others
            others |= touched
            for m in touched:
                for key in other.members(m):
                    back = one.kernel_of.get(key)
                    if back is not None and back not in seen:
                        seen.add(back)
                        own.append(back)
                        new.append(back)
        rest -= others
        yield sorted(own), sorted(others)
    for k in sorted(rest):  # kernels none of whose operations the first plan has
        yield [], [k]


def _difference(one: _Side, other: _Side, left: Sequence[int], right: Sequence[int]) -> Difference:
    pairs = _partners(one, other, left)
    moved, only_in_one = [], []
    for k in left:
        for key in one.members(k):
            there = other.kernel_of.get(key)
            if there is None:
                only_in_one.append(one.name(key))
            elif pairs.get(k) != there:
                moved.append(Moved(one.name(key), k, there))
    only_in_other = [other.name(key) for k in right for key in other.members(k) if key not in one.kernel_of]
    return Difference(
        tuple(map(one.facts, left)),
        tuple(map(other.facts, right)),
        tuple(moved),
        tuple(only_in_one),
        tuple(only_in_other),
    )


def _partners(one: _Side, other: _Side, left: Sequence[int]) -> Mapping[int, int]:
    """For kernels of the first plan, the one of the second with the most operations in common; each kernel
    has one partner at most."""
    shared = Counter(
        (k, there) for k in left for key in one.members(k) if (there := other.kernel_of.get(key)) is not None
    )
    partner: dict[int, int] = {}
    for (k, there), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
        if k not in partner and there not in partner.values():
            partner[k] = there
    return partner


def _figures(plan: FusionPlan) -> Figures:
    return Figures(
        plan.planner,
        plan.device.name,
        len(plan.kernels),
        len(plan.graph.nodes),
        plan.objective_us,
        plan.hbm_bytes,
        plan.peak_bytes,
        plan.status,
        plan.gap,
    )
