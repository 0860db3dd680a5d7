"""The verifier against the solver on random programs in which operations rename dimensions of copies."""

import random

import jax
import jax.numpy as jnp
import pytest

import fuseplan

pytestmark = pytest.mark.one_python

DEVICES = ("h200", "h100", "a100", "tpu_v5e", "tpu_v6e", "l4")

SIZES = ((1024, 1024, 3), (2048, 512, 4), (512, 1024, 8), (4096, 256, 2), (1024, 1024, 64))

MOST_ELEMENTS = 1 << 24

READ_BY_RENAMES = 1_981
"""The seed of a program in which operations that only rename dimensions read copies: merged with their reader
before the search, they made the prices of the proof wrong."""


def random_function(seed):
    """A function of points, vectors and matrices, the shapes of its arguments, and a device."""
    rng = random.Random(seed)
    m, n, k = rng.choice(SIZES)
    shapes = {"x": (m, n), "p": (m, k), "q": (n, k), "v": (n,), "u": (m,)}
    names = rng.sample(list(shapes), rng.choice([2, 3]))
    steps = [tuple(rng.random() for _ in range(4)) for _ in range(rng.choice([6, 10, 14, 20, 26]))]

    def f(*args):
        values = list(args)
        for which, at, beside, _ in steps:
            made = applied(int(which * 15), chosen(values, at), values, beside, m * n)
            if made.size <= MOST_ELEMENTS:
                values.append(made)
        return (values[-1], *(values[int(step[3] * len(values))] for step in steps[:2]))

    return f, [jax.ShapeDtypeStruct(shapes[name], "float32") for name in names], rng.choice(DEVICES)


def chosen(values, at, fits=lambda value: True):
    """One of the values that fit, more often one of the last."""
    found = [value for value in values if fits(value)]
    return found[int(at**0.5 * len(found))] if found else None


def applied(kind, v, values, beside, most):
    """The result of an operation of that kind on ``v`` and, for some, another value."""
    simple = (jnp.exp, jnp.tanh, lambda v: 1.5 * v + 0.5)
    if kind < 3:
        return simple[kind](v)
    if kind < 7:
        w = chosen(values, beside, lambda w: w.ndim <= v.ndim and w.shape == v.shape[v.ndim - w.ndim :])
        return (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)[kind - 3](v, v if w is None else w)
    if kind == 7:
        return {2: v.T, 3: v.transpose(1, 0, 2) if v.ndim == 3 else v}.get(v.ndim, v * 2)
    if kind in (8, 9):
        is_small = v.ndim < 3 and v.size <= most
        wide = v[..., None] * jnp.float32(1.1) if kind == 8 else v[None] * 1.0
        return wide if is_small else v + 1
    if kind == 10:
        return v.sum(int(beside * v.ndim)) if v.ndim else v
    if kind == 11:
        return v - v.mean(-1, keepdims=True) if v.ndim else v
    if kind == 12:
        fits = lambda w: w.ndim == v.ndim == 2 and w.shape[1] == v.shape[1] <= 8  # noqa: E731
        w = chosen(values, beside, lambda w: fits(w) and w.shape[0] * v.shape[0] <= MOST_ELEMENTS)
        return jnp.abs(v) if w is None else v[:, None] - w[None]
    if kind == 13:
        w = chosen(values, beside, lambda w: v.ndim == w.ndim == 2 and v.shape[1] == w.shape[0])
        return jnp.sin(v) if w is None else v @ w
    return jnp.where(v > 0, v, -v * 0.1)


@pytest.mark.parametrize("seed", [READ_BY_RENAMES, *range(12)])
def test_proofs_of_random_programs_are_verified(seed):
    f, args, device = random_function(seed)
    plan = fuseplan.make_plan(f, device=device, deadline_s=20)(*args)
    result = plan.verify()
    assert result, f"{result}"
    assert plan.status == "OPTIMAL"
