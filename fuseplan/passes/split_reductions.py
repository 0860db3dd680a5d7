"""Split reductions, and contractions of several axes, into partial results and a final sum.

On a GPU each program of a kernel has some rows, and none reads a whole column. The gradient of a
normalisation's scale, a sum down the columns, would therefore read again an array that another kernel has on
chip. So the rows of ``x[R, C]`` become ``[R / T, T]``: the kernel that computes them adds up each ``T`` of
them, and a small kernel adds up the partial sums. Likewise, a single program would add up a mean over a
whole array, a loss or a norm. A heuristic plans the operations around such a reduction without the split and
with each of a few ``T``, once for all reductions with equal surroundings, and the fastest program is kept.

A kernel streams one axis only, so a contraction along several axes becomes one along the longest of them, for
each index of the others, and a sum. Where several heads of queries share keys, the gradient of the keys is a
sum over queries and heads: a kernel streams the queries of each head (as in FlashAttention-2: Dao,
arXiv:2307.08691), and a small kernel adds up the heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd, prod
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from costmodel.device import DeviceSpec
from costmodel.graph import ORIGINAL, Graph, check_graph
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.rewrite import Rewriter, part
from fuseplan.frontend.trace import Equation, Literal, trace
from fuseplan.passes.estimate import quick_ps
from fuseplan.plan.options import Features
from fuseplan.schedule.pricing import Nodes
from fuseplan.schedule.structure import Signatures
from fuseplan.support.digraph import reachable
from fuseplan.support.work import Work, unlimited

_ROWS = (4, 32, 128)
"""Rows that the first step of a sum down columns may add up. A program holds few long rows of a norm, or many
short ones; the more it adds up, the less it writes."""

_PIECE = (64, 1024)
"""Elements of a row, at least and at most, that a first step reduces: its result is then small compared with
its operand."""

_MAX_AROUND = 64
"""Operations around a reduction that are planned to decide about it: a normalisation and its gradient have
about forty."""

_NEAR = 2
"""Reductions are decided alike if the operations up to so many steps around them are equal, and one of them
is planned. Further away the layers of a deep network differ."""


def split_sums(
    lowered: Lowered, device: DeviceSpec, features: Features, work: Work | None = None
) -> Lowered | None:
    """``lowered`` with those reductions in two steps by which a GPU's plan gains; None where there are none.

    Reductions of one array are split together or not at all, since the array would otherwise be read twice.

    Raises:
        UndecidedError: ``work`` is over.
    """
    if not device.capabilities.splits_reductions or not features.splits:
        return None
    return _Splits(lowered, device, features, work or unlimited()).run()


class _Splits:
    def __init__(self, lowered: Lowered, device: DeviceSpec, features: Features, work: Work) -> None:
        self.lowered, self.graph = lowered, lowered.graph
        self.device, self.features, self.work = device, features, work
        self.signatures = Signatures(lowered.graph)
        self._best: dict[object, int | None] = {}

    def run(self) -> Lowered | None:
        chosen: dict[int, Split] = {}
        for nodes, sums in self._places():
            near = self._near(nodes, sums)
            key = (self.signatures.of(near).key, tuple(near.index(n) for n in sums))
            if key not in self._best:
                self._best[key] = self._fastest(nodes, sums)
            best = self._best[key]
            if best is not None:
                chosen |= _nth(sums, best)
        return in_two_steps(self.lowered, chosen) if chosen else None

    def _places(self) -> Iterator[tuple[Nodes, dict[int, Splits]]]:
        """Reductions that may be split, with the ways to split each, by the operations around them."""
        found = {
            n: splits
            for n, eqn in enumerate(self.lowered.equations)
            if (splits := _splits_of(eqn, self.device)) and self._is_shared(n)
        }
        around = sorted((self._around(n), n) for n in found)
        for nodes, several in groupby(around, key=lambda pair: pair[0]):
            yield nodes, {n: found[n] for _, n in several}

    def _is_shared(self, n: int) -> bool:
        """Whether a kernel of other operations may hold the operand of node ``n``."""
        (v,) = self.graph.nodes[n].inputs
        return self.graph.values[v].producer >= 0 or len(self.graph.consumers[v]) > 1

    def _around(self, n: int) -> Nodes:
        """The operations around a reduction that are connected to it, up to the next contractions."""
        graph, found, queue = self.graph, {n}, [n]
        while queue and len(found) < _MAX_AROUND:
            near = self._beside(queue.pop(0))
            queue += [m for m in near if m not in found]
            found.update(near)
        if all(graph.values[v].size == 1 for v in graph.nodes[n].outputs):
            # Operations that depend on a scalar result wait for it.
            last = max(found)
            found -= reachable(
                [n],
                lambda m: (c for v in graph.nodes[m].outputs for c in graph.consumers[v] if c <= last),
            )
        return tuple(sorted(found))

    def _near(self, nodes: Nodes, sums: Iterable[int]) -> Nodes:
        """Those of ``nodes`` that are at most ``_NEAR`` steps from one of ``sums``."""
        found = edge = set(sums)
        for _ in range(_NEAR):
            edge = {m for n in edge for m in self._beside(n)}.intersection(nodes) - found
            found = found | edge
        return tuple(sorted(found))

    def _beside(self, n: int) -> list[int]:
        """The operations that ``n`` is connected to; none for a contraction."""
        node, min_bytes = self.graph.nodes[n], self.device.least_large_bytes
        if node.flops.matrix:
            return []
        near = [_neighbours(self.graph, values, min_bytes) for values in (node.inputs, node.outputs)]
        return list(dict.fromkeys([*near[0], *near[1]]))

    def _fastest(self, nodes: Nodes, sums: dict[int, Splits]) -> int | None:
        """Which of the ways to split ``sums`` makes the fastest program; None where none gains."""
        once = part(self.lowered, nodes)
        # A search may save one launch in either of the two.
        fastest, least_ps = None, self._time_ps(once) - self.device.launch_ps
        for k in range(max(map(len, sums.values()))):
            splits = {nodes.index(n): split for n, split in _nth(sums, k).items()}
            if (time_ps := self._time_ps(in_two_steps(once, splits))) < least_ps:
                fastest, least_ps = k, time_ps
        return fastest

    def _time_ps(self, lowered: Lowered) -> int:
        return quick_ps(lowered, self.device, self.features, self.work, repeats=self.features.recompute)


def _neighbours(graph: Graph, values: Iterable[int], min_bytes: int) -> list[int]:
    """The producers and consumers of ``values``; of arguments, the consumers of large ones. Scalars do not
    count: in a training step the norm of all gradients is connected with everything."""

    def is_tie(v: int) -> bool:
        value = graph.values[v]
        return value.nbytes >= min_bytes or (value.producer >= 0 and value.size > 1)

    ties = [v for v in values if is_tie(v)]
    makers = [p for v in ties if (p := graph.values[v].producer) >= 0]
    return makers + [n for v in ties for n in graph.consumers[v]]


@dataclass(frozen=True, slots=True)
class Split:
    """A reduction in two steps: of its operand in the shape ``tiled`` along ``first``, and of what that
    leaves along ``second``."""

    tiled: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]


Splits = tuple[Split, ...]
"""The ways to split a reduction."""


def _nth(sums: dict[int, Splits], k: int) -> dict[int, Split]:
    """The way ``k`` to split each reduction; of those with fewer ways, the last."""
    return {n: splits[min(k, len(splits) - 1)] for n, splits in sums.items()}


_REDUCTIONS = frozenset(
    {lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p, lax.reduce_and_p, lax.reduce_or_p}
)
"""Reductions that may be computed in any order, piece by piece."""


def _splits_of(eqn: Equation, device: DeviceSpec) -> Splits:
    """The ways to make a reduction in two steps; only where reading its operand again takes longer than to
    launch the second."""
    if eqn.primitive not in _REDUCTIONS or eqn.is_set_apart or isinstance(eqn.inputs[0], Literal):
        return ()
    aval, axes = eqn.in_avals[0], eqn.params["axes"]
    if not axes or aval.size * aval.dtype.itemsize * 10**12 <= device.launch_ps * device.hbm_bytes_per_s:
        return ()
    find = _along_rows if aval.ndim - 1 in axes else _down_columns
    return tuple(find(aval.shape, axes, device.core_count))


def _down_columns(shape: tuple[int, ...], axes: tuple[int, ...], least_programs: int) -> Iterator[Split]:
    """Split a sum down columns: some rows first."""
    if prod(shape[:-1]) // _ROWS[0] >= least_programs:
        found = (_of_rows(shape, axes, rows) for rows in _ROWS)
        yield from dict.fromkeys(split for split in found if split is not None)


def _of_rows(shape: tuple[int, ...], axes: tuple[int, ...], rows: int) -> Split | None:
    """Reduce up to ``rows`` rows first: those of the innermost dimensions, and a part of the next; None where
    that is one row, or all."""
    inner: list[int] = []
    for dim in sorted(axes, reverse=True):
        if shape[dim] > rows:
            piece = max(n for n in range(1, rows + 1) if shape[dim] % n == 0)
            if piece > 1:
                return _cut(shape, axes, dim, piece, inner)
            return Split(shape, tuple(inner), tuple(d for d in axes if d not in inner)) if inner else None
        inner.append(dim)
        rows //= shape[dim]
    return None


def _along_rows(shape: tuple[int, ...], axes: tuple[int, ...], least_programs: int) -> Iterator[Split]:
    """Split a sum along rows: whole rows first, or pieces where rows are few; not where each result may have
    a program of its own."""
    size, results = prod(shape), prod(n for d, n in enumerate(shape) if d not in axes)
    if results >= least_programs:
        return
    inner = len(shape) - 1
    while inner - 1 in axes and prod(shape[inner:]) < _PIECE[0]:
        inner -= 1
    left = size // prod(shape[inner:])
    if left > results and left >= least_programs:
        yield Split(shape, tuple(range(inner, len(shape))), tuple(d for d in axes if d < inner))
        return
    piece = gcd(shape[-1], _PIECE[1])
    if piece >= _PIECE[0] and size // piece >= least_programs:
        yield _cut(shape, axes, len(shape) - 1, piece)


def _cut(
    shape: tuple[int, ...], axes: tuple[int, ...], dim: int, piece: int, inner: Sequence[int] = ()
) -> Split:
    """Split one dimension into pieces that are reduced first, together with the dimensions ``inner`` after
    it."""
    tiled = (*shape[:dim], shape[dim] // piece, piece, *shape[dim + 1 :])
    first = (dim + 1, *(d + 1 for d in inner))
    return Split(tiled, tuple(sorted(first)), tuple(d for d in axes if d not in inner))


def in_two_steps(lowered: Lowered, splits: dict[int, Split]) -> Lowered:
    """``lowered`` with some of its reductions, by node, made in two steps; sums of 16 bits in float32, and
    rounded once.

    Example:
        >>> import jax
        >>> from fuseplan.frontend.lower import lower
        >>> from fuseplan.frontend.trace import trace
        >>> x = jax.ShapeDtypeStruct((4096, 768), "float32")
        >>> columns = lower(trace(lambda x: x.sum(0), x))
        >>> new = in_two_steps(columns, {0: Split((256, 16, 768), (1,), (0,))})
        >>> [(node.op, new.graph.values[node.outputs[0]].shape) for node in new.graph.nodes]
        [('reshape', (256, 16, 768)), ('reduce_sum', (256, 768)), ('reduce_sum', (768,))]
    """
    rewriter, waits = Rewriter(lowered), []
    for n, eqn in enumerate(lowered.equations):
        if n in splits:
            steps = _two_steps(eqn, splits[n])
            at = rewriter.put(n, steps)
            first, second = (at + i for i, e in enumerate(steps.equations) if e.primitive is eqn.primitive)
            waits.append((first, second))
        else:
            rewriter.add(n, ORIGINAL, lambda v: (v, ORIGINAL))
    new = rewriter.finish()
    # No program of a kernel holds the whole operand of the second step.
    return replace(new, graph=check_graph(replace(new.graph, waits=tuple(waits))))


def _two_steps(eqn: Equation, split: Split) -> Lowered:
    (whole,), (result,) = eqn.in_avals, eqn.out_avals
    narrow = jnp.issubdtype(whole.dtype, jnp.floating) and whole.dtype.itemsize < 4
    wide = jnp.dtype("float32") if narrow and eqn.primitive is lax.reduce_sum_p else whole.dtype

    def steps(x: Any) -> Any:
        tiled = lax.convert_element_type(x if split.tiled == whole.shape else x.reshape(split.tiled), wide)
        parts = eqn.primitive.bind(tiled, **{**eqn.params, "axes": split.first})
        return lax.convert_element_type(
            eqn.primitive.bind(parts, **{**eqn.params, "axes": split.second}), result.dtype
        )

    return lower(trace(steps, jax.ShapeDtypeStruct(whole.shape, whole.dtype)))


_MIN_REDUCTION = 4
"""The parts are so many times smaller than what is contracted: to write and to read them is then little
beside one pass over that."""


def along_several(eqn: Equation) -> bool:
    """Whether ``eqn`` contracts several axes of something large, so that it may be made in steps."""
    if eqn.primitive is not lax.dot_general_p or eqn.is_set_apart:
        return False
    if not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (*eqn.in_avals, *eqn.out_avals)):
        return False
    extents = _extents(eqn)
    parts = eqn.out_avals[0].size * prod(extents) // max(extents, default=1)
    largest = max(aval.size for aval in eqn.in_avals)
    return sum(extent > 1 for extent in extents) > 1 and parts * _MIN_REDUCTION <= largest


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
