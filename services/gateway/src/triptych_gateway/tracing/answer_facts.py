"""Facts of an answer in its request's span: id, model, finish reasons, usage. Never its text.

The first event of a stream is parsed, and at its end the last events that end a choice or have the usage.
Only a stream of several choices is searched as it passes, for the word that ends one: its quotes would be
escaped in any text.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import orjson

from triptych_gateway.tracing import attributes

MAX_PARSED_BYTES = 64 << 10  # of one event, or of a whole answer: it is parsed on the event loop
MAX_USAGE_BYTES = 4 << 10
MAX_CHARS = 128
MAX_CHOICES = 128
NUM_LAST = 4  # the end of the only choice, the usage and `[DONE]` come in three pieces at most
_FINISHED = b'"finish_reason":"'
_STOPPED = b'"stop_reason":"'  # of Anthropic's form
_USAGE = b'"usage":{'
_EVENT_END = b"\n\n"
_DATA_LINE = re.compile(rb"(?:event:[^\n]*\n)?data:")
_HOLDERS = ("message", "response")  # of an answer, in events of other forms than completions

# Also of Anthropic's form, where tokens of the prompt that were in a cache are not among the input's.
_USAGE_NAMES = (
    (
        ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        attributes.USAGE_INPUT_TOKENS,
    ),
    (("completion_tokens", "output_tokens"), attributes.USAGE_OUTPUT_TOKENS),
)

Facts = dict[str, str | int | list[str]]


class AnswerFacts:
    """Facts filled in as the answer passes. Missing or unexpected fields are left out."""

    def __init__(self, num_choices: int = 1) -> None:
        self._has_one_choice = num_choices == 1
        self._first = b""
        self._last: deque[bytes] = deque(maxlen=NUM_LAST)
        self._usage: dict[str, Any] = {}
        self._head: dict[str, Any] = {}
        self._reasons: dict[int, str] = {}

    def feed_events(self, events: bytes) -> None:
        self._last.append(events)
        if not self._first:
            self._first = events
        if not self._has_one_choice and _FINISHED in events:
            for event in _objects(events, _FINISHED):
                self._take_reasons(event)

    def feed_whole(self, body: bytes) -> None:
        """Read the body of an answer that is not streamed; of a long one only the usage at its end."""
        if len(body) > MAX_PARSED_BYTES:
            self._usage = usage_at_end(body)
            return
        self._head = _parse(body)
        self._usage = object_of(self._head.get("usage"))
        self._take_reasons(self._head)

    def attributes(self) -> Facts:
        for event in _objects(self._first.partition(_EVENT_END)[0], b""):
            self._head = _held(event)
        for events in self._last:
            for needle in (_FINISHED, _STOPPED) if self._has_one_choice else ():
                if needle in events:
                    for event in _objects(events, needle):
                        self._take_reasons(event)
            if _USAGE in events:
                for event in _objects(events, _USAGE):
                    self._usage = object_of(_held(event).get("usage")) or usage_at_end(events)
        found: Facts = {}
        for name, attribute in (("id", attributes.RESPONSE_ID), ("model", attributes.RESPONSE_MODEL)):
            if isinstance(value := self._head.get(name), str):
                found[attribute] = value[:MAX_CHARS]
        if self._reasons:
            found[attributes.RESPONSE_FINISH_REASONS] = [
                reason for _, reason in sorted(self._reasons.items())
            ]
        for names, attribute in _USAGE_NAMES:
            counts = [count for name in names if isinstance(count := self._usage.get(name), int)]
            if counts:
                found[attribute] = sum(counts)
        return found

    def _take_reasons(self, answer: dict[str, Any]) -> None:
        reason = object_of(answer.get("delta")).get("stop_reason") or answer.get("stop_reason")
        if isinstance(reason, str):
            self._reasons[0] = reason[:MAX_CHARS]
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            reason = object_of(choice).get("finish_reason")
            index = object_of(choice).get("index", 0)
            if isinstance(reason, str) and isinstance(index, int) and len(self._reasons) < MAX_CHOICES:
                self._reasons[index] = reason[:MAX_CHARS]


def _objects(events: bytes, needle: bytes) -> Iterator[dict[str, Any]]:
    for event in events.split(_EVENT_END):
        if needle in event and (found := _DATA_LINE.match(event)) is not None:
            yield _parse(event[found.end() :])


def _held(event: dict[str, Any]) -> dict[str, Any]:
    return next((object_of(event[name]) for name in _HOLDERS if name in event), event)


def usage_at_end(body: bytes) -> dict[str, Any]:
    """Return the last usage in `body`, which may be the end of an answer; {} without one."""
    at = body.rfind(_USAGE)
    if at < 0:
        return {}
    begin = at + len(_USAGE) - 1
    try:
        found, _ = json.JSONDecoder().raw_decode(
            body[begin : begin + MAX_USAGE_BYTES].decode(errors="replace")
        )
    except ValueError:
        return {}
    return object_of(found)


def _parse(text: bytes) -> dict[str, Any]:
    if len(text) > MAX_PARSED_BYTES:
        return {}
    return object_in(text)


def object_in(text: bytes) -> dict[str, Any]:
    """Return the object in an answer's JSON text; {} if there is none, as in `[DONE]`."""
    try:
        return object_of(orjson.loads(text))
    except orjson.JSONDecodeError:
        return {}


def object_of(value: object) -> dict[str, Any]:
    """Return `value` if it is an object, else {}."""
    return value if isinstance(value, dict) else {}
