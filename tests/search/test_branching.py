"""Branch and price against full enumeration: its plan, its bound, and the cases that prove it."""

import random
from itertools import combinations

import numpy as np
import pytest

from fuseplan.plan.fusion_plan import Case
from fuseplan.schedule.pricing import Price
from fuseplan.search.branching import branch
from fuseplan.search.column_pricing import solve_listed
from fuseplan.search.decisions import Decisions, undecided
from fuseplan.search.group_search import GroupSearch
from fuseplan.search.restricted_master import Columns, ColumnSearch
from fuseplan.support.bitset import bits
from fuseplan.verify.bound import _missing
from tests.search.test_column_generation import (
    CASES,
    NEVER,
    large_space,
    legal_prices,
    random_prices,
    spaces_with_copies,
)

pytestmark = pytest.mark.one_python


def column_search(space, max_work=1 << 62):
    search = GroupSearch(space, space.book.partial_floor(space.members))
    prices = {mask: space.price(mask) for mask in (*space.singles, *space.offers)}
    known = {mask: price.time_ps for mask, price in prices.items() if isinstance(price, Price)}
    return ColumnSearch(search, Columns(space, known, space.singles), NEVER, max_work)


def random_decisions(space, search, rng):
    """Some that a random plan obeys: a few pairs of its groups, and a few pairs that it separates."""
    owner = {i: mask for mask in random_plan(space, rng) for i in bits(mask)}
    decisions = Decisions(space, search.conflicts)
    pairs = list(combinations(range(space.n), 2))
    for i, j in rng.sample(pairs, min(4, len(pairs))):
        same = owner[i] == owner[j]
        decisions = decisions.and_together((i, j)) if same else decisions.and_apart((i, j))
    return decisions


def random_plan(space, rng):
    """A partition into legal groups that can run."""
    plan = [1 << i for i in range(space.n)]
    legal = list(legal_prices(space))
    for mask in sorted(legal, key=lambda mask: -mask.bit_count() * rng.random()):
        if all(group & mask == group or not group & mask for group in plan):
            wider = [mask, *(group for group in plan if not group & mask)]
            plan = wider if space.can_run(wider) else plan
    return plan


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_cases_prove_the_optimum(seed, device):
    space = large_space(seed, device)
    legal = legal_prices(space)
    optimum = solve_listed(space, tuple(dict.fromkeys([*legal, *space.offers])), space.singles, NEVER)
    found = branch(column_search(space), space.singles, 1 << 62)
    time_ps = space.total(optimum.groups).time_ps
    # Prices are whole picoseconds.
    assert time_ps - space.n <= found.bound_ps <= time_ps
    assert time_ps <= space.total(found.groups).time_ps <= time_ps + space.n
    check_cases(space, found.cases, legal)


def check_cases(space, cases, legal):
    """Each plan is in a case, and no group of a case costs less than its positions."""
    assert _missing([(frozenset(case.together), frozenset(case.apart)) for case in cases]) is None
    bars = GroupSearch(space, space.book.partial_floor(space.members)).conflicts
    for case in cases:
        decisions = Decisions(space, bars, case.together, case.apart)
        for mask, time_ps in legal.items():
            if decisions.allow(mask, is_offered=True):
                assert time_ps >= sum(case.prices_ps[i] for i in bits(mask))


@pytest.mark.parametrize("max_work", [0, 2_000, 20_000, 100_000])
def test_a_limit_leaves_a_plan_and_cases_that_bound_it(max_work):
    for seed in range(3):
        space = large_space(seed, "h200")
        legal = legal_prices(space)
        optimum = solve_listed(space, tuple(legal), space.singles, NEVER).bound_ps
        found = branch(column_search(space, max_work), space.singles, max_work)
        assert found.bound_ps <= optimum <= space.total(found.groups).time_ps
        check_cases(space, found.cases, legal)


@pytest.mark.parametrize(("seed", "device"), CASES)
def test_a_search_under_decisions_finds_the_groups_that_they_allow(seed, device):
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    search = GroupSearch(space, space.book.partial_floor(space.members))
    for scale in (0.3, 1.0):
        decisions = random_decisions(space, search, rng)
        prices = random_prices(space, rng, scale)
        found = search.under(decisions).below(prices)
        assert found.complete
        expected = {
            mask: time_ps
            for mask, time_ps in legal.items()
            if time_ps < prices[bits(mask)].sum() and decisions.allow(mask, is_offered=False)
        }
        assert {mask: t for mask, t in found.times_ps.items() if mask not in space.offers} == {
            mask: t for mask, t in expected.items() if mask not in space.offers
        }


@pytest.mark.parametrize("seed", range(4))
def test_a_search_under_decisions_obeys_the_rules_of_copies(seed):
    rng = random.Random(seed)
    for space in spaces_with_copies(seed, "h200"):
        legal = legal_prices(space)
        search = GroupSearch(space, space.book.partial_floor(space.members))
        decisions = random_decisions(space, search, rng)
        prices = random_prices(space, rng, 1.0)
        found = search.under(decisions).below(prices)
        expected = {
            mask
            for mask, time_ps in legal.items()
            if time_ps < prices[bits(mask)].sum() and decisions.allow(mask, is_offered=False)
        }
        assert set(found.times_ps) - set(space.offers) == expected - set(space.offers)


@pytest.mark.parametrize(("seed", "device"), [case for case in CASES if case[1] != "rtx4090"])
def test_every_plan_that_obeys_the_pairs_obeys_what_follows_from_them(seed, device):
    """What decisions add to the pairs (paths, waiting kernels, conflicts beyond) excludes no plan."""
    space, rng = large_space(seed, device), random.Random(seed)
    legal = legal_prices(space)
    search = GroupSearch(space, space.book.partial_floor(space.members))
    for _ in range(6):
        plan = random_plan(space, rng)
        owner = {i: mask for mask in plan for i in bits(mask)}
        decisions = Decisions(space, search.conflicts)
        for i, j in rng.sample(list(combinations(range(space.n), 2)), 5):
            same = owner[i] == owner[j]
            decisions = decisions.and_together((i, j)) if same else decisions.and_apart((i, j))
        assert all(decisions.allow(mask, mask in space.offers) for mask in plan if mask in legal)
        assert all(mask & whole in (0, whole) for mask in plan for whole in decisions.classes)


def test_what_lies_on_a_path_is_together_and_what_lies_beyond_is_apart():
    space = large_space(0, "h200")
    below = next(i for i in range(space.n) if space.below[i].bit_count() > 2)
    path = [below]
    while len(path) < 3:
        path.append(next(j for j in bits(space.below[path[-1]]) if space.producers[j].count(path[-1])))
    first, middle, last = path
    bars = (0,) * space.n
    together = Decisions(space, bars, together=((first, last),))
    assert together.classes[middle] >> first & together.classes[middle] >> last & 1
    apart = Decisions(space, bars, apart=((first, middle),))
    assert apart.conflicts[first] >> last & 1
    both = Decisions(space, bars, together=((first, last),), apart=((first, middle),))
    assert both.conflicts[first] >> first & 1, "no group can hold them"
    assert not any(both.allow(mask, is_offered=False) for mask in range(1, 1 << 10) if mask >> first & 1)


def test_pairs_are_undecided_where_groups_in_use_disagree():
    space = large_space(0, "h200")
    decisions = Decisions(space, (0,) * space.n)
    assert not undecided(decisions, {0b11: 1.0, 0b100: 1.0})
    assert undecided(decisions, {0b11: 0.5, 0b110: 0.5, 0b101: 0.5}) == {
        (0, 1): 0.5,
        (0, 2): 0.5,
        (1, 2): 0.5,
    }
    # Two whole groups that overlap cover more than a plan does.
    assert undecided(decisions, {0b011: 1.0, 0b110: 1.0}) == {(0, 1): 1.0, (1, 2): 1.0}


def test_cases_are_complete_if_each_plan_is_in_one():
    def missing(*cases):
        return _missing([(frozenset(together), frozenset(apart)) for together, apart in cases])

    a, b = (0, 1), (2, 3)
    assert missing(((), ())) is None
    assert missing(((a,), ()), ((), (a,))) is None
    assert missing(((a,), ()), ((b,), (a,)), ((), (a, b))) is None
    assert missing(((a,), ())) == (frozenset(), {a})
    assert missing(((a, b), ()), ((), (a,))) == ({a}, {b})
    assert missing(((a,), ()), ((), (b,)))[0] == {b}
    assert missing() == (frozenset(), frozenset())


def test_a_case_holds_prices_for_each_position():
    space = large_space(1, "tpu_v5e")
    found = branch(column_search(space), space.singles, 1 << 62)
    assert all(isinstance(case, Case) and len(case.prices_ps) == space.n for case in found.cases)
    assert all(np.array(case.prices_ps).min() >= 0 for case in found.cases)
