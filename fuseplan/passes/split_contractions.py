"""Steps: a contraction along several axes is one along the longest, for each of the others, and a sum.

A kernel streams one axis. The gradient by keys that several heads of queries share is summed up along
queries and heads: each head's part is a kernel's to stream (as in FlashAttention-2: Dao, arXiv:2307.08691),
and what is left to add up is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from costmodel.graph import ORIGINAL
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.rewrite import Rewriter
from fuseplan.frontend.trace import Equation, trace

_SMALL = 4
"""The parts are so many times smaller than what is contracted: to write and to read them is then little
beside one pass over that."""


def along_several(eqn: Equation) -> bool:
    """Whether ``eqn`` contracts several axes of something large, so that it may be made in steps."""
    if eqn.primitive is not lax.dot_general_p or eqn.is_set_apart:
        return False
    if not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (*eqn.in_avals, *eqn.out_avals)):
        return False
    extents = _extents(eqn)
    parts = eqn.out_avals[0].size * math.prod(extents) // max(extents, default=1)
    largest = max(aval.size for aval in eqn.in_avals)
    return sum(extent > 1 for extent in extents) > 1 and parts * _SMALL <= largest


def in_steps(lowered: Lowered, contractions: Sequence[int]) -> tuple[Lowered, list[int]]:
    """``lowered`` with each of ``contractions``, node ids, in steps, and where each node stands now. Parts
    of 16 bits are in float32, and rounded once.

    Example:
        >>> x, y = (jax.ShapeDtypeStruct((4, 512, n), "bfloat16") for n in (1024, 64))
        >>> new, ids = in_steps(lower(trace(lambda x, y: jnp.einsum("hqk,hqd->kd", x, y), x, y)), [0])
        >>> [(node.op, new.graph.values[node.outputs[0]].shape) for node in new.graph.nodes]
        [('dot_general', (4, 1024, 64)), ('reduce_sum', (1024, 64)), ('convert_element_type', (1024, 64))]
    """
    rewriter, ids = Rewriter(lowered), []
    for n, eqn in enumerate(lowered.equations):
        if n in contractions:
            ids.append(rewriter.put(n, _steps(eqn)))
        else:
            ids.append(rewriter.add(n, ORIGINAL, lambda v: (v, ORIGINAL)))
    return rewriter.finish(), ids


def _extents(eqn: Equation) -> list[int]:
    """Of the axes that are contracted."""
    ((contracted, _), _) = eqn.params["dimension_numbers"]
    return [eqn.in_avals[0].shape[d] for d in contracted]


def _steps(eqn: Equation) -> Lowered:
    (contracts, batches), extents = eqn.params["dimension_numbers"], _extents(eqn)
    longest = extents.index(max(extents))
    along = [(dims[longest],) for dims in contracts]
    apart = [(*b, *dims[:longest], *dims[longest + 1 :]) for b, dims in zip(batches, contracts, strict=True)]
    (result,) = eqn.out_avals
    wide = result.dtype if result.dtype.itemsize >= 4 else jnp.dtype("float32")
    summed = tuple(range(len(batches[0]), len(apart[0])))

    def steps(x: Any, y: Any) -> Any:
        numbers = ((along[0], along[1]), (apart[0], apart[1]))
        parts = lax.dot_general(x, y, numbers, eqn.params["precision"], wide)
        return parts.sum(summed).astype(result.dtype)

    return lower(trace(steps, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in eqn.in_avals)))
