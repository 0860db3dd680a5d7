"""Collect the data that the script of a page draws: the plans of its studies as one compact JSON document.

A text stands once, in ``strings``, and its number stands wherever it is used. Tables are columns. Plans of
one graph share its operations. The parts of the document:

- ``strings``; ``types``, pairs of an array type's text and its bytes.
- ``graphs``: for each operation its primitive, scope, source, operands and results; for each value its type.
- ``studies``: the device, and for each plan its kernels (their operations, schedule, cost), the live ranges
  of its temporaries, the reasons between its kernels, the prices of other cuts, the refusals, and the proof.

``templates/model.js`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.memory.liveness import live_ranges
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import anchor, kernel_name, place
from fuseplan.report.explain import Explainer, borders
from fuseplan.report.figures import main_dtype
from fuseplan.report.frames import roofline_share
from fuseplan.report.text import grid, makes, skipped, status_text, tile
from fuseplan.search.what_if import Change

MAX_EXPLAINED_KERNELS = 150
"""The number of kernels of a plan up to which the borders of its kernels and cuts through them are priced,
some twenty milliseconds a kernel. The last plan of each study comes first; then others while the page has
room for their kernels within this number."""

MAX_CUT_OPERATIONS = 10_000
"""Cuts through the kernels of a plan are priced if the groups on both sides of all cuts have no more
operations together, some half a millisecond each."""


def page_json(studies: Sequence[tuple[str, Sequence[FusionPlan], FusionPlan]]) -> str:
    """The document of the page as JSON, which may stand in a ``script`` element.

    Args:
        studies: for each its name, its plans, of which the last is shown first, and the plan beside it.
    """
    tables = _Tables()
    explained = _explained([plans for _, plans, _ in studies])
    document = {
        "studies": [
            tables.study(name, plans, beside, of_one)
            for (name, plans, beside), of_one in zip(studies, explained, strict=True)
        ],
        "graphs": tables.graphs,
        "types": tables.types,
        "strings": tables.strings,
    }
    # No "<" is left that could end the element or open a comment.
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


class _Tables:
    """The texts, types and graphs of a document so far."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self.types: list[tuple[int, int]] = []
        self.graphs: list[dict[str, Any]] = []
        self._of_text: dict[str, int] = {}
        self._of_type: dict[tuple[str, int], int] = {}
        self._of_graph: dict[int, int] = {}
        self._kept: list[Graph] = []  # so that no other graph gets the id of one of them

    def text(self, text: str) -> int:
        """The number of a text."""
        number = self._of_text.setdefault(text, len(self.strings))
        if number == len(self.strings):
            self.strings.append(text)
        return number

    def study(
        self, name: str, plans: Sequence[FusionPlan], beside: FusionPlan, explained: Sequence[bool]
    ) -> dict[str, Any]:
        same_graph = all(plan.graph is plans[0].graph for plan in plans)
        cuts: dict[tuple[int, ...], int] = {}
        return {
            "name": name,
            "device": self._device(plans[-1]),
            "plans": [
                self._plan(plan, explain, same_graph, cuts)
                for plan, explain in zip(plans, explained, strict=True)
            ],
            "beside": -1 if beside is plans[-1] else next(i for i, p in enumerate(plans) if p is beside),
        }

    def _device(self, plan: FusionPlan) -> dict[str, Any]:
        device, dtype = plan.device, main_dtype(plan)
        return {
            "name": device.name,
            "onchip": device.onchip_bytes,
            "hbm": device.hbm_bytes_per_s,
            "vector": device.vector_flops_per_s,
            "matrix": device.matrix_rate(dtype),
            "dtype": dtype,
        }

    def _plan(
        self, plan: FusionPlan, explain: bool, same_graph: bool, cuts: dict[tuple[int, ...], int]
    ) -> dict[str, Any]:
        origins = _origins(plan, same_graph)
        lives = live_ranges(plan.graph, plan.kernels)
        return {
            "planner": plan.planner,
            "graph": self._graph(plan.graph),
            "origins": None if same_graph else origins,
            "kernels": self._kernels(plan, origins, cuts),
            "live": [(r.value, r.writer, r.users[-1]) for r in lives.ranges],
            "scratch": [(k, n) for k, n in enumerate(lives.scratch_bytes) if n],
            "reasons": self._reasons(plan) if explain else None,
            "cuts": _cuts(plan) if explain else None,
            "refusals": [(self.text(v.rule), self.text(v.reason), v.nodes[:8]) for v in plan.refusals],
            "proof": _proof(plan),
        }

    def _graph(self, graph: Graph) -> int:
        """The number of a graph, which is added if it is not there yet."""
        known = self._of_graph.get(id(graph))
        if known is not None:
            return known
        self._of_graph[id(graph)] = len(self.graphs)
        self._kept.append(graph)
        nodes = graph.nodes
        self.graphs.append(
            {
                "op": [self.text(node.op) for node in nodes],
                "scope": [self.text(node.scope) for node in nodes],
                "source": [self.text(_file_name(node.source)) for node in nodes],
                "reads": [list(dict.fromkeys(node.inputs)) for node in nodes],
                "makes": [node.outputs for node in nodes],
                "type": [self._type(str(value), value.nbytes) for value in graph.values],
                "inputs": graph.inputs,
                "outputs": graph.outputs,
            }
        )
        return len(self.graphs) - 1

    def _type(self, text: str, nbytes: int) -> int:
        number = self._of_type.setdefault((text, nbytes), len(self.types))
        if number == len(self.types):
            self.types.append((self.text(text), nbytes))
        return number

    def _kernels(
        self, plan: FusionPlan, origins: Sequence[int], cuts: dict[tuple[int, ...], int]
    ) -> dict[str, list[Any]]:
        """The columns of the table of kernels. Kernels of equal ``cut`` in plans of one study compute the
        same operations of the program."""
        graph, roof = plan.graph, _RooflineShares(plan)
        columns: dict[str, list[Any]] = {name: [] for name in _KERNEL_COLUMNS}
        for kernel in plan.kernels:
            spec, cost, main = kernel.spec, kernel.cost, anchor(graph, kernel.spec.nodes)
            cut = tuple(sorted({origins[n] for n in spec.nodes}))
            row = (
                spec.nodes,
                self.text(kernel_name(graph, spec.nodes)),
                self.text(main.scope),
                self.text(place(main)),
                cuts.setdefault(cut, len(cuts)),
                self.text(spec.backend),
                self.text(grid(spec)),
                self.text(tile(spec)),
                self.text(skipped(spec)),
                self.text(makes(graph, spec)),
                self.text(cost.bound_by),
                [x for name, ps in cost.parts_ps.items() for x in (self.text(name), ps)],
                cost.hbm_read_bytes,
                cost.hbm_write_bytes,
                cost.onchip_bytes,
                (cost.flops.matrix, cost.flops.vector, cost.flops.transcendental),
                roof.share(kernel),
                self.text(_file_name(main.source)),
            )
            for column, cell in zip(columns.values(), row, strict=True):
                column.append(cell)
        return columns

    def _reasons(self, plan: FusionPlan) -> list[tuple[Any, ...]]:
        """For each border between kernels: the producer, the consumers, the reason, and if one kernel is
        possible, its additional picoseconds and bytes."""
        found: list[tuple[Any, ...]] = []
        for of_one in borders(plan):
            for border in of_one:
                change = border.outcome if isinstance(border.outcome, Change) else None
                extra = (None, None) if change is None else (change.extra_ps, change.extra_hbm_bytes)
                found.append((border.producer, border.consumers, self.text(border.reason), *extra))
        return found


_KERNEL_COLUMNS = (
    "nodes", "name", "scope", "place", "cut", "backend", "grid", "tile", "skipped", "makes", "bound",
    "parts", "read", "write", "onchip", "flops", "roof", "source",
)  # fmt: skip


def _explained(studies: Sequence[Sequence[FusionPlan]]) -> list[list[bool]]:
    """For each plan of each study, whether other cuts of it are priced: of a study the last, and others while
    the page has few kernels."""
    chosen = [[False] * len(plans) for plans in studies]
    left = MAX_EXPLAINED_KERNELS
    for plans, of_one in zip(studies, chosen, strict=True):
        of_one[-1] = len(plans[-1].kernels) <= MAX_EXPLAINED_KERNELS
        left -= len(plans[-1].kernels)
    for plans, of_one in zip(studies, chosen, strict=True):
        for i in reversed(range(len(plans) - 1)):
            if len(plans[i].kernels) <= left:
                of_one[i] = True
                left -= len(plans[i].kernels)
    return chosen


def _origins(plan: FusionPlan, same_graph: bool) -> Sequence[int]:
    """For each node, the number of its operation in all plans of a study, whose rewrites number nodes anew.
    A plan that was read from a file without its program has its own numbers."""
    if same_graph or plan.program is None or not plan.program.equations:
        return range(len(plan.graph.nodes))
    return [n if e.origin < 0 else e.origin for n, e in enumerate(plan.program.equations)]


def _cuts(plan: FusionPlan) -> list[tuple[int, int, int, int, int]] | None:
    """For each kernel of several operations the cheapest other cut through it: the kernel, the operation
    before which it is cut, the additional picoseconds and bytes, and the number of kernels. None where there
    are too many cuts."""
    groups = [kernel.spec.nodes for kernel in plan.kernels]
    if sum(len(nodes) * (len(nodes) - 1) for nodes in groups) > MAX_CUT_OPERATIONS:
        return None
    explainer, found = Explainer(plan), []
    for k, nodes in enumerate(groups):
        tried = [(n, explainer.explain(nodes[0], n)) for n in nodes[1:]]
        possible = [
            (e.extra_ps, e.extra_hbm_bytes, n, len(e.forced))
            for n, e in tried
            if e.extra_ps is not None and e.extra_hbm_bytes is not None
        ]
        if possible:
            extra_ps, extra_bytes, n, count = min(possible)
            found.append((k, n, extra_ps, extra_bytes, count))
    return found


class _RooflineShares:
    """Per mille of the roofline's time in the modelled time of kernels; equal kernels are computed once."""

    def __init__(self, plan: FusionPlan) -> None:
        self._graph: Graph = plan.graph
        self._device: DeviceSpec = plan.device
        self._known: dict[tuple[Any, ...], int | None] = {}

    def share(self, kernel: Kernel) -> int | None:
        """None for a kernel that takes no time."""
        spec = kernel.spec
        nodes = tuple(
            (n.op, n.kind, n.dims, n.roles, n.flops) for n in map(self._graph.nodes.__getitem__, spec.nodes)
        )
        moved = tuple(str(self._graph.values[a.value]) for a in (*spec.reads, *spec.writes))
        key = (nodes, moved, spec.axes, spec.node_axes, kernel.cost)
        if key not in self._known:
            found = roofline_share(self._graph, kernel, self._device) if kernel.cost.time_ps else None
            self._known[key] = None if found is None else round(1000 * found)
        return self._known[key]


def _proof(plan: FusionPlan) -> dict[str, Any]:
    stats, proof = plan.stats, plan.proof
    parts = [] if proof is None else sorted(proof.parts, key=lambda p: -p.bound_ps * len(p.first_nodes))
    return {
        "status": status_text(plan),
        "optimal": plan.status == "OPTIMAL",
        "bound": plan.bound_ps,
        "gap": None if plan.gap is None or plan.gap == float("inf") else plan.gap,
        "peak": plan.peak_bytes,
        "components": stats.components,
        "distinct": stats.distinct_components,
        "candidates": stats.candidates,
        "remembered": stats.remembered,
        "certified": stats.certified,
        "seconds": [(name, round(s, 4)) for name, s in stats.seconds],
        # A part's bound, the components that it holds for, their operations, and its cases.
        "parts": [(p.bound_ps, len(p.first_nodes), len(p.prices_ps), len(p.cases)) for p in parts],
        "joint": None if proof is None or proof.joint is None else proof.joint.bound_ps,
    }


def _file_name(source: str) -> str:
    """``source`` without the folders of its file, which may be private."""
    return source.replace("\\", "/").rpartition("/")[2]
