"""Passes along the stream of a kernel of a GPU or a TPU: what is read and computed how often.

Each pass loads anew what it needs and computes again what earlier passes computed on the same
tile: the stream is walked several times because it is too long to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from costmodel.axes import compose
from costmodel.graph import Graph
from costmodel.kernel import Access, KernelSpec


def pass_count(spec: KernelSpec) -> int:
    """How often the streamed axis is walked."""
    return len(spec.passes) or 1


def evaluations(spec: KernelSpec) -> tuple[tuple[int, int], ...]:
    """For each node, how often it is computed on every tile, as (numerator, denominator): in how many
    passes, as far as these walk all tiles; once for what is not."""
    every = tile_count(spec)
    counts = [0] * len(spec.nodes)
    for positions, walked in zip(spec.passes, spec.walked or (every,) * len(spec.passes), strict=True):
        for i in positions:
            counts[i] += walked
    return tuple([(count, every) if count else (1, 1) for count in counts])


def tile_count(spec: KernelSpec) -> int:
    """Tiles of all axes together."""
    return math.prod([axis.n_tiles for axis in spec.axes])


def walked_share(spec: KernelSpec, passes: Sequence[int]) -> tuple[int, int]:
    """What part of their tiles some passes walk."""
    if not spec.walked or not passes:
        return 1, 1
    return sum(spec.walked[k] for k in passes), tile_count(spec) * len(passes)


def readers(graph: Graph, spec: KernelSpec) -> dict[Access, tuple[int, ...]]:
    """For each array read, the passes that need it on every tile."""
    found: dict[Access, list[int]] = {access: [] for access in spec.reads}
    for k, positions in enumerate(spec.passes):
        for i in positions:
            node = graph.nodes[spec.nodes[i]]
            for v, dim_map in zip(node.inputs, node.input_maps, strict=True):
                walked = found.get(Access(v, compose(dim_map, spec.node_axes[i])))
                if walked is not None and k not in walked:
                    walked.append(k)
    return {access: tuple(walked) for access, walked in found.items()}
