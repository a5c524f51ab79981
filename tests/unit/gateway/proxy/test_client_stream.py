"""ClientStream: comments before an answer, and where an error goes then."""

from collections.abc import MutableMapping
from typing import Any

import pytest

from triptych_gateway.proxy import streaming
from triptych_gateway.proxy.streaming import COMMENT, ClientStream, Send


class Client:
    """Record what a client has been sent, and what a meter of the answer has seen of it."""

    def __init__(self) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.metered: list[str] = []
        self.stream = ClientStream(self._send, {"X-Request-Id": "r"})
        self.stream.send_by(self._meter)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    def _meter(self, send: Send) -> Send:
        async def metered(message: MutableMapping[str, Any]) -> None:
            self.metered.append(message["type"])
            await send(message)

        return metered

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def num_starts(self) -> int:
        return sum(message["type"] == "http.response.start" for message in self.sent)


async def test_a_comment_begins_no_answer() -> None:
    client = Client()
    await client.stream.keep_open()
    assert (client.stream.has_headers, client.stream.has_begun) == (True, False)
    assert client.body == COMMENT
    assert client.metered == [], "a request that fails now has cost nothing"


async def test_the_answer_follows_under_the_same_headers() -> None:
    client = Client()
    await client.stream.keep_open()
    await client.stream.begin_answer({"Content-Type": "text/event-stream; charset=utf-8"})
    await client.stream.write_chunk(b"data: 1\n\n")
    await client.stream.end_answer()
    assert client.num_starts == 1
    assert client.body == COMMENT + b"data: 1\n\n"
    assert client.metered == ["http.response.start", "http.response.body", "http.response.body"]


async def test_an_error_before_the_answer_is_an_event_and_not_metered() -> None:
    client = Client()
    await client.stream.keep_open()
    await client.stream.end_answer(b"data: error\n\n")
    assert client.body == COMMENT + b"data: error\n\n"
    assert client.metered == []
    assert not client.sent[-1]["more_body"]


async def test_one_comment_in_an_interval_and_none_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    await client.stream.keep_open()
    await client.stream.keep_open()
    assert client.body == COMMENT
    monkeypatch.setattr(streaming, "COMMENT_INTERVAL_S", 0.0)
    await client.stream.keep_open()
    assert client.body == COMMENT * 2
    await client.stream.begin_answer({})
    await client.stream.keep_open()
    assert client.body == COMMENT * 2
