"""Anthropic's Messages API through the gateway when parts fail."""

import asyncio
from typing import Any

import anthropic
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.messages_client import BODY, WORDS, ask, image, streamed
from tests.support.gateway.system import System
from tests.support.waiting import until
from triptych_common.protocol.messages import FailureKind


async def test_a_failed_encode_is_the_requests_error(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    system.encoder.failures = [FailureKind.BAD_MEDIA]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await ask(claude, [image()])
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0].source.data" in body["error"]["message"]


@pytest.mark.parametrize(
    ("behaviour", "error", "kind"),
    [
        ("refuse", anthropic.BadRequestError, "invalid_request_error"),
        ("too_long", anthropic.BadRequestError, "invalid_request_error"),
        ("fail", anthropic.InternalServerError, "overloaded_error"),
        ("busy", anthropic.InternalServerError, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("content", ["a", [image()]], ids=["text", "image"])
async def test_prefill_decodes_errors_have_anthropics_form(
    system: System,
    claude: anthropic.AsyncAnthropic,
    behaviour: str,
    error: type[anthropic.APIStatusError],
    kind: str,
    content: Any,
) -> None:
    system.prefill_decode.behaviour = behaviour
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(claude, content)
    body: Any = caught.value.body
    assert caught.value.status_code == (400 if error is anthropic.BadRequestError else 503)
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"].keys() == {"type", "message"}


async def test_an_error_before_the_first_event_is_a_status(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    system.prefill_decode.behaviour = "error_first"
    with pytest.raises(anthropic.APIStatusError) as caught:
        await streamed(claude, "a")
    assert caught.value.status_code == 503


@pytest.mark.parametrize("behaviour", ["die", "error_late"])
@pytest.mark.parametrize("content", ["a", [image()]], ids=["text", "image"])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(
    system: System, claude: anthropic.AsyncAnthropic, behaviour: str, content: Any
) -> None:
    system.prefill_decode.behaviour = behaviour
    with pytest.raises(anthropic.APIError) as caught:
        await streamed(claude, content)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
    raw = await system.http.post("/v1/messages", json=BODY | {"stream": True})
    *events, last = raw.text.strip().split("\n\n")
    assert last.startswith("event: error\ndata: {")
    assert all(event.startswith("event: ") for event in events)
    assert "message_stop" not in raw.text


async def test_another_instance_answers_where_one_cannot(
    system: System, claude: anthropic.AsyncAnthropic
) -> None:
    other = FakePrefillDecode("pd-1")
    await system.stack.enter_async_context(other.running(system.bus))
    await system.refresh()
    system.prefill_decode.behaviour = "busy"
    for content in ("a", [image()]):
        for way in (ask, streamed):
            assert WORDS in (await way(claude, content)).content[0].text


@pytest.mark.parametrize("content", ["a", [image()]], ids=["text", "image"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_its_request(
    system: System, claude: anthropic.AsyncAnthropic, content: Any, stream: bool
) -> None:
    system.prefill_decode.behaviour = "hang"
    asked = asyncio.get_running_loop().create_task((streamed if stream else ask)(claude, content))
    await until(lambda: len(system.prefill_decode.bodies) == 1)
    asked.cancel()
    await until(lambda: system.prefill_decode.num_disconnects == 1)
