"""Chat completions, completions and tokens through the gateway, as the openai client sees them."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode, send_encode_needed
from tests.support.gateway.samples import MODEL, data_url, image_bytes, image_part
from tests.support.gateway.system import System
from tests.support.waiting import until
from triptych_common.protocol.messages import ECTransferParams, ImageProperties

ALLOWED_OPTIONS = {
    "request_processor_options": {"min_pixels": {"min": 4, "max": 1000}},
    "request_image_options": {"image_mode": {"values": ["RGB"]}},
}
NO_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}


def image(color: int = 1, size: tuple[int, int] = (8, 8)) -> dict[str, Any]:
    return image_part(color, size)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def collect(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_text_passes_without_the_encode_path(system: System) -> None:
    answer = await system.ask("hello", extra_body={"top_k": 3})
    assert answer.choices[0].message.content == "word0 word1 word2"
    (body,) = system.prefill_decode.bodies
    assert body == {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "top_k": 3}
    assert system.encoder.jobs == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_answers_are_untouched(system: System, path: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "x"}]
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": messages, "max_tokens": 5}
    body = {"model": MODEL, "stream": stream, **asked}
    through = await system.http.post(path, json=body)
    async with httpx.AsyncClient(trust_env=False) as direct:
        expected = await direct.post(f"http://127.0.0.1:{system.prefill_decode.port}{path}", json=body)
    assert through.content == expected.content
    assert through.headers["content-type"] == expected.headers["content-type"]
    assert through.headers["x-request-id"].startswith("req-")


async def test_images_in_their_places(system: System) -> None:
    parts = [text("a"), image(1, (4, 2)), text("b"), image(2, (6, 8)), image(1, (4, 2))]
    answer = await system.ask(parts)
    assert answer.choices[0].message.content == "1x2x4 1x8x6 1x2x4 word0 word1 word2"
    (body,) = system.prefill_decode.bodies
    content = body["messages"][0]["content"]
    assert [part["type"] for part in content] == [
        "text",
        "image_embeds",
        "text",
        "image_embeds",
        "image_embeds",
    ]
    assert content[1] == content[4]
    assert set(content[1]) == {"type", "image_embeds", "uuid"}
    params = ECTransferParams.model_validate_json(
        httpx.Response(200, json=body["ec_transfer_params"]).content
    )
    assert [item.mm_hash for item in params.items] == [content[index]["uuid"] for index in (1, 3, 4)]
    assert [item.num_embeds for item in params.items] == [8, 48, 8]
    assert len(system.encoder.jobs) == 2  # the same picture twice is one job, with two requesters
    first = next(job for job in system.encoder.jobs if job.mm_hash == content[1]["uuid"])
    assert [requester.item_index for requester in first.requesters] == [0, 2]


async def test_prefill_decode_has_the_request_before_the_encoder_has_finished(system: System) -> None:
    encoder, prefill_decode = system.encoder, system.prefill_decode
    encoder.before_seal.clear()
    arrived = asyncio.Event()

    async def until_sealed(params: ECTransferParams) -> None:
        arrived.set()
        await encoder.before_seal.wait()

    prefill_decode.waits_for = until_sealed
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(system.ask([image()]))
        async with asyncio.timeout(60):
            await arrived.wait()
        assert encoder.num_encodes == 0
        encoder.before_seal.set()
        assert (await asked).choices[0].message.content.startswith("1x8x8")


async def test_sizes_known_from_before_need_no_job(system: System) -> None:
    await system.ask([image()])
    assert (
        await collect(await system.ask([text("again"), image()], stream=True)) == "1x8x8 word0 word1 word2 "
    )
    assert len(system.encoder.jobs) == 1


async def test_sizes_are_known_to_another_gateway_too(system: System) -> None:
    await system.ask([image()])
    system.gateway.orders.sizes._local.clear()
    await system.ask([image()])
    assert len(system.encoder.jobs) == 1


async def test_concurrent_requests_for_one_picture_are_one_job(system: System) -> None:
    system.encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(system.ask([image()])) for _ in range(5)]
        await until(lambda: len(system.gateway.orders._item_waits) == 5)
        system.encoder.before_metadata.set()
    assert {task.result().choices[0].message.content for task in asked} == {"1x8x8 word0 word1 word2"}
    assert len(system.encoder.jobs) == 1


async def test_first_client_that_goes_away_leaves_the_job_to_the_others(system: System) -> None:
    system.encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(system.ask([image()]))
        await until(lambda: system.encoder.jobs)
        second = group.create_task(system.ask([image()]))
        await until(lambda: len(system.gateway.orders._item_waits) == 2)
        first.cancel()
        await until(lambda: len(system.gateway.orders._item_waits) == 1)
        system.encoder.before_metadata.set()
        assert (await second).choices[0].message.content.startswith("1x8x8")
    assert len(system.encoder.jobs) == 1


async def test_large_media_are_fetched_small_ones_travel_inline(system: System) -> None:
    noise = image_bytes(size=(700, 700), image_format="BMP")
    assert len(noise) > system.gateway.settings.inline_media_bytes
    await system.ask([{"type": "image_url", "image_url": {"url": data_url(noise, "image/bmp")}}])
    await system.ask([image()])
    large, small = system.encoder.jobs
    assert large.media_url is not None
    assert small.media_url is None
    assert system.encoder.media == [noise, image_bytes(1)]
    gone = await system.http.get(httpx.URL(large.media_url).path)
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "media_gone"


async def test_options_are_refused_before_the_media_are_read(system: System) -> None:
    for name, options in (
        ("mm_processor_kwargs", {"patch_size": 7}),
        ("media_io_kwargs", {"image": {"a": 1}}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await system.ask([NO_IMAGE], extra_body={name: options})
        assert (caught.value.code, caught.value.param) == ("field_not_allowed", name)
    assert system.encoder.jobs == []
    assert system.prefill_decode.bodies == []


async def test_the_job_names_the_image_that_the_gateway_saw(system: System) -> None:
    await system.ask([image(size=(9, 8))])
    (job,) = system.encoder.jobs
    assert job.image == ImageProperties(format="PNG", width=9, height=8)


@pytest.mark.parametrize("system", [ALLOWED_OPTIONS], indirect=True)
async def test_options_are_in_the_job_and_not_in_the_request(system: System) -> None:
    options = {"mm_processor_kwargs": {"min_pixels": 4}, "media_io_kwargs": {"image": {"image_mode": "RGB"}}}
    await system.ask([image()], extra_body=options)
    await system.ask([image()])
    first, second = system.encoder.jobs
    assert first.mm_hash != second.mm_hash
    assert (first.mm_processor_kwargs, first.media_io_kwargs) == ({"min_pixels": 4}, {"image_mode": "RGB"})
    assert not {"mm_processor_kwargs", "media_io_kwargs"} & set(system.prefill_decode.bodies[0])


async def test_encode_needed_orders_the_item(system: System) -> None:
    await system.ask([image()])
    await until(lambda: bool(system.encoder.sealed))  # the answer does not wait for it
    (mm_hash,) = system.encoder.sealed
    system.encoder.sealed.clear()  # evicted

    async def until_sealed(params: ECTransferParams) -> None:
        await send_encode_needed(system.bus, params, "pd-0")
        await send_encode_needed(system.bus, params, "pd-0")
        await until(lambda: mm_hash in system.encoder.sealed)

    system.prefill_decode.waits_for = until_sealed
    assert (await system.ask([image()])).choices[0].message.content.startswith("1x8x8")
    assert len(system.encoder.jobs) == 2


async def test_an_answer_that_was_read_is_no_disconnect(system: System) -> None:
    for stream in (True, False) * 10:
        await system.ask("x", stream=stream) if not stream else await collect(
            await system.ask("x", stream=True)
        )
    await system.assert_idle()
    metrics = (await system.http.get("/metrics")).text
    assert 'triptych_gateway_requests_total{route="/v1/chat/completions",status="200"} 20.0' in metrics
    assert "triptych_gateway_disconnects_total 0.0" in metrics


async def test_request_id_is_ours(system: System) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image()]}], "request_id": "theirs"}
    answer = await system.post(body, headers={"X-Request-Id": "theirs"})
    request_id = answer.headers["x-request-id"]
    assert request_id != "theirs"
    assert system.prefill_decode.headers[0]["x-request-id"] == request_id
    assert system.prefill_decode.bodies[0]["ec_transfer_params"]["request_id"] == request_id
    assert "request_id" not in system.prefill_decode.bodies[0]


# ---- completions and tokens ----------------------------------------------------------------------
WORDS = "word0 word1 word2"


async def complete(system: System, prompt: Any = "a", **options: Any) -> Any:
    return await system.openai.completions.create(model=MODEL, prompt=prompt, **options)


async def post(system: System, path: str, **body: Any) -> httpx.Response:
    return await system.http.post(path, json=body)


async def test_whole(system: System) -> None:
    options: dict[str, Any] = {"n": 2, "stop": ["x"], "logprobs": 3, "echo": True, "seed": 7, "max_tokens": 5}
    answer = await complete(system, ["a", "b"], **options, extra_body={"top_k": 3, "request_id": "theirs"})
    assert [choice.text for choice in answer.choices] == [WORDS, WORDS]
    assert system.prefill_decode.paths == ["/v1/completions"]
    assert system.prefill_decode.bodies == [{"model": MODEL, "prompt": ["a", "b"], "top_k": 3, **options}]


async def test_tokens(system: System) -> None:
    counted = await post(system, "/tokenize", prompt="one two three")
    assert counted.json()["count"] == 3
    messages = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    assert (await post(system, "/tokenize", model=MODEL, messages=messages)).json()["count"] == 2
    text = await post(system, "/detokenize", model=MODEL, tokens=[3, 4])
    assert text.json() == {"prompt": "token3 token4"}
    assert system.prefill_decode.tokenized[0] == {"prompt": "one two three"}


async def test_batch(system: System) -> None:
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    answer = await post(system, "/v1/chat/completions/batch", model=MODEL, messages=chats)
    assert answer.json()["choices"]
    assert system.prefill_decode.bodies == [{"model": MODEL, "messages": chats}]


async def test_without_a_model_it_is_the_one_that_is_served(system: System) -> None:
    assert (await post(system, "/v1/completions", prompt="a")).json()["choices"]

    class Other(FakePrefillDecode):
        def record(self) -> Any:
            return super().record().model_copy(update={"model": "other"})

    await system.stack.enter_async_context(Other("pd-1").running(system.bus))
    await system.refresh()
    answer = await post(system, "/v1/completions", prompt="a")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "missing_field", "model")
