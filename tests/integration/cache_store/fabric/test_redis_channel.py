"""A channel through Redis carries bytes as a socket does, holds little there, and leaves nothing."""

import random
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support.waiting import wait_until
from triptych_cache_store.fabric.wire.channel import ChannelClosedError, ChannelError
from triptych_cache_store.fabric.wire.redis_channel import WINDOW_BYTES, RedisChannel
from triptych_cache_store.fabric.wire.redis_links import RedisLinks
from triptych_common.protocol.names import StreamNames
from triptych_common.redis_client.address import RedisAddress

LIMIT_S = 90.0
NAMES = StreamNames("test")
ONE, OTHER = b"1" * 32, b"2" * 32


@pytest.fixture
def links(redis_url: str) -> RedisLinks:
    return RedisLinks(RedisAddress.parse(redis_url), NAMES, "tester", 2.0)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def ends(links: RedisLinks) -> Iterator[tuple[RedisChannel, RedisChannel]]:
    """Source and target, past their handshake."""
    link_id = secrets.token_hex(16)
    source = links.create(link_id)
    target = links.attach(link_id)
    source.protect(ONE, OTHER)
    target.protect(OTHER, ONE)
    yield source, target
    source.close()
    target.close()


def link_keys(raw: Any) -> list[bytes]:
    return list(raw.scan_iter(NAMES.link("*", "*")))


def send_all(channel: RedisChannel, data: bytes) -> None:
    left = memoryview(data)
    deadline = time.monotonic() + LIMIT_S
    while left:
        assert time.monotonic() < deadline
        num_sent = channel.try_send([left[:16], left[16 : 16 + (1 << 20)]])
        left = left[num_sent:]
        if not num_sent:
            channel.wait(1.0, writable=True)
            assert channel.try_receive(memoryview(bytearray(1))) == 0
    channel.wait(0.0, writable=False)


def receive_all(channel: RedisChannel, num_bytes: int, into: bytearray) -> None:
    deadline = time.monotonic() + LIMIT_S
    chunk = memoryview(bytearray(100_000))
    while len(into) < num_bytes:
        assert time.monotonic() < deadline
        num_read = channel.try_receive(chunk)
        into += chunk[:num_read]
        if not num_read:
            channel.wait(1.0, writable=False)


def in_redis(raw: Any, key: str) -> int:
    return sum(len(fields[b"e"]) for _, fields in raw.xrange(key))


def test_bytes_come_as_they_were_sent(ends: tuple[RedisChannel, RedisChannel]) -> None:
    for sender, receiver in (ends, ends[::-1]):
        data = random.Random(1).randbytes(3 * WINDOW_BYTES + 12_345)
        received = bytearray()
        reading = threading.Thread(target=receive_all, args=(receiver, len(data), received))
        reading.start()
        send_all(sender, data)
        reading.join(LIMIT_S)
        assert received == data


def test_a_peer_that_reads_nothing_bounds_what_is_in_redis(
    ends: tuple[RedisChannel, RedisChannel], raw: Any
) -> None:
    source, target = ends
    chunk = memoryview(bytes(1 << 20))
    num_sent = 0
    for _ in range(100):  # as often as it takes something, and then some
        num_sent += source.try_send([chunk])
        source.wait(0.0, writable=True)
    assert WINDOW_BYTES // 2 < num_sent <= WINDOW_BYTES
    (key,) = [key.decode() for key in link_keys(raw) if key.endswith(b"to-target")]
    wait_until(lambda: in_redis(raw, key) >= num_sent, LIMIT_S, "all that was sent is in Redis")
    assert in_redis(raw, key) <= WINDOW_BYTES
    received = bytearray()
    receive_all(target, num_sent, received)
    target.wait(0.0, writable=False)
    wait_until(lambda: raw.xlen(key) == 0, LIMIT_S, "what was taken is deleted")
    source.wait(LIMIT_S, writable=False)
    assert source.try_receive(memoryview(bytearray(1))) == 0
    assert source.try_send([chunk]) > 0, "it has heard that there is room again"


def test_the_last_bytes_arrive_before_the_end_and_nothing_stays(
    ends: tuple[RedisChannel, RedisChannel], raw: Any
) -> None:
    source, target = ends
    assert source.try_send([memoryview(b"the last word")]) == 13
    source.close()
    received = bytearray()
    receive_all(target, 13, received)
    assert received == b"the last word"
    deadline = time.monotonic() + LIMIT_S
    while not target.wait(1.0, writable=False):  # Redis' reply to what the target has sent wakes it too
        assert time.monotonic() < deadline
    with pytest.raises(ChannelClosedError):
        target.try_receive(memoryview(bytearray(1)))
    target.close()
    assert link_keys(raw) == []


def test_streams_expire_where_both_ends_die(links: RedisLinks, raw: Any) -> None:
    links.create(secrets.token_hex(16))  # and is never heard of again
    ttls = [raw.pttl(key) for key in link_keys(raw)]
    assert len(ttls) == 2
    assert all(0 < ttl <= 12_000 for ttl in ttls)


def test_a_link_that_nobody_made_is_closed(links: RedisLinks) -> None:
    channel = links.attach(secrets.token_hex(16))
    assert channel.wait(LIMIT_S, writable=False)
    with pytest.raises(ChannelClosedError):
        channel.try_receive(memoryview(bytearray(1)))
    channel.close()


def test_a_wait_ends_when_it_is_woken(ends: tuple[RedisChannel, RedisChannel]) -> None:
    source, _ = ends
    source.wake()
    assert source.wait(LIMIT_S, writable=False) is False
    source.close()
    source.wake()


def test_what_a_stranger_adds_ends_the_link(ends: tuple[RedisChannel, RedisChannel], raw: Any) -> None:
    _, target = ends
    (key,) = [key for key in link_keys(raw) if key.endswith(b"to-target")]
    raw.xadd(key, {b"e": bytes(9) + b"a frame" + bytes(32)})
    assert target.wait(LIMIT_S, writable=False)
    with pytest.raises(ChannelError):
        target.try_receive(memoryview(bytearray(1)))


def test_without_a_key_there_is_no_link(links: RedisLinks) -> None:
    channel = links.create(secrets.token_hex(16))
    with pytest.raises(ChannelError):
        channel.protect(b"", b"")
    channel.close()
