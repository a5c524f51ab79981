"""Server-sent events as bytes: cut into whole events, never rewritten; knows errors, tokens, and the end.

form           an event                the last one
completions    data: {…}               data: [DONE]
messages       event: message_start    event: message_stop
               data: {…}               data: {…}
responses      as messages             event: response.completed
                                       data: {…}
"""

from typing import Any

from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.tracing.answer_facts import object_in

_END = b"\n\n"
DONE = b"data: [DONE]"
_ERROR = b'"error"'  # this and the patterns below match no text, where quotes are escaped
_ROLE = b'"role"'  # vLLM's first event of each choice, without a token
_DONE_EVENT = DONE + _END
_USAGE = b'"choices":[]'  # the event with the usage alone
_NAME = b"event:"
_LAST = {  # beginning of the last event
    ChatForm.COMPLETIONS: DONE,
    ChatForm.MESSAGES: b"event: message_stop",
    ChatForm.RESPONSES: b"event: response.completed\n",
}
_DELTA = b'"type":"content_block_delta"'  # event of the Messages API with a token's text
_SIGNATURE = b'"type":"signature_delta"'  # event without a token
_RESPONSE_DELTA = b".delta\ndata:"  # of responses: no line of data has a line break in it


class EventCutter:
    """Cutter that passes only whole events, so that an error event can follow a broken stream."""

    def __init__(self, form: ChatForm = ChatForm.COMPLETIONS) -> None:
        self._last = _LAST[form]
        self._rest = b""
        self.is_done = False  # the last event has passed

    def feed(self, chunk: bytes) -> bytes:
        """Return the whole events in the bytes fed so far and not yet returned; may be empty."""
        data = self._rest + chunk if self._rest else chunk
        if data.endswith(_END):
            whole, self._rest = data, b""
        else:
            cut = data.rfind(_END)
            end = cut + len(_END) if cut >= 0 else 0
            whole, self._rest = data[:end], data[end:]
        if self._last in whole and whole.rstrip().rpartition(_END)[2].startswith(self._last):
            self.is_done = True
        return whole


def error_in_first_event(events: bytes) -> dict[str, Any] | None:
    """Return the error object if the first event is an error, as vLLM sends one before any token."""
    return _error_of(events.split(_END, 1)[0])


def cut_at_error(events: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """Return whole events up to the first error, and its error object; else all of them, and None."""
    if _ERROR not in events:
        return events, None
    before = b""
    for event in events.split(_END)[:-1]:
        error = _error_of(event)
        if error is not None:
            return before, error
        before += event + _END
    return events, None


def num_tokens_in(events: bytes, form: ChatForm = ChatForm.COMPLETIONS) -> int:
    """Return the number of vLLM's events with a token; one may bring several under speculation."""
    if form is ChatForm.MESSAGES:
        return events.count(_DELTA) - events.count(_SIGNATURE)
    if form is ChatForm.RESPONSES:
        return events.count(_RESPONSE_DELTA)
    num_events = events.count(b"\n") // 2  # a line of JSON, and the empty one behind it
    if events.endswith(_DONE_EVENT):
        num_events -= 1
    return num_events - events.count(_USAGE)


def num_roles_in(events: bytes) -> int:
    """Return the number of vLLM's events without a token, at the beginning of each choice."""
    return events.count(_ROLE)


def _error_of(event: bytes) -> dict[str, Any] | None:
    if _ERROR not in event:
        return None
    if event.startswith(_NAME):
        event = event.partition(b"\n")[2]
    if not event.startswith(b"data:"):
        return None
    error = object_in(event[len(b"data:") :]).get("error")
    return error if isinstance(error, dict) else None
