"""XLA:GPU's ``PriorityFusion``: fuse the producer of highest priority into all of its users, or into none.

After ``priority_fusion`` and ``gpu_performance_model`` of OpenXLA. A priority queue holds each operation with
the time that fusing it saves: its time and its users' times as separate kernels, less the times of the users
if each recomputes it for the elements that it reads. A kernel takes
``compute + memory - 0.95 min(compute, memory)`` and a launch of 1 us. The operation that saves most is fused,
the priorities of its users and operands are updated, until fusing saves nothing. An operation with several
users is then computed in each of them.

Refused are: two reductions of 16 or more elements in one kernel; operations other than unary elementwise ones
after such a reduction; evaluating a shorter one more than once; operations that are not loops (contractions,
sorts, calls); fusing a result of the function; more than 96 arrays; code for too many indices of one
operation; what reads a scatter, and what makes its table. Not modelled: uncoalesced reads and small grids,
and the passes around this one, which fuse contractions and softmax by Triton before it and siblings after it.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from costmodel.device import DeviceSpec
from costmodel.devices import get_device
from costmodel.graph import Graph, Node, OpKind
from costmodel.xla_loops import MIN_REDUCED_ELEMENTS, elements_read, evaluations_in_loop, is_scatter
from fuseplan.schedule.pricing import Nodes, PriceBook, Pricing
from fuseplan.search.decided import plan_decided
from fuseplan.search.grouping import Budget, Grouping
from fuseplan.support.work import Work, unlimited

LAUNCH_S = 1e-6
"""``kKernelLaunchOverhead``."""
OVERLAP = 0.95
"""Share of the shorter of compute and memory time that is hidden (``memory_compute_parallelism``)."""
L2_SPEEDUP, L1_SPEEDUP, L1_BYTES_PER_CORE = 2.5, 8.0, 2048
"""Speed of repeated reads over HBM, and the cache size assumed per core: ``kL2CacheSpeedup``,
``kL1CacheSpeedup``, ``kL1CacheSizePerSM``."""
MAX_ARRAYS = 96
"""``MaxOperandsAndOutputsPerFusion``."""
TICKS_PER_S = 4e9
"""Resolution of ``absl::Duration``, in which XLA compares times."""
_KERNEL_WORK = 10
"""Units of work to estimate the time of a kernel, beside one for each of its operations."""
DEFAULT_DEVICE = "h100"
"""The device whose rates are used if the prices follow from no device."""


def plan_groups(graph: Graph, pricing: Pricing, budget: Budget | None = None) -> Grouping:
    """Plan with the fusions of the queue: all, or those of the highest priorities that are found within
    ``budget``."""
    budget = budget or Budget()
    expires_at = time.monotonic() + budget.deadline_s if budget.deadline_s > 0 else inf

    def decide(book: PriceBook) -> Iterator[Nodes]:
        return fuse_by_priority(book, pricing.device, budget.work, expires_at)

    return plan_decided(graph, pricing, decide)


def fuse_by_priority(
    book: PriceBook, device: DeviceSpec | None = None, work: Work | None = None, expires_at: float = inf
) -> Iterator[Nodes]:
    """The fusions, by node ids. An operation occurs in every fusion that computes it. They are those that
    are found until ``work`` is spent, or until ``expires_at``, by ``time.monotonic``."""
    queue = _Queue(book, device or get_device(DEFAULT_DEVICE), work or unlimited())
    for fusion in queue.run(expires_at):
        if len(fusion) > 1:
            yield fusion


@dataclass(slots=True)
class _Fusion:
    """The operations of one kernel; ``root`` is the one whose result it writes."""

    root: Node
    nodes: set[int]
    number: int
    """XLA's instruction number: of equal priorities, the latest instruction is fused first."""
    reduces: bool = False
    """Whether it is written by the reduction emitter."""
    users: set[int] = field(default_factory=set)
    """Roots of the kernels that read it."""
    operands: set[int] = field(default_factory=set)
    """Roots of the kernels that it reads."""
    runtime_s: float = 0.0
    with_producer_s: dict[int, float] = field(default_factory=dict)
    """Cache: its time if it recomputes a producer, by the producer's root."""


_Entry = tuple[float, int, int]
"""The negative priority, the negative number, and the root: the least entry is fused first."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What ``_Queue.runtime_s`` needs of an operation."""

    compute_s: float
    """Seconds for one element of its largest result."""
    outputs: tuple[int, ...]
    reads: tuple[tuple[int, float], ...]
    """Each value that it reads, and how many elements of it for one element of a result."""


class _Queue:
    def __init__(self, book: PriceBook, device: DeviceSpec, work: Work) -> None:
        self.graph, self.device, self._work = book.graph, device, work
        self._steps = [self._step(node) for node in self.graph.nodes]
        values = self.graph.values
        self._read = [[(v, values[v].producer) for v in node.inputs] for node in self.graph.nodes]
        """For each operation, each value that it reads, and the operation that makes it."""
        self._sizes = [value.size for value in values]
        self._item_bytes = [value.nbytes / max(value.size, 1) for value in values]
        self._bitcasts = {node.id for node in self.graph.nodes if book.renames(node.id)}
        self.fusions = {node.id: _Fusion(node, {node.id}, node.id) for node in self.graph.nodes}
        for node in self.graph.nodes:
            for v in node.inputs:
                if (maker := self.graph.values[v].producer) >= 0:
                    self.fusions[maker].users.add(node.id)
                    self.fusions[node.id].operands.add(maker)
        for fusion in self.fusions.values():
            reduces = not is_scatter(fusion.root)
            fusion.reduces = reduces and elements_read(self.graph, fusion.root) >= MIN_REDUCED_ELEMENTS
            fusion.runtime_s = self.runtime_s(fusion.root, fusion.nodes)
        self._numbers = itertools.count(len(self.graph.nodes))
        self._queue: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}
        """The current entry of each root; older entries in the queue are stale."""

    def run(self, expires_at: float = inf) -> list[Nodes]:
        for root in self.fusions:
            self._push(root)
        while self._queue and not self._work.is_spent and time.monotonic() < expires_at:
            entry = heapq.heappop(self._queue)
            if self._entries.get(entry[-1]) == entry:  # else it is stale
                self._fuse(entry[-1])
        return [tuple(sorted(fusion.nodes)) for fusion in self.fusions.values()]

    def _push(self, root: int) -> None:
        fusion = self.fusions[root]
        entry = self._entries[root] = (-self._priority_of(fusion), -fusion.number, root)
        if entry[0] <= 0:
            heapq.heappush(self._queue, entry)

    def _fuse(self, root: int) -> None:
        producer = self.fusions[root]
        into = self._fusible_users(producer)
        # This costs more than to ask for a priority, so that it is asked last.
        if not all(self._has_small_code(producer.nodes | self.fusions[user].nodes) for user in into):
            return  # It is asked again if one of its users or operands changes.
        for user in into:
            fusion = self.fusions[user]
            if len(fusion.nodes) == 1:  # A fusion that grows remains the same instruction.
                fusion.number = next(self._numbers)
            fusion.nodes |= producer.nodes
            fusion.reduces |= producer.reduces
            fusion.operands = fusion.operands - {root} | producer.operands
            fusion.runtime_s = self.runtime_s(fusion.root, fusion.nodes)
            fusion.with_producer_s.clear()
            producer.users.remove(user)
            for reader in fusion.users:
                self.fusions[reader].with_producer_s.pop(user, None)
            for operand in producer.operands:
                self.fusions[operand].users.add(user)
        del self._entries[root]
        if not producer.users:
            del self.fusions[root]
            for operand in producer.operands:
                self.fusions[operand].users.discard(root)
        affected = set(into).union(*(self.fusions[user].operands for user in into))
        for other in sorted(affected & self._entries.keys()):
            self._push(other)

    def _fusible_users(self, producer: _Fusion) -> list[int]:
        """The users, apart from bitcasts, that the producer may be fused into."""
        users = sorted(producer.users)
        return [u for u in users if not self._is_bitcast(u) and self._may_fuse(producer, self.fusions[u])]

    def _is_bitcast(self, root: int) -> bool:
        return self.fusions[root].nodes <= self._bitcasts

    def _priority_of(self, producer: _Fusion) -> float:
        """The ticks saved by fusing the producer into all of its users; -inf if that is not allowed."""
        fusible = self._fusible_users(producer)
        users = [self.fusions[user] for user in fusible]
        if self._is_bitcast(producer.root.id):
            return inf if users else -inf
        if not users or any(user not in fusible and not self._is_bitcast(user) for user in producer.users):
            return -inf
        unfused_s = LAUNCH_S + producer.runtime_s + sum(user.runtime_s for user in users)
        fused_s = sum(self._fused_s(producer, user) for user in users)
        return round((unfused_s - fused_s) * TICKS_PER_S)

    def _fused_s(self, producer: _Fusion, user: _Fusion) -> float:
        known, root = user.with_producer_s, producer.root.id
        if root not in known:
            known[root] = self.runtime_s(user.root, user.nodes | producer.nodes)
        return known[root]

    def _may_fuse(self, producer: _Fusion, user: _Fusion) -> bool:
        graph = self.graph
        if not graph.results.isdisjoint(producer.root.outputs) or len(producer.root.outputs) != 1:
            return False
        if not _is_loop(producer.root) or not _is_loop(user.root):
            return False
        if is_scatter(producer.root):
            return False
        if is_scatter(user.root) and user.root.inputs[0] in producer.root.outputs:
            return False  # It is updated in place.
        if producer.reduces:
            if user.reduces:
                return False
            size = graph.values[producer.root.outputs[0]].size
            if not all(self._is_unary(graph.nodes[n], size) for n in user.nodes):
                return False
        both = user.nodes | producer.nodes
        self._work.spend(len(both))
        reads = {v for n in both for v, maker in self._read[n] if maker not in both}
        return len(reads) + len(user.root.outputs) <= MAX_ARRAYS

    def _has_small_code(self, nodes: set[int]) -> bool:
        """Whether the code of the loop of ``nodes`` is small: it evaluates each operation at few indices, and
        each reduction once."""
        self._work.spend(_KERNEL_WORK * len(nodes))
        ordered, graph = tuple(sorted(nodes)), self.graph
        times = evaluations_in_loop(graph, ordered, self.device.capabilities.loop_indices)
        if times is None:
            return False
        reductions = (k for k, n in enumerate(ordered) if graph.nodes[n].kind == OpKind.REDUCTION)
        return all(times[k][0] <= times[k][1] for k in reductions)

    def _is_unary(self, node: Node, size: int) -> bool:
        result = self.graph.values[node.outputs[0]]
        return node.kind <= OpKind.INJECTIVE and len(node.inputs) == 1 and result.size == size

    def _step(self, node: Node) -> _Step:
        values, device = self.graph.values, self.device
        size = max([values[v].size for v in node.outputs], default=0)
        whole_s = _at(node.flops.vector, device.vector_flops_per_s)
        whole_s += _at(node.flops.transcendental, device.transcendental_per_s)
        read = elements_read(self.graph, node)
        is_joined = node.op == "concatenate"
        reads = [(v, values[v].size / max(size, 1) if is_joined else read) for v in node.inputs]
        return _Step(whole_s / max(size, 1), node.outputs, tuple(reads))

    def runtime_s(self, root: Node, nodes: set[int]) -> float:
        """Seconds of a kernel, without its launch."""
        sizes, values = self._sizes, self.graph.values
        self._work.spend(_KERNEL_WORK + len(nodes))
        elements: dict[int, float] = {v: sizes[v] for v in root.outputs}
        """How many elements of each value the kernel computes or reads: the most of any reader."""
        compute_s = memory_s = 0.0
        for n in sorted(nodes, reverse=True):
            step = self._steps[n]
            made = max([elements.get(v, 0.0) for v in step.outputs], default=0.0)
            compute_s += step.compute_s * made
            for v, each in step.reads:
                count = made * each
                if count > elements.get(v, 0.0):
                    elements[v] = count
        for v, count in elements.items():
            if values[v].producer not in nodes:
                item_bytes = self._item_bytes[v]
                memory_s += self._read_s(min(count, sizes[v]) * item_bytes, count * item_bytes)
        memory_s += _at(sum([values[v].nbytes for v in root.outputs]), self.device.hbm_bytes_per_s)
        return compute_s + memory_s - OVERLAP * min(compute_s, memory_s)

    def _read_s(self, net_bytes: float, total_bytes: float) -> float:
        """Seconds to read ``net_bytes`` of an array once, and the rest of ``total_bytes`` again."""
        bytes_per_s = float(self.device.hbm_bytes_per_s)
        again_bytes_per_s = bytes_per_s
        if net_bytes < self.device.cache_bytes:
            again_bytes_per_s *= L2_SPEEDUP
            if net_bytes < L1_BYTES_PER_CORE * self.device.core_count:
                again_bytes_per_s *= L1_SPEEDUP
        return _at(net_bytes, bytes_per_s) + _at(total_bytes - net_bytes, again_bytes_per_s)


def _is_loop(node: Node) -> bool:
    return node.kind <= OpKind.REDUCTION and not node.effects


def _at(amount: float, per_s: float) -> float:
    """Seconds for an amount at a rate; a rate of 0 means no limit (``DeviceSpec``)."""
    return amount / per_s if per_s else 0.0
