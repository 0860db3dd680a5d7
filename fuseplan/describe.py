"""What equations are compared by: their arrays, parameters and literals, hashable.

Equations that are described alike have the same rule, iteration space and costs, wherever
they stand.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Describer:
    """Describes the equations of one function, which must be alive all the while: JAX shares
    most of what they are made of, so what has been described is known by its identity.

    Example:
        >>> describer = Describer()
        >>> describer.params({"axes": (1,), "sharding": None})
        (('axes', '(1,)'), ('sharding', None))
    """

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[tuple[int, ...], str]] = {}
        self._params: dict[int, tuple[tuple[str, Any], ...]] = {}
        self._literals: dict[Any, str] = {}

    def array(self, aval: Any) -> tuple[tuple[int, ...], str]:
        """Its shape, and the name of its dtype."""
        found = self._arrays.get(id(aval))
        if found is None:
            dtype = getattr(aval, "dtype", None)
            name = "token" if dtype is None else str(dtype)
            found = self._arrays[id(aval)] = (tuple(getattr(aval, "shape", ())), name)
        return found

    def params(self, params: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """An equation's parameters, hashable."""
        found = self._params.get(id(params))
        if found is None:
            stable = [(k, _stable(v)) for k, v in sorted(params.items())]
            found = self._params[id(params)] = tuple(stable)
        return found

    def literal(self, value: Any) -> str:
        """Its ``repr``: NumPy takes 30 us to print a number, so equal bits are printed once."""
        if not isinstance(value, np.ndarray):
            return repr(value)
        weak = getattr(value, "weak_type", None)
        key = (type(value), weak, value.dtype, value.shape, value.tobytes())
        if key not in self._literals:
            self._literals[key] = repr(value)
        return self._literals[key]


def _stable(param: Any) -> Any:
    """A parameter as a hashable key: by identity where it holds code (a loop's body)."""
    if param is None or isinstance(param, (int, float, str, bool, tuple)):
        return repr(param) if isinstance(param, tuple) else param
    if hasattr(param, "eqns") or hasattr(param, "jaxpr") or (callable(param) and not isinstance(param, type)):
        return id(param)
    return repr(param)
