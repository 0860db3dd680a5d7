"""Draw plans as small SVG pictures without Matplotlib and without scripts: a strip of time and a line of
memory for a notebook, and a picture of two plans for a document.

A notebook's theme is not known to a picture: text has the colour of the text around it, and the colours of
bars contrast with a light and a dark ground. A document's picture has a ground of its own, and follows the
reader's theme by ``prefers-color-scheme``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from os import PathLike

from costmodel.kernel import BOUNDS
from fuseplan.memory.liveness import live_ranges, profile
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.plan.kernel_names import kernel_name
from fuseplan.report.text import makes, parts_text, rows, status_text, summary, unfused_plan
from fuseplan.support.atomic_file import check_writable, write_text
from fuseplan.support.format import bytes_text, counted, time_text

BOUND_COLOURS = {
    "memory": "#3a7cc4",
    "cache": "#1f8a7a",
    "matrix": "#c46a17",
    "vector": "#9465c2",
    "launch": "#7d828a",
    "latency": "#4f86b8",
}
"""Colours by the bound of a kernel, with a contrast of at least 3 with white and with ``#1e1e1e``."""
OTHER_COLOUR = "#9a7638"
"""Of the other bounds."""

_MOST_BARS = 400
"""The most bars of a picture: of more kernels, neighbours of one bound share a bar."""


def colour_of(bound: str) -> str:
    """The colour of kernels with that bound."""
    return BOUND_COLOURS.get(bound, OTHER_COLOUR)


_MOST_ROWS = 10
"""The most kernels of a notebook's table."""


def plan_html(plan: FusionPlan) -> str:
    """A plan for a notebook: the summary, the pictures, and a table of the costliest kernels."""
    alike = rows(plan)
    costly = sorted(alike, key=lambda r: -r.count * r.kernel.cost.time_ps)[:_MOST_ROWS]
    body = "".join(
        "<tr>"
        f"<td>{row.first}</td>"
        f"<td>{escape(kernel_name(plan.graph, row.kernel.spec.nodes))}"
        f"{f' × {row.count}' if row.count > 1 else ''}</td>"
        f"<td>{len(row.kernel.spec.nodes)}</td><td>{escape(makes(plan.graph, row.kernel.spec))}</td>"
        f"<td>{time_text(row.kernel.cost.time_us * row.count)}</td>"
        f"<td>{escape(row.kernel.cost.bound_by)}</td>"
        f"<td>{row.kernel.cost.hbm_bytes * row.count / 1e6:.1f}</td></tr>"
        for row in costly
    )
    heads = "".join(f"<th>{h}</th>" for h in ("#", "kernel", "ops", "makes", "µs", "bound by", "HBM MB"))
    is_part = len(costly) < len(alike)
    more = f"<p>The costliest of {counted(len(plan.kernels), 'kernel')}.</p>" if is_part else ""
    return (
        f"<pre>{escape(summary(plan))}</pre>"
        f"{strip_of_time(plan)}{line_of_memory(plan)}<p>{legend(plan)}</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{more}"
    )


def strip_of_time(plan: FusionPlan, width: float = 640, height: float = 18) -> str:
    """An SVG of the kernels in order, each as wide as its modelled time, with a title for each."""
    bars = "".join(
        f'<rect x="{x:.2f}" y="0" width="{w:.2f}" height="{height:g}" fill="{colour_of(bound)}">'
        f"<title>{escape(title)}</title></rect>"
        for x, w, bound, title in _bars(plan, width, plan.objective_ps)
    )
    label = f"{counted(len(plan.kernels), 'kernel')} in {time_text(plan.objective_us)} µs"
    return _svg(width, height, label, bars)


def line_of_memory(plan: FusionPlan, width: float = 640, height: float = 28) -> str:
    """An SVG of the bytes of live temporaries over the modelled time."""
    live = profile(live_ranges(plan.graph, plan.kernels), range(len(plan.kernels)))
    most, total = max(live, default=0), plan.objective_ps
    label = f"temporaries, {bytes_text(most)} at the peak"
    if not most or not total:
        return _svg(width, height, label, "")
    path, x = [f"M0,{height:g}"], 0.0
    for kernel, now in zip(plan.kernels, live, strict=True):
        if not kernel.cost.time_ps:
            continue
        y = height - 1 - now / most * (height - 2)
        path.append(f"L{x:.2f},{y:.2f}")
        x += kernel.cost.time_ps / total * width
        path.append(f"L{x:.2f},{y:.2f}")
    path.append(f"L{x:.2f},{height:g}")
    drawn = f'<path d="{" ".join(path)}" fill="currentColor" fill-opacity="0.15" stroke="currentColor"/>'
    return _svg(width, height, label, f"<title>{escape(label)}</title>{drawn}")


def legend(plan: FusionPlan) -> str:
    """The bounds of a plan's kernels as text, each behind a square of its colour."""
    used = {kernel.cost.bound_by for kernel in plan.kernels if kernel.cost.time_ps}
    return " ".join(
        f'<span style="white-space:nowrap"><svg width="10" height="10" aria-hidden="true">'
        f'<rect width="10" height="10" fill="{colour_of(bound)}"/></svg> {bound}</span>'
        for bound in BOUNDS
        if bound in used
    )


def _svg(width: float, height: float, label: str, inside: str) -> str:
    return (
        f'<svg role="img" aria-label="{escape(label, quote=True)}" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'style="display:block;max-width:100%;margin:2px 0">{inside}</svg>'
    )


Bar = tuple[float, float, str, str]
"""Left, width, bound, and title."""


def _bars(plan: FusionPlan, width: float, whole_ps: int) -> list[Bar]:
    """The bars of the kernels that take time, where ``whole_ps`` fill the width."""
    scale = width / whole_ps if whole_ps else 0.0
    bars: list[Bar] = []
    timed = [(k, kernel) for k, kernel in enumerate(plan.kernels) if kernel.cost.time_ps]
    ends = [*accumulate(kernel.cost.time_ps * scale for _, kernel in timed)]
    for (k, kernel), end in zip(timed, ends, strict=True):
        cost = kernel.cost
        wide = cost.time_ps * scale
        if len(timed) > _MOST_BARS and bars and bars[-1][2] == cost.bound_by:
            x, before, bound, title = bars[-1]
            bars[-1] = (x, before + wide, bound, f"{title.partition(' to ')[0]} to {k}: bound by {bound}")
            continue
        name = kernel_name(plan.graph, kernel.spec.nodes)
        gap = min(1.0, wide / 4) if len(timed) <= _MOST_BARS else 0.0
        many = len(timed) > _MOST_BARS
        title = f"kernels {k}" if many else f"{k} {name}: {time_text(cost.time_us)} µs, {parts_text(cost)}"
        bars.append((end - wide, wide - gap, cost.bound_by, title))
    return bars


# --- a document's picture --------------------------------------------------------------------

_WIDTH, _MARGIN = 760.0, 20.0
_BAR, _TALL_BAR = 34.0, 92.0
"""The heights of bars: on the common scale, and of a plan that is drawn again, enlarged."""
_CHARACTER = 6.6
"""The width of a character at 12 pixels."""
_SHORT = 0.6
"""A strip that fills no more of the width is drawn again, enlarged to all of it."""

_STYLE = """
  .page { fill: #ffffff; stroke: #d0d4da; } .ink { fill: #22252a; } .faint { fill: #5b616a; }
  .name { fill: #ffffff; } .guide { stroke: #9aa0a8; stroke-dasharray: 2 3; }
  text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; }
  .head { font-size: 14px; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #16181b; stroke: #363a40; } .ink { fill: #e6e7e4; } .faint { fill: #a3a8b0; }
  }
"""


def write_plan_picture(plan: FusionPlan, path: str | PathLike[str], title: str = "") -> None:
    """See ``Plan.to_svg``."""
    target = check_writable(path)
    plans = [("each operation by itself", unfused_plan(plan))] if plan.planner != "unfused" else []
    name = f"planned by {plan.planner}, {status_text(plan)}"
    heading = title or f"{counted(len(plan.graph.nodes), 'operation')} on {plan.device.name}, modelled"
    write_text(target, document_picture([*plans, (name, plan)], heading))


def document_picture(plans: Sequence[tuple[str, FusionPlan]], title: str) -> str:
    """A whole SVG file with a strip of time for each named plan, on one scale, and a legend. If the last
    strip is short, it is drawn again, enlarged.

    It uses no script, no font file and no reference; it has a ground of its own in light and in dark.
    """
    longest = max(plan.objective_ps for _, plan in plans)
    inner = _WIDTH - 2 * _MARGIN
    parts = [f'<text class="ink head" x="{_MARGIN:g}" y="28">{escape(title)}</text>']
    y = 46.0
    for name, plan in plans:
        figures = (
            f"{counted(len(plan.kernels), 'kernel')}, {time_text(plan.objective_us)} µs, "
            f"HBM {bytes_text(plan.hbm_bytes)}"
        )
        parts.append(
            f'<text x="{_MARGIN:g}" y="{y + 12:g}"><tspan class="ink">{escape(name)}</tspan>'
            f'<tspan class="faint" dx="8">{escape(figures)}</tspan></text>'
        )
        y += 20
        parts += _named_bars(plan, longest, y, _BAR)
        y += _BAR
        share = plan.objective_ps / longest if longest else 1.0
        if plan is plans[-1][1] and 0 < share <= _SHORT:
            for x, end in ((_MARGIN, _MARGIN), (_MARGIN + share * inner, _MARGIN + inner)):
                parts.append(f'<path class="guide" d="M{x:.2f},{y + 2:g} L{end:.2f},{y + 26:g}"/>')
            parts += _named_bars(plan, plan.objective_ps, y + 28, _TALL_BAR)
            y += 28 + _TALL_BAR
        y += 16
    used = {k.cost.bound_by for _, plan in plans for k in plan.kernels if k.cost.time_ps}
    x = _MARGIN
    for bound in (b for b in BOUNDS if b in used):
        text = f"bound by {bound}"
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="10" height="10" fill="{colour_of(bound)}"/>')
        parts.append(f'<text class="faint" x="{x + 15:g}" y="{y + 9:g}">{text}</text>')
        x += 15 + len(text) * _CHARACTER + 18
    height = y + 26
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title, quote=True)}" '
        f'viewBox="0 0 {_WIDTH:g} {height:g}" width="{_WIDTH:g}" height="{height:g}">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1:g}" height="{height - 1:g}" rx="6"/>\n'
        f"{body}\n</svg>\n"
    )


def _named_bars(plan: FusionPlan, whole_ps: int, top: float, height: float) -> list[str]:
    """The bars of a plan, where ``whole_ps`` fill the width, with the names that fit along or across them."""
    bars = _bars(plan, _WIDTH - 2 * _MARGIN, whole_ps)
    timed = [kernel for kernel in plan.kernels if kernel.cost.time_ps]
    names = [kernel_name(plan.graph, kernel.spec.nodes) for kernel in timed]
    parts = []
    for i, (x, wide, bound, tip) in enumerate(bars):
        left, middle = _MARGIN + x, (_MARGIN + x + wide / 2, top + height / 2)
        parts.append(
            f'<rect x="{left:.2f}" y="{top:g}" width="{wide:.2f}" height="{height:g}" rx="2" '
            f'fill="{colour_of(bound)}"><title>{escape(tip)}</title></rect>'
        )
        if len(bars) < len(names):  # bars of several kernels
            continue
        room = len(names[i]) * _CHARACTER + 8
        if room <= wide:
            place = f'x="{middle[0]:.2f}" y="{middle[1] + 4:.2f}"'
        elif room <= height and wide >= 14:
            place = f'transform="translate({middle[0] + 4:.2f},{middle[1]:.2f}) rotate(-90)"'
        else:
            continue
        parts.append(f'<text class="name" {place} text-anchor="middle">{escape(names[i])}</text>')
    return parts
