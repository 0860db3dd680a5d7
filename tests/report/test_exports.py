"""Files for other tools: valid in their formats, and the plan that they show."""

import html
import json
import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan.memory.liveness import live_ranges, profile
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.exports import BY_KERNEL, BY_SCOPE
from fuseplan.support.atomic_file import OutputError
from fuseplan.support.errors import InvalidArgumentError

X = jax.ShapeDtypeStruct((512, 256), "float32")


def program(x, y):
    with jax.named_scope('odd "name" \\ <b>&</b>'):
        a = jnp.exp(x - x.max(-1, keepdims=True))
    with jax.named_scope("block/attention"):
        b = a / a.sum(-1, keepdims=True)
    return jnp.sort(b, axis=0), b.T @ y, x


@pytest.fixture(scope="module")
def plan():
    return fuseplan.make_plan(program, device="h200")(X, X)


# --- Model Explorer --------------------------------------------------------------------------

FIELDS = {
    "graph": {"id": str, "nodes": list, "groupNodeAttributes": dict},
    "node": {
        "id": str,
        "label": str,
        "namespace": str,
        "attrs": list,
        "incomingEdges": list,
        "outputsMetadata": list,
    },
    "edge": {"sourceNodeId": str, "sourceNodeOutputId": str, "targetNodeInputId": str},
    "metadata": {"id": str, "attrs": list},
    "attribute": {"key": str, "value": str},
}
"""The fields of Model Explorer's ``graph_builder``, with their types."""


def check(kind, found):
    assert {name: type(value) for name, value in found.items()} == FIELDS[kind]


@pytest.fixture(scope="module")
def explorer(plan, tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    plan.to_model_explorer(folder / "plan.json", folder / "times.json")
    return json.loads((folder / "plan.json").read_text()), json.loads((folder / "times.json").read_text())


def test_model_explorer_gets_graphs_in_its_format(explorer):
    collection, _ = explorer
    assert set(collection) == {"label", "graphs"}
    assert [graph["id"] for graph in collection["graphs"]] == [BY_KERNEL, BY_SCOPE]
    for graph in collection["graphs"]:
        check("graph", graph)
        ids = {node["id"] for node in graph["nodes"]}
        assert len(ids) == len(graph["nodes"])
        outputs = {node["id"]: {item["id"] for item in node["outputsMetadata"]} for node in graph["nodes"]}
        for node in graph["nodes"]:
            check("node", node)
            for edge in node["incomingEdges"]:
                check("edge", edge)
                assert edge["sourceNodeOutputId"] in outputs[edge["sourceNodeId"]]
            for item in node["outputsMetadata"]:
                check("metadata", item)
            for attribute in [
                *node["attrs"],
                *(a for item in node["outputsMetadata"] for a in item["attrs"]),
            ]:
                check("attribute", attribute)
        namespaces = {node["namespace"] for node in graph["nodes"]}
        for name, attributes in graph["groupNodeAttributes"].items():
            assert name == "" or name in namespaces
            assert all(isinstance(text, str) for text in attributes.values())


def test_model_explorer_gets_every_operation_once_in_its_kernel_and_scope(plan, explorer):
    by_kernel, by_scope = ({n["id"]: n for n in graph["nodes"]} for graph in explorer[0]["graphs"])
    for k, kernel in enumerate(plan.kernels):
        for n in kernel.spec.nodes:
            assert by_kernel[f"n{n}"]["namespace"].startswith(f"kernel {k} ")
            assert "/" not in by_kernel[f"n{n}"]["namespace"]
            assert by_scope[f"n{n}"]["namespace"] == plan.graph.nodes[n].scope
    edges = sum(len(node["incomingEdges"]) for node in by_kernel.values())
    assert edges == sum(len(node.inputs) for node in plan.graph.nodes) + len(plan.graph.outputs)


def test_times_of_model_explorer_add_up_to_the_plans(plan, explorer):
    graphs, times = explorer
    assert set(times) == {graph["id"] for graph in graphs["graphs"]}
    for graph in graphs["graphs"]:
        data = times[graph["id"]]
        assert set(data["results"]) <= {node["id"] for node in graph["nodes"]}
        assert sum(r["value"] for r in data["results"].values()) == pytest.approx(plan.objective_us)
        assert [stop["stop"] for stop in data["gradient"]] == [0, 1]


# --- Perfetto --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    plan.to_perfetto(path)
    document = json.loads(path.read_text())
    assert document["otherData"]["times"] == "modelled, not measured"
    return document["traceEvents"]


def test_a_trace_has_a_slice_for_each_kernel_without_gaps(plan, events):
    slices = [event for event in events if event["ph"] == "X"]
    timed = [k for k, kernel in enumerate(plan.kernels) if kernel.cost.time_ps]
    assert [event["args"]["kernel"] for event in slices] == timed
    end = 0.0
    for event in slices:
        assert event["ts"] == pytest.approx(end)
        end = event["ts"] + event["dur"]
        cost = plan.kernels[event["args"]["kernel"]].cost
        parts = [v for name, v in event["args"].items() if name.endswith("_us")]
        assert sum(parts) == pytest.approx(event["dur"]) == pytest.approx(cost.time_us)
        assert event["args"]["hbm_read_bytes"] + event["args"]["hbm_write_bytes"] == cost.hbm_bytes
    assert end == pytest.approx(plan.objective_us)
    assert {event["name"] for event in events if event["ph"] == "M"} == {"process_name", "thread_name"}


def test_a_trace_counts_live_temporaries(plan, events):
    counts = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "live temporaries"]
    assert counts[:-1] == profile(live_ranges(plan.graph, plan.kernels), range(len(plan.kernels)))
    assert max(counts) == plan.peak_bytes > 0
    assert counts[-1] == 0


# --- Graphviz --------------------------------------------------------------------------------


def test_dot_has_a_cluster_for_each_kernel_and_escapes_names(plan):
    text = plan.to_dot()
    assert len(re.findall(r"subgraph cluster_\d+ {", text)) == len(plan.kernels)
    for node in plan.graph.nodes:
        assert re.search(rf"\n\t\tn{node.id} \[label=", text)
    unescaped = re.sub(r"\\.", "", text)
    assert unescaped.count('"') % 2 == 0
    assert text.count("{") == text.count("}")


def test_dot_is_read_by_graphviz():
    if shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed")

    def odd(x):
        with jax.named_scope('odd "name" \\ <b>&</b>'):
            return jnp.exp(x - x.max(-1, keepdims=True))

    plan = fuseplan.make_plan(odd, device="h200")(X)
    done = subprocess.run(["dot", "-Tsvg"], input=plan.to_dot(), capture_output=True, text=True, check=True)
    labels = [html.unescape(label) for label in re.findall(r"<text [^>]*>([^<]*)</text>", done.stdout)]
    (kernel,) = plan.kernels
    name = kernel_name(plan.graph, kernel.spec.nodes)
    assert any(label.startswith(f"0 {name}, ") for label in labels), labels
    assert {f"n{node.id} {node.op} " for node in plan.graph.nodes} <= {
        f"{' '.join(label.split()[:2])} " for label in labels
    }


def test_a_plan_of_nothing_has_files_too(tmp_path):
    plan = fuseplan.make_plan(lambda x: x, device="h200")(X)
    plan.to_model_explorer(tmp_path / "plan.json", tmp_path / "times.json")
    plan.to_perfetto(tmp_path / "trace.json")
    assert "digraph" in plan.to_dot()
    assert json.loads((tmp_path / "times.json").read_text())[BY_KERNEL]["results"] == {}


@pytest.mark.parametrize("method", ["to_model_explorer", "to_perfetto", "to_svg"])
def test_a_file_that_cannot_be_written_is_an_error(plan, tmp_path, method):
    with pytest.raises(OutputError):
        getattr(plan, method)(tmp_path / "missing" / "file")
    if method == "to_model_explorer":
        with pytest.raises(OutputError):
            plan.to_model_explorer(tmp_path / "plan.json", tmp_path)
        assert not (tmp_path / "plan.json").exists(), "a half of two files was written"


def test_two_files_in_one_place_are_refused(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match="expected two files"):
        plan.to_model_explorer(tmp_path / "plan.json", "plan.json")
    assert not (tmp_path / "plan.json").exists()
