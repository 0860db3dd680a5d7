"""``fuseplan calibrate``."""

from __future__ import annotations

from typing import Annotated

import typer

from costmodel.calibrate import FIGURES, figure_of
from fuseplan.cli.arguments import Json
from fuseplan.console import print_json, print_table, progress
from fuseplan.support.format import wrapped
from fuseplan.targets.calibrate import cache_file, recalibrate_cpu


def calibrate(
    deadline: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", min=0, help="How long to try on a busy machine."),
    ] = 60.0,
    json: Json = False,
) -> None:
    """Measure this machine's CPU anew (some ten seconds when it is idle), and keep the figures.

    A figure is taken when its timings agree. Exit code 1: some did not in time;
    they keep the values of an earlier measurement, or stay assumed.
    """
    with progress(1) as steps:
        steps.start("measuring")
        found = recalibrate_cpu(deadline)
    cpu = found.device
    if json:
        print_json(
            {
                "description": cpu.description,
                **{name: figure_of(cpu, name) for name in FIGURES},
                "measured": found.measured,
                "kept": found.kept,
                "assumed": found.assumed,
                "problems": dict(found.problems),
                "sources": {name: cpu.source(name) for name in FIGURES},
                "file": str(cache_file()) if found.is_stored else None,
            }
        )
    else:
        print(cpu.description)
        origin = dict.fromkeys(FIGURES, "measured")
        origin |= dict.fromkeys(found.kept, "kept from an earlier measurement")
        origin |= dict.fromkeys(found.assumed, "assumed")
        rows = [(name, _text(name, figure_of(cpu, name)), origin[name]) for name in FIGURES]
        print_table(("figure", "value", "source"), rows, right=(1,))
        print(f"written to {cache_file()}" if found.is_stored else f"{cache_file()} is unchanged")
        for why in dict.fromkeys(why for _, why in found.problems):
            names = ", ".join(name for name, other in found.problems if other == why)
            print("\n".join(wrapped(f"not measured: {names}: {why}", 80, "    ")))
    if found.problems:
        raise typer.Exit(1)


def _text(name: str, value: int) -> str:
    """Rates in 10⁹ a second, times in µs."""
    return f"{value / 1e6:.2f} µs" if name.endswith("_ps") else f"{value / 1e9:.1f} G/s"
