"""Questions of a family: how many, about what, and what changes when their media do."""

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


def test_other_media_have_the_same_shapes_and_places(questions: list[FamilyQuestion]) -> None:
    for question in questions:
        other = question.with_other_media()
        for one, another in zip(question.samples, other.samples, strict=True):
            assert (one.kind, one.shape) == (another.kind, another.shape)
            assert one.data != another.data
        assert texts(question) == texts(other)


def test_exchanged_media_are_the_same_contents_in_other_places(questions: list[FamilyQuestion]) -> None:
    num_exchanged = 0
    for question in questions:
        exchanged = question.with_exchanged_media()
        before, after = question.samples, exchanged.samples
        assert Counter((each.kind, each.seed) for each in before) == Counter(
            (each.kind, each.seed) for each in after
        )
        assert [each.shape for each in before] == [each.shape for each in after]
        num_exchanged += exchanged != question
    assert num_exchanged >= 5


def texts(question: FamilyQuestion) -> list[str]:
    messages = question.body("m")["messages"]
    contents = [message["content"] for message in messages]
    return [part.get("text", part["type"]) for each in contents if isinstance(each, list) for part in each]
