"""Passes along the stream of a kernel of a GPU or a TPU: what is read and computed how often.

Each pass loads anew what it needs and computes again what earlier passes computed on the same
tile: the stream is walked several times because it is too long to be kept.
"""

from __future__ import annotations

from costmodel.axes import compose
from costmodel.graph import Graph
from costmodel.kernel import Access, KernelSpec


def pass_count(spec: KernelSpec) -> int:
    """How often the streamed axis is walked."""
    return len(spec.passes) or 1


def evaluations(spec: KernelSpec) -> tuple[int, ...]:
    """For each node, in how many passes it is computed on every tile; one for what is not."""
    counts = [0] * len(spec.nodes)
    for positions in spec.passes:
        for i in positions:
            counts[i] += 1
    return tuple([count or 1 for count in counts])


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
