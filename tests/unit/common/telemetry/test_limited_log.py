"""Lines that callers cause: a few of each reason, and a count."""

import logging

import pytest

from tests.support.waiting import until
from triptych_common.telemetry.logs import BURST, MAX_REASONS, LimitedLog, get_logger


@pytest.fixture
def limited(caplog: pytest.LogCaptureFixture) -> LimitedLog:
    caplog.set_level(logging.INFO)
    return LimitedLog(get_logger("limited"))


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, list[str], int]]:
    """Return the reports about lines that were left out."""
    fields = [getattr(each, "triptych_fields") for each in caplog.records if "left out" in each.message]  # noqa: B009
    return [(each["of"], each["reason"], each["num_left_out"]) for each in fields]


async def test_of_each_reason_a_few_lines_and_a_count(
    limited: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        limited.info("refused", "invalid_api_key", "")
    limited.info("refused", "missing_api_key", "")
    assert len(caplog.records) == BURST + 1
    limited.end_interval()
    assert told(caplog) == [("refused", ["invalid_api_key", ""], 1000 - BURST)]
    limited.info("refused", "invalid_api_key", "")
    assert caplog.records[-1].message == "refused"


async def test_what_is_not_left_out_is_not_counted(
    limited: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(BURST):
        limited.info("refused", "x")
    limited.end_interval()
    assert told(caplog) == []


async def test_reasons_are_bounded_too(limited: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    num_lines = MAX_REASONS + 1000
    for number in range(num_lines):
        limited.info("refused", f"reason {number}")
    assert len(caplog.records) == MAX_REASONS + BURST
    limited.end_interval()
    assert told(caplog) == [("others", [], num_lines - MAX_REASONS - BURST)]


async def test_the_count_comes_by_itself(
    limited: LimitedLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing more is refused."""
    monkeypatch.setattr("triptych_common.telemetry.logs.INTERVAL_S", 0.0)
    for _ in range(BURST + 1):
        limited.info("refused", "x")
    await until(lambda: told(caplog) == [("refused", ["x"], 1)])
