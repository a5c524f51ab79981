"""Requests that an engine that decodes ends before anything is computed for them."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_vllm_connector.scheduler.kv_refusals import describe_kv_caches

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from triptych_vllm_connector.scheduler.decode_scheduler import DecodeMixin

TOKENS = [1, 2, 3]


class Added:
    """In vLLM's place."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.refused: list[str] = []
        self.ec_connector = SimpleNamespace(refuse_request=self.refused.append)

    def add_request(self, request: Any) -> None:
        self.added.append(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = [
            EngineCoreOutput(each, new_token_ids=[], finish_reason=FinishReason.ERROR)
            for each in self.refused
        ]
        return {0: SimpleNamespace(outputs=outputs)}


class Scheduler(DecodeMixin, Added):
    def reason(self, request: Any) -> str | None:
        """With which it is ended; None: it goes on."""
        self.add_request(request)
        if not self._ec_transfer_pending(request, 0):
            return None
        (output,) = self.update_from_output(None, None)[0].outputs
        reason: str = output.stop_reason
        return reason


def handed_over(tokens: list[int]) -> dict[str, Any]:
    """As an engine that has prefilled these says it."""
    owner = SimpleNamespace(
        _reqs_need_send={"p": 1.0},
        request_finished=lambda request, blocks: (
            True,
            {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "p"},
        ),
    )
    describe_kv_caches(SimpleNamespace(connector_scheduler=owner))
    request = SimpleNamespace(request_id="p", prompt_token_ids=tokens, kv_transfer_params={})
    params: dict[str, Any] = owner.request_finished(request, [1])[1]
    return params


def request(params: dict[str, Any] | None, **fields: Any) -> Any:
    values = {"request_id": "d", "prompt_token_ids": TOKENS, "abort_immediately": False, **fields}
    return SimpleNamespace(kv_transfer_params=params, mm_features=(), num_tokens=len(TOKENS), **values)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(TOKENS, None), ([1, 2, 4], "kv_load_failed"), ([1, 2], "kv_load_failed")]
)
def test_only_a_kv_cache_of_the_same_prompt_is_read(tokens: list[int], expected: str | None) -> None:
    params = handed_over(tokens)
    assert Scheduler().reason(request(params)) == expected
    assert params["do_remote_prefill"], "its owner is told to free it"


def test_a_request_that_was_refused_before_has_its_kv_cache_freed() -> None:
    """Its prompt is none."""
    params = handed_over(TOKENS)
    assert Scheduler().reason(request(params, prompt_token_ids=[0], abort_immediately=True)) is None
    assert params["do_remote_prefill"]
