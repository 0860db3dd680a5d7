"""Convert plans to the formats of other tools: Model Explorer, Perfetto and Graphviz.

- Model Explorer (https://github.com/google-ai-edge/model-explorer): graphs of operations in nested layers,
  and node data, an overlay of values. The fields are those of its ``graph_builder`` and
  ``node_data_builder``.
- Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``: the Trace Event Format, a JSON list of events.
- Graphviz: a graph in the language DOT, with a cluster for each kernel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from costmodel.graph import Graph, Node
from fuseplan.memory.liveness import live_ranges, profile
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import anchor, kernel_name
from fuseplan.report.text import grid, makes, parts_text, status_text, tile
from fuseplan.support.atomic_file import check_writable, write_text
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.format import bytes_text, counted, time_text

BY_KERNEL, BY_SCOPE = "operations by kernel", "operations by named_scope"
"""The ids of the two graphs for Model Explorer."""


# --- Model Explorer --------------------------------------------------------------------------


def write_model_explorer(
    plan: FusionPlan, path: str | PathLike[str], node_data_path: str | PathLike[str] | None = None
) -> None:
    """See ``Plan.to_model_explorer``."""
    target = check_writable(path)
    node_data = None if node_data_path is None else check_writable(node_data_path)
    if node_data is not None and node_data.resolve() == target.resolve():
        raise InvalidArgumentError(f"expected two files, one for node data, got {target} for both")
    collection = {"label": _title(plan), "graphs": model_explorer_graphs(plan)}
    write_text(target, json.dumps(collection, ensure_ascii=False))
    if node_data is not None:
        write_text(node_data, json.dumps(model_explorer_node_data(plan), ensure_ascii=False))


def model_explorer_graphs(plan: FusionPlan) -> list[dict[str, Any]]:
    """The operations of a plan as two graphs, whose layers are the kernels and the named scopes."""
    layers = {n: _layer(plan, k) for k, kernel in enumerate(plan.kernels) for n in kernel.spec.nodes}
    kernels = {_layer(plan, k): _kernel_figures(plan, k) for k in range(len(plan.kernels))}
    whole = {
        "planner": plan.planner,
        "device": plan.device.name,
        "kernels": f"{len(plan.kernels):,}",
        "time": f"{time_text(plan.objective_us)} µs, modelled",
        "HBM": bytes_text(plan.hbm_bytes),
        "proof": status_text(plan),
    }
    by_scope = {node.id: node.scope for node in plan.graph.nodes}
    return [
        {
            "id": BY_KERNEL,
            "nodes": _explorer_nodes(plan, layers, layers),
            "groupNodeAttributes": {"": whole, **kernels},
        },
        {
            "id": BY_SCOPE,
            "nodes": _explorer_nodes(plan, by_scope, layers),
            "groupNodeAttributes": {"": whole},
        },
    ]


def model_explorer_node_data(plan: FusionPlan) -> dict[str, Any]:
    """The modelled microseconds of each kernel, at its main operation, so that the sums over layers are those
    of their kernels."""
    graph = plan.graph
    times = {
        f"n{anchor(graph, kernel.spec.nodes).id}": {"value": kernel.cost.time_us} for kernel in plan.kernels
    }
    # From white to a dark orange, with text that contrasts at both ends.
    gradient = [
        {"stop": 0, "bgColor": "#ffffff", "textColor": "#000000"},
        {"stop": 1, "bgColor": "#f4a460", "textColor": "#000000"},
    ]
    return {name: {"results": times, "gradient": gradient} for name in (BY_KERNEL, BY_SCOPE)}


def _title(plan: FusionPlan) -> str:
    return f"fuseplan: {plan.planner} plan for {plan.device.name}"


def _layer(plan: FusionPlan, k: int) -> str:
    """The layer of a kernel. A slash in its name would make further layers."""
    return f"kernel {k} {_name(plan, k)}".replace("/", " › ")


def _name(plan: FusionPlan, k: int) -> str:
    return kernel_name(plan.graph, plan.kernels[k].spec.nodes)


def _kernel_figures(plan: FusionPlan, k: int) -> dict[str, str]:
    spec, cost = plan.kernels[k].spec, plan.kernels[k].cost
    figures = {
        "time": f"{time_text(cost.time_us)} µs, modelled",
        "parts": parts_text(cost),
        "bound by": cost.bound_by,
        "backend": spec.backend,
        "grid": grid(spec),
        "tile": tile(spec),
        "HBM": bytes_text(cost.hbm_bytes),
        "on chip": bytes_text(cost.onchip_bytes),
        "flops": f"{cost.flops.total:,}",
        "makes": makes(plan.graph, spec),
    }
    return {name: text for name, text in figures.items() if text}


def _explorer_nodes(
    plan: FusionPlan, namespaces: Mapping[int, str], layers: Mapping[int, str]
) -> list[dict[str, Any]]:
    graph = plan.graph
    stored = {access.value for kernel in plan.kernels for access in kernel.spec.writes}
    nodes = [
        _explorer_node(f"v{v}", "input", "inputs", [], [], [_metadata(graph, v, 0, "HBM")])
        for v in graph.inputs
    ]
    for node in graph.nodes:
        results = [
            _metadata(graph, v, i, "HBM" if v in stored else "on chip") for i, v in enumerate(node.outputs)
        ]
        attributes = {
            "kernel": layers[node.id],
            "kind": node.kind.name.lower(),
            "scope": node.scope,
            "source": node.source,
            "flops": f"{node.flops.total:,}",
        }
        edges = [_explorer_edge(graph, v, i) for i, v in enumerate(node.inputs)]
        shown = [(name, text) for name, text in attributes.items() if text]
        nodes.append(_explorer_node(f"n{node.id}", node.op, namespaces[node.id], shown, edges, results))
    for i, v in enumerate(graph.outputs):
        nodes.append(_explorer_node(f"out{i}", "output", "outputs", [], [_explorer_edge(graph, v, 0)], []))
    return nodes


def _explorer_node(
    id: str,
    label: str,
    namespace: str,
    attributes: Iterable[tuple[str, str]],
    edges: Sequence[dict[str, str]],
    results: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "id": id,
        "label": label,
        "namespace": namespace,
        "attrs": [{"key": key, "value": value} for key, value in attributes],
        "incomingEdges": list(edges),
        "outputsMetadata": list(results),
    }


def _explorer_edge(graph: Graph, v: int, position: int) -> dict[str, str]:
    producer = graph.values[v].producer
    output = 0 if producer < 0 else graph.nodes[producer].outputs.index(v)
    return {
        "sourceNodeId": _producer_id(graph, v),
        "sourceNodeOutputId": str(output),
        "targetNodeInputId": str(position),
    }


def _producer_id(graph: Graph, v: int) -> str:
    """The id of the node that makes a value: an operation, or the value itself if it is an input."""
    producer = graph.values[v].producer
    return f"v{v}" if producer < 0 else f"n{producer}"


def _metadata(graph: Graph, v: int, position: int, place: str) -> dict[str, Any]:
    value = graph.values[v]
    figures = {"value": f"v{v}", "shape": str(value), "bytes": f"{value.nbytes:,}", "stored": place}
    return {"id": str(position), "attrs": [{"key": key, "value": text} for key, text in figures.items()]}


# --- Perfetto --------------------------------------------------------------------------------

_PROCESS, _KERNELS = 1, 1
"""The numbers of the one process and of its track of kernels."""


def write_perfetto(plan: FusionPlan, path: str | PathLike[str]) -> None:
    """See ``Plan.to_perfetto``."""
    target = check_writable(path)
    document = {
        "traceEvents": trace_events(plan),
        "displayTimeUnit": "ns",
        "otherData": {
            "planner": plan.planner,
            "device": plan.device.name,
            "times": "modelled, not measured",
            "proof": status_text(plan),
        },
    }
    write_text(target, json.dumps(document, ensure_ascii=False))


def trace_events(plan: FusionPlan) -> list[dict[str, Any]]:
    """The modelled schedule of a plan as trace events: a slice for each kernel that takes time, and counters
    of the live temporaries in bytes and of the HBM traffic in GB/s. Times are in microseconds."""
    graph = plan.graph
    events = [
        _event("M", "process_name", args={"name": f"{_title(plan)} (modelled)"}),
        _event("M", "thread_name", tid=_KERNELS, args={"name": "kernels"}),
    ]
    live = profile(live_ranges(graph, plan.kernels), range(len(plan.kernels)))
    now_ps = 0
    for k, kernel in enumerate(plan.kernels):
        cost = kernel.cost
        events.append(_event("C", "live temporaries", now_ps, args={"bytes": live[k]}))
        if not cost.time_ps:
            continue
        rate = cost.hbm_bytes * 1e3 / cost.time_ps  # bytes a picosecond are TB/s
        events.append(_event("C", "HBM traffic", now_ps, args={"GB/s": rate}))
        events.append(
            _event(
                "X",
                _name(plan, k),
                now_ps,
                tid=_KERNELS,
                dur=cost.time_ps / 1e6,
                cat=cost.bound_by,
                args=_kernel_args(graph, k, kernel),
            )
        )
        now_ps += cost.time_ps
    end = [_event("C", name, now_ps, args={unit: 0}) for name, unit in _COUNTERS.items()]
    return events + end


_COUNTERS = {"live temporaries": "bytes", "HBM traffic": "GB/s"}


def _event(phase: str, name: str, now_ps: int = 0, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "name": name, "ts": now_ps / 1e6, **fields}


def _kernel_args(graph: Graph, k: int, kernel: Kernel) -> dict[str, Any]:
    spec, cost = kernel.spec, kernel.cost
    return {
        "kernel": k,
        "operations": " ".join(graph.nodes[n].op for n in spec.nodes),
        "makes": makes(graph, spec),
        "backend": spec.backend,
        "grid": grid(spec),
        "tile": tile(spec),
        "bound_by": cost.bound_by,
        **{f"{name}_us": ps / 1e6 for name, ps in cost.parts_ps.items()},
        "hbm_read_bytes": cost.hbm_read_bytes,
        "hbm_write_bytes": cost.hbm_write_bytes,
        "onchip_bytes": cost.onchip_bytes,
        "flops": cost.flops.total,
        "source": anchor(graph, spec.nodes).source,
    }


# --- Graphviz --------------------------------------------------------------------------------


def dot_text(plan: FusionPlan) -> str:
    """See ``Plan.to_dot``."""
    import graphviz  # imported on use: it is of no use to plans

    graph = plan.graph
    drawn = graphviz.Digraph(
        graph_attr={"label": graphviz.escape(_heading(plan)), "labelloc": "t", "compound": "true"},
        node_attr={"shape": "box", "fontname": "Helvetica", "fontsize": "10"},
        edge_attr={"fontname": "Helvetica", "fontsize": "9"},
    )
    for v in graph.inputs:
        drawn.node(f"v{v}", graphviz.escape(f"v{v} {graph.values[v]}"), shape="ellipse")
    kernel_of: dict[int, int] = {}
    for k, kernel in enumerate(plan.kernels):
        kernel_of |= dict.fromkeys(kernel.spec.nodes, k)
        label = f"{k} {_name(plan, k)}, {time_text(kernel.cost.time_us)} µs, {kernel.cost.bound_by}"
        with drawn.subgraph(name=f"cluster_{k}") as cluster:
            cluster.attr(label=graphviz.escape(label), style="rounded", fontname="Helvetica", fontsize="11")
            for n in kernel.spec.nodes:
                cluster.node(f"n{n}", graphviz.escape(_node_label(graph, graph.nodes[n])))
    for node in graph.nodes:
        for v in dict.fromkeys(node.inputs):
            producer = graph.values[v].producer
            if producer >= 0 and kernel_of[producer] == kernel_of[node.id]:
                drawn.edge(f"n{producer}", f"n{node.id}", color="gray")  # stays on chip
            else:
                moved = bytes_text(graph.values[v].nbytes)
                drawn.edge(_producer_id(graph, v), f"n{node.id}", graphviz.escape(moved))
    for i, v in enumerate(graph.outputs):
        drawn.node(f"out{i}", graphviz.escape(f"result {i} {graph.values[v]}"), shape="ellipse")
        drawn.edge(_producer_id(graph, v), f"out{i}", graphviz.escape(bytes_text(graph.values[v].nbytes)))
    return drawn.source


def _heading(plan: FusionPlan) -> str:
    return (
        f"{_title(plan)}: {counted(len(plan.kernels), 'kernel')}, {time_text(plan.objective_us)} µs "
        f"modelled, {status_text(plan)}"
    )


def _node_label(graph: Graph, node: Node) -> str:
    made = ", ".join(str(graph.values[v]) for v in node.outputs)
    return f"n{node.id} {node.op} {made}".strip()
