"""Random programs that cut, join, reshape and reduce, planned for a GPU and a TPU: the same as JAX's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fuseplan.runtime.tolerance import check_results
from tests.codegen.test_planned_kernels import run_planned

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

SHAPES = ((6, 4, 24), (8, 96), (12, 30), (3, 5, 16))


def _sliced(rng, x):
    d = int(rng.integers(x.ndim))
    stride = int(rng.choice([1, 1, 2, 3]))
    unit = int(rng.choice([n for n in (1, 2, 3, 4, 8) if x.shape[d] % n == 0]))
    start, end = sorted(unit * rng.choice(x.shape[d] // unit + 1, 2, replace=False))
    return lax.slice_in_dim(x, int(start), int(end), stride, d)


def _joined(rng, x):
    other = _sliced(rng, x) if rng.random() < 0.5 else x
    d = next((d for d in range(x.ndim) if other.shape[d] != x.shape[d]), int(rng.integers(x.ndim)))
    return jnp.concatenate([jnp.exp(-abs(other)), x, other][:: int(rng.choice([1, -1]))], d)


def _padded(rng, x):
    d = int(rng.integers(x.ndim))
    n = x.shape[d]
    config = [(0, 0, 0)] * x.ndim
    config[d] = [(n, 0, 0), (n, 2 * n, 0), (1, 0, 1), (0, 1, 1), (2, 3, 0)][rng.integers(5)]
    return lax.pad(x, jnp.float32(0.5), config)


def _reshaped(rng, x):
    d = int(rng.integers(x.ndim))
    factor = int(rng.choice([n for n in (1, 2, 3, 4) if x.shape[d] % n == 0]))
    apart = x.reshape(*x.shape[:d], factor, x.shape[d] // factor, *x.shape[d + 1 :])
    if rng.random() < 0.5:
        apart = jnp.swapaxes(apart, d, d + 1)
    return apart if rng.random() < 0.5 and apart.ndim < 5 else apart.reshape(x.shape)


def _reduced(rng, x):
    d = int(rng.integers(x.ndim))
    f = [jnp.sum, jnp.max, jnp.prod, jnp.mean][rng.integers(4)]
    return x - f(jnp.tanh(x), d, keepdims=True)


STEPS = (
    _sliced,
    _joined,
    _padded,
    _reshaped,
    _reduced,
    lambda rng, x: jnp.tanh(x) * 1.5,
    lambda rng, x: lax.cumsum(x, int(rng.integers(x.ndim)), reverse=bool(rng.integers(2))) / 8,
    lambda rng, x: jnp.swapaxes(x, 0, int(rng.integers(x.ndim))),
    lambda rng, x: jnp.stack([x, jnp.sin(x), -x], int(rng.integers(x.ndim + 1))) if x.ndim < 4 else x,
    lambda rng, x: jnp.tile(x, [int(n) for n in rng.integers(1, 3, x.ndim)]) if x.size < 2000 else x,
    lambda rng, x: x + jnp.unstack(jnp.stack([x, x * 2]))[1],
)


def random_cuts(seed):
    """A function of one array of ``shape``, with two or three results."""

    def f(x):
        rng = np.random.default_rng(seed)
        values = [x]
        for _ in range(int(rng.integers(4, 9))):
            last = values[-1] if rng.random() < 0.7 else values[rng.integers(len(values))]
            made = STEPS[rng.integers(len(STEPS))](rng, last)
            values.append(made if 0 < made.size < 20_000 else jnp.cos(last))
        return values[-1], values[rng.integers(len(values))] * 2

    return f, SHAPES[seed % len(SHAPES)]


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
@pytest.mark.parametrize("seed", range(6))
def test_random_cuts(seed, device):
    f, shape = random_cuts(seed)
    x = jax.random.normal(jax.random.key(seed), shape)
    _, got, want = run_planned(f, (x,), device)
    check_results(str(seed), got, want)
