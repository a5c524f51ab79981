"""Waiting costs nothing: with a slow encoder, PD's request is parked, and others run on.

Nor does it last for ever: not even when the gateway hangs.
"""

import concurrent.futures
from collections.abc import Iterator
from types import ModuleType

import openai
import pytest

from tests.support.real.roles import Instance
from tests.support.real.system import System, image_part, running_system
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

ENCODE_DELAY_MS = 300
MAX_STEPS = 20
BUDGET_EMBEDS = 24  # two strips of three digits
FIRST_TOKEN_TIMEOUT_S = 8


@pytest.fixture(scope="module")
def slow_system() -> Iterator[System]:
    with running_system(
        TRIPTYCH_DEBUG_ENCODE_DELAY_MS=str(ENCODE_DELAY_MS),
        TRIPTYCH_NUM_SLOTS="1",
        TRIPTYCH_BUDGET_EMBEDS=str(BUDGET_EMBEDS),
        TRIPTYCH_FIRST_TOKEN_TIMEOUT_S=str(FIRST_TOKEN_TIMEOUT_S),
        is_forked=True,
    ) as running:
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

    texts = [next(span for span in slow_system.trace(text_id) if span.is_root) for text_id in text_ids]
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


def test_a_request_larger_than_the_budget_costs_no_steps_while_it_runs_and_waits(
    slow_system: System, strips: ModuleType
) -> None:
    """It has computed its first images, holds their KV blocks, and waits for space and for the third."""
    images = [image_part(strip.png) for strip in strips.held_out_strips(3, seed=33)]
    question = {"type": "text", "text": "read the digits"}
    slow_system.ask([*images[:2], question])  # these are in the store, so the third is the last to be ready
    answer = slow_system.ask([question, *images])  # not the same beginning: nothing is in the KV cache
    spans = slow_system.trace(
        answer.request_id,
        *("prefill.wait", "encoder.encode", "llm_request"),
        until=lambda spans: [span.name for span in spans].count("prefill.inject") == 3,
    )
    waits = sorted((span for span in spans if span.name == "prefill.wait"), key=lambda span: span.start_ns)
    injects = [span for span in spans if span.name == "prefill.inject"]
    assert len(waits) == 2, "for its first images to be pinned, and for the third"
    last_encode_end_ns = max(span.end_ns for span in spans if span.name == "encoder.encode")
    assert min(span.end_ns for span in injects) < waits[1].start_ns, "it had begun"
    assert waits[1].start_ns < last_encode_end_ns <= waits[1].end_ns, "and waited for the third"
    assert all(int(wait.attributes["triptych.num_engine_steps"]) < MAX_STEPS for wait in waits)
    assert slow_system.ask([images[0], question]).text
    instance, stalls = Instance.of(slow_system, "prefill_decode-0"), "triptych_prefill_decode_stalls_total"
    wait_until(lambda: instance.metric(stalls) > 0, 10, "the stall is counted")


def test_a_gateway_that_hangs_keeps_nothing_waiting(slow_system: System, strips: ModuleType) -> None:
    """prefill_decode ends the request by itself, before its image is there."""
    (strip,) = strips.held_out_strips(1, seed=34)
    content = [image_part(strip.png), {"type": "text", "text": "read the digits"}]
    with concurrent.futures.ThreadPoolExecutor(1) as pool, slow_system.stopped_engine("encoder-0"):
        asked = pool.submit(slow_system.ask, content, stream=True)
        wait_until(lambda: slow_system.store_stats().num_watches == 2, FIRST_TOKEN_TIMEOUT_S, "it is parked")
        with slow_system.stopped("gateway-0"):
            wait_until(lambda: slow_system.store_stats().num_watches == 1, 30, "it is ended")
            assert slow_system.store_stats().num_reservations == 1, "the encoder is not done"
        with pytest.raises(openai.APIStatusError) as caught:
            asked.result()
    assert caught.value.status_code in (503, 504)
    wait_until(lambda: slow_system.store_stats().num_reservations == 0, 30, "the encode is finished")
    assert slow_system.ask(content).text
    wait_until(lambda: slow_system.store_stats().num_pins == 0, 10, "all pins end")
