"""Cut the plan of a function and its derivative into a forward and a backward pass.

Both passes are planned as one program: the planner decides which values the backward pass reads from memory,
and which it recomputes. An operation between the two waits for the cotangents: everything that the results
depend on comes before it, everything that depends on a cotangent after it, and no kernel can hold operations
of both sides. The other kernels are put where the fewest bytes have to be kept: a minimum cut (Ford and
Fulkerson, 1956; augmenting paths by breadth first, as Edmonds and Karp, 1972).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import mlir

from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Equation, Literal, Operand, Primitive, depends_on
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.runtime.executor import Part
from fuseplan.support.digraph import reachable

AWAIT = "await_cotangents"
await_p = Primitive(AWAIT)
"""An operation of the results and their cotangents that returns the cotangents."""
await_p.multiple_results = True


@await_p.def_abstract_eval
def _cotangents(*avals: Any, n: int) -> Any:
    return avals[len(avals) - n :]


def await_cotangents(results: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """The cotangents, after all results are computed."""
    arrays = [r for r in results if isinstance(r, jax.core.Tracer)]
    return list(await_p.bind(*arrays, *cotangents, n=len(cotangents)))


def _barrier(*arrays: Any, n: int) -> Any:
    """The operation for XLA, where both passes are compiled as one (``fuseplan.planners.xla``)."""
    return jax.lax.optimization_barrier(arrays)[len(arrays) - n :]


mlir.register_lowering(await_p, mlir.lower_fun(_barrier, multiple_results=True))


@dataclass(frozen=True, slots=True)
class Halves:
    """A planned program of both passes, in two parts.

    ``plan`` is the whole, ``forward.kernels`` and ``back.kernels`` are those of each part (but for
    the operation between them, which runs nothing), ``kept_bytes`` is what ``jax.vjp`` holds of it.
    """

    lowered: Lowered
    plan: FusionPlan
    forward: Part
    """Its outputs are the function's results, then the values ``kept``."""
    back: Part
    """Its inputs are the program's but for the cotangents, the cotangents, and ``hints``."""
    kept: tuple[int, ...]
    """Values that the pass forward writes for the pass back alone."""
    hints: tuple[int, ...]
    """Values of the pass forward that the pass back reads: results, or ``kept``."""

    def equations(self, part: Part) -> list[Equation]:
        """Those of a part, in order."""
        return [self.lowered.equations[n] for n in sorted(n for k in part.kernels for n in k.spec.nodes)]

    def reaches(self, part: Part, marks: Sequence[bool]) -> list[bool]:
        """Which outputs of a part depend on one of its marked inputs."""
        return depends_on(self.equations(part), part.inputs, part.outputs, marks)

    @property
    def kept_bytes(self) -> int:
        """HBM bytes of the values kept beside arguments and results."""
        return sum(self.lowered.graph.values[v].nbytes for v in self.kept)


def halves(lowered: Lowered, plan: FusionPlan, n_args: int, n_results: int) -> Halves:
    """Cut the plan of a program in two; its first ``n_args`` inputs are the function's, its first
    ``n_results`` outputs the results."""
    graph, outputs = lowered.graph, lowered.outputs
    # Where no cotangent matters, nothing waits for one.
    wait = next((node for node in graph.nodes if node.op == AWAIT), None)
    cotangents = graph.inputs[n_args:] if wait is None else wait.outputs
    results = _values(outputs[:n_results])
    forward, back = sides(plan, -1 if wait is None else wait.id, results)
    reads = {a.value for k in back for a in k.spec.reads} | _values(outputs[n_results:])
    made = {a.value for k in forward for a in k.spec.writes}
    hints = tuple(sorted(made & reads))
    kept = tuple(v for v in hints if v not in results)
    inputs = graph.inputs[:n_args]
    return Halves(
        lowered,
        plan,
        Part(forward, inputs, (*outputs[:n_results], *kept)),
        Part(back, (*inputs, *cotangents, *hints), outputs[n_results:]),
        kept,
        hints,
    )


def _values(outputs: Sequence[Operand]) -> set[int]:
    return {v for v in outputs if not isinstance(v, Literal)}


def sides(
    plan: FusionPlan, wait: int, results: Collection[int]
) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """The kernels before and after the node ``wait``, in order, without its own; ``results`` are
    written before it. -1: there is none."""
    graph, kernels = plan.graph, plan.kernels
    maker = {a.value: k for k, kernel in enumerate(kernels) for a in kernel.spec.writes}
    needs = [{maker[a.value] for a in kernel.spec.reads if a.value in maker} for kernel in kernels]
    own = next((k for k, kernel in enumerate(kernels) if wait in kernel.spec.nodes), -1)
    before = {maker[v] for v in results if v in maker} | (needs[own] if own >= 0 else set())
    before |= reachable(before, needs.__getitem__)
    after = {own}
    for k, some in enumerate(needs):
        if some & after:
            after.add(k)
    place = {k: -1 if k in before else -2 if k in after else k for k in range(len(kernels)) if k != own}
    before |= _kept_free(graph, kernels, place, results)
    return (
        tuple(kernel for k, kernel in enumerate(kernels) if k in before),
        tuple(kernel for k, kernel in enumerate(kernels) if k not in before and k != own),
    )


def _kept_free(
    graph: Graph, kernels: Sequence[Kernel], place: dict[int, int], results: Collection[int]
) -> set[int]:
    """The free kernels that belong to the forward pass, so that the fewest bytes are kept; each only with all
    kernels that it reads from. ``place`` has -1 for each kernel of the forward pass, -2 for one of the
    backward pass, and its own index for a free one."""
    free = {k for k, node in place.items() if node == k}
    if not free:
        return set()
    # The nodes of the network are these places and the values.
    room: dict[Any, dict[Any, int]] = {}

    def edge(u: Any, v: Any, capacity: int) -> None:
        room.setdefault(u, {})[v] = room.get(u, {}).get(v, 0) + capacity
        room.setdefault(v, {}).setdefault(u, 0)

    unbounded = 1 + sum(value.nbytes for value in graph.values)
    maker = {a.value: place[k] for k in place for a in kernels[k].spec.writes}
    for k, node in place.items():
        if node != -2:
            for v in {a.value for a in kernels[k].spec.writes}:
                edge(node, ("value", v), 0 if v in results else max(graph.values[v].nbytes, 1))
        if node != -1:
            for v in {a.value for a in kernels[k].spec.reads if maker.get(a.value, -2) != -2}:
                edge(("value", v), node, unbounded)
                edge(node, maker[v], unbounded)  # only with all that it reads
    while path := _augmenting(room):
        least = min(room[u][v] for u, v in path)
        for u, v in path:
            room[u][v] -= least
            room[v][u] += least
    return free & _reached(room).keys()


def _reached(room: dict[Any, dict[Any, int]]) -> dict[Any, Any]:
    """The nodes that the forward pass still reaches, each with its predecessor."""
    found: dict[Any, Any] = {-1: None}
    queue = deque([-1])
    while queue:
        u = queue.popleft()
        for v, capacity in room.get(u, {}).items():
            if capacity > 0 and v not in found:
                found[v] = u
                queue.append(v)
    return found


def _augmenting(room: dict[Any, dict[Any, int]]) -> list[tuple[Any, Any]]:
    """A shortest path along which more can flow; empty if there is none."""
    found = _reached(room)
    path = []
    v: Any = -2
    while v in found and found[v] is not None:
        path.append((found[v], v))
        v = found[v]
    return path
