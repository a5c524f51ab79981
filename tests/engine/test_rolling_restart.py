"""Every service that runs twice is replaced under load, and the store alone: no request fails."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from types import ModuleType

import openai
import pytest

from tests.support.real.balancer import Ask, read_stream, steady_load
from tests.support.real.system import MODEL, System, image_part, running_system
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

PAUSE_S = 0.2  # two cores start engines meanwhile
NUM_STRIPS = 400
LONG_STREAM_TOKENS = 48
IDLE_LIMIT_S = 90  # a requester that went elsewhere never acks: the producer's pin ends with its deadline
RESTART_LIMIT_S = 300


@pytest.fixture(scope="module")
def pairs() -> Iterator[System]:
    with running_system("--encoders=2", "--prefill-decodes=2", num_gateways=2) as running:
        yield running


@pytest.fixture(scope="module")
def kinds(strips: ModuleType) -> dict[str, Ask]:
    """Texts in long streams; images that are new; images again, not streamed."""
    fresh = itertools.cycle(strips.held_out_strips(NUM_STRIPS, seed=51))
    lock = threading.Lock()

    def ask_text(client: openai.OpenAI) -> None:
        text = read_stream(
            client.chat.completions.create(
                model=MODEL.name,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=LONG_STREAM_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        assert text

    def ask_image(client: openai.OpenAI) -> None:
        with lock:
            strip = next(fresh)
        content = [image_part(strip.png), {"type": "text", "text": "read the digits"}]
        for stream in (True, False):
            answer = client.chat.completions.create(
                model=MODEL.name,
                messages=[{"role": "user", "content": content}],
                max_tokens=12,
                stream=stream,
            )
            text = read_stream(answer) if stream else answer.choices[0].message.content
            assert text

    return {"text": ask_text, "image": ask_image}


def pids(system: System) -> dict[str, int]:
    status = json.loads((system.run_dir / "supervisor.json").read_text())
    return {service["name"]: service["pid"] for service in status["services"]}


@pytest.mark.parametrize("kind", ["cache_store", "encoder", "prefill_decode", "gateway"])
def test_no_request_fails(pairs: System, kinds: dict[str, Ask], kind: str) -> None:
    first_port = int(pairs.base_url.rsplit(":", 1)[1].split("/")[0])
    urls = [f"http://127.0.0.1:{port}" for port in (first_port, first_port + 1)]
    before = pids(pairs)
    with steady_load(urls, kinds, PAUSE_S) as load:
        wait_until(lambda: len(load.num_answers) == len(kinds), 60, "every kind was answered")
        begun = load.num_answers.copy()
        restart = pairs.command("restart", kind)
        finished = load.num_answers.copy()
        wait_until(
            lambda: all(load.num_answers[name] > finished[name] for name in kinds), 60, "all go on afterwards"
        )
    assert restart.returncode == 0, restart.stdout + restart.stderr
    after = pids(pairs)
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if name.startswith(kind)
    }
    assert load.failures == []
    if kind in ("encoder", "prefill_decode"):  # these take long enough
        assert all(finished[name] > begun[name] for name in kinds)
    wait_until(lambda: pairs.store_stats().num_pins == 0, IDLE_LIMIT_S, "no pin is left")


def test_a_signal_to_the_process_group_reaches_no_engine(pairs: System) -> None:
    """As a terminal's Ctrl-C: the host drains, and its engine goes on until the stream has ended."""
    before = pids(pairs)
    with pairs.openai as client:
        streams = [
            client.chat.completions.create(
                model=MODEL.name,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=LONG_STREAM_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in range(2)
        ]
        for stream in streams:  # one at each instance: the router chooses the one with fewer
            next(iter(stream))
        os.killpg(before["prefill_decode-0"], signal.SIGINT)
        texts = [read_stream(stream) for stream in streams]
    assert len(set(texts)) == 1
    wait_until(
        lambda: (
            is_ready(pairs, "prefill_decode-0")
            and pids(pairs)["prefill_decode-0"] != before["prefill_decode-0"]
        ),
        RESTART_LIMIT_S,
        "its host has ended, and was started again",
    )


def is_ready(system: System, name: str) -> bool:
    status = json.loads((system.run_dir / "supervisor.json").read_text())
    return any(each["name"] == name and each["state"] == "ready" for each in status["services"])
