"""What XLA really does: its own kernels, read from the program that it compiles.

The function is compiled for the device, and each kernel of the optimized program costs its launch, the
arrays that it reads and writes, and the operations that it computes. What XLA computes in several kernels
stands in each of them. Kernels that compute no operation, copies and steps of others, are counted with the
kernel that they serve: the plan moves and launches what XLA's program does, no more and no less. For a GPU
that is not there XLA chooses without its autotuner, which times kernels on the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from costmodel.device import DeviceSpec
from costmodel.graph import ORIGINAL, Graph, Item
from costmodel.kernel import Compiled
from costmodel.roofline import estimate
from fuseplan.frontend.lower import Lowered
from fuseplan.frontend.rewrite import Rewriter
from fuseplan.plan.fusion_plan import Kernel, PlanStats
from fuseplan.plan.notes import Note, NoteKind, note
from fuseplan.planners.hlo.attribution import Place, Placed, place_nodes
from fuseplan.planners.hlo.compiled import compiled_kernels
from fuseplan.planners.hlo.kernels import HloKernel
from fuseplan.schedule.layout import whole_array_spec
from fuseplan.search.grouping import Grouping, Stopwatch


def plan_program(lowered: Lowered, device: DeviceSpec) -> tuple[Lowered, Grouping]:
    """XLA's kernels for a program, with the program in which each computes its own operations.

    Raises:
        InvalidArgumentError: there is no compiler for ``device`` here.
        MissingCompilerError: it is part of the extra ``aot``, which is not installed.
    """
    watch = Stopwatch()
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
    stats = PlanStats(n, len(plan), len(plan), len(plan), tuple(watch.laps.items()))
    return program, Grouping(plan, notes=_notes(kernels, placed), stats=stats, is_ordered=True)


def _program(lowered: Lowered, placed: Placed) -> tuple[Lowered, dict[Place, list[int]]]:
    """The program with each node once a place, and the nodes of each place."""
    graph = lowered.graph
    rewriter = Rewriter(lowered)
    groups: dict[Place, list[int]] = {}

    def read(place: Place | None, v: int) -> Item:
        maker = graph.values[v].producer
        if maker < 0:
            return v, ORIGINAL
        return v, copy_of[maker, place if place in placed.places[maker] else placed.source[maker]]

    copy_of = {(n, place): k for n, several in enumerate(placed.places) for k, place in enumerate(several)}
    for n, several in enumerate(placed.places):
        for k, place in enumerate(several):
            groups.setdefault(place, []).append(rewriter.add(n, k, partial(read, place)))
    is_whole = len(rewriter.nodes) == len(graph.nodes)
    return (lowered if is_whole else rewriter.finish(partial(read, None))), groups


def _hosted(kernels: tuple[HloKernel, ...], placed: Placed, place: Place) -> Compiled:
    """What XLA launches and moves at a place, with all that is counted with it."""
    own = [kernel for kernel, host in zip(kernels, placed.hosts, strict=True) if host == place]
    return Compiled(
        len(own),
        sum(kernel.read_bytes for kernel in own),
        sum(kernel.write_bytes for kernel in own),
    )


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
