"""What a gateway learns of encoders, and of the rows of images."""

import pytest

from triptych_gateway.decision.serving_costs import ServingCosts


def test_encodes_that_ran_together_count_as_the_encoders_time() -> None:
    """Four items in one step are reported at its end, each with the step's seconds."""
    costs = ServingCosts()
    now = 0.0
    for _ in range(10):
        now += 5.0
        for _ in range(4):
            costs.on_completed("encoder-0", 100, 4.0, now)
    line = costs.costs(now).encode
    assert line is not None
    assert line.seconds(100) == pytest.approx(1.0, rel=0.15)


def test_encoders_have_times_of_their_own() -> None:
    costs = ServingCosts()
    for step in range(1, 11):
        for encoder in ("encoder-0", "encoder-1"):
            costs.on_completed(encoder, 100, 1.0, step * 1.0)
    line = costs.costs(10.0).encode
    assert line is not None
    assert line.seconds(100) == pytest.approx(1.0)


@pytest.mark.parametrize("encode_s", [float("inf"), float("nan"), -1.0])
def test_what_no_encode_takes_is_ignored(encode_s: float) -> None:
    costs = ServingCosts()
    for step in range(10):
        costs.on_completed("encoder-0", 100, encode_s, float(step))
    line = costs.costs(9.0).encode
    assert line is None or line.seconds(100) == 0.0


def test_rows_follow_the_pixels() -> None:
    costs = ServingCosts()
    assert costs.rows_of(448 * 448) == 0.0
    for _ in range(5):
        costs.on_sizes(448 * 448, 256)
    assert costs.rows_of(448 * 448) == 256
    assert costs.rows_of(896 * 896) == pytest.approx(1024)
    costs.on_sizes(896 * 896, 1000)  # the model's own bound
    assert costs.rows_of(900 * 900) == 1000
    assert sum(map(costs.rows_of, [448 * 448, 900 * 900])) == pytest.approx(1256)


def test_encode_and_handover_are_learned_of_items_that_had_the_encoders_alone() -> None:
    costs = ServingCosts()
    for step in range(10):
        ordered_at = 10.0 * step
        costs.on_completed("encoder-0", 100, 2.0, ordered_at + 5.0, ordered_at)
        costs.on_completed("encoder-1", 100, 9.0, ordered_at + 9.0, ordered_at)  # not alone
        costs.on_completed("encoder-0", 100, 9.0, ordered_at + 9.5)  # another is in flight
    found = costs.costs(100.0)
    assert found.encode_alone is not None
    assert found.handover is not None
    assert found.encode_alone.seconds(100) == pytest.approx(2.0)
    assert found.handover.seconds(100) == pytest.approx(3.0)
