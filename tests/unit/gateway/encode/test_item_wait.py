"""ItemWait: which failures count, until when, and what the caller gets."""

import asyncio
import time

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import FailureKind, Modality
from triptych_gateway.encode.item_table import ItemFailure
from triptych_gateway.encode.item_wait import RENEWED_WAIT_S, ItemWait, error_for
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.media import TakenItem

A, B = MmHash("a" * 64), MmHash("b" * 64)
BROKEN = ItemFailure(FailureKind.ENCODER_ERROR, "x")


def item_wait() -> ItemWait:
    items = [
        TakenItem(
            MediaPart(index, ("messages", 0, "content", index), Modality.IMAGE, "", f"part {index}"),
            mm_hash,
            b"x",
            ImageHeader("PNG", 1, 1),
            {},
            {},
        )
        for index, mm_hash in enumerate((A, B))
    ]
    return ItemWait(RequestId("r"), "pd-0", items, 0.0, None, "d" * 64)


async def raises_now(waiting: ItemWait) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await waiting.wait_failure()
    except TimeoutError:
        return False
    except RequestError:
        return True
    return False


async def test_a_failure_before_the_first_chunk_counts() -> None:
    waiting = item_wait()
    waiting.on_failed(B, BROKEN)
    with pytest.raises(RequestError) as caught:
        await waiting.wait_failure()
    assert caught.value.param == "part 1"


async def test_from_the_first_chunk_on_it_does_not() -> None:
    waiting = item_wait()
    waiting.on_answer_began()
    waiting.on_failed(A, BROKEN)
    waiting.raise_failure()  # there is none
    assert not await raises_now(waiting)


async def test_a_failure_in_the_moment_of_the_first_chunk_does_not_end_the_watch() -> None:
    waiting = item_wait()
    async with asyncio.TaskGroup() as group:
        guard = group.create_task(waiting.wait_failure())
        await asyncio.sleep(0)
        waiting.on_failed(A, BROKEN)
        waiting.on_answer_began()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not guard.done()
        guard.cancel()


async def test_what_is_needed_again_counts_again() -> None:
    waiting = item_wait()
    waiting.on_answer_began()
    waiting.on_needed_again(A)
    assert waiting.deadline > 0.0
    waiting.on_failed(B, BROKEN)
    waiting.raise_failure()  # there is none
    waiting.on_failed(A, BROKEN)
    assert await raises_now(waiting)


async def test_an_item_that_is_still_needed_is_waited_for_longer_too() -> None:
    """A whole answer does not show its first token."""
    waiting = item_wait()
    before = time.monotonic()
    waiting.on_needed_again(A)
    assert waiting.needed_at >= before
    assert waiting.deadline >= before + RENEWED_WAIT_S


async def test_the_answer_of_a_failure_goes_before_its_kind() -> None:
    waiting = item_wait()
    waiting.on_failed(A, ItemFailure(None, "x", RequestError(429, "encode_queue_full", "full")))
    with pytest.raises(RequestError) as caught:
        waiting.raise_failure()
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (
        429,
        "encode_queue_full",
        "part 0",
    )


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.BAD_MEDIA, 400, "invalid_image"),
        (FailureKind.TOO_LARGE, 413, "image_too_large"),
        (FailureKind.MEDIA_GONE, 503, "encode_failed"),
        (FailureKind.STORE_FULL, 503, "store_full"),
        (FailureKind.ENCODER_ERROR, 503, "encode_failed"),
        (FailureKind.EXPIRED, 503, "deadline_exceeded"),
        (FailureKind.DEAD_LETTER, 503, "encode_failed"),
        (None, 503, "bus_unavailable"),
    ],
)
def test_item_failures(kind: FailureKind | None, status: int, code: str) -> None:
    error = error_for(ItemFailure(kind, "detail"), "messages[0].content[1].image_url.url", Modality.IMAGE)
    assert (error.status_code, error.code) == (status, code)
    assert error.param == "messages[0].content[1].image_url.url"


async def test_all_items_must_be_sealed() -> None:
    waiting = item_wait()
    async with asyncio.TaskGroup() as group:
        sealed = group.create_task(waiting.wait_sealed())
        for mm_hash in (A, A):
            waiting.on_sealed(mm_hash)
            await asyncio.sleep(0)
            assert not sealed.done()
        waiting.on_sealed(B)
