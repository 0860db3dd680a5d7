"""Find comparisons that break if an operand is computed twice and rounds differently (``x == max(x)``).

``x == max(x)`` holds of some element only if the comparison reads the same numbers as the maximum. Two
kernels, or two passes of one, that each compute ``x`` may round differently: then no element equals the
maximum, and a gradient that divides by how many do is NaN. So a float that reaches both sides of a comparison
by operations that round nothing must not be computed once for one side and again for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from costmodel.graph import Graph, Node

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"})

_UNROUNDED = frozenset(
    {"max", "min", "clamp", "reduce_max", "reduce_min", "cummax", "cummin", "select_n"}
    | {"neg", "abs", "sign", "floor", "ceil", "round", "real", "imag", "complex", "conj"}
    | {"reduce_window_max", "reduce_window_min", "top_k"}
    | {"convert_element_type", "reduce_precision", "copy", "stop_gradient", "sort", "pad", "rev"}
    | {"broadcast_in_dim", "reshape", "squeeze", "transpose", "concatenate", "tile", "stack", "unstack"}
    | {"bitcast_convert_type", "optimization_barrier", "device_put", "scatter"}
    | {"slice", "dynamic_slice", "dynamic_update_slice", "gather", "select_and_gather_add", "split"}
)
"""Operations that give equal results for equal operands, however they are compiled."""

MAX_OPERATIONS = 10_000
"""The most operations that are searched behind one operand of a comparison. Behind more, every operation is
assumed to need one evaluation."""

Maker = Callable[[int, int], tuple[int, int] | None]
"""The node that makes a value which is read in some pass of a kernel, and the pass that evaluates it; None
of a value that comes from memory."""


def is_comparison(graph: Graph, node: Node) -> bool:
    """Whether it compares arrays of real or complex numbers with each other."""
    if node.op not in _COMPARISONS or len(node.inputs) != 2:
        return False
    return graph.values[node.inputs[0]].dtype.startswith(("float", "bfloat", "complex"))


def are_apart(graph: Graph, node: Node, at: int, maker: Maker) -> bool:
    """Whether the operands of a comparison in pass ``at`` follow, unrounded, from two evaluations of
    one operation of the program (``Graph.origins`` says of copies which)."""
    one, other = (_evaluations(graph, v, at, maker) for v in node.inputs)
    if one is None or other is None:
        return True
    return any(one[n] != other[n] for n in one.keys() & other.keys())


def copies_apart(graph: Graph) -> Iterator[Node]:
    """The comparisons of a graph with copies whose operands come from different copies."""
    if graph.origins:
        for node in graph.nodes:
            if is_comparison(graph, node) and are_apart(graph, node, 0, _maker_in(graph)):
                yield node


def needed_once(graph: Graph) -> frozenset[int]:
    """The operations that no reader may compute again for itself, since both operands of some comparison
    follow from them unrounded."""
    found: set[int] = set()
    for node in graph.nodes:
        if is_comparison(graph, node):
            one, other = (_evaluations(graph, v, 0, _maker_in(graph)) for v in node.inputs)
            if one is None or other is None:
                return frozenset(range(len(graph.nodes)))
            found.update(one.keys() & other.keys())
    return frozenset(found)


def _maker_in(graph: Graph) -> Maker:
    """The ``Maker`` of a graph in which each node is evaluated once."""

    def maker(v: int, at: int) -> tuple[int, int] | None:
        producer = graph.values[v].producer
        return None if producer < 0 else (producer, at)

    return maker


def _evaluations(graph: Graph, v: int, at: int, maker: Maker) -> dict[int, set[tuple[int, int]]] | None:
    """The rounding operations from whose results ``v`` follows by unrounded ones, each with its evaluations;
    None if more than ``MAX_OPERATIONS`` operations would have to be searched."""
    found: dict[int, set[tuple[int, int]]] = {}
    seen: set[tuple[int, int]] = set()
    waiting = [(v, at)]
    while waiting:
        made = maker(*waiting.pop())
        if made is None or made in seen:
            continue
        seen.add(made)
        if len(seen) > MAX_OPERATIONS:
            return None
        n, evaluated_at = made
        node = graph.nodes[n]
        if node.op in _UNROUNDED:
            waiting += [(u, evaluated_at) for u in node.inputs]
        else:
            found.setdefault(graph.origins[n] if graph.origins else n, set()).add(made)
    return found
