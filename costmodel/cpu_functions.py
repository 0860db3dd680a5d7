"""Count the arithmetic of a CPU in exponentials: some functions take XLA many times as long as others.

XLA:CPU computes exponentials, logarithms and hyperbolic tangents by vector instructions. For other functions
it calls the C library for each element, or adds up a long series.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from costmodel.graph import Flops, Graph, Node

_EXPONENTIALS = {
    "acos": 24,
    "acosh": 4,
    "asin": 24,
    "asinh": 4,
    "atan": 16,
    "atan2": 30,
    "atanh": 4,
    "cbrt": 16,
    "cos": 9,
    "digamma": 20,
    "erf_inv": 4,
    "igamma": 100,
    "igammac": 100,
    "lgamma": 16,
    "log1p": 3,
    "polygamma": 100,
    "pow": 10,
    "regularized_incomplete_beta": 100,
    "sin": 9,
    "sinh": 3,
    "tan": 16,
    "zeta": 100,
}
"""The time of a function of one float32, as a multiple of an exponential's. Functions that are not here take
up to twice as long as an exponential. (Measured on two server cores, in a loop in cache, with jax 0.10 and
0.12, whose figures are up to twice as far apart: sines 8 and 14, powers 9 and 12.)"""

_ELEMENTS = {
    "cumlogsumexp": 12,
    "cummax": 12,
    "cummin": 12,
    "cumprod": 6,
    "cumsum": 6,
    "gather": 2,
    "random_bits": 24,
    "scatter-add": 2,
    "sort": 350,
    "threefry2x32": 12,
}
"""The same of other operations that XLA computes element by element, for each result, or for each element
that is added to a table. (Measured likewise: lookups of rows of 1 to 64 elements 1 to 4, random bits 23 and
26, sorted rows of 1,024 elements 350.)"""

_POSITIONS = {"argmax": 6, "argmin": 6}
"""The same of the positions of extrema, which tiled loops find in two steps, by vector instructions."""

_REMAINDER = 25
"""The exponentials of a remainder of floats, for which XLA calls the C library."""

_COMPLEX = 20
"""The exponentials of a function of a complex number: an exponential, a sine and a cosine, or as much."""

IN_TURN = "reduce"
"""The reduction by a function of the user, which combines elements, or rows of a tile, in turn."""

_OPERATION_IN_TURN, _CALL_IN_TURN = 2, 12
"""The exponentials that an operation, and a function, of a user's ``jax.lax.reduce`` take in each step, where
XLA combines elements. Tiled loops combine rows, by vector instructions. (Measured likewise: a pair of sums
with two exponentials 33, a mean and variance of twelve operations 16, a minimum of pairs 10.)"""


def flops_on_cpu(graph: Graph, node: Node, tiled: bool = False) -> Flops:
    """The operations of a node, with what takes longer than its arithmetic counted in exponentials; ``tiled``
    tells whether a loop over tiles computes it.

    Example:
        >>> from costmodel.graph import OpKind, Value, make_graph
        >>> values = Value(0, (8,), "float32", -1), Value(1, (8,), "float32", 0)
        >>> flops = Flops(vector=16, transcendental=8)
        >>> sine = Node(0, "sin", OpKind.ELEMENTWISE, (0,), (1,), (8,), (), (((0,),),), (((0,),),), flops)
        >>> flops_on_cpu(make_graph(values, (sine,), (0,), (1,)), sine)
        Flops(matrix=0, vector=16, transcendental=72)
    """
    flops = node.flops
    if node.op == IN_TURN and not tiled:
        in_turn = _OPERATION_IN_TURN * flops.vector + _CALL_IN_TURN * flops.transcendental
        return replace(flops, transcendental=in_turn)
    each = _EXPONENTIALS.get(node.op) or _ELEMENTS.get(node.op, 0)
    if not tiled:
        each = each or _POSITIONS.get(node.op, 0)
    if node.op == "rem" and "float" in graph.values[node.outputs[0]].dtype:
        each = _REMAINDER
    elif flops.transcendental and "complex" in graph.values[node.outputs[0]].dtype:
        each = max(each, _COMPLEX)
    return replace(flops, transcendental=each * _elements(graph, node)) if each else flops


def _elements(graph: Graph, node: Node) -> int:
    if node.op in ("gather", "scatter-add"):  # Their iteration space has the table, too.
        return graph.values[node.outputs[0] if node.op == "gather" else node.inputs[-1]].size
    return prod(node.dims)
