"""`/v1/files` by the openai client: round trip, lists, owners, expiry, several gateways."""

import os
import stat

import openai
import pytest

from tests.support.gateway.file_samples import (
    ALICE,
    FILE,
    IMAGE,
    PURPOSE,
    Held,
    file_part,
    multipart,
    post,
    refusal,
    stored,
    upload,
)
from tests.support.gateway.samples import image_bytes
from tests.support.gateway.system import System, another_gateway
from tests.support.waiting import until, until_async


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
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"purpose": "assistants"}, {"after": "x"}):
        answer = await files.http.get("/v1/files", params=query, headers=ALICE)
        assert refusal(answer) == (400, "invalid_value")


async def test_all_files_are_deleted_while_they_are_listed(files: System) -> None:
    client = files.openai.with_options(api_key="key-alice")
    for number in range(5):
        await upload(files, image_bytes(number))
    async for each in client.files.list(limit=2):
        await client.files.delete(each.id)
    assert stored(files) == []


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


async def test_a_disk_that_refuses(files: System, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("triptych_gateway.files.partial_file.os.write", refuse)
        assert refusal(await post(files, multipart(PURPOSE, FILE))) == (503, "file_storage_failed")
    await until(lambda: stored(files) == [])
    assert (await post(files, multipart(PURPOSE, FILE))).status_code == 200


async def test_a_record_that_the_disk_refuses(files: System, monkeypatch: pytest.MonkeyPatch) -> None:
    created = await upload(files, IMAGE)
    read = os.open

    def refuse(path: object, *rest: int) -> int:
        if str(path).endswith(".json"):
            raise OSError(24, "Too many open files")
        return read(path, *rest)

    body = {"model": "fake-vl", "messages": [{"role": "user", "content": [file_part(created.id)]}]}
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        answer = await files.http.get(f"/v1/files/{created.id}", headers=ALICE)
        assert refusal(answer) == (503, "file_storage_failed")
        assert refusal(await files.post(body, headers=ALICE)) == (503, "file_storage_failed")
    assert (await files.http.get(f"/v1/files/{created.id}", headers=ALICE)).status_code == 200


async def test_every_route_takes_a_place_of_a_request(files: System) -> None:
    created = await upload(files, IMAGE)
    async with another_gateway(files, "gateway-1", max_requests_in_flight=1) as full, Held(full):
        paths = ["/v1/files", f"/v1/files/{created.id}", f"/v1/files/{created.id}/content"]
        for method, path in [*(("GET", path) for path in paths), ("DELETE", paths[1])]:
            answer = await full.http.request(method, path, headers=ALICE)
            assert refusal(answer) == (429, "too_many_requests"), (method, path)


async def test_metrics(files: System) -> None:
    await upload(files, IMAGE)
    with pytest.raises(openai.BadRequestError):
        await upload(files, b"x")
    text = (await files.http.get("/metrics")).text
    assert 'triptych_gateway_file_uploads_total{outcome="stored"} 1.0' in text
    assert 'triptych_gateway_file_uploads_total{outcome="refused"} 1.0' in text
    assert "triptych_gateway_files_stored 1.0" in text
    assert f"triptych_gateway_files_stored_bytes {float(len(IMAGE))}" in text
