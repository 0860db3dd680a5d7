"""What a bound rests on: numbers that anyone can check against the prices of groups.

A plan is an exact cover of the nodes by legal groups. Whatever prices its nodes are given, as
long as no legal group costs less than its nodes are priced together, no cover costs less than
all nodes are: each of its groups pays for its own (weak duality of linear programming; set
partitioning as in Balas and Padberg, "Set Partitioning: A Survey", SIAM Review 18, 1976). That
holds for each component by itself, because no group spans two.

Packs (``fuseplan.search.horizontal.rules``) do. But one that is taken apart into the kernels that it stands
for leaves a plan without it, which that bound is under. So if each piece is given a *share*, no more than its
kernels take alone, and no pack takes less than the shares of its pieces, then a plan with packs is no faster
than the bound less what all pieces would save, paying shares.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A bound on one component of a graph, and on every other that is equal to it."""

    bound_ps: int
    """Picoseconds that no plan of one such component beats."""
    first_nodes: tuple[int, ...]
    """The lowest node of each of these components."""
    prices_ps: tuple[int, ...] = ()
    """A price for each node of such a component, in order of the nodes, such that no legal group
    costs less than its nodes. Where they add up to less than ``bound_ps``, every cheaper cover is
    to be ruled out, of which few are left. Empty where ``costmodel.floor`` of all nodes together is
    the bound."""


@dataclass(frozen=True, slots=True)
class Joint:
    """A bound on several components together, whose cheapest groups would wait for each other."""

    bound_ps: int
    first_nodes: tuple[int, ...]
    """The lowest node of each."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a pack may hold: one kernel of the best plan without packs, or several."""

    kernels: tuple[tuple[int, ...], ...]
    """The operations of each, ascending; as nodes of the plan's own graph, whatever ``roots`` are."""
    alone_ps: int
    """Picoseconds that these kernels take."""
    share_ps: int
    """Picoseconds such that no pack takes less than its pieces' shares together."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """All operations, ascending."""
        return tuple(sorted([n for kernel in self.kernels for n in kernel]))


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound on every plan of the search space, component by component. Each is in one part;
    those in ``joint`` are counted there, and their parts only lend it the prices."""

    parts: tuple[Part, ...]
    joint: Joint | None = None
    roots: tuple[int, ...] = ()
    """The operations that may be computed again, as nodes of the graph in which each stands once
    (``costmodel.graph.whole``). Where there are any, all other numbers are those of nodes of the graph
    in which these are split."""
    origins: tuple[int, ...] = ()
    """For each node of the plan's graph, the first that computes the same operation of that graph, as
    ``Graph.origins`` does; empty where that is the same. The graph may have had copies before the search
    (``fuseplan.passes.recompute_streams``)."""
    packs: tuple[tuple[Piece, ...], ...] = ()
    """Lines of pieces: any run of pieces that follow each other in one may be a kernel."""

    @property
    def bound_ps(self) -> int:
        """What it proves, in picoseconds."""
        return self.bound_without_packs_ps - sum(
            piece.alone_ps - piece.share_ps for line in self.packs for piece in line
        )

    @property
    def bound_without_packs_ps(self) -> int:
        """What it proves of plans without packs."""
        together = frozenset(self.joint.first_nodes) if self.joint is not None else frozenset()
        alone = sum(part.bound_ps * len(set(part.first_nodes) - together) for part in self.parts)
        return alone + (self.joint.bound_ps if self.joint is not None else 0)
