"""Validation: what is refused, with which status and which `param`."""

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.domain.hashing import tenant_of_salt, tenant_salt
from triptych_common.domain.media_options import OptionBounds
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.chat_request import NO_OPTIONS, RequestOptions, parse_chat_request
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
GUARD = PlaceholderGuard(VISION_TOKENS)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def parse(body: Any, max_items: int = 4, options: RequestOptions = NO_OPTIONS) -> Any:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return parse_chat_request(raw, GUARD, max_items, options=options)


def refusal(body: Any, max_items: int = 4) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, max_items)
    return caught.value


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **fields}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{not json", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"model": "\xff"}', "invalid_json", None),
        ([1], "invalid_json", None),
        ({"model": 3, "messages": [{"role": "user", "content": "x"}]}, "invalid_value", "model"),
        ({"model": "m"}, "missing_field", "messages"),
        ({"model": "m", "messages": []}, "invalid_value", "messages"),
        ({"model": "m", "messages": "hello"}, "invalid_value", "messages"),
        ({"model": "m", "messages": ["hello"]}, "invalid_value", "messages[0]"),
        ({"model": "m", "messages": [{"content": "x"}]}, "missing_field", "messages[0].role"),
        ({"model": "m", "messages": [{"role": 5, "content": "x"}]}, "missing_field", "messages[0].role"),
        ({"model": "m", "messages": [{"role": "user"}]}, "missing_field", "messages[0].content"),
        (chat({"text": "x"}), "invalid_type", "messages[0].content"),
        (chat([7]), "invalid_type", "messages[0].content[0]"),
        (chat([{"text": "x"}]), "invalid_type", "messages[0].content[0].type"),
        (chat([{"type": "image_url"}]), "missing_image_url", "messages[0].content[0].image_url"),
        (
            chat([{"type": "image_url", "image_url": {}}]),
            "missing_image_url",
            "messages[0].content[0].image_url.url",
        ),
        (
            chat([{"type": "image_url", "image_url": {"url": ""}}]),
            "missing_image_url",
            "messages[0].content[0].image_url.url",
        ),
        (
            chat([{**IMAGE, "uuid": 7}]),
            "invalid_value",
            "messages[0].content[0].uuid",
        ),
        (
            chat([{"type": "video_url", "video_url": None, "uuid": "x" * 257}]),
            "invalid_value",
            "messages[0].content[0].uuid",
        ),
        (
            chat([{"type": "image_url", "image_url": 7, "uuid": "a"}]),
            "missing_image_url",
            "messages[0].content[0].image_url",
        ),
        (
            chat([{"type": "input_audio", "input_audio": 7, "uuid": "a"}]),
            "missing_audio",
            "messages[0].content[0].input_audio.data",
        ),
        (
            chat([{"type": "image_url", "image_url": None, "uuid": ""}]),
            "missing_image_url",
            "messages[0].content[0].image_url",
        ),
        (
            chat([{"type": "file", "uuid": "a"}]),
            "unsupported_content_part",
            "messages[0].content[0].file_id",
        ),
        (chat([{"type": "input_text", "text": None}]), "invalid_type", "messages[0].content[0].text"),
        (
            chat([{"tool_reference": 1, "name": "x", "image_pil": None}]),
            "unknown_content_part",
            "messages[0].content[0].type",
        ),
        (chat([{"image_url": None}]), "missing_image_url", "messages[0].content[0].image_url"),
        (chat([{"image_embeds": {}}]), "embeds_not_allowed", "messages[0].content[0].type"),
        (chat([{"type": "hologram"}]), "unknown_content_part", "messages[0].content[0].type"),
        (
            chat([{"type": "input_video", "input_video": {"url": "x"}}]),
            "unsupported_content_part",
            "messages[0].content[0].type",
        ),
        (
            chat([{"type": "image_embeds", "image_embeds": {}, "uuid": "a"}]),
            "embeds_not_allowed",
            "messages[0].content[0].type",
        ),
        (
            chat([{"type": "text", "text": "x", "uuid": "a", "image_embeds": {}}]),
            "unexpected_field",
            "messages[0].content[0].image_embeds",
        ),
        (  # vLLM reads a part with a uuid by this key, whatever its value and the part's type
            chat([{"type": "text", "text": "x", "uuid": "a", "image_embeds": None}]),
            "unexpected_field",
            "messages[0].content[0].image_embeds",
        ),
        (chat("x", ec_transfer_params={"request_id": "r"}), "field_not_allowed", "ec_transfer_params"),
        (chat("x", kv_transfer_params={"do_remote_decode": True}), "field_not_allowed", "kv_transfer_params"),
        (chat("x", cache_salt=""), "invalid_value", "cache_salt"),
        (chat("x", cache_salt="a/b"), "invalid_value", "cache_salt"),
        (chat("x", cache_salt="a" * 129), "invalid_value", "cache_salt"),
        (chat("x", cache_salt=5), "invalid_value", "cache_salt"),
        (chat("x", vllm_xargs={"cache_salt": "x"}), "field_not_allowed", "vllm_xargs.cache_salt"),
        (chat("x", chat_template="{% for a in b %}"), "field_not_allowed", "chat_template"),
        (
            chat("x", vllm_xargs={"ec_transfer_params": "x"}),
            "field_not_allowed",
            "vllm_xargs.ec_transfer_params",
        ),
        (chat("x", stream="perhaps"), "invalid_value", "stream"),
        (chat("x", stream=2), "invalid_value", "stream"),
        (chat("x", mm_processor_kwargs={"patch_size": 7}), "field_not_allowed", "mm_processor_kwargs"),
        (chat([IMAGE], media_io_kwargs={"image": 1}), "field_not_allowed", "media_io_kwargs"),
        (chat([IMAGE], use_beam_search=True), "unsupported", "use_beam_search"),
    ],
)
def test_refused(body: Any, code: str, param: str | None) -> None:
    error = refusal(body)
    assert (error.status_code, error.code, error.param) == (400, code, param)


def test_a_template_does_not_see_a_null_key_of_a_text() -> None:
    """Some ask whether `image` is there, and would put an image's token in the text's place."""
    part = {"type": "text", "text": "hi", "image": None, "video": None, "audio": None, "image_pil": None}
    (message,) = parse(chat([part])).body["messages"]
    assert message["content"] == [{"type": "text", "text": "hi"}]


NULLS = {"image_url": None, "video_url": None, "input_audio": None, "text": None}


@pytest.mark.parametrize(
    ("content", "num_items"),
    [
        ([{**NULLS, "type": "text", "text": "x"}], 0),
        ([{**NULLS, **IMAGE}], 1),
        ([{"type": "text", "text": None}, {"type": "refusal", "refusal": None}, {"type": "text"}], 0),
        ([{"image_url": IMAGE["image_url"]}, {"type": None, "image_url": "data:;base64,AAAA"}], 2),
        ([{"video_url": {"url": "data:,"}}, {"input_audio": {"data": "AAAA"}}, {"audio_url": "data:,"}], 3),
    ],
    ids=["text with nulls", "image with nulls", "null texts", "images without a type", "others without"],
)
def test_parts_that_datasets_write_are_read_as_vllm_reads_them(content: list[Any], num_items: int) -> None:
    assert len(parse(chat(content)).media) == num_items


@pytest.mark.parametrize(
    ("fields", "stream"), [({"stream": 0}, False), ({"stream": 1}, True), ({"stream": "false"}, False)]
)
def test_a_stream_is_asked_for_as_in_vllm(fields: dict[str, Any], stream: bool) -> None:
    assert parse(chat("x", **fields)).stream is stream


@pytest.mark.parametrize("named", [{}, {"model": ""}, {"model": None}])
def test_a_model_need_not_be_named(named: dict[str, Any]) -> None:
    assert parse({"messages": [{"role": "user", "content": "x"}], **named}).model == ""


@pytest.mark.parametrize("role", ["ipython", "observation", "pope"])
def test_the_models_template_decides_about_roles(role: str) -> None:
    request = parse({"model": "m", "messages": [{"role": role, "content": [IMAGE]}]})
    assert len(request.media) == 1
    with pytest.raises(RequestError, check=lambda error: error.code == "placeholder_in_text"):
        parse({"model": "m", "messages": [{"role": f"{role}{VISION_TOKENS[0]}", "content": "x"}]})


def test_a_callers_salt_stands_behind_its_tenants() -> None:
    def salt(tenant: str, own: str) -> str:
        body = parse(chat("x", cache_salt=own)).of_tenant(tenant_salt(tenant) if tenant else "").body
        return str(body["cache_salt"])

    salts = [salt(tenant, own) for tenant in ("", "red", "blue") for own in ("a", "b", tenant_salt("blue"))]
    assert len({*salts, *map(tenant_salt, ("red", "blue"))}) == len(salts) + 2
    assert [tenant_of_salt(each) for each in salts[2::3]] == ["", tenant_salt("red"), tenant_salt("blue")]
    assert max(map(len, salts)) <= 128  # else vLLM refuses it
    assert salt("red", "a") == salt("red", "a")


@pytest.mark.parametrize("token", VISION_TOKENS)
def test_placeholder_in_text_is_refused(token: str) -> None:
    assert refusal(chat(f"look: {token}")).param == "messages[0].content"
    assert refusal(chat([IMAGE, {"type": "text", "text": token}])).code == "placeholder_in_text"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": "<|image_pad|>"}}]},
        {"tools": [{"type": "function", "function": {"parameters": {"<|image_pad|>": 1}}}]},
        {"chat_template_kwargs": {"note": "<|vision_start|>"}},
    ],
)
def test_placeholder_is_found_wherever_a_template_may_render_it(fields: dict[str, Any]) -> None:
    assert refusal(chat("x", **fields)).code == "placeholder_in_text"


def test_placeholder_split_over_neighbouring_parts_is_refused() -> None:
    parts = [{"type": "text", "text": "<|image_"}, {"type": "text", "text": "pad|>"}]
    assert refusal(chat(parts)).param == "messages[0].content"


def tool_call(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    return {"model": "m", "messages": messages}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "<|image_pad|>"}',
        r'{"a": "\u003c|image_pad|\u003e"}',
        r'{"a": [{"b": "\u003c|image_pad|>"}]}',
        r'{"\u003c|image_pad|>": NaN}',  # vLLM's parser takes NaN
        r'"\u003c|image_pad|>"',
        "broken <|image_pad|>",
    ],
)
def test_placeholder_in_arguments_is_refused_also_when_escaped(arguments: str) -> None:
    error = refusal(tool_call(arguments))
    assert error.code == "placeholder_in_text"
    assert (error.param or "").startswith("messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize("arguments", ['{"a": "b"}', "", "no json", "{", "3", '{"n": 1}', {"a": 1}, None])
def test_other_arguments_pass(arguments: Any) -> None:
    assert parse(tool_call(arguments)).media == ()


def test_deep_arguments_are_no_recursion_error() -> None:
    assert refusal(tool_call("[" * 100_000)).code == "body_too_complex"


def peak_bytes(check: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        check()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_key_costs_no_memory_per_element() -> None:
    body = orjson.dumps(chat("x", functions={"k" * 20_000: [""] * 6_000}))
    assert peak_bytes(lambda: parse(body)) < 4 << 20


def test_the_path_of_a_hit_is_bounded() -> None:
    error = refusal(chat("x", tools={"k" * 20_000: ["<|image_pad|>"]}))
    assert error.param is not None
    assert error.param.startswith("tools.kkk")
    assert len(error.param) <= 300


@pytest.mark.parametrize(
    "body",
    [
        chat([""] * 300_000),
        chat("x", tools=[[]] * 300_000),
        chat("x", tools=[0] * 300_000),
        {"model": "m", "messages": [{"role": "user", "content": ""}] * 300_000},
        {"model": "m", "messages": [1] * 300_000},
        chat("x", media_io_kwargs={f"k{index}": 1 for index in range(100_000)}),
    ],
)
def test_too_many_values_are_refused_cheaply(body: dict[str, Any]) -> None:
    raw = orjson.dumps(body)
    began = time.process_time()
    assert refusal(raw).code in ("body_too_complex", "prompt_too_large")
    assert time.process_time() - began < 2.0


def test_too_many_items_names_the_first_one_too_many() -> None:
    error = refusal(chat([IMAGE] * 3), max_items=2)
    assert (error.code, error.param) == ("too_many_items", "messages[0].content[2].image_url.url")


def test_media_are_found_in_the_order_of_the_prompt() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "read"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE, "b", IMAGE]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,BBBB"}]},
        ],
    }
    media = parse(body).media
    assert [part.item_index for part in media] == [0, 1, 2]
    assert [part.path for part in media] == [
        "messages[1].content[1].image_url.url",
        "messages[1].content[3].image_url.url",
        "messages[3].content[0].image_url",
    ]


def test_unknown_fields_pass_and_ours_are_stripped() -> None:
    request = parse(
        chat(
            "x",
            top_k=3,
            seed=1,
            request_id="mine",
            cache_salt=None,
            mm_processor_kwargs={"a": 1},
            media_io_kwargs={"image": {"b": 2}},
            stream=True,
        ),
        options=RequestOptions(
            {"a": OptionBounds(values=(1,))}, {Modality.IMAGE: {"b": OptionBounds(values=(2,))}}
        ),
    )
    assert set(request.body) == {"model", "messages", "top_k", "seed", "stream"}
    assert request.stream
    assert request.processor_options == {"a": 1}
    assert request.media_io_options == {"image": {"b": 2}}


def test_deep_nesting_is_no_recursion_error() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    assert parse(chat("x", functions=deep)).media == ()
    raw = orjson.dumps(chat("x", tools=None)).replace(b"null", b"[" * 400 + b"]" * 400)
    assert refusal(raw).code == "body_too_complex"


def test_arguments_are_counted_before_they_are_parsed() -> None:
    """vLLM parses them too, on its event loop."""
    error = refusal(tool_call("[" + ",".join(["[]"] * 60_000) + "]"))
    assert (error.status_code, error.code) == (400, "body_too_complex")


@pytest.mark.parametrize("n", [129, 10**6, "100000", 1e6])
def test_too_many_choices(n: Any) -> None:
    error = refusal(chat("x", n=n))
    assert (error.code, error.param) == ("invalid_value", "n")


def test_too_many_messages() -> None:
    error = refusal({"model": "m", "messages": [{"role": "user", "content": ""}] * 2001})
    assert (error.code, error.param) == ("invalid_value", "messages")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "left"}, "truncate_prompt_tokens"),
    ],
)
def test_truncation_is_not_served_beside_media(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat([IMAGE], **fields))
    assert (error.status_code, error.code, error.param) == (400, "unsupported", param)
    assert parse(chat("x", **fields)).body["messages"]


def test_tokens_that_were_not_known_are_looked_for_later() -> None:
    known: list[str] = []
    guard = PlaceholderGuard((), announced=lambda model: known if model == "m" else ["<other>"])
    request = parse_chat_request(orjson.dumps(chat("an <image>")), guard, 8)
    request.check_placeholders(["<video>"])
    with pytest.raises(RequestError) as caught:
        request.check_placeholders(["<video>", "<image>"])
    assert caught.value.code == "placeholder_in_text"
    known.append("<image>")
    with pytest.raises(RequestError):
        parse_chat_request(orjson.dumps(chat("an <image>")), guard, 8)


@pytest.mark.parametrize(
    "parts",
    [["<im", "x-anthropic-billing-header: a", "age>"], ["<im", "x-anthropic-billing-header: a\nage>"]],
)
def test_a_line_that_vllm_cuts_hides_no_placeholder(parts: list[str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    body = {"model": "m", "messages": [{"role": "system", "content": content}]}
    with pytest.raises(RequestError, check=lambda error: error.code == "placeholder_in_text"):
        parse_chat_request(orjson.dumps(body), PlaceholderGuard(("<image>",)), 8)
