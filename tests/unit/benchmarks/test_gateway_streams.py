"""What a client of many streams makes of the bytes that come."""

import time

from gateway_bench.streams import StreamClient


def event(number: int) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%d %d"}}]}\n\n' % (number, time.perf_counter_ns())


async def received(*pieces: bytes) -> StreamClient:
    client = StreamClient()
    for piece in pieces:
        client.on_body(piece)
    return client


async def test_each_token_counts_once_however_its_bytes_come() -> None:
    whole = b"".join(map(event, range(3)))
    for size in (1, 7, 50, len(whole)):
        client = await received(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert (client.num_tokens, client.is_in_order) == (3, True), size
        assert len(client.latency_ms) == 3
        assert all(0 <= each < 10_000 for each in client.latency_ms)


async def test_a_token_that_is_missing_or_comes_twice_is_noticed() -> None:
    for numbers in ((0, 2), (0, 0), (1,), (1, 0)):
        assert not (await received(*map(event, numbers))).is_in_order
