"""``Pattern``: what to look for in a program, what it may match, and what to run in its place."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from fuseplan.frontend.trace import Primitive
from fuseplan.support.errors import ExtensionError, FuseplanError, InvalidArgumentError, first_line
from fuseplan.support.lru import LruCache

if TYPE_CHECKING:
    from fuseplan.patterns.matches import Match

name_p = Primitive("pattern_name")
"""The identity, which gives its operand a name within a pattern."""
name_p.def_abstract_eval(lambda x, *, name: x)
name_p.def_impl(lambda x, *, name: x)
mlir.register_lowering(name_p, lambda ctx, x, *, name: [x])
ad.primitive_jvps[name_p] = lambda primals, tangents, *, name: (name_p.bind(*primals, name=name), tangents[0])
batching.primitive_batchers[name_p] = lambda args, dims, *, name: (name_p.bind(args[0], name=name), dims[0])

constant_p = Primitive("pattern_constant")
"""A number that a match binds."""
constant_p.def_abstract_eval(
    lambda *, name, default: jax.core.ShapedArray((), np.dtype("float32"), weak_type=True)
)

CACHED_TRACES = 64
"""Sets of shapes and dtypes for which a pattern keeps what it was traced to."""

CHOICES = ("always", "cost")


def name(x: Any, name: str) -> Any:
    """``x``, which ``check``, ``cost`` and ``replacement`` find as ``match.named[name]``.

    Example:
        >>> import fuseplan, jax, jax.numpy as jnp
        >>> def f(x):
        ...     return jnp.tanh(fuseplan.patterns.name(x * x, "square"))
        >>> report = fuseplan.match(fuseplan.Pattern("bump", f), lambda x: jnp.tanh(x * x))(jnp.ones(3))
        >>> report.matches[0].named["square"].shape
        (3,)
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"patterns.name expects a name of one letter or more, got {name!r}")
    return name_p.bind(jnp.asarray(x), name=name)


def constant(name: str, default: float | None = None) -> Any:
    """A number of the program, whatever it is, as a scalar within a pattern.

    A match binds it to a scalar that is known when the program is traced, and passes it to the replacement as
    the keyword argument ``name``, a Python number. Two constants of one name are equal numbers. With a
    ``default``, a multiplication by the constant may be missing from the program: it is then ``default``.

    Example:
        >>> import fuseplan, jax.numpy as jnp
        >>> pattern = fuseplan.Pattern("scaled", lambda x: jnp.tanh(x * fuseplan.patterns.constant("scale")))
        >>> fuseplan.match(pattern, lambda x: jnp.tanh(x / 4))(jnp.ones(3)).matches[0].constants
        {'scale': 0.25}
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidArgumentError(
            f"patterns.constant expects the name of a keyword argument of the replacement, got {name!r}"
        )
    return constant_p.bind(name=name, default=None if default is None else float(default))


@dataclass(frozen=True, slots=True)
class Argument:
    """The shape of one argument of a pattern, by the names of its dimensions."""

    dims: tuple[str, ...]
    is_batched: bool = False
    """Whether any number of dimensions may stand before ``dims``."""
    dtype: str = "float32"
    """The dtype that the pattern is traced at before the dtype of a match is known."""
    extents: tuple[int, ...] = ()
    """Of an argument given as an array or ``ShapeDtypeStruct``, its shape: it is traced at that first."""

    def names(self, n_batch: int) -> tuple[str, ...]:
        """The names of all dimensions where ``n_batch`` stand before the others."""
        return (*(f"...{i}" for i in range(n_batch if self.is_batched else 0)), *self.dims)


_SPEC = re.compile(r"\s*(?:(?P<dtype>\w+)\[(?P<inner>[^\[\]]*)\]|(?P<dims>[^\[\]]*))\s*")

_EXTENTS = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
"""Extents of dimensions while no match is known: none of them divides another."""


def _argument(pattern: str, spec: Any, k: int) -> Argument:
    if isinstance(spec, str):
        found = _SPEC.fullmatch(spec)
        words = (found["dims"] if found["inner"] is None else found["inner"]).split() if found else []
        is_batched = bool(words) and words[0] == "..."
        dims = tuple(words[is_batched:])
        if found and all(word.isidentifier() for word in dims):
            dtype = found["dtype"] or "float32"
            try:
                np.dtype(jnp.dtype(dtype))
            except TypeError:
                raise InvalidArgumentError(
                    f"argument {k} of the pattern {pattern!r} has an unknown dtype in {spec!r}"
                ) from None
            return Argument(dims, is_batched, dtype)
    elif hasattr(spec, "shape") and hasattr(spec, "dtype"):
        dims = tuple(f"_{k}_{i}" for i in range(len(spec.shape)))
        return Argument(dims, False, str(spec.dtype), tuple(spec.shape))
    raise InvalidArgumentError(
        f"args of the pattern {pattern!r} expect names of dimensions, such as '... t d' or 'bool[t s]', or "
        f"arrays or ShapeDtypeStructs; got {spec!r} for argument {k}"
    )


@dataclass(frozen=True, eq=False)
class Pattern:
    """A part of a program to look for, and a library's or a user's kernel to run in its place.

    Args:
        name: shown in plans, notes and errors.
        f: a JAX function of arrays that computes what is looked for. It is traced, and its equations are
            found in the program's, up to the order of commutative operands, casts between floating-point
            types, broadcasts, transposes, and reshapes that only add or drop dimensions of size one. Its
            arguments match any value. ``fuseplan.patterns.name`` names values inside,
            ``fuseplan.patterns.constant`` is any number; other numbers have to be equal.
        args: for each argument of ``f``, the names of its dimensions: ``("... t d", "... s d")``. Dimensions
            of one name are equal. ``...`` stands for any number of leading dimensions, the same for all
            arguments that have it. ``"bool[t s]"`` has a dtype, else the argument is a floating-point array.
            Arrays or ``ShapeDtypeStruct``s are arguments of their rank and kind of dtype. By default, every
            argument has the same number of dimensions, whatever it is. At a match, ``f`` is traced anew at
            the shapes and dtypes that were found, and has to match there, with all its numbers.
        check: called with a ``Match``; the match is refused if it returns False, a reason (a string), or a
            ``fuseplan.Verdict``.
        replacement: a JAX function of the same arguments, and of the constants as keyword arguments, with
            the same result; with a parameter ``match``, it is also given the ``Match``. It is
            differentiated by its own rule (``jax.custom_vjp``, say), or by that of its operations. It may be
            a mapping from platforms (``"cpu"``, ``"gpu"``, ``"tpu"``) to functions; on another platform the
            matched operations stay, and the plan has a note. None: the matched part itself, as one kernel
            that XLA compiles.
        cost: called with a ``Match`` and the ``DeviceSpec``; returns the seconds that the replacement takes.
            By default they are those of a roofline: of its arguments and results, and of the operations in
            whose place it is.
        priority: patterns are tried in descending order, and the first match of an operation counts.
        choose: ``"always"``, or ``"cost"``: use the matches only if the plan is faster with them.
        required: whether it is an error if a planned function has no match.

    Raises:
        InvalidArgumentError: an argument has the wrong type or value.

    Example:
        >>> import fuseplan, jax, jax.numpy as jnp
        >>> def gelu(x):
        ...     return 0.5 * x * (1 + jax.lax.erf(x / jnp.sqrt(2.0)))
        >>> library = fuseplan.Pattern("gelu", gelu, replacement=lambda x: jax.nn.gelu(x, approximate=False))
        >>> f = lambda x: gelu(x) + 1
        >>> plan = fuseplan.make_plan(f, device="h200", patterns=[library])(jnp.ones((8, 8)))
        >>> plan.to_frame().name.tolist()
        ['gelu', 'add']
    """

    name: str
    f: Callable[..., Any]
    args: Sequence[Any] | None = field(default=None, kw_only=True)
    check: Callable[[Match], Any] | None = field(default=None, kw_only=True)
    replacement: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = field(
        default=None, kw_only=True
    )
    cost: Callable[[Match, Any], float] | None = field(default=None, kw_only=True)
    priority: int = field(default=0, kw_only=True)
    choose: str = field(default="always", kw_only=True)
    required: bool = field(default=True, kw_only=True)
    arguments: tuple[Argument, ...] = field(init=False, repr=False)
    """The shapes of the arguments."""
    traces: LruCache[Any, Any] = field(
        init=False, repr=False, default_factory=lambda: LruCache(CACHED_TRACES)
    )
    """A cache of what the function was traced to, by shapes and dtypes."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z][\w .+-]*", self.name):
            raise InvalidArgumentError(
                f"a pattern's name expects letters, digits and any of '_ .+-', got {self.name!r}"
            )
        for what in ("f", "check", "cost"):
            value = getattr(self, what)
            if not callable(value) and (what == "f" or value is not None):
                raise InvalidArgumentError(
                    f"{what} of the pattern {self.name!r} expects a function, got {type(value).__name__}"
                )
        every = self.replacement if isinstance(self.replacement, Mapping) else {"cpu": self.replacement}
        if not every.keys() <= {"cpu", "gpu", "tpu"} or not all(
            callable(r) for r in every.values() if r is not self.replacement or r is not None
        ):
            raise InvalidArgumentError(
                f"replacement of the pattern {self.name!r} expects a function, or a mapping from 'cpu', "
                f"'gpu' and 'tpu' to functions, got {self.replacement!r}"
            )
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidArgumentError(
                f"priority of the pattern {self.name!r} expects a whole number, got {self.priority!r}"
            )
        if self.choose not in CHOICES:
            raise InvalidArgumentError(
                f"choose of the pattern {self.name!r} expects 'always' or 'cost', got {self.choose!r}"
            )
        object.__setattr__(self, "arguments", self._arguments())

    def __reduce__(self) -> Any:
        # Without the cache of traces. A copy is the same pattern, whose matches are known by it.
        names = ("args", "check", "replacement", "cost", "priority", "choose", "required")
        return _made, (self.name, self.f, {name: getattr(self, name) for name in names})

    def __deepcopy__(self, _: Any) -> Pattern:
        return self

    def _arguments(self) -> tuple[Argument, ...]:
        if self.args is not None:
            if isinstance(self.args, str) or not isinstance(self.args, Sequence):
                raise InvalidArgumentError(
                    f"args of the pattern {self.name!r} expects one entry for each argument of its function, "
                    f"got {self.args!r}"
                )
            return tuple(_argument(self.name, spec, k) for k, spec in enumerate(self.args))
        try:
            parameters = inspect.signature(self.f).parameters.values()
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"the function of the pattern {self.name!r} has no signature: give args"
            ) from None
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        n = sum(p.kind in positional and p.default is p.empty for p in parameters)
        return tuple(Argument((), True) for _ in range(n))

    def examples(self, n_batch: int) -> list[jax.ShapeDtypeStruct]:
        """Arguments to trace the function at while no match is known."""
        extents: dict[str, int] = {}
        found = []
        for argument in self.arguments:
            names = argument.names(n_batch)
            if self.args is None:  # all arguments are alike
                names = tuple(f"...{i}" for i in range(n_batch))
            shape = list(argument.extents)
            for dim in names if not shape else ():
                k = extents.setdefault(dim, len(extents))
                shape.append(_EXTENTS[k % len(_EXTENTS)] * (1 + k // len(_EXTENTS)))
            found.append(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(argument.dtype)))
        return found

    def disagreement(self, shapes: Sequence[tuple[int, ...]]) -> str:
        """Which two dimensions of one name have other extents; empty if all agree. A dimension of size one
        agrees with any, as in broadcasting."""
        known: dict[str, tuple[int, int]] = {}
        for k, (argument, shape) in enumerate(zip(self.arguments, shapes, strict=True)):
            if self.args is None:
                continue
            for dim, extent in zip(argument.names(len(shape) - len(argument.dims)), shape, strict=True):
                first = known.setdefault(dim, (extent, k)) if extent != 1 else (extent, k)
                if first[0] != extent:
                    return f"{dim!r} is {first[0]} in argument {first[1]} and {extent} in argument {k}"
        return ""

    def seconds(self, match: Match, device: Any) -> float | None:
        """The seconds that ``cost`` gives, or None without it.

        Raises:
            ExtensionError: it fails, or gives no time.
        """
        if self.cost is None:
            return None
        from_user = asked(self, "cost", self.cost, match, device)
        is_number = isinstance(from_user, (int, float, np.number)) and not isinstance(from_user, bool)
        if not is_number or not math.isfinite(from_user) or from_user < 0:
            raise ExtensionError(
                f"cost of the pattern {self.name!r} should be a finite number of seconds, at least 0, "
                f"got {from_user!r}"
            )
        return float(from_user)


def _made(name: str, f: Callable[..., Any], options: dict[str, Any]) -> Pattern:
    return Pattern(name, f, **options)


def asked(pattern: Pattern, what: str, ask: Callable[..., Any], *question: Any) -> Any:
    """The answer of a pattern's own function; ``ExtensionError`` if it raises."""
    try:
        return ask(*question)
    except (FuseplanError, MemoryError):
        raise
    except Exception as error:
        raise ExtensionError(
            f"{what} of the pattern {pattern.name!r} raised {type(error).__name__}: {first_line(error)}"
        ) from error


def flattened(patterns: Any) -> tuple[Pattern, ...]:
    """The patterns of a pattern or of nested sequences of them, highest priority first.

    Raises:
        InvalidArgumentError: one of them is no pattern, or two have one name and function.
    """
    found: list[Pattern] = []

    def add(item: Any) -> None:
        if isinstance(item, Pattern):
            if item not in found:
                found.append(item)
        elif isinstance(item, Sequence) and not isinstance(item, str):
            for inner in item:
                add(inner)
        else:
            raise InvalidArgumentError(
                f"patterns expects fuseplan.Patterns, got {item!r}: write "
                "fuseplan.Pattern(name, function, replacement=...)"
            )

    add(patterns)
    return tuple(sorted(found, key=lambda p: -p.priority))
