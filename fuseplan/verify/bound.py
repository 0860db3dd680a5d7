"""Check the proof of a bound against a graph and the prices of its groups.

The verifier trusts the definitions of the search space and of the cost: the rules
(``fuseplan.schedule.legality``, ``fuseplan.schedule.footprint``), the scheduler's price of a group, its lower
bound (``costmodel.floor``), the edges that a group may cross and the partition into components
(``fuseplan.search.components``), and that components of equal structure are equal
(``fuseplan.schedule.structure``). Everything else is computed anew, without the planners and the solver.

A proof gives each node a price. No legal group may cost less than its nodes' prices; then no plan costs less
than the sum of all prices. Prices may be negative, as a plan holds each node exactly once. Where the sum is
below the claimed bound, a search (``Covers``) shows that no plan lies between them: only groups that cost
little more than their nodes can be in such a plan.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import Part, Proof
from fuseplan.schedule.pricing import Nodes, Price, PriceBook
from fuseplan.search.components import (
    Component,
    component_key,
    components,
    crossable_edges,
    data_edges,
    effect_edges,
)
from fuseplan.support.bitset import bits, union_at
from fuseplan.verify.errors import NotCheckedError, RefutedError
from fuseplan.verify.groups import Groups

MAX_STEPS = 2_000_000
"""The number of partial covers after which a search gives up: about ten seconds."""


class TooManyCoversError(Exception):
    """The search reached ``MAX_STEPS``."""


def reach_of(graph: Graph, nodes: Sequence[int]) -> list[int]:
    """For each of ``nodes``, the nodes that depend on it by any path of the graph, as a mask of positions."""
    position = {node: i for i, node in enumerate(nodes)}
    after: list[list[int]] = [[] for _ in graph.nodes]
    for u, v in data_edges(graph) + effect_edges(graph):
        after[u].append(v)
    reach = [0] * len(graph.nodes)
    for u in reversed(range(len(graph.nodes))):
        for v in after[u]:
            reach[u] |= reach[v] | (1 << position[v] if v in position else 0)
    return [reach[node] for node in nodes]


class Covers:
    """Search for exact covers of items by groups.

    Args:
        prices: for each item, its price. No group costs less than its items.
        groups: pairs of a mask of items and a cost.
        reach: for each item, the mask of items that depend on it.
    """

    def __init__(
        self, prices: Sequence[int], groups: Sequence[tuple[int, int]], reach: Sequence[int]
    ) -> None:
        self._reach = reach
        self._everything = (1 << len(prices)) - 1
        self._base = sum(prices)
        self._by_lowest: list[list[tuple[int, int, int]]] = [[] for _ in prices]
        for mask, cost in groups:
            extra = cost - sum(prices[i] for i in bits(mask))
            after = union_at(mask, reach) & ~mask
            self._by_lowest[(mask & -mask).bit_length() - 1].append((extra, mask, after))
        for options in self._by_lowest:
            options.sort()
        self.steps = 0
        self._cycles = 0

    def below(self, bound: int) -> list[int] | None:
        """A cover that costs less than ``bound`` and whose groups have an order to run in, or None.

        Raises:
            TooManyCoversError: the search takes too long.
        """
        return self._extend(0, bound - 1 - self._base, [], {})

    def _extend(
        self, covered: int, room: int, chosen: list[tuple[int, int]], hopeless: dict[int, int]
    ) -> list[int] | None:
        """Groups that cover the rest for at most ``room`` picoseconds above its prices, or None. ``hopeless``
        maps a rest to the largest room for which it is known to have no cover."""
        if room < 0 or hopeless.get(covered, -1) >= room:
            return None
        if covered == self._everything:
            return None if self._has_cycle(chosen) else [mask for mask, _ in chosen]
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooManyCoversError
        lowest = (~covered & (covered + 1)).bit_length() - 1
        cycles = self._cycles
        for extra, mask, after in self._by_lowest[lowest]:
            if extra > room:
                break
            if mask & covered:
                continue
            if any(after & other and waits & mask for other, waits in chosen):
                self._cycles += 1
                continue
            chosen.append((mask, after))
            found = self._extend(covered | mask, room - extra, chosen, hopeless)
            chosen.pop()
            if found is not None:
                return found
        if self._cycles == cycles:
            hopeless[covered] = room
        return None

    def _has_cycle(self, chosen: Sequence[tuple[int, int]]) -> bool:
        """Whether groups depend on each other in a cycle."""
        left = list(chosen)
        while left:
            waiting = 0
            for _, after in left:
                waiting |= after
            ready = [group for group in left if not waiting & group[0]]
            if not ready:
                self._cycles += 1
                return True
            left = [group for group in left if waiting & group[0]]
        return False


MAX_GROUPS = 1_000_000
"""The most groups of one component that are checked: some minutes."""


@dataclass(slots=True)
class Counts:
    """The size of a check."""

    components: int = 0
    distinct: int = 0
    groups: int = 0
    """Legal groups of the distinct components that may cost less than the prices of their nodes, as far as
    lower bounds tell. Each is compared with these prices."""
    priced: int = 0
    """Of these, the groups whose lower bound was not enough, so that the scheduler priced them."""
    covers: int = 0
    """Partial covers searched for components whose prices add up to less than the bound."""


_Pairs = frozenset[tuple[int, int]]


def _missing(cases: Sequence[tuple[_Pairs, _Pairs]]) -> tuple[_Pairs, _Pairs] | None:
    """Pairs of nodes that are in one kernel, and pairs that are in two, of plans that may be in none of
    ``cases``, which are such pairs; None if every plan is in one."""
    waiting: list[tuple[list[tuple[_Pairs, _Pairs]], _Pairs, _Pairs]] = [
        (list(cases), frozenset(), frozenset())
    ]
    while waiting:
        left, together, apart = waiting.pop()
        if any(one <= together and two <= apart for one, two in left):
            continue
        open_ = [pair for one, two in left for pair in sorted(one - together) + sorted(two - apart)]
        if not open_:
            return together, apart
        # Most cases come of the same division: the one that divides all of them.
        pair = max(open_, key=open_.count)
        waiting.append(([c for c in left if pair not in c[1]], together | {pair}, apart))
        waiting.append(([c for c in left if pair not in c[0]], together, apart | {pair}))
    return None


@dataclass(frozen=True, slots=True)
class _Claim:
    """A component and its part of the proof."""

    component: Component
    part: Part
    key: object

    @property
    def prices(self) -> tuple[int, ...]:
        return self.part.prices_ps or (0,) * len(self.component.nodes)


def verify_proof(
    proof: Proof,
    book: PriceBook,
    counts: Counts,
    tell: Callable[[int, int], None] = lambda done, total: None,
    expires_at: float = inf,
) -> int:
    """The bound that ``proof`` proves, in picoseconds.

    ``counts`` is filled in; ``tell`` is called with the number of distinct components that are done, and of
    all. ``expires_at``: the deadline, by ``time.monotonic``.

    Raises:
        RefutedError: the proof is wrong.
        NotCheckedError: there is too much to check, or the deadline came first.
    """
    return _Verifier(book, counts, tell, expires_at).verify(proof)


class _Verifier:
    def __init__(
        self, book: PriceBook, counts: Counts, tell: Callable[[int, int], None], expires_at: float
    ) -> None:
        self._book, self._counts, self._tell, self._expires_at = book, counts, tell, expires_at
        self._near: defaultdict[object, list[int]] = defaultdict(list)
        """For components whose covers are searched, the groups that cost little more than their nodes."""

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
            self._check_component(claim, max(room, 0) if claim.key in shared else None)
        self._tell(len(distinct), len(distinct))
        if joint is not None:
            self._check_covers(together, joint.bound_ps)
        return proof.bound_ps

    def _claims(self, proof: Proof) -> dict[int, _Claim]:
        """The claim of each component, by its lowest node."""
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
            count = len(component.nodes)
            every = [case.prices_ps for case in part.cases] + ([part.prices_ps] if part.prices_ps else [])
            for given in every:
                if len(given) != count:
                    raise RefutedError(f"{len(given)} prices are given for {self._name(component)}")
            pairs = [pair for case in part.cases for pair in (*case.together, *case.apart)]
            if not all(0 <= i < count for pair in pairs for i in pair):
                raise RefutedError(f"a case of {self._name(component)} is about a node that is not there")
            claims[first] = _Claim(component, part, (component_key(book, component), k))
        if part_of:
            raise RefutedError(f"the proof counts a component that starts at n{min(part_of)}: there is none")
        if proof.joint is not None:
            known = proof.joint.first_nodes
            if not known or len(set(known)) < len(known) or not claims.keys() >= set(known):
                raise RefutedError("the joint bound is not about different components of the graph")
        return claims

    def _check_component(self, claim: _Claim, room: int | None) -> None:
        """Check a part of the proof. Of a component in a joint bound, which has a ``room``, also keep the
        groups that cost less than that more than their nodes."""
        nodes, bound_ps, prices = claim.component.nodes, claim.part.bound_ps, claim.prices
        where = self._name(claim.component)
        if not (claim.part.prices_ps or claim.part.cases):
            floor_ps = self._book.floor(nodes)
            if floor_ps < bound_ps:
                raise RefutedError(f"{where}: its floor is {floor_ps:,} ps, not {bound_ps:,}")
            if room is None:
                return

        def look() -> None:
            if time.monotonic() >= self._expires_at:
                raise NotCheckedError(f"the deadline came before {where} was checked")

        groups = Groups(claim.component, self._book, look)
        if claim.part.cases:
            self._check_cases(claim, groups)
            if room is None:
                return
        gap = bound_ps - sum(prices) if claim.part.prices_ps and not claim.part.cases else 0
        self._near[claim.key] += self._check_prices(claim, groups, prices, max(gap, room or 0))
        if gap > 0:
            self._check_covers([claim], bound_ps)

    def _check_prices(self, claim: _Claim, groups: Groups, prices: Sequence[int], room: int) -> list[int]:
        """Check that no group costs less than the prices of its nodes; those that cost less than ``room``
        more."""
        where, near = self._name(claim.component), []
        for count, mask in enumerate(groups.below(prices, room), 1):
            if count > MAX_GROUPS:
                raise NotCheckedError(f"{where} has more than {MAX_GROUPS:,} legal groups")
            inside = groups.members(mask)
            worth = sum(p for i, p in enumerate(prices) if mask >> i & 1)
            if self._book.least(inside) < worth + room:
                cost_ps = self._cost(inside) if groups.fits(mask) else None
                if cost_ps is None:
                    continue
                self._counts.priced += 1
                if cost_ps < worth:
                    raise RefutedError(
                        f"{where}: a kernel of {self._ops(inside)} takes {cost_ps:,} ps, less "
                        f"than the {worth:,} ps that the proof gives its nodes"
                    )
                if cost_ps < worth + room:
                    near.append(mask)
            self._counts.groups += 1
        return near

    def _check_cases(self, claim: _Claim, groups: Groups) -> None:
        """Check that each plan of a component is one of its cases, and the bound of each case."""
        nodes, bound_ps, where = claim.component.nodes, claim.part.bound_ps, self._name(claim.component)
        missing = _missing([(frozenset(c.together), frozenset(c.apart)) for c in claim.part.cases])
        if missing is not None:
            together, apart = (
                " and ".join(f"n{nodes[i]} and n{nodes[j]}" for i, j in sorted(pairs)) or "none"
                for pairs in missing
            )
            raise RefutedError(f"{where}: no case has {together} in one kernel, and {apart} in two")
        for case in claim.part.cases:
            if sum(case.prices_ps) < bound_ps:
                raise RefutedError(
                    f"{where}: the prices of a case add up to {sum(case.prices_ps):,} ps, not {bound_ps:,}"
                )
            self._check_prices(claim, groups.under(case.together, case.apart), case.prices_ps, 0)

    def _check_covers(self, claims: list[_Claim], bound_ps: int) -> None:
        """Check that the components together have no plan below ``bound_ps``."""
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
