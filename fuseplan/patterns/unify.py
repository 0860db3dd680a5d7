"""Find the equations of a pattern among those of a program.

Two roots (``fuseplan.patterns.sides``) match if their equations do, and these match if they are of one
primitive, have equal parameters, and their operands match along corresponding dimensions. The correspondence
follows from that of the results, dimension by dimension, so that a transposed program matches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.trace import Equation, Literal, Operand
from fuseplan.patterns.sides import (
    NONE,
    OPPOSITE,
    AnyOperand,
    Dims,
    Form,
    Hole,
    Inverse,
    Iota,
    Number,
    Root,
    Seen,
    Side,
    computes_alike,
    kind_of,
    optional_factors,
)

_OF_LAYOUT = frozenset(
    {
        "sharding",
        "out_sharding",
        "accuracy",
        "preferred_element_type",
        "dimension_numbers",
        "axes",
        "precision",
    }
)
"""Parameters that are compared otherwise, or that only say how a result is rounded or laid out."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A value of the program that an argument of the pattern is bound to."""

    root: Operand
    """The value, as it is before transposes and broadcasts."""
    dims: Dims
    """For each dimension of the argument, the value's."""
    extents: tuple[int, ...]
    """The extents of the argument's dimensions where the value is broadcast."""
    deepest: Root
    """The value before casts."""


@dataclass(frozen=True, slots=True)
class State:
    """What is matched so far."""

    values: Mapping[int, tuple[int, Dims]] = field(default_factory=dict)
    """For each root of the pattern, a root of the program, and the dimensions of that."""
    equations: Mapping[int, int] = field(default_factory=dict)
    arguments: Mapping[int, Bound] = field(default_factory=dict)
    """By the pattern's value number."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Miss:
    """The first difference of the best attempt at one place."""

    n_matched: int
    expected: str
    found: str
    at: int | None = None
    """The position of the program's equation that differs."""


Goal = tuple[AnyOperand, AnyOperand, Dims]


class Matcher:
    """Looks for the results of a pattern among the values of a program.

    With ``strict``, numbers, extents and parameters have to be equal; otherwise only what does not depend on
    shapes is compared.
    """

    def __init__(self, pattern: Side, program: Side, strict: bool) -> None:
        self.pattern, self.program, self.strict = pattern, program, strict
        self._describe = Describer()
        self._plausible: dict[tuple[Root, Root], bool] = {}
        self.arguments = {v: k for k, v in enumerate(pattern.flat.inputs)}
        self.miss: Miss | None = None

    def at(self, root: int, anchor: int, start: State | None = None) -> Iterator[State]:
        """The ways in which the pattern's root ``root`` is the program's root ``anchor``."""
        if not self.plausible(root, anchor):
            return
        yield from self.attempts(root, anchor, start)

    def attempts(self, root: int, anchor: int, start: State | None = None) -> Iterator[State]:
        """As ``at``, also where the operations differ, so that ``miss`` says in what."""
        rank = len(self.pattern.shape(root))
        given = self.program.shape(anchor)
        if rank != len(given):
            self._note(start or State(), root, anchor, f"{len(given)} dimensions instead of {rank}")
            return
        for order in itertools.permutations(range(rank)):
            yield from self.solve([(root, anchor, order)], start or State())

    def plausible(self, p: AnyOperand, g: AnyOperand) -> bool:
        """Whether the operations agree, whatever their dimensions and numbers."""
        one, other = self.pattern.view(p).root, self.program.view(g).root
        key = (one, other)
        if key not in self._plausible:
            self._plausible[key] = False
            self._plausible[key] = self._is_plausible(one, other)
        return self._plausible[key]

    def _is_plausible(self, p: Root, g: Root) -> bool:
        if p in self.arguments:
            return True
        if isinstance(p, (Number, Hole)):
            return isinstance(g, Number)
        if isinstance(p, Iota):
            return isinstance(g, Iota)
        if p in self.pattern.flat.consts:
            return g in self.program.flat.consts
        for other in optional_factors(self.pattern, p):
            if self.plausible(other[0], g if isinstance(g, int) else _literal(g)):
                return True
        pair = self._forms(p, g)
        if pair is None:
            return False
        mine, theirs = pair
        if mine.name == "select_n":
            return True  # The predicate may be the opposite, and the cases exchanged.
        return any(
            all(self.plausible(a, b) for a, b in zip(mine.operands, order, strict=True))
            for order in _orders(mine, theirs.operands)
        )

    def _forms(self, p: Root, g: Root) -> tuple[Form, Form] | None:
        if not isinstance(p, int) or not isinstance(g, int):
            return None
        a, b = self.pattern.equation(p), self.program.equation(g)
        if a is None or b is None or a[1] != b[1]:
            return None
        mine, theirs = self.pattern.form(a[0]), self.program.form(b[0])
        if mine is None or theirs is None or mine.name != theirs.name:
            return None
        if len(mine.operands) != len(theirs.operands) or (mine.labels is None) != (theirs.labels is None):
            return None
        return mine, theirs

    def solve(self, goals: list[Goal], state: State) -> Iterator[State]:
        """The ways in which all goals hold."""
        if not goals:
            yield state
            return
        (p, g, order), rest = goals[0], goals[1:]
        for more, new in self._step(p, g, order, state):
            yield from self.solve([*more, *rest], new)

    def _step(
        self, p: AnyOperand, g: AnyOperand, order: Dims, state: State
    ) -> Iterator[tuple[list[Goal], State]]:
        mine, theirs = self.pattern.view(p), self.program.view(g)
        if mine.root in self.arguments:
            new = self._bound(mine, g, order, state)
            if new is not None:
                yield [], new
            return
        dims = self._root_dims(mine, theirs, order)
        root, other = mine.root, theirs.root
        if isinstance(root, (Number, Hole, Iota)):
            new = self._constant(root, other, g, state) if dims is not None else None
            if new is not None:
                yield [], new
            else:
                self._note(state, p, g)
            return
        if dims is None:
            self._note(state, p, g, "other dimensions")
            return
        if root in state.values:
            known = state.values[root]
            is_same = (
                isinstance(other, int)
                and self.program.flat.numbers[known[0]] == self.program.flat.numbers[other]
            )
            if is_same and known[1] == dims:
                yield [], state
            else:
                self._note(state, p, g, "another value than the one that was matched before")
            return
        if root in self.pattern.flat.consts:
            if isinstance(other, int) and self._same_array(root, other):
                yield [], replace(state, values={**state.values, root: (other, dims)})
            else:
                self._note(state, p, g)
            return
        yield from self._equations(root, other, p, g, dims, mine.names, state)
        for operand, hole in optional_factors(self.pattern, root):
            constants = _with_constant(state.constants, hole, hole.default)
            if constants is not None and isinstance(other, int):
                values = {**state.values, root: (other, dims)}
                named = {**state.named, **dict.fromkeys(mine.names, other)}
                new = replace(state, values=values, named=named, constants=constants)
                yield [(operand, other, dims)], new

    def _root_dims(self, mine: Seen, theirs: Seen, order: Dims) -> Dims | None:
        """For each dimension of the pattern's root, the program root's; None where they do not correspond."""
        rank = len(self.pattern.shape(mine.root)) if isinstance(mine.root, int) else 1
        found = [NONE] * rank
        covered = set()
        for d, j in zip(mine.dims, order, strict=True):
            there = NONE if j == NONE else theirs.dims[j]
            if d == NONE:
                if there != NONE:
                    return None
            else:
                found[d] = there
                covered.add(there)
        if any(there != NONE and there not in covered for there in theirs.dims):
            return None
        if self.strict and isinstance(mine.root, int) and isinstance(theirs.root, int):
            extents, given = self.pattern.shape(mine.root), self.program.shape(theirs.root)
            if any(j != NONE and extents[d] != given[j] for d, j in enumerate(found)):
                return None
        return tuple(found)

    def _bound(self, mine: Seen, g: AnyOperand, order: Dims, state: State) -> State | None:
        """The state in which the pattern's argument is the program's value ``g``."""
        argument = mine.root
        assert isinstance(argument, int)
        if isinstance(g, Inverse):
            return None
        theirs, deepest = self.program.view(g, casts=False), self.program.view(g)
        shape = self.program.shape(g)
        wanted, given = self.pattern.flat.avals[argument], self.program.flat.type_of(g)
        if kind_of(wanted.dtype) != kind_of(given.dtype):
            self._note(
                state, argument, g, f"{given.str_short()} instead of an array of {kind_of(wanted.dtype)}"
            )
            return None
        rank = len(self.pattern.shape(argument))
        dims, below, extents, covered = [NONE] * rank, [NONE] * rank, [1] * rank, set()
        for d, j in zip(mine.dims, order, strict=True):
            there = NONE if j == NONE else theirs.dims[j]
            if d == NONE:
                if there != NONE:
                    self._note(state, argument, g, "a value that differs along a dimension that is broadcast")
                    return None
                continue
            dims[d], extents[d] = there, 1 if j == NONE else shape[j]
            below[d] = NONE if j == NONE else deepest.dims[j]
            covered.add(there)
        if any(there != NONE and there not in covered for there in theirs.dims):
            self._note(state, argument, g, "a value of more dimensions")
            return None
        root = theirs.root if isinstance(theirs.root, int) else g
        assert isinstance(root, (int, Literal))
        new = Bound(root, tuple(dims), tuple(extents), deepest.root)
        known = state.arguments.get(argument)
        if known is not None:
            joined = self._joined(known, new, tuple(below))
            if joined is None:
                self._note(state, argument, g, "another value than for the same argument before")
                return None
            new = joined
        named = {**state.named, **dict.fromkeys(mine.names, root)} if isinstance(root, int) else state.named
        return replace(state, arguments={**state.arguments, argument: new}, named=named)

    def _joined(self, known: Bound, new: Bound, below: Dims) -> Bound | None:
        """The binding of an argument that occurs twice: the value before casts where these differ."""
        extents = tuple(map(max, known.extents, new.extents))
        if isinstance(known.root, Literal) or isinstance(new.root, Literal):
            if not (isinstance(known.root, Literal) and isinstance(new.root, Literal)):
                return None
            return known if np.array_equal(known.root.val, new.root.val) else None
        numbers = self.program.flat.numbers
        if numbers[known.root] == numbers[new.root] and known.dims == new.dims:
            return replace(known, extents=extents)
        both = known.deepest, new.deepest
        if isinstance(both[0], int) and isinstance(both[1], int) and numbers[both[0]] == numbers[both[1]]:
            seen = self.program.view(known.root)
            if tuple([NONE if d == NONE else seen.dims[d] for d in known.dims]) == below:
                return Bound(both[0], below, extents, both[0])
        return None

    def _constant(self, p: Root, g: Root, operand: AnyOperand, state: State) -> State | None:
        """The state in which the pattern's number or indices are the program's; None if they are others."""
        if isinstance(p, Iota):
            return state if isinstance(g, Iota) else None
        if not isinstance(g, Number):
            return None
        if isinstance(p, Hole):
            value = Number(g.value, g.dtype, g.inverse != p.inverse).number
            constants = _with_constant(state.constants, p, value)
            return None if constants is None else replace(state, constants=constants)
        assert isinstance(p, Number)
        if not self.strict and math.isfinite(_size(p.number)):
            return state  # It may depend on shapes.
        return state if _are_close(p, g) else None

    def _same_array(self, p: int, g: int) -> bool:
        mine, theirs = self.pattern.flat.consts[p], self.program.flat.consts.get(g)
        if theirs is None or isinstance(theirs, jax.core.Tracer) or isinstance(mine, jax.core.Tracer):
            return False
        return not self.strict or bool(np.array_equal(np.asarray(mine), np.asarray(theirs)))

    def _equations(
        self,
        p: int,
        g: Root,
        operand: AnyOperand,
        there: AnyOperand,
        dims: Dims,
        names: tuple[str, ...],
        state: State,
    ) -> Iterator[tuple[list[Goal], State]]:
        pair = self._forms(p, g)
        if pair is None or not isinstance(g, int):
            self._note(state, operand, there)
            return
        mine, theirs = pair
        (m, _), (n, _) = self.pattern.flat.producer[p], self.program.flat.producer[g]
        one, other = self.pattern.flat.equations[m], self.program.flat.equations[n]
        differs = self._other_dtypes(one, other) or self._other_params(mine, theirs)
        if differs:
            self._note(state, operand, there, differs)
            return
        values = (
            {v: (w, dims) for v, w in zip(one.outputs, other.outputs, strict=True)}
            if len(one.outputs) > 1
            else {p: (g, dims)}
        )
        new = replace(
            state,
            values={**state.values, **values},
            equations={**state.equations, m: n},
            named={**state.named, **dict.fromkeys(names, g)},
        )
        is_any = False
        for goals in self._operand_goals(mine, theirs, dims):
            is_any = True
            yield goals, new
        if not is_any:
            self._note(state, operand, there, "other dimensions")

    def _other_dtypes(self, one: Equation, other: Equation) -> str:
        """How the dtypes of two equations' results differ, other than in rounding. Those of a pattern that is
        traced at arbitrary dtypes differ where their kinds do."""
        for a, b in zip(one.out_avals, other.out_avals, strict=False):
            kinds = kind_of(a.dtype), kind_of(b.dtype)
            if kinds[0] != kinds[1]:
                return f"{kinds[1]} instead of {kinds[0]}"
            # A float that an integer is rounded to may be one that holds it exactly, or not.
            is_rounded_integer = one.primitive.name == "convert_element_type" and "integer" in {
                kind_of(e.in_avals[0].dtype) for e in (one, other)
            }
            if self.strict and (
                a.dtype != b.dtype if is_rounded_integer else not computes_alike(a.dtype, b.dtype)
            ):
                return f"{b.dtype} instead of {a.dtype}"
        return ""

    def _operand_goals(self, mine: Form, theirs: Form, dims: Dims) -> Iterator[list[Goal]]:
        if mine.labels is None or theirs.labels is None:
            if any(j not in (d, NONE) for d, j in enumerate(dims)):
                return
            pairs = list(zip(mine.operands, theirs.operands, strict=True))
            if any(len(self.pattern.shape_of(a)) != len(self.program.shape_of(b)) for a, b in pairs):
                return
            yield [(a, b, tuple(range(len(self.pattern.shape_of(a))))) for a, b in pairs]
            return
        known = {
            label: theirs.out_labels[j] if j != NONE else None
            for label, j in zip(mine.out_labels, dims, strict=True)
            if label is not None
        }
        if mine.name == "select_n":
            yield from self._opposite_cases(mine, theirs, known)
        orders = list(_orders(mine, range(len(theirs.operands))))
        for reduced in _pairings(mine.reduced, theirs.reduced):
            of = {**known, **reduced}
            for order in orders:
                yield [
                    (a, theirs.operands[k], _by_label(mine.labels[i], theirs.labels[k], of))
                    for i, (a, k) in enumerate(zip(mine.operands, order, strict=True))
                ]

    def _opposite_cases(self, mine: Form, theirs: Form, known: Mapping[Any, Any]) -> Iterator[list[Goal]]:
        """A selection by ``a < b`` is one by ``b <= a`` with its cases exchanged."""
        one, other = self.pattern.comparison(mine.operands[0]), self.program.comparison(theirs.operands[0])
        if one is None or other is None or other[0] != OPPOSITE[one[0]] or len(mine.operands) != 3:
            return
        assert mine.labels is not None
        assert theirs.labels is not None
        goals: list[Goal] = []
        for k in (1, 2):
            order = _by_label(mine.labels[k], theirs.labels[3 - k], known)
            goals.append((mine.operands[k], theirs.operands[3 - k], order))
        whole = _by_label(mine.labels[0], theirs.labels[0], known)
        # From the dimensions of the comparisons to those of the selections.
        inner = [NONE] * (1 + max(one[2], default=NONE))
        for d, j in zip(one[2], whole, strict=True):
            if d != NONE:
                inner[d] = NONE if j == NONE else other[2][j]
        for a, b in zip(one[1], other[1][::-1], strict=True):
            goals.append((a, b, tuple(inner) if len(self.pattern.shape_of(a)) else ()))
        yield goals

    def _other_params(self, mine: Form, theirs: Form) -> str:
        """The first parameter that differs, of those that count."""
        names = [k for k in mine.params if k not in _OF_LAYOUT]
        if mine.labels is None and not self.strict:
            return ""  # They have sizes.
        if mine.name == "convert_element_type":
            names = []
        precision = _precision(theirs.params)
        if _precision(mine.params) != precision:
            return f"precision={precision}"
        if mine.labels is None:
            names = list(mine.params)
        one = dict(self._describe.params(mine.name, {k: mine.params[k] for k in names}).items)
        other = dict(self._describe.params(theirs.name, {k: theirs.params.get(k) for k in names}).items)
        return next(
            (
                f"{k}={theirs.params.get(k)!r} instead of {mine.params[k]!r}"
                for k in one
                if one[k] != other[k]
            ),
            "",
        )

    def _note(self, state: State, p: AnyOperand, g: AnyOperand, differs: str = "") -> None:
        """Remember the attempt that came furthest."""
        if self.miss is not None and self.miss.n_matched >= len(state.equations):
            return
        at = None
        root = self.program.view(g).root
        if isinstance(root, int) and root in self.program.flat.producer:
            at = self.program.flat.producer[root][0]
        found = _told(self.program, g)
        found = f"{found}: {differs}" if differs else found
        self.miss = Miss(len(state.equations), _told(self.pattern, p, self.strict), found, at)


def _precision(params: Mapping[str, Any]) -> Any:
    """The precision that a product asks for; None where it is the default."""
    asked = params.get("precision")
    each = asked if isinstance(asked, tuple) else (asked,)
    return None if all(p in (None, jax.lax.Precision.DEFAULT) for p in each) else asked


def _literal(g: Root) -> Literal:
    value = g.number if isinstance(g, Number) else 0
    return Literal(value, jax.typeof(np.asarray(value)))


def _orders(form: Form, operands: Sequence[Any]) -> Iterator[Sequence[Any]]:
    yield operands
    if form.commutes and len(operands) == 2:
        yield operands[::-1]


def _pairings(mine: Sequence[Any], theirs: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """The ways to pair the reduced dimensions of two equations. The program's may be fewer: others have
    size one."""
    if len(theirs) > len(mine):
        return
    padded = [*theirs, *[None] * (len(mine) - len(theirs))]
    seen = set()
    for order in itertools.permutations(padded):
        if order not in seen:
            seen.add(order)
            yield dict(zip(mine, order, strict=True))


def _by_label(mine: Sequence[Any], theirs: Sequence[Any], of: Mapping[Any, Any]) -> Dims:
    """For each dimension of a pattern's operand, the one of the program's operand with the label that
    corresponds."""
    place = {label: j for j, label in enumerate(theirs) if label is not None}
    return tuple([place.get(of.get(label), NONE) if label is not None else NONE for label in mine])


def _with_constant(constants: Mapping[str, Any], hole: Hole, value: Any) -> Mapping[str, Any] | None:
    if hole.name not in constants:
        return {**constants, hole.name: value}
    return constants if math.isclose(constants[hole.name], value, rel_tol=1e-6) else None


def _size(x: Any) -> float:
    return abs(x) if not isinstance(x, bool) else 0.0


def _are_close(p: Number, g: Number) -> bool:
    """Whether two numbers are equal up to the rounding of the narrower of their dtypes."""
    a, b = p.number, g.number
    if isinstance(a, bool) or isinstance(b, bool) or isinstance(a, complex) or isinstance(b, complex):
        return bool(a == b)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    floats = [d for d in (p.dtype, g.dtype) if kind_of(d) == "float"]
    if not floats or not (math.isfinite(a) and math.isfinite(b)):
        return False
    eps = max(float(jnp.finfo(d).eps) for d in floats)
    return math.isclose(a, b, rel_tol=2 * eps)


def _told(side: Side, v: AnyOperand, shapes: bool = True) -> str:
    """An operand in words: its equation, or its type. Without ``shapes``, those of a pattern that is traced
    at arbitrary ones are left out."""
    root = side.view(v).root
    if isinstance(root, Number):
        return f"the number {root.number!r}"
    if isinstance(root, Hole):
        return f"a number {root.name!r}"
    if isinstance(root, Iota):
        return "indices (iota)"
    at = side.flat.producer.get(root)
    if at is None:
        return f"an input {side.flat.avals[root].str_short()}" if shapes else "an argument"
    eqn = side.flat.equations[at[0]]
    return f"`{eqn}`" if shapes else f"`{eqn.primitive.name}`"
