"""Hostile images and options on a running system: a 4xx or the monolith's answer, and nothing else happens.

The encoder is not started again, its memory grows by no more than `MAX_GROWTH_BYTES`, and a neighbour's
requests are answered meanwhile.
"""

import base64
import concurrent.futures
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest

from tests.support.hostile import options as option_sets
from tests.support.hostile.images import hostile_images
from tests.support.real.processes import Part, pids_of
from tests.support.real.system import EXACT, MODEL, Server, System, running_system
from tests.support.waiting import free_port, wait_until

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}
NUM_CLIENTS = 4
DECODER = "triptych_vllm_connector.decoding.child"
NUM_NEIGHBOURS = 24
ANSWER_LIMIT_S = 60.0
MAX_PIXELS = 32_000_000  # of one image, and of all that are preprocessed at once
# Of host, engine and worker together, at their highest: what pixels cost while they are decoded, converted
# and resized, and what the engine keeps.
MAX_GROWTH_BYTES = 24 * MAX_PIXELS + (128 << 20)
UNCHECKED_OPTIONS = [{"patch_size": 7}, {"patch_size": 28}, {"temporal_patch_size": 1}]
PROCESSOR_OPTIONS = option_sets.ALLOWED_PROCESSOR_OPTIONS | {
    "patch_size": {"values": [7, 28]},  # what the check of items is for
    "temporal_patch_size": {"values": [1]},
}


@dataclass(frozen=True)
class Reply:
    status: int
    token_ids: tuple[int, ...] = ()
    error: dict[str, Any] = field(default_factory=dict)


def ask(server: Server, content: Any, fields: dict[str, Any] | None = None) -> Reply:
    body = {
        "model": MODEL.name, "messages": [{"role": "user", "content": content}],
        "temperature": 0, "max_tokens": 12, "return_token_ids": True, **(fields or {}),
    }  # fmt: skip
    url = f"{server.base_url}/chat/completions"
    answer = httpx.post(url, json=body, timeout=ANSWER_LIMIT_S, trust_env=False)
    body = answer.json()
    if answer.status_code != 200:
        return Reply(answer.status_code, error=body.get("error", body))
    return Reply(200, tuple(body["choices"][0]["token_ids"]))


def image(content: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(content).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unchecked") / "switch"


@pytest.fixture(scope="module")
def guarded(switch: Path) -> Iterator[System]:
    """A system whose operator allows some options."""
    arguments = " ".join(EXACT)
    with running_system(
        f"--encoder-args={arguments}", f"--prefill-decode-args={arguments}",
        TRIPTYCH_REQUEST_PROCESSOR_OPTIONS=json.dumps(PROCESSOR_OPTIONS),
        TRIPTYCH_REQUEST_IMAGE_OPTIONS=json.dumps(option_sets.ALLOWED_IMAGE_OPTIONS),
        TRIPTYCH_MAX_IMAGE_PIXELS=str(MAX_PIXELS),
        TRIPTYCH_PREPROCESS_PIXELS=str(MAX_PIXELS),
        UNCHECKED_ITEMS=str(switch),
        is_forked=True,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def strict_gateway(guarded: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second gateway of the system, whose operator allows no options: the default."""
    port = free_port()
    env = {key: value for key, value in guarded.env.items() if not key.startswith("TRIPTYCH_REQUEST_")}
    env["TRIPTYCH_REDIS_URL"] = f"unix://{guarded.run_dir / 'redis.sock'}"
    env |= {"TRIPTYCH_INSTANCE": "gateway-strict", "TRIPTYCH_PORT": str(port)}
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "triptych_gateway"], env=env, stderr=output)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_ready, 60, "the second gateway is ready")
        yield Server(f"http://127.0.0.1:{port}/v1")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def neighbours(monolith: Server, strips: ModuleType) -> list[tuple[list[Any], Reply]]:
    """Ordinary requests, and their answers."""
    asked = [[image(strip.png), QUESTION] for strip in strips.held_out_strips(NUM_NEIGHBOURS, seed=77)]
    return [(content, ask(monolith, content)) for content in asked]


@dataclass
class Watch:
    """Of the services' processes, the encoder's memory, and a neighbour that goes on asking."""

    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    growth: int = 0


def lasting_pids(system: System, name: str) -> list[int]:
    """Return its processes but those that decode rare formats, which start on demand and end at limits."""
    return [pid for pid in pids_of(system, name) if DECODER not in psutil.Process(pid).cmdline()]


@contextmanager
def watched(system: System, neighbours: list[tuple[list[Any], Reply]]) -> Iterator[Watch]:
    watch, stop = Watch(), threading.Event()
    before = {name: lasting_pids(system, name) for name in system.services()}
    pids = pids_of(system, "encoder-0", Part.WHOLE)
    resident = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from here

    def go_on_asking() -> None:
        for content, expected in itertools.cycle(neighbours):
            if stop.is_set():
                return
            got = ask(system, content)
            watch.num_answers += 1
            if got != expected:
                watch.wrong.append(f"{got} instead of {expected}")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(go_on_asking)
        try:
            yield watch
        finally:
            stop.set()
            asking.result()
    watch.growth = sum(map(peak_resident_bytes, pids)) - resident
    after = {name: lasting_pids(system, name) for name in system.services()}
    assert after == before, "a process was started again"
    assert not watch.wrong, watch.wrong
    assert watch.num_answers > 0
    assert watch.growth <= MAX_GROWTH_BYTES, f"the encoder grew by {watch.growth >> 20} MiB"


def peak_resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(peak.split()[1]) << 10


def all_of(work: Callable[[Any], str | None], cases: list[Any]) -> list[str]:
    """What `work` found wrong."""
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return [wrong for wrong in pool.map(work, cases) if wrong is not None]


def is_refused_for_the_option(reply: Reply, fields: dict[str, Any]) -> bool:
    (name,) = fields
    return reply.status == 400 and str(reply.error.get("param", "")).startswith(name)


def test_images(
    guarded: System, monolith: Server, strips: ModuleType, neighbours: list[tuple[list[Any], Reply]]
) -> None:
    (strip,) = strips.held_out_strips(1, seed=5)
    images = hostile_images(strip.png)
    assert len(images) >= 50
    statuses: dict[str, int] = {}

    def check(each: Any) -> str | None:
        content = [image(each.content), QUESTION]
        got = ask(guarded, content)
        statuses[each.name] = got.status
        if 400 <= got.status < 500:
            return None
        expected = ask(monolith, content)
        return None if got == expected else f"{each.name}: {got} instead of {expected}"

    with watched(guarded, neighbours) as watch:
        wrong = all_of(check, images)
    assert not wrong, "\n".join(wrong)
    answered = [name for name, status in statuses.items() if status == 200]
    assert len(answered) >= 25, answered  # it would be no answer to refuse them all
    assert {name: statuses[name] for name in statuses if " and " in name and "high" not in name} == {
        "jpeg and fli": 400, "jpeg and small fli": 400, "jpeg and gbr": 400, "png and pcd": 400,
    }  # fmt: skip
    print(f"images: {len(answered)} of {len(images)} answered, growth {watch.growth >> 20} MiB")


def test_options_where_none_are_allowed(
    strict_gateway: Server, guarded: System, strips: ModuleType, neighbours: list[tuple[list[Any], Reply]]
) -> None:
    sets = [*option_sets.HOSTILE, *option_sets.ALLOWED]
    assert len(sets) >= 50
    (strip,) = strips.held_out_strips(1, seed=6)
    content = [image(strip.png), QUESTION]

    def check(fields: dict[str, Any]) -> str | None:
        got = ask(strict_gateway, content, fields)
        return None if is_refused_for_the_option(got, fields) else f"{fields}: {got}"

    with watched(guarded, neighbours):
        wrong = all_of(check, sets)
    assert not wrong, "\n".join(wrong)
    expected = ask(strict_gateway, content)
    assert expected.status == 200
    assert [ask(strict_gateway, content, fields) for fields in option_sets.NOTHING] == [
        expected for _ in option_sets.NOTHING
    ]


def test_options_within_and_beyond_what_is_allowed(
    guarded: System, monolith: Server, strips: ModuleType, neighbours: list[tuple[list[Any], Reply]]
) -> None:
    (strip,) = strips.held_out_strips(1, seed=8)
    content = [image(strip.png), QUESTION]

    def check(fields: dict[str, Any]) -> str | None:
        got = ask(guarded, content, fields)
        if any(fields is each for each in option_sets.HOSTILE):  # 1 equals True, and is not the same
            return None if 400 <= got.status < 500 else f"{fields}: {got}"
        expected = ask(monolith, content, fields)
        return None if got == expected else f"{fields}: {got} instead of {expected}"

    with watched(guarded, neighbours) as watch:
        wrong = all_of(check, [*option_sets.HOSTILE, *option_sets.ALLOWED])
    assert not wrong, "\n".join(wrong)
    print(f"options: growth {watch.growth >> 20} MiB")


def test_an_item_that_raises_in_the_tower_costs_only_its_own_job(
    guarded: System, switch: Path, strips: ModuleType, neighbours: list[tuple[list[Any], Reply]]
) -> None:
    """With the check of items switched off, so that they reach the tower."""
    samples = strips.held_out_strips(len(UNCHECKED_OPTIONS), seed=9)
    asked = [
        ([image(strip.png), QUESTION], {"mm_processor_kwargs": each})
        for strip, each in zip(samples, UNCHECKED_OPTIONS, strict=True)
    ]
    switch.touch()
    try:
        with watched(guarded, neighbours), concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
            replies = list(pool.map(lambda each: ask(guarded, *each), asked))
    finally:
        switch.unlink()
    assert [reply.status for reply in replies] == [503] * len(asked), replies
    assert {reply.error["code"] for reply in replies} == {"encode_failed"}, replies
    log = (guarded.logs_dir / "encoder-0.log").read_text()
    assert log.count("encoder refused item") >= len(asked)
    for fields in UNCHECKED_OPTIONS:  # and with it they do not reach the tower
        assert ask(guarded, [image(samples[0].png), QUESTION], {"mm_processor_kwargs": fields}).status == 400
    assert (guarded.logs_dir / "encoder-0.log").read_text().count("encoder refused item") == log.count(
        "encoder refused item"
    )
