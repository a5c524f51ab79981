"""Bodies of the endpoints that take no media: what passes on, and what is refused by name."""

from typing import Any

import orjson
import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.domain.media_options import OptionBounds
from triptych_gateway.endpoints.endpoint import Endpoint, EndpointKind, TextBody
from triptych_gateway.endpoints.table import FORWARDED
from triptych_gateway.request.chat_request import REFUSED_FIELDS, RequestOptions
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard
from triptych_gateway.request.text_request import TextRequest, parse_text_request
from triptych_gateway.settings import RequestSettings

BY_PATH = {endpoint.path: endpoint for endpoint in FORWARDED}
TEXT_ENDPOINTS = [endpoint for endpoint in FORWARDED if endpoint.body is TextBody]
COMPUTED = [endpoint for endpoint in TEXT_ENDPOINTS if endpoint.kind is not EndpointKind.TOKENIZE]
INPUTS = [(endpoint, name) for endpoint in TEXT_ENDPOINTS for name in endpoint.inputs]
GUARD = PlaceholderGuard(("<image>",))
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
OPTIONS = RequestOptions({"max_pixels": OptionBounds(min=4, max=1000)})
LIMITS = RequestSettings(max_prompt_bytes=100_000, max_body_values=5000, max_messages=10, max_choices=8)


def parse(path: str | Endpoint, **fields: Any) -> TextRequest:
    endpoint = BY_PATH[path] if isinstance(path, str) else path
    raw = orjson.dumps({"model": "m", **fields})
    return parse_text_request(raw, endpoint, GUARD, LIMITS, OPTIONS)


def refusal(path: str | Endpoint, **fields: Any) -> tuple[int, str, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(path, **fields)
    return caught.value.status_code, caught.value.code, caught.value.param


def test_everything_passes_that_is_vllms_to_check() -> None:
    fields = {
        "prompt": "a", "n": 2, "stop": ["x"], "logprobs": 3, "echo": True, "seed": 1, "unknown": {"a": []},
        "vllm_xargs": {"mine": 1}, "suffix": None, "max_tokens": -5,
    }  # fmt: skip
    request = parse("/v1/completions", **fields, request_id="theirs")
    assert request.body == {"model": "m", **fields}
    assert (request.model, request.stream, request.media) == ("m", False, ())


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}),
        ("/v1/completions", {"prompt": None}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "a"}]] * 2}),
        ("/v1/embeddings", {"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        ("/v1/embeddings", {"messages": [[{"role": "user", "content": "a"}]]}),
        ("/score", {"queries": "a", "documents": ["b", {"content": [{"type": "text", "text": "c"}]}]}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/tokenize", {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}),
        ("/tokenize", {"prompt": "an <image> is counted, not computed"}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_inputs_of_every_form_pass(path: str, fields: dict[str, Any]) -> None:
    assert parse(path, **fields).body == {"model": "m", **fields}


@pytest.mark.parametrize(("endpoint", "name"), INPUTS, ids=str)
def test_media_are_refused_wherever_they_stand(endpoint: Endpoint, name: str) -> None:
    text = {"type": "text", "text": "a"}
    message = {"role": "user", "content": [text, IMAGE]}
    place = f"{name}[0].content[1]"
    assert refusal(endpoint, **{name: [message]}) == (400, "unsupported_content_part", place)
    nested = f"{name}[1][0].content[1]"
    chats = [[{"role": "user", "content": "a"}], [message]]
    assert refusal(endpoint, **{name: chats}) == (400, "unsupported_content_part", nested)
    scored = {"content": [IMAGE]}
    assert refusal(endpoint, **{name: scored}) == (400, "unsupported_content_part", f"{name}.content[0]")
    assert refusal(endpoint, **{name: [text, IMAGE]}) == (400, "unsupported_content_part", f"{name}[1]")


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"type": "text", "text": "a", "image_url": "http://x"}, "unexpected_field"),
        ({"type": "image_embeds", "image_embeds": None, "uuid": "x"}, "embeds_not_allowed"),
        ({"type": "prompt_embeds", "data": "x"}, "embeds_not_allowed"),
        ({"type": "input_video"}, "unsupported_content_part"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "unsupported_content_part"),
        ({"type": "new"}, "unknown_content_part"),
        ({"image_url": "http://x"}, "unsupported_content_part"),
        ({"type": None, "video_url": {"url": "http://x"}}, "unsupported_content_part"),
        ({"text": "a"}, "invalid_type"),
        (7, "invalid_type"),
    ],
)
def test_parts_that_vllm_could_read_as_media_are_refused(part: Any, code: str) -> None:
    for path, name in (("/tokenize", "messages"), ("/v1/embeddings", "input"), ("/classify", "messages")):
        status, found, param = refusal(path, **{name: [{"role": "user", "content": [part]}]})
        assert (status, found) == (400, code)
        assert param is not None
        assert param.startswith(f"{name}[0].content[0]")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (7, "invalid_type"),
        (True, "invalid_type"),
        ([1, "a"], "invalid_type"),
        ([1.5], "invalid_type"),
        ([True], "invalid_type"),
        ([[[[1]]]], "invalid_type"),
        ([-1], "invalid_value"),
        ([{"role": "user", "content": {"type": "image_url"}}], "invalid_type"),
        ([{"role": "user", "content": "a"}] * 11, "invalid_value"),
    ],
)
def test_inputs_of_no_known_form_are_refused(value: Any, code: str) -> None:
    status, found, param = refusal("/v1/embeddings", input=value)
    assert (status, found) == (400, code)
    assert param is not None
    assert param.startswith("input")


@pytest.mark.parametrize("endpoint", TEXT_ENDPOINTS, ids=lambda each: each.path)
def test_what_callers_may_not_set(endpoint: Endpoint) -> None:
    for name in REFUSED_FIELDS:
        value: Any = {"a": 1} if name.endswith("params") else "x"
        assert refusal(endpoint, **{name: value}) == (400, "field_not_allowed", name)
        xargs = {"vllm_xargs": {name: "x"}}
        assert refusal(endpoint, **xargs) == (400, "field_not_allowed", f"vllm_xargs.{name}")
    options: dict[str, Any] = {"mm_processor_kwargs": {"min_pixels": 1}}
    assert refusal(endpoint, **options) == (400, "invalid_value", "mm_processor_kwargs.min_pixels")
    options = {"media_io_kwargs": {"image": {"image_mode": "L"}}}
    assert refusal(endpoint, **options) == (400, "field_not_allowed", "media_io_kwargs")


def test_processor_options_are_not_passed_on_where_they_are_allowed() -> None:
    """There is nothing here that they could change."""
    body = parse("/v1/embeddings", input="a", mm_processor_kwargs={"max_pixels": 100}).body
    assert body == {"model": "m", "input": "a"}


def test_embeddings_and_plugin_data_are_refused() -> None:
    assert refusal("/v1/completions", prompt_embeds="gASV") == (400, "embeds_not_allowed", "prompt_embeds")
    assert refusal("/pooling", data={"url": "http://x"}) == (400, "field_not_allowed", "data")
    assert refusal("/v1/embeddings", input="a", encoding_format="bytes") == (
        400,
        "unsupported",
        "encoding_format",
    )


@pytest.mark.parametrize("endpoint", COMPUTED, ids=lambda each: each.path)
def test_placeholders_are_refused_in_every_input(endpoint: Endpoint) -> None:
    for name in endpoint.inputs:
        for value in ("an <image>", ["a", "an <image>"], [{"role": "user", "content": "an <image>"}]):
            status, code, param = refusal(endpoint, **{name: value})
            assert (status, code) == (400, "placeholder_in_text")
            assert param is not None
            assert param.startswith(name)


def test_streams_are_refused_where_vllm_would_lose_tokens() -> None:
    chats = [[{"role": "user", "content": "a"}]]
    path = "/v1/chat/completions/batch"
    assert refusal(path, messages=chats, stream=True) == (400, "unsupported", "stream")
    assert not parse(path, messages=chats, stream=False).stream


def test_placeholders_of_an_instance_that_was_not_known_yet() -> None:
    request = parse("/v1/completions", prompt="a <video>")
    request.check_placeholders(["<image>", "<audio>"])
    with pytest.raises(RequestError) as caught:
        request.check_placeholders(["<image>", "<video>"])
    assert caught.value.param == "prompt"
    parse("/tokenize", prompt="a <video>").check_placeholders(["<video>"])


def test_a_request_becomes_a_bounded_number_of_requests_of_the_engine() -> None:
    parse("/v1/completions", prompt=["a"] * 4, n=2)
    assert refusal("/v1/completions", prompt=["a"] * 5, n=2) == (400, "invalid_value", "prompt")
    assert refusal("/v1/completions", prompt="a", n=9) == (400, "invalid_value", "n")
    parse("/v1/completions", prompt=[1] * 100, n=8)  # one prompt
    assert refusal("/v1/completions", prompt=[[1]] * 9) == (400, "invalid_value", "prompt")
    chats = [[{"role": "user", "content": "a"}]] * 9
    assert refusal("/v1/chat/completions/batch", messages=chats) == (400, "invalid_value", "messages")
    parse("/v1/embeddings", input=["a"] * 2048)
    assert refusal("/v1/embeddings", input=["a"] * 2049) == (400, "invalid_value", "input")


def test_bodies_are_bounded() -> None:
    assert refusal("/tokenize", prompt="a" * 100_001)[:2] == (413, "prompt_too_large")
    assert refusal("/detokenize", tokens=[1] * 5001)[:2] == (400, "body_too_complex")
    media = "data:image/png;base64," + "A" * 100_000
    assert refusal("/tokenize", prompt=media)[:2] == (413, "prompt_too_large")


def test_a_model_need_not_be_named() -> None:
    assert parse("/tokenize", prompt="a", model=None).model == ""
    assert parse("/tokenize", prompt="a", model="").model == ""
    assert refusal("/tokenize", prompt="a", model=5) == (400, "invalid_value", "model")


def test_a_stream_is_one_only_where_the_endpoint_streams() -> None:
    assert parse("/v1/completions", prompt="a", stream=True).stream
    assert not parse("/v1/embeddings", input="a", stream=True).stream  # vLLM passes over it
    assert not parse("/v1/completions", prompt="a", stream=0).stream
    assert refusal("/v1/completions", prompt="a", stream="perhaps") == (400, "invalid_value", "stream")


def test_a_tenants_salt_is_where_something_stays_in_a_cache() -> None:
    assert parse("/v1/completions", prompt="a").of_tenant("salt").body["cache_salt"] == "salt"
    assert parse("/v1/embeddings", input="a").of_tenant("salt").body["cache_salt"] == "salt"
    assert "cache_salt" not in parse("/tokenize", prompt="a").of_tenant("salt").body
    assert "cache_salt" not in parse("/v1/completions", prompt="a").of_tenant("").body
    assert "cache_salt" not in parse("/tokenize", prompt="a", cache_salt="x").of_tenant("salt").body
    own = parse("/v1/completions", prompt="a", cache_salt="x")
    assert own.of_tenant("salt").body["cache_salt"] == "salt" + own.of_tenant("").body["cache_salt"]
    assert "x" != own.of_tenant("").body["cache_salt"] != ""
