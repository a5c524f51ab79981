"""Overlap on real engines: stalled at every item in turn, a prompt is answered as the monolith answers it.

The encoder's engine stands still until prefill_decode has computed all that it can: the text in front of the
first image that was not sent before, and the images in front of it, which are in the store.
"""

import concurrent.futures
from types import ModuleType
from typing import Any

import pytest

from tests.support.real.processes import are_asleep, pids_of
from tests.support.real.system import Server, System, image_part
from tests.support.waiting import wait_until
from triptych_common.telemetry.span_records import SpanRecord

pytestmark = pytest.mark.engine

STALL_TIMEOUT_S = 30
TEXT = {"type": "text", "text": "read the digits"}
LONG = {"type": "text", "text": "these are strips of digits, please read the digits " * 8}
# By name: the parts of a message. A number stands for an image; those below `num_known` were sent before.
CASES: dict[str, tuple[list[Any], int]] = {
    "text, image": ([LONG, 0, TEXT], 0),
    "image first": ([0, TEXT], 0),
    "text between images, the second is missing": ([0, LONG, 1, TEXT], 1),
    "image behind image, the third is missing": ([TEXT, 0, 1, 2], 2),
    "image behind image, all are missing": ([TEXT, 0, 1, 2, TEXT], 0),
    "the same image twice, before and behind a missing one": ([TEXT, 0, 1, 0, TEXT], 1),
    "a missing image twice": ([LONG, 0, TEXT, 0], 0),
}


def parts(content: list[Any], images: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [images[each] if isinstance(each, int) else each for each in content]


def has_stalled(system: System, num_missing: int) -> bool:
    """Has the engine computed what it can? It and the encoder's host watch each missing image, and no answer
    is on its way from the store to the engine.
    """
    if system.store_stats().num_watches != 2 * num_missing:
        return False
    return are_asleep([*pids_of(system, "cache_store-0"), *pids_of(system, "prefill_decode-0")])


def hashes_of(spans: list[SpanRecord], name: str) -> set[str]:
    return {str(span.attributes["triptych.mm_hash"]) for span in spans if span.name == name}


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_that_stalls_at_a_missing_image_is_answered_as_the_monolith_answers_it(
    system: System, monolith: Server, strips: ModuleType, name: str
) -> None:
    content, num_known = CASES[name]
    num_images = 1 + max(each for each in content if isinstance(each, int))
    found = strips.held_out_strips(num_images, length=3, seed=700 + list(CASES).index(name))
    images = [image_part(strip.png) for strip in found]
    for image in images[:num_known]:
        system.ask([image, {"type": "text", "text": "what is this?"}], max_tokens=1)
    asked = parts(content, images)
    expected = monolith.ask(asked)
    num_missing = num_images - num_known
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with system.stopped_engine("encoder-0"):
            answer = pool.submit(system.ask, asked, stream=True)
            wait_until(lambda: has_stalled(system, num_missing), STALL_TIMEOUT_S, "it waits")
        got = answer.result()
    assert (got.token_ids, got.text) == (expected.token_ids, expected.text)

    def has_all(spans: list[SpanRecord]) -> bool:
        """Of prefill_decode, too: its waits end before what they were for is injected."""
        encoded, injected = (hashes_of(spans, name) for name in ("encoder.encode", "prefill.inject"))
        return len(encoded) == num_missing and encoded <= injected

    spans = system.trace(got.request_id, "prefill.wait", "gateway.stream", until=has_all)
    waits = sorted((span for span in spans if span.name == "prefill.wait"), key=lambda span: span.start_ns)
    computed = [int(span.attributes["triptych.num_computed_tokens"]) for span in waits]
    assert computed[0] > 0, "it had begun"
    missing = [int(span.attributes["triptych.num_items_missing"]) for span in waits]
    assert num_missing in missing, "it waited for the encoder"  # before that perhaps for the store's reply
    assert computed == sorted(set(computed)), "each wait is one span, and further on"
    assert all(int(span.attributes["triptych.num_engine_steps"]) <= 2 for span in waits), "waiting is free"
    wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")


def test_a_text_that_was_computed_while_its_image_was_encoded_is_cached_for_others(
    system: System, monolith: Server, strips: ModuleType
) -> None:
    images = [image_part(strip.png) for strip in strips.held_out_strips(2, length=3, seed=750)]
    text = {"type": "text", "text": "one of the strips that come here is to be read " * 30}  # over two blocks
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with system.stopped_engine("encoder-0"):
            answers = [pool.submit(system.ask, [text, image], stream=True) for image in images]
            wait_until(lambda: has_stalled(system, 2), STALL_TIMEOUT_S, "both wait")
        got = [each.result() for each in answers]
    assert [each.token_ids for each in got] == [monolith.ask([text, image]).token_ids for image in images]
