"""Explain why two operations do or do not share a kernel, and what the opposite would cost.

For operations in different kernels, two alternatives are priced by the scheduler that made the plan: the
union of their kernels with all kernels on paths between them, and the smallest convex group that holds both
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.graph import Graph, boundary
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.text import skipped
from fuseplan.schedule.pricing import Nodes
from fuseplan.search.components import data_edges
from fuseplan.search.what_if import Change, Regrouping
from fuseplan.support.digraph import group_successors, reachable
from fuseplan.support.errors import InvalidArgumentError, Verdict
from fuseplan.support.format import bytes_text, time_text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of ``Plan.explain``; ``str`` returns its text."""

    a: int
    b: int
    together: bool
    kernels: tuple[int, int]
    """The kernels that compute ``a`` and ``b``, by position in the plan."""
    verdict: Verdict | None
    """The rule by which the two can never share a kernel; None if they can or do."""
    forced: tuple[Nodes, ...]
    """The groups that the opposite decision would have in place of the plan's."""
    extra_ps: int | None
    """The difference that the opposite decision makes to the plan's time, in picoseconds; None if it is
    impossible."""
    extra_hbm_bytes: int | None
    text: str

    @property
    def extra_us(self) -> float | None:
        """``extra_ps`` in microseconds."""
        return None if self.extra_ps is None else self.extra_ps / 1e6

    def __str__(self) -> str:
        return self.text


class Explainer(Regrouping):
    """Explains decisions of one plan; keeps prices between calls."""

    def explain(self, a: int, b: int) -> Explanation:
        """Why ``a`` and ``b`` are, or are not, in one kernel."""
        if self.kernel_of[a] == self.kernel_of[b]:
            return self._apart(a, b)
        return self._together(a, b)

    def _together(self, a: int, b: int) -> Explanation:
        """Explain two operations in different kernels: the rule against one kernel, or its cost."""
        ka, kb = self.kernel_of[a], self.kernel_of[b]
        smallest = tuple(sorted(self.ties.between({a, b})))
        whole = self.merge((ka, kb))
        small = self.split_out(smallest)
        changes = [c for c in (whole, small) if isinstance(c, Change)]
        where = f"({self._kernel(ka)}; {self._kernel(kb)})"
        head = f"{self._node(a)} and {self._node(b)} are in different kernels {where}."
        if not changes:
            assert isinstance(small, Verdict)
            verdict = small
            if verdict.rule == "producer-consumer" and isinstance(whole, Verdict):
                verdict = whole  # their kernels touch, even if the two operations do not
            between = [n for n in smallest if n not in (a, b)]
            path = f" Between them: {self._names(between)}." if between and verdict.rule != "cycle" else ""
            text = f"{head}\nOne kernel is impossible ({verdict}).{path}"
            return Explanation(a, b, False, (ka, kb), verdict, (), None, None, text)
        best = min(changes, key=lambda c: (c.extra_ps, c.extra_hbm_bytes))
        holder = next(g for g in best.groups if a in g and b in g)
        scope = f"One kernel of {len(holder)} operations for both"
        others = len(best.groups) - 1
        if others:
            scope += f" (and {others} other kernel{'s' if others > 1 else ''} for what it leaves over)"
        text = f"{head}\n{scope} is possible and would {_costs(best)}.{self._why(best)}"
        text += self._unskipped((ka, kb))
        costs = (best.extra_ps, best.extra_hbm_bytes)
        return Explanation(a, b, False, (ka, kb), None, best.groups, *costs, text)

    def _apart(self, a: int, b: int) -> Explanation:
        """Explain two operations in one kernel: the cost of cutting it between them."""
        k = self.kernel_of[a]
        nodes = self.groups[k]
        head = f"{self._node(a)} and {self._node(b)} share {self._kernel(k)}."
        if a == b:
            return Explanation(a, b, True, (k, k), None, (), None, None, head)
        inside = set(nodes)
        high = max(a, b)
        # The later operation and everything that depends on it go to the second kernel.
        second = {high} | reachable([high], lambda n: inside.intersection(self.ties.after[n]))
        first = inside - second
        written = set(boundary(self.graph, nodes).writes)
        made = [v for n in sorted(first) for v in self.graph.nodes[n].outputs if v not in written]
        kept = [v for v in made if second.intersection(self.graph.consumers[v])]
        kept.sort(key=lambda v: -self.graph.values[v].nbytes)
        passed = ", ".join(f"v{v}:{self.graph.values[v]}" for v in kept[:3])
        change = self.change([k], [*self.pieces(first), *self.pieces(second)])
        stays = f" It keeps {passed} on chip." if passed else ""
        if isinstance(change, Verdict):
            text = f"{head}{stays}\nCut between them it could not run ({change})."
            return Explanation(a, b, True, (k, k), None, (), None, None, text)
        text = (
            f"{head}{stays}\nCut before {self._node(high)}, in {len(change.groups)} kernels, it would "
            f"{_costs(change)}.{self._unskipped((k,))}"
        )
        costs = (change.extra_ps, change.extra_hbm_bytes)
        return Explanation(a, b, True, (k, k), None, change.groups, *costs, text)

    def _why(self, change: Change) -> str:
        if self.plan.status == "OPTIMAL" and change.extra_ps >= 0:
            return " The plan is proven optimal without it."
        if change.extra_ps < 0 and self.plan.status == "OPTIMAL":
            return " It is no part of what the planner searches: loops around these alone."
        if change.extra_ps < 0:
            return f" The planner {self.plan.planner!r} did not find it; the solver may."
        return ""

    def _unskipped(self, kernels: Sequence[int]) -> str:
        """A remark for plans with skipped tiles: one that was read from a file has no masks, so that the
        alternative is priced without."""
        if self.plan.program is not None:
            return ""
        specs = [self.plan.kernels[k].spec for k in kernels]
        return " The other way is priced without skipping masked tiles." if any(map(skipped, specs)) else ""

    def _node(self, n: int) -> str:
        node = self.graph.nodes[n]
        made = f":{self.graph.values[node.outputs[0]]}" if node.outputs else ""
        return f"n{n} {node.op}{made}"

    def _kernel(self, k: int) -> str:
        return f"kernel {k}, {kernel_name(self.graph, self.groups[k])}"

    def _names(self, nodes: Sequence[int]) -> str:
        names = ", ".join(f"n{n} {self.graph.nodes[n].op}" for n in nodes[:4])
        return names + (f", … {len(nodes) - 4} more" if len(nodes) > 4 else "")


@dataclass(frozen=True, slots=True)
class Border:
    """A kernel, others that read its results, and the reason why they are not one kernel."""

    producer: int
    consumers: tuple[int, ...]
    """Positions in the plan; the reason is the same for all of them."""
    outcome: Change | Verdict

    @property
    def reason(self) -> str:
        if isinstance(self.outcome, Verdict):
            return str(self.outcome)
        return f"one kernel would {_costs(self.outcome)}"


def borders(plan: FusionPlan) -> tuple[tuple[Border, ...], ...]:
    """For each kernel, the reasons why it is not fused with the kernels that read its results, the most
    frequent first."""
    explainer = Explainer(plan)
    result = []
    for k, after in enumerate(group_successors(data_edges(plan.graph), explainer.groups)):
        found: dict[str, Border] = {}
        for consumer in sorted(after):
            border = Border(k, (consumer,), explainer.merge((k, consumer)))
            known = found.get(border.reason)
            if known is not None:
                border = Border(k, (*known.consumers, consumer), known.outcome)
            found[border.reason] = border
        result.append(tuple(sorted(found.values(), key=lambda b: -len(b.consumers))))
    return tuple(result)


def _costs(change: Change) -> str:
    us, n = change.extra_ps / 1e6, change.extra_hbm_bytes
    time, moved = "take as long", "move as many bytes"
    if us:
        time = f"cost {time_text(us)} µs more" if us > 0 else f"save {time_text(-us)} µs"
    if n:
        moved = f"move {bytes_text(abs(n))} {'more' if n > 0 else 'less'}"
    return f"{time} and {moved}"


def explain(plan: FusionPlan, a: int | str, b: int | str) -> Explanation:
    """See ``Plan.explain``."""
    first, second = _find(plan.graph, a), _find(plan.graph, b)
    if len(first) > 1 or len(second) > 1:
        first, second = _narrow(plan.graph, a, b, first, second)
    return Explainer(plan).explain(first[0], second[0])


def _find(graph: Graph, name: int | str) -> list[int]:
    """The nodes with the id or operation ``name``. Raises ``InvalidArgumentError`` if there is none."""
    count = len(graph.nodes)
    if isinstance(name, str) and name[:1] == "n" and name[1:].isdigit():
        name = int(name[1:])
    if isinstance(name, int) and not isinstance(name, bool):
        if 0 <= name < count:
            return [name]
        raise InvalidArgumentError(f"expected a node from 0 to {count - 1}, got {name}")
    if isinstance(name, str):
        found = [node.id for node in graph.nodes if node.op == name]
        if found:
            return found
        ops = ", ".join(sorted({node.op for node in graph.nodes}))
        raise InvalidArgumentError(f"no operation of this plan is called {name!r}; there are {ops}")
    raise InvalidArgumentError(f"expected a node's id or an operation's name, got {type(name).__name__}")


def _narrow(
    graph: Graph, a: int | str, b: int | str, first: list[int], second: list[int]
) -> tuple[list[int], list[int]]:
    """Of names that fit several nodes, the only pair with an edge between them."""
    edges = set(data_edges(graph))
    pairs = [(m, n) for m in first for n in second if (m, n) in edges or (n, m) in edges]
    if len(pairs) == 1:
        return [pairs[0][0]], [pairs[0][1]]
    name, found = (a, first) if len(first) > 1 else (b, second)
    listed = ", ".join(
        f"n{n} ({graph.nodes[n].source.rpartition('/')[2] or graph.values[graph.nodes[n].outputs[0]]})"
        for n in found[:6]
    )
    more = f" and {len(found) - 6} more" if len(found) > 6 else ""
    raise InvalidArgumentError(f"{len(found)} nodes are called {name!r}: {listed}{more}. Pass a node's id")
