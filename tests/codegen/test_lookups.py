"""Lookups in kernels that load by index: Triton's, in Pallas' interpreter, against ``jax.jit``."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from costmodel.axes import Conflict, unify
from costmodel.devices import get_device
from costmodel.graph import DimRole, OpKind
from costmodel.kernel import is_by_index
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.plan.options import Features
from fuseplan.runtime.executor import make_runner
from fuseplan.runtime.tolerance import check_results
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.settings import make_options
from fuseplan.verify.report import verify_plan
from tests.helpers.plans import plan_traced
from tests.helpers.quickly import run_quickly
from tests.helpers.specs import P, R, S, Tiled, hand_spec, kernel_function, whole_group

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TILED = Features(xla_loops=False)
H200 = get_device("h200")


def normal(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def places(n, *shape, seed=1, dtype="int32", outside=0):
    """Indices of ``n`` places, and as many as ``outside`` before and after them."""
    return jnp.asarray(np.random.default_rng(seed).integers(-outside, n + outside, shape), dtype)


def specs_of(f, *args, most=4):
    """Some schedules of all of ``f`` as one kernel, the first and the last among them."""
    lowered = whole_group(f, *args)
    nodes = tuple(range(len(lowered.graph.nodes)))
    every = list(Scheduler(lowered.graph, H200, lowered).schedules(nodes))
    assert every, "no kernel can hold it"
    step = max(1, (len(every) - 1) // (most - 1)) if most > 1 else len(every)
    return lowered, list(dict.fromkeys([*every[::step], every[-1]]))


def agrees(f, *args, most=4):
    lowered, specs = specs_of(f, *args, most=most)
    assert any(is_by_index(lowered.graph.values[a.value], a) for a in specs[0].reads)
    want = run_quickly(f, *args)
    for spec in specs:
        got = run_quickly(kernel_function(spec, lowered, interpret=True), *args)
        check_results(str(spec.axes), got, jax.tree.leaves(want))


def norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def window(x, i):
    return jax.vmap(lambda i: lax.dynamic_slice(x, (i, i), (2, 3)))(i)


X, BATCHES = normal(19, 13), normal(3, 19, 13)
LOOKUPS = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "elements of a vector": lambda x, i: x[:, 2][i] if x.ndim == 2 else x[0, :, 2][i],
    "many a row": lambda x, i: jnp.take_along_axis(x, jnp.stack([i, i + 1, i], 1)[:19], 1),
    "table of indices": lambda x, i: x[jnp.stack([i, i[::-1], i])],
    "windows of rows": lambda x, i: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (3, 13)))(i),
    "fill": lambda x, i: jnp.take(x, i, axis=0, mode="fill"),
    "fill with a number": lambda x, i: x.at[i].get(mode="fill", fill_value=-2.5),
    "clip": lambda x, i: jnp.take(x, i, axis=1, mode="clip"),
    "promised": lambda x, i: x.at[i].get(mode="promise_in_bounds"),
    "one table for batches": lambda x, i: jax.vmap(lambda x, i: x[i], (None, 0))(x, jnp.stack([i, i[::-1]])),
    "one row": lambda x, i: x[i[0]],
    "two indices a place": lambda x, i: x[i, i[::-1] % 13],
    "all windows": window,
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    """Indices inside of the table and outside, negative ones among them, and places past the end of the last
    tile."""
    f = LOOKUPS[name]
    table = X[:, :1] + X if "elements" not in name else X

    def program(x, i):
        return jnp.tanh(f(x, i)) * 2

    lowered = lower(trace(program, table, places(19, 21, outside=9)))
    gathers = [n for n in lowered.graph.nodes if DimRole.ADDRESSED in n.roles]
    assert all("triton" in node.backends for node in gathers)
    assert gathers
    _planned(program, table, places(19, 21, outside=9))
