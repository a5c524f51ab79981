"""Tokens of an answer, read as it passes; only an event that the caller did not ask for is left out."""

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from triptych_gateway.access.answer_usage import AnswerUsage, asking_for_usage

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


WORD = event({"choices": [{"index": 0, "delta": {"content": 'a "usage" of\n\nwords'}}]})
USAGE_EVENT = event({"choices": [], "usage": USAGE})
DONE = b"data: [DONE]\n\n"


async def passed(
    usage: AnswerUsage, *chunks: bytes, kind: bytes = b"text/event-stream; charset=utf-8"
) -> Any:
    """Bodies of the messages that come through."""
    bodies: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    metered = usage.meter(send)
    await metered({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for chunk in chunks:
        await metered({"type": "http.response.body", "body": chunk, "more_body": True})
    await metered({"type": "http.response.body", "body": b"", "more_body": False})
    return bodies


@pytest.mark.parametrize("is_together", [True, False])
async def test_the_event_that_was_added_does_not_reach_the_caller(is_together: bool) -> None:
    usage = AnswerUsage(drops_usage_event=True)
    events = [WORD, WORD, USAGE_EVENT, DONE]
    found = await passed(usage, *([b"".join(events)] if is_together else events))
    assert b"".join(found) == WORD + WORD + DONE
    assert usage.num_tokens == 12


def finish(index: int, fingerprint: str | None = None) -> bytes:
    """The event that ends a choice."""
    choice = {"index": index, "delta": {}, "finish_reason": "stop"}
    return event({"choices": [choice]} | ({} if fingerprint is None else {"system_fingerprint": fingerprint}))


def data_of(stream: bytes) -> list[Any]:
    return [
        json.loads(each.removeprefix(b"data: "))
        for each in stream.split(b"\n\n")[:-1]
        if b"[DONE]" not in each
    ]


@pytest.mark.parametrize("is_together", [True, False])
async def test_the_fingerprint_is_where_it_is_without_usage(is_together: bool) -> None:
    """In the events that end a choice; with usage vLLM sends it in that event alone."""
    told = event({"choices": [], "usage": USAGE, "system_fingerprint": "fp-1"})
    events = [WORD, finish(0), WORD, finish(1), told, DONE]
    usage = AnswerUsage(drops_usage_event=True)
    found = b"".join(await passed(usage, *([b"".join(events)] if is_together else events)))
    wanted = WORD + WORD + finish(0, "fp-1") + finish(1, "fp-1") + DONE
    assert data_of(found) == data_of(wanted)
    assert found.endswith(DONE)


@pytest.mark.parametrize("end", [[USAGE_EVENT, DONE], [DONE], []])
async def test_no_end_of_a_choice_is_lost(end: list[bytes]) -> None:
    """Without a fingerprint; without usage; in a stream that breaks off."""
    found = await passed(AnswerUsage(drops_usage_event=True), WORD, finish(0), *end)
    assert b"".join(found) == WORD + finish(0) + (DONE if end else b"")


@pytest.mark.parametrize(
    ("events", "num_tokens"),
    [
        ([{"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}], 7),
        ([{"type": "response.created", "response": {"usage": None}}], None),
        (
            [
                {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 0}}},
                {"type": "message_delta", "usage": {"output_tokens": 9}},
            ],
            12,
        ),
        ([{"choices": [1], "usage": {"total_tokens": 4}}, {"choices": [1], "usage": {"total_tokens": 5}}], 5),
        ([{"choices": [], "usage": {"total_tokens": "many"}}], None),
    ],
)
async def test_other_forms_of_usage(events: list[dict[str, Any]], num_tokens: int | None) -> None:
    usage = AnswerUsage(drops_usage_event=False)
    sent = [b"event: x\n" + event(each) for each in events]
    assert await passed(usage, *sent) == [*sent, b""]
    assert usage.num_tokens == num_tokens


@pytest.mark.parametrize(
    ("body", "options", "is_added"),
    [
        ({"stream": True}, {"include_usage": True}, True),
        ({"stream": True, "stream_options": None}, {"include_usage": True}, True),
        (
            {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
            {"include_usage": True},
            True,
        ),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"include_usage": True}, False),
        ({"stream": True, "stream_options": "x"}, "x", False),  # vLLM refuses it
        ({"stream": True, "stream_options": {"include_usage": "false"}}, {"include_usage": True}, True),
        ({"stream": "true"}, {"include_usage": True}, True),
        ({"stream": 1, "stream_options": {"include_usage": "yes"}}, {"include_usage": "yes"}, False),
        ({"stream": "no"}, None, False),
        ({"stream": "x"}, None, False),  # vLLM refuses it
        ({"stream": False}, None, False),
        ({}, None, False),
    ],
)
def test_a_stream_is_asked_for_its_usage(body: dict[str, Any], options: Any, is_added: bool) -> None:
    found, was_added = asking_for_usage(body)
    assert (found.get("stream_options"), was_added) == (options, is_added)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_events_of_many_tokens_cannot_be_asked_for(options: dict[str, Any]) -> None:
    """A caller that leaves before the end would have had them for one each."""
    found, _ = asking_for_usage({"stream": True, "stream_options": options, "stream_interval": 500})
    assert "stream_interval" not in found


@pytest.mark.parametrize("num_pieces", [1, 3, 1000])
async def test_a_long_answer_is_not_parsed(num_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych_gateway.access.answer_usage.object_in", lambda text: pytest.fail("parsed"))
    usage = AnswerUsage(drops_usage_event=False)
    text = json.dumps(
        {"data": ["x" * 100] * 1000, "usage": USAGE, "prompt_logprobs": [None] * 50}, separators=(",", ":")
    ).encode()
    size = -(-len(text) // num_pieces)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert b"".join(await passed(usage, *pieces, kind=b"application/json")) == text
    assert usage.num_tokens == 12


def named(data: dict[str, Any]) -> bytes:
    """An event of Anthropic's form."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


async def test_anthropics_events_tell_it_at_both_ends() -> None:
    usage = AnswerUsage(drops_usage_event=False)
    start = named({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 1}}})
    text = {"type": "text_delta", "text": 'a "usage"'}
    delta = named({"type": "content_block_delta", "index": 0, "delta": text})
    end = {"input_tokens": 4, "output_tokens": 3, "cache_read_input_tokens": 5}
    stop = named({"type": "message_delta", "delta": {}, "usage": end})
    assert b"".join(await passed(usage, start + delta, delta, stop)) == start + delta * 2 + stop
    assert usage.num_tokens == 12


async def test_anthropics_stream_that_breaks_off_has_not_told_it() -> None:
    usage = AnswerUsage(drops_usage_event=False)
    start = named({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}})
    delta = named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}})
    await passed(usage, start, *[delta] * 5)
    assert usage.num_tokens is None
    assert usage.num_events == 6
