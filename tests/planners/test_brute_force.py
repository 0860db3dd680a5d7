"""The solver against brute force on random graphs, a sample of ``experiments.brute_force``."""

import pytest

from experiments import brute_force as experiment
from fuseplan import planners
from fuseplan.planners import get_planner
from tests.helpers.brute_force import compare, random_case

pytestmark = pytest.mark.one_python

SEEDS = range(100_000, 100_120)


@pytest.mark.parametrize("first", SEEDS[::30])
def test_the_solver_finds_the_best_of_all_plans(first):
    found = [compare(random_case(seed)) for seed in range(first, first + 30)]
    assert not [text for comparison in found for text in comparison.wrong]
    assert any(comparison.copies == "compared" for comparison in found)


PRICED_BY_STRUCTURE = (2_894, 4_462)
"""Seeds of graphs in which a group is offered as a loop of XLA, and one of equal structure is not."""

MERGED_BY_OPERANDS = 10_219
"""The seed of a graph in which two loops have no more in common than the operand of a contraction."""

OFFERED_WITHOUT_PAIRS = (302_126, 100_066)
"""Seeds of graphs with an offered loop of readers of one array that no tiled kernel may hold in pairs; in the
second, nothing else connects them."""


@pytest.mark.parametrize("seed", [*PRICED_BY_STRUCTURE, MERGED_BY_OPERANDS, *OFFERED_WITHOUT_PAIRS])
def test_loops_of_xla_are_priced_and_joined_as_by_brute_force(seed):
    assert not compare(random_case(seed)).wrong


def test_a_plan_that_is_not_the_best_is_found(capsys):
    planners.register_planner("solver", get_planner("greedy"))
    assert experiment.main(["--graphs", "12"]) == 1
    told = capsys.readouterr().out
    assert "the bound is None" in told
    assert "of which" not in told
