"""Token usage of a request, read from its answer as that is sent, whole or as a stream of events.

A stream reports its usage at its end if the request asks for it. Where the caller did not ask, the gateway
does (`asking_for_usage`) and drops the event that the caller does not expect. vLLM then puts its fingerprint
into that event only, not into those that end a choice: these wait for it and get it back.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from triptych_gateway.tracing.answer_facts import (
    MAX_PARSED_BYTES,
    MAX_USAGE_BYTES,
    object_in,
    usage_at_end,
)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_USAGE = b'"usage"'  # in text its quotes would be escaped
_DATA = b"data:"
_DONE = b"data: [DONE]"
_END = b"\n\n"
_FINISH = re.compile(rb'"finish_reason":\s*"')
_FINGERPRINT = "system_fingerprint"
_MESSAGE = "message"
_HOLDERS = ("response", _MESSAGE)  # of usage, in events of other endpoints than completions
_FLAG = TypeAdapter(bool)  # as vLLM reads it: "true" and 1 as well
_PARTS = (
    ("prompt_tokens", "completion_tokens"),
    # Of Anthropic's form, tokens of the prompt that were in a cache are not among the input's.
    ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
)


def asking_for_usage(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    options = body.get("stream_options") or {}
    if not _flag(body.get("stream")) or not isinstance(options, dict):
        return body, False
    # Many tokens in one event could be had by leaving before the end.
    body = {name: each for name, each in body.items() if name != "stream_interval"}
    if _flag(options.get("include_usage")):
        return body, False
    added = {name: each for name, each in options.items() if name != "continuous_usage_stats"}
    return {**body, "stream_options": {**added, "include_usage": True}}, True


class AnswerUsage:
    """Usage of one answer; `meter` reads what is sent."""

    def __init__(self, *, drops_usage_event: bool) -> None:
        self._drops_usage_event = drops_usage_event
        self._is_stream = False
        self._usage: dict[str, Any] = {}
        self._end = b""  # of a whole answer that comes in pieces
        self._waiting: list[bytes] = []  # events that end a choice
        self.num_events = 0  # of a stream, each a token or more

    @property
    def num_tokens(self) -> int | None:
        """Tokens of prompt and answer; None until the answer reports them."""
        total = self._usage.get("total_tokens")
        if isinstance(total, int):
            return total
        for names in _PARTS:
            if isinstance(self._usage.get(names[1]), int):
                return sum(number for name in names if isinstance(number := self._usage.get(name), int))
        return None

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer alone, as far as it has reported them."""
        for names in _PARTS:
            if isinstance(number := self._usage.get(names[1]), int):
                return number
        return 0

    def meter(self, send: Send) -> Send:

        async def metered(message: MutableMapping[str, Any]) -> None:
            body = message.get("body", b"")
            if message["type"] == "http.response.start":
                self._is_stream = _is_stream(message)
            elif not self._is_stream:
                self._read_whole(body, is_last=not message.get("more_body"))
            else:
                body = self._read_events(body)
                if message.get("more_body"):
                    if not body:
                        return
                elif self._waiting:  # the stream broke off: the next event is the error
                    body = self._take_waiting(None) + body
                message["body"] = body
            await send(message)

        return metered

    def _read_whole(self, piece: bytes, *, is_last: bool) -> None:
        """Parse a short answer; of a long one, only the usage at its end, to spare the event loop."""
        if is_last and not self._end and len(piece) <= MAX_PARSED_BYTES:
            self._note(object_in(piece))
            return
        self._end = (self._end + piece)[-2 * MAX_USAGE_BYTES :]
        if is_last:
            self._note({"usage": usage_at_end(self._end)})

    def _read_events(self, events: bytes) -> bytes:
        """Read whole events; return those for the client now."""
        self.num_events += events.count(_END)
        if self._drops_usage_event:
            if not self._waiting and _USAGE not in events and _FINISH.search(events) is None:
                return events
            *whole, rest = events.split(_END)
            return b"".join(map(self._pass_event, whole)) + rest
        if _USAGE in events:
            for event in events.split(_END):
                if _USAGE in event:
                    self._note(_data_of(event))
        return events

    def _pass_event(self, event: bytes) -> bytes:
        """Read one event; return the bytes for the client now."""
        if event == _DONE:
            return self._take_waiting(None) + event + _END
        if _USAGE in event:
            data = _data_of(event)
            self._note(data)
            if data.get("choices") == [] and isinstance(data.get("usage"), dict):
                return self._take_waiting(data.get(_FINGERPRINT))
        if _FINISH.search(event) is None:
            return event + _END
        self._waiting.append(event)
        return b""

    def _take_waiting(self, fingerprint: str | None) -> bytes:
        """Return and clear waiting events, as vLLM sends them where no usage is requested."""
        waiting, self._waiting = self._waiting, []
        if fingerprint is not None:
            waiting = [
                b"data: " + orjson.dumps({**_data_of(event), _FINGERPRINT: fingerprint}) for event in waiting
            ]
        return b"".join(event + _END for event in waiting)

    def _note(self, data: Mapping[str, Any]) -> None:
        for key, holder in ((None, data), *((name, data.get(name)) for name in _HOLDERS)):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                known = {name: each for name, each in usage.items() if each is not None}
                if key == _MESSAGE:  # its stream begins: nothing is answered yet
                    known.pop(_PARTS[-1][1], None)
                self._usage |= known


def _flag(value: Any) -> bool:
    try:
        return value is not None and _FLAG.validate_python(value)
    except ValidationError:
        return False


def _is_stream(start: Mapping[str, Any]) -> bool:
    types = (value for name, value in start.get("headers", ()) if name.lower() == b"content-type")
    return next(types, b"").startswith(b"text/event-stream")


def _data_of(event: bytes) -> dict[str, Any]:
    at = event.find(_DATA)
    return object_in(event[at + len(_DATA) :]) if at >= 0 else {}
