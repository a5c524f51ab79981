"""The page at `/ui`: off by default, behind keys, what it shows to whom, and what its listeners cost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.types import Message

from tests.support.gateway.samples import KEYS, MODEL, data_url, entry, image_bytes, image_part, write_keys
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_common.protocol.messages import ECTransferParams
from triptych_gateway.access.auth import ANONYMOUS
from triptych_gateway.tracing.recent_requests import RecentRequests
from triptych_gateway.ui import live_view
from triptych_gateway.ui.live_view import EventStream, LiveView
from triptych_gateway.ui.system_view import SystemView

SECRET = "words that only their caller may read"
UI = pytest.mark.parametrize("system", [{"ui": True}], indirect=True)
OPERATOR = entry("ops", "key-ops", operator=True)
DATA = ("/ui/api/snapshot", "/ui/api/events")


@pytest.fixture
async def guarded(redis_url: str, tmp_path: Path) -> AsyncIterator[System]:
    """With the keys of the samples, and one of an operator."""
    keys = write_keys(tmp_path / "keys.toml", KEYS, OPERATOR, entry("dora", "key-dora", models=["other"]))
    async with opened_system(
        redis_url, tmp_path, ui=True, api_keys_file=keys, api_keys_check_s=0.05
    ) as opened:
        yield opened


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def with_image(number: int, **fields: Any) -> dict[str, Any]:
    image = image_part(number)
    content = [image, {"type": "text", "text": SECRET}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


async def snapshot_of(system: System, key: str | None = None) -> dict[str, Any]:
    answer = await system.http.get("/ui/api/snapshot", headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, orjson.loads(line.removeprefix("data: "))


async def test_it_is_off_unless_it_is_enabled(system: System) -> None:
    for path in ("/ui", "/ui/app.js", *DATA):
        answer = await system.http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ui_not_enabled"), path
    assert system.gateway.services.recents is None


@UI
async def test_its_files_are_served_with_a_strict_policy(system: System) -> None:
    for path, kind in {
        "/ui": "text/html",
        "/ui/app.js": "text/javascript",
        "/ui/style.css": "text/css",
        "/ui/htm-preact-3.1.1.js": "text/javascript",
        "/ui/icon.svg": "image/svg+xml",
    }.items():
        answer = await system.http.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].startswith(kind), path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';"), path
    for path in ("/ui/page.py", "/ui/..%2fpage.py", "/ui/unknown.js", "/ui/api/unknown"):
        assert (await system.http.get(path)).status_code == 404, path


async def test_data_are_behind_the_key_and_files_are_not(guarded: System) -> None:
    assert (await guarded.http.get("/ui")).status_code == 200
    for path in DATA:
        assert (await guarded.http.get(path)).json()["error"]["code"] == "missing_api_key", path
        answer = await guarded.http.get(f"{path}?api_key=key-ops", headers=bearer("wrong"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path


@UI
async def test_a_request_is_shown_with_its_stages_and_items(system: System) -> None:
    async def wait_for_the_seals(params: ECTransferParams) -> None:
        await until(lambda: not any(each.in_flight for each in system.gateway.orders.table))

    system.prefill_decode.waits_for = wait_for_the_seals
    answer = await system.post(with_image(3, stream=True))
    again = await system.post(with_image(3))
    refused = await system.post({"model": "no-such-model", "messages": [{"role": "user", "content": SECRET}]})
    found = await snapshot_of(system)
    first, second, third = found["requests"]
    assert first["request_id"] == answer.headers["x-request-id"]
    assert (first["state"], first["model"], first["num_items"], first["instance"]) == (
        "done",
        MODEL,
        1,
        "pd-0",
    )
    assert first["num_tokens"] > 0
    assert 0 < first["first_token_ms"] <= first["duration_ms"]
    stages = {each["stage"] for each in first["stages"]}
    assert {"body", "media", "sizes", "prefill", "stream"} <= stages
    (item,) = first["items"]
    assert (item["modality"], item["source"], item["encoder"]) == ("image", "encoded", "encoder-0")
    assert item["ordered_ms"] <= item["sized_ms"] <= item["sealed_ms"] <= first["duration_ms"]
    assert (second["request_id"], second["avoided"]) == (again.headers["x-request-id"], {"memory": 1})
    assert (second["num_prompt_tokens"], second["num_tokens"]) == (2, 1)  # as the answer tells
    assert refused.status_code == 404
    assert (third["state"], third["error"], third["model"]) == ("refused", "model_not_found", None)
    assert found["system"]["since_start"] == {"num_requests": 3, "num_items": 2, "avoided": {"memory": 1}}
    load = found["system"]["load"]
    assert (load["num_requests"], load["num_sizes"], load["store"]) == (0, 1, None)
    assert {each["instance"] for each in found["system"]["instances"]} == {"gateway-0", "encoder-0", "pd-0"}


@UI
async def test_nothing_that_a_caller_sent_or_got_is_shown(system: System) -> None:
    answer = await system.post(with_image(3, user="user-1", model=MODEL))
    await system.post({"model": "made-up", "messages": [{"role": "user", "content": SECRET}]})
    text = orjson.dumps(await snapshot_of(system)).decode()
    said = answer.json()["choices"][0]["message"]["content"]
    (mm_hash,) = system.encoder.sealed
    for secret in (SECRET, said, "user-1", "made-up", mm_hash, data_url(image_bytes(3))):
        assert secret not in text, secret


async def test_a_key_sees_its_own_requests_and_an_operator_all(guarded: System) -> None:
    for key in ("key-alice", "key-anna", "key-bob"):
        assert (await guarded.post(with_image(1), headers=bearer(key))).status_code == 200
    assert (await guarded.post(with_image(1))).status_code == 401  # nobody's: not shown
    for key, name in {"key-alice": "alice", "key-anna": "anna", "key-bob": "bob"}.items():
        found = await snapshot_of(guarded, key)
        assert [each["key_name"] for each in found["requests"]] == [name]
        assert found["system"]["load"] is None
        assert "since_start" not in found["system"]
        assert {each["num_busy"] for each in found["system"]["instances"]} == {None}
    everything = await snapshot_of(guarded, "key-ops")
    assert [each["key_name"] for each in everything["requests"]] == ["alice", "anna", "bob"]
    assert everything["system"]["load"] is not None


async def test_a_key_is_not_told_of_models_that_it_may_not_use(guarded: System) -> None:
    found = await snapshot_of(guarded, "key-dora")
    assert {each["instance"] for each in found["system"]["instances"]} == {"gateway-0", "encoder-0", "pd-0"}
    assert MODEL not in orjson.dumps(found).decode()
    for key in ("key-alice", "key-ops"):
        models = {
            each["instance"]: each["model"]
            for each in (await snapshot_of(guarded, key))["system"]["instances"]
        }
        assert models["pd-0"] == MODEL, key


@UI
async def test_events_follow_a_request(system: System) -> None:
    async with asyncio.timeout(20), system.http.stream("GET", "/ui/api/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer)
        name, first = await anext(events)
        assert (name, first["requests"]) == ("snapshot", [])
        system.encoder.before_seal.clear()  # so that it is seen while it runs
        asking = asyncio.get_running_loop().create_task(system.post(with_image(7, stream=True)))
        states: list[str] = []
        async for name, data in events:
            if name == "requests":
                states += [each["state"] for each in data]
            elif {each["instance"]: each["num_busy"] for each in data["instances"]}["encoder-0"]:
                assert data["load"]["queues"][0]["num_in_hand"] == 1
                system.encoder.before_seal.set()
            if "done" in states:
                break
        await asking
    assert states[0] != "done", states
    await until(lambda: not recents_of(system)._listeners)


def recents_of(system: System) -> RecentRequests:
    recents = system.gateway.services.recents
    assert recents is not None
    return recents


async def events_end_once(guarded: System, key: str, keys: str) -> None:
    """A stream of events that has begun with `key` ends when `keys` are all that the file holds."""
    path = guarded.gateway.settings.api_keys_file
    assert path is not None
    async with (
        asyncio.timeout(20),
        guarded.http.stream("GET", "/ui/api/events", headers=bearer(key)) as answer,
    ):
        events = events_of(answer)
        await anext(events)
        write_keys(path, keys)
        async for _ in events:
            pass


async def test_a_stream_of_events_ends_with_its_key(guarded: System) -> None:
    await events_end_once(guarded, "key-bob", entry("alice", "key-alice", "red"))
    assert (await guarded.http.get("/ui/api/events", headers=bearer("key-bob"))).status_code == 401


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("key-ops", entry("ops", "key-ops")),  # no operator any more
        ("key-carol", entry("carol", "key-carol", "red")),
        ("key-carol", entry("caroline", "key-carol")),
        ("key-carol", entry("carol", "key-carol", models=["other"])),
        ("key-carol", entry("carol", "key-carol", operator=True)),
    ],
)
async def test_a_stream_of_events_ends_when_its_key_may_see_other_things(
    guarded: System, key: str, changed: str
) -> None:
    await events_end_once(guarded, key, changed)
    again = await snapshot_of(guarded, key)
    assert again["system"]["is_operator"] == ("operator" in changed)


@UI
async def test_a_gateway_that_goes_away_ends_the_streams_of_events(system: System) -> None:
    async with asyncio.timeout(20), system.http.stream("GET", "/ui/api/events") as answer:
        events = events_of(answer)
        await anext(events)
        await system.gateway.registration.announce_draining()
        async for _ in events:
            pass


@pytest.mark.parametrize("system", [{"ui": True, "ui_listeners": 1}], indirect=True)
async def test_one_page_too_many_is_refused(system: System) -> None:
    async with system.http.stream("GET", "/ui/api/events") as answer:
        await anext(events_of(answer))
        other = await system.http.get("/ui/api/events")
        assert (other.status_code, other.json()["error"]["code"]) == (429, "too_many_listeners")
    await until(lambda: not recents_of(system)._listeners)


async def test_one_key_cannot_take_the_places_of_all(guarded: System) -> None:
    """Sixteen by default: four of them."""
    async with contextlib.AsyncExitStack() as pages:

        async def status_of(key: str) -> int:
            opening = guarded.http.stream("GET", "/ui/api/events", headers=bearer(key))
            return (await pages.enter_async_context(opening)).status_code

        assert [await status_of("key-alice") for _ in range(5)] == [200, 200, 200, 200, 429]
        assert [await status_of(key) for key in ("key-anna", "key-ops")] == [200, 200]


@UI
async def test_a_slow_link_has_its_time_for_each_piece(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is less than the snapshot takes, and more than one of its pieces."""
    for number in range(3):
        await system.post(with_image(number))
    monkeypatch.setattr(live_view, "SEND_LIMIT_S", 0.5)
    monkeypatch.setattr(live_view, "PIECE_BYTES", 64)
    recents, view = recents_of(system), SystemView(system.gateway)
    loop, pieces = asyncio.get_running_loop(), list[bytes]()
    began, is_over = loop.time(), asyncio.Event()

    async def send(message: Message) -> None:
        if body := message.get("body"):
            pieces.append(body)
            if body.endswith(b"\n\n"):
                is_over.set()
            await asyncio.sleep(0.02)  # the link's time for one

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    stream = EventStream(LiveView(ANONYMOUS, recents, view), is_over=is_over.is_set, has_rights=lambda: True)
    await stream({"type": "http"}, receive, send)
    assert loop.time() - began > live_view.SEND_LIMIT_S
    assert max(map(len, pieces)) == live_view.PIECE_BYTES
    found = orjson.loads(b"".join(pieces).removeprefix(b"event: snapshot\ndata: "))
    assert len(found["requests"]) == 3


@UI
async def test_a_page_that_does_not_read_is_dropped(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "SEND_LIMIT_S", 0.05)
    recents, view = recents_of(system), SystemView(system.gateway)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > 1:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    stream = EventStream(LiveView(ANONYMOUS, recents, view), is_over=lambda: False, has_rights=lambda: True)
    async with asyncio.timeout(10):
        await stream({"type": "http"}, receive, send)
    assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
    assert not recents._listeners
