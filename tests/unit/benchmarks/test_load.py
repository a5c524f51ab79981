"""Figures of answers and intervals of ratios: numbers by hand."""

import math

import pytest
from load.client import Answer, Question, _take_line
from load.figures import Objectives, Window, figures, percentile, requests_per_s, tokens_per_s
from load.intervals import median_interval, ratio_interval

LOOSE = Objectives(ttft_ms=1e6, stall_ms=1e6)


def answer(kind: str, start: float, *times: float, error: str = "", end: float | None = None) -> Answer:
    return Answer(
        kind, "", start, end=end if end is not None else (times[-1] if times else start), times=list(times),
        token_ids=list(range(len(times))), error=error,
    )  # fmt: skip


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.0, 1.0), (0.75, 3.0)])
def test_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_figures_of_one_kind() -> None:
    found = figures([answer("image", 1.0, 1.5, 1.6, 1.9)], Window(1.0, 2.0), LOOSE)
    assert found["image.ttft_ms"] == pytest.approx(500)
    assert found["image.stall_ms"] == pytest.approx(300)
    assert found["image.tpot_ms"] == pytest.approx(200)
    assert found["image.e2e_ms"] == pytest.approx(900)
    assert found["image.tokens_per_s"] == pytest.approx(1.5)
    assert found["all.ttft_ms"] == found["image.ttft_ms"]


def test_untimed_answers_count_nowhere() -> None:
    untimed = answer("image", 0.0, 9.0)
    untimed.is_timed = False
    found = figures([untimed, answer("image", 0.0, 1.0)], Window(0.0, 10.0), LOOSE)
    assert found["image.num_requests"] == 1
    assert found["image.ttft_ms"] == pytest.approx(1000)


def test_tokens_behind_the_end_of_the_load_do_not_count() -> None:
    assert tokens_per_s([answer("text", 0.0, 0.5, 1.0, 1.5, 2.5)], Window(0.0, 2.0)) == pytest.approx(1.5)


def test_rate_is_from_the_first_end_to_the_last() -> None:
    answers = [answer("image", 0.0, end) for end in (1.0, 1.5, 2.0, 9.0)]
    assert requests_per_s(answers, Window(0.0, 2.2)) == pytest.approx(2.0)


def test_goodput_leaves_out_what_came_late_or_stalled() -> None:
    answers = [answer("text", 0.0, 0.1, 0.2), answer("text", 0.0, 0.5, 0.6), answer("text", 0.0, 0.1, 0.9)]
    found = figures(answers, Window(0.0, 1.0), Objectives(ttft_ms=200, stall_ms=200))
    assert found["text.goodput_per_s"] == pytest.approx(found["text.requests_per_s"] / 3)


def test_ratio_of_pairs_is_not_moved_by_a_slow_phase() -> None:
    found = ratio_interval([2.0, 20.0, 4.0], [4.0, 40.0, 8.0])
    assert (found.middle, found.low, found.high, found.num_pairs) == (0.5, 0.5, 0.5, 3)


def test_ratio_leaves_out_what_was_not_measured() -> None:
    assert ratio_interval([1.0, math.nan, 0.0], [2.0, 2.0, 0.0]).num_pairs == 1
    assert str(ratio_interval([], [])) == "–"
    with pytest.raises(ValueError, match="longer"):
        ratio_interval([1.0], [1.0, 2.0])


def test_starts_that_differ_widen_the_interval() -> None:
    """Four repeats of each of two starts agree among themselves: one start says nothing of the next."""
    values = [1.0, 1.01, 1.0, 1.01, 1.2, 1.21, 1.2, 1.21]
    found = median_interval(values, num_starts=2)
    assert found.low == pytest.approx(1.0, abs=0.011)
    assert found.high == pytest.approx(1.2, abs=0.011)
    assert median_interval([*values[:4], *values[:4]]).high < 1.02, "one start hides it"
    assert found == median_interval(values, num_starts=2)


def test_lines_of_a_stream_become_tokens() -> None:
    got = Answer("text", "", 0.0)
    lines = [
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n', b"\n",
        b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[7,8]}]}\n', b"data: [DONE]\n",
    ]  # fmt: skip
    for line in lines:
        _take_line(got, line)
    assert got.token_ids == [7, 8]
    assert len(got.times) == 1
    _take_line(got, b'data: {"error":{"message":"gone"}}\n')
    assert "gone" in got.error


def test_questions_fix_the_length_of_their_answers() -> None:
    body = Question("text", [{"role": "user", "content": "a"}], 5).body("model")
    assert body["ignore_eos"]
    assert body["max_tokens"] == 5
