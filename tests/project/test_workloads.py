"""Every named workload traces, and computes what its name says."""

import functools
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fuseplan.support.errors import InvalidArgumentError, UnknownNameError
from fuseplan.workloads import (
    GROUPS,
    PACKAGES,
    WORKLOADS,
    functions,
    get_workload,
    gpt2,
    make_args,
    optimizer,
)
from fuseplan.workloads.workload import MissingPackageError
from tests.helpers.quickly import QUICKLY, run_quickly

pytestmark = pytest.mark.one_python


def count_equations(jaxpr) -> int:
    """The equations that remain when every call is inlined; a loop counts as one."""
    total = 0
    for equation in jaxpr.eqns:
        body = None
        if equation.primitive.name not in ("scan", "while", "cond"):
            body = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        total += 1 if body is None else count_equations(getattr(body, "jaxpr", body))
    return total


def equations(name: str, **options) -> int:
    f, args = get_workload(name).build(**options)
    return count_equations(jax.make_jaxpr(f)(*args).jaxpr)


def run(name: str, **options):
    """The arguments of the small workload as NumPy arrays, and its result."""
    if name.startswith("gpt2_train"):  # two of the equal layers say as much, and compile sooner
        options["layers"] = 2
    f, args = get_workload(name).build(small=True, **options)
    arrays = make_args(args)
    return arrays, run_quickly(f, *arrays)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(("dtype", "small"), [("float32", True), ("bfloat16", False)])
def test_traces_at_both_sizes(name, dtype, small):
    f, args = get_workload(name).build(dtype, small)
    leaves = jax.tree.leaves(args)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert any(leaf.dtype == dtype for leaf in leaves)
    traced = jax.make_jaxpr(f)(*args)
    assert traced.out_avals
    # The scale of program that the planner is made for: a real 24-layer training step.
    assert name != "gpt2_train_24" or count_equations(traced.jaxpr) >= 12_000


# Of two layers, gpt2_train_24 is gpt2_train_4.
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "gpt2_train_24"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_finite_and_keep_the_dtype(name, dtype):
    _, results = run(name, dtype=dtype)
    for leaf in jax.tree.leaves(results):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()
            assert leaf.dtype in (dtype, jnp.float32)


@pytest.mark.parametrize("name", WORKLOADS)
def test_name_and_description(name):
    workload = get_workload(name)
    assert workload.name == name
    assert workload.description
    assert workload.sizes.keys() == workload.small_sizes.keys()


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("softmax", [(4096, 1024)]),
        ("gpt2_block", [(1, 1024, 768)]),
        ("batchnorm_relu", [(16, 56, 56, 64), (64,), (64,)]),
        ("gated_mlp", [(4096, 1024)]),
        ("causal_attention_grad", [(1, 4096, 8, 64)] * 3),
        ("cross_entropy_grad", [(), (1024, 50257)]),
        ("gaussian_kernel_sum", [(20000,)]),
    ],
)
def test_shapes_of_the_full_size(name, shapes):
    f, args = get_workload(name).build()
    assert [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(f, *args))] == shapes


def test_gpt2_has_the_parameters_of_the_published_sizes():
    # 124,439,808 is the count of the published GPT-2 small and 354,823,168 that of medium.
    def size(**sizes) -> int:
        return sum(math.prod(a.shape) for a in jax.tree.leaves(gpt2.params(gpt2.Config(**sizes), "float32")))

    assert size(layers=12) == 124_439_808
    assert size(layers=24, width=1024, heads=16) == 354_823_168


def test_a_training_step_returns_what_it_takes():
    f, (params, state, *batch) = get_workload("gpt2_train_4").build("bfloat16")
    loss, new_params, new_state = jax.eval_shape(f, params, state, *batch)
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)  # noqa: E731
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert shapes((new_params, new_state)) == shapes((params, state))


def test_equation_counts():
    assert equations("add_transpose") == 2
    assert equations("swiglu") == 3
    # A loop over layers is unrolled: each adds the same equations.
    one, two, three = (equations("gpt2_train_4", small=True, layers=n) for n in (1, 2, 3))
    assert three - two == two - one > 400


def test_sizes_can_be_changed():
    f, args = get_workload("gpt2_block").build(tokens=32, small=True)
    assert jax.eval_shape(f, *args).shape == (2, 32, 30)


def test_mistakes_are_explained():
    with pytest.raises(UnknownNameError, match="did you mean 'softmax'"):
        get_workload("softmaxx")
    with pytest.raises(UnknownNameError, match="gpt2_train_24"):
        get_workload("?")
    with pytest.raises(
        InvalidArgumentError, match="the sizes of workload 'softmax' are m, n; it has no rows"
    ):
        get_workload("softmax").build(rows=3)
    for dtype in ("int32", "float33"):
        with pytest.raises(InvalidArgumentError, match="expected a floating-point dtype"):
            get_workload("softmax").build(dtype)


def test_a_missing_optional_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(MissingPackageError, match=r"equinox_mlp_train.* needs optax, .*pip install optax"):
        get_workload("equinox_mlp_train").build()
    monkeypatch.setitem(sys.modules, "haiku", None)
    assert PACKAGES["haiku_lstm_grad"].missing == ("haiku",)
    with pytest.raises(MissingPackageError, match="pip install dm-haiku"):
        get_workload("haiku_lstm_grad").build()


def test_programs_of_packages_are_an_optional_group():
    others = {name for group, workloads in GROUPS.items() if group != "packages" for name in workloads}
    assert not PACKAGES.keys() & others
    needed = {package for workload in PACKAGES.values() for package in workload.needs}
    assert len(PACKAGES) == 19
    assert len(needed) == 14
    assert not needed & {"jax", "numpy"}
    for name, workload in PACKAGES.items():
        assert get_workload(name) is workload
        assert workload.name == name
        assert workload.description
    with pytest.raises(InvalidArgumentError, match="'histograms_36' is of float32"):
        get_workload("histograms_36").build("bfloat16")


@pytest.mark.parametrize("name", [name for name, workload in PACKAGES.items() if not workload.missing])
def test_programs_of_packages_are_traced(name):
    f, args = get_workload(name).build(small=True)
    assert jax.tree.leaves(jax.eval_shape(f, *args))


@pytest.mark.slow
def test_listing_the_workloads_needs_no_optional_package():
    code = (
        "import sys; from fuseplan.workloads import WORKLOADS; assert len(WORKLOADS) > 20; "
        "sys.exit(bool({'equinox', 'optax', 'pandas'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestMakeArgs:
    def test_same_seed_same_arrays(self):
        _, args = get_workload("equinox_mlp_train").build(small=True)
        first, again, other = make_args(args, 1), make_args(args, 1), make_args(args, 2)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, first, again))
        assert not jnp.array_equal(first[-1], other[-1])

    @pytest.mark.parametrize("name", ["gpt2_train_4", "dropout_residual", "equinox_mlp_train"])
    def test_the_arrays_are_of_the_shapes_asked_for(self, name):
        _, args = get_workload(name).build("bfloat16", small=True)
        made = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make_args(args))
        assert made == args

    def test_integers_are_in_bounds(self):
        tokens = make_args(jax.ShapeDtypeStruct((10_000,), jnp.int32), integers_below=7)
        assert set(np.unique(tokens)) == set(range(7))

    def test_names_say_what_an_array_is(self):
        struct = jax.ShapeDtypeStruct((100, 100), jnp.float32)
        x, params, state = make_args(
            (struct, {"w": struct}, optimizer.adam_init({"w": struct})._replace(nu=struct))
        )
        assert np.std(x) == pytest.approx(1, rel=0.05)
        assert np.std(params["w"]) == pytest.approx(0.02, rel=0.05)
        assert state.nu.min() >= 0


class TestAgainstReferences:
    """Absolute tolerances are a few float32 roundings (6e-8) of the magnitudes that are summed."""

    def test_softmax_and_logsumexp(self):
        (x,), y = run("softmax")
        np.testing.assert_allclose(y, jax.nn.softmax(x), rtol=1e-5)
        (x,), y = run("logsumexp")
        np.testing.assert_allclose(y, jax.nn.logsumexp(x, axis=-1), rtol=1e-6)

    def test_normalisations(self):
        (x, scale, bias), y = run("layernorm")
        x64 = np.asarray(x, np.float64)
        deviation = np.sqrt(x64.var(axis=-1, keepdims=True) + 1e-5)
        expected = (x64 - x64.mean(axis=-1, keepdims=True)) / deviation * scale + bias
        np.testing.assert_allclose(y, expected, atol=1e-5)
        (x, scale), y = run("rmsnorm")
        x64 = np.asarray(x, np.float64)
        expected = x64 / np.sqrt(np.square(x64).mean(axis=-1, keepdims=True) + 1e-5) * scale
        np.testing.assert_allclose(y, expected, atol=1e-5)
        (x, *_), (_, mean, variance) = run("batchnorm_relu")
        np.testing.assert_allclose(mean, np.mean(x, axis=(0, 1, 2)), atol=1e-6)
        np.testing.assert_allclose(variance, np.var(x, axis=(0, 1, 2)), rtol=1e-5)

    def test_layernorm_gradient(self):
        (x, scale, bias, cotangent), gradients = run("layernorm_grad")
        step = 1e-2
        direction = make_args(jax.ShapeDtypeStruct(x.shape, x.dtype), seed=9)
        values = [
            np.vdot(
                cotangent,
                np.asarray(functions.layernorm(x + sign * step * direction, scale, bias), np.float64),
            )
            for sign in (1, -1)
        ]
        slope = (values[0] - values[1]) / (2 * step)
        assert np.vdot(gradients[0], direction) == pytest.approx(slope, rel=1e-2)
        np.testing.assert_allclose(gradients[2], np.sum(cotangent, axis=0), atol=1e-5)

    @pytest.mark.parametrize("causal", [False, True])
    def test_attention(self, causal):
        (q, k, v), y = run("causal_attention" if causal else "attention")
        expected = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
        np.testing.assert_allclose(y, expected, atol=1e-5)

    def test_rope_rotates_by_the_position(self):
        (x,), y = run("rope")
        np.testing.assert_allclose(y[:, 0], x[:, 0], atol=1e-6)
        norm = lambda a: np.hypot(*np.split(np.asarray(a), 2, axis=-1))  # noqa: E731
        np.testing.assert_allclose(norm(y), norm(x), rtol=1e-5)
        # Products of a rotated query and key depend on the distance of their positions alone.
        same = run_quickly(functions.rope, np.broadcast_to(x[:1, :1, :1], (1, 13, 1, 10)))[0, :, 0]
        products = np.asarray(same) @ np.asarray(same).T
        np.testing.assert_allclose(products[3, 1], products[9, 7], rtol=1e-4)

    def test_cross_entropy(self):
        (logits, labels), y = run("cross_entropy")
        expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        (x, head, labels), y = run("linear_cross_entropy")
        expected = optax.softmax_cross_entropy_with_integer_labels(x @ head["w"], labels).mean()
        np.testing.assert_allclose(y, expected, rtol=1e-5)

    def test_gaussian_kernel_sum(self):
        (x, y, weights), result = run("gaussian_kernel_sum")
        squares = np.square(np.asarray(x, np.float64)[:, None] - np.asarray(y)).sum(axis=-1)
        np.testing.assert_allclose(result, np.exp(-squares / 2) @ np.asarray(weights), atol=1e-5)

    def test_dropout_keeps_nine_tenths(self):
        f, args = get_workload("dropout_residual").build(small=True, m=100)
        key, x, branch = make_args(args)
        dropped = run_quickly(f, key, x, branch) == x
        assert np.mean(dropped) == pytest.approx(0.1, abs=0.01)

    def test_clipped_adam_is_that_of_optax(self):
        (params, _, grads), _ = run("adam_update")
        reference = optax.chain(
            optax.clip_by_global_norm(0.5), optax.adam(optimizer.LEARNING_RATE, eps=optimizer.EPSILON)
        )
        clipped = run_quickly(functools.partial(optimizer.clip_by_global_norm, max_norm=0.5), grads)
        state = reference.init(params)
        ours, optimizer_state = params, optimizer.adam_init(params)
        theirs = params
        step = jax.jit(optimizer.adam_update, compiler_options=QUICKLY)
        reference_step = jax.jit(reference.update, compiler_options=QUICKLY)
        for _ in range(3):
            ours, optimizer_state = step(ours, optimizer_state, clipped)
            updates, state = reference_step(grads, state)
            theirs = jax.tree.map(np.add, theirs, updates)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)

    @pytest.mark.parametrize("name", ["gpt2_train_4", "equinox_mlp_train"])
    def test_training_lowers_the_loss(self, name):
        f, args = get_workload(name).build(small=True, **({"layers": 1} if name.startswith("gpt2") else {}))
        step = jax.jit(f, compiler_options=QUICKLY)
        params, state, *batch = make_args(args)
        state = jax.tree.map(jnp.zeros_like, state)
        losses = []
        for _ in range(20):
            loss, *carried = step(params, state, *batch)
            params, state = carried
            losses.append(float(loss))
        assert losses[-1] < 0.95 * losses[0]
        if name == "gpt2_train_4":  # an untrained model knows no more than the size of the vocabulary
            assert losses[0] == pytest.approx(math.log(130), rel=0.2)
