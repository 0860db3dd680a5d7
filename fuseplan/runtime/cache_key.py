"""Calls of a jitted function: which of them ``jax.jit`` has one program for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

_ASPECTS = ("aval", "sharding", "shape", "dtype")


class Calls:
    """The calls of ``jax.jit(f, **options)``, told apart by their arguments."""

    def __init__(self, f: Callable[..., Any], options: dict[str, Any]) -> None:
        self._static_numbers, self._static_names = _static_parameters(f, options)

    def key(self, args: Any, kwargs: Any) -> Hashable:
        """What ``jax.jit`` would compile anew for; a tracer's type makes a key of its own.

        Raises ``TypeError`` or ``ValueError`` where there is none, as for arguments that are no arrays.
        """
        statics: Any = ()
        if self._static_numbers or self._static_names:
            statics, args, kwargs = self.split(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        try:
            kinds: list[Any] = [(x.aval, x.sharding) for x in leaves]
        except AttributeError:  # Numbers, NumPy's arrays, tracers.
            kinds = [tuple(getattr(x, a, None) for a in _ASPECTS) for x in leaves]
        return tree, tuple(map(type, leaves)), tuple(kinds), statics

    def split(self, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Static arguments, each with its type (``1 == 1.0``), and the others."""
        numbers = {n + len(args) if n < 0 else n for n in self._static_numbers}
        statics = [(i, type(a), a) for i, a in enumerate(args) if i in numbers]
        named = [(k, type(v), v) for k, v in sorted(kwargs.items()) if k in self._static_names]
        dynamic = tuple(a for i, a in enumerate(args) if i not in numbers)
        return (*statics, *named), dynamic, {k: v for k, v in kwargs.items() if k not in self._static_names}


def _static_parameters(
    f: Callable[..., Any], options: dict[str, Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of static parameters; as in ``jax.jit``, each implies the other."""
    numbers, names = options.get("static_argnums"), options.get("static_argnames")
    n = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
    s = () if names is None else (names,) if isinstance(names, str) else tuple(names)
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        return n, s
    if not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        n = tuple(i + len(parameters) if i < 0 else i for i in n)
    either = [(i, p.name) for i, p in enumerate(parameters) if p.kind == p.POSITIONAL_OR_KEYWORD]
    if names is None:
        s = tuple(name for i, name in either if i in n)
    elif numbers is None:
        n = tuple(i for i, name in either if name in s)
    return n, s
