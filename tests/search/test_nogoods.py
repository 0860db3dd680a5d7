"""Learning a monotone question: every answer right, and few questions asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.search.limits import LIMITS
from fuseplan.search.nogoods import MonotoneRefusals

pytestmark = pytest.mark.one_python

N = 12
sets = st.integers(1, (1 << N) - 1)
several = sets.filter(lambda mask: mask.bit_count() > 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(several, max_size=6),
    st.lists(sets, max_size=60),
    st.sampled_from([0, (1 << N) - 1]),
    st.randoms(),
)
def test_answers_are_those_of_the_question(cores, asked, universe, random):
    def ask(mask):
        inside = [core for core in cores if not core & ~mask]
        # Whatever is suspected, right or wrong, the answers must be right.
        return random.choice([inside[0], mask, 0, random.randrange(1 << N) & mask]) if inside else None

    learner = MonotoneRefusals(ask, universe)
    for mask in asked:
        assert learner.refused(mask) == any(not core & ~mask for core in cores)
    for core in learner.cores:
        assert ask(core) is not None
        assert all(ask(core ^ 1 << i) is None for i in range(N) if core >> i & 1)


def test_few_questions_answer_for_thousands():
    questions = []

    def ask(mask):
        questions.append(mask)
        return mask if mask & 0b11 == 0b11 or mask & 0b1100 == 0b1100 else None

    learner = MonotoneRefusals(ask, (1 << N) - 1)
    refused = [learner.refused(mask) for mask in range(1, 1 << N)]
    assert sum(refused) == sum(m & 3 == 3 or m & 12 == 12 for m in range(1 << N))
    assert len(questions) < 100


def test_a_pair_that_is_suspected_is_learnt_at_once():
    questions = []

    def ask(mask):
        questions.append(mask)
        return 0b1010 if mask & 0b1010 == 0b1010 else None

    learner = MonotoneRefusals(ask, 0)
    assert learner.refused((1 << N) - 1)
    assert learner.cores == [0b1010]
    assert len(questions) == 2


def test_nothing_is_learnt_after_the_deadline_but_a_little():
    n, questions = 2_000, []

    def ask(mask):
        questions.append(mask)
        return mask if mask & mask >> 1 else None

    learner = MonotoneRefusals(ask, (1 << n) - 1, is_late=lambda: True)
    assert not learner.refused(1)
    assert sum(mask.bit_count() for mask in questions) < LIMITS.late_learning_bits + n
    assert [learner.refused(mask) for mask in (0b11, 0b101)] == [True, False]
