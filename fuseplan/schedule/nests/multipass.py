"""Split the evaluation of a nest into passes along its streamed axis.

The innermost streamed axis of a nest, its *stream*, is walked once or several times. A node that has this
axis and needs a complete reduction over it, as in the backward pass of a softmax, waits for the next pass,
which recomputes its other operands. A node whose value is final up to a factor need not wait
(``online_rescaling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodel.axes import reduced_axes
from costmodel.cpu_functions import IN_TURN
from costmodel.graph import Graph, Node
from costmodel.kernel import KernelSpec
from fuseplan.frontend.compared import are_apart, is_comparison
from fuseplan.schedule.nests.online_rescaling import OnlineRescaling, Scale, Shift


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass along the stream. Nodes are given by their positions in the group."""

    loop: tuple[int, ...]
    """The nodes evaluated on every tile, in order; they include the sinks."""
    sinks: tuple[tuple[int, Scale], ...]
    """The reductions accumulated in this pass, and the scale that their totals lack."""
    pending: dict[int, int]
    """For each product or quotient in ``loop`` of which one operand is not known yet, the position of the
    other operand, which it passes on unchanged."""
    stored: frozenset[int]
    """The nodes in ``loop`` whose tiles are final in this pass and written by the kernel."""
    after: tuple[int, ...]
    """Nodes without the stream that are evaluated when the pass is over; sinks are completed there."""
    recalled: tuple[int, ...] = ()
    """Contractions whose tiles an earlier pass stored; they are not in ``loop``."""
    kept: tuple[int, ...] = ()
    """The contractions in ``loop`` whose tiles are stored for a later pass."""


@dataclass(frozen=True, slots=True)
class Program:
    """The evaluation at each tile of the outer axes: the nodes ``before``, then the passes."""

    stream: int | None
    before: tuple[int, ...]
    passes: tuple[Pass, ...]
    shifts: dict[int, Shift]


class TimeLimit:
    """The time above which a nest is discarded; it is lowered whenever a faster nest is found."""

    def __init__(self, least_ps: Sequence[int], ps: int | None = None) -> None:
        """``least_ps``: the least picoseconds of evaluating each node of the group once. ``ps``: the time
        limit; None: no limit."""
        self.least_ps, self.ps = least_ps, ps


class TooSlowError(Exception):
    """The passes take longer than the limit."""


def program_of(graph: Graph, spec: KernelSpec, limit: TimeLimit | None = None) -> Program | None:
    """The passes of a nest along its innermost streamed axis. If it ``keeps`` contractions, they are stored
    for later passes instead of being recomputed.

    Returns:
        None if the group cannot be split into passes: some node needs a reduction over an outer axis, which
        is complete only at the end of the nest; or a comparison needs both operands from one evaluation
        (``fuseplan.frontend.compared``), but each pass has its own; or a function of the user would combine
        the tiles of two axes, which loops visit in any order.

    Raises:
        TooSlowError: the passes take longer than the limit. Each pass recomputes its operands, so many passes
            evaluate far more nodes than the group has.
    """
    return _PassBuilder(graph, spec).program(spec, limit)


def passes_of(graph: Graph, spec: KernelSpec) -> tuple[tuple[int, ...], ...] | None:
    """For each pass of a kernel along its stream, the nodes evaluated on every tile; None if it cannot be
    split into passes."""
    program = program_of(graph, spec)
    return None if program is None else tuple(p.loop for p in program.passes)


class _PassBuilder(OnlineRescaling):
    """Determines, node by node, the pass in which each value is final, and its scale before that."""

    def program(self, spec: KernelSpec, limit: TimeLimit | None) -> Program | None:
        written = frozenset(w.value for w in spec.writes)
        for i, node in enumerate(self.nodes):
            if any(self.outer(self.producer[v]) for v in node.inputs if v in self.producer):
                return None
            tiled = (spec.axes[a].n_tiles > 1 for a in reduced_axes(node, spec.node_axes[i]))
            if node.op == IN_TURN and sum(tiled) > 1:
                return None
            self._place(i, node)
        targets: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if i in self.runs:
                targets.setdefault(self.runs[i], []).append(i)
            elif self.carries(i) and not written.isdisjoint(node.outputs):
                targets.setdefault(self.final[i], []).append(i)
        late = [final for i, final in enumerate(self.final) if not self.in_loop(i)]
        count = max([*targets, *late], default=-1) + 1
        passes: list[Pass] = []
        known: set[int] = set()
        least_ps = 0
        for at in range(count):
            passes.append(self._pass(at, targets.get(at, []), known))
            if limit is not None and limit.ps is not None:
                least_ps += sum([limit.least_ps[i] for i in passes[-1].loop])
                if least_ps > limit.ps:
                    raise TooSlowError
            if spec.keeps:
                known.update(i for i in passes[-1].loop if self._is_product(i, at))
        if len(passes) > 1 and self._compares_apart(passes):
            return None
        recalled = {i for p in passes for i in p.recalled}
        passes = [replace(p, kept=tuple(i for i in p.loop if i in recalled)) for p in passes]
        return Program(self.stream, self._known_after(-1), tuple(passes), dict(self.shifts))

    def _compares_apart(self, passes: Sequence[Pass]) -> bool:
        """Whether two passes evaluate one operation for the two operands of a comparison
        (``fuseplan.frontend.compared``)."""
        graph, loops = self.graph, [frozenset(p.loop) for p in passes]

        def evaluated(i: int, at: int) -> int:
            """The pass that evaluates node ``i`` for a reader in pass ``at``; for a node without the stream,
            the pass after its evaluation."""
            if self.in_loop(i):
                return next(k for k in range(at, -1, -1) if i in loops[k])
            return self.runs[i] if i in self.runs else self.final[i] + 1

        def producer(v: int, at: int) -> tuple[int, int] | None:
            i = self.producer.get(v)
            return None if i is None else (self.nodes[i].id, evaluated(i, at))

        for i, node in enumerate(self.nodes):
            if is_comparison(graph, node):
                within = [at for at, loop in enumerate(loops) if i in loop]
                for at in within if self.in_loop(i) else [self.final[i] + 1]:
                    if are_apart(graph, node, at, producer):
                        return True
        return False

    def _is_product(self, i: int, at: int) -> bool:
        """Whether node ``i`` is a contraction that is final in pass ``at``, and so worth storing."""
        return self.in_loop(i) and self.nodes[i].flops.matrix > 0 and self.final[i] <= at

    def _place(self, i: int, node: Node) -> None:
        if not self.carries(i):
            known = [self.final[self.producer[v]] for v in node.inputs if v in self.producer]
            self.final.append(max(known, default=-1))
            return
        run = final = max([0, *map(self.usable, node.inputs)])
        scaled = None if final == 0 or self.outer(i) else self.scaled(i, node)
        if scaled is not None and scaled[0] < final and self.fits(i, scaled[1]):
            self.early[i], run = scaled, scaled[0]
        if self.reduced[i]:
            self.runs[i] = run
            if i in self.early:
                final = max([run, *(self.final[self.producer[v]] for _, v in self.early[i][1].factors)])
        self.final.append(final)

    def _known_after(self, at: int) -> tuple[int, ...]:
        """The nodes evaluated without the stream after pass ``at``, in order, with the sinks completed
        there."""
        return tuple(
            i
            for i, final in enumerate(self.final)
            if final == at and not self.in_loop(i) and not (i in self.runs and self.outer(i))
        )

    def _pass(self, at: int, targets: list[int], known: set[int]) -> Pass:
        needed: set[int] = set()
        pending: dict[int, int] = {}
        queue = list(targets)
        while queue:
            i = queue.pop()
            if i in needed:
                continue
            needed.add(i)
            if i in known:
                continue
            inputs = self.nodes[i].inputs
            if i in self.factored and self.final[i] > at:
                pending[i] = next(k for k, v in enumerate(inputs) if v != self.factored[i])
                inputs = (inputs[pending[i]],)
            for v in inputs:
                j = self.producer.get(v)
                if j is not None and self.in_loop(j):
                    queue.append(j)
        sinks = tuple(
            (i, self.early[i][1] if i in self.early else Scale()) for i in sorted(targets) if i in self.runs
        )
        stored = frozenset(i for i in targets if i not in self.runs)
        loop, recalled = tuple(sorted(needed - known)), tuple(sorted(needed & known))
        return Pass(loop, sinks, pending, stored, self._known_after(at), recalled)
