"""Describe equations by their content: primitive parameters, literals and nested jaxprs as text.

Two equations with equal descriptions compute the same and have the same rule, iteration space and costs. A
description is the same in every process: it holds no address, no source location and no hash that depends on
``PYTHONHASHSEED``. A function, a tracer or a mutable array has no readable content: it is numbered within one
``Describer``, and the description is then valid in one graph only (``Params.portable`` is False).
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex_core

from fuseplan.frontend.trace import INLINED

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}|<locals>")
"""Matches the ``repr`` of an object with an address, or of a local class, whose name may not be unique."""

_MAX_VERBATIM_BYTES = 64
"""Larger arrays are described by a digest of their bytes."""

_SOURCE_FIELDS = ("debug_info", "src_info", "source_info")
"""Suffixes of the names of fields that hold source locations."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Params(NamedTuple):
    """The parameters of an equation as text."""

    items: tuple[tuple[str, str], ...]
    portable: bool
    """Whether equal ``items`` mean equal parameters in every graph and process."""


class Describer:
    """Describes equations, with a cache by object identity, since JAX shares most parameters.

    The cache keeps described objects alive, so that no address is used twice.

    Example:
        >>> describer = Describer()
        >>> describer.params("squeeze", {"dimensions": (1,), "sharding": None}).items
        (('dimensions', '(1,)'), ('sharding', 'None'))
    """

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Any, tuple[tuple[int, ...], str]]] = {}
        self._params: dict[int, tuple[Any, Params]] = {}
        self._bodies: dict[int, tuple[Any, str, frozenset[int]]] = {}
        self._reprs: dict[int, tuple[Any, str]] = {}
        self._objects: dict[int, tuple[Any, int]] = {}
        """The objects without readable content, and their numbers."""

    def array(self, aval: Any) -> tuple[tuple[int, ...], str]:
        """The shape of an aval, and the name of its dtype."""
        found = self._arrays.get(id(aval))
        if found is None:
            dtype = getattr(aval, "dtype", None)
            name = "token" if dtype is None else str(dtype)
            found = self._arrays[id(aval)] = (aval, (tuple(getattr(aval, "shape", ())), name))
        return found[1]

    def params(self, primitive: str, params: Mapping[str, Any]) -> Params:
        """The parameters of an equation of ``primitive``."""
        found = self._params.get(id(params))
        if found is None:
            objects: set[int] = set()
            items = tuple([(k, self._text(v, objects)) for k, v in _evaluated(primitive, params)])
            found = self._params[id(params)] = (params, Params(items, not objects))
        return found[1]

    def literal(self, value: Any) -> str:
        """The type and the bits of a literal. ``repr`` of an array would round."""
        return self._text(value, set())

    def _text(self, value: Any, objects: set[int]) -> str:
        """``value`` as text. Adds to ``objects`` the numbers of objects without readable content."""
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr)):
            return self._body(value, objects)
        if isinstance(value, np.dtype):
            return f"dtype {value}"
        if isinstance(value, Enum):
            return f"{kind.__qualname__}.{value.name}"
        if isinstance(value, (tuple, list)):
            if all(type(v) in _PLAIN for v in value) and kind in (tuple, list):
                return repr(value)
            name = "" if kind in (tuple, list) else kind.__qualname__
            inner = ", ".join([self._text(v, objects) for v in value])
            return f"{name}[{inner}]" if kind is list else f"{name}({inner},)"
        if isinstance(value, Mapping):
            pairs = [f"{self._text(k, objects)}: {self._text(v, objects)}" for k, v in value.items()]
            return f"{kind.__qualname__}{{{', '.join(sorted(pairs))}}}"
        if isinstance(value, (set, frozenset)):
            inner = ", ".join([self._text(v, objects) for v in sorted(value, key=_sort_key)])
            return f"{kind.__qualname__}{{{inner}}}"
        if isinstance(value, (np.ndarray, np.generic, jax.Array)):
            return _bits(value) or self._object(value, objects)
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and not callable(value):
            fields = [f.name for f in dataclasses.fields(value) if not f.name.endswith(_SOURCE_FIELDS)]
            said = [f"{name}={self._text(getattr(value, name, None), objects)}" for name in fields]
            return f"{kind.__module__}.{kind.__qualname__}({', '.join(said)})"
        if callable(value) and not isinstance(value, type):
            return self._object(value, objects)
        known = self._reprs.get(id(value))
        if known is None:
            known = self._reprs[id(value)] = (value, f"{kind.__qualname__} {value!r}")
        return self._object(value, objects) if _ADDRESS.search(known[1]) else known[1]

    def _object(self, value: Any, objects: set[int]) -> str:
        number = self._objects.setdefault(id(value), (value, len(self._objects)))[1]
        objects.add(number)
        return f"{type(value).__qualname__} #{number}"

    def _body(self, body: Any, objects: set[int]) -> str:
        """A digest of a jaxpr, computed once for a shared one."""
        found = self._bodies.get(id(body))
        if found is None:
            inside: set[int] = set()
            text = "\n".join(self._lines(body, inside))
            digest = hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
            found = self._bodies[id(body)] = (body, f"jaxpr {digest}", frozenset(inside))
        objects |= found[2]
        return found[1]

    def _lines(self, body: Any, objects: set[int]) -> Iterable[str]:
        """An unambiguous text of a jaxpr, with variables numbered in order of their binding."""
        jaxpr = getattr(body, "jaxpr", body)
        numbers: dict[Any, int] = {}

        def bind(variables: Iterable[Any]) -> str:
            said = []
            for v in variables:
                numbers[v] = len(numbers)
                said.append(self._text(v.aval, objects))
            return f"({', '.join(said)})"

        def read(v: Any) -> str:
            if isinstance(v, jex_core.Literal):
                return f"{self._text(v.val, objects)}: {self._text(v.aval, objects)}"
            return f"%{numbers[v]}"

        constants = [self._text(value, objects) for value in getattr(body, "consts", ())]
        yield f"{constants} {bind(jaxpr.constvars)} {bind(jaxpr.invars)} {self._effects(jaxpr, objects)}"
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            params = [(k, self._text(v, objects)) for k, v in _evaluated(name, eqn.params)]
            operands = [read(v) for v in eqn.invars]
            context = self._text(eqn.ctx, objects)
            yield f"{name} {params} {operands} {context} {self._effects(eqn, objects)} {bind(eqn.outvars)}"
        yield f"{[read(v) for v in jaxpr.outvars]}"

    def _effects(self, of: Any, objects: set[int]) -> str:
        return self._text(frozenset(of.effects), objects) if of.effects else ""


def _evaluated(primitive: str, params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The parameters, sorted by name, that affect the value of an equation.

    Of a call this is the body. Its differentiation and batching rules have been applied before planning, and
    its name is for readers. ``reduce`` has its function as a jaxpr as well.
    """
    beside: tuple[str, ...] = tuple(k for k in params if k.endswith(_SOURCE_FIELDS))
    if primitive in INLINED and INLINED[primitive] in params:
        body = INLINED[primitive]
        beside += tuple(k for k, v in params.items() if k == "name" or (k != body and callable(v)))
    elif primitive == "reduce" and params.get("jaxpr") is not None:
        beside += ("computation",)
    return sorted((k, v) for k, v in params.items() if k not in beside) if beside else sorted(params.items())


def _sort_key(value: Any) -> tuple[str, str]:
    """A sort key for the members of a set that does not depend on their hashes or addresses."""
    return type(value).__qualname__, _ADDRESS.sub("", repr(value))


def _bits(value: Any) -> str:
    """The dtype, shape and bits of an array; empty if they cannot be read."""
    if isinstance(value, jax.core.Tracer):
        return ""
    weak = " weak" if getattr(value, "weak_type", False) else ""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return ""  # deleted, on another host, or of a dtype that NumPy does not know
    if array.dtype.hasobject:
        return ""
    raw = array.tobytes()
    said = raw.hex() if len(raw) <= _MAX_VERBATIM_BYTES else hashlib.blake2b(raw, digest_size=20).hexdigest()
    return f"{array.dtype}{list(array.shape)}{weak} {said}"
