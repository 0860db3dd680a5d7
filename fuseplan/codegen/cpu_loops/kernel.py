"""Emit a group as a nest of XLA loops over tiles: the kernels of the CPU.

Loops visit the tiles of the outer axes. Inside them, each pass of the group visits the tiles of the stream.
Large intermediates exist one tile at a time, results are written by dynamic slices, and XLA runs each
operation of a tile on all cores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from costmodel.cpu_functions import IN_TURN
from costmodel.graph import DimMap
from costmodel.kernel import Access, KernelSpec, block_shape
from fuseplan.codegen.pass_evaluator import Nest, NestPart, PassEvaluator, Results, TileOrder, Totals
from fuseplan.codegen.single_pass import Blocks
from fuseplan.codegen.tile import Position, ShiftedTile, Step, first_index, uncovered
from fuseplan.frontend.lower import Lowered
from fuseplan.schedule.nests.multipass import Pass


def emit(
    spec: KernelSpec, lowered: Lowered, *, interpret: bool = False, part: NestPart | None = None
) -> Callable[..., tuple[Any, ...]]:
    """The group as a loop nest, or ``part`` of one; see ``fuseplan.codegen.emit``."""
    nest, avals = Nest(spec, lowered, part), lowered.avals
    makers = {v: nest.maker(v) for v in nest.writes}
    # The steps whose results combine tiles, each by its first result.
    combining = dict.fromkeys(i for i in makers.values() if nest.accumulates_outside(i))
    combined = {nest.steps[i].equation.outputs[0]: nest.steps[i] for i in combining}

    def run(*arrays: Any) -> tuple[Any, ...]:
        loops = _OuterLoops(nest, dict(zip(nest.reads, arrays, strict=True)), combined)
        stored = [v for v in nest.writes if makers[v] not in combining]
        results: Results = {v: jnp.zeros(avals[v].shape, avals[v].dtype) for v in stored}
        results |= {v: step.initial(avals[v].shape) for v, step in combined.items()}
        results |= {~v: array for v, array in nest.scratch().items()}
        results = loops.run((), results)
        for v, step in combined.items():
            results |= zip(step.equation.outputs, step.finish(results[v]), strict=True)
        return tuple(results[v] for v in nest.writes)

    return run


class _OuterLoops:
    """The loops over the tiles of all outer axes, the first axis outermost."""

    def __init__(self, nest: Nest, values: dict[int, Any], combined: dict[int, Step]) -> None:
        self.nest, self.values, self.combined = nest, values, combined
        self.orders = [TileOrder(nest, skips, values) for skips in nest.skips]
        axes, stream = nest.spec.axes, nest.program.stream
        self.looped = [a for a in (*nest.outer, stream) if a is not None and axes[a].n_tiles > 1]

    def run(self, at: tuple[Any, ...], results: Results) -> Results:
        """Visit the tiles ``at`` these places along the first outer axes, and at all along the others."""
        if len(at) == len(self.nest.outer):
            return _OuterTile(self.nest, self.values, self.orders, self._position(at), results).run()

        def turn(t: Any, results: Results) -> Results:
            # Under jax.disable_jit, loops count in Python.
            return self._run_apart((*at, jnp.int32(t)), results)

        n_tiles = self.nest.spec.axes[self.nest.outer[len(at)]].n_tiles
        if n_tiles == 1:
            return turn(0, results)
        return lax.fori_loop(jnp.int32(0), jnp.int32(n_tiles), turn, results)

    def _run_apart(self, at: tuple[Any, ...], results: Results) -> Results:
        """As ``run``, but all that the loops inside add to one block of a result is added up by itself first.

        The rounding error of n summands that are added one after the other grows with n; that of sums of
        sums grows with the sum of the loops' lengths, not with their product (Higham, *Accuracy and Stability
        of Numerical Algorithms*, 2002, section 4.2).
        """
        spec, inside = self.nest.spec, set(self.looped).difference(self.nest.outer[: len(at)])
        apart = {v: step for v, step in self.combined.items() if _adds_to_one_block(step, inside)}
        own = {v: step.initial(block_shape(spec.axes, step.out_axes[0])) for v, step in apart.items()}
        after = self.run(at, results | own)
        position = self._position(at)
        for v, step in apart.items():
            after[v] = _combine_block(results[v], after[v], spec, step, position)
        return after

    def _position(self, at: tuple[Any, ...]) -> Position:
        places = dict(zip(self.nest.outer, at, strict=False))
        return [places.get(a, 0) for a in range(len(self.nest.spec.axes))]


class _OuterTile(PassEvaluator):
    """One turn of the outer loop: the group on one outer tile."""

    tile = ShiftedTile

    def __init__(
        self,
        nest: Nest,
        values: dict[int, Any],
        orders: Sequence[TileOrder],
        position: Position,
        results: Results,
    ) -> None:
        super().__init__(nest, position, results)
        self.values, self.orders = values, orders

    def loop(self, k: int, p: Pass) -> Totals:
        inner = [i for i, _ in p.sinks if not self.nest.accumulates_outside(i)]
        totals = {i: self.nest.steps[i].initial(self.out_shape(i)) for i in inner}
        count, tile_at = self.orders[k].at(self.position)
        stream = self.nest.program.stream
        assert stream is not None
        self.load_invariant(p)

        def turn(j: Any, carry: tuple[Totals, Results]) -> tuple[Totals, Results]:
            position = (*self.position[:stream], tile_at(jnp.int32(j)), *self.position[stream + 1 :])
            return self.on_tile(p, position, *carry)

        start = (totals, self.results)
        if isinstance(count, int) and count == 1:
            totals, self.results = turn(jnp.int32(0), start)
        else:
            totals, self.results = lax.fori_loop(jnp.int32(0), jnp.int32(count), turn, start)
        return totals

    def load(self, access: Access, position: Position) -> Any:
        return _read_block(self.values[access.value], self.spec, access.axes, position)

    def store(self, results: Results, access: Access, block: Any, position: Position) -> Results:
        whole = _write_block(results[access.value], block, self.spec, access.axes, position)
        return {**results, access.value: whole}

    def load_kept(self, p: Pass, results: Results, blocks: Blocks, position: Position) -> None:
        for i in p.recalled:
            v, axes = self.nest.steps[i].equation.outputs[0], self.nest.steps[i].out_axes[0]
            blocks[v, axes] = _read_block(results[~v], self.spec, axes, self._stream_only(position))

    def store_kept(self, results: Results, step: Step, blocks: Blocks, position: Position) -> Results:
        v, axes = step.equation.outputs[0], step.out_axes[0]
        at = self._stream_only(position)
        return {**results, ~v: _write_block(results[~v], blocks[v, axes], self.spec, axes, at)}

    def _stream_only(self, position: Position) -> Position:
        """The position in an array that has one outer tile and the whole stream."""
        stream = self.nest.program.stream
        return tuple(p if a == stream else 0 for a, p in enumerate(position))

    def add_to_result(self, results: Results, i: int, part: Any, position: Position) -> Results:
        step = self.nest.steps[i]
        v, axes = step.equation.outputs[0], step.out_axes[0]
        shape = self.out_shape(i)
        masks = [uncovered(self.spec, dims, position, shape, dim) for dim, dims in enumerate(axes)]
        # Outer axes that the step does not have repeat its result: only their first tile counts.
        own = {a for dims in step.node_axes for a in dims}
        masks += [jnp.equal(position[a], 0) for a in self.nest.outer if a not in own]
        return {**results, v: _combine_block(results[v], part, self.spec, step, position, masks)}


def _adds_to_one_block(step: Step, loops: Set[int]) -> bool:
    """Whether several turns of ``loops`` add to one block of the result of ``step``. A reduction by the
    user's function begins with initial values that count once, so it is never begun again."""
    own = {a for dims in step.node_axes for a in dims}
    result = {a for dims in step.out_axes[0] for a in dims}
    return bool(loops & own) and loops.isdisjoint(result) and step.equation.op != IN_TURN


def _combine_block(
    whole: Any, part: Any, spec: KernelSpec, step: Step, position: Position, masks: Sequence[Any] = ()
) -> Any:
    """An accumulator of ``step``, ``part`` combined into its block at ``position`` where all ``masks`` hold;
    each mask is an array or None, which holds everywhere."""
    axes = step.out_axes[0]
    old = jax.tree.map(lambda x: _read_block(x, spec, axes, position), whole)
    new = step.combine(old, part)
    for mask in masks:
        if mask is not None:
            new = jax.tree.map(functools.partial(jnp.where, mask), new, old)
    return jax.tree.map(lambda x, block: _write_block(x, block, spec, axes, position), whole, new)


def _starts(spec: KernelSpec, axes: DimMap, position: Position) -> list[Any]:
    """The first index of the tile at ``position`` along each dimension of an array indexed by ``axes``."""
    return [jnp.int32(first_index(spec, dims, position, shifted=True)) for dims in axes]


def _read_block(whole: Any, spec: KernelSpec, axes: DimMap, position: Position) -> Any:
    shape = block_shape(spec.axes, axes)
    if shape == whole.shape:
        return whole
    starts = _starts(spec, axes, position)
    return lax.dynamic_slice(whole, starts, shape, allow_negative_indices=False)


def _write_block(whole: Any, block: Any, spec: KernelSpec, axes: DimMap, position: Position) -> Any:
    if block.shape == whole.shape:
        return block
    starts = _starts(spec, axes, position)
    return lax.dynamic_update_slice(whole, block, starts, allow_negative_indices=False)
