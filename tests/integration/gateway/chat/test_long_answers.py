"""Large answers that are not streamed: passed on whole, bounded, not kept for a client that does not read."""

import socket

import openai
import orjson
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System
from tests.support.waiting import until


@pytest.mark.parametrize("system", [{"chunk_timeout_s": 0.5}], indirect=True)
async def test_a_whole_answer_that_nobody_reads_does_not_stay(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request keeps its place as long as it is held, and that is bounded."""
    monkeypatch.setattr(FakePrefillDecode, "_text", lambda self, body: "x" * (30 << 20))
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", system.gateway.settings.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        await until(lambda: b'status="499"} 1.0' in system.gateway.services.metrics.metrics.render())


async def test_a_long_whole_answer_arrives_as_it_is(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePrefillDecode, "_text", lambda self, body: "xyz" * (1 << 20))
    answer = await system.ask("x")
    assert answer.choices[0].message.content == "xyz" * (1 << 20)


@pytest.mark.parametrize("system", [{"max_answer_bytes": 1000}], indirect=True)
async def test_a_whole_answer_is_bounded(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePrefillDecode, "_text", lambda self, body: "x" * 1001)
    with pytest.raises(openai.APIStatusError) as caught:
        await system.ask("x")
    assert (caught.value.status_code, caught.value.code) == (413, "answer_too_large")
    assert len(system.prefill_decode.bodies) == 1  # no other instance is asked
