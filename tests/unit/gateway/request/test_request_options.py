"""The gate for `mm_processor_kwargs` and `media_io_kwargs`."""

import json
from typing import Any

import pytest

from tests.support.hostile import options as sets
from triptych_common.domain.errors import RequestError
from triptych_common.domain.media_options import OptionBounds
from triptych_common.protocol.messages import Modality
from triptych_gateway.request.chat_request import ChatRequest, RequestOptions, parse_chat_request
from triptych_gateway.request.placeholder_tokens import PlaceholderGuard

NONE = RequestOptions()
SOME = RequestOptions(
    {name: OptionBounds.model_validate(each) for name, each in sets.ALLOWED_PROCESSOR_OPTIONS.items()},
    {
        Modality.IMAGE: {
            name: OptionBounds.model_validate(each) for name, each in sets.ALLOWED_IMAGE_OPTIONS.items()
        }
    },
)


def parse(options: RequestOptions, fields: dict[str, Any]) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat_request(json.dumps(body).encode(), PlaceholderGuard(()), 4, options=options)


def refusal(options: RequestOptions, fields: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(options, fields)
    return caught.value


@pytest.mark.parametrize("fields", [*sets.HOSTILE, *sets.ALLOWED], ids=lambda each: str(each)[:60])
def test_by_default_all_are_refused(fields: dict[str, Any]) -> None:
    error = refusal(NONE, fields)
    (name,) = fields
    assert error.status_code == 400
    assert error.param is not None
    assert error.param.startswith(name)


@pytest.mark.parametrize("fields", sets.HOSTILE, ids=lambda each: str(each)[:60])
def test_beyond_what_is_allowed(fields: dict[str, Any]) -> None:
    error = refusal(SOME, fields)
    (name,) = fields
    assert error.status_code == 400
    assert error.param is not None
    assert error.param.startswith(name)
    assert len(error.message) < 300


@pytest.mark.parametrize("fields", [*sets.ALLOWED, *sets.NOTHING], ids=lambda each: str(each)[:60])
def test_within_what_is_allowed(fields: dict[str, Any]) -> None:
    request = parse(SOME, fields)
    assert request.processor_options == (fields.get("mm_processor_kwargs") or {})
    assert request.media_io_options == (fields.get("media_io_kwargs") or {})
    assert not {"mm_processor_kwargs", "media_io_kwargs"} & set(request.body)


@pytest.mark.parametrize("fields", sets.NOTHING, ids=str)
def test_what_sets_nothing_is_fine_everywhere(fields: dict[str, Any]) -> None:
    request = parse(NONE, fields)
    assert (request.processor_options, request.media_io_options) == ({}, {})


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"mm_processor_kwargs": {"patch_size": 7}}, "invalid_value", "mm_processor_kwargs.patch_size"),
        ({"media_io_kwargs": {"video": {"fps": 1}}}, "field_not_allowed", "media_io_kwargs.video"),
        ({"media_io_kwargs": {"smell": {"fps": 1}}}, "invalid_value", "media_io_kwargs.smell"),
        ({"media_io_kwargs": {"image": {"x": 1}}}, "invalid_value", "media_io_kwargs.image.x"),
    ],
)
def test_the_param_names_the_option(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(SOME, fields)
    assert (error.code, error.param) == (code, param)
