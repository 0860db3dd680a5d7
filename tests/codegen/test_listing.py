"""The code of kernels as text: for each backend, for plans from everywhere, and compiled."""

import copy
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fuseplan
from costmodel import get_device
from fuseplan import Plan
from fuseplan.extend import emit
from fuseplan.support.errors import InvalidPlanError, UnknownNameError
from fuseplan.support.jax_compat import pallas_kernels
from fuseplan.workloads import get_workload
from tests.helpers.cpus import SERVER_CPU

X = jax.ShapeDtypeStruct((512, 256), "float32")
W = jax.ShapeDtypeStruct((256, 256), "float32")


def make(device, f=jax.nn.softmax, args=(X,)):
    return fuseplan.make_plan(f, device=device)(*args)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (
            "h200",
            ["# Pallas kernel", "grid (", "the kernel gets whole arrays", "num_warps=", "exp", "{ lambda ;"],
        ),
        ("tpu_v5e", ["# Pallas kernel", "grid (", "f32[4096,1024], block (", "exp", "{ lambda ;"]),
    ],
)
def test_a_pallas_kernel_is_its_jaxpr_with_grid_and_blocks(device, expected):
    plan = make(device, args=(jax.ShapeDtypeStruct((4096, 1024), "float32"),))
    (kernel,) = plan.kernels
    text = kernel.code()
    assert [part for part in expected if part not in text] == []
    head = [line for line in text.splitlines() if line.startswith("# ")]
    assert head[0] == "# kernel 0: softmax, 9 operations"
    assert f"for {device}: a kernel in {kernel.spec.backend}" in head[1]
    assert head[2] == "# reads   v0:f32[4096,1024]"
    assert head[3].startswith("# writes  v")
    assert "modelled" in head[4]


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028"])
def test_a_name_of_several_lines_stays_in_its_comment(end):
    device = replace(get_device("h200"), name=f"my{end}device")
    text = make(device).kernels[0].code()
    head = text.partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in head)
    assert head[1].startswith("# for my device: ")


def test_mosaic_gpu_kernels_are_shown_with_their_grid():
    plan = make(
        "h200:mosaic_gpu", lambda x, w: jnp.tanh(x @ w), tuple(x.update(dtype="bfloat16") for x in (X, W))
    )
    emitted = [kernel for kernel in plan.kernels if kernel.spec.backend == "mosaic_gpu"]
    assert emitted, "the plan has a kernel of Mosaic GPU"
    text = emitted[0].code()
    assert "# Pallas kernel" in text
    assert "program: " in text


def test_a_group_of_xla_is_the_jaxpr_of_its_operations():
    plan = make("h200", lambda x: jnp.sort(x, axis=0))
    text = plan.kernels[0].code()
    assert "operations that XLA compiles" in text
    assert "sort" in text
    assert "Pallas" not in text


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def test_loops_of_a_cpu_are_the_jaxpr_of_the_loops():
    shape = jax.ShapeDtypeStruct((4096, 64), "float32")
    plan = make(SERVER_CPU, attention, (shape, shape, shape))
    nests = [kernel for kernel in plan.kernels if kernel.spec.backend == "loops"]
    assert nests, "the plan has a nest"
    text = nests[0].code()
    assert "a nest of XLA loops" in text
    assert "dynamic_slice" in text


def test_every_kernel_of_a_plan_has_code():
    f, args = get_workload("gpt2_block").build(small=True)
    for device in ("h200", "tpu_v5e"):
        plan = fuseplan.make_plan(f, device=device)(*args)
        for k, kernel in enumerate(plan.kernels):
            assert kernel.code().startswith(f"# kernel {k}: ")


# --- plans from everywhere -------------------------------------------------------------------


def test_plans_of_jit_and_of_files_have_code_too():
    plan = make("h200")
    text = plan.kernels[0].code()
    assert fuseplan.jit(jax.nn.softmax, device="h200").plan(X).kernels[0].code() == text
    assert Plan.from_json(plan.to_json()).kernels[0].code() == text
    assert copy.deepcopy(plan.kernels[0]).code() == text


def test_without_a_program_the_error_says_why():
    read = Plan.from_json(make("h200").to_json())
    bare = replace(read, program=None)
    with pytest.raises(InvalidPlanError, match="does not hold it: plan the function anew"):
        bare.kernels[0].code()
    lone = replace(read.kernels[0])
    with pytest.raises(InvalidPlanError, match="got one without a plan"):
        lone.code()


def test_kernels_of_plans_are_kernels():
    plan = make("h200")
    (kernel,) = plan.kernels
    data = fuseplan.Kernel(kernel.spec, kernel.cost)
    assert isinstance(kernel, fuseplan.Kernel)
    assert kernel == data
    assert data == kernel
    assert hash(kernel) == hash(data)
    assert kernel != replace(data, cost=replace(data.cost, launch_ps=1))
    assert kernel != "a kernel"
    assert repr(kernel) == repr(data).replace("Kernel(", "PlanKernel(", 1)
    assert pickle.loads(pickle.dumps(replace(kernel))) == data
    with pytest.raises(AttributeError):
        kernel.cost = data.cost


def test_a_plan_numbers_its_kernels_anew():
    plan = make("h200", lambda x: jnp.sort(jnp.sort(x, axis=0), axis=1))
    assert len(plan.kernels) == 2
    fewer = replace(plan, kernels=plan.kernels[1:])
    assert fewer.kernels[0].code().startswith("# kernel 0: ")
    assert plan.kernels[1].code().startswith("# kernel 1: ")


def test_pallas_kernels_are_found_inside_of_other_calls():
    plan = make("h200")
    function = emit(plan.kernels[0].spec, plan.lowered)
    closed = jax.make_jaxpr(lambda x: jax.jit(function)(x * 2))(X)
    (found,) = pallas_kernels(closed)
    assert "softmax" in found.name
    assert pallas_kernels(jax.make_jaxpr(jnp.sin)(X)) == []


# --- compiled --------------------------------------------------------------------------------


def test_a_cpus_group_is_shown_as_xla_compiles_it():
    plan = make(SERVER_CPU)
    exp = next(n for n, node in enumerate(plan.graph.nodes) if node.op == "exp")
    text = next(kernel for kernel in plan.kernels if exp in kernel.spec.nodes).code(compiled=True)
    assert "# compiled by XLA for this CPU" in text
    assert "HloModule" in text
    assert "exponential" in text


def test_a_device_without_a_description_for_its_compiler_is_an_error():
    with pytest.raises(UnknownNameError, match="expected a device to compile for among"):
        make("a100").kernels[0].code(compiled=True)
