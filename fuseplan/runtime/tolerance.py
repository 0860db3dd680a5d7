"""Compare the results of a fused function with a reference, within the rounding errors of each dtype.

A fused kernel adds in another order than the reference, and keeps intermediates in wider or narrower dtypes.
So results may differ by a multiple of the dtype's epsilon, relative to the terms of the sums; the multiple
depends on the length of the sums. A defect, such as a wrong block or a missing mask, causes a much larger
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuseplan.support.errors import MismatchError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The condition ``|result - reference| <= epsilons * eps * (|reference| + scale) + eps * largest``.

    ``scale`` is the root mean square of the reference, ``largest`` that of the largest leaf of the pytree. A
    sum that cancels has the error of its terms, not of its small result, and a gradient that is zero by
    symmetry (attention's key bias) consists of rounding errors.
    """

    epsilons: int
    because: str


TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(2**12, "as float32: the same operations"),
    "float32": Tolerance(
        2**12,
        "sums of up to 2^24 terms in random order err by about sqrt(n) eps = 2^12 eps "
        "(Higham, Accuracy and Stability of Numerical Algorithms, 4.2)",
    ),
    "float16": Tolerance(2**5, "accumulated in float32, then rounded once at each of a few tens of stores"),
    "bfloat16": Tolerance(2**5, "as float16"),
}
"""Tolerances by the dtype of the result. A complex dtype has the tolerance of its parts, narrower floats that
of bfloat16; integers, booleans and keys must be equal."""


def tolerance(dtype: Any) -> Tolerance | None:
    """The tolerance for results of ``dtype``; None if they must be equal."""
    name = {"complex64": "float32", "complex128": "float64"}.get(str(dtype), str(dtype))
    if name in TOLERANCES:
        return TOLERANCES[name]
    return TOLERANCES["bfloat16"] if jnp.issubdtype(dtype, jnp.floating) else None


def check_results(name: str, result: Any, reference: Any) -> None:
    """Compare two pytrees of arrays, leaf by leaf.

    Args:
        name: the function's name, for the message.
        result: the results of the fused function.
        reference: the results of JAX's own function.

    Raises:
        MismatchError: structure, shape, dtype or values differ beyond the dtype's tolerance;
            the message says by how much, where, and which numbers are not finite.
    """
    structure: Any = jax.tree.structure(result)
    expected: Any = jax.tree.structure(reference)
    if structure != expected:
        raise MismatchError(f"{name}: expected a result of structure {expected}, got {structure}")
    wrong = list(_differences(result, reference))
    if wrong:
        count = len(jax.tree.leaves(reference))
        more = f"\n  … and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise MismatchError(
            f"{name}: {len(wrong)} of {count} results differ from jax.jit's:\n  "
            + "\n  ".join(wrong[:8])
            + more
            + "\nFUSEPLAN_DISABLE=1 runs jax.jit instead; FUSEPLAN_DEBUG=3 prints the plan. Please report it."
        )


def largest_difference(result: Any, reference: Any) -> tuple[float, float]:
    """The largest absolute difference of two leaves of inexact dtype, and the largest difference relative to
    the leaf's root mean square. The root mean square counts as at least a millionth of the largest leaf's,
    since a gradient that is zero by symmetry consists of rounding errors."""
    absolute = relative = 0.0
    least = _largest_scale(reference) * 1e-6
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(reference), strict=True):
        if not jnp.issubdtype(jnp.asarray(b).dtype, jnp.inexact) or not np.size(b):
            continue
        wide_a, wide_b = _wide(a), _wide(b)
        difference = float(np.max(np.abs(wide_a - wide_b), initial=0.0))
        absolute = max(absolute, difference)
        scale = max(_root_mean_square(np.abs(wide_b)), least)
        relative = max(relative, difference / scale if scale else difference)
    return absolute, relative


def _differences(result: Any, reference: Any) -> Iterator[str]:
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(result),
        jax.tree_util.tree_leaves_with_path(reference),
        strict=True,
    )
    largest = _largest_scale(reference)
    for (path, a), (_, b) in pairs:
        text = _difference(a, b, largest)
        if text:
            yield f"{jax.tree_util.keystr(path) or 'the result'}: {text}"


def _largest_scale(reference: Any) -> float:
    """The largest root mean square of any finite leaf of inexact dtype."""
    scales = [0.0]
    for b in jax.tree.leaves(reference):
        if jnp.issubdtype(b.dtype if hasattr(b, "dtype") else np.asarray(b).dtype, jnp.inexact):
            size = np.abs(_wide(b))
            scales.append(_root_mean_square(size[np.isfinite(size)]))
    return max(scales)


def _difference(a: Any, b: Any, largest: float) -> str:
    a, b = (x if hasattr(x, "dtype") else np.asarray(x) for x in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"expected {_aval(b)}, got {_aval(a)}"
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    rule = tolerance(b.dtype)
    if not b.size:
        return ""
    if rule is None:
        unequal = np.asarray(a) != np.asarray(b)
        if not unequal.any():
            return ""
        at = tuple(int(i) for i in np.argwhere(unequal)[0])
        return (
            f"{_aval(b)}: {int(unequal.sum())} of {b.size} elements are not equal, first at {list(at)}: "
            f"expected {np.asarray(b)[at]}, got {np.asarray(a)[at]}"
        )
    eps = float(jnp.finfo(b.dtype).eps)
    return _inexact_difference(_wide(a), _wide(b), _aval(b), rule, eps, eps * largest)


def _inexact_difference(
    a: np.ndarray, b: np.ndarray, aval: str, rule: Tolerance, eps: float, noise: float
) -> str:
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite | (np.isnan(a) & np.isnan(b)) | (a == b)  # NaN for NaN, infinity for infinity
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        return (
            f"{aval}: {int((~same).sum())} of {b.size} elements are finite in one only, first at {list(at)}: "
            f"expected {b[at]}, got {a[at]} "
            f"(NaN: expected {int(np.isnan(b).sum())}, got {int(np.isnan(a).sum())}; "
            f"infinite: expected {int(np.isinf(b).sum())}, got {int(np.isinf(a).sum())})"
        )
    if not finite.any():
        return ""
    difference = np.where(finite, np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), 0.0)
    size = np.where(finite, np.abs(b), 0.0)
    scale = _root_mean_square(size[finite])
    allowed = rule.epsilons * eps * (size + scale) + noise
    beyond = difference > allowed
    if not beyond.any():
        return ""
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(difference - allowed)), difference.shape))
    worst = float(difference.max())
    relative = worst / scale if scale else float("inf")
    return (
        f"{aval}: {int(beyond.sum())} of {b.size} elements beyond {rule.epsilons} eps; largest difference "
        f"{worst:.3g}, {relative:.3g} of the root mean square {scale:.3g}; "
        f"worst at {list(at)}: expected {b[at]:.9g}, got {a[at]:.9g}"
    )


def _root_mean_square(size: np.ndarray) -> float:
    """The root mean square of magnitudes, scaled so that squares do not overflow."""
    largest = float(size.max(initial=0.0))
    return largest * float(np.sqrt(np.mean((size / largest) ** 2))) if largest else 0.0


def _wide(x: Any) -> np.ndarray:
    """An array as float64 or complex128, in which narrower values subtract without rounding."""
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _aval(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"
