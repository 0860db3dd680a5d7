"""Tables of a study's rows, and a plot of each plan's time over the solver's."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

import fuseplan
from fuseplan.bench import time_text, with_ratios, write_text

AS_FAST = 1.001
"""Plans within a thousandth are as fast."""

Table = tuple[str, list[str], list[list[str]]]
"""A title, a head and rows."""


def frame_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with ``over_solver``, the modelled time over that of the solver's plan: of planners with the
    same rewrites. ``traced_over_solver`` is as that, of the plan of the program as traced; ``rewriting`` is
    the one over the other, what rewriting gains the planner."""
    names = {"over_baseline": "over_solver", "traced_over_baseline": "traced_over_solver"}
    return with_ratios(rows, "solver").rename(columns=names)


def panels(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The rows of each device and dtype."""
    for (device, dtype), part in frame.groupby(["device", "dtype"], sort=False):  # type: ignore[misc]
        yield str(device), str(dtype), part


def short_table(rows: pd.DataFrame) -> Iterator[Table]:
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


def tables(rows: pd.DataFrame, command: str, versions: str, date: str) -> str:
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


def plot(rows: pd.DataFrame, path: Path) -> None:
    """Write ``fuseplan.study_figure`` as SVG; nothing if there is no plan of the solver."""
    import matplotlib

    if rows[rows.planner == "solver"].time_us.isna().all():
        return
    with matplotlib.rc_context({"svg.hashsalt": "greedy_vs_solver"}):
        text = io.StringIO()
        fuseplan.study_figure(rows).savefig(text, format="svg", metadata={"Date": None})
    write_text(path, text.getvalue())
