"""vLLM's message queue between EngineCore and its workers, as the plugin has it: readers sleep."""

import concurrent.futures
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from triptych_vllm_connector import plugin

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.distributed.device_communicators import shm_broadcast

SILENCE_S = 0.2
NEVER_MS = 60_000


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A writer, and its only reader."""
    condition = shm_broadcast.SpinCondition
    monkeypatch.setattr(condition, "__init__", condition.__init__)  # both are put back at the end
    monkeypatch.setattr(condition, "wait", condition.wait)
    plugin._stop_spinning()
    writer = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    threads = [threading.Thread(target=each.wait_until_ready) for each in (writer, reader)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield writer, reader
    for queue in (reader, writer):
        queue.shutdown()


def test_a_reader_that_has_just_read_sleeps(queues: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = queues
    num_waits = 0
    wait = shm_broadcast.SpinCondition.wait

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        wait(*args, **kwargs)

    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", counted)
    writer.enqueue("one")
    assert reader.dequeue() == "one"
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=SILENCE_S)
    assert num_waits < 500, "spinning for 10 ms asks thousands of times"


def test_a_message_whose_notification_is_lost_is_read(
    queues: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = queues
    monkeypatch.setattr(shm_broadcast.SpinCondition, "notify", lambda self: None)
    monkeypatch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", NEVER_MS)
    writer.enqueue("before")
    assert reader.dequeue() == "before"
    for number, after_s in enumerate((0.002, 0.02, 0.2)):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            read = pool.submit(reader.dequeue, timeout=30)
            assert not threading.Event().wait(after_s), "the reader sleeps by now"
            writer.enqueue(number)
            assert read.result() == number
