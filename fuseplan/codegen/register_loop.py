"""The loop over a streamed axis with accumulators in registers: that of every kernel for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from costmodel.kernel import Access
from fuseplan.codegen import body as bodies
from fuseplan.codegen.body import Blocks, Body

Totals = list[list[Any]]
"""What each accumulator of a body has, result by result."""


def accumulated(
    body: Body,
    outer: Blocks,
    position: Sequence[Any],
    load: Callable[[Access, Sequence[Any]], Any],
    start: Totals,
) -> Totals:
    """``start`` with the parts of all tiles of the stream at a position of the grid; ``outer`` are the
    blocks that are the same on all of them, ``load`` has those of a tile."""
    streamed = body.spec.streamed
    assert streamed is not None

    def turn(k: Any, totals: Totals) -> Totals:
        at = [*position[:streamed], k, *position[streamed + 1 :]]
        blocks = dict(outer)

        def loaded(access: Access) -> Any:
            return load(access, at)

        bodies.evaluate(body, body.loop, blocks, at, loaded)
        combined = []
        for step, total in zip(body.accumulators, totals, strict=True):
            parts = bodies.partial_results(body, step, blocks, at, loaded)
            combine = step.rule.reduction.combine  # type: ignore[union-attr]
            combined.append([combine(t, p) for t, p in zip(total, parts, strict=True)])
        return combined

    turns = body.spec.axes[streamed].n_tiles
    return turn(0, start) if turns == 1 else lax.fori_loop(0, turns, turn, start)
