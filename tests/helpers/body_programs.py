"""Programs whose operations hold bodies: loops, branches and reductions of their own. Run as a program, it
prints the signatures of each one's nodes, to be compared between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace

TABLE = np.arange(512, dtype=np.float32).reshape(8, 64)


def scan(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.scan(lambda c, t: (op(c, t * by), c), x[0], x)


def while_loop(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.while_loop(lambda c: jnp.sum(c) < 100.0, lambda c: op(c, jnp.abs(c) * by + 1.0), x)


def fori_loop(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: op(c, x * by) + i, x)


def reduce(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.reduce(x, np.float32(0), lambda a, b: op(a, b) * by, (1,))


def reduce_window(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.reduce_window(x, np.float32(0), lambda a, b: op(a, b) * by, (2, 2), (1, 1), "SAME")


def cond(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.cond(x[0, 0] > 0, lambda v: op(v, v * by), lambda v: v - 1.0, x)


def nested(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    """The difference lies in a branch of a call in a loop in a loop; ``relu`` has a rule of its own."""

    def step(c: Any, t: Any) -> Any:
        named = jax.jit(lambda v: lax.cond(v[0] > 0, lambda u: op(u, u * by), jax.nn.relu, v))
        return lax.fori_loop(0, 2, lambda i, v: named(v), c) + t, None

    return lax.scan(step, x[0], x)[0]


def constant(x: Any, by: float = 2.0, op: Any = jnp.add) -> Any:
    return lax.scan(lambda c, t: (op(c, t * by) + TABLE[:, 0] + jnp.asarray(TABLE)[0, :8], c), x[0], x)


PROGRAMS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (scan, while_loop, fori_loop, reduce, reduce_window, cond, nested, constant)
}


def build(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program that was never traced before, and its arguments."""
    f = PROGRAMS[name]
    return (lambda x: f(x)), (jax.ShapeDtypeStruct((8, 8), "float32"),)


def signatures(name: str, **change: Any) -> list[int]:
    """Of the nodes of a program, traced anew."""
    f, x = PROGRAMS[name], jax.ShapeDtypeStruct((8, 8), "float32")
    return [node.signature for node in lower(trace(lambda x: f(x, **change), x)).graph.nodes]


if __name__ == "__main__":
    for name in PROGRAMS:
        print(name, *signatures(name))
