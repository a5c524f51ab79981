"""Instances that prefill and instances that decode, asked directly, as a gateway asks them.

One that encodes and prefills, one that decodes, and one that does it all, whose answers are the measure.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import orjson
import pytest

from tests.support.real.roles import Instance
from tests.support.real.system import EXACT, MODEL, System, image_part, running_system
from tests.support.waiting import wait_until

LEASE_S = 20  # comparisons wait for a core, but not so long
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LONG_TEXT = "count the digits one by one. " * 12  # several blocks of the KV cache


@pytest.fixture(scope="module")
def roles() -> Iterator[System]:
    with running_system(
        "--encode-prefills=1",
        "--decodes=1",
        "--encode-prefill-decodes=1",
        f"--prefill-decode-args={' '.join(EXACT)}",
        TRIPTYCH_KV_LEASE_S=str(LEASE_S),
        COLUMNS="200",  # of the tables of `status`
        is_forked=True,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def prefill(roles: System) -> Instance:
    return Instance.of(roles, "encode_prefill-0")


@pytest.fixture(scope="module")
def decode(roles: System) -> Instance:
    return Instance.of(roles, "decode-0")


@pytest.fixture(scope="module")
def whole(roles: System) -> Instance:
    return Instance.of(roles, "encode_prefill_decode-0")


def chat(content: Any, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 24,
        "return_token_ids": True,
        **options,
    }


def prefilled(prefill: Instance, body: dict[str, Any]) -> dict[str, Any]:
    """What the instance that decodes needs."""
    asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
    answer = prefill.post(asked)
    assert answer.status_code == 200, answer.text
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def in_two_stages(prefill: Instance, decode: Instance, body: dict[str, Any]) -> httpx.Response:
    return decode.post({**body, "kv_transfer_params": prefilled(prefill, body)})


# ---- announcement --------------------------------------------------------------------------------
def test_each_announces_its_role_and_its_kv_caches(
    roles: System, prefill: Instance, decode: Instance, whole: Instance
) -> None:
    assert [each.record.role for each in (prefill, decode, whole)] == [
        "encode-prefill",
        "decode",
        "encode-prefill-decode",
    ]
    assert (prefill.record.kv_transfer, whole.record.kv_transfer) == (decode.record.kv_transfer, None)
    assert prefill.record.kv_transfer is not None
    assert prefill.record.kv_transfer.lease_s == LEASE_S
    shown = roles.command("status").stdout
    for each in (prefill, decode, whole):
        assert any(
            {each.record.instance, each.record.role.value} <= set(line.split()) for line in shown.splitlines()
        )


# ---- before any is read --------------------------------------------------------------------------
def test_a_refused_request_has_its_kv_cache_freed(prefill: Instance, decode: Instance) -> None:
    """Nor has this idle engine met the owner yet: it says so as soon as they are connected."""
    body = chat(f"{LONG_TEXT} and refused")
    params = prefilled(prefill, body)
    assert prefill.holds_kv_blocks
    refused = decode.post({**body, "top_logprobs": 1, "kv_transfer_params": params})
    assert refused.status_code == 400, refused.text
    wait_until(lambda: not prefill.holds_kv_blocks, LEASE_S / 2, "KV blocks are freed at once")


# ---- the same answers ----------------------------------------------------------------------------
def test_two_stages_answer_as_one_instance_does(
    prefill: Instance, decode: Instance, whole: Instance, strips: ModuleType
) -> None:
    images = [strip.png for strip in strips.held_out_strips(8, length=None, seed=11)]
    bodies = [
        chat("hello"),
        chat(LONG_TEXT),
        *(
            chat([*map(image_part, images[first : first + num]), {"type": "text", "text": "read the digits"}])
            for first, num in ((0, 1), (1, 1), (2, 2), (4, 3))
        ),
    ]
    loaded_before = decode.metric("vllm:external_prefix_cache_hits_total")
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: in_two_stages(prefill, decode, body), bodies))
    expected = [tokens_of(whole.post(body)) for body in bodies]
    assert [tokens_of(each) for each in answers] == expected
    assert decode.metric("vllm:external_prefix_cache_hits_total") > loaded_before
    assert prefill.metric("triptych_prefill_decode_local_encodes_total") > 0
    wait_until(lambda: not prefill.holds_kv_blocks, 10, "KV blocks are freed after they were read")


def test_a_stream_in_two_stages(prefill: Instance, decode: Instance, whole: Instance) -> None:
    body = chat("count to 20")
    streamed = decode.post({**body, "stream": True, "kv_transfer_params": prefilled(prefill, body)})
    assert streamed.status_code == 200
    *events, last = streamed.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    choices = [each for event in events for each in orjson.loads(event.removeprefix("data: "))["choices"]]
    tokens = [token for each in choices for token in each.get("token_ids") or ()]
    assert tokens == tokens_of(whole.post(body))


# ---- KV caches that are not read -----------------------------------------------------------------
def test_a_kv_cache_of_another_prompt_is_not_read(prefill: Instance, decode: Instance) -> None:
    """As if a template had put the time into it."""
    params = prefilled(prefill, chat(f"{LONG_TEXT} at twelve"))
    other = decode.post({**chat(f"{LONG_TEXT} at one"), "kv_transfer_params": params})
    assert (other.status_code, other.json()["error"]["code"]) == (503, "kv_load_failed"), other.text
    wait_until(lambda: not prefill.holds_kv_blocks, LEASE_S / 2, "KV blocks are freed at once")


def test_a_kv_cache_is_neither_kept_nor_read_after_its_lease(
    prefill: Instance, decode: Instance, whole: Instance
) -> None:
    """Its blocks are another's by then, or may be."""
    body = chat(f"{LONG_TEXT} too late")
    params = prefilled(prefill, body)
    assert prefill.holds_kv_blocks
    wait_until(lambda: not prefill.holds_kv_blocks, LEASE_S + 10, "KV blocks are freed after the lease")
    late = decode.post({**body, "kv_transfer_params": params})
    assert late.status_code == 503, late.text
    assert late.json()["error"]["code"] == "kv_load_failed"
    assert tokens_of(in_two_stages(prefill, decode, body)) == tokens_of(whole.post(body))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_kv_cache_is_read_once(prefill: Instance, decode: Instance, stream: bool, path: str) -> None:
    body = chat(f"read twice by {path}, {stream}")
    params = prefilled(prefill, body)
    tokens_of(decode.post({**body, "kv_transfer_params": params}))
    if path == "/v1/responses":
        body = {"model": MODEL.name, "input": "read twice", "max_output_tokens": 8}
    again = decode.post({**body, "stream": stream, "kv_transfer_params": params}, path)
    assert again.status_code == 503, again.text
    assert again.json()["error"]["code"] == "kv_taken"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_gone_is_an_error_with_a_code(
    prefill: Instance, decode: Instance, stream: bool
) -> None:
    """Its side channel answers no more."""
    body = chat(f"{LONG_TEXT} of an engine that is gone, {stream}")
    params = {**prefilled(prefill, body), "remote_engine_id": f"gone-{stream}", "remote_port": 9}
    failed = decode.post({**body, "stream": stream, "kv_transfer_params": params})
    assert failed.status_code == 503, failed.text
    assert failed.json()["error"]["code"] == "kv_load_failed"
    assert tokens_of(decode.post(chat("it still answers")))


# ---- without a KV cache --------------------------------------------------------------------------
def test_text_is_computed_where_it_is_missing(decode: Instance, whole: Instance) -> None:
    body = chat("nobody has prefilled this text")
    assert tokens_of(decode.post(body)) == tokens_of(whole.post(body))


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_that_no_kv_cache_holds_is_an_error_with_a_code(
    decode: Instance, strips: ModuleType, stream: bool
) -> None:
    (strip,) = strips.held_out_strips(1, length=None, seed=12)
    body = chat([image_part(strip.png), {"type": "text", "text": "read the digits"}], stream=stream)
    refused = decode.post(body)
    assert refused.status_code == 503, refused.text
    assert refused.json()["error"]["code"] == "prefix_not_held"


def test_a_prefix_that_is_held_is_decoded_at_once(
    prefill: Instance, decode: Instance, whole: Instance, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, length=None, seed=13)
    turn = [image_part(strip.png), {"type": "text", "text": f"read the digits. {LONG_TEXT}"}]
    body = chat(turn)
    first = tokens_of(in_two_stages(prefill, decode, body))
    assert tokens_of(decode.post(body)) == first == tokens_of(whole.post(body))


def test_one_instance_answers_images_though_no_encoder_was_ever_there(
    roles: System, whole: Instance, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, length=None, seed=14)
    content = [image_part(strip.png), {"type": "text", "text": "read the digits"}]
    assert roles.ask(content).token_ids == tokens_of(whole.post(chat(content)))
