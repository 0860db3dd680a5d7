"""Find all places of a program where a pattern matches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from costmodel.graph import Flops
from fuseplan.frontend.flat_view import Call, ClosedJaxpr, FlatView, Insertion, opened_calls
from fuseplan.frontend.ops import rule_of
from fuseplan.frontend.trace import Literal, closed_jaxpr
from fuseplan.frontend.trace_settings import trace_settings
from fuseplan.patterns.matches import Found, Match, Moves, NearMiss, Place, Refusal, Value
from fuseplan.patterns.pattern import Pattern, asked
from fuseplan.patterns.sides import NONE, Dims, Side, kind_of, optional_factors
from fuseplan.patterns.unify import Bound, Matcher, Miss, State
from fuseplan.support.errors import ExtensionError, FuseplanError, PatternError, Verdict, first_line

MAX_BATCH = 5
"""The most dimensions that ``...`` stands for."""


class _Traced:
    """A pattern's function, traced at some shapes."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.side = Side(FlatView(closed), is_pattern=True)
        flat = self.side.flat
        self.outputs = flat.outputs
        self.roots: list[int] = []
        self.layouts: list[Dims] = []
        """For each result, for each of its dimensions the root's."""
        for v in flat.outputs:
            seen = self.side.view(v)
            if not isinstance(seen.root, int) or seen.root in flat.inputs or seen.root in flat.consts:
                raise ValueError("a result is an argument, or does not depend on any")
            shape = self.side.shape(v)
            if any(d == NONE and n != 1 for d, n in zip(seen.dims, shape, strict=True)):
                raise ValueError("a result is broadcast along a dimension")
            self.roots.append(seen.root)
            self.layouts.append(seen.dims)
        if any(eqn.effects for eqn in flat.equations):
            raise ValueError("it has side effects")
        self.of_arguments = set(flat.inputs)
        """The values that depend on an argument: not those of a mask that is made of indices."""
        for eqn in flat.equations:
            if not self.of_arguments.isdisjoint(v for v in eqn.inputs if not isinstance(v, Literal)):
                self.of_arguments.update(eqn.outputs)

    @property
    def n_equations(self) -> int:
        """The number of equations to match."""
        side = self.side
        return sum(
            any(side.view(v).root == v for v in eqn.outputs) and not eqn.primitive.name.startswith("pattern_")
            for n, eqn in enumerate(side.flat.equations)
            if n in side.flat.needed and eqn.inputs
        )


def _traced(pattern: Pattern, examples: Sequence[Any]) -> _Traced | str:
    """The pattern at these arguments, or why it cannot be traced or looked for there."""
    config = tuple(trace_settings().values())
    key = (config, tuple([(a.shape, str(a.dtype)) for a in examples]))
    known: _Traced | str | None = pattern.traces.get(key)
    if known is None:
        try:
            known = _Traced(closed_jaxpr(pattern.f, tuple(examples), {})[0])
        except (FuseplanError, MemoryError):
            raise
        except Exception as error:
            known = f"{type(error).__name__}: {first_line(error)}"
        pattern.traces.update([(key, known)])
    return known


def forms(pattern: Pattern, ranks: Callable[[_Traced], Collection[int]]) -> Iterator[_Traced]:
    """The pattern at each number of leading dimensions at which it can be traced, and may have a match:
    ``ranks`` has, of a pattern at some number, the numbers of dimensions that its first result may have.

    Raises:
        PatternError: it can be traced at none.
    """
    counts = range(MAX_BATCH + 1) if any(a.is_batched for a in pattern.arguments) else (0,)
    first: int | None = None
    possible: Collection[int] = ()
    told, reason = "", ""
    for n in counts:
        if first is not None and first + n not in possible:
            continue
        examples = pattern.examples(n)
        traced = _traced(pattern, examples)
        if isinstance(traced, str):
            told, reason = ", ".join(f"{a.dtype}{list(a.shape)}" for a in examples), traced
            continue
        if first is None:
            rank = len(traced.side.shape(traced.roots[0]))
            first, possible = rank - n, ranks(traced)
        if len(traced.side.shape(traced.roots[0])) in possible:
            yield traced
    if first is None:
        raise PatternError(
            f"the pattern {pattern.name!r} cannot be looked for: traced at {told or 'no arguments'}, "
            f"{reason}. Give the dimensions of its arguments, as in args=('... t d', '... s d')"
        )


class Search:
    """Looks for patterns in one flat view."""

    def __init__(self, flat: FlatView, device: Any = None, where: str = "", explain: bool = False) -> None:
        self.flat, self.device, self.where = flat, device, where
        self.explain = explain
        """Whether to look for near misses, too."""
        self.side = Side(flat)

    def find(self, pattern: Pattern) -> Found:
        """All matches of a pattern, in the order of the program."""
        found = Found()
        taken: set[int] = set()
        for traced in forms(pattern, lambda t: {len(self.side.shape(v)) for v in self._anchors(t, 0)}):
            matcher = Matcher(traced.side, self.side, strict=False)
            rank = len(traced.side.shape(traced.roots[0]))
            for anchor in self._anchors(traced, 0):
                if anchor in taken or len(self.side.shape(anchor)) != rank:
                    continue
                if self._at(pattern, traced, matcher, anchor, found):
                    taken.add(anchor)
        found.matches = [m for m in found.matches if not _is_within_another(m, found.matches)]
        found.matches.sort(key=lambda m: m.place.equations[-1])
        found.near_misses.sort(key=lambda miss: -miss.n_matched)
        return found

    def _anchors(self, traced: _Traced, k: int) -> list[int]:
        """The values of the program that the same operation makes as the pattern's result ``k``; also what is
        left of that without a multiplication that may be missing."""
        side, root = traced.side, traced.roots[k]
        found: dict[int, None] = {}
        for r in (root, *(side.view(v).root for v, _ in optional_factors(side, root))):
            at = side.equation(r) if isinstance(r, int) else None
            if at is not None:
                every = [self.flat.equations[n].outputs for n in self.side.by_name.get(side.name_of(r), ())]
                found.update(dict.fromkeys(outputs[at[1]] for outputs in every if at[1] < len(outputs)))
        return list(found)

    def _at(self, pattern: Pattern, traced: _Traced, matcher: Matcher, anchor: int, found: Found) -> bool:
        """Add the match at ``anchor``, its refusal, or what differs there."""
        matcher.miss = None
        reason, last, chosen = "", None, None
        for state in self._states(traced, matcher, anchor):
            match = self._confirmed(pattern, state, anchor)
            if not isinstance(match, Match):
                reason, last = (match, state) if not reason else (reason, last)
                continue
            # Of the matches here, which differ in their other results, the first that overlaps none before.
            is_apart = len(traced.roots) == 1 or not any(match.overlaps(m) for m in found.matches)
            chosen = match if is_apart else chosen or match
            if is_apart:
                break
        if chosen is not None:
            verdict = self._refused(chosen)
            if verdict is None:
                found.matches.append(chosen)
            else:
                found.refusals.append(Refusal(chosen, verdict))
            return True
        if not self.explain:
            return False
        if reason and last is not None:
            at = self.flat.producer[anchor][0]
            found.near_misses.append(
                NearMiss(pattern.name, len(last.equations), traced.n_equations, "the pattern at these shapes",
                         reason, self.flat.equations[at].source)
            )  # fmt: skip
            return False
        if matcher.miss is None:
            for _ in matcher.attempts(traced.roots[0], anchor):
                break
        miss: Miss | None = matcher.miss
        if miss is not None and miss.n_matched:
            source = self.flat.equations[self.flat.producer[anchor][0] if miss.at is None else miss.at].source
            found.near_misses.append(
                NearMiss(
                    pattern.name,
                    miss.n_matched,
                    traced.n_equations,
                    miss.expected,
                    miss.found,
                    source,
                    self.flat.producer[anchor][0],
                )
            )
        return False

    def _states(
        self, traced: _Traced, matcher: Matcher, anchor: int, start: State | None = None
    ) -> Iterator[State]:
        """The ways in which all results of a pattern match, the first one at ``anchor``."""

        def rest(k: int, state: State) -> Iterator[State]:
            if k == len(traced.roots):
                yield state
                return
            root = traced.roots[k]
            if root in state.values:
                yield from rest(k + 1, state)
                return
            for value in self._anchors(traced, k):
                for new in matcher.at(root, value, state):
                    yield from rest(k + 1, new)

        for state in matcher.at(traced.roots[0], anchor, start):
            yield from rest(1, state)

    def _confirmed(self, pattern: Pattern, state: State, anchor: int) -> Match | str:
        """The match of the pattern as traced at the shapes that were found, or why there is none."""
        numbers = sorted(state.arguments)
        if len(numbers) < len(pattern.arguments):
            return "an argument of the pattern is not used in it"
        bounds = [state.arguments[v] for v in numbers]
        compact = [self._compact(b) for b in bounds]
        full = [b.extents for b in bounds]
        reason = ""
        for shapes in dict.fromkeys((tuple(compact), tuple(full))):
            disagreement = pattern.disagreement(shapes)
            if disagreement:
                reason = reason or disagreement
                continue
            types = [
                jax.ShapeDtypeStruct(s, self.flat.type_of(b.root).dtype)
                for s, b in zip(shapes, bounds, strict=True)
            ]
            traced = _traced(pattern, types)
            if isinstance(traced, str):
                reason = reason or traced
                continue
            matcher = Matcher(traced.side, self.side, strict=True)
            for new in self._states(traced, matcher, anchor):
                if self._is_bound_alike(new, bounds):
                    match = self._match(pattern, traced, new, shapes, types)
                    if isinstance(match, Match):
                        return match
                    reason = match
            miss = matcher.miss
            if miss is not None:
                reason = reason or f"{miss.found} instead of {miss.expected}"
        return reason or "other numbers or extents"

    def _compact(self, bound: Bound) -> tuple[int, ...]:
        shape = () if isinstance(bound.root, Literal) else self.side.shape(bound.root)
        return tuple([1 if d == NONE else shape[d] for d in bound.dims])

    def _is_bound_alike(self, state: State, bounds: Sequence[Bound]) -> bool:
        new = [state.arguments[v] for v in sorted(state.arguments)]

        def is_same(a: Bound, b: Bound) -> bool:
            if isinstance(a.root, Literal) or isinstance(b.root, Literal):
                return isinstance(a.root, Literal) and isinstance(b.root, Literal)
            return self.flat.numbers[a.root] == self.flat.numbers[b.root] and a.dims == b.dims

        return len(new) == len(bounds) and all(map(is_same, new, bounds))

    def _match(
        self,
        pattern: Pattern,
        traced: _Traced,
        state: State,
        shapes: tuple[tuple[int, ...], ...],
        types: Sequence[jax.ShapeDtypeStruct],
    ) -> Match | str:
        flat, side = self.flat, traced.side
        equations = sorted(set(state.equations.values()))
        made = [state.values[root][0] for root in traced.roots]
        matched = {v for n in equations for v in flat.equations[n].outputs}
        if not matched.issuperset(made):
            return "a result is an argument, without the factors that may be missing"
        moves: list[Moves] = []
        for root, layout in zip(traced.roots, traced.layouts, strict=True):
            value, dims = state.values[root]
            moves.append(self._moves(value, tuple([NONE if d == NONE else dims[d] for d in layout])))
        roots = [chain[-1][0] for chain in moves]
        bounds = tuple([state.arguments[v] for v in sorted(state.arguments)])
        reads = [b.root for b in bounds if not isinstance(b.root, Literal)]
        results = [side.flat.type_of(v) for v in traced.outputs]
        for value, result in zip(made, results, strict=True):
            needed = self._precision(value)
            given = _bits(result.dtype)
            if needed > given:
                return (
                    f"its result {result.str_short()} is narrower than the {needed} bits that are read of "
                    f"{flat.avals[value].str_short()}"
                )
        replaced = dict.fromkeys(roots, reads)
        if len(roots) > 1 and flat.reaches(roots, reads):
            return "an argument depends on a result"
        if any(flat.equations[n].effects for n in equations):
            return "an operation has side effects"
        left = flat.live(replaced)
        removed = flat.needed - left
        calls = opened_calls(flat, [Insertion(tuple(roots), tuple(reads))])
        for n in equations:
            calls.update(flat.call_of[n].around)
        for call in calls:
            if call.has_rules and any(n in left for n in call.within()):
                return (
                    f"it would take apart {call.eqn.primitive.name}, whose own derivative or "
                    "rematerialisation would be lost"
                )
            if call.has_own_derivative and not (pattern.replacement and _is_of_pattern(call, traced, state)):
                return (
                    f"{call.eqn.primitive.name} with a derivative of its own, which would be lost: that "
                    "needs a replacement, and such a function at this place of the pattern"
                )
        inside = {state.values[p][0] for p in traced.of_arguments if p in state.values} - set(made)
        # A value that is computed again elsewhere is one value once the program is compiled.
        computed = {flat.numbers[v] for n in left for v in flat.equations[n].outputs}
        outside = sorted(v for v in inside & matched if flat.numbers[v] in computed)
        n_without_factor = sum(side.flat.producer[root][0] not in state.equations for root in traced.roots)
        named = {name: self._value(v) for name, v in state.named.items()}
        source = flat.equations[flat.producer[roots[-1]][0]].source
        flops = sum(
            (rule_of(flat.equations[n]).flops(flat.equations[n]) for n in equations if n in removed or
             not set(flat.equations[n].outputs).isdisjoint(made)),
            Flops(),
        )  # fmt: skip
        return Match(
            pattern,
            source,
            tuple([str(flat.equations[n]) for n in equations]),
            tuple(types),
            tuple([jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]),
            dict(state.constants),
            named,
            tuple(map(self._value, outside)),
            flops,
            Place(tuple(moves), bounds, shapes, tuple(equations), removed, n_without_factor),
            flat,
            self.device,
            self.where,
        )

    def _moves(self, v: int, layout: Dims) -> Moves:
        """The value, and it after each of the transposes, casts and the like that alone read it, with
        ``layout`` in the dimensions of each: what the replacement begins with in its own order, it need not
        move twice."""
        flat = self.flat
        moves = [(v, layout)]
        while v not in flat.outputs and len(self._readers.get(v, ())) == 1:
            n = self._readers[v][0]
            eqn = flat.equations[n]
            passed = self.side.sources(eqn, casts=True)
            around = flat.call_of[flat.producer[v][0]].around
            enters = any(call.has_rules and call not in around for call in flat.call_of[n].around)
            if passed is None or passed[0] != v or enters or eqn.is_set_apart:
                break
            if eqn.primitive.name == "stop_gradient":
                break
            extents = self.side.shape(eqn.outputs[0])
            if any(d == NONE and n != 1 for d, n in zip(passed[1], extents, strict=True)):
                break
            place = {d: i for i, d in enumerate(passed[1]) if d != NONE}
            v, layout = eqn.outputs[0], tuple([place.get(d, NONE) for d in layout])
            moves.append((v, layout))
        return tuple(moves)

    def _precision(self, v: int) -> int:
        """The bits of the widest floating-point dtype in which a value is read."""
        flat = self.flat
        own = _bits(flat.avals[v].dtype)
        if kind_of(flat.avals[v].dtype) != "float" or v in flat.outputs:
            return own
        bits = 0
        for n in self._readers.get(v, ()):
            eqn = flat.equations[n]
            passed = self.side.sources(eqn, casts=True)
            if passed is None or eqn.inputs[0] != v:
                return own
            bits = max(bits, min(own, self._precision(eqn.outputs[0])))
        return bits

    @functools.cached_property
    def _readers(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for n in self.flat.needed:
            for v in self.flat.equations[n].inputs:
                if not isinstance(v, Literal):
                    found.setdefault(v, []).append(n)
        return found

    def _value(self, v: int) -> Value:
        aval = self.flat.avals[v]
        at = self.flat.producer.get(v)
        eqn = None if at is None else self.flat.equations[at[0]]
        return Value(
            tuple(aval.shape), aval.dtype, "" if eqn is None else eqn.op, "" if eqn is None else eqn.source
        )

    def _refused(self, match: Match) -> Verdict | None:
        """Why the pattern's check refuses a match, or None."""
        check = match.pattern.check
        if check is None:
            return None
        return _verdict(match, asked(match.pattern, "check", check, match))


def _verdict(match: Match, answer: Any) -> Verdict | None:
    """The answer of a check as a verdict."""
    name = match.pattern.name
    nodes = match.place.equations
    if answer is None or answer is True:
        return None
    if answer is False:
        return Verdict("pattern", f"the check of {name} returned False", nodes)
    if isinstance(answer, str):
        return Verdict("pattern", answer, nodes) if answer else None
    if isinstance(answer, Verdict):
        return answer
    raise ExtensionError(
        f"check of the pattern {name!r} should return None or True, or False, a reason or a Verdict, "
        f"got {answer!r}"
    )


def _is_of_pattern(call: Call, traced: _Traced, state: State) -> bool:
    """Whether the pattern has a function with a derivative of its own where the program has ``call``."""
    flat, within = traced.side.flat, set(call.within())
    inside = {m for m, n in state.equations.items() if n in within}
    calls = [c for m in inside for c in flat.call_of[m].around if c.has_own_derivative]
    return any(
        inside <= set(c.within()) and inside >= {m for m in c.within() if m in state.equations} for c in calls
    )


def _is_within_another(match: Match, matches: Sequence[Match]) -> bool:
    """Whether a match leaves out a factor that another one, which it overlaps, has."""
    n = match.place.n_without_factor
    return any(other.place.n_without_factor < n and match.overlaps(other) for other in matches)


def _bits(dtype: Any) -> int:
    return int(jnp.finfo(dtype).bits) if kind_of(dtype) == "float" else 0
