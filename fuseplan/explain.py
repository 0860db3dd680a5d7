"""Why two operations share a kernel or do not, and what the other way would cost.

An answer is found by trying: the union of the two kernels (with every kernel on a path
between them, or the result could not run) is priced by the scheduler that made the plan,
and so is the smallest group that holds both operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from costmodel.graph import Graph
from fuseplan.errors import InvalidArgumentError, Verdict
from fuseplan.join import cyclic_sets, group_successors
from fuseplan.layout import boundary
from fuseplan.partition import data_edges, effect_edges
from fuseplan.plan import Plan
from fuseplan.pricing import Nodes, Price, PriceBook
from fuseplan.schedule import Scheduler
from fuseplan.text import bytes_text, kernel_name, time_text


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``Plan.explain``; ``str`` of it is for people."""

    a: int
    b: int
    together: bool
    kernels: tuple[int, int]
    """The kernels that compute ``a`` and ``b``, by position in the plan."""
    verdict: Verdict | None
    """Why the two can never share a kernel; None if they can or do."""
    forced: tuple[Nodes, ...]
    """The groups that would stand in place of the plan's, if the decision were the other."""
    extra_ps: int | None
    """Picoseconds the plan would take longer then; None where it is impossible."""
    extra_hbm_bytes: int | None
    text: str

    @property
    def extra_us(self) -> float | None:
        return None if self.extra_ps is None else self.extra_ps / 1e6

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Change:
    """Some kernels of a plan replaced by other groups of the same nodes."""

    groups: tuple[Nodes, ...]
    extra_ps: int
    extra_hbm_bytes: int


class Explainer:
    """Answers about one plan; prices are remembered between questions."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.graph: Graph = plan.graph
        self.book = PriceBook(plan.graph, Scheduler(plan.graph, plan.device))
        self.edges = data_edges(plan.graph) + effect_edges(plan.graph)
        self.groups: list[Nodes] = [k.spec.nodes for k in plan.kernels]
        self.kernel_of = {n: k for k, nodes in enumerate(self.groups) for n in nodes}
        self._after: list[list[int]] = [[] for _ in plan.graph.nodes]
        self._before: list[list[int]] = [[] for _ in plan.graph.nodes]
        for u, v in self.edges:
            self._after[u].append(v)
            self._before[v].append(u)

    def explain(self, a: int, b: int) -> Explanation:
        """Why ``a`` and ``b`` are, or are not, in one kernel."""
        if self.kernel_of[a] == self.kernel_of[b]:
            return self._apart(a, b)
        return self._together(a, b)

    def merge(self, kernels: Iterable[int]) -> Change | Verdict:
        """Those kernels, and all between them, as one."""
        chosen = set(kernels)
        while True:
            closure = self._convex({n for k in chosen for n in self.groups[k]})
            wider = {self.kernel_of[n] for n in closure}
            if wider == chosen:
                break
            chosen = wider
        nodes = tuple(sorted(closure))
        refused = self._refusal(nodes)
        if refused is not None:
            return refused
        price = self.book.price(nodes)
        if isinstance(price, Verdict):
            return price
        return self._change(chosen, [nodes])

    def _convex(self, nodes: set[int]) -> set[int]:
        """``nodes`` and everything on a path between two of them."""
        low, high = min(nodes), max(nodes)  # ids are a topological order

        def reach(edges: list[list[int]]) -> set[int]:
            seen: set[int] = set()
            queue = list(nodes)
            while queue:
                for n in edges[queue.pop()]:
                    if low < n < high and n not in seen:
                        seen.add(n)
                        queue.append(n)
            return seen

        return nodes | (reach(self._after) & reach(self._before))

    def _connected(self, nodes: Sequence[int]) -> list[Nodes]:
        """The parts of ``nodes`` that producer-consumer edges hold together."""
        left = set(nodes)
        parts = []
        while left:
            start = min(left)
            part, queue = {start}, [start]
            while queue:
                n = queue.pop()
                for m in (*self._after[n], *self._before[n]):
                    if m in left and m not in part:
                        part.add(m)
                        queue.append(m)
            left -= part
            parts.append(tuple(sorted(part)))
        return parts

    def _refusal(self, nodes: Nodes) -> Verdict | None:
        """Why a convex set can be no kernel, whatever its schedule."""
        if len(nodes) > 1 and len(self._connected(nodes)) > 1:
            return Verdict(
                "producer-consumer",
                "no value passes between them, and a kernel holds only operations that pass values on",
                nodes,
            )
        return self.book.compatible(nodes)

    def _change(self, kernels: Iterable[int], groups: Sequence[Nodes]) -> Change | Verdict:
        """Replace ``kernels`` by ``groups``, if the rest can then still run."""
        gone = set(kernels)
        others = [g for k, g in enumerate(self.groups) if k not in gone]
        after = group_successors(self.edges, [*groups, *others])
        if cyclic_sets(after):
            return Verdict("cycle", "the kernels would wait for each other", groups[0])
        time_ps = hbm_bytes = 0
        for group in groups:
            price = self.book.price(group)
            if isinstance(price, Verdict):
                return price
            time_ps += price.time_ps
            hbm_bytes += price.hbm_bytes
        now = [self.plan.kernels[k].cost for k in gone]
        return Change(
            tuple(groups),
            time_ps - sum(c.time_ps for c in now),
            hbm_bytes - sum(c.hbm_bytes for c in now),
        )

    def _pieces(self, nodes: Iterable[int]) -> list[Nodes]:
        """``nodes`` as kernels: what holds together and has a price; else one by one."""
        pieces: list[Nodes] = []
        for part in self._connected(tuple(nodes)):
            convex = set(part) == self._convex(set(part))
            if convex and self.book.compatible(part) is None and isinstance(self.book.price(part), Price):
                pieces.append(part)
            else:
                pieces += [(n,) for n in part]
        return pieces

    def _together(self, a: int, b: int) -> Explanation:
        """They are apart: what keeps them so, or what one kernel for both would cost."""
        ka, kb = self.kernel_of[a], self.kernel_of[b]
        smallest = tuple(sorted(self._convex({a, b})))
        whole = self.merge((ka, kb))
        small = self._smallest(smallest)
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
        return Explanation(
            a, b, False, (ka, kb), None, best.groups, best.extra_ps, best.extra_hbm_bytes, text
        )  # fmt: skip

    def _smallest(self, nodes: Nodes) -> Change | Verdict:
        refused = self._refusal(nodes)
        if refused is not None:
            return refused
        price = self.book.price(nodes)
        if isinstance(price, Verdict):
            return price
        kernels = {self.kernel_of[n] for n in nodes}
        rest = {n for k in kernels for n in self.groups[k]} - set(nodes)
        return self._change(kernels, [nodes, *self._pieces(rest)])

    def _apart(self, a: int, b: int) -> Explanation:
        """They share a kernel: what cutting it between them would cost."""
        k = self.kernel_of[a]
        nodes = self.groups[k]
        head = f"{self._node(a)} and {self._node(b)} share {self._kernel(k)}."
        if a == b:
            return Explanation(a, b, True, (k, k), None, (), None, None, head)
        inside = set(nodes)
        high = max(a, b)
        # Everything from the later one on goes to the second kernel.
        second, queue = {high}, [high]
        while queue:
            for n in self._after[queue.pop()]:
                if n in inside and n not in second:
                    second.add(n)
                    queue.append(n)
        first = inside - second
        kept = [
            v
            for n in sorted(first)
            for v in self.graph.nodes[n].outputs
            if second.intersection(self.graph.consumers[v])
        ]
        written = set(boundary(self.graph, nodes).writes)
        kept = sorted((v for v in kept if v not in written), key=lambda v: -self.graph.values[v].nbytes)
        passed = ", ".join(f"v{v}:{self.graph.values[v]}" for v in kept[:3])
        change = self._change([k], [*self._pieces(first), *self._pieces(second)])
        stays = f" It keeps {passed} on chip." if passed else ""
        if isinstance(change, Verdict):
            text = f"{head}{stays}\nCut between them it could not run ({change})."
            return Explanation(a, b, True, (k, k), None, (), None, None, text)
        text = (
            f"{head}{stays}\nCut before {self._node(high)}, in {len(change.groups)} kernels, it would "
            f"{_costs(change)}."
        )
        return Explanation(
            a, b, True, (k, k), None, change.groups, change.extra_ps,
            change.extra_hbm_bytes, text,
        )  # fmt: skip

    def _why(self, change: Change) -> str:
        if self.plan.status == "OPTIMAL" and change.extra_ps >= 0:
            return " The plan is proven optimal without it."
        if change.extra_ps < 0:
            return f" The planner {self.plan.planner!r} did not find it; the solver may."
        return ""

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
    """Where one kernel ends and others that read from it begin, and why they are not one."""

    producer: int
    consumers: tuple[int, ...]
    """Positions in the plan; the reason is the same for all of them."""
    outcome: Change | Verdict

    @property
    def reason(self) -> str:
        if isinstance(self.outcome, Verdict):
            return str(self.outcome)
        return f"one kernel would {_costs(self.outcome)}"


def borders(plan: Plan) -> tuple[tuple[Border, ...], ...]:
    """For each kernel of the plan, why it does not go on into each kernel that reads from
    it: the most frequent reason first."""
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


def explain(plan: Plan, a: int | str, b: int | str) -> Explanation:
    """See ``Plan.explain``."""
    first, second = _find(plan.graph, a), _find(plan.graph, b)
    if len(first) > 1 or len(second) > 1:
        first, second = _narrow(plan.graph, a, b, first, second)
    return Explainer(plan).explain(first[0], second[0])


def _find(graph: Graph, name: int | str) -> list[int]:
    """The nodes that ``name`` may mean; raises if there is none."""
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
    """Of names that fit several nodes, the one pair that an edge joins."""
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
