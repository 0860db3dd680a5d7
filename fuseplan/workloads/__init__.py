"""The named programs that tests, benchmarks, reports and the command line plan.

A workload is a program in JAX and the shapes of its arguments, in full size and in a small, ragged size,
which few tiles divide. ``get_workload`` finds one by its name; ``WORKLOADS`` are the general ones, and
``PUBLISHED`` those of published models; ``PACKAGES`` are programs of packages that need not be installed, and
belong to no list by default. ``Workload`` and ``of_shapes`` define others: its ``Program`` and the
shapes are what is ``Built``. ``load_workload`` also takes a user's own function, as ``file.py:function``.
Open ``functions`` for the programs and ``workload`` for the type.

Example:
    >>> f, args = get_workload("softmax").build(small=True)
    >>> f(*make_args(args)).shape
    (5, 130)
"""

from __future__ import annotations

import difflib
from functools import partial

import jax

from fuseplan.support.errors import UnknownNameError
from fuseplan.workloads import equinox_models, functions, gpt2, optimizer
from fuseplan.workloads.large import LARGE
from fuseplan.workloads.own import FORMS, own_workload
from fuseplan.workloads.packages import PACKAGES
from fuseplan.workloads.published import PUBLISHED
from fuseplan.workloads.stress import STRESS
from fuseplan.workloads.workload import (
    GATED_MLP,
    HEADS,
    LINEAR_CLASSES,
    MLP,
    Built,
    Program,
    Workload,
    array,
    make_args,
    of_shapes,
)

__all__ = [
    "PACKAGES",
    "PUBLISHED",
    "WORKLOADS",
    "Built",
    "Program",
    "Workload",
    "get_workload",
    "load_workload",
    "make_args",
    "of_shapes",
]


def get_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        UnknownNameError: there is none; the message has the closest name, and all of them.
    """
    own = {**WORKLOADS, **LARGE, **HUGE, **STRESS, **PUBLISHED}
    known = {**own, **PACKAGES}
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise UnknownNameError(
        f"no workload is named {name!r}{hint} The workloads: {', '.join(own)}; "
        f"of other packages: {', '.join(PACKAGES)}."
    )


def load_workload(text: str) -> Workload:
    """The workload of a name, or a user's own.

    Args:
        text: a name for ``get_workload``; or ``package.module:function`` or ``file.py:function``, where the
            function takes no arguments and returns ``(f, args)``, the function to plan and a tuple of its
            arguments (arrays or ``jax.ShapeDtypeStruct``), or is a ``Workload``. Modules and the modules that
            they import are looked for in the current folder first, those of a file beside it.

    Raises:
        UnknownNameError: there is no such workload, module, file or function; the message has the closest
            name.
        InvalidArgumentError: the function takes arguments.

    Example:
        >>> load_workload("softmax").description
        'softmax over rows'
    """
    if ":" in text:
        return own_workload(text)
    if text.endswith(".py"):
        raise UnknownNameError(f"expected WORKLOAD as a name or {FORMS}, got {text!r} without a function")
    return get_workload(text)


def _dropout_residual(dtype: str, m: int, n: int) -> Built:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return functions.dropout_residual, (key, array(dtype, m, n), array(dtype, m, n))


def _adam_update(dtype: str, width: int) -> Built:
    params = gpt2.block_params(gpt2.Config(layers=1, width=width), dtype)["mlp"]
    return optimizer.adam_update, (params, jax.eval_shape(optimizer.adam_init, params), params)


def _gpt2_block(dtype: str, **sizes: int) -> Built:
    config = gpt2.Config(layers=1, **sizes)
    x = array(dtype, config.batch, config.tokens, config.width)
    return partial(gpt2.block, heads=config.heads), (gpt2.block_params(config, dtype), x)


def _gpt2_block_grad(dtype: str, heads: int, **sizes: int) -> Built:
    _, (params, x) = _gpt2_block(dtype, heads=heads, **sizes)
    return jax.value_and_grad(partial(gpt2.block_loss, heads=heads), argnums=(0, 1)), (params, x, x)


def _gpt2_train(dtype: str, **sizes: int) -> Built:
    config = gpt2.Config(**sizes)
    params = gpt2.params(config, dtype)
    tokens = array("int32", config.batch, config.tokens)
    state = jax.eval_shape(optimizer.adam_init, params)
    return partial(gpt2.train_step, heads=config.heads), (params, state, tokens, tokens)


_MATRIX = {"m": 4096, "n": 768}
_SMALL_MATRIX = {"m": 5, "n": 130}
_IMAGES = {"batch": 16, "side": 56, "channels": 64}
_SMALL_IMAGES = {"batch": 2, "side": 5, "channels": 6}
_HEADS = {"batch": 1, "tokens": 1024, "heads": 12, "width": 64}
_LONG_HEADS = {"batch": 1, "tokens": 4096, "heads": 8, "width": 64}
_SMALL_HEADS = {"batch": 2, "tokens": 13, "heads": 3, "width": 10}
_GPT2 = {"width": 768, "heads": 12, "tokens": 1024, "batch": 1}
_GPT2_MEDIUM = {"width": 1024, "heads": 16, "tokens": 1024, "batch": 1}
_SMALL_GPT2 = {"width": 30, "heads": 3, "tokens": 13, "batch": 2}
_PERCEPTRON = {"rows": 1024, "features": 256, "hidden": 1024, "depth": 3}
_SMALL_PERCEPTRON = {"rows": 5, "features": 12, "hidden": 34, "depth": 2}

_ALL = (
    Workload("add_transpose", "x + x.T: no single tiling serves both operands", {"n": 2048}, {"n": 130},
             of_shapes(functions.add_transpose, "n n")),
    Workload("gelu_bias", "bias and GELU (tanh form)", {"m": 4096, "n": 3072}, _SMALL_MATRIX,
             of_shapes(functions.gelu_bias, "m n", "n")),
    Workload("gelu_exact", "bias and GELU (by the error function)", {"m": 4096, "n": 3072}, _SMALL_MATRIX,
             of_shapes(functions.gelu_exact, "m n", "n")),
    Workload("softmax", "softmax over rows", {"m": 4096, "n": 1024}, _SMALL_MATRIX,
             of_shapes(functions.softmax, "m n")),
    Workload("logsumexp", "log-sum-exp over rows", {"m": 4096, "n": 32000}, _SMALL_MATRIX,
             of_shapes(functions.logsumexp, "m n")),
    Workload("layernorm", "LayerNorm with scale and bias", _MATRIX, _SMALL_MATRIX,
             of_shapes(functions.layernorm, "m n", "n", "n")),
    Workload("layernorm_grad", "the three gradients of LayerNorm", _MATRIX, _SMALL_MATRIX,
             of_shapes(functions.layernorm_grad, "m n", "n", "n", "m n")),
    Workload("rmsnorm", "RMSNorm with scale", _MATRIX, _SMALL_MATRIX,
             of_shapes(functions.rmsnorm, "m n", "n")),
    Workload("residual_norm", "residual addition and LayerNorm, both results kept", _MATRIX, _SMALL_MATRIX,
             of_shapes(functions.residual_norm, "m n", "m n", "n", "n")),
    Workload("dropout_residual", "dropout and residual addition", _MATRIX, _SMALL_MATRIX, _dropout_residual),
    Workload("batchnorm_relu", "BatchNorm in training and ReLU: reductions over all but the last dimension",
             _IMAGES, _SMALL_IMAGES,
             of_shapes(functions.batchnorm_relu, "batch side side channels", "channels", "channels")),
    Workload("conv_block", "3×3 convolution, BatchNorm, ReLU and residual", _IMAGES, _SMALL_IMAGES,
             of_shapes(functions.conv_block, "batch side side channels",
                       {"w": "3 3 channels channels", "scale": "channels", "bias": "channels"})),
    Workload("swiglu", "silu(gate) * up", {"m": 4096, "n": 2816}, _SMALL_MATRIX,
             of_shapes(functions.swiglu, "m n", "m n")),
    Workload("mlp", "the feed-forward layer of GPT-2", {"m": 4096, "n": 768, "hidden": 3072},
             {"m": 5, "n": 130, "hidden": 70}, of_shapes(functions.mlp, "m n", MLP)),
    Workload("norm_mlp", "LayerNorm and the feed-forward layer of GPT-2",
             {"m": 4096, "n": 768, "hidden": 3072}, {"m": 5, "n": 130, "hidden": 70},
             of_shapes(functions.norm_mlp, "m n", {"scale": "n", "bias": "n", **MLP})),
    Workload("norm_qkv", "RMSNorm and the queries, keys and values of Llama's attention",
             {"m": 4096, "n": 1024}, _SMALL_MATRIX,
             of_shapes(functions.norm_qkv, "m n", {"scale": "n", "w": "n 3*n"})),
    Workload("gated_mlp", "the SwiGLU feed-forward layer of Llama", {"m": 4096, "n": 1024, "hidden": 2816},
             {"m": 5, "n": 130, "hidden": 70}, of_shapes(functions.gated_mlp, "m n", GATED_MLP)),
    Workload("attention", "softmax attention without a mask", _HEADS, _SMALL_HEADS,
             of_shapes(functions.attention, HEADS, HEADS, HEADS)),
    Workload("causal_attention", "softmax attention with a causal mask", _LONG_HEADS, _SMALL_HEADS,
             of_shapes(functions.causal_attention, HEADS, HEADS, HEADS)),
    Workload("causal_attention_grad", "the three gradients of causal attention", _LONG_HEADS, _SMALL_HEADS,
             of_shapes(functions.causal_attention_grad, HEADS, HEADS, HEADS, HEADS)),
    Workload("rope", "rotary position embedding", _HEADS, _SMALL_HEADS, of_shapes(functions.rope, HEADS)),
    Workload("cross_entropy", "mean cross-entropy of logits and labels", {"m": 1024, "classes": 50257},
             {"m": 5, "classes": 130}, of_shapes(functions.cross_entropy, "m classes", "int32: m")),
    Workload("cross_entropy_grad", "mean cross-entropy and its gradient by the logits",
             {"m": 1024, "classes": 50257}, {"m": 5, "classes": 130},
             of_shapes(functions.cross_entropy_grad, "m classes", "int32: m")),
    Workload("linear_cross_entropy", "projection to the classes and mean cross-entropy",
             {"m": 4096, "n": 768, "classes": 32000}, {"m": 5, "n": 34, "classes": 130},
             of_shapes(functions.linear_cross_entropy, *LINEAR_CLASSES)),
    Workload("linear_cross_entropy_grad",
             "projection, mean cross-entropy and the gradients by both factors",
             {"m": 4096, "n": 768, "classes": 32000}, {"m": 5, "n": 34, "classes": 130},
             of_shapes(functions.linear_cross_entropy_grad, *LINEAR_CLASSES)),
    Workload("gaussian_kernel_sum", "a sum over pairs of points, by the Gram form",
             {"m": 20000, "n": 20000, "features": 16}, {"m": 5, "n": 130, "features": 3},
             of_shapes(functions.gaussian_kernel_sum, "m features", "n features", "n")),
    Workload("adam_update", "Adam over the four arrays of a feed-forward layer", {"width": 768},
             {"width": 5}, _adam_update),
    Workload("equinox_mlp", "the forward pass of an Equinox MLP", _PERCEPTRON, _SMALL_PERCEPTRON,
             equinox_models.mlp, ("equinox",)),
    Workload("equinox_mlp_train", "a training step of an Equinox MLP with optax.adam", _PERCEPTRON,
             _SMALL_PERCEPTRON, equinox_models.mlp_train, ("equinox", "optax")),
    Workload("gpt2_block", "a transformer block of GPT-2", _GPT2, _SMALL_GPT2, _gpt2_block),
    Workload("gpt2_block_grad", "its loss and the gradients by parameters and input", _GPT2, _SMALL_GPT2,
             _gpt2_block_grad),
    Workload("gpt2_train_4", "a training step of a GPT-2 with 4 layers",
             {"layers": 4, "vocabulary": 50257, **_GPT2}, {"layers": 4, "vocabulary": 130, **_SMALL_GPT2},
             _gpt2_train),
    Workload("gpt2_train_24", "a training step of GPT-2 medium (24 layers)",
             {"layers": 24, "vocabulary": 50257, **_GPT2_MEDIUM},
             {"layers": 24, "vocabulary": 130, **_SMALL_GPT2}, _gpt2_train),
)  # fmt: skip

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}

HUGE: dict[str, Workload] = {
    "gpt2_train_72": Workload(
        "gpt2_train_72",
        "a training step of a GPT-2 with 72 layers, of the width of the medium one",
        {"layers": 72, "vocabulary": 50257, **_GPT2_MEDIUM},
        {"layers": 72, "vocabulary": 130, **_SMALL_GPT2},
        _gpt2_train,
    )
}
"""Workloads that take seconds to trace, and are not in ``WORKLOADS``, which tests iterate over."""

GROUPS: dict[str, dict[str, Workload]] = {
    "general": WORKLOADS,
    "published": PUBLISHED,
    "large": LARGE,
    "stress": STRESS,
    "packages": PACKAGES,
}
"""Workloads that a benchmark takes by one name."""

FAMILIES: dict[str, dict[str, Workload]] = {**GROUPS, "huge": HUGE}
"""All workloads that ``get_workload`` finds, by family."""
