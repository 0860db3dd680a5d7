"""Workloads with intermediates much larger than their arguments: scores, logits, pairs of points, hidden
layers.

In small size an extent is about a hundred, which makes several ragged tiles.
"""

from __future__ import annotations

from functools import partial

import jax

from fuseplan.workloads import attention, functions, gpt2, lookups, optimizer, pairwise
from fuseplan.workloads.workload import (
    GATED_MLP,
    HEADS,
    LINEAR_CLASSES,
    Built,
    Program,
    Workload,
    array,
    of_shapes,
)

_SMALL_HEADS = {"batch": 2, "tokens": 133, "heads": 4, "width": 10}


def _attention(name: str, description: str, f: Program, cotangent: bool = False) -> Workload:
    sizes = {"batch": 1, "tokens": 4096, "heads": 8, "width": 64}
    count = 4 if cotangent else 3
    make = of_shapes(f, *(HEADS,) * count)
    return Workload(name, description, sizes, {"batch": 2, "tokens": 133, "heads": 3, "width": 10}, make)


def _grouped(name: str, description: str, f: Program, cotangent: bool = False) -> Workload:
    def make(dtype: str, batch: int, tokens: int, heads: int, shared: int, width: int) -> Built:
        queries, keys = (array(dtype, batch, tokens, n, width) for n in (heads, shared))
        return f, (queries, keys, keys, queries)[: 3 + cotangent]

    sizes = {"batch": 1, "tokens": 4096, "heads": 8, "shared": 2, "width": 64}
    return Workload(name, description, sizes, {**_SMALL_HEADS, "shared": 2}, make)


def _window(dtype: str, batch: int, tokens: int, heads: int, width: int, window: int) -> Built:
    f = partial(attention.window_attention, window=window)
    return f, (array(dtype, batch, tokens, heads, width),) * 3


def _pairs(name: str, description: str, f: Program, args: str, m: int, n: int, features: int = 3) -> Workload:
    """``args`` has a letter for each argument: ``x`` points ``[M, D]``, ``y`` points ``[N, D]``, ``b``
    weights ``[N]``, ``g`` a cotangent ``[M]``."""

    def make(dtype: str, m: int, n: int, features: int) -> Built:
        shapes = {"x": (m, features), "y": (n, features), "b": (n,), "g": (m,)}
        return f, tuple(array(dtype, *shapes[letter]) for letter in args)

    sizes = {"m": m, "n": n, "features": features}
    small = {"m": 131 if "y" in args else 139, "n": 139, "features": features}
    return Workload(name, description, sizes, small, make)


def _block(dtype: str, heads: int, **sizes: int) -> Built:
    config = gpt2.Config(layers=1, heads=heads, **sizes)
    x = array(dtype, config.batch, config.tokens, config.width)
    return partial(gpt2.block, heads=heads), (gpt2.block_params(config, dtype), x)


def _block_train(dtype: str, heads: int, **sizes: int) -> Built:
    _, (params, x) = _block(dtype, heads, **sizes)
    state = jax.eval_shape(optimizer.adam_init, params)
    return partial(gpt2.block_train_step, heads=heads), (params, state, x, x)


_BLOCK = {"width": 768, "heads": 12, "tokens": 2048, "batch": 1}
_SMALL_BLOCK = {"width": 30, "heads": 3, "tokens": 133, "batch": 2}
_POINTS = 20_000
BONDS = ("points 3", "m", "int32: m", "int32: m")
_BONDS, _SMALL_BONDS = {"points": 20_000, "m": 4_000_000}, {"points": 67, "m": 139}
BAGS = ("rows n", "m length", "int32: m length")
_BAGS = {"rows": 50_000, "n": 64, "m": 20_000, "length": 32}
_SMALL_BAGS = {"rows": 67, "n": 10, "m": 131, "length": 5}

_ALL = (
    _attention("full_attention", "softmax attention without a mask", functions.attention),
    _attention("full_attention_vjp", "it and its three gradients", attention.full_attention_vjp, True),
    _attention("causal_attention_vjp", "causal attention and its three gradients",
               attention.causal_attention_vjp, True),
    _attention("alibi_attention", "causal attention with ALiBi's linear bias", attention.alibi_attention),
    _grouped("grouped_attention", "causal attention, 4 query heads to each key head",
             attention.grouped_attention ),
    _grouped("grouped_attention_vjp", "it and its three gradients", attention.grouped_attention_vjp, True),
    Workload("window_attention", "causal attention to the last 512 keys",
             {"batch": 1, "tokens": 4096, "heads": 8, "width": 64, "window": 512},
             {**_SMALL_HEADS, "window": 17}, _window),
    Workload("gated_mlp_768", "the SwiGLU feed-forward layer at GPT-2's width",
             {"m": 4096, "n": 768, "hidden": 3072}, {"m": 131, "n": 34, "hidden": 150},
             of_shapes(functions.gated_mlp, "m n", GATED_MLP)),
    Workload("token_losses", "projection to the classes and the cross-entropy of each row",
             {"m": 4096, "n": 512, "classes": 131_072}, {"m": 131, "n": 34, "classes": 150},
             of_shapes(functions.linear_token_losses, *LINEAR_CLASSES)),
    _pairs("gaussian_gram", "Gaussian kernel sum, Gram form", pairwise.gaussian_gram, "xyb", _POINTS,
           _POINTS ),
    _pairs("gaussian_gram_vjp", "its three gradients", pairwise.gaussian_gram_vjp, "xybg", _POINTS, _POINTS),
    _pairs("gaussian_differences", "Gaussian kernel sum from differences", pairwise.gaussian_differences,
           "xyb", _POINTS, _POINTS),
    _pairs("laplacian", "Laplacian kernel sum", pairwise.laplacian, "xyb", _POINTS, _POINTS),
    _pairs("laplacian_vjp", "its three gradients", pairwise.laplacian_vjp, "xybg", _POINTS, _POINTS),
    _pairs("inverse_distance", "a sum of weights over distances", pairwise.inverse_distance, "xyb", _POINTS,
           _POINTS),
    _pairs("distance_logsumexp", "log-sum-exp of squared distances", pairwise.distance_logsumexp, "xy",
           _POINTS, _POINTS),
    _pairs("distance_logsumexp_vjp", "its two gradients", pairwise.distance_logsumexp_vjp, "xyg", _POINTS,
           _POINTS),
    _pairs("nearest_neighbour", "the index of the nearest point", pairwise.nearest, "xy", _POINTS, _POINTS),
    _pairs("kmeans_assign", "the assignment step of k-means", pairwise.nearest, "xy", 100_000, 1024, 16),
    _pairs("nbody", "softened gravity on each body", pairwise.nbody, "xb", 16_384, 16_384),
    _pairs("nbody_energy_grad", "potential energy of bodies and its gradient", pairwise.nbody_energy_grad,
           "xb", 16_384, 16_384),
    _pairs("chamfer", "distances to the nearest point, both ways", pairwise.chamfer, "xy", 8000, 8000),
    _pairs("energy_distance", "the energy distance of two samples", pairwise.energy_distance, "xy", 4000,
           4000, 8),
    _pairs("neighbour_counts", "points within a distance of one", pairwise.neighbour_counts, "xy", 8000,
           8000),
    _pairs("distance_moments", "means and variances of distances, by a function of the user",
           pairwise.distance_moments, "xy", 8000, 8000),
    Workload("magnetic_field", "the field of currents, by Biot and Savart", {"m": 6000, "n": 6000},
             {"m": 131, "n": 139}, of_shapes(pairwise.magnetic_field, "m 3", "n 3", "n 3")),
    Workload("kernel_products", "products of kernels of masked coordinates",
             {"m": 2000, "masks": 8, "features": 6}, {"m": 131, "masks": 3, "features": 5},
             of_shapes(pairwise.kernel_products, "m features", "masks features", "m")),
    Workload("structure_factor", "sums of complex waves", {"n": 8000, "waves": 4000},
             {"n": 139, "waves": 131}, of_shapes(pairwise.structure_factor, "n 3", "waves 3", "n")),
    Workload("bond_energy", "an energy of named pairs of points", _BONDS, _SMALL_BONDS,
             of_shapes(lookups.bond_energy, *BONDS)),
    Workload("bond_forces", "its gradient", _BONDS, _SMALL_BONDS, of_shapes(lookups.bond_forces, *BONDS)),
    Workload("embedding_bags", "weighted sums of rows of a table", _BAGS, _SMALL_BAGS,
             of_shapes(lookups.embedding_bags, *BAGS)),
    Workload("embedding_bags_vjp", "its gradients by the table and the weights", _BAGS, _SMALL_BAGS,
             of_shapes(lookups.embedding_bags_vjp, *BAGS, "m n")),
    Workload("column_histograms", "histograms of all pairs of columns", {"m": 200_000, "columns": 12},
             {"m": 131, "columns": 3}, of_shapes(lookups.column_histograms, "m columns")),
    Workload("mean_gradient", "the mean of gradients of many batches", {"batches": 512, "m": 2, "n": 65_536},
             {"batches": 3, "m": 5, "n": 34},
             of_shapes(lookups.mean_gradient, "n", "batches m n", "batches m")),
    Workload("block_2048", "a transformer block of GPT-2 at 2,048 tokens", _BLOCK, _SMALL_BLOCK, _block),
    Workload("block_2048_train", "its training step: loss, gradients, Adam", _BLOCK, _SMALL_BLOCK,
             _block_train ),
)  # fmt: skip

LARGE: dict[str, Workload] = {workload.name: workload for workload in _ALL}
