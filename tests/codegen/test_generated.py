"""Generated programs against NumPy in float64: loops of a CPU, kernels of GPUs and TPUs in Pallas'
interpreter, proofs and derivatives. ``python -m experiments.fuzz`` runs as many as one likes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from functools import cache

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import fuseplan
from experiments.fuzz import checks
from experiments.fuzz.checks import check_program
from experiments.fuzz.generate import generate, random_program
from experiments.fuzz.operations import OPERATIONS
from experiments.fuzz.program import FLOATS, INTEGERS, Input, Program, Step
from experiments.fuzz.reference import difference, expected_results
from experiments.fuzz.shrink import shrink

pytestmark = pytest.mark.usefixtures("compiled_quickly")

N_PROGRAMS = {"cpu": 70, "triton": 30, "mosaic_tpu": 30, "mosaic_gpu": 20}


def hold(program, backends, gradient=False, **how):
    report = check_program(program, backends, gradient, **how)
    ours = [f for f in report.failures if f.kind != "xla"]
    assert not ours, "\n".join([*map(str, ours), program.source(), repr(program)])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("backend", N_PROGRAMS)
def test_programs(backend):
    """Every result is what NumPy computes, and every plan is verified."""
    counts = Counter()

    @settings(max_examples=N_PROGRAMS[backend], suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.randoms(use_true_random=False))
    def run(random):
        program = generate(random.choice)
        counts.update(hold(program, [backend], solver=False).counts)

    run()
    assert counts[f"{backend}: kernels of ours"] > 0, "no kernel was tested"
    assert counts["plans verified"] >= N_PROGRAMS[backend] // 2


@pytest.fixture(scope="module")
def one_reference():
    """What a program's results and derivatives are in float64 is computed for the first backend."""
    derivative_of, known = checks._Derivative.of, {}

    def of(program, f):
        if program not in known:
            known[program] = derivative_of(program, f)
        return known[program]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "expected_results", cache(checks.expected_results))
        patch.setattr(checks._Derivative, "of", of)
        yield


@pytest.mark.one_python
@pytest.mark.parametrize("backend", ["cpu", "triton", "mosaic_tpu"])
@pytest.mark.slow
@pytest.mark.xdist_group("derivatives")
@pytest.mark.usefixtures("one_reference")
def test_derivatives(backend):
    """Derivatives of fused functions, and of kernels, are those of the program in float64."""
    compared = 0
    for index in range(5):
        report = hold(random_program(7, index), [backend], gradient=True, solver=index % 4 == 0)
        compared += report.counts["derivatives compared"]
    assert compared > 1


def test_every_operation_and_type_occurs():
    """Of a thousand programs, some have each operation, and each type."""
    programs = [random_program(0, index) for index in range(1000)]
    ops = Counter(s.op for p in programs for s in p.steps)
    assert not OPERATIONS.keys() - ops.keys()
    types = {p.dtype_of(v) for p in programs for v in range(len(p.inputs) + len(p.steps))}
    assert types == {*FLOATS, *INTEGERS, "bool"}
    assert any(0 in i.shape for p in programs for i in p.inputs)
    assert any(len(set(p.results)) < len(p.results) for p in programs)
    assert any(min(p.results) < len(p.inputs) for p in programs)


SUM = Program((Input("float32", (5, 130), "normal", 3),), (Step("sum", (0,), ((1,), False)),), (1,))


def test_a_wrong_element_is_found():
    expected = expected_results(SUM)[0]
    right = np.asarray(SUM.arguments()[0].sum(1))
    assert not difference(right, expected)
    for wrong in (right + np.float32(1e-3), np.where(np.arange(5) == 2, np.nan, right).astype("float32")):
        assert "wrong" in difference(wrong, expected)
    assert "type" in difference(right.astype("float64"), expected)


def test_a_wrong_kernel_is_found_and_shrunk(monkeypatch):
    """A plan's runner that loses a term is a failure, and what has no part in it is shrunk away."""
    more = (Step("sin", (0,)), Step("sum", (1,), ((1,), False)), Step("cos", (0,)))
    program = Program(SUM.inputs, more, (2, 3))
    right = fuseplan.Plan.run

    def wrong(plan, *args, **how):
        return [x + 1e-2 if x.ndim == 1 else x for x in right(plan, *args, **how)]

    monkeypatch.setattr(fuseplan.Plan, "run", wrong)
    fails = lambda p: any(f.kind == "wrong" for f in check_program(p, ["triton"], False).failures)  # noqa: E731
    assert fails(program)
    # A sum alone is no kernel of ours.
    assert [s.op for s in shrink(program, fails).steps] == ["sin", "sum"]


def test_a_wrong_derivative_is_found(monkeypatch):
    program = Program(SUM.inputs, (Step("sin", (0,)), Step("sum", (1,), ((1,), False))), (2,))
    assert hold(program, ["cpu"], gradient=True).counts["derivatives compared"] == 1
    monkeypatch.setattr(checks.fuseplan, "jit", lambda f, **_: lambda x: (jnp.sin(x).sum(1) * 1.02,))
    failures = check_program(program, ["cpu"], True).failures
    assert [f.kind for f in failures] == ["wrong", "wrong"]


@pytest.mark.slow
def test_the_command_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "rows.jsonl"
    for programs in (1, 2):
        command = [sys.executable, "-m", "experiments.fuzz", "--programs", str(programs), "--out", str(out)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.startswith(f"{programs} programs")
        assert len(out.read_text().splitlines()) == programs


CASES: dict[str, tuple[str, Program]] = {
    "the gradient of a maximum: passes that compute its operand again round it differently": (
        "cpu",
        Program(
            (Input("float32", (12, 1, 2), "normal", 454), Input("float32", (1, 33, 2), "normal", 175)),
            (
                Step("max", (0, 1)),
                Step("sum", (2,), ((2,), False)),
                Step("tanh", (3,)),
                Step("triangle", (4,), (1, 0, -10000.0)),
                Step("reduce_max", (5,), ((1,), False)),
            ),
            (6,),
        ),
    ),
    "a proof: a renaming connects its two readers, without the maximum that makes it": (
        "triton",
        Program(
            tuple(
                Input("float16", shape, "positive", seed, constant)
                for shape, seed, constant in (
                    ((128, 1, 2), 191, False),
                    ((1, 4, 2), 302, False),
                    ((4, 7), 163, False),
                    ((1, 4, 1), 766, True),
                )
            ),
            (
                Step("max", (0, 1), (), "float16"),
                Step("abs", (4,), (), "float16"),
                Step("sum", (5,), ((2,), False), "float16"),
                Step("exp", (6,), (), "float16"),
                Step("relu", (7,), (), "float16"),
                Step("sin", (8,), (), "float16"),
                Step("triangle", (9,), (1, 0, 0.0), "float16"),
                Step("einsum", (10, 2), ("ab,bd->ad", "float16"), "float16"),
                Step("reduce_max", (11,), ((0, 1), True), "float16"),
                Step("div", (12, 12), (), "float16"),
                Step("sub", (11, 12), (), "float16"),
                Step("einsum", (13, 3), ("ab,bda->da", "float32"), "float32"),
            ),
            (14, 15, 7),
        ),
    ),
    "a scalar product added to a vector: the sum does not start from it": (
        "triton",
        Program(
            tuple(Input("float32", (8,), "normal", seed) for seed in (831, 232, 3)),
            (Step("einsum", (0, 1), ("a,a->", "float32")), Step("add", (2, 3))),
            (4,),
        ),
    ),
    "64-bit integers enabled: indices of one type": (
        "triton",
        Program(
            (Input("float32", (5, 130), "normal", 1), Input("float32", (1, 130), "normal", 2)),
            (Step("add", (0, 1)), Step("sum", (2,), ((1,), False))),
            (3, 2),
            x64=True,
        ),
    ),
    "a proof: an empty slice reads nothing of the reshape before it": (
        "cpu",
        Program(
            (Input("float16", (8,), "normal", 3),),
            (
                Step("reduce_max", (0,), ((0,), True), "float16"),
                Step("slice", (1,), (((1, 1, 1),), (1,), (1,), (1,)), "float16"),
            ),
            (2,),
        ),
    ),
    "a derivative: cotangents of a narrow result are summed in its type": (
        "mosaic_tpu",
        Program(
            (Input("float32", (24, 7), "positive", 490),),
            (Step("cast", (0,), dtype="bfloat16"), Step("mul", (0, 0))),
            (1, 2, 1),
        ),
    ),
    "a proof: a slice reads less without the reshape before it": (
        "cpu",
        Program(
            (Input("float64", (3, 16), "special", 524, constant=True), Input("uint8", (16, 3), "small", 237)),
            (Step("dynamic_slice", (0, 1), (1, 0), "float64"),),
            (2,),
            x64=True,
        ),
    ),
    "a plan: a norm and a product of one element each": (
        "mosaic_tpu",
        Program(
            (Input("float32", (1,), "normal", 291), Input("float32", (1,), "normal", 505)),
            (
                Step("mean", (0,), ((0,), True)),
                Step("einsum", (2, 1), ("a,a->", "float32")),
                Step("cube", (3,)),
            ),
            (4,),
        ),
    ),
    "a derivative: a literal among the results": (
        "cpu",
        Program(
            (Input("float32", (2, 1), "normal", 635),),
            (Step("scalar", (), (0.5,)), Step("sin", (0,))),
            (1, 2),
        ),
    ),
    "a proof: a reshape that keeps apart what its reader is fused with": (
        "cpu",
        Program(
            (Input("float32", (33,), "positive", 821),),
            (Step("reshape", (0,), ((3, 11),)), Step("slice", (0,), (((4, 11, 3),), (4,), (11,), (3,)))),
            (2, 1),
        ),
    ),
    "a proof: a remembered plan that costs its floor, where the floor is lower": (
        "cpu",
        Program(
            (Input("float64", (24,), "positive", 640),),
            (Step("prod", (0,), ((0,), False), "float64"), Step("rmsnorm", (0,), (0,), "float64")),
            (2, 1),
            x64=True,
        ),
    ),
}
"""Programs that failed once, shrunk: a backend and the program."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_what_failed_once(name):
    backend, program = CASES[name]
    hold(program, [backend], gradient=True)
