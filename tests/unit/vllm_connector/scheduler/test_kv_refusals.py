"""Which requests an engine that decodes ends, and what their KV caches' owners are told."""

from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import fake_request
from triptych_vllm_connector.kv_failures import KvFailure
from triptych_vllm_connector.scheduler.kv_refusals import PROMPT, KvRefusals, _description

TOKENS = [1, 2, 3]


def params(tokens: list[int] = TOKENS) -> dict[str, Any]:
    named = {"remote_engine_id": "e", "remote_request_id": "r", PROMPT: _description(tokens, 0)}
    return {"do_remote_prefill": True, **named}


@pytest.mark.parametrize("given", [None, {}, {"do_remote_prefill": False}])
def test_without_a_kv_cache_there_is_nothing_to_refuse(given: dict[str, Any] | None) -> None:
    assert KvRefusals().on_added("one", given, TOKENS) is None


def test_the_second_that_names_it_has_nothing_freed() -> None:
    refusals, second = KvRefusals(), params()
    refusals.on_added("one", params(), TOKENS)
    assert refusals.on_added("two", second, TOKENS) is KvFailure.KV_TAKEN
    assert not second["do_remote_prefill"]
    assert refusals.check("one", [], 3, 3) is None


def test_an_item_that_is_not_covered() -> None:
    refusals, features = KvRefusals(), fake_request("one", [("0" * 64, 4)], gap=1).mm_features
    assert refusals.check("one", features, 4, 9) is KvFailure.PREFIX_NOT_HELD
    assert refusals.check("two", features, 7, 9) is None


def test_a_reason_is_told_once() -> None:
    refusals = KvRefusals()
    refusals.on_load_failed(["one", "two"])
    assert refusals.take("one") is KvFailure.KV_LOAD_FAILED
    assert refusals.take("one") is None
    assert len(refusals) == 1
