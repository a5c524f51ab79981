"""Form of Anthropic's Messages API, as vLLM serves it: vLLM makes a chat of the request.

    tool_result of a user               a tool's message, then a user's with its images; then the message
    thinking                            joined, apart from the texts
    system, and messages of that role   their texts, joined

So media stand in the prompt in another order than in the body, and texts that do not stand side by side here
may do so there. Images that vLLM would drop are refused: in system prompts, in an assistant's tool_result.
"""

from collections.abc import Iterator
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.endpoints.endpoint import FormBody, MessagesBody
from triptych_gateway.request.content_parts import MediaPart, Place, format_place
from triptych_gateway.request.forms.form import Fields, Form, add_media, check_role
from triptych_gateway.request.placeholder_tokens import BILLING_HEADER

ROLES = frozenset({"user", "assistant", "system"})
# Blocks without media, and what must be text in them where it is there.
TEXTS_OF_BLOCKS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name"),
    "tool_reference": ("tool_name", "name"),
    "tool_addition": (),
    "tool_removal": (),
}
TEXTS_OF_RESULTS = {name: TEXTS_OF_BLOCKS[name] for name in ("text", "tool_reference")}
# Of Anthropic's own API; vLLM refuses or drops them.
UNSUPPORTED_BLOCKS = frozenset({"document", "search_result", "container_upload", "server_tool_use"})


def _find_media(fields: Fields, max_items: int) -> tuple[MediaPart, ...]:
    system = fields.get("system")
    if isinstance(system, list):
        _find_in_content(("system",), system, "system")
    elif system is not None and not isinstance(system, str):
        raise _no_content("system")
    media: list[MediaPart] = []
    for index, message in enumerate(fields["messages"]):
        role = check_role(message, ROLES, f"messages[{index}]")
        place, content = ("messages", index, "content"), message.get("content")
        if isinstance(content, list):
            add_media(media, _find_in_content(place, content, role), max_items)
        elif not isinstance(content, str):
            raise _no_content(format_place(place))
    for item_index, part in enumerate(media):
        part.item_index = item_index
    return tuple(media)


def _find_in_content(content_place: Place, content: list[Any], role: str) -> list[MediaPart]:
    in_results: list[MediaPart] = []
    own: list[MediaPart] = []
    for index, block in enumerate(content):
        place = (*content_place, index)
        block_type = _type_of(block, place)
        if block_type == "image":
            if role == "system":
                raise _unsupported(place, "images are not served in system prompts")
            own.append(_image_of(block, place))
        elif block_type == "tool_result":
            in_results += _find_in_result(block, place, role)
        else:
            _check_texts(block, block_type, place, TEXTS_OF_BLOCKS)
    return in_results + own


def _find_in_result(block: Fields, result_place: Place, role: str) -> Iterator[MediaPart]:
    content = block.get("content")
    place = (*result_place, "content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _no_content(format_place(place))
    for index, each in enumerate(content):
        inner = (*place, index)
        inner_type = _type_of(each, inner)
        if inner_type != "image":
            _check_texts(each, inner_type, inner, TEXTS_OF_RESULTS)
        elif role != "user":
            raise _unsupported(inner, "images in a tool_result are served only in a user's message")
        else:
            yield _image_of(each, inner)


def _type_of(block: Any, place: Place) -> str:
    path = format_place(place)
    if not isinstance(block, dict):
        raise RequestError(400, "invalid_type", f"{path} must be an object", path)
    block_type = block.get("type")
    if not isinstance(block_type, str):
        raise RequestError(400, "invalid_type", f"{path}.type must be a string", f"{path}.type")
    return block_type


def _check_texts(block: Fields, block_type: str, place: Place, texts_of: dict[str, tuple[str, ...]]) -> None:
    names = texts_of.get(block_type)
    if names is None:
        if block_type in TEXTS_OF_BLOCKS or block_type in UNSUPPORTED_BLOCKS or block_type == "tool_result":
            raise _unsupported(place, f"content of type {block_type!r} is not served")
        path = format_place(place)
        message = f"{path}: unknown content block type {block_type[:50]!r}"
        raise RequestError(400, "unknown_content_part", message, f"{path}.type")
    for name in names:
        if block.get(name) is not None and not isinstance(block[name], str):
            path = format_place((*place, name))
            raise RequestError(400, "invalid_type", f"{path} must be a string", path)


def _image_of(block: Fields, place: Place) -> MediaPart:
    source, path = block.get("source"), format_place((*place, "source"))
    if not isinstance(source, dict):
        raise RequestError(400, "missing_image_url", f"{path} must be an object", path)
    source_type = source.get("type", "base64")  # as vLLM has it
    names = {"base64": "data", "url": "url", "file": "file_id"}
    name = names.get(source_type) if isinstance(source_type, str) else None
    if name is None:
        message = f"{path}.type must be one of {', '.join(names)}"
        raise RequestError(400, "unsupported_content_part", message, f"{path}.type")
    value, path = source.get(name), f"{path}.{name}"
    if not isinstance(value, str) or not value:
        raise RequestError(400, "missing_image_url", f"{path} is missing", path)
    if name == "file_id":
        return MediaPart(0, place, Modality.IMAGE, "", path, file_id=value)
    return MediaPart(0, place, Modality.IMAGE, value, path, is_base64=name == "data")


def _no_content(path: str) -> RequestError:
    return RequestError(400, "invalid_type", f"{path} must be a string or a list of content blocks", path)


def _unsupported(place: Place, why: str) -> RequestError:
    path = format_place(place)
    return RequestError(400, "unsupported_content_part", f"{path}: {why}", f"{path}.type")


def _check_choices(body: FormBody, max_choices: int) -> None:
    """Accept any number: this form has one choice."""


def _check_beside_media(fields: Fields) -> None:
    """Accept all fields: none of this form cuts a prompt."""


# ---- texts that come together ------------------------------------------------------------------------
def _joined_texts(fields: Fields) -> Iterator[tuple[str, str]]:
    system = list(_system_texts(fields.get("system")))
    for index, message in enumerate(fields["messages"]):
        content = message.get("content")
        if message.get("role") == "system":
            system += _system_texts(content)
        elif isinstance(content, list):
            for kind in ("text", "thinking"):
                texts = _texts_of(content, kind)
                if len(texts) > 1:
                    yield f"messages[{index}].content", "".join(texts)
    if len(system) > 1:
        yield "system", "".join(system)


def _system_texts(content: Any) -> Iterator[str]:
    """Yield the system texts, without blocks that vLLM leaves out."""
    texts = [content] if isinstance(content, str) else _texts_of(content or (), "text")
    yield from (text for text in texts if not text.startswith(BILLING_HEADER))


def _texts_of(content: Any, kind: str) -> list[str]:
    """Return the texts of blocks of one type, in the field of the same name."""
    blocks = (block for block in content if isinstance(block, dict) and block.get("type") == kind)
    return [text for block in blocks if isinstance(text := block.get(kind), str)]


MESSAGES = Form(MessagesBody, _find_media, _check_choices, _check_beside_media, _joined_texts)
