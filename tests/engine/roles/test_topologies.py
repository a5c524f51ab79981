"""The same tokens, whichever instances encode, prefill and decode. Through the gateway, with openai's SDK."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.otlp_receivers import Requests, http_receiver, trace_of
from tests.support.real.roles import Instance
from tests.support.real.system import EXACT, SPANS_TIMEOUT_S, Server, System, image_part, running_system
from tests.support.scraping import scrape
from tests.support.waiting import wait_until

NUM_QUESTIONS = 50
NUM_IMAGES = 30
NUM_AT_ONCE = 4
NUM_DONE = "vllm:request_success_total"
STAGES = {
    "gateway-0": {
        "chat digits-vl", "gateway.media", "gateway.publish_job", "gateway.encode_wait",
        "gateway.first_token", "gateway.prefill", "gateway.decode", "gateway.stream",
    },
    "encoder-0": {
        "queue.encode_job", "encoder.preprocess", "encoder.reserve", "encoder.encode", "encoder.write",
        "encoder.seal",
    },
    "prefill-0": {"prefill.preallocate", "prefill.inject", "llm_request"},
    "decode-0": {"llm_request"},
}  # fmt: skip
"""Spans of a streamed answer about a new image, by the instance that exports them."""
TEXTS = ("read the digits", "What digits are these?", "hello", "count to 20", "read them again. " * 20)


@dataclass(frozen=True)
class Question:
    content: list[dict[str, Any]]
    token_ids: list[int]  # of the answer
    is_streamed: bool


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, Requests]]:
    """The URL of a receiver of OTLP, and what it has been sent."""
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def questions(monolith: Server, strips: ModuleType) -> list[Question]:
    """Text, and one, two or three images each, some of them in several questions."""
    rng = random.Random(15)
    images = [strip.png for strip in strips.held_out_strips(NUM_IMAGES, length=None, seed=15)]

    def answered(number: int) -> Question:
        chosen = rng.sample(images, number % 4)
        content = [*map(image_part, chosen), {"type": "text", "text": f"{rng.choice(TEXTS)} {number}"}]
        return Question(content, monolith.ask(content).token_ids, number % 3 == 0)

    return [answered(number) for number in range(NUM_QUESTIONS)]


def start(*options: str, **env: str) -> AbstractContextManager[System]:
    exact = " ".join(EXACT)
    return running_system(
        f"--encoder-args={exact}", f"--prefill-decode-args={exact}", *options, is_forked=True, **env
    )


@pytest.fixture(scope="module")
def apart(collector: tuple[str, Requests]) -> Iterator[System]:
    """E+P+D, whose spans go to a collector."""
    with start("--prefills=1", "--decodes=1", OTEL_EXPORTER_OTLP_ENDPOINT=collector[0]) as running:
        yield running


def check_answers(system: System, questions: Sequence[Question]) -> None:
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        asked = [
            pool.submit(partial(system.ask, each.content, stream=each.is_streamed)) for each in questions
        ]
        answers = [each.result().token_ids for each in asked]
    wrong = [
        (number, question.token_ids, answer)
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True))
        if answer != question.token_ids
    ]
    assert not wrong, f"{len(wrong)} of {len(questions)} answers differ: {wrong[:3]}"


def check_division(system: System, prefills: Sequence[str], decodes: Sequence[str], *, encodes: bool) -> None:
    """Those that prefill made no answer, and those that decode did not prefill.

    Args:
        encodes: those that prefill do it themselves.
    """
    for name in prefills:
        prefill = Instance.of(system, name)
        assert prefill.metric("vllm:prompt_tokens_total") > 0
        num_requests = prefill.metric(NUM_DONE)
        assert prefill.metric("vllm:generation_tokens_total") == num_requests, "a token for each request"
        handed_over = prefill.metric("triptych_prefill_decode_handover_bytes_total")
        assert (handed_over == 0) == encodes
        assert (prefill.metric("triptych_prefill_decode_local_encodes_total") > 0) == encodes
        wait_until_freed(prefill)
    for name in decodes:
        decode = Instance.of(system, name)
        assert decode.metric("vllm:external_prefix_cache_hits_total") > 0
    num_staged = num_routed(system, "staged")
    assert num_staged == sum(Instance.of(system, each).metric(NUM_DONE) for each in prefills)
    assert (num_staged > 0) == bool(prefills)


def wait_until_freed(prefill: Instance) -> None:
    wait_until(lambda: not prefill.holds_kv_blocks, 10, f"{prefill.record.instance} has freed its KV blocks")


def num_routed(system: System, way: str) -> float:
    return scrape(urlsplit(system.base_url).port or 0).total("triptych_gateway_routes_total", way=way)


def test_encode_prefill_and_decode_apart(apart: System, questions: list[Question]) -> None:
    check_answers(apart, questions)
    check_division(apart, ["prefill-0"], ["decode-0"], encodes=False)


def test_a_collector_has_the_one_trace(
    apart: System, collector: tuple[str, Requests], strips: ModuleType
) -> None:
    """Of a request that all services had a part in: each span of each of them, below the request's own."""
    (strip,) = strips.held_out_strips(1, seed=16)
    content = [image_part(strip.png), {"type": "text", "text": TEXTS[0]}]
    request_id = apart.ask(content, stream=True).request_id
    received = collector[1]

    def is_complete() -> bool:
        found = trace_of(received, request_id)
        return all(STAGES[name] <= {span.name for span in found.get(name, ())} for name in STAGES)

    wait_until(is_complete, SPANS_TIMEOUT_S, f"all of {STAGES}")
    trace = trace_of(received, request_id)
    assert trace.keys() == STAGES.keys()
    spans = [span for each in trace.values() for span in each]
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    assert [span.name for span in spans if span.parent_span_id not in ids] == ["chat digits-vl"]
    assert not list(apart.traces_dir.glob("*.jsonl")), "no files beside a collector"


def test_other_endpoints_in_two_stages(apart: System, monolith: Server) -> None:
    def completion(server: Server) -> str:
        with server.openai as client:
            return (
                client.completions.create(
                    model="digits-vl", prompt="count to 9", max_tokens=12, temperature=0
                )
                .choices[0]
                .text
            )

    def response(server: Server) -> str:
        with server.openai as client:
            return client.responses.create(
                model="digits-vl", input="count to 9", max_output_tokens=12, temperature=0
            ).output_text

    asks: list[Callable[[Server], str]] = [completion, response]
    prefill, decode = Instance.of(apart, "prefill-0"), Instance.of(apart, "decode-0")
    for ask in asks:
        before = (prefill.metric(NUM_DONE), decode.metric(NUM_DONE), num_routed(apart, "staged"))
        assert ask(apart) == ask(monolith)
        after = (prefill.metric(NUM_DONE), decode.metric(NUM_DONE), num_routed(apart, "staged"))
        assert after == tuple(each + 1 for each in before)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "prefills", "decodes", "encodes"),
    [
        (("--encoders=1", "--prefill-decodes=1"), [], [], False),
        (("--encode-prefills=1", "--decodes=1"), ["encode_prefill-0"], ["decode-0"], True),
        (("--encode-prefill-decodes=1",), [], [], True),
        (
            ("--encoders=2", "--prefills=2", "--decodes=2"),
            ["prefill-0", "prefill-1"],
            ["decode-0", "decode-1"],
            False,
        ),
        (
            ("--prefills=1", "--decodes=1", "--prefill-decodes=1", "--encode-prefill-decodes=1"),
            ["prefill-0"],
            ["decode-0"],
            False,
        ),
    ],
    ids=["e+pd", "ep+d", "epd", "2e+2p+2d", "mixture"],
)
def test_other_topologies(
    options: tuple[str, ...],
    prefills: list[str],
    decodes: list[str],
    encodes: bool,
    questions: list[Question],
) -> None:
    with start(*options) as system:
        check_answers(system, questions)
        check_division(system, prefills, decodes, encodes=encodes)
        has_whole = any("prefill-decodes" in each for each in options)
        assert (num_routed(system, "whole") > 0) == has_whole
