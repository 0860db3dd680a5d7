"""Find the equations of a pattern among those of a program.

Each value is seen as a *root*, the result of an equation that computes, and a map from its dimensions to the
root's (``Sides.view``): transposes, broadcasts, reshapes that only add or drop dimensions of size one, and
casts between floating-point types are seen through. Two roots match if their equations do, and these match if
they are of one primitive, have equal parameters, and their operands match along corresponding dimensions. The
correspondence follows from that of the results, dimension by dimension, so that a transposed program matches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.graph import OpKind
from fuseplan.frontend.equation_text import Describer
from fuseplan.frontend.flat_view import FlatView
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.simplify import folded
from fuseplan.frontend.trace import Equation, Literal, Operand

NONE = -1
"""In the place of a dimension: it is of size one, or one along which a value is broadcast."""


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar that is known; ``inverse``: its reciprocal is meant."""

    value: Any
    dtype: Any
    inverse: bool = False

    @property
    def number(self) -> Any:
        """The number that is meant, as a Python number."""
        x = np.asarray(self.value).item()
        return x if not self.inverse else (1 / x if x else math.copysign(math.inf, x))


@dataclass(frozen=True, slots=True)
class Hole:
    """A number that a match binds (``patterns.constant``)."""

    name: str
    default: float | None
    inverse: bool = False


@dataclass(frozen=True, slots=True)
class Iota:
    """The indices along a dimension."""


@dataclass(frozen=True, slots=True)
class Inverse:
    """The reciprocal of an operand that is a number."""

    of: Operand


Root = int | Number | Hole | Iota
AnyOperand = int | Literal | Inverse
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A value as a root, and for each of its dimensions the root's."""

    root: Root
    dims: Dims
    names: tuple[str, ...] = ()
    """The names that a pattern gives the value."""


@dataclass(frozen=True, slots=True)
class Form:
    """An equation in the form in which it is compared."""

    name: str
    operands: tuple[AnyOperand, ...]
    params: Mapping[str, Any]
    labels: tuple[tuple[Any, ...], ...] | None
    """For each operand, for each dimension a label; None: dimensions correspond one to one, in order."""
    out_labels: tuple[Any, ...]
    reduced: tuple[Any, ...] = ()
    """The labels that no result has."""
    commutes: bool = False


_COMMUTES = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne", "dot_general"})
_MIRRORED = {"gt": "lt", "ge": "le"}
_OPPOSITE = {"lt": "le", "le": "lt"}
"""Of integers, ``a < b`` is true where ``b <= a`` is false."""

_FOLDED = frozenset(
    {
        "convert_element_type",
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "sqrt",
        "rsqrt",
        "exp",
        "log",
        "pow",
        "integer_pow",
    }
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

_LEAST_BITS = 16
"""Casts to floats of fewer bits are no mere rounding: they are compared as operations."""


def kind_of(dtype: Any) -> str:
    """Whether a dtype is floating, complex, of integers, or of another kind."""
    for kind, name in ((jnp.floating, "float"), (jnp.complexfloating, "complex"), (jnp.integer, "integer")):
        if jnp.issubdtype(dtype, kind):
            return name
    return str(dtype)


class Side:
    """A flat view as it is compared."""

    def __init__(self, flat: FlatView, is_pattern: bool = False) -> None:
        self.flat, self.is_pattern = flat, is_pattern
        self._views: dict[tuple[Any, bool], Seen] = {}
        self._forms: dict[int, Form | None] = {}

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        """The positions of live equations, by the names of their forms."""
        found: dict[str, list[int]] = {}
        for n in sorted(self.flat.needed):
            eqn = self.flat.equations[n]
            for v in eqn.outputs:
                seen = self.view(v)
                if seen.root == v:
                    form = self.form(n)
                    if form is not None:
                        found.setdefault(form.name, []).append(n)
                    break
        return found

    def shape(self, v: Operand) -> tuple[int, ...]:
        """The shape of an operand."""
        return tuple(getattr(self.flat.type_of(v), "shape", ()))

    def equation(self, root: int) -> tuple[int, int] | None:
        """The position of the equation that computes a root, and which of its results that is."""
        return self.flat.producer.get(root)

    def view(self, v: AnyOperand, casts: bool = True) -> Seen:
        """An operand as root and dimensions; with ``casts=False``, casts, numbers and indices are roots."""
        if isinstance(v, Inverse):
            seen = self.view(v.of, casts)
            root = seen.root
            assert isinstance(root, (Number, Hole)), "only numbers have a reciprocal"
            return replace(seen, root=replace(root, inverse=not root.inverse))
        if isinstance(v, Literal):
            value = np.asarray(v.val)[()]
            return Seen(Number(value, getattr(v.aval, "dtype", value.dtype)), (NONE,) * np.ndim(value))
        key = (v, casts)
        if key not in self._views:
            self._views[key] = self._seen(v, casts)
        return self._views[key]

    def _seen(self, v: int, casts: bool) -> Seen:
        shape = self.shape(v)
        itself = Seen(v, tuple([NONE if extent == 1 else i for i, extent in enumerate(shape)]))
        if v in self.flat.consts:
            value = self.flat.consts[v]
            is_known = not shape and casts and not isinstance(value, jax.core.Tracer)
            if is_known and _is_plain(value):
                return Seen(Number(np.asarray(value)[()], value.dtype), ())
            return itself
        at = self.flat.producer.get(v)
        if at is None:
            return itself
        eqn = self.flat.equations[at[0]]
        if eqn.effects or eqn.is_set_apart:
            return itself
        name = eqn.primitive.name
        if name == "pattern_constant":
            return Seen(Hole(eqn.params["name"], eqn.params["default"]), ())
        if name == "pattern_name":
            below = self.view(eqn.inputs[0], casts)
            return replace(below, names=(*below.names, eqn.params["name"]))
        if name == "iota" and casts and not eqn.inputs:
            along = eqn.params["dimension"]
            return Seen(Iota(), tuple([0 if i == along and n != 1 else NONE for i, n in enumerate(shape)]))
        sources = self._sources(eqn, casts)
        if sources is not None:
            operand, dims = sources
            below = self.view(operand, casts)
            if not casts and not isinstance(below.root, int):
                return itself
            found = tuple(
                [NONE if d == NONE or n == 1 else below.dims[d] for d, n in zip(dims, shape, strict=True)]
            )
            return Seen(below.root, found, below.names)
        if not shape and casts and name in _FOLDED and len(eqn.outputs) == 1:
            numbers = [r for u in eqn.inputs if isinstance(r := self.view(u).root, Number) and not r.inverse]
            if len(numbers) == len(eqn.inputs):
                literals = [
                    Literal(np.asarray(x.value, x.dtype)[()], aval)
                    for x, aval in zip(numbers, eqn.in_avals, strict=True)
                ]
                (aval,) = eqn.out_avals
                return Seen(Number(folded(eqn.primitive, literals, eqn.params, aval.dtype), aval.dtype), ())
        return itself

    def _sources(self, eqn: Equation, casts: bool) -> tuple[Operand, Dims] | None:
        """The operand that an equation passes on, and for each dimension of the result the operand's; None
        if it computes something."""
        name, params = eqn.primitive.name, eqn.params
        if not eqn.inputs or len(eqn.outputs) != 1:
            return None
        operand, (aval,) = eqn.inputs[0], eqn.out_avals
        shape, given = tuple(getattr(aval, "shape", ())), tuple(getattr(eqn.in_avals[0], "shape", ()))
        same = tuple(range(len(shape)))
        if name == "transpose":
            return operand, tuple(params["permutation"])
        if name == "squeeze":
            dropped = {d % len(given) for d in params["dimensions"]}
            return operand, tuple([d for d in range(len(given)) if d not in dropped])
        if name == "broadcast_in_dim" and len(eqn.inputs) == 1:
            dims = [NONE] * len(shape)
            for k, d in enumerate(params["broadcast_dimensions"]):
                dims[d] = k if given[k] == shape[d] else NONE
            return operand, tuple(dims)
        if name == "reshape" and len(eqn.inputs) == 1 and params.get("dimensions") is None:
            kept = [k for k, n in enumerate(given) if n != 1]
            if [given[k] for k in kept] != [n for n in shape if n != 1]:
                return None
            left = iter(kept)
            return operand, tuple([NONE if n == 1 else next(left) for n in shape])
        if name in ("copy", "copy_p"):
            return operand, same
        if not casts:
            return None
        if name == "convert_element_type" and _only_rounds(eqn.in_avals[0].dtype, aval.dtype):
            return operand, same
        if name == "stop_gradient" and not isinstance(operand, Literal):
            # The maximum that a softmax subtracts changes neither its value nor its derivative.
            at = self.flat.producer.get(self.view(operand).root)  # type: ignore[arg-type]
            is_max = at is not None and self.flat.equations[at[0]].primitive.name == "reduce_max"
            return (operand, same) if is_max else None
        return self._without_neutral(eqn, given, shape, same)

    def _without_neutral(
        self, eqn: Equation, given: tuple[int, ...], shape: tuple[int, ...], same: Dims
    ) -> tuple[Operand, Dims] | None:
        """The other operand of ``max(x, -inf)``, ``x * 1``, ``x / 1``, and of integers ``x + 0``; the
        predicate of a selection of True where it is true and of False elsewhere."""
        name, kind = eqn.primitive.name, kind_of(eqn.out_avals[0].dtype)
        if name == "select_n" and kind == "bool" and len(eqn.inputs) == 3:
            cases = [self.view(v).root for v in eqn.inputs[1:]]
            is_predicate = all(isinstance(c, Number) and c.number is bool(k) for k, c in enumerate(cases))
            return (eqn.inputs[0], same) if is_predicate and self.shape(eqn.inputs[0]) == shape else None
        neutral = {
            ("max", "float"): -math.inf,
            ("mul", "float"): 1,
            ("div", "float"): 1,
            ("add", "integer"): 0,
        }
        if (name, kind) not in neutral:
            return None
        for k in (1,) if name == "div" else (0, 1):
            number = self.view(eqn.inputs[k]).root
            other = eqn.inputs[1 - k]
            is_neutral = isinstance(number, Number) and number.number == neutral[name, kind]
            if is_neutral and self.shape(other) == shape:
                return other, same
        return None

    def form(self, n: int) -> Form | None:
        """The form of an equation; None if it may not be replaced."""
        if n not in self._forms:
            self._forms[n] = self._formed(self.flat.equations[n])
        return self._forms[n]

    def _formed(self, eqn: Equation) -> Form | None:
        if eqn.effects or eqn.is_set_apart:
            return None
        name, params, inputs = eqn.primitive.name, eqn.params, list(eqn.inputs)
        shape = tuple(getattr(eqn.out_avals[0], "shape", ())) if eqn.out_avals else ()
        own = _labels(shape, "d")
        if name == "dot_general":
            return _product(eqn)
        if name.startswith("reduce_") and "axes" in params and len(inputs) == 1:
            axes, given = params["axes"], eqn.in_avals[0].shape
            left = iter(own)
            of_operand: tuple[Any, ...] = tuple([
                (None if n == 1 else ("c", k)) if k in axes else next(left) for k, n in enumerate(given)
            ])  # fmt: skip
            reduced = tuple([label for k, label in enumerate(of_operand) if k in axes and label is not None])
            return Form(name, (inputs[0],), params, (of_operand,), own, reduced)
        is_pointwise = (
            bool(inputs)
            and len(eqn.outputs) == 1
            and all(_broadcasts(tuple(getattr(a, "shape", ())), shape) for a in eqn.in_avals)
        )
        if not is_pointwise or rule_of(eqn).kind > OpKind.BROADCAST:
            return Form(name, tuple(inputs), params, None, own)
        if name in _MIRRORED:
            name, inputs = _MIRRORED[name], inputs[::-1]
        operands: list[AnyOperand] = list(inputs)
        if name == "div" and kind_of(eqn.out_avals[0].dtype) == "float":
            if isinstance(self.view(inputs[1]).root, (Number, Hole)):
                name, operands = "mul", [inputs[0], Inverse(inputs[1])]
        elif name == "select_n":
            opposite = self._negated(inputs[0])
            if opposite is not None and len(inputs) == 3:
                operands = [opposite, inputs[2], inputs[1]]
        if name == "square" or (name == "mul" and len(inputs) == 2 and inputs[0] == inputs[1]):
            name, operands, params = "integer_pow", [inputs[0]], {"y": 2}
        labels = tuple([
            tuple([None if n == 1 else label for n, label in zip(self.shape_of(v), own, strict=False)])
            for v in operands
        ])  # fmt: skip
        return Form(name, tuple(operands), params, labels, own, commutes=name in _COMMUTES)

    def name_of(self, root: Root) -> str:
        """The name of the form of the equation that computes a root; empty if none does."""
        at = self.equation(root) if isinstance(root, int) else None
        form = None if at is None else self.form(at[0])
        return "" if form is None else form.name

    def shape_of(self, v: AnyOperand) -> tuple[int, ...]:
        """The shape of an operand of a form."""
        return self.shape(v.of if isinstance(v, Inverse) else v)

    def _negated(self, v: Operand) -> Operand | None:
        """The operand of a logical negation."""
        at = None if isinstance(v, Literal) else self.flat.producer.get(v)
        eqn = None if at is None else self.flat.equations[at[0]]
        return eqn.inputs[0] if eqn is not None and eqn.primitive.name == "not" else None

    def comparison(self, v: AnyOperand) -> tuple[str, tuple[AnyOperand, ...], Dims] | None:
        """The form of the comparison of integers that computes a root, its operands, and the dimensions of
        ``v`` in the root."""
        seen = self.view(v)
        at = self.equation(seen.root) if isinstance(seen.root, int) else None
        form = None if at is None else self.form(at[0])
        if at is None or form is None or form.name not in _OPPOSITE:
            return None
        is_integer = all(kind_of(a.dtype) == "integer" for a in self.flat.equations[at[0]].in_avals)
        return (form.name, form.operands, seen.dims) if is_integer else None


def _broadcasts(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand of an elementwise operation is a scalar, or has the dimensions of the result, some
    of size one."""
    if not given:
        return True
    return len(given) == len(shape) and all(n in (1, m) for n, m in zip(given, shape, strict=True))


def _is_plain(value: Any) -> bool:
    return kind_of(value.dtype) in ("float", "integer", "bool")


def _only_rounds(old: Any, new: Any) -> bool:
    kinds = kind_of(old), kind_of(new)
    if kinds == ("float", "float"):
        return min(jnp.finfo(old).bits, jnp.finfo(new).bits) >= _LEAST_BITS
    if kinds == ("integer", "integer"):
        return bool(jnp.promote_types(old, new) == new)
    return bool(old == new)


def _labels(shape: Sequence[int], kind: str) -> tuple[Any, ...]:
    return tuple([None if n == 1 else (kind, k) for k, n in enumerate(shape)])


def _product(eqn: Equation) -> Form:
    (contracted, batch) = eqn.params["dimension_numbers"]
    sides: list[tuple[Any, ...]] = []
    out: list[Any] = [
        ("b", k) if n != 1 else None for k, n in enumerate(eqn.out_avals[0].shape[: len(batch[0])])
    ]
    for side, aval in enumerate(eqn.in_avals):
        labels: list[Any] = []
        for d, n in enumerate(aval.shape):
            if d in contracted[side]:
                label: Any = ("c", contracted[side].index(d))
            elif d in batch[side]:
                label = ("b", batch[side].index(d))
            else:
                label = (f"f{side}", d)
            label = None if n == 1 else label
            labels.append(label)
            if d not in contracted[side] and d not in batch[side]:
                out.append(label)
        sides.append(tuple(labels))
    reduced = tuple([("c", k) for k, d in enumerate(contracted[0]) if eqn.in_avals[0].shape[d] != 1])
    return Form("dot_general", tuple(eqn.inputs), eqn.params, tuple(sides), tuple(out), reduced, True)


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
                yield [(operand, other, dims)], replace(state, constants=constants)

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
        kinds = [kind_of(e.out_avals[0].dtype) for e in (one, other)]
        differs = (
            f"{kinds[1]} instead of {kinds[0]}" if kinds[0] != kinds[1] else self._other_params(mine, theirs)
        )
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

    def _operand_goals(self, mine: Form, theirs: Form, dims: Dims) -> Iterator[list[Goal]]:
        if mine.labels is None or theirs.labels is None:
            if any(j not in (d, NONE) for d, j in enumerate(dims)):
                return
            yield [
                (a, b, tuple(range(len(self.pattern.shape_of(a)))))
                for a, b in zip(mine.operands, theirs.operands, strict=True)
                if len(self.pattern.shape_of(a)) == len(self.program.shape_of(b))
            ]
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
        if one is None or other is None or other[0] != _OPPOSITE[one[0]] or len(mine.operands) != 3:
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
        mine_precision, precision = mine.params.get("precision"), theirs.params.get("precision")
        if mine_precision is not None and mine_precision != precision:
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


def optional_factors(side: Side, root: Root) -> Iterator[tuple[AnyOperand, Hole]]:
    """The other operand where a root of a pattern is a product with a constant that has a default."""
    at = side.equation(root) if isinstance(root, int) else None
    form = None if at is None else side.form(at[0])
    if form is None or form.name != "mul" or not isinstance(root, int):
        return
    for k in (0, 1):
        hole, other = side.view(form.operands[k]).root, form.operands[1 - k]
        if isinstance(hole, Hole) and hole.default is not None and side.shape_of(other) == side.shape(root):
            yield other, hole


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
