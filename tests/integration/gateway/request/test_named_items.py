"""Items by `uuid`: named once with their media, found by every gateway, by their own tenant alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_prefill_decode import send_encode_needed
from tests.support.gateway.local_encode import QUICK, tower, without_encoders
from tests.support.gateway.samples import MODEL, data_url, image_bytes, image_part, refusal_of
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.waiting import until
from triptych_common.coordination import ItemNames
from triptych_common.coordination.item_names import NAMES_TTL_S
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import ECTransferParams, Modality

Part = dict[str, Any]
NUM_ITEMS, PER_REQUEST = 100, 10
MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + bytes(100)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(90)


@pytest.fixture
async def system(
    redis_url: str, tmp_path: Path, keys_file: Path, request: pytest.FixtureRequest
) -> AsyncIterator[System]:
    """Callers have keys (`KEYS`): alice and anna of one tenant, bob of another, carol of none."""
    settings: dict[str, Any] = {"api_keys_file": keys_file, "encoder_limits": dict.fromkeys(Modality, 16)}
    async with opened_system(redis_url, tmp_path, **settings | getattr(request, "param", {})) as opened:
        yield opened


async def ask(system: System, *parts: Part, key: str = "key-alice", stream: bool = False) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "stream": stream}
    return await system.post(body, headers={"Authorization": f"Bearer {key}"})


async def items_of(system: System, *parts: Part, key: str = "key-alice") -> list[str]:
    """The identities of the items that prefill_decode got."""
    answer = await ask(system, *parts, key=key)
    assert answer.status_code == 200, answer.text
    content = system.prefill_decode.bodies[-1]["messages"][0]["content"]
    return [part["uuid"] for part in content]


def whole(uuid: str, color: int = 7, width: int = 8) -> Part:
    return {**image_part(color, (width, 8)), "uuid": uuid}


def named(uuid: str, kind: str = "image_url") -> Part:
    return {"type": kind, kind: None, "uuid": uuid}


UNKNOWN = (400, "unknown_item", "messages[0].content[0].uuid")


async def test_a_name_finds_what_was_sent_at_any_gateway_and_is_encoded_once(system: System) -> None:
    sent = await items_of(system, whole("page-17"))
    assert await items_of(system, named("page-17")) == sent
    async with another_gateway(system, "gateway-1") as other:
        assert await items_of(other, named("page-17")) == sent
    assert len(system.encoder.jobs) == 1


async def test_two_tenants_with_the_same_names_never_cross(system: System) -> None:
    def chunks(parts: Sequence[Part]) -> list[Sequence[Part]]:
        return [parts[at : at + PER_REQUEST] for at in range(0, NUM_ITEMS, PER_REQUEST)]

    sent: dict[str, list[str]] = {}
    for key, width in (("key-alice", 8), ("key-bob", 9)):
        parts = [whole(f"item-{number}", number, width) for number in range(NUM_ITEMS)]
        sent[key] = [each for chunk in chunks(parts) for each in await items_of(system, *chunk, key=key)]
    assert len({*sent["key-alice"], *sent["key-bob"]}) == 2 * NUM_ITEMS
    names = [named(f"item-{number}") for number in range(NUM_ITEMS)]
    for key, owner in (("key-alice", "key-alice"), ("key-bob", "key-bob"), ("key-anna", "key-alice")):
        found = [each for chunk in chunks(names) for each in await items_of(system, *chunk, key=key)]
        assert found == sent[owner], key
    assert refusal_of(await ask(system, names[0], key="key-carol")) == UNKNOWN
    assert len(system.encoder.jobs) == 2 * NUM_ITEMS


async def test_what_only_one_tenant_has_named_the_other_does_not_find(system: System) -> None:
    """Nor does a key without a tenant, though such keys share what is cached."""
    await items_of(system, whole("mine", 3), key="key-carol")
    for key in ("key-alice", "key-bob"):
        assert refusal_of(await ask(system, named("mine"), key=key)) == UNKNOWN


@pytest.mark.parametrize(
    ("kind", "content", "again"),
    [
        ("image", image_bytes(7), {"type": "image_url", "image_url": None}),
        ("image", image_bytes(7), {"type": "image_url", "image_url": {"url": None}}),
        ("image", image_bytes(7), {"type": "image_url"}),
        ("image", image_bytes(7), {"type": "input_image", "image_url": ""}),
        ("video", MP4, {"type": "video_url", "video_url": None}),
        ("audio", WAV, {"type": "audio_url", "audio_url": None}),
        ("audio", WAV, {"type": "input_audio", "input_audio": None}),
        ("audio", WAV, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
    ],
)
async def test_each_kind_has_names_of_its_own(system: System, kind: str, content: bytes, again: Part) -> None:
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(content, f"{kind}/x")}, "uuid": "a"}
    sent = await items_of(system, part)
    assert await items_of(system, {**again, "uuid": "a"}) == sent
    for other in {"image_url", "video_url", "audio_url"} - {f"{kind}_url"}:
        assert refusal_of(await ask(system, named("a", other))) == UNKNOWN
    assert len(system.encoder.jobs) == 1


async def test_an_unknown_name_is_told_by_its_place_and_orders_nothing(system: System) -> None:
    await items_of(system, whole("known"))
    answer = await ask(system, whole("new", 9), named("known"), named("unknown"))
    assert refusal_of(answer) == (400, "unknown_item", "messages[0].content[2].uuid")
    assert "send it whole" in answer.json()["error"]["message"]
    assert len(system.encoder.jobs) == 1


async def test_other_media_under_a_name_are_what_it_names_from_then_on(system: System) -> None:
    first = await items_of(system, whole("a", 1))
    second = await items_of(system, whole("a", 2))
    assert await items_of(system, named("a")) == second != first
    third, *again = await items_of(system, whole("a", 3), named("a"), named("a"))
    assert again == [third, third]
    assert third not in (*first, *second)


def lose_tensors(system: System) -> None:
    """The store has no item from now on: prefill_decode asks for the first of each request."""

    async def lost(params: ECTransferParams) -> None:
        num_jobs = len(system.encoder.jobs)
        await send_encode_needed(system.bus, params, "pd-0")
        await until(lambda: len(system.encoder.jobs) > num_jobs)

    system.prefill_decode.waits_for = lost


async def test_an_evicted_item_is_unknown_until_it_is_sent_again(system: System) -> None:
    sent = await items_of(system, whole("a"))
    await system.wait_flights_ended()
    lose_tensors(system)
    for stream in (False, True):
        assert refusal_of(await ask(system, named("a"), stream=stream)) == UNKNOWN
    assert await items_of(system, whole("a")) == sent
    assert len(system.encoder.jobs) == 2


async def test_an_evicted_item_is_encoded_anew_from_the_bytes_of_another_request(system: System) -> None:
    await items_of(system, whole("a"))
    await system.wait_flights_ended()
    system.prefill_decode.behaviour = "hang"
    holder = asyncio.get_running_loop().create_task(ask(system, whole("a")))
    await until(lambda: len(system.prefill_decode.bodies) == 2)
    system.prefill_decode.behaviour = "ok"
    lose_tensors(system)
    await items_of(system, named("a"))
    assert len(system.encoder.jobs) == 2
    system.prefill_decode.release.set()
    assert (await holder).status_code == 200


async def test_without_sizes_an_item_is_unknown(system: System) -> None:
    await items_of(system, whole("a"))
    await system.wait_flights_ended()
    await system.bus.client.delete(system.bus.names.sizes)
    async with another_gateway(system, "gateway-1") as other:
        assert refusal_of(await ask(other, named("a"))) == UNKNOWN


@pytest.mark.parametrize("system", [QUICK], indirect=True)
async def test_an_instance_that_encodes_itself_gets_no_item_without_bytes(system: System) -> None:
    await without_encoders(system)
    instance = await tower(system)
    assert (await ask(system, whole("a"))).status_code == 200
    assert refusal_of(await ask(system, named("a"))) == UNKNOWN
    assert len(instance.bodies) == 1


async def test_a_responses_image_has_a_name_too(system: System) -> None:
    client: Any = system.openai.with_options(api_key="key-alice")

    def respond(part: Part) -> Any:
        return client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])

    url = data_url(image_bytes(7))
    await respond({"type": "input_image", "image_url": url, "detail": "auto", "uuid": "a"})
    await respond({"type": "input_image", "image_url": None, "detail": "auto", "uuid": "a"})
    first, second = (body["ec_transfer_params"]["items"] for body in system.prefill_decode.bodies)
    assert first == second
    assert await items_of(system, named("a")) == [first[0]["mm_hash"]]


# ---- Redis -------------------------------------------------------------------------------------------
async def test_a_request_with_names_takes_one_exchange_and_one_without_none(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanged: list[int] = []
    exchange = ItemNames.exchange

    async def counted(self: ItemNames, owner: str, names: Any) -> Any:
        exchanged.append(len(names))
        return await exchange(self, owner, names)

    monkeypatch.setattr(ItemNames, "exchange", counted)
    await items_of(system, image_part(1))
    assert exchanged == []
    await items_of(system, whole("a", 1), named("a"), image_part(2))
    assert exchanged == [2]


async def test_a_name_lives_on_with_each_use_and_then_expires(system: System) -> None:
    await items_of(system, whole("a"))
    client: Any = system.bus.client
    (key,) = await client.keys("*item-names:*")
    assert b"a" not in await client.hkeys(key)
    for _ in range(2):
        assert (NAMES_TTL_S - 60) * 1000 < await client.pttl(key) <= NAMES_TTL_S * 1000
        await client.pexpire(key, 60_000)
        await items_of(system, named("a"))
    await client.delete(key)
    assert refusal_of(await ask(system, named("a"))) == UNKNOWN


async def test_an_owners_oldest_names_go_and_no_others(system: System) -> None:
    names, digests = ItemNames(system.bus, max_names=3), [f"{number:064x}" for number in range(5)]
    await names.exchange("other", [(digests[0], b"0")])
    for digest in digests:
        await names.exchange("owner", [(digest, b"1")])
    asked = [(digest, None) for digest in digests]
    assert await names.exchange("owner", asked) == [None, None, b"1", b"1", b"1"]
    assert await names.exchange("other", asked[:1]) == [b"0"]


async def test_a_record_that_is_not_readable_is_none(system: System) -> None:
    await items_of(system, whole("a"))
    client: Any = system.bus.client
    (key,) = await client.keys("*item-names:*")
    (field,) = await client.hkeys(key)
    await client.hset(key, field, b'{"media_digest": "x"}')
    assert refusal_of(await ask(system, named("a"))) == UNKNOWN


async def test_without_redis_media_are_served_and_names_are_not(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(self: ItemNames, *arguments: Any) -> None:
        raise BusUnavailableError("away")

    await items_of(system, whole("a", 1))
    monkeypatch.setattr(ItemNames, "exchange", away)
    await items_of(system, whole("a", 2))
    answer = await ask(system, whole("b", 3), named("a"))
    assert refusal_of(answer) == (503, "bus_unavailable", "messages[0].content[1].uuid")
