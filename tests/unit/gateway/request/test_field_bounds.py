"""Fields by which one request could end, fill or falsify what others share: refused on every endpoint."""

from typing import Any

import orjson
import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.key_limits import RequestDemand
from triptych_gateway.endpoints import kinds
from triptych_gateway.endpoints.answer_cost import UNNAMED_TOKENS, AnswerCost
from triptych_gateway.endpoints.endpoint import BodyForm, Endpoint, TextBody
from triptych_gateway.endpoints.table import FORWARDED
from triptych_gateway.request.body_bounds import TEMPLATE_PARAMETERS
from triptych_gateway.request.chat_request import RequestOptions, parse_chat_request
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.text_request import parse_text_request
from triptych_gateway.settings import RequestSettings

WITH_BODY = [endpoint for endpoint in FORWARDED if endpoint.form is BodyForm.JSON]
BY_PATH = {endpoint.path: endpoint for endpoint in WITH_BODY}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LIMITS = RequestSettings()


def parse(endpoint: Endpoint, **asked: Any) -> Any:
    chat = [{"role": "user", "content": "a"}]
    own = {"prompt": "a", "messages": chat, "input": "a", "query": "a", "documents": ["a"], "tokens": [1]}
    first = endpoint.inputs[0]
    needed = {first: [chat] if endpoint.path.endswith("/batch") else own.get(first, "a")}
    raw = orjson.dumps({"model": "m", **needed, **asked})
    guard = PlaceholderGuard(())
    if endpoint.body is TextBody:
        return parse_text_request(raw, endpoint, guard, LIMITS, RequestOptions())
    return parse_chat_request(raw, guard, 16, LIMITS, endpoint=endpoint)


def refusal(endpoint: Endpoint | str, **asked: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(BY_PATH[endpoint] if isinstance(endpoint, str) else endpoint, **asked)
    assert caught.value.status_code == 400
    assert len(caught.value.message) < 1000, "an error repeats what was sent"
    return caught.value.code, caught.value.param


def with_field(name: str) -> list[Endpoint]:
    found = [endpoint for endpoint in WITH_BODY if name in endpoint.passed_fields]
    assert found
    return found


# ---- templates -----------------------------------------------------------------------------------
@pytest.mark.parametrize("endpoint", with_field("chat_template_kwargs"), ids=lambda each: each.path)
def test_parameters_of_apply_chat_template_are_never_a_callers(endpoint: Endpoint) -> None:
    for name in TEMPLATE_PARAMETERS:
        wanted = ("field_not_allowed", f"chat_template_kwargs.{name}")
        assert refusal(endpoint, chat_template_kwargs={name: True}) == wanted
    attack = {"tokenize": True, "padding": "max_length", "max_length": 100_000_000}
    assert refusal(endpoint, chat_template_kwargs=attack)[0] == "field_not_allowed"
    parse(endpoint, chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low", "budget": 5})


@pytest.mark.parametrize("value", [["a"], {"a": 1}, "a" * 1025])
def test_templates_read_short_scalars_alone(value: Any) -> None:
    assert refusal(CHAT, chat_template_kwargs={"mine": value})[1] == "chat_template_kwargs.mine"
    assert refusal(CHAT, chat_template_kwargs={"k" * 65: 1})[1] == "chat_template_kwargs"
    assert refusal(CHAT, chat_template_kwargs={f"k{index}": 1 for index in range(33)})[0] == "invalid_value"


def test_every_endpoint_that_reads_messages_bounds_the_templates_options() -> None:
    readers = {each.path for each in WITH_BODY if "messages" in each.inputs or each.path == "/v1/responses"}
    assert readers == {each.path for each in with_field("chat_template_kwargs")}


# ---- tables of the runner ------------------------------------------------------------------------
@pytest.mark.parametrize("endpoint", with_field("logit_bias"), ids=lambda each: each.path)
def test_a_key_of_the_logit_bias_is_short(endpoint: Endpoint) -> None:
    assert refusal(endpoint, logit_bias={"/a" * 7000: 1}) == ("invalid_value", "logit_bias")
    parse(endpoint, logit_bias={"5": 1.5})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {str(index): 1 for index in range(1025)}),
        ("allowed_token_ids", [*range(1025)]),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["a" * 257]),
        ("stop_token_ids", [*range(129)]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1025),
        ("stop_sequences", ["a" * 1025]),
        ("vllm_xargs", {"mine": ["a"] * 1025}),
    ],
)
def test_what_an_engine_has_a_table_for_is_bounded_everywhere(name: str, value: Any) -> None:
    for endpoint in with_field(name):
        code, param = refusal(endpoint, **{name: value})
        assert code == "invalid_value"
        assert str(param).startswith(name)


def test_the_tables_may_be_full() -> None:
    parse(
        BY_PATH[CHAT],
        logit_bias={str(index): 1 for index in range(kinds.MAX_LOGIT_BIAS_TOKENS)},
        allowed_token_ids=[*range(kinds.MAX_ALLOWED_TOKEN_IDS)],
        stop_token_ids=[*range(kinds.MAX_STOP_TOKEN_IDS)],
        bad_words=["a"] * kinds.MAX_BAD_WORDS,
    )


# ---- what falsifies other requests -----------------------------------------------------------------
@pytest.mark.parametrize("endpoint", WITH_BODY, ids=lambda each: each.path)
def test_fields_that_change_others_log_probabilities_are_not_served(endpoint: Endpoint) -> None:
    assert refusal(endpoint, logprob_token_ids=[1, 2]) == ("unsupported", "logprob_token_ids")


# ---- cost ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (CHAT, {"n": 128, "max_tokens": 4096}, "n"),
        (CHAT, {"n": 64}, "n"),  # of an answer without an end, 8,192 tokens are counted
        (COMPLETION, {"best_of": 128, "max_tokens": 4096}, "n"),
        (COMPLETION, {"prompt": ["a"] * 64, "max_tokens": 8192}, "prompt"),
        (COMPLETION, {"prompt": ["word " * 3200] * 16, "prompt_logprobs": 20}, "prompt_logprobs"),
        (COMPLETION, {"prompt": ["word " * 3200] * 16, "echo": True, "logprobs": 20}, "echo"),
        (COMPLETION, {"prompt": "word " * 3200, "n": 128, "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"n": 16, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        (CHAT, {"max_tokens": 1000, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"n": 32, "max_tokens": 4096, "use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_answers_cost_together_is_bounded(path: str, asked: dict[str, Any], param: str) -> None:
    assert refusal(path, **asked) == ("invalid_value", param)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"max_tokens": 10**9}),  # one answer: vLLM knows how long the model's are
        (CHAT, {"n": 128, "max_tokens": 2048}),
        (CHAT, {"n": 8}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}),
        (COMPLETION, {"n": 128}),
        (COMPLETION, {"prompt": ["word " * 3200] * 16, "echo": True, "logprobs": 1, "max_tokens": 1}),
    ],
)
def test_ordinary_costs_pass(path: str, asked: dict[str, Any]) -> None:
    parse(BY_PATH[path], **asked)


def test_log_probabilities_count_against_a_keys_tokens() -> None:
    plain = {"max_tokens": 100, "n": 2}
    asked = {**plain, "logprobs": True, "top_logprobs": 19}
    assert RequestDemand("m", plain, 400, 0).num_tokens == 100 + 200
    assert RequestDemand("m", asked, 400, 0).num_tokens == 100 + 200 + 200  # twenty cost as much as a token
    of_prompt = {**plain, "prompt_logprobs": 19}
    assert RequestDemand("m", of_prompt, 400, 0).num_tokens == 100 + 200 + 2 * 100
    cost = AnswerCost.of(asked, 400)
    assert cost.extra_tokens(prompt_tokens=100, answer_tokens=30) == 30  # of what was answered in the end


def test_odd_kinds_cost_nothing() -> None:
    for value in (None, True, "5", -5, 1.5, [], {}):
        cost = AnswerCost.of({"n": value, "max_tokens": value, "top_logprobs": value, "prompt": "a"}, 4)
        assert (cost.num_choices, cost.prompt_logprobs) == (1, 0)
    assert AnswerCost.of({}, 0).tokens_each == UNNAMED_TOKENS
