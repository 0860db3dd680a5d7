"""Patterns of kernels that libraries ship: attention of cuDNN and of tokamax, grouped products, norms.

Each is compared with the plain functions in wider arithmetic by the tests, and tested not to match functions
that only look alike. Attention is found with and without a scale, a causal mask, a mask of booleans and a
bias, by a softmax that subtracts the maximum or not, and divided before or after the product with the values.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from costmodel.device import DeviceSpec
from fuseplan.patterns.matches import Match
from fuseplan.patterns.pattern import Pattern, constant, name

HIDDEN_BELOW = -6e4
"""A score of this or less has no weight: the least float16 is a common one."""

CUDNN_WIDEST_HEAD = 128
"""Elements of a head that cuDNN's attention takes on every GPU that has it; a multiple of 8."""

_MASKS = ("", "causal", "mask", "hidden", "bias", "causal+bias", "mask+bias", "hidden+bias")
_SOFTMAXES = ("softmax", "exponentials", "divided last")


def _scores(q: Array, k: Array) -> Array:
    product = jnp.einsum("...td,...sd->...ts", q * constant("q_scale", 1.0), k * constant("k_scale", 1.0))
    return product * constant("scale", 1.0)


def _hide(scores: Array, mask: str, arrays: dict[str, Array]) -> Array:
    if "bias" in mask:
        scores = scores + arrays["bias"]
    if "causal" in mask:
        t, s = scores.shape[-2:]
        return jnp.where(jnp.arange(s) <= jnp.arange(t)[:, None], scores, constant("fill"))
    if "mask" in mask:
        return jnp.where(arrays["mask"], scores, constant("fill"))
    return jnp.where(arrays["hidden"], constant("fill"), scores) if "hidden" in mask else scores


def _weighted(scores: Array, v: Array, softmax: str) -> Array:
    if softmax == "softmax":
        weights = name(jax.nn.softmax(scores, axis=-1), "weights")
        return jnp.einsum("...ts,...sd->...td", weights, v)
    if softmax == "exponentials":
        exps = jnp.exp(scores)
        return jnp.einsum("...ts,...sd->...td", name(exps / exps.sum(axis=-1, keepdims=True), "weights"), v)
    exps = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = exps.sum(axis=-1, keepdims=True)
    return jnp.einsum("...ts,...sd->...td", name(exps, "weights"), v) / total


def _function(mask: str, softmax: str) -> tuple[Callable[..., Array], list[str]]:
    """A form of attention, and the dimensions of its arguments."""
    extra: list[str] = [word for word in ("mask", "hidden", "bias") if word in mask.split("+")]
    args = ["... t d", "... s d", "... s d"]
    args += ["... t s" if word == "bias" else "bool[... t s]" for word in extra]

    def attention(q: Array, k: Array, v: Array, *more: Array) -> Array:
        arrays: dict[str, Array] = dict(zip(extra, more, strict=True))
        return _weighted(name(_hide(_scores(q, k), mask, arrays), "scores"), v, softmax)

    return attention, args


def _check(match: Match) -> str | None:
    q, k, v = match.arguments[:3]
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        return f"queries, keys and values have other dtypes: {q.dtype}, {k.dtype}, {v.dtype}"
    if match.is_used_outside:
        return f"it computes a value that is read elsewhere, too: {match.used_outside[0]}"
    if not match.constants.get("fill", -math.inf) <= HIDDEN_BELOW:
        return f"hidden scores are {match.constants['fill']!r}, which has a weight"
    (read,) = match.read_dtypes
    if jnp.finfo(read).bits > jnp.finfo(q.dtype).bits:
        return f"its result is read in {read}, and the kernel's has the {q.dtype} of its arguments"
    return None


def _check_masked(match: Match, word: str) -> str | None:
    """As ``_check``. A row that ``-inf`` hides as a whole is NaN, and would be an average: the mask has to be
    known, and to leave a score in each row."""
    if match.constants["fill"] == -math.inf:
        mask = match.known(3)
        if mask is None:
            return (
                "its mask hides by -inf, and may hide a row as a whole, which is NaN: a large negative "
                "number in the place of -inf has the same weights elsewhere"
            )
        visible = mask if word == "mask" else np.logical_not(mask)
        if not visible.any(axis=-1).all():
            return "its mask hides a row as a whole by -inf, which is NaN"
    return _check(match)


def _check_causal(match: Match) -> str | None:
    q, k = match.arguments[:2]
    if q.shape[-2] != k.shape[-2]:
        return f"its causal mask is not square: {q.shape[-2]} queries, {k.shape[-2]} keys"
    return _check(match)


def _check_for_cudnn(check: Callable[[Match], str | None]) -> Callable[[Match], str | None]:
    def checked(match: Match) -> str | None:
        q = match.arguments[0]
        if match.device is not None and match.device.platform == "gpu":
            if q.dtype not in (jnp.float16, jnp.bfloat16):
                return f"cuDNN's attention takes float16 and bfloat16, and these are {q.dtype}"
            if q.shape[-1] % 8 or q.shape[-1] > CUDNN_WIDEST_HEAD:
                return f"cuDNN's attention takes heads of 8, 16, … {CUDNN_WIDEST_HEAD}, not of {q.shape[-1]}"
        return check(match)

    return checked


def _heads(q: Array, k: Array, v: Array) -> tuple[tuple[int, int, int], list[Array]]:
    """Queries, keys and values as ``[B, T, N, H]``; the numbers of batches, of heads of keys, and of heads of
    queries that share one. Trailing dimensions along which keys and values are broadcast are such groups."""
    lead = q.shape[:-2]
    shared = [max(a, b) for a, b in zip(k.shape[:-2], v.shape[:-2], strict=True)]
    full = [max(a, b) for a, b in zip(lead, shared, strict=True)]
    n_group = 0
    while n_group < len(full) and shared[-1 - n_group] == 1:
        n_group += 1
    split = len(full) - n_group
    for_keys = [*full[:split], *[1] * n_group]
    q = jnp.broadcast_to(q, (*full, *q.shape[-2:]))
    k, v = (jnp.broadcast_to(x, (*for_keys, *x.shape[-2:])) for x in (k, v))
    n_heads = full[split - 1] if split else 1
    group = math.prod(full[split:])
    batch = math.prod(full[: split - 1]) if split else 1
    arrays = []
    for x, heads in ((q, n_heads * group), (k, n_heads), (v, n_heads)):
        arrays.append(jnp.swapaxes(x.reshape(batch, heads, *x.shape[-2:]), 1, 2))
    return (batch, n_heads, group), arrays


def _like_scores(x: Array, lead: Sequence[int], sizes: tuple[int, int, int], tail: tuple[int, int]) -> Array:
    """A mask or bias as ``[B, N, T, S]``, with one for ``B`` and ``N`` where all of these dimensions are
    broadcast."""
    batch, n_heads, group = sizes
    x = jnp.broadcast_to(x, (*x.shape[:-2], *tail))
    if all(n == 1 for n in x.shape[:-2]):
        return x.reshape(1, 1, *tail)
    return jnp.broadcast_to(x, (*lead, *tail)).reshape(batch, n_heads * group, *tail)


def _by(attend: Callable[..., Array], mask: str) -> Callable[..., Array]:
    """``attend``, with the interface of ``jax.nn.dot_product_attention``, in the place of a form of
    attention."""
    extra = [word for word in ("mask", "hidden", "bias") if word in mask.split("+")]

    def replacement(
        q: Array,
        k: Array,
        v: Array,
        *more: Array,
        match: Match,
        scale: float = 1.0,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        fill: float = -math.inf,
    ) -> Array:
        sizes, (queries, keys, values) = _heads(q, k, v)
        lead = jnp.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        tail = q.shape[-2], k.shape[-2]
        given: dict[str, Array] = {}
        for word, x in zip(extra, more, strict=True):
            x = _like_scores(jnp.logical_not(x) if word == "hidden" else x, lead, sizes, tail)
            given["bias" if word == "bias" else "mask"] = x
        total = scale * q_scale * k_scale
        out = attend(queries, keys, values, match=match, scale=total, is_causal="causal" in mask, **given)
        out = jnp.swapaxes(out, 1, 2).reshape(*lead, *out.shape[1:2], out.shape[-1])
        # With a wider bias the pattern's result is as wide, and the program rounds it (``_check``).
        return out.astype(match.results[0].dtype)

    return replacement


def _by_jax(q: Array, k: Array, v: Array, *, match: Match, **options: Any) -> Array:
    """cuDNN's attention where this process runs a GPU and the plan is for one; elsewhere XLA's."""
    is_for_gpu = match.device is not None and match.device.platform == "gpu"
    implementation = "cudnn" if is_for_gpu and jax.default_backend() == "gpu" else "xla"
    if implementation == "cudnn" and "bias" in options:
        options["bias"] = options["bias"].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)  # type: ignore[call-overload, no-any-return]


def _by_tokamax(q: Array, k: Array, v: Array, *, match: Match, **options: Any) -> Array:
    import tokamax

    attended: Array = tokamax.dot_product_attention(q, k, v, **options)
    return attended


def flash_attention_s(match: Match, device: DeviceSpec) -> float:
    """Seconds of an attention that writes no scores, at the device's peaks: the slowest of its arguments and
    results through memory, its two products, and an exponential for each score. A causal mask halves the
    latter two."""
    flops = match.flops
    part = 0.5 if "causal" in match.pattern.name else 1.0
    q = match.arguments[0]
    product_s = part * flops.matrix / device.matrix_rate(str(q.dtype))
    memory_s = match.nbytes / device.hbm_bytes_per_s
    exp_s = part * flops.transcendental / device.transcendental_per_s
    return device.launch_ps / 1e12 + max(product_s, memory_s, exp_s)


def _attentions(
    title: str,
    attend: Callable[..., Array],
    checked: Callable[[Callable[[Match], str | None]], Callable[[Match], str | None]],
) -> tuple[Pattern, ...]:
    found = []
    for mask, softmax in itertools.product(_MASKS, _SOFTMAXES):
        function, args = _function(mask, softmax)
        word = next((w for w in ("mask", "hidden") if w in mask.split("+")), "")
        masked = functools.partial(_check_masked, word=word) if word else _check
        check = checked(_check_causal if "causal" in mask else masked)
        found.append(
            Pattern(
                f"{title} {mask}".strip(),
                function,
                args=args,
                check=check,
                replacement=_by(attend, mask),
                cost=flash_attention_s,
                # A causal mask is also some mask, and a bias may be part of the scores.
                priority=10 * ("causal" in mask) + 5 * ("+" in mask) + ("bias" in mask),
                choose="cost",
                required=False,
            )
        )
    return tuple(found)


attention = _attentions("attention", _by_jax, _check_for_cudnn)
"""Attention by ``jax.nn.dot_product_attention``: cuDNN's kernel on a GPU, in float16 and bfloat16, and XLA's
elsewhere. It is used where the plan is faster with it."""


def has_tokamax() -> bool:
    """Whether the package ``tokamax`` is installed."""
    return importlib.util.find_spec("tokamax") is not None


tokamax_attention = (
    _attentions("tokamax attention", _by_tokamax, lambda check: check) if has_tokamax() else ()
)
"""Attention by ``tokamax.dot_product_attention``; no patterns where ``tokamax`` is not installed."""


def _one_hot_product(ids: Array, x: Array, w: Array) -> Array:
    chosen = ids[:, None] == jnp.arange(w.shape[0])
    products = name(jnp.einsum("td,edf->tef", x, w), "products")
    return jnp.einsum("te,tef->tf", chosen.astype(x.dtype), products)


def _masked_product(ids: Array, x: Array, w: Array) -> Array:
    chosen = ids[:, None] == jnp.arange(w.shape[0])
    products = name(jnp.einsum("td,edf->tef", x, w), "products")
    return jnp.where(chosen[:, :, None], products, 0.0).sum(axis=1)


def _ragged(ids: Array, x: Array, w: Array) -> Array:
    """The rows of ``x`` sorted by group, each group times its matrix, in the order that they had. A row whose
    group does not exist is zero."""
    n = w.shape[0]
    known = (ids >= 0) & (ids < n)
    order = jnp.argsort(jnp.where(known, ids, n), stable=True)
    sizes = jnp.bincount(jnp.where(known, ids, n), length=n + 1)[:n].astype(jnp.int32)
    rows = lax.ragged_dot(x[order], w, sizes)
    out = jnp.zeros(rows.shape, rows.dtype).at[order].set(rows)
    return jnp.where(known[:, None], out, 0)


def ragged_dot_s(match: Match, device: DeviceSpec) -> float:
    """Seconds of a product of each row with the matrix of its group alone, at the device's peaks, and of
    sorting and moving the rows there and back."""
    _, x, w = match.arguments
    (out,) = match.results
    rows, width = x.shape
    flops = 2 * rows * width * w.shape[-1]
    moved = match.nbytes + 2 * (rows * width * x.dtype.itemsize + math.prod(out.shape) * out.dtype.itemsize)
    product_s = flops / device.matrix_rate(str(x.dtype))
    # Sorting, gathering the rows, the product, and scattering them are kernels.
    return 4 * device.launch_ps / 1e12 + max(product_s, moved / device.hbm_bytes_per_s)


def _check_ragged(match: Match) -> str | None:
    _, x, w = match.arguments
    if x.dtype != w.dtype:
        return f"rows and matrices have other dtypes: {x.dtype}, {w.dtype}"
    if match.is_used_outside:
        return f"it computes a value that is read elsewhere, too: {match.used_outside[0]}"
    return None


ragged_dot = tuple(
    Pattern(
        "ragged dot",
        function,
        args=("int32[t]", "t d", "e d f"),
        check=_check_ragged,
        replacement=_ragged,
        cost=ragged_dot_s,
        choose="cost",
        required=False,
    )
    for function in (_one_hot_product, _masked_product)
)
"""Products of each row with the matrix that its index chooses, computed for all matrices and masked: by
``jax.lax.ragged_dot`` of the sorted rows."""

library = (*attention, *ragged_dot)
"""All patterns whose replacements JAX itself has."""
