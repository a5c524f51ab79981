"""When parts fail: what the caller sees, and that nothing is left behind."""

import asyncio
import socket
import time
from typing import Any

import openai
import orjson
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import DIGEST, MODEL, data_url, image_bytes, image_part
from tests.support.gateway.system import System
from tests.support.waiting import until, until_async
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ECTransferParams, EncodeFailed, FailureKind
from triptych_gateway.request.body_splitter import SplitBody

IMAGE = image_part(3)
URL = "messages[0].content[0].image_url.url"


async def collect_into(words: list[str], stream: Any) -> None:
    async for chunk in stream:
        words.append(chunk.choices[0].delta.content or "")  # noqa: PERF401


async def second_instance(system: System) -> FakePrefillDecode:
    """Another prefill_decode, and the gateway knows it."""
    other = await system.stack.enter_async_context(FakePrefillDecode("pd-1").running(system.bus))
    await system.refresh()
    return other


@pytest.mark.parametrize(
    ("kind", "status", "code", "num_jobs"),
    [
        (FailureKind.BAD_MEDIA, 400, "invalid_image", 1),
        (FailureKind.TOO_LARGE, 413, "image_too_large", 1),
        (FailureKind.STORE_FULL, 503, "store_full", 1),
        (FailureKind.DEAD_LETTER, 503, "encode_failed", 1),
        (FailureKind.ENCODER_ERROR, 503, "encode_failed", 2),
    ],
)
async def test_encode_failure(
    system: System, kind: FailureKind, status: int, code: str, num_jobs: int
) -> None:
    system.encoder.failures = [kind] * 2
    with pytest.raises(openai.APIStatusError) as caught:
        await system.ask([IMAGE])
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, code, URL)
    assert ("retry-after" in caught.value.response.headers) == (status == 503)
    assert len(system.encoder.jobs) == num_jobs
    assert [job.attempt for job in system.encoder.jobs] == list(range(1, num_jobs + 1))
    assert system.prefill_decode.bodies == []
    system.encoder.failures = []
    assert (await system.ask([IMAGE])).choices  # nothing is remembered against the picture


async def test_encoder_error_is_tried_once_more(system: System) -> None:
    system.encoder.failures = [FailureKind.ENCODER_ERROR]
    assert (await system.ask([IMAGE])).choices[0].message.content.startswith("1x8x8")
    assert len(system.encoder.jobs) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_encode_failure_while_prefill_decode_waits_aborts_its_request(
    system: System, stream: bool
) -> None:
    system.encoder.fail_after_metadata = FailureKind.BAD_MEDIA
    system.encoder.before_seal.clear()

    async def for_ever(params: ECTransferParams) -> None:
        system.encoder.before_seal.set()
        await asyncio.Event().wait()

    system.prefill_decode.waits_for = for_ever
    with pytest.raises(openai.BadRequestError) as caught:
        await system.ask([IMAGE], stream=stream)
    assert caught.value.param == URL
    await until(lambda: system.prefill_decode.num_disconnects == 1)


@pytest.mark.parametrize("stage", ["encode", "prefill", "stream"])
async def test_client_that_goes_away_leaves_nothing(system: System, stage: str) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": [IMAGE]}],
    }
    if stage == "encode":
        system.encoder.before_metadata.clear()
    elif stage == "prefill":
        system.prefill_decode.behaviour = "hang"
    else:
        system.prefill_decode.behaviour = "stall"

    async def read() -> None:
        async with system.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async with asyncio.TaskGroup() as group:
        reader = group.create_task(read())
        if stage == "encode":
            await until(lambda: system.encoder.jobs)
        else:
            await until(lambda: system.prefill_decode.bodies)
        reader.cancel()
    await system.assert_idle()
    if stage != "encode":
        await until(lambda: system.prefill_decode.num_disconnects == 1)


@pytest.mark.parametrize("content", ["hello", [IMAGE]])
async def test_prefill_decode_that_cannot_be_reached_costs_only_time(system: System, content: Any) -> None:
    other = await second_instance(system)
    await system.stack.enter_async_context(FakePrefillDecode("pd-2", port=1).running_nowhere(system.bus))
    await system.refresh()
    for _ in range(4):
        assert (await system.ask(content)).choices
    assert len(other.bodies) + len(system.prefill_decode.bodies) == 4


async def test_busy_instance_another_takes_it(system: System) -> None:
    other = await second_instance(system)
    system.prefill_decode.behaviour = "busy"
    for _ in range(3):
        assert (await system.ask([IMAGE])).choices
    assert len(other.bodies) == 3


async def test_no_other_instance_is_503(system: System) -> None:
    system.prefill_decode.behaviour = "busy"
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask("x")
    assert (caught.value.status_code, caught.value.code) == (503, "instance_unreachable")
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize(("behaviour", "stream"), [("fail", False), ("fail", True), ("error_first", True)])
async def test_failure_before_the_first_token_is_a_proper_error(
    system: System, behaviour: str, stream: bool
) -> None:
    system.prefill_decode.behaviour = behaviour
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask("x", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (503, "generation_failed")


async def test_refusal_of_prefill_decode_passes(system: System) -> None:
    system.prefill_decode.behaviour = "refuse"
    with pytest.raises(openai.BadRequestError) as caught:
        await system.ask("x", stream=True)
    assert caught.value.param == "max_tokens"
    assert "max_tokens is too large" in caught.value.message


@pytest.mark.parametrize(("behaviour", "last"), [("die", []), ("error_late", ["last "])])
async def test_failure_after_the_first_token_ends_the_stream_with_an_error(
    system: System, behaviour: str, last: list[str]
) -> None:
    system.prefill_decode.behaviour = behaviour
    words: list[str] = []
    stream = await system.ask("x", stream=True)
    with pytest.raises(openai.APIError, match="broke off") as caught:
        await collect_into(words, stream)
    assert caught.value.code == "stream_interrupted"
    assert words == ["", "word0 ", "word1 ", *last]


@pytest.mark.parametrize("system", [{"first_token_timeout_s": 0.3}], indirect=True)
async def test_deadlines(system: System) -> None:
    system.encoder.before_metadata.clear()
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([IMAGE])
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_exceeded")
    assert caught.value.param == URL
    system.encoder.before_metadata.set()
    system.prefill_decode.behaviour = "hang"
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask("x", stream=True)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    await until(lambda: system.prefill_decode.num_disconnects == 1)


@pytest.mark.parametrize("system", [{"first_token_timeout_s": 0.3}], indirect=True)
async def test_what_prefill_decode_gives_up_at_the_deadline_may_be_tried_again(system: System) -> None:
    """It ends what waits for an item by itself: the gateway of such a request may hang."""

    async def past_the_deadline(params: ECTransferParams) -> None:
        await asyncio.sleep(params.remaining_ms / 1000 + 0.1)
        system.prefill_decode.behaviour = "fail_late"

    system.prefill_decode.waits_for = past_the_deadline
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([IMAGE])
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_exceeded")
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("system", [{"request_timeout_s": 0.3}], indirect=True)
async def test_whole_answer_has_a_limit(system: System) -> None:
    system.prefill_decode.behaviour = "hang"
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask("x")
    assert caught.value.status_code == 504
    await until(lambda: system.prefill_decode.num_disconnects == 1)


@pytest.mark.parametrize("system", [{"chunk_timeout_s": 0.3}], indirect=True)
async def test_stream_that_stalls_ends_with_an_error(system: System) -> None:
    system.prefill_decode.behaviour = "stall"
    stream = await system.ask("x", stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        await collect_into([], stream)


@pytest.mark.parametrize(
    "system", [{"chunk_timeout_s": 0.5}, {"request_timeout_s": 2.0}], indirect=True, ids=str
)
async def test_a_client_that_stays_and_does_not_read_is_let_go(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers are full: whatever is sent to it, also the error event, waits for ever."""
    monkeypatch.setattr(FakePrefillDecode, "_text", lambda self, body: " ".join(["x" * 100_000] * 300))
    body = orjson.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}]})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", system.gateway.settings.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        await until(
            lambda: b"gateway_request_seconds_count 1.0" in system.gateway.services.metrics.metrics.render()
        )
    await until(lambda: system.prefill_decode.num_disconnects == 1)


@pytest.mark.parametrize("system", [{"max_requests_in_flight": 1}], indirect=True)
async def test_overload_is_429(system: System) -> None:
    system.prefill_decode.behaviour = "hang"
    async with asyncio.TaskGroup() as group:
        first = group.create_task(system.ask("x"))
        await until(lambda: system.prefill_decode.bodies)
        with pytest.raises(openai.RateLimitError) as caught:
            await system.ask("y")
        assert caught.value.response.headers["retry-after"] == "1"
        system.prefill_decode.release.set()
        await first


@pytest.mark.parametrize("system", [{"encoder_grace_s": 0.2}], indirect=True)
async def test_without_any_encoder(system: System) -> None:
    await system.ask([IMAGE])
    await system.bus.client.delete(system.bus.names.instance("encoder-0"))
    await system.bus.client.zrem(system.bus.names.instances, "encoder-0")
    records = [record for record in system.gateway.view.records if record.instance != "encoder-0"]
    system.encoder.before_metadata.clear()
    system.gateway.view._registry.list_instances = lambda: _answer(records)  # type: ignore[method-assign]
    await system.refresh()
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([image_part(99)])
    assert (caught.value.status_code, caught.value.code) == (503, "no_encoder")
    assert len(system.encoder.jobs) == 1  # nothing is queued
    assert (await system.ask([IMAGE])).choices  # its sizes are known, its tensor may well be there
    ready = await system.http.get("/health/ready")
    assert (ready.status_code, ready.json()["encoder_available"]) == (200, False)


async def queued_jobs(system: System) -> int:
    return await system.bus.stream_length(system.bus.names.encode_jobs(DIGEST))


async def num_queued_is(system: System, count: int) -> bool:
    return await queued_jobs(system) == count


@pytest.mark.parametrize("system", [{"max_queued_jobs": 2}], indirect=True)
async def test_more_orders_than_may_wait_are_429(system: System) -> None:
    await until(lambda: system.gateway.view.encoding)
    urls = [data_url(image_bytes(color)) for color in range(3)]
    with pytest.raises(openai.RateLimitError) as caught:
        await system.ask([{"type": "image_url", "image_url": {"url": url}} for url in urls])
    assert caught.value.code == "encode_queue_full"
    assert caught.value.response.headers["retry-after"] == "1"
    assert (await system.ask("text goes on")).choices
    assert (await system.ask([IMAGE])).choices


@pytest.mark.parametrize("system", [{"max_queued_jobs": 2}], indirect=True)
async def test_what_is_on_the_stream_is_no_reason_to_refuse_anyone(system: System) -> None:
    stream = system.bus.names.encode_jobs(DIGEST)
    await until(lambda: system.gateway.view.encoding)
    await system.bus.client.xgroup_setid(stream, "encoders", "9999999999999-0")  # the encoder sees no job
    for number in (1, 2):
        await system.bus.client.xadd(stream, {"x": str(number)}, id=f"{time.time_ns() // 1_000_000}-{number}")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(system.ask([IMAGE]))
        await until_async(lambda: num_queued_is(system, 3))
        await system.bus.client.xtrim(stream, maxlen=1)
        await system.bus.client.xgroup_setid(stream, "encoders", "0")
    assert asking.result().choices


async def test_a_stream_that_has_its_tensors_outlives_the_failure_of_a_later_job(system: System) -> None:
    """Another request's job for the same item."""
    system.prefill_decode.behaviour = "stall"
    system.encoder.before_seal.clear()  # the job stays in flight
    words: list[str] = []
    stream = await system.ask([IMAGE], stream=True)
    reading = asyncio.ensure_future(collect_into(words, stream))
    await until(lambda: words)
    item = next(iter(system.gateway.orders.table))
    assert item.job_id is not None
    failed = EncodeFailed(
        job_id=item.job_id,
        mm_hash=item.mm_hash,
        encoder="encoder-0",
        kind=FailureKind.ENCODER_ERROR,
        detail="x",
    )
    await system.gateway.orders.on_encode_result(failed)
    assert system.gateway.orders.table.get(MmHash(item.mm_hash)) is item
    assert not item.in_flight  # and not ordered again: no request needs it
    system.prefill_decode.release.set()
    await reading
    assert words[-2:] == ["word2 ", ""]
    system.encoder.before_seal.set()


async def test_a_large_body_does_not_block_the_event_loop(system: System) -> None:
    parts = [{"type": "text", "text": "x"}] * 16_000  # about as many values as a body may hold
    body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}]})
    num_turns = 0
    async with asyncio.TaskGroup() as group:
        parsing = group.create_task(_parse(system, body))
        while not parsing.done():
            await asyncio.sleep(0)
            num_turns += 1
    assert parsing.result() == 0
    assert num_turns >= 5  # parsed on the event loop it would be one


async def _parse(system: System, body: bytes) -> int:
    split = SplitBody(bytearray(body), [], len(body), is_odd=False)
    return len((await system.gateway.services.parser.parse(split, int)).media)


async def _answer(records: Any) -> Any:
    return records


# ---- large answers that are not streamed: passed on whole, bounded, not kept ---------------------
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
