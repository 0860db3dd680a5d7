"""Groups as models have them, forward and backward, planned for a GPU and a TPU and run in Pallas'
interpreter on ragged sizes: against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from costmodel.xla_loops import is_one_loop
from tests.codegen.test_planned_kernels import run_planned
from tests.helpers.cutting_cases import rope_by_pairs, rope_by_reshape, rope_by_slices
from tests.helpers.emit_cases import layernorm, rmsnorm
from tests.helpers.quickly import run_quickly

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]


def losses(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


def batchnorm(x, g, b):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return jnp.tanh((x - mean) * lax.rsqrt(variance + 1e-3) * g + b)


def heads(x, scale):
    """Attention's heads, split off, scaled, and merged again."""
    rows, width = x.shape
    apart = x.reshape(rows, 4, width // 4).transpose(1, 0, 2) * scale[:, None, None]
    return jnp.tanh(apart).transpose(1, 0, 2).reshape(rows, width)


def gated(x, y):
    a, b = jnp.split(jnp.concatenate([x, y], -1), [x.shape[-1] // 2], -1)
    return jax.nn.sigmoid(a).sum(-1) * b.mean(-1)


def several_sums(x):
    return x.sum(0), (x * x).mean(1), jnp.exp(x * 0.1).sum(), x.max(1) - x.min(1)


def running(x):
    return jnp.cumsum(jax.nn.softmax(x, -1), -1) * jnp.sqrt(jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype))


def shifted(x):
    """Each token with the one before."""
    before = jnp.pad(x[:-1], ((1, 0), (0, 0)))
    return jnp.tanh(x) * 0.5 + before


def depth_of_space(x):
    a, b, c = x.shape
    return (x.reshape(a // 2, 2, b // 2, 2, c).transpose(0, 2, 1, 3, 4) * 2).reshape(a // 2, b // 2, 4 * c)


def fake_quantised(x):
    """Rounded to what eight bits hold, with the gradient of what is not clipped."""
    scaled = jnp.clip(x * 64, -448.0, 448.0)
    rounded = scaled.astype(jnp.float8_e4m3fn).astype(x.dtype)
    return (scaled + lax.stop_gradient(rounded - scaled)) / 64


ROWS = ((13, 130), (5, 257), (3, 1000))
HEADS = ((5, 3, 16), (13, 2, 64), (7, 1, 32))
# The function, the sizes of its first array, and the shapes of the others by that.
FORMS = {
    "softmax": (lambda x: jax.nn.softmax(x, -1), ROWS, lambda r, n: ()),
    "log_softmax": (lambda x: jax.nn.log_softmax(x, -1), ROWS, lambda r, n: ()),
    "layernorm": (layernorm, ROWS, lambda r, n: ((n,), (n,))),
    "rmsnorm": (rmsnorm, ROWS, lambda r, n: ((n,),)),
    "losses": (losses, ROWS, lambda r, n: ((r, "int32"),)),
    "bias-gelu": (lambda x, b: jax.nn.gelu(x + b, approximate=False), ROWS, lambda r, n: ((n,),)),
    "several-sums": (several_sums, ROWS, lambda r, n: ()),
    "running": (running, ROWS, lambda r, n: ()),
    "shifted": (shifted, ROWS, lambda r, n: ()),
    "gated": (gated, ((13, 128), (5, 64), (3, 130)), lambda r, n: ((r, n),)),
    "fake-quantised": (fake_quantised, ROWS, lambda r, n: ()),
    "heads": (heads, ((13, 128), (5, 256), (3, 64)), lambda r, n: ((4,),)),
    "batchnorm": (batchnorm, ((3, 7, 65), (2, 5, 130), (1, 13, 32)), lambda a, b, n: ((n,), (n,))),
    "space-to-depth": (depth_of_space, ((4, 6, 32), (2, 8, 128), (6, 2, 16)), lambda *_: ()),
    "rope-slices": (rope_by_slices, HEADS, lambda t, h, d: ((t, 1, d),) * 2),
    "rope-reshape": (rope_by_reshape, HEADS, lambda t, h, d: ((t, 1, d),) * 2),
    "rope-pairs": (rope_by_pairs, HEADS, lambda t, h, d: ((t, 1, d),) * 2),
}
# Each with one of the sizes; a TPU has no float16.
DTYPES = {"h200": ("float32", "float16"), "tpu_v5e": ("float32", "bfloat16")}
SIZES = {"float32": 0, "bfloat16": 1, "float16": 2}


def forward_and_back(f):
    def both(args, cotangents):
        floats = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating)]

        def of_floats(*some):
            every = list(args)
            for i, a in zip(floats, some, strict=True):
                every[i] = a
            return f(*every)

        results, pull = jax.vjp(of_floats, *(args[i] for i in floats))
        return results, pull(cotangents)

    return both


def arguments(f, shape, others, dtype, seed):
    rng = np.random.default_rng(seed)

    def make(s):
        if s and s[-1] == "int32":
            return jnp.asarray(rng.integers(0, shape[-1], s[:-1]), "int32")
        return jnp.asarray(rng.standard_normal(s), dtype)

    args = (make(shape), *map(make, others(*shape)))
    results = jax.eval_shape(f, *args)
    return args, jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), results)


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("name", FORMS)
def test_forward_and_backward(name, device):
    f, shapes, others = FORMS[name]
    for dtype in DTYPES[device]:
        shape = shapes[SIZES[dtype]]
        both = forward_and_back(f)
        args = arguments(f, shape, others, dtype, SIZES[dtype])
        plan, got, _ = run_planned(both, args, device)
        # Sixteen bits are what they are asked to be; results of each operation are rounded to them.
        with jax.enable_x64(True):
            wide = [a if a.dtype == "int32" else a.astype("float64") for a in jax.tree.leaves(args)]
            want = run_quickly(both, *jax.tree.unflatten(jax.tree.structure(args), wide))
        assert any(is_one_loop(plan.graph, k.spec.nodes) for k in plan.kernels)
        tolerance = float(jnp.finfo(dtype).eps) * (8 if dtype != "float32" else 64)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            g64, w64 = np.asarray(g).astype("float64"), np.asarray(w)
            scale = np.abs(w64).max(initial=1.0)
            np.testing.assert_allclose(
                g64, w64, rtol=tolerance, atol=tolerance * scale, err_msg=f"{dtype}{shape}"
            )
