"""Check that the graph of a plan is that of its program.

Times and bounds are of the graph. Each operation follows from one equation by the rules of primitives
(``fuseplan.frontend.ops``), which the check trusts.
"""

from __future__ import annotations

from dataclasses import fields

from costmodel.graph import Graph, Node, OpKind
from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.lower import Lowered, NodeTemplates
from fuseplan.frontend.ops import has_rule
from fuseplan.frontend.trace import Equation, Literal
from fuseplan.verify.errors import RefutedError

_OF_EQUATIONS = [
    field.name
    for field in fields(Node)
    if field.name not in ("id", "op", "inputs", "outputs", "source", "scope", "signature")
]
"""What the template of an equation says. ``signature`` is a hash of parameters, which prices do not use."""


def check_program(graph: Graph, program: Lowered) -> str:
    """Check that the operations, values and results of ``graph`` are those of ``program``. Returns what could
    not be checked, as a rule is not registered here; else nothing.

    Raises:
        RefutedError: the graph is not that of the program.
    """
    if len(graph.nodes) != len(program.equations):
        raise RefutedError(
            f"the graph has {len(graph.nodes):,} operations, its program {len(program.equations):,}"
        )
    if len(graph.values) != len(program.avals):
        raise RefutedError(f"the graph has {len(graph.values):,} arrays, its program {len(program.avals):,}")
    describe = Describer()
    for value, aval in zip(graph.values, program.avals, strict=True):
        shape, dtype = describe.array(aval)
        if (value.shape, value.dtype) != (shape, dtype):
            raise RefutedError(
                f"v{value.id} is {value.dtype}{list(value.shape)}, in the program {dtype}{list(shape)}"
            )
    templates = NodeTemplates(describe)
    unknown = ""
    for node, equation in zip(graph.nodes, program.equations, strict=True):
        unknown = _check_node(node, equation, templates) or unknown
    results = tuple([v for v in program.outputs if not isinstance(v, Literal)])
    if graph.outputs != results:
        raise RefutedError(f"the results are {_values(graph.outputs)}, in the program {_values(results)}")
    return unknown


def _check_node(node: Node, equation: Equation, templates: NodeTemplates) -> str:
    where = f"n{node.id} {node.op}"
    if node.op != equation.op:
        raise RefutedError(f"{where} is {equation.op} in the program")
    operands = tuple([v for v in equation.inputs if not isinstance(v, Literal)])
    for verb, own, others in (("reads", node.inputs, operands), ("makes", node.outputs, equation.outputs)):
        if own != others:
            raise RefutedError(f"{where} {verb} {_values(own)}, in the program {_values(others)}")
    expected = templates.of(equation)
    for name in _OF_EQUATIONS:
        given, own = getattr(node, name), getattr(expected, name)
        if given != own:
            if not has_rule(equation):
                return f"{where} follows from a rule that is not registered here"
            raise RefutedError(f"{where}: its {name} is {given}, in the program {own}")
    return ""


def _values(ids: tuple[int, ...]) -> str:
    return ", ".join(f"v{v}" for v in ids[:6]) + (", …" if len(ids) > 6 else "") or "nothing"


def check_waits(graph: Graph) -> None:
    """Check that an operation that may share no kernel with one before it is the second step of a reduction
    (``fuseplan.passes.split_reductions``), whose first step that is.

    Raises:
        RefutedError: it is not.
    """
    origin = graph.origins or range(len(graph.nodes))
    for u, v in graph.waits:
        first, second = graph.nodes[u], graph.nodes[v]
        makers = [graph.values[operand].producer for operand in second.inputs]
        reads = any(n >= 0 and origin[n] == origin[u] for n in makers)
        if not reads or first.op != second.op or second.kind != OpKind.REDUCTION:
            raise RefutedError(
                f"n{v} {second.op} waits for n{u} {first.op}, and they are no reduction in two steps"
            )
