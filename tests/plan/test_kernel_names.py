"""A kernel is named for what it does: scope, function, form, operations."""

import re

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import get_device
from fuseplan import Plan
from fuseplan.codegen.tile import kernel_name as emitted_name
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan import kernel_names
from fuseplan.plan.kernel_names import anchor, form, kernel_name, place
from fuseplan.plan.options import Options
from fuseplan.workloads.workload import array
from tests.helpers.plans import plan_best

X = array("float32", 512, 256)
W = array("float32", 256, 256)


def graph_of(f, *args):
    return lower(trace(f, *args)).graph


def form_of(f, *args):
    graph = graph_of(f, *args)
    return form(graph, range(len(graph.nodes)))


def tempered(x):
    e = jnp.exp2((x - x.max(-1, keepdims=True)) * 0.7)
    return e * (1.0 / e.sum(-1, keepdims=True))


def partition_function(x):
    top = jax.lax.stop_gradient(x.max(0))
    return jnp.log(jnp.exp(x - top).sum(0)) + top


def standardised(x):
    centred = x - x.mean(0)
    return centred / jnp.sqrt((centred**2).mean(0) + 1e-3)


def unit_power(x):
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-9)


def memory_lookup(q, k, v):
    score = jnp.exp(-jnp.abs(q @ k.T))
    return score @ v


def gated(x, w):
    return jnp.tanh(x @ w) * 2.0


def spectrum(x):
    return jnp.sin(x) + jnp.sin(2 * x) + x


FORMS = {
    "softmax": (tempered, X),
    "logsumexp": (partition_function, X),
    "layer norm": (standardised, X),
    "RMS norm": (unit_power, X),
    "attention": (memory_lookup, X, array("float32", 128, 256), array("float32", 128, 64)),
    "matmul+tanh": (gated, X, W),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_recognised(name):
    f, *args = FORMS[name]
    assert form_of(f, *args) == name


def test_what_only_looks_like_a_form_is_none():
    assert form_of(lambda x: jnp.exp(x) / x.sum(-1, keepdims=True), X) != "softmax"
    assert form_of(lambda x: jnp.exp(x).sum(0), X) == "exp+reduce_sum"
    assert form_of(lambda x: x / jnp.sqrt(x.sum(-1, keepdims=True)), X) not in ("layer norm", "RMS norm")
    assert form_of(spectrum, X).split("+")[0] == "sin"
    assert form_of(lambda x: x.T, X) == "transpose"
    assert form_of(lambda x, w: (x @ w) @ w, X, W) == "matmul"


def names_of(f, *args, device="h200"):
    program, plan = plan_best(lower(trace(f, *args)), Options(get_device(device), "greedy", 60.0))
    return program, plan, [kernel_name(plan.graph, k.spec.nodes) for k in plan.kernels]


def test_a_function_names_the_kernel_that_is_all_of_it():
    assert names_of(unit_power, X)[2] == ["unit_power"]
    assert names_of(tempered, X)[2] == ["tempered"]


def test_a_scope_goes_before_the_function():
    def scoped(x):
        with jax.named_scope("encoder"), jax.named_scope("head"):
            return tempered(x) + 1.0

    assert names_of(scoped, X)[2] == ["encoder/head"]
    deep = jax.named_scope("a_scope_of_a_very_long_name")(jax.named_scope("and_a_second_one")(tempered))
    (name,) = names_of(deep, X)[2]
    assert name == "and_a_second_one"


def test_parts_of_a_function_say_what_they_do():
    def two_steps(x, w):
        return unit_power(jnp.cos(x @ w) @ w)

    _, _, names = names_of(two_steps, X, W)
    assert any(name.startswith("unit_power") for name in names)
    assert any(name.startswith("two_steps:matmul+cos") for name in names)
    assert len(set(names)) == len(names)


def test_the_names_of_all_kernels_look_at_each_operation_once(monkeypatch):
    def steps(x):
        for i in range(30):
            with jax.named_scope(f"step{i}"):
                x = jnp.cos(x) * 2.0 + 1.0
        return x

    graph = graph_of(steps, X)
    of_step = {}
    for node in graph.nodes:
        of_step.setdefault(node.scope, []).append(node.id)
    looked = []
    monkeypatch.setattr(kernel_names, "place", lambda node: looked.append(node) or place(node))
    assert [kernel_name(graph, nodes) for nodes in of_step.values()] == list(of_step)
    parts = [kernel_name(graph, nodes[:2]) for nodes in of_step.values()]
    assert parts == [f"{step}:cos+mul" for step in of_step]
    assert len(looked) <= len(graph.nodes) + 2 * len(of_step)


def test_without_a_function_the_form_is_the_name():
    (name,) = names_of(lambda x: jnp.sin(x) * 2, X)[2]
    assert "lambda" not in name
    graph = graph_of(lambda x, w: jnp.einsum("ij,jk->ik", x, w), X, W)
    assert place(anchor(graph, range(len(graph.nodes)))) == ""
    assert kernel_name(graph, range(len(graph.nodes))) == "matmul"


def test_names_are_short_alike_and_kept_in_files():
    program, plan, names = names_of(jax.grad(lambda x, w: standardised(gated(x, w)).sum()), X, W)
    assert names == names_of(jax.grad(lambda x, w: standardised(gated(x, w)).sum()), X, W)[2]
    again = Plan.from_json(plan.to_json())
    assert [kernel_name(again.graph, k.spec.nodes) for k in again.kernels] == names
    assert max(map(len, str(plan).splitlines())) <= 80
    for kernel in plan.kernels:
        emitted = emitted_name(kernel.spec, program)
        assert re.fullmatch(r"fuseplan_[A-Za-z0-9_]+", emitted)
        assert emitted.endswith(f"_{len(kernel.spec.nodes)}")
