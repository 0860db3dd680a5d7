"""Check the proof of a bound against a graph and the prices of its groups.

Trusted, because they are the definition of the search space or of the cost: the rules
(``fuseplan.schedule.legality``, ``fuseplan.schedule.footprint``), the scheduler's price of a group, the floor
(``costmodel.floor``, ``costmodel.floors``), which edges a group may cross and what lies between components
(``fuseplan.search.components``), and that components of equal structure are equal
(``fuseplan.schedule.structure``). Everything else is done here anew, and nothing of the planners or the
solver is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from fuseplan.plan.certificate import Part, Proof
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.search.components import Component, component_key, components, crossable_edges
from fuseplan.verify.covers import Covers, TooManyCoversError, reach_of
from fuseplan.verify.groups import Groups

MAX_GROUPS = 1_000_000
"""Groups of one component that are looked at: some minutes."""


_AT_ONCE = 1_000
"""Groups whose floors are computed together."""


class RefutedError(Exception):
    """The proof does not prove what it claims; the message names the fault."""


class NotCheckedError(Exception):
    """Whether it does was not found out; the message says why."""


@dataclass(slots=True)
class Counts:
    """How much there was to check."""

    components: int = 0
    distinct: int = 0
    groups: int = 0
    """Legal groups of the distinct components, each compared with its nodes' prices."""
    priced: int = 0
    """Of these, those whose floor did not tell, so that the scheduler had to price them."""
    covers: int = 0
    """Partial covers looked at, where prices add up to less than the bound."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """A component and the part of the proof that is about it."""

    component: Component
    part: Part
    key: object

    @property
    def prices(self) -> tuple[int, ...]:
        return self.part.prices_ps or (0,) * len(self.component.nodes)


def verify_proof(
    proof: Proof, book: PriceBook, counts: Counts, tell: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """The bound on plans without packs that ``proof`` proves, in picoseconds; ``counts`` is filled
    in, ``tell`` told how many of the distinct components are done.

    Raises:
        RefutedError: something in it is not so.
        NotCheckedError: there is too much to check.
    """
    return _Verifier(book, counts, tell).verify(proof)


class _Verifier:
    def __init__(self, book: PriceBook, counts: Counts, tell: Callable[[int, int], None]) -> None:
        self._book, self._counts, self._tell = book, counts, tell
        self._near: dict[object, list[int]] = {}
        """For components in a joint bound, the groups that cost nearly what their nodes do."""

    def verify(self, proof: Proof) -> int:
        claims = self._claims(proof)
        joint = proof.joint
        together = [claims[n] for n in joint.first_nodes] if joint is not None else []
        distinct = {claim.key: claim for claim in claims.values()}
        self._counts.components, self._counts.distinct = len(claims), len(distinct)
        shared = {claim.key for claim in together}
        room = joint.bound_ps - sum(sum(c.prices) for c in together) if joint is not None else 0
        for done, claim in enumerate(distinct.values()):
            self._tell(done, len(distinct))
            self._near[claim.key] = self._check_component(claim, room if claim.key in shared else 0)
        self._tell(len(distinct), len(distinct))
        if joint is not None:
            self._check_covers(together, joint.bound_ps)
        return proof.bound_without_packs_ps

    def _claims(self, proof: Proof) -> dict[int, _Claim]:
        """For each component, by its lowest node, what is claimed of it."""
        graph, book = self._book.graph, self._book
        part_of: dict[int, tuple[int, Part]] = {}
        for k, part in enumerate(proof.parts):
            for n in part.first_nodes:
                if n in part_of:
                    raise RefutedError(f"the proof counts the component of n{n} twice")
                part_of[n] = (k, part)
        claims: dict[int, _Claim] = {}
        for component in components(graph, crossable_edges(graph, book)):
            first = component.nodes[0]
            if first not in part_of:
                raise RefutedError(f"the proof says nothing of {self._name(component)}")
            k, part = part_of.pop(first)
            if part.prices_ps and len(part.prices_ps) != len(component.nodes):
                raise RefutedError(f"{len(part.prices_ps)} prices are given for {self._name(component)}")
            claims[first] = _Claim(component, part, (component_key(book.signatures, component), k))
        if part_of:
            raise RefutedError(f"the proof counts a component that starts at n{min(part_of)}: there is none")
        if proof.joint is not None:
            known = proof.joint.first_nodes
            if len(set(known)) < len(known) or not claims.keys() >= set(known):
                raise RefutedError("the joint bound is not about different components of the graph")
        return claims

    def _check_component(self, claim: _Claim, room: int) -> list[int]:
        """Check a part; the groups that cost less than ``room`` more than their nodes."""
        nodes, bound_ps, prices = claim.component.nodes, claim.part.bound_ps, claim.prices
        where = self._name(claim.component)
        if not claim.part.prices_ps:
            floor_ps = self._book.floor(nodes)
            if floor_ps < bound_ps:
                raise RefutedError(f"{where}: its floor is {floor_ps:,} ps, not {bound_ps:,}")
            if not room:
                return []
        gap = bound_ps - sum(prices) if claim.part.prices_ps else 0
        near: list[int] = []
        groups = Groups(claim.component, self._book)
        for count, (mask, least_ps) in enumerate(self._with_floors(groups), 1):
            if count > MAX_GROUPS:
                raise NotCheckedError(f"{where} has more than {MAX_GROUPS:,} legal groups")
            inside = groups.members(mask)
            worth = sum(p for i, p in enumerate(prices) if mask >> i & 1)
            if least_ps < worth + max(gap, room, 0):
                cost_ps = self._cost(inside) if groups.fits(mask) else None
                if cost_ps is None:
                    continue
                self._counts.priced += 1
                if cost_ps < worth:
                    raise RefutedError(
                        f"{where}: a kernel of {self._ops(inside)} takes {cost_ps:,} ps, less "
                        f"than the {worth:,} ps that the proof gives its nodes"
                    )
                if cost_ps < worth + max(gap, room):
                    near.append(mask)
            self._counts.groups += 1
        if gap > 0:
            self._near[claim.key] = near
            self._check_covers([claim], bound_ps)
        return near

    def _with_floors(self, groups: Groups) -> Iterator[tuple[int, int]]:
        """Each group with picoseconds that it takes at least, many at once."""
        floors = self._book.floors([(n,) for n in groups.nodes])
        every = iter(groups)
        while some := list(islice(every, _AT_ONCE)):
            if floors is None:
                yield from ((mask, self._book.least(groups.members(mask))) for mask in some)
            else:
                yield from zip(some, (least_ps for least_ps, _ in floors.one_kernel(some)), strict=True)

    def _check_covers(self, claims: list[_Claim], bound_ps: int) -> None:
        """Make sure that the components together have no plan below ``bound_ps``."""
        nodes = tuple(sorted(n for claim in claims for n in claim.component.nodes))
        position = {n: i for i, n in enumerate(nodes)}
        prices = [0] * len(nodes)
        candidates: list[tuple[int, int]] = []
        for claim in claims:
            own = claim.component.nodes
            for n, price in zip(own, claim.prices, strict=True):
                prices[position[n]] = price
            for mask in self._near[claim.key]:
                inside = tuple(n for i, n in enumerate(own) if mask >> i & 1)
                cost_ps = self._cost(inside)
                assert cost_ps is not None, "only groups with a price are kept"
                candidates.append((sum(1 << position[n] for n in inside), cost_ps))
        covers = Covers(prices, candidates, reach_of(self._book.graph, nodes))
        where = " and ".join(self._name(claim.component) for claim in claims[:3])
        try:
            found = covers.below(bound_ps)
        except TooManyCoversError:
            raise NotCheckedError(f"too many plans of {where} cost nearly {bound_ps:,} ps") from None
        finally:
            self._counts.covers += covers.steps
        if found is not None:
            costs = dict(candidates)
            raise RefutedError(
                f"{where}: {len(found)} kernels take {sum(costs[mask] for mask in found):,} ps, less "
                f"than the {bound_ps:,} ps that the proof claims no plan beats"
            )

    def _cost(self, nodes: Nodes) -> int | None:
        price = self._book.price(nodes)
        return price.time_ps if isinstance(price, Price) else None

    def _name(self, component: Component) -> str:
        nodes = component.nodes
        return f"the component of n{nodes[0]} ({len(nodes)} operations)"

    def _ops(self, nodes: Nodes) -> str:
        ops = ", ".join(f"n{n} {self._book.graph.nodes[n].op}" for n in nodes[:4])
        return ops + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
