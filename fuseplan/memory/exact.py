"""Groups and order together, exactly, for small graphs."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.graph import Graph
from fuseplan.memory.order_dp import Steps, TooLargeError
from fuseplan.memory.region import Region
from fuseplan.plan.fusion_plan import Kernel
from fuseplan.schedule.pricing import PriceBook, Pricing
from fuseplan.search.components import crossable_edges
from fuseplan.support.work import Work

MAX_NODES, MAX_STEPS = 40, 3_000_000
"""Nodes of a graph and steps looked at: a second of work, and pricing of 6,000 groups at most. A
graph that exceeds them is not searched exactly."""


@dataclass(frozen=True, slots=True)
class Exact:
    """The fastest kernels under the limit in an order that keeps to it, None if there are none;
    then ``smallest_bytes`` is the smallest peak of any plan."""

    kernels: tuple[Kernel, ...] | None
    smallest_bytes: int


def plan_exactly(graph: Graph, pricing: Pricing, max_peak_bytes: int, work: Work) -> Exact | None:
    """The fastest plan whose peak is at most ``max_peak_bytes``, of those the one that moves the
    fewest bytes, then of the fewest kernels; None where the graph is too large to say, or
    ``work`` is over."""
    if len(graph.nodes) > MAX_NODES:
        return None
    try:
        nodes = tuple(range(len(graph.nodes)))
        book = PriceBook(graph, pricing)
        siblings = crossable_edges(graph, book).siblings
        region = Region(graph, book, nodes, Steps(MAX_STEPS, work), siblings=siblings)
        way = region.fastest(max_peak_bytes)
        if way is not None:
            return Exact(way.kernels, max_peak_bytes)
        return Exact(None, region.lowest().cost[0])
    except TooLargeError:
        return None
