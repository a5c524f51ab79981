"""What operators do around a change of weights: vLLM's caches are emptied under requests."""

import concurrent.futures
from collections.abc import Iterator
from types import ModuleType

import httpx
import pytest

from tests.support.real.inspection import prefill_decode_url
from tests.support.real.system import EXACT, System, image_part, running_system
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}
RESETS = ("reset_encoder_cache", "reset_mm_cache", "reset_prefix_cache")


@pytest.fixture(scope="module")
def resettable() -> Iterator[System]:
    # Prompts are computed in several steps, so that a reset finds views that are still needed.
    exact = " ".join(EXACT)
    with running_system(
        f"--encoder-args={exact}",
        f"--prefill-decode-args={exact} --max-num-batched-tokens=64 --max-num-seqs=8 --block-size=32",
        VLLM_SERVER_DEV_MODE="1",
        is_forked=True,
    ) as running:
        yield running


def reset(url: str, cache: str) -> None:
    answer = httpx.post(f"{url}/{cache}", trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text


def test_the_engine_is_warm_before_the_instance_registers(resettable: System) -> None:
    """With prompts that take several steps, too."""
    log = (resettable.logs_dir / "prefill_decode-0.log").read_text()
    warm, ready = log.find("engine is warm"), log.find("prefill_decode ready")
    assert 0 <= warm < ready, log


@pytest.mark.parametrize("cache", RESETS)
def test_requests_go_on_after_a_reset(resettable: System, strips: ModuleType, cache: str) -> None:
    (strip,) = strips.held_out_strips(1, seed=61)
    before = resettable.ask([image_part(strip.png), QUESTION]).text
    reset(prefill_decode_url(resettable), cache)
    assert resettable.ask([image_part(strip.png), QUESTION]).text == before
    wait_until(lambda: resettable.store_stats().num_pins == 0, 10, "all pins end")


def test_a_parked_request_outlives_every_reset(resettable: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=62)
    url = prefill_decode_url(resettable)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with resettable.stopped_engine("encoder-0"):
            asked = pool.submit(resettable.ask, [image_part(strip.png), QUESTION])
            wait_until(lambda: resettable.store_stats().num_watches == 2, 30, "it is parked")
            for cache in RESETS:
                reset(url, cache)
        answer = asked.result()
    assert answer.text == resettable.ask([image_part(strip.png), QUESTION]).text
    wait_until(lambda: resettable.store_stats().num_pins == 0, 10, "all pins end")


def test_requests_under_way_outlive_resets(resettable: System, strips: ModuleType) -> None:
    """Long prompts with images at both ends, while the encoder cache is emptied again and again."""
    images = [image_part(strip.png) for strip in strips.held_out_strips(6, seed=63)]
    filler = {"type": "text", "text": "read the digits " * 40}
    contents = [[images[i], images[i + 1], filler, images[i], QUESTION] for i in range(5)]
    expected = [resettable.ask(content).text for content in contents]
    url = prefill_decode_url(resettable)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(resettable.ask, content) for content in contents * 2]
        while not all(answer.done() for answer in answers):
            reset(url, "reset_encoder_cache")
        texts = [answer.result().text for answer in answers]
    assert len(texts) == 10
    assert [text.split() for text in texts] == [text.split() for text in expected * 2]
    wait_until(lambda: resettable.store_stats().num_pins == 0, 10, "all pins end")
