"""What a search for patterns finds: matches, near misses, and matches that may not be used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.graph import Flops
from fuseplan.frontend.flat_view import FlatView
from fuseplan.frontend.trace import Literal
from fuseplan.patterns.pattern import Pattern
from fuseplan.patterns.sides import NONE, Dims
from fuseplan.patterns.unify import Bound
from fuseplan.support.errors import Verdict

MOST_KNOWN = 2**26
"""The most elements of an array that is computed while a pattern is looked for: a mask of 8192 by 8192."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array of a program: its shape, dtype, the operation that makes it, and where in the user's code."""

    shape: tuple[int, ...]
    dtype: Any
    op: str
    """The name of the primitive; empty for an input."""
    source: str

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        return f"{self.dtype}{list(self.shape)} of {self.op or 'an input'}{where}"


@dataclass(frozen=True, eq=False)
class Match:
    """One place of a program where a pattern matches."""

    pattern: Pattern
    source: str
    """``file:line (function)`` of the last operation."""
    equations: tuple[str, ...]
    """The matched equations, in order."""
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    """What the pattern's arguments are bound to, in the pattern's order of dimensions. A value that is
    broadcast has size one there, where the pattern can be traced with that."""
    results: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    """The numbers that ``patterns.constant`` has bound."""
    named: Mapping[str, Value]
    """The values that ``patterns.name`` names, with the program's order of dimensions."""
    used_outside: tuple[Value, ...]
    """The values inside of the match that depend on its arguments and that other operations read, too. They
    are computed all the same."""
    flops: Flops
    """The operations of the matched equations that need not be computed any more."""
    place: Place = field(repr=False)
    program: FlatView = field(repr=False)
    device: Any = None
    """The ``DeviceSpec`` that the program is planned for, where it is known."""
    where: str = ""
    """The loop, branch or call whose body the match is in; empty for the function itself."""

    def known(self, k: int) -> np.ndarray | None:
        """The value of the argument ``k``, where it is computed from constants alone, as most masks are; None
        where it depends on an argument of the function, or has more than ``MOST_KNOWN`` elements."""
        bound = self.place.arguments[k]
        value = self.program.value_of(bound.root, MOST_KNOWN)
        if value is None:
            return None
        kept = [d for d in bound.dims if d != NONE]
        dropped = [d for d in range(value.ndim) if d not in kept]
        shape = [1 if d == NONE else value.shape[d] for d in bound.dims]
        return np.broadcast_to(value.transpose(*kept, *dropped).reshape(shape), self.arguments[k].shape)

    @property
    def read_dtypes(self) -> tuple[Any, ...]:
        """The dtypes in which the program reads the results."""
        return tuple([self.program.avals[v].dtype for v in self.place.roots])

    @property
    def nbytes(self) -> int:
        """The bytes of arguments and results."""
        return sum(
            int(jnp.dtype(a.dtype).itemsize) * math.prod(a.shape) for a in (*self.arguments, *self.results)
        )

    @property
    def is_used_outside(self) -> bool:
        """Whether an operation outside of the match reads a value inside of it."""
        return bool(self.used_outside)

    def overlaps(self, other: Match) -> bool:
        """Whether one of both needs an equation that the other removes."""
        return not (
            self.place.gone.isdisjoint(other.place.equations)
            and other.place.gone.isdisjoint(self.place.equations)
        )

    def __str__(self) -> str:
        shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in self.arguments)
        said = [
            f"{self.pattern.name} at {self.source or 'an unknown line'}{self.where and f', in {self.where}'}"
        ]
        said.append(f"  arguments: {shapes}")
        if self.constants:
            said.append("  constants: " + ", ".join(f"{k} = {v!r}" for k, v in self.constants.items()))
        said += [f"  {name}: {value}" for name, value in self.named.items()]
        said += [f"  also read outside: {value}" for value in self.used_outside]
        return "\n".join(said + [f"    {text}" for text in self.equations])


Moves = tuple[tuple[int, Dims], ...]
"""The value of a program that is a result of a pattern, then what each of the transposes, casts and the like
after it makes of it; with each value, for each dimension of the result the value's."""


@dataclass(frozen=True, slots=True)
class Place:
    """How a match is bound in a flat view."""

    moves: tuple[Moves, ...]
    """For each result of the pattern."""
    arguments: tuple[Bound, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the arguments as the pattern was traced."""
    equations: tuple[int, ...]
    removed: frozenset[int]
    """The positions of equations that nothing needs any more."""
    n_without_factor: int = 0
    """The results of the pattern whose multiplication by a constant with a default is missing."""

    @property
    def roots(self) -> tuple[int, ...]:
        """For each result, the value of the program that it takes the place of."""
        return tuple([chain[-1][0] for chain in self.moves])

    @property
    def layouts(self) -> tuple[Dims, ...]:
        """For each result, for each of its dimensions the one of that value."""
        return tuple([chain[-1][1] for chain in self.moves])

    @property
    def reads(self) -> tuple[int, ...]:
        """The values of the program that the arguments are bound to."""
        return tuple([b.root for b in self.arguments if not isinstance(b.root, Literal)])

    @property
    def gone(self) -> frozenset[int]:
        """The equations of the match that are not computed any more; those of its results are among them."""
        return self.removed.intersection(self.equations)


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A place where most of a pattern matches, and the first difference."""

    pattern: str
    n_matched: int
    n_equations: int
    expected: str
    found: str
    source: str
    at: int = field(default=-1, compare=False, repr=False)
    """The position of the equation that would be the match's last."""

    def __str__(self) -> str:
        return (
            f"{self.pattern}: {self.n_matched} of {self.n_equations} equations match at "
            f"{self.source or 'an unknown line'}; expected {self.expected}, found {self.found}"
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A match that may not be used, and why."""

    match: Match
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.match.pattern.name} at {self.match.source or 'an unknown line'}: {self.verdict.reason}"


@dataclass(slots=True)
class Found:
    """What a search for one pattern in one flat view has found."""

    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
