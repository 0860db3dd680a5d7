"""Exact cover: choose sets so that every item is in exactly one, at the least cost.

Integers in, integers out; items and sets have no meaning here. Costs are tuples compared
lexicographically. A result carries its proof: ``bound`` is the value of the first objective that no cover
beats, and OPTIMAL means that no cover is better in any objective.

Three engines, cheapest first: a linear relaxation whose duals price out almost every set; dynamic programming
over the lowest uncovered item; and CP-SAT, for instances that are too wide for that or have forbidden
combinations.

Exceptions of OR-Tools pass through; ``MODEL_INVALID``, and an ``UNKNOWN`` long before the deadline, are
raised as RuntimeError: the caller has a plan to fall back on. A crash of its native code (a segmentation
fault, an abort where memory runs out) ends the process, and nothing in Python can catch it; choose
``planner="best_first"`` on a machine where that happens.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fuseplan.search.limits import LIMITS

_MOST_SECONDS = 1e9
"""A longer deadline is none: OR-Tools takes no number of milliseconds beyond 64 bits."""

_SLACK = 0.5
"""The share of its time limit that CP-SAT may leave unused when the limit ended it."""

_INT64_HEADROOM = 2**62
"""CP-SAT keeps sums of objective terms in 64 bits."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An exact cover problem, fully prepared."""

    sets: tuple[tuple[int, ...], ...]
    """Items of each set, ascending."""
    costs: tuple[tuple[int, ...], ...]
    """For each set its objectives, the most important first; none negative."""
    n_items: int
    hint: tuple[int, ...] | None = None
    """A cover that is known, as indices of ``sets``."""
    deadline_s: float = math.inf
    """Wall-clock limit, building and presolving the model included."""
    forbidden: tuple[tuple[int, ...], ...] = ()
    """Combinations of sets that must not all be chosen."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The answer to an ``Instance``."""

    status: str
    """``OPTIMAL``, ``FEASIBLE`` (a limit came first), ``INFEASIBLE``, or ``UNKNOWN``
    (no cover was found in time, and none was hinted)."""
    chosen: tuple[int, ...]
    objective: tuple[int, ...]
    bound: int
    """No cover has a first objective below this."""
    engine: str = ""
    is_late: bool = False
    """Whether it is not ``OPTIMAL`` because of the deadline, and not of a counted limit."""
    counted_us: int = 0
    """CP-SAT's count of its work, in about microseconds of an idle core."""


def exact_cover(instance: Instance) -> Selection:
    """The cheapest cover. Raises ImportError if CP-SAT is needed and not installed."""
    expires_at = time.monotonic() + instance.deadline_s
    _check(instance)
    if instance.n_items == 0:
        return Selection("OPTIMAL", (), (0,) * _n_objectives(instance), 0, "trivial")
    if instance.deadline_s <= 0:
        return _unsolved(instance, 0)
    duals: tuple[int, ...] = (0,) * instance.n_items
    bound = 0
    alive = list(range(len(instance.sets)))
    if len(instance.sets) > instance.n_items:
        relaxation = Relaxation(instance.sets, [c[0] for c in instance.costs], instance.n_items)
        relaxation.solve(expires_at)
        duals, bound = relaxation.duals, relaxation.bound
        if instance.hint is not None and _allowed(instance, instance.hint):
            # Using a set costs at least its reduced cost more than the bound.
            gap = _total(instance, instance.hint)[0] - bound
            alive = np.flatnonzero(relaxation.reduced_costs() <= gap).tolist()
    if not instance.forbidden:
        chosen = _dynamic_programming(instance, alive, duals, expires_at)
        if chosen is not None:
            if not chosen:
                return Selection("INFEASIBLE", (), (), bound, "dynamic programming")
            total = _total(instance, chosen)
            return Selection("OPTIMAL", chosen, total, total[0], "dynamic programming")
    return _cp_sat(instance, alive, bound, expires_at)


class Relaxation:
    """The linear relaxation of an exact cover, solved again as costs become known.

    ``duals`` is a price for each item such that no set costs less than its items, as large
    in sum as the relaxation allows; ``bound`` is that sum, a lower bound on every cover;
    ``support`` has the sets that the relaxation uses. It is solved in floating point, then
    rounded to integers that satisfy the condition exactly: the bound is a proof whatever
    the accuracy of the solver.

    The solver sees few of the sets: those whose items cost more than the set does enter
    until there are none (column generation).
    """

    def __init__(self, sets: Sequence[Sequence[int]], costs: Sequence[int], n_items: int) -> None:
        self._lp = _make_glop()
        self._optimal = self._lp.OPTIMAL
        self._unfinished = (None, self._lp.FEASIBLE, self._lp.NOT_SOLVED)
        """The states of a relaxation that a limit cut short."""
        self._rows = [self._lp.Constraint(1.0, 1.0) for _ in range(n_items)]
        self._objective = self._lp.Objective()
        self._objective.SetMinimization()
        self._sets = sets
        self._unit = max(1, max(costs, default=1))
        self._costs = np.array(costs, dtype=np.int64)
        self._sizes = np.array([len(items) for items in sets], dtype=np.int64)
        self._items = np.array([i for items in sets for i in items], dtype=np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)))[:-1].astype(np.int64)
        self._alive = np.ones(len(sets), dtype=bool)
        self._variables: dict[int, Any] = {}
        for k in range(len(sets)):
            if self._sizes[k] == 1:
                self._enter(k)
        self.duals: tuple[int, ...] = (0,) * n_items
        self.bound = 0
        self.support: tuple[int, ...] = ()

    def set_cost(self, k: int, cost: int) -> None:
        """Set ``k`` turns out to cost so much."""
        self._costs[k] = cost
        if k in self._variables:
            self._objective.SetCoefficient(self._variables[k], cost / self._unit)

    def drop(self, k: int) -> None:
        """Set ``k`` cannot be used after all, or in no cover of interest."""
        self._alive[k] = False
        if k in self._variables:
            self._variables[k].SetUb(0.0)

    def solve(self, expires_at: float = math.inf) -> None:
        """Find ``duals``, ``bound`` and ``support``.

        Where ``time.monotonic()`` reaches ``expires_at`` first, or counted work its limit, the duals stay
        as they were if no cost has fallen below them since, which is as good a proof; else they are zero.
        """
        n_items = len(self._rows)
        known = self.duals
        self.duals, self.bound, self.support = (0,) * n_items, 0, ()
        outside = self._alive.copy()
        outside[list(self._variables)] = False
        while True:
            left_s = expires_at - time.monotonic()
            if left_s < math.inf:
                self._lp.SetTimeLimit(_milliseconds(left_s))
            status = self._lp.Solve() if left_s > 0 else None
            is_late = status != self._optimal and time.monotonic() >= expires_at
            if is_late or status in self._unfinished:
                below = self._item_sums(np.array(known, dtype=np.int64)) <= self._costs
                if bool(np.all(below | ~self._alive)):
                    self.duals, self.bound = known, sum(known)
                return
            if status == self._optimal:
                exact = np.array([row.dual_value() for row in self._rows]) * self._unit
                prices = np.floor(exact).astype(np.int64)
                over = self._item_sums(prices) - self._costs
                entering = np.flatnonzero(outside & (over > 0))
                entering = entering[np.argsort(-over[entering], kind="stable")][: LIMITS.max_entering]
            else:  # what is inside covers nothing: all may be needed
                entering = np.flatnonzero(outside)
                if not len(entering):
                    return
            if not len(entering):
                break
            outside[entering] = False
            for k in entering.tolist():
                self._enter(k)
        excess = max(0, int(np.max(-(-over // self._sizes)[self._alive], initial=0)))
        duals = tuple(int(p) - excess for p in prices)
        # A set in use costs as much as its items, but for rounding: no other set can be in the support.
        tight = np.flatnonzero(self._alive & ~outside & (over >= -self._sizes - 1e-6 * self._unit))
        self.support = tuple(k for k in tight.tolist() if self._variables[k].solution_value() > 1e-6)
        if sum(duals) > 0:  # else all costs are zero but for rounding: no price is as good
            self.duals, self.bound = duals, sum(duals)

    def reduced_costs(self) -> npt.NDArray[np.int64]:
        """For each set, how much dearer than ``bound`` a cover that uses it is at least."""
        return self._costs - self._item_sums(np.array(self.duals, dtype=np.int64))

    def _enter(self, k: int) -> None:
        x = self._lp.NumVar(0.0, self._lp.infinity(), "")
        self._objective.SetCoefficient(x, int(self._costs[k]) / self._unit)
        for i in self._sets[k]:
            self._rows[i].SetCoefficient(x, 1.0)
        self._variables[k] = x

    def _item_sums(self, prices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.add.reduceat(prices[self._items], self._starts)


class Covering:
    """The linear relaxation of covering items, each at least once, by sets that become known one by one."""

    def __init__(self, n_items: int) -> None:
        self._lp = _make_glop()
        self._rows = [self._lp.Constraint(1.0, self._lp.infinity()) for _ in range(n_items)]
        self._objective = self._lp.Objective()
        self._objective.SetMinimization()
        self._sets: list[Any] = []
        self._near = [self._lp.NumVar(0.0, _PULL, "") for _ in range(2 * n_items)]
        for row, above, below in zip(self._rows, self._near[::2], self._near[1::2], strict=True):
            row.SetCoefficient(above, 1.0)
            row.SetCoefficient(below, -1.0)
        self._lacking = [self._lp.NumVar(0.0, 0.0, "") for _ in range(n_items)]
        for row, x in zip(self._rows, self._lacking, strict=True):
            row.SetCoefficient(x, 1.0)
        self.solution: list[float] = []
        """How much of each set the last solution uses, in the order in which they were added."""

    def add(self, items: Sequence[int], cost: int) -> None:
        """Add a set."""
        x = self._lp.NumVar(0.0, self._lp.infinity(), "")
        for i in items:
            self._rows[i].SetCoefficient(x, 1.0)
        self._objective.SetCoefficient(x, cost / _COVERING_UNIT)
        self._sets.append(x)

    def restrict(self, chosen: Collection[int], barred: Collection[int]) -> None:
        """Use some sets, by their order, once at least, and others not at all; the rest freely."""
        for k, x in enumerate(self._sets):
            x.SetBounds(float(k in chosen), 0.0 if k in barred else self._lp.infinity())

    def allow_lacking(self, cost: int | None) -> None:
        """Let an item be covered by nothing for ``cost``, or not at all."""
        for x in self._lacking:
            x.SetUb(0.0 if cost is None else 1.0)
            self._objective.SetCoefficient(x, (cost or 0) / _COVERING_UNIT)

    def pull(self, prices: Sequence[float] | None) -> None:
        """Of duals that are nearly as good as the best, prefer those close to ``prices``; None: the best."""
        for x in self._near:
            x.SetUb(0.0 if prices is None else _PULL)
        for price, above, below in zip(prices or (), self._near[::2], self._near[1::2], strict=False):
            self._objective.SetCoefficient(above, price / _COVERING_UNIT)
            self._objective.SetCoefficient(below, -price / _COVERING_UNIT)

    def duals(self, limit_s: float) -> list[float] | None:
        """A price for each item, none negative; None if it is not solved in ``limit_s`` seconds."""
        if limit_s <= 0:
            return None
        if limit_s < math.inf:
            self._lp.SetTimeLimit(_milliseconds(limit_s))
        if self._lp.Solve() != self._lp.OPTIMAL:
            return None
        self.solution = [x.solution_value() for x in self._sets]
        return [max(row.dual_value(), 0.0) * _COVERING_UNIT for row in self._rows]


_PULL = 1e-3
"""The weight of the distance of duals to those that are preferred, as a part of the objective."""

_COVERING_UNIT = 10**6
"""Costs are divided by it: GLOP's tolerances are absolute, about a millionth."""


def _make_glop() -> Any:
    """A linear program for GLOP, which counts its work."""
    from ortools.linear_solver import pywraplp

    lp = pywraplp.Solver.CreateSolver("GLOP")
    if lp is None:
        raise RuntimeError("this build of OR-Tools has no GLOP")
    # Presolve would forget the basis, from which the next solution is a few pivots away.
    parameters = f"use_preprocessing: false max_deterministic_time: {LIMITS.solver_work_s}"
    if not lp.SetSolverSpecificParametersAsString(parameters):
        raise RuntimeError("this build of GLOP does not count its work")
    return lp


def _check(instance: Instance) -> None:
    if len(instance.sets) != len(instance.costs):
        raise ValueError(f"{len(instance.sets)} sets but {len(instance.costs)} costs")
    for items in instance.sets:
        ascending = items and list(items) == sorted(set(items))
        if not ascending or items[0] < 0 or items[-1] >= instance.n_items:
            raise ValueError(f"a set must hold ascending items below {instance.n_items}, got {items}")
    if any(c < 0 for cost in instance.costs for c in cost):
        raise ValueError("costs must not be negative")
    if len({len(cost) for cost in instance.costs}) > 1:
        raise ValueError("every set needs the same number of objectives")
    if instance.hint is not None:
        covered = sorted(i for k in instance.hint for i in instance.sets[k])
        if covered != list(range(instance.n_items)):
            raise ValueError("the hint is not a cover")


def _n_objectives(instance: Instance) -> int:
    return len(instance.costs[0]) if instance.costs else 1


def _total(instance: Instance, chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(instance.costs[k] for k in chosen), strict=True)))


def _unsolved(instance: Instance, bound: int) -> Selection:
    if instance.hint is None or not _allowed(instance, instance.hint):
        return Selection("UNKNOWN", (), (), bound, "none", is_late=True)
    total = _total(instance, instance.hint)
    return Selection("FEASIBLE", tuple(instance.hint), total, bound, "hint", is_late=True)


def _dynamic_programming(
    instance: Instance, alive: Sequence[int], duals: Sequence[int], expires_at: float
) -> tuple[int, ...] | None:
    """The best cover, ``()`` if there is none, None if there are too many partial covers.

    A cover is built by always covering the lowest uncovered item next, so that what is
    covered so far is all that matters about the past.
    """
    n_objectives = _n_objectives(instance)
    # One integer in base "more than any sum" compares as the objectives do, digit by digit.
    base = 1 + sum(max(c) for c in instance.costs)
    weights = [base ** (n_objectives - 1 - j) for j in range(n_objectives)]

    def weigh(cost: Sequence[int]) -> int:
        return sum(c * w for c, w in zip(cost, weights, strict=True))

    limit = None if instance.hint is None else weigh(_total(instance, instance.hint))
    by_lowest: list[list[tuple[int, int, int, int]]] = [[] for _ in range(instance.n_items)]
    for k in alive:
        items = instance.sets[k]
        mask = sum(1 << i for i in items)
        worth = sum(duals[i] for i in items) * weights[0]
        by_lowest[items[0]].append((mask, weigh(instance.costs[k]), worth, k))
    to_go = sum(duals) * weights[0]
    everything = (1 << instance.n_items) - 1
    # covered -> (cost, price of what is uncovered, last set, covered before it)
    waiting: list[dict[int, tuple[int, int, int, int]]] = [{} for _ in range(instance.n_items + 1)]
    waiting[0][0] = (0, to_go, -1, 0)
    n_states, limits = 0, LIMITS
    for lowest in range(instance.n_items):
        options = by_lowest[lowest]
        for covered, (cost, rest, _, _) in waiting[lowest].items():
            n_states += 1
            if n_states > limits.max_states:
                return None
            if n_states % limits.states_per_clock_look == 0 and time.monotonic() > expires_at:
                return None
            for mask, extra, worth, k in options:
                if mask & covered:
                    continue
                total, left = cost + extra, rest - worth
                if limit is not None and total + left > limit:
                    continue
                now = covered | mask
                # The lowest uncovered item is the lowest zero bit.
                following = waiting[(~now & (now + 1)).bit_length() - 1]
                known = following.get(now)
                if known is None or total < known[0]:
                    following[now] = (total, left, k, covered)
    if everything not in waiting[instance.n_items]:
        return ()
    chosen: list[int] = []
    covered, lowest = everything, instance.n_items
    while covered:
        _, _, k, covered = waiting[lowest][covered]
        chosen.append(k)
        lowest = instance.sets[k][0]
    return tuple(sorted(chosen))


def _cp_sat(instance: Instance, alive: Sequence[int], bound: int, expires_at: float) -> Selection:
    """Objective by objective: minimise, fix, go on to the next."""
    if time.monotonic() >= expires_at:
        return _unsolved(instance, bound)
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    use = {k: model.new_bool_var(f"use_{k}") for k in alive}
    covering: list[list] = [[] for _ in range(instance.n_items)]
    for k, x in use.items():
        for i in instance.sets[k]:
            covering[i].append(x)
    for sets in covering:
        # Every item is in exactly one chosen set.
        model.add_exactly_one(sets)
    for combination in instance.forbidden:
        # Not all sets of a forbidden combination are chosen.
        if all(k in use for k in combination):
            model.add_bool_or([use[k].negated() for k in combination])

    best = tuple(instance.hint) if instance.hint is not None and _allowed(instance, instance.hint) else None
    status, is_late, counted_s = "OPTIMAL", False, 0.0
    for j in range(_n_objectives(instance)):
        factor = math.gcd(*(instance.costs[k][j] for k in use)) or 1
        if sum(instance.costs[k][j] // factor for k in use) > _INT64_HEADROOM:
            raise OverflowError("the sum of all costs exceeds 62 bits: give them in a coarser unit")
        terms = [(x, instance.costs[k][j] // factor) for k, x in use.items()]
        expression = cp_model.LinearExpr.weighted_sum([x for x, _ in terms], [c for _, c in terms])
        model.minimize(expression)
        model.clear_hints()
        held = frozenset(best or ())
        for k, x in use.items():
            if best is not None:
                model.add_hint(x, k in held)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # one worker and one seed: the same plan every run
        solver.parameters.random_seed = 0
        # Its handler would take Ctrl-C for a limit of time, return what it has, and remove Python's handler.
        solver.parameters.catch_sigint_signal = False
        solver.parameters.max_deterministic_time = LIMITS.solver_work_s
        remaining_s = expires_at - time.monotonic()  # of 20,000 sets, building the model takes 0.1 s
        if remaining_s <= 0:
            status, is_late = "FEASIBLE", True
            break
        if remaining_s < math.inf:
            # The limit covers presolve: it is the solver's own, and starts with the call
            # (20,000 sets: exceeded by 40 to 60 ms on a busy machine).
            solver.parameters.max_time_in_seconds = remaining_s
        outcome = _solved(solver, model)
        counted_s += _counted_s(solver)
        if outcome == cp_model.MODEL_INVALID:
            raise RuntimeError(f"CP-SAT calls the model invalid: {model.validate() or 'it says no more'}")
        is_early = time.monotonic() < expires_at - _SLACK * remaining_s
        if outcome == cp_model.UNKNOWN and is_early and _counted_s(solver) < _SLACK * LIMITS.solver_work_s:
            raise RuntimeError("CP-SAT gave up long before the deadline, as it does where memory runs out")
        if outcome == cp_model.INFEASIBLE:
            return Selection("INFEASIBLE", (), (), bound, "CP-SAT", counted_us=round(1e6 * counted_s))
        if outcome in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            best = tuple(k for k, x in use.items() if solver.boolean_value(x))
            value = sum(instance.costs[k][j] for k in best) // factor
        if j == 0 and outcome != cp_model.UNKNOWN:
            proven = value if outcome == cp_model.OPTIMAL else math.ceil(solver.best_objective_bound - 1e-6)
            bound = max(bound, proven * factor)
        if outcome != cp_model.OPTIMAL:
            status, is_late = "FEASIBLE", _counted_s(solver) < LIMITS.solver_work_s
            break
        # Later objectives must not worsen this one.
        model.add(expression <= value)
    if best is None:
        return Selection("UNKNOWN", (), (), bound, "CP-SAT", is_late, round(1e6 * counted_s))
    total = _total(instance, best)
    return Selection(status, best, total, bound, "CP-SAT", is_late, round(1e6 * counted_s))


_LOOK_S = 0.2
"""Seconds after which Ctrl-C takes effect on systems that cannot interrupt a wait."""


def _solved(solver: Any, model: Any) -> Any:
    """``solver.solve(model)``. Ctrl-C ends it at once, as the main thread, where Python raises
    ``KeyboardInterrupt``, only waits."""
    if threading.current_thread() is not threading.main_thread():
        return solver.solve(model)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(solver.solve, model)
        try:
            while not running.done():
                wait([running], _LOOK_S)
        finally:
            while not running.done():  # a solver that has not begun yet does not know that it was stopped
                solver.stop_search()
                wait([running], _LOOK_S / 10)
        return running.result()


def _counted_s(solver: Any) -> float:
    """The deterministic time that CP-SAT has spent."""
    return float(solver.response_proto.deterministic_time)


def _allowed(instance: Instance, chosen: Sequence[int]) -> bool:
    return not any(set(combination) <= set(chosen) for combination in instance.forbidden)


def _milliseconds(limit_s: float) -> int:
    """A limit of time as OR-Tools takes it."""
    return max(1, int(1000 * min(limit_s, _MOST_SECONDS)))
