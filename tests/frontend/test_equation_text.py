"""Equations are described by what they compute: alike in every process, apart where anything differs."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fuseplan
from costmodel.calibrate import described_cpu
from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.search.cache import SolutionCache, using_cache
from tests.helpers.body_programs import PROGRAMS, build, signatures

CPU = described_cpu()
X = jax.ShapeDtypeStruct((8, 8), "float32")


def in_process(seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.body_programs"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_other_processes_and_hash_seeds_have_the_same_signatures():
    here = "".join(f"{name} {' '.join(map(str, signatures(name)))}\n" for name in PROGRAMS)
    assert in_process(1) == in_process(2) == here
    assert "-" not in here, "all of these programs have content only"


@pytest.mark.parametrize("name", PROGRAMS)
def test_signatures_follow_from_what_bodies_say(name):
    first = signatures(name)
    assert signatures(name) == first
    literal, operation = signatures(name, by=2.0000002), signatures(name, op=jnp.subtract)
    assert len(first) == len(literal) == len(operation)
    assert first != literal != operation != first


@pytest.mark.parametrize("name", ["scan", "reduce", "nested"])
def test_two_plannings_write_the_same(name):
    def written():
        f, args = build(name)
        with using_cache(SolutionCache()):
            plan = fuseplan.make_plan(f, device="h200")(*args)
        return [(n.op, n.signature) for n in plan.graph.nodes]

    assert written() == written()


def described(f, *args):
    return Describer().params("custom", {"jaxpr": jax.make_jaxpr(f)(*args or (X,))})


def test_constants_in_bodies_are_read_whole():
    def of(table):
        found = described(lambda x: x + jnp.asarray(table).sum())
        assert found.portable
        return found

    table = np.arange(4096.0, dtype=np.float32)
    middle, view = table.copy(), table.copy()
    middle[2000] += 1
    assert of(table) == of(view)
    closed = jax.make_jaxpr(lambda x: x + jnp.asarray(table).sum())(X)
    assert [np.shape(c) for c in closed.consts] == [(4096,)], "the body has it, and not an operand"
    assert len({of(table), of(middle), of(table.reshape(64, 64)), of(table.view(np.int32))}) == 4


def test_operands_and_types_of_bodies_count():
    weak = described(lambda x: x, jax.core.ShapedArray((), jnp.float32, weak_type=True))
    strong = described(lambda x: x, jax.core.ShapedArray((), jnp.float32))
    bodies = [
        described(lambda x, y: x - y, X, X),
        described(lambda x, y: y - x, X, X),
        described(lambda x, y: x - x, X, X),
        described(lambda x, y: (x - y, x), X, X),
        described(lambda x, y: (x - y, y), X, X),
        weak,
        strong,
    ]
    assert len(set(bodies)) == len(bodies)


def test_places_and_names_do_not_count():
    def one(x):
        return x * 2.0 + 1.0

    def other(x):
        with jax.named_scope("elsewhere"):
            doubled = x * 2.0
        return doubled + 1.0

    assert described(one) == described(other) == described(lambda x: x * 2.0 + 1.0)
    assert described(jax.jit(one)) == described(jax.jit(other)), "the name of a call"


def test_a_body_that_is_nested_often_is_described_once():
    """Were it not, 40 levels of two uses each would take 2**40 steps."""

    def level(f):
        return jax.jit(lambda x: f(x) + f(x))

    f = jax.jit(jnp.sin)
    for _ in range(40):
        f = level(f)
    assert described(f).portable


def test_functions_have_no_content():
    def double(x):
        return x * 2.0

    def triple(x):
        return x * 3.0

    describer = Describer()
    one, again, other = (describer.params("custom", {"f": f, "n": 1}) for f in (double, double, triple))
    assert one == again != other
    assert not one.portable
    inside = described(lambda x: jax.pure_callback(lambda v: v, X, x))
    assert not inside.portable, "nor has a body with one in it"


def test_what_holds_a_function_is_known_in_its_graph_only():
    def calls(*functions):
        return lower(trace(lambda x: [jax.pure_callback(f, X, x) for f in functions], X)).graph

    def one(x):
        return x

    def other(x):
        return -x

    graph = calls(one, other)
    assert all(n.signature < 0 for n in graph.nodes)
    names = Signatures(graph)
    assert names.of((0,)).key != names.of((1,)).key, "two functions"
    assert [n.signature for n in calls(other, one).nodes] == [n.signature for n in graph.nodes]
    assert Scheduler(graph, CPU).cache_key((0, 1), names) is None, "so it is no key of the cache"
    told = lower(trace(lambda x: lax.scan(lambda c, t: (c + t, c), x[0], x), X)).graph
    every = tuple(range(len(told.nodes)))
    assert Scheduler(told, CPU).cache_key(every, Signatures(told)) is not None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.float32(0.071036056), np.float32(0.07103606)),
        (np.float32(1e-3), np.nextafter(np.float32(1e-3), np.float32(1))),
        (np.float64(1 / 3), np.float64(1 / 3 + 1e-12)),
        (np.float32(0.0), np.float32(-0.0)),
        (np.int32(1), np.float32(1)),
    ],
)
def test_literals_are_their_bits(a, b):
    """NumPy prints eight decimals: two multiplications by neighbouring numbers were one."""
    assert a.dtype != b.dtype or a.tobytes() != b.tobytes()
    assert Describer().literal(np.asarray(a)) != Describer().literal(np.asarray(b))


def test_operations_by_neighbouring_numbers_are_two():
    a = np.float32(0.071036056)
    b = np.nextafter(a, np.float32(1))
    assert len(lower(trace(lambda x: (x * a, x * b), X)).graph.nodes) == 2
    assert len(lower(trace(lambda x: (x * a, x * a), X)).graph.nodes) == 1


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, True), (1, 1.0)])
def test_parameters_that_compare_equal_may_differ(a, b):
    assert a == b
    assert Describer().params("custom", {"n": a}) != Describer().params("custom", {"n": b})
