"""Format plans as text: a table of kernels in 80 columns, a summary, and figures with units."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from costmodel.graph import Graph, without_copies
from costmodel.kernel import AxisRole, Cost, KernelSpec
from fuseplan.memory.allocation import arena_bytes
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.plan.notes import all_notes
from fuseplan.plan.options import ALL_FEATURES
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.heuristics import unfused
from fuseplan.support.format import (
    TIED,
    bytes_text,
    columns,
    counted,
    cut,
    factor_text,
    seconds_text,
    time_text,
    wrapped,
)
from fuseplan.verify.plan import plan_buffers

_MAX_LINES = 40
"""The most kernels that are listed one by one (about a screen); a longer plan is grouped by equal kernels."""


def makes(graph: Graph, spec: KernelSpec) -> str:
    """The largest array that a kernel writes and the number of others, in jaxpr notation: ``f32[128,256]
    +1``."""
    written = [graph.values[a.value] for a in spec.writes]
    if not written:
        return "-"
    return str(max(written, key=lambda v: v.nbytes)) + (f" +{len(written) - 1}" if len(written) > 1 else "")


def grid(spec: KernelSpec) -> str:
    """The number of tiles along each parallel axis with several, the outermost first, as ``12×128``; of a
    loop nest, along each loop. ``XLA`` for a group that XLA compiles, with the number of kernels if XLA makes
    several."""
    if not spec.axes:
        made = spec.compiled
        return "XLA" if made is None or made.launches == 1 else f"XLA, {made.launches}×"
    counts = [a.n_tiles for a in spec.axes] if spec.capabilities.loop_nest else spec.grid
    return "×".join(str(n) for n in counts if n > 1) or "1"


def tile(spec: KernelSpec) -> str:
    """The tile of each axis, with its size if it is iterated over in a loop (``32 of 1024``), and the number
    of passes if there are several."""
    parts = []
    for axis in spec.axes:
        looped = spec.capabilities.loop_nest and axis.n_tiles > 1
        if axis.role == AxisRole.STREAMED or looped:
            parts.append(f"{axis.tile} of {axis.size}")
        elif axis.size > 1:
            parts.append(str(min(axis.tile, axis.size)))
    return " × ".join(parts) + ("" if spec.capabilities.loop_nest else _in_passes(spec))


def _in_passes(spec: KernelSpec) -> str:
    passes = sum(bool(nodes) for nodes in spec.passes)
    return f", in {passes} passes" if passes > 1 else ""


def skipped(spec: KernelSpec) -> str:
    """The number of tiles that masks leave out of a kernel's passes, as ``28 of 64``; empty if none."""
    every = math.prod(a.n_tiles for a in spec.axes)
    if not spec.tiles_visited:
        return ""
    visits = [n for n, nodes in zip(spec.tiles_visited, spec.passes, strict=True) if nodes]
    total = every * len(visits)
    return f"{total - sum(visits):,} of {total:,}" if sum(visits) < total else ""


def loops_line(spec: KernelSpec) -> str:
    """Describe a loop nest: ``loops over tiles of 256 of 2048 × 256 of 2048, 28 of 64 skipped``."""
    cut = " × ".join(f"{a.tile} of {a.size}" for a in spec.axes if a.n_tiles > 1)
    left_out = skipped(spec)
    passes = _in_passes(spec)
    return (
        f"loops over tiles of {cut}{passes}"
        + (" that keep products" if spec.keeps and passes else "")
        + (f", {left_out} skipped" if left_out else "")
    )


def parts_text(cost: Cost) -> str:
    """The parts of a kernel's time, the largest first: ``memory 6.99 + launch 1.00 µs``."""
    parts = sorted(cost.parts_ps.items(), key=lambda part: -part[1])
    return " + ".join(f"{name} {time_text(ps / 1e6)}" for name, ps in parts) + " µs" if parts else "free"


def status_text(plan: FusionPlan) -> str:
    """``proven optimal``, ``at most 1.03 times the bound of 984 µs``, ``no bound``; the first two end in
    ``(as rewritten)`` or ``(as traced)`` if the bound holds for that form of the program alone."""
    scope = f" ({plan.stats.bound_of})" if plan.stats.bound_of else ""
    if plan.status == "OPTIMAL":
        return f"proven optimal{scope}"
    if plan.gap is None or not plan.bound_us:
        return "no bound"
    return f"at most {factor_text(1 + plan.gap)} times the bound of {time_text(plan.bound_us)} µs{scope}"


def bound_lines(plans: Iterable[tuple[str, FusionPlan]]) -> list[str]:
    """The lines below a table of named plans: one for each plan above its bound, or whose bound holds for one
    form of the program alone."""
    return [
        f"{name}: {status_text(plan)}"
        for name, plan in plans
        if plan.bound_us and (plan.status != "OPTIMAL" or plan.stats.bound_of)
    ]


def bound_text(status: str, gap: float | None, bound_us: float | None = None) -> str:
    """``proven``, ``984 (1.03×)``, or ``1.03×`` without ``bound_us``: as ``status_text``, for the cell of a
    table; empty where there is no bound."""
    if status == "OPTIMAL":
        return "proven"
    if gap is None or math.isinf(gap):
        return ""
    factor = f"{factor_text(1 + gap)}×"
    return factor if bound_us is None else f"{time_text(bound_us)} ({factor})"


def unfused_plan(plan: FusionPlan) -> FusionPlan:
    """The plan of the same program and device with each operation, without copies, in a kernel of its own."""
    graph = without_copies(plan.graph)
    # Kernels of one operation are the same without what is for several, which takes longer to find.
    of_one = replace(ALL_FEATURES, loop_nests=False, xla_loops=False, streaming=False)
    grouping = unfused(graph, Scheduler(graph, plan.device, features=of_one))
    return FusionPlan(graph, plan.device, "unfused", grouping.kernels, stats=grouping.stats)


def summary(plan: FusionPlan) -> str:
    """See ``Plan.summary``."""
    apart = unfused_plan(plan)
    count = sum(1 for k in plan.kernels if k.cost.time_ps)
    free = len(plan.kernels) - count
    lines = [
        f"{counted(len(plan.graph.nodes), 'operation')} in {counted(count, 'kernel')}"
        + (f" and {counted(free, 'renaming')}" if free else "")
        + f", planned by {plan.planner} for {plan.device.name}",
        f"  time     {time_text(plan.objective_us)} µs, unfused {time_text(apart.objective_us)} µs"
        + _faster(apart.objective_ps, plan.objective_ps),
        f"  HBM      {bytes_text(plan.hbm_bytes)}, unfused {bytes_text(apart.hbm_bytes)}",
        f"  memory   {_memory(plan, apart)}",
        f"  proof    {status_text(plan)}",
    ]
    if plan.recomputed:
        lines.append(
            f"  again    {counted(len(plan.recomputed), 'operation')} computed once more for other readers"
        )
    if plan.stats.seconds:
        shown = ((name, s) for name, s in plan.stats.seconds if s >= 0.001)  # less rounds to 0 ms
        stages = [f"{name} {seconds_text(s)}".replace(" ", TIED) for name, s in shown]
        text = f"  planning {seconds_text(plan.planning_s)}" + (f": {', '.join(stages)}" if stages else "")
        if plan.stats.remembered:
            text += (
                f"; {plan.stats.remembered} of {counted(plan.stats.distinct_components, 'part')} remembered"
            )
        lines += wrapped(text, 80, " " * 11)
    for note in all_notes(plan):
        lines += wrapped(f"  note     {note}", 80, " " * 11)
    return "\n".join(lines)


def _memory(plan: FusionPlan, apart: FusionPlan) -> str:
    """``temporaries 210.8 MB at the peak, unfused 431.0 MB; arena 211.1 MB``."""
    peak, arena = bytes_text(plan.peak_bytes), bytes_text(arena_bytes(plan_buffers(plan)))
    text = f"temporaries {peak} at the peak, unfused {bytes_text(apart.peak_bytes)}"
    return text + (f"; arena {arena}" if arena != peak else "")


def _faster(before_ps: int, after_ps: int) -> str:
    return f" ({before_ps / after_ps:.2f}× faster)" if after_ps and before_ps > after_ps else ""


@dataclass(frozen=True, slots=True)
class Row:
    """Kernels that look alike: the first of them, and how many there are."""

    first: int
    kernel: Kernel
    count: int


def rows(plan: FusionPlan) -> list[Row]:
    """One row a kernel; in a plan of more than a screen, one row for all equal kernels."""
    if len(plan.kernels) <= _MAX_LINES:
        return [Row(i, k, 1) for i, k in enumerate(plan.kernels)]
    seen: dict[tuple[object, ...], list[int]] = {}
    for i, kernel in enumerate(plan.kernels):
        key = (
            kernel_name(plan.graph, kernel.spec.nodes),
            makes(plan.graph, kernel.spec),
            kernel.spec.axes,
            kernel.spec.backend,
            kernel.cost,
        )
        seen.setdefault(key, []).append(i)
    return [Row(members[0], plan.kernels[members[0]], len(members)) for members in seen.values()]


def kernel_table(plan: FusionPlan) -> str:
    """See ``Plan.__str__``."""
    head = (
        f"{plan.planner} plan for {plan.device.name}: {counted(len(plan.graph.nodes), 'operation')} in "
        f"{counted(len(plan.kernels), 'kernel')}, {time_text(plan.objective_us)} µs, {status_text(plan)}"
    )
    all_rows = rows(plan)
    shown = all_rows
    if len(all_rows) > _MAX_LINES:  # the costly ones, in their order
        kept = sorted(all_rows, key=lambda r: -r.count * r.kernel.cost.time_ps)[:_MAX_LINES]
        shown = sorted(kept, key=lambda r: r.first)
    grouped = any(r.count > 1 for r in all_rows)
    cells = [("", "kernel", *(("×",) if grouped else ()), "ops", "makes", "grid", "µs", "bound", "MB")]
    for row in shown:
        spec, cost = row.kernel.spec, row.kernel.cost
        mb = cost.hbm_bytes * row.count / 1e6
        cells.append(
            (
                str(row.first),
                kernel_name(plan.graph, spec.nodes),
                *((str(row.count),) if grouped else ()),
                str(len(spec.nodes)),
                makes(plan.graph, spec),
                cut(grid(spec), 9),
                time_text(cost.time_us * row.count),
                cost.bound_by,
                f"{mb:,.0f}" if mb >= 1000 else f"{mb:.1f}",
            )
        )
    numbers = (0, 2, 3, 6, 8) if grouped else (0, 2, 5, 7)
    lines = [*wrapped(head, 80, "  "), "", *columns(cells, right=numbers, limit=80)]
    if len(shown) < len(all_rows):
        hidden = [r for r in all_rows if r not in shown]
        rest = sum(r.count * r.kernel.cost.time_us for r in hidden)
        number = sum(r.count for r in hidden)
        lines.append(f"… and {number} cheaper kernels of {len(hidden)} kinds, {time_text(rest)} µs in all")
    for row in shown:
        if row.kernel.spec.capabilities.loop_nest:
            lines += wrapped(f"{row.first}: {loops_line(row.kernel.spec)}", 80, "   ")
        elif len(row.kernel.spec.passes) > 1:
            lines += wrapped(f"{row.first}: tiles of {tile(row.kernel.spec)}", 80, "   ")
    if grouped:
        lines.append("Equal kernels share a line: the number is the first one's, the costs are sums.")
    for note in all_notes(plan):
        lines += wrapped(f"note: {note}", 80, "      ")
    return "\n".join(lines)
