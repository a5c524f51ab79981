"""Bounds of the queue of jobs: each namespace has its own."""

import pytest

from triptych_common.coordination import Backlog
from triptych_common.domain.errors import RequestError
from triptych_gateway.encode.encode_admission import READ_INTERVAL_S, JobQueue

LONG, SLOW, FREE = (digit * 64 for digit in "012")
BACKLOGS = {LONG: Backlog(300, 0.0), SLOW: Backlog(1, 30.0), FREE: Backlog(1, 0.0)}


def try_admit(queue: JobQueue, digest: str) -> str:
    try:
        queue.admit_job(digest)
    except RequestError as error:
        return f"{error.status_code} {error.code}"
    return "admitted"


def test_a_slow_namespace_holds_up_no_other_and_a_long_one_nobody() -> None:
    queue = JobQueue(3, 30.0)
    for digest, backlog in BACKLOGS.items():
        queue.note_backlog(digest, backlog, 0.0)
    assert [try_admit(queue, each) for each in (LONG, SLOW, FREE)] == [
        "admitted",
        "429 encode_queue_slow",
        "admitted",
    ]


def test_what_was_read_lasts_a_moment() -> None:
    queue = JobQueue(3, 30.0)
    assert queue.needs_reading(FREE, 100.0)
    queue.note_backlog(FREE, BACKLOGS[FREE], 100.0)
    assert not queue.needs_reading(FREE, 100.0 + 0.9 * READ_INTERVAL_S)
    assert queue.needs_reading(LONG, 100.0), "of this namespace alone"
    assert queue.needs_reading(FREE, 100.0 + 1.1 * READ_INTERVAL_S)


def test_a_namespace_that_was_never_read_is_not_refused() -> None:
    assert try_admit(JobQueue(2, 30.0), FREE) == "admitted"


def test_a_new_reading_counts_anew() -> None:
    queue = JobQueue(1, 30.0)
    queue.note_backlog(FREE, Backlog(1, 30.0), 0.0)
    assert try_admit(queue, FREE) == "429 encode_queue_slow"
    queue.note_backlog(FREE, Backlog(1, 0.0), 1.0)
    assert try_admit(queue, FREE) == "admitted"


def test_a_flow_answers_for_its_own_orders() -> None:
    queue = JobQueue(10, 30.0)
    held = {"flood": 10}
    assert queue.is_full("flood", held)
    assert not queue.is_full("one", held)
    assert not queue.is_slow(FREE, held, 29.0, 0.0)
    assert queue.is_slow(FREE, held, 30.0, 0.0)


def test_a_wait_for_the_first_encoder_shows_no_slow_queue() -> None:
    queue = JobQueue(10, 30.0)
    queue.note_backlog("a", Backlog(1, 90.0), 0.0)
    assert queue.is_slow("a", {"flow": 1}, 90.0, 0.0)
    assert not queue.is_slow("a", {"flow": 1}, 90.0, 0.0, served_s=5.0)
    assert queue.is_slow("a", {"flow": 1}, 90.0, 0.0, served_s=30.0)
    queue.admit_job("a", served_s=5.0)
    with pytest.raises(RequestError):
        queue.admit_job("a", served_s=30.0)
