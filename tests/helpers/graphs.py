"""Graphs and kernels built by hand, without jax: the cost model and the solver are tested on these.

Example:
    >>> b = GraphBuilder()
    >>> x = b.input((128, 256))
    >>> graph = b.build(b.reduce(b.elementwise(x, op="exp"), axes=(1,)))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from costmodel.devices import TEST_DEVICE
from costmodel.graph import DimMap, DimRole, Flops, Graph, Node, OpKind, Value, check_graph, make_graph
from costmodel.kernel import Access, Axis, AxisRole, KernelSpec

P, R, W = DimRole.PARALLEL, DimRole.REDUCED, DimRole.WHOLE
BACKENDS = ("triton", "mosaic_tpu", "xla")
_TRANSCENDENTAL = frozenset({"exp", "log", "tanh", "logistic", "sin", "cos", "rsqrt", "sqrt", "div"})


TPU = dataclasses.replace(
    TEST_DEVICE, name="test-tpu", platform="tpu", backend="mosaic_tpu", core_count=1, cache_bytes=0,
    cache_bytes_per_s=0, onchip_bytes=16 * 2**20, register_bytes=0, sequential_grid=True,
)  # fmt: skip
"""The test device with a TPU's grid, VMEM and lack of a shared cache."""


class GraphBuilder:
    """Collects values and nodes; every method returns the id of the value it makes."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.inputs: list[int] = []

    def input(self, shape: Sequence[int], dtype: str = "float32") -> int:
        """An input of the graph."""
        self.inputs.append(self._value(shape, dtype, -1))
        return self.inputs[-1]

    def elementwise(self, *values: int, op: str = "add", dtype: str | None = None) -> int:
        """``op`` of values of one shape; ``dtype`` of the result, if it is another."""
        shape = self.shape(values[0])
        dims, dim_map = _dims_of(shape)
        unit = "transcendental" if op in _TRANSCENDENTAL else "vector"
        flops = Flops(**{unit: prod(shape)})
        return self._node(
            op, OpKind.ELEMENTWISE, values, shape, dims, (P,) * len(dims), (dim_map,) * len(values), dim_map,
            flops, dtype,
        )  # fmt: skip

    def reduce(self, value: int, axes: Sequence[int], op: str = "reduce_sum") -> int:
        """Sums (say) over ``axes``."""
        shape = self.shape(value)
        dims, dim_map = _dims_of(shape)
        roles = [P] * len(dims)
        for axis in axes:
            for d in dim_map[axis]:
                roles[d] = R
        kept = [i for i in range(len(shape)) if i not in axes]
        return self._node(
            op, OpKind.REDUCTION, (value,), [shape[i] for i in kept], dims, tuple(roles), (dim_map,),
            tuple(dim_map[i] for i in kept), Flops(vector=prod(shape)),
        )  # fmt: skip

    def scan(self, value: int, axis: int, op: str = "cumsum") -> int:
        """Sums (say) of all before an element along ``axis``."""
        shape = self.shape(value)
        dims, dim_map = _dims_of(shape)
        roles = tuple(W if d in dim_map[axis] else P for d in range(len(dims)))
        return self._node(
            op, OpKind.REDUCTION, (value,), shape, dims, roles, (dim_map,), dim_map, Flops(vector=prod(shape))
        )

    def matmul(self, a: int, b: int, dtype: str | None = None) -> int:
        """``[..., m, k] @ [..., k, n]``, the leading dimensions equal."""
        sa, sb = self.shape(a), self.shape(b)
        assert (sa[:-2], sa[-1]) == (sb[:-2], sb[-2]), f"cannot multiply {sa} by {sb}"
        space = (*sa[:-2], sa[-2], sb[-1], sa[-1])  # batch, m, n, k
        dims, space_map = _dims_of(space)
        batch, (m, n, k) = space_map[:-3], space_map[-3:]
        roles = tuple(R if (d,) == k else P for d in range(len(dims)))
        return self._node(
            "dot_general", OpKind.OUT_ELEMENTWISE_FUSABLE, (a, b), (*sa[:-2], sa[-2], sb[-1]), dims, roles,
            ((*batch, m, k), (*batch, k, n)), (*batch, m, n), Flops(matrix=2 * prod(space)), dtype,
        )  # fmt: skip

    def broadcast(self, value: int, shape: Sequence[int], where: Sequence[int]) -> int:
        """``broadcast_in_dim``: dimension i of ``value`` becomes dimension ``where[i]``."""
        dims, dim_map = _dims_of(shape)
        old = self.shape(value)
        in_map = tuple(() if old[i] == 1 else dim_map[w] for i, w in enumerate(where))
        return self._node(
            "broadcast_in_dim", OpKind.BROADCAST, (value,), shape, dims, (P,) * len(dims), (in_map,), dim_map
        )

    def transpose(self, value: int, perm: Sequence[int]) -> int:
        """Dimension i of the result is dimension ``perm[i]`` of ``value``."""
        shape = [self.shape(value)[p] for p in perm]
        dims, dim_map = _dims_of(shape)
        in_map: list[tuple[int, ...]] = [()] * len(perm)
        for i, p in enumerate(perm):
            in_map[p] = dim_map[i]
        return self._node(
            "transpose", OpKind.INJECTIVE, (value,), shape, dims, (P,) * len(dims), (tuple(in_map),), dim_map
        )

    def reshape(self, value: int, shape: Sequence[int]) -> int:
        """Splits and merges of dimensions: extents must nest (6,4 -> 24 or 2,3,4)."""
        old, new = self.shape(value), tuple(shape)
        dims, old_map, new_map = _common_factors(old, new)
        return self._node(
            "reshape", OpKind.INJECTIVE, (value,), new, dims, (P,) * len(dims), (old_map,), new_map,
            bitcast=True,
        )  # fmt: skip

    def opaque(self, *values: int, shape: Sequence[int], dtype: str | None = None, op: str = "sort") -> int:
        """Something no kernel can hold: every dimension is needed whole."""
        dims: list[int] = []
        maps: list[DimMap] = []
        for extents in [*(self.shape(v) for v in values), shape]:
            own, dim_map = _dims_of(extents)
            maps.append(tuple(tuple(d + len(dims) for d in ds) for ds in dim_map))
            dims += own
        return self._node(
            op, OpKind.OPAQUE, values, shape, tuple(dims), (W,) * len(dims), tuple(maps[:-1]), maps[-1],
            dtype=dtype, backends=(),
        )  # fmt: skip

    def build(self, *outputs: int) -> Graph:
        """The graph, checked."""
        return check_graph(make_graph(self.values, self.nodes, self.inputs, outputs))

    def shape(self, value: int) -> tuple[int, ...]:
        return self.values[value].shape

    def _value(self, shape: Sequence[int], dtype: str, producer: int) -> int:
        self.values.append(Value(len(self.values), tuple(shape), dtype, producer))
        return len(self.values) - 1

    def _node(
        self,
        op: str,
        kind: OpKind,
        inputs: Sequence[int],
        shape: Sequence[int],
        dims: tuple[int, ...],
        roles: tuple[DimRole, ...],
        input_maps: tuple[DimMap, ...],
        output_map: DimMap,
        flops: Flops = Flops(),  # noqa: B008 -- immutable
        dtype: str | None = None,
        bitcast: bool = False,
        backends: tuple[str, ...] = BACKENDS,
    ) -> int:
        id_ = len(self.nodes)
        out = self._value(shape, dtype or self.values[inputs[0]].dtype, id_)
        self.nodes.append(
            Node(id_, op, kind, tuple(inputs), (out,), dims, roles, input_maps, (output_map,),
                 flops, bitcast, backends=backends)
        )  # fmt: skip
        return out


def matmul(m: int, n: int, k: int, dtype: str = "float32") -> Graph:
    """``[m, k] @ [k, n]``."""
    b = GraphBuilder()
    return b.build(b.matmul(b.input((m, k), dtype), b.input((k, n), dtype)))


def tiled_matmul(graph: Graph, bm: int, bn: int, bk: int, backend: str = "triton") -> KernelSpec:
    """The first node, a matmul, as a kernel of m x n tiles that streams k."""
    m, n, k = graph.nodes[0].dims
    grid = AxisRole.PARALLEL
    return KernelSpec(
        (0,), (Axis(m, grid, bm), Axis(n, grid, bn), Axis(k, AxisRole.STREAMED, bk)), (((0,), (1,), (2,)),),
        (Access(0, ((0,), (2,))), Access(1, ((2,), (1,)))), (Access(2, ((0,), (1,))),), backend,
    )  # fmt: skip


def spec_of_xla(graph: Graph, *nodes: int) -> KernelSpec:
    """A kernel of XLA's own making: every live-in read, every live-out written."""
    made = {v for n in nodes for v in graph.nodes[n].outputs}
    used = dict.fromkeys(v for n in nodes for v in graph.nodes[n].inputs if v not in made)
    out = [v for v in made if v in graph.outputs or set(graph.consumers[v]) - set(nodes)]
    return KernelSpec(
        nodes, (), tuple(((),) * len(graph.nodes[n].dims) for n in nodes),
        tuple(Access(v, ()) for v in used), tuple(Access(v, ()) for v in out),
    )  # fmt: skip


def _dims_of(shape: Sequence[int]) -> tuple[tuple[int, ...], DimMap]:
    """A dimension for each extent but one: ``(4, 1, 8) -> (4, 8), ((0,), (), (1,))``."""
    dims: list[int] = []
    dim_map: list[tuple[int, ...]] = []
    for extent in shape:
        dim_map.append(() if extent == 1 else (len(dims),))
        if extent != 1:
            dims.append(extent)
    return tuple(dims), tuple(dim_map)


def _common_factors(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[tuple[int, ...], DimMap, DimMap]:
    """The coarsest dimensions that both shapes are merges of, and the two maps."""
    assert prod(old) == prod(new), f"cannot reshape {old} to {new}"
    cuts = sorted({prod(shape[i:]) for shape in (old, new) for i in range(len(shape) + 1)}, reverse=True)
    for outer, inner in pairwise(cuts):
        assert outer % inner == 0, f"{old} and {new} do not nest"
    dims = tuple(outer // inner for outer, inner in pairwise(cuts))

    def dim_map(shape: tuple[int, ...]) -> DimMap:
        return tuple(
            tuple(d for d in range(len(dims)) if prod(shape[i + 1 :]) <= cuts[d + 1] < prod(shape[i:]))
            for i in range(len(shape))
        )

    return dims, dim_map(old), dim_map(new)
