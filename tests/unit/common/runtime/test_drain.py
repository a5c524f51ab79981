"""The gate in front of an HTTP application, driven as an ASGI server would."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import orjson

from tests.support.waiting import until
from triptych_common.runtime import DRAINING_HEADER, DrainGate

Message = MutableMapping[str, Any]


class Application:
    """Answers 200 once the test allows it."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.num_calls = 0

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.num_calls += 1
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b"done"})


async def ask(gate: DrainGate, path: str = "/v1/chat/completions") -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    await gate({"type": "http", "path": path}, receive, send)
    start, body = sent
    return start["status"], dict(start["headers"]), body["body"]


def gate_of(application: Application) -> DrainGate:
    return DrainGate(application, lambda path: path.startswith("/v1/"))


async def test_leaving_serves_and_closes_the_connection() -> None:
    gate = gate_of(Application())
    gate.leave()
    status, headers, _ = await ask(gate)
    assert (status, headers[b"connection"], headers[b"x"]) == (200, b"close", b"y")


async def test_refusing_never_reaches_the_application() -> None:
    application = Application()
    gate = gate_of(application)
    gate.refuse()
    status, headers, body = await ask(gate)
    assert (status, headers[b"retry-after"], headers[b"connection"]) == (503, b"1", b"close")
    assert headers[DRAINING_HEADER.lower().encode()] == b"1"
    assert orjson.loads(body)["error"]["code"] == "draining"
    assert application.num_calls == 0
    assert (await ask(gate, "/health/ready"))[0] == 200


async def test_a_refusal_has_the_form_of_its_path() -> None:
    gate = DrainGate(Application(), lambda path: True, lambda path, error: f"{path} {error.code}".encode())
    gate.refuse()
    assert (await ask(gate, "/v1/messages"))[2] == b"/v1/messages draining"


async def test_idle_when_the_last_guarded_request_has_ended() -> None:
    application = Application()
    gate = gate_of(application)
    application.go_on.clear()
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(ask(gate)) for _ in range(2)]
        group.create_task(ask(gate, "/internal/media/x"))
        await until(lambda: application.num_calls == 3)
        gate.refuse()
        idle = group.create_task(gate.wait_idle())
        assert gate.num_requests == 2
        running[0].cancel()  # its client went away
        await asyncio.wait({running[0]})
        assert not idle.done()
        application.go_on.set()
    assert running[1].result()[0] == 200
    assert gate.num_requests == 0
