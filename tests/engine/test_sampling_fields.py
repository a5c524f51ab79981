"""Every pair of sampling fields in one batch of a real engine: each request answers as it does alone.

A field that changes what another request gets is not served (`MIXING_FIELDS`). One engine answers all
batches: each request alone, all together, and each with each.
"""

import inspect
import os
import re
import sys
import warnings
from itertools import combinations_with_replacement
from typing import Any

import orjson
import pytest

from tests.support.real.batches import PROMPT
from tests.support.real.bodies.comparing import alike
from tests.support.real.system import MONOLITH_ENVIRONMENT, START_TIMEOUT_S
from tests.support.real.warm import client as warm
from triptych_gateway.endpoints.fields import SAMPLING
from triptych_gateway.endpoints.table import ENDPOINTS
from triptych_gateway.request.body_bounds import MIXING_FIELDS

pytestmark = pytest.mark.engine

LENGTH = {"max_tokens": 12}
GREEDY = {**LENGTH, "temperature": 0, "logprobs": 4}
DRAWN = {**LENGTH, "temperature": 1.0, "seed": 7, "logprobs": 2, "ignore_eos": True}
FEW = {**DRAWN, "temperature": 2.0, "allowed_token_ids": [20, 21, 22]}  # they come again
TOKENS = [*range(5, 25)]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seed": DRAWN,
    "temperature": {**DRAWN, "temperature": 0.4},
    "top_p": {**DRAWN, "top_p": 0.6},
    "top_k": {**DRAWN, "top_k": 3},
    "min_p": {**DRAWN, "min_p": 0.2},
    "presence_penalty": {**FEW, "presence_penalty": 2.0},
    "frequency_penalty": {**FEW, "frequency_penalty": 2.0},
    "repetition_penalty": {**FEW, "repetition_penalty": 3.0},
    "logit_bias": {**GREEDY, "logit_bias": {"9": 50.0, "10": -50.0}},
    "bad_words": {**GREEDY, "bad_words": ["10", "12", "of", "digits"]},
    "allowed_token_ids": {**DRAWN, "allowed_token_ids": TOKENS},
    "min_tokens": {**GREEDY, "min_tokens": 12},
    "stop": {**GREEDY, "stop": ["1", " "], "ignore_eos": True},
    "include_stop_str_in_output": {**GREEDY, "stop": [" "], "include_stop_str_in_output": True},
    "stop_token_ids": {**GREEDY, "stop_token_ids": TOKENS, "min_tokens": 2, "ignore_eos": True},
    "ignore_eos": {**GREEDY, "ignore_eos": True},
    "n": {**DRAWN, "n": 2},
    "max_tokens": {**GREEDY, "max_tokens": 1},
    "logprobs": {**GREEDY, "logprobs": 20},
    "no logprobs": {**LENGTH, "temperature": 0},
    "prompt_logprobs": {**GREEDY, "prompt_logprobs": 3},
    "structured_outputs": {**GREEDY, "structured_outputs": {"regex": "[0-9]{4}"}},
    "repetition_detection": {**FEW, "repetition_detection": {"max_pattern_size": 1, "min_count": 2}},
    "skip_special_tokens": {**GREEDY, "skip_special_tokens": False, "ignore_eos": True},
    "spaces_between_special_tokens": {**GREEDY, "spaces_between_special_tokens": False},
}
OUTSIDE = {  # of the table of fields those that no sampler sees
    # read before: the prompt's tokens, the requests that a request becomes, its turn
    "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "best_of", "use_beam_search",
    "length_penalty", "priority", "response_format", "user", "session_id", "request_id", "vllm_xargs",
    # read behind it: what of an answer is sent, and how
    "echo", "stream_interval", "return_token_ids", "return_tokens_as_token_ids", "return_token_offsets",
    "stream", "return_weight_versions",
    # refused or without effect unless the engine has an option or a model for them
    "thinking_token_budget", "watermarking", "routed_experts_prompt_start",
}  # fmt: skip
ALIASES = {
    "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs",
    "include": "logprobs", "text": "structured_outputs",
}  # fmt: skip
NAMES = [*REQUESTS]
PAIRS = [*combinations_with_replacement(NAMES, 2)]
MIXING = {**LENGTH, "temperature": 0, "logprob_token_ids": [6, 7]}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[Any]]:
    """By the names of a batch: what each request of it got."""
    batches: dict[tuple[str, ...], list[dict[str, Any]]] = {(name,): [REQUESTS[name]] for name in NAMES}
    batches |= {pair: [REQUESTS[name] for name in pair] for pair in PAIRS}
    batches |= {(name, "without"): [_without(name)] for name in NAMES if name in REQUESTS[name]}
    batches[*NAMES, ""] = [*REQUESTS.values(), GREEDY]
    batches |= {(field, "greedy"): [MIXING, GREEDY] for field in MIXING_FIELDS}
    folder = tmp_path_factory.mktemp("batches")
    (folder / "batches").write_bytes(orjson.dumps([*batches.values()]))
    program = warm.run(
        [sys.executable, "-m", "tests.support.real.batches", f"{folder}/batches", f"{folder}/answers"],
        environment={**MONOLITH_ENVIRONMENT, **os.environ}, timeout_s=START_TIMEOUT_S,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr[-3000:]
    return dict(zip(batches, orjson.loads((folder / "answers").read_bytes()), strict=True))


def _without(name: str) -> dict[str, Any]:
    return {field: value for field, value in REQUESTS[name].items() if field != name}


def test_every_sampling_field_is_tried() -> None:
    tried = {field for fields in REQUESTS.values() for field in fields}
    assert {*SAMPLING} - OUTSIDE <= tried
    assert {ALIASES.get(name, name) for name in _read_for_sampling()} - OUTSIDE <= tried
    assert not tried & {*MIXING_FIELDS}


def _read_for_sampling() -> set[str]:
    """Fields of which vLLM makes sampling parameters, as far as an endpoint of the gateway passes them."""
    with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    sources = [
        inspect.getsource(each.to_sampling_params)
        for each in (ChatCompletionRequest, CompletionRequest, ResponsesRequest)
    ]
    read = {name for source in sources for name in re.findall(r"self\.(\w+)", source)}
    return read & {name for endpoint in ENDPOINTS for name in endpoint.passed_fields}


def test_fields_change_their_own_answers(answers: dict[tuple[str, ...], list[Any]]) -> None:
    """Else a field that has no effect on this model would compare nothing."""
    no_effect = {"spaces_between_special_tokens", "seed"}
    for name in NAMES:
        if (name, "without") in answers and name not in no_effect:
            assert answers[name,] != answers[name, "without"], name


@pytest.mark.parametrize("first", NAMES)
def test_a_request_answers_beside_any_other_as_alone(
    answers: dict[tuple[str, ...], list[Any]], first: str
) -> None:
    wrong = []
    for pair in (each for each in PAIRS if first in each):
        for name, got in zip(pair, answers[pair], strict=True):
            (wanted,) = answers[name,]
            if not alike(got, wanted):
                wrong.append(f"{name} in {pair}:\n  got {got}\n  alone {wanted}")
    assert not wrong, "\n".join(wrong)


def test_all_requests_in_one_batch_answer_as_alone(answers: dict[tuple[str, ...], list[Any]]) -> None:
    for name, got in zip([*NAMES, "greedy"], answers[*NAMES, ""], strict=True):
        (wanted,) = answers[name,]
        assert alike(got, wanted), f"{name}:\n  got {got}\n  alone {wanted}"


@pytest.mark.parametrize("field", MIXING_FIELDS)
def test_fields_that_are_not_served_still_change_other_answers(
    answers: dict[tuple[str, ...], list[Any]], field: str
) -> None:
    """When this fails, vLLM has it right, and the field may be served."""
    (wanted,) = answers["greedy",]
    assert not alike(answers[field, "greedy"][1], wanted), PROMPT
