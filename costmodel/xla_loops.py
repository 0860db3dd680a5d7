"""Count how often XLA evaluates each operation of a loop that it fuses (``evaluations_in_loop``), and find
the operations that it fuses into a matrix product on a GPU (``epilogues_of_product``).

XLA emits a fusion as one loop over the elements of its result. The element of an operand is computed where it
is needed: once for each index at which the loop reads it, as no array is kept. A stencil of a computed array
evaluates that array at each point of the stencil; a value that is broadcast is evaluated for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from math import prod

from costmodel.backends import Backend
from costmodel.graph import DimRole, Graph, Node, OpKind, arrays_of, boundary, once

DIVISIONS = frozenset({"div", "rem"})
"""Primitives that XLA counts as expensive, beside those with transcendental operations."""

SCATTERS = frozenset({"scatter-add"})
"""Primitives that add each element of a loop to one of a table in memory."""

_LOOP = 0
"""The index of the loop itself."""

_COMBINED = -1
"""In the place of an operand: the elements that an inner reduction combines."""


def evaluations_in_loop(
    graph: Graph, nodes: tuple[int, ...], most_indices: int
) -> tuple[tuple[int, int], ...] | None:
    """For each of ``nodes``, how often XLA evaluates all of it in one loop, as (numerator, denominator), at
    least (1, 1); None if it evaluates one at more than ``most_indices`` indices (``Backend.loop_indices``).

    ``nodes`` are elementwise operations, broadcasts, data movement, contractions and reductions. The indices
    of two readers are the same if only elementwise operations and broadcasts lead to them. A contraction
    reads each element of its operands once.

    Example:
        >>> from costmodel.graph import make_graph
        >>> evaluations_in_loop(make_graph((), (), (), ()), (), 32)
        ()
    """
    results = set(boundary(graph, nodes).writes)
    inside = set(nodes)
    read: dict[int, dict[int, int]] = {n: {} for n in nodes}
    """By node and index, the elements that are evaluated."""
    names: dict[tuple[int, int, int], int] = {}
    """The number of each index: of a mover, its operand (``_COMBINED`` of an inner reduction), and the index
    at which it is evaluated."""
    found: dict[int, tuple[int, int]] = {}
    for n in reversed(nodes):
        node, own = graph.nodes[n], read[n]
        size = _combined(node) if node.kind == OpKind.REDUCTION else _made(graph, node)
        is_inner = node.kind == OpKind.REDUCTION and bool(own)
        if is_inner:  # Each element that is read combines elements at indices of their own.
            each = size // max(_made(graph, node), 1)
            read_at, own = own, {}
            for index, count in read_at.items():
                own[names.setdefault((n, _COMBINED, index), len(names) + 1)] = count * each
        if not results.isdisjoint(node.outputs) or (node.kind == OpKind.REDUCTION and not is_inner):
            own[_LOOP] = max(own.get(_LOOP, 0), size)
        if len(own) > most_indices:
            return None
        found[n] = (max(sum(own.values()), size), size) if size else (1, 1)
        for k, v in enumerate(node.inputs):
            producer = graph.values[v].producer
            if producer not in inside:
                continue
            if node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE:
                index = names.setdefault((n, k, _LOOP), len(names) + 1)
                read[producer][index] = graph.values[v].size
                continue
            for index, count in own.items():
                if node.kind == OpKind.INJECTIVE and not node.bitcast:
                    index = names.setdefault((n, k, index), len(names) + 1)
                    count = _part(graph, node, v, count)
                of_producer = read[producer]
                of_producer[index] = max(of_producer.get(index, 0), count)
    return tuple([found[n] for n in nodes])


def _part(graph: Graph, node: Node, v: int, count: int) -> int:
    """How many of ``count`` elements of a mover's result come from its operand ``v``: of a concatenation or a
    padded array, each element is read from one operand, or from none."""
    size, made = graph.values[v].size, _made(graph, node)
    return count if node.takes_part or size >= made else -(-count * size // made)


MIN_REDUCED_ELEMENTS = 16
"""XLA emits a reduction of fewer elements as a loop of its reader, not by the reduction emitter of a GPU."""


def elements_read(graph: Graph, node: Node) -> float:
    """Elements of a node's largest operand for each element of its result: more than 1 in reductions."""
    if node.kind != OpKind.REDUCTION:
        return 1.0
    read = max((graph.values[v].size for v in node.inputs), default=0)
    return read / max(graph.values[node.outputs[0]].size, 1)


def is_scatter(node: Node) -> bool:
    """Whether a node adds updates to any places of a table, by which a loop of XLA's ends."""
    return node.op in SCATTERS and node.kind == OpKind.REDUCTION


def ends_loop(graph: Graph, node: Node, can: Backend) -> bool:
    """Whether a loop of XLA's for the device of a backend ends at a node: a scatter, or a reduction, but for
    one of few elements if its loops hold those (``Backend.loop_reductions``)."""
    if node.kind != OpKind.REDUCTION or is_scatter(node):
        return node.kind == OpKind.REDUCTION
    return not can.loop_reductions or elements_read(graph, node) >= MIN_REDUCED_ELEMENTS


def _combined(node: Node) -> int:
    """The elements that a reduction combines, those of its last operand: of a scatter the updates, and of a
    lookup of one element a row the indices."""
    if not node.input_maps:  # of literals alone
        return prod(node.dims)
    return prod(node.dims[d] for d in {d for dims in node.input_maps[-1] for d in dims})


def _made(graph: Graph, node: Node) -> int:
    """The elements of the results."""
    return sum(graph.values[v].size for v in node.outputs)


def repeated_in_loop(graph: Graph, nodes: tuple[int, ...], most_indices: int) -> tuple[int, ...] | None:
    """Those of ``nodes`` that XLA does not fuse into their loop, as it would evaluate an expensive operation
    more than once; None where ``evaluations_in_loop`` is."""
    if all(graph.nodes[n].kind == OpKind.ELEMENTWISE for n in nodes):
        return ()
    times = evaluations_in_loop(graph, nodes, most_indices)
    if times is None:
        return None
    repeated = (n for n, (done, least) in zip(nodes, times, strict=True) if done > least)
    return tuple([n for n in repeated if is_expensive(graph.nodes[n])])


def is_expensive(node: Node) -> bool:
    """Whether XLA evaluates a node once for all its readers (``InstructionFusion::IsExpensive``); reductions,
    too."""
    is_costly = node.flops.transcendental > 0 or node.flops.matrix > 0
    return is_costly or node.kind == OpKind.REDUCTION or node.op in DIVISIONS


EPILOGUE_OPS = frozenset(
    {"abs", "add", "convert_element_type", "cos", "div", "exp", "exp2", "expm1", "log", "log1p", "logistic"}
    | {"max", "min", "mul", "neg", "rsqrt", "sin", "sqrt", "sub", "tanh"}
)
"""The elementwise primitives of an epilogue. XLA expands others, such as ``erf_inv`` or ``square``, to
operations that read a value more than once, or its Triton kernels do not support them."""

PRODUCT_DTYPES = frozenset({"float16", "bfloat16", "float32"})
"""The dtypes of matrix products that XLA emits as Triton kernels, with an epilogue, on GPUs."""


def epilogues_of_product(graph: Graph, n: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups, ascending by size, that XLA runs on a GPU as one kernel: the matrix product ``n`` and
    an epilogue. The epilogue is a chain of elementwise operations. Each is the only reader of the result
    before it. Its other operands are scalars that the caller passes, or broadcasts of arrays that the caller
    passes, such as a bias (XLA's ``GemmFusion``).
    """
    if graph.nodes[n].op != "dot_general":
        return
    members, last = {n}, graph.nodes[n]
    touched = (*last.inputs, *last.outputs)
    if len(last.outputs) != 1 or any(graph.values[v].dtype not in PRODUCT_DTYPES for v in touched):
        return
    while True:
        result = last.outputs[0]
        readers = set(graph.consumers[result])
        if len(readers) != 1 or result in graph.results:
            return
        reader = graph.nodes[readers.pop()]
        others = [v for v in reader.inputs if v != result]
        if reader.op not in EPILOGUE_OPS or len(reader.inputs) - len(others) != 1:
            return
        if graph.values[reader.outputs[0]].nbytes > graph.values[result].nbytes:  # XLA fuses no wider result.
            return
        broadcasts = {graph.values[v].producer for v in others if graph.values[v].producer >= 0}
        if not all(_is_of_caller(graph, b, reader.id) for b in broadcasts):
            return
        if any(graph.values[v].size > 1 for v in others if graph.values[v].producer < 0):
            return
        members |= {reader.id, *broadcasts}
        last = reader
        yield tuple(sorted(members))


def _is_of_caller(graph: Graph, n: int, reader: int) -> bool:
    """Whether node ``n`` broadcasts an argument of the program, and only ``reader`` reads the result."""
    node = graph.nodes[n]
    is_given = all(graph.values[v].producer < 0 for v in node.inputs)
    is_read_alone = all(set(graph.consumers[v]) == {reader} and v not in graph.results for v in node.outputs)
    return node.op == "broadcast_in_dim" and is_given and is_read_alone


_LIBRARY_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})

_LIBRARY_DTYPES = frozenset({"float32", "float64", "bfloat16"})

_LIBRARY_OPS = frozenset(
    {"abs", "add", "add_any", "broadcast_in_dim", "ceil", "convert_element_type", "cosh", "div", "erf", "exp"}
    | {"exp2", "expand_dims", "expm1", "floor", "integer_pow", "iota", "log", "log1p", "logistic", "max"}
    | {"min", "mul", "neg", "pad", "pow", "reshape", "rsqrt", "sign", "sqrt", "square", "squeeze"}
    | {"select_n", "stop_gradient", "sub", "tanh"}
)
"""The primitives that XLA's calls of YNNPACK, a library for CPUs, fuse into a reduction. A selection by an
array of booleans is none, one by a constant is nothing. (jax 0.12 also fuses sines and cosines.)"""

_LEAST_ROWS = 4096
"""The fewest rows that XLA:CPU reduces, and uses the results of, in one call of the library. (Found by
compiling softmaxes of 1 to 65,536 rows of 16 to 8,192 elements: jax 0.10.)"""

LEAST_LIBRARY_ELEMENTS = 4096
"""The fewest elements of an operand that XLA:CPU reduces by its library. (Found by compiling sums of rows of
3 to 1,000 elements: jax 0.10 and 0.12.)"""

_WINDOW = 32
"""The elements of a window: XLA:CPU reduces longer dimensions window by window, and fuses nothing into
that."""


def is_written_before(graph: Graph, reduction: Node, node: Node) -> bool:
    """Whether XLA:CPU writes the result of ``node`` to memory before ``reduction``, which depends on it, is
    computed. Sums and extrema of floats are calls of a library that fuses some operations; other reductions
    of long rows are computed in windows, and fuse none; the positions of extrema fuse all. (Found by
    compiling each: jax 0.10 and 0.12.)
    """
    if not (reduction.op.startswith("reduce_") or _is_of_one_array(reduction)):
        return False
    if _is_by_library(graph, reduction):
        return not _is_of_library(graph, node)
    return not _is_in_one_window(reduction) and not node.bitcast


def goes_on(graph: Graph, reduction: Node) -> bool:
    """Whether XLA:CPU computes what is read elementwise of a reduction's result in the reduction's loop: if
    its rows are no longer than a window, and no library reduces it."""
    is_fused = reduction.op.startswith("reduce_") and _is_in_one_window(reduction)
    return is_fused and not _is_by_library(graph, reduction)


def _is_of_one_array(reduction: Node) -> bool:
    """Whether it is a reduction of one array by a function of the user."""
    return reduction.op == "reduce" and len(reduction.outputs) == 1


def _is_by_library(graph: Graph, reduction: Node) -> bool:
    if not reduction.inputs:  # of literals alone
        return False
    operand = graph.values[reduction.inputs[0]]
    is_known = reduction.op in _LIBRARY_REDUCTIONS and operand.dtype in _LIBRARY_DTYPES
    return is_known and operand.size >= LEAST_LIBRARY_ELEMENTS


def _is_in_one_window(reduction: Node) -> bool:
    rows = (n for n, role in zip(reduction.dims, reduction.roles, strict=True) if role == DimRole.REDUCED)
    return max(rows, default=0) <= _WINDOW


def library_rows(graph: Graph, node: Node) -> int:
    """The rows that a call of XLA:CPU's library walks for a reduction: its operand's elements along the last
    dimension, or along all last dimensions that it reduces; 0 if no library reduces it.

    Example:
        >>> from costmodel.graph import Value, make_graph
        >>> values = Value(0, (2000, 3), "float32", -1), Value(1, (2000,), "float32", 0)
        >>> roles, maps = (DimRole.PARALLEL, DimRole.REDUCED), ((((0,), (1,)),), (((0,),),))
        >>> node = Node(0, "reduce_sum", OpKind.REDUCTION, (0,), (1,), (2000, 3), roles, *maps)
        >>> library_rows(make_graph(values, (node,), (0,), (1,)), node)
        2000
    """
    if node.kind != OpKind.REDUCTION or not node.inputs or not _is_by_library(graph, node):
        return 0
    if DimRole.REDUCED not in node.roles:
        return 0
    row, last = 1, None
    for d in (d for dims in reversed(node.input_maps[0]) for d in reversed(dims)):
        if last is not None and not node.roles[d] == last == DimRole.REDUCED:
            break
        row, last = row * node.dims[d], node.roles[d]
    return graph.values[node.inputs[0]].size // max(row, 1)


@once
def absorbed_nodes(graph: Graph) -> frozenset[int]:
    """The nodes that XLA:CPU takes into a call of its library, whatever a plan groups: what leads to a
    reduction, and to nothing else, matrix products too, as far as the library has the operations.

    Example:
        >>> from costmodel.graph import make_graph
        >>> absorbed_nodes(make_graph((), (), (), ()))
        frozenset()
    """
    return frozenset(_calls(graph))


@once
def shared_broadcasts(graph: Graph) -> dict[int, tuple[tuple[int, int], ...]]:
    """By node that XLA:CPU takes into a call of its library: its operands, by position, that it broadcasts as
    a node of another call does, and the number of such calls. XLA writes such an array once, for all of them.

    Example:
        >>> from costmodel.graph import make_graph
        >>> shared_broadcasts(make_graph((), (), (), ()))
        {}
    """
    array = arrays_of(graph)
    calls_of: dict[Hashable, set[int]] = {}
    operands: dict[int, list[tuple[int, Hashable]]] = {}
    for n, call in _calls(graph).items():
        node = graph.nodes[n]
        for i, (v, in_map) in enumerate(zip(node.inputs, node.input_maps, strict=True)):
            if node.kind < OpKind.REDUCTION and graph.values[v].size < prod(node.dims):
                key = (array[v], in_map, node.dims)
                calls_of.setdefault(key, set()).add(call)
                operands.setdefault(n, []).append((i, key))
    shared = {
        n: tuple([(i, len(calls_of[k])) for i, k in own if len(calls_of[k]) > 1])
        for n, own in operands.items()
    }
    return {n: own for n, own in shared.items() if own}


@once
def _calls(graph: Graph) -> dict[int, int]:
    """By node that XLA:CPU takes into a call of its library, the reduction of the call."""
    if not graph.origins:
        return _calls_of(
            graph,
            reversed(range(len(graph.nodes))),
            _readers_inside(graph, range(len(graph.nodes)), graph.results),
        )
    # An operation with copies is absorbed if it is without them, so that copies change no price.
    origins = graph.origins
    readers: dict[int, set[int]] = {n: set() for n in origins}
    written: set[int] = set()
    for node, origin in zip(graph.nodes, origins, strict=True):
        readers[origin].update(origins[r] for v in node.outputs for r in graph.consumers[v])
        if not graph.results.isdisjoint(node.outputs):
            written.add(origin)

    def readers_of(n: int) -> list[Node]:
        return [] if n in written else [graph.nodes[r] for r in sorted(readers[n])]

    found = _calls_of(graph, sorted(readers, reverse=True), readers_of)
    return {n: found[origin] for n, origin in enumerate(origins) if origin in found}


def absorbed_in_group(graph: Graph, nodes: Sequence[int], writes: Collection[int]) -> frozenset[int]:
    """Find the nodes that XLA:CPU takes into calls of its library if it compiles ``nodes``, ascending, as a
    program with the results ``writes``."""
    return frozenset(_calls_of(graph, reversed(nodes), _readers_inside(graph, nodes, writes)))


def _readers_inside(
    graph: Graph, nodes: Collection[int], writes: Collection[int]
) -> Callable[[int], list[Node]]:
    """A function that finds the readers of a node in a group; none of a node whose result is written."""
    inside = set(nodes)

    def readers_of(n: int) -> list[Node]:
        made = graph.nodes[n].outputs
        if any(v in writes for v in made):
            return []
        return [graph.nodes[r] for v in made for r in graph.consumers[v] if r in inside]

    return readers_of


def _calls_of(graph: Graph, nodes: Iterable[int], readers_of: Callable[[int], list[Node]]) -> dict[int, int]:
    """Those of ``nodes``, readers first, that lead to one reduction of the library by its operations alone,
    and this reduction. A value that two reductions need is written once, for both.
    (Found by compiling each: jax 0.10 and 0.12.)"""
    call_of: dict[int, int] = {}
    for n in nodes:
        readers = readers_of(n)
        calls = {call_of.get(r.id, r.id if library_rows(graph, r) else -1) for r in readers}
        if len(calls) == 1 and -1 not in calls and _is_taken_in(graph, graph.nodes[n], readers):
            call_of[n] = calls.pop()
    return call_of


def absorbed(graph: Graph, node: Node) -> Node | None:
    """The reader with which a node is in a call of the library (``absorbed_nodes``), or None."""
    if node.id not in absorbed_nodes(graph):
        return None
    return graph.nodes[graph.consumers[node.outputs[0]][0]]


def _is_taken_in(graph: Graph, node: Node, readers: Sequence[Node]) -> bool:
    """Whether XLA:CPU's library computes a node in the call that reads its result."""
    if len(node.outputs) != 1:
        return False
    # XLA makes a transpose a part of the product that reads it, and the library has that for right operands.
    is_turned = node.op == "transpose" and all(_is_product_of_library(graph, r) for r in readers)
    if is_turned or _is_product_of_library(graph, node):
        return len(readers) == 1
    return node.kind < OpKind.REDUCTION and _is_of_library(graph, node)


_LEAST_SIDE = 8
"""The longest side of a product that XLA:CPU leaves to its library has so many elements at least."""


def _is_product_of_library(graph: Graph, node: Node) -> bool:
    """Whether XLA:CPU's library computes a matrix product: of matrices, whose left one has the terms of a sum
    side by side. (Found by compiling sums of 25 products: jax 0.10 and 0.12.)"""
    if node.op != "dot_general" or len(node.inputs) != 2:
        return False
    if {graph.values[v].dtype for v in (*node.inputs, *node.outputs)} not in ({"float32"}, {"float64"}):
        return False
    maker = graph.values[node.inputs[0]].producer
    if maker >= 0 and graph.nodes[maker].op == "transpose":  # XLA makes it a part of the product.
        return False
    left, right, result = ([d for dims in m for d in dims] for m in (*node.input_maps, *node.output_maps))
    batch = [d for d in left if d in right and d in result]
    rows, columns = ([d for d in side if d in result and d not in batch] for side in (left, right))
    depth = [d for d in left if d in right and d not in result]
    if left != [*batch, *rows, *depth] or result != [*batch, *rows, *columns]:
        return False
    sides = [prod(node.dims[d] for d in dims) for dims in (rows, columns, depth)]
    return min(sides[:2]) > 1 and max(sides) >= _LEAST_SIDE


def is_call_with_product(graph: Graph, nodes: Iterable[int]) -> bool:
    """Whether XLA:CPU can compute ``nodes`` together only in a call of its library that holds matrix
    products. A call begins with a reduction, and takes in what the reduction reads and what reads it (XLA's
    ``LibraryRewriter``); no other kernel of XLA:CPU holds a product and something else.

    Example:
        >>> from costmodel.graph import make_graph
        >>> is_call_with_product(make_graph((), (), (), ()), ())
        False
    """
    members = [graph.nodes[n] for n in nodes]
    begins = any(library_rows(graph, node) for node in members)
    return begins and any(_is_product_of_library(graph, node) for node in members)


def loops_of_results(
    graph: Graph, nodes: Collection[int], writes: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """The nodes of the loops that XLA:CPU makes of a group, by the node whose results the loop writes. Each
    loop reads the other results, and computes for itself what it needs of the rest.

    Example:
        >>> from costmodel.graph import make_graph
        >>> loops_of_results(make_graph((), (), (), ()), (), ())
        {}
    """
    found: dict[int, tuple[int, ...]] = {}
    for end in dict.fromkeys(graph.values[v].producer for v in writes):
        waiting, inside = [end], set[int]()
        while waiting:
            n = waiting.pop()
            if n in nodes and n not in inside:
                inside.add(n)
                waiting += [graph.values[u].producer for u in graph.nodes[n].inputs if u not in writes]
        found[end] = tuple(sorted(inside))
    return found


def is_library_call(graph: Graph, nodes: Iterable[int]) -> bool:
    """Whether XLA:CPU computes ``nodes`` row by row in one call of its library: reductions of many rows, and
    operations that it fuses before and after them, as in a softmax or a norm along the last axis. The call
    writes one array.

    Example:
        >>> from costmodel.graph import make_graph
        >>> is_library_call(make_graph((), (), (), ()), ())
        False
    """
    members = [graph.nodes[n] for n in nodes]
    reductions = [node for node in members if node.kind == OpKind.REDUCTION]
    return bool(reductions) and all(
        _reduces_rows(graph, node) if node.kind == OpKind.REDUCTION else _is_of_library(graph, node)
        for node in members
    )


def _is_of_library(graph: Graph, node: Node) -> bool:
    dtypes = {graph.values[v].dtype for v in (*node.inputs, *node.outputs)}
    return node.op in _LIBRARY_OPS and dtypes <= _LIBRARY_DTYPES


def _reduces_rows(graph: Graph, node: Node) -> bool:
    """Whether a reduction is one of the library's along the last axis of its operand."""
    if node.op not in _LIBRARY_REDUCTIONS or graph.values[node.inputs[0]].dtype not in _LIBRARY_DTYPES:
        return False
    if DimRole.REDUCED not in node.roles:  # only dimensions of size one
        return True
    long = [dims for dims in node.input_maps[0] if dims]
    reduced = [any(node.roles[d] == DimRole.REDUCED for d in dims) for dims in long]
    rows = prod(node.dims[d] for dims in long[:-1] for d in dims)
    return rows >= _LEAST_ROWS and reduced[-1] and not any(reduced[:-1])


def is_one_loop(graph: Graph, nodes: Collection[int]) -> bool:
    """Whether a group that XLA compiles is a loop of several operations, rather than one operation with the
    bitcasts around it."""
    return sum(not graph.nodes[n].bitcast for n in nodes) > 1
