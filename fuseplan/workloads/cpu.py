"""The cases of ``fuseplan bench cpu``: workloads with goals for a CPU.

A goal is a pair of ratios of ``jax.jit`` to fuseplan: of times, and of bytes of temporaries. Workloads
without a goal are measured too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from costmodel.calibrate import capacity_bytes
from fuseplan.bench.cpu import Args, Case, Goal, Rows, Sample
from fuseplan.bench.float64 import in_float64
from fuseplan.support.errors import UnknownNameError
from fuseplan.workloads import attention, functions, get_workload, pairwise
from fuseplan.workloads.workload import Program, make_args

GOALS: dict[str, Goal | None] = {
    "causal_attention": Goal(4, 100),
    "full_attention": Goal(2, 50),
    "grouped_attention": Goal(2, 50),
    "window_attention": Goal(2, 50),
    "alibi_attention": Goal(2, 50),
    "causal_attention_vjp": Goal(3, 100),
    "full_attention_vjp": Goal(2, 50),
    "linear_cross_entropy": Goal(1.9, 15),
    "linear_cross_entropy_grad": Goal(1.3, 6),
    "mlp": Goal(1.3, 3),
    "gated_mlp_768": Goal(1.3, 3),
    "gaussian_gram": Goal(4, 200),
    "gaussian_differences": Goal(1.4, 200),
    "gaussian_gram_vjp": Goal(3, 100),
    "laplacian": None,
    "laplacian_vjp": None,
    "inverse_distance": None,
    "distance_logsumexp": None,
    "distance_logsumexp_vjp": None,
    "nearest_neighbour": None,
    "kmeans_assign": None,
    "nbody": None,
    "nbody_energy_grad": None,
    "chamfer": None,
    "energy_distance": None,
    "distance_moments": None,
    "magnetic_field": None,
    "kernel_products": None,
    "structure_factor": None,
    "bond_energy": None,
    "bond_forces": None,
    "embedding_bags": None,
    "embedding_bags_vjp": None,
    "mean_gradient": None,
    "block_2048": Goal(1.5, 4),
    "block_2048_train": Goal(1.5, 4),
    "layernorm": Goal(0.98, 1),
    "softmax": Goal(0.98, 1),
    "gelu_bias": Goal(0.98, 1),
    "adam_update": Goal(0.98, 1),
    "conv_block": Goal(0.98, 1),
}
"""In the order in which they are measured."""

_SEVERAL_TILES = {
    "causal_attention": {"tokens": 133},
    "linear_cross_entropy": {"m": 131, "classes": 150},
    "linear_cross_entropy_grad": {"m": 131, "classes": 150},
    "mlp": {"m": 131, "hidden": 150},
}
"""Larger small sizes for workloads that would otherwise fit into one tile."""


_ROWS_OF_TABLES = {"bond": "points", "embedding": "rows"}
"""The size that bounds the indices of a lookup, by the beginning of a workload's name."""


def get_cases(names: Sequence[str] = (), small: bool = False, huge: bool = False) -> list[Case]:
    """The cases of the given names, or all.

    Args:
        names: names of workloads, with or without a goal.
        small: whether to use the small, ragged sizes.
        huge: whether to select the cases that ``jax.jit`` cannot hold in memory instead.

    Raises:
        UnknownNameError: there is no such workload, or none that is huge.
    """
    if huge:
        if unknown := [name for name in names if name not in HUGE]:
            close = difflib.get_close_matches(unknown[0], HUGE, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise UnknownNameError(f"no huge workload is named {unknown[0]!r}{hint} "
                                   f"The huge workloads: {', '.join(HUGE)}.")  # fmt: skip
        return [HUGE[name](name, small) for name in names or HUGE]
    return [_case(name, small) for name in names or GOALS]


def _case(name: str, small: bool) -> Case:
    sizes = _SEVERAL_TILES.get(name, {}) if small else {}
    workload = get_workload(name)
    f, args = workload.build("float32", small, **sizes)
    rows = _ROWS_OF_TABLES.get(name.partition("_")[0])
    if rows is not None:  # indices of the whole table
        args = make_args(args, integers_below=(workload.small_sizes if small else workload.sizes)[rows])
    goal = None if small else GOALS.get(name)  # a goal is for the full size
    return Case(name, f, args, goal, _SAMPLES.get(name), _SETTLED.get(name))


def _by_points(f: Program, sliced: Sequence[int] = (0,), of_result: int | None = None) -> Sample:
    """A sample of the points of the first argument, checked in float64. The arguments at the positions
    ``sliced`` are reduced to the sample; the result, or the one at position ``of_result``, has a row for each
    point."""

    def picked(result: Any) -> Any:
        return result if of_result is None else result[of_result]

    def expected(args: Args, rows: Rows) -> Any:
        return picked(in_float64(f, tuple(a[rows] if i in sliced else a for i, a in enumerate(args))))

    return Sample(256, 0, expected, lambda result, rows: np.asarray(picked(result))[rows])


def _rows(result: Any, rows: Rows) -> np.ndarray:
    return np.asarray(result)[rows]


def _of_forces(args: Args, rows: Rows) -> Any:
    points, masses = args
    return in_float64(pairwise.forces, (points[rows], points, masses))


_SAMPLES = {
    "gaussian_gram": _by_points(pairwise.gaussian_gram),
    "gaussian_gram_vjp": _by_points(pairwise.gaussian_gram_vjp, (0, 3), 0),
    "gaussian_differences": _by_points(pairwise.gaussian_differences),
    "laplacian": _by_points(pairwise.laplacian),
    "laplacian_vjp": _by_points(pairwise.laplacian_vjp, (0, 3), 0),
    "inverse_distance": _by_points(pairwise.inverse_distance),
    "distance_logsumexp": _by_points(pairwise.distance_logsumexp),
    "distance_logsumexp_vjp": _by_points(pairwise.distance_logsumexp_vjp, (0, 2), 0),
    "nearest_neighbour": Sample(256, 0, pairwise.exact_nearest_distances, _rows),
    "nbody": Sample(256, 0, _of_forces, _rows),
}
_SETTLED = dict.fromkeys(("nearest_neighbour", "kmeans_assign"), pairwise.chosen_distances)

# --- cases that jax.jit cannot hold in memory
# ----------------------------------------------------------------


def _first_batch_rows(result: Any, rows: Rows) -> np.ndarray:
    return np.asarray(result)[0, rows]


def _huge_attention(name: str, small: bool) -> Case:
    """Causal attention with 32,768 keys, whose scores take 34 GB."""
    sizes = {"tokens": 133 if small else 32_768}
    f, args = get_workload("causal_attention").build("float32", small, batch=1, **sizes)
    return Case(
        name, f, args, sample=Sample(64, 1, attention.exact_causal_rows, _first_batch_rows), alone=True
    )


def _huge_cross_entropy(name: str, small: bool) -> Case:
    """Cross-entropies with logits of 1.5 times this machine's memory, but at most 96 GB."""
    sizes = {"m": 131 if small else huge_tokens(capacity_bytes())}
    f, args = get_workload("token_losses").build("float32", small, **sizes)
    return Case(name, f, args, sample=Sample(64, 0, functions.exact_token_losses, _rows), alone=True)


def huge_tokens(memory_bytes: int, classes: int = 131_072) -> int:
    """The number of tokens, a multiple of 1,024, whose float32 logits take 1.5 times the memory, but at most
    96 GB.

    Example:
        >>> huge_tokens(24 * 2**30)
        73728
    """
    wanted_bytes = min(1.5 * memory_bytes, 96e9)
    return 1024 * -(-int(wanted_bytes) // (4 * classes * 1024))


HUGE: dict[str, Callable[[str, bool], Case]] = {
    "attention_32768": _huge_attention,
    "token_losses_huge": _huge_cross_entropy,
}
