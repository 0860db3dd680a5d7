"""Draw plans and studies as Matplotlib figures: rooflines, timelines, and a study's times.

Matplotlib is imported on use; it comes with the extra ``report``. Legends stand outside of the axes, and the
name of a kernel is written only where it lies over no dot, line or other name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from costmodel.kernel import BOUNDS
from fuseplan.memory.liveness import live_ranges, profile
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.columns import COLUMNS
from fuseplan.support.errors import FuseplanError, InvalidArgumentError
from fuseplan.support.format import bytes_text, time_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class MissingMatplotlibError(FuseplanError, ImportError):
    """Matplotlib, which draws figures, is not installed."""


def require_matplotlib() -> None:
    """Raise ``MissingMatplotlibError`` if Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlibError(
            f"expected Matplotlib, which draws figures, to be installed: {error}. "
            "Install it with pip install 'fuseplan[report]'"
        ) from None


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a figure."""

    ink: str
    faint: str
    line: str
    page: str
    bounds: Mapping[str, str]
    """By the bound of a kernel."""
    other: str
    """Of the bounds that have no colour."""

    def of(self, bound: str) -> str:
        """The colour of kernels with that bound."""
        return self.bounds.get(bound, self.other)


LIGHT = Palette(
    ink="#22252a",
    faint="#62676f",
    line="#dcdcd6",
    page="#ffffff",
    bounds=MappingProxyType(
        {
            "memory": "#2f6fb2",
            "cache": "#1f8a7a",
            "matrix": "#c46a17",
            "vector": "#8153ab",
            "launch": "#8b8f96",
            "latency": "#7fa8d1",
        }
    ),
    other="#a8854f",
)
"""The colours of the figures of ``Plan``, on white."""


# --- rooflines -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """A kernel in a roofline: flops per HBM byte, attained flops per second, and its time."""

    name: str
    intensity: float
    flops_per_s: float
    time_us: float
    bound_by: str


def points_of(plan: FusionPlan) -> list[Point]:
    """The kernels of a plan that compute and move anything, in order."""
    return [
        _point(plan, kernel)
        for kernel in plan.kernels
        if kernel.cost.flops.total and kernel.cost.hbm_bytes and kernel.cost.time_ps
    ]


def _point(plan: FusionPlan, kernel: Kernel) -> Point:
    cost, name = kernel.cost, kernel_name(plan.graph, kernel.spec.nodes)
    flops = cost.flops.total
    return Point(name, flops / cost.hbm_bytes, flops * 1e12 / cost.time_ps, cost.time_us, cost.bound_by)


def roofline_figure(plans: Sequence[FusionPlan], palette: Palette = LIGHT) -> Figure:
    """Draw attained flops per second over arithmetic intensity, each kernel a dot whose area grows with its
    time: those of the last plan in colour, those of the others hollow. See ``Plan.roofline_figure``."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    device = plans[-1].device
    points = [points_of(plan) for plan in plans]
    everything = [p for of_plan in points for p in of_plan]
    dtype = main_dtype(plans[-1])
    peak, vector, slope = device.matrix_rate(dtype), device.vector_flops_per_s, device.hbm_bytes_per_s
    ridge = peak / slope
    low = min((p.intensity for p in everything), default=ridge / 100) / 2
    high = max(max((p.intensity for p in everything), default=ridge), ridge) * 2
    bottom = min((p.flops_per_s for p in everything), default=low * slope) / 3
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = _axes(figure.add_subplot(), palette)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, peak * 2)
    for rate, name, style in ((peak, f"matrix units, {dtype}", "-"), (vector, "vector units", ":")):
        corners = [low, max(rate / slope, low), high]
        roof = [min(low * slope, rate), rate, rate]
        label = f"{name}: {si(rate)}flop/s"
        axes.plot(corners, roof, style, color=palette.ink, linewidth=1.2, label=label)
    axes.plot([], [], " ", label=f"HBM: {si(slope)}B/s")  # the slope that both roofs share
    longest = max((p.time_us for p in everything), default=1.0)

    def dots(points: Sequence[Point], **style: Any) -> None:
        axes.scatter(
            [p.intensity for p in points],
            [p.flops_per_s for p in points],
            s=[_area(p, longest) for p in points],
            **style,
        )

    for plan, hollow in zip(plans[:-1], points[:-1], strict=True):
        dots(hollow, facecolors="none", edgecolors=palette.faint, linewidths=1, label=plan.planner)
    for bound in dict.fromkeys((*BOUNDS, *(p.bound_by for p in points[-1]))):
        own = [p for p in points[-1] if p.bound_by == bound]
        if own:
            dots(
                own, color=palette.of(bound), edgecolors=palette.page, linewidths=0.8, alpha=0.85,
                label=f"bound by {bound}",
            )  # fmt: skip
    axes.set_xlabel("arithmetic intensity, flops per HBM byte", color=palette.ink, fontsize=10)
    axes.set_ylabel("attained flop/s (modelled)", color=palette.ink, fontsize=10)
    legend = figure.legend(
        loc="outside upper left", ncols=3, fontsize=8, frameon=False, labelcolor=palette.ink
    )
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_sizes([30])  # the area of a dot says nothing in the legend
    _name_dots(figure, axes, points, longest, palette)
    return figure


def _axes(axes: Any, palette: Palette) -> Any:
    """Axes with faint lines on the left and below, on a transparent ground."""
    axes.figure.patch.set_facecolor(palette.page)
    axes.patch.set_alpha(0)
    axes.tick_params(which="both", colors=palette.ink, labelsize=9)
    axes.grid(which="major", color=palette.line, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(palette.faint)
    return axes


def _area(point: Point, longest_us: float) -> float:
    """The area of a dot, in points squared: it grows with the time from a visible minimum."""
    return 14 + 320 * point.time_us / longest_us


_NAMED = 6
"""The most kernels whose names are written beside their dots: the costliest."""


def _name_dots(
    figure: Figure, axes: Any, points: Sequence[Sequence[Point]], longest_us: float, palette: Palette
) -> None:
    """Write the names of the costliest kernels of the last plan beside their dots, where there is room."""
    figure.draw_without_rendering()  # settles the layout, in which texts are measured
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg has one
    pixels = figure.dpi / 72
    shown = [p for of_plan in points for p in of_plan]
    if not shown:
        return
    centres = axes.transData.transform([(p.intensity, p.flops_per_s) for p in shown])
    radii = np.array([math.sqrt(_area(p, longest_us)) / 2 + 1 for p in shown]) * pixels
    taken = _Taken(centres, radii, np.concatenate([_line_pixels(axes, line) for line in axes.lines]))
    inside = axes.get_window_extent(renderer)
    first = len(shown) - len(points[-1])
    named: set[tuple[float, float]] = set()
    order = sorted(range(first, len(shown)), key=lambda i: -shown[i].time_us)
    for i in order:
        point = shown[i]
        key = (round(centres[i][0] / 4), round(centres[i][1] / 4))
        if key in named:  # its dot lies over a costlier one
            continue
        if len(named) == _NAMED:
            break
        named.add(key)
        label = axes.annotate(
            point.name, (point.intensity, point.flops_per_s), (0, 0), textcoords="offset points",
            fontsize=8, color=palette.ink, ha="center", va="center", annotation_clip=False,
        )  # fmt: skip
        size = label.get_window_extent(renderer)
        for x, y, is_near in _places(centres[i], radii[i], size.width, size.height, pixels):
            box = (x - size.width / 2, y - size.height / 2, x + size.width / 2, y + size.height / 2)
            fits = box[0] >= inside.x0 and box[1] >= inside.y0 and box[2] <= inside.x1 and box[3] <= inside.y1
            leader = np.linspace(centres[i], (x, y), 0 if is_near else 40)
            if fits and taken.is_free(box) and not any(_is_in(leader, other) for other in taken.boxes):
                taken.boxes.append(box)
                taken.lines = np.concatenate([taken.lines, leader])
                offset = ((x - centres[i][0]) / pixels, (y - centres[i][1]) / pixels)
                label.set_position(offset)
                if not is_near:
                    axes.annotate(
                        "", (point.intensity, point.flops_per_s), offset, textcoords="offset points",
                        arrowprops=_leader(palette, radii[i] / pixels), zorder=1.5,
                    )  # fmt: skip
                break
        else:
            label.remove()


def _line_pixels(axes: Any, line: Any) -> Any:
    """Points along a line, a few pixels apart."""
    corners = axes.transData.transform(line.get_xydata()) if len(line.get_xdata()) else np.zeros((0, 2))
    parts = [np.linspace(a, b, max(int(np.hypot(*(b - a)) / 3), 2)) for a, b in pairwise(corners)]
    return np.concatenate(parts) if parts else np.zeros((0, 2))


Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""


@dataclass(slots=True)
class _Taken:
    """The parts of the axes that no name may lie over: dots, points of lines, and other names."""

    centres: Any
    radii: Any
    lines: Any
    boxes: list[Box]

    def __init__(self, centres: Any, radii: Any, lines: Any) -> None:
        self.centres, self.radii, self.lines, self.boxes = centres, radii, lines, []

    def is_free(self, box: Box) -> bool:
        """Whether a name may stand in ``box``."""
        left, bottom, right, top = box
        nearest = np.clip(self.centres, (left, bottom), (right, top))
        if (np.hypot(*(nearest - self.centres).T) <= self.radii + 1).any():
            return False
        if _is_in(self.lines, box):
            return False
        return all(right < b[0] or left > b[2] or top < b[1] or bottom > b[3] for b in self.boxes)


def _is_in(points: Any, box: Box) -> bool:
    """Whether any of the points lies in the box."""
    left, bottom, right, top = box
    x, y = points.T
    return bool(((x >= left) & (x <= right) & (y >= bottom) & (y <= top)).any())


def _leader(palette: Palette, radius: float) -> dict[str, Any]:
    """A line from the name of a kernel to its dot, of that radius in points."""
    return {
        "arrowstyle": "-", "color": palette.faint, "linewidth": 0.6, "shrinkA": 5, "shrinkB": radius,
    }  # fmt: skip


def _places(
    centre: Any, radius: float, width: float, height: float, pixels: float
) -> Iterator[tuple[float, float, bool]]:
    """Centres for a text of that size around a dot, the nearest first, and whether each is beside the dot."""
    for ring, gap in enumerate((3 * pixels, 12 * pixels, 22 * pixels, 34 * pixels)):
        dx, dy = radius + gap + width / 2, radius + gap + height / 2
        for sx, sy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            diagonal = 0.75 if sx and sy else 1.0
            yield centre[0] + sx * dx * diagonal, centre[1] + sy * dy * diagonal, not ring


def main_dtype(plan: FusionPlan) -> str:
    """The dtype of the first operand in most of the contraction flops."""
    flops = Counter[str]()
    for node in plan.graph.nodes:
        if node.flops.matrix:
            flops[plan.graph.values[node.inputs[0]].dtype] += node.flops.matrix
    return max(flops, key=lambda d: flops[d]) if flops else "float32"


def si(rate: float) -> str:
    """A rate with the prefix of its unit: ``67 T`` for 67e12."""
    power = min(int(math.log10(rate) // 3), 5) if rate >= 1 else 0
    return f"{rate / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"


# --- timelines -------------------------------------------------------------------------------


def timeline_figure(plan: FusionPlan, palette: Palette = LIGHT) -> Figure:
    """Draw the modelled schedule: each kernel as wide as its time, above the bytes of live temporaries. See
    ``Plan.timeline_figure``."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times = [kernel.cost.time_us for kernel in plan.kernels]
    starts = [0.0, *accumulate(times)]
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.4))
    _axes(top, palette)
    _axes(below, palette)
    for bound in dict.fromkeys((*BOUNDS, *(k.cost.bound_by for k in plan.kernels))):
        own = [k for k, kernel in enumerate(plan.kernels) if kernel.cost.bound_by == bound and times[k]]
        if own:
            top.broken_barh(
                [(starts[k], times[k]) for k in own], (0, 1), facecolors=palette.of(bound),
                edgecolors=palette.page, linewidth=0.5, label=f"bound by {bound}",
            )  # fmt: skip
    top.set_ylim(0, 1)
    top.set_yticks([])
    top.grid(visible=False)
    top.spines["left"].set_visible(False)
    live = profile(live_ranges(plan.graph, plan.kernels), range(len(plan.kernels)))
    unit, scale = _bytes_unit(max(live, default=0))
    timed = [k for k, time_us in enumerate(times) if time_us]
    edges = [*(starts[k] for k in timed), starts[-1]]
    levels = [*(live[k] / scale for k in timed), 0.0]
    below.fill_between(edges, levels, step="post", color=palette.faint, alpha=0.3, linewidth=0)
    below.step(edges, levels, where="post", color=palette.ink, linewidth=1)
    below.set_ylim(0, max(max(levels), 1e-9) * 1.1)
    below.set_xlim(0, max(starts[-1], 1e-9))
    below.set_ylabel(f"live temporaries, {unit}", color=palette.ink, fontsize=9)
    below.set_xlabel("modelled time, µs", color=palette.ink, fontsize=10)
    title = f"{plan.planner} on {plan.device.name}: {len(plan.kernels)} kernels, "
    title += f"{time_text(plan.objective_us)} µs, temporaries {bytes_text(plan.peak_bytes)} at the peak"
    figure.suptitle(title, fontsize=10, color=palette.ink)
    handles, labels = top.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False,
            labelcolor=palette.ink,
        )  # fmt: skip
    _name_bars(figure, top, plan, starts)
    return figure


def _bytes_unit(most: int) -> tuple[str, float]:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= scale:
            return unit, scale
    return "B", 1.0


def _name_bars(figure: Figure, axes: Any, plan: FusionPlan, starts: Sequence[float]) -> None:
    """Write the name of a kernel into its bar where it fits, along the bar or across it."""
    figure.draw_without_rendering()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg has one
    height = axes.get_window_extent(renderer).height
    edges = axes.transData.transform([(x, 0) for x in starts])[:, 0]
    for k in range(len(plan.kernels)):
        room = edges[k + 1] - edges[k]
        if room < 12:  # of no use for any name: a line of text is as high
            continue
        name = kernel_name(plan.graph, plan.kernels[k].spec.nodes)
        text = axes.text(
            (starts[k] + starts[k + 1]) / 2, 0.5, name, fontsize=8, color="white", ha="center", va="center"
        )
        size = text.get_window_extent(renderer)
        if size.width + 4 <= room:
            continue
        if size.height + 2 <= room and size.width + 4 <= height:
            text.set_rotation(90)
        else:
            text.remove()


# --- studies ---------------------------------------------------------------------------------

_MARKS = "osD^v<>PX*"
_MOST = 16.0
"""Plans that take longer are drawn at the edge."""
AS_FAST = 1.001
"""Plans within a thousandth are as fast."""


def study_figure(frame: pd.DataFrame, baseline: str = "solver") -> Figure:
    """Draw the times of a study: a panel for each device and dtype, a line for each workload, and a mark for
    each planner at its modelled time over that of the ``baseline``.

    A mark left of 1 is a plan that is faster. A hollow mark is the planner's plan of the program as traced,
    where rewriting gains anything. Times of more than sixteen times the baseline's are drawn at the edge.

    Args:
        frame: a frame of ``fuseplan.study``.
        baseline: the planner that times are relative to.

    Raises:
        InvalidArgumentError: the frame has not the columns of a study, or no plan of the baseline.
        MissingMatplotlibError: Matplotlib is not installed (the extra ``report``).

    Example:
        >>> import fuseplan
        >>> frame = fuseplan.study(["softmax"], ["h200"], ["greedy", "solver"])
        >>> [axes.get_title() for axes in fuseplan.study_figure(frame).axes]
        ['h200, float32']
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    if missing := [c.name for c in COLUMNS["study"] if c.name not in frame]:
        raise InvalidArgumentError(
            f"expected a frame of fuseplan.study, got one without {', '.join(missing)}"
        )
    frame = with_ratios(frame, baseline).dropna(subset=["over_baseline"])
    if frame.empty:
        raise InvalidArgumentError(f"expected plans of the baseline {baseline!r} in the study, got none")
    parts = [part for _, part in frame.groupby(["device", "dtype"], sort=False)]
    workloads = list(dict.fromkeys(frame.workload))[::-1]
    place = {name: i for i, name in enumerate(workloads)}
    planners = [planner for planner in dict.fromkeys(frame.planner) if planner != baseline]
    size = (2.2 + 2.6 * len(parts), 1.4 + 0.2 * len(workloads))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(parts), sharey=True, squeeze=False)
    colours = colormaps["tab10"]
    for axis, part in zip(axes[0], parts, strict=True):
        for i, planner in enumerate(planners):
            own = part[part.planner == planner]
            moved, colour = own[own.rewriting > AS_FAST], colours(i % 10)
            axis.scatter(
                moved.traced_over_baseline.clip(upper=_MOST), [place[name] for name in moved.workload], s=16,
                linewidths=0.6, marker=_MARKS[i % len(_MARKS)], facecolors="none", edgecolors=[colour],
            )  # fmt: skip
            axis.scatter(
                own.over_baseline.clip(upper=_MOST), [place[name] for name in own.workload], s=16, alpha=0.8,
                linewidths=0, marker=_MARKS[i % len(_MARKS)], color=colour, label=planner,
            )  # fmt: skip
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlim(right=_MOST * 1.1)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(", ".join(filter(None, (part.device.iloc[0], part.dtype.iloc[0]))), fontsize=9)
        axis.grid(axis="y", linewidth=0.3)
        axis.tick_params(labelsize=7)
    axes[0][0].set_yticks(range(len(workloads)), workloads, fontsize=7)
    axes[0][0].set_ylim(-0.8, len(workloads) - 0.2)
    figure.supxlabel(
        f"modelled time over the {baseline}'s plan (at most {_MOST:g} are drawn; hollow: as traced)",
        fontsize=8,
    )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    return figure


def with_ratios(frame: pd.DataFrame, baseline: str = "solver") -> pd.DataFrame:
    """A study's frame with three more columns: ``over_baseline``, the modelled time over that of the
    baseline's plan, both with the same rewrites; ``rewriting``, the time of the planner's plan of the program
    as traced over its time; and ``traced_over_baseline``, their product."""
    key = ["workload", "device", "dtype"]
    base = frame[frame.planner == baseline].set_index(key).time_us.to_dict()
    found = [base.get(row, math.nan) for row in frame[key].itertuples(index=False, name=None)]
    frame = frame.assign(over_baseline=frame.time_us / np.array(found, dtype=float))
    frame["rewriting"] = frame.unrewritten_us / frame.time_us
    frame["traced_over_baseline"] = frame.over_baseline * frame.rewriting
    return frame
