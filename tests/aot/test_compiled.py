"""Kernels of the workloads' plans do not spill, and what ``experiments.compiled`` tells of them."""

from __future__ import annotations

import csv
import math
import re

import jax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from costmodel import dtypes
from costmodel.devices import get_device
from costmodel.memory import array_bytes
from costmodel.onchip import block_bytes, onchip_bytes
from experiments import compiled
from experiments.compiled_kernels import rows_of
from experiments.compiled_processes import Work, all_rows
from fuseplan.codegen import emit
from fuseplan.codegen.single_pass import live_ins
from fuseplan.extend import gpu_report, tpu_report
from fuseplan.frontend.trace import trace
from fuseplan.settings import make_options
from fuseplan.targets.compile_only import compile_for
from tests.helpers.plans import plan_traced
from tests.helpers.specs import hand_spec, kernel_function, whole_group
from tests.schedule.test_narrow_contractions import low_rank
from tests.schedule.test_normalised_contractions import layer_gelu, rms_gated

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.one_python]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((n, t) for n in ("layernorm_grad", "mlp") for t in ("float32", "bfloat16")),
        ("grouped_attention_vjp", "bfloat16"),
        ("logsumexp", "float32"),
    ],
)
def test_no_kernel_spills(name, dtype):
    rows = list(rows_of((name, "h200", dtype)))
    assert rows
    for row in rows:
        assert row.compiled, row.cause
        assert row.spill_bytes == 0
        assert 0 < row.registers <= 255
        assert row.shared_bytes <= 232_448
        assert row.threads in (32, 64, 128, 256, 512)


def test_what_one_warpgroup_holds_does_not_spill():
    """Nor is what was said of a kernel lost when it is compiled again, which assembles nothing."""
    first, again = (list(rows_of(("gelu_bias", "h200:mosaic_gpu", "bfloat16"))) for _ in range(2))
    assert first
    for row, same in zip(first, again, strict=True):
        assert row.compiled, row.cause
        assert row.spill_bytes == 0
        assert 32 < row.registers <= 255
        assert (same.registers, same.spill_bytes) == (row.registers, row.spill_bytes)


def one_kernel(f, shapes, device, dtype):
    """The one kernel of a function's plan, and the arrays that it reads."""
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    lowered, plan = plan_traced(trace(f, *args), make_options(device, "solver", deadline_s=100))
    (kernel,) = plan.kernels
    avals = [lowered.avals[v] for v in live_ins(kernel.spec)]
    return kernel, emit(kernel.spec, lowered), [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]


def doubled_sums(x, cotangent):
    """Sums along rows, and the gradient of their squares: one scan each way."""
    sums = jnp.cumsum(x * 2, 1) + 1
    return sums, lax.cumsum(sums * cotangent, 1, reverse=True) * 2


@jax.grad
def squared_log_softmax(x):
    """Down columns: rows are read in 16 bits, and computed with and written in 32."""
    return (jax.nn.log_softmax(x, 0).astype("float32") ** 2).sum()


@pytest.mark.parametrize(
    ("f", "shapes", "dtype"),
    [
        (lambda x: lax.cummax(x, 1) - x, [(1024, 1000)], "float32"),
        (lambda x: lax.cumlogsumexp(x, 1) - x, [(1024, 1000)], "bfloat16"),
        (doubled_sums, [(1024, 1000)] * 2, "float32"),
        (squared_log_softmax, [(1024, 1000)], "bfloat16"),
    ],
    ids=["cummax", "cumlogsumexp", "doubled_sums", "log_softmax_grad"],
)
def test_what_a_thread_holds_does_not_spill(f, shapes, dtype):
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    lowered, plan = plan_traced(trace(f, *args), make_options("h200", "solver", deadline_s=100))
    ours = [kernel.spec for kernel in plan.kernels if kernel.spec.backend == "triton"]
    assert ours
    for spec in ours:
        arrays = [lowered.avals[v] for v in live_ins(spec)]
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]
        for report in gpu_report(emit(spec, lowered), arrays, "h200").values():
            assert report.spill_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_and_its_products_do_not_spill(dtype):
    shapes = (4096, 1024), (1024,), (1024, 2816), (1024, 2816)
    kernel, run, arrays = one_kernel(rms_gated, shapes, "h200", dtype)
    assert len(kernel.spec.passes) == 1
    (report,) = gpu_report(run, arrays, "h200").values()
    assert report.spill_bytes == 0
    assert report.registers <= 255


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["tpu_v5e", "tpu_v6e"])
def test_rows_are_normed_beside_the_weights_in_vmem(device, dtype):
    shapes = (4096, 768), (768,), (768,), (768, 3072), (3072,)
    kernel, run, arrays = one_kernel(layer_gelu, shapes, device, dtype)
    assert kernel.spec.streamed is None
    report = tpu_report(run, arrays, device)
    assert report.vmem_bytes is None or report.vmem_bytes <= kernel.cost.onchip_bytes


@pytest.mark.parametrize(("device", "dtype"), [("tpu_v5e", "float32"), ("tpu_v6e", "bfloat16")])
def test_a_low_rank_adapter_is_beside_its_weights(device, dtype):
    shapes = (4096, 1024), (1024, 1024), (1024, 16), (16, 1024)
    kernel, run, arrays = one_kernel(low_rank, shapes, device, dtype)
    report = tpu_report(run, arrays, device)
    assert report.vmem_bytes is None or report.vmem_bytes <= kernel.cost.onchip_bytes


@pytest.mark.parametrize(
    ("device", "dtype", "heads"), [("tpu_v5e", "float32", 8), ("tpu_v6e", "bfloat16", 16)]
)
def test_several_heads_a_step_are_compiled(device, dtype, heads):
    def project(x, w, residual):
        return jnp.transpose(x, (0, 3, 1, 2)).reshape(1, 1024, 2048) @ w + residual

    shapes = (1, 32, 64, 1024), (2048, 768), (1, 1024, 768)
    kernel, run, arrays = one_kernel(project, shapes, device, dtype)
    assert kernel.spec.axes[kernel.spec.streamed].tile == heads
    report = tpu_report(run, arrays, device)
    # To merge heads of 64 into lanes takes more room than is modelled.
    assert report.vmem_bytes is None or report.vmem_bytes <= 1.1 * kernel.cost.onchip_bytes


def adam(parameters, gradients, means, squares, rate):
    means = [0.9 * m + 0.1 * g for m, g in zip(means, gradients, strict=True)]
    squares = [0.99 * s + 0.01 * g * g for s, g in zip(squares, gradients, strict=True)]
    steps = [rate * m / (jnp.sqrt(s) + 1e-8) for m, s in zip(means, squares, strict=True)]
    return [p - step for p, step in zip(parameters, steps, strict=True)], means, squares


def test_a_pack_of_many_arrays_does_not_spill():
    vectors = [jax.ShapeDtypeStruct((768,), "float32")] * 12
    args = (vectors, vectors, vectors, vectors, jax.ShapeDtypeStruct((), "float32"))
    lowered, plan = plan_traced(trace(adam, *args), make_options("h200", "solver", deadline_s=100))
    spec = max((kernel.spec for kernel in plan.kernels), key=lambda spec: len(spec.reads))
    assert len(spec.reads) > 40
    arrays = [jax.ShapeDtypeStruct(lowered.avals[v].shape, "float32") for v in live_ins(spec)]
    (report,) = gpu_report(emit(spec, lowered), arrays, "h200").values()
    assert report.spill_bytes == 0


def test_vmem_is_within_what_is_modelled():
    (row,) = rows_of(("softmax", "tpu_v5e", "float32"))
    assert row.compiled
    assert 0 < row.vmem_bytes <= 16 * 2**20
    # The model counts every block twice; the compiler reuses what it can.
    assert row.vmem_bytes <= 1.1 * row.modelled_onchip_bytes


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda x, y: (x // y, x % y, x + y), "int32"),
        (lambda x, y: (lax.rem(x, y), lax.rem(y, x), x + y), "float32"),
        (lambda x, y: (x**y, y**x, x + y), "float32"),
        (lambda x, y: (lax.nextafter(x, y), lax.nextafter(y, x), x + y), "float32"),
    ],
    ids=["divmod", "rem", "pow", "nextafter"],
)
def test_what_an_operation_is_made_of_is_within_what_is_modelled(f, dtype):
    """Several results are made at once, and what each is made of waits in VMEM."""
    arrays = [jax.ShapeDtypeStruct((128, 512), dtype)] * 2
    lowered = whole_group(f, *arrays)
    spec = hand_spec(lowered, "mosaic_tpu")
    report = tpu_report(kernel_function(spec, lowered, interpret=False), arrays, "tpu_v5e")
    blocks_bytes = 5 * 128 * 512 * 4  # once: there is no next tile
    made_bytes = report.vmem_bytes - blocks_bytes
    assert 0 < made_bytes <= onchip_bytes(lowered.graph, spec, get_device("tpu_v5e")) - 2 * blocks_bytes


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 1, 0)])
def test_transposes_are_within_what_is_modelled(order):
    arrays = [jax.ShapeDtypeStruct((128, 4, 128), "float32")]
    lowered = whole_group(lambda x: (x + 1).transpose(order) * 2, *arrays)
    spec = hand_spec(lowered, "mosaic_tpu")
    report = tpu_report(kernel_function(spec, lowered, interpret=False), arrays, "tpu_v5e")
    assert 0 < report.vmem_bytes <= onchip_bytes(lowered.graph, spec, get_device("tpu_v5e"))


def made_bytes(f, *arrays):
    """What a kernel of one tile has in VMEM beside its blocks: as compiled, and as modelled."""
    lowered = whole_group(f, *arrays)
    spec = hand_spec(lowered, "mosaic_tpu")
    values = lowered.graph.values
    once = sum(
        block_bytes(spec.axes, a.axes, dtypes.bits(values[a.value].dtype), True)
        for a in spec.reads + spec.writes
    )
    report = tpu_report(kernel_function(spec, lowered, interpret=False), arrays, "tpu_v5e")
    modelled = onchip_bytes(lowered.graph, spec, get_device("tpu_v5e"))
    return report.vmem_bytes - once, modelled - 2 * once


def test_what_is_widened_is_within_what_is_modelled():
    """16 bits that are used several times are 32 until the last time."""
    f = lambda x, y: (x - y, x + y, x * y, jnp.exp(x), jnp.sqrt(jnp.abs(y)))  # noqa: E731
    compiled_bytes, modelled_bytes = made_bytes(f, *[jax.ShapeDtypeStruct((256, 1024), "bfloat16")] * 2)
    wide_bytes = 256 * 1024 * 4
    assert modelled_bytes == 2 * wide_bytes
    blocks_bytes = 2 * 7 * wide_bytes // 2
    assert modelled_bytes < compiled_bytes < modelled_bytes + 0.1 * (modelled_bytes + blocks_bytes)


def by_pairs(a, b):
    return jnp.stack([a * 2, b * 3], -1).reshape(16, 8, 64)


def by_fours(a, b):
    return jnp.stack([a, b, a * 2, b * 3], -1).reshape(16, 8, 128)


def pairs(x):
    a, b = jnp.unstack((x * 2).reshape(16, 8, 32, 2), axis=-1)
    return a * b


def rotated(a, b):
    """The product of what is interleaved, taken apart again."""
    a, b = jnp.unstack((by_pairs(a, b) * 2).reshape(16, 8, 32, 2), axis=-1)
    return a + b, a - b


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("f", "count"), [(by_pairs, 2), (by_fours, 2), (pairs, 1), (rotated, 2)])
def test_what_is_stacked_is_within_what_is_modelled(f, count, dtype):
    """Rows of pairs are 128 lanes each, and so is each half of them before and after."""
    arrays = [jax.ShapeDtypeStruct((16, 8, 64 // count), dtype)] * count
    compiled_bytes, modelled_bytes = made_bytes(f, *arrays)
    rows_bytes = 16 * 8 * 32 * 128 * jnp.dtype(dtype).itemsize
    assert rows_bytes < compiled_bytes <= modelled_bytes <= 2.4 * compiled_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(300,), (3, 300), (5, 300), (20, 40), (64, 1, 300), (64, 12, 64)])
def test_arrays_cross_the_boundary_padded(shape, dtype):
    """In tiles that the compiler tells."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype)]
    lowered = whole_group(lambda x: ~x if dtype == "int8" else -x, *arrays)
    spec = hand_spec(lowered, "mosaic_tpu")
    program = compile_for(
        kernel_function(spec, lowered, interpret=False), *arrays, device="tpu_v5e"
    ).as_text()
    result = re.search(r"= \(?\w+\[([\d,]+)\]\{[\d,]+:T\((\d+),(\d+)\)\S* custom-call", program)
    extents = [int(n) for n in result[1].split(",")]
    for i, tile in ((-2, int(result[2])), (-1, int(result[3]))):
        extents[i] = -(-extents[i] // tile) * tile
    padded_bytes = math.prod(extents) * jnp.dtype(dtype).itemsize
    graph, (write,) = lowered.graph, spec.writes
    assert array_bytes(spec, write, graph.values[write.value]) == padded_bytes


def product(m: int, n: int):
    """``[m, k] @ [k, n]`` in one program, by four warps."""

    def kernel(a, b, out):
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    shape = jax.ShapeDtypeStruct((m, n), "float32")
    params = plgpu.CompilerParams(num_warps=4, num_stages=1)
    return pl.pallas_call(kernel, out_shape=shape, compiler_params=params, name="product")


def test_spills_and_refusals_are_seen():
    def report(m, n, k=16):
        factors = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, k), (k, n))]
        return gpu_report(product(m, n), factors, "h200")["product"]

    assert report(64, 64).spill_bytes == 0
    many = report(256, 128)  # 256 accumulators a thread, of 255 registers
    assert many.spill_bytes > 0
    assert many.registers == 255
    with pytest.raises(Exception, match="Shared memory size limit"):
        report(256, 256, 256)


def test_a_program_of_xla_alone():
    x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    report = tpu_report(lambda x: jnp.tanh(x) + 1, [x], "tpu_v5e")
    assert 0 < report.vmem_bytes <= 16 * 2**20
    assert report.cycles is None
    assert report.hbm_bytes >= 2 * 4 * 1024 * 1024


def test_the_command(tmp_path, capsys):
    out = tmp_path / "compiled.csv"
    assert compiled.main(["--only", "softmax", "--devices", "h200", "--out", str(out)]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["dtype"], r["compiled"], r["spill_bytes"]) for r in rows] == [
        ("float32", "True", "0"),
        ("bfloat16", "True", "0"),
    ]
    assert "100.0%" in capsys.readouterr().out


@pytest.fixture(scope="module")
def attention_and_softmax(tmp_path_factory):
    """The rows of two workloads on a TPU, and the table of cycles, as the command writes them."""
    folder = tmp_path_factory.mktemp("compiled")
    out, cycles = folder / "compiled.csv", folder / "cycles.csv"
    arguments = ["--only", "causal_attention,softmax", "--devices", "tpu_v5e", "--dtypes", "float32"]
    assert compiled.main([*arguments, "--out", str(out), "--cycles-out", str(cycles)]) == 0
    with out.open(newline="") as file:
        return list(csv.DictReader(file)), cycles.read_text()


def test_what_libtpu_ends_the_process_for_is_estimated_in_hbm(attention_and_softmax):
    """Tables that XLA makes in VMEM and a kernel copies to scalar memory; what comes after is as ever."""
    (attention, softmax), cycles = attention_and_softmax
    assert attention["in_hbm"] == "True"
    assert int(attention["cycles"]) > 0
    assert softmax["in_hbm"] == "False"
    assert 0 < int(softmax["cycles"]) < int(softmax["xla_cycles"])
    assert "softmax,tpu_v5e,float32,1,1," in cycles


def test_an_operation_without_an_estimate_has_no_cycles(attention_and_softmax):
    """libtpu's profile says 0 cycles of some loops of XLA, and of copies, and shows the instruction."""
    rows = [row for row in attention_and_softmax[0] if row["no_cycles"]]
    assert rows
    for row in rows:
        assert row["compiled"] == "True"
        assert not row["xla_cycles"]
        compiler, cause = "of XLA's own: " if row["cycles"] else "", row["no_cycles"]
        assert re.fullmatch(rf"{compiler}no estimate of [\w.-]+(, [\w.-]+)*", cause), cause


def test_sixteen_bits_are_estimated():
    (row,) = compiled_alone(("gelu_bias", "tpu_v5e", "bfloat16"))
    assert row.cycles is not None, row.no_cycles
    assert row.xla_cycles is not None, row.no_cycles


def compiled_alone(task):
    """The rows of a task, in a process of its own: libtpu is told only at its start to estimate cycles."""
    return [row for row in all_rows(Work(((task, 0),), 20.0, True)) if row is not None]
