"""Form of OpenAI's chat completions."""

from collections.abc import Iterator

from triptych_common.domain.errors import RequestError
from triptych_gateway.endpoints.bodies import ChatBody, FormBody
from triptych_gateway.request.content_parts import MediaPart, find_media
from triptych_gateway.request.forms.form import (
    Fields,
    Form,
    add_media,
    check_role,
    not_beside_media,
)

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def _find_media(fields: Fields, max_items: int) -> tuple[MediaPart, ...]:
    media: list[MediaPart] = []
    for index, message in enumerate(fields["messages"]):
        path = f"messages[{index}]"
        role = check_role(message, ROLES, path)
        content = message.get("content")
        if isinstance(content, list):
            found = find_media(("messages", index, "content"), content, len(media))
            add_media(media, list(found), max_items)
        elif content is not None and not isinstance(content, str):
            fault = f"{path}.content must be a string or a list of parts"
            raise RequestError(400, "invalid_type", fault, f"{path}.content")
        elif content is None and role != "assistant":
            raise RequestError(400, "missing_field", f"{path}.content is missing", f"{path}.content")
    return tuple(media)


def _check_choices(body: FormBody, max_choices: int) -> None:
    if isinstance(body, ChatBody) and (body.n or 0) > max_choices:
        raise RequestError(400, "invalid_value", f"n may be {max_choices} at most", "n")


def _check_beside_media(fields: Fields) -> None:
    if fields.get("use_beam_search"):
        raise not_beside_media("use_beam_search")
    # Cutting a prompt that is too long would cut placeholders off their items.
    if fields.get("truncate_prompt_tokens") is not None:
        raise not_beside_media("truncate_prompt_tokens")


def _joined_texts(fields: Fields) -> Iterator[tuple[str, str]]:
    """Yield nothing: only parts of one message are joined, and they stand side by side."""
    yield from ()


COMPLETIONS = Form(ChatBody, _find_media, _check_choices, _check_beside_media, _joined_texts)
