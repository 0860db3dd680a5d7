"""XLA's own fusion decisions, read from the program that XLA compiles for the device.

Each kernel of the optimized program costs its launch, the arrays that it reads and writes, and the operations
that it computes. An operation that XLA computes in several kernels occurs in each of them. Kernels that
compute no operation, such as copies, are charged to a kernel that they serve, so the plan has exactly the
launches and the traffic of XLA's program. For a GPU that is not present, XLA chooses without its autotuner,
which times kernels on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from costmodel.device import DeviceSpec
from costmodel.devices import DEVICES
from costmodel.graph import ORIGINAL, Graph, Item
from costmodel.kernel import Compiled
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import Rewriter
from fuseplan.frontend.trace import FlatFunction, evaluator, run_equations
from fuseplan.plan.fusion_plan import Kernel, PlanStats
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.planners.hlo.attribution import Place, Placed, place_nodes
from fuseplan.planners.hlo.kernels import HloKernel, read_kernels
from fuseplan.planners.hlo.module import SCOPE, read_module
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.search.grouping import Grouping
from fuseplan.support import jax_compat
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.work import StageTimer
from fuseplan.targets.compile_only import compile_for, is_installed, targets
from fuseplan.targets.detect import local_device, local_platform


def plan_program(lowered: Lowered, device: DeviceSpec) -> tuple[Lowered, Grouping]:
    """XLA's kernels for a program, with the program in which each kernel has its own copies of operations.

    Raises:
        InvalidArgumentError: there is no compiler for ``device`` here.
        MissingCompilerError: the compiler is part of the extra ``aot``, which is not installed.
    """
    watch = StageTimer()
    kernels = compiled_kernels(lowered, device)
    watch.lap("compile")
    placed = place_nodes(lowered.graph, kernels)
    program, groups = _program(lowered, placed)
    plan = tuple(
        _kernel(program.graph, device, tuple(nodes), _hosted(kernels, placed, place))
        for place, nodes in sorted(groups.items())
    )
    watch.lap("join")
    n = len(lowered.graph.nodes)
    stats = PlanStats(n, len(plan), len(plan), len(plan), tuple(watch.seconds.items()))
    return program, Grouping(plan, notes=_notes(kernels, placed), stats=stats, is_ordered=True)


def _program(lowered: Lowered, placed: Placed) -> tuple[Lowered, dict[Place, list[int]]]:
    """The program with a copy of each node for each of its places, and the nodes of each place."""
    graph = lowered.graph
    rewriter = Rewriter(lowered)
    groups: dict[Place, list[int]] = {}

    def read(place: Place | None, v: int) -> Item:
        producer = graph.values[v].producer
        if producer < 0:
            return v, ORIGINAL
        return v, copy_of[producer, place if place in placed.places[producer] else placed.source[producer]]

    copy_of = {(n, place): k for n, several in enumerate(placed.places) for k, place in enumerate(several)}
    for n, several in enumerate(placed.places):
        for k, place in enumerate(several):
            groups.setdefault(place, []).append(rewriter.add(n, k, partial(read, place)))
    is_whole = len(rewriter.nodes) == len(graph.nodes)
    return (lowered if is_whole else rewriter.finish(partial(read, None))), groups


def _hosted(kernels: tuple[HloKernel, ...], placed: Placed, place: Place) -> Compiled:
    """The launches and the traffic charged to a place."""
    own = [kernel for kernel, host in zip(kernels, placed.hosts, strict=True) if host == place]
    return Compiled(len(own), sum(k.read_bytes for k in own), sum(k.write_bytes for k in own))


def _kernel(graph: Graph, device: DeviceSpec, nodes: tuple[int, ...], compiled: Compiled) -> Kernel:
    spec = replace(whole_array_spec(graph, nodes), compiled=compiled)
    return Kernel(spec, estimate(graph, spec, device))


def _notes(kernels: tuple[HloKernel, ...], placed: Placed) -> tuple[Note, ...]:
    """The notes on the share of XLA's kernels that is matched with operations, and on the others."""
    if not kernels:
        return (note(NoteKind.XLA_NOTHING),)
    mapped = [kernel for kernel in kernels if kernel.touches]
    moved, of_mapped = (sum(kernel.moved_bytes for kernel in some) for some in (kernels, mapped))
    share = of_mapped / moved if moved else len(mapped) / len(kernels)
    found = [note(NoteKind.XLA_MATCHED, matched=len(mapped), count=len(kernels), percent=100 * share)]
    used = {place for several in placed.places for place in several}
    beside = sum((k, len(placed.places)) not in used for k in range(len(kernels)))
    if not used:
        found.append(note(NoteKind.XLA_UNCHARGED, moved_bytes=moved))
    elif beside:
        found.append(note(NoteKind.XLA_SERVANTS, count=beside))
    on_chip = sum(kernel.on_chip_bytes for kernel in kernels)
    if on_chip:
        found.append(note(NoteKind.XLA_ON_CHIP, on_chip_bytes=on_chip))
    return tuple(found)


def compiled_kernels(lowered: Lowered, device: DeviceSpec) -> tuple[HloKernel, ...]:
    """Compile a program by XLA for a device, and read its kernels.

    Raises:
        InvalidArgumentError: there is no compiler for the device here, or it cannot compile the program
            without the device, or the program is one shard's part of another.
        MissingCompilerError: the extra ``aot`` is not installed.
    """
    if any(jax_compat.varying_axes(a) for e in lowered.equations for a in (*e.in_avals, *e.out_avals)):
        raise InvalidArgumentError(
            "the planner 'xla' compiles whole programs, and this is a shard's part of one (jax.shard_map): "
            "plan the function without its collectives, or take another planner."
        )
    n_consts = len(lowered.consts)
    run = _labelled(lowered)
    avals = [lowered.avals[v] for v in lowered.graph.inputs[n_consts:]]
    # As under jax.jit, constants are part of the program.
    compiled = _compile(lambda *args: run(*lowered.consts, *args), avals, device)
    (module,) = compiled.runtime_executable().hlo_modules()
    return read_kernels(read_module(module.as_serialized_hlo_module_proto()))


def _labelled(lowered: Lowered) -> FlatFunction:
    """The program as a function of flat arrays, each equation in a named scope with its node's number."""

    def run(*flat: Any) -> list[Any]:
        values: dict[int, Any] = dict(zip(lowered.graph.inputs, flat, strict=True))
        for n, equation in enumerate(lowered.equations):
            with jax.named_scope(f"{SCOPE}{n}"):
                run_equations([equation], values)
        finish = evaluator((), tuple(values), lowered.outputs)
        return finish(*values.values())

    return run


def _compile(f: FlatFunction, avals: Sequence[Any], device: DeviceSpec) -> Any:
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    name = device.name.partition(":")[0]
    if _is_here(device, name):
        with jax.default_device(jax.devices(device.platform)[0]):
            return jax.jit(f).lower(*shapes).compile()
    if name not in targets():
        here = "the CPU" if local_platform() == "cpu" else f"the CPU, {local_device().name}"
        raise InvalidArgumentError(
            f"the planner 'xla' needs XLA's compiler for the device, and here is none for {name!r}: expected "
            f"{here}, or with the extra aot one of {', '.join(targets())}. Plan on the device itself, or "
            "take another planner."
        )
    try:
        return compile_for(f, *shapes, device=name)
    except RuntimeError as error:  # for example, side effects need the device
        raise InvalidArgumentError(
            f"the planner 'xla' compiles the function for {name!r}, which is not here: "
            f"{str(error).rstrip('.')}. Plan on the device itself, or take another planner."
        ) from error


def has_compiler(device: DeviceSpec) -> bool:
    """Whether XLA's compiler for the device is installed; it may still fail to start."""
    name = device.name.partition(":")[0]
    return _is_here(device, name) or (name in targets() and is_installed(name))


def _is_here(device: DeviceSpec, name: str) -> bool:
    """Whether JAX runs on the device. A device that is not in the table is taken to be the local one."""
    if device.platform == "cpu":
        return True
    return device.platform == local_platform() and (name not in DEVICES or name == local_device().name)
