"""Bounds of the queue of jobs: each namespace has its own."""

from triptych_common.coordination import Backlog
from triptych_common.domain.errors import RequestError
from triptych_gateway.encode.job_queue import READ_INTERVAL_S, JobQueue

FULL, SLOW, FREE = (digit * 64 for digit in "012")
BACKLOGS = {FULL: Backlog(3, 0.0), SLOW: Backlog(1, 30.0), FREE: Backlog(1, 0.0)}


def try_admit(queue: JobQueue, digest: str) -> str:
    try:
        queue.admit_job(digest)
    except RequestError as error:
        return f"{error.status_code} {error.code}"
    return "admitted"


def test_a_full_or_slow_namespace_holds_up_no_other() -> None:
    queue = JobQueue(3, 30.0)
    for digest, backlog in BACKLOGS.items():
        queue.note_backlog(digest, backlog, 0.0)
    assert [try_admit(queue, each) for each in (FULL, SLOW, FREE, FULL, FREE, FREE)] == [
        "429 encode_queue_full", "429 encode_queue_slow", "admitted", "429 encode_queue_full", "admitted",
        "429 encode_queue_full",  # those admitted since it was read count
    ]  # fmt: skip


def test_what_was_read_lasts_a_moment() -> None:
    queue = JobQueue(3, 30.0)
    assert queue.needs_reading(FREE, 100.0)
    queue.note_backlog(FREE, BACKLOGS[FREE], 100.0)
    assert not queue.needs_reading(FREE, 100.0 + 0.9 * READ_INTERVAL_S)
    assert queue.needs_reading(FULL, 100.0), "of this namespace alone"
    assert queue.needs_reading(FREE, 100.0 + 1.1 * READ_INTERVAL_S)


def test_a_namespace_that_was_never_read_is_counted_from_nothing() -> None:
    queue = JobQueue(2, 30.0)
    assert [try_admit(queue, FREE) for _ in range(3)] == ["admitted", "admitted", "429 encode_queue_full"]


def test_a_new_reading_counts_anew() -> None:
    queue = JobQueue(1, 30.0)
    assert [try_admit(queue, FREE) for _ in range(2)] == ["admitted", "429 encode_queue_full"]
    queue.note_backlog(FREE, Backlog(0, 0.0), 1.0)
    assert try_admit(queue, FREE) == "admitted"
