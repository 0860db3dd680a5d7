"""A group in passes before it is run: its steps, its passes, and the tiles that they visit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.kernel import AxisRole, KernelSpec, block_shape
from fuseplan.codegen.body import live_ins
from fuseplan.codegen.cpu_loops.tiles import Position
from fuseplan.codegen.step import Step, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.masks.dead_tiles import Skips
from fuseplan.schedule.nests.cpu import program_of
from fuseplan.schedule.nests.live_tiles import TileRange, ranges_of, skips_of
from fuseplan.schedule.nests.online_rescaling import reduced_axes


class Nest:
    """A loop nest, or a kernel in passes; nothing in it depends on the arrays it is run on."""

    def __init__(self, spec: KernelSpec, lowered: Lowered) -> None:
        program = program_of(lowered.graph, spec)
        assert program is not None, "the schedule offers no nest without passes"
        self.spec, self.program = spec, program
        self.steps = [make_step(spec, lowered, i) for i in range(len(spec.nodes))]
        self.avals = lowered.avals
        self.reads = live_ins(spec)
        self.writes = tuple(w.value for w in spec.writes)
        cut = [a for a, axis in enumerate(spec.axes) if not axis.role.is_whole]
        self.outer = [a for a in cut if a != program.stream]
        nodes = [lowered.graph.nodes[n] for n in spec.nodes]
        self.reduced = [
            reduced_axes(node, own) & set(cut) for node, own in zip(nodes, spec.node_axes, strict=True)
        ]
        self.inner = [a for a, axis in enumerate(spec.axes) if axis.role == AxisRole.INNER]
        self.scales = {i: scale for p in program.passes for i, scale in p.sinks}
        self.skips = skips_of(lowered, spec, program) if spec.capabilities.loop_nest else []
        self.ranges: list[TileRange | None] = [None] * len(program.passes)
        """Of a GPU's or a TPU's kernel, the tiles that each pass walks."""
        if not spec.capabilities.loop_nest and spec.walked:
            self.ranges = ranges_of(lowered, spec, program)

    @property
    def n_tables(self) -> int:
        """How many ``tables`` the kernel reads."""
        return sum(r is not None for r in self.ranges)

    def tables(self, arrays: Sequence[Any]) -> list[Any]:
        """The ranges of tiles that passes walk, int32 vectors, for the arrays that are read."""
        values = dict(zip(self.reads, arrays, strict=True))
        return [r.table(values) for r in self.ranges if r is not None]

    def range_at(self, k: int, tables: Sequence[Any], position: Any) -> tuple[Any, Any]:
        """The first tile that pass ``k`` walks at a position of the grid, and how many; ``tables``
        are references to ``tables``."""
        own = self.ranges[k]
        assert own is not None
        table = tables[sum(r is not None for r in self.ranges[:k])]
        at = own.index(self.spec, position)
        return table[at], table[at + 1]

    def accumulates_outside(self, i: int) -> bool:
        """Whether the result of a node is summed up over more than the stream."""
        return bool(self.reduced[i] - {self.program.stream})

    def maker(self, v: int) -> int:
        """The position of the node that makes a value."""
        return next(i for i, step in enumerate(self.steps) if v in step.equation.outputs)

    def scratch(self) -> dict[int, Any]:
        """Room for the products that one pass keeps for another, on all tiles of the stream at
        one outer tile, by value."""
        room = {}
        for i in (i for p in self.program.passes for i in p.kept):
            stream, step, axes = self.program.stream, self.steps[i], list(self.spec.axes)
            assert stream is not None
            axes[stream] = replace(axes[stream], tile=axes[stream].size)
            shape = block_shape(tuple(axes), step.out_axes[0])
            room[step.equation.outputs[0]] = jnp.zeros(shape, step.equation.out_avals[0].dtype)
        return room


class Walk:
    """Which tiles of the stream a pass visits."""

    def __init__(self, nest: Nest, skips: Skips | None, values: dict[int, Any]) -> None:
        stream = nest.program.stream
        self.count = 1 if stream is None else nest.spec.axes[stream].n_tiles
        self.skips = skips
        if skips is None:
            return
        # Of each row of tiles, first the live ones, in order.
        order = np.argsort(~skips.live, axis=-1, kind="stable").astype(np.int32)
        live = skips.live.sum(axis=-1, dtype=np.int32)
        safe = skips.safe(values)
        self.order = jnp.where(safe, order, np.arange(self.count, dtype=np.int32))
        self.live = jnp.where(safe, live, np.int32(self.count))

    def at(self, position: Position) -> tuple[Any, Callable[[Any], Any]]:
        """How many tiles are visited at an outer position, and which is the j-th."""
        if self.skips is None:
            return self.count, lambda j: j
        row = tuple(position[a] for a in self.skips.axes[:-1])
        order = self.order[row]
        return self.live[row], lambda j: order[j]


def neutral(step: Step, shape: tuple[int, ...]) -> Any:
    """What ``shape`` of the step's result is before anything is combined into it."""
    assert step.rule.reduction is not None
    return step.rule.reduction.init(shape, step.equation)


def finish(step: Step, total: Any) -> Any:
    """The step's result of what was combined."""
    assert step.rule.reduction is not None
    return step.rule.reduction.finish(total, step.equation)


def finished(step: Step, parts: Sequence[Any]) -> Sequence[Any]:
    """The results of a step; of a reduction whose axes are whole, its total."""
    return parts if step.rule.reduction is None else [finish(step, parts[0])]
