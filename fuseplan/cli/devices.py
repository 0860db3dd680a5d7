"""``fuseplan devices``."""

from __future__ import annotations

from typing import Any

from fuseplan.cli.arguments import Json
from fuseplan.console import print_json, print_table
from fuseplan.report.frames import devices_frame, records
from fuseplan.support.format import wrapped


def devices(json: Json = False) -> None:
    """List the known devices; --json adds the source of each figure."""
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
        shown = {field for fields in _FIELDS.values() for field in fields}
        rest = [name for name in device["assumed"].split(", ") if name and name not in shown]
        if rest:
            print("\n".join(wrapped(f"  {device['name']}: {', '.join(rest)}", 80, "    ")))
    if "cpu" in {device["name"] for device in known if device["assumed"]}:
        print("`fuseplan calibrate` measures the CPU.")


_FIELDS = {
    "hbm_gb": ("hbm_capacity_bytes",),
    "hbm_gb_per_s": ("hbm_bytes_per_s",),
    "bf16_tflops": ("matrix_flops_per_s", "matrix_flops_per_s.bfloat16"),
    "f32_tflops": ("matrix_flops_per_s", "matrix_flops_per_s.float32"),
    "vector_tflops": ("vector_flops_per_s",),
    "ridge_point": ("hbm_bytes_per_s", "matrix_flops_per_s", "matrix_flops_per_s.bfloat16"),
}
"""The fields of ``DeviceSpec`` that a column shows."""


def _shown(device: dict[str, Any], column: str, text: str) -> str:
    """The text of a number, marked where it is assumed."""
    assumed = set(device["assumed"].split(", "))
    return f"{text}?" if assumed & set(_FIELDS[column]) else text


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
