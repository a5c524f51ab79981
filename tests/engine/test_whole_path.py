"""The whole path on real parts: what a client gets, what the trace shows, what the store counts."""

import concurrent.futures
import io
import itertools
import json
import os
from types import ModuleType
from typing import Any

import openai
import psutil
import pytest
from PIL import Image

from tests.support import janitor
from tests.support.real.processes import pids_of
from tests.support.real.system import MODEL, Answer, Server, System, image_part
from tests.support.waiting import wait_until
from triptych_cli.system.machine import cores_of_engines
from triptych_common.telemetry.span_records import SpanRecord

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}
NUM_STRIPS = 100
NUM_CLIENTS = 6
STAGES = {
    "chat digits-vl", "gateway.media", "queue.encode_job", "gateway.encode_wait", "encoder.preprocess",
    "encoder.reserve", "encoder.encode", "encoder.write", "encoder.seal", "prefill.preallocate",
    "prefill.inject", "llm_request", "gateway.first_token", "gateway.stream",
}  # fmt: skip


def by_name(spans: list[SpanRecord], name: str) -> list[SpanRecord]:
    return [span for span in spans if span.name == name]


def contents(strips: ModuleType) -> list[list[dict[str, Any]]]:
    """100 held-out strips in requests of one, two and three images, the text in front, between and behind."""
    images = [image_part(strip.png) for strip in strips.held_out_strips(NUM_STRIPS, length=None, seed=7)]
    requests: list[list[dict[str, Any]]] = []
    for size in itertools.cycle((1, 2, 3)):
        taken, images = images[:size], images[size:]
        if not taken:
            return requests
        place = len(requests) % (len(taken) + 1)
        requests.append([*taken[:place], QUESTION, *taken[place:]])
    return requests


def ask_all(server: Server, requests: list[list[dict[str, Any]]], *, stream: bool) -> list[Answer]:
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return list(pool.map(lambda content: server.ask(content, stream=stream), requests))


def test_every_process_is_known_to_the_janitor_of_the_run(system: System) -> None:
    """Redis has the supervisor's death signal in place of an environment that can be read.

    The child that decodes what C libraries read has hardly any environment.
    """
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "JPEG2000")
    assert system.ask([image_part(file.getvalue()), QUESTION]).text
    supervisor = json.loads((system.run_dir / "supervisor.json").read_text())["supervisor_pid"]

    def unknown() -> dict[int, list[str] | None]:
        pids = {pid for name in system.services() if name != "redis" for pid in pids_of(system, name)}
        left = {supervisor, *pids} - {*janitor.processes_of(os.environ[janitor.OWNER])}
        found = psutil.process_iter(["cmdline"])
        return {each.pid: each.info["cmdline"] for each in found if each.pid in left}  # some end meanwhile

    wait_until(lambda: not unknown(), 60, lambda: f"unknown to the janitor: {unknown()}")


def test_answers_equal_the_monoliths_token_for_token(
    system: System, monolith: Server, strips: ModuleType
) -> None:
    requests = contents(strips)
    expected = ask_all(monolith, requests, stream=False)
    for stream in (False, True):
        answers = ask_all(system, requests, stream=stream)
        different = [
            (got.text, wanted.text)
            for got, wanted in zip(answers, expected, strict=True)
            if got.token_ids != wanted.token_ids or got.text != wanted.text
        ]
        assert not different, f"stream={stream}: {different}"
    assert all(answer.token_ids for answer in expected)


def test_held_out_handwriting_is_read(system: System, strips: ModuleType) -> None:
    samples = strips.held_out_strips(40, length=3, seed=11)
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(lambda strip: system.ask([image_part(strip.png), QUESTION]).text, samples))
    right = sum(answer.strip() == strip.digits for answer, strip in zip(answers, samples, strict=True))
    assert right >= 36, f"{right} of 40 right"  # the model's own figure on more strips is 95 % or better


def test_every_stage_is_in_the_trace(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=21)
    answer = system.ask([image_part(strip.png), QUESTION], stream=True)
    spans = system.trace(answer.request_id, *STAGES)
    assert len({span.trace_id for span in spans}) == 1
    places = {
        "encoder.encode": "encoder-0",
        "prefill.inject": "prefill_decode-0",
        "gateway.first_token": "gateway-0",
    }
    assert {name: by_name(spans, name)[0].instance for name in places} == places
    encode = by_name(spans, "encoder.encode")[0].attributes
    fewest, most = (int(encode.get(f"triptych.{which}_cores", 1)) for which in ("fewest", "most"))
    assert 1 <= fewest <= most <= len(os.sched_getaffinity(0))
    assert ("triptych.most_cores" in encode) == (len(cores_of_engines()) > 1), "shared where it can be"


def test_the_injected_tensor_lies_in_the_region(system: System, strips: ModuleType) -> None:
    """No copy: the address that vLLM's encoder cache holds is inside the worker's mapping of the region."""
    (strip,) = strips.held_out_strips(1, seed=22)
    answer = system.ask([image_part(strip.png), QUESTION])
    (inject,) = by_name(system.trace(answer.request_id, "prefill.inject"), "prefill.inject")
    view = int(inject.attributes["triptych.view_address"])
    region = int(inject.attributes["triptych.region_address"])
    assert region <= view
    assert view + int(inject.attributes["triptych.num_bytes"]) <= region + int(
        inject.attributes["triptych.region_num_bytes"]
    )


def test_the_same_image_again_is_not_encoded(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=23)
    first = system.ask([image_part(strip.png), QUESTION])
    before = system.store_stats()
    second = system.ask([QUESTION, image_part(strip.png)])
    spans = system.trace(second.request_id, "prefill.inject", "llm_request")
    assert not by_name(spans, "encoder.encode")
    assert not by_name(spans, "queue.encode_job")
    after = system.store_stats()
    assert after.num_seals_total == before.num_seals_total
    assert after.num_hits_total > before.num_hits_total
    assert first.text.split() == second.text.split()


def test_the_same_image_twice_in_one_request_is_encoded_once(
    system: System, monolith: Server, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, seed=24)
    content = [image_part(strip.png), QUESTION, image_part(strip.png)]
    before = system.store_stats().num_seals_total
    assert system.ask(content).token_ids == monolith.ask(content).token_ids
    assert system.store_stats().num_seals_total == before + 1


def test_an_evicted_image_is_encoded_again(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=25)
    first = system.ask([image_part(strip.png), QUESTION])
    wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    evict = system.command("store", "evict", "--all")
    assert evict.returncode == 0, evict.stdout + evict.stderr
    before = system.store_stats()
    assert before.num_entries == 0
    again = system.ask([image_part(strip.png), {"type": "text", "text": "What digits are these?"}])
    assert by_name(system.trace(again.request_id, "encoder.encode"), "encoder.encode")
    assert system.store_stats().num_seals_total == before.num_seals_total + 1
    assert again.text.split() == first.text.split()


def test_a_conversation_goes_on_without_its_image(system: System, strips: ModuleType) -> None:
    """Its tokens are in prefill_decode's prefix cache: neither an encode nor a transfer, not even a pin."""
    (strip,) = strips.held_out_strips(1, seed=29)
    long_text = {"type": "text", "text": "read the digits " * 60}  # fills the blocks that the image stands in
    image = image_part(strip.png)
    first = system.ask([image, long_text])
    wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    before = system.store_stats()
    assert before.num_entries > 0
    history = [{"role": "user", "content": [image, long_text]}, {"role": "assistant", "content": first.text}]
    second = system.ask("read them again", history=history, stream=True)
    after = system.store_stats()
    spans = {span.name for span in system.trace(second.request_id, "llm_request", "gateway.stream")}
    assert second.token_ids
    assert not [name for name in spans if name.startswith(("encoder.", "queue.", "prefill."))]
    unchanged = (
        "num_seals_total",
        "num_hits_total",
        "num_misses_total",
        "num_reservations",
        "num_watches",
        "num_pins",
    )
    assert {name: getattr(after, name) for name in unchanged} == {
        name: getattr(before, name) for name in unchanged
    }


def test_text_never_reaches_the_encode_path(system: System) -> None:
    answer = system.ask("hello", stream=True)
    spans = system.trace(answer.request_id, "llm_request", "gateway.stream")
    assert answer.text
    assert not [span for span in spans if span.name.startswith(("encoder.", "queue.", "prefill."))]


def test_nothing_stays_pinned(system: System, strips: ModuleType) -> None:
    for strip in strips.held_out_strips(3, seed=26):
        system.ask([image_part(strip.png), QUESTION], max_tokens=1)
    wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    stats = system.store_stats()
    assert (stats.num_reservations, stats.num_watches, stats.pinned_num_bytes) == (0, 0, 0)


def test_a_client_that_goes_away_leaves_nothing(system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=27)
    with system.openai as client:
        stream = client.chat.completions.create(
            model=MODEL.name, messages=[{"role": "user", "content": [image_part(strip.png), QUESTION]}],
            stream=True, max_tokens=2000, extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        stream.close()
    wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    assert system.ask("hello").text


BAD_REQUESTS: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "unknown model": ({"model": "nobody"}, 404, "model"),
    "no messages": ({"messages": []}, 400, "messages"),
    "no role": ({"messages": [{"content": "hi"}]}, 400, "messages[0].role"),
    "image without url": (
        {"messages": [{"role": "user", "content": [QUESTION, {"type": "image_url"}]}]},
        400,
        "messages[0].content[1]",
    ),
    "not base64": (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}}]}]},
        400,
        "messages[0].content[0]",
    ),
    "not an image": (
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8gd29ybGQ="}}]}]},
        400,
        "messages[0].content[0]",
    ),
    "placeholder without an image": (
        {"messages": [{"role": "user", "content": "<|image_pad|> what is this?"}]},
        400,
        "messages[0].content",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_input_is_refused_and_named(system: System, name: str) -> None:
    change, status, param = BAD_REQUESTS[name]
    body = {"model": MODEL.name, "messages": [{"role": "user", "content": "hi"}], **change}
    with system.openai as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**body)
    assert caught.value.status_code == status
    error = caught.value.response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    assert param is None or str(error["param"]).startswith(param)
    assert system.ask("hello").text  # the services go on


def test_a_body_that_is_no_json_is_refused(system: System) -> None:
    with system.openai as client, pytest.raises(openai.APIStatusError) as caught:
        client.post(
            "/chat/completions",
            cast_to=object,
            body=None,
            options={"headers": {"content-type": "application/json"}},
        )
    assert caught.value.status_code == 400
    assert caught.value.response.json()["error"]["type"] == "invalid_request_error"


def test_bytes_that_only_begin_like_an_image_are_refused(system: System, strips: ModuleType) -> None:
    """The header is right, so only the encoder finds out: its error must reach the caller as a 4xx."""
    (strip,) = strips.held_out_strips(1, seed=28)
    with system.openai as client, pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model=MODEL.name,
            messages=[{"role": "user", "content": [QUESTION, image_part(strip.png[: len(strip.png) // 2])]}],
        )
    assert caught.value.status_code in (400, 422)
    assert "messages[0].content[1]" in str(caught.value.response.json()["error"]["param"])
    wait_until(lambda: system.store_stats().num_reservations == 0, 10, "no reservation stays")
    assert system.ask("hello").text
