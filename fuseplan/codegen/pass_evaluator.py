"""Evaluate a group in several passes over its streamed axis: shared by all backends that support it.

``Nest`` has all that does not depend on the arrays: steps, passes, and the tiles that masks leave out.
``PassEvaluator`` evaluates one tile of a pass, and the steps between passes, with the rescaling of
accumulators whose scale is not yet final (``fuseplan.schedule.nests.online_rescaling``). A backend's subclass
loads and stores blocks, and loops over tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from costmodel.axes import reduced_axes
from costmodel.graph import DimMap
from costmodel.kernel import Access, AxisRole, KernelSpec, block_shape
from fuseplan.codegen.single_pass import Blocks, live_ins, partial_results, put_results
from fuseplan.codegen.tile import BlockTile, Position, Step, align, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.ops.reduction import accumulator
from fuseplan.masks.dead_tiles import Skips
from fuseplan.schedule.nests.live_tiles import TileRange, ranges_of, skips_of
from fuseplan.schedule.nests.multipass import Pass, program_of

Totals = dict[int, Any]
"""Accumulators along the stream, by position in the group."""
Results = dict[int, Any]
"""The arrays that a loop nest is building, by value, and under ``~value`` those that one pass keeps for
another. Empty in kernels that store blocks at once."""


@dataclass(frozen=True, slots=True)
class NestPart:
    """The part of a loop nest that one of several devices computes."""

    whole: KernelSpec
    origin: tuple[Any, ...]
    """Along each axis, the index in the whole of the part's first element: a multiple of the tile if masks
    skip tiles along the axis."""
    completed: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """For nodes, by position in the group, of whose result each device has a part and that other nodes read:
    the whole result, from the own part and those that the other devices compute at the same time."""


class Nest:
    """A loop nest, or a kernel with several passes, before it is run."""

    def __init__(self, spec: KernelSpec, lowered: Lowered, part: NestPart | None = None) -> None:
        program = program_of(lowered.graph, spec)
        assert program is not None, "the schedule offers no nest without passes"
        self.spec, self.program = spec, program
        self.steps = [make_step(spec, lowered, i) for i in range(len(spec.nodes))]
        self.avals = lowered.avals
        self.reads = live_ins(spec)
        self.writes = tuple(w.value for w in spec.writes)
        tiled = [a for a, axis in enumerate(spec.axes) if not axis.role.is_whole]
        self.outer = [a for a in tiled if a != program.stream]
        nodes = [lowered.graph.nodes[n] for n in spec.nodes]
        self.reduced = [
            reduced_axes(node, own) & set(tiled) for node, own in zip(nodes, spec.node_axes, strict=True)
        ]
        self.inner = [a for a, axis in enumerate(spec.axes) if axis.role == AxisRole.INNER]
        self.scales = {i: scale for p in program.passes for i, scale in p.sinks}
        self.origin = () if part is None else part.origin
        self.completed = {} if part is None else part.completed
        whole = spec if part is None else part.whole
        self.skips = skips_of(lowered, whole, program) if spec.capabilities.loop_nest else []
        self.ranges: list[TileRange | None] = [None] * len(program.passes)
        """For a GPU or TPU kernel, the tiles that each pass visits."""
        if not spec.capabilities.loop_nest and spec.tiles_visited:
            self.ranges = ranges_of(lowered, spec, program)

    @property
    def n_tables(self) -> int:
        """The number of ``tables`` that the kernel reads."""
        return int(any(r is not None for r in self.ranges))

    def tables(self, arrays: Sequence[Any]) -> list[Any]:
        """The ranges of tiles of all passes, one after the other, as one int32 vector, for the arrays that
        the kernel reads: the full ranges where the data do not allow a pass to skip any."""
        values = dict(zip(self.reads, arrays, strict=True))
        ranges = [r for r in self.ranges if r is not None]
        if not ranges:
            return []
        # One vector takes one launch.
        safe = functools.reduce(jnp.logical_and, [r.skips.safe(values) for r in ranges])
        live = np.concatenate([r.tiles.reshape(-1) for r in ranges])
        every = np.concatenate([r.every.reshape(-1) for r in ranges])
        return [jnp.where(safe, live, every)]

    def range_at(self, k: int, tables: Sequence[Any], position: Any) -> tuple[Any, Any]:
        """The first tile and the number of tiles that pass ``k`` visits at a position of the grid, from
        references to ``tables``."""
        own, (table,) = self.ranges[k], tables
        assert own is not None
        at = own.index(self.spec, position) + sum(r.tiles.size for r in self.ranges[:k] if r is not None)
        return table[at], table[at + 1]

    def accumulates_outside(self, i: int) -> bool:
        """Whether node ``i`` reduces more axes than the stream."""
        return bool(self.reduced[i] - {self.program.stream})

    def maker(self, v: int) -> int:
        """The position of the node that makes a value."""
        return next(i for i, step in enumerate(self.steps) if v in step.equation.outputs)

    def scratch(self) -> dict[int, Any]:
        """Zero arrays for the values that one pass keeps for another, on all tiles of the stream at one
        outer tile, by value."""
        arrays = {}
        for i in (i for p in self.program.passes for i in p.kept):
            stream, step, axes = self.program.stream, self.steps[i], list(self.spec.axes)
            assert stream is not None
            axes[stream] = replace(axes[stream], tile=axes[stream].size)
            shape = block_shape(tuple(axes), step.out_axes[0])
            arrays[step.equation.outputs[0]] = jnp.zeros(shape, step.equation.out_avals[0].dtype)
        return arrays


class TileOrder:
    """The tiles of the stream that a pass of a loop nest visits, in order."""

    def __init__(self, nest: Nest, skips: Skips | None, values: dict[int, Any]) -> None:
        stream = nest.program.stream
        self.count = 1 if stream is None else nest.spec.axes[stream].n_tiles
        self.skips = skips
        self.first = [o // axis.tile for o, axis in zip(nest.origin, nest.spec.axes, strict=False)]
        if skips is None:
            return
        # Each row of tiles with the live ones first, in ascending order.
        order = np.argsort(~skips.live, axis=-1, kind="stable").astype(np.int32)
        live = skips.live.sum(axis=-1, dtype=np.int32)
        safe = skips.safe(values)
        self.order = jnp.where(safe, order, np.arange(self.count, dtype=np.int32))
        self.live = jnp.where(safe, live, np.int32(self.count))

    def at(self, position: Position) -> tuple[Any, Callable[[Any], Any]]:
        """The number of tiles visited at an outer position, and the function from j to the j-th of them."""
        if self.skips is None:
            return self.count, lambda j: j
        row = tuple(position[a] + (self.first[a] if self.first else 0) for a in self.skips.axes[:-1])
        order = self.order[row]
        return self.live[row], lambda j: order[j]


class PassEvaluator:
    """Evaluates all passes at one position of the axes other than the stream."""

    tile: type[BlockTile] = BlockTile

    def __init__(self, nest: Nest, position: Position, results: Results) -> None:
        self.nest, self.spec, self.position = nest, nest.spec, tuple(position)
        self.results = dict(results)
        self.invariant: Blocks = {}
        """The blocks that are the same for all tiles of the stream."""

    def load(self, access: Access, position: Position) -> Any:
        """The block of an array from outside the group at ``position``."""
        raise NotImplementedError

    def store(self, results: Results, access: Access, block: Any, position: Position) -> Results:
        """``results`` after storing the block of an array that the kernel writes."""
        raise NotImplementedError

    def load_kept(self, p: Pass, results: Results, blocks: Blocks, position: Position) -> None:
        """Add the blocks that an earlier pass kept to ``blocks``. Only loop nests of CPUs keep any."""

    def store_kept(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with a block that a later pass loads."""
        raise NotImplementedError

    def add_to_result(self, results: Results, i: int, part: Any, position: Position) -> Results:
        """``results`` with a tile's part of a reduction over more axes than the stream."""
        raise NotImplementedError

    def contract_inner(self, step: Step, axis: int, position: Position) -> Sequence[Any]:
        """The result of a contraction of arrays from outside over all tiles of an inner axis. Only Triton
        kernels have inner axes."""
        raise NotImplementedError

    def combines_late(self, i: int) -> bool:
        """Whether the accumulator of node ``i`` has an element for each of a tile (``combined_late``)."""
        return False

    def loop(self, k: int, p: Pass) -> Totals:
        """The accumulators of pass ``k`` after a loop over the stream."""
        raise NotImplementedError

    def run(self) -> Results:
        """Run all passes in order."""
        self.before()
        totals: Totals = {}
        for k, p in enumerate(self.nest.program.passes):
            if p.loop:
                totals |= self._completed_totals(p, self.loop(k, p))
            self.after(p, totals)
        return self.results

    def before(self) -> None:
        """Evaluate the steps before the first pass."""
        for i in self.nest.program.before:
            self._off_stream(i)

    def after(self, p: Pass, totals: Totals) -> None:
        """Evaluate the steps that follow a pass, from the accumulators of all passes so far."""
        for i in p.after:
            if i in totals:
                self._finish_sink(i, totals[i])
            else:
                self._off_stream(i)

    def _off_stream(self, i: int) -> None:
        step = self.nest.steps[i]
        parts = self._evaluate(step, self.invariant, self.position)
        if self.nest.accumulates_outside(i):
            self.results = self.add_to_result(self.results, i, parts[0], self.position)
        else:
            put_results(step, step.finish_parts(self._completed(i, parts)), self.invariant)
            self.results = self._write(self.results, step, self.invariant, self.position)

    def _write(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        """``results`` with those of a step that the kernel writes."""
        for v, axes in zip(step.equation.outputs, step.out_axes, strict=True):
            if v in self.nest.writes:
                results = self.store(results, Access(v, axes), blocks[v, axes], position)
        return results

    def load_invariant(self, p: Pass) -> None:
        """Load the blocks that a pass reads and that are the same on all of its tiles."""
        for i in p.loop:
            for access in self.nest.steps[i].reads:
                changes = access.axis_set.intersection([self.nest.program.stream, *self.nest.inner])
                if access.value in self.nest.reads and not changes:
                    self._operand(access, self.invariant, self.position)

    def on_tile(
        self, p: Pass, position: Position, totals: Totals, results: Results
    ) -> tuple[Totals, Results]:
        """Evaluate a pass on one tile of the stream."""
        totals, blocks, scales = dict(totals), dict(self.invariant), dict(p.sinks)
        shifts = {scale.shift for scale in scales.values() if scale.shift is not None}
        factors: dict[int, tuple[Any, DimMap]] = {}
        self.load_kept(p, results, blocks, position)
        for i in p.loop:
            step = self.nest.steps[i]
            if i in p.pending:
                access = step.reads[p.pending[i]]
                x, shape = self._operand(access, blocks, position), self.out_shape(i)
                if x.shape != shape:
                    x = jnp.broadcast_to(x, shape)
                blocks[step.equation.outputs[0], step.out_axes[0]] = x
                continue
            parts = self._evaluate(step, blocks, position, i in scales and self.combines_late(i))
            if i not in scales:
                put_results(step, step.finish_parts(self._completed(i, parts)), blocks)
                if i in p.kept:
                    results = self.store_kept(results, step, blocks, position)
                if i in p.stored:
                    results = self._write(results, step, blocks, position)
            elif self.nest.accumulates_outside(i):
                results = self.add_to_result(results, i, parts[0], position)
            else:
                old, shifted = totals[i], scales[i].shift
                if shifted is not None:
                    old = old * self._align(*factors[shifted], step).astype(old.dtype)
                totals[i] = step.combine(old, parts[0])
                for shift in shifts:
                    if self.nest.program.shifts[shift].maximum == i:
                        factors[shift] = self._update_shift(shift, old, totals[i], blocks)
        return totals, results

    def _completed(self, i: int, parts: Sequence[Any]) -> Sequence[Any]:
        """The result of a reduction on a tile, if devices have parts of the tile."""
        completed = self.nest.completed.get(i)
        return parts if completed is None else [completed(parts[0])]

    def _completed_totals(self, p: Pass, totals: Totals) -> Totals:
        """The accumulators of a pass, if devices have parts of the stream: rescaled from the maximum of the
        own part to that of the whole."""
        scales, completed = dict(p.sinks), self.nest.completed
        whole = {
            i: completed[i](x) if i in completed else x for i, x in totals.items() if scales[i].shift is None
        }
        for i, shift in ((i, scales[i].shift) for i in totals):
            if shift is None:
                continue
            total, maximum = totals[i], self.nest.program.shifts[shift].maximum
            if maximum in completed:
                factor = self._update_shift(shift, totals[maximum], whole[maximum], dict(self.invariant))
                total = total * self._align(*factor, self.nest.steps[i]).astype(total.dtype)
            whole[i] = completed[i](total) if i in completed else total
        return whole

    def _update_shift(self, shift: int, old: Any, new: Any, blocks: Blocks) -> tuple[Any, DimMap]:
        """Put the shift of the running maximum ``new`` into ``blocks``.

        Returns the factor that rescales accumulators from the maximum ``old``, and the factor's axes.
        """
        source = self.nest.program.shifts[shift]
        maximum = self.nest.steps[source.maximum]
        step = self.nest.steps[source.chain[-1] if source.chain else source.maximum]
        axes = step.out_axes[0]

        def shift_of(total: Any) -> Any:
            chain = dict(blocks)
            put_results(maximum, maximum.finish(total), chain)
            for i in source.chain:
                step = self.nest.steps[i]
                put_results(step, step.finish_parts(self._evaluate(step, chain, self.position)), chain)
            return chain[shift, axes]

        def is_unset(total: Any) -> Any:
            return _is_minus_infinity(align(total, maximum.out_axes[0], axes, self.spec))

        before, now = shift_of(old), shift_of(new)
        # If all x so far are -inf, exp(x - -inf) is NaN where it must be zero.
        blocks[shift, axes] = jnp.where(is_unset(new) & _is_minus_infinity(now), 0, now).astype(now.dtype)
        before, now = _widened(before), _widened(now)
        return jnp.where(is_unset(old) | (before == now), 1, jnp.exp(before - now)), axes

    def _finish_sink(self, i: int, total: Any) -> None:
        step, scale = self.nest.steps[i], self.nest.scales[i]
        if scale.shift is not None:
            maximum = self.nest.steps[self.nest.program.shifts[scale.shift].maximum].equation.outputs[0]
            # If all x are -inf, the unrescaled result is NaN.
            unset = [_is_minus_infinity(self._aligned_value(v, step)) for v in (scale.shift, maximum)]
            total = jnp.where(unset[0] & unset[1], jnp.nan, total)
        for operation, v in scale.factors:
            factor = self._aligned_value(v, step).astype(total.dtype)
            total = total * factor if operation == "mul" else total / factor
        put_results(step, step.finish(total), self.invariant)
        self.results = self._write(self.results, step, self.invariant, self.position)

    def _aligned_value(self, v: int, step: Step) -> Any:
        """A value made off the stream, aligned with the result of ``step``."""
        x, axes = next((x, axes) for (u, axes), x in self.invariant.items() if u == v)
        return self._align(x, axes, step)

    def _align(self, x: Any, axes: DimMap, step: Step) -> Any:
        return align(x, axes, step.out_axes[0], self.spec)

    def out_shape(self, i: int) -> tuple[int, ...]:
        """The block shape of the result of the node at a position of the group."""
        return block_shape(self.spec.axes, self.nest.steps[i].out_axes[0])

    def _operand(self, access: Access, blocks: Blocks, position: Position) -> Any:
        """The block of an operand, loaded once into ``blocks``."""
        key = access.value, access.axes
        if key not in blocks:
            blocks[key] = self.load(access, position)
        return blocks[key]

    def _evaluate(
        self, step: Step, blocks: Blocks, position: Position, elements: bool = False
    ) -> Sequence[Any]:
        for axis in self.nest.inner:
            if any(axis in dims for dims in step.node_axes):
                return self.contract_inner(step, axis, position)

        def load(access: Access) -> Any:
            return self.load(access, position)

        tile = functools.partial(self.tile, origin=self.nest.origin)
        return partial_results(self.spec, step, blocks, position, load, tile, elements)


def _widened(x: Any) -> Any:
    return x.astype(accumulator(x.dtype))


def _is_minus_infinity(x: Any) -> Any:
    return _widened(x) == -jnp.inf  # widened: a TPU does not compare 16-bit scalars
