"""A request that is divided: prefilled at one instance, decoded at another; and what goes where."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.integration.gateway.stages.conftest import Staged
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.local_encode import without_encoders
from tests.support.gateway.samples import MODEL, data_url, image_bytes, image_part
from tests.support.gateway.spans import exported_spans
from tests.support.waiting import until
from triptych_common.protocol.messages import KvTransfer, Role

IMAGE = image_part(3)
TEXT = {"type": "text", "text": "what is it"}
ANSWER = "1x8x8 word0 word1 word2"
WORDS = "word0 word1 word2"


async def streamed(staged: Staged, content: Any, **options: Any) -> str:
    words = [
        chunk.choices[0].delta.content or ""
        async for chunk in await staged.system.ask(content, stream=True, **options)
    ]
    return "".join(words).strip()


async def test_prefilled_at_one_and_decoded_at_the_other(staged: Staged) -> None:
    answer = await streamed(staged, [IMAGE, TEXT], max_completion_tokens=7, stop=["x"], logprobs=True)
    assert answer == ANSWER
    (first,), (second,) = staged.prefill.bodies, staged.decode.bodies
    assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
    assert not {"stop", "logprobs", "stream_options"} & first.keys()
    assert (second["max_completion_tokens"], second["stop"], second["stream"]) == (7, ["x"], True)
    assert "max_tokens" not in second
    assert second["ec_transfer_params"] == first["ec_transfer_params"]
    assert staged.prefill.headers[0]["x-request-id"] == staged.decode.headers[0]["x-request-id"]
    assert (len(staged.decode.taken), staged.prefill.kept) == (1, {})
    (job,) = staged.system.encoder.jobs
    assert job.requesters[0].prefill_decode == "p-0"
    assert await staged.total("routes_total", way="staged", reason="no_whole") == 1
    assert await staged.total("prefill_stage_seconds_count") == 1


async def test_a_whole_answer_tells_nothing_of_the_handover(staged: Staged) -> None:
    assert (await staged.system.ask("hello")).choices[0].message.content == WORDS
    staged.decode.behaviour = "leaks"
    told = await staged.system.post({"model": MODEL, "messages": [{"role": "user", "content": "again"}]})
    assert told.status_code == 200
    assert "kv_transfer_params" not in told.json()


async def test_every_form_of_a_chat_and_a_completion(staged: Staged) -> None:
    client = staged.system.openai
    assert (await client.completions.create(model=MODEL, prompt="hello")).choices[0].text == WORDS
    assert staged.prefill.bodies[-1]["max_tokens"] == 1
    assert "max_completion_tokens" not in staged.prefill.bodies[-1]
    message = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    assert (await staged.system.http.post("/v1/messages", json=message)).status_code == 200
    assert (staged.prefill.bodies[-1]["max_tokens"], staged.decode.bodies[-1]["max_tokens"]) == (1, 9)
    assert len(staged.decode.taken) == 2


async def test_spans_of_both_stages(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    with exported_spans(monkeypatch) as exporter:
        await streamed(staged, [IMAGE, TEXT])
        await until(lambda: f"chat {MODEL}" in _names(exporter))
        found = {each.name: dict(each.attributes or {}) for each in exporter.get_finished_spans()}
    assert found["gateway.prefill"]["triptych.prefill"] == "p-0"
    assert found["gateway.decode"]["triptych.decode"] == "d-0"
    root = found[f"chat {MODEL}"]
    assert (root["triptych.way"], root["triptych.way_reason"]) == ("staged", "no_whole")
    assert "gen_ai.server.time_to_first_token" in root


def _names(exporter: InMemorySpanExporter) -> set[str]:
    return {each.name for each in exporter.get_finished_spans()}


async def test_who_encodes_itself_and_prefills_gets_raw_media(staged: Staged) -> None:
    staged.prefill.role = Role.ENCODE_PREFILL
    assert staged.prefill.registration is not None
    await staged.prefill.registration.update(role=Role.ENCODE_PREFILL)
    await without_encoders(staged.system)
    assert await streamed(staged, [IMAGE, TEXT]) == ANSWER
    assert "ec_transfer_params" not in staged.prefill.bodies[0]
    assert staged.decode.bodies[0]["kv_transfer_params"]["remote_engine_id"] == "p-0"


async def test_side_by_side_the_load_decides(staged: Staged) -> None:
    whole = await staged.stack.enter_async_context(FakePrefillDecode("pd-1").running(staged.system.bus))
    await staged.system.refresh()
    assert await streamed(staged, "hello") == WORDS
    assert (len(whole.bodies), len(staged.prefill.bodies)) == (1, 0)
    with _busy(staged, "pd-1"):
        assert await streamed(staged, [IMAGE, TEXT]) == ANSWER
    assert (len(whole.bodies), len(staged.prefill.bodies)) == (1, 1)
    with _busy(staged, "pd-1"), _busy(staged, "d-0"):
        await streamed(staged, "hello")
    assert (len(whole.bodies), len(staged.prefill.bodies)) == (2, 1), "a pair counts as its busier half"
    assert await staged.total("routes_total", reason="least_load") == 3


@contextmanager
def _busy(staged: Staged, instance: str) -> Iterator[None]:
    """A request more at an instance."""
    router = staged.system.gateway.router
    router.begin_request(instance)
    try:
        yield
    finally:
        router.end_request(instance)


async def test_what_cannot_be_divided_is_one_instances(staged: Staged) -> None:
    assert len((await staged.system.ask("hello", n=2)).choices) == 2
    assert (len(staged.prefill.bodies), len(staged.decode.bodies)) == (0, 1)
    assert "kv_transfer_params" not in staged.decode.bodies[0]
    with pytest.raises(openai.BadRequestError) as caught:
        await staged.system.ask([IMAGE, TEXT], n=2)
    assert (caught.value.code, caught.value.param) == ("unsupported", "n")
    whole = await staged.stack.enter_async_context(FakePrefillDecode("pd-1").running(staged.system.bus))
    await staged.system.refresh()
    for _ in range(2):
        assert len((await staged.system.ask([IMAGE, TEXT], n=2)).choices) == 2
    assert (len(whole.bodies), len(staged.prefill.bodies)) == (2, 0)


async def test_endpoints_that_make_no_tokens_work_with_pairs_alone(staged: Staged) -> None:
    http = staged.system.http
    for path, body in (
        ("/tokenize", {"model": MODEL, "prompt": "a b c"}),
        ("/detokenize", {"model": MODEL, "tokens": [1, 2]}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "a b"}]}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    pooled = await http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert (pooled.status_code, pooled.json()["error"]["code"]) == (404, "endpoint_not_served")
    assert (await http.get("/health")).status_code == 200
    assert [each["id"] for each in (await http.get("/v1/models")).json()["data"]] == [MODEL]


async def test_halves_that_do_not_fit_serve_nothing(staged: Staged) -> None:
    registration = staged.decode.registration
    assert registration is not None
    other = KvTransfer(connector="FakeConnector", compatibility="other", lease_s=1.0)
    await registration.update(kv_transfer=other)
    await staged.system.refresh()
    assert (await staged.system.http.get("/health")).status_code == 503
    assert staged.system.gateway.view.models == []


# ---- the next turn goes where the last one was decoded, while it is held -------------------------
async def say(staged: Staged, messages: list[dict[str, Any]], text: str | None = None) -> None:
    """One turn; the answer, and `text` if there is some, are in `messages` afterwards."""
    answer = await staged.system.openai.chat.completions.create(model=MODEL, messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    if text is not None:
        messages.append({"role": "user", "content": text})


def sent(staged: Staged) -> tuple[int, int]:
    return len(staged.prefill.bodies), len(staged.decode.bodies)


async def test_a_new_turn_of_text_needs_no_prefill(staged: Staged) -> None:
    staged.decode.holds_items = True
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(3), TEXT]}]
    await say(staged, messages, "and then?")
    assert sent(staged) == (1, 1)
    await say(staged, messages, "and then?")
    await say(staged, messages)
    assert sent(staged) == (1, 3)
    assert "kv_transfer_params" not in staged.decode.bodies[-1]
    assert staged.decode.bodies[-1]["ec_transfer_params"]["items"]
    assert len(staged.system.encoder.jobs) == 1
    assert await staged.total("routes_total", way="decode", reason="prefix_held") == 2


async def test_what_it_holds_no_more_is_prefilled(staged: Staged) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(3), TEXT]}]
    await say(staged, messages, "and then?")
    await say(staged, messages)
    assert sent(staged) == (2, 3)
    assert await staged.total("stage_retries_total", stage="decode", reason="prefix_not_held") == 1
    assert staged.prefill.kept == {}


async def test_a_new_item_is_prefilled(staged: Staged) -> None:
    staged.decode.holds_items = True
    messages: list[dict[str, Any]] = [{"role": "user", "content": [image_part(3), TEXT]}]
    await say(staged, messages)
    messages.append({"role": "user", "content": [image_part(4), TEXT]})
    await say(staged, messages)
    assert sent(staged) == (2, 2)


async def test_much_new_text_is_prefilled(staged: Staged) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    await say(staged, messages, "and then? " * 2000)
    await say(staged, messages)
    assert sent(staged) == (2, 2)


# ---- responses -----------------------------------------------------------------------------------
INPUT_IMAGE = {"type": "input_image", "image_url": data_url(image_bytes(3))}
WITH_IMAGE = [{"role": "user", "content": [INPUT_IMAGE, {"type": "input_text", "text": "what is it"}]}]


async def respond(staged: Staged, asked: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "input": asked, **options}
    answer = await staged.system.http.post("/v1/responses", json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("asked", ["hello", WITH_IMAGE])
async def test_a_response_is_divided(staged: Staged, asked: Any) -> None:
    status, response = await respond(staged, asked, max_output_tokens=9)
    assert (status, response["status"]) == (200, "completed"), response
    assert "kv_transfer_params" not in response
    (first,), (second,) = staged.prefill.bodies, staged.decode.bodies
    assert (first["max_output_tokens"], first["store"], first["stream"]) == (1, False, False)
    assert (second["max_output_tokens"], second["request_id"]) == (9, first["request_id"])
    assert len(staged.decode.taken) == 1
    stream = await staged.system.openai.responses.create(model=MODEL, input=asked, stream=True)
    events = [each.type async for each in stream]
    assert (events[0], events[-1]) == ("response.created", "response.completed")
    assert len(staged.decode.taken) == 2


async def test_a_stored_one_is_gone_on_from_where_it_was_decoded(staged: Staged) -> None:
    staged.decode.stores_responses = True
    assert staged.decode.registration is not None
    await staged.decode.registration.update(stores_responses=True)
    await staged.system.refresh()
    _, first = await respond(staged, "hello")
    status, second = await respond(staged, "and then?", previous_response_id=first["id"])
    assert status == 200, second
    assert (len(staged.prefill.bodies), len(staged.decode.bodies)) == (1, 2)
    status, refused = await respond(staged, WITH_IMAGE, previous_response_id=first["id"])
    assert (status, refused["error"]["code"]) == (400, "unsupported")
    _, of_image = await respond(staged, WITH_IMAGE)
    status, missing = await respond(staged, "and then?", previous_response_id=of_image["id"])
    assert (status, missing["error"]["code"]) == (404, "response_not_found")
