"""What a workload is: a program and the sizes at which it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fuseplan.support.errors import InvalidArgumentError

Program = Callable[..., Any]
Built = tuple[Program, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A program, and the sizes it runs at; ``build`` makes it."""

    name: str
    description: str
    sizes: dict[str, int]
    """The extents of the full size."""
    small_sizes: dict[str, int]
    """The extents of the small size."""
    make: Callable[..., Built] = field(repr=False)
    """From a dtype and the sizes to the function and the shapes of its arguments."""

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
        return self.make(_floating(dtype), **{**known, **sizes})


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array that need not be there."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def fixed(f: Program, args: Callable[..., tuple[Any, ...]]) -> Callable[..., Built]:
    """The ``make`` of a workload whose function is the same at every size; ``args`` takes a maker
    of arrays, and the sizes."""

    def make(dtype: str, **sizes: int) -> Built:
        return f, args(partial(array, dtype), **sizes)

    return make


def heads_args(count: int) -> Callable[..., tuple[Any, ...]]:
    """For ``fixed``: so many arrays ``[B, T, H, D]`` of one shape."""
    return lambda a, batch, tokens, heads, width: (a(batch, tokens, heads, width),) * count


def gated_mlp_args(a: Callable[..., Any], m: int, n: int, hidden: int) -> tuple[Any, ...]:
    """For ``fixed``: rows ``[M, N]`` and the weights of a gated MLP."""
    return a(m, n), {"w_gate": a(n, hidden), "w_up": a(n, hidden), "w_down": a(hidden, n)}


def classes_args(a: Callable[..., Any], m: int, n: int, classes: int) -> tuple[Any, ...]:
    """For ``fixed``: rows ``[M, N]``, the weights ``[N, V]`` of their classes, and labels ``[M]``."""
    return a(m, n), {"w": a(n, classes)}, array("int32", m)


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
