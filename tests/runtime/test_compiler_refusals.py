"""A kernel that the compiler refuses costs the user a warning, never a result: the compiler's
refusals are faked, and kernels run in Pallas' interpreter."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import fuseplan
from fuseplan.codegen import emit
from fuseplan.runtime import executor, recovering, replan
from fuseplan.runtime.replan import is_refusal, read_refusal
from fuseplan.support import jax_compat
from fuseplan.support.errors import CompilerRefusalWarning, ConstraintError
from tests.helpers.arrays import ramp

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

X = ramp(-1, 1, 8, 256)
W = ramp(-1 / 16, 1 / 16, 256, 64)
SHARED = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 150000, available: 100000"
fast = functools.partial(fuseplan.jit, device="test")


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def activated(x, w):
    return jnp.tanh(x @ w)


def gated(x, w):
    """Its product is read twice, so that it is no kernel of XLA with an epilogue."""
    y = x @ w
    return y * jnp.tanh(y)


refused_p = Primitive("refused")
refused_p.def_abstract_eval(lambda x, said: x)


def _refuse(ctx, x, said):
    raise RuntimeError(said)


mlir.register_lowering(refused_p, _refuse)


class FakeCompiler:
    """Refuses what ``refuses(spec, lowered)`` has words for, while it lowers the program."""

    def __init__(self):
        self.refuses = self.in_whole = lambda spec, lowered: None
        self.asked = self.made = self.plans = 0

    def emit(self, refuses):
        def emitted(spec, lowered, interpret=False):
            kernel = emit(spec, lowered, interpret=True)
            said = refuses(spec, lowered) if spec.backend == "triton" else None

            def group(*arrays):
                if said is not None:
                    arrays = [refused_p.bind(arrays[0], said=said), *arrays[1:]]
                return kernel(*arrays)

            return group

        return emitted

    def by_itself(self, spec, lowered):
        self.asked += 1
        return self.emit(self.refuses)(spec, lowered)

    def inside(self, spec, lowered, interpret=False):
        self.made += 1
        return self.emit(lambda s, o: self.in_whole(s, o) or self.refuses(s, o))(spec, lowered)


@pytest.fixture
def compiler(monkeypatch):
    """An accelerator of the kind that the device ``test`` is."""
    fake = FakeCompiler()
    real = replan.plan_traced

    def plan_traced(*args):
        fake.plans += 1
        return real(*args)

    for module in (recovering, replan, fuseplan.api):
        monkeypatch.setattr(module, "local_platform", lambda: "gpu")
    monkeypatch.setattr(jax_compat, "lowered_for", lambda ctx: ("gpu",))
    monkeypatch.setattr(executor, "emit", fake.inside)
    monkeypatch.setattr(replan, "emit", fake.by_itself)
    monkeypatch.setattr(replan, "plan_traced", plan_traced)
    replan._tried.clear()
    return fake


def agree(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_nothing_is_tried_by_itself_where_all_is_well(compiler, recwarn):
    f = fast(softmax)
    agree(f(X), softmax(X))
    assert compiler.made == 1
    assert compiler.asked == compiler.plans == 0
    assert not recwarn.list
    assert f.plan(X).stats.refused == 0


@pytest.mark.slow
def test_planned_anew_with_less_room(compiler):
    modelled = fast(gated).plan(X, W).kernels[0].cost.onchip_bytes

    def needs_more_than_the_model(spec, lowered):
        kernel = replan.Scheduler(lowered.graph, fuseplan.api.make_options("test").device).price(spec.nodes)
        return SHARED if kernel.spec.axes == spec.axes else None

    compiler.refuses = needs_more_than_the_model
    f = fast(gated)
    with pytest.warns(CompilerRefusalWarning, match=r"gated\S*: it needs 150.0 kB.*has 100.0 kB"):
        agree(f(X, W), gated(X, W))
    plan = f.plan(X, W)
    assert plan.device.onchip_bytes == modelled * 100_000 // 150_000
    assert plan.device.name.startswith("test-")
    assert (plan.stats.refused, plan.stats.replans) == (1, 1)
    assert any("refused" in note for note in plan.notes)
    (kernel,) = plan.kernels
    assert 0 < kernel.cost.onchip_bytes <= plan.device.onchip_bytes
    assert plan.verify().status == "verified"


def test_the_next_call_costs_nothing(compiler):
    compiler.refuses = lambda spec, lowered: "ptxas: cannot" if len(spec.nodes) > 2 else None
    traces = []

    def f(x):
        traces.append(x.shape)
        return softmax(x)

    g = fast(f)
    with pytest.warns(CompilerRefusalWarning):
        agree(g(X), softmax(X))
    before = (len(traces), compiler.asked, compiler.made, compiler.plans)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(g(X + 1), softmax(X + 1))
        assert before == (len(traces), compiler.asked, compiler.made, compiler.plans)
    # Other shapes are planned on their own, and the kernels that were tried are known.
    with pytest.warns(CompilerRefusalWarning):
        agree(g(X[:3]), softmax(X[:3]))


def test_two_replans_at_most_and_then_xla(compiler, monkeypatch, capsys):
    monkeypatch.setenv("FUSEPLAN_DEBUG", "1")
    compiler.refuses = lambda spec, lowered: "INTERNAL: Mosaic failed to compile"
    f = fast(softmax)
    with pytest.warns(CompilerRefusalWarning, match="left to XLA") as caught:
        agree(f(X), softmax(X))
    assert len(caught) == 1
    assert compiler.plans == 1 + replan.MAX_REPLANS
    plan = f.plan(X)
    assert plan.stats.replans == replan.MAX_REPLANS
    assert {kernel.spec.backend for kernel in plan.kernels} == {"xla"}
    assert plan.status == "FEASIBLE"
    assert "refused kernels are left to XLA" in capsys.readouterr().err


def test_an_operation_that_the_compiler_does_not_know_is_set_apart(compiler):
    said = "Unimplemented primitive in Pallas GPU lowering: exp. Please file an issue at https://x.y"

    def knows_no_exp(spec, lowered):
        return said if any(lowered.graph.nodes[n].op == "exp" for n in spec.nodes) else None

    compiler.refuses = knows_no_exp
    f = fast(softmax)
    with pytest.warns(CompilerRefusalWarning):
        agree(f(X), softmax(X))
    plan = f.plan(X)
    assert plan.stats.replans == 1
    exps = [k.spec for k in plan.kernels if any(plan.graph.nodes[n].op == "exp" for n in k.spec.nodes)]
    assert [(len(s.nodes), s.backend) for s in exps] == [(1, "xla")] * len(exps)
    assert any(k.spec.backend == "triton" for k in plan.kernels)


def test_what_the_user_keeps_together_is_left_to_jax(compiler):
    compiler.refuses = lambda spec, lowered: "Mosaic: no"
    together = fuseplan.Constraints(must_fuse=[("exp", "div")])
    f = fast(softmax, constraints=together)
    with pytest.warns(CompilerRefusalWarning):
        agree(f(X), softmax(X))
    agree(f(X), softmax(X))
    with pytest.raises(ConstraintError):  # The user's own mistakes are not hidden.
        fast(softmax, constraints=fuseplan.Constraints(must_fuse=["cosh"]))(X)


def test_jax_takes_over_where_only_the_whole_fails(compiler):
    compiler.in_whole = lambda spec, lowered: "no words that anybody knows"
    f = fast(softmax)
    with pytest.warns(CompilerRefusalWarning, match=r"softmax: .* jax.jit's own is used.*nobody|anybody"):
        agree(f(X), softmax(X))
    made = compiler.made
    agree(f(X), softmax(X))
    assert compiler.made == made
    with pytest.warns(CompilerRefusalWarning, match="jax.jit's own is used"):
        lowered = fast(softmax).lower(X)
    agree(lowered.compile()(X), softmax(X))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fuseplan.CompilerRefusalWarning")
def test_inside_of_other_transformations(compiler):
    compiler.refuses = lambda spec, lowered: SHARED if len(spec.nodes) > 2 else None
    f = fast(softmax)
    agree(jax.jit(lambda x: f(x) + 1)(X), softmax(X) + 1)
    agree(jax.vmap(f)(X), jax.vmap(softmax)(X))
    agree(jax.grad(lambda x: (f(x) ** 2).sum())(X), jax.grad(lambda x: (softmax(x) ** 2).sum())(X))
    agree(jax.jit(jax.vmap(f))(X), jax.vmap(softmax)(X))
    agree(f.lower(X).compile()(X), softmax(X))
    agree(f.trace(X).lower().compile()(X), softmax(X))
    measured = fast(softmax, measure=True)
    agree(measured(X), softmax(X))
    agree(measured(X), softmax(X))


def test_errors_of_the_function_stay_its_own(compiler):
    def asks(x):
        return 1 if softmax(x).sum() > 0 else 2

    with pytest.raises(jax.errors.TracerBoolConversionError):
        fast(asks)(X)

    def fails(x):
        return softmax(refused_p.bind(x, said="the user's"))

    for call in (fast(fails), lambda x: fast(fails).lower(x).compile()):
        with pytest.raises(RuntimeError, match="the user's"):
            call(X)

    calls = []

    def printed(x):
        def host(x):
            calls.append(1)
            raise ValueError("host")

        jax.debug.callback(host, x)
        return softmax(x)

    with pytest.raises(Exception, match="host"):
        (fast(printed)(X), jax.effects_barrier())
    assert len(calls) == 1, "a program with side effects is not run again"


@pytest.mark.parametrize(
    ("said", "needed", "available"),
    [
        (f"{SHARED}, context: []", 150_000, 100_000),
        ("Scoped allocation with size 28.01M and limit 16.00M exceeded", 29_370_614, 2**24),
        ("Mosaic GPU kernel … smem_bytes=458752 > max_smem_bytes=232448", 458_752, 232_448),
        ("ptxas error: uses too much shared data (0xd000 bytes, 0xc000 max)", 0xD000, 0xC000),
        ("memory space vmem. Used 159.80M of 128.00M vmem. Exceeded", 167_562_445, 2**27),
    ],
)
def test_figures_of_the_compilers(said, needed, available):
    refusal = read_refusal(RuntimeError(f"first line\n{said}\nlast line"))
    assert (refusal.needed_bytes, refusal.available_bytes) == (needed, available)
    assert is_refusal(RuntimeError(said))


def test_other_words_of_the_compilers():
    said = "Unimplemented primitive in Pallas TPU lowering for tc: rev. Please file"
    assert read_refusal(NotImplementedError(said)).primitive == "rev"
    assert read_refusal(RuntimeError("ptxas fatal: Register allocation failed")).registers
    assert read_refusal(RuntimeError("")).said == "RuntimeError"
    assert not is_refusal(RuntimeError("Out of memory while trying to allocate 3 bytes"))


def test_arrays_that_a_second_try_consumed_are_not_read_again(monkeypatch):
    """Its error is the one to see."""

    def refused(x):
        raise RuntimeError(SHARED)

    def consumed(x):
        x.delete()
        raise RuntimeError("the device is lost")

    run = fast(softmax)
    monkeypatch.setattr(run._jitted, "fused", refused)
    monkeypatch.setattr(run._jitted, "_accepted", consumed)
    with pytest.raises(RuntimeError, match="the device is lost"):
        run(jnp.copy(X))
