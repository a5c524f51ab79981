"""Instances that end while they have a request: how many one request can end, and what its caller gets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.fake_stages import KV_TRANSFER, FakeDecode, FakePrefill
from tests.support.gateway.samples import image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Role
from triptych_gateway.proxy.forward import Forwarder
from triptych_gateway.proxy.stages import Stages

MODEL = "poisoned"
MANY_TRIES = 8  # of what is merely not reachable
MESSAGES = [{"role": "user", "content": "x"}]
IMAGE = image_part(3)
BEGUN = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"
    b'data: {"choices": [{"ind'
)
ANSWERING = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"
    b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
)
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/responses", {"input": "x"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/embeddings", {"input": "x"}),
    ("/tokenize", {"prompt": "x"}),
]


@dataclass
class DyingInstance(FakePrefillDecode):
    """Its connection and its port are gone at the first request. `beginning`: what it sends before."""

    beginning: bytes = b""
    num_requests: int = 0

    @asynccontextmanager
    async def running(self, bus: AsyncBus) -> AsyncIterator["FakePrefillDecode"]:
        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):  # a connection without a request
                writer.close()
                return
            self.num_requests += 1
            listener.close()
            writer.write(self.beginning)
            writer.close()

        listener = await asyncio.start_server(take, self.host, self.port)
        async with listener, Registry(bus).keep_registered(self.record()) as self.registration:
            yield self


@pytest.fixture
async def many_tries(redis_url: str, tmp_path: Path) -> AsyncIterator[System]:
    async with opened_system(redis_url, tmp_path, max_dispatch_attempts=MANY_TRIES) as opened:
        yield opened


async def start(system: System, stack: AsyncExitStack, *instances: FakePrefillDecode) -> None:
    for each in instances:
        await stack.enter_async_context(each.running(system.bus))
    await system.refresh()


def dying(number: int, **fields: Any) -> list[DyingInstance]:
    role = fields.pop("role", Role.PREFILL_DECODE)
    return [DyingInstance(f"dying-{role.value}-{n}", role=role, model=MODEL, **fields) for n in range(number)]


def is_lost(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    is_same = error.get("code", "instance_lost") == "instance_lost"  # the Messages API has no codes
    return (answer.status_code, is_same, answer.headers["x-should-retry"]) == (502, True, "false")


@pytest.mark.parametrize("beginning", [b"", BEGUN], ids=["before", "during"])
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[f"{path} {len(body)}" for path, body in REQUESTS])
async def test_a_request_ends_two_instances_at_most(
    many_tries: System, path: str, body: dict[str, Any], beginning: bytes
) -> None:
    async with AsyncExitStack() as stack:
        instances = dying(4, beginning=beginning)
        await start(many_tries, stack, *instances)
        answer = await many_tries.http.post(path, json={"model": MODEL, **body})
        assert is_lost(answer), answer.text
        assert sum(each.num_requests for each in instances) == 2


@pytest.mark.parametrize(
    "beginning", [b"", BEGUN, ANSWERING], ids=["before", "during", "behind the first event"]
)
@pytest.mark.parametrize("content", ["x", [IMAGE]], ids=["text", "image"])
async def test_a_request_that_is_sent_anew_ends_two_instances_at_most(
    many_tries: System, beginning: bytes, content: Any
) -> None:
    async with AsyncExitStack() as stack:
        instances = dying(4, beginning=beginning)
        await start(many_tries, stack, *instances)
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
        answers = [await many_tries.post(body) for _ in range(4)]
        assert sum(each.num_requests for each in instances) == 2
        assert all(map(is_lost, answers[2:])), [each.text for each in answers]
        other = [{"role": "user", "content": "y"}]
        assert is_lost(await many_tries.post({"model": MODEL, "messages": other}))
        assert sum(each.num_requests for each in instances) > 2


@pytest.mark.parametrize(
    "system", [{"encode_override": "all", "max_dispatch_attempts": MANY_TRIES}], indirect=True
)
async def test_media_are_one_request_however_they_are_sent(system: System) -> None:
    """Raw, to an instance with a tower, and as metadata of what an encoder makes."""
    async with AsyncExitStack() as stack:
        instances = dying(6, role=Role.ENCODE_PREFILL_DECODE, beginning=BEGUN)
        await start(system, stack, *instances)
        await stack.enter_async_context(FakeEncoder(system.bus).running())
        await system.refresh()
        body = {"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}], "stream": True}
        answers = [
            await system.http.post("/v1/chat/completions", json=body, headers={"X-Triptych-Encode": way})
            for way in ("local", "remote", "local", "remote")
        ]
        assert sum(each.num_requests for each in instances) == 2, [each.text for each in answers]
        assert all(map(is_lost, answers[2:])), [each.text for each in answers]


@pytest.mark.parametrize("system", [{"chunk_timeout_s": 0.2}], indirect=True)
async def test_a_request_whose_answer_stalls_may_come_again(system: System) -> None:
    """Its instances may be busy; none has ended."""
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    for number in range(3):
        instance = FakePrefillDecode(f"pd-{number}", model=MODEL, behaviour="stall")
        async with AsyncExitStack() as stack:
            await start(system, stack, instance)
            assert "stream_interrupted" in (await system.post(body)).text
            assert len(instance.bodies) == 1


@pytest.mark.parametrize("content", ["x", [IMAGE]], ids=["text", "image"])
async def test_a_request_cut_off_by_draining_instances_may_come_again(
    many_tries: System, content: Any
) -> None:
    """They are restarted one after the other, and do not wait for long answers."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
    for number in range(3):
        instance = FakePrefillDecode(f"pd-{number}", model=MODEL, behaviour="hang")
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            await start(many_tries, stack, instance)
            answer = group.create_task(many_tries.post(body))
            await until(lambda each=instance: each.bodies)
            assert instance.registration is not None
            await instance.registration.announce_draining()
            await many_tries.refresh()
            instance.behaviour = "die"
            instance.release.set()
            assert "stream_interrupted" in (await answer).text


async def test_an_instances_refusal_keeps_its_cause(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    cause, raised = ValueError("cause"), list[BaseException | None]()
    forward = Forwarder.forward

    async def refuse(self: Stages, *args: Any) -> Any:
        raise RequestError(400, "x", "refused") from cause

    async def observe(self: Forwarder, *args: Any) -> Any:
        try:
            return await forward(self, *args)
        except RequestError as error:
            raised.append(error.__cause__)
            raise

    monkeypatch.setattr(Stages, "begin", refuse)
    monkeypatch.setattr(Forwarder, "forward", observe)
    assert (
        await system.post({"model": system.prefill_decode.model, "messages": MESSAGES})
    ).status_code == 400
    assert raised == [cause]


async def test_a_request_that_was_answered_may_come_again(many_tries: System) -> None:
    """Its instance ended for another reason."""
    body = {"model": MODEL, "messages": MESSAGES}
    for _ in range(3):
        async with AsyncExitStack() as stack:
            await start(many_tries, stack, *dying(1))
            assert is_lost(await many_tries.post(body))
        async with AsyncExitStack() as stack:
            await start(many_tries, stack, FakePrefillDecode("pd-1", model=MODEL))
            assert (await many_tries.post(body)).status_code == 200


async def test_a_request_whose_instance_ended_is_answered_by_another(many_tries: System) -> None:
    """It need not be at fault."""
    async with AsyncExitStack() as stack:
        (ends,), others = dying(1), [FakePrefillDecode(f"pd-{n}", model=MODEL) for n in (1, 2)]
        await start(many_tries, stack, ends, *others)
        body = {"model": MODEL, "messages": MESSAGES}
        answers = [await many_tries.post(body) for _ in range(8)]
        assert [each.status_code for each in answers] == [200] * 8
        assert ends.num_requests == 1


@pytest.mark.parametrize("number", [1, 2])
async def test_the_last_instance_of_a_model_is_spared(many_tries: System, number: int) -> None:
    async with AsyncExitStack() as stack:
        instances = dying(number)
        await start(many_tries, stack, *instances)
        answer = await many_tries.post({"model": MODEL, "messages": MESSAGES})
        assert is_lost(answer), answer.text
        assert sum(each.num_requests for each in instances) == 1


@pytest.mark.parametrize("system", [{"resend_to_last_instance": True}], indirect=True)
async def test_the_last_instance_is_asked_where_an_operator_wants_it(system: System) -> None:
    async with AsyncExitStack() as stack:
        (ends,), other = dying(1), FakePrefillDecode("pd-1", model=MODEL)
        await start(system, stack, ends, other)
        answers = [await system.post({"model": MODEL, "messages": MESSAGES}) for _ in range(4)]
        assert [each.status_code for each in answers] == [200] * 4
        assert ends.num_requests == 1


async def test_instances_that_cannot_be_reached_have_not_had_the_request(many_tries: System) -> None:
    async with AsyncExitStack() as stack:
        for number in range(3):
            away = FakePrefillDecode(f"away-{number}", port=1, model=MODEL)
            await stack.enter_async_context(away.running_nowhere(many_tries.bus))
        await start(many_tries, stack, FakePrefillDecode("pd-1", model=MODEL))
        answers = [await many_tries.post({"model": MODEL, "messages": MESSAGES}) for _ in range(4)]
        assert [each.status_code for each in answers] == [200] * 4


@pytest.mark.parametrize("content", ["x", [IMAGE]], ids=["text", "image"])
@pytest.mark.parametrize("stage", [Role.PREFILL, Role.DECODE])
async def test_of_pairs_two_instances_at_most(many_tries: System, stage: Role, content: Any) -> None:
    async with AsyncExitStack() as stack:
        instances = dying(4, role=stage, kv_transfer=KV_TRANSFER)
        prefill = FakePrefill(model=MODEL)
        other = FakeDecode(model=MODEL, prefills=[prefill]) if stage is Role.PREFILL else prefill
        await start(many_tries, stack, *instances, other)
        answer = await many_tries.post({"model": MODEL, "messages": [{"role": "user", "content": content}]})
        assert is_lost(answer), answer.text
        assert sum(each.num_requests for each in instances) == 2


async def test_the_count_of_a_prompts_tokens_counts(many_tries: System) -> None:
    """It has the request's text, and comes before the request itself."""
    async with AsyncExitStack() as stack:
        instances = dying(4, max_model_len=100)
        await start(many_tries, stack, *instances)
        text = {"type": "text", "text": "x" * 100}
        answer = await many_tries.post(
            {"model": MODEL, "messages": [{"role": "user", "content": [text, IMAGE]}]}
        )
        assert is_lost(answer), answer.text
        assert sum(each.num_requests for each in instances) == 2


async def test_an_engine_that_died_with_the_request_is_no_other_case(many_tries: System) -> None:
    """Its host lives, and answers 503."""
    died = b'{"error": {"message": "x", "code": "engine_died"}}'
    head = b"HTTP/1.1 503 No\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(died)
    async with AsyncExitStack() as stack:
        instances = dying(4, beginning=head + died)
        await start(many_tries, stack, *instances)
        answer = await many_tries.post({"model": MODEL, "messages": MESSAGES})
        assert is_lost(answer), answer.text
        assert sum(each.num_requests for each in instances) == 2
