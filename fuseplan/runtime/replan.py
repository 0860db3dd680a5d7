"""Replan a program whose kernels the device's compiler refuses, and read the compiler's reasons.

The model of on-chip memory is not the compiler's, and Pallas does not document what it can lower. A refused
kernel is replanned with less on-chip memory, or its operations are kept apart; after two attempts it is left
to XLA. Kernels are compiled one by one only after the whole program was refused, or if its compilation cannot
be observed, so that accepted programs are compiled once.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from costmodel.graph import Graph
from costmodel.kernel import Access, KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Traced
from fuseplan.pipeline import plan_traced
from fuseplan.plan.constraints import Constraints
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.plan.notes import NoteKind, note
from fuseplan.plan.options import Options
from fuseplan.report.debug import report_refused
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.search.remat.duplicates import operations_of
from fuseplan.support.errors import CompilerRefusalWarning, FuseplanError
from fuseplan.support.lru import LruCache
from fuseplan.targets.detect import local_platform
from fuseplan.verify.plan import check_plan

_UNIT_BYTES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = r"(0x[0-9a-f]+|[\d.]+[BKMG]?)"

# Messages with the needed, then the available bytes of on-chip memory.
_ONCHIP = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Shared memory size limit exceeded: requested {_SIZE}, available: {_SIZE}",  # XLA, Triton
        rf"smem_bytes={_SIZE} > max_smem_bytes={_SIZE}",  # Pallas, Mosaic GPU
        rf"too much shared data \({_SIZE} bytes, {_SIZE} max\)",  # ptxas
        rf"Scoped allocation with size {_SIZE} and limit {_SIZE}",  # XLA, TPU: the limit of a kernel
        rf"Used {_SIZE} of {_SIZE} vmem",  # XLA, TPU: all VMEM
    )
)

_REGISTERS = re.compile(r"(?i)too many registers|register allocation failed|out of registers")

_PRIMITIVE = re.compile(r"Unimplemented primitive in Pallas [^:]*: (\w+)")

_WORDS = ("Mosaic", "Triton", "triton", "ptxas", "Pallas", "pallas", "scoped vmem")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why the compiler refused a kernel, as parsed from its message."""

    said: str
    """The line of the message with the reason."""
    needed_bytes: int = 0
    """Bytes of on-chip memory; 0 if that is not the reason."""
    available_bytes: int = 0
    registers: bool = False
    primitive: str = ""
    """The primitive that the compiler does not lower, if that is the reason."""


def read_refusal(error: Exception) -> Refusal:
    """The reason in an error that was raised while a kernel was compiled.

    Example:
        >>> read_refusal(ValueError("smem_bytes=4096 > max_smem_bytes=1024")).needed_bytes
        4096
    """
    text = str(error)
    lines = text.splitlines() or [type(error).__name__]
    for pattern in _ONCHIP:
        if found := pattern.search(text):
            needed, available = map(_bytes, found.groups())
            return Refusal(found.group(), needed, available)
    if found := _PRIMITIVE.search(text):
        return Refusal(lines[0], primitive=found.group(1))
    return Refusal(lines[0], registers=bool(_REGISTERS.search(text)))


def is_refusal(error: Exception) -> bool:
    """Whether the message or type of an error is that of a kernel compiler."""
    text = str(error)
    told = any(pattern.search(text) for pattern in _ONCHIP)
    return told or "pallas" in type(error).__module__ or any(word in text for word in _WORDS)


def _bytes(text: str) -> int:
    """``"458752"``, ``"0xd000"`` or ``"28.01M"`` as a number."""
    if text.startswith("0x"):
        return int(text, 16)
    unit = text[-1] if text[-1] in _UNIT_BYTES else ""
    return round(float(text.removesuffix(unit)) * _UNIT_BYTES[unit])


MAX_REPLANS = 2
"""The most replans; then XLA takes the kernels that are still refused."""

Compile = Callable[[Callable[..., Any], Sequence[Any]], object]
"""Compiles a function for the shapes of its arguments, or raises the compiler's error."""

Refused = tuple[tuple[Kernel, Refusal], ...]

_tried: LruCache[Hashable, Refusal | str] = LruCache(4096)
"""The refusal of each kernel that was compiled by itself, or ``_ACCEPTED``, by its structure, which equal
layers share."""

_ACCEPTED = "accepted"


def compile_here(kernel: Callable[..., Any], avals: Sequence[Any]) -> object:
    """Compile for the device that JAX runs on."""
    return jax.jit(kernel).lower(*avals).compile()


def has_kernels(plan: FusionPlan, platform: str | None) -> bool:
    """Whether any kernel of the plan is compiled by Pallas' compilers on that platform (None: the local)."""
    return plan.device.platform == (platform or local_platform()) and any(
        map(_is_compiled_apart, plan.kernels)
    )


def plan_accepted(
    platform: str | None, compile_kernel: Compile, traced: Traced, options: Options, trace_s: float = 0.0
) -> FusionPlan:
    """``plan_traced`` with kernels that the compiler of ``platform`` (None: the local one) accepts.

    If some are refused, the program is replanned at most twice: with less on-chip memory, by the compiler's
    figures, or with the refused operations kept apart. Kernels that are still refused are left to XLA,
    operation by operation. The plan's notes, ``stats.refused`` and a ``CompilerRefusalWarning`` report it.
    """
    plan = plan_traced(traced, options, trace_s)
    if not has_kernels(plan, platform):
        return plan
    tightened, notes, count = options, [], 0
    is_new = False
    for replans in range(MAX_REPLANS + 1):
        found = tuple(_refused(plan, compile_kernel))
        is_new = is_new or any(new for *_, new in found)
        refused = tuple((kernel, refusal) for kernel, refusal, _ in found)
        if not refused:
            break
        count += len(refused)
        notes += [_note(plan.graph, *pair) for pair in refused]
        again = None
        if replans < MAX_REPLANS:
            before, tightened = tightened, _tightened(options, tightened, plan, refused)
            with contextlib.suppress(FuseplanError):  # the user's constraints contradict the tightened ones
                again = plan_traced(traced, tightened)
        if again is None:
            plan = _plan_without_kernels(plan, {kernel.spec.nodes for kernel, _ in refused})
            notes.append(str(note(NoteKind.REFUSED_LEFT, count=len(refused))))
            break
        plan = again
        if tightened.constraints != before.constraints:
            notes.append(str(note(NoteKind.REPLANNED_APART)))
        else:
            notes.append(str(note(NoteKind.REPLANNED, device=plan.device.name)))
    if notes:
        notes = list(dict.fromkeys(notes))
        stats = replace(plan.stats, refused=count, replans=replans)
        plan = check_plan(replace(plan, notes=(*plan.notes, *notes), stats=stats))
        report_refused(plan, notes)
        if is_new:  # else it has been reported
            warnings.warn("; ".join(notes), CompilerRefusalWarning, stacklevel=2)
    return plan


def _is_compiled_apart(kernel: Kernel) -> bool:
    return kernel.spec.capabilities.is_compiled_apart


def _refused(plan: FusionPlan, compile_kernel: Compile) -> Iterator[tuple[Kernel, Refusal, bool]]:
    """The kernels that do not compile by themselves, each with the reason, and whether it is new."""
    signatures = Signatures(plan.graph)
    for kernel in filter(_is_compiled_apart, plan.kernels):
        key = (compile_kernel, plan.device.platform, structure_key(kernel.spec, signatures))
        known = _tried.get(key)
        refusal = known or _refusal(kernel.spec, plan.lowered, compile_kernel) or _ACCEPTED
        if known is None:
            _tried.update([(key, refusal)])
        if isinstance(refusal, Refusal):
            yield kernel, refusal, known is None


def _refusal(spec: KernelSpec, lowered: Lowered, compile_kernel: Compile) -> Refusal | None:
    avals = [lowered.avals[v] for v in live_ins(spec)]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    try:
        compile_kernel(emit(spec, lowered), shapes)
    except Exception as error:  # an error of any type is the compiler's
        return read_refusal(error)
    return None


def structure_key(spec: KernelSpec, signatures: Signatures) -> Hashable:
    """A key of a kernel's structure: its group and schedule, without the ids of its values."""
    number = signatures.key(spec.nodes)[1]

    def shown(accesses: tuple[Access, ...]) -> tuple[Any, ...]:
        return tuple((number[a.value], a.axes) for a in accesses)

    schedule = replace(spec, nodes=(), reads=(), writes=())
    # If the text is valid in this graph only, the key contains the graph's signatures.
    graph = None if signatures.are_told(spec.nodes) else signatures
    return signatures.text(spec.nodes), schedule, shown(spec.reads), shown(spec.writes), graph


def _tightened(options: Options, before: Options, plan: FusionPlan, refused: Refused) -> Options:
    """``before`` with less on-chip memory, or with constraints that keep refused operations apart. A changed
    device has a name of its own."""
    device = before.device
    onchip_bytes, register_bytes = device.onchip_bytes, device.register_bytes
    apart: list[Any] = []
    for kernel, refusal in refused:
        modelled_bytes = kernel.cost.onchip_bytes
        if refusal.needed_bytes > refusal.available_bytes and modelled_bytes:
            # Scales the limit by the ratio of the compiler's bytes to the model's.
            allowed = refusal.available_bytes * modelled_bytes // refusal.needed_bytes
            onchip_bytes = min(onchip_bytes, allowed)
        elif refusal.registers and device.register_bytes:
            register_bytes = device.register_bytes // 2
        else:
            apart += _kept_apart(plan.graph, kernel, refusal)
    if (onchip_bytes, register_bytes) != (device.onchip_bytes, device.register_bytes):
        name = f"{options.device.name}-{onchip_bytes // 1024}KiB"
        name += "" if register_bytes == options.device.register_bytes else f"-{register_bytes // 1024}KiB"
        device = replace(device, name=name, onchip_bytes=onchip_bytes, register_bytes=register_bytes)
    wanted = before.constraints or Constraints()
    limits = replace(wanted, never_fuse=(*wanted.never_fuse, *apart)) if apart else before.constraints
    return replace(before, device=device, constraints=limits)


def _kept_apart(graph: Graph, kernel: Kernel, refusal: Refusal) -> Iterator[Any]:
    """Entries of ``never_fuse`` that exclude the kernel: each operation that the compiler does not lower by
    itself, or else the first and the last operation of the group apart."""
    operations, nodes = operations_of(graph), kernel.spec.nodes
    unknown = {operations[n][0] for n in nodes if graph.nodes[n].op == refusal.primitive}
    first, last = operations[nodes[0]][0], operations[nodes[-1]][0]
    yield from unknown or ([(first, last)] if first != last else [])


def _plan_without_kernels(plan: FusionPlan, refused: set[tuple[int, ...]]) -> FusionPlan:
    """The plan in which XLA compiles each operation of the refused kernels by itself."""
    scheduler = Scheduler(plan.graph, plan.device, features=plan.features)
    kernels: list[Kernel] = []
    for kernel in plan.kernels:
        if kernel.spec.nodes not in refused:
            kernels.append(kernel)
            continue
        for n in kernel.spec.nodes:
            alone = scheduler.price((n,))
            assert isinstance(alone, Kernel), "a single operation is always possible"
            kernels.append(alone)
    left = replace(plan, kernels=tuple(kernels), status="FEASIBLE")
    return left if left.bound_ps is None else replace(left, bound_ps=min(left.bound_ps, left.objective_ps))


def _note(graph: Graph, kernel: Kernel, refusal: Refusal) -> str:
    name = kernel_name(graph, kernel.spec.nodes)
    if not refusal.needed_bytes:
        return str(note(NoteKind.REFUSED, kernel=name, reason=refusal.said))
    needed, room = refusal.needed_bytes, refusal.available_bytes
    return str(note(NoteKind.REFUSED_ON_CHIP, kernel=name, needed_bytes=needed, room_bytes=room))
