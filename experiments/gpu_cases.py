"""The cases of ``experiments.gpu_bench``: programs at sizes beyond a GPU's L2 cache with library kernels and
goals, and the other workloads at their own sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fuseplan.workloads import PUBLISHED, WORKLOADS, Built, Program, Workload, get_workload, of_shapes

OF_COPY = 0.9
"""Of the bandwidth of a copy, what a kernel bound by memory is to reach."""
OF_CUDNN = 0.7
"""Of cuDNN's speed, what attention is to reach."""
NEVER_BELOW = 0.98
"""Of ``jax.jit``'s speed, whatever the workload."""
EPSILON = 1e-5
"""Of the normalisations, as in the workloads."""


@dataclass(frozen=True, slots=True)
class GpuCase:
    """One program to measure, at one size."""

    name: str
    workload: Workload
    sizes: dict[str, int]
    flops: Callable[..., int] | None = None
    """Of the contractions, from the sizes; None where they are not counted."""
    copy_share: float = 0.0
    """What is meant to be reached of a copy's bandwidth, where memory is the limit."""
    speedup: float = NEVER_BELOW
    """What is meant to be reached of ``jax.jit``'s speed."""
    library: str = ""
    """The best library's kernel that JAX can call."""
    by_library: Program | None = None
    library_share: float = 0.0
    """What is meant to be reached of its speed."""
    dtype: str = "bfloat16"

    def build(self, small: bool = False) -> Built:
        """The function and the shapes of its arguments."""
        return self.workload.build(self.dtype, small, **({} if small else self.sizes))

    @property
    def total_flops(self) -> int:
        """Flops of the contractions in full size, 0 where they are not counted."""
        return 0 if self.flops is None else self.flops(**self.sizes)


def least_bytes(f: Program, args: Any) -> int:
    """Bytes of all arguments and results: what any program for ``f`` moves at least."""
    leaves = jax.tree.leaves((args, jax.eval_shape(f, *args)))
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def _program(name: str) -> Program:
    return get_workload(name).build()[0]


_LAYERNORM, _RMSNORM, _GELU_BIAS = map(_program, ("layernorm", "rmsnorm", "gelu_bias"))


def layernorm_vjp(x: Array, scale: Array, bias: Array, cotangent: Array) -> tuple[Array, Any]:
    """LayerNorm and its three gradients."""
    y, pull = jax.vjp(_LAYERNORM, x, scale, bias)
    return y, pull(cotangent)


def layernorm_columns(x: Array, scale: Array, bias: Array) -> Array:
    """LayerNorm over the first dimension of ``x[M, N]``; ``scale[M]``, ``bias[M]``."""
    h = x.astype(jnp.float32)
    centred = h - h.mean(axis=0)
    variance = jnp.square(centred).mean(axis=0)
    return (centred * lax.rsqrt(variance + EPSILON)).astype(x.dtype) * scale[:, None] + bias[:, None]


def residual_rmsnorm(x: Array, branch: Array, scale: Array) -> tuple[Array, Array]:
    """Add a branch to the residual stream and normalise: both results are kept."""
    y = x + branch
    return y, _RMSNORM(y, scale)


def linear_gelu(x: Array, p: dict[str, Array]) -> Array:
    """``gelu(x[M, N] @ w[N, F] + b[F])``."""
    return _GELU_BIAS(x @ p["w"], p["b"])


def _product(x: Array, p: dict[str, Array]) -> Array:
    return x @ p["w"]


def _cudnn(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _cudnn_vjp(q: Array, k: Array, v: Array, cotangent: Array) -> tuple[Array, ...]:
    y, pull = jax.vjp(_cudnn, q, k, v)
    return y, *pull(cotangent)


def _workload(name: str, f: Program, *shapes: Any, **sizes: int) -> Workload:
    small = {"m": 8, "n": 130, "hidden": 70}
    return Workload(name, "", sizes, {k: small[k] for k in sizes}, of_shapes(f, *shapes))


_ROWS = {"m": 16_384, "n": 4096}


def _of_memory(name: str) -> GpuCase:
    return GpuCase(name, get_workload(name), _ROWS, copy_share=OF_COPY)


_HEADS = {"batch": 2, "tokens": 4096, "heads": 16, "width": 128}
_SMALL_HEADS = {"batch": 1, "tokens": 40, "heads": 2, "width": 16}


def _attention(name: str, count: int) -> Workload:
    shapes = ("batch tokens heads width",) * count
    return Workload(name, "", _HEADS, _SMALL_HEADS, of_shapes(_program(name), *shapes))


def _causal_flops(products: int, batch: int, tokens: int, heads: int, width: int) -> int:
    """The flops of causal attention, where each product is of half of the scores."""
    return products * batch * heads * tokens**2 * width


_ALL = (
    _of_memory("layernorm"),
    GpuCase(
        "layernorm_vjp",
        _workload("layernorm_vjp", layernorm_vjp, "m n", "n", "n", "m n", **_ROWS),
        _ROWS,
        copy_share=OF_COPY,
        speedup=2.0,
    ),
    GpuCase(
        "layernorm_columns",
        _workload("layernorm_columns", layernorm_columns, "m n", "m", "m", **_ROWS),
        {"m": 4096, "n": 16_384},
        copy_share=OF_COPY,
        speedup=2.0,
    ),
    _of_memory("rmsnorm"),
    _of_memory("softmax"),
    _of_memory("gelu_bias"),
    _of_memory("swiglu"),
    GpuCase(
        "residual_rmsnorm",
        _workload("residual_rmsnorm", residual_rmsnorm, "m n", "m n", "n", **_ROWS),
        _ROWS,
        copy_share=OF_COPY,
    ),
    GpuCase("adam_update", get_workload("adam_update"), {"width": 1536}, copy_share=OF_COPY, dtype="float32"),
    GpuCase(
        "cross_entropy",
        get_workload("cross_entropy"),
        {"m": 8192, "classes": 50_257},
        copy_share=OF_COPY,
    ),
    GpuCase(
        "linear_gelu",
        _workload(
            "linear_gelu", linear_gelu, "m n", {"w": "n hidden", "b": "hidden"}, m=8192, n=4096, hidden=4096
        ),
        {"m": 8192, "n": 4096, "hidden": 4096},
        lambda m, n, hidden: 2 * m * n * hidden,
        library="cuBLAS, the product alone",
        by_library=_product,
    ),
    GpuCase(
        "gated_mlp",
        get_workload("gated_mlp"),
        {"m": 8192, "n": 2048, "hidden": 5632},
        lambda m, n, hidden: 6 * m * n * hidden,
    ),
    GpuCase(
        "causal_attention",
        _attention("causal_attention", 3),
        _HEADS,
        partial(_causal_flops, 2),
        library="cuDNN",
        by_library=_cudnn,
        library_share=OF_CUDNN,
    ),
    GpuCase(
        "causal_attention_vjp",
        _attention("causal_attention_vjp", 4),
        _HEADS,
        partial(_causal_flops, 7),
        library="cuDNN",
        by_library=_cudnn_vjp,
        library_share=OF_CUDNN,
    ),
)  # fmt: skip

CASES: dict[str, GpuCase] = {case.name: case for case in _ALL}
"""Those with goals, in the order in which they are measured."""

_PAIRWISE = (
    "gaussian_gram",
    "gaussian_gram_vjp",
    "gaussian_differences",
    "laplacian",
    "laplacian_vjp",
    "inverse_distance",
    "distance_logsumexp",
    "distance_logsumexp_vjp",
    "nearest_neighbour",
    "kmeans_assign",
    "nbody",
    "nbody_energy_grad",
)
_TOO_LARGE = ("gpt2_train_24",)
"""Their check in float64 takes more memory or time than the rest together."""

MORE: dict[str, GpuCase] = {
    name: GpuCase(name, get_workload(name), get_workload(name).sizes, dtype="float32")
    for name in (*_PAIRWISE, *WORKLOADS, *PUBLISHED)
    if name not in CASES and name not in _TOO_LARGE
}
"""The other workloads, at their own sizes, whose one goal is ``jax.jit``'s time."""
