"""Content parts of chat messages: text, media, and parts that are refused; places of values in a body.

A `Place` is the keys and indices that lead to a value:

    ("messages", 0, "content", 2)    messages[0].content[2]

A request that names an uploaded file (`KnownFile`) rarely needs its bytes: identity, kind and size were found
at the upload.

vLLM reads a part without a `type`, and one that has a `uuid`, by the first media key it carries. So a text
part with a `uuid` may carry no media key, other text parts none but null ones, and a media part is never
passed on as it came; `named_items` knows what a `uuid` names.

A media part may name an uploaded file by its `file_id`, in the place of a URL. A part of type `file` or
`input_file` can do nothing else.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.metrics import MIXED, TEXT
from triptych_gateway.request.image_header import ImageHeader

Place = tuple[str | int, ...]


def format_place(place: Place) -> str:
    """Format ('messages', 0, 'role') as 'messages[0].role'."""
    path = ""
    for step in place:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def value_at(body: Any, place: Place) -> Any:
    """Return the value at a place, which must exist; the same below."""
    for step in place:
        body = body[step]
    return body


def put_at(body: Any, place: Place, value: Any) -> None:
    value_at(body, place[:-1])[place[-1]] = value


def replace_at(body: dict[str, Any], values: Iterable[tuple[Place, Any]]) -> dict[str, Any]:
    """Return a copy of the body with these values; only containers on the paths to them are copied."""
    copies: dict[Place, Any] = {(): dict(body)}
    for place, value in values:
        for depth in range(1, len(place)):
            holder, step = copies[place[: depth - 1]], place[depth - 1]
            if place[:depth] not in copies:
                copies[place[:depth]] = holder[step] = holder[step].copy()
        copies[place[:-1]][place[-1]] = value
    return copies[()]  # type: ignore[no-any-return]


def lists_before(body: Any, place: Place) -> Iterator[list[Any]]:
    """Yield the elements before the place in each list that leads to it, from the outside."""
    for step in place:
        if isinstance(step, int):
            yield body[:step]
        body = body[step]


@dataclass(frozen=True, slots=True)
class KnownFile:
    """Uploaded file whose bytes are read at each call; none are kept."""

    file_id: str
    num_bytes: int
    media_digest: str  # common `domain.hashing.media_digest` of its bytes
    modalities: tuple[Modality, ...]  # that it can be; the likeliest first
    image: ImageHeader | None  # of an image
    read: Callable[[], bytes] = field(repr=False)
    """Reader of the file's bytes. It blocks on the disk, so call it in a thread.

    Raises:
        RequestError: 404 it was deleted meanwhile; 503 it cannot be read.
    """
    threads: Executor = field(repr=False)

    async def fetch(self) -> bytes:
        """Read the bytes in a thread of its own pool."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.read)


# type -> key that holds the text
TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# type -> modality, and the key that holds a URL, or an object with one
URL_TYPES: Mapping[str, tuple[Modality, str]] = {
    "image_url": (Modality.IMAGE, "image_url"),
    "input_image": (Modality.IMAGE, "image_url"),
    "video_url": (Modality.VIDEO, "video_url"),
    "audio_url": (Modality.AUDIO, "audio_url"),
}
INPUT_AUDIO = "input_audio"  # an object with base64 and the format's name
FILE_TYPES = frozenset({"file", "input_file"})  # of any kind, by its id
MEDIA_TYPES = frozenset({*URL_TYPES, INPUT_AUDIO, *FILE_TYPES})
UNSUPPORTED_TYPES = frozenset({"input_video"})
EMBEDS_TYPES = frozenset({"image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"})
# Keys that tell what a part without a type is, in vLLM's order.
UNTYPED_KEYS = (
    "image_url",
    "image_pil",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "audio_url",
    "input_audio",
    "video_url",
    "tool_reference",
)
SKIPPED_TYPES = frozenset({"text", "refusal"})  # vLLM leaves such a part out if its text is null
MEDIA_KEYS = (MEDIA_TYPES | UNSUPPORTED_TYPES | EMBEDS_TYPES | {"image_pil", "image", "video", "audio"}) - {
    "file"
}
MAX_UUID_CHARS = 256


@dataclass(slots=True)
class MediaPart:
    """One media item of a request, in the order of the prompt."""

    item_index: int
    place: Place  # of the part in the body; empty: it is of the response that the request goes on from
    modality: Modality  # of a file of any kind: an image, until the file was found
    url: str  # or base64; emptied once its bytes were taken; empty where a file is named by its id
    path: str  # of the URL, e.g. `messages[0].content[1].image_url.url`; errors carry it as `param`
    is_base64: bool = False  # `url` is the media themselves
    content_digest: str = field(default="", compare=False)  # of `content`
    content: bytes | None = field(default=None, repr=False)  # decoded while they came; `url` ends before them
    file_id: str | None = None
    takes_any: bool = False  # the file may be of any kind
    file: KnownFile | None = None  # once it was found
    uuid: str | None = None  # the caller's own name for the item
    is_name: bool = False  # `uuid` is all that it brings

    @property
    def num_sent_bytes(self) -> int:
        """Bytes of its media in the body; an estimate while they are base64."""
        if self.content is not None:
            return len(self.content)
        is_text = self.is_base64 or self.url[:5].lower() == "data:"
        return len(self.url) * 3 // 4 if is_text else 0


def modality_of(media: Sequence[MediaPart]) -> str:
    """Return the request's modality for metrics: text, that of its media, or mixed."""
    if not media:
        return TEXT
    first = media[0].modality
    return first.value if all(part.modality is first for part in media) else MIXED


def text_of(part: Any) -> str | None:
    """Return the text that a content part renders as; None for other parts."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return None
    part_type = part.get("type")
    text = part.get(TEXT_KEYS[part_type]) if isinstance(part_type, str) and part_type in TEXT_KEYS else None
    return text if isinstance(text, str) else None


def find_media(content_place: Place, content: list[Any], first_item: int) -> Iterator[MediaPart]:
    """Check every part of one message's content and yield its media.

    Raises:
        RequestError: 400 naming the part.
    """
    item_index = first_item
    for part_index, part in enumerate(content):
        place = (*content_place, part_index)
        path = format_place(place)
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise RequestError(400, "invalid_type", f"{path} must be an object", path)
        part_type = _type_of(part, path)
        if part_type in MEDIA_TYPES:
            uuid = _uuid_of(part, path)
            if (named := _file_of(part, part_type, path)) is not None:
                modality, id_path, file_id = named
                takes_any = part_type in FILE_TYPES
                yield MediaPart(
                    item_index, place, modality, "", id_path, file_id=file_id, takes_any=takes_any, uuid=uuid
                )
                item_index += 1
                continue
            modality, url_path, url, is_base64 = _media_of(part, part_type, path, uuid)
            is_name = not url
            yield MediaPart(item_index, place, modality, url, url_path, is_base64, uuid=uuid, is_name=is_name)
            item_index += 1
        else:
            _check_other(part, part_type, path)


def check_text_parts(content: list[Any], path: str) -> None:
    """Check every part of a content that may hold no media; `path` names it.

    Raises:
        RequestError: 400 naming the part.
    """
    for index, part in enumerate(content):
        check_text_part(part, f"{path}[{index}]")


def check_text_part(part: Any, path: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise RequestError(400, "invalid_type", f"{path} must be an object", path)
    part_type = _type_of(part, path)
    if part_type in MEDIA_TYPES:
        message = f"{path}: media are not served by this endpoint; send them in a chat completion"
        raise RequestError(400, "unsupported_content_part", message, path)
    _check_other(part, part_type, path)


def _type_of(part: dict[str, Any], path: str) -> str:
    part_type = part.get("type")
    if part_type is None:
        part_type = next((key for key in UNTYPED_KEYS if key in part), None)
    if not isinstance(part_type, str):
        raise RequestError(400, "invalid_type", f"{path}.type must be a string", f"{path}.type")
    return part_type


def _file_of(part: dict[str, Any], part_type: str, path: str) -> tuple[Modality, str, str] | None:
    """Return modality, path of the id, and the id; None if the part names no file.

    The id stands where the URL would, or in the part itself.
    """
    others_are = Modality.AUDIO if part_type == INPUT_AUDIO else Modality.IMAGE
    modality, key = URL_TYPES.get(part_type, (others_are, part_type))
    inner = part.get(key)
    place, at = (inner, f"{path}.{key}") if isinstance(inner, dict) else (part, path)
    id_path, file_id = f"{at}.file_id", place.get("file_id")
    if part_type in FILE_TYPES and not isinstance(file_id, str):
        message = f"{path}: of {part_type!r} parts only uploaded files are served: {id_path} is missing"
        raise RequestError(400, "unsupported_content_part", message, id_path)
    if file_id is None:
        return None
    if not isinstance(file_id, str):
        raise RequestError(400, "invalid_type", f"{id_path} must be a string", id_path)
    others = {"url", "file_data", "file_url", "data", *(() if place is inner else (key,))} & {
        name for name, value in place.items() if value is not None
    }
    if others:
        name = min(others)
        raise RequestError(400, "unexpected_field", f"{path} has a file_id and {name!r}", f"{at}.{name}")
    return modality, id_path, file_id


def _uuid_of(part: dict[str, Any], path: str) -> str | None:
    uuid, path = part.get("uuid"), f"{path}.uuid"
    if uuid is not None and (not isinstance(uuid, str) or len(uuid) > MAX_UUID_CHARS):
        message = f"{path} must be a string of at most {MAX_UUID_CHARS} characters"
        raise RequestError(400, "invalid_value", message, path)
    return uuid or None


def _media_of(
    part: dict[str, Any], part_type: str, path: str, uuid: str | None
) -> tuple[Modality, str, str, bool]:
    """Return modality, path of the text with the media or their name, the text, and if it is base64.

    The text may be empty where a `uuid` names the item.
    """
    if part_type == INPUT_AUDIO:
        data_path = f"{path}.{INPUT_AUDIO}.data"
        value = part.get(INPUT_AUDIO)
        data = value.get("data") if isinstance(value, dict) else None
        if uuid is not None and (value is None or (isinstance(value, dict) and data in (None, ""))):
            return Modality.AUDIO, f"{path}.uuid", "", False
        if not isinstance(data, str) or not data:
            raise RequestError(400, "missing_audio", f"{path} is audio without data", data_path)
        return Modality.AUDIO, data_path, data, True
    modality, key = URL_TYPES[part_type]
    url_path, url = f"{path}.{key}", part.get(key)
    if isinstance(url, dict):
        url_path, url = f"{url_path}.url", url.get("url")
    if uuid is not None and url in (None, ""):
        return modality, f"{path}.uuid", "", False
    if not isinstance(url, str) or not url:
        message = f"{path} is of type {part_type} without a URL: {url_path} is missing"
        raise RequestError(400, f"missing_{modality}_url", message, url_path)
    return modality, url_path, url, False


def _check_other(part: dict[str, Any], part_type: str, path: str) -> None:
    if part_type in EMBEDS_TYPES:
        message = f"{path}: embeddings may not be sent by callers"
        raise RequestError(400, "embeds_not_allowed", message, f"{path}.type")
    if part_type in UNSUPPORTED_TYPES:
        message = f"{path}: content of type {part_type!r} is not served"
        raise RequestError(400, "unsupported_content_part", message, f"{path}.type")
    if part_type == "tool_reference":
        text_key = "name"
    elif part_type in TEXT_KEYS:
        text_key = TEXT_KEYS[part_type]
    else:
        message = f"{path}: unknown content part type {part_type[:50]!r}"
        raise RequestError(400, "unknown_content_part", message, f"{path}.type")
    text = part.get(text_key)
    if not isinstance(text, str) and not (text is None and part_type in SKIPPED_TYPES):
        raise RequestError(400, "invalid_type", f"{path}.{text_key} must be a string", f"{path}.{text_key}")
    has_uuid = part.get("uuid") is not None
    for name in sorted(MEDIA_KEYS.intersection(part)):
        if part[name] is None and not has_uuid:
            del part[name]  # templates ask whether a key is there
            continue
        message = f"{path} is a text part and may not have {name!r}"
        raise RequestError(400, "unexpected_field", message, f"{path}.{name}")
