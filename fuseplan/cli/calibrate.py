"""``fuseplan calibrate``."""

from __future__ import annotations

from fuseplan.cli.arguments import Json


def calibrate(json: Json = False) -> None:
    """Measure this machine's CPU anew (some seconds), and keep the figures."""
    from fuseplan.calibrate import cache_file, local_cpu
    from fuseplan.console import print_json, print_table, progress

    with progress(1) as steps:
        steps.start("measuring")
        cpu = local_cpu(refresh=True)
    matrix = dict(cpu.matrix_flops_per_s)
    rates = {
        "hbm_bytes_per_s": cpu.hbm_bytes_per_s,
        "cache_bytes_per_s": cpu.cache_bytes_per_s,
        "private_cache_bytes_per_s": cpu.private_cache_bytes_per_s,
        "matrix_bf16_flops_per_s": matrix["bfloat16"],
        "matrix_f32_flops_per_s": matrix["float32"],
        "matrix_f64_flops_per_s": matrix["float64"],
        "vector_flops_per_s": cpu.vector_flops_per_s,
        "transcendental_per_s": cpu.transcendental_per_s,
        "reduction_per_s": cpu.reduction_per_s,
        "fresh_bytes_per_s": cpu.fresh_bytes_per_s,
    }
    overheads = {"launch_ps": cpu.launch_ps, "step_ps": cpu.step_ps}
    if json:
        print_json({"description": cpu.description, **rates, **overheads, "file": str(cache_file())})
        return
    print(cpu.description)
    rows = [(name, f"{value / 1e9:.1f}") for name, value in rates.items()]
    print_table(("measured", "10⁹ a second"), rows, right=(1,))
    rows = [(name.replace("_ps", "_us"), f"{value / 1e6:.2f}") for name, value in overheads.items()]
    print_table(("measured", "µs"), rows, right=(1,))
    print(f"kept in {cache_file()}")
