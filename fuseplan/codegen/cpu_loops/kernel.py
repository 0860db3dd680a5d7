"""Emit a group as a nest of XLA loops over tiles: the kernels of the CPU.

One loop walks the tiles of all outer axes; inside it, each pass of the group walks the
stream. Large intermediates exist a tile at a time, results are written into place by
dynamic slices, and XLA runs each operation of a tile on all cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from costmodel.kernel import KernelSpec
from fuseplan.codegen.cpu_loops.turn import Turn
from fuseplan.codegen.nest import Nest, Walk, finish, neutral
from fuseplan.codegen.pass_body import Results
from fuseplan.frontend.lower import Lowered


def emit(spec: KernelSpec, lowered: Lowered, *, interpret: bool = False) -> Callable[..., tuple[Any, ...]]:
    """The group as a loop nest; see ``fuseplan.codegen.emit``."""
    nest = Nest(spec, lowered)

    def run(*arrays: Any) -> tuple[Any, ...]:
        values = dict(zip(nest.reads, arrays, strict=True))
        walks = [Walk(nest, skips, values) for skips in nest.skips]
        counts = [spec.axes[a].n_tiles for a in nest.outer]

        def turn(t: Any, results: Results) -> Results:
            position: list[Any] = [0] * len(spec.axes)
            t = jnp.int32(t)  # under jax.disable_jit, loops count in Python
            for a, count in zip(reversed(nest.outer), reversed(counts), strict=True):
                t, position[a] = lax.div(t, jnp.int32(count)), lax.rem(t, jnp.int32(count))
            return Turn(nest, values, tuple(position), results).run(walks)

        results = {v: _empty(nest, v) for v in nest.writes}
        results |= {~v: room for v, room in nest.scratch().items()}
        turns = math.prod(counts)
        if turns == 1:
            results = turn(0, results)
        else:
            results = lax.fori_loop(jnp.int32(0), jnp.int32(turns), turn, results)
        return tuple(_final(nest, v, results[v]) for v in nest.writes)

    return run


def _empty(nest: Nest, v: int) -> Any:
    """A result before the first tile: neutral where tiles are summed up."""
    aval, i = nest.avals[v], nest.maker(v)
    if nest.accumulates_outside(i):
        return neutral(nest.steps[i], aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)


def _final(nest: Nest, v: int, result: Any) -> Any:
    i = nest.maker(v)
    return finish(nest.steps[i], result) if nest.accumulates_outside(i) else result
