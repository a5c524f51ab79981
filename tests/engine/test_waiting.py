"""Waiting costs nothing: with a slow encoder, PD's request is parked, and others run on."""

import concurrent.futures
from collections.abc import Iterator
from types import ModuleType

import pytest
from support.system import System, image_part, running_system

pytestmark = pytest.mark.engine

ENCODE_DELAY_MS = 300
MAX_STEPS = 20


@pytest.fixture(scope="module")
def slow_system() -> Iterator[System]:
    with running_system(TRIPTYCH_DEBUG_ENCODE_DELAY_MS=str(ENCODE_DELAY_MS)) as running:
        yield running


def test_a_request_is_parked_while_its_image_is_encoded(slow_system: System, strips: ModuleType) -> None:
    question = {"type": "text", "text": "read the digits"}
    slow_system.ask("hello")  # the engine's first step is slow
    (strip,) = strips.held_out_strips(1, seed=31)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = pool.submit(slow_system.ask, [image_part(strip.png), question], stream=True)
        text_ids = []
        while not asked.done():
            text_ids.append(slow_system.ask("hello", max_tokens=4).request_id)
        image_id = asked.result().request_id
    spans = {
        span.name: span
        for span in slow_system.trace(image_id, "prefill.wait", "encoder.encode", "llm_request")
    }
    wait, encode = spans["prefill.wait"], spans["encoder.encode"]
    assert wait.start_ns < encode.end_ns, "PD had the request before the encoder was done"
    assert encode.end_ns <= wait.end_ns, "and waited for it"
    assert encode.end_ns - encode.start_ns >= ENCODE_DELAY_MS * 1_000_000

    texts = [
        next(span for span in slow_system.trace(text_id, "gateway.request") if span.name == "gateway.request")
        for text_id in text_ids
    ]
    meanwhile = [span for span in texts if wait.start_ns < span.start_ns and span.end_ns < wait.end_ns]
    assert meanwhile, "a text request was answered completely while the image's request was parked"


def test_a_parked_request_costs_no_engine_steps(slow_system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=32)
    answer = slow_system.ask([image_part(strip.png), {"type": "text", "text": "read the digits"}])
    spans = {
        span.name: span for span in slow_system.trace(answer.request_id, "prefill.wait", "encoder.encode")
    }
    wait = spans["prefill.wait"]
    assert wait.start_ns < spans["encoder.encode"].end_ns
    assert int(wait.attributes["triptych.num_engine_steps"]) < MAX_STEPS
