"""Compute independent chains of large arrays a few at a time, in a program that XLA:CPU compiles.

XLA:CPU may run independent operations at the same time, so it gives memory of their own to all arrays that no
dependence orders: histograms of 66 pairs of columns have 66 arrays of bins. Together they are new pages in
each run, which cost several times as much as memory that is there (``costmodel.temporaries``). ``in_turns``
adds dependences: with three at a time, a chain starts when the third before it has ended.

A dependence is a number that is always zero, which XLA does not know: it is computed from a result of one
chain, and its bits are added to an operand of another. XLA removes ``jax.lax.optimization_barrier`` before it
assigns memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import dtypes, lax
from jax import numpy as jnp

from costmodel.graph import Graph, OpKind
from costmodel.temporaries import LARGE_BYTES, temporary_bytes
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.rewrite import EquationRewriter
from fuseplan.frontend.trace import Equation, Flat, Operand
from fuseplan.support.digraph import connected_sets, execution_order, reachable

_LEAST_BYTES = 256 << 10
"""An array of fewer bytes ties no operations to a chain."""

_MOST_READERS = 2
"""An array with more readers is computed once for several chains."""

_MOST_ENDS = 4
"""The most operations that a chain starts or ends with."""

_MOST_STEPS = 2_000_000
"""The most operations that are looked at to find out which chains may wait for which: about a second."""

_LEAST_GAIN = 2
"""By what factor the arrays of all chains must be larger than those of the largest that run at a time."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """Operations that large arrays connect."""

    nbytes: int
    """Bytes of its large arrays."""
    starts: tuple[int, ...]
    """Operations that read none of its large arrays."""
    ends: tuple[int, ...]
    """Operations whose results none of its operations reads."""


def in_turns(flat: Flat, n_at_once: int) -> Flat:
    """The program with ``n_at_once`` of its independent chains at a time; the same object if that saves
    little.

    Example:
        >>> import jax
        >>> from fuseplan.frontend.trace import trace
        >>> flat = trace(lambda x: x + 1, jax.ShapeDtypeStruct((8,), "float32"))
        >>> in_turns(flat, 2) is flat
        True
    """
    if any(eqn.effects or eqn.is_set_apart for eqn in flat.equations):
        return flat
    made = (a for eqn in flat.equations for a in eqn.out_avals if hasattr(a, "dtype"))
    if sum(_bytes(a) for a in made if _bytes(a) >= _LEAST_BYTES) < LARGE_BYTES:
        return flat
    lowered = lower(flat)
    chains = _chains(lowered.graph)
    largest = sorted((chain.nbytes for chain in chains), reverse=True)
    if _LEAST_GAIN * sum(largest[:n_at_once]) > sum(largest) or temporary_bytes(lowered.graph) < LARGE_BYTES:
        return flat
    return _Rewriter(lowered, chains, n_at_once).run(flat)


def _bytes(aval: Any) -> int:
    return int(aval.size * getattr(aval.dtype, "itemsize", 0))


def _chains(graph: Graph) -> list[_Chain]:
    """The chains of a program, by their first operations."""
    large = {
        v.id
        for v in graph.values
        if v.producer >= 0 and v.nbytes >= _LEAST_BYTES and len(graph.consumers[v.id]) <= _MOST_READERS
    }
    edges = [(graph.values[v].producer, n) for v in sorted(large) for n in graph.consumers[v]]
    found = []
    for nodes in connected_sets(len(graph.nodes), edges):
        inside = set(nodes)
        members = [graph.nodes[n] for n in nodes]
        made = [v for node in members for v in node.outputs if v in large and v not in graph.results]
        if not made or any(node.effects for node in members):
            continue
        starts = [node.id for node in members if large.isdisjoint(node.inputs)]
        ends = [node.id for node in members if not any(inside & {*graph.consumers[v]} for v in node.outputs)]
        found.append(_Chain(sum(graph.values[v].nbytes for v in made), tuple(starts), tuple(ends)))
    return found


class _Rewriter(EquationRewriter):
    """Writes a program with a dependence of each chain on an earlier one."""

    def __init__(self, lowered: Lowered, chains: Sequence[_Chain], n_at_once: int) -> None:
        super().__init__(lowered)
        self._graph = lowered.graph
        self._waits: dict[int, _Chain] = {}
        """By operation that starts a chain, the chain that it waits for."""
        after = [{r for v in node.outputs for r in self._graph.consumers[v]} for node in self._graph.nodes]
        most = _MOST_STEPS // len(after)
        for before, chain in zip(chains[:most], chains[n_at_once:], strict=False):
            is_short = max(len(before.ends), len(chain.starts)) <= _MOST_ENDS
            if not is_short or not all(map(self._has_element, before.ends)):
                continue
            if reachable(chain.starts, after.__getitem__).isdisjoint(before.ends):
                self._waits.update(dict.fromkeys(chain.starts, before))
                for end in before.ends:
                    after[end].update(chain.starts)
        self._order = execution_order(after)
        self._zeros: dict[tuple[int, ...], Operand] = {}

    def run(self, flat: Flat) -> Flat:
        if not self._waits:
            return flat
        for n in self._order:
            eqn = self.old.equations[n]
            place = self._place(n, eqn) if n in self._waits else None
            if place is None:
                self.equations.append(eqn)
                continue
            inputs = list(eqn.inputs)
            zero = self._zero(eqn, self._waits[n])
            (inputs[place],) = self.add_traced(eqn, _with_bits, [inputs[place], zero])
            self.add(eqn, eqn.primitive, eqn.params, inputs, eqn.out_avals, eqn.outputs)
        new = self.lowered()
        return Flat(new.equations, new.avals, new.graph.inputs, new.outputs, new.consts, new.out_tree)

    def _has_element(self, n: int) -> bool:
        aval = self.old.equations[n].out_avals[0]
        return bool(getattr(aval, "size", 0)) and not jnp.issubdtype(aval.dtype, dtypes.extended)

    def _zero(self, like: Equation, chain: _Chain) -> Operand:
        """The number that is zero, and known once the chain has ended."""
        if chain.ends not in self._zeros:
            ends = [self.old.equations[n].outputs[0] for n in chain.ends]
            (self._zeros[chain.ends],) = self.add_traced(like, _zero_of, ends)
        return self._zeros[chain.ends]

    def _place(self, n: int, eqn: Equation) -> int | None:
        """The place of the operand of a chain's first operation to add the number to: the smallest, so that
        the addition takes next to no time, or any that XLA reads in the operation's loop."""
        sizes = {
            k: _bytes(aval)
            for k, aval in enumerate(eqn.in_avals)
            if jnp.issubdtype(aval.dtype, jnp.floating) or jnp.issubdtype(aval.dtype, jnp.integer)
        }
        if not sizes:
            return None
        place = min(sizes, key=sizes.__getitem__)
        is_small = 8 * sizes[place] <= sum(map(_bytes, eqn.out_avals))
        return place if is_small or self._graph.nodes[n].kind <= OpKind.INJECTIVE else None


def _zero_of(*ends: Any) -> Any:
    """Zero, computed from an element of each array. XLA does not know that it is zero."""
    found = jnp.int32(0)
    for x in ends:
        one = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
        one = lax.real(one) if jnp.issubdtype(x.dtype, jnp.complexfloating) else one
        is_float = jnp.issubdtype(one.dtype, jnp.floating)
        number = lax.bitcast_convert_type(one.astype(jnp.float32), jnp.int32) if is_float else one
        found |= lax.min(abs(number.astype(jnp.int32) & np.int32(2**31 - 1)), np.int32(0))
    return found


def _with_bits(x: Any, zero: Any) -> Any:
    """``x`` with the bits of ``zero`` added: the same bits."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x | zero.astype(x.dtype)
    bits = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) | zero.astype(bits), x.dtype)
