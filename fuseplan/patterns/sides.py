"""A pattern or a program in the form in which the two are compared.

Each value is seen as a *root*, the result of an equation that computes, and a map from its dimensions to the
root's (``Side.view``): transposes, broadcasts, reshapes that only add or drop dimensions of size one, and
casts between floating-point types, and between integers where the wider type holds every value of the
narrower one, are seen through. An equation has a form (``Side.form``), in which its
dimensions are labelled, and the same computation has fewer ways to be written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from costmodel.graph import OpKind
from fuseplan.frontend.flat_view import DERIVATIVE_CALLS, FlatView
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
OPPOSITE = {"lt": "le", "le": "lt"}
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
        along = eqn.params["dimension"] if name == "iota" else 0
        if name == "iota" and casts and not eqn.inputs and _holds_indices(shape[along], eqn.params["dtype"]):
            return Seen(Iota(), tuple([0 if i == along and n != 1 else NONE for i, n in enumerate(shape)]))
        sources = self.sources(eqn, casts)
        if sources is not None:
            operand, dims = sources
            below = self.view(operand, casts)
            if not casts and not isinstance(below.root, int):
                return itself
            if isinstance(below.root, Iota) and not _holds_indices(
                max(shape, default=1), eqn.out_avals[0].dtype
            ):
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

    def sources(self, eqn: Equation, casts: bool) -> tuple[Operand, Dims] | None:
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
            return (operand, same) if is_max and self._is_shift_of_softmax(eqn.outputs[0]) else None
        return self._without_neutral(eqn, given, shape, same)

    def _is_shift_of_softmax(self, shift: int) -> bool:
        """Whether a value is only subtracted before exponentials that are divided by their own sums, before
        or after a product with another array. It cancels out then, and so does its derivative."""
        differences = self._only_uses(shift, "sub", 1)
        exponentials = [e for d in differences for e in self._only_uses(d, "exp", 0)]
        return bool(exponentials) and all(map(self._is_normalised, exponentials))

    def _is_normalised(self, x: int) -> bool:
        uses = [(n, at, self.flat.equations[n].primitive.name) for n, at in self._uses(x)]
        sums = [self.flat.equations[n].outputs[0] for n, _, name in uses if name == "reduce_sum"]
        products = [n for n, _, name in uses if name == "dot_general"]
        divided = [(n, at) for n, at, name in uses if name not in ("reduce_sum", "dot_general")]
        for n in products:
            divided += self._uses(self.flat.equations[n].outputs[0])
        divisors = [use for v in sums for use in self._uses(v)]
        is_division = all(n >= 0 and self.flat.equations[n].primitive.name == "div" for n, _ in divided)
        return (
            is_division
            and bool(divided)
            and len(set(products)) == len(products)
            and set(divisors) == {(n, 1) for n, _ in divided}
            and all(at == 0 for _, at in divided)
        )

    def _only_uses(self, v: int, name: str, at: int) -> list[int]:
        """The results of the equations that read a value; empty if one is not ``name`` of it as its operand
        ``at``."""
        uses = self._uses(v)
        is_only = all(n >= 0 and k == at and self.flat.equations[n].primitive.name == name for n, k in uses)
        return [self.flat.equations[n].outputs[0] for n, _ in uses] if is_only else []

    def _uses(self, v: int) -> list[tuple[int, int]]:
        """The equations that read a value, through broadcasts, transposes and casts, and as which operand; a
        result of the function counts as one at -1."""
        found = [(-1, 0)] if v in self.flat.outputs else []
        for n, at in self._readers.get(v, ()):
            eqn = self.flat.equations[n]
            name = eqn.primitive.name
            is_cast = name == "convert_element_type" and _only_rounds(
                eqn.in_avals[0].dtype, eqn.out_avals[0].dtype
            )
            is_moved = is_cast or name == "pattern_name" or self.sources(eqn, casts=False) is not None
            found += self._uses(eqn.outputs[0]) if is_moved else [(n, at)]
        return found

    @cached_property
    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        """The needed equations that read each value, and as which operand."""
        found: dict[int, list[tuple[int, int]]] = {}
        for n in sorted(self.flat.needed):
            for k, v in enumerate(self.flat.equations[n].inputs):
                if not isinstance(v, Literal):
                    found.setdefault(v, []).append((n, k))
        return found

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
        if eqn.effects or eqn.is_set_apart or eqn.primitive.name in DERIVATIVE_CALLS:
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
        if at is None or form is None or form.name not in OPPOSITE:
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
        given, into = jnp.iinfo(old), jnp.iinfo(new)
        return bool(into.min <= given.min and given.max <= into.max)
    return bool(old == new)


def _holds_indices(extent: int, dtype: Any) -> bool:
    """Whether a dtype holds every index below ``extent`` exactly."""
    kind = kind_of(dtype)
    if kind == "integer":
        return extent - 1 <= int(jnp.iinfo(dtype).max)
    return kind == "float" and extent <= 2 ** (int(jnp.finfo(dtype).nmant) + 1)


def computes_alike(one: Any, other: Any) -> bool:
    """Whether results of these dtypes differ in rounding alone, where the operations are the same: integers
    wrap around, and floats of fewer than 16 bits are quantised."""
    if kind_of(one) == kind_of(other) == "float":
        return one == other or _only_rounds(one, other)
    return bool(one == other)


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
