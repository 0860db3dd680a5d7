"""Splits: what is summed down columns is summed in two steps, each tile of rows first.

On a GPU rows are dealt out to programs, and none of them sees a whole column: the gradient of a
normalisation's scale would read again what its own kernel has on chip. So the rows of ``x[R, C]`` become
``[R / T, T]``, the kernel that makes them adds up each ``T`` of them, and a small one what it leaves.
Where that pays is decided on what hangs together around such a sum, once for each structure, by a quick
plan of either program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from jax import lax
from jax import numpy as jnp

from costmodel.device import DeviceSpec
from costmodel.graph import Graph, check_graph
from fuseplan.features import Features
from fuseplan.loops.offered import least_bytes
from fuseplan.loops.quick import quick_ps
from fuseplan.loops.regions import Nodes
from fuseplan.lower import Lowered, lower
from fuseplan.rewrite import part
from fuseplan.signature import Signatures
from fuseplan.trace import Equation, Flat, Literal, Operand

_GAIN = (19, 20)
"""A quick plan with splits has to be a twentieth faster: what is around may make less of either."""

_ROWS = 4
"""What a first step sums up: a program holds so many rows of a norm, and writes a quarter of one of them."""

_NEAR = 64
"""So many operations around a sum are looked at: a normalisation and its gradient have about forty."""


def split_sums(lowered: Lowered, device: DeviceSpec, features: Features) -> Lowered | None:
    """``lowered`` with those sums down columns in two steps that a GPU's plan gains by; None where
    there are none."""
    if device.backend != "triton" or not features.splits:
        return None
    return _Splits(lowered, device, features).run()


class _Splits:
    def __init__(self, lowered: Lowered, device: DeviceSpec, features: Features) -> None:
        self.lowered, self.graph = lowered, lowered.graph
        self.device, self.features = device, features
        self.signatures = Signatures(lowered.graph)
        self._pays: dict[object, bool] = {}

    def run(self) -> Lowered | None:
        chosen: dict[int, tuple[int, int]] = {}
        for nodes, sums in self._places():
            key = (self.signatures.of(nodes).key, tuple(nodes.index(n) for n in sums))
            if key not in self._pays:
                self._pays[key] = self._gains(nodes, sums)
            if self._pays[key]:
                chosen |= sums
        return in_two_steps(self.lowered, chosen) if chosen else None

    def _places(self) -> Iterator[tuple[Nodes, dict[int, tuple[int, int]]]]:
        """Sums that may be split, by what hangs together around them."""
        found = {
            n: split
            for n, eqn in enumerate(self.lowered.equations)
            if (split := _split_of(eqn, self.device)) is not None and self._is_shared(n)
        }
        around = sorted((self._around(n), n) for n in found)
        for nodes, several in groupby(around, key=lambda pair: pair[0]):
            yield nodes, {n: found[n] for _, n in several}

    def _is_shared(self, n: int) -> bool:
        """Whether a kernel of others may have what node ``n`` sums up."""
        (v,) = self.graph.nodes[n].inputs
        return self.graph.values[v].producer >= 0 or len(self.graph.consumers[v]) > 1

    def _around(self, n: int) -> Nodes:
        """What hangs together with a sum, up to the next contractions."""
        graph, found, queue = self.graph, {n}, [n]
        while queue and len(found) < _NEAR:
            node = graph.nodes[queue.pop(0)]
            if node.flops.matrix:
                continue
            near = _neighbours(graph, node.inputs, least_bytes(self.device))
            near += _neighbours(graph, node.outputs, least_bytes(self.device))
            queue += [m for m in dict.fromkeys(near) if m not in found]
            found.update(near)
        return tuple(sorted(found))

    def _gains(self, nodes: Nodes, sums: dict[int, tuple[int, int]]) -> bool:
        once = part(self.lowered, nodes)
        split = in_two_steps(once, {nodes.index(n): where for n, where in sums.items()})
        return self._time_ps(split) * _GAIN[1] < self._time_ps(once) * _GAIN[0]

    def _time_ps(self, lowered: Lowered) -> int:
        return quick_ps(lowered, self.device, self.features)


def _neighbours(graph: Graph, values: Iterable[int], min_bytes: int) -> list[int]:
    """Who makes or reads ``values``: of arguments, who reads those that are large."""
    ties = [v for v in values if graph.values[v].producer >= 0 or graph.values[v].nbytes >= min_bytes]
    makers = [p for v in ties if (p := graph.values[v].producer) >= 0]
    return makers + [n for v in ties for n in graph.consumers[v]]


def _split_of(eqn: Equation, device: DeviceSpec) -> tuple[int, int] | None:
    """The dimension of a sum down columns that is split, and into how many rows a step; only where reading
    them again takes longer than to launch the second step."""
    if eqn.primitive is not lax.reduce_sum_p or eqn.is_set_apart or isinstance(eqn.inputs[0], Literal):
        return None
    aval, axes = eqn.in_avals[0], eqn.params["axes"]
    if not aval.size or not axes or aval.ndim - 1 in axes or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    read_ps = aval.size * aval.dtype.itemsize * 10**12 // device.hbm_bytes_per_s
    dim = max(axes, key=lambda d: (aval.shape[d], d))
    programs = aval.size // aval.shape[-1] // _ROWS
    is_worth_it = read_ps > device.launch_ps and programs >= device.core_count
    return (dim, _ROWS) if is_worth_it and aval.shape[dim] % _ROWS == 0 else None


def in_two_steps(lowered: Lowered, sums: dict[int, tuple[int, int]]) -> Lowered:
    """``lowered`` with each of ``sums``, node ids with a dimension and a divisor of its extent, made of
    sums of so many rows; those of 16 bits in float32, and rounded once.

    Example:
        >>> import jax
        >>> from fuseplan.trace import trace
        >>> x = jax.ShapeDtypeStruct((4096, 768), "float32")
        >>> new = in_two_steps(lower(trace(lambda x: x.sum(0), x)), {0: (0, 16)})
        >>> [(node.op, new.graph.values[node.outputs[0]].shape) for node in new.graph.nodes]
        [('reshape', (256, 16, 768)), ('reduce_sum', (256, 768)), ('reduce_sum', (768,))]
    """
    chain = _Chain(lowered)
    for n, eqn in enumerate(lowered.equations):
        if n in sums:
            chain.add_sum(eqn, *sums[n])
        else:
            chain.equations.append(eqn)
    flat = Flat(
        tuple(chain.equations), tuple(chain.avals), lowered.graph.inputs, lowered.outputs, lowered.consts,
        lowered.out_tree,
    )  # fmt: skip
    new = lower(flat)
    # No program has all of what the second step sums up.
    return replace(new, graph=check_graph(replace(new.graph, waits=tuple(chain.waits))))


class _Chain:
    """Equations under construction."""

    def __init__(self, lowered: Lowered) -> None:
        self.avals = list(lowered.avals)
        self.equations: list[Equation] = []
        self.waits: list[tuple[int, int]] = []
        """The two steps of each sum."""

    def add_sum(self, eqn: Equation, dim: int, rows: int) -> None:
        """A sum in two steps, of ``rows`` rows each at first."""
        (v,), (whole,), (result,) = eqn.inputs, eqn.in_avals, eqn.out_avals
        wide = whole.dtype if whole.dtype.itemsize >= 4 else jnp.dtype("float32")
        before, after = whole.shape[:dim], whole.shape[dim + 1 :]
        outer = (*before, whole.shape[dim] // rows, *after)
        tiled = (*before, whole.shape[dim] // rows, rows, *after)
        reshape = {"new_sizes": tiled, "dimensions": None, "sharding": None}
        v = self._add(eqn, lax.reshape_p, reshape, v, tiled)
        v = self._as(eqn, v, wide)
        v = self._add(eqn, eqn.primitive, {**eqn.params, "axes": (dim + 1,)}, v, outer)
        first = len(self.equations) - 1
        v = self._add(eqn, eqn.primitive, eqn.params, v, result.shape)
        self.waits.append((first, len(self.equations) - 1))
        self._as(eqn, v, result.dtype)
        last = self.equations.pop()
        self.equations.append(replace(last, outputs=eqn.outputs, out_avals=eqn.out_avals))

    def _as(self, like: Equation, v: Operand, dtype: Any) -> Operand:
        assert not isinstance(v, Literal)
        if self.avals[v].dtype == dtype:
            return v
        params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
        return self._add(like, lax.convert_element_type_p, params, v, self.avals[v].shape, dtype)

    def _add(
        self,
        like: Equation,
        primitive: Any,
        params: Any,
        v: Operand,
        shape: tuple[int, ...],
        dtype: Any = None,
    ) -> Operand:
        assert not isinstance(v, Literal)
        aval = self.avals[v]
        out = aval.update(shape=shape, dtype=dtype or aval.dtype)
        self.avals.append(out)
        new = len(self.avals) - 1
        self.equations.append(
            replace(like, primitive=primitive, params=params, inputs=(v,), outputs=(new,), in_avals=(aval,),
                    out_avals=(out,))
        )  # fmt: skip
        return new
