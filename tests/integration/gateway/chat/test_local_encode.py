"""When encoders cannot be had: the whole request goes to an instance that has a vision tower."""

import asyncio
import base64
from typing import Any

import openai
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.local_encode import ANSWER, QUICK, tower, without_encoders
from tests.support.gateway.samples import data_url, image_bytes
from tests.support.gateway.system import System
from tests.support.waiting import until
from triptych_common.protocol.messages import ECTransferParams, FailureKind

MEDIA = image_bytes(3)
IMAGE = {"type": "image_url", "image_url": {"url": data_url(MEDIA)}}
TEXT = {"type": "text", "text": "what is this?"}
ALLOWED_OPTIONS = {
    "request_processor_options": {"max_pixels": {"min": 4, "max": 4096}},
    "request_image_options": {"rgba": {"values": [[0, 0, 0]]}},
}


def whole_bodies(*instances: FakePrefillDecode) -> list[dict[str, Any]]:
    return [body for instance in instances for body in instance.bodies if "ec_transfer_params" not in body]


def count(system: System, reason: str) -> float:
    value = system.gateway.services.metrics.metrics.registry.get_sample_value(
        "triptych_gateway_local_encodes_total", {"reason": reason}
    )
    return value or 0.0


async def assert_whole(system: System, instance: FakePrefillDecode, reason: str) -> None:
    (body,) = whole_bodies(system.prefill_decode, instance)
    assert body in instance.bodies
    part = body["messages"][0]["content"][1]
    assert part.keys() == {"type", "image_url"}
    assert part["image_url"].keys() == {"url"}
    assert base64.b64decode(part["image_url"]["url"].partition("base64,")[2]) == MEDIA
    assert count(system, reason) == 1
    await system.assert_idle()


@pytest.mark.parametrize("system", [QUICK], indirect=True)
async def test_encoders_that_hang_before_the_sizes(system: System) -> None:
    instance = await tower(system)
    system.encoder.before_metadata.clear()
    answer = await system.ask([TEXT, IMAGE])
    assert answer.choices[0].message.content == ANSWER
    await assert_whole(system, instance, "deadline_exceeded")


@pytest.mark.parametrize("system", [QUICK], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_encoders_that_hang_while_prefill_decode_waits(system: System, stream: bool) -> None:
    """The request that has no media is ended first."""
    instance = await tower(system)
    system.encoder.before_seal.clear()

    async def for_ever(params: ECTransferParams) -> None:
        await asyncio.Event().wait()

    system.prefill_decode.waits_for = instance.waits_for = for_ever
    answer = await system.ask([TEXT, IMAGE], stream=stream)
    if stream:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in answer]).strip() == ANSWER
    else:
        assert answer.choices[0].message.content == ANSWER
    await until(lambda: system.prefill_decode.num_disconnects + instance.num_disconnects == 1)
    await assert_whole(system, instance, "deadline_exceeded")


@pytest.mark.parametrize("system", [QUICK | {"local_encode_after_s": 9.0}], indirect=True)
async def test_the_last_encoder_goes_while_prefill_decode_waits(system: System) -> None:
    instance = await tower(system)
    system.encoder.before_seal.clear()
    gone = asyncio.Event()

    async def for_ever(params: ECTransferParams) -> None:
        gone.set()
        await asyncio.Event().wait()

    system.prefill_decode.waits_for = instance.waits_for = for_ever
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(system.ask([TEXT, IMAGE]))
        await gone.wait()
        await without_encoders(system)
        assert (await asked).choices[0].message.content == ANSWER
    await assert_whole(system, instance, "no_encoder")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(FailureKind.ENCODER_ERROR, "encode_failed"), (FailureKind.STORE_FULL, "store_full")],
)
async def test_attempts_used_up(system: System, kind: FailureKind, reason: str) -> None:
    instance = await tower(system)
    system.encoder.failures = [kind] * 2
    answer = await system.ask([TEXT, IMAGE])
    assert answer.choices[0].message.content == ANSWER
    await assert_whole(system, instance, reason)


@pytest.mark.parametrize(
    ("kind", "status"),
    [(FailureKind.BAD_MEDIA, 400), (FailureKind.TOO_LARGE, 413), (FailureKind.DEAD_LETTER, 503)],
)
async def test_what_no_engine_shall_get(system: System, kind: FailureKind, status: int) -> None:
    """Bad media, and media that ended their encoders."""
    instance = await tower(system)
    system.encoder.failures = [kind] * 2
    with pytest.raises(openai.APIStatusError) as caught:
        await system.ask([TEXT, IMAGE])
    assert caught.value.status_code == status
    assert whole_bodies(system.prefill_decode, instance) == []


@pytest.mark.parametrize("system", [QUICK], indirect=True)
async def test_an_instance_that_waits_for_another_reason_is_left_alone(system: System) -> None:
    """The tensors are all there: a whole request would wait as well."""
    instance = await tower(system)
    system.prefill_decode.behaviour = instance.behaviour = "hang"
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(system.ask([TEXT, IMAGE]))
        await until(lambda: system.encoder.num_encodes)
        await until(lambda: not next(iter(system.gateway.orders.table)).in_flight)
        for _ in range(10):  # well past `local_encode_after_s`, in reads of the registry
            await system.gateway.view.wait_for_refresh()
        assert whole_bodies(system.prefill_decode, instance) == []
        system.prefill_decode.release.set()
        instance.release.set()
        assert (await asked).choices[0].message.content == ANSWER


async def test_never_after_the_first_token(system: System) -> None:
    instance = await tower(system)
    system.prefill_decode.behaviour = instance.behaviour = "die"
    with pytest.raises(openai.APIError, match="broke off"):
        async for _ in await system.ask([TEXT, IMAGE], stream=True):
            pass
    assert whole_bodies(system.prefill_decode, instance) == []


@pytest.mark.parametrize("system", [QUICK | ALLOWED_OPTIONS], indirect=True)
@pytest.mark.parametrize(
    "options",
    [{"mm_processor_kwargs": {"max_pixels": 4096}}, {"media_io_kwargs": {"image": {"rgba": [0, 0, 0]}}}],
    ids=str,
)
async def test_media_with_options_are_for_encoders_alone(system: System, options: dict[str, Any]) -> None:
    """As if there were no tower: only encoders check what the processor made of them."""
    instance = await tower(system)
    await without_encoders(system)
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([TEXT, IMAGE], extra_body=options)
    assert (caught.value.status_code, caught.value.code) == (503, "no_encoder")
    assert whole_bodies(system.prefill_decode, instance) == []
