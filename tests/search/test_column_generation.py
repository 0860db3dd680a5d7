"""Column generation against full enumeration, on random programs; its bound wherever it ends."""

import itertools
import random
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fuseplan
from costmodel.devices import get_device
from costmodel.floor import Floor
from costmodel.graph import OpKind
from costmodel.partial_floor import PartialFloor
from costmodel.set_tables import as_sets
from fuseplan.frontend.lower import lower
from fuseplan.frontend.trace import trace
from fuseplan.schedule.pricing import Price, PriceBook
from fuseplan.schedule.scheduler import Scheduler
from fuseplan.search.candidates import enumerate_groups
from fuseplan.search.column_generation import solve_by_columns
from fuseplan.search.column_pricing import solve_listed
from fuseplan.search.group_search import GroupSearch, NearGroups
from fuseplan.search.grouping import decompose
from fuseplan.search.remat.duplicate_pricing import DuplicatePricing
from fuseplan.search.remat.duplicates import split
from fuseplan.support.bitset import bits
from fuseplan.verify.groups import Groups

pytestmark = pytest.mark.one_python

NEVER = float("inf")
CASES = [(seed, device) for seed in range(5) for device in ("h200", "tpu_v5e", "rtx4090")]


def random_program(seed, length=9):
    """A web of elementwise operations, row and column reductions, products, slices and masks."""
    rng = random.Random(seed)

    def program(x, y, w):
        live = [x, y]
        for _ in range(length):
            a, b = (live[max(len(live) - rng.randrange(1, 6), 0)] for _ in "ab")
            kind = rng.choice("eeeebbbrrcmsk")
            live.append(
                {
                    "e": lambda a, b: jnp.tanh(a),
                    "b": lambda a, b: a * 0.5 + b,
                    "r": lambda a, b: a - a.sum(1, keepdims=True),
                    "c": lambda a, b: a / (1 + jnp.square(b).mean(0)),
                    "m": lambda a, b: (a @ w) + b,
                    "s": lambda a, b: jnp.concatenate([a[:100], b[100:]]),
                    "k": lambda a, b: jnp.where(a > b, a, 0),
                }[kind](a, b)
            )
        return live[-1], live[-2].sum(0)

    sizes = rng.choice([(512, 256), (2048, 1024), (96, 8)])
    shapes = [sizes, sizes, (sizes[1], sizes[1])]
    return program, [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]


def spaces(seed, device, length=9):
    program, args = random_program(seed, length)
    lowered = lower(trace(program, *args))
    scheduler = Scheduler(lowered.graph, get_device(device), lowered)
    return decompose(lowered.graph, PriceBook(lowered.graph, scheduler)).spaces


def large_space(seed, device):
    return max(spaces(seed, device), key=lambda space: space.n)


def spaces_with_copies(seed, device):
    """Components of a random program in which some cheap operations have a copy for each reader."""
    program, args = random_program(seed)
    lowered = lower(trace(program, *args))
    rng = random.Random(seed)
    cheap = [n.id for n in lowered.graph.nodes if n.kind <= OpKind.INJECTIVE and rng.random() < 0.5]
    copies = split(lowered.graph, cheap)
    if copies is None:
        return []
    pricing = DuplicatePricing(copies, Scheduler(lowered.graph, get_device(device), lowered))
    found = decompose(copies.graph, PriceBook(copies.graph, pricing)).spaces
    return [space for space in found if space.duplicate_rules is not None]


def legal_prices(space):
    found = enumerate_groups(space, 20_000)
    assert found.complete
    prices = {mask: space.price(mask) for mask in found.groups}
    return {mask: price.time_ps for mask, price in prices.items() if isinstance(price, Price)}


def random_prices(space, rng, scale):
    singles = [space.price(1 << i).time_ps for i in range(space.n)]
    return np.floor([rng.choice([0, rng.random(), rng.random()]) * scale * time for time in singles])


def check_bounds(partial, space, groups, known, possible, times_ps):
    """Each group takes at least the floor between ``known`` and ``possible``, and as long as its slowest
    resource, or any mean of two, with what those that joined add; also if it is known to execute several."""
    inside, around = as_sets(known, space.n), as_sets(possible, space.n)
    whole = as_sets(groups, space.n)
    joined = as_sets([mask & ~some for mask, some in zip(groups, known, strict=True)], space.n)
    one_copy = space.duplicate_rules is None
    several = (whole[:, partial.executes].sum(axis=1) > 1) & one_copy
    for rows in (None, several):
        bounds = partial.bounds(inside, around, rows)
        assert all(bounds.floor_ps <= times_ps)
        least = [r.known_ps + (r.added_ps * joined).sum(axis=1) for r in bounds.additive]
        for ps in [*least, *(sum(pair) / 2 for pair in combinations(least, 2))]:
            assert all(ps <= times_ps)
    assert all(partial.stakes(inside).ravel() >= 0)
    shares = partial.shares(whole)
    assert (shares >= 0).all()
    assert not shares[~whole].any()


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_partial_floors_bound_every_group_between(seed, device):
    rng = random.Random(seed)
    for space in spaces(seed, device):
        floor = Floor(space.book.graph, get_device(device))
        partial = PartialFloor(floor, space.members)
        groups = [rng.getrandbits(space.n) | 1 << rng.randrange(space.n) for _ in range(60)]
        known = [mask & rng.getrandbits(space.n) for mask in groups]
        possible = [mask | rng.getrandbits(space.n) for mask in groups]
        of_groups = as_sets(groups, space.n)
        exact = partial(of_groups, of_groups)
        between = partial(as_sets(known, space.n), as_sets(possible, space.n))
        for mask, same, lower_ps in zip(groups, exact.tolist(), between.tolist(), strict=True):
            assert lower_ps <= same
            assert same >= floor.one_kernel(space.nodes(mask)) * (1 - 1e-9) - 4


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_partial_floors_never_fall_when_more_is_decided(seed, device):
    """Whichever open positions join, and whichever are left out."""
    rng = random.Random(seed)
    for space in (*spaces(seed, device), *spaces_with_copies(seed, device)):
        partial = space.book.partial_floor(space.members)
        known = [rng.getrandbits(space.n) & rng.getrandbits(space.n) for _ in range(200)]
        known = [mask or 1 << rng.randrange(space.n) for mask in known]
        possible = [mask | rng.getrandbits(space.n) for mask in known]
        open_ = [around & ~mask for mask, around in zip(known, possible, strict=True)]
        joined = [mask | some & rng.getrandbits(space.n) for mask, some in zip(known, open_, strict=True)]
        left = [
            mask | around & rng.getrandbits(space.n) for mask, around in zip(joined, possible, strict=True)
        ]
        before = partial(as_sets(known, space.n), as_sets(possible, space.n))
        after = partial(as_sets(joined, space.n), as_sets(left, space.n))
        assert (before <= after + 2).all()  # picoseconds of rounding


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_partial_floors_are_below_the_price_of_every_legal_group_between(seed, device):
    rng = random.Random(seed)
    for space in spaces(seed, device):
        legal = legal_prices(space)
        partial = space.book.partial_floor(space.members)
        groups = [mask for mask in legal if mask & (mask - 1)]
        for keep in (1.0, 0.7, 0.3):
            known = [sum(1 << i for i in bits(mask) if rng.random() < keep) for mask in groups]
            possible = [mask | rng.getrandbits(space.n) & rng.getrandbits(space.n) for mask in groups]
            check_bounds(partial, space, groups, known, possible, [legal[mask] for mask in groups])


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_the_search_finds_exactly_the_groups_that_cost_less_than_their_members(seed, device):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    found_any = False
    for scale in (0.5, 1.0, 1.5):
        prices = random_prices(space, rng, scale)
        expected = {m: t for m, t in legal.items() if t < prices[bits(m)].sum()}
        for depth_first_work in (1 << 62, 0):
            groups = GroupSearch(space, space.book.partial_floor(space.members))
            found = groups.below(prices, depth_first_work=depth_first_work)
            assert found.complete
            assert found.times_ps == expected
        found_any |= bool(expected)
    assert found_any


def check_near(space, legal, prices, rooms):
    """Each room's groups hold all that cost less, and no group that is against a rule."""
    near = NearGroups(GroupSearch(space, space.book.partial_floor(space.members)), prices)
    for room in rooms:
        assert near.within(room, most=1 << 62, max_work=1 << 62, expires_at=NEVER)
        found = set(near.masks)
        assert found >= {m for m, t in legal.items() if t <= prices[bits(m)].sum() + room}
        others = found - legal.keys() - set(space.offers)
        assert not any(isinstance(space.price(m), Price) for m in others)


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_the_groups_near_their_members_prices_are_listed_by_their_floors(seed, device):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    for scale, rooms in ((1.0, (0, 100_000, 300_000)), (0.2, (5_000_000, 10_000_000))):
        check_near(space, legal, random_prices(space, rng, scale), rooms)


@pytest.mark.parametrize(("seed", "device"), CASES[:4])
def test_a_listing_that_a_limit_ended_goes_on(seed, device):
    space = large_space(seed, device)
    legal = legal_prices(space)
    prices = random_prices(space, random.Random(seed), 1.0)
    near = NearGroups(GroupSearch(space, space.book.partial_floor(space.members)), prices)
    ends = 0
    while not near.within(300_000, most=1 << 62, max_work=1_000, expires_at=NEVER):
        ends += 1
    assert ends
    assert set(near.masks) >= {m for m, t in legal.items() if t <= prices[bits(m)].sum() + 300_000}


@pytest.mark.parametrize(("seed", "device"), CASES[:6])
def test_groups_grow_into_legal_ones_that_cost_less_than_their_members(seed, device):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    groups = GroupSearch(space, space.book.partial_floor(space.members))
    found = {}
    for scale in (0.5, 1.0, 1.0):
        prices = random_prices(space, rng, scale)
        grown = groups.grown(prices, space.singles)
        assert grown.items() <= legal.items()
        assert all(time_ps < prices[bits(mask)].sum() for mask, time_ps in grown.items())
        found |= grown
    assert found
    assert groups.grown(np.zeros(space.n), space.singles) == {}
    assert groups.times_ps.items() <= legal.items()


@pytest.mark.parametrize(("seed", "device"), CASES[:6])
def test_a_start_that_led_to_nothing_is_tried_again_when_prices_have_risen(seed, device):
    space = large_space(seed, device)
    work = space.book.work
    groups = GroupSearch(space, space.book.partial_floor(space.members))
    high = np.array([2.0 * space.price(mask).time_ps for mask in space.singles])
    low = high / 1000
    assert groups.grown(low, space.singles) == {}
    spent = work.spent
    assert groups.grown(low, space.singles) == {}
    assert work.spent == spent
    assert groups.grown(high, space.singles)
    assert work.spent > spent


@pytest.mark.parametrize(("seed", "device"), CASES[:6])
def test_overlapping_groups_are_priced_in_parts_that_make_a_partition(seed, device):
    space = large_space(seed, device)
    legal = legal_prices(space)
    one, other = next((a, b) for a in legal for b in legal if a & b and a & ~b in legal and b & ~a and a < b)
    groups = GroupSearch(space, space.book.partial_floor(space.members))
    groups.disjoint([one, other])
    assert {one, other, one & ~other} <= groups.times_ps.keys()
    assert groups.times_ps.items() <= legal.items()


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_where_the_search_ends_early_its_share_of_the_prices_is_still_proven(seed, device):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    prices = random_prices(space, rng, 1.0)
    groups = GroupSearch(space, space.book.partial_floor(space.members))
    for limit in (0, 1, 10_000, 100_000):
        for depth_first_work in (limit, 0):
            found = groups.below(prices, max_work=limit, depth_first_work=depth_first_work)
            proven = np.floor(prices * found.share)
            assert all(time >= proven[bits(mask)].sum() for mask, time in legal.items())
    assert found.share.max() > 0


@pytest.mark.parametrize(("seed", "device"), CASES[:6])
def test_where_the_deadline_ends_the_search_its_share_of_the_prices_is_still_proven(
    seed, device, monkeypatch
):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    prices = random_prices(space, rng, 1.0)
    for most_looks in (0, 5, 20, 80):
        looks = itertools.count()
        monkeypatch.setattr(space.book, "clock", lambda looks=looks: next(looks))
        groups = GroupSearch(space, space.book.partial_floor(space.members))
        found = groups.below(prices, expires_at=most_looks, depth_first_work=0)
        proven = np.floor(prices * found.share)
        assert all(time >= proven[bits(mask)].sum() for mask, time in legal.items())


def test_the_partial_groups_of_least_share_raise_the_bound_soonest():
    bounds = {1 << 62: 0, 0: 0}
    for seed in range(4):
        space = max(spaces(seed, "tpu_v5e", length=60), key=lambda space: space.n)
        prices = random_prices(space, random.Random(seed), 0.6)
        for depth_first_work in bounds:
            groups = GroupSearch(space, space.book.partial_floor(space.members))
            found = groups.below(prices, max_work=200_000, depth_first_work=depth_first_work)
            bounds[depth_first_work] += np.floor(prices * found.share).sum() / prices.sum()
    assert bounds[0] > 1.05 * bounds[1 << 62]


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_the_plan_is_the_one_that_enumeration_proves(seed, device):
    space = large_space(seed, device)
    legal = legal_prices(space)
    best = solve_listed(space, tuple(dict.fromkeys([*legal, *space.offers])), space.singles, NEVER)
    solved = solve_by_columns(space, space.book.partial_floor(space.members), space.singles, NEVER)
    assert best.optimal
    assert solved.optimal
    assert space.total(solved.groups) == space.total(best.groups)
    assert solved.bound_ps == space.total(best.groups).time_ps
    assert all(time >= sum(solved.duals[i] for i in bits(mask)) for mask, time in legal.items())


@pytest.mark.parametrize("limit", [0, 5_000, 100_000])
def test_an_early_end_leaves_a_plan_and_a_bound_below_it(limit):
    space = large_space(3, "h200")
    legal = legal_prices(space)
    optimum = solve_listed(space, tuple(legal), space.singles, NEVER).bound_ps
    solved = solve_by_columns(
        space, space.book.partial_floor(space.members), space.singles, NEVER, max_work=limit
    )
    assert solved.bound_ps <= optimum <= space.total(solved.groups).time_ps
    assert all(time >= sum(solved.duals[i] for i in bits(mask)) for mask, time in legal.items())


@pytest.mark.parametrize(("seed", "device"), CASES[:9])
def test_the_verifier_lists_every_group_that_may_cost_less(seed, device, monkeypatch):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    monkeypatch.setattr("fuseplan.verify.groups._STEPS", 1)
    for scale, room in ((0.5, 0), (1.0, 0), (1.0, 300_000)):
        prices = [int(p) for p in random_prices(space, rng, scale)]
        listed = list(Groups(space.component, space.book).below(prices, room))
        assert len(listed) == len(set(listed))
        assert set(listed) >= {m for m, t in legal.items() if t < sum(prices[i] for i in bits(m)) + room}
        assert not any(
            isinstance(space.price(m), Price) for m in set(listed) - set(legal) - set(space.offers)
        )


@pytest.mark.parametrize(
    ("seed", "device"), [(seed, device) for seed in (0, 1, 3) for device in ("h200", "tpu_v5e")]
)
def test_the_search_finds_exactly_the_groups_with_copies(seed, device, monkeypatch):
    """Also the verifier does, by its own rules of copies."""
    monkeypatch.setattr("fuseplan.verify.groups._STEPS", 1)
    rng = random.Random(seed)
    found_any = False
    for space in spaces_with_copies(seed, device):
        legal = legal_prices(space)
        floor = space.book.partial_floor(space.members)
        for scale, room in ((0.5, 0), (1.0, 0), (1.0, 300_000)):
            prices = random_prices(space, rng, scale)
            expected = {m: t for m, t in legal.items() if t < prices[bits(m)].sum() + room}
            groups = GroupSearch(space, floor)
            found = groups.below(prices)
            assert found.complete
            assert found.times_ps == {m: t for m, t in expected.items() if t < prices[bits(m)].sum()}
            check_near(space, legal, prices, (room // 3, room))
            listed = set(Groups(space.component, space.book).below([int(p) for p in prices], room))
            assert listed >= expected.keys()
            others = listed - legal.keys() - set(space.offers)
            assert not any(isinstance(space.price(m), Price) for m in others)
            found_any |= bool(expected)
    assert found_any


@pytest.mark.parametrize("device", ["h200", "tpu_v5e"])
def test_partial_floors_of_copies_are_below_the_price_of_every_legal_group_between(device):
    rng = random.Random(0)
    asked = 0
    for space in [space for seed in range(4) for space in spaces_with_copies(seed, device)]:
        legal = legal_prices(space)
        partial = space.book.partial_floor(space.members)
        groups = [mask for mask in legal if mask & (mask - 1)]
        asked += len(groups)
        for keep in (1.0, 0.7, 0.3):
            known = [sum(1 << i for i in bits(mask) if rng.random() < keep) for mask in groups]
            possible = [mask | rng.getrandbits(space.n) & rng.getrandbits(space.n) for mask in groups]
            check_bounds(partial, space, groups, known, possible, [legal[mask] for mask in groups])
    assert asked


@pytest.mark.slow
def test_a_program_of_too_many_groups_to_list_is_proven_optimal_and_verified():
    def lennard_jones(r):
        d = r[:, None] - r[None]
        q = (d**2).sum(-1) + jnp.eye(len(r))
        return (4 * (q**-6 - q**-3) * (1 - jnp.eye(len(r)))).sum() / 2

    points = jax.ShapeDtypeStruct((2_000, 3), "float32")
    plan = fuseplan.make_plan(jax.grad(lennard_jones), device="h200", deadline_s=90.0)(points)
    assert plan.status == "OPTIMAL"
    largest = max(plan.graph.values[w.value].size for k in plan.kernels for w in k.spec.writes)
    assert largest < 2_000 * 2_000, "the distances are computed where they are read"
    assert plan.verify().status == "verified"
