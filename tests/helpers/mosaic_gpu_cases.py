"""One Mosaic GPU kernel a case, as in ``emit_cases``: rows that threads hold whole, tiles of columns
that are ragged, matmuls that nothing reaches out of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from costmodel.axes import compose
from fuseplan.schedule.addressing import is_addressable
from tests.helpers.emit_cases import BRAIN, FLOATS, Case, causal_softmax, layernorm, layernorm_rows, rmsnorm
from tests.helpers.specs import P, S, Tiled, hand_spec, whole_group

HALF = ("bfloat16", "float16")
INTEGER = ("int32",)


@dataclass(frozen=True, slots=True)
class GpuCase:
    """A case with the tiles of one kernel."""

    case: Case
    tiles: tuple[Tiled, ...]
    turned: bool = False
    """Whether an operand is read the other way round from shared memory: JAX 0.10 does not
    interpret that."""


def _case(
    name: str,
    f: Callable[..., Any],
    shapes: tuple[Any, ...],
    tiles: tuple[Tiled, ...],
    dtypes: tuple[str, ...] = BRAIN,
    turned: bool = False,
) -> GpuCase:
    return GpuCase(Case(name, f, shapes, None, None, dtypes), tiles, turned)


def _dot(left: int, right: int, batched: bool = False) -> Callable[..., Any]:
    """A matmul that contracts these dimensions, with an epilogue that stays of order one."""
    batch = ((0,), (0,)) if batched else ((), ())
    numbers = (((left + batched,), (right + batched,)), batch)

    def f(a: Any, b: Any, bias: Any, residual: Any) -> Any:
        y = lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)
        return (jnp.tanh(y * 0.1 + bias) + residual.astype(jnp.float32)).astype(a.dtype)

    return f


_ROWS, _ROW = (Tiled(0, 0, P, 4),), (Tiled(0, 0, P, 1),)
_BOTH = (Tiled(0, 0, P, 4), Tiled(0, 1, P, 128))
_MATMUL = (Tiled(-1, 0, P, 64), Tiled(-1, 1, P, 64))

CASES = (
    _case("chain", lambda x, y: jnp.tanh(x) * 2 + y - 0.5, ((13, 257), (13, 257)), _BOTH, FLOATS),
    _case("scalar-operand", lambda x, s: x * s + 1, ((13, 257), ()), _BOTH),
    _case("vector", lambda x, y: x * jnp.exp(y), ((300,), (300,)), (Tiled(0, 0, P, 128),)),
    _case("bias-gelu", lambda x, b: jax.nn.gelu(x + b), ((13, 257), (257,)), _BOTH),
    _case("two-results", lambda x: (jnp.exp(x) * 2, jnp.sqrt(jnp.abs(x)) - 1), ((13, 257),), _BOTH),
    _case(
        "columns-between",
        lambda x: jnp.exp(x) * 2,
        ((8, 128, 3),),
        (Tiled(0, 0, P, 4), Tiled(0, 1, P, 64), Tiled(0, 2, P, 1)),
    ),
    _case(
        "merge-batch",
        lambda x, b: jnp.tanh(x.reshape(40, 128)) + b,
        ((5, 8, 128), (128,)),
        (Tiled(0, 0, P, 1), Tiled(0, 1, P, 4)),
    ),
    _case("softmax", lambda x: jax.nn.softmax(x, -1), ((5, 160),), _ROWS, FLOATS),
    _case("softmax-a-row-at-a-time", lambda x: jax.nn.softmax(x, -1), ((5, 256),), _ROW, FLOATS),
    _case("causal", causal_softmax, ((3, 12, 96),), (Tiled(0, 0, P, 1), Tiled(0, 1, P, 4))),
    _case("rmsnorm", rmsnorm, ((13, 256), (256,)), _ROWS),
    _case("layernorm", layernorm, ((13, 256), (256,), (256,)), _ROW),
    _case("layernorm-rows", layernorm_rows, ((13, 256), (256,), (13, 256)), _ROWS, FLOATS),
    _case("statistics", lambda x: (x.mean(1), (x * x).sum(1)), ((20, 256),), _ROW),
    _case(
        "long-rows",
        lambda x: (jnp.exp(x).sum(1), x.max(1)),
        ((20, 300),),
        (Tiled(0, 0, P, 4), Tiled(0, 1, S, 64)),
    ),
    _case(
        "columns",
        lambda x, y: (x * y).sum(0),
        ((60, 257), (60, 257)),
        (Tiled(0, 0, S, 16), Tiled(0, 1, P, 128)),
        FLOATS,
    ),
    _case("sum", lambda x: (x * x * 0.01).sum(), ((60, 256),), (Tiled(0, 0, S, 8),)),
    _case(
        "integers",
        lambda a, b: (
            jnp.where((a > b) & (b != 3), a << 1, jnp.maximum(b, 3) % 7 - (a >> 1)),
            a.astype(bool) * b,
        ),
        ((13, 257, "int32"), (13, 257, "int32")),
        _BOTH,
        INTEGER,
    ),
    _case("integer-sums", lambda a: (a.sum(1), a.max(1), a.min(1)), ((20, 160, "int32"),), _ROWS, INTEGER),
    _case(
        "matmul",
        _dot(1, 0),
        ((128, 256), (256, 64), (64,), (128, 64)),
        (*_MATMUL, Tiled(0, 1, S, 64)),
        HALF,
    ),
    _case(
        "matmul-bias",
        lambda x, w, b: lax.dot(x, w, preferred_element_type=jnp.float32) + b.astype(jnp.float32),
        ((64, 128), (128, 64), (64,)),
        (*_MATMUL, Tiled(0, 1, S, 64)),
        HALF,
    ),
    _case(
        "matmul-residual",
        lambda x, w, y: lax.dot(x, w, preferred_element_type=jnp.float32) + y,
        ((64, 128), (128, 64), (64, 64, "float32")),
        (*_MATMUL, Tiled(0, 1, S, 64)),
        HALF,
    ),
    _case(
        "matmul-by-two-warpgroups",
        _dot(1, 0),
        ((128, 256), (256, 128), (128,), (128, 128)),
        (Tiled(-1, 0, P, 128), Tiled(-1, 1, P, 128), Tiled(0, 1, S, 64)),
        HALF,
    ),
    _case(
        "matmul-nt",
        _dot(1, 1),
        ((64, 128), (64, 128), (64,), (64, 64)),
        (*_MATMUL, Tiled(0, 1, S, 128)),
        HALF,
        turned=True,
    ),
    _case(
        "matmul-tn",
        _dot(0, 0),
        ((128, 128), (128, 64), (64,), (128, 64)),
        (Tiled(-1, 0, P, 128), Tiled(-1, 1, P, 64), Tiled(0, 0, S, 64)),
        HALF,
        turned=True,
    ),
    _case(
        "matmul-batched",
        _dot(1, 0, batched=True),
        ((2, 64, 128), (2, 128, 64), (64,), (2, 64, 64)),
        (Tiled(-1, 0, P, 1), Tiled(-1, 1, P, 64), Tiled(-1, 2, P, 64), Tiled(0, 2, S, 64)),
        HALF,
    ),
    _case(
        "matmul-heads",
        lambda x, w: jnp.tanh(x @ w).reshape(64, 2, 64),
        ((64, 64), (64, 128)),
        (Tiled(-1, 0, P, 64), Tiled(-1, 1, P, 1), Tiled(-1, 2, P, 64), Tiled(0, 1, S, 64)),
        HALF,
    ),
    _case(
        "matmul-two-depths",
        lambda x, w: jnp.einsum("thd,hdn->tn", x, w) + 1,
        ((64, 2, 64), (2, 64, 64)),
        (*_MATMUL, Tiled(0, 1, S, 1)),
        HALF,
    ),
)

BY_NAME = {c.case.name: c for c in CASES}


def is_dealt(f: Callable[..., Any], avals: tuple[Any, ...], *tiled: Tiled) -> bool:
    """Whether a warpgroup holds every block of ``f`` as one kernel."""
    lowered = whole_group(f, *avals)
    spec = hand_spec(lowered, "mosaic_gpu", *tiled)
    nodes = zip(lowered.graph.nodes, spec.node_axes, strict=True)
    made = [compose(m, own) for node, own in nodes for m in node.output_maps]
    sizes, tiles = [axis.size for axis in spec.axes], [axis.tile for axis in spec.axes]
    return is_addressable(sizes, tiles, [*(a.axes for a in (*spec.reads, *spec.writes)), *made])


def exchanged(f: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """``f`` of integers that stand for booleans, and making such: Mosaic GPU reads and writes no others."""

    def g(*args: Any) -> Any:
        made = f(*((x != 0 for x in args) if dtype == "bool" else args))
        return jax.tree.map(lambda y: y.astype("int32") if y.dtype == "bool" else y, made)

    return g
