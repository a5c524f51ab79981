"""The stages of the time until the first chunk have no gaps: their sum is the whole."""

import pytest

from triptych_gateway.tracing.timings import FirstTokenStages, Stage


def test_stages_add_up() -> None:
    stages = FirstTokenStages(100.0)
    for stage, now in (
        (Stage.BODY, 100.1),
        (Stage.QUEUE, 100.15),
        (Stage.MEDIA, 100.4),
        (Stage.QUEUE, 100.5),
        (Stage.SIZES, 101.0),
    ):
        stages.end(stage, now)
    assert stages.end_first_chunk(101.5, 102.0) == pytest.approx(2.0)
    spent = stages.as_ms()
    assert spent == {
        Stage.BODY: pytest.approx(100), Stage.QUEUE: pytest.approx(150), Stage.MEDIA: pytest.approx(250),
        Stage.SIZES: pytest.approx(500), Stage.ENCODE: pytest.approx(500), Stage.PREFILL: pytest.approx(500),
    }  # fmt: skip
    assert sum(spent.values()) == pytest.approx(2000)


@pytest.mark.parametrize(
    ("sealed_at", "encode_ms"),
    [(None, None), (1.0, 0.0), (2.5, 500.0), (9.0, 2000.0)],
    ids=["nothing was encoded for it", "before it was sent", "while it waited", "after the first chunk"],
)
def test_the_encode_that_was_waited_for(sealed_at: float | None, encode_ms: float | None) -> None:
    stages = FirstTokenStages(0.0)
    stages.end(Stage.SIZES, 2.0)
    assert stages.end_first_chunk(sealed_at, 4.0) == 4.0
    spent = stages.as_ms()
    assert spent.get(Stage.ENCODE) == encode_ms
    assert sum(spent.values()) == 4000.0


def test_a_clock_that_stands_still_gives_nothing_negative() -> None:
    stages = FirstTokenStages(5.0)
    stages.end(Stage.BODY, 4.0)
    assert stages.end_first_chunk(3.0, 5.0) == 0.0
    assert set(stages.as_ms().values()) == {0.0}
