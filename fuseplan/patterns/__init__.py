"""Patterns: parts of a program that a library's or a user's kernel computes.

In: a traced function and ``Pattern``s. Out: the function with each match replaced by one operation, which a
plan shows as a kernel of its own. ``pattern`` says what a pattern is, ``sides`` and ``unify`` compare
equations, ``matching`` finds ``matches``, ``claims`` chooses among those that overlap, ``replace`` puts
replacements in place, ``choice`` decides by cost, and ``shipped`` has patterns of the kernels that JAX and
others ship.
"""

from __future__ import annotations

from fuseplan.patterns.matches import Match, NearMiss, Refusal, Value
from fuseplan.patterns.pattern import Pattern, constant, name
from fuseplan.patterns.report import MatchReport, match, rewrite
from fuseplan.patterns.shipped import attention, library, ragged_dot, tokamax_attention

__all__ = [
    "Match",
    "MatchReport",
    "NearMiss",
    "Pattern",
    "Refusal",
    "Value",
    "attention",
    "constant",
    "library",
    "match",
    "name",
    "ragged_dot",
    "rewrite",
    "tokamax_attention",
]
