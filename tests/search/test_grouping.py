"""Groups that wait for each other are taken apart, at the least loss."""

import jax
import jax.numpy as jnp
import pytest

from costmodel.devices import get_device
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.grouping import break_cycles, sum_prices

X = jax.ShapeDtypeStruct((1024, 2048), "float32")


def around(x):
    """Five operations, of which the third is beside the others on one path."""
    y = jnp.sin(jnp.tanh(x))
    return jnp.exp(y + jnp.cos(y))


@pytest.fixture
def book():
    lowered = lower(trace(around, X))
    assert [node.op for node in lowered.graph.nodes] == ["tanh", "sin", "cos", "add", "exp"]
    return PriceBook(lowered.graph, Scheduler(lowered.graph, get_device("h200"), lowered))


def test_a_group_is_divided_into_what_others_wait_for_and_the_rest(book):
    ordered, broken = break_cycles(book.graph, book, [(0, 1, 3, 4), (2,)])
    assert (ordered, broken) == ([(0, 1), (2,), (3, 4)], 1)


def test_what_does_not_end_the_circle_stays_whole():
    """The group in between waits for the others, and they for it, with all of its operations."""

    def program(x):
        y = jnp.sin(jnp.tanh(x))
        return jnp.exp(y + jnp.abs(jnp.cos(y)))

    lowered = lower(trace(program, X))
    book = PriceBook(lowered.graph, Scheduler(lowered.graph, get_device("h200"), lowered))
    ordered, broken = break_cycles(book.graph, book, [(0, 1, 4, 5), (2, 3)])
    assert (ordered, broken) == ([(0, 1), (2, 3), (4, 5)], 1)
    assert sum_prices(book, ordered) < sum_prices(book, [(n,) for n in range(6)])


def test_groups_that_can_run_stay(book):
    groups = [(0, 1), (2, 3, 4)]
    assert break_cycles(book.graph, book, reversed(groups)) == (groups, 0)
    assert all(isinstance(book.price(nodes), Price) for nodes in groups)
