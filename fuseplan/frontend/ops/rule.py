"""What fuseplan knows of one primitive: its kind, axes, flops, and how to evaluate it
on one tile. One ``Rule`` is the only place that says any of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax import lax
from jax import numpy as jnp

from costmodel.backends import backend_names, backend_of
from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.frontend.trace import Equation

TRITON = frozenset({"triton"})
MOSAIC_GPU = frozenset({"mosaic_gpu"})
PALLAS = frozenset({"triton", "mosaic_tpu", "mosaic_gpu"})
XLA = frozenset({"xla", "loops"})
"""The backends whose compiler is XLA: it has every primitive, for every dtype, so that what
Pallas lacks needs no detour there, and a tile gets the very bits that the array would."""
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Space:
    """The iteration space of one equation. Maps are given for every operand, literals
    included; a dimension of size one maps to ``()``."""

    dims: tuple[int, ...]
    roles: tuple[DimRole, ...]
    input_maps: tuple[DimMap, ...]
    output_maps: tuple[DimMap, ...]


class Tile(Protocol):
    """What a rule sees of the kernel when its equation is evaluated on one tile."""

    language: str
    """``costmodel.backends.Backend.language`` of the kernel."""
    in_shapes: tuple[tuple[int, ...], ...]
    """Block shape of each operand; the true shape for operands that are literals."""
    out_shapes: tuple[tuple[int, ...], ...]

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        """int32 array of ``shape``: along ``dim``, the index in the node's iteration
        dimension ``node_dim`` that each element of this tile stands for."""

    def valid(self, operand: int, dim: int) -> Any | None:
        """Bool array of the operand's block shape: which elements count along ``dim``, being
        inside the array and in no earlier tile. None where all of them do."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How partial results over tiles of a reduced axis are combined.

    ``combine(total, part)`` is associative and commutative, ``neutral(dtype)`` its
    neutral element, ``accumulator(dtype)`` the dtype in which partial results of a
    result of ``dtype`` are carried.

    Example:
        >>> from fuseplan.frontend.ops import rules
        >>> rules()["reduce_sum"].reduction.combine(1, 2)
        3
    """

    combine: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]
    accumulator: Callable[[Any], Any]

    def init(self, shape: tuple[int, ...], eqn: Equation) -> Any:
        """What ``shape`` of the equation's result is before anything is combined into it: an
        array, or a tuple of arrays, of that shape."""
        dtype = self.accumulator(eqn.out_avals[0].dtype)
        return jnp.full(shape, self.neutral(dtype), dtype)

    def finish(self, total: Any, eqn: Equation) -> Any:
        """The equation's result, in its dtype, of what was combined."""
        dtype = eqn.out_avals[0].dtype
        return total if jnp.result_type(total) == dtype else total.astype(dtype)


BlockFn = Callable[[Tile, Equation, Sequence[Any]], Sequence[Any]]

_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = {
    "triton": frozenset({"bool", "float16", "bfloat16", "float32", "float64", *_INTEGERS}),
    # Narrower integers can be converted, but have no arithmetic of their own.
    "mosaic_tpu": frozenset({"bool", "bfloat16", "float32", "int32", "uint32"}),
    # Narrower integers are converted, but are not added or compared.
    "mosaic_gpu": frozenset({"bool", "float16", "bfloat16", "float32", "int32", "uint32"}),
}


def dtypes_of(eqn: Equation) -> set[str]:
    """The names of the dtypes of an equation's operands and results."""
    return {str(getattr(a, "dtype", "token")) for a in (*eqn.in_avals, *eqn.out_avals)}


def kernel_dtypes(language: str) -> frozenset[str]:
    """The dtypes that kernels of a Pallas backend compute with."""
    return _DTYPES[language]


def known_dtypes(eqn: Equation, language: str) -> bool:
    """Whether kernels of ``backend`` compute with the equation's dtypes."""
    return dtypes_of(eqn) <= _DTYPES[language]


def _real(eqn: Equation) -> bool:
    """Whether all operands and results are real numbers or booleans: neither keys nor tokens,
    nor complex numbers, which have no least or greatest one."""
    dtypes = [getattr(a, "dtype", None) for a in (*eqn.in_avals, *eqn.out_avals)]
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return all(d is not None and any(jnp.issubdtype(d, k) for k in kinds) for d in dtypes)


@dataclass(frozen=True, slots=True)
class Rule:
    """All that is known of one primitive.

    ``space`` and ``flops`` see the equation with its avals. ``block`` evaluates it on one
    tile (None: it can only be left to XLA as it is); for a ``reduction`` it returns
    partial results as the accumulators are, in their dtype. ``lacks`` names the backends
    whose compilers do not lower it into a larger kernel. ``special`` gives the rule of an
    equation for which more is known than for the primitive, or None.
    """

    kind: OpKind
    space: Callable[[Equation], Space]
    flops: Callable[[Equation], Flops]
    block: BlockFn | None = None
    lacks: frozenset[str] = NONE
    reduction: Reduction | None = None
    supports: Callable[[Equation, str], bool] = known_dtypes
    """Whether a backend that lowers the primitive does so for an equation's dtypes and
    parameters."""
    temporaries: int = 0
    """Blocks as large as the result that evaluating it keeps beside operands and result."""
    special: Callable[[Equation], Rule | None] | None = None

    def backends(self, eqn: Equation) -> tuple[str, ...]:
        """The backends that can emit ``eqn`` inside a fused kernel."""
        return tuple(b for b in backend_names() if self._emits(eqn, backend_of(b).language))

    def _emits(self, eqn: Equation, language: str) -> bool:
        if self.kind == OpKind.OPAQUE or language in self.lacks:
            return False
        if language == "xla":
            return True
        if self.block is None:
            return False
        return _real(eqn) if language == "loops" else self.supports(eqn, language)


def bind(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation whose parameters do not mention shapes, at block shape."""
    out = eqn.primitive.bind(*args, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` at ``shape``, untouched where it has it: Mosaic lowers no reshape of a scalar to
    a scalar."""
    return x if jnp.shape(x) == shape else lax.reshape(x, shape)


def moved(tile: Tile, x: Any, move: Callable[[Any], Any]) -> Any:
    """``move(x)``, which puts a dimension of size one last; of narrow numbers on a TPU in 32 bits, since not
    every compiler for it turns packed rows into columns (tests/aot/test_compile_primitives.py)."""
    if tile.language != "mosaic_tpu" or x.dtype.itemsize >= 4:
        return move(x)
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    return move(x.astype(wide)).astype(x.dtype)


def no_flops(eqn: Equation) -> Flops:
    """Moving data is not counted as arithmetic."""
    return Flops()


def out_size(eqn: Equation) -> int:
    """Elements of its results."""
    return sum(map(_size, eqn.out_avals))


def in_size(eqn: Equation) -> int:
    """Elements of its operands."""
    return sum(map(_size, eqn.in_avals))


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0))  # a token has none


def own_dims(shape: Sequence[int], first: int = 0) -> tuple[tuple[int, ...], DimMap]:
    """Give each dimension of ``shape`` an iteration dimension of its own.

    Returns their sizes and the map, numbering from ``first``; size one maps to ``()``.

    Example:
        >>> own_dims((4, 1, 6))
        ((4, 6), ((0,), (), (1,)))
    """
    dims: list[int] = []
    dim_map: list[tuple[int, ...]] = []
    for extent in shape:
        if extent == 1:
            dim_map.append(())
        else:
            dim_map.append((first + len(dims),))
            dims.append(extent)
    return tuple(dims), tuple(dim_map)


def whole_space(eqn: Equation) -> Space:
    """Every dimension of every operand and result is needed whole: what is assumed of an
    equation without a rule."""
    dims: tuple[int, ...] = ()
    maps: list[DimMap] = []
    for aval in (*eqn.in_avals, *eqn.out_avals):
        own, dim_map = own_dims(getattr(aval, "shape", ()), len(dims))
        dims += own
        maps.append(dim_map)
    n_in = len(eqn.in_avals)
    return Space(dims, (DimRole.WHOLE,) * len(dims), tuple(maps[:n_in]), tuple(maps[n_in:]))
