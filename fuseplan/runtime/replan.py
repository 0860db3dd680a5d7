"""Fall back: a kernel that the device's compiler refuses is planned anew with less room, twice at
most, and in the end left to XLA.

The model of what a kernel needs on chip is not the compiler's, and what Pallas can lower is not
written down. Nothing is compiled twice for that where all goes well: kernels are tried one by
one only once the whole program was refused, or where nobody would see that it is.

What a device's compiler says when it refuses a kernel, and how much it would have needed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from costmodel.graph import Graph
from costmodel.kernel import Access, KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.body import live_ins
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
from fuseplan.verify.plan import check_plan

_UNIT_BYTES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30}


_SIZE = r"(0x[0-9a-f]+|[\d.]+[BKMG]?)"


# Needed, then available.
_ONCHIP = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Shared memory size limit exceeded: requested {_SIZE}, available: {_SIZE}",  # XLA, Triton
        rf"smem_bytes={_SIZE} > max_smem_bytes={_SIZE}",  # Pallas, Mosaic GPU
        rf"too much shared data \({_SIZE} bytes, {_SIZE} max\)",  # ptxas
        rf"Scoped allocation with size {_SIZE} and limit {_SIZE}",  # XLA, TPU: what a kernel may ask for
        rf"Used {_SIZE} of {_SIZE} vmem",  # XLA, TPU: all that there is
    )
)


_REGISTERS = re.compile(r"(?i)too many registers|register allocation failed|out of registers")


_PRIMITIVE = re.compile(r"Unimplemented primitive in Pallas [^:]*: (\w+)")


_WORDS = ("Mosaic", "Triton", "triton", "ptxas", "Pallas", "pallas", "scoped vmem")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the compiler refused a kernel, as far as its message can be understood."""

    said: str
    """The first line of the message that tells it."""
    needed_bytes: int = 0
    """Of on-chip memory; 0 where that is not the reason."""
    available_bytes: int = 0
    registers: bool = False
    primitive: str = ""
    """The operation that the compiler does not know, if that is the reason."""


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
    """Whether an error is one of the compilers' of kernels, from its words alone."""
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
"""A tightened plan whose kernels are refused as well is tightened once more; then XLA takes over."""

Compile = Callable[[Callable[..., Any], Sequence[Any]], object]
"""Compiles a function for the shapes of its arguments, or raises the compiler's error."""

Refused = tuple[tuple[Kernel, Refusal], ...]

_tried: LruCache[Hashable, Refusal | str] = LruCache(4096)
"""The refusal of each kernel that was compiled by itself, or ``_ACCEPTED``, by its structure: equal layers
have one."""

_ACCEPTED = "accepted"


def compile_here(kernel: Callable[..., Any], avals: Sequence[Any]) -> object:
    """Compile for the device that JAX runs on."""
    return jax.jit(kernel).lower(*avals).compile()


def has_kernels(plan: FusionPlan, platform: str) -> bool:
    """Whether any kernel of the plan is compiled by Pallas' compilers on that platform."""
    return plan.device.platform == platform and any(map(_is_ours, plan.kernels))


def plan_accepted(
    traced: Traced, options: Options, platform: str, compile_kernel: Compile, trace_s: float = 0.0
) -> FusionPlan:
    """``plan_traced``, but every kernel of the plan is one that its compiler accepts.

    Where some are refused the plan is made anew, twice at most: with as much less on-chip memory
    as the compiler's figures ask for, or with what it refused kept apart. Kernels that are
    refused even then are left to XLA, operation by operation. The plan's notes and
    ``stats.refused`` tell, and a ``CompilerRefusalWarning``.
    """
    plan = plan_traced(traced, options, trace_s)
    if not has_kernels(plan, platform):
        return plan
    tightened, notes, count = options, [], 0
    is_new = False
    for replans in range(MAX_REPLANS + 1):
        found = tuple(_refused(plan.lowered, plan, compile_kernel))
        is_new = is_new or any(new for *_, new in found)
        refused = tuple((kernel, refusal) for kernel, refusal, _ in found)
        if not refused:
            break
        count += len(refused)
        notes += [_note(plan.graph, *pair) for pair in refused]
        again = None
        if replans < MAX_REPLANS:
            before, tightened = tightened, _tightened(options, tightened, plan, refused)
            again = _planned(traced, tightened)
        if again is None:
            plan = _without(plan, {kernel.spec.nodes for kernel, _ in refused})
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
        if is_new:  # Else it has been said.
            warnings.warn("; ".join(notes), CompilerRefusalWarning, stacklevel=2)
    return plan


def _is_ours(kernel: Kernel) -> bool:
    return kernel.spec.capabilities.is_compiled_apart


def _planned(traced: Traced, options: Options) -> FusionPlan | None:
    """A plan under the tightened options, unless there is none."""
    try:
        return plan_traced(traced, options)
    except FuseplanError:  # What the user asked for and what the compiler refused exclude each other.
        return None


def _refused(
    lowered: Lowered, plan: FusionPlan, compile_kernel: Compile
) -> Iterator[tuple[Kernel, Refusal, bool]]:
    """The kernels that do not compile by themselves, each with the reason, and whether it was found now."""
    signatures = Signatures(plan.graph)
    for kernel in filter(_is_ours, plan.kernels):
        key = (compile_kernel, plan.device.platform, described(kernel.spec, signatures))
        known = _tried.get(key)
        refusal = known or _refusal(kernel.spec, lowered, compile_kernel) or _ACCEPTED
        if known is None:
            _tried.update([(key, refusal)])
        if isinstance(refusal, Refusal):
            yield kernel, refusal, known is None


def _refusal(spec: KernelSpec, lowered: Lowered, compile_kernel: Compile) -> Refusal | None:
    avals = [lowered.avals[v] for v in live_ins(spec)]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    try:
        compile_kernel(emit(spec, lowered), shapes)
    except Exception as error:  # Whatever a compiler raises, it is not the user's.
        return read_refusal(error)
    return None


def described(spec: KernelSpec, signatures: Signatures) -> Hashable:
    """The group and its schedule, whichever arrays it works on."""
    number = signatures.key(spec.nodes)[1]

    def shown(accesses: tuple[Access, ...]) -> tuple[Any, ...]:
        return tuple((number[a.value], a.axes) for a in accesses)

    schedule = replace(spec, nodes=(), reads=(), writes=())
    # Else the text means this graph alone; the key holds its signatures, so that no other graph has it.
    graph = None if signatures.are_told(spec.nodes) else signatures
    return signatures.text(spec.nodes), schedule, shown(spec.reads), shown(spec.writes), graph


def _tightened(options: Options, before: Options, plan: FusionPlan, refused: Refused) -> Options:
    """``before`` with less room on chip, or with what was refused kept apart; the device, which is
    not the user's ``options.device`` any more, has a name of its own."""
    device = before.device
    onchip_bytes, register_bytes = device.onchip_bytes, device.register_bytes
    apart: list[Any] = []
    for kernel, refusal in refused:
        modelled_bytes = kernel.cost.onchip_bytes
        if refusal.needed_bytes > refusal.available_bytes and modelled_bytes:
            # The compiler needs so many times what the model says, and will for the next.
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
    """Entries of ``never_fuse`` that rule the kernel out: the operations that the compiler does not
    know by themselves, or else the first and the last of the group apart."""
    operations, nodes = operations_of(graph), kernel.spec.nodes
    unknown = {operations[n][0] for n in nodes if graph.nodes[n].op == refusal.primitive}
    first, last = operations[nodes[0]][0], operations[nodes[-1]][0]
    yield from unknown or ([(first, last)] if first != last else [])


def _without(plan: FusionPlan, refused: set[tuple[int, ...]]) -> FusionPlan:
    """The plan with every operation of the refused kernels left to XLA by itself."""
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
