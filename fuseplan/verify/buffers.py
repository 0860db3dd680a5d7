"""Check from scratch that the temporaries of a plan have a place each while they are in use."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from dataclasses import replace

from costmodel.memory import is_bitcast
from fuseplan.memory.allocation import ALIGNMENT_BYTES, Buffer, place_buffers
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.verify.kernel import require


def plan_buffers(plan: FusionPlan) -> tuple[Buffer, ...]:
    """Where each temporary lies in an arena that they share, and the kernels between which it is in use, by
    first kernel; checked. Takes up to 0.2 s."""
    return check_buffers(plan, place_buffers(plan.graph, plan.kernels))


def check_buffers(plan: FusionPlan, buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """Return ``buffers`` unchanged if each temporary of ``plan`` has one while it is in use, and
    no two lie in the same place at the same time.

    Raises:
        InvalidPlanError: otherwise.
    """
    graph = plan.graph
    home = list(range(len(graph.values)))
    uses: dict[int, list[int]] = {}
    tiles: list[Buffer] = []
    for k, kernel in enumerate(plan.kernels):
        if is_bitcast(graph, kernel.spec):
            for node in (graph.nodes[n] for n in kernel.spec.nodes):
                for v in node.outputs:
                    home[v] = home[node.inputs[0]]
        for access in kernel.spec.reads + kernel.spec.writes:
            uses.setdefault(home[access.value], []).append(k)
        if kernel.spec.capabilities.loop_nest and kernel.cost.onchip_bytes:
            tiles.append(Buffer(-1, 0, kernel.cost.onchip_bytes, k, k))
    kept = {*graph.inputs, *(home[v] for v in graph.outputs)}
    temporaries = {v: ks for v, ks in uses.items() if v not in kept and graph.values[v].nbytes}
    expected = [Buffer(v, 0, graph.values[v].nbytes, ks[0], ks[-1]) for v, ks in temporaries.items()] + tiles
    given = [replace(b, offset_bytes=0) for b in buffers]
    odd = Counter(expected) - Counter(given) or Counter(given) - Counter(expected)
    require(not odd, f"expected a buffer for each temporary while it is in use, but for {next(iter(odd), 0)}")
    alive: list[tuple[int, int, int]] = []  # start, end and last kernel, by start
    for b in sorted(buffers, key=lambda b: b.first):
        require(b.offset_bytes >= 0 and b.offset_bytes % ALIGNMENT_BYTES == 0, f"{b} is not aligned")
        alive = [row for row in alive if row[2] >= b.first]
        at = bisect(alive, (b.offset_bytes, b.end_bytes, b.last))
        require(not at or alive[at - 1][1] <= b.offset_bytes, f"{b} overlaps what lies below it")
        require(at == len(alive) or b.end_bytes <= alive[at][0], f"{b} overlaps what lies above it")
        alive.insert(at, (b.offset_bytes, b.end_bytes, b.last))
    return buffers
