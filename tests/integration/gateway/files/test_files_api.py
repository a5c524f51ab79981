"""`/v1/files` by the openai client: round trip, bounds, quota, expiry, owners, what stays on the disk."""

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway.file_samples import file_part, stored, upload
from tests.support.gateway.media_samples import image_bytes
from tests.support.gateway.system import System, another_gateway
from tests.support.waiting import until, until_async
from triptych_common.protocol.messages import Modality
from triptych_gateway.files.content_checks import modalities_of

IMAGE = image_bytes(7)
BITMAP = image_bytes(7, image_format="BMP")  # 1142 bytes, and the form's
ALICE = {"Authorization": "Bearer key-alice"}
MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + b"\x00" * 100
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + b"\x00" * 100
BOUNDARY = "b" * 20


def multipart(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """A body of parts: the rest of the disposition, and the content."""
    body = b"".join(
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {rest}\r\n\r\n".encode() + content + b"\r\n"
        for rest, content in parts
    )
    return body + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


PURPOSE = ('name="purpose"', b"vision")
FILE = ('name="file"; filename="a.png"', IMAGE)
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", **ALICE}


async def post(system: System, body: Any, headers: dict[str, str] = FORM) -> httpx.Response:
    return await system.http.post("/v1/files", content=body, headers=headers)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_round_trip(files: System) -> None:
    client = files.openai.with_options(api_key="key-alice")
    created = await upload(files, IMAGE, name="strip 1 ü.png")
    assert (created.object, created.bytes, created.filename) == ("file", len(IMAGE), "strip 1 ü.png")
    assert (created.purpose, created.status) == ("vision", "processed")
    assert created.expires_at is not None
    assert created.expires_at - created.created_at == files.gateway.settings.files_lifetime_s
    assert await client.files.retrieve(created.id) == created
    assert [each async for each in client.files.list()] == [created]
    content = await client.files.content(created.id)
    assert content.read() == IMAGE
    assert content.response.headers["content-disposition"] == "attachment"
    deleted = await client.files.delete(created.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (created.id, True, "file")
    for gone in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError) as raised:
            await gone(created.id)
        assert raised.value.code == "file_not_found"
    assert stored(files) == []


async def test_a_large_file_comes_back_as_it_was(files: System) -> None:
    """It comes in many pieces, and goes in several."""
    picture = bytearray(os.urandom(1500 * 1000))
    large = image_bytes(1, (1500, 1000), "BMP")[: -len(picture)] + bytes(picture)
    created = await upload(files, large)
    content = await files.openai.with_options(api_key="key-alice").files.content(created.id)
    assert content.read() == large


async def test_lists_in_pages(files: System) -> None:
    client = files.openai.with_options(api_key="key-alice")
    made = [await upload(files, image_bytes(number), name=f"{number}.png") for number in range(5)]
    data = await upload(files, image_bytes(9), purpose="user_data")
    ids = [each.id for each in made]
    assert [each.id async for each in client.files.list(purpose="vision", order="asc")] == ids
    assert [each.id async for each in client.files.list(limit=2)] == [data.id, *reversed(ids)]
    page = await client.files.list(limit=2, order="asc", after=ids[1])
    assert [each.id for each in page.data] == ids[2:4]
    assert page.has_more
    assert [each.id async for each in client.files.list(purpose="user_data")] == [data.id]
    with pytest.raises(openai.BadRequestError):
        await client.files.list(after="file-" + "0" * 32)
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"purpose": "assistants"}):
        answer = await files.http.get("/v1/files", params=query, headers=ALICE)
        assert refusal(answer) == (400, "invalid_value")


async def test_another_keys_file_is_not_found_by_any_route(files: System) -> None:
    created = await upload(files, IMAGE)
    for key in ("key-anna", "key-bob", "key-carol"):
        client = files.openai.with_options(api_key=key)
        assert (await client.files.list()).data == []
        for ask in (client.files.retrieve, client.files.delete, client.files.content):
            with pytest.raises(openai.NotFoundError) as raised:
                await ask(created.id)
            assert raised.value.code == "file_not_found"
    assert len(stored(files)) == 2
    for path in ("/v1/files", f"/v1/files/{created.id}", f"/v1/files/{created.id}/content"):
        assert refusal(await files.http.get(path)) == (401, "missing_api_key")
    assert refusal(await files.http.post("/v1/files")) == (401, "missing_api_key")


@pytest.mark.parametrize(
    "files", [{"api_keys": ("key-one", "key-two"), "api_keys_file": None}], indirect=True
)
async def test_keys_without_a_name_have_files_of_their_own(files: System) -> None:
    created = await upload(files, IMAGE, key="key-one")
    assert await files.openai.with_options(api_key="key-one").files.retrieve(created.id) == created
    with pytest.raises(openai.NotFoundError):
        await files.openai.with_options(api_key="key-two").files.retrieve(created.id)


@pytest.mark.parametrize(
    "file_id", ["..%2f..%2flock", "file-..", "%2e%2e", "lock", "file-" + "A" * 32, "%00"]
)
async def test_ids_that_no_file_has(files: System, file_id: str) -> None:
    await upload(files, IMAGE)
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        answer = await files.http.get(path, headers=ALICE)
        assert answer.status_code == 404
    assert (await files.http.delete(f"/v1/files/{file_id}", headers=ALICE)).status_code == 404
    assert len(stored(files)) == 2


async def test_what_is_on_the_disk_is_private(files: System) -> None:
    await upload(files, IMAGE, name="../../etc/passwd")
    root = files.gateway.settings.files_dir
    assert root is not None
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
        assert "passwd" not in path.name
        assert "alice" not in path.name


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


BAD_FORMS = {
    "no purpose": (multipart(FILE), "missing_field"),
    "no file": (multipart(PURPOSE), "missing_field"),
    "another purpose": (multipart(('name="purpose"', b"assistants"), FILE), "invalid_value"),
    "no end": (multipart(PURPOSE, FILE, end=False), "invalid_multipart"),
    "two files": (multipart(PURPOSE, FILE, FILE), "invalid_multipart"),
    "a field twice": (multipart(PURPOSE, PURPOSE, FILE), "invalid_multipart"),
    "many parts": (multipart(*((f'name="x{n}"', b"") for n in range(20)), FILE), "invalid_multipart"),
    "a long field": (multipart(('name="purpose"', b"v" * 2000), FILE), "invalid_multipart"),
    "a long header": (multipart((f'name="{"x" * 9000}"', b""), FILE), "invalid_multipart"),
    "nothing": (b"", "invalid_multipart"),
    "no form": (b"\xff" * 1000, "invalid_multipart"),
    "anchor": (multipart(PURPOSE, ('name="expires_after[anchor]"', b"now"), FILE), "invalid_value"),
    "seconds alone": (multipart(PURPOSE, ('name="expires_after[seconds]"', b"60"), FILE), "invalid_value"),
    "no number": (
        multipart(
            PURPOSE,
            ('name="expires_after[anchor]"', b"created_at"),
            ('name="expires_after[seconds]"', b"1e3"),
            FILE,
        ),
        "invalid_value",
    ),
    "too long": (
        multipart(
            PURPOSE,
            ('name="expires_after[anchor]"', b"created_at"),
            ('name="expires_after[seconds]"', b"99999999"),
            FILE,
        ),
        "invalid_value",
    ),
}


@pytest.mark.parametrize("name", BAD_FORMS)
async def test_forms_that_are_refused(files: System, name: str) -> None:
    body, code = BAD_FORMS[name]
    assert refusal(await post(files, body)) == (400, code)
    await until(lambda: stored(files) == [])


async def test_bodies_that_are_no_form(files: System) -> None:
    for kind in ("application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 300}"):
        answer = await post(files, b"{}", {"Content-Type": kind, **ALICE})
        assert refusal(answer) == (400, "invalid_multipart")


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


class Held:
    """An upload whose body stops in the middle, until `go`."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.go = asyncio.Event()

    async def __aenter__(self) -> "Held":
        self._task = asyncio.get_running_loop().create_task(post(self._system, self._pieces()))
        await until(lambda: any(path.suffix == ".part" for path in stored(self._system)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _pieces(self) -> Any:
        body = multipart(PURPOSE, FILE)
        yield body[:150]
        await self.go.wait()
        yield body[150:]

    async def answer(self) -> httpx.Response:
        return await self._task


async def test_a_client_that_goes_away_leaves_nothing(files: System) -> None:
    async with Held(files):
        assert len(stored(files)) == 1
    await until(lambda: stored(files) == [])
    await until(lambda: not files.gateway.chat.limiter.num_requests)


@pytest.mark.parametrize("files", [{"body_timeout_s": 0.2}, {"files_upload_timeout_s": 0.2}], indirect=True)
async def test_an_upload_that_stalls_ends(files: System) -> None:
    async with Held(files) as held:
        await until(lambda: stored(files) == [])
        held.go.set()  # the client reads the answer once it has sent all
        assert refusal(await held.answer()) == (408, "body_timeout")


async def test_a_gateway_that_ends_cuts_uploads_off(files: System) -> None:
    async with Held(files) as held:
        files.gateway.chat.cut_off.set()
        await until(lambda: stored(files) == [])
        held.go.set()
        assert refusal(await held.answer()) == (503, "draining")


# ---- time, and other gateways --------------------------------------------------------------------
async def test_an_expired_file_is_gone_at_once_and_removed(files: System) -> None:
    client = files.openai.with_options(api_key="key-alice")
    stays = await upload(files, IMAGE)
    short = await upload(files, IMAGE, expires_after={"anchor": "created_at", "seconds": 1})
    assert short.expires_at == short.created_at + 1

    async def is_gone() -> bool:
        return (await files.http.get(f"/v1/files/{short.id}", headers=ALICE)).status_code == 404

    await until_async(is_gone)
    assert [each.id async for each in client.files.list()] == [stays.id]
    await until(lambda: len(stored(files)) == 2)  # by the sweep alone
    answer = await files.post(
        {
            "model": "fake-vl",
            "messages": [{"role": "user", "content": [file_part(short.id)]}],
        },
        headers=ALICE,
    )
    assert refusal(answer) == (404, "file_not_found")


async def test_two_gateways_share_a_directory(files: System) -> None:
    async with another_gateway(files, "gateway-1") as other:
        created = await upload(files, IMAGE)
        client = other.openai.with_options(api_key="key-alice")
        assert await client.files.retrieve(created.id) == created
        assert (await client.files.content(created.id)).read() == IMAGE
        await client.files.delete(created.id)
        with pytest.raises(openai.NotFoundError):
            await files.openai.with_options(api_key="key-alice").files.retrieve(created.id)


async def test_a_start_removes_what_was_left_over_and_leaves_living_uploads_alone(files: System) -> None:
    created = await upload(files, IMAGE)
    root = files.gateway.settings.files_dir
    assert root is not None
    folder = stored(files)[0].parent
    left = [
        folder / f".{'0' * 32}.1000.part",  # of a gateway that died
        folder / f"file-{'0' * 32}.bin",  # it died between two steps
        folder / f".file-{'0' * 32}.tmp",
    ]
    for path in left:
        path.write_bytes(b"x")
    async with Held(files) as held, another_gateway(files, "gateway-1"):
        assert not any(path.exists() for path in left)
        held.go.set()
        assert (await held.answer()).status_code == 200
    client = files.openai.with_options(api_key="key-alice")
    assert created in [each async for each in client.files.list()]


async def test_a_damaged_file_is_not_served_as_it_was(files: System) -> None:
    created = await upload(files, IMAGE, purpose="user_data")
    await until(lambda: files.encoder.num_encodes == 1)
    content, record = stored(files)
    content.write_bytes(IMAGE[:-1])
    answer = await files.http.get(f"/v1/files/{created.id}/content", headers=ALICE)
    assert refusal(answer) == (503, "file_storage_failed")
    record.write_text('{"version": 2}')
    assert (await files.http.get(f"/v1/files/{created.id}", headers=ALICE)).status_code == 404


async def test_a_disk_that_refuses(files: System, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("triptych_gateway.files.partial_file.os.write", refuse)
        assert refusal(await post(files, multipart(PURPOSE, FILE))) == (503, "file_storage_failed")
    await until(lambda: stored(files) == [])
    assert (await post(files, multipart(PURPOSE, FILE))).status_code == 200


async def test_metrics(files: System) -> None:
    await upload(files, IMAGE)
    with pytest.raises(openai.BadRequestError):
        await upload(files, b"x")
    text = (await files.http.get("/metrics")).text
    assert 'triptych_gateway_file_uploads_total{outcome="stored"} 1.0' in text
    assert 'triptych_gateway_file_uploads_total{outcome="refused"} 1.0' in text
    assert "triptych_gateway_files_stored 1.0" in text
    assert f"triptych_gateway_files_stored_bytes {float(len(IMAGE))}" in text
