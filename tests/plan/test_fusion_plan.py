"""Plans as values: text, frames, explanations, and JSON that is checked when it is read."""

import copy
import json
import random
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel.calibrate import described_cpu
from costmodel.devices import TEST_DEVICE
from costmodel.kernel import Axis, AxisRole, KernelSpec
from costmodel.memory import peak_bytes
from fuseplan import InvalidArgumentError, InvalidPlanError, Plan
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.json_codec import FORMAT, VERSION
from fuseplan.plan.options import Options
from fuseplan.report.debug import report_plan
from fuseplan.report.explain import Explainer, borders
from fuseplan.report.text import kernel_name, loops_line, skipped, unfused_plan
from fuseplan.support.format import bytes_text, columns, seconds_text, time_text
from tests.helpers.graphs import GraphBuilder
from tests.helpers.plans import plan_lowered


def mlp(x, w1, w2):
    return jax.nn.softmax(jnp.tanh(x @ w1) @ w2)


ARGS = (
    jax.ShapeDtypeStruct((256, 128), "float32"),
    jax.ShapeDtypeStruct((128, 512), "float32"),
    jax.ShapeDtypeStruct((512, 384), "float32"),
)


def make(planner="solver", device="test", f=mlp, args=ARGS):
    return fuseplan.make_plan(f, device=device, planner=planner)(*args)


@pytest.fixture(scope="module")
def plan():
    return make()


@pytest.fixture(scope="module")
def apart():
    return make("unfused")


def plan_graph(graph, planner="solver"):
    lowered = Lowered(graph, (), (), (), (), None)
    return plan_lowered(lowered, Options(TEST_DEVICE, planner))[1]


def layers(n):
    """``n`` equal layers: a product, then a tanh; nothing else."""

    def f(x, ws):
        for w in ws:
            x = jnp.sort(jnp.tanh(x @ w), axis=-1)
        return x

    x = jax.ShapeDtypeStruct((128, 128), "float32")
    return make(f=f, args=(x, [x] * n))


# --- numbers ---------------------------------------------------------------------------------


def test_totals_are_the_sums_of_the_kernels(plan):
    assert plan.objective_us == pytest.approx(sum(k.cost.time_us for k in plan.kernels))
    assert plan.peak_bytes == peak_bytes(plan.graph, [k.spec for k in plan.kernels])
    assert plan.planning_s == sum(s for _, s in plan.stats.seconds) > 0
    frame = plan.to_frame()
    assert frame.time_us.sum() == pytest.approx(plan.objective_us)
    assert frame.hbm_bytes.sum() == plan.hbm_bytes
    assert frame.n_ops.sum() == len(plan.graph.nodes)


def test_peak_bytes_by_hand():
    b = GraphBuilder()
    x = b.input((1024,))
    y = b.opaque(x, shape=(1024,))
    z = b.opaque(y, shape=(512,))
    graph = b.build(b.opaque(z, shape=(16,)))
    assert plan_graph(graph).peak_bytes == 4 * (1024 + 512)  # y and z while z is made


def test_frame_has_a_row_for_each_kernel(plan):
    frame = plan.to_frame()
    assert list(frame.kernel) == list(range(len(plan.kernels)))
    documented = Plan.to_frame.__doc__.replace("``", "").replace("(flops per HBM byte)", "")
    assert [c for c in frame.columns if c not in documented] == []
    assert list(frame.columns[:4]) == ["kernel", "name", "ops", "n_ops"]
    assert all("test_fusion_plan.py" in source for source in frame.source)
    assert frame.roofline.between(0, 1).all()
    product = frame[frame.ops == "dot_general"].iloc[0]
    assert product.flops == 2 * 256 * 512 * 384
    assert product.intensity == product.flops / product.hbm_bytes


def test_a_function_of_nothing_still_has_a_plan():
    plan = make(f=lambda x: x, args=(ARGS[0],))
    assert plan.kernels == ()
    assert plan.to_frame().empty
    assert "0 operations" in plan.summary()
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan)
    assert plan._repr_html_()


# --- text ------------------------------------------------------------------------------------


def test_table_names_every_kernel_in_80_columns(plan, apart):
    for p in (plan, apart):
        lines = str(p).splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) == len(p.kernels) + 3 + len(p.notes)
        assert lines[2].split() == ["kernel", "ops", "makes", "grid", "µs", "bound", "MB"]
    assert "f32[256,384]" in str(plan)
    assert "proven optimal" in str(plan)
    assert "no bound" in str(apart)


def test_equal_kernels_of_a_long_plan_share_a_line():
    plan = layers(24)
    assert len(plan.kernels) > 40
    text = str(plan)
    assert len(text.splitlines()) < 12
    assert "Equal kernels share a line" in text
    assert sum("24" in line.split() for line in text.splitlines()) >= 2
    assert max(map(len, text.splitlines())) <= 80


def test_names_are_of_what_a_kernel_is_about(plan):
    names = {kernel_name(plan.graph, k.spec.nodes) for k in plan.kernels}
    assert any("matmul" in name for name in names)
    assert not any(name == "dot_general" or "reduce_max…" in name for name in names)


def test_summary_compares_with_the_unfused_plan(plan, apart):
    text = plan.summary()
    assert unfused_plan(plan).kernels == apart.kernels
    assert f"unfused {time_text(apart.objective_us)} µs" in text
    assert f"({apart.objective_us / plan.objective_us:.2f}× faster)" in text
    assert "proven optimal" in text
    assert "trace" in text
    assert max(map(len, text.splitlines())) <= 80


def test_summary_says_how_far_from_the_bound_and_why(plan):
    worse = replace(plan, status="FEASIBLE", bound_ps=plan.objective_ps * 9 // 10, notes=("out of time",))
    assert "at most 1.12 times the bound of" in worse.summary()
    assert "note     out of time" in worse.summary()
    assert max(map(len, str(replace(worse, planner="a_planner_of_a_long_name")).splitlines())) <= 80
    assert "note: out of time" in str(worse)


def test_a_notebook_gets_escaped_html(plan):
    html = replace(plan, notes=("<script>",))._repr_html_()
    assert "<script>" not in html
    assert html.count("<tr>") == min(len(plan.kernels), 10) + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (58_300_000, "58.3 MB"), (5e12, "5000.0 GB")],
)
def test_bytes_text(value, text):
    assert bytes_text(value) == text


def test_numbers_keep_their_digits():
    assert [time_text(v) for v in (0, 0.42, 12.3, 363.49, 1204)] == [
        "0.00",
        "0.42",
        "12.30",
        "363.5",
        "1,204",
    ]
    assert [seconds_text(v) for v in (0.003, 0.51, 12.2)] == ["3 ms", "0.51 s", "12 s"]


def test_columns_cut_words_but_never_numbers():
    lines = columns([("a", "1" * 30), ("b" * 90, "2")], right=(1,), limit=80)
    assert {len(line) for line in lines} == {80}
    assert lines[0].endswith("1" * 30)
    assert "…" in lines[1]


# --- explain ---------------------------------------------------------------------------------


def test_apart_because_a_rule_forbids_it(plan):
    products = [n.id for n in plan.graph.nodes if n.op == "dot_general"]
    answer = plan.explain(*products)
    assert not answer.together
    assert answer.verdict.rule == "shapes"
    assert answer.extra_us is None
    assert "One kernel is impossible (shapes:" in str(answer)


def test_together_and_what_a_cut_would_cost(plan):
    answer = plan.explain("reduce_max", "sub")
    assert answer.together
    assert answer.kernels[0] == answer.kernels[1]
    assert answer.extra_ps > 0
    assert sorted(n for g in answer.forced for n in g) == list(plan.kernels[answer.kernels[0]].spec.nodes)
    assert "on chip" in str(answer)


def test_apart_although_it_is_possible(apart):
    answer = apart.explain("reduce_max", "sub")
    assert not answer.together
    assert answer.verdict is None
    assert answer.extra_ps < 0
    assert "save" in str(answer)
    assert "'unfused' did not find it" in str(answer)


@pytest.mark.parametrize("planner", ["solver", "unfused", "greedy"])
def test_every_pair_has_an_answer_that_adds_up(planner):
    def f(x, w):
        y = jnp.exp(x @ w)
        return y / y.sum(-1, keepdims=True), jnp.sort(x, axis=0) + x

    x = jax.ShapeDtypeStruct((128, 128), "float32")
    plan = make(planner, f=f, args=(x, x))
    explainer = Explainer(plan)
    count = len(plan.graph.nodes)
    for a in range(count):
        for b in range(count):
            answer = explainer.explain(a, b)
            assert answer.together == (answer.kernels[0] == answer.kernels[1])
            if plan.status == "OPTIMAL" and answer.extra_ps is not None:
                assert answer.extra_ps >= 0, answer
            if not answer.together:
                assert (answer.verdict is None) == (answer.extra_ps is not None)
            if not answer.together and answer.verdict is None:
                assert any(a in g and b in g for g in answer.forced)


def test_what_lies_between_is_named():
    def f(x):
        return jnp.exp(jnp.sort(jnp.tanh(x)))

    plan = make(f=f, args=(jax.ShapeDtypeStruct((4096,), "float32"),))
    text = str(plan.explain("tanh", "exp"))
    assert "impossible (opaque: sort" in text
    assert "Between them: n1 sort" in text


def test_unrelated_operations_have_no_kernel_together():
    def f(x, y):
        return jnp.tanh(x), jnp.exp(y)

    a = jax.ShapeDtypeStruct((64,), "float32")
    answer = make(f=f, args=(a, a)).explain("tanh", "exp")
    assert answer.verdict.rule == "producer-consumer"


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (0, 999, "expected a node from 0 to"),
        (-1, 0, "expected a node from 0 to"),
        (0, "gemm", "no operation of this plan is called 'gemm'; there are .*dot_general"),
        ("dot_general", 0, "2 nodes are called 'dot_general': n0 .*Pass a node's id"),
        (0, 1.5, "got float"),
        (True, 0, "got bool"),
    ],
)
def test_names_that_do_not_single_out_a_node(plan, a, b, message):
    with pytest.raises(InvalidArgumentError, match=message):
        plan.explain(a, b)


def test_an_edge_singles_out_one_of_two_nodes(plan):
    first = next(n.id for n in plan.graph.nodes if n.op == "dot_general")
    tanh = next(n.id for n in plan.graph.nodes if n.op == "tanh")
    narrow = make(f=lambda x, w: jnp.tanh(x @ w) @ w.T, args=(ARGS[0], ARGS[1]))
    assert narrow.explain(f"n{first}", tanh).a == first


def test_borders_name_every_kernel_that_reads(plan):
    for k, of_one in enumerate(borders(plan)):
        readers = {
            j
            for j, other in enumerate(plan.kernels)
            for read in other.spec.reads
            if read.value in {w.value for w in plan.kernels[k].spec.writes}
        }
        assert {c for border in of_one for c in border.consumers} == readers
        assert all(border.reason for border in of_one)


# --- JSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", ["unfused", "greedy", "solver"])
@pytest.mark.parametrize("device", ["test", "tpu_v5e", "h200"])
def test_round_trip(planner, device):
    plan = make(planner, device)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()


def test_every_field_is_written(plan):
    document = json.loads(plan.to_json())
    assert document["format"] == FORMAT
    assert document["version"] == VERSION
    assert document["plan"].keys() == {f.name for f in fields(Plan)} - {"program"}
    assert document["program"]["equations"], "stands beside the plan"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", '"format": "fuseplan.plan"'),
        ("{}", '"format": "fuseplan.plan"'),
        ("NaN", "NaN is not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"format": "fuseplan.plan", "version": 99}', "schema version 99, this fuseplan reads 3"),
        ('{"format": "fuseplan.plan", "version": 3}', "plan: expected an object"),
        (b"{}", "expected a plan as JSON text, got bytes"),
    ],
)
def test_what_is_no_plan(text, message):
    with pytest.raises(InvalidPlanError, match=message):
        Plan.from_json(text)


def edited(plan, edit):
    document = json.loads(plan.to_json())
    edit(document["plan"])
    return json.dumps(document)


MUTATIONS = {
    "a missing field": (lambda p: p.pop("kernels"), "the field 'kernels' of FusionPlan is missing"),
    "an unknown field": (lambda p: p.update(colour=1), "Plan has no field 'colour'"),
    "a wrong type": (lambda p: p["kernels"][0]["cost"].update(launch_ps="2"), r"kernels\[0\].cost.launch_ps"),
    "a bool for an int": (lambda p: p["device"].update(core_count=True), "core_count: expected an integer"),
    "an unknown kind": (lambda p: p["graph"]["nodes"][0].update(kind="magic"), "expected one of elementwise"),
    "an object for a list": (lambda p: p.update(kernels={}), "plan.kernels: expected a list"),
    "a value out of range": (lambda p: p["graph"].update(outputs=[999]), r"graph.outputs: expected one of"),
    "a negative id": (lambda p: p["graph"]["nodes"][1].update(inputs=[-1]), "got -1"),
    "a rate of zero": (
        lambda p: p["device"].update(hbm_bytes_per_s=0),
        "plan.device.hbm_bytes_per_s: expected an integer from 1,000,000 .* got 0",
    ),
    "a lost kernel": (lambda p: p["kernels"].pop(), "computed by no kernel"),
    "a kernel twice": (lambda p: p["kernels"].append(p["kernels"][0]), "more than one kernel"),
    "another order": (lambda p: p["kernels"].reverse(), "makes only later"),
    "a cheaper cost": (lambda p: p["kernels"][0]["cost"].update(launch_ps=1), "claims .* but costs"),
    "a false bound": (lambda p: p.update(bound_ps=p["bound_ps"] + 1), "bound"),
    "a false proof": (lambda p: p.update(bound_ps=None), "an OPTIMAL plan"),
    "a status of one's own": (lambda p: p.update(status="PERFECT"), "OPTIMAL or FEASIBLE"),
    "a false consumer": (lambda p: p["graph"]["consumers"].__setitem__(0, []), "consumers do not match"),
    "too few consumers": (lambda p: p["graph"]["consumers"].pop(), "consumers"),
    "a null": (lambda p: p.update(graph=None), "plan.graph: expected an object"),
    "not a number": (
        lambda p: p["stats"].update(seconds=[["solve", "x"]]),
        r"seconds\[0\]\[1\]: expected a number",
    ),
    "half a pair": (lambda p: p["stats"].update(seconds=[["solve"]]), r"seconds\[0\]: expected a list of 2"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_plan_that_was_edited_is_refused_with_the_reason(plan, name):
    edit, message = MUTATIONS[name]
    with pytest.raises(InvalidPlanError, match=message):
        Plan.from_json(edited(plan, edit))


def test_a_huge_number_is_refused():
    text = edited(make(), lambda p: p["stats"].update(seconds=[["solve", 10**400]]))
    with pytest.raises(InvalidPlanError, match="finite number"):
        Plan.from_json(text)


def leaves(node, path=()):
    """Every place of a document, containers too."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield from leaves(child, (*path, key))


WRONG = (None, -1, 0, 1, 7, 10**30, 1.5, True, "", "float32", "n0", [], [0], [[]], {}, [None], {"id": 0})


@pytest.mark.slow
@pytest.mark.one_python
def test_no_edit_of_one_place_leads_to_another_error(plan):
    document = json.loads(plan.to_json())
    places = [p for p in leaves(document["plan"], ("plan",)) if len(p) > 1]
    places += [p for p in leaves(document["program"], ("program",)) if len(p) > 1]
    rng = random.Random(0)
    refused = 0
    for _ in range(1500):
        changed = copy.deepcopy(document)
        *path, last = rng.choice(places)
        target = changed
        for key in path:
            target = target[key]
        if rng.random() < 0.3:
            del target[last]
        else:
            target[last] = rng.choice(WRONG)
        try:
            Plan.from_json(json.dumps(changed))
        except InvalidPlanError:  # any other error fails the test
            refused += 1
    assert refused > 1000


# --- loop nests ------------------------------------------------------------------------------


def causal(q, k, v):
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 8
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
    return jnp.sin(jax.nn.softmax(jnp.where(mask, scores, -1e30)) @ v).sort(-1)


HEADS = (jax.ShapeDtypeStruct((8, 2048, 64), "float32"),) * 3


@pytest.fixture(scope="module")
def nest_plan():
    cpu = replace(described_cpu(), core_count=2, private_cache_bytes=4 << 20, cache_bytes=32 << 20)
    plan = make(device=cpu, f=causal, args=HEADS)
    assert [k.spec.backend for k in plan.kernels].count("loops") == 1
    return plan


def nest_of(plan):
    """The loop nest of a plan, as a dataclass or as JSON."""
    kernels = plan.kernels if isinstance(plan, Plan) else plan["kernels"]
    specs = [k.spec if isinstance(plan, Plan) else k["spec"] for k in kernels]
    return next(s for s in specs if (s.backend if isinstance(plan, Plan) else s["backend"]) == "loops")


def test_the_table_tells_how_a_nest_is_tiled_and_what_it_skips(nest_plan):
    spec = nest_of(nest_plan)
    lines = str(nest_plan).splitlines()
    assert max(map(len, lines)) <= 80
    cut = [axis for axis in spec.axes if axis.n_tiles > 1]
    shown = " × ".join(f"{axis.tile} of {axis.size}" for axis in cut)
    assert any(f"loops over tiles of {shown}" in line for line in lines)
    assert f" {'×'.join(str(axis.n_tiles) for axis in cut)} " in str(nest_plan)
    assert f"{skipped(spec)} skipped" in str(nest_plan)
    assert any("attention" in line for line in lines)


def test_skipped_tiles_are_those_of_passes_that_walk():
    axes = (Axis(64, AxisRole.PARALLEL, 8), Axis(100, AxisRole.STREAMED, 10))
    passes, visits = ((0,), (), (1,)), (60, 80, 80)
    spec = KernelSpec((0, 1), axes, (), (), (), backend="loops", passes=passes, tiles_visited=visits)
    assert skipped(spec) == "20 of 160"
    assert loops_line(spec) == "loops over tiles of 8 of 64 × 10 of 100, in 2 passes, 20 of 160 skipped"
    assert "in 2 passes that keep products, 20" in loops_line(replace(spec, keeps=True))
    for nothing in (replace(spec, tiles_visited=()), replace(spec, tiles_visited=(80, 1, 80))):
        assert skipped(nothing) == ""
        assert loops_line(nothing).endswith("in 2 passes")


def test_the_summary_of_a_nest_and_its_notebook_table(nest_plan):
    text = nest_plan.summary()
    assert max(map(len, text.splitlines())) <= 80
    assert "× faster)" in text
    assert "attention" in nest_plan._repr_html_()


def test_the_frame_of_a_nest(nest_plan):
    frame = nest_plan.to_frame()
    row = frame[frame.backend == "loops"].iloc[0]
    assert " of 2048" in row.tile
    assert row.grid == "×".join(str(a.n_tiles) for a in nest_of(nest_plan).axes if a.n_tiles > 1)
    assert row.skipped == skipped(nest_of(nest_plan)) != ""
    assert set(frame[frame.backend == "xla"].skipped) <= {""}
    assert 0 < row.roofline <= 1


def test_the_page_of_a_nest(nest_plan, tmp_path):
    nest_plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "attention" in page
    assert f'"{skipped(nest_of(nest_plan))}"' in page  # of the data, to which the page adds the word


def test_a_nest_is_explained_by_what_smaller_nests_would_cost(nest_plan):
    first, last = (n.id for n in nest_plan.graph.nodes if n.op == "dot_general")
    answer = nest_plan.explain(first, last)
    assert answer.together
    assert answer.extra_ps > 0
    assert len(answer.forced) < len(nest_of(nest_plan).nodes) // 2  # not operation by operation
    assert answer.extra_hbm_bytes >= 2 * 4 * 8 * 2048 * 2048
    assert "priced without skipping" not in str(answer)
    from_file = fuseplan.Plan.from_json(nest_plan.to_json())
    assert from_file.explain(first, last).extra_ps == answer.extra_ps
    outside = nest_plan.explain(last, "sort")
    assert "impossible (opaque: sort" in str(outside)


def test_groups_apart_may_share_a_nest():
    cpu = replace(described_cpu(), core_count=2, private_cache_bytes=4 << 20, cache_bytes=32 << 20)
    plan = make("unfused", device=cpu, f=causal, args=HEADS)
    answer = plan.explain(*(n.id for n in plan.graph.nodes if n.op == "dot_general"))
    assert not answer.together
    assert answer.verdict is None
    assert answer.extra_ps < 0
    assert answer.extra_hbm_bytes < 0


def test_every_debug_level_prints_a_nest(nest_plan, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FUSEPLAN_DUMP", str(tmp_path))
    printed = []
    for level in range(5):
        monkeypatch.setenv("FUSEPLAN_DEBUG", str(level))
        report_plan(nest_plan)
        printed.append(capsys.readouterr().err)
    assert printed[0] == ""
    assert all(map(str.startswith, printed[2:], printed[1:]))
    assert "loops over tiles of" in printed[3]
    (kept,) = tmp_path.iterdir()
    assert Plan.from_json(kept.read_text()).kernels == nest_plan.kernels


def test_a_nest_round_trips(nest_plan):
    again = Plan.from_json(nest_plan.to_json())
    assert again == nest_plan
    assert nest_of(again).tiles_visited == nest_of(nest_plan).tiles_visited != ()
    assert again.to_json() == nest_plan.to_json()


def test_a_renamed_field_is_read_by_its_former_name(nest_plan):
    text = nest_plan.to_json()
    assert '"tiles_visited"' in text
    assert Plan.from_json(text.replace('"tiles_visited"', '"walked"')) == nest_plan


NEST_MUTATIONS = {
    "a position that is none": (
        lambda p: nest_of(p)["passes"][0].append(99), r"passes\[0\]: expected one of .* positions",
    ),
    "a negative position": (lambda p: nest_of(p)["passes"][0].append(-1), r"passes\[0\]: .* got -1"),
    "a pass less": (lambda p: nest_of(p).update(passes=[]), "only a loop nest skips tiles"),
    "another pass": (lambda p: nest_of(p)["passes"][0].pop(), "claims passes"),
    "no tiles visited": (lambda p: nest_of(p).update(tiles_visited=[0]), "expected at least 1, got 0"),
    "fewer tiles visited": (
        lambda p: nest_of(p).update(tiles_visited=[1] * len(nest_of(p)["passes"])), "claims .* but costs",
    ),
    "more tiles than there are": (
        lambda p: nest_of(p).update(tiles_visited=[10**6] * len(nest_of(p)["passes"])), "claims to visit",
    ),
    "visits of another pass": (lambda p: nest_of(p)["tiles_visited"].append(1), "claims to visit"),
    "another tile": (lambda p: nest_of(p)["axes"][0].update(tile=7), "claims"),
    "a tile of nothing": (lambda p: nest_of(p)["axes"][0].update(tile=0), "tile: expected at least 1"),
    "no axes": (
        lambda p: nest_of(p).update(axes=[], node_axes=[[[] for _ in d] for d in nest_of(p)["node_axes"]],
                                    reads=[], writes=[]),
        "axes: expected the axes of a loop nest",
    ),
    "passes of no nest": (lambda p: nest_of(p).update(backend="xla"), "none of a kernel that streams"),
    "what no nest keeps": (
        lambda p: next(k for k in p["kernels"] if k["spec"]["backend"] == "xla")["spec"].update(keeps=True),
        "only a loop nest skips tiles",
    ),
    "a cache of no speed": (
        lambda p: p["device"].update(cache_bytes_per_s=0), "device.cache_bytes_per_s: expected a rate above",
    ),
    "cores' caches of no speed": (
        lambda p: p["device"].update(private_cache_bytes_per_s=0),
        "private_cache_bytes_per_s: expected a rate above 0 beside .* got 0",
    ),
    "fresh memory that saves time": (
        lambda p: p["device"].update(fresh_bytes_per_s=-1), "fresh_bytes_per_s: expected an integer from",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEST_MUTATIONS)
def test_a_nest_that_was_edited_is_refused_with_the_reason(nest_plan, name):
    edit, message = NEST_MUTATIONS[name]
    with pytest.raises(InvalidPlanError, match=message):
        Plan.from_json(edited(nest_plan, edit))
