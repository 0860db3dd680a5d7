"""Random programs over two large axes: what a loop nest can be asked to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

M, N = 17, 33
Pick = Callable[[Sequence[Any]], Any]

_UNARY = {
    "sin": lambda x: jnp.sin(jnp.clip(x, -9, 9)),  # of 1e30, any rounding makes another number
    "tanh": jnp.tanh,
    "neg": lambda x: -x,
    "square": jnp.square,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 2)),
    "third": lambda x: x / 3,
    "double": lambda x: 2 * x,
    "reciprocal": lambda x: 0.5 / (abs(x) + 0.5),
    "relu": jax.nn.relu,
    "narrow": lambda x: x.astype(jnp.float32).astype(x.dtype),
}
_BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lambda x, y: x / (1 + abs(y)),
    "plain div": lambda x, y: x / y,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "select": lambda x, y: jnp.where(x > y, x, y * 0.5),
}
_MASKS = {
    "causal": lambda: jnp.arange(M)[:, None] >= jnp.arange(N) // 2,
    "band": lambda: abs(jnp.arange(M)[:, None] * 2 - jnp.arange(N)) < 9,
    "rows": lambda: jnp.arange(M)[:, None] % 3 > 0,
    "columns": lambda: jnp.arange(N)[None] < 20,
}
_REDUCE = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "var": jnp.var,
    "argmax": lambda x, axis, keepdims: jnp.argmax(x, axis, keepdims=keepdims).astype(x.dtype) / 40,
    "all": lambda x, axis, keepdims: jnp.all(x < 1, axis, keepdims=keepdims).astype(x.dtype),
}


_OF_LOOPS = {
    "phase": lambda x: (jnp.exp(1j * jnp.clip(x, -9, 9)) * x).imag,
    "product": lambda x, axis: jnp.prod(1 + jnp.tanh(x) / 40, axis, keepdims=True),
    "count": lambda x, axis: jnp.sum(x > 0.1, axis, keepdims=True).astype(x.dtype) / 40,
    "any": lambda x, axis: jnp.any(x > 1, axis, keepdims=True).astype(x.dtype),
    "lookup": lambda x, axis: jnp.take(x, _scattered(x.shape[axis]), axis),
    "sums": lambda x, axis: jnp.moveaxis(
        jnp.zeros_like(jnp.moveaxis(x, axis, 0)).at[_scattered(x.shape[axis])].add(jnp.moveaxis(x, axis, 0)),
        0, axis,
    ),
}  # fmt: skip
"""What loops of a CPU hold, and no other kernels."""


def _scattered(n: int) -> Any:
    """Places along an axis, some of them twice."""
    return jnp.arange(n) * 5 % max(n - 2, 1)


def _guarded(x: Any, axis: int, guard: str) -> Any:
    m = x.max(axis, keepdims=True)
    if guard == "finite":
        m = jnp.where(jnp.isfinite(m), m, 0)
    elif guard == "floor":
        m = jnp.maximum(m, -1.0)
    elif guard == "stop":
        m = jax.lax.stop_gradient(m)
    return jnp.exp(x - m)


def random_program(pick: Pick, length: int, of_loops: bool = False) -> tuple[Callable[..., Any], list[str]]:
    """A function of arrays [M, 1], [1, N] and [M, N], and what it does, line by line. ``of_loops`` adds
    operations that only loops of a CPU hold."""
    kinds = ["unary", "binary", "binary", "mask", "reduce", "reduce", "softmax", "guarded", "dot"]
    kinds += ["of loops"] * (3 if of_loops else 0)
    shapes: list[tuple[bool, bool]] = [(True, False), (False, True), (True, True)]
    steps: list[Callable[[list[Any]], Any]] = []
    text: list[str] = []

    def operand(full: bool = False) -> int:
        recent = list(range(len(shapes)))[-5:]
        if full:
            recent = [i for i in range(len(shapes)) if shapes[i] == (True, True)][-3:]
        return pick(recent)

    def add(step: Callable[[list[Any]], Any], shape: tuple[bool, bool], what: str) -> None:
        steps.append(step)
        text.append(f"v{len(shapes)} = {what}")
        shapes.append(shape)

    for _ in range(length):
        kind = pick(kinds)
        if kind == "unary":
            i, name = operand(), pick(sorted(_UNARY))
            add(lambda v, i=i, f=_UNARY[name]: f(v[i]), shapes[i], f"{name} v{i}")
        elif kind == "of loops":
            i, name, axis = operand(), pick(sorted(_OF_LOOPS)), pick([0, 1, 1])
            shape, more = shapes[i], () if name == "phase" else (axis,)
            if name in ("product", "count", "any"):
                shape = (shape[0] and axis != 0, shape[1] and axis != 1)
            add(lambda v, i=i, f=_OF_LOOPS[name], m=more: f(v[i], *m), shape, f"{name} v{i} {more}")
        elif kind == "binary":
            i, j, name = operand(), operand(), pick(sorted(_BINARY))
            shape = tuple(a or b for a, b in zip(shapes[i], shapes[j], strict=True))
            add(lambda v, i=i, j=j, f=_BINARY[name]: f(v[i], v[j]), shape, f"{name} v{i} v{j}")  # type: ignore[arg-type]
        elif kind == "mask":
            i, name, value = operand(True), pick(sorted(_MASKS)), pick([0.0, -1e30, -jnp.inf])
            add(
                lambda v, i=i, m=_MASKS[name], x=value: jnp.where(m(), v[i], x),
                (True, True),
                f"where {name} v{i} {value}",
            )
        elif kind == "reduce":
            i, name, axis = operand(), pick(sorted(_REDUCE)), pick([0, 1, 1])
            shape = (shapes[i][0] and axis != 0, shapes[i][1] and axis != 1)
            add(
                lambda v, i=i, f=_REDUCE[name], a=axis: f(v[i], axis=a, keepdims=True),
                shape,
                f"{name} v{i} over {axis}",
            )
        elif kind == "dot":
            i, j, axis = operand(True), operand(True), pick([0, 1, 1])
            numbers = (([axis], [axis]), ([1 - axis], [1 - axis]))
            add(
                lambda v, i=i, j=j, n=numbers, a=axis: jnp.expand_dims(jax.lax.dot_general(v[i], v[j], n), a),
                (axis != 0, axis != 1),
                f"dot v{i} v{j} over {axis}",
            )
        else:
            i, axis, guard = operand(True), pick([0, 1, 1]), pick(["finite", "floor", "stop", "none"])
            f = jax.nn.softmax if kind == "softmax" else _guarded
            more = () if kind == "softmax" else (guard,)
            add(
                lambda v, i=i, a=axis, f=f, more=more: f(v[i], a, *more),
                (True, True),
                f"{kind} {more} v{i} over {axis}",
            )
    outputs = sorted({len(shapes) - 1, operand(), operand()} - {0, 1, 2})
    text.append(f"return {outputs}")

    def f(*args: Any) -> Any:
        values = list(args)
        for step in steps:
            values.append(step(values))
        return [values[i] for i in outputs]

    return f, text
