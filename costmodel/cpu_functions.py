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

_REMAINDER = 25
"""The exponentials of a remainder of floats, for which XLA calls the C library."""

_COMPLEX = 20
"""The exponentials of a function of a complex number: an exponential, a sine and a cosine, or as much."""


def flops_on_cpu(graph: Graph, node: Node) -> Flops:
    """The operations of a node, with its transcendental functions counted in exponentials.

    Example:
        >>> from costmodel.graph import OpKind, Value, make_graph
        >>> values = Value(0, (8,), "float32", -1), Value(1, (8,), "float32", 0)
        >>> flops = Flops(vector=16, transcendental=8)
        >>> sine = Node(0, "sin", OpKind.ELEMENTWISE, (0,), (1,), (8,), (), (((0,),),), (((0,),),), flops)
        >>> flops_on_cpu(make_graph(values, (sine,), (0,), (1,)), sine)
        Flops(matrix=0, vector=16, transcendental=72)
    """
    flops = node.flops
    each = _EXPONENTIALS.get(node.op, 0)
    if node.op == "rem" and "float" in graph.values[node.outputs[0]].dtype:
        each = _REMAINDER
    elif flops.transcendental and "complex" in graph.values[node.outputs[0]].dtype:
        each = max(each, _COMPLEX)
    return replace(flops, transcendental=each * prod(node.dims)) if each else flops
