"""The cases of ``experiments.gpu_bench`` in PyTorch, for ``torch.compile``; needs PyTorch with CUDA.

Each function takes the module ``torch`` and returns a function of tensors, in the pytrees of
``experiments.gpu_cases``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_cases import EPSILON

LEARNING_RATE, BETA1, BETA2, ADAM_EPSILON = 3e-4, 0.9, 0.999, 1e-8
"""Of Adam, as in the workload ``adam_update``."""

Maker = Callable[[Any], Callable[..., Any]]


def import_torch() -> Any:
    """The module, or None where there is none, or none that sees a GPU."""
    try:
        torch = importlib.import_module("torch")
    except Exception:  # A broken installation is as good as none.
        return None
    return torch if torch.cuda.is_available() else None


def to_torch(torch: Any, args: Any) -> Any:
    """JAX's arrays as tensors on the GPU, in the same pytree; copies, through the host."""

    def tensor(x: Any) -> Any:
        if x.dtype == jnp.bfloat16:
            return torch.from_numpy(np.asarray(x, np.float32)).to("cuda", torch.bfloat16)
        return torch.from_numpy(np.array(x)).to("cuda")

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


def _linear_gelu(torch: Any) -> Callable[..., Any]:
    return lambda x, p: torch.nn.functional.gelu(x @ p["w"] + p["b"], approximate="tanh")


def _gated_mlp(torch: Any) -> Callable[..., Any]:
    return lambda x, p: (torch.nn.functional.silu(x @ p["w_gate"]) * (x @ p["w_up"])) @ p["w_down"]


def _attention(torch: Any) -> Callable[..., Any]:
    def f(q: Any, k: Any, v: Any) -> Any:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return y.transpose(1, 2)

    return f


def _compiled(maker: Maker) -> Maker:
    return lambda torch: torch.compile(maker(torch))


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
    "linear_gelu": _compiled(_linear_gelu),
    "gated_mlp": _compiled(_gated_mlp),
    "causal_attention": _compiled(_attention),
    "causal_attention_vjp": _with_gradients(_attention),
}
"""By the names of ``experiments.gpu_cases``."""
