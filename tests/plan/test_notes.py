"""Notes of plans: each kind has a wording, and the numbers of nodes follow a change of graph."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from fuseplan import Constraints, Features, planners
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.notes import Note, NoteKind, limit_reached, note, renumbered, worded
from fuseplan.planners import solver
from fuseplan.support.work import Limit

NUMBERS = {
    "count", "most", "guards", "matched", "percent", "deadline_s", "limit_bytes", "fastest_bytes",
    "least_ps", "time_ps", "floor_ps", "moved_bytes", "on_chip_bytes", "peak_bytes", "most_bytes",
    "needed_bytes", "room_bytes", "with_ps", "without_ps",
}  # fmt: skip


def example(kind):
    """A note of a kind, whose figures are plain numbers and words."""
    names = set(re.findall(r"{(\w+)", kind.value))
    figures = {name: 1234567 if name in NUMBERS else f"some {name}" for name in sorted(names)}
    figures |= {"limit": Limit.WORK} if "limit" in names else {}
    figures |= {"node": 3} if "node" in names else {}
    return note(kind, **figures)


@pytest.mark.parametrize("kind", NoteKind)
def test_each_kind_has_a_wording_and_keeps_its_data(kind):
    made = example(kind)
    text = str(made)
    assert not set("{}") & set(text)
    assert all(str(value) in text for name, value in made.figures if name not in NUMBERS)
    assert text.startswith("the limit of counted work came before ") == (made.limit is not None)
    assert ("n3" in text) == (made.node is not None)
    assert Note.from_data(json.loads(json.dumps(made.to_data()))) == made


def test_a_note_has_the_figures_of_its_wording():
    assert str(note(NoteKind.SCALAR_SPLIT, most=4, least_ps=10**6)).startswith(
        "a scalar that ties more than 4 "
    )
    for figures in (
        {},
        {"most": 1},
        {"most": 1, "least_ps": 1, "node": 1},
        {"most": 1, "least_ps": 1, "more": 1},
    ):
        with pytest.raises(ValueError, match="SCALAR_SPLIT expects least_ps, most"):
            note(NoteKind.SCALAR_SPLIT, **figures)


def test_renumbered_notes_name_the_nodes_of_the_other_graph():
    graph = lower(trace(lambda x: jnp.tanh(jnp.exp(x) * 2.0), jnp.ones((4, 4)))).graph
    ops = [node.op for node in graph.nodes]
    notes = (
        note(NoteKind.CYCLIC, count=2, node=10),
        "n10, in a planner's own words",
        example(NoteKind.SCALAR_SPLIT),
    )
    moved = renumbered(notes, {10: ops.index("tanh")}.__getitem__)
    assert f"from tanh (n{ops.index('tanh')}) on" in worded(moved, graph)[0]
    assert moved[1:] == notes[1:]


def test_the_deadline_counts_for_more_than_counted_work():
    spent, late = (note(NoteKind.SEARCH_CUT, limit=limit) for limit in (Limit.WORK, Limit.DEADLINE))
    assert (
        limit_reached([])
        is limit_reached([example(NoteKind.SCALAR_SPLIT), "the deadline came before"])
        is None
    )
    assert (limit_reached([spent]), limit_reached([spent, late])) == (Limit.WORK, Limit.DEADLINE)


def layers(x, ws):
    for a, b in ws:
        x = x + jax.nn.gelu(x @ a) @ b
    return (x**2).sum()


WEIGHTS = [tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((256, 1024), (1024, 256)))] * 2
SHAPES = (jax.ShapeDtypeStruct((2048, 256), "float32"), WEIGHTS)


@pytest.fixture
def tanh_noted(monkeypatch):
    """The solver, with a note about the last ``tanh``."""

    def plan_groups(graph, pricing, budget):
        grouping = solver.plan_groups(graph, pricing, budget)
        last = max(node.id for node in graph.nodes if node.op == "tanh")
        return replace(grouping, notes=(*grouping.notes, note(NoteKind.CYCLIC, count=1, node=last)))

    monkeypatch.setattr(planners, "_PLANNERS", dict(planners._PLANNERS))
    fuseplan.register_planner("tanh_noted", plan_groups)
    return "tanh_noted"


def assert_tanh_noted(plan):
    told = [
        found[1]
        for text in plan.notes
        if (found := re.search(r"plans found of 1 operations from (.*) on", text))
    ]
    assert set(told) <= {f"tanh (n{node.id})" for node in plan.graph.nodes if node.op == "tanh"}
    assert told


def test_a_note_follows_must_fuse(tanh_noted):
    together = Constraints(must_fuse=[("exp", "log")])
    f = lambda x: jnp.tanh(jnp.log(jnp.exp(x) + 1.0) @ x)  # noqa: E731
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    plan = fuseplan.make_plan(f, device="h200", planner=tanh_noted, constraints=together)(x)
    assert_tanh_noted(plan)
    assert fuseplan.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("percent", [None, 90, 75])
def test_a_note_follows_what_is_computed_again(tanh_noted, percent):
    make, f = fuseplan.make_plan, jax.grad(layers, argnums=(0, 1))
    limits = None
    if percent is not None:
        free = make(f, device="h200", features=Features(recompute=False))(*SHAPES)
        limits = Constraints(max_peak_bytes=free.peak_bytes * percent // 100)
    plan = make(f, device="h200", planner=tanh_noted, constraints=limits)(*SHAPES)
    assert plan.recomputed
    assert_tanh_noted(plan)
