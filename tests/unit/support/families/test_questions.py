"""Questions of a family: how many, and about what."""

from collections import Counter

import pytest

from tests.support.families.questions import (
    MAX_ITEMS,
    NUM_QUESTIONS,
    FamilyQuestion,
    family_questions,
)
from tests.support.families.registry import FAMILIES


@pytest.fixture(params=FAMILIES)
def questions(request: pytest.FixtureRequest) -> list[FamilyQuestion]:
    return family_questions(FAMILIES[request.param])


def test_questions_have_one_to_four_items_of_every_kind_within_the_limits(
    questions: list[FamilyQuestion], request: pytest.FixtureRequest
) -> None:
    limits = FAMILIES[request.node.callspec.params["questions"]].limits
    assert len(questions) == NUM_QUESTIONS
    numbers = Counter(len(question.samples) for question in questions)
    assert set(numbers) == set(range(1, MAX_ITEMS + 1))
    kinds = [Counter(sample.kind for sample in question.samples) for question in questions]
    assert set().union(*kinds) == set(limits)
    assert all(count <= limits[kind] for each in kinds for kind, count in each.items())
    if len(limits) > 1:
        assert any(len(each) > 1 for each in kinds), "no kinds together"
