"""Make a failing program smaller: fewer results, and fewer steps before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from experiments.fuzz.generate import without_dead
from experiments.fuzz.program import Input, Program
from experiments.fuzz.reference import evaluate


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 60) -> Program:
    """The smallest program that still ``fails``, as found by at most ``tries`` checks."""
    found = True
    while found and tries > 0:
        found = False
        for smaller in _smaller(program):
            tries -= 1
            if fails(smaller):
                program, found = smaller, True
                break
            if tries <= 0:
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs of one step or result less, those that lose most first."""
    for k, result in enumerate(program.results):
        yield from _valid(replace(program, results=(result,)), program)
        if len(program.results) > 1:
            yield from _valid(
                replace(program, results=program.results[:k] + program.results[k + 1 :]), program
            )
    n = len(program.inputs)
    values = evaluate(program, [i.array() for i in program.inputs])
    for k in range(len(program.steps) - 1, -1, -1):
        v = n + k
        alike = [
            a
            for a in range(v)
            if program.dtype_of(a) == program.dtype_of(v) and np.shape(values[a]) == np.shape(values[v])
        ]
        if alike:
            yield from _valid(_with(program, v, alike[0]), program)
    for k in range(len(program.steps) - 1, -1, -1):
        yield from _valid(_given(program, n + k, np.shape(values[n + k])), program)


def _valid(smaller: Program, program: Program) -> Iterator[Program]:
    smaller = without_dead(smaller)
    if smaller.arguments() and len(smaller.steps) + len(smaller.results) < len(program.steps) + len(
        program.results
    ):
        yield smaller


def _with(program: Program, value: int, other: int) -> Program:
    """``other`` in the place of ``value``."""
    steps = tuple(replace(s, args=tuple(other if a == value else a for a in s.args)) for s in program.steps)
    return replace(program, steps=steps, results=tuple(other if r == value else r for r in program.results))


def _given(program: Program, value: int, shape: tuple[int, ...]) -> Program:
    """``value`` becomes an argument."""
    n = len(program.inputs)
    kind = "special" if any(i.kind == "special" for i in program.inputs) else "normal"
    new = Input(program.dtype_of(value), shape, kind, value)

    def moved(v: int) -> int:
        return n if v == value else v + (v >= n)

    steps = tuple(replace(s, args=tuple(map(moved, s.args))) for s in program.steps)
    return replace(
        program, inputs=(*program.inputs, new), steps=steps, results=tuple(map(moved, program.results))
    )
