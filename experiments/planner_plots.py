"""A plot of the rows of ``experiments.greedy_vs_solver``: each plan's time over the solver's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.planner_tables import AS_FAST, frame_of, panels
from fuseplan.support.atomic_file import write_text

_MARKS = "osD^v<>PX*"
_MOST = 16.0
"""Plans that take longer are drawn at the edge."""


def plot(rows: Sequence[Any], path: Path) -> None:
    """Write an SVG: a panel a device, a line a workload, a mark a planner, hollow of its plan of the
    program as traced; left of 1 is faster than the solver's plan."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "greedy_vs_solver"
    from matplotlib import pyplot

    frame = frame_of(rows).dropna(subset=["over_solver"])
    parts = list(panels(frame))
    workloads = list(dict.fromkeys(frame.workload))[::-1]
    place = {name: i for i, name in enumerate(workloads)}
    planners = [planner for planner in dict.fromkeys(frame.planner) if planner != "solver"]
    size = (2.2 + 2.6 * max(len(parts), 1), 1.4 + 0.2 * len(workloads))
    figure, axes = pyplot.subplots(
        1, max(len(parts), 1), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    colours = matplotlib.colormaps["tab10"]
    for axis, (device, dtype, part) in zip(axes[0], parts, strict=False):
        for i, planner in enumerate(planners):
            own = part[part.planner == planner]
            moved, colour = own[own.rewriting > AS_FAST], colours(i % 10)
            axis.scatter(
                moved.traced_over_solver.clip(upper=_MOST), [place[name] for name in moved.workload], s=16,
                linewidths=0.6, marker=_MARKS[i % len(_MARKS)], facecolors="none", edgecolors=[colour],
            )  # fmt: skip
            axis.scatter(
                own.over_solver.clip(upper=_MOST), [place[name] for name in own.workload], s=16, alpha=0.8,
                linewidths=0, marker=_MARKS[i % len(_MARKS)], color=colour, label=planner,
            )  # fmt: skip
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlim(right=_MOST * 1.1)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{device}, {dtype}", fontsize=9)
        axis.grid(axis="y", linewidth=0.3)
        axis.tick_params(labelsize=7)
    axes[0][0].set_yticks(range(len(workloads)), workloads, fontsize=7)
    axes[0][0].set_ylim(-0.8, len(workloads) - 0.2)
    figure.supxlabel(
        f"modelled time over the solver's plan (at most {_MOST:g} are drawn; hollow: as traced)", fontsize=8
    )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    write_text(path, text.getvalue())
