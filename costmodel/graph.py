"""The graph of operations: values, nodes, and the iteration space of each node.

Every node has an *iteration space*: a tuple of dimensions (``dims``), each with a role. A map for each
operand and result gives, for each of its dimensions, the iteration dimensions that index it. Three examples,
written ``operand, operand -> result``::

    add                     [i j], [i j]  -> [i j]
    reduce_sum(axes=(1,))   [i j]         -> [i]          j is REDUCED
    reshape 6,4 -> 2,3,4    [(a b) c]     -> [a b c]      the first dim merges a and b

Legality, tiling, on-chip bytes and memory traffic all follow from these maps. No iteration dimension indexes
a dimension of size one: its entry is ``()``.

A graph may hold several copies of an operation (``Graph.origins``); ``copies_of`` finds them, and
``without_copies`` removes them. ``boundary`` finds the arrays that a group of nodes reads and writes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NoReturn, TypeVar

from costmodel import dtypes

T = TypeVar("T")

DimMap = tuple[tuple[int, ...], ...]
"""For each dimension of a value, the iteration dimensions that it merges, major first."""


class OpKind(enum.IntEnum):
    """The kind of map from inputs to output, in the order of TVM's ``OpPatternKind``: simplest first, so that
    the kind of a path is the greatest of its members."""

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    OUT_ELEMENTWISE_FUSABLE = 4
    TUPLE = 7
    OPAQUE = 8


class DimRole(enum.IntEnum):
    """How a node uses one dimension of its iteration space."""

    PARALLEL = 0
    """Every index is independent: any tile can be computed by itself."""
    REDUCED = 1
    """Reduced by an associative operation: partial results can be combined."""
    WHOLE = 2
    """Not tiled: an index of the result may depend on every index."""
    ADDRESSED = 3
    """Of an operand alone, in which the values of indices choose places. A kernel that loads by index
    (``Backend.loads_by_index``) reads each element at its address, and the dimension is no axis of it; in
    every other kernel the dimension is whole."""

    @property
    def is_whole(self) -> bool:
        """Whether a kernel that does not load by index needs the whole dimension."""
        return self >= DimRole.WHOLE


@dataclass(frozen=True, slots=True)
class Flops:
    """Numbers of floating-point operations, by the unit that executes them."""

    matrix: int = 0
    vector: int = 0
    transcendental: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matrix + other.matrix, self.vector + other.vector, self.transcendental + other.transcendental
        )

    def times(self, count: int) -> Flops:
        """These operations, executed ``count`` times."""
        return Flops(self.matrix * count, self.vector * count, self.transcendental * count)

    def share(self, part: int, whole: int) -> Flops:
        """The share ``part / whole`` of these operations, rounded up."""
        if part == whole:
            return self
        return Flops(*(-(-n * part // whole) for n in (self.matrix, self.vector, self.transcendental)))

    @property
    def total(self) -> int:
        return self.matrix + self.vector + self.transcendental


@dataclass(frozen=True, slots=True)
class Value:
    """An array of the graph: ``id`` is its position in ``Graph.values``."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    producer: int
    """The id of the node that computes it; -1 for an input or constant of the graph."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.size * dtypes.bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{dtypes.short(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: ``id`` is its position in ``Graph.nodes``, a topological order."""

    id: int
    op: str
    """The name of the JAX primitive."""
    kind: OpKind
    inputs: tuple[int, ...]
    """Values read, one entry for each array operand: a value may occur twice."""
    outputs: tuple[int, ...]
    dims: tuple[int, ...]
    """Extents of the iteration space, none of them one."""
    roles: tuple[DimRole, ...]
    input_maps: tuple[DimMap, ...]
    output_maps: tuple[DimMap, ...]
    flops: Flops = Flops()
    bitcast: bool = False
    """Whether it moves no byte as a kernel by itself: a reshape of a row-major array."""
    effects: bool = False
    """Whether it has side effects: it is never fused and keeps its order among other nodes with side
    effects."""
    backends: tuple[str, ...] = ()
    """The backends that can emit it inside a fused kernel."""
    temporaries: int = 0
    """The number of further blocks, of the size of its result, that its evaluation needs."""
    signature: int = 0
    """A hash of its parameters and literals. Negative if a parameter, such as a function, cannot be hashed by
    its content: it then distinguishes nodes of one graph only."""
    source: str = ""
    """Its place in the user's code, as ``file:line (function)``."""
    reciprocal: bool = False
    """Whether it is a number divided by a power of its operand, so that multiplying by it is a division."""
    takes_part: bool = False
    """Whether, as a kernel by itself, it reads no more of its first operand than the size of its result: a
    slice, a gather."""
    scope: str = ""
    """The names of the enclosing ``jax.named_scope``s, outermost first: ``block/attention``."""
    given_ps: int | None = None
    """Picoseconds of one run as a kernel by itself where these are given, as for a library's kernel; None
    where they are estimated."""

    def addresses(self, dim_map: DimMap) -> bool:
        """Whether the node reads the operand of ``dim_map`` at places that indices choose."""
        return DimRole.ADDRESSED in self.roles and any(
            self.roles[d] == DimRole.ADDRESSED for dims in dim_map for d in dims
        )

    @property
    def reduction_size(self) -> int:
        """The number of elements that a reduction, or of products that a contraction, combines into each
        element of its result; 1 for other operations."""
        return math.prod(
            [n for n, role in zip(self.dims, self.roles, strict=True) if role == DimRole.REDUCED]
        )


@dataclass(frozen=True, slots=True)
class Graph:
    """Values and nodes in topological order; ``inputs`` and ``outputs`` are value ids."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    consumers: tuple[tuple[int, ...], ...]
    """For each value, the nodes that read it, ascending, each once."""
    origins: tuple[int, ...] = ()
    """For each node, the first node that computes the same result from the same values; empty if there are no
    copies. A kernel that holds several copies of an operation computes it once."""
    waits: tuple[tuple[int, int], ...] = ()
    """Pairs of nodes; the second depends on the first by a path outside this graph."""
    results: frozenset[int] = field(init=False, repr=False, compare=False)
    """``outputs`` as a set."""
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What ``once`` has computed of the graph."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", frozenset(self.outputs))

    def __str__(self) -> str:
        lines = [f"in   {', '.join(f'v{v}:{self.values[v]}' for v in self.inputs)}"]
        for node in self.nodes:
            outs = ", ".join(f"v{v}:{self.values[v]}" for v in node.outputs)
            ins = " ".join(f"v{v}" for v in node.inputs)
            lines.append(f"n{node.id:<4}{outs} = {node.op} {ins}    [{node.kind.name.lower()}]")
        lines.append(f"out  {', '.join(f'v{v}' for v in self.outputs)}")
        return "\n".join(lines)


def once(f: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Compute a function of a graph once for each graph."""

    name = f"{f.__module__}.{f.__qualname__}"

    @wraps(f)
    def computed(graph: Graph) -> T:
        if name not in graph.computed:
            graph.computed[name] = f(graph)
        found: T = graph.computed[name]
        return found

    return computed


def make_graph(
    values: Iterable[Value],
    nodes: Iterable[Node],
    inputs: Iterable[int],
    outputs: Iterable[int],
    origins: Iterable[int] = (),
    waits: Iterable[tuple[int, int]] = (),
) -> Graph:
    """Build a ``Graph`` and its ``consumers``.

    Example:
        >>> x, y = Value(0, (4,), "float32", -1), Value(1, (4,), "float32", 0)
        >>> exp = Node(0, "exp", OpKind.ELEMENTWISE, (0,), (1,), (4,),
        ...            (DimRole.PARALLEL,), (((0,),),), (((0,),),))
        >>> make_graph([x, y], [exp], [0], [1]).consumers
        ((0,), ())
    """
    values, nodes = tuple(values), tuple(nodes)
    consumers: list[list[int]] = [[] for _ in values]
    for node in nodes:
        for v in node.inputs:
            readers = consumers[v]
            if not readers or readers[-1] != node.id:
                readers.append(node.id)
    known = (values, nodes, tuple(inputs), tuple(outputs), tuple(map(tuple, consumers)))
    return Graph(*known, tuple(origins), tuple(waits))


class GraphError(AssertionError):
    """The graph is inconsistent: a defect of the code that built it, not of the user's program."""


def check_graph(graph: Graph) -> Graph:
    """Return ``graph`` unchanged. Raises ``GraphError`` if it is inconsistent."""
    values, known = graph.values, range(len(graph.values))
    _require(all(v in known for v in graph.inputs), "an input is no value")
    _require(all(v in known for v in graph.outputs), "an output is never made")
    defined = set(graph.inputs)
    _require(len(defined) == len(graph.inputs), "an input stands twice")
    for i, value in enumerate(values):
        if value.id != i:
            _fail(f"value {value.id} stands at position {i}")
        if (value.producer == -1) != (i in defined):
            _fail(f"v{i} is neither an input nor produced, or both")
    every = frozenset(known)
    fitting: set[tuple[object, ...]] = set()
    for i, node in enumerate(graph.nodes):
        if node.id != i:
            _fail(f"node {node.id} stands at position {i}")
        if not every.issuperset(node.outputs):
            _fail(f"n{i} {node.op}: makes what is no value")
        if not defined.issuperset(node.inputs):
            _fail(f"n{i} {node.op}: reads a value before it is made")
        # Layers repeat, so each distinct iteration space is checked once.
        shapes = tuple([values[v].shape for v in node.inputs + node.outputs])
        space = (node.dims, node.roles, node.input_maps, node.output_maps, len(node.inputs), shapes)
        if space not in fitting:
            problem = _misfit(graph, node)
            if problem is not None:
                _fail(f"n{i} {node.op}: {problem}")
            fitting.add(space)
        for v in node.outputs:
            if v in defined:
                _fail(f"n{i} {node.op}: v{v} is made twice")
            if values[v].producer != i:
                _fail(f"n{i} {node.op}: v{v} names another producer")
            defined.add(v)
    _require(len(defined) == len(values), "a value is never made")
    _require(
        graph.consumers == make_graph(values, graph.nodes, (), ()).consumers,
        "consumers do not match the nodes' inputs",
    )
    if graph.origins:
        _check_origins(graph)
    _require(all(0 <= u < v < len(graph.nodes) for u, v in graph.waits), "a node waits for a later one")
    return graph


def _check_origins(graph: Graph) -> None:
    """Check that copies are the same operation on the same values, or on copies of these."""
    _require(len(graph.origins) == len(graph.nodes), "an origin for each node")
    first = list(range(len(graph.values)))
    for i, origin in enumerate(graph.origins):
        node = graph.nodes[i]
        if origin == i:
            continue
        if not 0 <= origin < i or graph.origins[origin] != origin:
            _fail(f"n{i} {node.op}: its origin n{origin} does not come first")
        other = graph.nodes[origin]
        same = replace(
            node,
            id=origin,
            inputs=other.inputs,
            outputs=other.outputs,
            source=other.source,
            scope=other.scope,
        )
        if same != other or [first[v] for v in node.inputs] != [first[v] for v in other.inputs]:
            _fail(f"n{i} {node.op} is no copy of n{origin} {other.op}")
        if len(node.outputs) != len(other.outputs):
            _fail(f"n{i} {node.op} makes other results than n{origin}")
        for v, w in zip(node.outputs, other.outputs, strict=True):
            first[v] = w


def _require(ok: bool, what: str) -> None:
    if not ok:
        _fail(what)


def _fail(what: str) -> NoReturn:
    raise GraphError(f"inconsistent graph: {what}")


def _misfit(graph: Graph, node: Node) -> str | None:
    """The error in the iteration space of a node, or None."""
    if len(node.dims) != len(node.roles):
        return "a role for each dimension"
    if 1 in node.dims:
        return "a dimension of size one"
    if len(node.inputs) != len(node.input_maps):
        return "a map for each input"
    if len(node.outputs) != len(node.output_maps):
        return "a map for each output"
    for v, dim_map in zip(node.inputs + node.outputs, node.input_maps + node.output_maps, strict=True):
        problem = _map_misfit(graph.values[v], node, dim_map)
        if problem is not None:
            return f"v{v} {problem}"
    if any(
        node.roles[a] == DimRole.REDUCED for dim_map in node.output_maps for dims in dim_map for a in dims
    ):
        return "the result is indexed by a reduced dimension"
    return None


def _map_misfit(value: Value, node: Node, dim_map: DimMap) -> str | None:
    """The error in the map of an operand or result, or None."""
    if len(dim_map) != len(value.shape):
        return "has a map of another rank"
    for extent, dims in zip(value.shape, dim_map, strict=True):
        n = 1
        for a in dims:
            if not 0 <= a < len(node.dims):
                return f"maps to dimension {a} of {len(node.dims)}"
            n *= node.dims[a]
        if n != extent:
            return f"maps {extent} to dimensions of product {n}"
    return None


def copies_of(graph: Graph) -> Iterator[tuple[int, ...]]:
    """For each operation with several copies, their ids."""
    by_origin: dict[int, list[int]] = {}
    for n, origin in enumerate(graph.origins):
        by_origin.setdefault(origin, []).append(n)
    yield from (tuple(nodes) for nodes in by_origin.values() if len(nodes) > 1)


def arrays_of(graph: Graph) -> list[int]:
    """For each value, the result of the first copy of its producer: all copies of an array map to one
    value."""
    array = list(range(len(graph.values)))
    for node, origin in zip(graph.nodes, graph.origins, strict=False):
        for v, first in zip(node.outputs, graph.nodes[origin].outputs, strict=True):
            array[v] = first
    return array


Item = tuple[int, int | None]
"""A node of a graph, or a value that one makes, and which copy of it."""

ORIGINAL = None
"""The copy that an input is, and everything of which there is only one."""


class GraphRewriter:
    """Builds a graph of the nodes of ``old``, each any number of times, and numbers nodes and values anew."""

    def __init__(self, old: Graph, inputs: Iterable[int] | None = None) -> None:
        self.source = old
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.ids: dict[Item, int] = {}
        """The new value of each copy of an old one."""
        self.node_of: list[int] = []
        """For each new node, the old one."""
        self.value_of: list[int] = []
        """For each new value, the old one."""
        self.places: list[list[int]] = [[] for _ in old.nodes]
        """For each old node, the new ones."""
        self._has_copies = bool(old.origins)
        for v in old.inputs if inputs is None else inputs:
            self.add_value(v, ORIGINAL)

    def add_value(self, v: int, copy: int | None, producer: int = -1) -> int:
        """Add ``copy`` of the old value ``v``, by default as an input; its new id."""
        new = self.ids[v, copy] = len(self.values)
        self.values.append(replace(self.source.values[v], id=new, producer=producer))
        self.value_of.append(v)
        return new

    def add(self, n: int, copy: int | None, read: Callable[[int], Item]) -> int:
        """Add the old node ``n`` as ``copy``, which reads ``read(v)`` for each input ``v``; its new id."""
        node, new = self.source.nodes[n], len(self.nodes)
        inputs = tuple([self.ids[read(v)] for v in node.inputs])
        outputs = tuple([self.add_value(v, copy, new) for v in node.outputs])
        self.nodes.append(replace(node, id=new, inputs=inputs, outputs=outputs))
        self.node_of.append(n)
        self.places[n].append(new)
        self._has_copies |= copy is not ORIGINAL
        return new

    def add_once(self, graph: Graph) -> Callable[[int], Item]:
        """Add one copy of each operation of ``graph``, which is the old graph with its ``origins``. Returns
        the item that stands for each old value."""
        array = arrays_of(graph)

        def read(v: int) -> Item:
            return array[v], ORIGINAL

        for n in sorted(set(graph.origins)):
            self.add(n, ORIGINAL, read)
        # Copies wait for copies, so several pairs may become one.
        self.places = [self.places[n] for n in graph.origins]
        return read

    def finished(self, results: Iterable[int], waits: Iterable[tuple[int, int]] | None = None) -> Graph:
        """The new graph, checked. ``results`` are new values; ``waits``, by default those of the old graph
        between all copies, pairs of new nodes."""
        if waits is None:
            places = self.places
            pairs = ((c, d) for u, v in self.source.waits for c in places[u] for d in places[v])
            waits = dict.fromkeys((c, d) for c, d in pairs if c < d)  # a later copy belongs to other readers
        origins: list[int] = []
        if self._has_copies:
            before, first = self.source.origins, dict[int, int]()
            origins = [first.setdefault(before[n] if before else n, i) for i, n in enumerate(self.node_of)]
        inputs = [value.id for value in self.values if value.producer < 0]
        return check_graph(make_graph(self.values, self.nodes, inputs, results, origins, waits))


def without_copies(graph: Graph) -> Graph:
    """``graph`` with one copy of each operation."""
    if not graph.origins:
        return graph
    rewriter = GraphRewriter(replace(graph, origins=()))
    read = rewriter.add_once(graph)
    return rewriter.finished([rewriter.ids[read(v)] for v in graph.outputs])


Skeleton = tuple[object, ...]
"""A graph without its sizes, hashable."""


def skeleton(graph: Graph) -> Skeleton:
    """All of a graph but its sizes: which operation reads and makes what, and which dimensions of operands
    and results are which."""
    values = tuple([(len(v.shape), v.dtype) for v in graph.values])
    nodes = tuple(
        [
            (node.op, node.kind, node.inputs, node.outputs, node.roles, node.input_maps, node.output_maps)
            for node in graph.nodes
        ]
    )
    return (values, nodes, graph.inputs, graph.outputs, graph.waits)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The values that a group reads from outside, and those that it must write."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def boundary(graph: Graph, nodes: tuple[int, ...]) -> Boundary:
    """The live-in values of a group by first use, and its live-out values in the order of nodes."""
    inside = set(nodes)
    all_nodes, consumers, results = graph.nodes, graph.consumers, graph.results
    reads: dict[int, None] = {}
    made: set[int] = set()
    writes: list[int] = []
    for n in nodes:
        node = all_nodes[n]
        for v in node.inputs:
            if v not in made:
                reads[v] = None
        for v in node.outputs:
            made.add(v)
            if v in results or not inside.issuperset(consumers[v]):
                writes.append(v)
    return Boundary(tuple(reads), tuple(writes))
