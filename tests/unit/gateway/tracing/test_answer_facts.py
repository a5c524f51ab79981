"""What of an answer is said in the span: never its text, whatever that looks like."""

import json
from typing import Any

import pytest

from triptych_gateway.tracing import answer_facts
from triptych_gateway.tracing.answer_facts import MAX_CHARS, MAX_PARSED_BYTES, AnswerFacts

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
TRICKY = 'he said "finish_reason":"stop" and "usage":{"prompt_tokens":99}'


def dumps(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def event(delta: str = "", reason: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": {"content": delta}, "finish_reason": reason}
    data = {"id": "chatcmpl-1", "model": "m", "choices": [choice], **more}
    return b"data: " + dumps(data) + b"\n\n"


def of_stream(*chunks: bytes, num_choices: int = 1) -> dict[str, Any]:
    facts = AnswerFacts(num_choices)
    for chunk in chunks:
        facts.feed_events(chunk)
    return facts.attributes()


def of_whole(data: Any) -> dict[str, Any]:
    facts = AnswerFacts()
    facts.feed_whole(data if isinstance(data, bytes) else dumps(data))
    return facts.attributes()


LAST = b"data: " + dumps({"id": "chatcmpl-1", "model": "m", "choices": [], "usage": USAGE}) + b"\n\n"
DONE = b"data: [DONE]\n\n"
ALL = {
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.response.model": "m",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.usage.input_tokens": 5,
    "gen_ai.usage.output_tokens": 2,
}


@pytest.mark.parametrize("joined", [False, True], ids=["event by event", "all at once"])
def test_of_a_stream(joined: bool) -> None:
    chunks = [event(), event(TRICKY), event("b"), event("", "stop"), LAST, DONE]
    for num_choices in (1, 2):
        assert of_stream(*([b"".join(chunks)] if joined else chunks), num_choices=num_choices) == ALL


def test_only_few_events_of_a_stream_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = answer_facts._parse

    def count(text: bytes) -> dict[str, Any]:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(answer_facts, "_parse", count)
    assert of_stream(event(), *(event(TRICKY) for _ in range(500)), event("", "stop"), LAST, DONE) == ALL
    assert len(parsed) == 3


def test_usage_in_every_event_is_the_last_one() -> None:
    chunks = [event(f"w{number}", usage={**USAGE, "completion_tokens": number}) for number in range(5)]
    assert of_stream(*chunks)["gen_ai.usage.output_tokens"] == 4


def test_without_usage_and_broken_off() -> None:
    assert of_stream(event(), event("a")) == {
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m",
    }
    assert of_stream() == {}


def test_reasons_stand_in_the_order_of_the_choices() -> None:
    chunks = [event(), event("", "length", index=1), *(event("x") for _ in range(9)), event("", "stop")]
    chunks += [event("", "tool_calls", index=2), LAST, DONE]
    assert of_stream(*chunks, num_choices=3)["gen_ai.response.finish_reasons"] == [
        "stop",
        "length",
        "tool_calls",
    ]


def whole(text: str) -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": USAGE, "prompt_logprobs": None}


def test_of_a_whole_answer() -> None:
    assert of_whole(whole(TRICKY)) == ALL


def test_of_a_long_whole_answer_the_usage_alone_is_read() -> None:
    usage = {name: value for name, value in ALL.items() if "usage" in name}
    assert of_whole(whole(TRICKY * (MAX_PARSED_BYTES // len(TRICKY) + 1))) == usage


@pytest.mark.parametrize(
    "data",
    [
        b"", b"nonsense", b"[1]", b'"usage":{' * 20_000, {"id": 5, "model": None, "choices": {"a": 1}},
        {"choices": [None, {"finish_reason": 3}, {"finish_reason": "stop", "index": "x"}], "usage": [1]},
    ],
)  # fmt: skip
def test_what_has_another_form_is_left_out(data: Any) -> None:
    assert of_whole(data) == {}


def test_names_are_short() -> None:
    found = of_whole({**whole("x"), "id": "i" * 1000, "model": "m" * 1000})
    assert {len(found["gen_ai.response.id"]), len(found["gen_ai.response.model"])} == {MAX_CHARS}


RESPONSE = {"id": "resp_1", "model": "m", "output": [], "usage": None}
RESPONSE_USAGE = {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 1}, "output_tokens": 2}


@pytest.mark.parametrize("num_chars", [3, MAX_PARSED_BYTES])
def test_of_a_responses_stream(num_chars: int) -> None:
    output = [{"content": [{"text": TRICKY * (num_chars // 3)}]}]
    facts = of_stream(
        named("response.created", response=RESPONSE) + named("response.in_progress", response=RESPONSE),
        named("response.output_text.delta", delta=TRICKY),
        named("response.completed", response={**RESPONSE, "output": output, "usage": RESPONSE_USAGE}),
    )
    assert facts == {
        "gen_ai.response.id": "resp_1",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 2,
    }


def test_of_a_whole_response() -> None:
    facts = of_whole({**RESPONSE, "object": "response", "usage": RESPONSE_USAGE})
    assert facts["gen_ai.usage.input_tokens"] == 5
    assert of_whole(RESPONSE) == {"gen_ai.response.id": "resp_1", "gen_ai.response.model": "m"}


def named(name: str, **data: Any) -> bytes:
    """An event of Anthropic's form, and of responses."""
    return f"event: {name}\ndata: ".encode() + dumps({"type": name, **data}) + b"\n\n"


ANTHROPICS = {
    "gen_ai.response.id": "msg_1",
    "gen_ai.response.model": "m",
    "gen_ai.response.finish_reasons": ["max_tokens"],
    "gen_ai.usage.input_tokens": 9,
    "gen_ai.usage.output_tokens": 3,
}


@pytest.mark.parametrize("joined", [False, True], ids=["event by event", "all at once"])
def test_of_a_stream_of_anthropics_form(joined: bool) -> None:
    message = {"id": "msg_1", "model": "m", "stop_reason": None, "usage": {"input_tokens": 4}}
    usage = {"input_tokens": 4, "cache_read_input_tokens": 5, "output_tokens": 3}
    chunks = [
        named("message_start", message=message),
        *[named("content_block_delta", index=0, delta={"type": "text_delta", "text": TRICKY})] * 9,
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": "max_tokens"}, usage=usage),
        named("message_stop"),
    ]
    assert of_stream(*([b"".join(chunks)] if joined else chunks)) == ANTHROPICS


def test_of_a_whole_answer_of_anthropics_form() -> None:
    usage = {"input_tokens": 9, "output_tokens": 3}
    answer = {"id": "msg_1", "model": "m", "stop_reason": "max_tokens", "usage": usage}
    assert of_whole(answer) == ANTHROPICS
