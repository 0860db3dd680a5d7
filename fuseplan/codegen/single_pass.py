"""Evaluate a group on one tile in a single pass over its streamed axis.

``make_body`` splits the group into phases. A backend decides where blocks come from and where accumulators
live::

    before        does not use the streamed axis, and the loop needs it
    loop          is indexed by the streamed axis
    accumulators  reduce the streamed axis: their partial results are combined
    after         needs the final value of an accumulator, or is not needed by the loop

A value that is added to the result of a contraction, such as a bias or a residual, initialises its
accumulator (``Seed``), as in TVM's ``FuseReductionEpilogue``, so that no sum follows the loop.

``run_in_registers`` is the program of GPU kernels, which hold accumulators in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap
from costmodel.kernel import Access, KernelSpec, block_shape
from fuseplan.codegen.tile import BlockTile, Position, Step, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Literal
from fuseplan.support.errors import InvalidPlanError

Blocks = dict[tuple[int, DimMap], Any]
"""The blocks that are loaded or computed, by value and by the kernel axes that index them."""

Load = Callable[[Access], Any]


@dataclass(frozen=True, slots=True)
class Seed:
    """The sum of an accumulator's result and ``start``, which is known before the loop."""

    step: Step
    start: Access

    def block(self, start: Any, spec: KernelSpec) -> Any:
        """The initial accumulator, from the block of ``start``."""
        return jnp.broadcast_to(start, block_shape(spec.axes, self.step.out_axes[0]))


@dataclass(frozen=True, slots=True)
class Body:
    """A group split into phases around its streamed axis; each phase is in execution order."""

    spec: KernelSpec
    before: tuple[Step, ...]
    loop: tuple[Step, ...]
    accumulators: tuple[Step, ...]
    after: tuple[Step, ...]
    seeds: dict[int, Seed] = field(default_factory=dict)
    """By position among ``accumulators``, the sum whose other operand initialises the accumulator."""

    def final_step(self, i: int) -> Step:
        """The step whose result is the final value of accumulator ``i``."""
        return self.seeds[i].step if i in self.seeds else self.accumulators[i]

    @property
    def invariant_reads(self) -> tuple[Access, ...]:
        """The arrays that the loop reads and that the streamed axis does not index."""
        made = {v for step in (*self.before, *self.loop) for v in step.equation.outputs}
        reads = dict.fromkeys(r for step in (*self.loop, *self.accumulators) for r in step.reads)
        return tuple(r for r in reads if r.value not in made and self.spec.streamed not in r.axis_set)


def make_body(spec: KernelSpec, lowered: Lowered, *, seeded: bool = True) -> Body:
    """Split the group of ``spec`` into phases; unless ``seeded``, no accumulator has a ``Seed``.

    Raises:
        InvalidPlanError: a step of the loop depends on a result of the loop, so that no single pass
            computes the group.
    """
    streamed = spec.streamed
    steps = [make_step(spec, lowered, i) for i in range(len(spec.nodes))]
    final: set[int] = set()
    loop, accumulators, free, after = [], [], [], []
    for step, axes in zip(steps, spec.node_axes, strict=True):
        depends = any(r.value in final for r in step.reads)
        carries = streamed is not None and any(streamed in d for d in axes)
        if carries and depends:
            raise InvalidPlanError(
                f"expected a single pass over the streamed axis, but `{step.equation}` needs the "
                "result of a reduction over that axis. Keep the axis resident, or split the group."
            )
        if depends:
            after.append(step)
        elif not carries:
            free.append(step)
        elif any(streamed in a for out in step.out_axes for a in out):
            loop.append(step)
        else:
            accumulators.append(step)
        if depends or (carries and step in accumulators):
            final.update(step.equation.outputs)
    seeds = _seeds(spec, accumulators, after) if seeded else {}
    starts = {seed.start.value for seed in seeds.values()}
    before = _needed(free, starts | {r.value for step in (*loop, *accumulators) for r in step.reads})
    added = [seed.step for seed in seeds.values()]
    late = [s for s in steps if (s in after and s not in added) or (s in free and s not in before)]
    return Body(spec, tuple(before), tuple(loop), tuple(accumulators), tuple(late), seeds)


def _seeds(spec: KernelSpec, accumulators: Sequence[Step], after: Sequence[Step]) -> dict[int, Seed]:
    """The seeds of contractions whose only reader is a sum in the dtype of their accumulator."""
    written = {w.value for w in spec.writes}
    final = {v for step in (*accumulators, *after) for v in step.equation.outputs}
    found: dict[int, Seed] = {}
    for i, step in enumerate(accumulators):
        (v, *more), (axes, *_) = step.equation.outputs, step.out_axes
        readers = [s for s in after if any(r.value == v for r in s.reads)]
        is_product = step.equation.primitive.name == "dot_general"
        if more or v in written or not is_product or len(readers) != 1:
            continue
        (reader,) = readers
        others = [r for r in reader.reads if r.value != v]
        dtypes = {step.equation.out_avals[0].dtype, step.accumulator_dtype()}
        is_sum = reader.equation.primitive.name in ("add", "add_any") and len(others) == 1
        if not is_sum or len(dtypes) > 1 or others[0].value in final:
            continue
        # A sum with other axes broadcasts the product.
        is_alike = reader.out_axes[0] == axes
        if is_alike and all(own in (dims, ()) for own, dims in zip(others[0].axes, axes, strict=True)):
            found[i] = Seed(reader, others[0])
    return found


def _needed(steps: Sequence[Step], values: set[int]) -> list[Step]:
    """The steps that ``values`` depend on, in order."""
    kept = []
    for step in reversed(steps):
        if not values.isdisjoint(step.equation.outputs):
            values |= {r.value for r in step.reads}
            kept.append(step)
    return kept[::-1]


def evaluate(body: Body, steps: Iterable[Step], blocks: Blocks, position: Position, load: Load) -> None:
    """Evaluate ``steps`` on the tile at ``position``, and add their results to ``blocks``.

    Operands that are not in ``blocks`` are loaded, each once. Results are cast to their final dtypes.
    """
    for step in steps:
        put_results(step, partial_results(body.spec, step, blocks, position, load), blocks)


def partial_results(
    spec: KernelSpec,
    step: Step,
    blocks: Blocks,
    position: Position,
    load: Load,
    tile: Callable[[KernelSpec, Step, Position], BlockTile] = BlockTile,
    elements: bool = False,
) -> Sequence[Any]:
    """The results of one step on one tile; those of a reduction in the accumulator's dtype, or, with
    ``elements``, the elements that it combines."""
    block = step.reduction.elements if elements else step.rule.block
    assert block is not None, f"{step.equation.primitive} has no block form"
    operands = []
    for operand, axes in zip(step.equation.inputs, step.in_axes, strict=True):
        if isinstance(operand, Literal):
            operands.append(literal_scalar(operand))
            continue
        assert axes is not None
        if (operand, axes) not in blocks:
            blocks[operand, axes] = load(Access(operand, axes))
        operands.append(blocks[operand, axes])
    return block(tile(spec, step, position), step.equation, operands)


def put_results(step: Step, results: Sequence[Any], blocks: Blocks) -> None:
    """Add the final results of a step to ``blocks``, in the equation's dtypes."""
    equation = step.equation
    for v, axes, aval, x in zip(equation.outputs, step.out_axes, equation.out_avals, results, strict=True):
        blocks[v, axes] = x if jnp.result_type(x) == aval.dtype else x.astype(aval.dtype)


def literal_scalar(literal: Literal) -> Any:
    """A literal as a NumPy scalar of its own dtype: kernels cannot capture arrays."""
    aval: Any = literal.aval
    return np.asarray(literal.val).astype(aval.dtype)[()]


def live_ins(spec: KernelSpec) -> tuple[int, ...]:
    """The distinct values that a kernel reads, in order of first appearance."""
    return tuple(dict.fromkeys(r.value for r in spec.reads))


class BlockRefs(Protocol):
    """The arrays of a kernel, loaded and stored block by block."""

    def load(self, access: Access, position: Position) -> Any:
        """The block of an array at ``position``."""

    def store(self, access: Access, block: Any, position: Position) -> None:
        """Store the block of an array at ``position``."""


def run_in_registers(
    body: Body, refs: BlockRefs, position: Position, held: Callable[[DimMap], DimMap] = lambda axes: axes
) -> None:
    """Evaluate a group on the tile at ``position`` with accumulators in registers, and store its results.

    ``held`` has the axes of an accumulator in registers, from those of its result.
    """
    blocks: Blocks = {}

    def load(access: Access) -> Any:
        return refs.load(access, position)

    evaluate(body, body.before, blocks, position, load)
    totals: Sequence[Any] = []
    if body.accumulators:
        # The compiler does not hoist loads out of loops.
        for access in (*body.invariant_reads, *(seed.start for seed in body.seeds.values())):
            if (access.value, access.axes) not in blocks:
                blocks[access.value, access.axes] = load(access)
        every = (*body.before, *body.loop, *body.accumulators, *body.after)
        late = combined_late(body.spec, body.accumulators, every)
        start = [
            step.initial(
                block_shape(body.spec.axes, operand_axes(step) if is_late else held(step.out_axes[0]))
            )
            for step, is_late in zip(body.accumulators, late, strict=True)
        ]
        for i, seed in body.seeds.items():
            start[i] = seed.block(blocks[seed.start.value, seed.start.axes], body.spec)
        totals = _loop(body, refs, position, blocks, start, late)
    finish_in_registers(body, refs, position, blocks, totals)


_MOST_LATE = 4
"""Accumulators that may have as many elements as a tile: 16 registers of a thread each, of 255."""


def combined_late(spec: KernelSpec, steps: Sequence[Step], group: Sequence[Step]) -> list[bool]:
    """Whether the elements of each reduction's tiles are combined with each other after the last tile of the
    stream, and element by element before: threads of a GPU would otherwise wait for each other at every
    tile. Beside a contraction of the ``group`` they do so anyway, and its tiles take the registers."""
    is_streamed = spec.streamed is not None and spec.axes[spec.streamed].n_tiles > 1
    multiplies = any(s.equation.primitive.name == "dot_general" for s in group)
    may_be = is_streamed and not multiplies
    late = [may_be and s.language == "triton" and s.reduction.elements is not None for s in steps]
    return late if sum(late) <= _MOST_LATE else [False] * len(late)


def operand_axes(step: Step) -> DimMap:
    """The kernel axes of a reduction's operand."""
    (axes,) = [axes for axes in step.in_axes if axes is not None]
    return axes


def combine_elements(spec: KernelSpec, step: Step, total: Any, position: Position) -> Any:
    """The result of a reduction that is ``combined_late``, from the elements of its accumulator."""
    assert step.reduction.within is not None
    return step.reduction.within(BlockTile(spec, step, position), step.equation, total)


def finish_in_registers(
    body: Body, refs: BlockRefs, position: Position, blocks: Blocks, totals: Sequence[Any]
) -> None:
    """Evaluate the steps after the loop, whose final accumulators are ``totals``, and store the results."""
    for i, total in enumerate(totals):
        put_results(body.final_step(i), [total], blocks)
    evaluate(body, body.after, blocks, position, lambda access: refs.load(access, position))
    for access in body.spec.writes:
        refs.store(access, blocks[access.value, access.axes], position)


def _loop(
    body: Body,
    refs: BlockRefs,
    position: Position,
    outer: Blocks,
    start: list[Any],
    late: Sequence[bool],
) -> list[Any]:
    """``start`` combined with the partial results of all tiles of the stream; ``outer`` has the blocks that
    are the same on all of them, ``late`` says which accumulators are ``combined_late``."""
    streamed = body.spec.streamed
    assert streamed is not None

    def turn(k: Any, totals: list[Any]) -> list[Any]:
        at = [*position[:streamed], k, *position[streamed + 1 :]]
        blocks = dict(outer)

        def load(access: Access) -> Any:
            return refs.load(access, at)

        evaluate(body, body.loop, blocks, at, load)
        combined = []
        for step, total, is_late in zip(body.accumulators, totals, late, strict=True):
            (part,) = partial_results(body.spec, step, blocks, at, load, elements=is_late)
            combined.append(step.combine(total, part))
        return combined

    totals = in_turns(body.spec.axes[streamed].n_tiles, turn, start, several=all(late) and bool(late))
    return [
        combine_elements(body.spec, step, total, position) if is_late else total
        for step, total, is_late in zip(body.accumulators, totals, late, strict=True)
    ]


_TURNS_AT_ONCE = 4
"""Tiles whose loads a thread has under way at the same time."""


def in_turns(count: int, turn: Callable[[Any, Any], Any], start: Any, *, several: bool) -> Any:
    """``turn(k, carry)`` for each ``k`` below ``count``; ``several`` turns at a time, where nothing makes
    threads wait, so that the loads of one precede the arithmetic of another."""
    at_once = min(_TURNS_AT_ONCE, count) if several else 1
    if count == 1:
        return turn(0, start)

    def group(k: Any, carry: Any) -> Any:
        for i in range(at_once):
            carry = turn(k * at_once + i, carry)
        return carry

    carry = lax.fori_loop(0, count // at_once, group, start) if count // at_once > 1 else group(0, start)
    for k in range(count - count % at_once, count):
        carry = turn(k, carry)
    return carry
