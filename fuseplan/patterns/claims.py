"""Choose which matches to use where those of one pattern, or of several, overlap."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.frontend.flat_view import FlatView, Insertion
from fuseplan.patterns.matches import Found, Match, Refusal
from fuseplan.patterns.pattern import Pattern
from fuseplan.support.errors import PatternError, Verdict


def claimed(
    found: Sequence[tuple[Pattern, Found]], flat: FlatView, function: str
) -> tuple[list[Match], list[Refusal]]:
    """The matches to use of those of several patterns, highest priority first: the first match of an
    operation counts. A match of several results is passed over where, with those before it, an argument of it
    would be computed from one of them.

    Raises:
        PatternError: two matches of one pattern overlap, so that which one to use is ambiguous.
    """
    used: list[Match] = []
    passed_over: list[Refusal] = []
    owner: dict[int, Match] = {}
    insertions: list[Insertion] = []
    for _, own in found:
        again = _overlapping(own.matches, function)
        for match in own.matches:
            if id(match) in again:
                continue
            place = match.place
            first = next((owner[n] for n in place.equations if n in owner), None)
            if first is not None:
                reason = f"the pattern {first.pattern.name!r} has replaced a part of it"
                passed_over.append(Refusal(match, Verdict("pattern", reason, place.equations)))
                continue
            new = Insertion(place.roots, place.reads)
            if any(len(i.results) > 1 for i in (*insertions, new)) and flat.depends_on_itself(
                [*insertions, new], new
            ):
                reason = "an argument would depend on a result, with the matches before it replaced"
                passed_over.append(Refusal(match, Verdict("pattern", reason, place.equations)))
                continue
            insertions.append(new)
            used.append(match)
            owner.update(dict.fromkeys(place.gone, match))
    return used, passed_over


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
            if other.place.values != place.values:
                first, second = sorted((match, other), key=matches.index)
                raise PatternError(
                    f"the pattern {match.pattern.name!r} overlaps itself in {function}: the match at "
                    f"{first.source or 'an unknown line'} (`{first.equations[-1]}`) and the one at "
                    f"{second.source or 'an unknown line'} (`{second.equations[-1]}`) have an equation in "
                    "common. Refuse one of them with check, or make the pattern larger"
                )
            again.add(id(match if matches.index(other) < matches.index(match) else other))
    return again
