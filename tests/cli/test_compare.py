"""``fuseplan.compare``: a row a planner, modelled, and measured where that is asked for."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import fuseplan
from fuseplan.cli import app
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.planners import planner_names, xla
from fuseplan.report.text import bound_lines, status_text
from fuseplan.runtime import compare as contest
from fuseplan.search import heuristics
from fuseplan.search.heuristics import greedy
from fuseplan.settings import make_options
from fuseplan.support.errors import (
    ConstraintError,
    ExtensionError,
    InvalidArgumentError,
    MemoryLimitError,
    MismatchError,
)
from fuseplan.workloads import get_workload
from tests.helpers.plans import plan_best

pytestmark = pytest.mark.one_python

X = jax.ShapeDtypeStruct((1024, 1024), "float32")
ARRAY = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
MEASURED = ["measured_us", "measured_ratio", "temp_bytes", "temp_ratio"]


def softmax(x):
    e = jnp.exp(x - jax.lax.reduce_max(x, (1,))[:, None])
    return e / e.sum(1)[:, None]


def test_every_planner_by_default():
    frame = fuseplan.compare(softmax, device="a100")(X)
    assert tuple(frame.planner) == planner_names(of_graphs=True)  # XLA cannot compile for it elsewhere
    assert set(frame.baseline) == {"unfused"}
    assert not set(MEASURED) & set(frame.columns)


def test_xlas_own_plan_is_the_baseline_where_its_compiler_is():
    frame = fuseplan.compare(softmax, device="cpu")(X).set_index("planner")
    assert tuple(frame.index) == planner_names()
    assert set(frame.baseline) == {"xla"}
    assert frame.ratio["xla"] == 1.0
    assert frame.ratio["solver"] == pytest.approx(frame.time_us["solver"] / frame.time_us["xla"])


def test_where_xla_cannot_compile_its_row_says_so(monkeypatch):
    def fail(*_):
        raise RuntimeError("the lock is held by process 7\n" * 99)

    monkeypatch.setattr(xla, "_compile", fail)
    frame = fuseplan.compare(softmax, device="cpu", planners=("unfused", "xla", "solver"))(X)
    assert frame.status.tolist()[1] == "NONE"
    assert frame.notes[1].startswith("RuntimeError: the lock is held by process 7")
    assert len(frame.notes[1]) <= 300
    assert frame.time_us.isna().tolist() == frame.ratio.isna().tolist() == [False, True, False]
    assert set(frame.baseline) == {"unfused"}
    result = CliRunner().invoke(app, ["compare", "softmax", "--small", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "over unfused" in result.output
    assert "xla: RuntimeError: the lock is held" in result.output


def test_a_bug_of_a_planner_of_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr(heuristics, "greedy_groups", lambda space: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuseplan.compare(lambda x: jnp.sin(x) @ x, device="h200", planners=("greedy",))(X)


def failing(graph, pricing, budget):
    raise RuntimeError("no groups today")


DOUBLED = fuseplan.Pattern("doubled", lambda x: jnp.tanh(x) * 2.0, choose="cost")


@pytest.mark.parametrize("patterns", [(), (DOUBLED,)], ids=["alone", "with patterns"])
def test_a_planner_that_fails_costs_one_row(patterns):
    fuseplan.register_planner("mine", failing)
    f, args = (lambda x: jnp.tanh(x) * 2.0 + x.sum(1)[:, None]), (X,)
    frame = fuseplan.compare(f, device="h200", planners=("mine", "greedy"), patterns=patterns)(*args)
    assert frame.status.tolist() == ["NONE", "FEASIBLE"]
    assert "'mine', and it raised RuntimeError: no groups today" in frame.notes[0]
    assert frame.time_us.isna().tolist() == [True, False]
    frame = fuseplan.compare(f, device=["h200", "tpu_v5e"], planners=("mine", "greedy"))(*args)
    assert frame.status.tolist() == ["NONE", "FEASIBLE"] * 2
    with pytest.raises(ExtensionError, match="no groups today"):
        fuseplan.compare(f, device=["h200", "tpu_v5e"], planners=("mine",), patterns=patterns)(*args)


def test_a_limit_of_memory_costs_the_rows_of_those_that_do_not_keep_to_it():
    f, args = get_workload("mlp").build()

    def compare(*planners, **limits):
        constraints = fuseplan.Constraints(**limits)
        return fuseplan.compare(f, device="h200", planners=planners, constraints=constraints)(*args)

    frame = compare("greedy", "unfused", "solver", max_peak_bytes=1)
    assert frame.status.tolist() == ["NONE", "FEASIBLE", "NONE"]
    assert frame.notes[0].startswith("no plan was found whose temporaries need at most 1 bytes")
    with pytest.raises(MemoryLimitError):
        compare("greedy", "solver", max_peak_bytes=1)
    with pytest.raises(ConstraintError, match="no_such_operation"):
        compare("greedy", "unfused", "solver", never_fuse=[("no_such_operation", "tanh")])


def test_the_command_has_a_line_for_each_planner_that_fails():
    fuseplan.register_planner("mine", failing)
    command = ["compare", "mlp", "--device", "h200,tpu_v5e", "--max-peak-bytes", "1", "--planners"]
    result = CliRunner().invoke(app, [*command, "mine,greedy,unfused"])
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.output.splitlines() if line.endswith("no plan")] == [
        "mine", "greedy",
    ] * 2  # fmt: skip
    text = " ".join(result.output.split())
    assert text.count("mine: expected groups of the registered planner 'mine'") == 2
    assert text.count("greedy: no plan was found whose temporaries need at most 1 bytes") == 2
    assert max(map(len, result.output.splitlines())) <= 80
    result = CliRunner().invoke(app, [*command, "greedy,mine"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no plan was found whose temporaries" in result.stderr


# --- what rewriting gains, and what solving gains ---------------------------------------------


@pytest.mark.slow
def test_every_planner_that_decides_is_given_the_rewrites():
    f, args = get_workload("causal_attention_grad").build("bfloat16")
    frame = fuseplan.compare(f, device="tpu_v5e", planners=planner_names(of_graphs=True))(*args)
    frame = frame.set_index("planner")
    assert (frame.time_us <= frame.unrewritten_us).all()
    assert frame.time_us["unfused"] == frame.unrewritten_us["unfused"]
    for name in ("greedy", "best_first", "tvm_fuse_ops", "nnc_tensorexpr", "solver"):
        assert frame.time_us[name] < frame.unrewritten_us[name], name
    # Greedy merges as well as can be once the program is rewritten: the gain is not the solver's.
    assert frame.time_us["greedy"] == frame.time_us["solver"]
    assert frame.unrewritten_us["greedy"] > frame.unrewritten_us["solver"] > frame.time_us["solver"]


def test_a_registered_planner_is_given_the_rewrites():
    fuseplan.register_planner("mine", greedy)
    f, args = get_workload("layernorm_grad").build()
    frame = fuseplan.compare(f, device="h200", planners=("mine", "greedy"))(*args)
    assert frame.time_us[0] == frame.time_us[1]
    assert frame.time_us[0] < frame.unrewritten_us[0] == frame.unrewritten_us[1]


@pytest.mark.slow
def test_as_traced_nothing_is_rewritten():
    f, args = get_workload("layernorm_grad").build()
    plan = fuseplan.make_plan(f, device="h200", features=Features(rewrites=False))(*args)
    assert plan.notes[0] == "switched off: rewrites"
    assert len(plan.graph.nodes) == len(lower(trace(f, *args)).graph.nodes)
    assert plan.recomputed == ()


def test_a_bound_names_the_form_of_the_program_for_which_it_holds():
    f, args = get_workload("causal_attention").build("bfloat16")
    rewritten = fuseplan.make_plan(f, device="tpu_v5e")(*args)
    traced = fuseplan.make_plan(f, device="tpu_v5e", features=Features(rewrites=False))(*args)
    assert rewritten.status == traced.status == "OPTIMAL"
    assert status_text(rewritten) == "proven optimal (as rewritten)"
    assert status_text(traced) == "proven optimal"
    assert bound_lines([("solver", rewritten), ("other", traced)]) == [
        "solver: proven optimal (as rewritten)"
    ]
    # Programs that need less memory were not searched, since one was found that fits.
    limit = fuseplan.Constraints(max_peak_bytes=2 * traced.peak_bytes)
    within = fuseplan.make_plan(jax.nn.softmax, device="tpu_v5e", constraints=limit)(X)
    assert (within.status, status_text(within)) == ("OPTIMAL", "proven optimal (as traced)")


NAMED = [
    ("add_transpose", "softmax", "layernorm", "rmsnorm", "gelu_bias", "swiglu", "rope", "residual_norm"),
    ("attention", "causal_attention", "layernorm_grad", "cross_entropy", "adam_update", "moe_routing"),
    ("mlp", "norm_qkv", "gated_mlp", "lstm_cell", "batchnorm_relu", "gaussian_kernel_sum"),
]
"""Named workloads that are planned in a second or two each."""


@pytest.mark.parametrize("device", ["h200", "tpu_v5e", "cpu"])
@pytest.mark.parametrize("names", NAMED, ids=lambda names: names[0])
def test_what_a_plan_says_of_a_heuristic_is_what_compare_shows(names, device):
    said = 0
    for name in names:
        f, args = get_workload(name).build()
        lowered = lower(trace(f, *args))
        plan = plan_best(lowered, make_options(device, "solver", 60))[1]
        claims = [note for note in plan.notes if "takes no longer" in note]
        assert bool(claims) == bool(plan.stats.certified)
        if not claims:
            continue
        said += 1
        assert claims[0].startswith(f"{plan.stats.certified}'s plan")
        assert plan.status == "OPTIMAL"
        heuristic = plan_best(lowered, make_options(device, plan.stats.certified, 60))[1]
        assert heuristic.objective_ps == plan.objective_ps, (name, claims)
        is_rewritten = len(plan.graph.nodes) != len(lowered.graph.nodes)
        assert ("rewritten" in claims[0]) >= is_rewritten
    assert said


# --- what was measured ------------------------------------------------------------------------


def test_what_is_computed_again():
    frame = fuseplan.compare(softmax, device="h200", planners=("greedy", "xla_priority"))(X)
    # A difference and an exponential of each element.
    assert frame.recomputed_flops.tolist() == [0, 2 * 1024 * 1024]


@pytest.mark.slow
def test_what_was_measured():
    frame = fuseplan.compare(softmax, planners=("unfused", "solver"), measure=True)(ARRAY)
    assert frame.columns[-4:].tolist() == MEASURED
    assert (frame.measured_us > 0).all()
    assert (frame.measured_ratio > 0).all()


@pytest.mark.parametrize("planner", ["unfused", "xla_priority"])
def test_what_is_left_to_xla_on_a_cpu_is_fused_as_xla_likes(planner):
    def kernels(jitted):
        entry = jitted.lower(ARRAY).compile().as_text().partition("ENTRY")[2]
        return [line.count("fusion(") for line in entry.splitlines()].count(1)

    assert kernels(fuseplan.jit(softmax, planner=planner)) == kernels(jax.jit(softmax))


def test_a_wrong_result_is_told(monkeypatch):
    monkeypatch.setattr(contest, "fuse", lambda f, args, kwargs, *_: f(*args, **kwargs) * 1.01)
    with pytest.raises(MismatchError, match="softmax by 'solver': 1 of 1 results differ"):
        fuseplan.compare(softmax, planners=("solver",), measure=True)(ARRAY)


def test_what_has_side_effects_is_not_run():
    ran = []

    def f(x):
        jax.debug.callback(ran.append, x.sum())
        return x + 1

    frame = fuseplan.compare(f, planners=("solver",), measure=True)(ARRAY)
    jax.effects_barrier()
    assert ran == []
    assert all(math.isnan(frame[name][0]) for name in MEASURED)


@pytest.mark.parametrize(
    ("device", "argument", "message"),
    [
        ("h200", ARRAY, "runs the programs here, on 'cpu', but they are to be planned for 'h200'"),
        (None, X, "expects arrays, got ShapeDtypeStruct"),
    ],
)
def test_what_cannot_be_measured(device, argument, message):
    with pytest.raises(InvalidArgumentError, match=message):
        fuseplan.compare(softmax, device=device, measure=True)(argument)


def test_no_planner_is_none_to_compare():
    with pytest.raises(InvalidArgumentError, match="planners expects one or more names"):
        fuseplan.compare(softmax, device="h200", planners=())


def test_the_commands_lines_fit_80_columns():
    result = CliRunner().invoke(app, ["compare", "softmax", "--small", "--planners", "inductor,solver"])
    assert "inductor: 1 of the planner's groups are several kernels here" in " ".join(result.output.split())
    assert "as traced µs  rewritten µs  rewriting gains" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_command_names_both_gains():
    command = ["compare", "attention", "--device", "tpu_v5e", "--planners", "unfused,greedy,solver"]
    result = CliRunner().invoke(app, command)
    text = " ".join(result.output.split())
    assert "over unfused" in text
    assert "Rewriting gains greedy 4.50× and solver 4.36×." in text
    assert "With the same rewrites, solving gains 1.00× over greedy." in text
    assert "greedy's plan of the same rewritten program takes no longer" in text


def test_a_gap_is_shown_with_the_bound_and_the_factor():
    command = ["compare", "shallow_water", "--device", "tpu_v5e", "--planners", "solver", "--deadline", "0"]
    text = " ".join(CliRunner().invoke(app, command).output.split())
    assert re.search(r"solver: at most [\d,.]+ times the bound of [\d,.]+ µs", text)
    assert "%" not in text


@pytest.mark.slow
def test_the_command_measures():
    command = ["compare", "softmax", "--small", "--measure", "--planners", "greedy,solver"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "softmax here, measured" in result.output
    # Of an array that is in the cache, the model counts no threads and no allocations.
    assert "Measured over modelled time, where they are more than a factor of 2 apart: greedy" in " ".join(
        result.output.split()
    )
    there = CliRunner().invoke(app, [*command, "--device", "h200"])
    assert there.exit_code != 0
    assert "leave out device, or measure" in there.output + str(there.exception)
