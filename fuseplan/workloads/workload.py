"""A workload: a program in JAX, its sizes, the shapes of its arguments, and random arrays of these shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuseplan.support.errors import FuseplanError, InvalidArgumentError

Program = Callable[..., Any]
Built = tuple[Program, tuple[Any, ...]]

_DISTRIBUTIONS = {"haiku": "dm-haiku"}
"""The name that a package is installed by, where it is not the one it is imported by."""


class MissingPackageError(FuseplanError, ImportError):
    """A workload needs a package that is not installed."""


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A program and its sizes; ``build`` returns the function and the shapes of its arguments."""

    name: str
    description: str
    sizes: dict[str, int]
    """The extents of the full size."""
    small_sizes: dict[str, int]
    """The extents of the small size."""
    make: Callable[..., Built] = field(repr=False)
    """A function of the dtype and the sizes that returns the function and the shapes of its arguments."""
    needs: tuple[str, ...] = ()
    """The packages that ``make`` imports, beside those of fuseplan."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages it needs that are not installed."""
        return tuple(package for package in self.needs if find_spec(package) is None)

    def build(self, dtype: str = "float32", small: bool = False, **sizes: int) -> Built:
        """The function and its arguments, as pytrees of ``jax.ShapeDtypeStruct``.

        Args:
            dtype: of the floating-point arrays, such as ``"bfloat16"``.
            small: the small, ragged size instead of the full one.
            **sizes: extents to change, by their names in ``self.sizes``.

        Raises:
            InvalidArgumentError: the dtype is not a floating-point one, or a size is unknown.
            MissingPackageError: the workload needs a package that is not installed.
        """
        known = self.small_sizes if small else self.sizes
        if unknown := sizes.keys() - known.keys():
            raise InvalidArgumentError(
                f"the sizes of workload {self.name!r} are {', '.join(known)}; "
                f"it has no {', '.join(sorted(unknown))}"
            )
        if missing := self.missing:
            raise MissingPackageError(
                f"the workload {self.name!r} needs {' and '.join(missing)}, not installed here: "
                f"pip install {' '.join(_DISTRIBUTIONS.get(package, package) for package in missing)}"
            )
        return self.make(_floating(dtype), **{**known, **sizes})


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without the array."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def of_shapes(f: Program, *shapes: Any) -> Callable[..., Built]:
    """The ``make`` of a workload whose function is the same at every size.

    ``shapes`` has a pytree of texts for each argument. A text lists the extents of an array: names of sizes,
    numbers, or products of these, as in ``"m 4*hidden"``. The arrays are of the workload's dtype, or of the
    one before a colon, as in ``"int32: m"``.

    Example:
        >>> of_shapes(jnp.dot, "m n", "n 2*m")("float32", m=3, n=5)[1][1].shape
        (5, 6)
    """

    def make(dtype: str, **sizes: int) -> Built:
        def shaped(text: str) -> jax.ShapeDtypeStruct:
            of, _, extents = text.rpartition(":")
            shape = [
                math.prod(sizes.get(n) or int(n) for n in extent.split("*")) for extent in extents.split()
            ]
            return array(of or dtype, *shape)

        return f, jax.tree.map(shaped, shapes)

    return make


HEADS = "batch tokens heads width"
"""The shape of the queries, keys and values of attention."""
MLP = {"w_in": "n hidden", "b_in": "hidden", "w_out": "hidden n", "b_out": "n"}
"""The parameters of a feed-forward layer."""
GATED_MLP = {"w_gate": "n hidden", "w_up": "n hidden", "w_down": "hidden n"}
"""The parameters of a feed-forward layer with a gate."""
LINEAR_CLASSES = ("m n", {"w": "n classes"}, "int32: m")
"""Rows, the weights of the classes, and labels."""


def _floating(dtype: str) -> str:
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise InvalidArgumentError(
            f"expected a floating-point dtype such as 'float32' or 'bfloat16', not {dtype!r}"
        )
    return str(known.name)


_WEIGHT_SCALE = 0.02  # the standard deviation with which GPT-2 initialises its weights


def make_args(args: Any, seed: int = 0, integers_below: int = 64) -> Any:
    """Random arrays for a pytree of ``jax.ShapeDtypeStruct``, the same for the same seed.

    They are normally distributed; parameters named ``w…`` have the scale of initialised weights, and
    Adam's mean squares (``nu``) are not negative. Integers are uniform in
    ``[0, integers_below)``, which is valid as a token or label of every workload.
    """
    return jax.tree_util.tree_map_with_path(
        partial(_sample, np.random.default_rng(seed), integers_below), args
    )


def _sample(
    rng: np.random.Generator, integers_below: int, path: tuple, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, leaf)
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, bits.shape, np.uint32)))
    if leaf.dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, integers_below, leaf.shape), leaf.dtype)
    # A key of a dict, or a field of a named tuple or module; "" for a position.
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    values = rng.standard_normal(leaf.shape, np.float32)
    if "nu" in names:
        values = np.square(values)
    elif names and names[-1].startswith("w"):
        values *= _WEIGHT_SCALE
    return jnp.asarray(values, leaf.dtype)
