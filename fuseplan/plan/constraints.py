"""Constraints: what a user wants in one kernel, or apart, and how large a kernel may be.

``Constraints`` names operations as the user does; ``Resolved`` is the same for one graph, by
node. ``fuseplan.search.selectors`` leads from one to the other, ``fuseplan.search.constrained_pricing`` and
``fuseplan.search.must_fuse`` make planners obey it, and ``fuseplan.verify.plan`` makes sure that they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuseplan.support.errors import InvalidArgumentError

Selector = int | str
Nodes = tuple[int, ...]

_LIMITS = ("max_peak_bytes", "max_group_size", "max_kernel_args")


@dataclass(frozen=True, slots=True)
class Constraints:
    """What every plan has to obey: of each, fusions that must or must not be, and limits.

    A *selector* names operations: a node's id (``3`` or ``"n3"``, as ``print(plan.graph)`` of an
    ``"unfused"`` plan lists them), a name scope (``"attention"`` for all inside
    ``jax.named_scope("attention")``, forward and backward, or a path, ``"block/attention"``), or
    a primitive (``"exp"``, or ``"attention/exp"`` in that scope). One that matches nothing is an
    error that lists what is close.

    Args:
        must_fuse: entries, each a sequence of selectors, or one selector. The operations of an
            entry, with everything on a path between them, are in one kernel (with others, if
            that is faster). Entries that share an operation share a kernel. The planner
            ``"unfused"`` leaves every operation by itself all the same, and says so.
        never_fuse: entries, each a pair of selectors or one selector. Of a pair ``(a, b)``, no
            operation of ``a`` shares a kernel with another of ``b``; none of a single ``a``
            shares one with anything.
        max_peak_bytes: bytes of HBM that temporaries may occupy at once: the fastest plan found
            that keeps to it, or ``MemoryLimitError``, which names the smallest peak found. On GPUs and
            TPUs the solver also computes elementwise values again for it, where that needs less.
        max_group_size: at most so many operations in a kernel.
        max_kernel_args: at most so many arrays, read and written together, in a kernel of more
            than one operation.

    Constraints hold for the kernels of a plan. What a plan leaves to XLA, which on the CPU is
    all but tiled loops, XLA compiles as it sees fit. Where a value is computed again for another
    reader, or by columns, a selector means all that came of an operation; what ``must_fuse`` names
    is computed once on GPUs and TPUs. In
    ``jax.vmap(fuseplan.jit(f))`` the batched function is planned, with nodes of its own: name
    scopes and primitives, not ids. In ``jax.grad(fuseplan.jit(f))`` both passes are planned as one,
    within the limits and what ``never_fuse`` says by name; the rest is said of ``f`` itself.

    Raises:
        InvalidArgumentError: an entry or a limit is of the wrong form.

    Example:
        >>> import fuseplan, jax, jax.numpy as jnp
        >>> def f(x):
        ...     with jax.named_scope("gate"):
        ...         g = jax.nn.sigmoid(x)
        ...     return jnp.tanh(x * g)
        >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
        >>> apart = fuseplan.Constraints(never_fuse=[("gate", "tanh")])
        >>> plan = fuseplan.make_plan(f, device="h200", constraints=apart)(x)
        >>> len(plan.kernels), len(fuseplan.make_plan(f, device="h200")(x).kernels)
        (2, 1)
        >>> plan.explain("mul", "tanh").together, plan.explain("logistic", "tanh").verdict.rule
        (False, 'constraint')
    """

    must_fuse: Sequence[Selector | Sequence[Selector]] = ()
    never_fuse: Sequence[Selector | Sequence[Selector]] = ()
    max_peak_bytes: int | None = None
    max_group_size: int | None = None
    max_kernel_args: int | None = None

    def __post_init__(self) -> None:
        for name in ("must_fuse", "never_fuse"):
            object.__setattr__(self, name, _entries(name, getattr(self, name)))
        for entry in self.never_fuse:
            if isinstance(entry, tuple) and len(entry) != 2:
                raise InvalidArgumentError(
                    f"an entry of never_fuse is a pair of selectors, or one selector; got {entry!r}. "
                    "Write every pair that is to stay apart as an entry of its own"
                )
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is not None and (type(limit) is not int or limit < 1):
                raise InvalidArgumentError(f"{name} expects a whole number from 1 on, or None; got {limit!r}")

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.must_fuse or self.never_fuse) or any(
            getattr(self, name) is not None for name in _LIMITS
        )

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """All of them, in order."""
        entries = (*self.must_fuse, *self.never_fuse)
        return tuple(s for entry in entries for s in (entry if isinstance(entry, tuple) else (entry,)))  # type: ignore[misc]


def _entries(name: str, given: Any) -> tuple[Selector | tuple[Selector, ...], ...]:
    """The entries as tuples, or an error that says how to write them."""
    if isinstance(given, (str, int)) or not isinstance(given, Sequence):
        raise InvalidArgumentError(f"{name} expects a sequence of entries, got {given!r}: write [{given!r}]")
    return tuple(_entry(name, entry) for entry in given)


def _entry(name: str, entry: Any) -> Selector | tuple[Selector, ...]:
    if is_selector(entry):
        return entry
    if isinstance(entry, Sequence) and entry and all(map(is_selector, entry)):
        return tuple(entry)
    raise InvalidArgumentError(
        f"an entry of {name} is a selector or a sequence of selectors, got {entry!r}; a selector is a "
        "node's id (3 or 'n3'), a name scope ('block/attention') or a primitive ('exp')"
    )


def is_selector(thing: Any) -> bool:
    """Whether it has the form of one."""
    return isinstance(thing, (str, int)) and not isinstance(thing, bool)


@dataclass(frozen=True, slots=True)
class Apart:
    """No node of ``a`` shares a kernel with another of ``b``; with any other, if that is None."""

    text: str
    """The entry, as a reason."""
    a: Nodes
    b: Nodes | None


@dataclass(frozen=True, slots=True)
class Together:
    """These nodes are in one kernel; everything on a path between them is among them."""

    text: str
    """The entry, as a reason."""
    nodes: Nodes


@dataclass(frozen=True, slots=True)
class Resolved:
    """The constraints of one graph, by node. No two of ``together`` have a node in common."""

    apart: tuple[Apart, ...] = ()
    together: tuple[Together, ...] = ()
    max_peak_bytes: int | None = None
    max_group_size: int | None = None
    max_kernel_args: int | None = None

    @property
    def shapes_groups(self) -> bool:
        """Whether it says anything about which nodes share a kernel."""
        limited = self.max_group_size is not None or self.max_kernel_args is not None
        return limited or bool(self.apart or self.together)

    @property
    def fused(self) -> frozenset[int]:
        """All nodes that must be in one kernel with others."""
        return frozenset(n for t in self.together for n in t.nodes)

    def moved(self, places: Sequence[Sequence[int]]) -> Resolved:
        """The same of another graph, in which ``places[n]`` are the nodes that node ``n`` became."""

        def there(nodes: Nodes) -> Nodes:
            return tuple(sorted({m for n in nodes for m in places[n]}))

        return replace(
            self,
            apart=tuple(replace(t, a=there(t.a), b=None if t.b is None else there(t.b)) for t in self.apart),
            together=tuple(replace(t, nodes=there(t.nodes)) for t in self.together),
        )

    def cut(self, nodes: Sequence[int]) -> Together | None:
        """What must be in one kernel, of which ``nodes`` are a part only; None if nothing is."""
        if not self.together:
            return None
        inside = set(nodes)
        return next((t for t in self.together if 0 < len(inside.intersection(t.nodes)) < len(t.nodes)), None)
