"""Select nodes of a graph by id, name scope or primitive, and find which of them are connected.

``resolve`` turns a user's constraints into constraints on nodes. ``Ties`` has the values that pass between
operations, and full-size operands of several operations.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from costmodel.graph import Graph
from fuseplan.frontend.lower import Lowered
from fuseplan.plan.constraints import Apart, Constraints, Nodes, Resolved, Selector, Together
from fuseplan.search.components import data_edges, effect_edges
from fuseplan.support.digraph import between, connected_sets
from fuseplan.support.errors import ConstraintError


class Ties:
    """For each operation, its predecessors and successors, and its full-size operands. The edges ``untied``
    tie no group together."""

    def __init__(
        self,
        graph: Graph,
        full_size_operands: Callable[[int], Nodes] = lambda n: (),
        untied: Collection[tuple[int, int]] = (),
    ) -> None:
        self.edges = data_edges(graph) + effect_edges(graph)
        self.after: list[list[int]] = [[] for _ in graph.nodes]
        self.before: list[list[int]] = [[] for _ in graph.nodes]
        for u, v in self.edges:
            self.after[u].append(v)
            self.before[v].append(u)
        self._untied = frozenset(untied)
        self._operands = [full_size_operands(node.id) for node in graph.nodes]

    def between(self, nodes: set[int]) -> set[int]:
        """``nodes`` and everything on a path between two of them."""
        return between(nodes, self.after.__getitem__, self.before.__getitem__)

    def parts(self, nodes: Sequence[int]) -> list[Nodes]:
        """The connected parts of ``nodes``, by lowest operation."""
        nodes = sorted(nodes)
        place = {n: i for i, n in enumerate(nodes)}
        edges = [
            (i, place[m])
            for n, i in place.items()
            for m in self.after[n]
            if m in place and (n, m) not in self._untied
        ]
        first: dict[int, int] = {}
        edges += [(i, first.setdefault(v, i)) for n, i in place.items() for v in self._operands[n]]
        return [tuple([nodes[i] for i in part]) for part in connected_sets(len(nodes), edges)]


Path = tuple[str, ...]
"""The name scopes around an operation, outermost first, and its primitive."""

_LISTED = 8
"""Names of a kind that an error lists."""


def resolve(constraints: Constraints, lowered: Lowered) -> Resolved:
    """The constraints by node of this graph.

    Raises:
        ConstraintError: a selector matches nothing, or both a scope and a primitive.
    """
    index = Selectors(lowered)
    apart = []
    for entry in constraints.never_fuse:
        if isinstance(entry, (int, str)):
            apart.append(Apart(f"never_fuse keeps {_shown(entry)} by itself", index.select(entry), None))
        else:
            a, b = entry
            text = f"never_fuse keeps {_shown(a)} and {_shown(b)} apart"
            apart.append(Apart(text, index.select(a), index.select(b)))
    together = []
    for entry in constraints.must_fuse:
        selectors = _selectors(entry)
        nodes = {n for selector in selectors for n in index.select(selector)}
        text = f"must_fuse keeps {', '.join(map(_shown, selectors))} together"
        together.append(Together(text, tuple(sorted(nodes))))
    return Resolved(
        tuple(apart),
        joined(lowered.graph, together),
        constraints.max_peak_bytes,
        constraints.max_group_size,
        constraints.max_kernel_args,
    )


class Selectors:
    """The ids, name scopes and primitives of one graph."""

    def __init__(self, lowered: Lowered) -> None:
        self._by_origin: dict[int, list[int]] = {}
        self._by_path: dict[Path, list[int]] = {}
        for node in lowered.graph.nodes:
            equation = lowered.equations[node.id] if lowered.equations else None
            origin = node.id if equation is None or equation.origin < 0 else equation.origin
            self._by_origin.setdefault(origin, []).append(node.id)
            # A scope's own name may be a path.
            scopes = "/".join(equation.scope).split("/") if equation is not None and equation.scope else ()
            self._by_path.setdefault((*scopes, node.op), []).append(node.id)

    def select(self, selector: Selector) -> Nodes:
        """The nodes that it names, ascending."""
        number = _node_number(selector)
        if number is not None:
            if number in self._by_origin:
                return tuple(self._by_origin[number])
            raise ConstraintError(
                f"no operation is called {_shown(selector)}: the function has nodes n0 to "
                f"n{max(self._by_origin, default=-1)}, in which an id must lie"
            )
        assert isinstance(selector, str)
        wanted = tuple(selector.strip("/").split("/"))
        scoped = self._all(path for path in self._by_path if _inside(wanted, path[:-1]))
        named = self._all(path for path in self._by_path if path[-len(wanted) :] == wanted)
        if scoped and named and scoped != named:
            raise ConstraintError(
                f"{selector!r} is both a name scope (of {len(scoped)} operations) and a primitive (of "
                f"{len(named)}). Rename the scope, select it by a longer path, or select nodes by id"
            )
        return scoped or named or self._nothing(selector)

    def names(self, selector: Selector) -> bool:
        """Whether it is a name, and there is something of it."""
        if _node_number(selector) is not None:
            return False
        try:
            return bool(self.select(selector))
        except ConstraintError:
            return False

    def _all(self, paths: Iterable[Path]) -> Nodes:
        return tuple(sorted(n for path in paths for n in self._by_path[path]))

    def _nothing(self, selector: str) -> Nodes:
        scopes = dict.fromkeys("/".join(path[:k]) for path in self._by_path for k in range(1, len(path)))
        primitives = sorted({path[-1] for path in self._by_path})
        names = (name for path in self._by_path for name in path)
        close = difflib.get_close_matches(selector, list(dict.fromkeys((*scopes, *names))), n=3)
        meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ConstraintError(
            f"no operation is selected by {selector!r}.{meant} A selector is a node's id (3 or 'n3'), a "
            f"name scope (jax.named_scope; here {_listed(scopes)}) or a primitive (here "
            f"{_listed(primitives)})"
        )


def _node_number(selector: Selector) -> int | None:
    if isinstance(selector, int):
        return selector
    return int(selector[1:]) if selector[:1] == "n" and selector[1:].isdecimal() else None


def require_names(constraints: Constraints | None) -> None:
    """Raise ``ConstraintError`` if nodes are selected by their ids, for a function that is
    batched: ids belong to one trace."""
    for selector in () if constraints is None else constraints.selectors:
        if _node_number(selector) is not None:
            raise ConstraintError(
                f"{_shown(selector)} names a node of the function itself, and jax.vmap makes another of it. "
                "Select by a name scope or a primitive, or fuse the batched function: "
                "fuseplan.jit(jax.vmap(f), constraints=...)"
            )


def of_derivative(constraints: Constraints | None, lowered: Lowered) -> Constraints | None:
    """The constraints on a function that hold for its derivative, another function: the limits, and the
    entries of ``never_fuse`` whose names occur in it."""
    if constraints is None:
        return None
    index = Selectors(lowered)
    apart = [entry for entry in constraints.never_fuse if all(map(index.names, _selectors(entry)))]
    return replace(constraints, must_fuse=(), never_fuse=apart) or None


def _selectors(entry: Selector | Sequence[Selector]) -> Sequence[Selector]:
    return (entry,) if isinstance(entry, (int, str)) else entry


def _inside(wanted: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether ``wanted`` stands in ``path`` in one piece."""
    return any(path[k : k + len(wanted)] == wanted for k in range(len(path) - len(wanted) + 1))


def _shown(selector: Selector) -> str:
    return f"n{selector}" if isinstance(selector, int) else repr(selector)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more


def joined(graph: Graph, entries: Sequence[Together]) -> tuple[Together, ...]:
    """Each entry with the nodes on paths between its own, and entries that share a node merged; entries of a
    single node are dropped."""
    ties = Ties(graph)
    result: list[Together] = []
    for entry in entries:
        nodes, texts = ties.between(set(entry.nodes)), [entry.text]
        while shared := [t for t in result if nodes.intersection(t.nodes)]:
            result = [t for t in result if t not in shared]
            texts += [t.text for t in shared]
            nodes = ties.between(nodes.union(*(t.nodes for t in shared)))
        result.append(Together("; ".join(sorted(set(texts))), tuple(sorted(nodes))))
    return tuple(sorted((t for t in result if len(t.nodes) > 1), key=lambda t: t.nodes))
