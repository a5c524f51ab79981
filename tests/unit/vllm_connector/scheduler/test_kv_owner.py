"""An engine that prefills says when the lease of a KV cache ends, and which prompt it is of."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_vllm_connector.scheduler.kv_refusals import PROMPT, describe_kv_caches, is_of_prompt

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector  # noqa: F401 -- as kv_owner does later

ENDS = {"kept": 123.5}
TOKENS = [5, 7, 70_000]


def connector() -> Any:
    def request_finished(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_kept = request.request_id in ENDS
        return is_kept, {"remote_block_ids": block_ids} if is_kept else None

    scheduler = SimpleNamespace(
        _reqs_need_send=ENDS, request_finished=request_finished, _prefill_backoff=lambda: 1
    )
    return SimpleNamespace(connector_scheduler=scheduler)


def request(name: str, tokens: list[int] | None = None, **params: Any) -> Any:
    return SimpleNamespace(request_id=name, prompt_token_ids=tokens, kv_transfer_params=params)


def test_the_end_goes_with_what_the_reader_needs() -> None:
    made = connector()
    describe_kv_caches(made)
    finish = made.connector_scheduler.request_finished
    assert finish(request("kept"), [1]) == (
        True,
        {"remote_block_ids": [1], "remote_blocks_expiry_time": 123.5},
    )
    assert finish(request("freed", TOKENS), [1]) == (False, None)


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_reader_knows_whether_the_prompt_is_its_own(is_cut: bool) -> None:
    made = connector()
    describe_kv_caches(made)
    computed = TOKENS[:-1] if is_cut else TOKENS
    kept = request("kept", computed, _p_side_truncated=is_cut)
    _, params = made.connector_scheduler.request_finished(kept, [1])
    assert is_of_prompt(params, TOKENS)
    for other in ([5, 8, 70_000], [5, 7], [5], [], [*TOKENS, 1]):
        assert not is_of_prompt(params, other), other


def test_an_owner_that_does_not_say_is_believed() -> None:
    assert is_of_prompt({}, TOKENS)
    assert is_of_prompt({PROMPT: None}, TOKENS)


@pytest.mark.parametrize("said", [1, {}, {"num_computed": "3"}, {"num_computed": -1}, {"num_computed": 3}])
def test_what_makes_no_sense_is_of_no_prompt(said: Any) -> None:
    assert not is_of_prompt({PROMPT: said}, TOKENS)


def test_engines_without_such_a_connector_are_left_alone() -> None:
    describe_kv_caches(None)
    other = SimpleNamespace(connector_scheduler=SimpleNamespace())
    describe_kv_caches(other)
    assert not hasattr(other.connector_scheduler, "request_finished")
