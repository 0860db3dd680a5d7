"""Skip the planning of programs for a CPU in which no tiled loop can gain.

On a CPU XLA regroups all operations that a plan leaves to it, so only tiled loops change the program that
runs. Tiled loops are always groups that were offered for their large intermediates
(``fuseplan.schedule.nests.offered``). The tests here are cheapest first: whether any large array is made,
whether one of them could stay out of memory (both in time linear in the program), and whether some region has
a loop nest that is cheaper than its operations one by one. The solver is asked only where a heuristic's plan
of such a region has a loop: the proof of a plan without loops changes nothing that runs.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered, lower
from fuseplan.frontend.trace import Flat, is_sharded
from fuseplan.passes.array_to_columns import by_columns, with_columns
from fuseplan.passes.chains_in_turn import in_turns
from fuseplan.passes.recompute_large import recompute
from fuseplan.passes.rewriting import may_rewrite
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.options import Options
from fuseplan.planners import has_fixed_kernels, is_built_in
from fuseplan.runtime.control_flow import bodies
from fuseplan.schedule.nests.cpu import CpuNests
from fuseplan.schedule.nests.regions import MAX_SIZE_RATIO, can_nest
from fuseplan.schedule.pricing import PriceBook
from fuseplan.schedule.scheduler import make_scheduler
from fuseplan.schedule.structure import Signatures
from fuseplan.search.grouping import decompose
from fuseplan.search.heuristics import best_first_groups, heuristic_groups
from fuseplan.settings import with_figures
from fuseplan.support.work import DIVISION, may_begin


def is_screened(options: Options) -> bool:
    """Whether a program without offers may be left unplanned under ``options``.

    With constraints or a registered planner, tiled loops may be made that are not offered; with ``strict``,
    planning may raise an error.
    """
    built_in = is_built_in(options.planner)
    return is_on_cpu(options.device) and built_in and options.constraints is None and not options.strict


def may_loop(flat: Flat, options: Options) -> bool:
    """Whether a call plans the program: not if no plan under ``options`` may have a tiled loop, nor with the
    solver if ``best_first``'s has none. Bodies of the program's loops and branches are not examined."""
    return not is_screened(options) or may_gain(with_large_arrays(flat, options), options)


def with_large_arrays(flat: Flat, options: Options) -> list[Lowered]:
    """The forms of the program that may be planned, the last as traced; none if in none of them a large array
    could stay out of memory."""
    if has_fixed_kernels(options.planner) or not options.features.loop_nests:
        return []
    min_bytes = options.device.least_large_bytes
    if not any(_bytes(a) >= min_bytes for eqn in flat.equations for a in eqn.out_avals):
        return []
    lowered = lower(flat)
    columns = by_columns(lowered, min_bytes)
    programs = [columns or lowered, *([lowered] if columns else [])]
    return programs if any(may_keep(program.graph, min_bytes) for program in programs) else []


def may_gain(programs: Sequence[Lowered], options: Options) -> bool:
    """Whether some region of ``programs``, forms of one program, has a loop nest that is cheaper than its
    operations, in the solver's case by a heuristic's plan."""
    if not programs:
        return False
    device = with_figures(options).device

    def gains(program: Lowered) -> bool:
        if options.planner == "solver":
            return _has_loop_by_heuristic(program, device, options)
        return CpuNests(program.graph, device, program).has_offers

    if any(map(gains, programs)):
        return True
    recomputing = None
    if options.features.recompute:
        recomputing = recompute(programs[0], options.device.least_large_bytes)
    return recomputing is not None and gains(recomputing)


def _has_loop_by_heuristic(program: Lowered, device: DeviceSpec, options: Options) -> bool:
    """Whether the plan of ``best_first`` has a tiled loop. Only the components that have an offer are
    planned."""
    graph, deadline_s = program.graph, options.deadline_s
    scheduler = make_scheduler(program, device, options.features)
    if not scheduler.offers:
        return False
    if deadline_s > 0 and not may_begin(DIVISION, len(graph.nodes), deadline_s):
        return True  # Planning does what there is time for.
    book = PriceBook(graph, scheduler)
    if deadline_s > 0:
        book.expires_at = time.monotonic() + deadline_s
    for space in decompose(graph, book, at_hubs=False).spaces:
        groups = heuristic_groups(space, best_first_groups) if space.offers else []
        if any(book.kernel(space.nodes(mask)).spec.capabilities.loop_nest for mask in groups):
            return True
    return False


def as_left_to_xla(flat: Flat, options: Options) -> Flat:
    """The program that XLA compiles where no tiled loop gains: on a CPU with large arrays of short rows as
    columns. The same object if that changes nothing."""
    return with_columns(flat) if _may_change(flat, options) else flat


def with_chains_in_turn(flat: Flat, options: Options) -> Flat:
    """The program that XLA compiles for one device where no tiled loop gains: on a CPU with a few of its
    independent chains of large arrays at a time. The same object if that changes nothing."""
    # One more than there are cores, so that none is idle while a chain ends.
    return in_turns(flat, options.device.core_count + 1) if _may_change(flat, options) else flat


def _may_change(flat: Flat, options: Options) -> bool:
    """Whether what is left to XLA may be another form of the program. Constraints are about kernels, of which
    there is none, and about memory, of which the other form needs less."""
    free = replace(options, constraints=None)
    return is_screened(free) and may_rewrite(free) and not is_sharded(flat)


def may_loop_anywhere(flat: Flat, options: Options) -> bool:
    """Whether ``may_loop`` holds for the program or for a body in it."""
    return may_loop(flat, options) or any(may_loop_anywhere(b, options) for b in bodies(flat.equations))


def runs_as_jax(plan: FusionPlan) -> bool:
    """Whether ``plan`` runs the same program as ``jax.jit``: it is for a CPU and has no tiled loop."""
    return is_on_cpu(plan.device) and not any(kernel.spec.capabilities.loop_nest for kernel in plan.kernels)


def has_same_loops(one: FusionPlan, other: FusionPlan) -> bool:
    """Whether the tiled loops of two plans are equal, wherever they stand in the programs."""
    return _loops(one) == _loops(other)


def _loops(plan: FusionPlan) -> Counter[Hashable]:
    signatures = Signatures(plan.graph)
    loops = [kernel.spec for kernel in plan.kernels if kernel.spec.capabilities.loop_nest]
    return Counter((signatures.text(spec.nodes), spec.axes) for spec in loops)


def is_on_cpu(device: DeviceSpec) -> bool:
    """Whether the device is a CPU, for which only tiled loops are emitted."""
    return not device.capabilities.emits_kernels and device.platform == "cpu"


def _bytes(aval: Any) -> int:
    # Random keys have no item size, and are small.
    return getattr(aval, "size", 0) * getattr(aval.dtype, "itemsize", 0) if hasattr(aval, "dtype") else 0


def may_keep(graph: Graph, min_bytes: int) -> bool:
    """Whether some group could make and consume an array that is larger than any array that it reads or
    writes. If False, no region is offered, in this graph or in one with rematerialised operations.

    Two lower bounds are computed for each array, in elements: of the largest array that a group reads to make
    it, and of the largest array that a group writes to consume it.
    """
    made = [v.size for v in graph.values if v.producer >= 0 and v.nbytes >= min_bytes]
    if not made:
        return False
    least = min(made) // MAX_SIZE_RATIO  # a region is connected by values of more elements than this
    sizes = [v.size for v in graph.values]
    can_loop = [can_nest(node) for node in graph.nodes]
    read: list[float] = [math.inf] * len(sizes)
    for node in graph.nodes:
        if can_loop[node.id]:
            needed = max((min(sizes[v], read[v]) for v in node.inputs), default=0)
            for v in node.outputs:
                read[v] = needed
    written: list[float] = [math.inf] * len(sizes)
    for node in reversed(graph.nodes):
        if not can_loop[node.id]:
            continue
        live = [v for v in node.outputs if graph.consumers[v] or v in graph.results]
        needed = max((min(sizes[v], written[v]) for v in live), default=0)
        for v in node.inputs:
            written[v] = min(written[v], needed)
    return any(size > max(read[v], written[v], least) for v, size in enumerate(sizes))
