"""Tables of the rows of ``experiments.greedy_vs_solver``, and a plot of each plan's time over the
solver's."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fuseplan.bench import time_text, write_text

AS_FAST = 1.001
"""Plans within a thousandth are as fast."""

Table = tuple[str, list[str], list[list[str]]]
"""A title, a head and rows."""


def frame_of(rows: Sequence[Any]) -> pd.DataFrame:
    """The rows, with ``over_solver``, the modelled time over that of the solver's plan: of planners with the
    same rewrites. ``traced_over_solver`` is as that, of the plan of the program as traced; ``rewriting`` is
    the one over the other, what rewriting gains the planner."""
    frame = pd.DataFrame([asdict(row) for row in rows])
    key = ["workload", "device", "dtype"]
    solver = frame[frame.planner == "solver"].set_index(key).time_us
    frame["over_solver"] = frame.time_us / frame.set_index(key).index.map(solver.to_dict()).to_numpy(float)
    frame["rewriting"] = frame.unrewritten_us.astype(float) / frame.time_us.astype(float)
    frame["traced_over_solver"] = frame.over_solver * frame.rewriting
    return frame


def panels(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The rows of each device and dtype."""
    for (device, dtype), part in frame.groupby(["device", "dtype"], sort=False):  # type: ignore[misc]
        yield str(device), str(dtype), part


def short_table(rows: Sequence[Any]) -> Iterator[Table]:
    """For each device and dtype, a row a planner: how its plans compare with the solver's."""
    frame = frame_of(rows)
    head = [
        "planner",
        "rewriting gains",
        "time over solver's",
        "worst",
        "as fast",
        "kernels",
        "MB",
        "planning s",
    ]
    for device, dtype, part in panels(frame):
        lines = []
        for planner, own in part.groupby("planner", sort=False):
            own = own.dropna(subset=["time_us", "over_solver"])
            if own.empty:
                lines.append([str(planner), *["–"] * 7])
                continue
            as_fast = int((own.over_solver <= AS_FAST).sum())
            lines.append(
                [
                    str(planner),
                    f"{np.exp(np.log(own.rewriting).mean()):.2f}",
                    f"{np.exp(np.log(own.over_solver).mean()):.2f}",
                    f"{own.over_solver.max():.2f}",
                    f"{as_fast} of {len(own)}",
                    f"{own.kernels.sum():,.0f}",
                    f"{own.hbm_bytes.sum() / 1e6:,.0f}",
                    f"{own.planning_s.sum():.1f}",
                ]
            )
        yield f"{device}, {dtype}: {part.workload.nunique()} workloads", head, lines


def tables(rows: Sequence[Any], command: str, versions: str, date: str) -> str:
    """All of it as Markdown."""
    frame = frame_of(rows)
    text = [
        "# Greedy against solver",
        f"`{command}`, {date}: {versions}. Modelled times. *Rewriting gains* is the geometric mean over "
        "the workloads of the time of a planner's plan of the program as traced over that of its best plan, "
        "with the rewrites that every planner is given but `unfused` and `xla`. *Time over solver's* is that "
        "of a plan's time over the solver's, both with the same rewrites: what solving gains; *worst* is the "
        "largest; *as fast* counts those within a thousandth; kernels, bytes and planning are sums.",
    ]
    for title, head, lines in short_table(rows):
        text += [f"## {title}", _markdown(head, lines)]
    text += ["## Where greedy, with the same rewrites, is as fast as the proven plan", _already(frame)]
    text += [
        "## Every workload",
        "Modelled µs, in parentheses as traced where that is another; **bold** where no plan of the "
        "rewritten program is faster, by the solver's proof.",
    ]
    for device, dtype, part in panels(frame):
        planners = list(dict.fromkeys(part.planner))
        lines = [
            [str(name), *[_cell(own, planner) for planner in planners]]
            for name, own in part.groupby("workload", sort=False)
        ]
        text += [f"### {device}, {dtype}", _markdown(["workload", *planners], lines)]
    missing = frame[frame.time_us.isna()]
    if not missing.empty:
        text += ["## No plan", _reasons(missing)]
    faster = frame[frame.over_solver < 1 / AS_FAST]
    if not faster.empty:
        lines = [
            [row["workload"], row["device"], row["dtype"], row["planner"], f"{row['over_solver']:.3f}"]
            for row in faster.to_dict("records")
        ]
        text += [
            "## Faster than the solver's plan",
            "Plans outside of the solver's search space, or where its deadline ended the search. XLA's "
            "kernels are priced by their operands and results, each once: what its matmuls read again, tile "
            "after tile, is not in it, and random bits, an opaque step to the planners, are part of its "
            "loops.",
            _markdown(["workload", "device", "dtype", "planner", "over solver's"], lines),
        ]
    return "\n\n".join(text) + "\n"


def _already(frame: pd.DataFrame) -> str:
    """By device, the workloads on which the proof leaves greedy's best plan nothing to gain."""
    proven = frame[(frame.planner == "solver") & (frame.status == "OPTIMAL")]
    key = ["workload", "device", "dtype"]
    greedy = frame[frame.planner == "greedy"].set_index(key).over_solver
    text = []
    for device, dtype, part in panels(proven):
        ratios = [(name, greedy.get((name, device, dtype), np.nan)) for name in part.workload]
        equal = [str(name) for name, ratio in ratios if ratio <= AS_FAST]
        names = ", ".join(equal) or "none"
        text.append(f"- {device}, {dtype}: {len(equal)} of {len(ratios)} that are proven: {names}.")
    return "\n".join(text)


def _cell(own: pd.DataFrame, planner: str) -> str:
    row = own[own.planner == planner]
    if row.empty or row.time_us.isna().all():
        return "–"
    text = time_text(float(row.time_us.iloc[0]))
    text = f"**{text}**" if row.status.iloc[0] == "OPTIMAL" else text
    traced_us, rewriting = float(row.unrewritten_us.iloc[0]), float(row.rewriting.iloc[0])
    return f"{text} ({time_text(traced_us)})" if abs(rewriting - 1) >= AS_FAST - 1 else text


def _reasons(missing: pd.DataFrame) -> str:
    counts: dict[tuple[str, str, str], list[str]] = {}
    for row in missing.to_dict("records"):
        counts.setdefault((row["planner"], row["device"], row["notes"]), []).append(row["workload"])
    return "\n".join(
        f"- {planner} on {device}, {len(names)} workloads ({names[0]} …): {notes}"
        for (planner, device, notes), names in counts.items()
    )


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


_MARKS = "osD^v<>PX*"
_MOST = 16.0
"""Plans that take longer are drawn at the edge."""


def plot(rows: Sequence[Any], path: Path) -> None:
    """Write an SVG with a panel for each device, a line for each workload and a mark for each planner
    (hollow: its plan of the program as traced). A mark left of 1 is a plan faster than the solver's."""
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
