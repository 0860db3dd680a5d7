"""A CPU with fixed figures, so that tests plan for it alike on every machine."""

from costmodel.device import DeviceSpec

SERVER_CPU = DeviceSpec(
    name="server_cpu",
    description="round numbers for tests: two cores of a server, 26 GB/s",
    platform="cpu",
    backend="xla",
    core_count=2,
    hbm_capacity_bytes=24 * 10**9,
    hbm_bytes_per_s=26 * 10**9,
    cache_bytes=32 << 20,
    cache_bytes_per_s=150 * 10**9,
    private_cache_bytes=2 << 20,
    private_cache_bytes_per_s=140 * 10**9,
    onchip_bytes=20 << 20,
    register_bytes=0,
    launch_ps=750_000,
    matrix_flops_per_s=(("float32", 300 * 10**9), ("float64", 140 * 10**9)),
    vector_flops_per_s=96 * 10**9,
    transcendental_per_s=32 * 10**8,
    fresh_bytes_per_s=8 * 10**9,
    reduction_per_s=11 * 10**9,
    reduction_row_ps=2_200,
    step_ps=105_000,
    sources=(("all", "chosen: round numbers near a small server of 2023"),),
)
