"""Choose which matches to use where those of one pattern, or of several, overlap."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fuseplan.frontend.flat_view import FlatView, Insertion
from fuseplan.patterns.matches import Found, Match, Moves, Refusal
from fuseplan.patterns.pattern import Pattern
from fuseplan.support.errors import PatternError, Verdict


def claimed(
    found: Sequence[tuple[Pattern, Found]], flat: FlatView, function: str
) -> tuple[list[Match], list[Refusal]]:
    """The matches to use of those of several patterns, highest priority first: the first match of an
    operation counts. A match of several results is passed over where, with those before it, an argument of it
    would be computed from one of them; and a match whose results nothing needs, with the others replaced.

    Transposes, casts and the like of a result are the match's own up to where another match reads it.

    Raises:
        PatternError: two matches of one pattern overlap, so that which one to use is ambiguous.
    """
    used: list[Match] = []
    passed_over: list[Refusal] = []
    owner: dict[int, Match] = {}
    maker: dict[int, Match] = {}

    def pass_over(match: Match, reason: str) -> None:
        passed_over.append(Refusal(match, Verdict("pattern", reason, match.place.equations)))

    for _, own in found:
        again = _overlapping(own.matches, function)
        for match in own.matches:
            if id(match) in again:
                continue
            place = match.place
            first = next((owner[n] for n in place.equations if n in owner), None)
            first = first or next((maker[v] for v in place.roots if v in maker), None)
            if first is not None:
                pass_over(match, f"the pattern {first.pattern.name!r} has replaced a part of it")
                continue
            if any(len(m.place.roots) > 1 for m in (*used, match)):
                insertions = _insertions(_apart([*used, match]))
                if flat.depends_on_itself(insertions, insertions[-1]):
                    reason = "an argument would depend on a result, with the matches before it replaced"
                    pass_over(match, reason)
                    continue
            used.append(match)
            owner.update(dict.fromkeys(place.gone, match))
            maker.update(dict.fromkeys(place.roots, match))
    are_read = flat.are_read(_insertions(_apart(used)))
    for match, is_read in zip(used, are_read, strict=True):
        if not is_read:
            pass_over(match, "nothing needs its results, with the other matches replaced")
    return _apart([match for match, is_read in zip(used, are_read, strict=True) if is_read]), passed_over


def _insertions(matches: Sequence[Match]) -> list[Insertion]:
    return [Insertion(match.place.roots, match.place.reads) for match in matches]


def _apart(matches: Sequence[Match]) -> list[Match]:
    """The matches with their results as they are where another of them reads them."""
    reads = {v for match in matches for v in match.place.reads}
    return [_moved_up_to(match, reads) for match in matches]


def _moved_up_to(match: Match, values: Collection[int]) -> Match:
    """The match without the moves of its results that come after one of ``values``."""
    place, program = match.place, match.program

    def kept(moves: Moves) -> Moves:
        first = next((k for k, (v, _) in enumerate(moves) if v in values), len(moves) - 1)
        return moves[: first + 1]

    moves = tuple([kept(own) for own in place.moves])
    if moves == place.moves:
        return match
    new = replace(place, moves=moves)
    left = {v for own in place.moves for v, _ in own} - {v for own in moves for v, _ in own}
    removed = place.removed - {program.producer[v][0] for v in left}
    source = program.equations[program.producer[new.roots[-1]][0]].source
    return replace(match, source=source, place=replace(new, removed=removed))


def _overlapping(matches: Sequence[Match], function: str) -> set[int]:
    """The ids of matches that another match of the same values overlaps.

    Raises:
        PatternError: two matches of other values overlap.
    """
    again: set[int] = set()
    remover: dict[int, Match] = {}
    for match in matches:
        for n in match.place.gone:
            remover.setdefault(n, match)
    for match in matches:
        place = match.place
        for n in place.equations:
            other = remover.get(n, match)
            if other is match:
                continue
            if _values(other) != _values(match):
                first, second = sorted((match, other), key=matches.index)
                raise PatternError(
                    f"the pattern {match.pattern.name!r} overlaps itself in {function}: the match at "
                    f"{first.source or 'an unknown line'} (`{first.equations[-1]}`) and the one at "
                    f"{second.source or 'an unknown line'} (`{second.equations[-1]}`) have an equation in "
                    "common. Refuse one of them with check, or make the pattern larger"
                )
            again.add(id(match if matches.index(other) < matches.index(match) else other))
    return again


def _values(match: Match) -> list[int]:
    """Numbers of what the results take the place of, equal for equal expressions."""
    return [match.program.numbers[v] for v in match.place.roots]
