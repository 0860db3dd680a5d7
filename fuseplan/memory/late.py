"""A program that needs less memory where a plan needs the most: values wait for nobody that can be
computed again from what is there anyway.

Those who read such a value after the highest step compute it then (rematerialisation: Chen et al.,
arXiv:1604.06174), from inputs of the function and from values that wait for other reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.memory.liveness import Lives, lives_of, profile
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.search.duplicates import Copies, roots_of, split
from fuseplan.search.materialise import rewritten

_SMALL = 16
"""What is so many times smaller than the value may wait in its place."""


def computed_late(
    lowered: Lowered, kernels: Sequence[Kernel], device: DeviceSpec, once: Collection[int]
) -> tuple[Lowered, list[list[int]]] | None:
    """The program in which later readers compute again what is in the way at the highest step of
    ``kernels``, which are in order, and for each operation the nodes that compute it; None if nothing
    is. The nodes ``once`` are computed once."""
    graph = lowered.graph
    lives = lives_of(graph, kernels)
    needs = profile(lives, range(len(kernels)))
    top = needs.index(max(needs, default=0)) if needs else 0
    waiting = _waiting(graph, lives, top)
    roots = {n for n in roots_of(graph, device) if waiting.intersection(graph.nodes[n].outputs)}
    while roots:
        copies = split(graph, roots, once)
        if copies is None:
            return None
        costly = {n for n in copies.roots if not _is_fed(copies, n, waiting)}
        if not costly:
            return rewritten(lowered, copies, _early_and_late(copies, kernels, top))
        roots = set(copies.roots) - costly
    return None


def _waiting(graph: Graph, lives: Lives, top: int) -> set[int]:
    """The values that are there at a step and that later ones use."""
    return {
        v
        for v, writer, users in zip(lives.values, lives.writers, lives.users, strict=True)
        if writer <= top < users[-1]
    }


def _is_fed(copies: Copies, root: int, waiting: Collection[int]) -> bool:
    """Whether all is there, or small, that ``root`` is computed from."""
    graph = copies.whole
    made = sum(graph.values[v].nbytes for v in graph.nodes[root].outputs)
    seen, queue = {root}, [root]
    while queue:
        for v in graph.nodes[queue.pop()].inputs:
            maker = graph.values[v].producer
            if maker < 0 or v in waiting or graph.values[v].nbytes * _SMALL <= made:
                continue
            if copies.copies[maker] < 2:
                return False
            if maker not in seen:
                seen.add(maker)
                queue.append(maker)
    return True


def _early_and_late(copies: Copies, kernels: Sequence[Kernel], top: int) -> list[tuple[int, ...]]:
    """The nodes that run up to the highest step, and those after; copies with their readers."""
    graph = copies.graph
    step = {n: k for k, kernel in enumerate(kernels) for n in kernel.spec.nodes}
    late: dict[int, bool] = {}
    for node in reversed(graph.nodes):
        n = copies.node[node.id]
        readers = {r for v in node.outputs for r in graph.consumers[v]}
        if copies.copies[n] < 2 or not readers:
            late[node.id] = step[n] > top
        else:
            late[node.id] = all(late[r] for r in readers)
    return [tuple(n for n in sorted(late) if late[n] == after) for after in (False, True)]
