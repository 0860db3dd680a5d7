"""Name a kernel by its place in the program and by the form of its computation: ``attention:softmax``.

The place is the ``jax.named_scope`` around the kernel's main operation, else the user's function that holds
it. The form is a recognised one (``softmax``, ``layer norm``), else the one or two operations that compute
most (``exp+reduce_sum``). The form is left out where the place contains it already, or where the kernel holds
all of the function's arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from costmodel.graph import Graph, Node, OpKind, once
from fuseplan.support.bitset import bits

_WIDEST = 22
"""Characters of a scope's path that are shown, from its end: a table of 80 columns has room for them."""

_TRANSCENDENTAL = 8
"""Vector operations that one transcendental operation counts as: special function units have an eighth
to a quarter of the rate (``costmodel.device``)."""

_NO_FUNCTION = ("<lambda>", "<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "")


def anchor(graph: Graph, nodes: Sequence[int]) -> Node:
    """The main operation of a group: its contraction, else its last reduction, else the last operation that
    computes something."""
    members = [graph.nodes[n] for n in nodes]

    def last(test: Callable[[Node], bool]) -> Node | None:
        return next((node for node in reversed(members) if test(node)), None)

    return (
        last(lambda node: node.kind in (OpKind.OPAQUE, OpKind.OUT_ELEMENTWISE_FUSABLE))
        or last(lambda node: node.kind == OpKind.REDUCTION)
        or last(lambda node: bool(node.flops.total))
        or members[-1]
    )


def kernel_name(graph: Graph, nodes: Sequence[int]) -> str:
    """A short name, the same for the same operations of the same program.

    Example:
        ``layernorm``, ``attention:softmax``, ``mlp:matmul+tanh``, ``block/norm:exp+reduce_sum``
    """
    main = anchor(graph, nodes)
    where, what = place(main), form(graph, nodes)
    if not where:
        return what
    if _letters(what) in _letters(where):
        return where
    inside = set(nodes)
    is_all = len(nodes) > 1 and all(n in inside for n in _arithmetic(graph).get(where, ()))
    return where if is_all else f"{where}:{what}"


@once
def _arithmetic(graph: Graph) -> dict[str, list[int]]:
    """For each place, the operations there that compute something."""
    found: dict[str, list[int]] = {}
    for node in graph.nodes:
        if node.flops.total:
            found.setdefault(place(node), []).append(node.id)
    return found


def place(node: Node) -> str:
    """The place of an operation: the end of the path of its named scope, else the user's function; empty
    where there is none."""
    # ``jnp.einsum`` names a scope after its subscripts.
    path = "/".join(name for name in node.scope.split("/") if not re.search(r"[,>]", name))
    if path:
        while len(path) > _WIDEST and "/" in path:
            path = path.partition("/")[2]
        return path[-_WIDEST:]
    found = re.search(r"\(([^()]*)\)$", node.source)
    function = found[1].rpartition(".")[2] if found else ""
    return "" if function in _NO_FUNCTION else function[:_WIDEST]


def form(graph: Graph, nodes: Sequence[int]) -> str:
    """The recognised form of a group, by the structure of its operations.

    - ``attention``: a contraction depends on an ``exp`` that depends on another contraction.
    - ``matmul``: a ``dot_general``, with the heaviest operations beside it.
    - ``softmax``: an ``exp``, its sum, and a division of the one by the other.
    - ``logsumexp``: an ``exp``, its sum, and the ``log`` of that.
    - ``layer norm``: a root of a sum over values from which another sum was subtracted.
    - ``RMS norm``: a root of a sum of squares, with no sum subtracted before.

    Otherwise it is the one or two operations that compute most, in program order.
    """
    return _Form(graph, nodes).name()


class _Form:
    """The operations of a group, and for each the operations that it depends on (a bit for each position)."""

    def __init__(self, graph: Graph, nodes: Sequence[int]) -> None:
        self.members = [graph.nodes[n] for n in nodes]
        made = {v: i for i, node in enumerate(self.members) for v in node.outputs}
        self.reads = [[made[v] for v in node.inputs if v in made] for node in self.members]
        self.before: list[int] = []
        for read in self.reads:
            mask = 0
            for i in read:
                mask |= self.before[i] | 1 << i
            self.before.append(mask)

    def name(self) -> str:
        products = self._all(lambda node: node.kind == OpKind.OUT_ELEMENTWISE_FUSABLE)
        if products:
            return self._of_products(products)
        return self._of_rows() or self._heaviest(self.members)

    def _of_products(self, products: int) -> str:
        exps = self._ops("exp", "exp2")
        for i in bits(products):
            if any(self.before[k] & products for k in bits(self.before[i] & exps)):
                return "attention"
        first = self.members[bits(products)[0]]
        name = "matmul" if first.op == "dot_general" else first.op
        beside = [node for i, node in enumerate(self.members) if not products >> i & 1]
        rest = self._heaviest(beside, only_flops=True)
        return f"{name}+{rest}" if rest else name

    def _of_rows(self) -> str:
        sums = self._ops("reduce_sum")
        exps = self._ops("exp", "exp2")
        of_exps = sum(1 << i for i in bits(sums) if self.before[i] & exps)
        for i in bits(self._ops("div", "mul")):
            parts = [self.before[k] | 1 << k for k in self.reads[i]]
            if len(parts) == 2:
                over = parts[1] & of_exps
                if over and any(self.before[s] & exps & parts[0] for s in bits(over)):
                    return "softmax"
        if any(self.before[i] & of_exps for i in bits(self._ops("log", "log1p"))):
            return "logsumexp"
        for root in bits(self._ops("rsqrt", "sqrt")):
            behind = self.before[root] & sums
            if not behind:
                continue
            centred = self._ops("sub")
            for last in bits(behind):
                if any(self.before[k] & sums & ~(1 << last) for k in bits(self.before[last] & centred)):
                    return "layer norm"
            if any(self._squares(self.before[last]) for last in bits(behind)):
                return "RMS norm"
        return ""

    def _squares(self, behind: int) -> bool:
        for i in bits(behind):
            node = self.members[i]
            twice = node.op == "mul" and len(node.inputs) == 2 and node.inputs[0] == node.inputs[1]
            if node.op in ("integer_pow", "square") or twice:
                return True
        return False

    def _heaviest(self, members: Sequence[Node], only_flops: bool = False) -> str:
        """The two operations that compute most, or the last one where nothing is computed."""
        work: dict[str, int] = {}
        for node in members:
            flops = node.flops.vector + _TRANSCENDENTAL * node.flops.transcendental
            if flops or (node.kind == OpKind.OPAQUE and not only_flops):
                work[node.op] = work.get(node.op, 0) + flops
        if not work:
            return "" if only_flops or not members else members[-1].op
        order = list(work)
        heavy = sorted(order, key=lambda op: -work[op])[: 1 if only_flops else 2]
        return "+".join(op for op in order if op in heavy)

    def _ops(self, *names: str) -> int:
        return self._all(lambda node: node.op in names)

    def _all(self, test: Callable[[Node], bool]) -> int:
        return sum(1 << i for i, node in enumerate(self.members) if test(node))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", text.lower())
