"""Turn a plan and its program into one function of flat arrays that runs the plan's kernels in order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.interpreters import mlir

from costmodel.kernel import KernelSpec
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.codegen.xla import apart, read_apart
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.trace import FlatFunction, Literal, Operand, Primitive, literal_array
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.runtime.partition import KernelFunction, partitioned
from fuseplan.support import jax_compat

shard_kernel_p = Primitive("shard_kernel")
"""A kernel under ``jax.shard_map``. JAX tracks which arrays differ between shards (``check_vma``). A kernel
has no collectives, so it is traced without that check, and its results are declared."""
shard_kernel_p.multiple_results = True


def _in_shard(kernel: KernelFunction, out_avals: Sequence[Any]) -> KernelFunction:
    """``kernel``; where its results differ between shards, as one ``shard_kernel_p``."""
    if not any(map(jax_compat.varying_axes, out_avals)):
        return kernel
    return lambda *arrays: tuple(shard_kernel_p.bind(*arrays, kernel=kernel, out_avals=tuple(out_avals)))


@shard_kernel_p.def_abstract_eval
def _shard_kernel_avals(*_: Any, kernel: KernelFunction, out_avals: Sequence[Any]) -> Sequence[Any]:
    return out_avals


def _lower_shard_kernel(ctx: Any, *operands: Any, kernel: KernelFunction, out_avals: Sequence[Any]) -> Any:
    avals = [jax.core.ShapedArray(a.shape, a.dtype, a.weak_type) for a in ctx.avals_in]
    with jax_compat.same_in_all_shards():
        return mlir.lower_fun(lambda *arrays: list(kernel(*arrays)))(ctx.replace(avals_in=avals), *operands)


mlir.register_lowering(shard_kernel_p, _lower_shard_kernel, cacheable=False)


@dataclass(frozen=True, slots=True)
class Part:
    """Some kernels of a plan, in order. They read only each other's results and ``inputs``, values of the
    graph."""

    kernels: tuple[Kernel, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]


def make_runner(
    lowered: Lowered, plan: FusionPlan, *, platform: str, interpret: bool = False, part: Part | None = None
) -> FlatFunction:
    """A function of the constants followed by the flat arguments that returns flat results; with ``part``, a
    function of the part's inputs that returns its outputs.

    If the plan's device is of another platform than ``platform`` (``cpu``, ``gpu``, ``tpu``), XLA compiles
    every group, with the same results. ``interpret=True`` runs Pallas' interpreter on any platform instead.
    """
    native = plan.device.platform == platform or interpret
    part = part or Part(plan.kernels, lowered.graph.inputs, lowered.outputs)
    barriers = apart(lowered.graph, part.kernels, plan.device) if native else [()] * len(part.kernels)
    steps = []
    for kernel, behind in zip(part.kernels, barriers, strict=True):
        spec = kernel.spec if native else spec_of_xla(kernel.spec)
        reads = live_ins(spec)
        writes = tuple(a.value for a in spec.writes)
        emitted = functools.partial(emit, interpret=interpret)
        kernel_of = emitted(spec, lowered)
        if spec.capabilities.emits_kernels:
            kernel_of = partitioned(kernel_of, spec, lowered, emitted)
            kernel_of = _in_shard(kernel_of, [lowered.avals[v] for v in writes])
        steps.append((kernel_of, reads, writes, behind))
    release = _last_readers(part.outputs, [reads for _, reads, _, _ in steps])

    def run(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(part.inputs, flat, strict=True))
        last: dict[int, Any] = {}
        for (kernel, reads, writes, behind), dead in zip(steps, release, strict=True):
            own = read_apart(env, behind, last)
            arrays = [own[v] if v in own else env[v] for v in reads]
            env.update(zip(writes, kernel(*arrays), strict=True))
            for v in dead:
                del env[v]
                last.pop(v, None)
        return [literal_array(o) if isinstance(o, Literal) else env[o] for o in part.outputs]

    return run


def spec_of_xla(spec: KernelSpec) -> KernelSpec:
    """The same group without a schedule, for XLA to compile."""
    return replace(spec, axes=(), backend="xla", passes=(), keeps=False, tiles_visited=())


def _last_readers(outputs: Sequence[Operand], reads: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each step, the values that no later step reads, so that eager evaluation can free them."""
    kept = {o for o in outputs if not isinstance(o, Literal)}
    release: list[tuple[int, ...]] = []
    for values in reversed(reads):
        release.append(tuple([v for v in values if v not in kept]))
        kept.update(values)
    return release[::-1]
