"""Run in a process of its own, with eight simulated devices: each case prints a line, its name and
how far a fused function is from ``jax.jit``'s, or how many loops there are in its program."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fuseplan
from experiments.sharded import PROGRAMS, Pair, attention, compiled, pairwise
from fuseplan.targets.calibrate import described_cpu
from tests.helpers.quickly import all_quickly

J = functools.partial(fuseplan.jit, device="test", planner="greedy")
ON_CPU = functools.partial(fuseplan.jit, device=described_cpu())
MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
X = jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)
W = jnp.linspace(-0.5, 0.5, 64).reshape(8, 8)


def layer(x, w):
    return jnp.tanh(x @ w) * x


def loss(x, w):
    return jnp.mean(layer(x, w) ** 2)


def shards(f, in_specs, out_specs, **options):
    return jax.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


def data_parallel(j, inside=True):
    """A training step: the gradient of each shard's loss, averaged over shards."""

    def step(x, w):
        value, grad = jax.value_and_grad(j(loss), 1)(x, w) if inside else jax.value_and_grad(loss, 1)(x, w)
        return lax.pmean(value, "d"), w - 0.1 * lax.pmean(grad, "d")

    return shards(step if inside else j(step), (P("d"), P()), (P(), P()), check_vma=False)


def whole_loss(j, **options):
    f = j(lambda x, w: lax.pmean(loss(x, w), "d"))
    return jax.value_and_grad(shards(f, (P("d"), P()), P(), **options), (0, 1))


def model_parallel(j):
    """Rows of the weights on each shard: gathered for one product, summed after the other."""

    def f(x, w):
        gathered = lax.all_gather(w, "d", tiled=True)
        partial = jnp.tanh(x @ gathered)[:, :1] * w
        return lax.psum_scatter(partial, "d", scatter_dimension=0, tiled=True)

    g = shards(j(f), (P(), P("d")), P("d"))
    return jax.grad(lambda x, w: (g(x[:8], w) ** 2).sum(), (0, 1))


def sharded(mesh, **options):
    def case(j):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        return lambda _, w: jax.value_and_grad(j(loss, **options), (0, 1))(
            x, jax.device_put(w, NamedSharding(mesh, P()))
        )

    return case


def told(x, w):
    """A side effect that keeps its order, on each shard."""
    io_callback(lambda x: None, (), x, ordered=True)
    return layer(x, w)


CASES = {
    "shard_map of fused": lambda j: shards(j(layer), (P("d"), P()), P("d")),
    "fused shard_map": lambda j: j(shards(layer, (P("d"), P()), P("d"))),
    "gradient of fused shard_map": lambda j: jax.grad(
        j(lambda x, w: (shards(layer, (P("d"), P()), P("d"))(x, w) ** 2).sum()), (0, 1)
    ),
    "collective inside, checked": whole_loss,
    "collective inside, unchecked": functools.partial(whole_loss, check_vma=False),
    "training step, fused loss": data_parallel,
    "training step, all fused": functools.partial(data_parallel, inside=False),
    "gathered and scattered": model_parallel,
    "ordered side effect on each shard": lambda j: j(shards(told, (P("d"), P()), P("d"))),
    "sharded arguments": sharded(MESH),
    "explicitly sharded arguments": sharded(EXPLICIT),
    "in_shardings": lambda j: j(
        layer,
        in_shardings=(NamedSharding(MESH, P("d")), NamedSharding(MESH, P())),
        out_shardings=NamedSharding(MESH, P("d")),
    ),
    "vmap with a named axis": lambda j: jax.vmap(
        jax.grad(j(lambda x, w: ((x - lax.pmean(x, "i")) @ w).sum() ** 2), (0, 1)), (0, None), axis_name="i"
    ),
}


def shards_inside(j, axes):
    """A function with a loop of its own, beside a ``shard_map`` that has one, over all axes or one."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    inner = jax.shard_map(
        j(pairwise) if len(axes) == 1 else pairwise,
        mesh=mesh,
        in_specs=(P(axes), P(), P()),
        out_specs=P(axes),
        axis_names=set(axes),
    )
    f = j(lambda x, y, w: inner(x, y, w) * 2 + pairwise(x, y, w))
    x = jax.random.normal(jax.random.key(0), (8192, 4)) / 4
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("d")), (x, P()), (x, P()))]
    return f, args


def partly_manual(j):
    """A loop in a ``shard_map`` over one axis of the mesh, whose data is sharded over the other, too."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": (P("d"), P(), P()), "out_specs": P("d")}
    f = jax.shard_map(j(pairwise), mesh=mesh, axis_names={"d"}, **specs)
    x = jax.random.normal(jax.random.key(0), (8192, 4)) / 4
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P(("d", "m"))), (x, P()), (x, P()))]
    return jax.jit(f), args


def in_mesh(j):
    """Explicit axes that ``jax.set_mesh`` has set, and a dimension that is not the first."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.random.normal(jax.random.key(0), (8192, 4)) / 4
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("d", "m")), (x, P()), (x, P()))]
    return mesh, j(lambda x, y, w: pairwise(x, y, w) + w), args


def of_each_shard(j, check):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    f = jax.shard_map(j(attention), mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check)
    return jax.grad(lambda x: (f(x, x, x) ** 2).sum())


def compared(f, g, args):
    lowered = f.lower(*args)
    pair = Pair(args, lowered.compile(), g.lower(*args).compile(), 0)
    wrong, same = pair.difference()
    text = lowered.as_text()
    loops = text.count("CustomSPMDPartitioning") + text.count("stablehlo.while")
    ours, theirs = pair.collectives
    more = dict(ours - theirs)
    return {"wrong": wrong, "same_shardings": same, "loops": loops, "more_collectives": more}


def say(name, **said):
    print(json.dumps({"name": name, **said}), flush=True)


def main():
    for name, case in CASES.items():
        got, want = jax.jit(case(J))(X, W), jax.jit(case(jax.jit))(X, W)
        wrong = [
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        ]
        same = [
            a.sharding.is_equivalent_to(b.sharding, a.ndim)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        ]
        say(name, wrong=max(wrong), same_shardings=all(same))
    x = jax.random.normal(jax.random.key(0), (2, 2048, 8))
    for check in (True, False):
        f = functools.partial(of_each_shard, check=check)
        lowered = jax.jit(f(ON_CPU)).lower(x)
        wrong = float(np.abs(np.asarray(lowered.compile()(x)) - np.asarray(jax.jit(f(jax.jit))(x))).max())
        say(f"loops of each shard, {check}", wrong=wrong, loops=lowered.as_text().count("stablehlo.while"))
    for axes in (("d", "m"), ("d",)):
        (f, args), (g, _) = shards_inside(ON_CPU, axes), shards_inside(jax.jit, axes)
        say(f"shards inside over {len(axes)}", **compared(f, g, args))
    (f, args), (g, _) = partly_manual(ON_CPU), partly_manual(jax.jit)
    say("manual over one axis", **compared(f, g, args))
    mesh, f, args = in_mesh(ON_CPU)
    say("explicit without set_mesh", **compared(f, in_mesh(jax.jit)[1], args))
    with jax.set_mesh(mesh):
        say("explicit with set_mesh", **compared(f, in_mesh(jax.jit)[1], args))
        of_tokens = replace(PROGRAMS["cross-entropy: both"], specs=(P("d"), P(), P("d")))
        f, g = ON_CPU(of_tokens.f), jax.jit(of_tokens.f)
        say("explicit with a scatter", **compared(f, g, of_tokens.args(mesh)))
    with jax.enable_x64(True):  # in which the program is JAX's
        x = np.random.default_rng(0).standard_normal((4096, 4)) / 4
        args = [jax.device_put(a, NamedSharding(MESH, s)) for a, s in ((x, P("d")), (x, P()), (x, P()))]
        say("64 bits in a block", **compared(ON_CPU(pairwise), jax.jit(pairwise), args))
    for name, program in PROGRAMS.items():
        for kind in (AxisType.Auto, AxisType.Explicit)[: 1 + program.is_explicit]:
            mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
            pair = compiled(program, mesh, ON_CPU)
            (wrong, same), (ours, theirs), temporaries = pair.difference(), pair.collectives, pair.temp_bytes
            say(
                f"{name}, {kind.name}",
                wrong=wrong,
                same_shardings=same,
                kernels=pair.kernels,
                more_collectives=dict(ours - theirs),
                temporaries=temporaries[0] / max(temporaries[1], 1),
            )


if __name__ == "__main__":
    with all_quickly():
        main()
