"""Guards in vLLM's own code: texts of errors are cut first, the GPU runner's tables are never exceeded."""

import sys
import warnings
from typing import Any

import pytest

from triptych_gateway.endpoints import kinds
from triptych_vllm_connector.seams.replacing import SeamNotFoundError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    from vllm import envs
    from vllm.entrypoints.anthropic import serving as anthropic_serving  # has the sanitiser by name
    from vllm.entrypoints.serve.exception_handling import error_response, utils
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample import logit_bias as tables

    from triptych_prefill_decode.request_guards import MAX_ERROR_CHARS, guard_requests

PATHS = "/a" * 7000  # 14 kB, for which vLLM's expressions take 90 s


class Characters:
    """A tokenizer that makes a token of each character."""

    max_token_id = 0x10FFFF

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*map(ord, text)]


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with the guards, and as it was behind the test."""
    for module in (utils, error_response, anthropic_serving):
        monkeypatch.setattr(module, "sanitize_message", module.sanitize_message)
    monkeypatch.setattr(SamplingParams, "update_from_tokenizer", SamplingParams.update_from_tokenizer)
    guard_requests()


def test_an_error_text_is_cut_before_any_expression_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Expressions:
        @staticmethod
        def sub(pattern: str, replacement: str, text: str) -> str:
            seen.append(len(text))
            return text

    monkeypatch.setattr(utils, "re", Expressions)
    for error in (ValueError(PATHS), PATHS):
        assert len(error_response.create_error_response(error).error.message) < MAX_ERROR_CHARS + 20
    assert seen
    assert max(seen) < MAX_ERROR_CHARS + 20


def test_no_module_of_vllm_has_the_sanitiser_without_the_cut() -> None:
    guard_requests()  # once more changes nothing
    found = {
        name: module.sanitize_message
        for name, module in sys.modules.items()
        if name.startswith("vllm.") and hasattr(module, "sanitize_message")
    }
    assert {utils.__name__, error_response.__name__, anthropic_serving.__name__} <= found.keys()
    for name, sanitise in found.items():
        assert len(sanitise("x" * 5000)) < MAX_ERROR_CHARS + 20, name


def test_a_vllm_without_the_sanitiser_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "sanitize_message")
    with pytest.raises(SeamNotFoundError):
        guard_requests()


def test_error_responses_that_bypass_the_sanitiser_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_response, "sanitize_message", lambda message: message)
    with pytest.raises(SeamNotFoundError):
        guard_requests()


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ({"allowed_token_ids": [*range(tables.MAX_NUM_ALLOWED_TOKEN_IDS + 1)]}, 0),
        ({"logit_bias": dict.fromkeys(range(tables.MAX_NUM_LOGIT_BIAS_TOKENS + 1), 1.0)}, 0),
        ({"bad_words": ["b" * 600, "c" * 600]}, 0),
        ({"min_tokens": 1, "stop_token_ids": [*range(100)]}, 29),
    ],
)
def test_what_the_runners_tables_do_not_hold_is_refused_before_the_engine(
    asked: dict[str, Any], ends: int
) -> None:
    field = [*asked][-1]
    params = SamplingParams(max_tokens=8, **asked)
    params.update_from_generation_config({"eos_token_id": [*range(1000, 1000 + ends)]})
    with pytest.raises(VLLMValidationError) as caught:
        params.update_from_tokenizer(Characters())
    assert caught.value.parameter == field


def test_what_the_runners_tables_hold_passes() -> None:
    params = SamplingParams(
        max_tokens=8,
        min_tokens=1,
        stop_token_ids=[*range(kinds.MAX_STOP_TOKEN_IDS)],
        allowed_token_ids=[*range(kinds.MAX_ALLOWED_TOKEN_IDS)],
        logit_bias=dict.fromkeys(range(kinds.MAX_LOGIT_BIAS_TOKENS), 1.0),
        bad_words=[chr(0x4E00 + index) for index in range(kinds.MAX_BAD_WORDS)],
    )
    params.update_from_tokenizer(Characters())


def test_the_gateways_bounds_are_the_tables_of_vllm() -> None:
    assert kinds.MAX_ALLOWED_TOKEN_IDS == tables.MAX_NUM_ALLOWED_TOKEN_IDS
    assert kinds.MAX_LOGIT_BIAS_TOKENS == tables.MAX_NUM_LOGIT_BIAS_TOKENS
    assert kinds.MAX_STOP_TOKEN_IDS == tables.MAX_NUM_STOP_TOKEN_IDS
    assert kinds.MAX_BAD_WORDS == envs.VLLM_MAX_NUM_BAD_WORDS
