"""What engines are started with: the same answers as one vLLM engine with the same options.

One pair has them all: LoRA, n-gram speculation, a parser for reasoning, priorities, and steps of few
tokens, so that prompts are computed in chunks. Images are new to the system in each request.
"""

import re
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.support.fast.redis_inspection import registered_records
from tests.support.real.adapters import Adapters
from tests.support.real.answers import answer_of, events_of, joined_chat, post, without_call_ids
from tests.support.real.bodies.comparing import alike
from tests.support.real.engine_options import MAX_STEP_TOKENS
from tests.support.real.inspection import DEPLOYMENT, redis_url
from tests.support.real.system import MODEL, Server, System, image_part
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TEXT = {"type": "text", "text": "read the digits"}
THOUGHT = "Here is my thought process: [a-c]{3} Here is my response: [0-9]{3}"


def question(strips: ModuleType, seed: int, num_images: int = 2) -> list[dict[str, Any]]:
    images = [image_part(strip.png) for strip in strips.held_out_strips(num_images, length=None, seed=seed)]
    return [{"role": "user", "content": [TEXT, *(part for image in images for part in (image, TEXT))]}]


def compare(server: Server, other: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Ask both; return the answer that they share."""
    if body.get("stream"):
        got, wanted = (joined_chat(events_of(post(each, CHAT, body))) for each in (server, other))
    else:
        got, wanted = (without_call_ids(answer_of(post(each, CHAT, body))) for each in (server, other))
    assert alike(got, wanted), f"got {got}\nwanted {wanted}"
    return wanted


def prefill_decode_url(system: System) -> str:
    name = "prefill_decode-0"
    return str(registered_records(redis_url(system), DEPLOYMENT, [name])[name]["url"])


def counted(system: System, name: str) -> float:
    """A counter of prefill_decode's vLLM, over its labels."""
    text = httpx.get(f"{prefill_decode_url(system)}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def test_a_reasoning_parser(equipped: System, equipped_monolith: Server, strips: ModuleType) -> None:
    body = GREEDY | {"structured_outputs": {"regex": THOUGHT}, "max_tokens": 120}
    whole = compare(equipped, equipped_monolith, body | {"messages": question(strips, 810)})
    message = whole["choices"][0]["message"]
    assert message["reasoning"].strip()
    assert re.fullmatch("[0-9]{3}", message["content"].strip())
    streamed = compare(equipped, equipped_monolith, body | STREAM | {"messages": question(strips, 811)})
    assert streamed["choices"][0]["reasoning"].strip()
    assert re.fullmatch("[0-9]{3}", streamed["choices"][0]["text"].strip())


def test_a_lora_adapter(equipped: System, equipped_monolith: Server, strips: ModuleType) -> None:
    """Asked for by its name, for an image that the model itself has been asked about, and the other way."""
    with equipped.openai as client:
        cards = {card.id: (card.model_extra or {})["parent"] for card in client.models.list().data}
    assert cards == {MODEL.name: None, "french": MODEL.name}
    for first, second, seed in (("french", MODEL.name, 820), (MODEL.name, "french", 821)):
        body = GREEDY | {"messages": question(strips, seed), "logprobs": True}
        answers = [
            compare(equipped, equipped_monolith, body | {"model": model} | options)
            for model in (first, second)
            for options in ({}, STREAM)
        ]
        assert not alike(answers[0]["choices"][0]["logprobs"], answers[2]["choices"][0]["logprobs"])
    shown = httpx.get(f"{prefill_decode_url(equipped)}/metrics", trust_env=False).text
    labels = set(
        re.findall(r'(\w+)="', " ".join(re.findall("^vllm:lora_requests_info{.*", shown, re.MULTILINE)))
    )
    assert labels >= {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}


def test_a_lora_adapter_is_loaded_and_unloaded(
    equipped: System, equipped_monolith: Server, strips: ModuleType, adapters: Adapters
) -> None:
    """At prefill_decode's own port; the gateway has the name as soon as it reads the registry."""
    body = GREEDY | {"model": "dutch", "messages": question(strips, 830)}
    assert post(equipped, CHAT, body).status_code == 404
    urls = (prefill_decode_url(equipped), equipped_monolith.base_url.removesuffix("/v1"))
    for url in urls:
        loading = {"lora_name": "dutch", "lora_path": str(adapters.dutch)}
        httpx.post(
            f"{url}/v1/load_lora_adapter", json=loading, timeout=60, trust_env=False
        ).raise_for_status()
    try:
        wait_until(lambda: _has_model(equipped, "dutch"), 10, "the gateway knows the adapter")
        dutch = compare(equipped, equipped_monolith, body)
        french = compare(equipped, equipped_monolith, body | {"model": "french"})
        assert dutch["choices"][0]["token_ids"] != french["choices"][0]["token_ids"]
    finally:
        for url in urls:
            unloading = {"lora_name": "dutch"}
            httpx.post(f"{url}/v1/unload_lora_adapter", json=unloading, timeout=60, trust_env=False)
    wait_until(lambda: not _has_model(equipped, "dutch"), 10, "the gateway forgets the adapter")
    answer = post(equipped, CHAT, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def _has_model(system: System, model: str) -> bool:
    with system.openai as client:
        return model in [card.id for card in client.models.list().data]


def test_ngram_speculation(equipped: System, equipped_monolith: Server, strips: ModuleType) -> None:
    """The prompt repeats itself, so there are drafts; some are taken."""
    content = question(strips, 840)[0]["content"] + [{"type": "text", "text": "1 2 3 1 2 3 1 2 3 1 2"}]
    body = GREEDY | {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "ignore_eos": True}
    before = counted(equipped, "vllm:spec_decode_num_draft_tokens_total")
    compare(equipped, equipped_monolith, body)
    compare(equipped, equipped_monolith, body | STREAM)
    assert counted(equipped, "vllm:spec_decode_num_draft_tokens_total") > before


def test_chunked_prefill(equipped: System, equipped_monolith: Server, strips: ModuleType) -> None:
    """A prompt of several steps, with images in each of them."""
    body = GREEDY | {"messages": question(strips, 850, num_images=8)}
    answer = compare(equipped, equipped_monolith, body)
    assert answer["usage"]["prompt_tokens"] > 2 * MAX_STEP_TOKENS
    compare(equipped, equipped_monolith, body | STREAM)


@pytest.mark.parametrize("priority", [-5, 5])
def test_priority(equipped: System, equipped_monolith: Server, strips: ModuleType, priority: int) -> None:
    compare(
        equipped,
        equipped_monolith,
        GREEDY | {"messages": question(strips, 860 + priority), "priority": priority},
    )


def test_nothing_stays_pinned(equipped: System) -> None:
    wait_until(lambda: equipped.store_stats().num_pins == 0, 10, "all pins end")
