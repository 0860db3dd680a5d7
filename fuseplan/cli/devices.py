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
    head = ("device", "backends", "GB", "GB/s", "bf16", "f32", "vector", "ridge")
    print_table(head, rows, right=(2, 3, 4, 5, 6, 7))
    print("backends: what kernels are in; --device h200:mosaic_gpu asks for the second.")
    print("bf16 and f32: matrix units, vector: the others, in Tflop/s; ridge: bf16 flops per HBM byte.")


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
