"""Regenerate or check the outputs, tables and figures of the README and of ``docs``, from commands and result
files.

    python -m experiments.readme --check     # list what differs from what would be made now
    python -m experiments.readme --write     # regenerate it in place
    python -m experiments.readme --write --figures     # the figures alone; or --tables

``FIGURES`` lists the figures. Three rules, which ``tests/project/test_readme.py`` holds:

- A ``sh`` block that a ``text`` block follows is run, and what it prints is that block. Only seconds of
  planning may differ. A ``sh`` block without one is a command of CI (``RUN_BY_CI``).
- A table of figures stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and is made of a file in
  ``experiments/results`` that says with which versions, when and, where the clock was read, on which machine.
- Elsewhere a number is in code, or in ``FACTS`` with the function that checks it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import operator
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuseplan
from costmodel import DEVICES
from experiments.planner_tables import plot
from fuseplan import planner_names
from fuseplan.bench import (
    DIVERGENCE_FACTOR,
    are_apart,
    bytes_text,
    price_lines,
    results_lines,
    time_text,
    write_text,
)
from fuseplan.workloads import get_workload

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"

RUN_BY_CI = (
    "python3 -m venv .uv && .uv/bin/pip install -q uv && .uv/bin/uv run --extra report fuseplan demo",
    ".uv/bin/uv run --extra aot --extra report --group test pytest",
)
"""The commands of the README that ``.ci/run`` runs."""

_COMMAND_S = 900

Record = dict[str, str]


def documents() -> list[Path]:
    """The README, and the pages of ``docs``."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# --- what commands print ---------------------------------------------------------------------

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shown:
    """A block of commands, and the block that shows what they print; None where none follows."""

    commands: str
    output: str | None
    start: int
    end: int
    """Where the output stands in the text."""


def shown_commands(text: str) -> Iterator[Shown]:
    """The ``sh`` blocks of a page."""
    fences = list(_FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence[1] != "sh":
            continue
        after = fences[i + 1] if i + 1 < len(fences) else None
        if after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip():
            yield Shown(fence[2], after[2], after.start(2), after.end(2))
        else:
            yield Shown(fence[2], None, fence.end(), fence.end())


def run_commands(commands: str) -> str:
    """What the commands print, run by a shell in an empty folder. ``fuseplan`` is this checkout's, with a
    deadline that a busy machine keeps: what is printed shall be the plan, not the load.

    Raises:
        RuntimeError: a command fails; the message has what it said.
    """
    python = shlex.quote(sys.executable)
    shell = f"""set -euo pipefail
fuseplan() {{
    case $1 in
        plan | compare) {python} -m fuseplan "$@" --deadline 300 ;;
        *) {python} -m fuseplan "$@" ;;
    esac
}}
{commands}"""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    known = {name: value for name, value in os.environ.items() if not name.startswith("FUSEPLAN_")}
    env = known | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "COLUMNS": "80"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-c", shell],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(
            f"{commands.strip()!r} exits with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout


def without_seconds(output: str) -> str:
    """The output but for seconds of planning, by stage, and the spaces that align them."""
    output = re.sub(r"^  planning .*\n(?: {11}.*\n)*", "  planning …\n", output, flags=re.MULTILINE)
    text = re.sub(r"\b\d[\d.,]* m?s\b", "… s", output)
    text = re.sub(r"^( *seconds +)[\d.]+$", r"\1…", text, flags=re.MULTILINE)
    return "\n".join(re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines())


# --- tables ----------------------------------------------------------------------------------

TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class NoProvenanceError(ValueError):
    """A file of results does not say with which versions, when or on which machine it was made."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of one file of ``experiments/results``."""

    file: str
    command: str
    """What writes the file."""
    body: Callable[[list[Record]], str]
    measured: bool
    """Whether the clock of a machine was read, which the file then names."""

    def text(self, folder: Path = RESULTS) -> str:
        """The table as Markdown, and a line that says where it comes from."""
        path = folder / self.file
        if not path.exists():
            return (
                f"*Not measured yet with this version: `{self.command}` writes the figures of this table.*\n"
            )
        rows, head = results_lines(path)
        origin = provenance(rows, head, path, self.measured)
        source = f"[{self.file}](LINK/experiments/results/{self.file})"
        body = self.body(rows)
        assumed = "" if self.measured else _assumed(body)
        rewrites = _given_rewrites(rows)
        return f"{body}\n\n*{origin}. From {source}, which `{self.command}` writes.{assumed}{rewrites}*\n"


def _given_rewrites(rows: Sequence[Record]) -> str:
    """Which planners of the rows were given rewritten programs, where that was not all that decide."""
    is_study = "planner" in rows[0] and {row["planner"] for row in rows} >= {"greedy", "solver"}
    if not is_study or "unrewritten_us" in rows[0]:
        return ""
    return " In these rows `solver` alone was given rewrites of the program; the others planned it as traced."


def _assumed(body: str) -> str:
    """The figures that the model assumes of the devices in a table: neither measured nor published."""
    by_fields: dict[tuple[str, ...], list[str]] = {}
    for name, device in DEVICES.items():
        if device.assumed and re.search(rf"\b{name}\b", body):
            by_fields.setdefault(device.assumed, []).append(name)
    return "".join(
        f" Assumed of {' and '.join(f'`{name}`' for name in names)}: {', '.join(f'`{f}`' for f in fields)}."
        for fields, names in by_fields.items()
    )


def provenance(rows: Sequence[Record], head: str, path: Path, measured: bool) -> str:
    """The versions, the dates and the machine of a file's rows.

    Raises:
        NoProvenanceError: a row does not say.
    """
    if not rows:
        raise NoProvenanceError(f"{path} has no rows")
    versions = _versions(rows)
    dates = _all_of(rows, lambda row: row.get("date", "")[:10])
    if not dates and (found := re.search(r"\d{4}-\d\d-\d\d", head or _beside(path))):
        dates = found[0]
    if not versions and (found := re.search(r"^# (.*jax [\d.]+.*), \d{4}-", head, re.MULTILINE)):
        versions = found[1]
    if not re.search(r"jax \d", versions) or not dates:
        raise NoProvenanceError(f"{path}: every row shall say with which versions and when it was made")
    parts = [versions.replace("jax", "JAX").replace("python", "Python"), dates]
    if measured:
        machine = _all_of(rows, lambda row: f"{row['cpu']}, {row['cores']} cores" if row.get("cpu") else "")
        if not machine:
            raise NoProvenanceError(f"{path}: every row shall name the machine on which it was measured")
        parts.append(machine)
    return "; ".join(parts)


def _versions(rows: Sequence[Record]) -> str:
    if all(row.get("fuseplan") and row.get("jax") for row in rows):
        own, jax = (_all_of(rows, operator.itemgetter(name)) for name in ("fuseplan", "jax"))
        return f"fuseplan {own}; jax {jax}"
    found = sorted({row.get("versions", "") for row in rows})
    if "" in found:
        return ""
    # Each version and machine once: "jax 0.10.2; one CPU and another".
    parts = zip(*[versions.split("; ") for versions in found], strict=True)
    return "; ".join(" and ".join(dict.fromkeys(part)) for part in parts)


def _all_of(rows: Sequence[Record], value: Callable[[Record], str]) -> str:
    """The values of the rows, or nothing where a row has none."""
    values = [value(row) for row in rows]
    found = sorted(set(values))
    return "" if "" in found else found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _beside(path: Path) -> str:
    """What is written in one go with the file, and dated."""
    page = path.with_suffix(".md")
    return page.read_text() if page.exists() else ""


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _number(row: Record, name: str) -> float:
    return float(row.get(name) or "nan")


def _known(value: float, text: Callable[[float], str]) -> str:
    return "–" if math.isnan(value) else text(value)


_HEADLINE = (
    "softmax",
    "layernorm_grad",
    "gpt2_block",
    "gpt2_block_grad",
    "causal_attention",
    "causal_attention_grad",
)


def _headline(rows: list[Record]) -> str:
    """XLA, greedy and the solver on some workloads, for a GPU and a TPU."""
    times = _times(rows)
    devices, planners = ("h200", "tpu_v5e"), ("xla", "greedy", "solver")
    head = ["modelled µs", *(f"{device} {planner}" for device in devices for planner in planners)]
    lines = []
    for workload in _HEADLINE:
        cells = [_known(times.get((workload, d, p), math.nan), time_text) for d in devices for p in planners]
        lines.append([f"`{workload}`", *cells])
    return _markdown(head, lines)


def _times(rows: Sequence[Record]) -> dict[tuple[str, str, str], float]:
    return {
        (row["workload"], row["device"], row["planner"]): _number(row, "time_us")
        for row in rows
        if row["dtype"] == "float32"
    }


def _planner_names(rows: Sequence[Record]) -> list[str]:
    """The planners of the rows, in the order in which fuseplan lists them."""
    order = {name: i for i, name in enumerate(planner_names())}
    return sorted({row["planner"] for row in rows}, key=lambda name: (order.get(name, -1), name))


AS_FAST = 1.001
"""Plans within a thousandth are as fast."""


def _planners(rows: list[Record]) -> str:
    """For each planner and device, the geometric mean of its time over the solver's, and on how many of the
    workloads it is as fast; the baseline is XLA's own plan where there is one."""
    times = _times(rows)
    names = _planner_names(rows)
    devices = list(dict.fromkeys(row["device"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    lines = []
    for planner in names:
        cells = []
        for device in devices:
            pairs = [
                (times.get((w, device, planner), math.nan), times.get((w, device, "solver"), math.nan))
                for w in workloads
            ]
            ratios = [mine / best for mine, best in pairs if mine > 0 and best > 0]
            if not ratios:
                cells.append("–")
                continue
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            cells.append(f"{mean:.2f} ({sum(r <= AS_FAST for r in ratios)} of {len(ratios)})")
        lines.append([f"`{planner}`", *cells])
    return _markdown(["time over the solver's", *devices], lines)


def _below(rows: list[Record]) -> str:
    """Where XLA's own plan is priced below the solver's."""
    times = _times(rows)
    devices = list(dict.fromkeys(row["device"] for row in rows))
    lines = []
    for device in devices:
        found = {
            w: times[w, device, "solver"] / time
            for (w, d, planner), time in times.items()
            if (d, planner) == (device, "xla") and time * AS_FAST < times.get((w, device, "solver"), 0)
        }
        worst = sorted(found, key=lambda w: -found[w])[:4]
        known = sum(d == device and p == "xla" and time > 0 for (_, d, p), time in times.items())
        if known:
            cell = ", ".join(f"`{w}` {found[w]:.2f}×" for w in worst) or "–"
            lines.append([f"`{device}`", f"{len(found)} of {known}", cell])
    return _markdown(["device", "XLA's plan is priced lower", "by most on"], lines)


def _rewriting(rows: list[Record]) -> str:
    """For each planner and device, what the rewrites that it is given gain: the geometric mean of the time
    of its plan of the program as traced over that of its plan of the rewritten program."""
    if "unrewritten_us" not in rows[0]:
        return "*The file of this table does not tell yet how fast the plans of the programs as traced are.*"
    devices = list(dict.fromkeys(row["device"] for row in rows))
    lines = []
    for planner in _planner_names(rows):
        cells = []
        for device in devices:
            own = [
                row
                for row in rows
                if (row["planner"], row["device"], row["dtype"]) == (planner, device, "float32")
            ]
            gains = [_number(row, "unrewritten_us") / t for row in own if (t := _number(row, "time_us")) > 0]
            gains = [gain for gain in gains if gain > 0]
            mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else math.nan
            cells.append(_known(mean, lambda x: f"{x:.2f}×"))
        lines.append([f"`{planner}`", *cells])
    return _markdown(["rewriting gains", *devices], lines)


def _cycles(rows: list[Record]) -> str:
    """TPU cycles of the planned kernels over XLA's, all workloads of a dtype together."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype and _number(row, "ratio") > 0]
        ratios = sorted((_number(row, "ratio"), row["workload"]) for row in own)
        mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
        times = [t for row in own if (t := _number(row, "time_ratio")) > 0]
        time = math.exp(sum(map(math.log, times)) / len(times)) if times else math.nan
        worst, name = ratios[-1]
        total = sum(row["dtype"] == dtype for row in rows)
        lines.append(
            [dtype, f"{len(own)} of {total}", f"{mean:.2f}", f"{ratios[len(ratios) // 2][0]:.2f}",
             f"{worst:.2f} (`{name}`)", _known(time, lambda t: f"{t:.2f}")]
        )  # fmt: skip
    return _markdown(
        [
            "dtype",
            "workloads with estimates",
            "cycles over XLA's",
            "median",
            "worst",
            "larger of cycles and bytes",
        ],
        lines,
    )


def _cpu(rows: list[Record]) -> str:
    """``jax.jit`` and fuseplan on a CPU: milliseconds and temporaries."""
    lines = []
    for row in rows:
        low, high = _number(row, "speedup_low"), _number(row, "speedup_high")
        modelled, measured = _number(row, "predicted_ms"), _number(row, "fuseplan_ms")
        far = are_apart(modelled, measured)
        temps = [_known(_number(row, f"{who}_temp_bytes"), bytes_text) for who in ("jax", "fuseplan")]
        lines.append(
            [
                f"`{row['workload']}`",
                _known(_number(row, "jax_ms"), _digits),
                _known(measured, _digits),
                _known(_number(row, "speedup"), lambda x: f"{x:.2f}×")
                + ("" if math.isnan(low + high) else f" ({low:.2f}–{high:.2f})"),
                " → ".join(temps),
                _known(modelled, _digits) + (f" (off by more than {DIVERGENCE_FACTOR:g}×)" if far else ""),
            ]
        )
    head = [
        "workload (float32)",
        "`jax.jit` ms",
        "fuseplan ms",
        "faster (quartiles)",
        "temporaries",
        "modelled ms",
    ]
    return _markdown(head, lines)


_HEADLINE_CPU = (
    "causal_attention",
    "causal_attention_vjp",
    "gaussian_gram",
    "nbody_energy_grad",
    "chamfer",
    "linear_cross_entropy",
    "softmax",
)


def _headline_cpu(rows: list[Record]) -> str:
    """``jax.jit`` and fuseplan on some workloads on a CPU: where it gains most, little, and nothing."""
    of = {row["workload"]: row for row in rows}
    lines = []
    for name in _HEADLINE_CPU:
        row = of[name]
        temps = [_known(_number(row, f"{who}_temp_bytes"), bytes_text) for who in ("jax", "fuseplan")]
        times = [_known(_number(row, f"{who}_ms"), _digits) for who in ("jax", "fuseplan")]
        faster = _known(_number(row, "speedup"), lambda x: f"{x:.2f}×")
        lines.append([f"`{name}`", *times, faster, " → ".join(temps)])
    return _markdown(["float32", "`jax.jit` ms", "fuseplan ms", "faster", "temporaries"], lines)


def _cpu_beside(rows: list[Record]) -> str:
    """Fuseplan beside PyTorch and KeOps on a CPU: milliseconds."""
    lines = []
    for row in rows:
        ours = _number(row, "fuseplan_ms")
        others = [_number(row, f"{name}_ms") for name in ("torch", "keops")]
        if all(map(math.isnan, others)):
            continue
        told = ["–" if math.isnan(ms) else f"{_digits(ms)} ({ms / ours:.2f}×)" for ms in others]
        lines.append([f"`{row['workload']}`", _digits(ours), _digits(_number(row, "jax_ms")), *told])
    head = ["workload (float32)", "fuseplan ms", "`jax.jit` ms", "PyTorch ms", "KeOps ms"]
    return _markdown(head, lines)


def _cpu_prices(rows: list[Record]) -> str:
    """How well the programs of a CPU are priced, and the ten whose price is farthest off."""
    numbers = [{name: _number(row, name) for name in _PRICED} for row in rows]
    known = [{k: None if math.isnan(x) else x for k, x in row.items()} for row in numbers]
    worst = []
    for row in rows:
        for whose, modelled, measured in (("fuseplan", *_PRICED[:2]), ("`jax.jit`", *_PRICED[2:])):
            pair = _number(row, modelled), _number(row, measured)
            if not math.isnan(sum(pair)):
                worst.append((abs(math.log(pair[0] / pair[1])), f"`{row['workload']}`", whose, *pair))
    lines = [
        [name, whose, _digits(modelled), _digits(measured), f"{measured / modelled:.2f}×"]
        for _, name, whose, modelled, measured in sorted(worst, reverse=True)[:10]
    ]
    head = ["farthest off", "program of", "modelled ms", "measured ms", "measured over modelled"]
    return "\n".join([*price_lines(known), "", _markdown(head, lines)])


_PRICED = ("predicted_ms", "fuseplan_ms", "jax_predicted_ms", "jax_ms")


def _sharded(rows: list[Record]) -> str:
    """``jax.jit`` and fuseplan on sharded arrays: collectives, temporaries and times."""
    lines = [
        [
            row["program"],
            row["mesh"],
            f"{row['jax_collectives']} → {row['collectives']}",
            " → ".join(bytes_text(int(row[name])) for name in ("jax_temp_bytes", "temp_bytes")),
            f"{_digits(_number(row, 'jax_ms'))} → {_digits(_number(row, 'ms'))}",
        ]
        for row in rows
    ]
    head = ["program, and what is sharded", "axes", "collectives", "temporaries", "ms"]
    return _markdown(head, lines)


def _sizes(rows: list[Record]) -> str:
    """Plans at many sizes: those that are searched for, and the seconds and the loss of the others."""
    lines = [
        [
            row["program"],
            row["device"],
            f"{row['searched']} of {row['sizes']}",
            *(_known(_number(row, name), lambda x: f"{x:.3f}") for name in _SIZES_SECONDS),
            *(f"{100 * _number(row, name):.1f} %" for name in ("mean_loss", "worst_loss")),
        ]
        for row in rows
    ]
    head = ["program", "device", "searched", "search s", "taken over s", "trace s", "slower by", "at most"]
    return _markdown(head, lines)


_SIZES_SECONDS = ("search_s", "taken_over_s", "trace_s")


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _planning(rows: list[Record]) -> str:
    """Seconds of planning by stage, beside XLA's compiler."""
    stages = ("trace_s", "lower_s", "enumerate_s", "solve_s", "check_s", "total_s", "xla_compile_s")
    head = [
        "workload",
        "equations",
        "distinct parts",
        *(s.removesuffix("_s").replace("_", " ") for s in stages),
        "status",
    ]
    lines = [
        [f"`{row['workload']}`", f"{int(row['equations']):,}", row["distinct_components"],
         *(_known(_number(row, s), lambda x: f"{x:.2f}") for s in stages), row["status"]]
        for row in rows
    ]  # fmt: skip
    return _markdown(head, lines)


def _solver(rows: list[Record]) -> str:
    """How well and how fast functions are planned: the certified gap, the seconds beside those of XLA's
    compiler, and what a heuristic's plan loses."""
    heuristics = ("excess_greedy", "excess_best_first")
    devices = list(dict.fromkeys(row["device"] for row in rows))

    def gap(row: Record) -> str:
        found = _number(row, "gap")
        if row["status"] == "OPTIMAL":
            return "proven"
        return f"{100 * found:.2f} %" if math.isfinite(found) else "no bound"

    def cells(row: Record) -> list[str]:
        excess = [_number(row, name) for name in heuristics]
        return [
            gap(row),
            f"{_number(row, 'planning_s'):.1f}",
            *[_known(e, lambda x: f"{100 * x:+.1f} %" if abs(x) >= 0.0005 else "–") for e in excess],
        ]

    of: dict[str, dict[str, Record]] = {}
    for row in rows:
        of.setdefault(row["workload"], {})[row["device"]] = row
    per_device = ["gap", "plan s", *(name.removeprefix("excess_").replace("_", " ") for name in heuristics)]
    lines = []
    for name, found in of.items():
        first = next(iter(found.values()))
        compiled = _known(_number(first, "xla_compile_s"), lambda s: f"{s:.1f}")
        every = [cells(found[d]) if d in found else ["–"] * len(per_device) for d in devices]
        lines.append([f"`{name}`", f"{int(first['equations']):,}", compiled, *itertools.chain(*every)])
    head = [f"{device} {column}" for device in devices for column in per_device]
    return _markdown(["workload", "equations", "XLA s", *head], lines)


def _jax_tests(rows: list[Record]) -> str:
    """How many of JAX's own tests fail with fuseplan's ``jit`` alone, by file and version of JAX."""
    names = ("tests", "fail_with_jax", "fail_alone")
    files, versions = (list(dict.fromkeys(row[key] for row in rows)) for key in ("file", "jax"))
    counts = {(row["file"], row["jax"], name): int(row[name]) for row in rows for name in names}
    columns = [(jax, name) for jax in versions for name in names]
    lines = [[f"`{f}`", *(f"{counts[f, *c]:,}" if (f, *c) in counts else "" for c in columns)] for f in files]
    total = [f"{sum(counts.get((f, *column), 0) for f in files):,}" for column in columns]
    said = dict(zip(names, ("tests", "fail with `jax.jit`", "with `fuseplan.jit` alone"), strict=True))
    head = ["file", *(f"JAX {jax}: {said[name]}" for jax, name in columns)]
    return _markdown(head, [*lines, ["all", *total]])


def _what_runs(rows: list[Record]) -> str:
    """By device, how many of the plans' kernels XLA leaves as they are, and where it changes most."""
    names = ("kernels", "as_planned", "merged", "divided", "beside")
    lines = []
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        total = {name: sum(int(row[name]) for row in own) for name in names}
        others = sorted(own, key=lambda row: int(row["as_planned"]) - int(row["kernels"]))
        most = [f"`{row['workload']}`" for row in others[:5] if row["as_planned"] != row["kernels"]]
        share = f"{100 * total['as_planned'] / total['kernels']:.0f} %"
        lines.append([device, *(f"{total[name]:,}" for name in names), share, ", ".join(most)])
    head = ["device", "kernels", "as planned", "merged", "divided", "beside", "share", "most others in"]
    return _markdown(head, lines)


_BENCH_CPU = "fuseplan bench cpu --beside torch,keops --out experiments/results/cpu.csv"
_STUDY = "python -m experiments.greedy_vs_solver"
TABLES = {
    "headline": Table("greedy_vs_solver.csv", _STUDY, _headline, measured=False),
    "planners": Table("greedy_vs_solver.csv", _STUDY, _planners, measured=False),
    "rewriting": Table("greedy_vs_solver.csv", _STUDY, _rewriting, measured=False),
    "below": Table("greedy_vs_solver.csv", _STUDY, _below, measured=False),
    "cycles": Table(
        "tpu_cycles.csv",
        "python -m experiments.compiled --devices tpu_v5e --dtypes float32,bfloat16 --without gpt2_train_24 "
        "--out rows.csv --cycles-out experiments/results/tpu_cycles.csv",
        _cycles,
        measured=False,
    ),
    "headline_cpu": Table("cpu.csv", _BENCH_CPU, _headline_cpu, measured=True),
    "cpu": Table("cpu.csv", _BENCH_CPU, _cpu, measured=True),
    "cpu_beside": Table("cpu.csv", _BENCH_CPU, _cpu_beside, measured=True),
    "cpu_prices": Table("cpu.csv", _BENCH_CPU, _cpu_prices, measured=True),
    "sharded": Table(
        "sharded.csv",
        "python -m experiments.sharded --out experiments/results/sharded.csv",
        _sharded,
        measured=True,
    ),
    "what_runs": Table(
        "what_runs.csv",
        "python -m experiments.what_runs --out experiments/results/what_runs.csv",
        _what_runs,
        measured=False,
    ),
    "jax_tests": Table(
        "jax_tests.csv",
        "python -m experiments.jax_tests path/to/jax/tests --out experiments/results/jax_tests.csv",
        _jax_tests,
        measured=False,
    ),
    "sizes": Table(
        "dynamic_shapes.csv",
        "python -m experiments.dynamic_shapes --without-calls --out experiments/results/dynamic_shapes.csv",
        _sizes,
        measured=True,
    ),
    "planning": Table(
        "planning.csv", "fuseplan bench plan --out experiments/results/planning.csv", _planning, measured=True
    ),
    "solver": Table(
        "solver.csv",
        "fuseplan bench solver --workloads packages --device h200,tpu_v5e --repeats 1 --deadlines 1 "
        "--no-ablation --with-xla --out experiments/results/solver.csv",
        _solver,
        measured=True,
    ),
}
"""By the name that a page calls for it."""


def with_tables(text: str, page: Path, folder: Path = RESULTS) -> str:
    """The page with every table made anew."""
    up = "/".join([".."] * len(page.resolve().relative_to(ROOT).parts[:-1])) or "."

    def made(match: re.Match[str]) -> str:
        table = TABLES[match[2]].text(folder).replace("LINK/", f"{up}/" if up != "." else "")
        return f"{match[1]}\n{table}\n{match[4]}"

    return TABLE.sub(made, text)


def with_outputs(text: str) -> str:
    """The page with what every command prints made anew, where it differs by more than seconds."""
    for shown in reversed(list(shown_commands(text))):
        if shown.output is not None:
            output = run_commands(shown.commands)
            if without_seconds(output) != without_seconds(shown.output):
                text = text[: shown.start] + output + text[shown.end :]
    return text


# --- figures ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of the README, of ``docs`` or of a study."""

    draw: Callable[[Path], None]
    """Write the figure to a file."""
    is_exact: bool
    """Whether it is the same with every version of Matplotlib, so that ``--check`` compares it."""


def _plan_shown() -> fuseplan.Plan:
    """The plan that the README's picture and the figures of ``docs`` show."""
    f, args = get_workload("gpt2_block").build()
    plan: fuseplan.Plan = fuseplan.make_plan(f, device="h200", deadline_s=300)(*args)
    return plan


def _draw_plan(path: Path) -> None:
    _plan_shown().to_svg(path, "A transformer block of GPT-2 on an H200, modelled")


def _draw_roofline(path: Path) -> None:
    _save(_plan_shown().roofline_figure(), path)


def _draw_timeline(path: Path) -> None:
    _save(_plan_shown().timeline_figure(), path)


def _draw_study(path: Path) -> None:
    plot(fuseplan.read_frame(RESULTS / "greedy_vs_solver.csv"), path)


def _save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, the same for the same figure."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    write_text(path, text.getvalue())


FIGURES = {
    "docs/images/plan.svg": Picture(_draw_plan, is_exact=True),
    "docs/images/roofline.svg": Picture(_draw_roofline, is_exact=False),
    "docs/images/timeline.svg": Picture(_draw_timeline, is_exact=False),
    "experiments/results/greedy_vs_solver.svg": Picture(_draw_study, is_exact=False),
}
"""By their paths in the repository."""


def stale_figures() -> list[str]:
    """The paths of the figures that are missing, or are not what would be drawn now."""
    stale = []
    with tempfile.TemporaryDirectory() as folder:
        for name, picture in FIGURES.items():
            there = ROOT / name
            if there.is_file() and not picture.is_exact:
                continue
            new = Path(folder) / Path(name).name
            if there.is_file():
                picture.draw(new)
            if not there.is_file() or new.read_text() != there.read_text():
                stale.append(name)
    return stale


# --- numbers in sentences --------------------------------------------------------------------


def _requires(text: str) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return text in project["requires-python"]


FACTS: dict[str, Callable[[], bool]] = {
    "Python 3.11": lambda: _requires("3.11"),
    "Apache-2.0": lambda: "Apache License" in (ROOT / "LICENSE").read_text()[:200],
}
"""Phrases with a number that is no measurement, and whether each is so."""

_NOT_PROSE = (
    _FENCE,
    re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"`[^`\n]+`"),
    re.compile(r"(?<=\])\([^)]*\)"),
)
_NAME = re.compile(r"[A-Za-z][\w.-]*")
"""A word that begins with a letter: H200, v5e, GPT-2, x86-64 and float32 are names, not numbers."""


def loose_numbers(text: str) -> list[str]:
    """The numbers of a page that stand in sentences, with a few words around: none is made by a command or
    a file, or checked."""
    for pattern in _NOT_PROSE:
        text = pattern.sub(" ", text)
    for phrase in FACTS:
        text = text.replace(phrase, " ")
    names = [range(m.start(), m.end()) for m in _NAME.finditer(text)]
    found = (m for m in re.finditer(r"\d[\d.,]*", text) if not any(m.start() in name for name in names))
    return [" ".join(text[max(m.start() - 30, 0) : m.end() + 20].split()) for m in found]


# --- the command -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Check the pages and figures, or regenerate them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="exit with 1 if a page would change")
    mode.add_argument("--write", action="store_true", help="write the pages anew")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--tables", action="store_true", help="tables only: no command is run")
    some.add_argument("--figures", action="store_true", help="figures only")
    options = parser.parse_args(argv)
    stale = 0
    if not options.tables:
        for name in FIGURES if options.write else stale_figures():
            stale += 1
            if options.write:
                (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
                FIGURES[name].draw(ROOT / name)
            print(f"{name} {'written' if options.write else 'is not what would be drawn now'}")
    for page in () if options.figures else documents():
        text = page.read_text()
        new = with_tables(text, page)
        if not options.tables:
            new = with_outputs(new)
        if new != text:
            stale += 1
            print(
                f"{page.relative_to(ROOT)} {'written' if options.write else 'is not what would be made now'}"
            )
            if options.write:
                page.write_text(new)
        for number in loose_numbers(new):
            print(f"{page.relative_to(ROOT)}: a number that nothing makes or checks: … {number} …")
            stale += not options.write
    return 0 if options.write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())
