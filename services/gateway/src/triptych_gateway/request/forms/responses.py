"""Form of OpenAI's Responses API, as vLLM serves it: vLLM makes a chat of the request.

Images stand in messages and in what tools have put out. vLLM reads them there alone, and nothing else of an
item but text; other items pass through.
"""

from collections.abc import Iterator
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.endpoint import FormBody, ResponseBody
from triptych_gateway.endpoints.response_fields import ITEM_TYPES
from triptych_gateway.request.content_parts import (
    MEDIA_TYPES,
    TEXT_KEYS,
    MediaPart,
    Place,
    find_media,
    format_place,
)
from triptych_gateway.request.forms.form import Fields, Form, add_media, not_beside_media

IMAGE_TYPE = "input_image"
TEXT_TYPE = "input_text"
ANSWER_TYPES = ("output_text", "refusal")  # of a message that the model has made
DETAILS = (None, "auto", "low", "high", "original")


def _find_media(fields: Fields, max_items: int) -> tuple[MediaPart, ...]:
    items = fields["input"]
    if isinstance(items, str):
        return ()
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError(400, "invalid_type", "input must be text or a list of objects", "input")
    media: list[MediaPart] = []
    for index, item in enumerate(items):
        if item.get("type", "message") not in ITEM_TYPES:
            path = format_place(("input", index, "type"))
            raise RequestError(400, "invalid_value", f"{path} must be one of {', '.join(ITEM_TYPES)}", path)
        for name in _fields_with_parts(item):
            place, content = ("input", index, name), item[name]
            if isinstance(content, list):
                _check_types(item, content, place)
                add_media(media, list(find_media(place, content, len(media))), max_items)
            elif content is not None and not isinstance(content, str):
                path = format_place(place)
                raise RequestError(400, "invalid_type", f"{path} must be a string or a list of parts", path)
    return tuple(media)


def _fields_with_parts(item: Fields) -> Iterator[str]:
    """Yield the fields that vLLM passes on as a message's content."""
    if "content" in item and ("role" in item or item.get("type", "message") == "message"):
        yield "content"
    if "output" in item:
        yield "output"


def _check_types(item: Fields, content: list[Any], place: Place) -> None:
    """Check that images are the only media; the model's own answers have none, as vLLM reads them.

    Parts of another kind than the message has are refused here: vLLM makes some 240 error objects of each.
    """
    text_types = ANSWER_TYPES if _is_answer(item, content) else (TEXT_TYPE,)
    for index, part in enumerate(content):
        path = format_place((*place, index))
        part_type = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part_type, str):
            raise RequestError(400, "invalid_type", f"{path} must be an object with a type", path)
        if part_type not in MEDIA_TYPES:
            if part_type in TEXT_KEYS and part_type not in text_types:
                message = f"{path}.type must be {' or '.join(text_types)} here"
                raise RequestError(400, "unsupported_content_part", message, f"{path}.type")
            continue
        if part_type != IMAGE_TYPE:
            message = f"{path}: {part_type!r} parts are not read here; images are {IMAGE_TYPE!r} parts"
            raise RequestError(400, "unsupported_content_part", message, f"{path}.type")
        if item.get("role") == "assistant":
            message = f"{path}: no images are read in an assistant's message"
            raise RequestError(400, "unsupported_content_part", message, f"{path}.type")
        if part.get("detail") not in DETAILS:
            message = f"{path}.detail must be one of auto, low, high, original"
            raise RequestError(400, "invalid_value", message, f"{path}.detail")


def _is_answer(item: Fields, content: list[Any]) -> bool:
    """Return whether the item is the model's answer, by vLLM's own rule."""
    if item.get("type") != "message" or item.get("role") != "assistant":
        return False
    return not (content and isinstance(content[0], dict) and content[0].get("type") == TEXT_TYPE)


def _check_choices(body: FormBody, max_choices: int) -> None:
    """Accept any number: this form has one choice."""


def check_beside_media(fields: Fields) -> None:
    """Refuse fields that cannot be combined with media, also those of the continued response.

    Raises:
        RequestError: 400.
    """
    if fields.get("background"):  # nothing would pass on the requests of encoders and prefill_decode
        raise not_beside_media("background")
    if fields.get("truncation") not in (None, "disabled"):  # it would cut placeholders off their items
        raise not_beside_media("truncation")


def _joined_texts(fields: Fields) -> Iterator[tuple[str, str]]:
    """Yield nothing: only parts of one message are joined, and they stand side by side."""
    yield from ()


RESPONSES = Form(ResponseBody, _find_media, _check_choices, check_beside_media, _joined_texts)
