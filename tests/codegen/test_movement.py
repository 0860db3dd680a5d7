"""Moves by table: each is exact, and is a kernel wherever it is expected to be."""

from __future__ import annotations

from itertools import groupby

import jax.numpy as jnp
import pytest

from fuseplan.frontend.ops import movement, one_hot_gather, slices
from fuseplan.frontend.trace import trace
from tests.helpers.moves import DEVICES, MOVES, SIZES, Case, covering, is_one_kernel, run

pytestmark = [pytest.mark.one_python, pytest.mark.usefixtures("compiled_quickly")]

COVERING = {move: list(cases) for move, cases in groupby(covering(), lambda case: case.move)}


@pytest.mark.parametrize("move", MOVES)
def test_moves_are_exact(move):
    for case in COVERING[move]:
        run(case)


CASES = (
    # Blocks padded to powers of two were reshaped as if they were not.
    *(
        Case(move, shape, around, backend)
        for move, shape, around in (
            ("reshape reversed", (3, 5), "between"),
            ("reshape reversed", (6, 8, 7), "between"),
            ("reshape reversed", (8, 6, 6), "between"),
            ("reshape reversed", (12, 10), "alone"),
            ("reshape reversed", (3, 1000), "between"),
            ("reshape reversed", (100, 70), "sum of dimension 0"),
            ("reshape nearly square", (3, 5, 7), "between"),
            ("reshape square reversed", (4, 9), "sum of dimension 1"),
        )
        for backend in ("triton", "mosaic_gpu", "mosaic_tpu")
    ),
)
"""What was wrong once."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_was_wrong_once(case):
    outcome = run(case)
    if case.backend == "mosaic_tpu":
        assert outcome.forced, "its blocks are not padded"
    elif case.backend == "triton":
        assert "would move the padding of its block" in outcome.refused


COMPUTES = {"sort", "top_k", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"}
"""Of the same files of rules, and more than moves."""


def test_the_table_has_every_primitive_that_moves():
    found = set()
    for name, move in MOVES.items():
        shapes = [s for several in SIZES.values() for s in several if move.applies(s)]
        for shape in shapes[:1] + shapes[-1:]:
            case = Case(name, shape, "alone", "triton")
            equations = trace(lambda x, case=case: case.f(jnp, x), case.argument()).equations
            found |= {eqn.primitive.name for eqn in equations}
    declared = {*movement.RULES, *slices.RULES, *one_hot_gather.RULES}
    assert declared - found == COMPUTES


NO_KERNEL = {
    "slice nothing",  # an empty array
    "dynamic_slice traced", "dynamic_update_slice literal", "dynamic_update_slice traced",
    "scatter a row",  # an index an element
    "pad negative", "pad negative and positive", "pad interior and negative", "pad interior",  # no windows
    "rev columns", "rev rows", "rev all", "rot90",
}  # fmt: skip
"""What no kernel holds, whatever the backend."""

TABLES = {"gather rows", "diagonal"}

EXCEPT = {
    "triton": TABLES,
    # Neighbours in a vector are not taken apart.
    "mosaic_tpu": {"slice every second", "slice every second from one", "pad interior and edges"} | TABLES,
    "loops": {"dynamic_slice literal", "roll flat", "sum with transpose"},
}
"""What else no kernel of a backend holds."""

IN_ORDER = {
    "reshape reversed", "reshape nearly square", "reshape square reversed", "reshape flat",
    "reshape split major", "reshape merge first", "reshape merge last", "reshape column", "reshape ones",
    "transpose first", "split heads", "merge heads", "broadcast first", "broadcast middle", "broadcast one",
    "expand_dims", "squeeze", "slice front", "tile", "tile columns", "triangle", "iota", "copy",
}  # fmt: skip
"""What threads of Mosaic GPU do, each with its own elements."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", DEVICES)
def test_nothing_else_is_left_to_xla(backend):
    left = {name for name in MOVES if not is_one_kernel(name, backend)}
    if backend == "mosaic_gpu":
        assert MOVES.keys() - left == IN_ORDER
    else:
        assert left == NO_KERNEL | EXCEPT[backend]
