"""Notes: facts about a plan that its user should read, as data, and the wording of each kind.

A planner makes notes with ``note(NoteKind.…)`` while nodes still have the numbers of the graph that it plans.
``renumbered`` follows a change of graph, and ``worded`` turns the notes into the text of ``plan.notes`` once
the graph is the plan's own.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from operator import index
from typing import Any, TypeAlias

from costmodel.device import DeviceSpec
from costmodel.graph import Graph
from fuseplan.plan.fusion_plan import FusionPlan
from fuseplan.support.format import bytes_text, time_text
from fuseplan.support.work import Limit, first_reached

_PART = "{count} operations from {node} on"
_UNPROVEN = f"{{limit}} came before the plan of {_PART} was proven"
_SCALAR = "a scalar that ties more than {most} operations together is passed between their kernels: "
_AS_JAX = "a call runs jax.jit's own program: no tiled loop gains here, and XLA groups the rest as it likes"
_WITH_AND_WITHOUT = "the plan takes {with_ps:us} µs with it and {without_ps:us} µs without"
_ASSUMED = "assumed of {device}, not measured or published: {figures}"


class NoteKind(Enum):
    """The kinds of notes. The value is the wording, with the names of a note's figures in braces."""

    # A limit ended a search: {limit} is a ``Limit``, {node} the first operation of a component.
    UNPROVEN = _UNPROVEN
    UNPROVEN_HEURISTIC = _UNPROVEN + ": {planner}'s plan is used there"
    UNPROVEN_PARTIAL = _UNPROVEN + ": {planner}'s plan, which the deadline cut short, is used there"
    OTHERS_UNPROVEN = "{limit} came before the plans of {count} other distinct components were proven"
    SEARCH_CUT = "{limit} came before the search had ended"
    MERGES_CUT = "{limit} came before a heuristic had tried all merges: its plan has the groups made so far"
    REMATERIALISATION_CUT = (
        "{limit} came before plans with rematerialisation were searched: every operation is computed once"
    )
    FEWER_COPIES_CUT = "{limit} came before plans with fewer copies of operations were searched"
    MEMORY_CUT = "{limit} came before all plans within the limit of memory had been tried"
    ORDER_CUT = "{limit} came before the order that needs the least memory was found"
    REWRITES_CUT = "{limit} came before all rewritten programs had been tried"
    PROGRAMS_CUT = "{limit} came before all equivalent programs had been searched"
    DIVISION_CUT = (
        "{limit} came before {count:,} operations were divided into components: they are one kernel, or each "
        "is one"
    )
    DEADLINE_ZERO = "the deadline is 0: this is the better of the heuristic plans"
    NO_TIME_FOR_OFFERS = (
        "a deadline of {deadline_s:g} s leaves no time to look for attention, and for loops of XLA, in "
        "{count:,} operations"
    )
    NO_TIME_TO_REWRITE = "a deadline of {deadline_s:g} s leaves no time to rewrite {count:,} operations"

    COST_MODEL = "priced by the cost model {model}, not by fuseplan's own"

    # The search left something out, or could not use its result.
    SOME_GROUPS = f"{_PART} have more than {{most:,}} legal groups: only some were searched"
    TOO_MANY_COPIES = f"{_PART} have too many legal groups with copies: each is computed once"
    SOLVER_FAILED = "the solver could not be used ({error})"
    CYCLIC = f"all plans found of {_PART} have kernels that wait for each other: a heuristic's plan is used"
    CYCLES_SPLIT = "groups split because their kernels would wait for each other in a cycle: {count}"
    SCALAR_SPLIT = _SCALAR + "plans that fuse across it were not searched, and take at least {least_ps:us} µs"
    PEER = "{planner}'s plan is used: it is faster than the best that the search found"
    PEER_UNCONSTRAINED = "the planner {planner!r} is not asked for a plan to compare: it takes no constraints"
    UNVERIFIABLE = (
        "the graph that was searched cannot be rebuilt from the plan, so its bound cannot be checked: "
        "the plan is not reported as proven"
    )
    BELOW_FLOOR = (
        f"not proven: {_PART} take {{time_ps:us}} µs by the pricing {{pricing}}, less than its floor of "
        "{floor_ps:us} µs (lower its floor, least, floors and partial_floor)"
    )
    NOT_MONOTONE = (
        f"not proven: the pricing {{pricing}} refuses {_PART}, which a kernel holds that its other "
        "answers allow (compatible must refuse every set that holds a refused one)"
    )
    MEMORY_COST = (
        "the limit of {limit_bytes:,} bytes makes the plan {percent:.1f} % slower: the fastest one needs "
        "{fastest_bytes:,} bytes"
    )
    AS_FAST = "{planner}'s plan takes no longer, and by the proof none is faster"
    AS_FAST_REWRITTEN = (
        "{planner}'s plan of the same rewritten program takes no longer, and by the proof none is faster"
    )

    # A planner asked for groups, and got other kernels.
    GROUPS_REFUSED = "{count} of the planner's groups are several kernels here, the first because {reason}"
    GROUPS_UNTIED = (
        "{count} of the planner's groups are several kernels here: no value passes between their parts"
    )
    REPEATS_DROPPED = "{count} operations that several of the planner's groups compute are computed once"
    GUARDS_HOLD = "fused before for other sizes: the guards hold for {sizes}"
    GUARDED = "fused for {sizes}, and for all sizes for which {guards} guards hold"

    FAMILY = (
        "the groups are those of a plan for {planned}, taken over to {here} without a search "
        "(dynamic_shapes=False searches)"
    )

    # The kernels of XLA.
    XLA_NOTHING = "XLA launches nothing"
    XLA_MATCHED = (
        "{matched} of XLA's {count} kernels are matched with operations: they move {percent:.0f} % of the "
        "bytes"
    )
    XLA_UNCHARGED = "no kernel of this plan is charged with what they move, {moved_bytes:bytes}"
    XLA_SERVANTS = (
        "{count} of XLA's kernels, copies and auxiliary steps, are counted with those that they serve"
    )
    XLA_ON_CHIP = (
        "operands and results of {on_chip_bytes:bytes} lie on chip in XLA's program, and cost here what they "
        "would in HBM, as in every plan"
    )

    # Patterns and their replacements (``fuseplan.patterns``).
    PATTERN_USED = "kernels in the place of matches of the pattern {pattern!r}: {count}"
    PATTERN_FASTER = "pattern {pattern!r} is used: " + _WITH_AND_WITHOUT
    PATTERN_SLOWER = "pattern {pattern!r} is not used: " + _WITH_AND_WITHOUT
    PATTERN_REFUSED = "pattern {pattern!r} is not used at {place}: {reason}"
    PATTERN_FAILED = "pattern {pattern!r} is not used at {place}: its replacement failed ({reason})"
    PATTERN_ABSENT = "patterns that match nothing: {patterns}"

    # The user's options, constraints and operations.
    SWITCHED_OFF = "switched off: {features}"
    WITHOUT_RULE = (
        "{operation} has no rule: {count} of them left to XLA as opaque steps "
        "(fuseplan.register_rule declares one)"
    )
    UNCONSTRAINED = "constraints do not hold: the planner {planner!r} takes none"
    MUST_FUSE_IGNORED = "must_fuse does not hold: the planner 'unfused' leaves every operation by itself"
    PEAK_IGNORED = (
        "temporaries occupy {peak_bytes:bytes} at the peak, more than max_peak_bytes allows "
        "({most_bytes:bytes}): the planner 'unfused' does not search for less"
    )

    # The device, its compiler, and the program that a call runs.
    ASSUMED = _ASSUMED
    ASSUMED_CPU = _ASSUMED + " (`fuseplan calibrate` measures this CPU)"
    REFUSED = "the compiler refused the kernel {kernel}: {reason}"
    REFUSED_ON_CHIP = (
        "the compiler refused the kernel {kernel}: it needs {needed_bytes:bytes} on chip, and has "
        "{room_bytes:bytes}"
    )
    REFUSED_LEFT = "{count} refused kernels are left to XLA"
    REPLANNED_APART = "planned anew with the refused operations in separate kernels"
    REPLANNED = "planned anew for {device}"
    RUNS_AS_JAX = _AS_JAX
    RUNS_AS_JAX_BUT_BODIES = _AS_JAX + "; bodies of loops and branches are planned by themselves"
    RUNS_AS_JAX_BUT_ROWS = _AS_JAX + ", but large arrays of short rows are computed column by column"
    RUNS_AS_JAX_BUT_CHAINS = _AS_JAX + ", but independent chains of large arrays run a few at a time"
    RUNS_AS_JAX_BUT_SCANS = _AS_JAX + ", but scans stack nothing that is only reduced"
    ONLY_LOOPS = (
        "made for a call on a CPU: the search covers only components that may have tiled loops, "
        "and proves no bound"
    )
    OTHER_LOOPS = "a call runs other tiled loops than this plan has: its own plan is made without a proof"
    LEFT_BY_HEURISTIC = (
        "a call runs jax.jit's own program: it asks best_first first, by whose plan no tiled loop gains"
    )


FAULTS = frozenset({NoteKind.BELOW_FLOOR, NoteKind.NOT_MONOTONE})
"""A pricing contradicts itself, so that nothing is proven. A planning has one such note."""


@dataclass(frozen=True, slots=True)
class Note:
    """One fact about a plan: its kind, and what the wording of that kind needs."""

    kind: NoteKind
    limit: Limit | None = None
    """What ended a search, of the kinds that say so."""
    node: int | None = None
    """A node of the graph that the note is about."""
    figures: tuple[tuple[str, Any], ...] = ()
    """Names and values: numbers, names and texts."""

    def __post_init__(self) -> None:
        given = {name for name, _ in self.figures}
        given |= {name for name in ("limit", "node") if getattr(self, name) is not None}
        if given != fields_of(self.kind):
            wanted = ", ".join(sorted(fields_of(self.kind)))
            raise ValueError(f"a note {self.kind.name} expects {wanted or 'nothing'}, got {sorted(given)}")

    def text(self, graph: Graph | None = None) -> str:
        """The wording, in which the operation of ``node`` in ``graph`` is named, too."""
        given = dict(self.figures)
        if self.limit is not None:
            given["limit"] = self.limit.value
        if self.node is not None:
            number = f"n{self.node}"
            given["node"] = number if graph is None else f"{graph.nodes[self.node].op} ({number})"
        return _WORDING.vformat(self.kind.value, (), given)

    __str__ = text

    def renumbered(self, number: Callable[[int], int]) -> Note:
        """The note about another graph, in which node ``n`` is ``number(n)``."""
        return self if self.node is None else replace(self, node=number(self.node))

    def to_data(self) -> dict[str, Any]:
        """The note as values of JSON, which ``from_data`` reads."""
        limit = None if self.limit is None else self.limit.name
        return {"kind": self.kind.name, "limit": limit, "node": self.node, "figures": dict(self.figures)}

    @classmethod
    def from_data(cls, data: Any) -> Note:
        """The note that ``to_data`` wrote; ``LookupError``, ``TypeError`` or ``ValueError`` if it is none."""
        limit, node = data["limit"], data["node"]
        node = None if node is None else index(node)
        return note(NoteKind[data["kind"]], limit=limit and Limit[limit], node=node, **data["figures"])


AnyNote: TypeAlias = Note | str
"""A planner that was registered from outside may word its notes itself."""


def note(kind: NoteKind, *, limit: Limit | None = None, node: int | None = None, **figures: Any) -> Note:
    """Make a ``Note``, and check that it has all figures of its kind's wording.

    Raises:
        ValueError: ``figures`` are not those that the wording has.
    """
    return Note(kind, limit, node, tuple(figures.items()))


def renumbered(notes: Iterable[AnyNote], number: Callable[[int], int]) -> tuple[AnyNote, ...]:
    """The notes about another graph, in which node ``n`` is ``number(n)``."""
    return tuple(n if isinstance(n, str) else n.renumbered(number) for n in notes)


def worded(notes: Iterable[AnyNote], graph: Graph) -> tuple[str, ...]:
    """The texts of notes about ``graph``."""
    return tuple(n if isinstance(n, str) else n.text(graph) for n in notes)


def limit_reached(notes: Iterable[AnyNote]) -> Limit | None:
    """The limit that cut short the search that made these notes (of two, the deadline), or None."""
    return first_reached(n.limit for n in notes if isinstance(n, Note))


def assumed_text(device: DeviceSpec) -> str:
    """The note on the figures of a device that are assumed; empty where none is."""
    if not device.assumed:
        return ""
    kind = NoteKind.ASSUMED_CPU if device.platform == "cpu" else NoteKind.ASSUMED
    return str(note(kind, device=device.name, figures=", ".join(device.assumed)))


def all_notes(plan: FusionPlan) -> tuple[str, ...]:
    """The plan's notes, and the one on the figures of its device that are assumed."""
    assumed = assumed_text(plan.device)
    return (*plan.notes, *([assumed] if assumed else []))


@cache
def fields_of(kind: NoteKind) -> frozenset[str]:
    """The names in the wording of a kind."""
    return frozenset(name for _, name, _, _ in _WORDING.parse(kind.value) if name)


class _Wording(string.Formatter):
    """Format text with two more formats: ``bytes``, and ``us`` for picoseconds in microseconds."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "bytes":
            return bytes_text(value)
        return time_text(value / 1e6) if format_spec == "us" else super().format_field(value, format_spec)


_WORDING = _Wording()
