"""What XLA:CPU computes in one call of its library, and what it writes before: as its compiler does."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from costmodel.graph import OpKind, boundary
from costmodel.xla_loops import is_library_call, is_written_before, library_rows
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.legality import refuse_several

X = jax.ShapeDtypeStruct((4096, 256), "float32")
FEW = jax.ShapeDtypeStruct((4095, 256), "float32")


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def kernels_of(f, *args):
    """The fusions, and other loops, of the program that XLA compiles."""
    text = jax.jit(f).lower(*args).compile().as_text()
    entry = text[text.index("ENTRY") :]
    return len(re.findall(r" (?:fusion|reduce|reduce-window|convert|copy|transpose)\(", entry))


CALLS = {
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, -1),
    "norm": norm,
    "norm of a softmax": lambda x: norm(jax.nn.softmax(x, -1)),
    "gradient of a softmax": lambda x: jax.vjp(lambda x: jax.nn.softmax(x, -1), x)[1](jnp.tanh(x))[0],
    "rms": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5),
    "variance": lambda x: x.var(-1),
    "two sums": lambda x: x.sum(-1) * (x * x).max(-1),
}
"""Each is one call."""

SEVERAL = {
    "columns": lambda x: jax.nn.softmax(x, 0),
    "all": lambda x: x - x.mean(),
    "a selection": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -9.0), -1),
    "a transpose": lambda x: jax.nn.softmax(x.T, -1),
    "a slice": lambda x: jnp.exp(x[:, 1:]).sum(-1),
    "a product of rows": lambda x: jnp.tanh(x).prod(-1),
    "integers": lambda x: (x > 0).sum(-1),
}
"""None is."""


@pytest.mark.parametrize("name", [*CALLS, *SEVERAL])
def test_calls_are_those_of_the_compiler(name):
    f = {**CALLS, **SEVERAL}[name]
    graph = lower(trace(f, X)).graph
    is_call = is_library_call(graph, range(len(graph.nodes)))
    assert is_call == (name in CALLS)
    assert (kernels_of(f, X) == 1) == is_call


def test_of_few_rows_each_reduction_is_a_call():
    graph = lower(trace(CALLS["softmax"], FEW)).graph
    assert not is_library_call(graph, range(len(graph.nodes)))
    assert kernels_of(CALLS["softmax"], FEW) > 1


WRITTEN = {
    "select": (True, lambda x: jnp.where(x > 0, x, 0.5).sum(0)),
    "transpose": (True, lambda x: jnp.exp(x.T).sum(0)),
    "reverse": (True, lambda x: (x[::-1] * 2).max(0)),
    "arithmetic": (False, lambda x: (jnp.exp(x) * 2 - 1).sum(0)),
    "pad": (False, lambda x: jax.lax.pad(x, 0.0, [(1, 1, 0), (0, 0, 0)]).sum(0)),
    "anything before a product": (True, lambda x: (x * 2).prod(0)),
    "anything before positions": (False, lambda x: jnp.where(x > 0, x, 0.5).argmax(0)),
    "a short product": (False, lambda x: (x.reshape(-1, 16) * 2).prod(1)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_before_a_reduction(name):
    is_written, f = WRITTEN[name]
    graph = lower(trace(f, X)).graph
    *before, reduction = [n for n in graph.nodes if not n.bitcast]
    assert any(is_written_before(graph, reduction, node) for node in before) == is_written
    assert (kernels_of(f, X) > 1) == is_written


@pytest.mark.parametrize(
    ("f", "rows"),
    [
        (lambda x: x.sum(-1), 4096),
        (lambda x: x.sum(), 1),
        (lambda x: x.sum(0), 4096),
        (lambda x: x.reshape(-1, 4, 4).sum((1, 2)), 4096 * 16),
        (lambda x: x.reshape(-1, 4).max(-1), 4096 * 64),
        (lambda x: (x > 0).sum(-1), 0),
        (lambda x: x.prod(-1), 0),
        (lambda x: x.argmax(-1), 0),
    ],
)
def test_rows_of_a_library(f, rows):
    graph = lower(trace(f, X)).graph
    assert sum(library_rows(graph, n) for n in graph.nodes if n.kind == OpKind.REDUCTION) == rows


def test_each_kernel_has_one_result():
    """XLA:CPU merges no kernels that have different results, and computes what both need for each."""
    several = {
        "of one array": lambda x: (x + 1, x * 2),
        "of one value": lambda x: ((y := jnp.exp(x)) * 2, y + x),
        "one of the other": lambda x: (y := jnp.exp(x), y * 2),
        "two sums": lambda x: ((x * 2).sum(0), (x + 1).sum(0)),
    }
    for f in several.values():
        assert kernels_of(f, X) >= 2
        graph = lower(trace(f, X)).graph
        every = tuple(range(len(graph.nodes)))
        refused = refuse_several(graph, "xla", every, boundary(graph, every))
        assert refused is not None
        assert "writes one array" in refused.reason
        last = (len(graph.nodes) - 1,)
        assert refuse_several(graph, "xla", last, boundary(graph, last)) is None
