"""What fits on a core, and what is alive in HBM between kernels."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel import (
    TEST_DEVICE,
    Access,
    Axis,
    AxisRole,
    Footprint,
    Graph,
    KernelSpec,
    footprint,
    get_device,
    onchip_bytes,
    peak_bytes,
)
from costmodel.onchip import block_bytes, concurrent_tiles
from tests.helpers.graphs import TPU, GraphBuilder, matmul, spec_of_xla, tiled_matmul

pytestmark = pytest.mark.one_python

P, S, R = AxisRole.PARALLEL, AxisRole.STREAMED, AxisRole.RESIDENT
KIB = 1024


def tile_of(graph: Graph, rows: int, backend: str = "triton") -> KernelSpec:
    """The whole graph as one kernel over [rows, columns] with a block of whole rows."""
    m, n = graph.values[graph.inputs[0]].shape

    def axes_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple({m: (0,), n: (1,)}[extent] for extent in shape)

    return KernelSpec(
        tuple(range(len(graph.nodes))), (Axis(m, P, rows), Axis(n, R, n)),
        tuple(axes_of(node.dims) for node in graph.nodes),
        tuple(Access(v, axes_of(graph.values[v].shape)) for v in graph.inputs),
        tuple(Access(v, axes_of(graph.values[v].shape)) for v in graph.outputs), backend,
    )  # fmt: skip


def attention(seq: int, keys: int, d: int) -> tuple[Graph, KernelSpec]:
    """q k^T, exp, p v in one kernel: the keys streamed in tiles of 128, queries of 128."""
    b = GraphBuilder()
    q, k, v = b.input((seq, d), "bfloat16"), b.input((d, keys), "bfloat16"), b.input((keys, d), "bfloat16")
    p = b.elementwise(b.matmul(q, k, "float32"), op="exp", dtype="bfloat16")
    graph = b.build(b.matmul(p, v))
    spec = KernelSpec(
        (0, 1, 2), (Axis(seq, P, 128), Axis(keys, S, 128), Axis(d, R, d)),
        (((0,), (1,), (2,)), ((0,), (1,)), ((0,), (2,), (1,))),
        (Access(q, ((0,), (2,))), Access(k, ((2,), (1,))), Access(v, ((1,), (2,)))),
        (Access(graph.outputs[0], ((0,), (2,))),), "triton",
    )  # fmt: skip
    return graph, spec


class TestTriton:
    def test_streamed_operands_are_double_buffered_in_shared_memory(self) -> None:
        graph = matmul(4096, 4096, 4096, "bfloat16")
        need = footprint(graph, tiled_matmul(graph, 128, 128, 64), TEST_DEVICE)
        # The compiler took 98,304 bytes for three stages of this matmul: 32,768 a stage.
        assert need.onchip_bytes == 2 * 98_304 // 3
        assert need.register_bytes == 128 * 128 * 4  # the float32 accumulator

    def test_attention_takes_what_the_compiler_took(self) -> None:
        graph, spec = attention(4096, 4096, 64)
        assert footprint(graph, spec, TEST_DEVICE).onchip_bytes == 81_920

    def test_attention_d128_just_fits_the_usable_half_of_the_registers(self) -> None:
        # ptxas: 254 registers a thread and no spills, at 128x128 blocks.
        graph, spec = attention(4096, 4096, 128)
        need = footprint(graph, spec, get_device("h200"))
        assert need.register_bytes == 128 * KIB
        assert need.fits(get_device("h200"))

    def test_a_256x256_accumulator_is_the_whole_register_file_and_spills(self) -> None:
        graph = matmul(4096, 4096, 4096, "bfloat16")
        need = footprint(graph, tiled_matmul(graph, 256, 256, 64), get_device("h200"))
        assert need.register_bytes == 256 * KIB
        assert need.onchip_bytes <= get_device("h200").onchip_bytes
        assert not need.fits(get_device("h200"))

    def test_shared_memory_alone_can_be_too_much(self) -> None:
        graph = matmul(4096, 4096, 4096)
        spec = tiled_matmul(graph, 128, 128, 256)  # 2 x 256 KiB
        assert onchip_bytes(graph, spec, TEST_DEVICE) == 512 * KIB
        assert not footprint(graph, spec, TEST_DEVICE).fits(TEST_DEVICE)

    def test_an_elementwise_chain_needs_one_block_whatever_its_length(self) -> None:
        for length in (1, 5):
            b = GraphBuilder()
            x = b.input((1024, 256))
            for _ in range(length):
                x = b.elementwise(x, op="tanh")
            graph = b.build(x)
            need = footprint(graph, tile_of(graph, 8), TEST_DEVICE)
            assert need == Footprint(0, 8 * 256 * 4)

    def test_a_value_used_later_stays_alive(self) -> None:
        b = GraphBuilder()
        x = b.input((1024, 256))
        y = b.elementwise(b.elementwise(x, op="exp"), op="log")
        graph = b.build(b.elementwise(x, y))
        assert footprint(graph, tile_of(graph, 8), TEST_DEVICE).register_bytes == 2 * 8 * 256 * 4

    def test_a_broadcast_keeps_its_source_alive_and_takes_nothing(self) -> None:
        b = GraphBuilder()
        x = b.input((1024, 256))
        s = b.reduce(x, (1,))
        graph = b.build(b.elementwise(x, b.broadcast(s, (1024, 256), (0,)), op="div"))
        assert footprint(graph, tile_of(graph, 8), TEST_DEVICE).register_bytes == (8 * 256 + 8) * 4

    def test_a_scan_joins_blocks_of_32_bits(self) -> None:
        # ptxas: with one block counted, cumlogsumexp of 16 rows of 1024 in bfloat16 spilled 100 bytes.
        b = GraphBuilder()
        graph = b.build(b.scan(b.input((1024, 256), "bfloat16"), 1))
        assert footprint(graph, tile_of(graph, 8), TEST_DEVICE).register_bytes == 8 * 256 * (2 + 4 + 4)

    def test_a_narrow_type_takes_its_own_bytes(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.elementwise(b.input((1024, 256), "bfloat16"), op="neg"))
        assert footprint(graph, tile_of(graph, 8), TEST_DEVICE).register_bytes == 8 * 256 * 2

    @pytest.mark.parametrize(
        ("left", "right", "made"),
        # The compiler took 65,536 for (silu(x) * y) @ w in its two stages; of x @ tanh(w) and
        # silu(x) @ tanh(w) it held 6 and 5 blocks in three: here one less of what is loaded.
        [(2, 0, 65_536), (0, 1, 65_536), (1, 1, 49_152), (1, 0, 49_152)],
    )
    def test_what_operands_are_made_of_is_buffered_once(self, left: int, right: int, made: int) -> None:
        b = GraphBuilder()
        sides = []
        for n_arrays in (left, right):
            arrays = [b.input((4096, 4096), "bfloat16") for _ in range(max(n_arrays, 1))]
            sides.append(b.elementwise(*arrays, op="mul") if n_arrays else arrays[0])
        graph = b.build(b.matmul(*sides))
        lhs, rhs = ((0,), (2,)), ((2,), (1,))
        reads = [Access(v, lhs) for v in graph.inputs[: max(left, 1)]]
        reads += [Access(v, rhs) for v in graph.inputs[max(left, 1) :]]
        node_axes = ([lhs] if left else []) + ([rhs] if right else []) + [((0,), (1,), (2,))]
        spec = KernelSpec(
            tuple(range(len(graph.nodes))), (Axis(4096, P, 128), Axis(4096, P, 128), Axis(4096, S, 64)),
            tuple(node_axes), tuple(reads), (Access(graph.outputs[0], ((0,), (1,))),), "triton",
        )  # fmt: skip
        need = footprint(graph, spec, TEST_DEVICE)
        assert need.onchip_bytes == made
        # The accumulator, and what of the two sides is computed in registers.
        alive = max(left * 16_384, right * 16_384, (left and right) * 32_768)
        assert need.register_bytes == 128 * 128 * 4 + alive

    def test_an_operand_that_the_epilogue_reads_too(self) -> None:
        b = GraphBuilder()
        x = b.input((4096, 4096))
        graph = b.build(b.elementwise(b.matmul(x, b.input((4096, 4096))), x))
        spec = tiled_matmul(graph, 64, 64, 32)
        spec = dataclasses.replace(
            spec, nodes=(0, 1), node_axes=(*spec.node_axes, ((0,), (1,))),
            reads=(*spec.reads, Access(0, ((0,), (1,)))), writes=(Access(3, ((0,), (1,))),),
        )  # fmt: skip
        need = footprint(graph, spec, TEST_DEVICE)
        assert need.onchip_bytes == 2 * 2 * 64 * 32 * 4
        assert need.register_bytes == 2 * 64 * 64 * 4

    def test_small_tiles_share_a_core(self) -> None:
        assert concurrent_tiles(Footprint(0, 0), TEST_DEVICE) == 16
        assert concurrent_tiles(Footprint(64 * KIB, 0), TEST_DEVICE) == 2
        assert concurrent_tiles(Footprint(1, 128 * KIB), TEST_DEVICE) == 2
        assert concurrent_tiles(Footprint(10**9, 0), TEST_DEVICE) == 1


class TestMosaicTpu:
    def test_a_prologue_is_computed_in_32_bits(self) -> None:
        b = GraphBuilder()
        x, w = b.input((1024, 1024), "bfloat16"), b.input((1024, 1024), "bfloat16")
        graph = b.build(b.matmul(b.elementwise(x, op="tanh"), w))
        spec = KernelSpec(
            (0, 1), (Axis(1024, P, 128), Axis(1024, P, 256), Axis(1024, S, 512)),
            (((0,), (2,)), ((0,), (1,), (2,))), (Access(x, ((0,), (2,))), Access(w, ((2,), (1,)))),
            (Access(graph.outputs[0], ((0,), (1,))),), "mosaic_tpu",
        )  # fmt: skip
        blocks = (128 * 512 + 512 * 256 + 128 * 256) * 2
        assert onchip_bytes(graph, spec, TPU) == 2 * blocks + 128 * 256 * 4 + 128 * 512 * 4

    def test_the_pipeline_double_buffers_reads_and_writes(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.elementwise(b.input((1024, 256)), op="neg"))
        # Two buffers of x, two of the result, and the result as computed.
        assert onchip_bytes(graph, tile_of(graph, 8, "mosaic_tpu"), TPU) == 5 * 8 * 256 * 4

    def test_what_is_read_in_16_bits_and_used_twice_is_kept_in_32(self) -> None:
        def made(*ops: str) -> int:
            b = GraphBuilder()
            x, y = (b.input((1024, 256), "bfloat16") for _ in range(2))
            graph = b.build(*(b.elementwise(x, y, op=op) for op in ops))
            buffers = 2 * (2 + len(ops)) * 16 * 256 * 2
            return onchip_bytes(graph, tile_of(graph, 16, "mosaic_tpu"), TPU) - buffers

        assert made("sub") == 16 * 256 * 4  # the result
        assert made("sub", "mul") == 2 * 16 * 256 * 4  # x and y

    def test_a_streamed_contraction_carries_a_float32_accumulator(self) -> None:
        graph = matmul(1024, 1024, 1024, "bfloat16")
        spec = tiled_matmul(graph, 128, 256, 512, "mosaic_tpu")
        blocks = (128 * 512 + 512 * 256 + 128 * 256) * 2
        assert onchip_bytes(graph, spec, TPU) == 2 * blocks + 128 * 256 * 4

    @pytest.mark.parametrize(
        ("shape", "bits", "expected"),
        [
            ((8, 128), 32, 4096),
            ((1, 1), 32, 4096),
            ((9, 128), 32, 8192),
            ((8, 128), 16, 4096),  # (16, 128) tiles of 16 bits
            ((8, 128), 8, 4096),  # (32, 128) tiles of 8 bits
            ((3, 5, 130), 32, 3 * 8 * 256 * 4),
            ((100,), 32, 4096),
            ((), 32, 4),
        ],
    )
    def test_blocks_pad_to_the_registers_of_a_tpu(self, shape, bits, expected) -> None:
        axes = tuple(Axis(n, R, n) for n in shape)
        assert block_bytes(axes, tuple((i,) for i in range(len(shape))), bits, True) == expected

    def test_a_column_takes_a_whole_lane_row_each(self) -> None:
        assert block_bytes((Axis(256, R, 256),), ((0,), ()), 32, True) == 256 * 128 * 4

    def test_vmem_is_the_limit(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.elementwise(b.input((4096, 1024)), op="neg"))
        v5e = get_device("tpu_v5e")
        assert footprint(graph, tile_of(graph, 512, "mosaic_tpu"), v5e).fits(v5e)  # 10 MiB
        assert not footprint(graph, tile_of(graph, 1024, "mosaic_tpu"), v5e).fits(v5e)  # 20 MiB


def test_blocks_of_other_backends_are_not_padded() -> None:
    assert block_bytes((Axis(3, R, 3), Axis(5, R, 5)), ((0, 1), ()), 16, False) == 30
    assert block_bytes((Axis(3, R, 3),), ((0,),), 4, False) == 2  # three nibbles


def test_an_xla_loop_holds_its_blocks_once() -> None:
    b = GraphBuilder()
    graph = b.build(b.elementwise(b.input((1024, 256)), op="neg"))
    assert onchip_bytes(graph, tile_of(graph, 8, "xla"), TEST_DEVICE) == 3 * 8 * 256 * 4


def test_a_group_left_to_xla_always_fits() -> None:
    graph = matmul(4096, 4096, 4096)
    assert footprint(graph, spec_of_xla(graph, 0), TEST_DEVICE) == Footprint(0)


def test_a_larger_tile_never_needs_less() -> None:
    graph, spec = attention(4096, 4096, 64)
    for device in (TEST_DEVICE, TPU):
        backend = dataclasses.replace(spec, backend=device.backend)
        needs = []
        for tile in (16, 32, 64, 128, 256):
            axes = (Axis(4096, P, tile), *spec.axes[1:])
            need = footprint(graph, dataclasses.replace(backend, axes=axes), device)
            needs.append(need.onchip_bytes + need.register_bytes)
        assert needs == sorted(needs)


class TestPeakBytes:
    SIZE = 64 * 64 * 4

    def chain(self, length: int) -> Graph:
        b = GraphBuilder()
        x = b.input((64, 64))
        for _ in range(length):
            x = b.elementwise(x, op="neg")
        return b.build(x)

    def kernels(self, graph: Graph, *groups: tuple[int, ...]) -> list[KernelSpec]:
        return [spec_of_xla(graph, *group) for group in groups]

    def test_inputs_and_outputs_are_not_temporaries(self) -> None:
        graph = self.chain(1)
        assert peak_bytes(graph, self.kernels(graph, (0,))) == 0

    def test_a_chain_holds_the_value_read_and_the_one_written(self) -> None:
        graph = self.chain(5)
        assert peak_bytes(graph, self.kernels(graph, (0,), (1,), (2,), (3,), (4,))) == 2 * self.SIZE

    def test_fusion_removes_temporaries(self) -> None:
        graph = self.chain(5)
        assert peak_bytes(graph, self.kernels(graph, (0, 1), (2, 3, 4))) == self.SIZE
        assert peak_bytes(graph, self.kernels(graph, (0, 1, 2, 3, 4))) == 0

    def test_a_value_lives_until_its_last_reader(self) -> None:
        b = GraphBuilder()
        x = b.elementwise(b.input((64, 64)), op="exp")
        y = b.elementwise(b.elementwise(x, op="neg"), op="abs")
        graph = b.build(b.elementwise(x, y))
        assert peak_bytes(graph, self.kernels(graph, (0,), (1,), (2,), (3,))) == 3 * self.SIZE

    def test_the_order_of_kernels_matters(self) -> None:
        b = GraphBuilder()
        x = b.input((64, 64))
        first, second = b.elementwise(x, op="exp"), b.elementwise(x, op="log")
        graph = b.build(b.reduce(first, (0, 1)), b.reduce(second, (0, 1)))
        assert peak_bytes(graph, self.kernels(graph, (0,), (1,), (2,), (3,))) == 2 * self.SIZE
        assert peak_bytes(graph, self.kernels(graph, (0,), (2,), (1,), (3,))) == self.SIZE

    def test_a_bitcast_shares_its_operands_buffer(self) -> None:
        b = GraphBuilder()
        x = b.elementwise(b.input((64, 64)), op="exp")
        flat = b.reshape(x, (4096,))
        graph = b.build(b.reduce(flat, (0,)))
        assert peak_bytes(graph, self.kernels(graph, (0,), (1,), (2,))) == self.SIZE

    def test_a_bitcast_of_a_temporary_to_an_output_is_the_output(self) -> None:
        b = GraphBuilder()
        graph = b.build(b.reshape(b.elementwise(b.input((64, 64)), op="exp"), (4096,)))
        assert peak_bytes(graph, self.kernels(graph, (0,), (1,))) == 0

    def test_no_kernels_no_bytes(self) -> None:
        assert peak_bytes(self.chain(1), []) == 0
