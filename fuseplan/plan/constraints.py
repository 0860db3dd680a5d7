"""Constraints of a user on plans: which operations share a kernel, which do not, and limits of size.

``Constraints`` names operations as the user does, ``Resolved`` by node of one graph.
``fuseplan.search.selectors`` makes the second of the first, ``fuseplan.search.constrained_pricing`` and
``fuseplan.search.must_fuse`` make planners obey it, and ``fuseplan.verify.plan`` checks that they did.
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
    """Fusions that a plan must or must not have, and limits that it keeps to.

    Planners of whole programs, such as ``"xla"``, ignore them, and a note of their plans says so.

    A *selector* names operations: a node's id (``3`` or ``"n3"``, as ``print(plan.graph)`` of an
    ``"unfused"`` plan lists them), a name scope (``"attention"`` for all inside
    ``jax.named_scope("attention")``, forward and backward, or a path, ``"block/attention"``), or
    a primitive (``"exp"``, or ``"attention/exp"`` in that scope). One that matches nothing is an
    error that lists what is close.

    Args:
        must_fuse: entries, each a sequence of selectors, or one selector. The operations of an
            entry, with everything on a path between them, are in one kernel (with others, if
            that is faster). Entries that share an operation share a kernel. The planner
            ``"unfused"`` leaves every operation by itself all the same, and says so; nor does it keep to
            ``max_peak_bytes``.
        never_fuse: entries, each a pair of selectors or one selector. Of a pair ``(a, b)``, no
            operation of ``a`` shares a kernel with another of ``b``; none of a single ``a``
            shares one with anything.
        max_peak_bytes: bytes of HBM that temporaries may occupy at once: the fastest plan found
            that keeps to it, or ``MemoryLimitError``, which names the smallest peak found. On GPUs and
            TPUs the solver also computes elementwise values again for it, where that needs less.
        max_group_size: at most so many operations in a kernel.
        max_kernel_args: at most so many arrays, read and written together, in a kernel of more
            than one operation.

    Constraints hold for the kernels of a plan. XLA groups the operations that a plan leaves to it as it
    likes; on the CPU these are all but tiled loops. Where a value is rematerialised or computed by columns, a
    selector names all nodes that compute the operation; operations that ``must_fuse`` names are computed once
    on GPUs and TPUs. ``jax.vmap(fuseplan.jit(f))`` plans the batched function, which has nodes of its own:
    select by name scope or primitive, not by id. ``jax.grad(fuseplan.jit(f))`` plans both passes together,
    under the limits and the entries of ``never_fuse`` that are names; the others apply to ``f`` alone.

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
        """Whether there is any constraint."""
        return bool(self.must_fuse or self.never_fuse) or any(
            getattr(self, name) is not None for name in _LIMITS
        )

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selectors of all entries, in order."""
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
    """Whether ``thing`` has the form of a selector."""
    return isinstance(thing, (str, int)) and not isinstance(thing, bool)


@dataclass(frozen=True, slots=True)
class Apart:
    """No node of ``a`` shares a kernel with another of ``b``; with any other, if that is None."""

    text: str
    """The user's entry, as the reason of a refusal."""
    a: Nodes
    b: Nodes | None


@dataclass(frozen=True, slots=True)
class Together:
    """These nodes, with every node on a path between two of them, are in one kernel."""

    text: str
    """The user's entry, as the reason of a refusal."""
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
        """Whether any constraint is about the nodes that share a kernel."""
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
        """A set that must be in one kernel and of which ``nodes`` hold a part only; None if there is none."""
        if not self.together:
            return None
        inside = set(nodes)
        return next((t for t in self.together if 0 < len(inside.intersection(t.nodes)) < len(t.nodes)), None)
