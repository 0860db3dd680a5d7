"""A group's equations evaluated on one tile: what every kernel backend shares.

A ``Body`` says what is computed before, inside and after the loop over the streamed
axis. A backend decides only where blocks come from and where accumulators live::

    before        uses no streamed axis, and the loop needs it
    loop          is indexed by the streamed axis
    accumulators  reduce the streamed axis: their partial results are combined
    after         needs an accumulator's final value, or nothing of the loop at all

What is added to the result of a contraction, a bias or a residual, is where its accumulator starts
(``seeds``), as TVM's ``FuseReductionEpilogue`` has it: no sum is made after the loop.

The loop over a streamed axis with accumulators in registers: that of every kernel for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap
from costmodel.kernel import Access, KernelSpec, block_shape
from fuseplan.codegen import body as bodies
from fuseplan.codegen.block_tile import BlockTile
from fuseplan.codegen.step import Step, make_step
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Literal
from fuseplan.support.errors import InvalidPlanError

Blocks = dict[tuple[int, DimMap], Any]
"""Blocks at hand, by value and by the kernel axes that index it."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A sum of an accumulator's result and of ``start``, which is known before the loop."""

    step: Step
    start: Access

    def block(self, start: Any, spec: KernelSpec) -> Any:
        """Where the accumulator starts, given the block of ``start``."""
        return jnp.broadcast_to(start, block_shape(spec.axes, self.step.out_axes[0]))


@dataclass(frozen=True, slots=True)
class Body:
    """A group split into phases around its streamed axis; each in execution order."""

    spec: KernelSpec
    before: tuple[Step, ...]
    loop: tuple[Step, ...]
    accumulators: tuple[Step, ...]
    after: tuple[Step, ...]
    seeds: dict[int, Seed] = field(default_factory=dict)
    """For accumulators, by position, the sum that they are."""

    def finals(self, i: int) -> Step:
        """The step whose results an accumulator ends as."""
        return self.seeds[i].step if i in self.seeds else self.accumulators[i]

    @property
    def invariant_reads(self) -> tuple[Access, ...]:
        """What the loop reads from outside the group that is the same in every turn."""
        made = {v for step in (*self.before, *self.loop) for v in step.equation.outputs}
        reads = dict.fromkeys(r for step in (*self.loop, *self.accumulators) for r in step.reads)
        return tuple(r for r in reads if r.value not in made and self.spec.streamed not in r.axis_set)


def make_body(spec: KernelSpec, lowered: Lowered, *, seeded: bool = True) -> Body:
    """Split the group of ``spec`` into phases; unless ``seeded``, all accumulators start at nothing.

    Raises ``InvalidPlanError`` where a step of the loop depends on a result of the loop:
    no single pass computes that.
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
    """Contractions whose results are read by one sum alone, of the dtype that they accumulate in."""
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
        dtypes = {step.equation.out_avals[0].dtype, *step.accumulator_dtypes()}
        is_sum = reader.equation.primitive.name in ("add", "add_any") and len(others) == 1
        if not is_sum or len(dtypes) > 1 or others[0].value in final:
            continue
        # A sum of other axes repeats the product along them.
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


def evaluate(
    body: Body,
    steps: Iterable[Step],
    blocks: Blocks,
    position: Sequence[Any],
    load: Callable[[Access], Any],
) -> None:
    """Evaluate ``steps`` on the tile at ``position``, adding their results to ``blocks``.

    Operands that are not among ``blocks`` are loaded, each once. Reductions are cast to
    the dtype of their results at once.
    """
    for step in steps:
        parts = partial_results(body, step, blocks, position, load)
        put(step, parts, blocks)


def partial_results(
    body: Body, step: Step, blocks: Blocks, position: Sequence[Any], load: Callable[[Access], Any]
) -> Sequence[Any]:
    """The results of one step on one tile; of a reduction, in the accumulator's dtype."""
    assert step.rule.block is not None, f"{step.equation.primitive} has no block form"
    operands = []
    for operand, axes in zip(step.equation.inputs, step.in_axes, strict=True):
        if isinstance(operand, Literal):
            operands.append(scalar(operand))
            continue
        assert axes is not None
        if (operand, axes) not in blocks:
            blocks[operand, axes] = load(Access(operand, axes))
        operands.append(blocks[operand, axes])
    return step.rule.block(BlockTile(body.spec, step, position), step.equation, operands)


def put(step: Step, results: Sequence[Any], blocks: Blocks) -> None:
    """Add the final results of a step to ``blocks``, in the equation's dtypes."""
    equation = step.equation
    for v, axes, aval, x in zip(equation.outputs, step.out_axes, equation.out_avals, results, strict=True):
        blocks[v, axes] = x if jnp.result_type(x) == aval.dtype else x.astype(aval.dtype)


def scalar(literal: Literal) -> Any:
    """A literal as a NumPy scalar of its own dtype: kernels cannot capture arrays."""
    aval: Any = literal.aval
    return np.asarray(literal.val).astype(aval.dtype)[()]


def live_ins(spec: KernelSpec) -> tuple[int, ...]:
    """The distinct values that a kernel reads, in order of first appearance."""
    return tuple(dict.fromkeys(r.value for r in spec.reads))


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
