"""``fuseplan devices``."""

from __future__ import annotations

from fuseplan.cli.arguments import Json


def devices(json: Json = False) -> None:
    """The known devices, and where their figures come from (--json)."""
    from fuseplan.console import print_json, print_table
    from fuseplan.report import devices_frame, records

    frame = devices_frame()
    known = records(frame.reset_index())
    if json:
        sources = frame.attrs["sources"]
        print_json([{**device, "sources": sources[device["name"]]} for device in known])
        return
    rows = [
        (
            device["name"],
            device["description"][:29],
            device["backends"],
            f"{device['hbm_gb']:.0f}",
            f"{device['hbm_gb_per_s']:,.0f}",
            _significant(device["bf16_tflops"]),
            _significant(device["f32_tflops"]),
            _significant(device["vector_tflops"]),
            f"{device['ridge_point']:.0f}",
        )
        for device in known
    ]
    head = ("device", "description", "backends", "GB", "GB/s", "bf16", "f32", "vector", "ridge")
    print_table(head, rows, right=(3, 4, 5, 6, 7, 8))
    print("backends: what kernels may be in; --device NAME:BACKEND asks for another than the first.")
    print("bf16 and f32: matrix units, vector: the others, in Tflop/s; ridge: bf16 flops per HBM byte.")


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
