"""The numeric limits of the search: counts that are the same on every machine.

They decide how far a search looks before it settles for the best plan found, or how much work it does between
two looks at the clock. If one ends a search, a note of the plan says so. Those on copies are part of the
problem, and have no note.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """How far the search looks; ``LIMITS`` has the values in use."""

    max_groups: int = 4_000
    """Groups of a component that are listed at most, where column generation cannot be used or components are
    solved together; also the groups near a bound of which a cover is sought though not all were listed."""
    max_listing_work: int = 30_000
    """Units of work to list the groups of one component. If listing takes more, because many groups do not
    fit on chip, column generation is used instead, which then proves a plan in less work."""
    max_listing_work_without_bounds: int = 2_000_000
    """As ``max_listing_work``, where column generation cannot be used: in a component that is too large for
    it, or whose masks may leave tiles out, so that no part of a group bounds its time."""
    max_column_work: int = 8_000_000
    """Units of work of column generation in one component. The limit of all searches (``support.work``) is
    lower, unless the deadline is longer than the default."""
    min_proof_work: int = 2_000_000
    """Units of work that one step of a proof by column generation may take, at least: to look for groups that
    cost less than their members, to close a gap of half a percent, to list the groups near the bound. Else as
    many as it took to come there."""
    max_column_work_with_copies: int = 5_000_000
    """As ``max_column_work``, in a component with copies. Where that neither proves a plan nor finds one
    faster than without copies, no operation of the component is computed twice."""
    max_case_work: int = 500_000
    """Units of work to prove one case of branch and price, after which it is divided."""
    max_growth_work: int = 1_000_000
    """Units of work for the groups that are found by growing others, between two solutions of the linear
    program."""
    max_dive_work: int = 1_000_000
    """Units of work for a partition near a solution of the linear program; also of all column generation
    where only a plan to start from is sought."""
    max_dense_positions: int = 1_500
    """Positions of a component that column generation is tried on: its tables grow with their square."""
    max_new_columns: int = 60
    """Groups after which a branch and bound ends, to solve the linear program again."""
    slack: float = 0.005
    """Column generation first ends where no group saves more than this part of its members' prices. That
    takes far fewer rounds than to end where none saves anything. Also the gap above which windows are tried,
    and the tolerance in favour of a proven plan with fewer copies."""
    max_near_groups: int = 32_000
    """The most groups near the bound that column generation lists, by lower bounds of their times."""
    room_divisors: tuple[int, ...] = (16, 4, 1)
    """Column generation lists the groups that may cost up to these parts of the gap more than their members,
    one part after the other: a better plan among them closes the gap before the whole of it is looked at."""
    max_cuts: int = 20
    """Cycles that are forbidden before groups that wait for each other are taken apart. No graph of the tests
    needs more than 3."""

    steps_per_clock_look: int = 16
    """Steps of the enumeration between two looks at the clock: one may schedule a group, up to 1 ms."""
    large_group: int = 100
    """Positions of a group from which on each step of the enumeration looks at the clock."""
    capacity_checks: int = 32
    """Groups near the capacity of the chip that are checked, and one in so many after that. A check takes as
    long as enumerating ten groups; 4 smallest sets are behind all 959 misfits of a LayerNorm's gradient."""
    capacity_misses: int = 4
    """Partial groups of a batch that fit, one after the other, after which no others are checked."""
    max_learnt_sets: int = 256
    """Refused and allowed sets that are remembered: to look through more takes longer than to ask."""
    max_learning_bits: int = 1 << 18
    """Bits of all sets asked about in order to learn nogoods of one kind in a component; a question takes
    some units of work for each of its bits."""
    max_learning_bits_with_copies: int = 1 << 16
    """As ``max_learning_bits``, in a component with copies."""
    max_large_learning_bits: int = 1 << 15
    """Positions of all large sets asked about in order to learn, some tenths of a second of work."""
    large_learnt_set: int = 256
    """Positions of a set from which on a question about it counts towards ``max_large_learning_bits``."""
    late_learning_bits: int = 1 << 14
    """Positions of all sets that may be asked about in order to learn after the deadline, a twentieth of a
    second of work: one question about all 10,000 operations of a chain answers all others."""

    max_looked: int = 20_000
    """Operations in the groups that a heuristic looks at before it merges in rounds: half a second of work.
    Components of two hundred operations need up to 8,000."""
    max_looked_in_rounds: int = 100_000
    """Operations in the groups that a heuristic looks at before it ends: some seconds of work."""
    max_tried_neighbours: int = 4
    """Neighbours, the smallest first, with which a round prices each group."""
    large_component: int = 1_000
    """Operations of a component that is left unmerged, or one kernel, where the deadline has passed."""

    window_shapes: tuple[tuple[int, float], ...] = ((12, 0.0), (8, 0.5))
    """Windows of the neighbourhood search in turns: the operations freed, and the probability with which a
    window grows to another reader of an array rather than to a reader or producer."""
    max_groups_of_window: int = 1_000
    """Candidate groups of one window."""
    max_idle_windows: int = 12
    """Windows in a row without gain after which the neighbourhood search ends."""
    window_gap_divisor: int = 1_000
    """The neighbourhood search ends within this part of the bound."""

    priced_at_once: int = 16
    """Groups that are priced at least between two relaxations: to schedule one takes half a millisecond, to
    solve the relaxation of a large component three."""
    columns_per_priced: int = 100
    """One more group is priced between two relaxations for so many columns."""
    max_states: int = 50_000
    """Partial covers of the dynamic programme: a tenth of a second, as long as CP-SAT takes to load."""
    states_per_clock_look: int = 16
    """Partial covers between two looks at the clock: each may be extended by thousands of sets."""
    max_entering: int = 200
    """Sets that enter the relaxation at a time."""
    solver_work_s: float = 5.0
    """Deterministic time of CP-SAT and of GLOP, about seconds of an idle core, after which they end."""

    max_copies: int = 4
    """Readers for which an operation is copied at most: groups of copies are subsets of them."""
    launch_divisor: int = 10
    """Values are copied that take at least this part of a launch to read."""
    max_feed_ratio: int = 2
    """The values that copies read may be so many times as large as what they make: a copy saves its reader a
    read, and the last one also the write."""
    max_copied_terms: int = 32
    """Terms that each element of a reduction that is copied may have. On a GPU, to add up so many takes about
    as long as to read the sum from memory."""
    max_sources: int = 16
    """Arrays from which a copied operation is computed at most."""
    max_partial_copies: int = 2
    """Copies of an operation of which some may serve readers elsewhere while others do not."""
    untried_copies: int = 6
    """Operations that are copied without a trial. A GPT-2 block has 5, and its best plan on a GPU computes
    one again that no trial of single moves finds."""


LIMITS = SearchLimits()
