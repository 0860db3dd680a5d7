"""Run: a plan and the equations behind it become one function on flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel.kernel import KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.shard_map import apart
from fuseplan.frontend.evaluate import FlatFunction, literal_array
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import Literal, Operand
from fuseplan.plan.fusion_plan import FusionPlan, Kernel


@dataclass(frozen=True, slots=True)
class Part:
    """Kernels of a plan that are run by themselves, in order; all that they read is made by
    one of them or among ``inputs``, values of the graph."""

    kernels: tuple[Kernel, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]


def make_runner(
    lowered: Lowered, plan: FusionPlan, *, platform: str, interpret: bool = False, part: Part | None = None
) -> FlatFunction:
    """A function of the constants followed by the flat arguments, returning flat results; or of
    a ``part``'s inputs, returning its outputs.

    Kernels written for another platform than ``platform`` (``cpu``, ``gpu``, ``tpu``) are
    left to XLA, which gives the same results; ``interpret=True`` runs them all the same, in
    Pallas' interpreter.
    """
    native = plan.device.platform == platform or interpret
    part = part or Part(plan.kernels, lowered.graph.inputs, lowered.outputs)
    steps = []
    for kernel in part.kernels:
        spec = kernel.spec if native else left_to_xla(kernel.spec)
        reads = tuple(dict.fromkeys(a.value for a in spec.reads))
        writes = tuple(a.value for a in spec.writes)
        kernel_of = emit(spec, lowered, interpret=interpret)
        if spec.capabilities.emits_kernels:
            kernel_of = apart(kernel_of, [lowered.avals[v] for v in writes])
        steps.append((kernel_of, reads, writes))
    release = _last_readers(part.outputs, [reads for _, reads, _ in steps])

    def run(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(part.inputs, flat, strict=True))
        for (kernel, reads, writes), dead in zip(steps, release, strict=True):
            env.update(zip(writes, kernel(*(env[v] for v in reads)), strict=True))
            for v in dead:
                del env[v]
        return [literal_array(o) if isinstance(o, Literal) else env[o] for o in part.outputs]

    return run


def left_to_xla(spec: KernelSpec) -> KernelSpec:
    """The same group without a schedule: XLA compiles it as it is."""
    return replace(spec, axes=(), backend="xla", passes=(), keeps=False, walked=())


def _last_readers(outputs: Sequence[Operand], reads: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Values no later step reads, step by step, so that eager evaluation frees them."""
    kept = {o for o in outputs if not isinstance(o, Literal)}
    last: dict[int, int] = {}
    for step, values in enumerate(reads):
        for v in values:
            last[v] = step
    release: list[list[int]] = [[] for _ in reads]
    for v, step in last.items():
        if v not in kept:
            release[step].append(v)
    return [tuple(r) for r in release]
