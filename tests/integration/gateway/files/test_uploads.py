"""Uploads: what is refused, how much is kept, and what stays on the disk of those that fail."""

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway.file_samples import (
    BITMAP,
    FILE,
    IMAGE,
    PURPOSE,
    Held,
    multipart,
    post,
    refusal,
    stored,
    upload,
)
from tests.support.gateway.samples import image_bytes
from tests.support.gateway.system import System, another_gateway
from tests.support.waiting import until
from triptych_common.protocol.messages import Modality
from triptych_gateway.files.partial_file import PartialFile
from triptych_gateway.files.uploads import modalities_of

MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + b"\x00" * 100
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + b"\x00" * 100


# ---- what is refused -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_file"),
        (b"hello", "invalid_image"),
        (b"%PDF-1.7 and so on", "invalid_image"),
        (b"#EXTM3U\nhttp://example.org/a.ts", "invalid_image"),
        (IMAGE[:20], "invalid_image"),
    ],
)
async def test_files_that_are_no_media(files: System, content: bytes, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await upload(files, content)
    assert raised.value.code == code
    assert raised.value.param == "file"
    await until(lambda: stored(files) == [])


@pytest.mark.parametrize("files", [{"max_image_pixels": 63}], indirect=True)
async def test_an_image_of_too_many_pixels(files: System) -> None:
    assert refusal(await post(files, multipart(PURPOSE, FILE))) == (413, "image_too_large")


async def test_video_and_audio_are_kept(files: System) -> None:
    for content in (MP4, WAV):
        assert (await upload(files, content, purpose="user_data")).bytes == len(content)


@pytest.mark.parametrize(
    ("head", "kinds"),
    [
        (MP4, (Modality.VIDEO, Modality.AUDIO)),
        (MP4.replace(b"isom", b"M4A ", 1), (Modality.AUDIO, Modality.VIDEO)),
        (WAV, (Modality.AUDIO,)),
        (IMAGE, (Modality.IMAGE,)),
        (b"", (Modality.IMAGE,)),
    ],
)
def test_what_a_file_can_be(head: bytes, kinds: tuple[Modality, ...]) -> None:
    assert modalities_of(head[:64]) == kinds


BAD_FORMS = {  # all others: tests/unit/gateway/files/test_upload_form.py
    "no file": (multipart(PURPOSE), "missing_field"),
    "another purpose": (multipart(('name="purpose"', b"assistants"), FILE), "invalid_value"),
    "no end": (multipart(PURPOSE, FILE, end=False), "invalid_multipart"),
    "two files": (multipart(PURPOSE, FILE, FILE), "invalid_multipart"),
    "seconds alone": (multipart(PURPOSE, ('name="expires_after[seconds]"', b"60"), FILE), "invalid_value"),
}


@pytest.mark.parametrize("name", BAD_FORMS)
async def test_forms_that_are_refused(files: System, name: str) -> None:
    body, code = BAD_FORMS[name]
    assert refusal(await post(files, body)) == (400, code)
    await until(lambda: stored(files) == [])


# ---- bounds --------------------------------------------------------------------------------------
@pytest.mark.parametrize("files", [{"files_max_file_bytes": 1000}], indirect=True)
@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_file_that_is_too_large(files: System, is_announced: bool) -> None:
    """Whatever its length is said to be."""
    body = multipart(PURPOSE, ('name="file"; filename="a"', IMAGE + b"\x00" * 2_000_000))

    async def pieces() -> Any:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    answer = await post(files, body if is_announced else pieces())
    assert refusal(answer) == (413, "file_too_large")
    await until(lambda: stored(files) == [])


@pytest.mark.parametrize("files", [{"files_max_key_files": 2}], indirect=True)
async def test_a_key_has_so_many_files(files: System) -> None:
    first, _ = [await upload(files, image_bytes(number)) for number in range(2)]
    with pytest.raises(openai.PermissionDeniedError) as raised:
        await upload(files, IMAGE)
    assert raised.value.code == "file_quota_exceeded"
    await upload(files, IMAGE, key="key-anna")  # has her own
    await files.openai.with_options(api_key="key-alice").files.delete(first.id)
    await upload(files, IMAGE)


@pytest.mark.parametrize("files", [{"files_max_key_bytes": 2000}], indirect=True)
async def test_a_key_has_so_many_bytes(files: System) -> None:
    """What an upload announces counts from its start."""
    await upload(files, BITMAP)
    with pytest.raises(openai.PermissionDeniedError) as raised:
        await upload(files, BITMAP)
    assert raised.value.code == "file_quota_exceeded"
    await upload(files, BITMAP, key="key-bob")


@pytest.mark.parametrize("files", [{"files_max_files": 1}, {"files_max_bytes": 2000}], indirect=True)
async def test_the_directory_has_bounds_over_all_keys(files: System) -> None:
    await upload(files, BITMAP)
    with pytest.raises(openai.InternalServerError) as raised:
        await upload(files, BITMAP, key="key-bob")
    assert raised.value.status_code == 503
    assert raised.value.code == "files_full"
    assert len(stored(files)) == 2


async def test_uploads_at_once_are_bounded_and_hold_their_room(
    redis_url: str, files: System, tmp_path: Path
) -> None:
    async with (
        another_gateway(files, "gateway-1", files_max_uploads=1) as bounded,
        Held(bounded) as held,
    ):
        assert refusal(await post(bounded, multipart(PURPOSE, FILE))) == (429, "too_many_requests")
        async with another_gateway(files, "gateway-2", files_max_files=1) as other:
            assert refusal(await post(other, multipart(PURPOSE, FILE))) == (503, "files_full")
            held.go.set()
            assert (await held.answer()).status_code == 200
            assert refusal(await post(other, multipart(PURPOSE, FILE))) == (503, "files_full")
    assert len(stored(files)) == 2


async def test_a_client_that_goes_away_leaves_nothing(files: System) -> None:
    async with Held(files):
        assert len(stored(files)) == 1
    await until(lambda: stored(files) == [])
    await until(lambda: not files.gateway.services.access.limiter.num_requests)


@pytest.mark.parametrize("files", [{"body_timeout_s": 0.2}, {"files_upload_timeout_s": 0.2}], indirect=True)
async def test_an_upload_that_stalls_ends(files: System) -> None:
    async with Held(files) as held:
        await until(lambda: stored(files) == [])
        held.go.set()  # the client reads the answer once it has sent all
        assert refusal(await held.answer()) == (408, "body_timeout")


@pytest.mark.parametrize("files", [{"body_timeout_s": 0.2, "files_upload_timeout_s": 0.2}], indirect=True)
async def test_a_slow_disk_is_not_the_clients_fault(files: System, monkeypatch: pytest.MonkeyPatch) -> None:
    write, slow = PartialFile.write, threading.Event()

    def write_slowly(self: PartialFile, data: bytes) -> None:
        slow.wait(0.4)  # longer than a client may take
        write(self, data)

    monkeypatch.setattr(PartialFile, "write", write_slowly)
    assert (await post(files, multipart(PURPOSE, FILE))).status_code == 200


async def test_a_gateway_that_ends_cuts_uploads_off(files: System) -> None:
    async with Held(files) as held:
        files.gateway.services.cut_off.set()
        await until(lambda: stored(files) == [])
        held.go.set()
        assert refusal(await held.answer()) == (503, "draining")
