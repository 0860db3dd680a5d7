"""``Rule``: the kind, iteration space, flops and tile evaluation of one primitive; the table of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from costmodel.backends import backend_names, backend_of
from costmodel.graph import DimMap, DimRole, Flops, OpKind
from fuseplan.frontend.trace import Equation
from fuseplan.support.errors import InvalidArgumentError, UnknownNameError

TRITON = frozenset({"triton"})
MOSAIC_GPU = frozenset({"mosaic_gpu"})
PALLAS = frozenset({"triton", "mosaic_tpu", "mosaic_gpu"})
XLA = frozenset({"xla", "loops"})
"""The languages that XLA compiles. XLA lowers every primitive for every dtype, so that a tile is computed
by the primitive itself and has the same bits as the whole array."""
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Space:
    """The iteration space of one equation.

    There is a map for every operand, literals included. A dimension of size one maps to ``()``.
    """

    dims: tuple[int, ...]
    roles: tuple[DimRole, ...]
    input_maps: tuple[DimMap, ...]
    output_maps: tuple[DimMap, ...]


@runtime_checkable
class Table(Protocol):
    """An array in memory that a kernel reads by index: the operand of a rule, in place of a block."""

    ndim: int

    def load(self, places: Sequence[Any], inside: Any | None) -> Any:
        """A block of elements: ``places`` has for each dimension of the array the index of each of them,
        ``inside`` says which are read, where not all are. The others are zero."""


class Tile(Protocol):
    """The tile of a kernel on which a rule evaluates its equation."""

    language: str
    """``costmodel.backends.Backend.language`` of the kernel."""
    in_shapes: tuple[tuple[int, ...], ...]
    """Block shape of each operand; the true shape for operands that are literals."""
    out_shapes: tuple[tuple[int, ...], ...]

    def indices(self, shape: tuple[int, ...], dim: int, node_dim: int) -> Any:
        """int32 array of ``shape``: the index of each element along the node's iteration dimension
        ``node_dim``, which varies along ``dim``."""

    def places(self, shape: tuple[int, ...], dim: int, node_dim: int) -> tuple[Any, Any | None]:
        """As ``indices``, but in the arrays that the kernel has, which may be parts; and a bool array of the
        elements that are inside of them, None where all are."""

    def valid(self, operand: int, dim: int) -> Any | None:
        """Bool array of the operand's block shape: the elements that are inside the array along ``dim``
        and in no earlier tile. None where all of them are."""


BlockFn = Callable[[Tile, Equation, Sequence[Any]], Sequence[Any]]


def is_float_in_triton(language: str, dtype: Any) -> bool:
    """Whether extrema of ``dtype`` ignore NaN: Triton's of floats do, and XLA's return it."""
    return language == "triton" and bool(jnp.issubdtype(dtype, jnp.floating))


@dataclass(frozen=True, slots=True)
class Reduction:
    """Combines partial results over the tiles of a reduced axis.

    ``combine(total, part)`` is associative, ``neutral(dtype)`` its neutral element,
    ``accumulator(dtype)`` the dtype of partial results whose final result is of ``dtype``.

    Example:
        >>> from fuseplan.frontend.ops import rules
        >>> rules()["reduce_sum"].reduction.combine(1, 2)
        3
    """

    combine: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]
    accumulator: Callable[[Any], Any]
    elements: BlockFn | None = None
    """The elements of a tile that are to be combined, in the accumulator's dtype; None if they are combined
    with each other in the rule's ``block`` only."""
    within: Callable[[Tile, Equation, Any], Any] | None = None
    """The result of combining such elements with each other."""
    of_floats_in_triton: Callable[[Any, Any], Any] | None = None
    """Takes the place of ``combine`` for floats in Triton, whose own operation differs from XLA's."""

    def combine_in(self, language: str, total: Any, part: Any) -> Any:
        """``combine`` in a kernel language."""
        own = self.of_floats_in_triton
        if own is not None and is_float_in_triton(language, total.dtype):
            return own(total, part)
        return self.combine(total, part)

    def init(self, shape: tuple[int, ...], eqn: Equation) -> Any:
        """The initial accumulator: an array, or a tuple of arrays, of ``shape``."""
        dtype = self.accumulator(eqn.out_avals[0].dtype)
        return jnp.full(shape, self.neutral(dtype), dtype)

    def finish_whole(self, part: Any, eqn: Equation) -> Sequence[Any]:
        """As ``finish``, of the part of a tile that has all elements, without ``init``."""
        return self.finish(part, eqn)

    def finish(self, total: Any, eqn: Equation) -> Sequence[Any]:
        """The equation's results, in their dtypes, from the final accumulator."""
        dtype = eqn.out_avals[0].dtype
        return [total if jnp.result_type(total) == dtype else total.astype(dtype)]


_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
KERNEL_DTYPES = {
    "triton": frozenset({"bool", "float16", "bfloat16", "float32", "float64", *_INTEGERS}),
    # Mosaic converts narrower integers but has no arithmetic for them.
    "mosaic_tpu": frozenset({"bool", "bfloat16", "float32", "int32", "uint32"}),
    # Mosaic GPU converts narrower integers but does not add or compare them.
    "mosaic_gpu": frozenset({"bool", "float16", "bfloat16", "float32", "int32", "uint32"}),
}
"""The dtypes for which each kernel language has arithmetic."""


def dtypes_of(eqn: Equation) -> set[str]:
    """The names of the dtypes of an equation's operands and results."""
    return {str(getattr(a, "dtype", "token")) for a in (*eqn.in_avals, *eqn.out_avals)}


def kernel_dtypes(language: str) -> frozenset[str]:
    """The dtypes for which ``language`` has arithmetic.

    Raises:
        UnknownNameError: ``KERNEL_DTYPES`` does not have the language.
    """
    try:
        return KERNEL_DTYPES[language]
    except KeyError:
        raise UnknownNameError(
            f"the dtypes of kernels in {language!r} are unknown, expected one of {', '.join(KERNEL_DTYPES)}: "
            "add a new language to KERNEL_DTYPES in fuseplan/frontend/ops/rule.py"
        ) from None


def known_dtypes(eqn: Equation, language: str) -> bool:
    """Whether kernels in ``language`` have arithmetic for all dtypes of the equation."""
    return dtypes_of(eqn) <= kernel_dtypes(language)


_EXTREMA = frozenset({"reduce_max", "reduce_min", "cummax", "cummin"})


def _can_loop(eqn: Equation) -> bool:
    """Whether loops over tiles may compute an equation of these dtypes: numbers or booleans, not keys or
    tokens. An extremum of complex numbers depends on the order of its operands where one has a NaN."""
    dtypes = [getattr(a, "dtype", None) for a in (*eqn.in_avals, *eqn.out_avals)]
    kinds = (jnp.inexact, jnp.integer, jnp.bool_)
    if not all(d is not None and any(jnp.issubdtype(d, k) for k in kinds) for d in dtypes):
        return False
    has_complex = any(str(d).startswith("complex") for d in dtypes)
    return not (has_complex and eqn.primitive.name in _EXTREMA)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one primitive is priced, tiled and evaluated.

    ``space`` and ``flops`` take the equation with its avals. ``block`` evaluates it on one tile; None means
    that only XLA can run it. For a ``reduction``, ``block`` returns partial results in the accumulators'
    dtypes. ``lacks`` names the languages whose compilers do not lower the primitive inside a larger kernel.
    ``special`` returns a more specific rule for an equation, by its parameters and shapes, or None.
    """

    kind: OpKind
    space: Callable[[Equation], Space]
    flops: Callable[[Equation], Flops]
    block: BlockFn | None = None
    lacks: frozenset[str] = NONE
    reduction: Reduction | None = None
    supports: Callable[[Equation, str], bool] = known_dtypes
    """Whether a language that lowers the primitive does so for an equation's dtypes and parameters."""
    temporaries: int = 0
    """Blocks of the result's size that the evaluation holds beside operands and result."""
    special: Callable[[Equation], Rule | None] | None = None

    def backends(self, eqn: Equation) -> tuple[str, ...]:
        """The backends that can emit ``eqn`` inside a fused kernel."""
        emitting = [b for b in map(backend_of, backend_names()) if self._emits(eqn, b.language)]
        if DimRole.ADDRESSED in self.space(eqn).roles:
            emitting = [b for b in emitting if b.loads_by_index or not b.is_compiled_apart]
        return tuple(b.name for b in emitting)

    def _emits(self, eqn: Equation, language: str) -> bool:
        if self.kind == OpKind.OPAQUE or language in self.lacks:
            return False
        if language == "xla":
            return True
        if self.block is None:
            return False
        return _can_loop(eqn) if language == "loops" else self.supports(eqn, language)


def bind(tile: Tile, eqn: Equation, args: Sequence[Any]) -> Sequence[Any]:
    """Evaluate an equation whose parameters contain no shapes on blocks."""
    out = eqn.primitive.bind(*args, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` reshaped to ``shape``; ``x`` itself if it has that shape, since Mosaic lowers no reshape of a
    scalar to a scalar."""
    return x if jnp.shape(x) == shape else lax.reshape(x, shape)


def relayout(tile: Tile, x: Any, move: Callable[[Any], Any]) -> Any:
    """``move(x)``, where ``move`` puts a dimension of size one last.

    On a TPU narrow numbers are moved in 32 bits: not every TPU compiler turns packed rows into columns.
    """
    if tile.language != "mosaic_tpu" or x.dtype.itemsize >= 4:
        return move(x)
    wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32
    return move(x.astype(wide)).astype(x.dtype)


def no_flops(eqn: Equation) -> Flops:
    """Zero flops, for primitives that only move data."""
    return Flops()


def out_size(eqn: Equation) -> int:
    """The number of elements of all results."""
    return sum(map(_size, eqn.out_avals))


def in_size(eqn: Equation) -> int:
    """The number of elements of all operands."""
    return sum(map(_size, eqn.in_avals))


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0))  # a token has none


def own_dims(shape: Sequence[int], first: int = 0) -> tuple[tuple[int, ...], DimMap]:
    """One iteration dimension for each dimension of ``shape`` that is longer than one.

    Returns their sizes and the map, numbered from ``first``. A dimension of size one maps to ``()``.

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
    """The space of an equation that needs every dimension of every operand and result whole."""
    dims: tuple[int, ...] = ()
    maps: list[DimMap] = []
    for aval in (*eqn.in_avals, *eqn.out_avals):
        own, dim_map = own_dims(getattr(aval, "shape", ()), len(dims))
        dims += own
        maps.append(dim_map)
    n_in = len(eqn.in_avals)
    return Space(dims, (DimRole.WHOLE,) * len(dims), tuple(maps[:n_in]), tuple(maps[n_in:]))


_RULES: dict[str, Rule] = {}

_WITHOUT_RULE = Rule(
    OpKind.OPAQUE,
    whole_space,
    # One operation for each element, so that an unknown primitive is never free.
    lambda eqn: Flops(vector=in_size(eqn) + out_size(eqn)),
)


def rule_of(eqn: Equation) -> Rule:
    """The rule of an equation: its primitive's, or a more specific one for its parameters and shapes.

    An unregistered primitive has an OPAQUE rule.
    """
    rule = _RULES.get(eqn.primitive.name, _WITHOUT_RULE)
    special = rule.special(eqn) if rule.special is not None else None
    return special or rule


def has_rule(eqn: Equation) -> bool:
    """Whether the equation's primitive has a registered rule."""
    return eqn.primitive.name in _RULES


def rules() -> dict[str, Rule]:
    """A copy of the table of rules, by the primitives' names."""
    return dict(_RULES)


def register_rule(primitive: jex_core.Primitive | str, rule: Rule) -> None:
    """Register the rule of a primitive, or replace it. Plans made afterwards use it.

    Raises:
        InvalidArgumentError: ``rule`` is not a ``Rule``.

    Example:
        >>> from fuseplan.frontend.ops import register_rule, rules
        >>> register_rule("my_gelu", rules()["tanh"])
    """
    if not isinstance(rule, Rule):
        raise InvalidArgumentError(
            f"register_rule expects a fuseplan.extend.Rule, got {type(rule).__name__}. "
            "Build one with fuseplan.extend.elementwise(...), or one with Rule(kind, space, flops, block)."
        )
    name = primitive if isinstance(primitive, str) else primitive.name
    _RULES[name] = rule
