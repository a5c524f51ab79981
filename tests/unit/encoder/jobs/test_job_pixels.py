"""The pixels of images in hand: bounded for large ones, and held by none that waits for its media."""

import asyncio

import pytest

from tests.support.encoder.encoder_bench import HASH, MEDIA, PREPARED_PIXELS, Bench, FakeDelivery, delivery_of
from triptych_common.protocol.messages import FailureKind
from triptych_encoder.encoding import LARGE_PIXELS
from triptych_encoder.jobs import job_leases
from triptych_vllm_connector.step_orders import WriteOrder

OTHER, SMALL = "b" * 64, "c" * 64


def delivery(number: int, mm_hash: str, *, is_inline: bool = True) -> FakeDelivery:
    made = delivery_of(f"job-{number}", f"req-{number}", blob=MEDIA if is_inline else None, mm_hash=mm_hash)
    made.entry_id = f"1-{number}"
    return made


def hold_encodes_of(bench: Bench, *hashes: str) -> asyncio.Event:
    """Until the event is set."""
    may_end, write = asyncio.Event(), bench.engine.on_encode

    async def on_encode(order: WriteOrder) -> None:
        if order.mm_hash in hashes:
            await may_end.wait()
        await write(order)

    bench.engine.on_encode = on_encode
    return may_end


async def settled() -> None:
    """Whatever can be done without the event that is waited for is done."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_job_whose_gateway_hangs_holds_no_pixels(bench: Bench) -> None:
    bench.engine.num_pixels_of = {HASH: PREPARED_PIXELS, OTHER: PREPARED_PIXELS}
    bench.gateway_answers.clear()
    hanging = asyncio.ensure_future(bench.run(delivery(1, HASH, is_inline=False)))
    await settled()
    await bench.run(delivery(2, OTHER))
    assert [order.mm_hash for order in bench.engine.orders] == [OTHER]
    bench.gateway_answers.set()
    await hanging
    assert bench.reporter.kinds[-1] is FailureKind.MEDIA_GONE


async def test_small_images_pass_large_ones_that_wait_for_each_other() -> None:
    bench = Bench(encode_batch=4)
    bench.engine.num_pixels_of = {HASH: PREPARED_PIXELS, OTHER: PREPARED_PIXELS, SMALL: LARGE_PIXELS}
    may_end = hold_encodes_of(bench, HASH)
    first = asyncio.ensure_future(bench.run(delivery(1, HASH)))
    await settled()
    second = asyncio.ensure_future(bench.run(delivery(2, OTHER)))
    third = asyncio.ensure_future(bench.run(delivery(3, SMALL)))
    await settled()
    announced = {each.mm_hash for each in bench.reporter.sent if each.TYPE == "EncoderCacheMetadata"}
    assert announced == {HASH, SMALL}
    may_end.set()
    await asyncio.gather(first, second, third)
    assert bench.reporter.kinds.count("EncodeCompleted") == 3


async def test_an_image_that_its_options_may_enlarge_counts_as_large(bench: Bench) -> None:
    """As the engine counts it: the job names a small image, or none."""
    bench.engine.num_pixels_of = {HASH: LARGE_PIXELS + 1, OTHER: PREPARED_PIXELS}
    may_end = hold_encodes_of(bench, HASH)
    first = asyncio.ensure_future(bench.run(delivery(1, HASH)))
    await settled()
    second = asyncio.ensure_future(bench.run(delivery(2, OTHER)))
    await settled()
    assert {each.mm_hash for each in bench.reporter.sent} == {HASH}
    may_end.set()
    await asyncio.gather(first, second)


async def test_an_image_that_waited_too_long_for_its_pixels_has_expired(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.engine.num_pixels_of = {HASH: PREPARED_PIXELS, OTHER: PREPARED_PIXELS}
    may_end = hold_encodes_of(bench, HASH)
    first = asyncio.ensure_future(bench.run(delivery(1, HASH)))
    await settled()
    second = asyncio.ensure_future(bench.run(delivery(2, OTHER)))
    await settled()
    monkeypatch.setattr(job_leases, "remaining_s", lambda envelope: 0.0)
    may_end.set()
    await asyncio.gather(first, second)
    assert bench.reporter.kinds[-1] is FailureKind.EXPIRED
