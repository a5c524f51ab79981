"""What every test of a Redis fault asks of a whole gateway."""

import asyncio

import openai

from tests.support.gateway.media_samples import image_part
from tests.support.gateway.system import System
from tests.support.waiting import until_async

RETRYABLE = {"bus_unavailable", "deadline_exceeded", "encode_failed", "no_encoder", "no_instance"}


async def until_ready(system: System) -> None:
    """The gateway knows an encoder, and its view of the registry is fresh."""

    async def is_ready() -> bool:
        ready = await system.http.get("/health/ready")
        return ready.status_code == 200 and ready.json()["redis"] and ready.json()["encoder_available"]

    await until_async(is_ready)


async def answer_or_documented_error(system: System, color: int, limit_s: float) -> str:
    """'answer', or the code of a retryable error; anything else, or nothing in time, fails the test."""
    refused: openai.APIStatusError | None = None
    try:
        async with asyncio.timeout(limit_s):
            answer = await system.ask([image_part(color)])
    except openai.APIStatusError as error:
        refused = error
    if refused is None:
        assert answer.choices[0].message.content.startswith("1x8x8")
        return "answer"
    assert refused.status_code == 503
    assert refused.code in RETRYABLE
    assert refused.response.headers["retry-after"]
    return str(refused.code)


async def check_well_again(system: System, color: int) -> None:
    """A new image is encoded and answered, and nothing is left of any request."""
    await until_ready(system)
    assert await answer_or_documented_error(system, color, 10) == "answer"
    await system.assert_idle()
