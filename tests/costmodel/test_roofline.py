"""The physics of ``estimate``, by hand-computed values on the test device: 1 byte a ps from
HBM, 4 from the cache (32 MiB), 100 (float32) and 200 (bfloat16) matrix flops, 10 vector
flops and 2 transcendentals a ps, 100 cores, 2 us a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import pytest
from jax import lax

from costmodel import (
    TEST_DEVICE,
    Access,
    Axis,
    AxisRole,
    Cost,
    DeviceSpec,
    Flops,
    Footprint,
    Graph,
    KernelSpec,
    bytes_moved,
    estimate,
    get_device,
)
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from tests.helpers.graphs import TPU, GraphBuilder, matmul, spec_of_xla, tiled_matmul

pytestmark = pytest.mark.one_python

P, R = AxisRole.PARALLEL, AxisRole.RESIDENT
LAUNCH_PS = 2_000_000


def add(*shape: int, dtype: str = "float32", op: str = "add") -> Graph:
    b = GraphBuilder()
    return b.build(b.elementwise(b.input(shape, dtype), b.input(shape, dtype), op=op))


def rows(graph: Graph, tile: int, backend: str = "triton") -> KernelSpec:
    """One elementwise node over [rows, columns], a block of whole rows."""
    m, n = graph.nodes[0].dims
    return KernelSpec(
        (0,), (Axis(m, P, tile), Axis(n, R, n)), (((0,), (1,)),),
        (Access(0, ((0,), (1,))), Access(1, ((0,), (1,)))), (Access(2, ((0,), (1,))),), backend,
    )  # fmt: skip


def prologue(
    m: int, n: int, k: int, tiles: tuple[int, int, int], backend: str = "triton"
) -> tuple[Graph, KernelSpec]:
    """``(exp(x) * exp(r)[:, None]) @ w``, k streamed."""
    b = GraphBuilder()
    x, r, w = b.input((m, k)), b.input((m,)), b.input((k, n))
    scale = b.broadcast(b.elementwise(r, op="exp"), (m, k), (0,))
    graph = b.build(b.matmul(b.elementwise(b.elementwise(x, op="exp"), scale, op="mul"), w))
    rows, depth = ((0,),), ((0,), (2,))
    spec = KernelSpec(
        (0, 1, 2, 3, 4),
        (Axis(m, P, tiles[0]), Axis(n, P, tiles[1]), Axis(k, AxisRole.STREAMED, tiles[2])),
        (rows, depth, depth, depth, ((0,), (1,), (2,))),
        (Access(r, rows), Access(x, depth), Access(w, ((2,), (1,)))),
        (Access(graph.outputs[0], ((0,), (1,))),), backend,
    )  # fmt: skip
    return graph, spec


class TestWhatDominates:
    def test_a_large_add_is_dominated_by_hbm_bandwidth(self) -> None:
        graph = add(4096, 1024)
        cost = estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE)
        assert cost.hbm_read_bytes == 2 * 4096 * 1024 * 4
        assert cost.hbm_write_bytes == 4096 * 1024 * 4
        assert cost.memory_ps == 50_331_648
        assert cost.bound_by == "memory"
        assert cost.time_ps == LAUNCH_PS + cost.memory_ps

    def test_a_small_add_is_launch_bound(self) -> None:
        graph = add(16, 16)
        cost = estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE)
        assert cost.bound_by == "launch"
        assert cost.time_ps == LAUNCH_PS + 3 * 16 * 16 * 4

    def test_a_large_matmul_is_dominated_by_the_matrix_units(self) -> None:
        graph = matmul(4096, 4096, 4096)
        cost = estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE)
        assert cost.flops == Flops(matrix=2 * 4096**3)
        # 4,096 tiles of 64 x 64 on 100 cores: 41 waves, of a flop a picosecond and core.
        assert cost.matrix_ps == 41 * 2 * 64 * 64 * 4096
        assert cost.bound_by == "matrix"

    def test_a_library_matmul_obeys_the_laws_of_a_fused_one(self) -> None:
        # Priced at its peak it would never be worth fusing anything to a matmul.
        graph = matmul(1024, 1024, 1024)
        library = estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE)
        ours = estimate(graph, tiled_matmul(graph, 128, 128, 64), TEST_DEVICE)
        assert library.matrix_ps >= -(-2 * 1024**3 // 100)
        assert library.time_ps <= ours.time_ps
        assert library.cache_ps > 0

    def test_a_kernel_of_a_hopper_transposes_wide_operands_on_their_way(self) -> None:
        h200, a100 = get_device("h200"), get_device("a100")
        across = matmul(1024, 1024, 1024)  # [m, k] @ [k, n]: the right operand lies along n
        along = dataclasses.replace(
            across, nodes=(dataclasses.replace(across.nodes[0], input_maps=(((0,), (2,)), ((1,), (2,)))),)
        )
        narrow = matmul(1024, 1024, 1024, "bfloat16")

        def matrix_ps(graph: Graph, device: DeviceSpec = h200) -> int:
            return estimate(graph, tiled_matmul(graph, 128, 128, 64), device).matrix_ps

        assert matrix_ps(across) > 7 * matrix_ps(along)
        assert matrix_ps(narrow) == pytest.approx(matrix_ps(along) / 2, rel=1e-6)
        assert matrix_ps(across, a100) == matrix_ps(along, a100)
        # The library's kernels copy such operands at their full rate, and so does a floor of any kernel.
        library = [estimate(g, spec_of_xla(g, 0), h200).matrix_ps for g in (across, along)]
        assert library[0] == library[1] < matrix_ps(along) * 2

    def test_bfloat16_doubles_the_matrix_rate_and_halves_the_bytes(self) -> None:
        wide, narrow = matmul(1024, 1024, 1024), matmul(1024, 1024, 1024, "bfloat16")
        a, b = (estimate(g, spec_of_xla(g, 0), TEST_DEVICE) for g in (wide, narrow))
        assert a.matrix_ps == pytest.approx(2 * b.matrix_ps, abs=2)
        assert a.hbm_bytes == 2 * b.hbm_bytes

    def test_a_thin_matmul_is_memory_bound_below_the_ridge_point(self) -> None:
        graph = matmul(1, 4096, 4096, "bfloat16")
        assert estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE).bound_by == "memory"

    def test_exponentials_are_bound_by_the_special_function_units(self) -> None:
        b = GraphBuilder()
        x = b.input((1024, 1024), "float16")
        for _ in range(40):
            x = b.elementwise(x, op="exp")
        graph = b.build(x)
        cost = estimate(graph, spec_of_xla(graph, *range(40)), TEST_DEVICE)
        assert cost.transcendental_ps == 40 * 1024 * 1024 // 2
        assert cost.bound_by == "vector"

    def test_vector_and_transcendental_work_add_up(self) -> None:
        assert Cost(vector_ps=3, transcendental_ps=4).time_ps == 7

    def test_a_bitcast_is_free(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.reshape(b.input((64, 64)), (4096,)))
        cost = estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE)
        assert cost == Cost()
        assert cost.bound_by == "free"

    def test_a_bitcast_beside_real_work_is_not_the_whole_kernel(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.elementwise(b.reshape(b.input((64, 64)), (4096,)), op="neg"))
        assert estimate(graph, spec_of_xla(graph, 0, 1), TEST_DEVICE).launch_ps == LAUNCH_PS

    def test_an_empty_array_costs_only_its_launch(self) -> None:
        graph = add(0, 16)
        assert estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE).time_ps == LAUNCH_PS

    def test_fusing_two_adds_saves_a_launch_and_the_intermediate_twice(self) -> None:
        b = GraphBuilder()
        x = b.input((4096, 1024))
        graph = b.build(b.elementwise(b.elementwise(x, op="neg"), op="abs"))
        apart = sum(estimate(graph, spec_of_xla(graph, n), TEST_DEVICE).time_ps for n in (0, 1))
        together = estimate(graph, spec_of_xla(graph, 0, 1), TEST_DEVICE).time_ps
        assert apart - together == LAUNCH_PS + 2 * 4096 * 1024 * 4

    def test_a_value_read_by_two_nodes_is_read_once(self) -> None:
        b = GraphBuilder()
        x = b.input((1024, 1024))
        graph = b.build(b.elementwise(x, op="neg"), b.elementwise(x, op="abs"))
        assert estimate(graph, spec_of_xla(graph, 0, 1), TEST_DEVICE).hbm_read_bytes == 4 * 1024**2


class TestReReads:
    def test_a_matmul_that_fits_the_cache_reads_hbm_once(self) -> None:
        graph = matmul(1024, 1024, 1024)
        moved = bytes_moved(graph, tiled_matmul(graph, 128, 64, 32), TEST_DEVICE)
        assert moved.hbm_read_bytes == 2 * 4 * 1024**2
        # 16 tiles along n load the left operand, 8 along m the right one.
        assert moved.loaded_bytes == (16 + 8) * 4 * 1024**2
        assert moved.loaded_bytes - moved.hbm_read_bytes == 22 * 4 * 1024**2

    def test_small_tiles_make_a_matmul_cache_bound(self) -> None:
        graph = matmul(1024, 1024, 1024)
        cost = estimate(graph, tiled_matmul(graph, 8, 8, 32), TEST_DEVICE)
        assert cost.cache_ps == 2 * 128 * 4 * 1024**2 // 4
        assert cost.bound_by == "cache"

    def test_re_reads_of_a_value_larger_than_the_cache_go_to_hbm(self) -> None:
        # 64 MiB each; 32 x 32 tiles in row order on 100 cores: a wave is 3 rows of 32 tiles. The
        # left operand's row serves its whole wave; the right one is fetched by ceil(32/3) waves.
        graph = matmul(4096, 4096, 4096)
        moved = bytes_moved(graph, tiled_matmul(graph, 128, 128, 32), TEST_DEVICE)
        assert moved.hbm_read_bytes == (1 + 11) * 4 * 4096**2

    def test_more_cores_share_more_fetches(self) -> None:
        graph = matmul(4096, 4096, 4096)
        spec = tiled_matmul(graph, 128, 128, 32)
        reads = [
            bytes_moved(graph, spec, dataclasses.replace(TEST_DEVICE, core_count=cores)).hbm_read_bytes
            for cores in (1, 32, 64, 100, 1024)
        ]
        assert reads == sorted(reads, reverse=True)
        assert reads[0] == 64 * 4 * 4096**2  # nobody shares: each of 32 tiles fetches, both operands
        assert reads[-1] == 2 * 4 * 4096**2  # all tiles run at once

    def test_a_block_that_the_streamed_axis_does_not_index_is_held(self) -> None:
        # Two matmuls in one kernel would re-read a bias per step otherwise: [n] added to [m, n].
        graph = matmul(512, 512, 512)
        spec = dataclasses.replace(tiled_matmul(graph, 512, 512, 32), reads=(Access(0, ((0,), ())),))
        assert bytes_moved(graph, spec, TEST_DEVICE).loaded_bytes == 4 * 512**2

    def test_two_views_of_a_cached_value_are_one_fetch_of_a_large_one_two(self) -> None:
        for side, fetches in ((1024, 1), (4096, 2)):  # 4 MiB and 64 MiB against 32 MiB
            b = GraphBuilder()
            x = b.input((side, side))
            graph = b.build(b.elementwise(x, b.transpose(x, (1, 0))))
            spec = KernelSpec(
                (0, 1), (Axis(side, P, 64), Axis(side, P, 64)), (((0,), (1,)), ((0,), (1,))),
                (Access(0, ((0,), (1,))), Access(0, ((1,), (0,)))), (Access(2, ((0,), (1,))),), "triton",
            )  # fmt: skip
            assert bytes_moved(graph, spec, TEST_DEVICE).hbm_read_bytes == fetches * 4 * side**2

    def test_a_masked_edge_moves_no_bytes(self) -> None:
        graph = add(100, 100)
        spec = dataclasses.replace(rows(graph, 16), axes=(Axis(100, P, 16), Axis(100, R, 128)))
        assert bytes_moved(graph, spec, TEST_DEVICE).hbm_read_bytes == 2 * 4 * 100 * 100


class TestParts:
    """What XLA's own kernels need not read: 128 columns of float32 are 512 bytes."""

    @staticmethod
    def read_bytes(f: Callable[..., jax.Array], *args: jax.ShapeDtypeStruct) -> int:
        graph = lower(trace(f, *args)).graph
        (node,) = (node for node in graph.nodes if node.takes_part)
        return bytes_moved(graph, spec_of_xla(graph, node.id), TEST_DEVICE).hbm_read_bytes

    def test_of_what_is_sliced(self) -> None:
        x = jax.ShapeDtypeStruct((1000, 128), "float32")
        i = jax.ShapeDtypeStruct((), "int32")
        assert self.read_bytes(lambda x: x[10:20], x) == 10 * 512
        assert self.read_bytes(lambda x: x[:, 5], x) == 1000 * 4
        assert self.read_bytes(lambda x, i: lax.dynamic_slice_in_dim(x, i, 10), x, i) == 10 * 512 + 4

    def test_of_what_is_gathered(self) -> None:
        table, rows = jax.ShapeDtypeStruct((1000, 128), "float32"), jax.ShapeDtypeStruct((7, 1), "int32")
        many = jax.ShapeDtypeStruct((5000, 1), "int32")
        dims = lax.GatherDimensionNumbers((1,), (0,), (0,))

        def gather(table: jax.Array, rows: jax.Array) -> jax.Array:
            return lax.gather(table, rows, dims, (1, 128))

        assert self.read_bytes(gather, table, rows) == 7 * 512 + 7 * 4
        assert self.read_bytes(gather, table, many) == 1000 * 512 + 5000 * 4


class TestSequentialGrid:
    def test_a_block_is_kept_while_its_index_does_not_change(self) -> None:
        # m outside n: the left block stays for all n, the right one is fetched for every m.
        graph = matmul(1024, 1024, 1024)
        spec = tiled_matmul(graph, 128, 256, 1024, "mosaic_tpu")
        assert bytes_moved(graph, spec, TPU).hbm_read_bytes == (1 + 8) * 4 * 1024**2

    def test_a_streamed_axis_makes_the_outer_operand_move_too(self) -> None:
        # k innermost: the left block changes within each n, so it is fetched for each of 4.
        graph = matmul(1024, 1024, 1024)
        spec = tiled_matmul(graph, 128, 256, 256, "mosaic_tpu")
        assert bytes_moved(graph, spec, TPU).hbm_read_bytes == (4 + 8) * 4 * 1024**2

    def test_a_value_no_axis_indexes_is_read_once(self) -> None:
        graph = add(1024, 128)
        spec = dataclasses.replace(rows(graph, 8, "mosaic_tpu"), reads=(Access(0, ((), ())),))
        assert bytes_moved(graph, spec, TPU).hbm_read_bytes == 4 * 1024 * 128

    @pytest.mark.parametrize(
        ("shape", "dtype", "padded"),
        [
            ((64, 12, 64), "float32", 64 * 16 * 128 * 4),
            ((64, 12, 64), "bfloat16", 64 * 16 * 128 * 2),
            ((64, 3, 64), "float32", 64 * 4 * 128 * 4),  # a tile has no more rows than it needs
            ((64, 1, 300), "float32", 64 * 1 * 384 * 4),
            ((64, 1, 300), "bfloat16", 64 * 2 * 384 * 2),  # but a word's
            ((64, 3, 300), "bool", 64 * 4 * 384),
            ((300,), "float32", 384 * 4),
            ((), "bfloat16", 2),
        ],
    )
    def test_arrays_are_padded(self, shape: tuple[int, ...], dtype: str, padded: int) -> None:
        b = GraphBuilder()
        graph = b.build(b.elementwise(b.input(shape, dtype), op="neg"))
        maps = graph.nodes[0].input_maps[0]
        axes = tuple(Axis(n, R, n) for n in graph.nodes[0].dims) or (Axis(1, P, 1),)
        own = tuple((i,) for i in range(len(graph.nodes[0].dims)))
        spec = KernelSpec((0,), axes, (own,), (Access(0, maps),), (Access(1, maps),), "mosaic_tpu")
        moved = bytes_moved(graph, spec, TPU)
        assert moved.hbm_read_bytes == moved.hbm_write_bytes == moved.loaded_bytes == padded
        ours = bytes_moved(graph, spec_of_xla(graph, 0), TPU)
        assert ours.hbm_read_bytes == ours.hbm_write_bytes == graph.values[0].nbytes

    def test_single_rows_that_are_addressed_are_not(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.elementwise(b.input((4, 12, 256)), op="neg"))
        access = ((0,), (1,), (2,))
        whole, single = (
            KernelSpec(
                (0,), (Axis(4, P, 1), Axis(12, P, rows), Axis(256, R, 256)), (((0,), (1,), (2,)),),
                (Access(0, access),), (Access(1, access),), "mosaic_tpu",
            ) for rows in (12, 1)
        )  # fmt: skip
        assert bytes_moved(graph, whole, TPU).hbm_read_bytes == 4 * 16 * 256 * 4
        assert bytes_moved(graph, single, TPU).hbm_read_bytes == 4 * 12 * 256 * 4

    def test_every_load_is_hbm_traffic(self) -> None:
        graph = matmul(1024, 1024, 1024)
        moved = bytes_moved(graph, tiled_matmul(graph, 128, 128, 128, "mosaic_tpu"), TPU)
        assert moved.loaded_bytes - moved.hbm_read_bytes == 0

    def test_tiny_blocks_are_bound_by_the_steps_of_the_grid(self) -> None:
        # The compiler's own figures for rmsnorm 4096x1024 on a v5e: 38 k cycles at 256 rows a
        # block, 363 k at 8: ten times the time. The estimate must rank them so.
        graph = add(4096, 1024)
        v5e = get_device("tpu_v5e")
        few, many = (estimate(graph, rows(graph, r, "mosaic_tpu"), v5e) for r in (256, 8))
        assert few.bound_by == "memory"
        assert many.bound_by == "steps"
        assert many.time_ps > 3 * few.time_ps


class TestWork:
    def test_recomputation_is_counted_per_tile(self) -> None:
        # exp of a row vector, added to every row: computed again by each of the 32 row tiles.
        b = GraphBuilder()
        x, g = b.input((1024, 512)), b.input((512,))
        e = b.elementwise(g, op="exp")
        graph = b.build(b.elementwise(x, b.broadcast(e, (1024, 512), (1,))))
        spec = KernelSpec(
            (0, 1, 2), (Axis(1024, P, 32), Axis(512, R, 512)), (((1,),), ((0,), (1,)), ((0,), (1,))),
            (Access(g, ((1,),)), Access(x, ((0,), (1,)))), (Access(4, ((0,), (1,))),), "triton",
        )  # fmt: skip
        cost = estimate(graph, spec, TEST_DEVICE)
        assert cost.flops == Flops(vector=1024 * 512, transcendental=32 * 512)

    def test_padding_is_computed_too(self) -> None:
        graph = add(100, 100)
        spec = dataclasses.replace(rows(graph, 16), axes=(Axis(100, P, 16), Axis(100, R, 128)))
        assert estimate(graph, spec, TEST_DEVICE).flops.vector == 7 * 16 * 128

    def test_a_loop_leaves_what_it_does_not_carry_alone(self) -> None:
        graph = matmul(128, 128, 1024)
        b = GraphBuilder()
        out = b.elementwise(b.matmul(b.input((128, 1024)), b.input((1024, 128))), op="neg")
        graph = b.build(out)
        spec = dataclasses.replace(
            tiled_matmul(graph, 128, 128, 32), nodes=(0, 1), node_axes=(((0,), (1,), (2,)), ((0,), (1,)))
        )
        assert estimate(graph, spec, TEST_DEVICE).flops == Flops(2 * 128 * 128 * 1024, 128 * 128)

    def test_a_prologue_is_made_again_for_each_tile_of_columns(self) -> None:
        # exp of [256, 100] for each of 256 / 64 tiles of columns, each 4 steps of 32 deep.
        graph, spec = prologue(256, 256, 100, (128, 64, 32))
        cost = estimate(graph, spec, TEST_DEVICE)
        assert cost.flops == Flops(2 * 256 * 256 * 128, 256 * 128 * 4, 256 * 128 * 4 + 256 * 4)
        # 4 tiles of columns load the left operand, 2 of rows the right one; a scale, each of 8 tiles.
        loaded = 4 * (4 * 256 * 100 + 2 * 100 * 256 + 4 * 256)
        assert bytes_moved(graph, spec, TEST_DEVICE).loaded_bytes == loaded

    def test_a_tpu_keeps_nothing_from_one_step_to_the_next(self) -> None:
        # exp of the scales is not carried along the depth, yet each of 4 steps needs it.
        graph, spec = prologue(256, 256, 512, (128, 128, 128), "mosaic_tpu")
        transcendental = estimate(graph, spec, TPU).flops.transcendental
        assert transcendental == 256 * 512 * 2 + 256 * 2 * 4

    def test_idle_cores_compute_nothing(self) -> None:
        graph = matmul(1024, 1024, 1024)
        full = -(-2 * 1024**3 // 100)
        one = estimate(graph, tiled_matmul(graph, 1024, 1024, 64), TEST_DEVICE).matrix_ps
        assert one == 100 * full

    def test_the_last_wave_counts_as_a_whole_one(self) -> None:
        graph = matmul(1024, 1024, 1024)
        full = -(-2 * 1024**3 // 100)
        tiles = estimate(graph, tiled_matmul(graph, 128, 64, 64), TEST_DEVICE).matrix_ps  # 128 on 100
        assert tiles == -(-full * 200 // 128)

    def test_a_few_tiles_wait_for_latency_not_bandwidth(self) -> None:
        # One tile of 32 steps, double buffered: 16 latencies of 0.6 us against 64 KiB at 1 byte/ps.
        graph = matmul(16, 16, 1024)
        cost = estimate(graph, tiled_matmul(graph, 16, 16, 32), TEST_DEVICE)
        assert cost.latency_ps == 16 * 600_000
        assert cost.bound_by == "latency"

    def test_enough_tiles_hide_latency(self) -> None:
        graph = add(65536, 1024)
        spec = rows(graph, 4)
        assert estimate(graph, spec, TEST_DEVICE).memory_ps == 3 * 65536 * 1024 * 4

    def test_a_footprint_at_hand_gives_the_same_cost(self) -> None:
        graph = add(4096, 1024)
        spec = rows(graph, 4)
        need = Footprint(0, 32768)
        assert estimate(graph, spec, TEST_DEVICE, need) == estimate(graph, spec, TEST_DEVICE)


@pytest.mark.parametrize("name", ["test", "a100", "h200", "l4", "tpu_v5e", "tpu_v5p"])
def test_more_of_anything_never_costs_less(name: str) -> None:
    device = get_device(name)
    times = []
    for side in (64, 128, 256, 512, 1024, 2048):
        graph = matmul(side, side, side, "bfloat16")
        times.append(estimate(graph, tiled_matmul(graph, 64, 64, 64, device.backend), device).time_ps)
    assert times == sorted(times)


def test_times_are_integers_rounded_up() -> None:
    graph = add(3, 1)
    cost = estimate(graph, spec_of_xla(graph, 0), TEST_DEVICE)
    assert cost.vector_ps == 1  # 0.3 ps
    assert all(type(getattr(cost, f)) is int for f in ("memory_ps", "vector_ps", "matrix_ps", "cache_ps"))
