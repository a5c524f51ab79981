"""A file's bytes, when an encode or an instance needs them: deleted meanwhile, too large, or too many."""

import asyncio
from typing import Any

import openai
import pytest

from tests.support.gateway.file_samples import (
    BITMAP,
    FILE,
    PURPOSE,
    ask,
    file_part,
    multipart,
    post,
    refusal,
    upload,
)
from tests.support.gateway.local_encode import ANSWER, tower
from tests.support.gateway.samples import data_url, image_bytes
from tests.support.gateway.system import System, another_gateway
from tests.support.waiting import until
from triptych_gateway.proxy.upstream_body import book_whole

IMAGE = image_bytes(7)
TEXT = {"type": "text", "text": "what is this?"}
BY_TOKEN = {"files_encode_ahead": False, "inline_media_bytes": 0}
LOCAL = {"encode_decision": "local"}
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + b"\x00" * 100


def begin(system: System, content: Any, key: str = "key-alice") -> asyncio.Task[str]:
    return asyncio.get_running_loop().create_task(ask(system, content, key))


@pytest.mark.parametrize("files", [BY_TOKEN], indirect=True)
async def test_a_file_that_is_deleted_before_its_encode_ends_the_request_at_once(files: System) -> None:
    file = await upload(files, IMAGE)
    files.encoder.before_metadata.clear()
    asked = begin(files, [TEXT, file_part(file.id)])
    await until(lambda: len(files.encoder.jobs) == 1)
    await files.openai.with_options(api_key="key-alice").files.delete(file.id)
    files.encoder.before_metadata.set()
    with pytest.raises(openai.NotFoundError) as raised:
        await asked
    assert raised.value.code == "file_not_found"
    assert raised.value.param == "messages[0].content[1].file.file_id"
    assert len(files.encoder.jobs) == 1


@pytest.mark.parametrize("files", [BY_TOKEN], indirect=True)
async def test_another_requests_file_of_the_same_bytes_serves_the_job(files: System) -> None:
    """anna is of alice's tenant, so the item is one."""
    first, second = await upload(files, IMAGE), await upload(files, IMAGE, key="key-anna")
    files.encoder.before_metadata.clear()
    asked = begin(files, [file_part(first.id), TEXT])
    await until(lambda: len(files.encoder.jobs) == 1)
    beside = begin(files, [file_part(second.id), TEXT], "key-anna")
    await until(lambda: any(len(item.request_ids) == 2 for item in files.gateway.orders.table))
    await files.openai.with_options(api_key="key-alice").files.delete(first.id)
    files.encoder.before_metadata.set()
    assert await asyncio.gather(asked, beside) == [ANSWER, ANSWER]


@pytest.mark.parametrize("files", [BY_TOKEN], indirect=True)
async def test_bytes_in_the_same_request_serve_the_job(files: System) -> None:
    file = await upload(files, IMAGE)
    files.encoder.before_metadata.clear()
    asked = begin(
        files, [file_part(file.id), {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}, TEXT]
    )
    await until(lambda: len(files.encoder.jobs) == 1)
    await files.openai.with_options(api_key="key-alice").files.delete(file.id)
    files.encoder.before_metadata.set()
    assert await asked == f"1x8x8 {ANSWER}"


async def test_a_file_is_no_larger_than_an_item_may_be(files: System) -> None:
    file = await upload(files, BITMAP)
    async with another_gateway(files, "gateway-1", max_item_bytes=1000) as strict:
        body = multipart(PURPOSE, (FILE[0], BITMAP))
        assert refusal(await post(strict, body)) == (413, "file_too_large")
        with pytest.raises(openai.APIStatusError) as raised:
            await ask(strict, [TEXT, file_part(file.id)])
    assert (raised.value.status_code, raised.value.code) == (413, "media_too_large")


@pytest.mark.parametrize("files", [LOCAL | {"max_body_bytes": 4000, "max_items": 16}], indirect=True)
async def test_a_file_in_many_places_goes_to_encoders_where_its_text_would_be_too_long(files: System) -> None:
    """1142 bytes are 1524 as base64: twice is fine, three times is too much."""
    instance = await tower(files)
    file = await upload(files, BITMAP)
    assert await ask(files, [file_part(file.id)] * 2 + [TEXT]) == f"1x8x8 {ANSWER}"
    assert (len(instance.bodies), len(files.prefill_decode.bodies)) == (1, 0)
    assert await ask(files, [file_part(file.id)] * 3 + [TEXT]) == f"1x8x8 1x8x8 {ANSWER}"
    assert len(files.encoder.jobs) >= 1
    await until(lambda: files.gateway.services.access.limiter.media_bytes == 0)


@pytest.mark.parametrize("files", [LOCAL | {"max_media_in_flight_bytes": 3000}], indirect=True)
async def test_a_file_for_which_there_is_no_room_goes_to_encoders(
    files: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await tower(files)
    file = await upload(files, BITMAP)
    most = 0

    def noted(items: Any, booking: Any, max_body_bytes: int) -> None:
        nonlocal most
        before = booking.num_bytes
        book_whole(items, booking, max_body_bytes)
        most = booking.num_bytes - before

    monkeypatch.setattr("triptych_gateway.proxy.multimodal_request.book_whole", noted)
    await ask(files, [file_part(file.id)] * 2 + [TEXT])
    assert most == 1142 + 2 * 1524
    assert len(instance.bodies) == 1
    with files.gateway.services.access.limiter.hold_bytes() as other:
        other.resize(1000)
        assert await ask(files, [file_part(file.id), TEXT]) == ANSWER
        assert len(instance.bodies) + len(files.prefill_decode.bodies) == 2
        await until(lambda: files.gateway.services.access.limiter.media_bytes == 1000)
    assert len(files.encoder.jobs) >= 1


async def test_audio_by_the_type_of_its_own_is_audio(files: System) -> None:
    file = await upload(files, WAV)
    part = {"type": "input_audio", "input_audio": {"file_id": file.id, "format": "wav"}}
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(files, [part, TEXT])
    assert raised.value.code == "unsupported_media"  # an image would be of another kind: invalid_file
