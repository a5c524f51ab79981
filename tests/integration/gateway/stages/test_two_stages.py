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
from tests.support.gateway.media_samples import image_part
from tests.support.gateway.serving import MODEL
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
