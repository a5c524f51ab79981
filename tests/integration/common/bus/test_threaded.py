"""The bus inside an engine's process: never blocks, never raises, counts what it drops."""

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import EmbeddedRedis
from tests.support.waiting import wait_until
from triptych_common.bus import AsyncBus, ThreadedBus
from triptych_common.bus.publisher import NewEntry, RefusedEntry
from triptych_common.bus.threaded_bus import MAX_BATCH
from triptych_common.protocol import codec
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeCompleted

STREAM = "triptych:test:metadata:pd-0"
NOWHERE = "unix:///nonexistent/redis.sock"
LIMIT_S = 60.0


def message(number: int) -> EncodeCompleted:
    return EncodeCompleted(job_id=f"job-{number}", mm_hash="ab" * 32, encoder="e", encode_s=0)


def test_published_in_order_from_here_received_in_order_there(redis_url: str, raw: Any) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    sender = ThreadedBus(redis_url, "test", client_name="sender")
    receiver = ThreadedBus(redis_url, "test", client_name="receiver")
    try:
        receiver.subscribe(STREAM, group="owner", consumer="pd-0", callback=received.put)
        total = 3 * MAX_BATCH
        for number in range(total):
            assert sender.publish(STREAM, message(number), traceparent="00-tp", remaining_ms=9000)
        envelopes = [received.get(timeout=LIMIT_S) for _ in range(total)]
        assert [each.message for each in envelopes] == [message(number) for number in range(total)]
        assert envelopes[0].traceparent == "00-tp"
        assert 0 < (envelopes[0].remaining_ms or 0) <= 9000
    finally:
        sender.close()
        receiver.close()
    assert (raw.xlen(STREAM), raw.xpending(STREAM, "owner")["pending"]) == (0, 0)


def test_one_fault_of_the_writer_does_not_end_the_thread(
    redis_url: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would go on, deaf and mute, and only its log would know."""
    publish, faults = AsyncBus.publish_encoded, iter([RuntimeError("a fault of the client's")])

    async def fail_once(self: AsyncBus, entries: Sequence[NewEntry]) -> list[RefusedEntry]:
        if (fault := next(faults, None)) is not None:
            raise fault
        return await publish(self, entries)

    monkeypatch.setattr(AsyncBus, "publish_encoded", fail_once)
    with closing(ThreadedBus(redis_url, "test", client_name="tests")) as bus:
        bus.publish(STREAM, message(1))
        wait_until(lambda: raw.xlen(STREAM) == 1, LIMIT_S, "the message was sent after all")
    assert bus.num_dropped == 0


def test_close_sends_what_is_queued(redis_url: str, raw: Any) -> None:
    bus = ThreadedBus(redis_url, "test", client_name="tests")
    for number in range(500):
        bus.publish(STREAM, message(number))
    bus.close()
    bus.close()
    assert raw.xlen(STREAM) == 500
    assert not bus.publish(STREAM, message(1)), "closed"
    assert bus.num_dropped == 1


def test_full_queue_is_counted_and_never_blocks() -> None:
    bus = ThreadedBus(NOWHERE, "test", client_name="tests", max_queued=5)
    try:
        started = time.monotonic()
        accepted = sum(bus.publish(STREAM, message(number)) for number in range(2 * MAX_BATCH + 100))
        assert time.monotonic() - started < 60
        assert bus.num_dropped == 2 * MAX_BATCH + 100 - accepted > 0
    finally:
        bus.close(flush_s=0)


def test_message_past_its_deadline_is_not_sent() -> None:
    bus = ThreadedBus(NOWHERE, "test", client_name="tests")
    try:
        bus.publish(STREAM, message(1), remaining_ms=50)
        wait_until(lambda: bus.num_dropped > 0, LIMIT_S, "it is dropped")
        assert (bus.num_dropped, bus.num_queued) == (1, 0)
    finally:
        bus.close(flush_s=0)


def test_failing_callback_buries_the_entry_and_goes_on(redis_url: str, raw: Any) -> None:
    received: queue.Queue[Envelope] = queue.Queue()

    def callback(envelope: Envelope) -> None:
        if envelope.message == message(1):
            raise ValueError("bug")
        received.put(envelope)

    with closing(ThreadedBus(redis_url, "test", client_name="tests")) as bus:
        bus.subscribe(STREAM, group="owner", consumer="pd-0", callback=callback)
        bus.publish(STREAM, message(1))
        bus.publish(STREAM, message(2))
        assert received.get(timeout=LIMIT_S).message == message(2)
    ((_, letter),) = raw.xrange("triptych:test:dead-letters")
    assert letter[b"reason"] == b"callback failed: ValueError"


def test_many_threads_may_publish(redis_url: str, raw: Any) -> None:
    bus = ThreadedBus(redis_url, "test", client_name="tests")
    threads = [
        threading.Thread(target=lambda: [bus.publish(STREAM, message(n)) for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.close()
    assert raw.xlen(STREAM) == 800


def test_bad_arguments_raise_at_once(redis_url: str) -> None:
    with pytest.raises(ValueError, match="deployment"):
        ThreadedBus(redis_url, "a:b", client_name="tests")
    with pytest.raises(ValueError, match="must start with"):
        ThreadedBus("http://x", "test", client_name="tests")


def test_messages_too_old_to_matter_are_dropped(
    own_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    with closing(ThreadedBus(own_redis.url, "test", client_name="tests")) as bus:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        own_redis.stop()
        with monkeypatch.context() as patched:
            patched.setattr("triptych_common.bus.threaded_bus.MAX_QUEUED_S", 0.1)
            bus.publish(STREAM, message(1))
        bus.publish(STREAM, message(2))
        wait_until(lambda: bus.num_dropped == 1, LIMIT_S, "the first message is dropped")
        own_redis.start()
        envelope = received.get(timeout=LIMIT_S)
        assert envelope.message == message(2)
        assert envelope.deadline is None  # its receiver has no limit for that


def test_a_reader_that_fails_starts_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    failures = iter([RuntimeError("a fault of ours")])

    def decode(*arguments: Any, **options: Any) -> Envelope:
        for failure in failures:
            raise failure
        return real(*arguments, **options)

    real = codec.decode
    monkeypatch.setattr(codec, "decode", decode)
    with closing(ThreadedBus(redis_url, "test", client_name="tests")) as bus:
        bus.subscribe(STREAM, group="g", consumer="c", callback=received.put)
        for number in (1, 2):
            bus.publish(STREAM, message(number))
        got = [received.get(timeout=LIMIT_S).message for _ in range(2)]
        assert {each.job_id for each in got if isinstance(each, EncodeCompleted)} == {"job-1", "job-2"}


def test_another_redis_is_noticed_by_a_bus_that_only_reads(own_redis: EmbeddedRedis) -> None:
    bus = ThreadedBus(own_redis.url, "test", client_name="tests")
    changed, received = threading.Event(), threading.Event()
    try:
        bus.on_server_changed(changed.set)
        bus.subscribe(STREAM, group="owner", consumer="pd-0", callback=lambda envelope: received.set())
        bus.publish(STREAM, message(1))
        assert received.wait(LIMIT_S)
        assert not changed.is_set()
        own_redis.stop()
        own_redis.start()
        assert changed.wait(LIMIT_S)
    finally:
        bus.close()
