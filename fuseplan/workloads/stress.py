"""Programs that are hard to plan: with many readers or operands, or sums along both axes (``fuseplan bench
solver``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fuseplan.workloads import functions, optimizer
from fuseplan.workloads.workload import Built, Workload, array, of_shapes

_UNARY: tuple[Callable[[Array], Array], ...] = (jnp.tanh, jnp.sin, jnp.exp, jnp.abs, jnp.negative)
_BINARY: tuple[Callable[[Array, Array], Array], ...] = (jnp.add, jnp.multiply, jnp.maximum, jnp.subtract)

GRAVITY = 9.81


def fan_out(x: Array, width: int) -> tuple[Array, ...]:
    """``width`` independent sums of one intermediate, alternately along columns and rows. Any subset of the
    sums in one direction can share a kernel with it."""
    y = jnp.exp(x)
    return tuple((y * (1.0 + i)).sum(axis=i % 2) for i in range(width))


def fan_in(xs: Sequence[Array]) -> Array:
    """The product of a function of each array, multiplied in pairs."""
    values = [_UNARY[i % len(_UNARY)](x) for i, x in enumerate(xs)]
    while len(values) > 1:
        pairs = [a * b for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def random_dag(x: Array, y: Array, count: int, seed: int) -> tuple[Array, ...]:
    """``count`` random elementwise operations on earlier results; returns the results that none of them
    reads."""
    rng = random.Random(seed)
    values, unread = [x, y], set[int]()
    for _ in range(count):
        i, j = (rng.randrange(max(len(values) - 12, 0), len(values)) for _ in range(2))
        unread -= {i, j}
        if rng.random() < 0.4:
            values.append(rng.choice(_UNARY)(values[i]))
        else:
            values.append(rng.choice(_BINARY)(values[i], values[j]))
        unread.add(len(values) - 1)
    return tuple(values[k] for k in sorted(unread))


def random_sums(x: Array, y: Array, count: int, seed: int) -> tuple[Array, ...]:
    """The results of ``random_dag``, summed alternately along columns and rows, so that no kernel holds
    all."""
    return tuple(value.sum(axis=i % 2) for i, value in enumerate(random_dag(x, y, count, seed)))


def lstm_cell(x: Array, h: Array, c: Array, w: Array, u: Array, bias: Array) -> tuple[Array, Array]:
    """One step of an LSTM (Hochreiter & Schmidhuber 1997): the new hidden and cell states."""
    i, f, g, o = jnp.split(x @ w + h @ u + bias, 4, axis=-1)
    new_c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(new_c), new_c


def gru_cell(x: Array, h: Array, w: Array, u: Array, bias: Array) -> Array:
    """One step of a GRU (Cho et al. 2014): the new hidden state."""
    xr, xz, xn = jnp.split(x @ w + bias, 3, axis=-1)
    hr, hz, hn = jnp.split(h @ u, 3, axis=-1)
    z = jax.nn.sigmoid(xz + hz)
    return (1.0 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h


def shallow_water(h: Array, u: Array, v: Array, dx: float = 1e3, f: float = 1e-4) -> tuple[Array, ...]:
    """The right-hand side of the rotating shallow-water equations on a periodic grid, by central
    differences: the rates of depth and of both velocities."""
    ddx, ddy = partial(_central, axis=0, dx=dx), partial(_central, axis=1, dx=dx)
    energy = GRAVITY * h + 0.5 * (u * u + v * v)
    vorticity = ddx(v) - ddy(u) + f
    depth_rate = -ddx(h * u) - ddy(h * v)
    drag = 1e-3 * jnp.sqrt(u * u + v * v) / h
    return depth_rate, vorticity * v - ddx(energy) - drag * u, -vorticity * u - ddy(energy) - drag * v


def euler_fluxes(left: Sequence[Array], right: Sequence[Array], gamma: float = 1.4) -> tuple[Array, ...]:
    """Rusanov's fluxes of the compressible Euler equations in 3-D between two states
    ``(density, u, v, w, pressure)``: five arrays of wide, shared arithmetic."""

    def flux(state: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
        rho, u, v, w, p = state
        energy = p / (gamma - 1.0) + 0.5 * rho * (u * u + v * v + w * w)
        kept = (rho, rho * u, rho * v, rho * w, energy)
        moved = (rho * u, rho * u * u + p, rho * u * v, rho * u * w, (energy + p) * u)
        return kept, moved, jnp.abs(u) + jnp.sqrt(gamma * p / rho)

    kept_l, moved_l, speed_l = flux(left)
    kept_r, moved_r, speed_r = flux(right)
    speed = jnp.maximum(speed_l, speed_r)
    return tuple(
        0.5 * (a + b) - 0.5 * speed * (d - c)
        for a, b, c, d in zip(moved_l, moved_r, kept_l, kept_r, strict=True)
    )


def adam_clipped(params: Any, state: optimizer.AdamState, grads: Any) -> tuple[Any, optimizer.AdamState]:
    """Adam with bias correction on gradients clipped by their global norm: scalars that every
    parameter shares."""
    return optimizer.adam_update(params, state, optimizer.clip_by_global_norm(grads, 1.0))


def norm_grads(xs: Sequence[Array], scales: Sequence[Array], cotangents: Sequence[Array]) -> Any:
    """Gradients of LayerNorms of several sizes: sums along rows and along columns of each."""
    return [
        functions.layernorm_grad(x, scale, jnp.zeros_like(scale), cotangent)
        for x, scale, cotangent in zip(xs, scales, cotangents, strict=True)
    ]


def _central(x: Array, axis: int, dx: float) -> Array:
    return (jnp.roll(x, -1, axis) - jnp.roll(x, 1, axis)) / (2.0 * dx)


def _fan_out(dtype: str, n: int, width: int) -> Built:
    return partial(fan_out, width=width), (array(dtype, n, n),)


def _fan_in(dtype: str, n: int, width: int) -> Built:
    return fan_in, ([array(dtype, n, n)] * width,)


def _random_dag(dtype: str, n: int, count: int, seed: int) -> Built:
    return partial(random_dag, count=count, seed=seed), (array(dtype, n, n),) * 2


def _random_sums(dtype: str, n: int, count: int, seed: int) -> Built:
    return partial(random_sums, count=count, seed=seed), (array(dtype, n, n),) * 2


def _euler(dtype: str, n: int) -> Built:
    state = [array(dtype, n, n)] * 5
    return euler_fluxes, (state, state)


def _adam(dtype: str, count: int, width: int) -> Built:
    shapes = ((width, width), (width,), (width, 4 * width), (4 * width,), (4 * width, width))
    params = [array(dtype, *shapes[i % len(shapes)]) for i in range(count)]
    return adam_clipped, (params, jax.eval_shape(optimizer.adam_init, params), params)


def _norm_grads(dtype: str, rows: int, count: int) -> Built:
    widths = [256 * (i + 1) for i in range(count)]
    arrays = [array(dtype, rows, n) for n in widths]
    return norm_grads, (arrays, [array(dtype, n) for n in widths], arrays)


_ALL = (
    Workload("fan_out_40", "40 independent sums of one intermediate", {"n": 2048, "width": 40},
             {"n": 34, "width": 6}, _fan_out),
    Workload("fan_in_40", "a product of functions of 40 arrays", {"n": 2048, "width": 40},
             {"n": 34, "width": 6}, _fan_in),
    Workload("random_dag_60", "60 elementwise operations on earlier results",
             {"n": 2048, "count": 60, "seed": 1}, {"n": 34, "count": 12, "seed": 1}, _random_dag),
    Workload("random_sums_60", "60 elementwise operations, and sums of the results along rows and columns",
             {"n": 2048, "count": 60, "seed": 1}, {"n": 34, "count": 12, "seed": 1}, _random_sums),
    Workload("lstm_cell", "a step of an LSTM", {"batch": 256, "features": 512, "hidden": 1024},
             {"batch": 5, "features": 12, "hidden": 34},
             of_shapes(lstm_cell, "batch features", "batch hidden", "batch hidden",
                       "features 4*hidden", "hidden 4*hidden", "4*hidden")),
    Workload("gru_cell", "a step of a GRU", {"batch": 256, "features": 512, "hidden": 1024},
             {"batch": 5, "features": 12, "hidden": 34},
             of_shapes(gru_cell, "batch features", "batch hidden",
                       "features 3*hidden", "hidden 3*hidden", "3*hidden")),
    Workload("shallow_water", "the right-hand side of the shallow-water equations", {"n": 2048}, {"n": 34},
             of_shapes(shallow_water, "n n", "n n", "n n")),
    Workload("euler_fluxes", "fluxes of the Euler equations in 3-D", {"n": 2048}, {"n": 34}, _euler),
    Workload("adam_100", "clipped Adam over 100 parameters of five shapes", {"count": 100, "width": 768},
             {"count": 6, "width": 12}, _adam),
    Workload("norm_grads", "gradients of LayerNorms of four widths", {"rows": 4096, "count": 4},
             {"rows": 5, "count": 2}, _norm_grads),
)  # fmt: skip

STRESS: dict[str, Workload] = {workload.name: workload for workload in _ALL}
