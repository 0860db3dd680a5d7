"""Workloads in PyTorch, to time beside the same workloads in JAX: compiled by ``torch.compile``, attention by
PyTorch's own kernels or by FlexAttention.

Each maker takes the module ``torch`` and returns a function of tensors, in the pytrees of the workload's
arguments and results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPSILON, SOFTENING = 1e-5, 1e-2
"""Of the normalisations, and of distances between points, as in the workloads."""
LEARNING_RATE, BETA1, BETA2, ADAM_EPSILON = 3e-4, 0.9, 0.999, 1e-8
"""Of Adam, as in the workload ``adam_update``."""

Maker = Callable[[Any], Callable[..., Any]]


def import_torch() -> Any:
    """The module, or None where it is missing or its installation is broken."""
    try:
        return importlib.import_module("torch")
    except Exception:
        return None


def to_torch(torch: Any, args: Any, device: str = "cpu") -> Any:
    """JAX's arrays as tensors of that device, in the same pytree; copies, through the host."""

    def tensor(x: Any) -> Any:
        if x.dtype == jnp.bfloat16:
            return torch.from_numpy(np.asarray(x, np.float32)).to(device, torch.bfloat16)
        return torch.from_numpy(np.array(x)).to(device)

    return jax.tree.map(tensor, args)


def _layernorm(torch: Any) -> Callable[..., Any]:
    return lambda x, scale, bias: torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, EPSILON)


def _with_gradients(forward: Maker) -> Maker:
    """The result, and the gradients by all arguments but the last, which is the cotangent."""

    def make(torch: Any) -> Callable[..., Any]:
        compiled = torch.compile(forward(torch))

        def run(*args: Any) -> Any:
            *inputs, cotangent = args
            leaves = [x.detach().requires_grad_() for x in inputs]
            y = compiled(*leaves)
            return (y, *torch.autograd.grad(y, leaves, cotangent))

        return run

    return make


def _gradients(forward: Maker, of: int | None = None) -> Maker:
    """The gradients alone by the first ``of`` arguments, or all but the last, which is the cotangent."""

    def make(torch: Any) -> Callable[..., Any]:
        compiled = torch.compile(forward(torch))

        def run(*args: Any) -> Any:
            *inputs, cotangent = args
            count = len(inputs) if of is None else of
            leaves = [x.detach().requires_grad_() for x in inputs[:count]]
            return torch.autograd.grad(compiled(*leaves, *inputs[count:]), leaves, cotangent)

        return run

    return make


def _layernorm_columns(torch: Any) -> Callable[..., Any]:
    def f(x: Any, scale: Any, bias: Any) -> Any:
        h = x.float()
        centred = h - h.mean(0)
        variance = centred.square().mean(0)
        return (centred * torch.rsqrt(variance + EPSILON)).to(x.dtype) * scale[:, None] + bias[:, None]

    return f


def _rmsnorm(torch: Any) -> Callable[..., Any]:
    return lambda x, scale: torch.nn.functional.rms_norm(x, x.shape[-1:], scale, EPSILON)


def _softmax(torch: Any) -> Callable[..., Any]:
    return lambda x: torch.nn.functional.softmax(x, -1)


def _gelu_bias(torch: Any) -> Callable[..., Any]:
    return lambda x, bias: torch.nn.functional.gelu(x + bias, approximate="tanh")


def _swiglu(torch: Any) -> Callable[..., Any]:
    return lambda gate, up: torch.nn.functional.silu(gate) * up


def _residual_rmsnorm(torch: Any) -> Callable[..., Any]:
    def f(x: Any, branch: Any, scale: Any) -> Any:
        y = x + branch
        return y, torch.nn.functional.rms_norm(y, y.shape[-1:], scale, EPSILON)

    return f


def _adam(torch: Any) -> Callable[..., Any]:
    def f(params: Any, state: Any, grads: Any) -> Any:
        step = state.step + 1
        correction1, correction2 = 1 - BETA1 ** step.float(), 1 - BETA2 ** step.float()
        mu = {k: BETA1 * state.mu[k] + (1 - BETA1) * g.float() for k, g in grads.items()}
        nu = {k: BETA2 * state.nu[k] + (1 - BETA2) * g.float().square() for k, g in grads.items()}
        new = {}
        for k, p in params.items():
            change = (mu[k] / correction1) / ((nu[k] / correction2).sqrt() + ADAM_EPSILON)
            new[k] = (p - LEARNING_RATE * change).to(p.dtype)
        return new, mu, nu

    return f


def _cross_entropy(torch: Any) -> Callable[..., Any]:
    return lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels.long())


def _linear_cross_entropy(torch: Any) -> Callable[..., Any]:
    return lambda x, p, labels: torch.nn.functional.cross_entropy(x @ p["w"], labels.long())


def _linear_gelu(torch: Any) -> Callable[..., Any]:
    return lambda x, p: torch.nn.functional.gelu(x @ p["w"] + p["b"], approximate="tanh")


def _mlp(torch: Any) -> Callable[..., Any]:
    def f(x: Any, p: Any) -> Any:
        h = torch.nn.functional.gelu(x @ p["w_in"] + p["b_in"], approximate="tanh")
        return h @ p["w_out"] + p["b_out"]

    return f


def _gated_mlp(torch: Any) -> Callable[..., Any]:
    return lambda x, p: (torch.nn.functional.silu(x @ p["w_gate"]) * (x @ p["w_up"])) @ p["w_down"]


def _attention(is_causal: bool) -> Maker:
    def make(torch: Any) -> Callable[..., Any]:
        def f(q: Any, k: Any, v: Any) -> Any:
            heads = [x.transpose(1, 2) for x in (q, k, v)]
            grouped = q.shape[2] != k.shape[2]
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(*heads, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)

        return f

    return make


def _flex_attention(torch: Any, score: Any, mask: Any) -> Callable[..., Any]:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    compiled = torch.compile(flex.flex_attention)

    def f(q: Any, k: Any, v: Any) -> Any:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        blocks = flex.create_block_mask(mask, None, None, q.shape[1], k.shape[1], device=q.device.type)
        own = score(q.shape[2]) if score else None
        return compiled(*heads, score_mod=own, block_mask=blocks).transpose(1, 2)

    return f


def _window_attention(torch: Any) -> Callable[..., Any]:
    window = 512  # of the workload at its own size
    return _flex_attention(torch, None, lambda b, h, i, j: (j <= i) & (j > i - window))


def _alibi_attention(torch: Any) -> Callable[..., Any]:
    def score(heads: int) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + torch.exp2(-8.0 * (h + 1) / heads) * (j - i)

    return _flex_attention(torch, score, lambda b, h, i, j: j <= i)


def _gram(torch: Any, x: Any, y: Any) -> Any:
    return (x * x).sum(-1)[:, None] + (y * y).sum(-1)[None] - 2 * (x @ y.T)


def _differences(torch: Any, x: Any, y: Any) -> Any:
    return ((x[:, None] - y[None]) ** 2).sum(-1)


def _kernel_sum(distances: Callable[..., Any], kernel: Callable[[Any, Any], Any]) -> Maker:
    return lambda torch: lambda x, y, b: kernel(torch, distances(torch, x, y)) @ b


def _gaussian(torch: Any, d: Any) -> Any:
    return torch.exp(-d)


def _laplacian(torch: Any, d: Any) -> Any:
    return torch.exp(-torch.sqrt(d))


def _inverse(torch: Any, d: Any) -> Any:
    return torch.rsqrt(d + SOFTENING)


def _distance_logsumexp(torch: Any) -> Callable[..., Any]:
    return lambda x, y: torch.logsumexp(-_gram(torch, x, y), 1)


def _nearest(torch: Any) -> Callable[..., Any]:
    return lambda x, y: torch.argmin(_gram(torch, x, y), 1)


def _nbody(torch: Any) -> Callable[..., Any]:
    def f(x: Any, masses: Any) -> Any:
        towards = x[None] - x[:, None]
        cubed = ((towards**2).sum(-1) + SOFTENING) ** 1.5
        return (towards * (masses / cubed)[..., None]).sum(1)

    return f


def _chamfer(torch: Any) -> Callable[..., Any]:
    def f(x: Any, y: Any) -> Any:
        d = _differences(torch, x, y)
        return d.min(1).values.mean() + d.min(0).values.mean()

    return f


def _energy_distance(torch: Any) -> Callable[..., Any]:
    def mean(a: Any, b: Any) -> Any:
        return torch.sqrt(_differences(torch, a, b) + SOFTENING).mean()

    return lambda x, y: 2 * mean(x, y) - mean(x, x) - mean(y, y)


def _neighbour_counts(torch: Any) -> Callable[..., Any]:
    def f(x: Any, y: Any) -> Any:
        near = _differences(torch, x, y) < 1
        return near.sum(1), near.any(1)

    return f


def _magnetic_field(torch: Any) -> Callable[..., Any]:
    def f(x: Any, sources: Any, currents: Any) -> Any:
        towards = x[:, None] - sources[None]
        distance = torch.linalg.norm(towards, dim=-1, keepdim=True)
        crossed = torch.linalg.cross(currents[None].expand_as(towards), towards)
        return (crossed / (distance**3 + SOFTENING)).sum(1)

    return f


def _kernel_products(torch: Any) -> Callable[..., Any]:
    def f(x: Any, masks: Any, b: Any) -> Any:
        kernels = torch.exp(-((x[:, None] - x[None]) ** 2))
        return torch.stack([torch.where(mask > 0, kernels, 1.0).prod(-1) @ b for mask in masks])

    return f


def _structure_factor(torch: Any) -> Callable[..., Any]:
    def f(x: Any, waves: Any, charges: Any) -> Any:
        phases = waves @ x.T
        real, imaginary = torch.cos(phases) @ charges, torch.sin(phases) @ charges
        return real**2 + imaginary**2

    return f


def _bond_energy(torch: Any) -> Callable[..., Any]:
    def f(x: Any, stiffness: Any, i: Any, j: Any) -> Any:
        stretch = torch.sqrt(((x[i] - x[j]) ** 2).sum(-1) + 1e-6) - 1
        return (stiffness * stretch**2).sum()

    return f


def _bond_forces(torch: Any) -> Callable[..., Any]:
    energy = torch.compile(_bond_energy(torch))

    def f(x: Any, *rest: Any) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(energy(leaf, *rest), leaf)[0]

    return f


def _embedding_bags(torch: Any) -> Callable[..., Any]:
    return lambda table, weights, indices: (table[indices] * weights[..., None]).sum(1)


def _compiled(maker: Maker) -> Maker:
    return lambda torch: torch.compile(maker(torch))


_GRAM_SUM = _kernel_sum(_gram, _gaussian)
_LAPLACIAN = _kernel_sum(_differences, _laplacian)

MAKERS: dict[str, Maker] = {
    "layernorm": _compiled(_layernorm),
    "layernorm_vjp": _with_gradients(_layernorm),
    "layernorm_columns": _compiled(_layernorm_columns),
    "rmsnorm": _compiled(_rmsnorm),
    "softmax": _compiled(_softmax),
    "gelu_bias": _compiled(_gelu_bias),
    "swiglu": _compiled(_swiglu),
    "residual_rmsnorm": _compiled(_residual_rmsnorm),
    "adam_update": _compiled(_adam),
    "cross_entropy": _compiled(_cross_entropy),
    "linear_cross_entropy": _compiled(_linear_cross_entropy),
    "linear_gelu": _compiled(_linear_gelu),
    "mlp": _compiled(_mlp),
    "gated_mlp": _compiled(_gated_mlp),
    "gated_mlp_768": _compiled(_gated_mlp),
    "causal_attention": _compiled(_attention(is_causal=True)),
    "causal_attention_vjp": _with_gradients(_attention(is_causal=True)),
    "full_attention": _compiled(_attention(is_causal=False)),
    "full_attention_vjp": _with_gradients(_attention(is_causal=False)),
    "grouped_attention": _compiled(_attention(is_causal=True)),
    "window_attention": _window_attention,
    "alibi_attention": _alibi_attention,
    "gaussian_gram": _compiled(_GRAM_SUM),
    "gaussian_gram_vjp": _gradients(_GRAM_SUM),
    "gaussian_differences": _compiled(_kernel_sum(_differences, _gaussian)),
    "laplacian": _compiled(_LAPLACIAN),
    "laplacian_vjp": _gradients(_LAPLACIAN),
    "inverse_distance": _compiled(_kernel_sum(_differences, _inverse)),
    "distance_logsumexp": _compiled(_distance_logsumexp),
    "distance_logsumexp_vjp": _gradients(_distance_logsumexp),
    "nearest_neighbour": _compiled(_nearest),
    "kmeans_assign": _compiled(_nearest),
    "nbody": _compiled(_nbody),
    "chamfer": _compiled(_chamfer),
    "energy_distance": _compiled(_energy_distance),
    "neighbour_counts": _compiled(_neighbour_counts),
    "magnetic_field": _compiled(_magnetic_field),
    "kernel_products": _compiled(_kernel_products),
    "structure_factor": _compiled(_structure_factor),
    "bond_energy": _compiled(_bond_energy),
    "bond_forces": _bond_forces,
    "embedding_bags": _compiled(_embedding_bags),
    "embedding_bags_vjp": _gradients(_embedding_bags, of=2),
}
"""By the names of workloads and of ``experiments.gpu_cases``."""
