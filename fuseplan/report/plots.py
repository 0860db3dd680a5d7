"""Draw the figures of the page as inline SVG in the page's colours: timelines of kernels, and rooflines.

The rooflines need Matplotlib (the extra ``report``).
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape

from costmodel.kernel import BOUNDS
from fuseplan.plan.fusion_plan import FusionPlan, Kernel
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.figures import Palette, points_of, roofline_figure
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
_PAGE = Palette(
    _COLOUR["ink"], _COLOUR["faint"], _COLOUR["line"], _COLOUR["page"], bounds=_COLOUR, other=_COLOUR["steps"]
)
_RESOURCES = ("memory", "cache", "matrix", "vector")
"""The bounds that a roofline shows."""


def roofline(plans: Sequence[FusionPlan], salt: str) -> str | None:
    """Draw ``figures.roofline_figure`` for a page. ``salt`` makes ids differ between the figures of a page.
    None if Matplotlib is not installed, empty if no kernel of the last plan computes anything.
    """
    try:
        import matplotlib
    except ImportError:
        return None
    points = points_of(plans[-1])
    if not points:
        return ""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}):
        figure = roofline_figure(plans, _PAGE)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    near = sum(p.time_us for p in points if p.bound_by in _RESOURCES)
    total = sum(p.time_us for p in points) or 1.0
    label = (
        f"Roofline of {plans[-1].device.name}: {len(points)} kernels of the {plans[-1].planner} plan; "
        f"{100 * near / total:.0f} % of their time in kernels that memory or arithmetic limits."
    )
    return _embed(out.getvalue(), label)


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
