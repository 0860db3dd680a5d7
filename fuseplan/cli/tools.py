"""The code of ``fuseplan demo``, ``workloads``, ``devices``, ``calibrate`` and ``cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from costmodel.calibrate import FIGURES, figure_of
from fuseplan.cli.inputs import load
from fuseplan.console import print_json, print_table, progress
from fuseplan.demo import Program, print_demo, run_demo
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.report.frames import devices_frame, records
from fuseplan.search.cache import cache_file, open_disk, setting
from fuseplan.settings import resolve_device
from fuseplan.support.atomic_file import OutputError
from fuseplan.support.errors import InvalidArgumentError
from fuseplan.support.format import bytes_text, wrapped
from fuseplan.targets import calibrate as calibration
from fuseplan.workloads import FAMILIES, Workload
from fuseplan.workloads.workload import make_args


def demo(out: Path, small: bool, dtype: str, deadline: float, json: bool) -> None:
    """``fuseplan demo``."""
    programs = []
    for name in ("gpt2_block", "gpt2_block_grad"):
        f, args = load(name, dtype, small)
        programs.append(Program(name, f, args, make_args(args)))
    with progress(1) as steps:
        result = run_demo(programs, out, deadline, steps)
    if json:
        print_json(result.as_dict())
    else:
        print_demo(result)


def workloads(text: str, operations: bool, json: bool) -> None:
    """``fuseplan workloads``."""
    found = [
        (family, workload)
        for family, of_family in FAMILIES.items()
        for workload in of_family.values()
        if text.lower() in f"{workload.name} {family} {workload.description}".lower()
    ]
    counts = _operations([workload for _, workload in found]) if operations else {}
    if json:
        print_json(
            [
                {
                    "name": workload.name,
                    "family": family,
                    "description": workload.description,
                    "sizes": workload.sizes,
                    "needs": workload.needs,
                    "missing": workload.missing,
                    **({"operations": counts.get(workload.name)} if operations else {}),
                }
                for family, workload in found
            ]
        )
        return
    if not found:
        print(f"no workload has {text!r} in its name, family or description")
        return
    for family in dict.fromkeys(family for family, _ in found):
        rows = []
        for workload in (workload for other, workload in found if other == family):
            sizes = " ".join(f"{name}={size}" for name, size in workload.sizes.items())
            lacks = f"not installed: {' and '.join(workload.missing)}" if workload.missing else ""
            count = counts.get(workload.name)
            number = ("" if count is None else f"{count:,}",) if operations else ()
            rows.append((workload.name, *number, workload.description, lacks or sizes))
        head = ("workload", *(("operations",) if operations else ()), "what it computes", "sizes")
        print_table(head, rows, right=(1,) if operations else (), title=family)
        print()
    print("Yours: package.module:function or file.py:function, which returns (f, args).")


def _operations(chosen: list[Workload]) -> dict[str, int]:
    """The number of operations of each workload whose packages are installed."""
    counts = {}
    with progress(len(chosen)) as steps:
        for workload in chosen:
            steps.start(f"tracing {workload.name}")
            if not workload.missing:
                f, args = workload.build()
                counts[workload.name] = len(lower(trace(f, *args)).graph.nodes)
            steps.done()
    return counts


def devices(toml: str | None, json: bool) -> None:
    """``fuseplan devices``."""
    if toml is not None:
        if json:
            raise InvalidArgumentError(f"--toml {toml} and --json: expected one of the two")
        print(resolve_device(toml).to_toml(), end="")
        return
    frame = devices_frame()
    known = records(frame.reset_index())
    if json:
        sources = frame.attrs["sources"]
        print_json([{**device, "sources": sources[device["name"]]} for device in known])
        return
    rows = [
        (
            device["name"],
            device["backends"],
            _shown(device, "hbm_gb", f"{device['hbm_gb']:.0f}"),
            _shown(device, "hbm_gb_per_s", f"{device['hbm_gb_per_s']:,.0f}"),
            *(
                _shown(device, name, _significant(device[name]))
                for name in ("bf16_tflops", "f32_tflops", "vector_tflops")
            ),
            _shown(device, "ridge_point", f"{device['ridge_point']:.0f}"),
        )
        for device in known
    ]
    head = ("device", "backends", "GB", "GB/s", "bf16", "f32", "vector", "ridge")
    print_table(head, rows, right=(2, 3, 4, 5, 6, 7))
    print("backends: languages of kernels; --device h200:mosaic_gpu asks for the second.")
    print("bf16 and f32: matrix units, vector: the others, in Tflop/s.")
    print("ridge: bf16 flops per HBM byte.")
    print("?: assumed, neither measured nor published. Also assumed, but not shown:")
    for device in known:
        shown = {field for fields in _DEVICE_FIELDS.values() for field in fields}
        rest = [name for name in device["assumed"].split(", ") if name and name not in shown]
        if rest:
            print("\n".join(wrapped(f"  {device['name']}: {', '.join(rest)}", 80, "    ")))
    if "cpu" in {device["name"] for device in known if device["assumed"]}:
        print("`fuseplan calibrate` measures the CPU.")


_DEVICE_FIELDS = {
    "hbm_gb": ("hbm_capacity_bytes",),
    "hbm_gb_per_s": ("hbm_bytes_per_s",),
    "bf16_tflops": ("matrix_flops_per_s", "matrix_flops_per_s.bfloat16"),
    "f32_tflops": ("matrix_flops_per_s", "matrix_flops_per_s.float32"),
    "vector_tflops": ("vector_flops_per_s",),
    "ridge_point": ("hbm_bytes_per_s", "matrix_flops_per_s", "matrix_flops_per_s.bfloat16"),
}
"""For each column of the table, the fields of ``DeviceSpec`` that it follows from."""


def _shown(device: dict[str, Any], column: str, text: str) -> str:
    """Mark ``text`` with ``?`` if a field behind the column is assumed."""
    assumed = set(device["assumed"].split(", "))
    return f"{text}?" if assumed & set(_DEVICE_FIELDS[column]) else text


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def calibrate(deadline: float, json: bool) -> None:
    """``fuseplan calibrate``."""
    with progress(1) as steps:
        steps.start("measuring")
        found = calibration.recalibrate_cpu(deadline)
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
                "file": str(calibration.cache_file()) if found.is_stored else None,
            }
        )
    else:
        print(cpu.description)
        origin = dict.fromkeys(FIGURES, "measured")
        origin |= dict.fromkeys(found.kept, "kept from an earlier measurement")
        origin |= dict.fromkeys(found.assumed, "assumed")
        rows = [(name, _figure_text(name, figure_of(cpu, name)), origin[name]) for name in FIGURES]
        print_table(("figure", "value", "source"), rows, right=(1,))
        print(
            f"written to {calibration.cache_file()}"
            if found.is_stored
            else f"{calibration.cache_file()} is unchanged"
        )
        for why in dict.fromkeys(why for _, why in found.problems):
            names = ", ".join(name for name, other in found.problems if other == why)
            print("\n".join(wrapped(f"not measured: {names}: {why}", 80, "    ")))
    if found.problems:
        raise typer.Exit(1)


def _figure_text(name: str, value: int) -> str:
    """Format a time in µs or ns, or a rate in 10⁹ per second."""
    if not name.endswith("_ps"):
        return f"{value / 1e9:.1f} G/s"
    return f"{value / 1e6:.2f} µs" if value >= 10_000 else f"{value / 1e3:.2f} ns"


def cache(clear: bool, json: bool) -> None:
    """``fuseplan cache``."""
    path, used = cache_file(), setting() not in ("", "0")
    disk = open_disk(path)
    if clear and disk is not None and not disk.clear():
        raise OutputError(f"{path} cannot be removed: remove it by hand, or set FUSEPLAN_CACHE to a folder")
    entries, size_bytes = (0, 0) if disk is None else (disk.count(), disk.size_bytes())
    if json:
        print_json({"file": str(path), "used": used, "entries": entries, "size_bytes": size_bytes})
        return
    print(f"file     {path}")
    print(f"used     {'yes' if used else 'no: FUSEPLAN_CACHE=1 keeps the solutions of components there'}")
    print(f"entries  {entries:,}, {bytes_text(size_bytes)}")
