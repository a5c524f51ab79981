"""kill -9 of a prefill_decode at every step of the protocol: another answers, or the stream says its end."""

import pytest
from support.fast.client import Answer
from support.fast.scenario import Action, Point, Scenario, points_of

from triptych_common.protocol.steps import Party

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(Party.PREFILL_DECODE), ids=str)
async def test_another_one_answers(scenario: Scenario, point: Point) -> None:
    case = await scenario.run(point, Party.PREFILL_DECODE, Action.KILL)
    assert all(answer.is_right or _broke_off(answer) for answer in case.answers), case
    assert case.bad_image.code == "invalid_image", case
    assert max(case.tally.num_encodes.values()) <= 2, case.tally
    assert case.tally.beyond_takeovers == {}, case.tally


def _broke_off(answer: Answer) -> bool:
    """After the first token the stream can only say that it ends."""
    return answer.has_begun and answer.code == "stream_interrupted"
