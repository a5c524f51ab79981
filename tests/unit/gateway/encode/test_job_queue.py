"""Bounds of the queue of jobs: each namespace has its own."""

import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.encode import job_queue as module
from triptych_gateway.encode.job_queue import JobQueue

FULL, SLOW, FREE = (digit * 64 for digit in "012")


class Backlogs:
    """`SingleFlight`, of which only the backlog is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def read_backlog(self, namespace_digest: str) -> tuple[int, float]:
        self.asked.append(namespace_digest)
        return {FULL: (3, 0.0), SLOW: (1, 30.0), FREE: (1, 0.0)}[namespace_digest]


async def test_a_full_or_slow_namespace_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_INTERVAL_S", 3600.0)
    backlogs = Backlogs()
    queue = JobQueue(backlogs, 3, 30.0)  # type: ignore[arg-type]
    codes: list[str] = []
    for digest in (FULL, SLOW, FREE, FULL, FREE, FREE):
        try:
            await queue.admit_job(digest)
            codes.append("admitted")
        except RequestError as error:
            codes.append(f"{error.status_code} {error.code}")
    assert codes == [
        "429 encode_queue_full", "429 encode_queue_slow", "admitted", "429 encode_queue_full", "admitted",
        "429 encode_queue_full",  # those admitted since it was read count
    ]  # fmt: skip
    assert backlogs.asked == [FULL, SLOW, FREE]
