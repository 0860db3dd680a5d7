"""Steps of a group on blocks that have lost their axes of one, as a Mosaic GPU kernel holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax import numpy as jnp

from costmodel.graph import DimMap, OpKind
from costmodel.kernel import KernelSpec
from fuseplan.codegen.block_tile import BlockTile, first_index
from fuseplan.codegen.body import Body
from fuseplan.codegen.cpu_loops.tiles import LoopTile
from fuseplan.codegen.step import Step
from fuseplan.frontend.ops.rule import Tile
from fuseplan.frontend.trace import Equation, Primitive
from fuseplan.schedule.addressing import held


def squeezed(spec: KernelSpec, dim_map: DimMap) -> DimMap:
    """The dimensions that a block has in registers, each one axis."""
    return tuple((a,) for a in held([axis.tile for axis in spec.axes], dim_map))


Place = Callable[[Any, DimMap], Any]
"""A block dealt to the threads as its axes are."""


def squeeze_body(body: Body, place: Place) -> Body:
    """The body, its steps with rules for squeezed blocks, whose results are put in their ``place``:
    where nothing that is loaded has all axes, the compiler would not know."""

    def each(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(_squeeze(body.spec, step, place) for step in steps)

    return Body(body.spec, each(body.before), each(body.loop), each(body.accumulators), each(body.after))


def _squeeze(spec: KernelSpec, step: Step, place: Place) -> Step:
    """The step with a rule for squeezed blocks; its axes still tell apart what it reads."""
    inner = replace(
        step,
        in_axes=tuple(None if m is None else squeezed(spec, m) for m in step.in_axes),
        out_axes=tuple(squeezed(spec, m) for m in step.out_axes),
    )

    def block(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(tile, BlockTile)
        results = _evaluate(_SqueezedTile(inner, tile), inner, args)
        return [place(x, axes) for x, axes in zip(results, inner.out_axes, strict=True)]

    return replace(step, rule=replace(step.rule, block=block))


class _SqueezedTile(LoopTile):
    """The tile of a step without its axes of one."""

    def __init__(self, step: Step, outer: BlockTile) -> None:
        super().__init__(outer._spec, step, outer._position)

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        axes = self._step.node_axes[node_dim]
        start = jnp.int32(first_index(self._spec, axes, self._position, shifted=True))
        along = [d for d, own in enumerate(self._step.out_axes[0]) if own[0] in axes]
        return lax.broadcasted_iota(jnp.int32, shape, along[0]) + start if along else jnp.full(shape, start)


def _evaluate(tile: _SqueezedTile, step: Step, args: Sequence[Any]) -> Sequence[Any]:
    rule, target = step.rule, step.out_axes[0]
    assert rule.block is not None
    if rule.kind == OpKind.INJECTIVE:
        return args  # Axes of one come and go, the others stay where they are.
    if rule.kind == OpKind.REDUCTION:
        gone = tuple(d for d, axes in enumerate(step.in_axes[0] or ()) if axes not in target)
        params = {**step.equation.params, "axes": gone}
        primitive: Any = _OneByOne(step.equation.primitive)
        eqn = replace(step.equation, params=params, primitive=primitive)
        return rule.block(tile, eqn, args)
    args = [_spread(x, axes, target, tile.out_shapes[0]) for x, axes in zip(args, step.in_axes, strict=True)]
    return args if rule.kind == OpKind.BROADCAST and args else rule.block(tile, step.equation, args)


def _spread(x: Any, axes: DimMap | None, target: DimMap, shape: tuple[int, ...]) -> Any:
    """An operand, or a literal, in the shape of the result."""
    if (axes or ()) == target:
        return x
    return lax.broadcast_in_dim(x, shape, [target.index(dims) for dims in axes or ()])


@dataclass(frozen=True)
class _OneByOne:
    """A reduction of one axis after the other: Mosaic GPU reduces no two at once."""

    primitive: Primitive

    @property
    def name(self) -> str:
        return self.primitive.name

    def bind(self, x: Any, *, axes: Sequence[int], **params: Any) -> Any:
        for axis in sorted(axes, reverse=True):
            x = self.primitive.bind(x, axes=(axis,), **params)
        return x
