"""Draw the figures of the page as inline SVG in the page's colours: timelines of kernels, and rooflines.

The rooflines need Matplotlib (the extra ``report``).
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from costmodel.kernel import BOUNDS
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.text import parts_text
from fuseplan.support.format import time_text

_STRIP_WIDTH, _STRIP_HEIGHT = 1000.0, 34.0
_NARROWEST = 0.6
"""The least width of a bar with a gap after it; narrower bars touch their neighbours."""


def strip(plan: FusionPlan, longest_ps: int) -> dict[str, str]:
    """Draw the kernels of ``plan`` in order, each as wide as its modelled time, where ``longest_ps`` fills
    the width. The hatched start of a bar is its launch. Returns the label and the SVG."""
    scale = _STRIP_WIDTH / longest_ps if longest_ps else 0.0
    bars, x = [], 0.0
    for k, kernel in enumerate(plan.kernels):
        width = kernel.cost.time_ps * scale
        if width:
            bars.append(_bar(plan, k, kernel, x, width, scale))
            x += width
    label = f"{plan.planner}: {len(plan.kernels)} kernels, {time_text(plan.objective_us)} µs"
    text = escape(f"{label}. {_shares(plan)}", quote=True)
    svg = (
        f'<svg class="strip" role="img" aria-label="{text}" '
        f'viewBox="0 0 {_STRIP_WIDTH:g} {_STRIP_HEIGHT:g}" preserveAspectRatio="none">{"".join(bars)}</svg>'
    )
    return {"label": label, "svg": svg}


def _bar(plan: FusionPlan, k: int, kernel: Kernel, x: float, width: float, scale: float) -> str:
    cost = kernel.cost
    name = kernel_name(plan.graph, kernel.spec.nodes)
    ops = len(kernel.spec.nodes)
    title = escape(f"{k}: {name} ({ops} ops), {time_text(cost.time_us)} µs: {parts_text(cost)}")
    gap = min(1.2, width / 4) if width > _NARROWEST else 0.0
    launch = min(cost.launch_ps * scale, width) if cost.bound_by != "launch" else 0.0
    rect = f'<rect y="0" height="{_STRIP_HEIGHT:g}" class="{cost.bound_by}"'
    body = f'{rect} x="{x:.2f}" width="{max(width - gap, 0.1):.2f}"/>'
    if launch > gap:
        veil = f'<rect y="0" height="{_STRIP_HEIGHT:g}" class="veil"'
        body += f'{veil} x="{x:.2f}" width="{launch - gap / 2:.2f}"/>'
    return f"<g><title>{title}</title>{body}</g>"


def _shares(plan: FusionPlan) -> str:
    """The shares of the plan's time by the bound of its kernels, in words."""
    total = plan.objective_ps
    parts = []
    for bound in BOUNDS:
        ps = sum(k.cost.time_ps for k in plan.kernels if k.cost.bound_by == bound)
        if ps:
            parts.append(f"{100 * ps / total:.0f} % of it bound by {bound}")
    return ", ".join(parts)


_VARIABLES = "ink faint line page memory cache matrix vector launch latency steps"
_COLOUR = {name: f"#0101{i:02x}" for i, name in enumerate(_VARIABLES.split(), 1)}
"""Matplotlib writes colours as numbers; these are placeholders for the page's variables, which follow the
reader's theme."""
_INK, _FAINT, _LINE, _PAGE = (_COLOUR[name] for name in ("ink", "faint", "line", "page"))
_RESOURCES = ("memory", "cache", "matrix", "vector")
"""The bounds that a roofline shows."""


def roofline(plans: Sequence[FusionPlan], salt: str) -> str | None:
    """Draw attained flops per second over arithmetic intensity, each kernel a dot whose area grows with its
    time: those of the last plan in colour, those of the first hollow. ``salt`` makes ids differ between the
    figures of a page. None if Matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return None
    device = plans[-1].device
    points = [[_point(k) for k in plan.kernels if k.cost.flops.total and k.cost.hbm_bytes] for plan in plans]
    everything = [p for plan in points for p in plan]
    if not everything:
        return ""
    dtype = _main_dtype(plans[-1])
    peak, vector, slope = device.matrix_rate(dtype), device.vector_flops_per_s, device.hbm_bytes_per_s
    low = min(p.intensity for p in everything) / 2
    high = max(max(p.intensity for p in everything), peak / slope) * 2
    bottom = min(p.flops_per_s for p in everything) / 3
    longest = max(p.time_us for p in everything)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure = Figure(figsize=(7.2, 4.2))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.09, 0.12, 0.89, 0.86))
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(bottom, peak * 3)
        for rate, name, style in ((peak, f"matrix units, {dtype}", "-"), (vector, "vector units", ":")):
            ridge = rate / slope
            roof = [min(low * slope, rate), rate, rate]
            axes.plot([low, max(ridge, low), high], roof, style, color=_INK, lw=1.2)
            axes.annotate(
                f"{name}: {_si(rate)}flop/s", (high, rate), (-4, 4), textcoords="offset points", color=_INK,
                fontsize=9, ha="right",
            )  # fmt: skip
        axes.annotate(
            f"HBM: {_si(slope)}B/s", (0.02, 0.02), xycoords="axes fraction", color=_INK, fontsize=9
        )  # fmt: skip

        def dots(points: Sequence[_Point], **style: Any) -> None:
            # The area of a dot, in points squared, grows with the time from a visible minimum.
            areas = [14 + 320 * p.time_us / longest for p in points]
            axes.scatter([p.intensity for p in points], [p.flops_per_s for p in points], s=areas, **style)

        if len(points) > 1:
            dots(points[0], facecolors="none", edgecolors=_FAINT, linewidths=1)
        colours = [_COLOUR.get(p.bound_by, _COLOUR["steps"]) for p in points[-1]]
        dots(points[-1], c=colours, edgecolors=_PAGE, linewidths=0.8, alpha=0.85)
        axes.set_xlabel("arithmetic intensity, flops per HBM byte", color=_INK, fontsize=10)
        axes.set_ylabel("attained flop/s (modelled)", color=_INK, fontsize=10)
        axes.tick_params(which="both", colors=_INK, labelsize=9)
        axes.grid(which="major", color=_LINE, lw=0.6)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(_FAINT)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    count = len(points[-1])
    near = sum(p.time_us for p in points[-1] if p.bound_by in _RESOURCES)
    total = sum(p.time_us for p in points[-1]) or 1.0
    label = (
        f"Roofline of {device.name}: {count} kernels of the {plans[-1].planner} plan; "
        f"{100 * near / total:.0f} % of their time in kernels that memory or arithmetic limits."
    )
    return _embed(out.getvalue(), label)


@dataclass(frozen=True, slots=True)
class _Point:
    intensity: float
    flops_per_s: float
    time_us: float
    bound_by: str


def _point(kernel: Kernel) -> _Point:
    cost = kernel.cost
    flops = cost.flops.total
    return _Point(flops / cost.hbm_bytes, flops * 1e12 / cost.time_ps, cost.time_us, cost.bound_by)


def _main_dtype(plan: FusionPlan) -> str:
    """The dtype of the first operand in most of the contraction flops."""
    flops = Counter[str]()
    for node in plan.graph.nodes:
        if node.flops.matrix:
            flops[plan.graph.values[node.inputs[0]].dtype] += node.flops.matrix
    return max(flops, key=lambda d: flops[d]) if flops else "float32"


def _si(rate: float) -> str:
    power = min(int(math.log10(rate) // 3), 5) if rate >= 1 else 0
    return f"{rate / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"


def _embed(svg: str, label: str) -> str:
    """Convert an SVG file for a page: without prologue and size, with the page's colours and a label."""
    svg = svg[svg.index("<svg") :]
    for name, number in _COLOUR.items():
        svg = svg.replace(number, f"var(--{name})")
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, _, rest = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "Matplotlib's SVG has a viewBox"
    open_tag = (
        f'<svg class="plot" role="img" aria-label="{escape(label, quote=True)}" {box[0]} '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    )
    return f"{open_tag}>{rest}"
