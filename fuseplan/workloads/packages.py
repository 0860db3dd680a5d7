"""Programs of published packages, and four in plain JAX: an optional group.

A program whose package is not installed is left out where the group is asked for. Packages are imported
where a program is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fuseplan.support.errors import InvalidArgumentError
from fuseplan.workloads.workload import Built, Workload

PACKAGES: dict[str, Workload] = {}
"""By name. They have one size and are of float32. Their arguments are arrays: on others, programs whose steps
adapt might not end."""


def _program(*needs: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Add the function below to ``PACKAGES``, described by the first line of its docstring."""

    def add(build: Callable[[], Built]) -> Callable[[], Built]:
        def make(dtype: str) -> Built:
            if dtype != "float32":
                raise InvalidArgumentError(f"the workload {name!r} is of float32, it has no form in {dtype}")
            return build()

        name, description = build.__name__, (build.__doc__ or "").strip().rstrip(".")
        PACKAGES[name] = Workload(name, description, {}, {}, make, needs)
        return build

    return add


def _normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@_program()
def log_density_grad() -> Built:
    """A hierarchical regression's log density, with a gradient of about 100 operations."""
    x, y = _normal(200, 8), (_normal(200, seed=1) > 0).astype(jnp.float32)

    def log_density(p: dict[str, jax.Array]) -> jax.Array:
        scale = jnp.exp(p["log_scale"])
        logits = x @ (p["mean"] + scale * p["weights"]) + p["offset"]
        prior = -0.5 * (p["weights"] ** 2).sum() - 0.5 * (p["mean"] ** 2).sum() / 9.0
        prior = prior - jnp.log1p((scale / 2.5) ** 2).sum() + p["log_scale"].sum() - 0.5 * p["offset"] ** 2
        return prior + (y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits)).sum()

    params = {"log_scale": jnp.zeros(8), "mean": jnp.zeros(8), "weights": _normal(8), "offset": jnp.zeros(())}
    return jax.value_and_grad(log_density), (params,)


@_program()
def lbfgs_step() -> Built:
    """One step of L-BFGS with a memory of ten pairs on the Rosenbrock function, unrolled."""

    def loss(x: jax.Array) -> jax.Array:
        return (100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2).sum()

    def step(x: jax.Array, s: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = gradient = jax.grad(loss)(x)
        rho, alphas = 1.0 / ((s * y).sum(1) + 1e-6), []
        for i in reversed(range(10)):
            alphas.append(rho[i] * (s[i] @ q))
            q = q - alphas[-1] * y[i]
        r = q * (s[-1] @ y[-1]) / (y[-1] @ y[-1] + 1e-6)
        for i in range(10):
            r = r + s[i] * (alphas[9 - i] - rho[i] * (y[i] @ r))
        new = x - 1e-3 * r
        return (
            new,
            jnp.roll(s, -1, 0).at[-1].set(new - x),
            jnp.roll(y, -1, 0).at[-1].set(jax.grad(loss)(new) - gradient),
        )

    return step, (_normal(64), _normal(10, 64, seed=1), _normal(10, 64, seed=2))


@_program()
def lennard_jones_grad() -> Built:
    """Forces of 128 particles in a periodic box, each pair once."""

    def energy(x: jax.Array) -> jax.Array:
        d = x[:, None] - x[None]
        d = d - 8.0 * jnp.round(d / 8.0)
        r2 = (d**2).sum(-1) + jnp.eye(len(x))
        inverse = jnp.where((r2 < 9.0) & ~jnp.eye(len(x), dtype=bool), 1.0 / r2, 0.0) ** 3
        return 2.0 * (inverse**2 - inverse).sum()

    return jax.grad(energy), (8.0 * jax.random.uniform(jax.random.key(0), (128, 3)),)


@_program()
def histograms_36() -> Built:
    """36 histograms of 16 bins, one after the other, of shifted samples."""

    def histograms(x: jax.Array) -> jax.Array:
        edges = jnp.linspace(-4.0, 4.0, 17)
        return jnp.stack([jnp.histogram(x + 0.1 * k, edges)[0] for k in range(36)])

    return histograms, (_normal(512),)


@_program("flax", "optax")
def flax_train_step() -> Built:
    """A convolutional classifier of flax, trained by optax's Adam."""
    import optax
    from flax import linen as nn

    class Classifier(nn.Module):  # type: ignore[misc,name-defined]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.Conv(8, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
            return nn.Dense(10)(nn.LayerNorm()(nn.relu(nn.Dense(32)(x))))

    model, optimizer = Classifier(), optax.adam(1e-3)
    images, labels = _normal(8, 12, 12, 1), jnp.arange(8)
    params = model.init(jax.random.key(0), images)

    def step(params: Any, state: Any, images: Any) -> Any:
        def loss(p: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(p, images), labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), images)


@_program("flax")
def flax_attention() -> Built:
    """Self-attention and an MLP of flax on 32 tokens."""
    from flax import linen as nn

    class Block(nn.Module):  # type: ignore[misc,name-defined]
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))

    model, x = Block(), _normal(2, 32, 32)
    return model.apply, (model.init(jax.random.key(0), x), x)


@_program("haiku")
def haiku_lstm_grad() -> Built:
    """The gradient of haiku's LSTM, unrolled by a scan."""
    import haiku as hk

    def forward(x: Any) -> Any:
        core = hk.LSTM(16)
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return (hk.Linear(4)(out) ** 2).mean()

    model, x = hk.without_apply_rng(hk.transform(forward)), _normal(12, 4, 8)
    return jax.grad(model.apply), (model.init(jax.random.key(0), x), x)


@_program("equinox")
def equinox_grad() -> Built:
    """The gradient of equinox's MLP over a batch."""
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.MLP(8, 4, 32, 3, key=jax.random.key(0)), eqx.is_array)

    def loss(params: Any, x: Any) -> Any:
        return (jax.vmap(eqx.combine(params, static))(x) ** 2).mean()

    return jax.grad(loss), (params, _normal(16, 8))


@_program("optax")
def optax_update() -> Built:
    """AdamW of optax with clipping and a schedule, over twelve arrays."""
    import optax

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    params = {f"w{i}": _normal(16, 16, seed=i) for i in range(12)}
    return optimizer.update, (params, optimizer.init(params), params)


@_program("numpyro")
def numpyro_log_density_grad() -> Built:
    """The gradient of numpyro's potential energy of eight schools."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    effects = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def model() -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, errors), obs=effects)

    found = initialize_model(jax.random.key(0), model)
    return jax.value_and_grad(found.potential_fn), (found.param_info.z,)


@_program("blackjax")
def blackjax_hmc_step() -> Built:
    """A transition of blackjax's Hamiltonian Monte Carlo."""
    import blackjax

    sampler = blackjax.hmc(lambda x: -0.5 * (x**2).sum() + jnp.sin(x).sum(), 0.1, jnp.ones(8), 10)
    return sampler.step, (jax.random.key(0), sampler.init(jnp.zeros(8)))


@_program("jaxopt")
def jaxopt_lbfgs() -> Built:
    """A step of jaxopt's L-BFGS on a ridge regression."""
    import jaxopt

    x, y = _normal(64, 8), _normal(64, seed=1)
    solver = jaxopt.LBFGS(lambda w: ((x @ w - y) ** 2).mean() + 0.1 * (w**2).sum(), maxiter=20)
    return solver.update, (jnp.zeros(8), solver.init_state(jnp.zeros(8)))


@_program("diffrax")
def diffrax_solve() -> Built:
    """Lotka and Volterra's equations by diffrax, with adaptive steps."""
    import diffrax

    term = diffrax.ODETerm(lambda t, y, _: jnp.stack([y[0] - y[0] * y[1], y[0] * y[1] - y[1]]))

    def solve(y: Any) -> Any:
        control = diffrax.PIDController(rtol=1e-4, atol=1e-4)
        return diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 5.0, 0.1, y, stepsize_controller=control, max_steps=256
        ).ys

    return solve, (jnp.array([2.0, 1.0]),)


@_program("optimistix")
def optimistix_newton() -> Built:
    """A root by optimistix' Newton, whose linear solves are lineax's."""
    import optimistix

    def solve(y: Any) -> Any:
        f = lambda y, _: jnp.tanh(y) + 0.5 * jnp.roll(y, 1) - 0.2  # noqa: E731
        return optimistix.root_find(f, optimistix.Newton(1e-5, 1e-5), y, max_steps=32).value

    return solve, (jnp.zeros(6),)


@_program("distrax")
def distrax_mixture_grad() -> Built:
    """The gradient of the likelihood of a mixture of Gaussians by distrax."""
    import distrax

    x = _normal(128)

    def loss(p: Any) -> Any:
        parts = distrax.Normal(p["mean"], jnp.exp(p["log_scale"]))
        mixture = distrax.MixtureSameFamily(distrax.Categorical(logits=p["logits"]), parts)
        return -mixture.log_prob(x).mean()

    params = {"mean": jnp.arange(4.0), "log_scale": jnp.zeros(4), "logits": jnp.zeros(4)}
    return jax.grad(loss), (params,)


@_program("tinygp")
def tinygp_likelihood_grad() -> Built:
    """The gradient of a Gaussian process's marginal likelihood by tinygp."""
    import tinygp

    x = jnp.linspace(0.0, 5.0, 48)

    def loss(p: Any) -> Any:
        kernel = jnp.exp(p["amplitude"]) * tinygp.kernels.Matern32(jnp.exp(p["scale"]))
        return -tinygp.GaussianProcess(kernel, x, diag=0.1).log_probability(jnp.sin(x))

    return jax.grad(loss), ({"amplitude": jnp.zeros(()), "scale": jnp.zeros(())},)


@_program("jraph")
def jraph_network() -> Built:
    """A graph network of jraph on a ring of 24 nodes."""
    import jraph

    ring = jnp.arange(24)
    graph = jraph.GraphsTuple(
        _normal(24, 8),
        _normal(24, 4),
        jnp.roll(ring, 1),
        ring,
        jnp.ones((1, 2)),
        jnp.array([24]),
        jnp.array([24]),
    )
    w = _normal(8, 8)
    network = jraph.GraphNetwork(
        lambda e, s, r, g: jnp.tanh(e + s[:, :4] * r[:, 4:]),
        lambda n, s, r, g: jnp.tanh(n @ w + s.sum(-1, keepdims=True)),
        lambda n, e, g: g + n.mean() + e.mean(),
    )
    return network, (graph,)


@_program("jax_md")
def jax_md_energy_grad() -> Built:
    """Forces of 64 particles by jax-md's Lennard-Jones potential."""
    from jax_md import energy, quantity, space

    displacement, _ = space.periodic(6.0)
    force = quantity.force(energy.lennard_jones_pair(displacement))
    return force, (6.0 * jax.random.uniform(jax.random.key(0), (64, 3)),)


@_program("e3nn_jax")
def e3nn_harmonics_grad() -> Built:
    """The gradient of spherical harmonics up to degree three by e3nn-jax."""
    import e3nn_jax as e3nn

    def f(x: Any) -> Any:
        return (e3nn.spherical_harmonics("0e+1o+2e+3o", x, normalize=True).array ** 3).sum()

    return jax.grad(f), (_normal(16, 3),)
