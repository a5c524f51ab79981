"""A file is uploaded once, encoded once, before anybody asks, and named in requests after that."""

import asyncio
from typing import Any

import openai
import pytest

from tests.support.gateway.file_samples import ask, file_part, num_ahead, stored, upload
from tests.support.gateway.local_encode import ANSWER, QUICK, tower, without_encoders
from tests.support.gateway.samples import DIGEST, data_url, image_bytes, image_part
from tests.support.gateway.system import System, another_gateway
from tests.support.waiting import until, until_async
from triptych_common.coordination import SingleFlight
from triptych_common.coordination.single_flight import merge_backlogs
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.files import encode_ahead
from triptych_gateway.files.file_store import FileStore

IMAGE = image_bytes(7)
TEXT = {"type": "text", "text": "what is this?"}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_ahead, "LOOK_AGAIN_S", 0.01)


async def test_one_upload_and_one_encode_over_a_restart(
    files: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_reads = 0
    read = FileStore.read_content

    def counted(self: FileStore, *arguments: Any) -> bytes:
        nonlocal num_reads
        num_reads += 1
        return read(self, *arguments)

    monkeypatch.setattr(FileStore, "read_content", counted)
    async with another_gateway(files, "gateway-1") as first:
        file = await upload(first, IMAGE)
        await until(lambda: files.encoder.num_encodes == 1)  # nobody has asked
        await until(lambda: num_ahead(first, "encoded") == 1)
        assert num_reads == 1  # for the job
        for _ in range(2):
            assert await ask(first, [file_part(file.id), TEXT]) == ANSWER
        await first.assert_idle()
    async with another_gateway(files, "gateway-1") as second:
        assert await ask(second, [file_part(file.id), TEXT]) == ANSWER
        await second.assert_idle()
    assert num_reads == 1
    assert files.encoder.num_encodes == 1
    assert len(files.encoder.jobs) == 1
    assert len(stored(files)) == 2


@pytest.mark.parametrize(
    "part",
    [
        lambda file_id: {"type": "file", "file": {"file_id": file_id}},
        lambda file_id: {"type": "input_file", "file_id": file_id},
        lambda file_id: {"type": "input_image", "file_id": file_id},
        lambda file_id: {"type": "image_url", "image_url": {"file_id": file_id}},
        lambda file_id: {"type": "file", "file": {"file_id": file_id, "file_data": None}},
    ],
)
async def test_every_form_of_a_part_names_the_same_item(files: System, part: Any) -> None:
    await ask(files, [{"type": "image_url", "image_url": {"url": data_url(IMAGE)}}, TEXT])
    file = await upload(files, IMAGE)
    assert await ask(files, [part(file.id), TEXT]) == ANSWER
    by_url, by_file = (body["messages"][0]["content"][0] for body in files.prefill_decode.bodies)
    assert by_url == by_file
    await until(lambda: files.encoder.num_encodes == 1)


async def test_a_file_beside_other_media_in_one_request(files: System) -> None:
    file = await upload(files, IMAGE)
    other = {"type": "image_url", "image_url": {"url": data_url(image_bytes(9, (4, 4)))}}
    same = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}
    answer = await ask(files, [file_part(file.id), other, same, TEXT])
    assert answer == "1x8x8 1x4x4 1x8x8 word0 word1 word2"
    await until(lambda: files.encoder.num_encodes == 2)  # an answer does not wait for its seal here


@pytest.mark.parametrize("files", [{"inline_media_bytes": 0}], indirect=True)
async def test_an_encoder_fetches_a_file_that_is_too_large_for_its_job(files: System) -> None:
    await upload(files, IMAGE)
    await until(lambda: files.encoder.num_encodes == 1)
    assert files.encoder.media == [IMAGE]


@pytest.mark.parametrize("files", [{"files_encode_ahead": False}], indirect=True)
async def test_without_encode_ahead_the_first_request_encodes(files: System) -> None:
    file = await upload(files, IMAGE)
    assert not files.encoder.jobs
    for _ in range(2):
        assert await ask(files, [file_part(file.id), TEXT]) == ANSWER
    await until(lambda: files.encoder.num_encodes == 1)
    assert files.encoder.media == [IMAGE]


async def test_no_file_is_ordered_while_a_request_waits_for_its_item(
    files: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    look = encode_ahead.EncodeAhead._is_idle

    async def noted(self: encode_ahead.EncodeAhead, digest: str) -> bool:
        looks.append(await look(self, digest))
        return looks[-1]

    monkeypatch.setattr(encode_ahead.EncodeAhead, "_is_idle", noted)
    files.encoder.before_seal.clear()
    asked = asyncio.get_running_loop().create_task(ask(files, [image_part(3), TEXT]))
    await until(lambda: len(files.encoder.jobs) == 1)
    for color in (10, 11):
        await upload(files, image_bytes(color))
    await until(lambda: len(looks) > 3)
    assert not any(looks)
    assert len(files.encoder.jobs) == 1
    files.encoder.before_seal.set()
    assert await asked == ANSWER
    await until(lambda: num_ahead(files, "encoded") == 2)
    assert files.encoder.num_encodes == 3


async def test_another_gateways_jobs_go_first_too(files: System) -> None:
    files.encoder.before_start.clear()
    async with another_gateway(files, "gateway-1") as other:
        asked = asyncio.get_running_loop().create_task(ask(other, [image_part(3), TEXT]))
        await until_async(lambda: _num_jobs(files))
        await upload(files, IMAGE)
        assert await _num_jobs(files) == 1
        files.encoder.before_start.set()
        assert await asked == ANSWER
        await until(lambda: num_ahead(files, "encoded") == 1)
    first, second = files.encoder.media
    assert second == IMAGE != first


async def _num_jobs(system: System) -> int:
    return merge_backlogs(await SingleFlight(system.bus).read_backlogs(DIGEST)).num_jobs


async def test_a_request_that_names_a_waiting_file_orders_it_itself(files: System) -> None:
    files.encoder.before_seal.clear()
    first = asyncio.get_running_loop().create_task(ask(files, [image_part(3), TEXT]))
    await until(lambda: len(files.encoder.jobs) == 1)
    file = await upload(files, IMAGE)
    second = asyncio.get_running_loop().create_task(ask(files, [file_part(file.id), TEXT]))
    await until(lambda: len(files.encoder.jobs) == 2)
    files.encoder.before_seal.set()
    assert await asyncio.gather(first, second) == [ANSWER, ANSWER]
    assert num_ahead(files, "left") == 1
    await until(lambda: files.encoder.num_encodes == 2)  # an answer does not wait for its seal here


async def test_a_failed_encode_ahead_is_no_failed_upload(files: System) -> None:
    files.encoder.failures += [FailureKind.ENCODER_ERROR] * 2
    file = await upload(files, IMAGE)
    assert file.status == "processed"
    await until(lambda: num_ahead(files, "failed") == 1)
    assert await ask(files, [file_part(file.id), TEXT]) == ANSWER
    await until(lambda: files.encoder.num_encodes == 1)


@pytest.mark.parametrize("files", [QUICK], indirect=True)
async def test_an_instance_with_a_tower_gets_the_files_bytes(files: System) -> None:
    await without_encoders(files)
    instance = await tower(files)
    file = await upload(files, IMAGE)
    await until(lambda: num_ahead(files, "no_encoder") == 1)
    assert await ask(files, [file_part(file.id), TEXT]) == ANSWER
    (body,) = instance.bodies
    assert body["messages"][0]["content"][0]["image_url"]["url"].endswith(data_url(IMAGE).partition(",")[2])


async def test_a_file_that_is_deleted_is_not_found_by_the_next_request(files: System) -> None:
    file = await upload(files, IMAGE)
    await ask(files, [file_part(file.id), TEXT])
    await files.openai.with_options(api_key="key-alice").files.delete(file.id)
    with pytest.raises(openai.NotFoundError) as raised:
        await ask(files, [file_part(file.id), TEXT])
    assert raised.value.code == "file_not_found"
    assert raised.value.param == "messages[0].content[0].file.file_id"


@pytest.mark.parametrize("key", ["key-anna", "key-bob", "key-carol"])
async def test_another_keys_file_is_not_found(files: System, key: str) -> None:
    """anna is of alice's tenant."""
    file = await upload(files, IMAGE)
    with pytest.raises(openai.NotFoundError) as raised:
        await ask(files, [file_part(file.id), TEXT], key)
    assert raised.value.code == "file_not_found"
    assert not files.prefill_decode.bodies


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "file", "file": {"file_data": data_url(IMAGE)}}, "unsupported_content_part"),
        ({"type": "file", "file": {"file_id": 1}}, "unsupported_content_part"),
        ({"type": "file"}, "unsupported_content_part"),
        ({"type": "input_file", "file_url": "https://example.org/a"}, "unsupported_content_part"),
        ({"type": "input_video", "file_id": "file-1"}, "unsupported_content_part"),
        ({"type": "image_url", "image_url": {"file_id": "x", "url": "y"}}, "unexpected_field"),
        ({"type": "input_image", "file_id": "x", "image_url": "y"}, "unexpected_field"),
        ({"type": "file", "file": {"file_id": "x", "file_data": "y"}}, "unexpected_field"),
        ({"type": "image_url", "image_url": {"file_id": 5}}, "invalid_type"),
    ],
)
async def test_parts_that_are_refused(files: System, part: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(files, [part, TEXT])
    assert raised.value.code == code


async def test_a_part_takes_files_of_its_own_kind(files: System) -> None:
    file = await upload(files, IMAGE)
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(files, [{"type": "video_url", "video_url": {"file_id": file.id}}, TEXT])
    assert raised.value.code == "invalid_file"


@pytest.mark.parametrize("files", [{"files_dir": None}], indirect=True)
async def test_a_gateway_without_a_directory(files: System) -> None:
    for asked in (upload(files, IMAGE), ask(files, [file_part("file-" + "0" * 32), TEXT])):
        with pytest.raises(openai.NotFoundError) as raised:
            await asked
        assert raised.value.code == "files_not_enabled"
