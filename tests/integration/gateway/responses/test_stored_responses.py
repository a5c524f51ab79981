"""Stored responses: found again by every gateway, by their own callers alone, with their images."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.gateway.responses.test_responses import IMAGE, OTHER, TEXT, user
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode, send_encode_needed
from tests.support.gateway.local_encode import QUICK, tower, without_encoders
from tests.support.gateway.samples import MODEL, entry, image_bytes, write_keys
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.waiting import until, until_async
from triptych_common.coordination import StoredResponses
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import ECTransferParams
from triptych_gateway.access.key_limiter import RequestCharge


async def ask(system: System, content: Any, **options: Any) -> Any:
    given = user(*content) if isinstance(content, tuple) else content
    return await system.openai.responses.create(model=MODEL, input=given, **options)


async def code_of(call: Any) -> tuple[int, str | None]:
    with pytest.raises(openai.APIStatusError) as raised:
        await call
    return raised.value.status_code, raised.value.code


async def test_a_response_is_read_again_by_another_gateway(storing: System) -> None:
    second = FakePrefillDecode("pd-1", stores_responses=True)
    await storing.stack.enter_async_context(second.running(storing.bus))
    await storing.refresh()
    made = [await ask(storing, "hello") for _ in range(4)]
    assert storing.prefill_decode.bodies
    assert second.bodies
    async with another_gateway(storing, "gateway-1") as other:
        for each in made:
            assert (await other.openai.responses.retrieve(each.id)).output_text == each.output_text
            follow = await ask(other, "and now?", previous_response_id=each.id)
            asked = [
                {body["request_id"] for body in fake.bodies} for fake in (storing.prefill_decode, second)
            ]
            assert any({each.id, follow.id} <= ids for ids in asked)


async def test_what_is_not_stored_is_not_found(storing: System) -> None:
    made = await ask(storing, "hello", store=False)
    assert await code_of(storing.openai.responses.retrieve(made.id)) == (404, "response_not_found")
    for response_id in ("resp_x", "resp_" + "0" * 32):
        found = await storing.http.get(f"/v1/responses/{response_id}")
        assert found.status_code == 404
    assert not await storing.bus.client.keys("*:response:*")


async def test_where_nothing_is_stored_nothing_is_recorded(system: System) -> None:
    made = await ask(system, "hello")
    assert await code_of(system.openai.responses.retrieve(made.id)) == (404, "response_not_found")
    assert not await system.bus.client.keys("*:response:*")
    assert await code_of(ask(system, "hello", background=True)) == (400, "invalid_request")


async def test_records_expire(redis_url: str, tmp_path: Path) -> None:
    fake = FakePrefillDecode(stores_responses=True)
    async with opened_system(redis_url, tmp_path, fake, responses_ttl_s=77) as system:
        made = await ask(system, "hello")
        key = system.bus.names.response(made.id)
        assert 70_000 < await system.bus.client.pttl(key) <= 77_000


@pytest.mark.parametrize("stream", [False, True])
async def test_images_of_a_conversation_come_along(storing: System, stream: bool) -> None:
    first = await ask(storing, (IMAGE, TEXT))
    second = await ask(storing, "again?", previous_response_id=first.id)
    third = await ask(storing, (TEXT, OTHER), previous_response_id=second.id, stream=stream)
    if stream:
        events = [event async for event in third]
        third = events[-1].response
    assert second.output_text == "1x8x8 word0 word1"
    assert third.output_text == "1x8x8 1x6x4 word0 word1"
    body = storing.prefill_decode.bodies[-1]
    assert [item["item_index"] for item in body["ec_transfer_params"]["items"]] == [0, 1]
    assert len(storing.encoder.jobs) == 2  # one of each image


async def test_images_in_system_messages_are_left_behind(storing: System) -> None:
    given = [{"role": "system", "content": [IMAGE]}, *user(OTHER)]
    first = await ask(storing, given)
    assert first.output_text == "1x8x8 1x6x4 word0 word1"
    await ask(storing, "again?", previous_response_id=first.id)
    (item,) = storing.prefill_decode.bodies[-1]["ec_transfer_params"]["items"]
    assert item["mm_hash"] == storing.prefill_decode.bodies[0]["ec_transfer_params"]["items"][1]["mm_hash"]


async def test_an_image_that_the_store_has_lost_is_encoded_again(storing: System) -> None:
    first = await ask(storing, (IMAGE, TEXT))
    await storing.wait_flights_ended()
    num_jobs = len(storing.encoder.jobs)

    async def lost(params: ECTransferParams) -> None:
        await send_encode_needed(storing.bus, params, "pd-0")
        await until(lambda: len(storing.encoder.jobs) > num_jobs)

    storing.prefill_decode.waits_for = lost
    second = await ask(storing, "again?", previous_response_id=first.id)
    assert second.output_text == "1x8x8 word0 word1"


@pytest.mark.parametrize("storing", [{"responses_image_bytes": 0}], indirect=True)
@pytest.mark.parametrize("is_file", [False, True])
async def test_bytes_that_are_gone_are_told_by_name(storing: System, is_file: bool) -> None:
    part: dict[str, Any] = IMAGE
    if is_file:
        file = await storing.openai.files.create(file=("a.png", image_bytes(7)), purpose="vision")
        part = {"type": "input_image", "file_id": file.id}
    first = await ask(storing, (part, TEXT))
    await storing.wait_flights_ended()
    assert (await ask(storing, "a", previous_response_id=first.id)).output_text == "1x8x8 word0 word1"
    if is_file:
        await storing.openai.files.delete(file.id)

    async def lost(params: ECTransferParams) -> None:
        await send_encode_needed(storing.bus, params, "pd-0")
        await asyncio.Event().wait()

    storing.prefill_decode.waits_for = lost
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as raised:
            await ask(storing, "again?", previous_response_id=first.id, stream=stream)
        assert (raised.value.code, raised.value.param) == ("response_image_gone", "previous_response_id")
        assert first.id in raised.value.message


@pytest.mark.parametrize("storing", [QUICK], indirect=True)
async def test_a_conversation_stays_where_its_images_were_encoded(storing: System) -> None:
    instance = await tower(storing)
    await without_encoders(storing)
    first = await ask(storing, (IMAGE, TEXT))
    second = await ask(storing, "again?", previous_response_id=first.id)
    third = await ask(storing, (OTHER,), previous_response_id=second.id)
    assert second.output_text == "1x8x8 word0 word1"
    assert third.output_text == "1x8x8 1x6x4 word0 word1"
    assert [body["request_id"] for body in instance.bodies] == [first.id, second.id, third.id]
    assert not any("ec_transfer_params" in body for body in instance.bodies)
    assert storing.encoder.jobs == []


async def test_an_instance_that_is_gone_takes_its_responses_along(storing: System) -> None:
    second = FakePrefillDecode("pd-1", stores_responses=True)
    async with second.running(storing.bus):
        await storing.refresh()
        made = [await ask(storing, "hello") for _ in range(2)]
    await storing.refresh()
    there = {body["request_id"] for body in second.bodies}
    for each in made:
        is_gone = each.id in there
        answer = await storing.http.get(f"/v1/responses/{each.id}")
        assert answer.status_code == (404 if is_gone else 200)
        if is_gone:
            error = answer.json()["error"]
            assert error["message"] == f"Response with id '{each.id}' not found."
            assert (error["code"], error["param"]) == ("response_not_found", "response_id")
    assert len(there) == 1


async def test_a_response_of_another_life_is_not_found(storing: System) -> None:
    made = await ask(storing, "hello")
    view = storing.gateway.view
    records = tuple(each.model_copy(update={"boot_id": "new"}) for each in view.records)
    view._registry.list_instances = lambda: _same(records)  # type: ignore[method-assign]
    for _ in range(2):  # one that is under way has the former records
        await view.wait_for_refresh()
    assert await code_of(storing.openai.responses.retrieve(made.id)) == (404, "response_not_found")


async def _same(records: Any) -> Any:
    return records


# ---- background and cancel --------------------------------------------------------------------------
async def test_the_background(storing: System) -> None:
    made = await ask(storing, "hello", background=True)
    assert made.status == "queued"

    async def is_done() -> bool:
        return (await storing.openai.responses.retrieve(made.id)).status == "completed"

    await until_async(is_done)
    with pytest.raises(openai.BadRequestError):  # it is over
        await storing.openai.responses.cancel(made.id)


async def test_a_background_response_is_cancelled(storing: System) -> None:
    storing.prefill_decode.behaviour = "hang"
    made = await ask(storing, "hello", background=True)
    async with another_gateway(storing, "gateway-1") as other:
        assert (await other.openai.responses.cancel(made.id)).status == "cancelled"
    assert (await storing.openai.responses.retrieve(made.id)).status == "cancelled"


async def test_events_of_a_background_response_are_read_again(storing: System) -> None:
    stream = await ask(storing, "hello", background=True, stream=True)
    events = [event async for event in stream]
    response_id = events[0].response.id
    again = await storing.openai.responses.retrieve(response_id, stream=True, starting_after=1)
    assert [event.sequence_number async for event in again] == [each.sequence_number for each in events[2:]]
    plain = await ask(storing, "hello")
    assert await code_of(storing.openai.responses.retrieve(plain.id, stream=True)) == (400, "invalid_value")
    for query in ("stream=perhaps", "stream=true&starting_after=-1", "stream=1&starting_after=x"):
        answer = await storing.http.get(f"/v1/responses/{response_id}?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), query


# ---- callers ----------------------------------------------------------------------------------------
async def test_a_response_is_of_the_key_that_made_it(redis_url: str, tmp_path: Path, keys_file: Path) -> None:
    fake = FakePrefillDecode(stores_responses=True)
    async with opened_system(redis_url, tmp_path, fake, api_keys_file=keys_file) as system:
        alice, bob, anna = (
            system.openai.with_options(api_key=f"key-{name}") for name in ("alice", "bob", "anna")
        )
        made = await alice.responses.create(model=MODEL, input="hello", background=True)
        for other in (bob, anna):  # of another tenant, and of the same
            for call in (
                other.responses.retrieve(made.id),
                other.responses.cancel(made.id),
                other.responses.create(model=MODEL, input="a", previous_response_id=made.id),
            ):
                assert await code_of(call) == (404, "response_not_found")
        assert (await alice.responses.retrieve(made.id)).id == made.id


async def test_limits_of_a_key(redis_url: str, tmp_path: Path) -> None:
    """Responses tell their usage unasked; of one in the background its bound counts, and its reads do not."""
    keys = write_keys(
        tmp_path / "keys.toml", entry("alice", "one", tokens_per_minute=1000, requests_per_minute=5)
    )
    fake = FakePrefillDecode(stores_responses=True)
    async with opened_system(redis_url, tmp_path, fake, api_keys_file=keys) as system:
        client = system.openai.with_options(api_key="one")

        async def level(rate: str) -> float:
            levels = await system.bus.client.hgetall(system.bus.names.limit_levels("alice"))
            return float(levels[rate.encode()].split()[0])

        async def at_most(number: int) -> bool:
            return await level("tokens") <= number

        for stream in (False, True):
            answer = await client.responses.create(
                model=MODEL, input="hello", max_output_tokens=900, stream=stream
            )
            if stream:
                assert [event async for event in answer]
            await until_async(lambda: at_most(2 * 3))
        assert "stream_options" not in fake.bodies[-1]
        unbounded = client.responses.create(model=MODEL, input="hello", background=True)
        assert await code_of(unbounded) == (400, "missing_field")
        made = await client.responses.create(
            model=MODEL, input="hello", background=True, max_output_tokens=700
        )
        for _ in range(4):
            await client.responses.retrieve(made.id)
        assert await level("tokens") > 500
        assert await level("requests") < 4


async def test_media_are_charged_once(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the request that brings them, not to those that go on from it."""
    charged: list[int] = []
    monkeypatch.setattr(RequestCharge, "on_media", lambda self, num_bytes: charged.append(num_bytes))
    keys = write_keys(tmp_path / "keys.toml", entry("alice", "one", media_bytes_per_minute=10**6))
    fake = FakePrefillDecode(stores_responses=True)
    async with opened_system(redis_url, tmp_path, fake, api_keys_file=keys) as system:
        client = system.openai.with_options(api_key="one")
        first = await client.responses.create(model=MODEL, input=user(IMAGE))
        second = await client.responses.create(model=MODEL, input="again", previous_response_id=first.id)
        assert second.output_text == "1x8x8 word0 word1"
        await system.assert_idle()
    assert charged == [len(image_bytes(7)), 0]


# ---- faults -----------------------------------------------------------------------------------------
async def test_without_redis_responses_are_made_and_not_found(
    storing: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(self: StoredResponses, *arguments: Any) -> None:
        raise BusUnavailableError("away")

    made = await ask(storing, "hello")
    monkeypatch.setattr(StoredResponses, "set", away)
    monkeypatch.setattr(StoredResponses, "get", away)
    assert (await ask(storing, "hello")).output_text == "word0 word1"
    assert await code_of(storing.openai.responses.retrieve(made.id)) == (503, "bus_unavailable")


async def test_a_record_that_is_not_readable_is_none(storing: System) -> None:
    made = await ask(storing, "hello")
    await storing.bus.client.set(storing.bus.names.response(made.id), b'{"version": 2}')
    assert await code_of(storing.openai.responses.retrieve(made.id)) == (404, "response_not_found")
